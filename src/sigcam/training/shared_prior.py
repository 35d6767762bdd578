"""fit_shared_prior: the softmax head's rows, with the part that they share fitted to background evidence.

Probabilities do not depend on what is added to every class's row of a softmax head (the additive logit
shift), so that part of its weights says nothing. A sigmoid branch can use it: as the difference between
pictures that show one of the classes and pictures that show none. It is learned from all classes at once, and
therefore also where each of them has few images.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.distributed import all_reduce_sum
from sigcam.training.logistic import Rows, Solution

OTHER_CLASSES = 20  # classes that an image does not show, asked about beside the one it shows
SHARED_ITERATIONS, SHARED_TOLERANCE = 500, 1e-6


def fit_shared_prior(rows: Rows, weight: Tensor, bias: Tensor, l2: float) -> Solution:
    """Return rows a W + v and biases a b + c, where (a, v, c) minimise the log loss of the question that
    evidence answers (`evidence_cases`) plus l2 |v|^2.

    Args:
        rows: images, and pictures that show none of the classes (label -1, or zeros).
        weight, bias: W (C, N) and b (C,) of the softmax head, less their means over classes.
    """
    classes, several = len(weight), rows.labels.ndim == 2
    shown = rows.labels.any(1) if several else rows.labels >= 0
    label = (rows.labels.byte().argmax(1) if several else rows.labels)[shown]
    steps = torch.arange(min(OTHER_CLASSES, classes - 1), device=label.device)
    others = (label[:, None] + 1 + steps * (classes - 1) // len(steps)) % classes  # (n, K), all different
    x = rows.features.double()
    mean = all_reduce_sum((x * rows.weights.double()[:, None]).sum(0)) / all_reduce_sum(
        rows.weights.double().sum()
    )
    x = x - mean
    # What a picture is asked about, and how much all such questions weigh (`evidence_cases`).
    logits = (x + mean) @ weight.T + bias
    groups = [
        (1 / 2, shown, logits[shown].gather(1, label[:, None])),
        (1 / 4, ~shown, logits[~shown].amax(1, keepdim=True)),
        (1 / 8, shown, logits[shown].gather(1, others)),
        (1 / 8, shown, logits[shown].scatter(1, label[:, None], -torch.inf).amax(1, keepdim=True)),
    ]
    asked = torch.cat([scores.flatten() for _, _, scores in groups])
    place, weights = list[Tensor](), list[Tensor]()
    for share, chosen, scores in groups:
        count = scores.shape[1]
        place.append(chosen.nonzero()[:, 0].repeat_interleave(count))
        part = rows.weights[chosen].double().repeat_interleave(count)
        weights.append(share * part / all_reduce_sum(part.sum()).clamp(min=1e-300))
    at, weighing = torch.cat(place), torch.cat(weights)
    answers = torch.zeros_like(asked)
    answers[: len(label)] = 1

    theta = torch.zeros(x.shape[1] + 2, dtype=torch.float64, device=x.device)
    theta[0] = 1.0
    theta.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [theta],
        max_iter=SHARED_ITERATIONS,
        tolerance_grad=SHARED_TOLERANCE,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    losses = list[float]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            scores = theta[0] * asked + (x @ theta[2:])[at] + theta[1]
            loss = F.binary_cross_entropy_with_logits(scores, answers, weighing, reduction="sum")
            loss.backward()
        assert theta.grad is not None
        total = all_reduce_sum(torch.cat([loss.detach()[None], theta.grad]))
        theta.grad.copy_(total[1:])
        theta.grad[2:] += 2 * l2 * theta.detach()[2:]
        losses.append(float(total[0] + l2 * (theta.detach()[2:] ** 2).sum()))
        return total[0] + l2 * (theta.detach()[2:] ** 2).sum()

    optimizer.step(closure)
    closure()
    assert theta.grad is not None
    a, c, v = theta.detach()[0], theta.detach()[1], theta.detach()[2:]
    return Solution(a * weight + v, a * bias + c - v @ mean, tuple(losses), float(theta.grad.norm()))
