"""sigcam bench: every table of the paper on the data that are there, with controls and paired intervals.

An evaluation is written as soon as it is done, with a key over all that shapes it: a run that was killed goes
on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sigcam.bench.networks import key_of, network
from sigcam.bench.paper import FIDELITY, FIRST, METHODS, Row
from sigcam.bench.weights import VGG
from sigcam.core.config import FitConfig
from sigcam.core.distributed import gathered, rank, wait, world
from sigcam.core.errors import DataError
from sigcam.core.manifest import write_text
from sigcam.data.labels import match_classes, refuse_shared
from sigcam.data.sample import Samples, open_dataset
from sigcam.evaluation.checkpoint import shaping
from sigcam.evaluation.evaluator import evaluate
from sigcam.evaluation.result import Result
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.bootstrap import Interval, paired
from sigcam.network.dual import DualBranch, gap_weight
from sigcam.network.opening import SHIPPED
from sigcam.training.features import Progress, extract

BASELINE = ("softmax", False)
CONTROL = ("softmax", True)  # what clamped maps of other heads are compared with besides
FEWER = 500  # images of other classifiers and other fits than the paper's
FEWEST = 100  # of these, where confidence is measured
LOCATING = ("max_box_acc_v2", "gt_known_loc", "top1_loc", "top1_cls")
BRANCHES: Any = ("softmax", "centred", "sigmoid")
FINE = ("cub", "cars")  # the data sets of fine-grained classes, in the order of choice
MASKED = ("openimages", "pets")  # those with masks
DATASETS = (*FINE, "ilsvrc", *MASKED)


@dataclass(frozen=True)
class Plan:
    """What to run on, and with which classifier.

    Args:
        data: folder with the data sets, each under its name: cub, cars, ilsvrc, openimages, pets.
        output: tables, figures, and the work so far.
        fidelity: how many images confidence is measured on, drawn with the seed; None for all.
        locating: the same for boxes and masks.
        zoom: how much larger the images of the finer rows are; 1 leaves these rows out.
        classifiers: folder with NAME/classifier.safetensors for each data set, trained before.
        learns: what of the classifier is trained on the data, if it is not: a linear probe, or its last
            stages too.
        learning: how many images classifiers and branches learn from; None for all.
    """

    data: Path
    output: Path
    fidelity: int | None = 300
    locating: int | None = None
    zoom: float = 2.0
    backbone: str = "embedded"
    classifiers: Path | None = None
    learns: Literal["probe", "stages"] = "probe"
    learning: int | None = None
    device: str = "cpu"
    batch_size: int = 16
    workers: int = 0
    seed: int = 0
    skip_unreadable: bool = False

    def samples(self, dataset: str, split: str, count: int | None) -> Samples:
        """All of a split, or as many, drawn with the seed."""
        found = open_dataset(self.data / dataset, split=split)
        if split == "test" and self.ships(dataset):
            found = _unseen(found, self.data / dataset)
        if count is None or count >= len(found):
            return found
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(found), generator=generator)[:count].sort().values
        return Samples(tuple(found[i] for i in chosen.tolist()), found.classes)

    def training(self, dataset: str, count: int | None) -> Samples:
        """What classifiers and branches learn from: none of the images that they are measured on."""
        train, place = self.samples(dataset, "train", count), self.data / dataset
        why = f"are in both splits of {place}: numbers of images that were learned from mean nothing."
        refuse_shared(
            train, self.samples(dataset, "test", None), f"{why} `sigcam inspect` shows what is there."
        )
        return train

    @property
    def fewer(self) -> int | None:
        """How many images other classifiers and other fits are measured on."""
        return self.locating or (None if self.fidelity is None else FEWER)

    @property
    def called(self) -> str:
        """The classifier's name in file names."""
        short = self.backbone.rpartition(":")[2] if self.backbone.count(":") < 2 else "file"
        return short if self.learns == "probe" else f"{short}-{self.learns}"

    def given(self, dataset: str) -> Path | None:
        """The data set's classifier, if it was trained before. On ImageNet it may be a published one."""
        if self.classifiers is None:
            return None
        path = self.classifiers / dataset / "classifier.safetensors"
        if path.is_file():
            return path
        if dataset == "ilsvrc":
            return None
        how = f"`sigcam train-classifier --model {self.backbone} --data {self.data / dataset}"
        raise DataError(f"{path} does not exist: {how} --output {path.parent}` makes it.")

    def ships(self, dataset: str) -> bool:
        """Whether the classifier is the one that comes with a branch, fitted on images of the data set."""
        return dataset == "ilsvrc" and self.backbone == "embedded" and not self.given(dataset)

    def kind(self, dataset: str) -> str:
        """What the classifier of a data set is, in words."""
        if self.given(dataset):
            return "trained before"
        if dataset == "ilsvrc":
            return "as published"
        words = {"probe": "a linear probe", "stages": "last stages trained"}
        return "conv6 and fc trained" if self.backbone == VGG else words[self.learns]

    def has(self, dataset: str) -> bool:
        """Whether the data set is there."""
        return (self.data / dataset).is_dir()


