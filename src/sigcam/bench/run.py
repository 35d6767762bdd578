"""sigcam bench: every table of the paper on the data that are there, with controls and paired intervals.

An evaluation is written as soon as it is done, with a key over all that shapes it: a run that was killed goes
on from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sigcam.bench.paper import METHODS, PUBLISHED, ROWS
from sigcam.bootstrap import Interval, paired
from sigcam.config import FitConfig
from sigcam.data import Samples, open_dataset
from sigcam.dist import rank, wait
from sigcam.dual import DualBranch, attach, fingerprint, load
from sigcam.errors import DataError
from sigcam.evaluating import evaluate
from sigcam.features import Progress
from sigcam.fitting import fit
from sigcam.labels import match_classes
from sigcam.manifest import data_fingerprint, write_text
from sigcam.models import Classifier, load_classifier, save_classifier
from sigcam.opening import SHIPPED
from sigcam.result import Result
from sigcam.training import train_probe

Row = dict[str, Any]
BASELINE = ("softmax", False)
LOCATING = ("max_box_acc_v2", "gt_known_loc", "top1_loc", "top1_cls")
FIDELITY = ("average_drop", "increase_in_confidence", "mean_map")
BRANCHES: Any = ("softmax", "centred", "sigmoid")


@dataclass(frozen=True)
class Plan:
    """What to run on.

    Args:
        data: folder with the data sets, each under its name: cub, cars, ilsvrc, pets.
        output: tables, figures, and the work so far.
        fidelity: how many images confidence is measured on, drawn with the seed; None for all.
        locating: the same for boxes and masks.
        zoom: how much larger the images of the finer rows are; 1 leaves these rows out.
    """

    data: Path
    output: Path
    fidelity: int | None = 300
    locating: int | None = None
    zoom: float = 2.0
    backbone: str = "embedded"
    device: str = "cpu"
    batch_size: int = 16
    workers: int = 0
    seed: int = 0

    def samples(self, dataset: str, split: str, count: int | None) -> Samples:
        """All of a split, or as many, drawn with the seed."""
        found = open_dataset(self.data / dataset, split=split)
        if count is None or count >= len(found):
            return found
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(found), generator=generator)[:count].sort().values
        return Samples(tuple(found[i] for i in chosen.tolist()), found.classes)

    def has(self, dataset: str) -> bool:
        """Whether the data set is there."""
        return (self.data / dataset).is_dir()


# ---------------------------------------------------------------------------------- a classifier and a branch


def network(plan: Plan, dataset: str, config: FitConfig, progress: Progress) -> DualBranch:
    """The classifier of a data set with a fitted branch: the ImageNet head with the branch that comes with
    it, else a linear probe of the training images. Both are kept in the output folder."""
    if dataset == "ilsvrc" and plan.backbone == "embedded":
        classifier = load_classifier("embedded", device=plan.device)
        return _prepared(load(SHIPPED, _last(classifier)), classifier)
    train = plan.samples(dataset, "train", None)
    made_of = _key((plan.backbone, plan.seed, data_fingerprint(train)))[:8]
    home = plan.output / "models" / f"{dataset}-{made_of}"
    weights = home / "classifier.safetensors"
    if not weights.is_file() and rank() == 0:
        classifier = load_classifier(plan.backbone, num_classes=len(train.classes), device=plan.device)
        _last(classifier)
        train_probe(classifier, train, seed=plan.seed, workers=plan.workers, progress=progress)
        home.mkdir(parents=True, exist_ok=True)
        save_classifier(weights, classifier.model, spec=plan.backbone, classes=train.classes)
    wait()
    count = len(train.classes)
    classifier = load_classifier(plan.backbone, weights=weights, num_classes=count, device=plan.device)
    file = home / f"branch-{_key(asdict(config))[:8]}.safetensors"
    if not file.is_file():
        net = _prepared(attach(_last(classifier)), classifier)
        fit(net, train, config, cache=plan.output / "features", progress=progress)
        if rank() == 0:
            net.save(file)
        wait()
    return _prepared(load(file, _last(classifier)), classifier)


def _last(classifier: Classifier) -> torch.nn.Module:
    """The model in the memory layout that is fastest."""
    return classifier.model.to(memory_format=torch.channels_last)


def _prepared(net: DualBranch, classifier: Classifier) -> DualBranch:
    net.transform = classifier.transform
    net.class_names = net.class_names or classifier.classes
    return net


# -------------------------------------------------------------------------------------------- evaluations


def measured(
    plan: Plan, name: str, net: DualBranch, dataset: str, samples: Samples, progress: Progress, **how: Any
) -> list[Row]:
    """A row for each method and branch, clamped and not, with intervals and the difference from the softmax
    head's signed maps; from the output folder, if this very evaluation was done before."""
    samples = match_classes(
        _unseen(samples) if dataset == "ilsvrc" else samples, net.classes, net.class_names
    )
    state = {key: _key(tensor.double().sum().item()) for key, tensor in net.state_dict().items()}
    about = (name, fingerprint(net.origin), state, data_fingerprint(samples), how, plan.batch_size)
    path = plan.output / "parts" / f"{name}-{_key(about)[:12]}.json"
    if path.is_file():
        rows: list[Row] = json.loads(path.read_text())
        return rows
    result = evaluate(
        net,
        samples,
        batch_size=plan.batch_size,
        workers=plan.workers,
        intervals=True,
        progress=lambda _, done, total: progress(name, done, total),
        **how,
    )
    rows = rows_of(result, dataset, plan.backbone, float(how.get("zoom", 1.0)))
    if rank() == 0:
        write_text(path, json.dumps(rows, indent=1) + "\n")
    wait()
    return rows


