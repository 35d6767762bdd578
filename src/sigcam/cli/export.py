"""`sigcam export`: write a network and its branch to one file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import typer

from sigcam.cli import options as opt
from sigcam.cli.console import say, show_table
from sigcam.cli.options import option
from sigcam.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExportOptions(opt.ModelOptions, opt.CropOptions):
    """Options of `sigcam export`."""

    path: Path = option("File to write, such as classifier.onnx; a folder for triton.", argument=True)
    branch: str = option(
        "File of a fitted branch, or hf://USER/REPO. The embedded model has a branch.", "sigmoid"
    )
    format: Literal["onnx", "torch", "triton"] = option(
        "onnx; torch, a program of torch.export (.pt2); triton, a model folder of a Triton server.", "onnx"
    )
    k: int | None = option("Draw maps of that many most probable classes; default: 5.", None)
    classes: list[str] | None = option(
        "Draw maps of this class instead, by its name or number; may be repeated.", None, name="--class"
    )
    threshold: float | None = option(
        "Of boxes: a probability, by default 0.5; with --scale logit a fraction of the map's maximum, by "
        "default 0.2.",
        None,
        min=0,
        max=1,
    )
    scale: Literal["probability", "logit"] | None = option(
        "Scale of the maps: probability or logit. Default: probability where the branch is calibrated.", None
    )
    no_preprocess: bool = option(
        "Take normalised tensors (B, 3, H, W) instead of pictures (B, H, W, 3) of any size.", False
    )
    opset: int = option("Version of ONNX's operators.", 18)
    fp16: bool = option("Let the network compute in float16: a file of half the size.", False)
    int8: bool = option(
        "Let convolutions and linear layers compute in 8-bit integers; needs --calibrate.", False
    )
    calibrate: str | None = option(
        "Images of the training split that show --int8 which range values have: a data set, or `shapes`.",
        None,
    )
    data: str | None = option(
        "Measure on these images what --fp16 or --int8 changes: a data set, or `shapes`.", None
    )
    split: str = option("Split of --data.", "test")
    limit: int | None = option("Number of images of --data: the first N only.", None, min=1)

    @property
    def precision(self) -> Literal["float32", "float16", "int8"]:
        """What the network in the file computes in."""
        return "float16" if self.fp16 else "int8" if self.int8 else "float32"


def export_command(options: ExportOptions) -> None:
    """Write a classifier and its branch to one file, from pictures to predictions, evidence, maps, boxes."""
    from sigcam.data.registry import open_dataset
    from sigcam.data.sample import match_classes
    from sigcam.deployment.export import export
    from sigcam.deployment.precision import check_onnxruntime, compare_files
    from sigcam.methods.inputs import class_number
    from sigcam.network.opening import open_network

    o: Any = options
    if o.fp16 and o.int8:
        raise ConfigError("--fp16 and --int8 exclude each other: give one.")
    if o.data and o.precision == "float32":
        raise ConfigError("--data measures what --fp16 or --int8 changes: give one of these, too.")
    if o.int8 and not o.calibrate:
        raise ConfigError("--int8 needs images that show which range values have: add --calibrate DIR.")
    if o.data:
        check_onnxruntime("measuring an exported file")
    seen = open_dataset(o.calibrate, split="train") if o.calibrate else None
    samples = open_dataset(o.data, split=o.split)[: o.limit] if o.data else None
    net = open_network(o.model, o.weights, o.branch, crop=o.crop).net
    settings: Any = {
        "k": o.k,
        "classes": [class_number(net, name) for name in o.classes] if o.classes else None,
        "threshold": o.threshold,
        "scale": o.scale,
        "preprocess": not o.no_preprocess,
        "opset": o.opset,
    }
    if samples is not None:
        match_classes(samples, net.classes, net.class_names)  # raises before anything is written
    path = export(net, o.path, format=o.format, precision=o.precision, calibrate=seen, **settings)
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    result: dict[str, Any] = {"path": str(path), "bytes": sum(each.stat().st_size for each in files)}
    if samples is not None:
        with TemporaryDirectory() as folder:
            exact = export(net, Path(folder) / "exact.onnx", **settings)
            small = path / "1" / "model.onnx" if path.is_dir() else path
            result["change"] = compare_files(net, exact, small, samples, preprocess=not o.no_preprocess)
    if o.json:
        typer.echo(json.dumps(result))
        return
    say(f"{path}: {result['bytes'] / 1e6:.1f} MB")
    if samples is not None:
        show_change(result["change"], o.precision)


def show_change(change: dict[str, Any], precision: str) -> None:
    """Print a table of the numbers of the float32 file and of the small one."""
    rows = [
        (title, *(f"{value:.1f}" for value in change[key]))
        for key, title in (("top1", "top-1 %"), ("max_box_acc_v2", "MaxBoxAccV2 %, predicted class"))
        if key in change
    ]
    rows.append(("same class %", "", f"{change['same_class']:.1f}"))
    show_table(f"{change['images']} images", rows, ("", "float32", precision))
