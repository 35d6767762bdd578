"""evaluate: measure the maps that a network draws; evaluate_maps: measure maps from files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.distributed import all_gather, local_batches
from sigcam.core.errors import ConfigError, DataError
from sigcam.core.types import Progress, Skipped
from sigcam.data.loader import load_batches
from sigcam.data.maps import find_maps, open_map, same_shape
from sigcam.data.sample import Sample, Samples, data_fingerprint, match_classes, name_classes
from sigcam.evaluation.batch import SCORERS, BatchEvaluator, ClassFrom, MapScale, Scorer, Variant
from sigcam.evaluation.metric_table import EvalCheckpoint, MetricTable, evaluation_facts
from sigcam.evaluation.registry import BatchRecord, Threshold, boxes_for, choose_metrics, mask_for
from sigcam.evaluation.result import Result
from sigcam.methods.registry import METHODS, MapConfig, method_name
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
    scales: Sequence[MapScale] = ("unit",),
    metrics: Sequence[str] | None = None,
    class_from: ClassFrom = "label",
    scorers: Sequence[Scorer] = ("softmax",),
    others: Mapping[str, DualBranch] | None = None,
    zoom: float = 1.0,
    curve_steps: int = 224,
    threshold: Threshold = "maximum",
    map_samples: int | None = None,
    map_top_n: int | None = None,
    val: Result | None = None,
    intervals: bool = False,
    transform: Callable[[Image.Image], Tensor] | None = None,
    batch_size: int = 16,
    workers: int = 0,
    skip_unreadable: bool = False,
    unfinished: str | Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """Measure the maps of each method and branch on annotated images; values are percent.

    One forward pass per batch serves all maps; confidence takes one more per method and branch, on the
    normalised images times the predicted class's map. Metrics that the samples have no annotations for are
    left out and named in the result.

    Args:
        methods: names of methods; each is drawn from every branch.
        clamps: whether negative channel weights are clamped, each in turn; None for the branch's default.
        scales: scales of the maps, each in turn; "probability" for maps of the sigmoid branches by methods in
            logits, of those that are calibrated at this zoom: at least one must be.
        metrics: names of metrics (`sigcam.list_metrics()`); None for the usual ones.
        class_from: class whose maps locate objects: the label's (the protocol) or the predicted one.
        scorers: what confidence is: "softmax" by the classifier's head for both rows of a comparison,
            "sigmoid" by the fitted branch, "branch" by a softmax over the branch that is explained.
        others: further fitted branches of the same classifier, by name, drawn from the same passes as the
            network's own; each is one more branch of the result.
        zoom: factor by which images are enlarged to draw finer maps, as for `explain`.
        curve_steps: steps of insertion and deletion; RISE has 224.
        threshold: what the thresholds of boxes are fractions of: each map's "maximum" (the protocol) or its
            90th "percentile" (Bae et al., 2020).
        map_samples: masks, noises or steps of methods that take them, as `samples` of `explain`.
        map_top_n: channels that methods try which mask images by channels, as `top_n` of `explain`.
        val: result of the same evaluation on a validation split; adds accuracies at its best thresholds.
        intervals: add bootstrap intervals over images.
        transform: turns an image into a (3, H, W) tensor, without cropping; `net.transform` by default.
        skip_unreadable: leave out images that cannot be decoded, and name them in the result.
        unfinished: file for intermediate results; the same evaluation resumes from it, and removes it.
        progress: called with (stage, done, total).
    """
    others = dict(others or {})
    transform = _check_arguments(net, transform, scorers, class_from, batch_size)
    _check_others(net, others)
    net = net.for_many(len(samples))
    by_label = class_from == "label"
    specs, left_out = choose_metrics(
        metrics, samples, network=True, maps_of_labels=by_label, threshold=threshold
    )
    scorers = tuple(dict.fromkeys(scorers))
    counts = curve_steps, map_samples, map_top_n
    evaluator = BatchEvaluator(net, specs, class_from, scorers, zoom, others, *counts)
    samples = _prepare_samples(samples, evaluator, transform)
    variants = _variants(methods, branches, others, clamps, scales)
    variants = _calibrated(variants, net, others, zoom)  # raises before any work
    table = MetricTable(specs, variants, evaluator.scorers, intervals)
    table.check_rows(len(samples))
    path = None if unfinished is None else Path(unfinished)
    options = (
        list(specs),
        class_from,
        evaluator.scorers,
        zoom,
        variants,
        intervals,
        batch_size,
        skip_unreadable,
        curve_steps,
        threshold,
        map_samples,
        map_top_n,
    )
    facts = path and [evaluation_facts(net, samples, transform, others), options]
    checkpoint = EvalCheckpoint(path, facts, table)

    local = Samples(tuple(samples[i] for i in _local_indices(len(samples), batch_size)), samples.classes)
    done, skipped = checkpoint.resume()
    rest, spawn = local[done:], net.device.type == "cuda"
    for batch in load_batches(rest, transform, batch_size=batch_size, workers=workers, spawn=spawn):
        if batch.skipped and not skip_unreadable:
            id, reason = batch.skipped[0]
            advice = "Repair it, or skip such images (skip_unreadable=True, --skip-unreadable)."
            raise DataError(f"image {id}: {reason} {advice}")
        if len(batch.images):
            for variant, record in evaluator.records(batch, [rest[i] for i in batch.indices], variants):
                table.update(variant, record)
        skipped += batch.skipped
        done += len(batch.indices) + len(batch.skipped)
        checkpoint.save_progress(done, skipped)
        if progress:
            progress("maps", done, len(local))

    skipped = [pair for part in all_gather(skipped) for pair in part]
    about = {**_about(evaluator, samples, transform, skipped), "threshold": threshold}
    result = table.result(left_out, skipped, about, val)
    checkpoint.remove()
    return result


def evaluate_maps(
    folder: str | Path,
    samples: Samples | Sequence[Sample],
    *,
    metrics: Sequence[str] | None = None,
    threshold: Threshold = "maximum",
    val: Result | None = None,
    intervals: bool = False,
    extra: bool = False,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Result:
    """Measure a folder of maps: .npy or .png files named by image id (`find_maps`), with values in [0, 1].

    Maps are scored at their own size, to which boxes are scaled and masks resized; the protocol's are
    224 x 224. Images are opened only if the data does not give their size.

    Args:
        metrics, threshold, val, intervals, progress: as for `evaluate`; confidence needs a network and is
            left out.
        extra: allow maps that belong to no sample.
    """
    specs, left_out = choose_metrics(
        metrics, samples, network=False, maps_of_labels=False, threshold=threshold
    )
    files = find_maps(folder, [sample.id for sample in samples], extra=extra)
    variant = Variant("maps")
    table = MetricTable(specs, [variant], (), intervals)
    table.check_rows(len(samples))
    boxed, masked = (any(need in spec.needs for spec in specs.values()) for need in ("boxes", "masks"))
    opened = ((i, open_map(files[i], samples[i].id)) for i in _local_indices(len(samples), batch_size))
    sizes = set[str]()
    for run in same_shape(opened, batch_size):
        part = [samples[i] for i, _ in run]
        maps = torch.stack([torch.from_numpy(values) for _, values in run])  # (B, H, W)
        height, width = maps.shape[1:]
        sizes.add(f"{width} x {height}")
        record = BatchRecord(
            [sample.id for sample in part],
            maps,
            [boxes_for(sample, None, width, height) for sample in part] if boxed else (),
            [mask_for(sample, width, height) for sample in part] if masked else (),
        )
        table.update(variant, record)
        if progress:
            progress("maps", run[-1][0] + 1, len(samples))
    about = {
        "images": len(samples),
        "data_fingerprint": data_fingerprint(_as_samples(samples)),
        "threshold": threshold,
        "map_sizes": sorted(set[str]().union(*all_gather(sizes))),
    }
    return table.result(left_out, (), about, val)


def _check_arguments(
    net: Any, transform: Any, scorers: Sequence[str], class_from: str, batch_size: int
) -> Callable[[Image.Image], Tensor]:
    """The transform to use; ConfigError if an argument is not valid."""
    if not isinstance(net, DualBranch):
        raise ConfigError(f"evaluate takes the network that attach returns, not {type(net).__name__}.")
    transform = transform or net.transform
    if transform is None:
        raise ConfigError("samples need preprocessing: set net.transform, or evaluate(..., transform=...).")
    if any(scorer not in SCORERS for scorer in scorers):
        raise ConfigError(f"unknown scorer in {list(scorers)}: choose from {', '.join(SCORERS)}.")
    if class_from not in ("label", "predicted"):
        raise ConfigError(f'class_from must be "label" or "predicted", not {class_from!r}.')
    if batch_size < 1:
        raise ConfigError(f"batch_size must be 1 or more, not {batch_size}.")
    if "sigmoid" in scorers and not net.fitted:
        raise ConfigError("the sigmoid branch is not fitted, so it cannot score: fit it, or load one.")
    return transform  # type: ignore[no-any-return]


def _check_others(net: DualBranch, others: Mapping[str, DualBranch]) -> None:
    """ConfigError unless the further branches belong to the network's classifier."""
    for name, other in others.items():
        if name in get_args(Branch) or not isinstance(other, DualBranch) or not other.fitted:
            raise ConfigError(f"others must be fitted branches under names of their own, not {name!r}.")
        same = fingerprint(other.original) == fingerprint(net.original)
        if (
            not same
            or other.split != net.split
            or (other.model is other.original) != (net.model is net.original)
        ):
            raise ConfigError(f"branch {name!r} is not one of this classifier: load it onto the same model.")


