"""The tables: what each one evaluates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sigcam.bench.networks import network
from sigcam.bench.paper import FIDELITY, FIRST, PAPER_METHODS, Row
from sigcam.bench.plan import DATASETS, FINE, MASKED_DATASETS, VGG, Plan, measured
from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, world_size
from sigcam.core.errors import DataError
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.methods.registry import METHODS
from sigcam.metrics.bootstrap import Interval
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.training.features import extract


def table1(plan: Plan, progress: Progress) -> list[Row]:
    """Average drop and increase in confidence on fine-grained data: five methods, two scorers."""
    rows = list[Row]()
    for dataset in plan.available(FINE):
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        rows += confidence_rows(plan, net, dataset, progress)
    return rows


def confidence_rows(plan: Plan, net: DualBranch, dataset: str, progress: Progress) -> list[Row]:
    """What masks keep of the confidence."""
    how: Any = {"branches": BRANCHES, "clamps": (False, True), "metrics": FIDELITY}
    how |= {"methods": paper_methods_for(net)}
    samples = plan.samples(dataset, "test", plan.fidelity_images)
    name = f"confidence-{plan.slug}-{dataset}"
    return measured(plan, name, net, dataset, samples, progress, scorers=("softmax", "branch"), **how)


def table2(plan: Plan, progress: Progress) -> list[Row]:
    """Localisation by boxes and by pixels, at the network's own size and enlarged."""
    rows = list[Row]()
    for dataset in plan.available(DATASETS):
        _need_places(plan, dataset)
    for dataset in plan.available(DATASETS):
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        rows += locating_rows(plan, net, dataset, progress)
    return rows


def _need_places(plan: Plan, dataset: str) -> None:
    """DataError, before any work, if nothing says where the data set's objects are."""
    what, field = ("masks", "open_mask") if dataset in MASKED_DATASETS else ("boxes", "boxes")
    if all(getattr(sample, field) is None for sample in plan.samples(dataset, "test", None)):
        raise DataError(f"{plan.data / dataset} has no {what} to measure maps by: add them, or leave it out.")


def locating_rows(plan: Plan, net: DualBranch, dataset: str, progress: Progress) -> list[Row]:
    """How well maps locate objects."""
    rows = list[Row]()
    methods = paper_methods_for(net)
    for zoom in dict.fromkeys((1.0, plan.zoom)):
        samples = plan.samples(dataset, "test", plan.localization_images)
        how: Any = {"methods": methods[:2] if zoom == 1 else methods[:1], "branches": BRANCHES}
        how |= {"clamps": (False, True), "metrics": numbers_of(dataset), "zoom": zoom}
        name = f"locating-{plan.slug}-{dataset}-x{zoom:g}"
        made = measured(plan, name, net, dataset, samples, progress, **how)
        rows += [row | {"shift": shift_of(net)} for row in made]
    return rows


def shift_of(net: DualBranch) -> float | None:
    """How long the mean over classes of the softmax head's rows is, in percent of a row: the part of the
    head that no probability depends on."""
    found = linear_weight(net.last_layer("softmax"))
    if found is None:
        return None
    weight = found[0].detach()
    return float(100 * weight.mean(0).norm() / weight.norm(dim=1).mean())


def paper_methods_for(net: DualBranch) -> tuple[str, ...]:
    """The paper's methods; vanilla CAM where the head is a global average and a linear layer."""
    return tuple(name for name in PAPER_METHODS if net.linear or METHODS[name].needs != "linear")


def numbers_of(dataset: str) -> tuple[str, ...]:
    """What localisation is measured by: pixels where there are masks, else boxes."""
    if dataset in MASKED_DATASETS:
        return "pxap", "top1_cls"
    return (*LOCATING, *FIRST) if dataset == "ilsvrc" else LOCATING


def nwc(plan: Plan, progress: Progress) -> list[Row]:
    """What keeping positive weights alone gives: rows of table 2."""
    return table2(replace(plan, zoom=1.0), progress)


