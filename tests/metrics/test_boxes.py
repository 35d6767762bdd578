"""From maps to boxes: counts of the public evaluator, hand-worked cases of PROTOCOL section 8, and OpenCV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.metrics.boxes import (
    THRESHOLDS,
    Mode,
    best_ious,
    boxes_at,
    cut_at_percentile,
    foreground,
    scaled_boxes,
)
from sigcam.metrics.contours import contours
from support.oracles import contour_boxes, iou_matrix, largest_box

Array = NDArray[Any]

MODES: tuple[Mode, ...] = ("all", "largest")
ROUNDED = np.array([round(i / 1000, 3) for i in range(1001)])


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


def as_map(levels: Array) -> Tensor:
    """A map with these levels, whatever rounding does to it."""
    return torch.from_numpy(np.where(levels == 255, 1, (levels + 0.5) / 255).astype(np.float32))


def oracle(values: Array, truth: Array) -> dict[str, Array]:
    """Per mode, the best IoU at all thresholds by OpenCV; the mask changes only at levels that occur."""
    levels = (255 * values).astype(np.uint8)
    occurring = np.unique([0, *levels.flat])
    last = np.searchsorted(occurring, (ROUNDED * levels.max()).astype(int), side="right") - 1
    found = {}
    for mode in MODES:
        boxes = [contour_boxes(levels, int(cut), mode) for cut in occurring]
        ious = iou_matrix(np.concatenate(boxes), truth).max(1)
        best = np.maximum.reduceat(ious, np.cumsum([0, *map(len, boxes[:-1])]))
        found[mode] = best[last]
    return found


# ----------------------------------------------------------------------------------------- all thresholds


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), [("all", "correct_multi"), ("largest", "correct_largest")])
def test_counts_equal_the_public_evaluators_at_every_threshold(mode: Any, name: str) -> None:
    with np.load(Path(__file__).parents[1] / "golden" / "wsol_counts.npz") as golden:
        maps = torch.from_numpy(golden["maps"])
        boxes = [
            scaled_boxes(torch.from_numpy(each[each[:, 0] >= 0]), (width, height), (224, 224))
            for each, (width, height) in zip(golden["boxes"], golden["sizes"].tolist(), strict=True)
        ]
        expected = golden[name]
    for precise in (maps, maps.float(), maps.double()):
        ious = best_ious(precise, boxes, mode=mode)
        counts = np.stack([(ious >= percent / 100).sum(0).numpy() for percent in (30, 50, 70)])
        assert np.array_equal(counts, expected)


def plateaus(generator: np.random.Generator, height: int, width: int) -> Array:
    """Few levels: large flat regions, and ties wherever one looks."""
    return generator.choice(generator.integers(0, 256, generator.integers(2, 6)), (height, width))


def rings(generator: np.random.Generator, height: int, width: int) -> Array:
    """Rings inside rings around a centre that may lie outside, with gaps and diagonal breaks."""
    y, x = np.mgrid[:height, :width]
    away = np.maximum(abs(y - generator.integers(-2, height + 2)), abs(x - generator.integers(-2, width + 2)))
    levels = generator.choice(generator.integers(0, 256, 6), height + width + 4)[away]
    return np.where(generator.random((height, width)) < 0.1, generator.integers(0, 256), levels)


def diagonals(generator: np.random.Generator, height: int, width: int) -> Array:
    y, x = np.mgrid[:height, :width]
    slope = generator.choice([-1, 1])
    return generator.integers(0, 256, 400)[(y + slope * x) % generator.integers(2, 6) + x // 4]


def noise(generator: np.random.Generator, height: int, width: int) -> Array:
    return generator.integers(0, 256, (height, width)) // generator.choice([1, 32, 32, 100])


def smooth(generator: np.random.Generator, height: int, width: int) -> Array:
    small = generator.random((4, 4)).astype(np.float32)
    large = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    return np.clip(255 * large, 0, 255).astype(np.int64) // generator.choice([1, 20])


def points(generator: np.random.Generator, height: int, width: int) -> Array:
    """Single pixels above nothing, or missing from a full map."""
    sparse = np.where(generator.random((height, width)) < 0.15, generator.integers(1, 256), 0)
    return sparse if generator.random() < 0.5 else 255 - sparse


def framed(generator: np.random.Generator, height: int, width: int) -> Array:
    """What touches the frame: a border, or all but the border."""
    levels = np.full((height, width), generator.integers(0, 256))
    levels[1:-1, 1:-1] = generator.integers(0, 256, levels[1:-1, 1:-1].shape) // 64 * 64
    return levels


def constant(generator: np.random.Generator, height: int, width: int) -> Array:
    return np.full((height, width), generator.choice([0, 1, 128, 255]))


KINDS: tuple[Callable[[np.random.Generator, int, int], Array], ...] = (
    plateaus, rings, diagonals, noise, smooth, points, framed, constant,
)  # fmt: skip


def cases(count: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """Small maps (H, W) of every kind and size, with one to three boxes (G, 4)."""
    generator = np.random.default_rng(seed)
    for case in range(count):
        height, width = generator.integers(1, 15, 2).tolist()
        levels = KINDS[case % len(KINDS)](generator, height, width)
        corners = generator.integers(0, (width + 1, height + 1), (generator.integers(1, 4), 2, 2))
        corners.sort(1)
        yield levels, corners.reshape(-1, 4)


@pytest.mark.slow
def test_every_iou_of_ten_thousand_maps_is_that_of_opencvs_contours() -> None:
    for case, (levels, truth) in enumerate(cases(10_000, seed=0)):
        values = as_map(levels)
        for mode, expected in oracle(values.numpy(), truth).items():
            found = best_ious(values[None], [torch.from_numpy(truth)], mode=mode)[0].numpy()
            assert np.array_equal(found, expected), (case, mode, levels, truth)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 40), st.sampled_from(KINDS))
def test_every_iou_of_any_larger_map_is_that_of_opencvs_contours(
    seed: int, height: int, width: int, kind: Callable[..., Array]
) -> None:
    values = as_map(kind(np.random.default_rng(seed), height, width))
    truth = np.array([[0, 0, width // 2, height // 3], [width // 3, height // 3, width, height]])
    for mode, expected in oracle(values.numpy(), truth).items():
        found = best_ious(values[None], [torch.from_numpy(truth)], mode=mode)[0].numpy()
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_batch_equals_one_by_one_on_any_number_of_threads(mode: Any, threads: int) -> None:
    generator = np.random.default_rng(1)
    maps = torch.stack([as_map(kind(generator, 21, 34)) for kind in KINDS])
    boxes = [torch.tensor([[i, i, 2 * i + 9, i + 8]] * (1 + i % 3)) for i in range(len(maps))]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = best_ious(maps, boxes, mode=mode)
    finally:
        torch.set_num_threads(before)
    assert together.shape == (len(maps), 1001) and together.dtype == torch.float64
    for i in range(len(maps)):
        assert torch.equal(together[i], best_ious(maps[i : i + 1], boxes[i : i + 1], mode=mode)[0])


def test_a_transposed_view_of_a_map_has_the_ious_of_its_copy() -> None:
    maps, boxes = torch.rand(2, 30, 50).transpose(1, 2), [torch.tensor([[3, 4, 20, 44]])] * 2
    assert torch.equal(best_ious(maps, boxes), best_ious(maps.contiguous(), boxes))


def test_no_maps_have_no_ious() -> None:
    assert best_ious(torch.zeros(0, 5, 6), []).shape == (0, 1001)


def test_thresholds_are_thousandths_as_written() -> None:
    assert THRESHOLDS.tolist() == [float(f"0.{i:03d}") for i in range(1000)] + [1.0]


def test_the_best_box_counts_unless_the_first_is_asked_for() -> None:
    truth = [torch.tensor([[0, 200, 20, 220], [30, 20, 90, 60]])]
    assert best_ious(golden_map(), truth)[0, 700] == 1
    assert best_ious(golden_map(), truth, first=True)[0, 700] == 0


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_is_above_the_first_pixel_is_the_box(mode: Any) -> None:
    truth = [torch.tensor([[0, 0, 1, 4]])]
    assert best_ious(golden_map(), truth, mode=mode)[0, 1000] == 1 / 10
    assert (best_ious(torch.zeros(1, 20, 30), truth, mode=mode) == 1 / 10).all()


@pytest.mark.parametrize(
    ("drawn", "truth", "expected"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), 1),
        ((10, 10, 19, 19), (15, 15, 24, 24), 25 / 175),
        ((30, 20, 90, 60), (30, 20, 89, 59), 2400 / 2501),
    ],
)
def test_ious_count_both_ends_as_inside(
    drawn: tuple[int, int, int, int], truth: tuple[int, int, int, int], expected: float
) -> None:
    x0, y0, x1, y1 = drawn
    values = torch.zeros(1, 224, 224)
    values[0, y0:y1, x0:x1] = 1  # boxes end one past the last pixel
    assert best_ious(values, [torch.tensor([truth])])[0, 200] == expected


def test_a_map_that_is_above_nowhere_but_one_level_has_its_box_at_all_thresholds() -> None:
    values = torch.zeros(1, 12, 9)
    values[0, 3:6, 2:7] = 1.5 / 255
    ious = best_ious(values, [torch.tensor([[2, 3, 7, 6]])])
    assert (ious[0, :1000] == 1).all() and ious[0, 1000] == 0


# ------------------------------------------------------------------------------------------- one threshold


def test_contours_have_opencvs_boxes_areas_and_order() -> None:
    generator = np.random.default_rng(2)
    for case in range(10_000):
        share = (0.2, 0.35, 0.5, 0.65, 0.8, 0.92)[case % 6]
        mask = generator.random(generator.integers(1, 14, 2)) < share
        theirs, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_TREE, cv2.CHAIN_APPROX_SIMPLE)
        rects = [(*cv2.boundingRect(each), 2 * cv2.contourArea(each)) for each in theirs]
        expected = [[x, y, x + w - 1, y + h - 1, int(twice)] for x, y, w, h, twice in rects]
        assert contours(mask).tolist() == expected, mask


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.floats(0, 1))
def test_boxes_are_opencvs_largest_polygon_first(seed: int, kind: Callable[..., Array], tau: float) -> None:
    values = as_map(kind(np.random.default_rng(seed), 13, 18))
    levels = (255 * values.numpy()).astype(np.uint8)
    expected = contour_boxes(levels, int(tau * levels.max()), "all")
    found = boxes_at(values[None], tau, "all")[0].tolist()
    assert sorted(found) == sorted(expected.tolist())
    assert found[0] == box(values[None], tau) == list(largest_box(values.numpy(), tau))


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.2, 0.204])
def test_the_largest_region_of_the_golden_map_at_low_thresholds(threshold: float) -> None:
    assert box(golden_map(), threshold) == [100, 120, 210, 200]


@pytest.mark.parametrize("threshold", [0.499, 0.7, 0.999])
def test_the_brightest_region_of_the_golden_map_at_high_thresholds(threshold: float) -> None:
    assert box(golden_map(), threshold) == [30, 20, 90, 60]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.1, [[100, 120, 210, 200], [30, 20, 90, 60], [149, 149, 152, 152], [9, 7, 10, 8], [5, 5, 6, 6]]),
        (0.2, [[100, 120, 210, 200], [30, 20, 90, 60], [149, 149, 152, 152], [5, 5, 6, 6]]),
        (0.204, [[100, 120, 210, 200], [30, 20, 90, 60], [149, 149, 152, 152]]),
        (0.499, [[30, 20, 90, 60]]),
        (0.999, [[30, 20, 90, 60]]),
        (1.0, [[0, 0, 0, 0]]),
    ],
)
def test_all_contours_of_the_golden_map_are_the_golden_ones(
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


def test_a_ring_has_an_outer_contour_and_that_of_its_hole() -> None:
    values = torch.zeros(1, 20, 20)
    values[0, 2:18, 2:18] = 1
    values[0, 6:14, 6:14] = 0
    assert boxes_at(values, 0.2, "all")[0].tolist() == [[2, 2, 18, 18], [5, 5, 15, 15]]


def test_the_largest_is_told_by_polygon_not_by_pixels_and_ties_go_to_the_lower_one() -> None:
    values = torch.zeros(1, 20, 40)
    values[0, 3, 1:39] = 1  # thirty-eight pixels, no area
    values[0, 8:10, 20:22] = values[0, 12:14, 4:6] = 1
    assert box(values, 0.2) == [4, 12, 6, 14]
    assert best_ious(values, [torch.tensor([[4, 12, 6, 14]])], mode="largest")[0, 200] == 1


def test_a_pixel_needs_level_52_at_a_fifth() -> None:
    values = torch.tensor([[[1.0, 51.9 / 255, 52 / 255, 52.1 / 255]]])
    assert foreground(values, 0.2)[0, 0].tolist() == [True, False, True, True]


@pytest.mark.parametrize("highest", [1, 7, 100, 254, 255])
def test_the_level_of_every_threshold_is_the_public_evaluators(highest: int) -> None:
    ramp = as_map(np.arange(highest + 1))[None, None]
    levels = (ramp[0, 0].numpy() * 255).astype(np.uint8)
    for step in range(1001):
        threshold = round(step / 1000, 3)
        expected = levels > int(threshold * levels.max())
        assert np.array_equal(foreground(ramp, threshold)[0, 0].numpy(), expected), threshold


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_are_rounded_as_numpy_does_in_the_maps_own_precision(dtype: torch.dtype) -> None:
    near = torch.arange(256, dtype=torch.float64) / 255  # some products round up to a level, some down
    values = (near + torch.tensor([[-1e-8], [0], [1e-8]])).clamp(0, 1).to(dtype)
    levels = (255 * values.numpy()).astype(np.uint8)
    for level in range(255):
        above = foreground(values[None], (level + 0.5) / 255)[0].numpy()
        assert np.array_equal(above, levels > level)


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


# ------------------------------------------------------------------------------- ground truth and refusals


@pytest.mark.parametrize(
    ("given_box", "size", "expected"),
    [
        ((111, 108, 441, 193), (500, 375), [49, 64, 197, 115]),
        ((60, 27, 385, 331), (500, 335), [26, 18, 172, 221]),
        ((1, 1, 276, 182), (276, 182), [0, 1, 224, 224]),
    ],
)
def test_boxes_are_scaled_as_the_public_evaluator_does(
    given_box: tuple[int, ...], size: tuple[int, int], expected: list[int]
) -> None:
    assert scaled_boxes(torch.tensor([given_box]), size, (224, 224)).tolist() == [expected]


def test_boxes_are_multiplied_before_they_are_divided() -> None:
    for width in range(1, 700):
        xs = torch.arange(width + 1)
        found = scaled_boxes(torch.stack([xs, xs, xs, xs], 1), (width, width), (224, 224))
        assert found[:, 0].tolist() == [int(x * 224 / width) for x in range(width + 1)]


def test_boxes_may_reach_one_past_the_last_pixel() -> None:
    ious = best_ious(torch.ones(1, 8, 6), [torch.tensor([[0, 0, 6, 8]])])
    assert ious[0, 0] == 48 / 63


def spoiled(value: float) -> Tensor:
    maps = torch.rand(3, 6, 8)
    maps[1, 2, 3] = value
    return maps


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "has NaN"),
        (-0.01, "values from -0.01 to"),
        (1.0000002, r"to 1: bring maps into \[0, 1\]"),
        (float("inf"), "to inf"),
    ],
)
def test_a_map_outside_0_to_1_is_refused_by_its_images_name(value: float, said: str) -> None:
    boxes = [torch.tensor([[0, 0, 3, 3]])] * 3
    with pytest.raises(DataError, match=f"map of image 'b.jpg' has .*{said.removeprefix('has ')}"):
        best_ious(spoiled(value), boxes, ids=["a.jpg", "b.jpg", "c.jpg"])
    with pytest.raises(DataError, match="map of image 1 has"):
        boxes_at(spoiled(value), 0.2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([[5, 0, 3, 3]], "inverted"),
        ([[0, 4, 3, 3]], "inverted"),
        ([[-1, 0, 3, 3]], "beyond its 8 x 6 map"),
        ([[0, 0, 9, 3]], "beyond its 8 x 6 map"),
        ([[0, 0, 3, 3], [0, 0, 3, 7]], "beyond its 8 x 6 map"),
        ([[0, 0, 3.5, 3]], "whole pixels"),
        ([[0, 0, float("nan"), 3]], "whole pixels"),
        ([[0, 0, 3]], "shape"),
        ([0, 0, 3, 3], "shape"),
        (torch.zeros(0, 4), "shape"),
    ],
)
def test_a_wrong_box_is_refused_by_its_images_name(wrong: Any, said: str) -> None:
    boxes = [torch.tensor([[0, 0, 8, 6]]), torch.as_tensor(wrong), torch.tensor([[0, 0, 3, 3]])]
    with pytest.raises(DataError, match=f"image 'b.jpg' .*{said}"):
        best_ious(torch.rand(3, 6, 8), boxes, ids=["a.jpg", "b.jpg", "c.jpg"])


@pytest.mark.parametrize("shape", [(6, 8), (1, 3, 6, 8), (1, 0, 8), (1, 1, 5000)])
def test_maps_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="maps"):
        best_ious(torch.zeros(shape), [torch.tensor([[0, 0, 3, 3]])] * shape[0])


def test_as_many_boxes_and_ids_as_maps_are_needed() -> None:
    one = torch.tensor([[0, 0, 3, 3]])
    with pytest.raises(DataError, match="2 maps but boxes of 1"):
        best_ious(torch.rand(2, 6, 8), [one])
    with pytest.raises(DataError, match="2 maps but 1 ids"):
        best_ious(torch.rand(2, 6, 8), [one, one], ids=["a.jpg"])


# --- percentiles ---


@pytest.mark.parametrize("percentile", [50.0, 90.0, 100.0])
def test_a_threshold_of_a_percentile_is_a_fraction_of_the_value_that_sorting_finds(percentile: float) -> None:
    maps = torch.rand(4, 11, 11, generator=torch.Generator().manual_seed(0)) * 0.7
    cut = cut_at_percentile(maps, percentile)
    for i in range(4):
        ordered = sorted(maps[i].flatten().tolist())
        place = percentile / 100 * (len(ordered) - 1)  # a whole number for these sizes
        value = ordered[round(place)]
        for threshold in (0.1, 0.35, 0.8):
            assert torch.equal(cut[i] > threshold, maps[i] > np.float32(threshold * value))
    assert float(cut.max()) == 1 and float(cut.min()) >= 0


def test_maps_without_a_percentile_keep_their_maximum() -> None:
    maps = torch.zeros(2, 10, 10)
    maps[0, 2, 3], maps[0, 2, 4] = 0.5, 0.25
    cut = cut_at_percentile(maps, 90)
    assert float(cut[0, 2, 3]) == 1 and float(cut[0, 2, 4]) == 0.5 and not bool(cut[1].any())