def _prepare_samples(
    samples: Samples | Sequence[Sample], evaluator: BatchEvaluator, transform: Any
) -> Samples:
    """The samples with the classifier's labels, if labels are needed; refuse transforms that crop."""
    net, prepared = evaluator.net, _as_samples(samples, evaluator.net)
    if evaluator.needs("labels"):
        prepared = match_classes(prepared, net.classes, net.class_names)
    placed = evaluator.needs("boxes") or evaluator.needs("masks")
    whole = (None, (transform.height, transform.width)) if isinstance(transform, Preprocess) else ()
    if placed and whole and transform.resize not in whole:
        raise ConfigError(
            "this preprocessing cuts the middle out of images, so boxes and masks would not fit the maps: "
            "use one that squashes, as dataclasses.replace(net.transform, resize=None) does."
        )
    return prepared


def _variants(
    methods: Sequence[str],
    branches: Sequence[Branch],
    others: Iterable[str],
    clamps: Sequence[bool | None] | None,
    scales: Sequence[str],
) -> list[Variant]:
    """Every combination once, with names and defaults resolved; "probability" where there is one."""
    for name, given in (("methods", methods), ("branches", branches), ("scales", scales)):
        if isinstance(given, str):
            raise ConfigError(f"{name} is a list of names: {name}=[{given!r}].")
    if any(scale not in ("unit", "probability") for scale in scales):
        raise ConfigError(f"scales are unit and probability, not {list(scales)}.")
    variants = list[Variant]()
    for method, branch, scale in product(methods, (*branches, *others), scales):
        source = branch if branch in branches else "sigmoid"
        if scale == "unit":
            configs = [MapConfig(method, source, clamp).checked() for clamp in clamps or (None,)]  # type: ignore[arg-type]
            variants += [Variant(c.method, branch, bool(c.clamp)) for c in configs]
        elif source == "sigmoid" and METHODS[method_name(method)].in_logits:
            variants.append(Variant(method_name(method), branch, False, "probability"))
    if not variants:
        raise ConfigError("there is nothing to draw: name at least one method, branch and scale.")
    return list(dict.fromkeys(variants))


