"""The classifiers under test: given, or trained once and kept (a linear probe, the last stages of a network,
the paper's VGG-16 on its published convolutions); and the branch fitted beside each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sigcam.bench.plan import VGG, Plan
from sigcam.bench.weights import open_vgg, pooled_cells
from sigcam.core.config import FitConfig, TrainConfig
from sigcam.core.distributed import barrier, rank, single_process, world_size
from sigcam.core.errors import DataError, SigcamError
from sigcam.core.files import hash_of
from sigcam.core.types import Progress
from sigcam.data.fingerprint import data_fingerprint, files_fingerprint
from sigcam.data.labels import match_classes
from sigcam.data.sample import Samples
from sigcam.evaluation.checkpoint import data_facts
from sigcam.models.classifier import Classifier, load_classifier, save_classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach
from sigcam.network.branch_file import load
from sigcam.network.dual import DualBranch
from sigcam.network.opening import SHIPPED
from sigcam.training.branch import fit
from sigcam.training.classifier import train_classifier
from sigcam.training.features import Features, TrainingData, extract
from sigcam.training.linear_probe import train_probe

FEW_TRAINED = 1500  # images that VGG-16 learns from: a pass of it takes seven times as long as the others'
STAGES = TrainConfig(epochs=2, lr=3e-3, head_lr_ratio=1.0, decay_every=3, freeze_until="blocks.5")


def network(
    plan: Plan, dataset: str, config: FitConfig, progress: Progress, negatives: Samples | None = None
) -> DualBranch:
    """The classifier of a data set with a fitted branch, which is kept in the output folder; the embedded
    classifier comes with one for ImageNet."""
    given = plan.given_classifier(dataset)
    if plan.uses_shipped_branch(dataset) and config == FitConfig(seed=plan.seed):
        classifier = load_classifier("embedded", device=plan.device)
        return load(SHIPPED, _last(classifier), **_known(classifier))
    if given or dataset == "ilsvrc":  # a trained one, or one with its published head
        train = plan.train_samples(dataset, plan.train_images)
        classifier = load_classifier(plan.backbone, weights=given, device=plan.device)
        name = hash_of((_made_of(plan, train, classifier), fingerprint(classifier.model)))[:8]
        home = plan.output / "models" / f"{dataset}-given-{name}"
    else:
        classifier, train, home = _trained(plan, dataset, progress)
    without = [] if negatives is None else [data_fingerprint(negatives), files_fingerprint(negatives)]
    file = home / f"branch-{hash_of([asdict(config), *without])[:8]}.safetensors"
    if not file.is_file():
        net = attach(_last(classifier), **_known(classifier))
        data: TrainingData | Features = match_classes(train, net.classes, net.class_names)
        cache = plan.output / "features"
        if plan.backbone == VGG and not given:
            data = pooled_cells(classifier, train, cache, progress)
        elif (
            world_size() > 1
        ):  # each runs its share of the images, then one solves, as if it had run them all
            extract(net, data, config, cache=cache, progress=progress)
            if negatives is not None:
                extract(net, negatives, config, cache=cache, progress=progress, labelled=False)
            barrier()
        if rank() == 0:
            with single_process():
                fit(net, data, config, negatives=negatives, cache=cache, progress=progress)
            home.mkdir(parents=True, exist_ok=True)
            net.save(file)
        barrier()
    with _kept(file):
        return load(file, _last(classifier), **_known(classifier))


def _trained(plan: Plan, dataset: str, progress: Progress) -> tuple[Classifier, Samples, Path]:
    """A classifier trained on the data set's own images, these, and the folder that it is kept in."""
    few = FEW_TRAINED if plan.backbone == VGG and plan.fidelity_images is not None else None
    train = plan.train_samples(dataset, plan.train_images or few)
    how: Any = {"num_classes": len(train.classes), "device": plan.device, "pretrained": False}
    recipe = asdict(STAGES) if plan.classifier_recipe == "stages" else None
    graph = load_classifier(plan.backbone, **how)
    name = hash_of((_made_of(plan, train, graph), plan.classifier_recipe, recipe, plan.seed))[:8]
    home = plan.output / "models" / f"{dataset}-{plan.classifier_recipe}-{name}"
    weights = home / "classifier.safetensors"
    if not weights.is_file() and rank() == 0:
        home.mkdir(parents=True, exist_ok=True)
        _train(plan, train, weights, progress)
    barrier()
    with _kept(weights):
        classifier = load_classifier(plan.backbone, weights=weights, **how)
    return classifier, train, home


@contextmanager
def _kept(file: Path) -> Iterator[None]:
    """Says how to get past a file of earlier work that cannot be read."""
    try:
        yield
    except SigcamError as error:
        raise DataError(f"{error} It was kept by an earlier run: remove {file} and run again.") from error


def _made_of(plan: Plan, train: Samples, classifier: Classifier) -> list[Any]:
    """What a classifier that is kept depends on besides its recipe."""
    around = data_facts(train, classifier.transform, torch.device(plan.device))
    return [plan.backbone, repr(classifier.model), *around]


def _train(plan: Plan, train: Samples, weights: Path, progress: Progress) -> None:
    """Trains the classifier that the plan asks for and writes it."""
    torch.manual_seed(plan.seed)  # of a new head
    if plan.backbone == VGG:
        classifier = open_vgg(plan, train, progress)
    else:
        classifier = load_classifier(plan.backbone, num_classes=len(train.classes), device=plan.device)
        _last(classifier)
        train_probe(classifier, train, seed=plan.seed, workers=plan.workers, progress=progress)
        if plan.classifier_recipe == "stages":  # from the probe on: a new head would shake the features first
            checkpoint = weights.with_name("checkpoint.pt")
            how = replace(STAGES, seed=plan.seed, workers=plan.workers)
            train_classifier(classifier, train, how, checkpoint=checkpoint, progress=progress)
            checkpoint.unlink(missing_ok=True)
    save_classifier(weights, classifier.model, spec=plan.backbone, classes=train.classes)


def _last(classifier: Classifier) -> torch.nn.Module:
    """The model in the memory layout that is fastest."""
    return classifier.model.to(memory_format=torch.channels_last)


def _known(classifier: Classifier) -> dict[str, Any]:
    """What the classifier tells `attach` and `load`."""
    return {"transform": classifier.transform, "class_names": classifier.classes}
