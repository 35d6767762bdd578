"""Scales from logits to probabilities: how they are fitted, kept in the branch file and used."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.errors import CheckpointError, ConfigError
from sigcam.network.branch_file import KEY, load
from sigcam.network.calibration import BranchCalibration, LogitScale, fit_scale
from sigcam.training.branch import fit
from sigcam.training.calibration import CalibrationSet
from sigcam.training.features import Features
from support.patches import patch_network, patches


def slow_scale(
    logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0
) -> tuple[float, float]:
    """Platt's smoothed logistic regression by a general optimiser."""
    z, y, w = (each.double().numpy() for each in (logits, targets, weights))
    yes, no = y.sum(), (1 - y).sum()
    t = np.where(y > 0, min((yes + 1) / (yes + 2), 1 - smoothing), max(1 / (no + 2), smoothing))

    def loss(v: np.ndarray) -> float:
        p = 1 / (1 + np.exp(-(v[0] * z + v[1])))
        return float(-(w * (t * np.log(p + 1e-300) + (1 - t) * np.log(1 - p + 1e-300))).sum() / w.sum())

    found = minimize(
        loss, np.array([0.1, 0.0]), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14}
    )
    return float(found.x[0]), float(found.x[1])


@given(
    st.integers(5, 60),
    st.floats(0.2, 4.0),
    st.floats(-3, 3),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 99),
)
def test_the_scale_is_plattss_logistic_regression(
    count: int, gap: float, centre: float, smoothing: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.arange(count) % 2).double()
    logits = torch.randn(count, generator=generator, dtype=torch.float64) + gap * targets + centre
    weights = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    scale, slow = (f(logits, targets, weights, smoothing) for f in (fit_scale, slow_scale))
    if scale is None:
        assert slow[0] <= 1e-6
    else:
        assert (scale.scale, scale.shift) == pytest.approx(slow, rel=1e-3, abs=1e-3)


def test_a_scale_stays_finite_where_logits_separate_and_is_none_where_they_do_not() -> None:
    ones, zeros = torch.ones(20), torch.zeros(20)
    apart = fit_scale(torch.cat([ones * 3, zeros - 3]), torch.cat([ones, zeros]), torch.ones(40))
    assert apart is not None and 0 < apart.scale < 100
    assert fit_scale(torch.cat([zeros, ones]), torch.cat([ones, zeros]), torch.ones(40)) is None
    assert fit_scale(ones, ones, ones) is None


def test_evidence_is_fitted_to_its_question_and_maps_to_images_against_backgrounds() -> None:
    net = patch_network()
    generator = torch.Generator().manual_seed(0)
    image, alone = (torch.randn(40, 6, generator=generator) for _ in range(2))
    alone[3] = torch.inf  # no background
    labels = torch.arange(40) % 4
    weight = torch.randn(4, 6, generator=generator)
    image = image + 0.5 * weight[labels]
    features = Features((image,), labels, backgrounds=(alone,))
    found = CalibrationSet(net, features, lambda rows: rows @ weight.T)
    z, b = (rows[torch.arange(40) != 3] @ weight.T for rows in (image, alone))
    own = torch.nn.functional.one_hot(labels[torch.arange(40) != 3], 4).bool()

    def expected(smoothing: float, *groups: tuple[Tensor, float, float]) -> tuple[float, float]:
        parts = [(v, torch.full_like(v, y), torch.full_like(v, w / len(v))) for v, y, w in groups]
        return slow_scale(*(torch.cat(column) for column in zip(*parts, strict=True)), smoothing)

    shown, best_other = (z[own], 1.0, 1 / 2), z.masked_fill(own, -torch.inf).amax(1)
    absent = (z[~own], 0.0, 6 / 22), (b.amax(1), 0.0, 3 / 22), (best_other, 0.0, 2 / 22)
    evidence, maps = found.evidence_scale(), found.map_scale()
    assert evidence is not None and maps is not None
    assert (evidence.scale, evidence.shift) == pytest.approx(
        expected(0.0, shown, *absent), rel=1e-3, abs=1e-3
    )
    slow = expected(0.1, shown, (b[own], 0.0, 1 / 2))
    assert (maps.scale, maps.shift) == pytest.approx(slow, rel=1e-3, abs=1e-3)


def test_a_branch_file_keeps_its_calibration_and_one_without_is_as_before(tmp_path: Path) -> None:
    net = patch_network()
    plain = tmp_path / "plain.safetensors"
    fit(net, patches(60), FitConfig(l2=0.1, background=0))
    net.save(plain)
    assert b"calibration" not in plain.read_bytes().replace(b"calibrate", b"")
    assert load(plain, net.model).calibration == BranchCalibration()
    fit(net, patches(), FitConfig(l2=1e-3, background=1.0, zooms=(1.0, 2.0)))
    assert net.calibration.maps.keys() == {1.0, 2.0}
    assert net.calibration.maps[1.0] != net.calibration.maps[2.0]
    path = tmp_path / "branch.safetensors"
    net.save(path)
    again = load(path, net.model)
    assert again.calibration == net.calibration
    assert torch.equal(again.evidence(torch.ones(2)), net.evidence(torch.ones(2)))


@pytest.mark.parametrize(
    "bad", [[], {"maps": {}}, {"evidence": [1], "maps": {"x": [1, 2]}}, {"evidence": 3, "maps": []}]
)
def test_a_file_with_a_damaged_calibration_is_refused(bad: object, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    net, path = patch_network(), tmp_path / "branch.safetensors"
    net.save(path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()[KEY]) | {"calibration": bad}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {KEY: json.dumps(about)})
    with pytest.raises(CheckpointError, match=r"branch\.safetensors"):
        load(path, net.model)


def test_a_size_without_a_scale_is_refused_with_the_line_that_adds_it() -> None:
    calibration = BranchCalibration(maps={1.0: LogitScale(2.0, 1.0)})
    assert calibration.map_scale(1) == LogitScale(2.0, 1.0)
    with pytest.raises(
        ConfigError, match=r"at zoom 2: fit it again with `sigcam fit --background auto --zooms 1,2`"
    ):
        calibration.map_scale(2.0)
