"""The solver: its answer is the minimum, by autograd and by another method, however the work is cut up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.training import logistic as solving
from sigcam.training.logistic import Rows, Solution, find_axes, solve
from sigcam.training.selection import choose_l2


def problem(images: int = 120, width: int = 7, classes: int = 4, seed: int = 0, many: bool = False) -> Rows:
    """Features as pooled ReLU outputs are: positive, correlated, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(-1, 1, width)
    features = (torch.randn(images, width, generator=generator) @ mixing).relu().half()
    truth = features.float() @ torch.randn(width, classes, generator=generator)
    truth = truth - truth.mean(0) + 3 * torch.randn(images, classes, generator=generator)
    labels = (truth > 1).long() if many else truth.argmax(1)
    weights = 0.5 + torch.rand(images, generator=generator)
    return Rows(features, labels, weights)


def objective(rows: Rows, weight: Tensor, bias: Tensor, l2: float, pos: Tensor, prior: Tensor) -> Tensor:
    """What is to be minimised, as it is written in the documentation; the sum over classes."""
    classes = len(bias)
    targets = rows.labels if rows.labels.ndim == 2 else F.one_hot(rows.labels.clamp(min=0), classes)
    targets = torch.where(rows.labels[:, None] < 0, 0, targets) if rows.labels.ndim == 1 else targets
    logits = rows.features.double() @ weight.T + bias
    each = F.binary_cross_entropy_with_logits(logits, targets.double(), pos_weight=pos, reduction="none")
    share = rows.weights.double() / rows.weights.double().sum()
    return (share[:, None] * each).sum() + l2 * ((weight - prior) ** 2).sum()


