"""Average precision, AUC and calibration: those of torchmetrics, ties and missing classes included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_calibration_error,
)

from sigcam.metrics.classification import auroc, average_precision, both_ways, calibration, quality_of


@given(st.integers(2, 40), st.integers(1, 5), st.integers(1, 12), st.integers(0, 10**6))
def test_both_are_torchmetrics_with_ties(images: int, classes: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels + 1, (images, classes), generator=generator) / levels  # many equal ones
    targets = torch.randint(2, (images, classes), generator=generator)
    precision, area = average_precision(scores, targets), auroc(scores, targets)
    for k in range(classes):
        positives = int(targets[:, k].sum())
        if positives:
            expected = float(binary_average_precision(scores[:, k], targets[:, k]))
            assert float(precision[k]) == pytest.approx(expected, abs=1e-5)
        else:
            assert math.isnan(float(precision[k]))
        if 0 < positives < images:
            assert float(area[k]) == pytest.approx(float(binary_auroc(scores[:, k], targets[:, k])), abs=1e-5)
        else:
            assert math.isnan(float(area[k]))


def test_hand_worked_values() -> None:
    scores, targets = torch.tensor([[0.9], [0.8], [0.7], [0.6]]), torch.tensor([[1], [0], [1], [0]])
    assert float(average_precision(scores, targets)) == pytest.approx((1 + 2 / 3) / 2)
    assert float(auroc(scores, targets)) == pytest.approx(3 / 4)
    same = torch.zeros(4, 1)
    assert float(average_precision(same, targets)) == pytest.approx(0.5)
    assert float(auroc(same, targets)) == pytest.approx(0.5)


@given(st.integers(1, 60), st.integers(0, 10**6))
def test_the_calibration_error_is_torchmetrics(images: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(images, 3, generator=generator)
    targets = torch.randint(2, (images, 3), generator=generator)
    found = calibration(scores, targets)
    expected = float(binary_calibration_error(scores.flatten(), targets.flatten(), n_bins=15))
    assert found.error == pytest.approx(expected, abs=1e-5)
    assert sum(found.count) == images * 3


def test_scores_that_are_frequencies_are_calibrated_once_the_weight_is_taken_off() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    targets = (torch.rand(20_000, 1, generator=generator) < logits.sigmoid()).long()
    weight = torch.tensor([9.0], dtype=torch.float64)
    found = quality_of(logits + weight.log(), targets, weight)  # as a positive weight of 9 would have it
    assert found.shifted.error < 0.02 < 0.3 < found.calibration.error
    assert found.images == 20_000


def test_one_logit_is_scored_for_both_of_its_classes() -> None:
    logits, targets = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([[1], [0], [0]])
    scores, both = both_ways(logits, targets)
    assert scores.tolist() == [[-2.0, 2.0], [1.0, -1.0], [-0.5, 0.5]]
    assert both.tolist() == [[0, 1], [1, 0], [1, 0]]
    assert quality_of(logits, targets, torch.ones(1)).mean_average_precision == 1.0
