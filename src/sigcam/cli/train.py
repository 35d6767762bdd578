"""`sigcam train-classifier`: train a softmax classifier on a folder of images."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigcam.cli import options as opt
from sigcam.cli.console import progress_bar, show_result
from sigcam.cli.options import option
from sigcam.core.config import TrainConfig
from sigcam.core.errors import ConfigError
from sigcam.core.manifest import write_manifest

if TYPE_CHECKING:
    from sigcam.data.sample import Samples
    from sigcam.training.classifier import TrainResult

PROBE_EPOCHS = 30
HELD_OUT = 0.2  # share of each class's training images that a probe is measured on if there are no others
PROBE_SETTINGS = ("epochs", "lr", "batch_size", "workers", "seed", "pretrained")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(opt.SourceOptions, opt.RunOptions, opt.CacheOptions, opt.ThreadOptions, opt.CropOptions):
    """Options of `sigcam train-classifier`."""

    probe: bool = option("Train a linear head alone, with Adam, on features computed once.", False)
    no_cache: bool = option("Keep a probe's features in memory only.", False)
    output: Path = Path("classifier")
    config: TrainConfig = TrainConfig()

    @property
    def resumes(self) -> bool:
        return not self.probe

    @property
    def needs_head(self) -> bool:
        return False


def train_command(options: TrainOptions) -> None:
    """Train a softmax classifier on a folder, to attach a branch to; an interrupted run continues."""
    import torch

    from sigcam.data.registry import open_held_out_data, open_training_data, open_validation_data
    from sigcam.data.sample import data_fingerprint
    from sigcam.models.classifier import save_classifier
    from sigcam.models.state_dict import fingerprint, weights_facts
    from sigcam.network.opening import open_classifier
    from sigcam.training.classifier import train_classifier
    from sigcam.training.feature_cache import default_folder
    from sigcam.training.linear_probe import train_probe
    from sigcam.training.settings import check_train_config

    o, config = options, options.config
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("a classifier is trained in one process: start it without torchrun.")
    check_train_config(config)
    if o.probe:
        _check_probe_config(config)
    elif o.cache or o.no_cache:
        raise ConfigError("--cache and --no-cache are of a probe: add --probe, or leave them out.")
    if o.threads:
        torch.set_num_threads(o.threads)
    train = open_training_data(o.data, o.format)
    torch.manual_seed(config.seed)  # for a new head
    count = len(train.classes)
    classifier = open_classifier(o.model, o.weights, o.crop, o.device, count, pretrained=config.pretrained)

    def write_about(numbers: dict[str, Any], **facts: Any) -> None:
        write_manifest(
            o.output,
            model=o.model,
            weights=weights_facts(o.model, o.weights) if o.weights or config.pretrained else None,
            data=o.data,
            data_fingerprint=data_fingerprint(train),
            seed=config.seed,
            config=asdict(config),
            numbers=numbers,
            **facts,
        )

    with progress_bar() as progress:
        if o.probe:
            others = open_held_out_data(o.data, o.format, train)
            probe = train_probe(
                classifier,
                train,
                epochs=config.epochs or PROBE_EPOCHS,
                lr=config.lr,
                batch_size=config.batch_size,
                workers=config.workers,
                seed=config.seed,
                held_out=others[1] if others else None,
                holdout=HELD_OUT,
                cache=None if o.no_cache else o.cache or default_folder(),
                maps=not o.no_cache and train[0].path is not None,  # of use to `fit` from a disk alone
                progress=progress,
            )
            skipped, facts = probe.skipped, dict[str, Any]()
            part = f"{HELD_OUT:.0%} of the training images; the head kept is trained on all"
            numbers: dict[str, Any] = {
                "images": probe.images,
                "training accuracy": probe.train_accuracy,
                "held-out accuracy": probe.held_out_accuracy,
                "held-out images": probe.held_out_images,
                "held out": part if others is None else f"the {others[0]} split",
                "final loss": probe.losses[-1],
                "skipped": len(probe.skipped),
            }
        else:
            val = open_validation_data(o.data, o.format, train)
            result = train_classifier(
                classifier,
                train,
                config,
                val=val,
                checkpoint=o.output / "checkpoint.pt",
                progress=progress,
                after_epoch=lambda result: write_about(_numbers(result, val), epochs=_epochs(result)),
            )
            skipped, facts = result.skipped, {"epochs": _epochs(result)}
            numbers = _numbers(result, val)
    path = o.output / "classifier.safetensors"
    save_classifier(path, classifier.model, spec=o.model, classes=train.classes)
    numbers = {"classes": count, **numbers, "classifier": str(path)}
    write_about(numbers, model_fingerprint=fingerprint(classifier.model), **facts)
    show_result(numbers, skipped, o.json)


def _check_probe_config(config: TrainConfig) -> None:
    """Raise ConfigError for a setting that a probe does not have."""
    default = TrainConfig()
    for each in fields(TrainConfig):
        if each.name not in PROBE_SETTINGS and getattr(config, each.name) != getattr(default, each.name):
            option = each.name.replace("_", "-")
            raise ConfigError(f"--{option} does not apply to a probe: leave it out, or leave --probe out.")


def _numbers(result: TrainResult, val: Samples | None) -> dict[str, Any]:
    last = result.epochs[-1]
    return {
        "images": result.images,
        "epochs": len(result.epochs),
        "trained parameters": result.trained,
        "training accuracy": last.train_accuracy,
        "validation images": len(val) if val else 0,
        "validation accuracy": last.val_accuracy,
        "final loss": last.loss,
        "skipped": len(result.skipped),
    }


def _epochs(result: TrainResult) -> list[dict[str, Any]]:
    return [asdict(epoch) for epoch in result.epochs]
