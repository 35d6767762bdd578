"""LightningMaps with the real Lightning: the training is not touched, the pictures arrive."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import sigcam
from sigcam.callbacks import LightningMaps
from sigcam.core.errors import AttachError, ConfigError, DataError
from support.tiny import Gap, Normed, easy_data, images, state

pytestmark = pytest.mark.slow


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Easy data, augmented with the global generators of Python, NumPy and torch."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[index]
        shift = random.random() + np.random.random() + torch.rand(())  # noqa: NPY002
        return image + 0.1 * shift, label


class Lit(lightning.LightningModule):
    """A classifier with dropout and BatchNorm, trained by SGD."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        assert torch.isfinite(self(batch[0])).all()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Parts(Lit):
    """A module without a forward of its own."""

    forward = lightning.LightningModule.forward

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.model(batch[0])


class Recorder(Logger):
    """A logger that keeps images the way W&B's or TensorBoard's takes them."""

    name, version = "recorder", 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.seen = list[tuple[str, int, tuple[int, ...]]]()
        if kind == "wandb":
            self.log_image = self._log_image
        self.experiment = self if kind == "tensorboard" else None  # type: ignore[misc]

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def _log_image(self, key: str, images: list[Image.Image], step: int) -> None:
        self.seen += [(key, step, np.asarray(image).shape) for image in images]

    def add_image(self, tag: str, image: np.ndarray, step: int, dataformats: str) -> None:
        assert dataformats == "HWC"
        self.seen.append((tag, step, image.shape))


def train(folder: Path, *callbacks: Any, make: Callable[[], nn.Module] = Normed, **options: Any) -> Any:
    """Train two epochs on six batches of four; return the module and the trainer."""
    lightning.seed_everything(3)
    wrap = options.pop("wrap", Lit)
    module = wrap(make())
    options = {"max_epochs": 2, "logger": False, "num_sanity_val_steps": 1} | options
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    loader = DataLoader(Noisy(easy_data()), batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(easy_data(8, seed=2), batch_size=4))
    return module, trainer


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Values, gradients, modes, attributes and generators are equal; addresses are not compared."""
    assert one.keys() == other.keys()
    for what, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[what]), what
        elif not what.startswith(("object", "grad object")):
            assert str(value) == str(other[what]), what


@pytest.mark.parametrize("options", [{}, {"inference_mode": False}, {"precision": "bf16-mixed"}], ids=str)
def test_a_training_ends_bit_equal_with_and_without_the_callback(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    maps = LightningMaps(fit=sigcam.FitConfig(), count=2)
    alone, _ = train(tmp_path / "alone", **options)
    before = state(alone)
    watched, _ = train(tmp_path / "watched", maps, **options)
    same(before, state(watched))
    assert maps.net is not None and maps.net.fitted


def test_pictures_and_the_fitted_branch_are_written_where_no_logger_takes_them(tmp_path: Path) -> None:
    maps = LightningMaps(fit=sigcam.FitConfig(), count=3)
    module, _ = train(tmp_path, maps)
    names = {path.name for path in (tmp_path / "maps").iterdir()}
    expected = {"step-000006-centred.png", "step-000012-centred.png", "step-000012-sigmoid.png"}
    assert names == {*expected, "branch.safetensors"}
    net = sigcam.load(tmp_path / "maps" / "branch.safetensors", module)
    assert net.fitted and maps.result is not None and maps.result.images == 24


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_logger_that_takes_images_gets_them_and_no_file_is_written(tmp_path: Path, kind: str) -> None:
    logger = Recorder(kind)
    train(tmp_path, LightningMaps(), logger=logger)
    assert [(tag, step) for tag, step, _ in logger.seen] == [("maps/centred", 6), ("maps/centred", 12)]
    assert all(shape[2] == 3 and shape[0] > 100 for *_, shape in logger.seen)
    assert not list(tmp_path.rglob("*.png"))


def test_a_named_folder_gets_files_beside_the_logger_and_every_counts_validations(tmp_path: Path) -> None:
    logger = Recorder("wandb")
    maps = LightningMaps(images(2), every=2, folder=tmp_path / "shown", classes=1)
    train(tmp_path, maps, logger=logger, max_epochs=4)
    assert [step for _, step, _ in logger.seen] == [12, 24]
    assert {p.name for p in (tmp_path / "shown").iterdir()} == {f"step-0000{n}-centred.png" for n in (12, 24)}


def test_pictures_follow_the_weights_and_show_the_same_images(tmp_path: Path) -> None:
    shown = dict[int, Image.Image]()
    train(tmp_path, LightningMaps(show=lambda picture, name, step: shown.setdefault(step, picture)))
    one, two = (np.asarray(picture) for picture in shown.values())
    assert one.shape == two.shape and (one != two).any()
    assert not list(tmp_path.rglob("*.png"))  # show= takes them


def test_a_part_of_the_module_is_explained_where_attach_says_so(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match=r"cannot attach to Parts: .*LightningMaps\(attach=lambda module"):
        train(tmp_path, LightningMaps(), wrap=Parts, make=Gap)

    def attach(module: Any) -> sigcam.DualBranch:
        return sigcam.attach(module.model, example=images(1), class_names=list("abcd"))

    train(tmp_path, LightningMaps(attach=attach), wrap=Parts, make=Gap)
    assert len(list(tmp_path.rglob("*.png"))) == 2


def test_a_module_with_no_head_is_refused_in_the_sanity_check(tmp_path: Path) -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3 * 16 * 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(x.flatten(1))
            return logits

    with pytest.raises(AttachError, match="LightningMaps cannot attach to Lit: ") as caught:
        train(tmp_path, LightningMaps(), make=Blind)
    assert "\n" not in str(caught.value)


def test_data_that_cannot_be_fitted_on_is_refused_before_the_training(tmp_path: Path) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        num_sanity_val_steps=0,
        callbacks=[LightningMaps(images(2), fit=sigcam.FitConfig())],
    )
    module = Lit(Gap())
    before = module.model.fc.weight.detach().clone()
    loaders = {"a": DataLoader(easy_data(), batch_size=4)}
    with pytest.raises(DataError, match="not from this dict: give images=, and data= to fit on"):
        trainer.fit(module, loaders, DataLoader(easy_data(8), batch_size=4))
    assert torch.equal(module.model.fc.weight, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branch": "sigmoid"}, "branch='sigmoid' cannot be drawn while the classifier trains"),
        ({"every": 0}, "every is a whole number from 1 on, not 0"),
        ({"count": True}, "count is a whole number from 1 on, not True"),
        ({"method": "grad-camm"}, "grad-cam"),
        ({"fit": True}, "fit is a FitConfig or None, not True"),
        ({"data": easy_data()}, "give fit="),
    ],
)
def test_settings_that_mean_nothing_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningMaps(**options)
