"""ROAD: pixels are removed in the right order, and replaced by what their neighbours say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.metrics import RoadLeast, RoadMost, impute, removal_curves


def dense(image: Tensor, removed: Tensor) -> np.ndarray:
    """The linear equations written out for each removed pixel of one plane, and solved."""
    height, width = image.shape
    matrix, known = np.eye(height * width), image.double().numpy().copy().ravel()
    for y, x in zip(*np.nonzero(removed.numpy()), strict=True):
        near = {(y + dy, x + dx): 1 / 12 if dy and dx else 1 / 6
                for dy in (-1, 0, 1) for dx in (-1, 0, 1)
                if (dy or dx) and 0 <= y + dy < height and 0 <= x + dx < width}  # fmt: skip
        known[y * width + x] = 0
        for (v, u), weight in near.items():
            matrix[y * width + x, v * width + u] = -weight / sum(near.values())
    solved: np.ndarray = np.linalg.solve(matrix, known).reshape(height, width)
    return solved


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_removed_pixels_solve_the_equations_of_their_neighbours(share: float) -> None:
    dice = torch.Generator().manual_seed(0)
    images = torch.randn(3, 2, 9, 13, generator=dice, dtype=torch.float64)
    removed = torch.rand(3, 9, 13, generator=dice) < share
    removed[:, 4, 4] = False
    imputed = impute(images, removed, noise=0)
    for i in range(3):
        for channel in range(2):
            expected = dense(images[i, channel], removed[i])
            assert np.abs(imputed[i, channel].numpy() - expected).max() < 1e-4
    assert torch.equal(imputed.movedim(1, -1)[~removed], images.movedim(1, -1)[~removed])


def test_a_large_hole_in_a_plain_image_is_plain_but_for_noise() -> None:
    images, removed = torch.full((1, 3, 64, 64), 0.7), torch.ones(1, 64, 64, dtype=torch.bool)
    removed[:, 0, 0] = False
    imputed = impute(images, removed)
    assert (imputed - 0.7).abs().max() < 0.06 and imputed[0, :, 1:].std() == pytest.approx(0.01, rel=0.05)
    assert torch.equal(imputed, impute(images, removed))
    slope = torch.linspace(0, 1, 64).expand(1, 1, 64, 64)
    hole = torch.zeros(1, 64, 64, dtype=torch.bool)
    hole[:, 5:60, 10:50] = True
    assert (impute(slope, hole, noise=0) - slope).abs().max() < 2e-3  # a straight line solves the equations


def test_curves_remove_the_least_and_the_most_relevant_pixels_first() -> None:
    dice = torch.Generator().manual_seed(0)
    images, maps = torch.rand(3, 2, 6, 5, generator=dice), torch.rand(3, 6, 5, generator=dice)
    weight, classes = torch.rand(2 * 6 * 5, 4, generator=dice), torch.tensor([2, 0, 3])

    def score(batch: Tensor) -> Tensor:
        return (batch.flatten(1) @ weight / 5).softmax(1)

    least, most = removal_curves(score, images, maps, classes, fractions=(0.2, 0.7), batch_size=2)
    for i in range(3):
        order = sorted(range(30), key=lambda p, i=i: float(maps[i].flatten()[p]))
        for step, count in enumerate((6, 21)):
            for curve, gone in ((least, order[:count]), (most, order[::-1][:count])):
                removed = torch.zeros(1, 30, dtype=torch.bool)
                removed[0, gone] = True
                alone = score(impute(images[i : i + 1], removed.view(1, 6, 5)))[0, classes[i]]
                assert curve[i, step] == pytest.approx(float(alone), abs=1e-5)


def test_the_metrics_are_means_over_the_fractions() -> None:
    scores = torch.tensor([[0.2, 0.4], [0.5, 0.9]])
    for metric, higher in ((RoadLeast(), True), (RoadMost(), False)):
        metric.update(scores)
        assert float(metric.compute()) == pytest.approx(50) and metric.higher_is_better is higher


def test_maps_of_another_size_and_fractions_out_of_range_are_refused() -> None:
    images, maps, classes = torch.rand(1, 3, 8, 8), torch.rand(1, 8, 8), torch.tensor([0])
    with pytest.raises(DataError, match="as large as images"):
        removal_curves(lambda x: x, images, maps[:, :4], classes)
    for fractions in ((), (0.0,), (0.5, 1.0)):
        with pytest.raises(DataError, match="fractions between 0 and 1"):
            removal_curves(lambda x: x, images, maps, classes, fractions=fractions)
