"""evaluate: samples -> maps -> metrics -> Result; evaluate_maps: the same for maps that others drew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.distributed import gathered, mine, summed
from sigcam.core.errors import DataError
from sigcam.core.manifest import data_fingerprint, versions
from sigcam.data.labels import match_classes
from sigcam.data.loader import Batch, collect
from sigcam.data.maps import find_maps, open_map, same_shape
from sigcam.data.sample import Sample, Samples
from sigcam.evaluation.checkpoint import Standing, shaping
from sigcam.evaluation.registry import Judged, Measure, boxes_for, choose_measures, mask_for
from sigcam.evaluation.result import Key, Result, Row, rows_of
from sigcam.methods.explainer import Drawing, explain_passage
from sigcam.methods.explanation import Scale
from sigcam.methods.inputs import choose_classes
from sigcam.methods.probe import Branch, branch_logits, full, resize, unit_range
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.localization import in_top, insertion_deletion_curves
from sigcam.models.classifier import Preprocess
from sigcam.network.dual import DualBranch, Passage, fingerprint
from sigcam.network.trace import Size
from sigcam.network.zoom import zoomed
from sigcam.training.features import Progress

Scorer = Literal["softmax", "sigmoid", "branch"]
SCORERS: dict[Scorer, str] = {
    "softmax": "the class's probability by the classifier's own head, for all branches alike",
    "sigmoid": "the class's evidence by the sigmoid branch, for all branches alike",
    "branch": "a softmax over the logits of the branch that the map explains",
}


class Cell(NamedTuple):
    """One way to draw maps; None where others drew them, or where none are needed."""

    method: str | None = None
    branch: Branch | None = None
    clamp: bool | None = None

    def drawing(self, scale: Scale = "unit") -> Drawing:
        """The same for `explain`."""
        assert self.method is not None and self.branch is not None
        return Drawing(self.method, self.branch, self.clamp, scale=scale)

    def standing_for(self, net: DualBranch) -> Cell:
        """The simplest cell with the same maps (PROTOCOL 4.2): some methods have no negative weights, and
        on a head that is global average + linear, some gradients are all alike."""
        cell, source = self, "sigmoid" if self.branch == "sigmoid" else "softmax"
        if cell.method in ("layer-cam", "grad-cam++"):
            cell = cell._replace(clamp=True)
        if source in net.linear and cell.method in ("xgrad-cam", "hires-cam", "layer-cam"):
            cell = cell._replace(method="grad-cam")
        return cell


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
    measures, left_out = choose_measures(metrics, samples, network=True, labels_draw=class_from == "label")
    asked = _Asked(net, measures, class_from, tuple(dict.fromkeys(scorers)), zoom)
    samples = _as_samples(samples, net)
    samples = match_classes(samples, net.classes, net.class_names) if asked.labels else samples
    if asked.boxes or asked.masks:
        _refuse_crops(transform)
    cells = _cells(methods, branches, clamps)
    books = Books(measures, cells, asked.scorers, intervals)
    own = Samples(tuple(samples[i] for i in _mine(samples, batch_size)), samples.classes)
    kept = None if unfinished is None else Path(unfinished)
    standing = Standing(kept, kept and _identity(asked, samples, cells, transform, intervals, batch_size))
    done, skipped = standing.resume(books.metrics, books.blank)
    rest, spawn = own[done:], net.device.type == "cuda"
    for batch in collect(rest, transform, batch_size=batch_size, workers=workers, spawn=spawn):
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
    skipped = [pair for part in gathered(skipped) for pair in part]
    if len(skipped) == len(samples):
        raise DataError(f"none of the {len(samples)} pictures could be read; the first: {skipped[0][1]}")
    about = {
        "images": len(samples) - len(skipped),
        "data_fingerprint": data_fingerprint(samples),
        "model": type(net.model).__name__,
        "model_fingerprint": fingerprint(net.origin),
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
    measures, left_out = choose_measures(metrics, samples, network=False, labels_draw=False)
    files = find_maps(folder, [sample.id for sample in samples], extra=extra)
    cell = Cell("maps")
    books = Books(measures, [cell], (), intervals)
    boxed, masked = (any(need in m.needs for m in measures.values()) for need in ("boxes", "masks"))
    own = _mine(samples, batch_size)
    opened = ((i, open_map(files[i], samples[i].id)) for i in own)
    sizes = set[str]()
    for run in same_shape(opened, batch_size):
        part = [samples[i] for i, _ in run]
        maps = torch.stack([torch.from_numpy(values) for _, values in run])  # (B, H, W)
        height, width = maps.shape[1:]
        sizes.add(f"{width} x {height}")
        seen = Judged(
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
        "map_sizes": sorted(set[str]().union(*gathered(sizes))),
        "definitions": books.definitions(),
        "versions": versions(),
    }
    return Result(tuple(books.rows(val)), tuple(left_out), (), about, books.metrics)


# ------------------------------------------------------------------------------------- metrics of each cell


class Books:
    """The metrics of each cell, and how many of its maps are blank."""

    def __init__(
        self, measures: Mapping[str, Measure], cells: Sequence[Cell], scorers: Sequence[str], intervals: bool
    ) -> None:
        self.metrics = dict[Key, ImageMetric]()
        self._told = dict[Cell, list[tuple[Measure, ImageMetric, str]]]()
        self._scorers = dict[Key, str]()
        for (name, measure), cell in product(measures.items(), (Cell(), *cells)):
            if (measure.uses == "classes") != (cell == Cell()):
                continue
            for scorer in scorers if measure.uses == "scores" else ("",):
                key = (*cell, name if scorer in ("", "softmax") else f"{name}:{scorer}")
                self.metrics[key] = metric = measure.make(intervals=intervals)
                self._scorers[key] = scorer
                self._told.setdefault(cell, []).append((measure, metric, scorer))
        self.blank = {cell: [0, 0] for cell in cells if cell in self._told}  # blank maps, maps

    def tell(self, cell: Cell, seen: Judged) -> None:
        """Count a batch of maps."""
        for measure, metric, scorer in self._told.get(cell, ()):
            measure.tell(metric, seen, scorer)
        if cell in self.blank:
            maps = seen.maps if len(seen.maps) or seen.kept is None else seen.kept
            self.blank[cell][0] += int((~maps.flatten(1).any(1)).sum())
            self.blank[cell][1] += len(maps)

    def rows(self, val: Result | None) -> list[Row]:
        """All numbers; the share of blank maps last."""
        found = [
            row
            for key, metric in self.metrics.items()
            for row in rows_of(key, metric, scorer=self._scorers[key] or None, val=val)
        ]
        empty = dict.fromkeys(("low", "high", "threshold", "threshold_from", "scorer"))
        for cell, counted in self.blank.items():
            blank, images = summed(torch.tensor(counted)).tolist()
            value = {"metric": "blank_maps", "value": 100 * blank / images, "images": images}
            found.append({**cell._asdict(), **empty, **value})
        return found

    def definitions(self) -> dict[str, str]:
        """Each metric's own words."""
        about = {key[3].partition(":")[0]: type(metric).__doc__ or "" for key, metric in self.metrics.items()}
        return {name: " ".join(text.split("\n\n")[0].split()) for name, text in about.items()}


