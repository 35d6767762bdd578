"""The classifiers under test, given or trained on the data, each with a fitted branch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sigcam.bench.paper import INCEPTION, RESNET, VGG, BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.weights import imagenet_weights
from sigcam.core.checkpoint import Checkpoint, work_key
from sigcam.core.config import FitConfig, TrainConfig
from sigcam.core.distributed import barrier, rank, single_process, world_size
from sigcam.core.errors import AttachError, ConfigError, DataError, SigcamError
from sigcam.core.files import hash_of
from sigcam.core.types import Progress
from sigcam.data.sample import Samples, data_fingerprint, files_fingerprint, match_classes
from sigcam.models.classifier import Classifier, save_classifier
from sigcam.models.state_dict import weights_facts
from sigcam.network.attachment import attach
from sigcam.network.branch_file import load
from sigcam.network.dual import DualBranch
from sigcam.network.identity import classifier_facts
from sigcam.network.opening import open_classifier
from sigcam.training.background import why_no_background
from sigcam.training.branch import fit
from sigcam.training.classifier import train_classifier
from sigcam.training.feature_reader import HeadInputs
from sigcam.training.features import Features, TrainingData, extract
from sigcam.training.last_stage import LastStage, StageConfig
from sigcam.training.linear_probe import train_layer, train_probe

# What is trained of the paper's networks. The rate was chosen on held-out training images of `cars`, where
# 0.01 was worse for each; longer training would be better, and cost more than all else.
LAST_STAGES = {
    RESNET: StageConfig("layer4", epochs=4, lr=0.03),
    INCEPTION: StageConfig("Mixed_7a", epochs=6, lr=0.03, weight_decay=5e-4),
    VGG: StageConfig("conv6", epochs=10, lr=0.03, weight_decay=5e-4),
}
STAGES = TrainConfig(epochs=2, lr=3e-3, head_lr_ratio=1.0, decay_every=3, freeze_until="blocks.5")


@dataclass(frozen=True)
class BranchFit:
    """How a branch is fitted.

    Args:
        negatives: images that show none of the classes.
        rows: computes the features to fit on, and those of examples without a class, from a network and the
            training images; None for the images' own features. `tag` names what it does.
    """

    config: FitConfig
    negatives: Samples | None = None
    rows: Callable[[DualBranch, Samples], tuple[Features, Features | None]] | None = None
    tag: str = ""

    def settings(self) -> list[Any]:
        """Return everything that tells this fit from others on the same images."""
        settings: list[Any] = [asdict(self.config), *filter(None, [self.tag])]
        if self.negatives is not None:
            settings += [data_fingerprint(self.negatives), files_fingerprint(self.negatives)]
        return settings


Fits = Mapping[str, FitConfig | BranchFit]


def paper_fit(plan: Plan, dataset: str, **settings: Any) -> FitConfig:
    """Return the paper's fit; on ImageNet, which has few images per class, with the softmax head as prior."""
    views = 1 if plan.backbone in LAST_STAGES else 2  # a pass of these takes five times as long
    few: Any = {"prior": "softmax", "views": views} if dataset == "ilsvrc" else {}
    return FitConfig(**{"background": 0.0, "seed": plan.seed, **few, **settings})


def table_fits(plan: Plan, dataset: str) -> dict[str, FitConfig]:
    """Return the fits of the tables: the paper's, the same with background evidence, and the control, a
    softmax over the classes and background. Maps in probabilities are calibrated at the plan's sizes."""
    zooms = tuple(dict.fromkeys((1.0, float(plan.zoom))))
    weight = 1.0 if dataset == "ilsvrc" else "auto"  # "auto" keeps 0 where each class has three images
    slow: Any = {"views": 1, "l2": 0.1} if dataset == "ilsvrc" else {}  # a solver for 1000 classes at once
    contrast: Any = {"background": 3.0, "loss": "background-softmax", "zooms": zooms, **slow}
    return {
        "sigmoid": paper_fit(plan, dataset),
        "sigmoid + background": paper_fit(plan, dataset, background=weight, zooms=zooms),
        "softmax + background": paper_fit(plan, dataset, **contrast),
    }


def network(
    plan: Plan, dataset: str, config: FitConfig, progress: Progress, negatives: Samples | None = None
) -> DualBranch:
    """Return the classifier of a data set with a fitted branch.

    Trained classifiers and fitted branches are stored in the output folder and reused.
    """
    opened = _open(plan, dataset, progress)
    file = _fitted(plan, opened, BranchFit(config, negatives), progress)
    if file is None:
        raise ConfigError(f"this {type(opened.classifier.model).__name__} has no background to learn from.")
    return opened.load(file)


