"""RISE and extremal perturbations against slow loops of their papers' formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sigcam.core.types import GridSize
from sigcam.methods import perturbations
from sigcam.methods.explainer import explain
from sigcam.methods.perturbations import mask_grid, random_grids
from sigcam.methods.targets import Branch
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from support.attribution_oracles import Score, extremal_map, rise_map
from support.method_cases import BRANCHES, CHOSEN, close, network, pictures, plain, raw
from support.tiny import Gap


def score_of(net: DualBranch, name: str, branch: Branch, k: int) -> Score:
    """The logit of class k by a plain model."""
    model = plain(net, branch, name).model

    def score(image: Tensor) -> Tensor:
        logits: Tensor = model(image[None])
        return logits[0, k]

    return score


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", ["gap", "vgg", "vit"])
def test_rise_is_its_formula(name: str, branch: Branch) -> None:
    net, x = network(name), pictures(name)
    maps = raw(net, x, "rise", branch=branch, classes=CHOSEN, samples=5, size="image")
    grids, shifts = random_grids(5, GridSize.of(x))
    for i, k in enumerate(CHOSEN):
        with torch.no_grad():
            expected = rise_map(score_of(net, name, branch, k), x[i], grids, shifts)
        assert close(maps[i], expected, 1e-5)  # masks are made in float32


def test_masks_are_random_halves_that_shift_by_up_to_a_cell() -> None:
    grids, shifts = random_grids(4000, GridSize(224, 224))
    assert grids.shape == (4000, 7, 7) and abs(float(grids.mean()) - 0.5) < 0.01
    assert int(shifts.min()) == 0 and int(shifts.max()) == 32
    masks = perturbations.grown_masks(grids[:50], shifts[:50], GridSize(224, 224))
    assert masks.shape == (50, 224, 224) and float(masks.min()) == 0 and float(masks.max()) == 1
    again, _ = random_grids(4000, GridSize(224, 224))
    assert torch.equal(again, grids)


@pytest.mark.parametrize("branch", BRANCHES)
def test_an_extremal_perturbation_is_its_formula(branch: Branch) -> None:
    net, x = network("vgg"), pictures("vgg")[:1]
    maps = raw(net, x, "extremal-perturbation", branch=branch, classes=3, samples=3, size="image")
    expected = extremal_map(score_of(net, "vgg", branch, 3), x[0], mask_grid(GridSize.of(x)), 3)
    assert close(maps[0], expected, 1e-7)


def test_the_best_mask_is_where_the_evidence_is() -> None:
    model = Gap(2)
    with torch.no_grad():  # the brighter, the more evidence of class 1
        for parameter in model.parameters():
            parameter.zero_()
        model.body[0].weight[:, :, 1, 1] = 1.0
        model.fc.weight[1] = 10.0
    net = attach(model, example=torch.randn(1, 3, 16, 16))
    x = torch.zeros(1, 3, 16, 16)
    x[:, :, 2:8, 8:14] = 3.0
    ex = explain(net, x, "extremal-perturbation", branch="softmax", classes=1, samples=200, scale="raw")
    whole = float(ex.maps[0].sum())
    assert float(ex.maps[0, 1:9, 7:15].sum()) / whole > 0.45  # of a quarter of the image
    assert 0.5 < whole / (16 * 16) / (0.025 + 0.05 + 0.1 + 0.2) < 2  # a few pixels are less than a kernel