# -------------------------------------------------------------------------------------------- evaluations


def measured(
    plan: Plan, name: str, net: DualBranch, dataset: str, samples: Samples, progress: Progress, **how: Any
) -> list[Row]:
    """A row for each method and branch, clamped and not, with intervals and the differences from the softmax
    head's signed maps (`delta`) and, of clamped ones, from its clamped maps (`beside`). They come from the
    output folder if this very evaluation was done before."""
    samples = match_classes(samples, net.classes, net.class_names)
    made_of = shaping(net, samples, net.transform), how, plan.batch_size, CONTROL
    path = plan.output / "parts" / f"{name}-{key_of(made_of)[:12]}.json"
    with suppress(OSError, ValueError):  # not there, or damaged: it is made anew
        kept: list[Row] = json.loads(path.read_text())
        return kept
    result = evaluate(
        net,
        samples,
        batch_size=plan.batch_size,
        workers=plan.workers,
        skip_unreadable=plan.skip_unreadable,
        intervals=True,
        unfinished=path.with_suffix(".unfinished"),
        progress=lambda _, done, total: progress(name, done, total),
        **how,
    )
    kind = {"backbone": plan.backbone, "classifier": plan.kind(dataset)}
    rows = [{**row, **kind} for row in rows_of(result, dataset, float(how.get("zoom", 1.0)))]
    if rank() == 0:
        write_text(path, json.dumps(rows, indent=1) + "\n")
    wait()
    return rows


def _unseen(samples: Samples, place: Path) -> Samples:
    """Without the images that the branch of the embedded classifier was fitted on."""
    seen = {Path(name).stem for name in json.loads(SHIPPED.with_suffix(".json").read_text())["ids"]}
    kept = tuple(sample for sample in samples if Path(sample.id).stem not in seen)
    if not kept:
        raise DataError(
            f"the branch that comes with sigcam was fitted on all {len(samples)} images of {place}."
        )
    return Samples(kept, samples.classes)


def rows_of(result: Result, dataset: str, zoom: float) -> list[Row]:
    """The result's numbers, one row per way to draw maps."""
    found = list[Row]()
    cells = list(dict.fromkeys(key[:3] for key in result.metrics if key[0] is not None))
    for cell in cells:
        method, branch, clamp = cell
        row: Row = {
            "dataset": dataset,
            "method": method,
            "branch": branch,
            "clamp": clamp,
            "zoom": zoom,
            **{name: result.about[name] for name in ("images", "data_fingerprint", "model_fingerprint")},
            "intervals": {},
            "delta": {},
            "beside": {},
        }
        for number in result.rows:
            mine = (number["method"], number["branch"], number["clamp"]) in (cell, (None, None, None))
            if not mine or number["threshold_from"] == "transferred":
                continue
            name = _name(number)
            row[name] = number["value"]
            if number["low"] is not None:
                row["intervals"][name] = [number["low"], number["high"]]
        for key, metric in result.metrics.items():
            if key[:3] == cell:
                for name, base in (("delta", BASELINE), ("beside", CONTROL)):
                    control = result.metrics.get((method, *base, key[3]))
                    if control is not None and (branch, clamp) != base and (name == "delta" or clamp):
                        row[name] |= _difference(metric, control, key[3])
        found.append(row)
    return found


