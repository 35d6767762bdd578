"""Reliability of calibrated evidence: weighted as its question says, and judged on images that it was not
calibrated on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from sigcam.core.config import FitConfig
from sigcam.metrics.classification import BINS, calibration
from sigcam.network.calibration import fit_scale
from sigcam.reports.fit_report import fit_details, fit_summary, plot_fit
from sigcam.training.branch import FitResult, fit
from sigcam.training.calibration import CalibrationSet
from sigcam.training.features import Features
from support.patches import patch_network, patches

SUMMARY = (
    "calibration error of evidence",
    "label's evidence above one half, % of images",
    "best evidence above one half, % of backgrounds",
)


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_a_case_of_weight_n_counts_as_n_cases(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    targets = torch.randint(2, (count, 1), generator=generator)
    weights = torch.randint(1, 5, (count,), generator=generator)
    found = calibration(scores, targets, weights[:, None] * 0.3)
    repeated = calibration(*(each.repeat_interleave(weights, 0) for each in (scores, targets)))
    assert found.error == pytest.approx(repeated.error)
    assert found.score == pytest.approx(repeated.score) and found.share == pytest.approx(repeated.share)
    assert found.count == pytest.approx([n / int(weights.sum()) for n in repeated.count])


def cases(count: int = 61, seed: int = 0) -> tuple[Features, Tensor, Tensor]:
    """Features of images and their backgrounds, their labels, and a (4, 6) head that half separates them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) * 7 % 4
    head = torch.randn(4, 6, generator=generator)
    images = torch.randn(count, 6, generator=generator) + 0.5 * head[labels]
    alone = torch.randn(count, 6, generator=generator)
    alone[5] = torch.inf  # too little background
    return Features((images,), labels, backgrounds=(alone,)), labels, head


def held_out_cases(features: Features, head: Tensor) -> CalibrationSet:
    return CalibrationSet(patch_network(), features, lambda rows: rows.double() @ head.double().T)


def evidence_by_loop(
    features: Features, labels: Tensor, head: Tensor, first: Tensor
) -> tuple[list[tuple[float, bool, float]], list[tuple[float, float]]]:
    """(evidence, shown, weight) of every case; (evidence of the label, best evidence on the background) of
    every image. Each half is calibrated on the other."""
    kept = [i for i in range(len(labels)) if i != 5]
    half = dict(zip(kept, first.tolist(), strict=True))
    logit = {
        (i, kind): (rows[i].double() @ head.double().T).tolist()
        for i in kept
        for kind, rows in (("image", features.views[0]), ("alone", features.backgrounds[0]))
    }

    def listed(chosen: list[int]) -> list[tuple[int, float, bool, float]]:
        n, rows = len(chosen), list[tuple[int, float, bool, float]]()
        for i in chosen:
            label = int(labels[i])
            others = [logit[i, "image"][k] for k in range(4) if k != label]
            rows.append((i, logit[i, "image"][label], True, 1 / 2 / n))
            rows.append((i, max(logit[i, "alone"]), False, 3 / 22 / n))
            rows.append((i, max(others), False, 2 / 22 / n))
            rows += [(i, z, False, 6 / 22 / (3 * n)) for z in others]
        return rows

    scales = {}
    for value in (True, False):
        _, z, shown, weight = zip(*listed([i for i in kept if half[i] != value]), strict=True)
        columns = [torch.tensor(each, dtype=torch.float64) for each in (z, shown, weight)]
        scales[value] = fit_scale(*columns)

    def evidence(i: int, z: float) -> float:
        scale = scales[half[i]]
        assert scale is not None
        return 1 / (1 + math.exp(-scale.scale * z - scale.shift))

    judged = [(evidence(i, z), shown, weight) for i, z, shown, weight in listed(kept)]
    pairs = [
        (
            evidence(i, logit[i, "image"][int(labels[i])]),
            max(evidence(i, z) for z in logit[i, "alone"]),
        )
        for i in kept
    ]
    return judged, pairs