def _calibrated(
    variants: Sequence[Variant], net: DualBranch, others: Mapping[str, DualBranch], zoom: float
) -> list[Variant]:
    """The variants without maps in probabilities of branches that are not calibrated at this zoom, where
    others are; ConfigError if none is."""
    missing, errors = list[Variant](), list[ConfigError]()
    for variant in variants:
        if variant.scale == "probability":
            try:
                others.get(variant.branch or "", net).calibration.map_scale(zoom)
            except ConfigError as error:
                missing.append(variant)
                errors.append(error)
    if errors and len(missing) == sum(variant.scale == "probability" for variant in variants):
        raise errors[0]
    return [variant for variant in variants if variant not in missing]


def _local_indices(count: int, batch_size: int) -> list[int]:
    """Indices of this process's samples: whole batches, the same for any number of processes."""
    batches = local_batches(-(-count // batch_size))
    return [i for b in batches for i in range(b * batch_size, min((b + 1) * batch_size, count))]


def _about(
    evaluator: BatchEvaluator, samples: Samples, transform: Any, skipped: Sequence[Skipped]
) -> dict[str, Any]:
    """What was evaluated, and with what."""
    if len(skipped) == len(samples):
        raise DataError(f"none of the {len(samples)} pictures could be read; the first: {skipped[0][1]}")
    net = evaluator.net
    return {
        "images": len(samples) - len(skipped),
        "data_fingerprint": data_fingerprint(samples),
        "model": type(net.model).__name__,
        "model_fingerprint": fingerprint(net.original),
        "fitted": net.fitted,
        "recipe": net.recipe,
        "preprocessing": str(transform),
        "class_from": evaluator.class_from,
        "zoom": evaluator.zoom,
        **({"map_samples": evaluator.map_samples} if evaluator.map_samples else {}),
        **({"map_top_n": evaluator.map_top_n} if evaluator.map_top_n else {}),
        "confidence": {scorer: SCORERS[scorer] for scorer in evaluator.scorers},
        "masking": "the normalised image times the predicted class's map",
    }


def _as_samples(samples: Samples | Iterable[Sample], net: DualBranch | None = None) -> Samples:
    """The samples with names for their classes."""
    if isinstance(samples, Samples):
        return samples
    return name_classes(samples, net.classes, net.class_names) if net else name_classes(samples)
