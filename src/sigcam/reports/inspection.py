"""What `sigcam inspect` tells: how a network is split, which methods it takes, which of those coincide; what
a data set holds."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.core.files import check_writable, write_atomic
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress
from sigcam.data.fingerprint import data_fingerprint
from sigcam.data.loader import load_batches
from sigcam.data.registry import guess_format, open_dataset
from sigcam.data.sample import Sample, Samples
from sigcam.drawing.contact_sheet import contact_sheet
from sigcam.methods.explainer import explain_pass
from sigcam.methods.map_config import MapConfig
from sigcam.methods.registry import METHODS
from sigcam.methods.rollout import rollout_maps
from sigcam.models.classifier import Classifier
from sigcam.network.dual import DualBranch

ALIKE = 1e-3  # of a map's largest value
SPLITS = ("train", "val", "test")
SHEET = "contact-sheet.png"
NAMED = 5  # damaged files that are named


def model_facts(classifier: Classifier, net: DualBranch) -> dict[str, str]:
    """Words for each thing that a user may want to check, or to change, before drawing maps."""
    split, size = net.split, net.split.fold.image
    same = {how: "; ".join(map(" = ".join, groups)) for how, groups in coinciding(net).items()}
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
        **{f"the same map, {how}": groups or "none" for how, groups in same.items()},
        "branch parameters": f"{sum(p.numel() for p in net.parameters() if p.requires_grad):,}",
        "finer layers": "; ".join(_finer_layers(net)) or "none",
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
    """Facts on each split of a data set, or on one, with every file decoded once.

    Args:
        output: a folder for contact-sheet.png, with some of the pictures and their boxes and masks.
    """
    if output is not None:
        check_writable(output)
    name = guess_format(path) if format is None else format
    splits = {split: open_dataset(path, format=name, split=split)} if split else open_splits(path, name)
    damaged = {title: unreadable(samples, title, workers, progress) for title, samples in splits.items()}
    broken = [pair for pairs in damaged.values() for pair in pairs]
    facts: dict[str, Any] = {
        "format": name,
        "images": sum(map(len, splits.values())),
        "classes": max(len(samples.classes) for samples in splits.values()),
        "splits": [
            {"split": title, **data_facts(samples), "damaged": len(damaged[title])}
            for title, samples in splits.items()
        ],
        "damaged files": len(broken),
        "damaged": [{"image": id, "reason": reason} for id, reason in broken[:NAMED]],
    }
    if output is not None:
        items = tuple(sample for samples in splits.values() for sample in samples)
        everything = Samples(items, max((s.classes for s in splits.values()), key=len))
        picture = io.BytesIO()
        title = f"{Path(path).absolute().name if name != 'shapes' else path}: some of {len(items)} pictures"
        contact_sheet(everything, seed=seed, title=title).save(picture, "PNG")
        output.mkdir(parents=True, exist_ok=True)
        write_atomic(output / SHEET, picture.getvalue())
        facts["contact sheet"] = str(output / SHEET)
        prints = {title: data_fingerprint(samples) for title, samples in splits.items()}
        write_manifest(output, data=path, data_fingerprint=prints, seed=seed, numbers=facts)
    return facts


def open_splits(path: str, format: str) -> dict[str, Samples]:
    """The splits that there are; one that several names open has them all: "val, test"."""
    found = list[tuple[list[str], Samples]]()
    missing: DataError | None = None
    for name in SPLITS:
        try:
            samples = open_dataset(path, format=format, split=name)
        except DataError as error:
            if "has no split" not in str(error):  # every reader's words for it
                raise
            missing = error
            continue
        files = [sample.path or sample.id for sample in samples]
        same = next((names for names, other in found if [s.path or s.id for s in other] == files), None)
        # shapes numbers each split's pictures alike, but they are others
        if same is None or format == "shapes":
            found.append(([name], samples))
        else:
            same.append(name)
    if not found and missing is not None:
        raise missing
    return {", ".join(names): samples for names, samples in found}


def data_facts(samples: Samples) -> dict[str, str | int]:
    """How many images, classes, boxes and masks a split has."""
    counts = Counter(sample.label for sample in samples if sample.label is not None)
    each = [counts[label] for label in range(len(samples.classes))]
    return {
        "images": len(samples),
        "classes": len(samples.classes),
        "images per class": f"{min(each)} to {max(each)}" if counts else "no labels",
        "with boxes": sum(sample.boxes is not None for sample in samples),
        "boxes": sum(len(sample.boxes or ()) for sample in samples),
        "with masks": sum(sample.open_mask is not None for sample in samples),
    }


def unreadable(
    samples: Samples, title: str = "files", workers: int = 0, progress: Progress | None = None
) -> list[tuple[str, str]]:
    """(id, reason) of each sample whose picture or mask cannot be decoded; only files are tried."""
    files = tuple(
        replace(sample, open=partial(_open_all, sample)) for sample in samples if sample.path is not None
    )
    broken, done = list[tuple[str, str]](), 0
    for batch in load_batches(Samples(files, samples.classes), _nothing, batch_size=32, workers=workers):
        broken += batch.skipped
        done += len(batch.indices) + len(batch.skipped)
        if progress:
            progress(title, done, len(files))
    return broken


def _open_all(sample: Sample) -> Image.Image:
    if sample.open_mask is not None:
        sample.open_mask()
    return sample.open()


def _nothing(picture: Image.Image) -> Tensor:
    return torch.zeros(3, 1, 1)


def usable_methods(net: DualBranch) -> list[str]:
    """Return the methods that work with this network."""
    missing = set() if net.linear else {"linear"}
    try:
        rollout_maps(net, random_images(net))
    except DataError:
        missing.add("attention")
    return [name for name, method in METHODS.items() if method.needs not in missing]


def random_images(net: DualBranch) -> Tensor:
    """Two images of noise such as the network takes."""
    noise = torch.randn(2, *net.input_shape, generator=torch.Generator().manual_seed(0))
    return noise.to(next(net.model.parameters()))


def coinciding(net: DualBranch) -> dict[str, list[list[str]]]:
    """Groups of methods whose signed, and whose clamped, softmax maps are one map up to scale; by trying
    them on two random images."""
    passage = net.run(random_images(net), grad=True)
    linear = "softmax" in net.linear
    tried = [n for n, m in METHODS.items() if m.follows_head and (linear or m.needs != "linear")]
    found = {}
    for how, clamp in (("signed weights", False), ("positive weights only", True)):
        groups = list[tuple[Tensor, list[str]]]()
        for name in tried:
            drawing = MapConfig(name, "softmax", clamp, scale="raw")
            low = explain_pass(net, passage, drawing, classes=0, size="features").maps
            low = low / low.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            alike = (names for maps, names in groups if bool(((maps - low).abs() <= ALIKE).all()))
            names = next(alike, None) if bool(low.any()) else None  # two blank maps are no finding
            if names is None:
                groups.append((low, [name]))
            else:
                names.append(name)
        found[how] = [names for _, names in groups if len(names) > 1]
    return found


def _finer_layers(net: DualBranch) -> list[str]:
    """For each finer grid that the network passes through, the last layer on it."""
    last = {(p, q): f"{name} ({n} x {p} x {q})" for name, n, p, q in net.split.spatial}
    return [text for grid, text in last.items() if grid[0] > net.split.fold.grid[0]]