def _difference(metric: ImageMetric, base: ImageMetric, name: str) -> dict[str, list[float]]:
    """The difference on the same images and the ends of its interval, under the metric's name."""
    found = paired(metric, base)
    one = found if isinstance(found, Interval) else found.get(name)
    return {} if one is None else {name: [one.value, one.low, one.high]}


def _name(number: Row) -> str:
    """A number's name: with its threshold unless that is the oracle's, with its scorer unless the softmax."""
    fixed = (
        f"_at_{number['threshold']:g}" if number["threshold_from"] == "fixed" and number["threshold"] else ""
    )
    fixed = fixed or ("_at_0.2" if number["threshold_from"] == "fixed" else "")
    scorer = f":{number['scorer']}" if number["scorer"] not in (None, "softmax") else ""
    return f"{number['metric']}{fixed}{scorer}"


# ------------------------------------------------------------------------------------------------- tables


def table1(plan: Plan, progress: Progress) -> list[Row]:
    """Average drop and increase in confidence on fine-grained data: five methods, two scorers."""
    rows = list[Row]()
    for dataset in there(plan, FINE):
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        rows += confidence_rows(plan, net, dataset, progress)
    return rows


def confidence_rows(plan: Plan, net: DualBranch, dataset: str, progress: Progress) -> list[Row]:
    """What masks keep of the confidence."""
    how: Any = {"branches": BRANCHES, "clamps": (False, True), "metrics": FIDELITY}
    how |= {"methods": methods_of(net)}
    samples = plan.samples(dataset, "test", plan.fidelity)
    name = f"confidence-{plan.called}-{dataset}"
    return measured(plan, name, net, dataset, samples, progress, scorers=("softmax", "branch"), **how)


def table2(plan: Plan, progress: Progress) -> list[Row]:
    """Localisation by boxes and by pixels, at the network's own size and enlarged."""
    rows = list[Row]()
    for dataset in there(plan, DATASETS):
        _need_places(plan, dataset)
    for dataset in there(plan, DATASETS):
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        rows += locating_rows(plan, net, dataset, progress)
    return rows


def _need_places(plan: Plan, dataset: str) -> None:
    """DataError, before any work, if nothing says where the data set's objects are."""
    what, field = ("masks", "open_mask") if dataset in MASKED else ("boxes", "boxes")
    if all(getattr(sample, field) is None for sample in plan.samples(dataset, "test", None)):
        raise DataError(f"{plan.data / dataset} has no {what} to measure maps by: add them, or leave it out.")


def locating_rows(plan: Plan, net: DualBranch, dataset: str, progress: Progress) -> list[Row]:
    """How well maps locate objects."""
    rows = list[Row]()
    methods = methods_of(net)
    for zoom in dict.fromkeys((1.0, plan.zoom)):
        samples = plan.samples(dataset, "test", plan.locating)
        how: Any = {"methods": methods[:2] if zoom == 1 else methods[:1], "branches": BRANCHES}
        how |= {"clamps": (False, True), "metrics": numbers_of(dataset), "zoom": zoom}
        name = f"locating-{plan.called}-{dataset}-x{zoom:g}"
        made = measured(plan, name, net, dataset, samples, progress, **how)
        rows += [row | {"shift": shift_of(net)} for row in made]
    return rows


def shift_of(net: DualBranch) -> float | None:
    """How long the mean over classes of the softmax head's rows is, in percent of a row: the part of the
    head that no probability depends on."""
    found = gap_weight(net.last_layer("softmax"))
    if found is None:
        return None
    weight = found[0].detach()
    return float(100 * weight.mean(0).norm() / weight.norm(dim=1).mean())


def methods_of(net: DualBranch) -> tuple[str, ...]:
    """The paper's methods; vanilla CAM where the head is a global average and a linear layer."""
    return METHODS if net.linear else METHODS[1:]


def numbers_of(dataset: str) -> tuple[str, ...]:
    """What localisation is measured by: pixels where there are masks, else boxes."""
    if dataset in MASKED:
        return "pxap", "top1_cls"
    return (*LOCATING, *FIRST) if dataset == "ilsvrc" else LOCATING


