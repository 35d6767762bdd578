"""The rows of each table in the registry."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sigcam.bench.measure import evaluate_rows, logit_shift, presence, with_presence
from sigcam.bench.networks import BranchFit, networks, paper_fit, table_fits
from sigcam.bench.paper import CURVES, FIDELITY, FIRST_BOX, HEADS, PAPER_METHODS, BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.registry import DATASETS, FINE_DATASETS, MASKED_DATASETS
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from sigcam.core.types import Progress
from sigcam.methods.registry import METHODS
from sigcam.network.dual import DualBranch

MAP_VARIANTS: Any = {"branches": HEADS, "clamps": (False, True)}
ALL_VARIANTS: Any = MAP_VARIANTS | {"scales": ("unit", "probability")}
BOX_METRICS = ("max_box_acc_v2", "gt_known_loc", "top1_loc", "top1_cls")
ABSOLUTE_METRICS = ("box_acc_at_half", "false_alarm")
CURVE_METHOD = "cam"  # insertion and deletion cost too much for all
CURVE_IMAGES, CURVE_STEPS, FULL_CURVE_STEPS = 40, 28, 224  # a curve of 28 steps costs 29 passes
OTHER_FIDELITY_IMAGES = 100  # test images for the confidence metrics of other classifiers


def table1(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Average drop and increase in confidence on fine-grained data: five methods, two scorers."""
    datasets = plan.available(FINE_DATASETS)
    return [row for dataset in datasets for row in fidelity_rows(plan, dataset, progress)]