def _mine(samples: Sequence[Sample], batch_size: int) -> list[int]:
    """Which samples are this process's: every n-th batch, whole, so that batches are the same for any n."""
    batches = mine(-(-len(samples) // batch_size))
    return [i for b in batches for i in range(b * batch_size, min((b + 1) * batch_size, len(samples)))]


def _identity(asked: _Asked, samples: Samples, cells: Sequence[Cell], transform: Any, *rest: Any) -> Any:
    """All that shapes the sums of an evaluation."""
    ways = list(asked.measures), asked.class_from, asked.scorers, asked.zoom
    return shaping(asked.net, samples, transform), ways, cells, rest


def _cells(
    methods: Sequence[str], branches: Sequence[Branch], clamps: Sequence[bool | None] | None
) -> list[Cell]:
    """Every combination once, names and defaults filled in."""
    if isinstance(methods, str) or isinstance(branches, str):
        raise DataError("methods and branches are lists of names: methods=['cam'], branches=['softmax'].")
    drawings = [
        Drawing(method, branch, clamp).checked()
        for method, branch, clamp in product(methods, branches, clamps or (None,))
    ]
    if not drawings:
        raise DataError("there is nothing to draw: name at least one method and one branch.")
    return list(dict.fromkeys(Cell(how.method, how.branch, bool(how.clamp)) for how in drawings))


# --------------------------------------------------------------------------------------- from a batch to maps


@dataclass(frozen=True)
class _Asked:
    """What is asked of the network for each batch."""

    net: DualBranch
    measures: Mapping[str, Measure]
    class_from: Literal["label", "predicted"]
    scorers: tuple[Scorer, ...]
    zoom: float

    def uses(self, *kinds: str) -> bool:
        return any(measure.uses in kinds for measure in self.measures.values())

    def needs(self, what: str) -> bool:
        return any(what in measure.needs for measure in self.measures.values())

    @property
    def boxes(self) -> bool:
        return self.needs("boxes")

    @property
    def masks(self) -> bool:
        return self.needs("masks")

    @property
    def labels(self) -> bool:
        return self.needs("labels") or (self.class_from == "label" and self.uses("maps"))

    def judged(
        self, batch: Batch, samples: Sequence[Sample], cells: Sequence[Cell]
    ) -> Iterator[tuple[Cell, Judged]]:
        """What is known of the batch, without maps and for each cell with its maps."""
        net = self.net
        images = batch.images.to(net.device, next(net.model.parameters()).dtype)
        passage = net.run(images, grad=True)  # the one pass that all cells share
        height, width = passage.image
        labels = batch.labels.to(net.device) if self.labels and batch.labels is not None else None
        seen = Judged([sample.id for sample in samples])
        if self.boxes:
            pairs = zip(samples, batch.sizes, strict=True)
            seen = replace(seen, boxes=[boxes_for(sample, size, width, height) for sample, size in pairs])
        if self.masks:
            seen = replace(seen, masks=[mask_for(sample, width, height) for sample in samples])
        if labels is not None:
            ranked = _probabilities(net, passage) if net.classes == 1 else full(passage.softmax)
            seen = replace(seen, top={k: in_top(ranked, labels, k).cpu() for k in (1, 5)})
        yield Cell(), seen
        predicted, _ = choose_classes(net, passage, None)  # (B, 1)
        chosen = labels[:, None] if labels is not None and self.class_from == "label" else predicted
        finer, larger = zoomed(net, images, self.zoom)
        fine = passage if finer is net and larger is images else finer.run(larger, grad=True)
        done = dict[Cell, Judged]()  # maps that are the same by an identity are drawn once
        for cell in cells:
            same = cell.standing_for(net)
            if same not in done:
                done[same] = self._drawn(same, passage, (finer, fine), chosen, predicted, seen)
            yield cell, done[same]

    def _drawn(
        self,
        cell: Cell,
        passage: Passage,
        fine: tuple[DualBranch, Passage],
        chosen: Tensor,
        predicted: Tensor,
        seen: Judged,
    ) -> Judged:
        """`seen` with the cell's maps, drawn from the finer pass, and what the network says of the images
        that they mask."""
        net, fidelity = self.net, self.uses("kept", "scores", "curves")
        own = fidelity and cell.method == "cam"  # its masks are finished in another way than its score maps
        wanted = [chosen] if self.uses("maps") else []
        wanted += [predicted] if fidelity and not own else []
        if wanted:
            classes = torch.cat(wanted, 1)
            drawn = explain_passage(*fine, cell.drawing(), classes=classes, size=passage.image).maps
            seen = replace(seen, maps=drawn[:, 0].cpu()) if self.uses("maps") else seen
        if not fidelity:
            return seen
        masks = _cam_masks(*fine, cell, predicted, passage.image) if own else drawn[:, -1]  # (B, H, W)
        seen = replace(seen, kept=masks.cpu())
        if self.uses("scores"):
            with torch.no_grad():
                masked = net.run(passage.images * masks[:, None].to(passage.images.dtype))
            scores = dict[str, tuple[Tensor, Tensor]]()
            for scorer in self.scorers:
                before, after = (_confidence(net, p, scorer, cell, predicted) for p in (passage, masked))
                scores[scorer] = before, after
            seen = replace(seen, scores=scores)
        if self.uses("curves"):
            curves = insertion_deletion_curves(
                lambda images: _probabilities(net, net.run(images)), passage.images, masks, predicted[:, 0]
            )
            seen = replace(seen, curves=tuple(curve.cpu() for curve in curves))
        return seen


def _cam_masks(net: DualBranch, passage: Passage, cell: Cell, classes: Tensor, size: Size) -> Tensor:
    """CAM as a mask, (B, H, W): scaled at low resolution, then resized bilinearly (PROTOCOL 6)."""
    low = explain_passage(net, passage, cell.drawing("raw"), classes=classes, size="features").maps
    with torch.no_grad():
        return resize(unit_range(low, eps=1e-7), size, "bilinear")[:, 0]


def _confidence(net: DualBranch, passage: Passage, scorer: Scorer, cell: Cell, classes: Tensor) -> Tensor:
    """The classes' scores, (B,), for (B, 1) classes."""
    if scorer == "softmax":
        scores = _probabilities(net, passage)
    else:
        branch: Branch = "sigmoid" if scorer == "sigmoid" else cell.branch or "softmax"
        logits = full(branch_logits(passage, branch).detach())
        logits = torch.cat([-logits, logits], 1) if net.classes == 1 else logits
        scores = logits.sigmoid() if scorer == "sigmoid" or net.classes == 1 else logits.softmax(1)
    return scores.gather(1, classes)[:, 0].cpu()


def _probabilities(net: DualBranch, passage: Passage) -> Tensor:
    """What the classifier's own head says, (B, C), or (B, 2) for one logit."""
    output = full(passage.softmax)
    if net.classes > 1:
        return output if net.split.output == "probabilities" else output.softmax(1)
    positive = output if net.split.output == "probabilities" else output.sigmoid()
    return torch.cat([1 - positive, positive], 1)


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
