"""The rows of each table in the registry."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sigcam.bench.measure import evaluate_rows, logit_shift, presence_auroc
from sigcam.bench.networks import network
from sigcam.bench.paper import FIDELITY, FIRST_BOX, PAPER_METHODS, BenchRow
from sigcam.bench.plan import VGG, Plan
from sigcam.bench.registry import DATASETS, FINE_DATASETS, MASKED_DATASETS
from sigcam.core.config import FitConfig
from sigcam.core.distributed import world_size
from sigcam.core.errors import ConfigError, DataError
from sigcam.core.types import Progress
from sigcam.methods.registry import METHODS
from sigcam.network.dual import DualBranch

MAP_VARIANTS: Any = {"branches": ("softmax", "centred", "sigmoid"), "clamps": (False, True)}
BOX_METRICS = ("max_box_acc_v2", "gt_known_loc", "top1_loc", "top1_cls")
OTHER_FIDELITY_IMAGES = 100  # test images for the confidence metrics of other classifiers


def table1(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Average drop and increase in confidence on fine-grained data: five methods, two scorers."""
    datasets = plan.available(FINE_DATASETS)
    return [row for dataset in datasets for row in fidelity_rows(plan, dataset, progress)]


def table2(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Localisation by boxes and by pixels, at the network's own size and enlarged."""
    datasets = plan.available(DATASETS)
    for dataset in datasets:
        _check_annotations(plan, dataset)
    return [row for dataset in datasets for row in localization_rows(plan, dataset, progress)]


def nwc(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The effect of keeping positive weights alone: rows of table 2."""
    return table2(replace(plan, zoom=1.0), progress)


def pos_weight(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The weight of a positive label: 1, half of C - 1, C - 1."""
    dataset = plan.available((*FINE_DATASETS, "ilsvrc"))[0]
    samples, rows = plan.samples(dataset, "test", plan.ablation_images), list[BenchRow]()
    most = len(samples.classes) - 1
    for weight in dict.fromkeys((1, max(1, most // 2), most)):
        net = network(plan, dataset, FitConfig(pos_weight=float(weight), seed=plan.seed), progress)
        settings = MAP_VARIANTS | {"methods": methods_for(net)[:2], "metrics": localization_metrics(dataset)}
        fit_rows = evaluate_rows(plan, f"pos-weight-{weight:g}", net, dataset, samples, progress, **settings)
        rows += [row | {"pos_weight": weight} for row in fit_rows if row["branch"] == "sigmoid"]
    return [row for row in fit_rows if row["branch"] != "sigmoid"] + rows  # the other heads have no weight


def sources(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Where the gain comes from: clamping, centring, sigmoid training, its penalty, images of no class."""
    dataset, count = plan.available(FINE_DATASETS)[0], plan.ablation_images
    samples, rows = plan.samples(dataset, "test", count), list[BenchRow]()
    pets = plan.samples("pets", "test", count) if plan.has("pets") else None
    fits = {f"L2 {l2:g}": FitConfig(l2=l2, seed=plan.seed) for l2 in (0.1, 0.01, 0.001, 0.0001)}
    if dataset != "cars" and plan.has("cars"):  # not pets, which the score is tested on
        fits["L2 0.1, with negatives"] = FitConfig(l2=0.1, seed=plan.seed)
    for number, (name, config) in enumerate(fits.items()):
        negatives = plan.samples("cars", "train", plan.train_images) if "negatives" in name else None
        net = network(plan, dataset, config, progress, negatives)
        settings = MAP_VARIANTS | {"methods": methods_for(net)[:1], "metrics": BOX_METRICS[:2]}
        fit_rows = evaluate_rows(plan, f"sources-{number}", net, dataset, samples, progress, **settings)
        auroc = {} if pets is None else presence_auroc(plan, net, samples, pets, progress)
        for row in fit_rows:
            if interval := auroc.get(row["branch"]):
                row["auroc_nothing"] = interval.value
                row["intervals"]["auroc_nothing"] = [interval.low, interval.high]
            if row["branch"] == "sigmoid":
                rows.append(row | {"fit": name})
            elif number == 0:  # the other heads do not depend on the fit
                rows.append(row)
    return rows


def lite2(plan: Plan, progress: Progress) -> list[BenchRow]:
    """A larger network of the same family, as a linear probe."""
    datasets = plan.available((*FINE_DATASETS, "pets"))
    return other_classifier(replace(plan, backbone="embedded:lite2"), datasets, progress)


def stages(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The same network with its last stages trained on the data, instead of a linear probe."""
    datasets = plan.available(FINE_DATASETS)[:1]
    return other_classifier(replace(plan, classifier_recipe="stages"), datasets, progress)


def vgg16(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The paper's own network with its published convolutions."""
    if world_size() > 1:
        raise ConfigError("vgg16 is trained in one process: start it without torchrun.")
    return other_classifier(replace(plan, backbone=VGG), plan.available(FINE_DATASETS)[:1], progress)


def other_classifier(plan: Plan, datasets: Sequence[str], progress: Progress) -> list[BenchRow]:
    """Fidelity and localisation of another classifier, on fewer images and without zoom."""
    few = plan.fidelity_images and min(plan.fidelity_images, OTHER_FIDELITY_IMAGES)
    plan = replace(plan, localization_images=plan.ablation_images, fidelity_images=few, zoom=1.0)
    rows = list[BenchRow]()
    for dataset in datasets:
        if dataset in FINE_DATASETS:
            rows += fidelity_rows(plan, dataset, progress)
        rows += localization_rows(plan, dataset, progress)
    return rows


def fidelity_rows(plan: Plan, dataset: str, progress: Progress) -> list[BenchRow]:
    """How much confidence masked images keep."""
    net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
    settings = MAP_VARIANTS | {"methods": methods_for(net), "metrics": FIDELITY}
    settings |= {"scorers": ("softmax", "branch")}
    samples = plan.samples(dataset, "test", plan.fidelity_images)
    name = f"confidence-{plan.slug}-{dataset}"
    return evaluate_rows(plan, name, net, dataset, samples, progress, **settings)


def localization_rows(plan: Plan, dataset: str, progress: Progress) -> list[BenchRow]:
    """How well maps locate objects, and the head's logit shift."""
    net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
    rows, shift = list[BenchRow](), logit_shift(net)
    samples = plan.samples(dataset, "test", plan.localization_images)
    for zoom in dict.fromkeys((1.0, plan.zoom)):
        settings = MAP_VARIANTS | {"methods": methods_for(net)[: 2 if zoom == 1 else 1], "zoom": zoom}
        settings |= {"metrics": localization_metrics(dataset)}
        name = f"locating-{plan.slug}-{dataset}-x{zoom:g}"
        zoom_rows = evaluate_rows(plan, name, net, dataset, samples, progress, **settings)
        rows += [row | {"shift": shift} for row in zoom_rows]
    return rows


def methods_for(net: DualBranch) -> tuple[str, ...]:
    """Return the paper's methods that the network's head allows."""
    return tuple(name for name in PAPER_METHODS if net.linear or METHODS[name].needs != "linear")


def localization_metrics(dataset: str) -> tuple[str, ...]:
    """Return the metrics of localisation: by pixels for data sets with masks, else by boxes."""
    if dataset in MASKED_DATASETS:
        return "pxap", "top1_cls"
    return (*BOX_METRICS, *FIRST_BOX) if dataset == "ilsvrc" else BOX_METRICS


def _check_annotations(plan: Plan, dataset: str) -> None:
    """Raise DataError, before any work, if the data set has no boxes or masks to measure by."""
    kind, field = ("masks", "open_mask") if dataset in MASKED_DATASETS else ("boxes", "boxes")
    if all(getattr(sample, field) is None for sample in plan.samples(dataset, "test", None)):
        raise DataError(f"{plan.data / dataset} has no {kind} to measure maps by: add them, or leave it out.")
