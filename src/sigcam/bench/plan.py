"""sigcam bench: every table of the paper on the data that are there, with controls and paired intervals.

An evaluation is written as soon as it is done, with a key over all that shapes it: a run that was killed goes
on from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sigcam.bench.paper import Row
from sigcam.core.distributed import barrier, rank
from sigcam.core.errors import DataError
from sigcam.core.files import hash_of, write_text_atomic
from sigcam.core.types import Progress
from sigcam.data.labels import check_disjoint, match_classes
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.evaluation.checkpoint import evaluation_facts
from sigcam.evaluation.evaluator import evaluate
from sigcam.evaluation.result import Result
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.bootstrap import Interval, paired
from sigcam.network.dual import DualBranch
from sigcam.network.opening import SHIPPED

BASELINE = ("softmax", False)
CONTROL = ("softmax", True)  # what clamped maps of other heads are compared with besides
FEWER = 500  # images of other classifiers and other fits than the paper's
FINE = ("cub", "cars")  # the data sets of fine-grained classes, in the order of choice
MASKED_DATASETS = ("openimages", "pets")  # those with masks
DATASETS = (*FINE, "ilsvrc", *MASKED_DATASETS)
VGG = "wsol:vgg16-cam"


@dataclass(frozen=True)
class Plan:
    """What to run on, and with which classifier.

    Args:
        data: folder with the data sets, each under its name: cub, cars, ilsvrc, openimages, pets.
        output: tables, figures, and the work so far.
        fidelity_images: number of test images for confidence metrics, drawn with the seed; None for all.
        localization_images: number of test images for boxes and masks; None for all.
        zoom: enlargement of the images in the zoomed rows; 1 leaves these rows out.
        classifiers: folder with DATASET/classifier.safetensors files, trained beforehand.
        classifier_recipe: how a classifier is trained on a data set that has none: "probe" trains the last
            layer, "stages" the last stages too.
        train_images: number of training images for classifiers and branches; None for all.
    """

    data: Path
    output: Path
    fidelity_images: int | None = 300
    localization_images: int | None = None
    zoom: float = 2.0
    backbone: str = "embedded"
    classifiers: Path | None = None
    classifier_recipe: Literal["probe", "stages"] = "probe"
    train_images: int | None = None
    device: str = "cpu"
    batch_size: int = 16
    workers: int = 0
    seed: int = 0
    skip_unreadable: bool = False

    def samples(self, dataset: str, split: str, count: int | None) -> Samples:
        """All of a split, or as many, drawn with the seed."""
        found = open_dataset(self.data / dataset, split=split)
        if split == "test" and self.uses_shipped_branch(dataset):
            found = _unseen(found, self.data / dataset)
        if count is None or count >= len(found):
            return found
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(found), generator=generator)[:count].sort().values
        return Samples(tuple(found[i] for i in chosen.tolist()), found.classes)

    def train_samples(self, dataset: str, count: int | None) -> Samples:
        """What classifiers and branches learn from: none of the images that they are measured on."""
        train, place = self.samples(dataset, "train", count), self.data / dataset
        why = f"are in both splits of {place}: numbers of images that were learned from mean nothing."
        check_disjoint(
            train, self.samples(dataset, "test", None), f"{why} `sigcam inspect` shows what is there."
        )
        return train

    @property
    def ablation_images(self) -> int | None:
        """How many images other classifiers and other fits are measured on."""
        return self.localization_images or (None if self.fidelity_images is None else FEWER)

    @property
    def slug(self) -> str:
        """The classifier's name in file names."""
        short = self.backbone.rpartition(":")[2] if self.backbone.count(":") < 2 else "file"
        return short if self.classifier_recipe == "probe" else f"{short}-{self.classifier_recipe}"

    def given_classifier(self, dataset: str) -> Path | None:
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

    def uses_shipped_branch(self, dataset: str) -> bool:
        """Whether the classifier is the one that comes with a branch, fitted on images of the data set."""
        return dataset == "ilsvrc" and self.backbone == "embedded" and not self.given_classifier(dataset)

    def classifier_kind(self, dataset: str) -> str:
        """What the classifier of a data set is, in words."""
        if self.given_classifier(dataset):
            return "trained before"
        if dataset == "ilsvrc":
            return "as published"
        words = {"probe": "a linear probe", "stages": "last stages trained"}
        return "conv6 and fc trained" if self.backbone == VGG else words[self.classifier_recipe]

    def has(self, dataset: str) -> bool:
        """Whether the data folder contains the data set."""
        return (self.data / dataset).is_dir()

    def available(self, datasets: Sequence[str]) -> list[str]:
        """The data sets that the data folder contains; DataError if there are none."""
        found = [name for name in datasets if self.has(name)]
        if not found:
            raise DataError(
                f"{self.data} holds none of {', '.join(datasets)}: put a data set there under its name."
            )
        return found


# -------------------------------------------------------------------------------------------- evaluations


def measured(
    plan: Plan, name: str, net: DualBranch, dataset: str, samples: Samples, progress: Progress, **how: Any
) -> list[Row]:
    """A row for each method and branch, clamped and not, with intervals and the differences from the softmax
    head's signed maps (`delta`) and, of clamped ones, from its clamped maps (`beside`). They come from the
    output folder if this very evaluation was done before."""
    samples = match_classes(samples, net.classes, net.class_names)
    made_of = evaluation_facts(net, samples, net.transform), how, plan.batch_size, CONTROL
    path = plan.output / "parts" / f"{name}-{hash_of(made_of)[:12]}.json"
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
    kind = {"backbone": plan.backbone, "classifier": plan.classifier_kind(dataset)}
    rows = [{**row, **kind} for row in table_rows(result, dataset, float(how.get("zoom", 1.0)))]
    if rank() == 0:
        write_text_atomic(path, json.dumps(rows, indent=1) + "\n")
    barrier()
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


def table_rows(result: Result, dataset: str, zoom: float) -> list[Row]:
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
                    control = result.metrics.get(key._replace(branch=base[0], clamp=base[1]))
                    if control is not None and (branch, clamp) != base and (name == "delta" or clamp):
                        row[name] |= _difference(metric, control, key.label)
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
