"""Boxes by runs and chains equal those of the contours of the enlarged map."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.deployment.largest_box import Axis, enlarged_extremes, largest_boxes
from sigcam.metrics.boxes import boxes_at

SIZES = [
    (7, 7, 224, 224),
    (3, 5, 32, 50),
    (5, 3, 23, 41),
    (14, 9, 70, 61),
    (7, 7, 7, 7),
    (1, 1, 8, 8),
    (1, 6, 9, 64),
]


def enlarged(maps: Tensor, height: int, width: int) -> Tensor:
    """The maps as explain enlarges them."""
    return F.interpolate(maps[:, None], (height, width), mode="bilinear", align_corners=False)[:, 0]


def drawn(maps: Tensor, threshold: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Boxes as `boxes_at` returns them, and their scores."""
    rows, columns = Axis.of(maps.shape[1], height, maps.device), Axis.of(maps.shape[2], width, maps.device)
    boxes, scores, found = largest_boxes(maps, torch.full((len(maps),), threshold), rows, columns)
    boxes[:, 2:] = torch.minimum(boxes[:, 2:] + 1, torch.tensor([width - 1.0, height - 1.0]))
    return boxes * found[:, None], scores


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("size", SIZES)
def test_boxes_equal_those_of_contours(size, threshold):
    height, width = size[2:]
    maps = torch.rand(60, *size[:2], generator=torch.Generator().manual_seed(0))
    expected = torch.cat(boxes_at(enlarged(maps, height, width), threshold, absolute=True))
    assert torch.equal(drawn(maps, threshold, height, width)[0].long(), expected)


def test_a_hole_counts_as_area_and_what_lies_in_it_does_not_win():
    maps = torch.zeros(1, 9, 14)
    maps[0, 1:6, 1:6] = 1
    maps[0, 2:5, 2:5] = 0  # 16 cells around a hole of 9, with a cell in it
    maps[0, 3, 3] = 1
    maps[0, 1:5, 8:13] = 1  # 20 cells without a hole
    assert drawn(maps, 0.5, 9, 14)[0][0].tolist() == [1, 1, 6, 6]
    expected = torch.cat(boxes_at(enlarged(maps, 90, 140), 0.5, absolute=True))
    assert drawn(maps, 0.5, 90, 140)[0].tolist() == expected.tolist()


def test_of_equal_areas_the_last_in_reading_order_wins():
    maps = torch.zeros(1, 5, 9)
    maps[0, 1:3, 1:3] = maps[0, 2:4, 5:7] = 1
    assert drawn(maps, 0.5, 5, 9)[0][0].tolist() == [5, 2, 7, 4]
    assert torch.cat(boxes_at(maps, 0.5, absolute=True)).tolist() == [[5, 2, 7, 4]]


def test_a_score_is_the_mean_of_the_map_in_the_box_and_zero_without_one():
    maps = torch.rand(5, 7, 7, generator=torch.Generator().manual_seed(1))
    maps[0] = 0.1
    rows = Axis.of(7, 64, maps.device)
    boxes, scores, found = largest_boxes(maps, torch.full((5,), 0.5), rows, rows)
    for pixels, box, score, there in zip(enlarged(maps, 64, 64), boxes.long(), scores, found, strict=True):
        x0, y0, x1, y1 = box.tolist()
        expected = pixels[y0 : y1 + 1, x0 : x1 + 1].mean() if there else torch.tensor(0.0)
        assert torch.allclose(score, expected, atol=1e-5)
    assert found.tolist() == [False, True, True, True, True] and not boxes[0].any()


def test_extremes_are_those_of_all_pixels():
    maps = torch.randn(20, 5, 7, generator=torch.Generator().manual_seed(2))
    low, high = enlarged_extremes(maps, Axis.of(5, 61, maps.device), Axis.of(7, 50, maps.device))
    pixels = enlarged(maps, 61, 50).flatten(1)
    assert torch.allclose(low, pixels.amin(1), atol=1e-5) and torch.allclose(high, pixels.amax(1), atol=1e-5)