def networks(plan: Plan, dataset: str, fits: Fits, progress: Progress) -> dict[str, DualBranch]:
    """Return a fitted branch for each of the fits, all beside one model, made faster where that is a CPU.

    A fit that the network does not allow is left out: with background where the head reads class tokens, as
    a softmax with background where the head is not one linear layer.
    """
    opened, nets = _open(plan, dataset, progress), dict[str, DualBranch]()
    model: nn.Module | None = None
    for name, each in fits.items():
        file = _fitted(plan, opened, each if isinstance(each, BranchFit) else BranchFit(each), progress)
        if file is None:
            continue
        net = opened.load(file, optimize=model is None)
        model = net.model if model is None else model
        nets[name] = net if net.model is model else net.with_model(model)
    return nets


@dataclass(frozen=True)
class _Opened:
    """A classifier with its training images and the folder of its branches."""

    classifier: Classifier
    train: Samples
    folder: Path
    given: bool  # whether it was trained beforehand, or is used as published

    @property
    def known(self) -> dict[str, Any]:
        return {"transform": self.classifier.transform, "class_names": self.classifier.classes}

    def load(self, file: Path, optimize: bool = False) -> DualBranch:
        """Return a stored branch beside the classifier, or beside a faster copy of it."""
        model = self.classifier.model
        with stored(file):
            if optimize and next(model.parameters()).device.type == "cpu":
                with suppress(AttachError):  # the model cannot be copied
                    return load(file, model, optimize=True, **self.known)
            return load(file, model, **self.known)


def _open(plan: Plan, dataset: str, progress: Progress) -> _Opened:
    """Open the classifier of a data set; train it if it is neither given nor stored."""
    given = plan.given_classifier(dataset)
    if given or dataset == "ilsvrc":  # trained beforehand, or with its published head
        train = plan.train_samples(dataset, plan.train_images)
        weights = given or _packaged(plan)
        classifier = open_classifier(plan.backbone, weights, crop=False, device=plan.device)
        folder = models_folder(plan, f"{dataset}-given", train, classifier, None)
        return _Opened(classifier, train, folder, given=True)
    return _Opened(*trained_classifier(plan, dataset, progress), given=False)


def _fitted(plan: Plan, opened: _Opened, branch_fit: BranchFit, progress: Progress) -> Path | None:
    """Return the file of a branch, fitted if there is none yet; None if the network does not allow it."""
    classifier, train, folder = opened.classifier, opened.train, opened.folder
    file = folder / f"branch-{hash_of(branch_fit.settings())[:8]}.safetensors"
    if file.is_file():
        return file
    net, config, negatives = attach(classifier.model, **opened.known), branch_fit.config, branch_fit.negatives
    linear = HeadInputs(net).linear
    backgrounds = config.background != 0
    if (backgrounds and why_no_background(net)) or (config.loss != "sigmoid" and not linear):
        return None
    if not linear:  # what only the solver has
        config = replace(config, prior="zero")
    data: TrainingData | Features = match_classes(train, net.classes, net.class_names)
    others: TrainingData | Features | None = negatives
    cache = plan.output / "features"
    if plan.backbone in LAST_STAGES and not opened.given:
        data = _head_inputs(plan, opened, progress)
    elif config.recipe != "fast":  # gradient steps on features that are there already
        data = extract(net, data, replace(config, recipe="fast"), cache=cache, progress=progress)
    elif world_size() > 1:  # each process computes its share of the features; the first one fits
        extract(net, data, config, cache=cache, progress=progress, backgrounds=backgrounds)
        if negatives is not None:
            extract(net, negatives, config, cache=cache, progress=progress, labelled=False)
        barrier()
    if rank() == 0:
        with single_process():
            if branch_fit.rows is not None:
                assert isinstance(data, Samples)
                data, others = branch_fit.rows(net, data)
            result = fit(net, data, config, negatives=others, cache=cache, progress=progress)
        if result.quality is not None:
            net.recipe["held_out_ap"] = 100 * result.quality.mean_average_precision
        folder.mkdir(parents=True, exist_ok=True)
        net.save(file)
    barrier()
    return file


