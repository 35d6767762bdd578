"""TrainingMaps: what the callbacks share, whatever trains the classifier."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sigcam.callbacks.training_batches import LoaderPairs, images_of
from sigcam.core.config import FitConfig
from sigcam.core.distributed import single_process
from sigcam.core.errors import AttachError, ConfigError, SigcamError
from sigcam.core.files import write_png
from sigcam.drawing.overlay import grid
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import Explanation
from sigcam.methods.inputs import Classes, ImageSource
from sigcam.methods.registry import MapConfig
from sigcam.methods.targets import Branch
from sigcam.network.attachment import attach as attach_branch
from sigcam.network.dual import DualBranch
from sigcam.training.branch import FitResult, fit
from sigcam.training.features import TrainingData

COLUMNS = 4  # of the picture


class TrainingMaps:
    """Draw maps of the same few images at validations, and fit a branch after training if asked to.

    The network is attached anew each time, so that nothing is kept from earlier weights.

    Args:
        images: A preprocessed (B, C, H, W) batch, or PIL images or paths if the attached network has a
            transform; by default the first validation batch.
        count: Number of images to draw, at most.
        every: Draw at every n-th validation.
        method: A name of `sigcam.list_methods()`.
        branch: "centred", the softmax head minus its mean over classes, or "softmax". The sigmoid branch has
            nothing to show before it is fitted.
        classes: As for `sigcam.explain`; by default the class that is predicted at the time.
        attach: From the model that is trained to the network to explain; by default `sigcam.attach`.
        folder: Where to write PNG files; by default they are written only where no logger takes images.
        show: Called with (picture, name, step), for any other place to show pictures in.
        fit: Settings of a fit of the sigmoid branch after training, on the training images. The branch is
            written to `branch.safetensors`, and its maps are drawn once. None fits none.
        data: What to fit on, as for `sigcam.fit`; by default the training loader's dataset.

    Attributes:
        net: The network with the fitted branch, after training; None before, and without `fit`.
        result: The `FitResult`.
    """

    def __init__(
        self,
        images: Tensor | Sequence[ImageSource] | None = None,
        *,
        count: int = 8,
        every: int = 1,
        method: str = "grad-cam",
        branch: Literal["centred", "softmax"] = "centred",
        classes: Classes = None,
        attach: Callable[[nn.Module], DualBranch] | None = None,
        folder: str | Path | None = None,
        show: Callable[[Image.Image, str, int], None] | None = None,
        fit: FitConfig | None = None,
        data: TrainingData | None = None,
    ) -> None:
        super().__init__()
        if branch not in ("centred", "softmax"):
            raise ConfigError(
                f"branch={branch!r} cannot be drawn while the classifier trains: choose 'centred' or "
                "'softmax'. fit=sigcam.FitConfig() fits the sigmoid branch after training and draws it."
            )
        for name, value in (("count", count), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is a whole number from 1 on, not {value!r}.")
        if fit is not None and not isinstance(fit, FitConfig):
            raise ConfigError(f"fit is a FitConfig or None, not {fit!r}: fit=sigcam.FitConfig().")
        if data is not None and fit is None:
            raise ConfigError("data is what the branch is fitted on: give fit=sigcam.FitConfig() too.")
        MapConfig(method, branch).checked()
        self.images = None if images is None else images[:count]
        self.count, self.every, self.method, self.branch, self.classes = count, every, method, branch, classes
        self.attach, self.show, self.config, self.data = attach, show, fit, data
        self.folder = None if folder is None else Path(folder)
        self.net: DualBranch | None = None
        self.result: FitResult | None = None
        self._validations = 0

    def keep_images(self, batch: Any) -> None:
        """Keep the first images of the first batch, if none were given."""
        if self.images is None:
            with torch.inference_mode(False), torch.no_grad():
                self.images = images_of(batch)[: self.count].clone()

    def keep_first(self, loader: Any) -> None:
        """Do that for a loader, without a pass over it, which would draw random numbers."""
        if self.images is None:
            dataset = LoaderPairs(loader).loader.dataset
            with kept_random_state():
                self.keep_images(
                    loader.collate_fn([dataset[i] for i in range(min(self.count, len(dataset)))])
                )

    def is_due(self) -> bool:
        """Count a validation; return whether its maps are to be drawn."""
        self._validations += 1
        return self._validations % self.every == 0

    def draw(self, model: nn.Module, step: int) -> Image.Image:
        """Return a picture of the images' maps by the model's present weights."""
        with kept_random_state():
            return self._picture(self._attached(model), self.branch, step)

    def training_data(self, loader: Any) -> TrainingData:
        """Return what the branch is fitted on, one item of which was read."""
        if self.data is not None:
            return self.data
        pairs = LoaderPairs(loader)
        with kept_random_state():
            pairs[0]
        return pairs

    def fit_branch(self, model: nn.Module, loader: Any, step: int, folder: Path) -> Image.Image:
        """Fit the sigmoid branch, write it into the folder, and return a picture of its maps."""
        assert self.config is not None
        self.keep_first(loader)
        with kept_random_state(), single_process():
            self.net = self._attached(model)
            self.result = fit(self.net, self.training_data(loader), self.config)
            folder.mkdir(parents=True, exist_ok=True)
            self.net.save(folder / "branch.safetensors")
            return self._picture(self.net, "sigmoid", step)

    def publish(
        self,
        picture: Image.Image,
        branch: Branch,
        step: int,
        folder: Path,
        log: Callable[[Image.Image, str, int], bool],
    ) -> None:
        """Hand the picture to the loggers; write a PNG if the user named a folder or none takes images."""
        name = f"maps/{branch}"
        taken = log(picture, name, step)
        if self.show is not None:
            self.show(picture, name, step)
        if self.folder is not None or not (taken or self.show):
            folder.mkdir(parents=True, exist_ok=True)
            write_png(folder / f"step-{step:06d}-{branch}.png", picture)

    def _attached(self, model: nn.Module) -> DualBranch:
        """Attach to the model as it is now."""
        example = self.images[:1] if isinstance(self.images, Tensor) else None
        try:
            if self.attach is not None:
                return self.attach(model)
            parameter = next(model.parameters(), torch.empty(0))
            return attach_branch(model, example=None if example is None else example.to(parameter))
        except SigcamError as error:
            name = type(self).__name__
            raise AttachError(
                f"{name} cannot attach to {type(model).__name__}: {error} If the classifier is a part of it, "
                f"say which: {name}(attach=lambda module: sigcam.attach(module.classifier))."
            ) from error

    def _picture(self, net: DualBranch, branch: Branch, step: int) -> Image.Image:
        """Explain the images and arrange their overlays."""
        images = self.images
        if images is None:
            raise ConfigError(f"{type(self).__name__} saw no validation batch: give it images=.")
        if isinstance(images, Tensor):
            images = images.to(next(net.model.parameters()))
        ex = explain(net, images, self.method, branch=branch, classes=self.classes)
        return sheet(ex, f"step {step}: {self.method}, {branch}")


def sheet(ex: Explanation, title: str) -> Image.Image:
    """Return the overlays with their captions, in rows of four."""
    drawn, captions = ex.overlay(), ["\n".join(ex.caption(i)) for i in range(len(ex))]
    starts = range(0, len(drawn), COLUMNS)
    rows = [drawn[i : i + COLUMNS] for i in starts]
    texts = [captions[i : i + COLUMNS] for i in starts]
    return grid(rows, columns=[""] * len(rows[0]), captions=texts, title=title)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the states of Python's, NumPy's and torch's generators back, which a user's dataset may use."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global one is the point)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