def table2(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Localisation by boxes and by pixels, at the network's own size and enlarged."""
    return _localization(plan, dict.fromkeys((1.0, plan.zoom)), progress)


def _localization(plan: Plan, zooms: Iterable[float], progress: Progress) -> list[BenchRow]:
    """Localisation on all data sets at these sizes."""
    datasets = plan.available(DATASETS)
    for dataset in datasets:
        _check_annotations(plan, dataset)
    return [row for dataset in datasets for row in localization_rows(plan, dataset, progress, zooms)]


def nwc(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The effect of keeping positive weights alone: rows of table 2, of the heads that the paper compares."""
    return [row for row in _localization(plan, (1.0,), progress) if row["branch"] in HEADS]


def pos_weight(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The weight of a positive label: 1, half of C - 1, C - 1."""
    return pos_weight_rows(plan, plan.available((*FINE_DATASETS, "ilsvrc"))[0], progress)


def pos_weight_rows(
    plan: Plan, dataset: str, progress: Progress, steps: Mapping[str, Any] | None = None
) -> list[BenchRow]:
    """The rows of a data set. Given the settings of gradient `steps`, also of branches trained by the paper's
    recipe on the same features instead of solved for."""
    samples, rows = plan.samples(dataset, "test", plan.ablation_images), list[BenchRow]()
    most = len(samples.classes) - 1
    weights = dict.fromkeys((1, max(1, most // 2), most))
    by_steps: Any = {"recipe": "paper-code", "prior": "zero", "views": 1, **(steps or {})}
    fits, facts = dict[str, FitConfig](), dict[str, BenchRow]()
    for settings in [{}, by_steps] if steps else [{}]:
        for weight in weights:
            name = f"{weight:g}{' by steps' if settings else ''}"
            fits[name] = paper_fit(plan, dataset, pos_weight=float(weight), **settings)
            facts[name] = {"pos_weight": weight} | ({"fit": "the paper's recipe"} if settings else {})
    (first, net), *others = networks(plan, dataset, fits, progress).items()
    variants = MAP_VARIANTS | {"methods": methods_for(net)[:2], "metrics": localization_metrics(dataset)}
    variants |= {"others": dict(others)}
    found: dict[str, list[BenchRow]] = {name: [] for name in fits}
    name = f"pos-weight-{plan.slug}-{dataset}" if steps else "pos-weight"
    for row in evaluate_rows(plan, name, net, dataset, samples, progress, **variants):
        if row["branch"] in ("softmax", "centred"):  # which have no weight
            rows.append(row)
        else:
            name = first if row["branch"] == "sigmoid" else row["branch"]
            found[name].append(row | {"branch": "sigmoid", "versus": {}} | facts[name])
    return [*rows, *(row for each in found.values() for row in each)]


def sources(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Where the gain comes from: clamping, centring, sigmoid training, its penalty, images of no class, and
    background."""
    datasets = plan.available(FINE_DATASETS)
    return [
        row for dataset in datasets for row in _sources_of(plan, dataset, dataset == datasets[0], progress)
    ]


def _sources_of(plan: Plan, dataset: str, sweep: bool, progress: Progress) -> list[BenchRow]:
    """The rows of a data set; with `sweep`, also of several penalties and of images without a class."""
    samples = plan.samples(dataset, "test", plan.ablation_images)
    fits: dict[str, Any] = dict(table_fits(plan, dataset))
    penalties = dict[str, Any]()
    if sweep:
        penalties = {f"L2 {l2:g}": paper_fit(plan, dataset, l2=l2) for l2 in (0.1, 0.01, 0.001, 0.0001)}
        if dataset != "cars" and plan.has("cars"):  # not pets, which the score is tested on
            cars = plan.samples("cars", "train", plan.train_images)
            penalties["L2 0.1, with negatives"] = BranchFit(paper_fit(plan, dataset, l2=0.1), cars)
    nets = networks(plan, dataset, fits | penalties, progress)
    net, others = nets["sigmoid"], {name: each for name, each in nets.items() if name != "sigmoid"}
    settings = ALL_VARIANTS | {"methods": methods_for(net)[:1], "metrics": BOX_METRICS[:2], "others": others}
    rows = evaluate_rows(plan, f"sources-{dataset}", net, dataset, samples, progress, **settings)
    if plan.has("pets"):
        pets = plan.samples("pets", "test", plan.ablation_images)
        with_presence(rows, presence(plan, nets, samples, pets, progress))
    return [
        row | {"branch": "sigmoid", "fit": row["branch"], "versus": {}} if row["branch"] in penalties else row
        for row in rows
    ]


def lite2(plan: Plan, progress: Progress) -> list[BenchRow]:
    """A larger network of the same family, as a linear probe."""
    datasets = plan.available((*FINE_DATASETS, "pets"))
    return other_classifier(replace(plan, backbone="embedded:lite2"), datasets, progress)


def stages(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The same network with its last stages trained on the data, instead of a linear probe."""
    datasets = plan.available(FINE_DATASETS)[:1]
    return other_classifier(replace(plan, classifier_recipe="stages"), datasets, progress)


def other_classifier(plan: Plan, datasets: Sequence[str], progress: Progress) -> list[BenchRow]:
    """Fidelity and localisation of another classifier, on fewer images and without zoom."""
    few = plan.fidelity_images and min(plan.fidelity_images, OTHER_FIDELITY_IMAGES)
    plan = replace(plan, localization_images=plan.ablation_images, fidelity_images=few, zoom=1.0)
    rows = list[BenchRow]()
    for dataset in datasets:
        if dataset in FINE_DATASETS:
            rows += fidelity_rows(plan, dataset, progress, curves=False)  # which cost more than all else
        rows += localization_rows(plan, dataset, progress)
    return rows


def fidelity_rows(plan: Plan, dataset: str, progress: Progress, *, curves: bool = True) -> list[BenchRow]:
    """How much confidence masked images keep; with `curves`, also insertion and deletion of CAM on some of
    the images."""
    net, others = _table_networks(plan, dataset, progress)
    settings = ALL_VARIANTS | {"methods": methods_for(net), "metrics": FIDELITY, "others": others}
    settings |= {"scorers": ("softmax", "branch")}
    samples = plan.samples(dataset, "test", plan.fidelity_images)
    name = f"{plan.slug}-{dataset}"
    rows = evaluate_rows(plan, f"confidence-{name}", net, dataset, samples, progress, **settings)
    if not curves or CURVE_METHOD not in methods_for(net):
        return rows
    full = plan.fidelity_images is None
    few = samples if full else plan.samples(dataset, "test", min(CURVE_IMAGES, len(samples)))
    settings = MAP_VARIANTS | {"methods": (CURVE_METHOD,), "metrics": CURVES, "others": others}
    settings |= {"curve_steps": FULL_CURVE_STEPS if full else CURVE_STEPS}
    curve_rows = evaluate_rows(plan, f"curves-{name}", net, dataset, few, progress, **settings)
    return with_curves(rows, curve_rows)


def with_curves(rows: Sequence[BenchRow], curve_rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows with insertion and deletion of the same variants, where these are measured."""
    by_variant = {_variant_of(row): row for row in curve_rows}
    return [_with_curves(row, by_variant.get(_variant_of(row))) for row in rows]


def _variant_of(row: BenchRow) -> tuple[Any, ...]:
    return row["method"], row["branch"], row["clamp"], row["scale"]


def _with_curves(row: BenchRow, curves: BenchRow | None) -> BenchRow:
    """Return the row with insertion and deletion, which have a number of images of their own."""
    if curves is None:
        return row
    parts = {name: curves[name] for name in CURVES} | {"curve_images": curves["images"]}
    for key in ("intervals", "delta", "beside", "versus"):
        parts[key] = row[key] | {name: curves[key][name] for name in CURVES if name in curves[key]}
    return row | parts


def localization_rows(
    plan: Plan, dataset: str, progress: Progress, zooms: Iterable[float] = (1.0,)
) -> list[BenchRow]:
    """How well maps locate objects, and the head's logit shift."""
    net, others = _table_networks(plan, dataset, progress)
    rows, shift = list[BenchRow](), logit_shift(net)
    samples = plan.samples(dataset, "test", plan.localization_images)
    metrics = (*localization_metrics(dataset), *_absolute_metrics(dataset))
    for zoom in zooms:
        settings = ALL_VARIANTS | {"methods": methods_for(net)[: 2 if zoom == 1 else 1], "zoom": zoom}
        settings |= {"metrics": metrics, "others": others}
        name = f"locating-{plan.slug}-{dataset}-x{zoom:g}"
        zoom_rows = evaluate_rows(plan, name, net, dataset, samples, progress, **settings)
        rows += [row | {"shift": shift} for row in zoom_rows]
    return rows


def _table_networks(plan: Plan, dataset: str, progress: Progress) -> tuple[DualBranch, dict[str, DualBranch]]:
    """Return the network with the paper's branch, and the branches with background evidence."""
    nets = networks(plan, dataset, table_fits(plan, dataset), progress)
    return nets.pop("sigmoid"), nets


def methods_for(net: DualBranch) -> tuple[str, ...]:
    """Return the paper's methods that the network's head allows."""
    return tuple(name for name in PAPER_METHODS if net.linear or METHODS[name].needs != "linear")


def localization_metrics(dataset: str) -> tuple[str, ...]:
    """Return the metrics of localisation: by pixels for data sets with masks, else by boxes."""
    if dataset in MASKED_DATASETS:
        return "pxap", "top1_cls"
    return (*BOX_METRICS, *FIRST_BOX) if dataset == "ilsvrc" else BOX_METRICS


def _absolute_metrics(dataset: str) -> tuple[str, ...]:
    """Return the metrics of maps in probabilities; those with masks have no boxes."""
    return ABSOLUTE_METRICS[1:] if dataset in MASKED_DATASETS else ABSOLUTE_METRICS


def _check_annotations(plan: Plan, dataset: str) -> None:
    """Raise DataError, before any work, if the data set has no boxes or masks to measure by."""
    kind, field = ("masks", "open_mask") if dataset in MASKED_DATASETS else ("boxes", "boxes")
    if all(getattr(sample, field) is None for sample in plan.samples(dataset, "test", None)):
        raise DataError(f"{plan.data / dataset} has no {kind} to measure maps by: add them, or leave it out.")
