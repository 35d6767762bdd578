"""TrainerMaps with the real Trainer of transformers: the training is not touched, the pictures arrive."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import sigcam
from sigcam.callbacks import TrainerMaps
from sigcam.core.errors import AttachError, DataError
from support.tiny import easy_data, images, state

pytestmark = pytest.mark.slow


class Rows(Dataset[dict[str, Tensor]]):
    """Items as the Trainer wants them, augmented at random."""

    def __init__(self, count: int) -> None:
        self.data = easy_data(count)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, label = self.data[index]
        return {"pixel_values": image + 0.1 * torch.rand(()), "labels": label}


class Endless(IterableDataset[dict[str, Tensor]]):
    """A stream without indices."""

    def __iter__(self) -> Any:
        return iter(Rows(24)[i] for i in range(24))


def classifier() -> Any:
    """A small ResNet with four classes and random weights."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def train(folder: Path, *callbacks: Any, model: Any = None, data: Any = None, **options: Any) -> Any:
    """Train two epochs of four steps, with an evaluation after each."""
    options = {"num_train_epochs": 2, "eval_strategy": "epoch"} | options
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=6,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=3,
        **options,
    )
    trainer = transformers.Trainer(
        model=model or classifier(),
        args=args,
        train_dataset=data or Rows(24),
        eval_dataset=Rows(8),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=str)
def test_a_training_ends_bit_equal_with_and_without_the_callback(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    alone = train(tmp_path / "alone", **options)
    before = state(alone)
    maps = TrainerMaps(fit=sigcam.FitConfig(), count=2)
    after = state(train(tmp_path / "watched", maps, **options))
    assert before.keys() == after.keys()
    for what, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, after[what]), what
        elif what.startswith(("mode", "attributes", "global", "python", "numpy")):
            assert value == after[what], what
    assert maps.net is not None and maps.net.fitted


def test_pictures_and_the_fitted_branch_are_written(tmp_path: Path) -> None:
    maps = TrainerMaps(images(5), fit=sigcam.FitConfig())
    model = train(tmp_path, maps)
    names = {path.name for path in (tmp_path / "maps").iterdir()}
    expected = {"step-000004-centred.png", "step-000008-centred.png", "step-000008-sigmoid.png"}
    assert names == {*expected, "branch.safetensors"}
    assert sigcam.load(tmp_path / "maps" / "branch.safetensors", model).fitted
    assert maps.result is not None and maps.result.images == 24


def test_a_run_of_weights_and_biases_gets_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = list[dict[str, Any]]()
    wandb = SimpleNamespace(run=object(), log=logged.append, Image=lambda picture: picture)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(tmp_path, TrainerMaps(every=2))
    assert [(list(row), row["train/global_step"]) for row in logged] == [
        (["maps/centred", "train/global_step"], 8)
    ]
    assert isinstance(logged[0]["maps/centred"], Image.Image)
    assert not list(tmp_path.rglob("*.png"))


def test_a_model_without_a_head_is_refused_before_the_training(tmp_path: Path) -> None:
    model = transformers.ResNetModel(classifier().config)
    with pytest.raises(AttachError, match="TrainerMaps cannot attach to ResNetModel: ") as caught:
        train(tmp_path, TrainerMaps(images(2)), model=model)
    assert "\n" not in str(caught.value)


def test_a_stream_cannot_be_fitted_on_and_is_refused_before_the_training(tmp_path: Path) -> None:
    maps = TrainerMaps(images(2), fit=sigcam.FitConfig())
    with pytest.raises(DataError, match="indexed dataset"):
        train(tmp_path, maps, data=Endless(), max_steps=8)
    train(
        tmp_path,
        TrainerMaps(images(2), fit=sigcam.FitConfig(), data=easy_data()),
        data=Endless(),
        max_steps=4,
    )
    assert (tmp_path / "maps" / "branch.safetensors").is_file()
