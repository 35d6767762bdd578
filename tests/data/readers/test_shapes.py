"""The synthetic birds: same for the same seed, exact boxes and masks, sizes as promised."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigcam.core.errors import DataError
from sigcam.data.readers.shapes import SHAPE_CLASSES, shapes


def tight_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """The obvious version: first and last row and column that hold an object pixel."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def test_shapes_are_the_same_for_any_count_and_order() -> None:
    few, many = shapes(6, size=64), shapes(20, size=64)
    for index in (5, 0, 3):
        assert few[index].id == many[index].id
        assert few[index].boxes == many[index].boxes
        assert few[index].open().tobytes() == many[index].open().tobytes()
        assert few[index].open().tobytes() == few[index].open().tobytes()


def test_shapes_survive_pickling() -> None:
    sample = shapes(2, size=64)[1]
    copy = pickle.loads(pickle.dumps(sample))
    assert (copy.id, copy.label, copy.boxes) == (sample.id, sample.label, sample.boxes)
    assert copy.open().tobytes() == sample.open().tobytes()


def test_seed_and_split_change_every_picture() -> None:
    pictures = [
        shapes(1, split=split, seed=seed, size=64)[0].open().tobytes()
        for split in ("train", "val", "test")
        for seed in (0, 1)
    ]
    assert len(set(pictures)) == 6


def test_shapes_are_balanced_and_have_unique_ids() -> None:
    samples = shapes(48, size=32)
    assert set(Counter(sample.label for sample in samples).values()) == {48 // len(SHAPE_CLASSES)}
    assert len({sample.id for sample in samples}) == 48
    assert samples.classes == SHAPE_CLASSES
    assert len(set(SHAPE_CLASSES)) == 8


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), index=st.integers(0, 7), size=st.integers(64, 256))
def test_box_is_the_tight_box_of_the_mask(seed: int, index: int, size: int) -> None:
    sample = shapes(index + 1, seed=seed, size=size)[index]
    assert sample.open_mask is not None
    mask = sample.open_mask()
    assert mask.shape == (size, size)
    assert mask.dtype == np.uint8
    assert set(np.unique(mask)) == {0, 1}
    assert sample.boxes == (tight_box(mask),)


@pytest.mark.slow
def test_box_covers_10_to_60_percent_of_the_picture() -> None:
    areas = []
    for sample in shapes(300):
        assert sample.boxes is not None
        ((x0, y0, x1, y1),) = sample.boxes
        assert 0 <= x0 < x1 < 224
        assert 0 <= y0 < y1 < 224
        areas.append((x1 - x0 + 1) * (y1 - y0 + 1) / 224**2)
    assert min(areas) >= 0.10
    assert max(areas) <= 0.60
    assert min(areas) < 0.14  # the whole range is used
    assert max(areas) > 0.50


def test_mask_is_where_the_picture_changes_with_the_bird(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = shapes(3)[2]
    assert sample.open_mask is not None
    with_bird, mask = np.asarray(sample.open(), dtype=int), sample.open_mask().astype(bool)
    monkeypatch.setattr("sigcam.data.shape_drawing._bird", lambda key: [])
    changed = (np.asarray(sample.open(), dtype=int) != with_bird).any(2)
    assert changed[mask].mean() > 0.99
    grown = mask | np.roll(mask, 1, 0) | np.roll(mask, -1, 0) | np.roll(mask, 1, 1) | np.roll(mask, -1, 1)
    assert changed[~grown].mean() < 0.001  # outside, only pixels that the outline half covers


def test_shapes_have_the_asked_size_and_are_rgb() -> None:
    picture = shapes(1, size=100)[0].open()
    assert (picture.mode, picture.size) == ("RGB", (100, 100))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"count": 0}, "shapes cannot make 0 images: ask for 1 or more, e.g. shapes:500."),
        ({"split": "dev"}, "shapes has no split 'dev': choose one of train, val, test."),
        ({"seed": -1}, "shapes cannot use the seed -1: seeds are 0 or more."),
        ({"size": 8}, "shapes cannot draw at 8 pixels: the parts need a size of 32 or more."),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        shapes(**arguments)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


def test_a_scene_is_the_test_picture_without_its_bird():
    from sigcam.data.readers.shapes import scenes

    bird, scene = shapes(3, split="test")[2], scenes(3)[2]
    assert scene.label is None and bird.open_mask is not None
    mask = bird.open_mask() == 1
    differs = np.abs(np.asarray(bird.open(), dtype=int) - np.asarray(scene.open(), dtype=int)).max(2) > 0
    assert differs[mask].mean() > 0.9  # the bird is gone
    assert bird.boxes is not None
    x0, y0, x1, y1 = bird.boxes[0]
    differs[max(y0 - 3, 0) : y1 + 4, max(x0 - 3, 0) : x1 + 4] = False
    assert not differs.any()  # and all that is not near it is as it was
