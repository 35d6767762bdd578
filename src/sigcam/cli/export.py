"""`sigcam export`: write a network and its branch to one file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from sigcam.cli import options as opt
from sigcam.cli.console import say
from sigcam.cli.options import option


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


def export_command(options: ExportOptions) -> None:
    """Write a classifier and its branch to one file, from pictures to predictions, evidence, maps, boxes."""
    from sigcam.deployment.export import export
    from sigcam.methods.inputs import class_number
    from sigcam.network.opening import open_network

    o: Any = options
    net = open_network(o.model, o.weights, o.branch, crop=o.crop).net
    path = export(
        net,
        o.path,
        k=o.k,
        classes=[class_number(net, name) for name in o.classes] if o.classes else None,
        threshold=o.threshold,
        scale=o.scale,
        preprocess=not o.no_preprocess,
        format=o.format,
        opset=o.opset,
    )
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    size = sum(each.stat().st_size for each in files)
    if o.json:
        typer.echo(json.dumps({"path": str(path), "bytes": size}))
    else:
        say(f"{path}: {size / 1e6:.1f} MB")
