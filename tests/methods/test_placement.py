"""Maps and boxes of the part of a picture that a network sees, in the picture's pixels."""

import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.core.types import GridSize, ImageSize
from sigcam.methods.placement import place_boxes, place_map
from sigcam.metrics.boxes import boxes_at
from sigcam.models.preprocess import Preprocess


@pytest.mark.parametrize("resize", [None, 16, 20, (20, 30), 12])
@pytest.mark.parametrize("size", [(64, 16), (30, 70), (33, 33)])
def test_the_region_is_where_the_pixels_of_the_crop_come_from(
    resize: int | tuple[int, int] | None, size: tuple[int, int]
) -> None:
    transform = Preprocess(16, 16, resize=resize)
    columns, rows = np.meshgrid(np.linspace(0, 250, size[0]), np.linspace(0, 250, size[1]))
    picture = Image.fromarray(np.stack([columns, rows, 0 * rows + 255], -1).round().astype(np.uint8))
    crop = np.asarray(transform.picture(picture)).astype(float)
    x0, y0, x1, y1 = transform.region(size)
    for axis, (low, high, side) in enumerate(((x0, x1, size[0]), (y0, y1, size[1]))):
        middles = low + (np.arange(16) + 0.5) * (high - low) / 16
        line = crop[8, :, axis] if axis == 0 else crop[:, 8, axis]
        inside = (middles > side / 8) & (middles < 7 * side / 8)  # the edges are blurred
        expected = (middles - 0.5) * 250 / (side - 1)
        assert inside.any() and np.abs(line - expected)[inside].max() < 250 / 16


def test_a_map_is_placed_where_the_network_sees_and_keeps_its_maximum() -> None:
    values = torch.rand(8, 8)
    whole = place_map(values, ImageSize(24, 16), (0, 0, 24, 16), unit=False)
    expected = torch.nn.functional.interpolate(values[None, None], (16, 24), mode="bilinear")[0, 0]
    assert torch.equal(whole, expected)
    unit = place_map(values, ImageSize(24, 16), (0, 0, 24, 16), unit=True)
    assert float(unit.max()) == pytest.approx(float(values.max()))
    part = place_map(values, ImageSize(24, 16), (4, 0, 12, 8), unit=False)
    assert torch.equal(part[:8, 4:12], values) and float(part.sum()) == pytest.approx(float(values.sum()))
    beyond = place_map(values, ImageSize(6, 6), (-1, -1, 7, 7), unit=False)  # the crop has a margin
    assert torch.equal(beyond, values[1:7, 1:7])


def test_boxes_are_scaled_reach_the_edge_and_stay_zero_where_there_are_none() -> None:
    boxes = torch.tensor([[2, 1, 6, 5], [0, 0, 7, 7], [0, 0, 0, 0]])
    placed = place_boxes(boxes, GridSize(8, 8), ImageSize(100, 40), (10, 0, 90, 40))
    assert placed.tolist() == [[30, 5, 70, 25], [10, 0, 89, 39], [0, 0, 0, 0]]


def test_the_box_is_that_of_the_placed_map_within_a_cell() -> None:
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    values = (-((rows - 12) ** 2 + (columns - 20) ** 2) / 40).exp()
    size, region = ImageSize(160, 96), (0.0, 0.0, 160.0, 96.0)
    scaled = place_boxes(boxes_at(values[None], 0.2)[0], GridSize(32, 32), size, region)
    cut = boxes_at(place_map(values, size, region, unit=True)[None], 0.2)[0]
    assert (scaled - cut).abs().max() <= 5
