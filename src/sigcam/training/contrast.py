"""solve_contrast: a softmax over the classes and background, each class's row less the background's.

What is left of a row after that has no free shift: adding a number to a channel's weight for every class and
for background changes neither the probabilities nor the difference.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sigcam.core.distributed import all_reduce_sum
from sigcam.core.errors import DataError
from sigcam.training.logistic import Axes, Rows, Solution

ITERATIONS = 1000
CONTRAST_TOLERANCE = 1e-5  # largest component of the gradient at the solution


def solve_contrast(
    rows: Rows,
    axes: Axes,
    classes: int,
    *,
    l2: float,
    prior: Tensor | None = None,
    intercept: bool = True,
    start: Solution | None = None,
    tolerance: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Solution:
    """Minimise the weighted mean cross-entropy over the classes and background plus l2 |V - prior|^2 / C,
    where rows without a class (label -1) are background; return each class's row less the background's.

    Args:
        prior: (C, N) weights that the classes' rows shrink towards; zero by default, as for background.
        axes: of the features; their mean is taken off.
        start: where to start, such as the solution for a stronger penalty.
        tolerance, progress: as for `solve`; the tolerance is not used, a solution is always exact.
    """
    if not intercept:
        raise DataError("loss='background-softmax' needs a head with a bias: use loss='sigmoid'.")
    if rows.labels.ndim == 2:
        raise DataError("loss='background-softmax' is for images of one class each: use loss='sigmoid'.")
    x = rows.features.double() - axes.mean
    weight = rows.weights.double()
    weight = weight / all_reduce_sum(weight.sum())
    targets = torch.where(rows.labels < 0, classes, rows.labels)
    v = torch.zeros(
        classes + 1, x.shape[1] + 1, dtype=torch.float64, device=x.device
    )  # the last column: bias
    centre = torch.zeros_like(v[:, :-1])
    if prior is not None:
        centre[:classes] = prior.to(centre)
    v[:, :-1] = centre
    if start is not None:  # the rows of a minimum sum to those of the prior
        v[:classes, :-1] = start.weight
        v[:classes, -1] = start.bias + start.weight @ axes.mean
        v[:, :-1] += centre.mean(0) - v[:, :-1].mean(0)
    v.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [v],
        max_iter=ITERATIONS,
        tolerance_grad=CONTRAST_TOLERANCE,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    losses = list[float]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            logits = x @ v[:, :-1].T + v[:, -1]
            loss = (weight * torch.nn.functional.cross_entropy(logits, targets, reduction="none")).sum()
            loss.backward()
        assert v.grad is not None
        parts = all_reduce_sum(torch.cat([loss.detach()[None], v.grad.flatten()]))
        v.grad.copy_(parts[1:].view_as(v))
        offset = v.detach()[:, :-1] - centre
        v.grad[:, :-1] += 2 * l2 / classes * offset
        total = parts[0] + l2 / classes * (offset**2).sum()
        losses.append(float(total))
        return total

    optimizer.step(closure)
    closure()
    assert v.grad is not None
    gradient, rows_of = float(v.grad.abs().max()), v.detach()
    if progress:
        progress(classes, classes)
    if not gradient <= 10 * CONTRAST_TOLERANCE:
        raise DataError(
            f"the fit did not converge at l2={l2:g} (gradient {gradient:.1e}): try a stronger one."
        )
    contrast = rows_of[:classes] - rows_of[classes]
    weights = contrast[:, :-1]
    return Solution(weights, contrast[:, -1] - weights @ axes.mean, (losses[0], losses[-1]), gradient)