def trained_classifier(plan: Plan, dataset: str, progress: Progress) -> tuple[Classifier, Samples, Path]:
    """Return a classifier trained on the data set, its training samples, and its folder."""
    train = plan.train_samples(dataset, plan.train_images)
    size: Any = {"crop": False, "device": plan.device, "classes": len(train.classes), "pretrained": False}
    recipe: Any = asdict(STAGES) if plan.classifier_recipe == "stages" else None
    if plan.backbone in LAST_STAGES:
        recipe = asdict(LAST_STAGES[plan.backbone])
    untrained = untrained_classifier(plan, len(train.classes))
    name = f"{dataset}-{plan.classifier_recipe}"
    folder = models_folder(plan, name, train, untrained, [plan.classifier_recipe, recipe, plan.seed])
    weights = folder / "classifier.safetensors"
    if not weights.is_file() and rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with single_process():
            _train(plan, dataset, untrained, train, weights, progress)
    barrier()
    with stored(weights):
        return open_classifier(plan.backbone, weights, **size), train, folder


def untrained_classifier(plan: Plan, classes: int) -> Classifier:
    """Return the plan's network with published weights and a new head."""
    torch.manual_seed(plan.seed)  # for the new head
    return open_classifier(plan.backbone, _packaged(plan), crop=False, device=plan.device, classes=classes)


def packaged_weights(plan: Plan) -> BenchRow:
    """Return what the rows of a network say of its weights, if these come by package name."""
    path = _packaged(plan)
    if path is None:
        return {}
    facts = weights_facts(plan.backbone, path)
    return {"weights": {name: fact for name, fact in facts.items() if name != "path"}}


def _packaged(plan: Plan) -> Path | None:
    """Return the file of ImageNet weights that come by package name; None for a network with others."""
    return imagenet_weights(plan.backbone)[1] if plan.backbone in LAST_STAGES else None


def models_folder(plan: Plan, name: str, train: Samples, classifier: Classifier, settings: Any) -> Path:
    """Return the folder of a classifier, named by everything that it and its branches depend on."""
    facts = [classifier_facts(classifier), classifier.classes, settings]
    facts += [data_fingerprint(train), files_fingerprint(train)]
    return plan.output / "models" / f"{name}-{work_key(facts)[:8]}"


@contextmanager
def stored(file: Path) -> Iterator[None]:
    """Add to an error how to recover from a stored file that cannot be read."""
    try:
        yield
    except SigcamError as error:
        raise DataError(f"{error} It was kept by an earlier run: remove {file} and run again.") from error


def _train(
    plan: Plan, dataset: str, classifier: Classifier, train: Samples, weights: Path, progress: Progress
) -> None:
    """Train the classifier of the plan and write it."""
    checkpoint = weights.with_name("checkpoint.pt")
    if plan.classifier_recipe == "last-stage" and plan.backbone != VGG:
        # which begins with the probe: a random head would disturb the features
        classifier = trained_classifier(replace(plan, classifier_recipe="probe"), dataset, progress)[0]
    if plan.backbone in LAST_STAGES:
        recipe = LAST_STAGES[plan.backbone]
        last = LastStage(classifier, recipe.first)
        outputs = last.outputs(train, plan.output / "features", progress)
        if plan.classifier_recipe == "probe":
            rows = last.head_inputs(outputs, progress)
            train_layer(last.stage[-1], rows.views[0], rows.labels, seed=plan.seed, progress=progress)
        else:
            last.train(outputs, recipe, seed=plan.seed, checkpoint=checkpoint, progress=progress)
    else:
        kept: Any = {"cache": plan.output / "features", "maps": plan.classifier_recipe == "probe"}
        train_probe(classifier, train, seed=plan.seed, workers=plan.workers, progress=progress, **kept)
        if plan.classifier_recipe == "stages":
            config = replace(STAGES, seed=plan.seed, workers=plan.workers)
            train_classifier(classifier, train, config, checkpoint=checkpoint, progress=progress)
            checkpoint.unlink(missing_ok=True)
    save_classifier(weights, classifier.model, spec=plan.backbone, classes=train.classes)


def _head_inputs(plan: Plan, opened: _Opened, progress: Progress) -> Features:
    """Return what enters the head of a classifier trained here, for its training images and their
    backgrounds, from the outputs of its frozen part; kept beside it."""
    kept = Checkpoint(opened.folder / "head_inputs.pt", None)
    state = kept.load()
    if state is None:
        last = LastStage(opened.classifier, LAST_STAGES[plan.backbone].first)
        outputs = last.outputs(opened.train, plan.output / "features", progress)
        rows = last.head_inputs(outputs, progress, backgrounds=True)
        state = {"views": list(rows.views), "backgrounds": list(rows.backgrounds), "labels": rows.labels}
        state |= {"index": rows.index, "skipped": list(rows.skipped)}
        kept.save(state)
    views, backgrounds = tuple(state["views"]), tuple(state["backgrounds"])
    skipped = tuple((name, reason) for name, reason in state["skipped"])
    return Features(views, state["labels"], state["index"], skipped, backgrounds=backgrounds)