@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_judged_by_numbers_that_were_fitted_on_other_images(seed: int) -> None:
    features, labels, head = cases(seed=seed)
    found = held_out_cases(features, head)
    quality = found.evidence_quality(seed)
    assert quality is not None and quality.images == 60
    judged, pairs = evidence_by_loop(features, labels, head, found._halves(seed))
    assert sum(weight for _, _, weight in judged) == pytest.approx(1)
    error = 0.0
    for b in range(BINS):
        inside = [case for case in judged if min(int(case[0] * BINS), BINS - 1) == b]
        total = sum(weight for _, _, weight in inside)
        assert quality.reliability.count[b] == pytest.approx(total)
        error += abs(sum(weight * (score - shown) for score, shown, weight in inside))
    assert quality.reliability.error == pytest.approx(error, rel=1e-5)
    assert quality.label_above_half == pytest.approx(100 * sum(own > 0.5 for own, _ in pairs) / 60)
    assert quality.background_above_half == pytest.approx(100 * sum(best > 0.5 for _, best in pairs) / 60)
    scale = found.evidence_scale()
    assert scale is not None
    same = found._evidence_cases(*(scale(each).sigmoid() for each in (found.images, found.alone)))
    assert quality.reliability.error != pytest.approx(calibration(*same).error, rel=1e-3)


def test_each_half_has_half_of_every_class() -> None:
    features, _, head = cases()
    found = held_out_cases(features, head)
    first = found._halves(0)
    assert abs(int(first.sum()) - int((~first).sum())) <= 1
    for k in range(4):
        shown = found.shown[:, k]
        assert abs(int((first & shown).sum()) - int((~first & shown).sum())) <= 1
    assert not torch.equal(first, found._halves(1))


def test_the_order_in_which_processes_hold_the_images_changes_nothing() -> None:
    features, labels, head = cases()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    columns = {"views": (features.views[0][order],), "backgrounds": (features.backgrounds[0][order],)}
    shuffled = replace(features, labels=labels[order], index=order, **columns)
    first, second = (held_out_cases(each, head) for each in (features, shuffled))
    assert torch.equal(first.shown, second.shown) and torch.allclose(first.images, second.images)
    qualities = first.evidence_quality(0), second.evidence_quality(0)
    assert qualities[0] is not None and qualities[1] is not None
    assert qualities[0].reliability.error == pytest.approx(qualities[1].reliability.error, rel=1e-9)
    assert qualities[0].background_above_half == qualities[1].background_above_half > 0


def test_images_that_cannot_be_calibrated_on_have_no_reliability() -> None:
    features, labels, head = cases()
    assert held_out_cases(features, -head).evidence_quality(0) is None  # evidence would fall with the logit
    one = Features((features.views[0][:1],), labels[:1], backgrounds=(features.backgrounds[0][:1],))
    assert held_out_cases(one, head).evidence_quality(0) is None


def noisy_fit(background: object) -> FitResult:
    x, labels = patches(400)[:]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    config = FitConfig(background=background)  # type: ignore[arg-type]
    return fit(patch_network(), TensorDataset(x + 0.6 * noise, labels), config)


@pytest.mark.slow
def test_the_report_tells_the_reliability_of_evidence_and_the_background_search(tmp_path: Path) -> None:
    for background, searched in (("auto", True), (1.0, False)):
        result = noisy_fit(background)
        assert bool(result.background_search) == searched
        quality, names = result.evidence_quality, ("a", "b", "c", "d")
        assert quality is not None and quality.images == 80
        assert 0 < quality.reliability.error < 0.1
        told = json.loads(json.dumps(fit_details(result, names)))["evidence_quality"]
        assert told["images"] == 80 and told["label_above_half"] == quality.label_above_half > 90
        assert told["background_above_half"] == quality.background_above_half < 50
        reliability = told["reliability"]
        columns = (reliability[name] for name in ("score", "share", "weight"))
        distance = sum(abs(score - share) * weight for score, share, weight in zip(*columns, strict=True))
        assert distance == pytest.approx(reliability["error"])
        assert sum(reliability["weight"]) == pytest.approx(1)
        summary = fit_summary(result)
        shares = quality.label_above_half, quality.background_above_half
        assert tuple(summary[name] for name in SUMMARY) == (quality.reliability.error, *shares)
        assert plot_fit(result, tmp_path / "fit.png")
        with Image.open(tmp_path / "fit.png") as image:
            assert image.width == 1815  # three columns


def test_without_a_calibration_the_report_is_as_before(tmp_path: Path) -> None:
    result = noisy_fit(0)
    assert result.calibration is None and result.evidence_quality is None
    assert "evidence_quality" not in fit_details(result, ("a", "b", "c", "d"))
    assert not set(SUMMARY) & fit_summary(result).keys()
    assert plot_fit(result, tmp_path / "fit.png")
    with Image.open(tmp_path / "fit.png") as image:
        assert image.width == 1210


def test_without_held_out_images_nothing_is_known_of_evidence() -> None:
    result = fit(patch_network(), patches(120), FitConfig(l2=0.1, background=1.0, holdout=0))
    assert result.calibration is not None and result.evidence_quality is None
    assert not set(SUMMARY) & fit_summary(result).keys()
