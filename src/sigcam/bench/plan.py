"""Plan: the data, classifier and numbers of images that the tables of `sigcam bench` are made with."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from sigcam.bench.paper import VGG
from sigcam.core.errors import DataError
from sigcam.core.manifest import versions
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples, check_disjoint

ABLATION_IMAGES = 500  # test images for ablations and for other classifiers than the plan's


@dataclass(frozen=True)
class Plan:
    """Settings of a benchmark. A number of images is drawn with the seed; None stands for all."""

    data: Path  # folder with the data sets, each under its name: cub, cars, ilsvrc, openimages, pets
    output: Path  # folder for tables, figures and unfinished work
    fidelity_images: int | None = 300  # test images for confidence metrics
    localization_images: int | None = None  # test images for boxes and masks
    zoom: float = 2.0  # enlargement of the images in the zoomed rows; 1 leaves these rows out
    backbone: str = "embedded"
    classifiers: Path | None = None  # folder with DATASET/classifier.safetensors files, trained beforehand
    classifier_recipe: Literal["probe", "stages", "last-stage"] = "probe"  # what is trained on the data
    train_images: int | None = None  # training images for classifiers and branches
    device: str = "cpu"
    batch_size: int = 16
    workers: int = 0
    seed: int = 0
    skip_unreadable: bool = False

    def samples(self, dataset: str, split: str, count: int | None) -> Samples:
        """Return `count` samples of a split, drawn with the seed; None for all."""
        samples = open_dataset(self.data / dataset, split=split)
        if count is None or count >= len(samples):
            return samples
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(samples), generator=generator)[:count].sort().values
        return Samples(tuple(samples[i] for i in chosen.tolist()), samples.classes)

    def train_samples(self, dataset: str, count: int | None) -> Samples:
        """Return training samples; DataError if some of them are test images too."""
        train, folder = self.samples(dataset, "train", count), self.data / dataset
        message = (
            f"are in both splits of {folder}: metrics are meaningless. `sigcam inspect` shows the splits."
        )
        check_disjoint(train, self.samples(dataset, "test", None), message)
        return train

    @property
    def quick(self) -> bool:
        """Whether a first look is enough."""
        return self.localization_images is not None

    @property
    def ablation_images(self) -> int | None:
        """Number of test images for ablations and for other classifiers; None for all."""
        return self.localization_images or (None if self.fidelity_images is None else ABLATION_IMAGES)

    @property
    def slug(self) -> str:
        """The classifier's name in file names."""
        short = self.backbone.rpartition(":")[2] if self.backbone.count(":") < 2 else "file"
        return short if self.classifier_recipe == "probe" else f"{short}-{self.classifier_recipe}"

    def given_classifier(self, dataset: str) -> Path | None:
        """Return the data set's weights in `classifiers`; None if the classifier is not given."""
        if self.classifiers is None:
            return None
        path = self.classifiers / dataset / "classifier.safetensors"
        if path.is_file():
            return path
        if dataset == "ilsvrc":
            return None
        command = f"`sigcam train-classifier --model {self.backbone} --data {self.data / dataset}"
        raise DataError(f"{path} does not exist: {command} --output {path.parent}` makes it.")

    def classifier_kind(self, dataset: str) -> str:
        """Describe the classifier of a data set in a few words."""
        if self.given_classifier(dataset):
            return "trained before"
        if dataset == "ilsvrc":
            return "as published"
        if self.backbone == VGG:
            return "conv6 and fc trained"
        kinds = {"probe": "a linear probe", "stages": "last stages trained"}
        return kinds.get(self.classifier_recipe, "last stage trained")

    def has(self, dataset: str) -> bool:
        """Whether the data folder contains the data set."""
        return (self.data / dataset).is_dir()

    def available(self, datasets: Sequence[str]) -> list[str]:
        """Return the data sets that the data folder contains; DataError if there are none."""
        found = [name for name in datasets if self.has(name)]
        if not found:
            names = ", ".join(datasets)
            raise DataError(f"{self.data} holds none of {names}: put a data set there under its name.")
        return found

    def provenance(self) -> dict[str, Any]:
        """Return how and when a result was made."""
        return {
            "command": " ".join(["sigcam", *sys.argv[1:]]),
            "date": datetime.now(UTC).date().isoformat(),
            "seed": self.seed,
            "device": torch.device(self.device).type,
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
