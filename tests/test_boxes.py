"""From maps to boxes: the golden cases of PROTOCOL section 8, and OpenCV where the two rules agree."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import largest_box
from torch import Tensor

from sigcam.boxes import boxes_at, foreground, regions


def golden_map() -> Tensor:
    values = torch.zeros(224, 224)
    values[20:60, 30:90] = 1.0
    values[120:200, 100:210] = 0.5
    values[150, 150] = 0
    values[5, 5] = 0.204
    values[7, 9] = 0.203
    return values[None]


def box(maps: Tensor, threshold: float) -> list[int]:
    """The one box of one map."""
    (found,) = boxes_at(maps, threshold)
    assert found.shape == (1, 4)
    return found[0].tolist()


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.2, 0.204])
def test_the_largest_region_of_the_golden_map_at_low_thresholds(threshold: float) -> None:
    assert box(golden_map(), threshold) == [100, 120, 210, 200]


@pytest.mark.parametrize("threshold", [0.499, 0.7, 0.999])
def test_the_brightest_region_of_the_golden_map_at_high_thresholds(threshold: float) -> None:
    assert box(golden_map(), threshold) == [30, 20, 90, 60]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.1, [[100, 120, 210, 200], [30, 20, 90, 60], [5, 5, 6, 6], [9, 7, 10, 8]]),
        (0.2, [[100, 120, 210, 200], [30, 20, 90, 60], [5, 5, 6, 6]]),
        (0.204, [[100, 120, 210, 200], [30, 20, 90, 60]]),
        (0.499, [[30, 20, 90, 60]]),
        (1.0, [[0, 0, 0, 0]]),
    ],
)
def test_all_regions_of_the_golden_map_are_the_golden_ones_without_holes(
    threshold: float, expected: list[list[int]]
) -> None:
    assert boxes_at(golden_map(), threshold, "all")[0].tolist() == expected


def test_nothing_is_one_empty_box() -> None:
    for threshold in (0.0, 0.2, 1.0):
        assert box(torch.zeros(1, 20, 30), threshold) == [0, 0, 0, 0]


def test_ones_with_a_zero_corner_reach_the_last_pixel_but_not_past_it() -> None:
    values = torch.ones(1, 224, 224)
    values[0, 0, 0] = 0
    assert box(values, 0.2) == [0, 0, 223, 223]


def test_diagonal_pixels_are_one_region() -> None:
    values = torch.zeros(1, 20, 20)
    values[0, [2, 3, 4], [2, 3, 4]] = 1
    assert box(values, 0.2) == [2, 2, 5, 5]


def test_a_ring_is_one_region() -> None:
    values = torch.zeros(1, 20, 20)
    values[0, 2:18, 2:18] = 1
    values[0, 6:14, 6:14] = 0
    assert boxes_at(values, 0.2, "all")[0].tolist() == [[2, 2, 18, 18]]


def test_a_pixel_needs_level_52_at_a_fifth() -> None:
    values = torch.tensor([[[1.0, 51.9 / 255, 52 / 255, 52.1 / 255]]])
    assert foreground(values, 0.2)[0, 0].tolist() == [True, False, True, True]


def test_the_level_of_every_threshold_is_the_public_evaluators() -> None:
    ramp = (torch.arange(256) / 255).clamp(max=1)[None, None]
    levels = (ramp[0, 0].numpy() * 255).astype(np.uint8)
    for step in range(1001):
        threshold = round(step / 1000, 3)
        expected = levels > int(threshold * levels.max())
        assert np.array_equal(foreground(ramp, threshold)[0, 0].numpy(), expected), threshold


@given(st.integers(0, 10_000))
def test_regions_are_told_apart_as_opencv_does(seed: int) -> None:
    import cv2

    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(12, 17, generator=generator) < 0.35).numpy()
    _, _, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    theirs = sorted((x, y, x + w - 1, y + h - 1, area) for x, y, w, h, area in stats[1:].tolist())
    assert sorted(map(tuple, regions(mask).tolist())) == theirs


@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.2, 0.5, 0.8]))
def test_the_box_of_one_smooth_blob_is_the_public_evaluators(seed: int, threshold: float) -> None:
    generator = np.random.default_rng(seed)
    (y, x), (h, w) = generator.uniform(10, 40, 2), generator.uniform(3, 15, 2)
    rows, columns = np.mgrid[:50, :60]
    values = np.exp(-(((rows - y) / h) ** 2) - ((columns - x) / w) ** 2).astype(np.float32)
    values = (values - values.min()) / (values.max() - values.min())
    assert box(torch.from_numpy(values)[None], threshold) == list(largest_box(values, threshold))


def test_each_image_has_its_own_boxes() -> None:
    maps = torch.cat([golden_map(), torch.zeros(1, 224, 224), golden_map().flip(2)])
    found = boxes_at(maps, 0.5)
    assert [tuple(b[0].tolist()) for b in found] == [(30, 20, 90, 60), (0, 0, 0, 0), (134, 20, 194, 60)]
