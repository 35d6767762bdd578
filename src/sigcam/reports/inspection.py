"""Facts about a network (split, usable methods, methods that coincide) and about a data set."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.files import check_writable, write_png
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress, Skipped
from sigcam.data.loader import load_batches
from sigcam.data.registry import guess_format, open_dataset
from sigcam.data.sample import Sample, Samples, data_fingerprint
from sigcam.drawing.contact_sheet import contact_sheet
from sigcam.methods.explainer import explain_pass
from sigcam.methods.registry import METHODS, MapConfig
from sigcam.models.classifier import Classifier
from sigcam.network.dual import DualBranch

TOLERANCE = 1e-3  # of a map's largest value, between maps that are the same
SHEET = "contact-sheet.png"
MAX_DAMAGED = 5  # damaged files to list


def model_facts(classifier: Classifier, net: DualBranch) -> dict[str, str]:
    """Return what a user may want to check, or to change, before drawing maps, by name."""
    split, size = net.split, net.split.fold.image
    last = {(p, q): f"{name} ({n} x {p} x {q})" for name, n, p, q in split.spatial}  # layer on each grid
    finer = [text for grid, text in last.items() if grid[0] > split.fold.grid[0]]
    same = {title: "; ".join(map(" = ".join, groups)) for title, groups in coinciding(net).items()}
    return {
        "model": classifier.name,
        "classes": f"{net.classes}"
        + (f" ({', '.join(classifier.classes[:3])}, ...)" if classifier.classes else ""),
        "head": ", ".join(split.heads) + ("" if split.whole else " (combined by the model's own last steps)"),
        "layer": split.layer + (" and the activation after it" if split.activation else ""),
        "map": f"{split.fold.grid[0]} x {split.fold.grid[1]} cells of a {size[0]} x {size[1]} input"
        + (f", after {split.fold.prefix} prefix token(s)" if split.fold.prefix else ""),
        "layout": split.fold.layout,
        "returns": split.output,
        "global average + linear": ", ".join(sorted(net.linear)) or "no",
        "methods": ", ".join(usable_methods(net)),
        **{f"the same map, {title}": groups or "none" for title, groups in same.items()},
        "branch parameters": f"{sum(p.numel() for p in net.parameters() if p.requires_grad):,}",
        "finer layers": "; ".join(finer) or "none",
        "preprocessing": str(classifier.transform),
    }


def inspect_data(
    path: str,
    *,
    format: str | None = None,
    split: str | None = None,
    output: Path | None = None,
    workers: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return facts about each split of a data set, or about one; decodes every file once.

    Args:
        output: folder for contact-sheet.png, which shows some images with their boxes and masks.
    """
    if output is not None:
        check_writable(output)
    name = guess_format(path) if format is None else format
    splits = {split: open_dataset(path, format=name, split=split)} if split else open_splits(path, name)
    damaged = {title: unreadable(samples, title, workers, progress) for title, samples in splits.items()}
    broken = [item for items in damaged.values() for item in items]
    facts: dict[str, Any] = {
        "format": name,
        "images": sum(map(len, splits.values())),
        "classes": max(len(samples.classes) for samples in splits.values()),
        "splits": [
            {"split": title, **split_facts(samples), "damaged": len(damaged[title])}
            for title, samples in splits.items()
        ],
        "damaged files": len(broken),
        "damaged": [{"image": id, "reason": reason} for id, reason in broken[:MAX_DAMAGED]],
    }
    if output is not None:
        items = tuple(sample for samples in splits.values() for sample in samples)
        all_samples = Samples(items, max((s.classes for s in splits.values()), key=len))
        title = f"{Path(path).absolute().name if name != 'shapes' else path}: some of {len(items)} images"
        sheet = contact_sheet(all_samples, seed=seed, title=title)
        output.mkdir(parents=True, exist_ok=True)
        write_png(output / SHEET, sheet)
        facts["contact sheet"] = str(output / SHEET)
        fingerprints = {title: data_fingerprint(samples) for title, samples in splits.items()}
        write_manifest(output, data=path, data_fingerprint=fingerprints, seed=seed, numbers=facts)
    return facts