def _unseen(samples: Samples) -> Samples:
    """Without the images that the branch of the embedded classifier was fitted on."""
    seen = {Path(name).stem for name in json.loads(SHIPPED.with_suffix(".json").read_text())["ids"]}
    kept = tuple(sample for sample in samples if Path(sample.id).stem not in seen)
    return Samples(kept, samples.classes)


def rows_of(result: Result, dataset: str, backbone: str, zoom: float) -> list[Row]:
    """The result's numbers, one row per way to draw maps."""
    found = list[Row]()
    cells = list(dict.fromkeys(key[:3] for key in result.metrics if key[0] is not None))
    for cell in cells:
        method, branch, clamp = cell
        row: Row = {
            "dataset": dataset,
            "backbone": backbone,
            "method": method,
            "branch": branch,
            "clamp": clamp,
            "zoom": zoom,
            "images": result.about["images"],
            "intervals": {},
            "delta": {},
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
            base = result.metrics.get((method, *BASELINE, key[3]))
            if key[:3] != cell or base is None or (branch, clamp) == BASELINE:
                continue
            difference = paired(metric, base)
            if isinstance(difference, Interval):
                row["delta"][key[3]] = [difference.value, difference.low, difference.high]
            elif key[3] in difference:
                each = difference[key[3]]
                row["delta"][key[3]] = [each.value, each.low, each.high]
        found.append(row)
    return found


def _name(number: Row) -> str:
    """A number's name: with its threshold unless that is the oracle's, with its scorer unless the softmax."""
    fixed = (
        f"_at_{number['threshold']:g}" if number["threshold_from"] == "fixed" and number["threshold"] else ""
    )
    fixed = fixed or ("_at_0.2" if number["threshold_from"] == "fixed" else "")
    scorer = f":{number['scorer']}" if number["scorer"] not in (None, "softmax") else ""
    return f"{number['metric']}{fixed}{scorer}"


def _key(value: Any) -> str:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


# ------------------------------------------------------------------------------------------------- tables


def table1(plan: Plan, progress: Progress) -> list[Row]:
    """Average drop and increase in confidence on fine-grained data: five methods, two scorers."""
    rows = list[Row]()
    for dataset in there(plan, ("cub", "cars")):
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        samples = plan.samples(dataset, "test", plan.fidelity)
        rows += measured(
            plan,
            f"table1-{dataset}",
            net,
            dataset,
            samples,
            progress,
            methods=METHODS,
            branches=BRANCHES,
            clamps=(False, True),
            metrics=FIDELITY,
            scorers=("softmax", "branch"),
        )
    return rows


def table2(plan: Plan, progress: Progress) -> list[Row]:
    """Localisation by boxes and by pixels, at the network's own size and enlarged."""
    rows = list[Row]()
    for dataset in there(plan, ("cub", "cars", "ilsvrc", "pets")):
        net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
        samples = plan.samples(dataset, "test", plan.locating)
        metrics = ("pxap", "top1_cls") if dataset == "pets" else LOCATING
        for zoom in dict.fromkeys((1.0, plan.zoom)):
            how: Any = {"methods": METHODS[:2] if zoom == 1 else METHODS[:1], "branches": BRANCHES}
            how |= {"clamps": (False, True), "metrics": metrics, "zoom": zoom}
            rows += measured(plan, f"table2-{dataset}-x{zoom:g}", net, dataset, samples, progress, **how)
    return rows


def nwc(plan: Plan, progress: Progress) -> list[Row]:
    """What keeping positive weights alone gives: rows of table 2 on the first data set."""
    first = there(plan, ("cub", "cars", "ilsvrc", "pets"))[0]
    return [row for row in table2(plan, progress) if row["dataset"] == first and row["zoom"] == 1]


def pos_weight(plan: Plan, progress: Progress) -> list[Row]:
    """The weight of a positive label: 1, half of C - 1, C - 1."""
    dataset = there(plan, ("cub", "cars"))[0]
    samples, rows = plan.samples(dataset, "test", plan.locating), list[Row]()
    most = len(samples.classes) - 1
    for weight in (1.0, most / 2, float(most)):
        net = network(plan, dataset, FitConfig(pos_weight=weight, seed=plan.seed), progress)
        how: Any = {"methods": METHODS[:2], "branches": ("softmax", "sigmoid"), "clamps": (False, True)}
        made = measured(
            plan, f"pos-weight-{weight:g}", net, dataset, samples, progress, metrics=LOCATING, **how
        )
        rows += [row | {"pos_weight": weight} for row in made if row["branch"] == "sigmoid" or weight == most]
    return rows


def there(plan: Plan, wanted: Sequence[str]) -> list[str]:
    """Those of the data sets that are there, at least one."""
    found = [name for name in wanted if plan.has(name)]
    if not found:
        raise DataError(
            f"{plan.data} holds none of {', '.join(wanted)}: put a data set there under its name."
        )
    return found


TABLES: dict[str, Callable[[Plan, Progress], list[Row]]] = {
    "table1": table1,
    "table2": table2,
    "nwc": nwc,
    "pos-weight": pos_weight,
}


NEEDED: dict[str, tuple[str, ...]] = {  # a table is made of those of its data sets that are there
    "table1": ("cub", "cars"),
    "table2": ("cub", "cars", "ilsvrc", "pets"),
    "nwc": ("cub", "cars", "ilsvrc", "pets"),
    "pos-weight": ("cub", "cars"),
}


def row_name(row: Row) -> str:
    """What the row is called in a table."""
    names = {kind: name for name, kind in ROWS.items()}
    name = names.get((row["branch"], row["clamp"]), f"{row['branch']}, {row['clamp']}")
    return name + (f", positive weight {row['pos_weight']:g}" if "pos_weight" in row else "")


BACKBONES = {"vgg16": "VGG-16", "resnet50": "ResNet-50", "inception_v3": "InceptionV3"}


def published(row: Row, table: str, metric: str) -> float | None:
    """The paper's number for the same data set, backbone, method and row; it scored the confidence of its
    own maps by its own branch."""
    kind = {("softmax", False): "baseline", ("sigmoid", True): "ours", ("sigmoid", False): "ours_no_nwc"}.get(
        (row["branch"], row["clamp"])
    )
    if table == "nwc" and kind == "ours":
        kind = "ours_nwc"
    if table == "pos-weight" and kind == "ours":
        kind = f"ours_{row['pos_weight']:g}to1"
    name, _, scorer = metric.partition(":")
    fair = table != "table1" or kind == "baseline" or bool(scorer)
    backbone = BACKBONES.get(row["backbone"].partition(":")[2].removesuffix("-cam"))
    wanted = (table, backbone, row["method"], kind, row["dataset"], name)
    found = [
        c.value for c in PUBLISHED if (c.table, c.backbone, c.method, c.row, c.dataset, c.metric) == wanted
    ]
    return found[0] if found and fair and row.get("zoom", 1) == 1 else None
