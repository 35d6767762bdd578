"""The paper's tables with its own networks and published ImageNet weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sigcam.bench.networks import packaged_weights
from sigcam.bench.paper import INCEPTION, RESNET, VGG, BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.registry import DATASETS, FINE_DATASETS, MASKED_DATASETS
from sigcam.bench.tables import fidelity_rows, localization_rows, pos_weight_rows
from sigcam.core.distributed import world_size
from sigcam.core.errors import ConfigError
from sigcam.core.types import Progress

FIDELITY_IMAGES, QUICK_FIDELITY_IMAGES, QUICK_TRAIN_IMAGES = 100, 12, 300
# The paper's settings for its branch; the learning rate is that of the last layer (PROTOCOL 3). It did not
# train InceptionV3 on `cub` and `cars`: here with its rate on ImageNet, for as long as the others.
_FINE: dict[str, Any] = {"cub": {"epochs": 50, "decay_every": 15}, "cars": {"epochs": 10, "decay_every": 15}}
_ILSVRC: dict[str, Any] = {"epochs": 10, "decay_every": 3}
PAPER_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    (RESNET, "cub"): {"lr": 1e-4, "weight_decay": 1e-4, **_FINE["cub"]},
    (RESNET, "cars"): {"lr": 1e-4, "weight_decay": 1e-4, **_FINE["cars"]},
    (RESNET, "ilsvrc"): {"lr": 1e-4, "weight_decay": 1e-4, **_ILSVRC},
    (INCEPTION, "cub"): {"lr": 5e-3, "weight_decay": 5e-4, **_FINE["cub"]},
    (INCEPTION, "cars"): {"lr": 5e-3, "weight_decay": 5e-4, **_FINE["cars"]},
    (INCEPTION, "ilsvrc"): {"lr": 5e-3, "weight_decay": 5e-4, **_ILSVRC},
    (VGG, "cub"): {"lr": 5e-4, "weight_decay": 5e-4, **_FINE["cub"]},
    (VGG, "cars"): {"lr": 3e-2, "weight_decay": 5e-4, **_FINE["cars"]},
}


def vgg16(plan: Plan, progress: Progress) -> list[BenchRow]:
    """VGG-16 for CAM: its published convolutions, `conv6` and `fc` trained on the data."""
    return _rows(replace(plan, backbone=VGG), (*FINE_DATASETS, *MASKED_DATASETS), progress)


def resnet50(plan: Plan, progress: Progress) -> list[BenchRow]:
    """ResNet-50: a linear probe, its last stage trained, and on ImageNet its published head."""
    return _rows(replace(plan, backbone=RESNET), DATASETS, progress)


def inception_v3(plan: Plan, progress: Progress) -> list[BenchRow]:
    """InceptionV3 for gradient methods, in the same way."""
    return _rows(replace(plan, backbone=INCEPTION), DATASETS, progress)


def _rows(plan: Plan, datasets: Sequence[str], progress: Progress) -> list[BenchRow]:
    """Tables 1 and 2 on each data set, with each of its classifiers, then the weights of positive labels."""
    if world_size() > 1:
        raise ConfigError("the paper's networks are trained in one process: start it without torchrun.")
    plan, rows = _fewer(plan), list[BenchRow]()
    for dataset in plan.available(datasets):
        for each in _classifiers(plan, dataset):
            if dataset in FINE_DATASETS:
                rows += fidelity_rows(each, dataset, progress, curves=False)
            rows += localization_rows(each, dataset, progress)
        if settings := PAPER_SETTINGS.get((plan.backbone, dataset)):
            rows += [
                row
                for row in pos_weight_rows(each, dataset, progress, steps=settings)
                if "pos_weight" in row  # the others are those above
            ]
    about = packaged_weights(plan)
    return [row | about for row in rows]


def _fewer(plan: Plan) -> Plan:
    """Return the plan with fewer test images and nothing enlarged: a pass takes five times as long."""
    fidelity = plan.fidelity_images and min(plan.fidelity_images, FIDELITY_IMAGES)
    fidelity = QUICK_FIDELITY_IMAGES if plan.quick else fidelity
    return replace(plan, localization_images=plan.ablation_images, fidelity_images=fidelity, zoom=1.0)


def _classifiers(plan: Plan, dataset: str) -> list[Plan]:
    """Return a plan for each classifier of the data set, the last being the one that ablations use."""
    if plan.quick and dataset != "ilsvrc" and plan.train_images:
        plan = replace(plan, train_images=min(plan.train_images, QUICK_TRAIN_IMAGES))
    trained = replace(plan, classifier_recipe="last-stage")
    if plan.backbone == VGG:
        return [trained]
    return [plan, trained] if dataset in FINE_DATASETS else [plan]