def by_lbfgs(rows: Rows, classes: int, l2: float, pos: Tensor, prior: Tensor, bias: bool = True) -> Solution:
    """The same minimum, found by torch's own quasi-Newton method on the whole."""
    w = torch.zeros(classes, rows.features.shape[1], dtype=torch.float64, requires_grad=True)
    b = torch.zeros(classes, dtype=torch.float64, requires_grad=bias)
    found = [w, b] if bias else [w]
    optimizer = torch.optim.LBFGS(
        found,
        max_iter=4000,
        tolerance_grad=1e-12,
        tolerance_change=0,
        history_size=60,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(rows, w, b, l2, pos, prior)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return Solution(w.detach(), b.detach(), (), 0.0)


def gradient_of(rows: Rows, found: Solution, l2: float, pos: Tensor, prior: Tensor) -> Tensor:
    w, b = found.weight.clone().requires_grad_(), found.bias.clone().requires_grad_()
    grads = torch.autograd.grad(objective(rows, w, b, l2, pos, prior), (w, b))
    return torch.cat([grads[0], grads[1][:, None]], 1)


@pytest.mark.slow
@pytest.mark.parametrize("l2", [1.0, 0.03, 0.001])
@pytest.mark.parametrize("many", [False, True])
def test_the_answer_is_what_another_method_finds(l2: float, many: bool) -> None:
    rows, pos = problem(many=many), torch.tensor([3.0, 1.0, 7.0, 0.5], dtype=torch.float64)
    prior = torch.randn(4, 7, dtype=torch.float64) * 0.1
    found = solve(rows, find_axes(rows), 4, l2=l2, pos_weight=pos, prior=prior)
    other = by_lbfgs(rows, 4, l2, pos, prior)
    assert torch.allclose(found.weight, other.weight, atol=2e-5)
    assert torch.allclose(found.bias, other.bias, atol=2e-4)  # hardly penalised


@given(
    st.integers(2, 60),
    st.integers(1, 9),
    st.integers(1, 6),
    st.floats(-3.5, 0.5),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_no_slope_is_left_at_the_answer(
    images: int, width: int, classes: int, log_l2: float, seed: int, many: bool
) -> None:
    rows, l2 = problem(images, width, classes, seed, many), 10**log_l2
    pos = torch.full((classes,), max(classes - 1.0, 1.0), dtype=torch.float64)
    found = solve(rows, find_axes(rows), classes, l2=l2, pos_weight=pos)
    slope = gradient_of(rows, found, l2, pos, torch.zeros(classes, width, dtype=torch.float64))
    mean = find_axes(rows).mean
    centred = torch.cat([slope[:, :-1] - slope[:, -1:] * mean, slope[:, -1:]], 1)  # what the solver looks at
    bias = (found.bias + found.weight @ mean).abs().max()
    rounding = 2 * solving.BIAS_PENALTY * float(bias) + 1e-6 * float(rows.features.abs().max())
    assert float(centred.norm(dim=1).max()) <= 2 * l2 * solving.SOLVER_TOLERANCE + rounding


def test_the_loss_falls_with_every_step_and_few_are_needed() -> None:
    rows = problem(400, 20, 5)
    found = solve(rows, find_axes(rows), 5, l2=0.01, pos_weight=torch.full((5,), 4.0))
    assert all(a >= b for a, b in zip(found.losses, found.losses[1:], strict=False))
    assert len(found.losses) < 20
    assert found.losses[0] == pytest.approx(2 * 0.8 * torch.tensor(2.0).log().item(), rel=0.2)


def test_the_answer_is_one_however_the_work_is_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, pos = problem(300, 12, 6), torch.full((6,), 5.0)
    whole = solve(rows, find_axes(rows), 6, l2=0.01, pos_weight=pos)
    for name, value in (("ROWS_PER_CHUNK", 7), ("MEMORY", 300 * 24 * 2), ("WIDEST", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(solving, name, value)
            part = solve(rows, find_axes(rows), 6, l2=0.01, pos_weight=pos)
        assert torch.allclose(part.weight, whole.weight, atol=2e-6), name
        assert torch.allclose(part.bias, whole.bias, atol=1e-4), name
    order = torch.randperm(300)
    mixed = Rows(rows.features[order], rows.labels[order], rows.weights[order])
    assert torch.allclose(
        solve(mixed, find_axes(mixed), 6, l2=0.01, pos_weight=pos).weight, whole.weight, atol=2e-6
    )


def test_a_start_changes_the_way_and_not_the_answer() -> None:
    rows, pos = problem(), torch.full((4,), 3.0)
    axes = find_axes(rows)
    strong = solve(rows, axes, 4, l2=1.0, pos_weight=pos)
    cold, warm = (solve(rows, axes, 4, l2=0.1, pos_weight=pos, start=start) for start in (None, strong))
    assert torch.allclose(cold.weight, warm.weight, atol=2e-6)
    assert solve(rows, axes, 4, l2=0.1, pos_weight=pos, start=cold).losses[0] == pytest.approx(
        cold.losses[-1]
    )
    assert len(solve(rows, axes, 4, l2=0.1, pos_weight=pos, start=cold).losses) <= 2


def test_without_an_intercept_there_is_none() -> None:
    rows, pos = problem(), torch.full((4,), 3.0, dtype=torch.float64)
    found = solve(rows, find_axes(rows, intercept=False), 4, l2=0.1, pos_weight=pos, intercept=False)
    assert float(found.bias.abs().max()) < 1e-9
    other = by_lbfgs(rows, 4, 0.1, pos, torch.zeros(4, 7, dtype=torch.float64), bias=False)
    assert torch.allclose(found.weight, other.weight, atol=2e-5)


def test_a_class_without_images_says_no_and_images_without_a_class_pull_down() -> None:
    rows = problem(classes=3)
    pos = torch.full((4,), 3.0)
    found = solve(rows, find_axes(rows), 4, l2=0.1, pos_weight=pos)
    logits = rows.features.double() @ found.weight.T + found.bias
    assert float(logits[:, 3].max()) < -5
    assert float(found.weight[3].abs().max()) < 1e-3
    none = Rows(rows.features[:40] + 1, torch.full((40,), -1), torch.ones(40))
    both = Rows(
        *(torch.cat([getattr(r, n) for r in (rows, none)]) for n in ("features", "labels", "weights"))
    )
    with_none = solve(both, find_axes(both), 4, l2=0.1, pos_weight=pos)
    apart = none.features.double()
    assert float((apart @ with_none.weight.T + with_none.bias)[:, :3].mean()) < float(
        (apart @ found.weight.T + found.bias)[:, :3].mean()
    )


def test_the_prior_is_where_a_strong_penalty_ends() -> None:
    rows, prior = problem(), torch.randn(4, 7, dtype=torch.float64)
    found = solve(rows, find_axes(rows), 4, l2=1e6, pos_weight=torch.full((4,), 3.0), prior=prior)
    assert torch.allclose(found.weight, prior, atol=1e-4)


def test_features_of_one_value_and_few_images_have_an_answer() -> None:
    rows = Rows(torch.ones(6, 3).half(), torch.tensor([0, 1, 0, 1, 0, 0]), torch.ones(6))
    found = solve(rows, find_axes(rows), 2, l2=0.1, pos_weight=torch.ones(2))
    assert torch.allclose(found.bias.sigmoid(), torch.tensor([4 / 6, 2 / 6], dtype=torch.float64), atol=1e-4)
    assert float(found.weight.abs().max()) < 1e-6


def test_a_fit_that_does_not_get_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "STEPS", 1)
    rows = problem()
    with pytest.raises(DataError, match=r"4 of 4 classes did not converge at l2=0\.001: try a stronger one"):
        solve(rows, find_axes(rows), 4, l2=0.001, pos_weight=torch.full((4,), 3.0))


def test_the_penalty_chosen_is_the_strongest_within_one_standard_error_of_the_best() -> None:
    spread = torch.tensor([0.7, 0.9])  # mean 0.8, standard error 0.1
    scores = [(1.0, torch.tensor([0.69, 0.69])), (0.1, torch.tensor([0.71, 0.71])), (0.01, spread)]
    assert choose_l2(scores) == (0.1, pytest.approx(0.1))
    assert choose_l2(scores[:1])[0] == 1.0
    unknown = [(1.0, torch.tensor([0.5, torch.nan])), (0.1, torch.tensor([0.6, torch.nan]))]
    assert choose_l2(unknown) == (0.1, 0.0)
    assert choose_l2([(1.0, spread), (0.1, spread)])[0] == 1.0  # of equals the strongest
