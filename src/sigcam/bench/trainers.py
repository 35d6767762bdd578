"""Trainers of weakly supervised localisation beside plain training of the same stage, on either head."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sigcam.bench.measure import table_rows
from sigcam.bench.networks import (
    LAST_STAGES,
    models_folder,
    paper_fit,
    stored,
    trained_classifier,
)
from sigcam.bench.paper import RESNET, BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.registry import FINE_DATASETS
from sigcam.bench.tables import MAP_VARIANTS
from sigcam.core.config import FitConfig
from sigcam.core.distributed import world_size
from sigcam.core.errors import ConfigError
from sigcam.core.types import Progress
from sigcam.data.sample import Samples, match_classes
from sigcam.evaluation.evaluator import evaluate
from sigcam.evaluation.result import Result
from sigcam.metrics.bootstrap import Interval, paired
from sigcam.models.classifier import save_classifier
from sigcam.network.attachment import attach
from sigcam.network.branch_file import load
from sigcam.network.dual import DualBranch
from sigcam.network.opening import open_classifier
from sigcam.training.branch import fit
from sigcam.training.last_stage import LastStage, StageConfig
from sigcam.training.wsol import WSOL

PLAIN = "plain training"
# Of the rates 0.03, 0.01 and 0.003, the first was best on held-out training images of `cub`.
STAGES_TRAINED = {"embedded": StageConfig("blocks.6", epochs=6), RESNET: LAST_STAGES[RESNET]}
COMPARED = ("max_box_acc_v2", "gt_known_loc", "top1_cls")


def trainers(plan: Plan, progress: Progress) -> list[BenchRow]:
    """The last stage trained plainly and by each trainer, from the same linear probe with the same recipe,
    with its branch; each row also has the paired difference from the same map of plain training."""
    if world_size() > 1:
        raise ConfigError("trainers are compared in one process: start it without torchrun.")
    if plan.backbone not in STAGES_TRAINED:
        raise ConfigError(f"trainers are compared on {' or '.join(STAGES_TRAINED)}, not {plan.backbone}.")
    dataset = plan.available(FINE_DATASETS)[0]
    samples, rows = plan.samples(dataset, "test", plan.ablation_images), list[BenchRow]()
    plain: Result | None = None
    for name in (None, *(name for name, trainer in WSOL.items() if not trainer.of_tokens)):
        net = _network(plan, dataset, name, progress)
        result = _evaluate(plan, net, samples, name, progress)
        plain = plain or result
        labels = {"backbone": plan.backbone, "classifier": name or PLAIN}
        rows += [row | labels for row in _with_plain(table_rows(result, dataset, 1.0), result, plain)]
    return rows


def _network(plan: Plan, dataset: str, name: str | None, progress: Progress) -> DualBranch:
    """Return the classifier that a trainer made with the paper's branch, from the output folder if it is
    there already."""
    start, train, _ = trained_classifier(replace(plan, classifier_recipe="probe"), dataset, progress)
    recipe = STAGES_TRAINED[plan.backbone]
    settings = [name, asdict(recipe), plan.seed]
    folder = models_folder(plan, f"{dataset}-{name or 'plain'}", train, start, settings)
    weights, branch = folder / "classifier.safetensors", folder / "branch.safetensors"
    if not branch.is_file():
        last = LastStage(start, recipe.first, name)
        config = paper_fit(plan, dataset)
        _train(plan, last, train, config, lambda *at: progress(f"{name or PLAIN}: {at[0]}", *at[1:]), folder)
    with stored(branch):
        classifier = open_classifier(plan.backbone, weights, crop=False, device=plan.device)
        known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
        return load(branch, classifier.model, optimize=plan.device == "cpu", **known)


def _train(
    plan: Plan, last: LastStage, train: Samples, config: FitConfig, progress: Progress, folder: Path
) -> None:
    """Train the last stage on the outputs of the frozen part, then the branch on what enters the head."""
    classifier = last.classifier
    outputs = last.outputs(train, plan.output / "features", progress)
    folder.mkdir(parents=True, exist_ok=True)
    kept: Any = {"seed": plan.seed, "checkpoint": folder / "checkpoint.pt", "progress": progress}
    last.train(outputs, STAGES_TRAINED[plan.backbone], samples=train, **kept)
    weights = folder / "classifier.safetensors"
    save_classifier(weights, classifier.model, spec=plan.backbone, classes=train.classes)
    known: Any = {"transform": classifier.transform, "class_names": train.classes}
    net = attach(classifier.model, example=last.example, **known)
    fit(net, last.head_inputs(outputs, progress), config, progress=progress)
    net.save(folder / "branch.safetensors")


def _evaluate(plan: Plan, net: DualBranch, samples: Samples, name: str | None, progress: Progress) -> Result:
    """Measure the maps of both heads: CAM where the head averages, else Grad-CAM, whose weights are the same;
    of plain training both, to compare with."""
    methods = ["cam"] if net.linear else ["grad-cam"]
    settings: Any = MAP_VARIANTS | {"branches": ("softmax", "sigmoid"), "metrics": COMPARED}
    settings |= {"skip_unreadable": plan.skip_unreadable, "workers": plan.workers, "intervals": True}
    return evaluate(
        net,
        match_classes(samples, net.classes, net.class_names),
        methods=methods if name else ["cam", "grad-cam"],
        batch_size=plan.batch_size,
        progress=lambda _, done, total: progress(f"{name or PLAIN}: maps", done, total),
        **settings,
    )


def _with_plain(rows: list[BenchRow], result: Result, plain: Result) -> list[BenchRow]:
    """Return the rows of a trainer with the paired differences from plain training, in `versus`."""
    if result is plain:
        return rows
    for row in rows:
        variant = (row["method"], row["branch"], row["clamp"], row["scale"])
        for key, metric in result.metrics.items():
            if (key.method is None or key.variant == variant) and key in plain.metrics:
                found = paired(metric, plain.metrics[key])
                named = {key.label: found} if isinstance(found, Interval) else found
                for column, each in named.items():
                    difference = [each.value, each.low, each.high]
                    row["versus"][column] = {"control": PLAIN, "difference": difference}
    return rows
