"""What `sigcam train-classifier` does: open data and network, train, write the classifier and how it went."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sigcam.cli.console import progress_bar, show_report
from sigcam.core.config import TrainConfig
from sigcam.core.errors import DataError
from sigcam.core.files import check_writable
from sigcam.core.manifest import write_manifest
from sigcam.data.fingerprint import data_fingerprint
from sigcam.data.registry import guess_format, open_dataset, open_training_data
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, save_classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.opening import open_classifier
from sigcam.training.classifier import TrainResult, train_classifier
from sigcam.training.linear_probe import train_probe
from sigcam.training.settings import check_train_config

PROBE_EPOCHS = 30
OF_PROBES = ("epochs", "lr", "batch_size", "workers", "seed", "pretrained")


@dataclass(frozen=True)
class TrainOptions:
    """The command's options besides the recipe's."""

    data: str
    format: str | None
    model: str
    weights: Path | None
    output: Path
    probe: bool
    device: str
    threads: int | None
    crop: bool


def make_classifier(options: TrainOptions, config: TrainConfig, as_json: bool) -> None:
    """Trains, writes classifier.safetensors and manifest.json, and prints."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise DataError("a classifier is trained in one process: start it without torchrun.")
    config = _for_probe(check_train_config(config)) if options.probe else check_train_config(config)
    if options.threads:
        torch.set_num_threads(options.threads)
    samples = open_training_data(options.data, options.format)
    check_writable(options.output)
    torch.manual_seed(config.seed)  # of a new head
    count = len(samples.classes)
    classifier = open_classifier(
        options.model, options.weights, options.crop, options.device, count, pretrained=config.pretrained
    )
    with progress_bar() as progress:
        if options.probe:
            result, (facts, skipped) = None, _probe(classifier, samples, config, progress)
        else:
            val = open_val(options.data, options.format, samples)

            def note(so_far: TrainResult) -> None:
                _write_about(options, config, samples, _facts(so_far, val), so_far)

            result = train_classifier(
                classifier,
                samples,
                config,
                val=val,
                checkpoint=options.output / "checkpoint.pt",
                progress=progress,
                after_epoch=note,
            )
            facts, skipped = _facts(result, val), result.skipped
    path = options.output / "classifier.safetensors"
    save_classifier(path, classifier.model, spec=options.model, classes=samples.classes)
    facts = {"classes": count, **facts, "classifier": str(path)}
    about = {"model_fingerprint": fingerprint(classifier.model)}
    _write_about(options, config, samples, facts, result, **about)
    show_report(facts, skipped, as_json)


def open_val(data: str, format: str | None, train: Samples) -> Samples | None:
    """The data's val split, None if it has none: never its test split, nor the images trained on."""
    try:
        val = open_dataset(data, format=format, split="val")
    except DataError as error:
        if "has no split" in str(error):
            return None
        raise
    known = {sample.id for sample in train}
    folder = (format or guess_format(data)) == "folder"  # it takes test/ for want of val/
    if any(sample.id in known or (folder and sample.id.startswith("test/")) for sample in val):
        return None
    return val


def _for_probe(config: TrainConfig) -> TrainConfig:
    """The settings, if a probe knows all that are not the default's."""
    default = TrainConfig()
    for field in fields(TrainConfig):
        if field.name not in OF_PROBES and getattr(config, field.name) != getattr(default, field.name):
            option = field.name.replace("_", "-")
            raise DataError(f"--{option} is of a whole training: leave it out, or leave --probe out.")
    return config


def _probe(
    classifier: Classifier, samples: Samples, config: TrainConfig, progress: Any
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    result = train_probe(
        classifier,
        samples,
        epochs=config.epochs or PROBE_EPOCHS,
        lr=config.lr,
        batch_size=config.batch_size,
        workers=config.workers,
        seed=config.seed,
        progress=progress,
    )
    facts = {
        "images": result.images,
        "training accuracy": result.train_accuracy,
        "final loss": result.losses[-1],
        "skipped": len(result.skipped),
    }
    return facts, result.skipped


def _facts(result: TrainResult, val: Samples | None) -> dict[str, Any]:
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


def _write_about(
    options: TrainOptions,
    config: TrainConfig,
    samples: Samples,
    facts: dict[str, Any],
    result: TrainResult | None = None,
    **about: Any,
) -> None:
    write_manifest(
        options.output,
        model=options.model,
        weights=str(options.weights) if options.weights else None,
        data=options.data,
        data_fingerprint=data_fingerprint(samples),
        seed=config.seed,
        config=asdict(config),
        **about,
        numbers=facts,
        **({"epochs": [asdict(epoch) for epoch in result.epochs]} if result else {}),
    )
