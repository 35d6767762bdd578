"""The classifiers under test, given or trained on the data, each with a fitted branch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sigcam.bench.plan import VGG, Plan
from sigcam.bench.weights import open_vgg, pooled_features
from sigcam.core.checkpoint import work_key
from sigcam.core.config import FitConfig, TrainConfig
from sigcam.core.distributed import barrier, rank, single_process, world_size
from sigcam.core.errors import DataError, SigcamError
from sigcam.core.files import hash_of
from sigcam.core.types import Progress
from sigcam.data.sample import Samples, data_fingerprint, files_fingerprint, match_classes
from sigcam.models.classifier import Classifier, save_classifier
from sigcam.network.attachment import attach, load
from sigcam.network.dual import DualBranch
from sigcam.network.identity import classifier_facts
from sigcam.network.opening import open_classifier, open_network
from sigcam.training.branch import fit
from sigcam.training.classifier import train_classifier
from sigcam.training.features import Features, TrainingData, extract
from sigcam.training.linear_probe import train_probe

VGG_TRAIN_IMAGES = 1500  # a pass of VGG-16 takes seven times as long as that of the others
STAGES = TrainConfig(epochs=2, lr=3e-3, head_lr_ratio=1.0, decay_every=3, freeze_until="blocks.5")


def network(
    plan: Plan, dataset: str, config: FitConfig, progress: Progress, negatives: Samples | None = None
) -> DualBranch:
    """Return the classifier of a data set with a fitted branch.

    Trained classifiers and fitted branches are stored in the output folder and reused. The embedded
    classifier has a branch for ImageNet, which is used as it is.
    """
    if plan.uses_shipped_branch(dataset) and config == FitConfig(seed=plan.seed):
        return open_network("embedded", device=plan.device).net
    given = plan.given_classifier(dataset)
    if given or dataset == "ilsvrc":  # trained beforehand, or with its published head
        train = plan.train_samples(dataset, plan.train_images)
        classifier = open_classifier(plan.backbone, given, crop=False, device=plan.device)
        folder = _folder(plan, f"{dataset}-given", train, classifier, None)
    else:
        classifier, train, folder = _trained(plan, dataset, progress)
    settings: list[Any] = [asdict(config)]
    settings += [] if negatives is None else [data_fingerprint(negatives), files_fingerprint(negatives)]
    file = folder / f"branch-{hash_of(settings)[:8]}.safetensors"
    known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
    if not file.is_file():
        net = attach(classifier.model, **known)
        data: TrainingData | Features = match_classes(train, net.classes, net.class_names)
        cache = plan.output / "features"
        if plan.backbone == VGG and not given:
            data = pooled_features(classifier, train, cache, progress)
        elif world_size() > 1:  # each process computes its share of the features; the first one fits
            extract(net, data, config, cache=cache, progress=progress)
            if negatives is not None:
                extract(net, negatives, config, cache=cache, progress=progress, labelled=False)
            barrier()
        if rank() == 0:
            with single_process():
                fit(net, data, config, negatives=negatives, cache=cache, progress=progress)
            folder.mkdir(parents=True, exist_ok=True)
            net.save(file)
        barrier()
    with _stored(file):
        return load(file, classifier.model, **known)


def _trained(plan: Plan, dataset: str, progress: Progress) -> tuple[Classifier, Samples, Path]:
    """Return a classifier trained on the data set, its training samples, and its folder."""
    few = VGG_TRAIN_IMAGES if plan.backbone == VGG and plan.fidelity_images is not None else None
    train = plan.train_samples(dataset, plan.train_images or few)
    size: Any = {"crop": False, "device": plan.device, "classes": len(train.classes), "pretrained": False}
    recipe = asdict(STAGES) if plan.classifier_recipe == "stages" else None
    torch.manual_seed(plan.seed)  # for the new head
    untrained = open_classifier(plan.backbone, None, **size | {"pretrained": plan.backbone != VGG})
    name = f"{dataset}-{plan.classifier_recipe}"
    folder = _folder(plan, name, train, untrained, [plan.classifier_recipe, recipe, plan.seed])
    weights = folder / "classifier.safetensors"
    if not weights.is_file() and rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _train(plan, untrained, train, weights, progress)
    barrier()
    with _stored(weights):
        return open_classifier(plan.backbone, weights, **size), train, folder


def _folder(plan: Plan, name: str, train: Samples, classifier: Classifier, settings: Any) -> Path:
    """Return the folder of a classifier, named by everything that it and its branches depend on."""
    facts = [classifier_facts(classifier), classifier.classes, settings]
    facts += [data_fingerprint(train), files_fingerprint(train)]
    return plan.output / "models" / f"{name}-{work_key(facts)[:8]}"


@contextmanager
def _stored(file: Path) -> Iterator[None]:
    """Add to an error how to recover from a stored file that cannot be read."""
    try:
        yield
    except SigcamError as error:
        raise DataError(f"{error} It was kept by an earlier run: remove {file} and run again.") from error


def _train(plan: Plan, classifier: Classifier, train: Samples, weights: Path, progress: Progress) -> None:
    """Train the classifier of the plan and write it."""
    if plan.backbone == VGG:
        torch.manual_seed(plan.seed)
        classifier = open_vgg(plan, train, progress)
    else:
        train_probe(classifier, train, seed=plan.seed, workers=plan.workers, progress=progress)
        if plan.classifier_recipe == "stages":  # after the probe: a random head would disturb the features
            checkpoint = weights.with_name("checkpoint.pt")
            config = replace(STAGES, seed=plan.seed, workers=plan.workers)
            train_classifier(classifier, train, config, checkpoint=checkpoint, progress=progress)
            checkpoint.unlink(missing_ok=True)
    save_classifier(weights, classifier.model, spec=plan.backbone, classes=train.classes)
