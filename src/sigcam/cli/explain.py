"""`sigcam explain`: draw evidence maps of images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from sigcam.cli import options as opt
from sigcam.cli.console import progress_bar, say, show_skips, show_table
from sigcam.cli.options import option
from sigcam.core.errors import ConfigError
from sigcam.core.files import write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.data.photographs import PHOTOGRAPHS, example_photographs, example_samples


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(
    opt.SourceOptions, opt.RunOptions, opt.BatchOptions, opt.LayerOptions, opt.CropOptions, opt.ReportOptions
):
    """Options of `sigcam explain`."""

    pictures: list[Path] | None = option("Image files, or folders of them.", None, argument=True)
    example: list[str] | None = option(
        lambda: f"Example photograph: {', '.join(PHOTOGRAPHS)}; may be repeated.", None
    )
    branch: str = option(
        "File of a fitted branch, or hf://USER/REPO; or softmax or centred, which need none. The embedded "
        "model has a branch.",
        "sigmoid",
    )
    method: str = option("Method: cam, grad-cam, grad-cam++, layer-cam, score-cam, ...", "grad-cam")
    target: str = option("Score to explain: class, probability or finer-cam.", "class")
    layers: str | None = option("Fuse the maps of these layers: layer3,layer4.", None)
    fusion: str | None = option(
        "How they are fused: mean, max (as in Layer-CAM) or product (RefineCAM).", None
    )
    zoom: float = option("Draw maps from the image enlarged by this factor: finer, slower.", 1.0)
    stride: int | None = option("1: no stride in a CNN's last stage; maps twice as fine.", None)
    aug_smooth: bool = option("Average over mirror images and brightnesses: six passes.", False)
    top_n: int | None = option("Number of channels that Score-CAM tries; default: all.", None)
    samples: int | None = option(
        "Number of masks (rise), noises (smoothgrad) or steps (integrated-gradients, extremal-perturbation); "
        "default: the paper's.",
        None,
    )
    eigen_smooth: bool = option("Keep the first principal component of the weighted channels.", False)
    classes: list[str] | None = option(
        "Class to explain, by its name, a synonym or word of it, or its number; may be repeated. Default: "
        "the predicted class.",
        None,
        name="--class",
    )
    scale: str | None = option(
        "Scale of the maps. unit: each map from 0 to 1; raw: signed, in logits; logit: with a mean that is "
        "the branch's logit; probability: comparable between images. Default: probability where the branch "
        "is calibrated and the method is in logits, otherwise unit.",
        None,
    )
    clamp: bool | None = option("Keep positive weights only.", None)
    threshold: float | None = option(
        "Box threshold: a probability with --scale probability, by default 0.5; otherwise a fraction of the "
        "map's maximum, by default 0.2.",
        None,
        min=0,
        max=1,
    )
    captions: bool = option("Write class, scores and a colour bar below each overlay.", False)
    data: str = option("Folder of class folders, or `shapes:20`.", "")
    output: Path = Path("maps")

    @property
    def resumes(self) -> bool:
        return True


def explain_command(options: ExplainOptions) -> None:
    """Draw evidence maps of images: an overlay (PNG) and the map (NPY) of each, and all scores (JSON)."""
    from sigcam.data.images import images_from_paths
    from sigcam.data.registry import open_dataset
    from sigcam.data.sample import data_fingerprint
    from sigcam.methods.cost import cost_note, is_long
    from sigcam.methods.folder import ExplainConfig, explain_samples
    from sigcam.methods.inputs import class_number
    from sigcam.models.state_dict import fingerprint, weights_facts
    from sigcam.network.opening import open_network
    from sigcam.reports.explain_report import explain_page
    from sigcam.reports.html import require_report_extra

    o: Any = options  # words such as --target are checked by ExplainConfig
    if o.report:
        require_report_extra()
    if not (o.pictures or o.data or o.example):
        raise ConfigError(
            "no pictures: give image files or a folder, or --example chelsea, a photograph of a cat."
        )
    if sum(map(bool, (o.pictures, o.data, o.example))) > 1:
        raise ConfigError("give image files, --data or --example: one of them.")
    config = ExplainConfig(
        method=o.method,
        branch=o.branch if o.branch in ("softmax", "centred") else "sigmoid",
        clamp=o.clamp,
        target=o.target,
        scale=o.scale or "unit",
        top_n=o.top_n,
        samples=o.samples,
        layers=tuple(o.layers.split(",")) if o.layers else None,
        fusion=o.fusion,
        zoom=o.zoom,
        stride=o.stride,
        aug_smooth=o.aug_smooth,
        eigen_smooth=o.eigen_smooth,
    ).checked()
    if o.example:
        samples = example_samples(o.example)
    elif o.pictures:
        samples = images_from_paths(o.pictures)
    else:
        samples = open_dataset(o.data, format=o.format, split="test")
    opened = open_network(
        o.model, o.weights, o.branch, head=o.head, layer=o.layer, crop=o.crop, device=o.device
    )
    net = opened.net
    if o.scale is None:
        config = replace(config, clamp=o.clamp).with_best_scale(net)
    if is_long(config):
        say(cost_note(net, config), err=True)
    with progress_bar() as progress:
        folder = explain_samples(
            net,
            samples,
            o.output,
            config,
            classes=[class_number(net, name) for name in o.classes] if o.classes else None,
            threshold=o.threshold,
            captions=o.captions,
            batch_size=o.batch_size,
            workers=o.workers,
            progress=progress,
        )
        rows, skipped = folder.rows, folder.skipped
        write_text_atomic(o.output / "explanation.json", json.dumps(rows, indent=1))
        if o.report:
            redraw = None
            if config.branch == "sigmoid" and config.scale != "probability":  # the softmax head has none
                redraw = partial(replace(config, branch="softmax", clamp=None).checked().explain, net)
            page = explain_page(
                rows, o.output, samples, net, redraw=redraw, skipped=skipped, progress=progress
            )
            write_text_atomic(o.output / "report.html", page)
    write_manifest(
        o.output,
        model=opened.classifier.name,
        weights=weights_facts(o.model, o.weights),
        model_fingerprint=fingerprint(net.original),
        data_fingerprint=data_fingerprint(samples),
        **{name: getattr(o, name) for name in ("branch", "method", "target", "layers", "zoom", "stride")},
        classes=o.classes,
        **{name: getattr(config, name) for name in SETTINGS},
        skipped=skipped,
        numbers=rows,
    )
    folder.checkpoint.remove()
    if o.json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show_maps(rows, o.output)
    say(SCALE_LINES[config.scale].format(rows[0]["threshold"]))
    for photograph in example_photographs(o.example or ()):
        say(photograph.credit)
    show_skips(skipped)
    files = "maps, explanation.json and report.html" if o.report else "maps and explanation.json"
    say(f"{len(rows)} overlay(s), {files} are in {o.output}")


SCALE_LINES = {
    "unit": "scale: unit, each map from 0 to 1; the box is where it is above {:g} of its maximum",
    "raw": "scale: raw, in logits; the box is where the map is above {:g} of its maximum",
    "logit": "scale: logit, its mean is the class's logit; the box is where it is above {:g} of its maximum",
    "probability": "scale: probability, the same for all images; the box is where it is above {:g} "
    "(--scale unit stretches each map from 0 to 1)",
}
SETTINGS = ("scale", "clamp", "aug_smooth", "eigen_smooth", "fusion", "top_n", "samples")  # of the manifest
TABLE_ROWS = 20  # rows of the table


def show_maps(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Print class and scores of each map, the top classes if there are few images, and blank maps."""
    presence = rows[0]["present"] is not None
    header = ("class", "probability", "evidence", *(["present"] if presence else []))

    def scores(row: dict[str, Any]) -> list[str]:
        evidence = row["evidence"]
        shown = [f"{row['probability']:.3f}", "-" if evidence is None else f"{evidence:.3f}"]
        return [*shown, "yes" if evidence > 0.5 else "no"] if presence else shown

    shown = [(row["image"], row["class_name"], *scores(row)) for row in rows[:TABLE_ROWS]]
    show_table("maps", shown, header=("image", *header))
    if len(rows) > TABLE_ROWS:
        say(f"and {len(rows) - TABLE_ROWS} more, in {output / 'explanation.json'}")
    images = {row["image"]: row for row in rows}
    for row in images.values() if len(images) <= 3 else ():
        top = [(each["class_name"], *scores(each)) for each in row["top"]]
        show_table(f"likely classes of {row['image']}", top, header=header)
    for row in rows:
        if row["blank"]:
            share = f"share of positive evidence {row['positive_share']:.0%}"
            say(f"blank map: {row['image']}, {row['class_name']} ({share})", err=True)
