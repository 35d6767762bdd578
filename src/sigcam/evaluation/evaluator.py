"""evaluate: samples -> maps -> metrics -> Result; evaluate_maps: the same for maps that others drew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.distributed import all_gather, local_batches
from sigcam.core.errors import DataError
from sigcam.core.manifest import versions
from sigcam.core.types import Progress
from sigcam.data.fingerprint import data_fingerprint
from sigcam.data.labels import match_classes
from sigcam.data.loader import load_batches
from sigcam.data.maps import find_maps, open_map, same_shape
from sigcam.data.sample import Sample, Samples
from sigcam.evaluation.batch import SCORERS, BatchEvaluator, Scorer, Variant
from sigcam.evaluation.checkpoint import EvalCheckpoint, shaping
from sigcam.evaluation.metric_table import MetricTable
from sigcam.evaluation.registry import BatchRecord, boxes_for, choose_metrics, mask_for
from sigcam.evaluation.result import Result
from sigcam.methods.map_config import MapConfig
from sigcam.methods.targets import Branch
from sigcam.models.preprocess import Preprocess
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch


def evaluate(
    net: DualBranch,
    samples: Samples | Sequence[Sample],
    *,
    methods: Sequence[str] = ("cam",),
    branches: Sequence[Branch] = ("softmax", "sigmoid"),
    clamps: Sequence[bool | None] | None = None,
    metrics: Sequence[str] | None = None,
    class_from: Literal["label", "predicted"] = "label",
    scorers: Sequence[Scorer] = ("softmax",),
    zoom: float = 1.0,
    val: Result | None = None,
    intervals: bool = False,
    transform: Callable[[Image.Image], Tensor] | None = None,
    batch_size: int = 16,
    workers: int = 0,
    skip_unreadable: bool = False,
    unfinished: str | Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """What the maps of each method and branch are worth on annotated images (PROTOCOL 5, 6), in percent.

    One pass of the backbone per batch serves all maps; confidence takes one more per method and branch, on
    the normalised images times the predicted class's map. Metrics that the samples have no annotations for
    are left out, and named in the result.

    Args:
        methods: names, every one drawn from each of the branches.
        clamps: whether channel weights are clamped, each in turn; None takes each branch's default.
        metrics: names, see `sigcam.evaluation.registry.MEASURES`; None for the usual ones.
        class_from: whose maps locate objects: the label's class (the protocol) or the predicted one.
        scorers: what confidence is: "softmax" by the classifier's head for both rows of a comparison,
            "sigmoid" by the fitted branch, "branch" by a softmax over the branch that is explained.
        zoom: how much larger the image is that maps are drawn from, as for `explain`.
        val: the result of the same on a validation split: accuracies at its best thresholds are added.
        intervals: bootstrap intervals over images.
        transform: from a picture to a (3, H, W) tensor; by default `net.transform`. It must not crop.
        skip_unreadable: go on without pictures that cannot be decoded; they are named in the result.
        unfinished: file for the sums so far, gone on from if this very evaluation was cut short there, and
            removed in the end.
        progress: called with (stage, done, total), for a bar.
    """
    if not isinstance(net, DualBranch):
        raise DataError(f"evaluate takes what attach returns, not {type(net).__name__}.")
    transform = transform or net.transform
    if transform is None:
        raise DataError("samples need preprocessing: set net.transform, or evaluate(..., transform=...).")
    wrong = [scorer for scorer in scorers if scorer not in SCORERS]
    if wrong or class_from not in ("label", "predicted") or batch_size < 1:
        what = f"scorers {', '.join(SCORERS)}; class_from label, predicted; batch_size 1 or more"
        raise DataError(f"cannot evaluate with {scorers}, {class_from!r}, {batch_size}: there are {what}.")
    if "sigmoid" in scorers and not net.fitted:
        raise DataError("the sigmoid branch is not fitted, so it cannot score: fit it, or load one.")
    measures, left_out = choose_metrics(metrics, samples, network=True, labels_draw=class_from == "label")
    asked = BatchEvaluator(net, measures, class_from, tuple(dict.fromkeys(scorers)), zoom)
    samples = _as_samples(samples, net)
    samples = match_classes(samples, net.classes, net.class_names) if asked.labels else samples
    if asked.boxes or asked.masks:
        _refuse_crops(transform)
    cells = _cells(methods, branches, clamps)
    books = MetricTable(measures, cells, asked.scorers, intervals)
    own = Samples(tuple(samples[i] for i in _mine(samples, batch_size)), samples.classes)
    kept = None if unfinished is None else Path(unfinished)
    standing = EvalCheckpoint(
        kept, kept and _identity(asked, samples, cells, transform, intervals, batch_size)
    )
    done, skipped = standing.resume(books.metrics, books.blank)
    rest, spawn = own[done:], net.device.type == "cuda"
    for batch in load_batches(rest, transform, batch_size=batch_size, workers=workers, spawn=spawn):
        if batch.skipped and not skip_unreadable:
            name, reason = batch.skipped[0]
            how = "Repair it, or go on without such (skip_unreadable=True, --skip-unreadable)."
            raise DataError(f"image {name}: {reason} {how}")
        skipped += batch.skipped
        if len(batch.images):
            for cell, seen in asked.judged(batch, [rest[i] for i in batch.indices], cells):
                books.tell(cell, seen)
        done += len(batch.indices) + len(batch.skipped)
        standing.note(done, skipped, books.metrics, books.blank)
        if progress:
            progress("maps", done, len(own))
    skipped = [pair for part in all_gather(skipped) for pair in part]
    if len(skipped) == len(samples):
        raise DataError(f"none of the {len(samples)} pictures could be read; the first: {skipped[0][1]}")
    about = {
        "images": len(samples) - len(skipped),
        "data_fingerprint": data_fingerprint(samples),
        "model": type(net.model).__name__,
        "model_fingerprint": fingerprint(net.original),
        "fitted": net.fitted,
        "recipe": net.recipe,
        "preprocessing": str(transform),
        "maps_of": f"the {class_from} class",
        "zoom": zoom,
        "confidence": {scorer: SCORERS[scorer] for scorer in asked.scorers},
        "masking": "the normalised image times the predicted class's map",
        "definitions": books.definitions(),
        "versions": versions(),
    }
    found = Result(tuple(books.rows(val)), tuple(left_out), tuple(skipped), about, books.metrics)
    standing.close()
    return found


def evaluate_maps(
    folder: str | Path,
    samples: Samples | Sequence[Sample],
    *,
    metrics: Sequence[str] | None = None,
    val: Result | None = None,
    intervals: bool = False,
    extra: bool = False,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Result:
    """What a folder of maps is worth: .npy or .png files named by image id (`find_maps`), in [0, 1].

    Maps are scored at their own size, to which boxes are scaled and masks resized; those of the protocol
    are 224 x 224. No picture is opened where the data gives its size.

    Args:
        metrics, val, intervals, progress: as for `evaluate`; confidence needs a network and is left out.
        extra: let maps be there that belong to no sample.
    """
    measures, left_out = choose_metrics(metrics, samples, network=False, labels_draw=False)
    files = find_maps(folder, [sample.id for sample in samples], extra=extra)
    cell = Variant("maps")
    books = MetricTable(measures, [cell], (), intervals)
    boxed, masked = (any(need in m.needs for m in measures.values()) for need in ("boxes", "masks"))
    own = _mine(samples, batch_size)
    opened = ((i, open_map(files[i], samples[i].id)) for i in own)
    sizes = set[str]()
    for run in same_shape(opened, batch_size):
        part = [samples[i] for i, _ in run]
        maps = torch.stack([torch.from_numpy(values) for _, values in run])  # (B, H, W)
        height, width = maps.shape[1:]
        sizes.add(f"{width} x {height}")
        seen = BatchRecord(
            [sample.id for sample in part],
            maps,
            [boxes_for(sample, None, width, height) for sample in part] if boxed else (),
            [mask_for(sample, width, height) for sample in part] if masked else (),
        )
        books.tell(cell, seen)
        if progress:
            progress("maps", run[-1][0] + 1, len(samples))
    about = {
        "images": len(samples),
        "data_fingerprint": data_fingerprint(_as_samples(samples)),
        "map_sizes": sorted(set[str]().union(*all_gather(sizes))),
        "definitions": books.definitions(),
        "versions": versions(),
    }
    return Result(tuple(books.rows(val)), tuple(left_out), (), about, books.metrics)


# ------------------------------------------------------------------------------------- metrics of each cell


def _mine(samples: Sequence[Sample], batch_size: int) -> list[int]:
    """Which samples are this process's: every n-th batch, whole, so that batches are the same for any n."""
    batches = local_batches(-(-len(samples) // batch_size))
    return [i for b in batches for i in range(b * batch_size, min((b + 1) * batch_size, len(samples)))]


def _identity(
    asked: BatchEvaluator, samples: Samples, cells: Sequence[Variant], transform: Any, *rest: Any
) -> Any:
    """All that shapes the sums of an evaluation."""
    ways = list(asked.measures), asked.class_from, asked.scorers, asked.zoom
    return shaping(asked.net, samples, transform), ways, cells, rest


def _cells(
    methods: Sequence[str], branches: Sequence[Branch], clamps: Sequence[bool | None] | None
) -> list[Variant]:
    """Every combination once, names and defaults filled in."""
    if isinstance(methods, str) or isinstance(branches, str):
        raise DataError("methods and branches are lists of names: methods=['cam'], branches=['softmax'].")
    drawings = [
        MapConfig(method, branch, clamp).checked()
        for method, branch, clamp in product(methods, branches, clamps or (None,))
    ]
    if not drawings:
        raise DataError("there is nothing to draw: name at least one method and one branch.")
    return list(dict.fromkeys(Variant(how.method, how.branch, bool(how.clamp)) for how in drawings))


# --------------------------------------------------------------------------------------- from a batch to maps


def _as_samples(samples: Samples | Iterable[Sample], net: DualBranch | None = None) -> Samples:
    """The samples with names for their classes."""
    if isinstance(samples, Samples):
        return samples
    items = tuple(samples)
    most = max((item.label for item in items if item.label is not None), default=0)
    count = max(net.classes if net else 0, 2, most + 1)
    names = net.class_names if net and net.class_names else tuple(f"class {k}" for k in range(count))
    return Samples(items, names)


def _refuse_crops(transform: Any) -> None:
    if isinstance(transform, Preprocess) and transform.resize not in (
        None,
        (transform.height, transform.width),
    ):
        raise DataError(
            "this preprocessing cuts the middle out of pictures, so that boxes and masks would not fit the "
            "maps: use one that squashes, as dataclasses.replace(net.transform, resize=None) does."
        )