def open_splits(path: str, format: str) -> dict[str, Samples]:
    """Return the splits of a data set by name; several names of one split are joined: "val, test"."""
    splits = list[tuple[list[str], Samples]]()
    missing: DataError | None = None
    for name in ("train", "val", "test"):
        try:
            samples = open_dataset(path, format=format, split=name)
        except DataError as error:
            if "has no split" not in str(error):  # the words of every reader
                raise
            missing = error
            continue
        files = [sample.path or sample.id for sample in samples]
        same = next((names for names, other in splits if [s.path or s.id for s in other] == files), None)
        if same is None or format == "shapes":  # whose splits have the same ids, but not the same images
            splits.append(([name], samples))
        else:
            same.append(name)
    if not splits and missing is not None:
        raise missing
    return {", ".join(names): samples for names, samples in splits}


def split_facts(samples: Samples) -> dict[str, str | int]:
    """Return the numbers of images, classes, boxes and masks of a split."""
    counts = Counter(sample.label for sample in samples if sample.label is not None)
    per_class = [counts[label] for label in range(len(samples.classes))]
    return {
        "images": len(samples),
        "classes": len(samples.classes),
        "images per class": f"{min(per_class)} to {max(per_class)}" if counts else "no labels",
        "with boxes": sum(sample.boxes is not None for sample in samples),
        "boxes": sum(len(sample.boxes or ()) for sample in samples),
        "with masks": sum(sample.open_mask is not None for sample in samples),
    }


def unreadable(
    samples: Samples, title: str = "files", workers: int = 0, progress: Progress | None = None
) -> list[Skipped]:
    """Return id and reason of each sample whose image or mask file cannot be decoded."""
    files = tuple(
        replace(sample, open=partial(_open_all, sample)) for sample in samples if sample.path is not None
    )
    broken, done = list[Skipped](), 0
    for batch in load_batches(Samples(files, samples.classes), None, batch_size=32, workers=workers):
        broken += batch.skipped
        done += len(batch.indices) + len(batch.skipped)
        if progress:
            progress(title, done, len(files))
    return broken


def _open_all(sample: Sample) -> Image.Image:
    if sample.open_mask is not None:
        sample.open_mask()
    return sample.open()


def usable_methods(net: DualBranch) -> list[str]:
    """Return the methods that work with this network."""
    missing: set[str | None] = set() if net.linear else {"linear"}
    first = {method.needs: name for name, method in reversed(METHODS.items()) if method.available}
    for need in first.keys() - {None, "linear"}:
        try:
            explain_pass(net, net.run(random_images(net)[:1]), MapConfig(first[need], "softmax"), classes=0)
        except DataError:
            missing.add(need)
    return [name for name, method in METHODS.items() if method.needs not in missing and method.available]


def random_images(net: DualBranch) -> Tensor:
    """Return two images of noise in the shape that the network takes."""
    noise = torch.randn(2, *net.input_shape, generator=torch.Generator().manual_seed(0))
    return noise.to(next(net.model.parameters()))


def coinciding(net: DualBranch) -> dict[str, list[list[str]]]:
    """Return groups of methods whose softmax maps of two random images are the same up to scale, for signed
    and for clamped weights."""
    forward = net.run(random_images(net), grad=True)
    linear = "softmax" in net.linear
    weighting = {name: method for name, method in METHODS.items() if method.weights_channels}
    methods = [
        n
        for n, m in weighting.items()
        if m.follows_head and m.needs in ((None, "linear") if linear else (None,))
    ]
    coincide = {}
    for title, clamp in (("signed weights", False), ("positive weights only", True)):
        groups = list[tuple[Tensor, list[str]]]()
        for method in methods:
            config = MapConfig(method, "softmax", clamp, scale="raw")
            maps = explain_pass(net, forward, config, classes=0, size="features").maps
            maps = maps / maps.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            same = (names for other, names in groups if bool(((other - maps).abs() <= TOLERANCE).all()))
            names = next(same, None) if bool(maps.any()) else None  # two blank maps prove nothing
            if names is None:
                groups.append((maps, [method]))
            else:
                names.append(method)
        coincide[title] = [names for _, names in groups if len(names) > 1]
    return coincide
