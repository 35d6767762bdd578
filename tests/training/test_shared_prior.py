"""The shared part of a prior: it minimises the loss of the question that evidence answers."""

import pytest
import torch
from torch import Tensor

from sigcam.training.logistic import Rows
from sigcam.training.selection import evidence_loss, strongest
from sigcam.training.shared_prior import fit_shared_prior

CLASSES, WIDTH, L2 = 4, 6, 0.05


def problem(several: bool) -> tuple[Rows, Tensor, Tensor]:
    """Images of four classes and backgrounds, as rows; rows and biases of a centred softmax head."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.cat([torch.arange(40) % CLASSES, torch.full((25,), -1)])
    features = torch.randn(65, WIDTH, generator=generator, dtype=torch.float64)
    features[:40] += 0.4 * weight[labels[:40]] + 0.3
    weights = 0.5 + torch.rand(65, generator=generator)
    if several:
        labels = torch.nn.functional.one_hot(labels.clamp(min=0), CLASSES) * (labels >= 0)[:, None]
    return Rows(features, labels, weights), weight - weight.mean(0), bias - bias.mean()


def loss_by_loop(rows: Rows, weight: Tensor, bias: Tensor, a: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """The mean log loss of each group of questions, by its share, and the penalty."""
    groups: dict[str, list[tuple[Tensor, float]]] = {"shown": [], "alone": [], "best": [], "any": []}
    for x, label, w in zip(rows.features, rows.labels, rows.weights.double(), strict=True):
        plain, k = (x @ weight.T + bias).tolist(), int(label)
        scores = a * (x @ weight.T + bias) + x @ v + c
        log_yes, log_no = scores.sigmoid().log(), (1 - scores.sigmoid()).log()
        if k < 0:
            groups["alone"].append((-log_no[plain.index(max(plain))], float(w)))
            continue
        others = [j for j in range(CLASSES) if j != k]
        groups["shown"].append((-log_yes[k], float(w)))
        groups["best"].append((-log_no[max(others, key=lambda j: plain[j])], float(w)))
        groups["any"] += [(-log_no[j], float(w)) for j in others]
    shares = {"shown": 1 / 2, "alone": 1 / 4, "best": 1 / 8, "any": 1 / 8}
    total = L2 * (v**2).sum()
    for name, cases in groups.items():
        total = total + shares[name] * sum(loss * w for loss, w in cases) / sum(w for _, w in cases)
    return total


@pytest.mark.parametrize("several", [False, True])
def test_the_shared_part_is_the_minimum_of_the_questions_loss(several: bool) -> None:
    rows, weight, bias = problem(several)
    found = fit_shared_prior(rows, weight, bias, L2)
    v = found.weight.mean(0).detach().requires_grad_()  # the head's own rows are centred
    a = ((found.weight - found.weight.mean(0)) * weight).sum() / (weight**2).sum()
    a, c = a.detach().requires_grad_(), found.bias.mean().detach().requires_grad_()
    assert torch.allclose(found.weight, a * weight + v) and torch.allclose(found.bias, a * bias + c)
    single = problem(several=False)[0]
    loss = loss_by_loop(single, weight, bias, a, v, c)
    slopes = torch.autograd.grad(loss, (a, v, c))
    assert float(torch.cat([slope.flatten() for slope in slopes]).norm()) < 1e-4
    assert float(found.losses[-1]) == pytest.approx(float(loss.detach()), rel=1e-6)


def test_evidence_loss_falls_where_scores_separate_and_is_infinite_where_they_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.nn.functional.one_hot(torch.arange(60) % 3, 3).double()
    noise, alone = torch.randn(60, 3, generator=generator), torch.randn(60, 3, generator=generator) - 1
    losses = [evidence_loss(gap * targets + noise, targets, alone)[0] for gap in (1.0, 3.0, 6.0)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.2 < losses[0] < 0.7
    assert evidence_loss(-6 * targets + noise, targets, alone)[0] == torch.inf


def test_the_strongest_penalty_within_an_error_of_the_lowest_loss_is_chosen() -> None:
    losses = {1.0: (0.35, 0.02), 0.3: (0.31, 0.02), 0.1: (0.30, 0.02), 0.03: (0.33, 0.02)}
    assert strongest(losses) == 0.3
    assert strongest({**losses, 0.1: (0.28, 0.02)}) == 0.1