def pos_weight(plan: Plan, progress: Progress) -> list[Row]:
    """The weight of a positive label: 1, half of C - 1, C - 1."""
    dataset = plan.available((*FINE, "ilsvrc"))[0]
    samples, rows = plan.samples(dataset, "test", plan.ablation_images), list[Row]()
    most = len(samples.classes) - 1
    for weight in dict.fromkeys((1, max(1, most // 2), most)):
        net = network(plan, dataset, FitConfig(pos_weight=float(weight), seed=plan.seed), progress)
        how: Any = {"branches": BRANCHES, "clamps": (False, True)}
        how |= {"methods": paper_methods_for(net)[:2], "metrics": numbers_of(dataset)}
        made = measured(plan, f"pos-weight-{weight:g}", net, dataset, samples, progress, **how)
        rows += [row | {"pos_weight": weight} for row in made if row["branch"] == "sigmoid"]
    return [row for row in made if row["branch"] != "sigmoid"] + rows  # no weight shapes these


def sources(plan: Plan, progress: Progress) -> list[Row]:
    """Where the gain comes from: clamping, centring, sigmoid training, its penalty, images of nothing."""
    dataset, count = plan.available(FINE)[0], plan.ablation_images
    samples, rows = plan.samples(dataset, "test", count), list[Row]()
    nothing = plan.samples("pets", "test", count) if plan.has("pets") else None
    fits = {f"L2 {l2:g}": FitConfig(l2=l2, seed=plan.seed) for l2 in (0.1, 0.01, 0.001, 0.0001)}
    if dataset != "cars" and plan.has("cars"):  # no pets: the score is tried on these
        fits["L2 0.1, with negatives"] = FitConfig(l2=0.1, seed=plan.seed)
    for number, (said, config) in enumerate(fits.items()):
        negatives = plan.samples("cars", "train", plan.train_images) if "negatives" in said else None
        net = network(plan, dataset, config, progress, negatives)
        how: Any = {"methods": paper_methods_for(net)[:1], "clamps": (False, True), "metrics": LOCATING[:2]}
        made = measured(plan, f"sources-{number}", net, dataset, samples, progress, branches=BRANCHES, **how)
        known = {} if nothing is None else _knows(plan, net, samples, nothing, progress)
        for row in made:
            if row["branch"] in known:
                found = known[row["branch"]]
                row["auroc_nothing"] = found.value
                row["intervals"]["auroc_nothing"] = [found.low, found.high]
            rows += [row | {"fit": said}] if row["branch"] == "sigmoid" else [] if number else [row]
    return rows


@torch.no_grad()
def _knows(
    plan: Plan, net: DualBranch, samples: Samples, nothing: Samples, progress: Progress
) -> dict[str, Interval]:
    """How well the best class's score tells images of the classes from others: area under the ROC, percent,
    for the softmax head's probability and for the sigmoid branch's evidence."""
    found = dict[str, list[torch.Tensor]](softmax=[], sigmoid=[])
    for part in (samples, nothing):
        held = extract(
            net, part, FitConfig(), cache=plan.output / "features", progress=progress, labelled=False
        )
        for branch, scores in found.items():
            weight_bias = linear_weight(net.last_layer(branch))  # type: ignore[arg-type]
            if weight_bias is None or held.views[0].ndim != 2:
                return {}
            logits = held.views[0].to(weight_bias[0]) @ weight_bias[0].T + weight_bias[1]
            best = (logits.softmax(1) if branch == "softmax" else logits).amax(1).cpu()
            scores.append(torch.cat(all_gather(best)))
    return {branch: told_apart(*scores) for branch, scores in found.items()}


def told_apart(inside: torch.Tensor, outside: torch.Tensor) -> Interval:
    """Area under the ROC curve of scores (n,) and (m,), in percent: how many pairs are in order, ties half;
    with the interval over images of both, resampled a thousand times."""
    above = (inside[:, None] > outside).float() + (inside[:, None] == outside).float() / 2  # (n, m)
    generator, draws = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for count in above.shape:
        drawn = torch.randint(count, (1000, count), generator=generator)
        draws.append(torch.zeros(1000, count).scatter_add_(1, drawn, torch.ones_like(drawn).float()))
    shares = ((draws[0] @ above) * draws[1]).sum(1).double() / above.numel()
    ends = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64))
    value, low, high = (100 * float(x) for x in (above.double().mean(), *ends))
    return Interval(value, low, high)


def another(plan: Plan, datasets: Sequence[str], progress: Progress) -> list[Row]:
    """Fidelity and localisation of another classifier, on fewer images and none of them enlarged."""
    fewest = plan.fidelity_images and min(plan.fidelity_images, FEWEST)
    plan = replace(plan, localization_images=plan.ablation_images, fidelity_images=fewest, zoom=1.0)
    rows = list[Row]()
    for dataset in datasets:
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        if dataset in FINE:
            rows += confidence_rows(plan, net, dataset, progress)
        rows += locating_rows(plan, net, dataset, progress)
    return rows


def lite2(plan: Plan, progress: Progress) -> list[Row]:
    """A larger network of the same family, as a linear probe."""
    return another(replace(plan, backbone="embedded:lite2"), plan.available((*FINE, "pets")), progress)


def stages(plan: Plan, progress: Progress) -> list[Row]:
    """The same network with its last stages trained on the data, so that not all is a linear probe."""
    return another(replace(plan, classifier_recipe="stages"), plan.available(FINE)[:1], progress)


def vgg16(plan: Plan, progress: Progress) -> list[Row]:
    """The paper's own network with its published convolutions."""
    if world_size() > 1:
        raise DataError("vgg16 is trained in one process: start it without torchrun.")
    return another(replace(plan, backbone=VGG), plan.available(FINE)[:1], progress)


# What makes each table, and the data sets of which it takes those that are there.
TABLES: dict[str, tuple[Callable[[Plan, Progress], list[Row]], tuple[str, ...]]] = {
    "table1": (table1, FINE),
    "table2": (table2, DATASETS),
    "nwc": (nwc, DATASETS),
    "pos-weight": (pos_weight, (*FINE, "ilsvrc")),
    "sources": (sources, FINE),
    "lite2": (lite2, (*FINE, "pets")),
    "stages": (stages, FINE),
    "vgg16": (vgg16, FINE),
}


ALL = ("table1", "table2", "nwc", "pos-weight", "sources")  # what "all" makes, besides overhead and figures


BRANCHES: Any = ("softmax", "centred", "sigmoid")


LOCATING = ("max_box_acc_v2", "gt_known_loc", "top1_loc", "top1_cls")


FEWEST = 100  # of these, where confidence is measured