def nwc(plan: Plan, progress: Progress) -> list[Row]:
    """What keeping positive weights alone gives: rows of table 2."""
    return table2(replace(plan, zoom=1.0), progress)


def pos_weight(plan: Plan, progress: Progress) -> list[Row]:
    """The weight of a positive label: 1, half of C - 1, C - 1."""
    dataset = there(plan, (*FINE, "ilsvrc"))[0]
    samples, rows = plan.samples(dataset, "test", plan.fewer), list[Row]()
    most = len(samples.classes) - 1
    for weight in dict.fromkeys((1, max(1, most // 2), most)):
        net = network(plan, dataset, FitConfig(pos_weight=float(weight), seed=plan.seed), progress)
        how: Any = {"branches": BRANCHES, "clamps": (False, True)}
        how |= {"methods": methods_of(net)[:2], "metrics": numbers_of(dataset)}
        made = measured(plan, f"pos-weight-{weight:g}", net, dataset, samples, progress, **how)
        rows += [row | {"pos_weight": weight} for row in made if row["branch"] == "sigmoid"]
    return [row for row in made if row["branch"] != "sigmoid"] + rows  # no weight shapes these


def sources(plan: Plan, progress: Progress) -> list[Row]:
    """Where the gain comes from: clamping, centring, sigmoid training, its penalty, images of nothing."""
    dataset, count = there(plan, FINE)[0], plan.fewer
    samples, rows = plan.samples(dataset, "test", count), list[Row]()
    nothing = plan.samples("pets", "test", count) if plan.has("pets") else None
    fits = {f"L2 {l2:g}": FitConfig(l2=l2, seed=plan.seed) for l2 in (0.1, 0.01, 0.001, 0.0001)}
    if dataset != "cars" and plan.has("cars"):  # no pets: the score is tried on these
        fits["L2 0.1, with negatives"] = FitConfig(l2=0.1, seed=plan.seed)
    for number, (said, config) in enumerate(fits.items()):
        negatives = plan.samples("cars", "train", plan.learning) if "negatives" in said else None
        net = network(plan, dataset, config, progress, negatives)
        how: Any = {"methods": methods_of(net)[:1], "clamps": (False, True), "metrics": LOCATING[:2]}
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
            weight_bias = gap_weight(net.last_layer(branch))  # type: ignore[arg-type]
            if weight_bias is None or held.views[0].ndim != 2:
                return {}
            logits = held.views[0].to(weight_bias[0]) @ weight_bias[0].T + weight_bias[1]
            best = (logits.softmax(1) if branch == "softmax" else logits).amax(1).cpu()
            scores.append(torch.cat(gathered(best)))
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
    fewest = plan.fidelity and min(plan.fidelity, FEWEST)
    plan, rows = replace(plan, locating=plan.fewer, fidelity=fewest, zoom=1.0), list[Row]()
    for dataset in datasets:
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        if dataset in FINE:
            rows += confidence_rows(plan, net, dataset, progress)
        rows += locating_rows(plan, net, dataset, progress)
    return rows


def lite2(plan: Plan, progress: Progress) -> list[Row]:
    """A larger network of the same family, as a linear probe."""
    return another(replace(plan, backbone="embedded:lite2"), there(plan, (*FINE, "pets")), progress)


def stages(plan: Plan, progress: Progress) -> list[Row]:
    """The same network with its last stages trained on the data, so that not all is a linear probe."""
    return another(replace(plan, learns="stages"), there(plan, FINE)[:1], progress)


def vgg16(plan: Plan, progress: Progress) -> list[Row]:
    """The paper's own network with its published convolutions."""
    if world() > 1:
        raise DataError("vgg16 is trained in one process: start it without torchrun.")
    return another(replace(plan, backbone=VGG), there(plan, FINE)[:1], progress)


def there(plan: Plan, wanted: Sequence[str]) -> list[str]:
    """Those of the data sets that are there, at least one."""
    found = [name for name in wanted if plan.has(name)]
    if not found:
        raise DataError(
            f"{plan.data} holds none of {', '.join(wanted)}: put a data set there under its name."
        )
    return found


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
