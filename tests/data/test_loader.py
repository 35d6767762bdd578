"""Batches keep the order of the samples; files that cannot be read are named and skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sigcam.data.images import images_from_paths
from sigcam.data.loader import Batch, load_batches
from sigcam.data.readers.folder import folder
from sigcam.data.sample import Sample, Samples
from support.data_files import put

SIZE = (6, 4)


def to_tensor(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image.resize(SIZE)))
    return pixels.permute(2, 0, 1).float() / 255


def set_with_damage(root: Path) -> Samples:
    """Ten labelled images; 1, 4, 5 and 9 cannot be read."""
    for index in range(10):
        path = put(root / f"{'ab'[index % 2]}" / f"{index}.png", size=(index + 1, 3))
        if index in (1, 4, 5, 9):
            path.write_bytes(path.read_bytes()[:40])
    samples = sorted(folder(root), key=lambda sample: sample.id[-5])
    return Samples(tuple(samples), ("a", "b"))


def check_damage(batches: list[Batch]) -> None:
    assert [batch.indices for batch in batches] == [[0], [2, 3], [], [6, 7], [8]]
    assert [len(batch.skipped) for batch in batches] == [1, 0, 2, 0, 1]
    assert [id for batch in batches for id, _ in batch.skipped] == [
        "b/1.png",
        "a/4.png",
        "b/5.png",
        "b/9.png",
    ]
    assert all(reason.startswith("cannot read ") for batch in batches for _, reason in batch.skipped)
    for batch in batches:
        assert batch.labels is not None
        assert batch.labels.dtype == torch.int64
        assert batch.labels.tolist() == [index % 2 for index in batch.indices]
        assert batch.images.shape == ((len(batch.indices), 3, 4, 6) if batch.indices else (0, 3, 0, 0))


def test_damaged_files_are_named_and_skipped_in_order(tmp_path: Path) -> None:
    check_damage(list(load_batches(set_with_damage(tmp_path), to_tensor, batch_size=2)))


def test_workers_give_the_same_batches(tmp_path: Path) -> None:
    check_damage(list(load_batches(set_with_damage(tmp_path), to_tensor, batch_size=2, workers=1)))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_opened_images_are_kept_on_request(tmp_path: Path, workers: int) -> None:
    samples = set_with_damage(tmp_path)
    batches = list(load_batches(samples, to_tensor, batch_size=2, workers=workers, keep_pictures=True))
    check_damage(batches)
    for batch in batches:
        assert [picture.size for picture in batch.pictures] == batch.sizes
        for index, image, picture in zip(batch.indices, batch.images, batch.pictures, strict=True):
            assert picture.tobytes() == samples[index].open().tobytes()
            assert torch.equal(image, to_tensor(picture))


def test_without_a_transform_images_are_only_decoded(tmp_path: Path) -> None:
    samples = set_with_damage(tmp_path)
    decoded = list(load_batches(samples, None, batch_size=2, keep_pictures=True))
    assert all(batch.images.shape == (0, 3, 0, 0) for batch in decoded)
    assert [batch.indices for batch in decoded] == [[0], [2, 3], [], [6, 7], [8]]
    assert [picture.width - 1 for batch in decoded for picture in batch.pictures] == [0, 2, 3, 6, 7, 8]
    checked = list(load_batches(samples, None, batch_size=2))
    assert [batch.skipped for batch in checked] == [batch.skipped for batch in decoded]
    assert all(batch.pictures == [] for batch in checked)


def test_unlabelled_pictures_have_no_labels(tmp_path: Path) -> None:
    samples = images_from_paths([put(tmp_path / "x.png")])
    (batch,) = load_batches(samples, to_tensor, batch_size=4)
    assert batch.labels is None
    assert torch.equal(batch.images[0], to_tensor(samples[0].open()))


def test_collect_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    list(load_batches(images_from_paths([put(tmp_path / "x.png")]), to_tensor, batch_size=1))
    assert torch.equal(before, torch.get_rng_state())


def test_other_errors_than_data_errors_are_not_swallowed() -> None:
    def broken() -> Image.Image:
        raise RuntimeError("a bug, not a bad file")

    with pytest.raises(RuntimeError, match="a bug"):
        list(load_batches(Samples((Sample("x", broken),), ()), to_tensor, batch_size=1))
