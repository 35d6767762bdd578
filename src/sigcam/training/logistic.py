"""solve: class-balanced logistic regression with an L2 penalty, for all classes at once (Eq. 12).

Each class is a convex problem of its own on the same features, so that truncated Newton steps for many
classes are a few matrix products. Directions come from conjugate gradients in float32, preconditioned by the
features' covariance; losses and gradients are float64, and those decide when a class is done. The answer
therefore depends on the data alone: not on batches, processes or a learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.distributed import all_gather, all_reduce_sum, broadcast_first
from sigcam.core.errors import DataError

SOLVER_TOLERANCE = 1e-6  # of weights: the gradient's norm is at most 2 l2 times this
STEPS, DIRECTIONS = 100, 40  # Newton steps; conjugate gradients per step
WIDEST = 4096  # channels up to which the covariance is decomposed; above, its diagonal has to do
BIAS_PENALTY = 1e-8  # gives a class without any image a minimum
ROWS_PER_CHUNK = 8192  # rows converted at a time
MEMORY = 2**31  # bytes for what is kept per image and class; more classes are solved one block after another


@dataclass(frozen=True)
class Rows:
    """This process's images.

    Args:
        features: (n, N), in the precision of the cache.
        labels: (n,) class indices, -1 for an image that shows none; or (n, C) zeros and ones.
        weights: (n,) how much each image counts.
    """

    features: Tensor
    labels: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.features)

    def targets(self, classes: Tensor) -> Tensor:
        """(n, K) zeros and ones for some classes."""
        classes = classes.to(self.labels.device)
        if self.labels.ndim == 2:
            return self.labels[:, classes].to(torch.uint8)
        return (self.labels[:, None] == classes).to(torch.uint8)

    def some(self, chosen: Tensor) -> Rows:
        """The chosen ones, by a mask (n,)."""
        return Rows(self.features[chosen], self.labels[chosen], self.weights[chosen])


@dataclass(frozen=True)
class Axes:
    """Mean (N,) of the features, and the principal axes (N, N) and variances (N,) of what is left."""

    mean: Tensor
    axes: Tensor | None
    variances: Tensor


@dataclass(frozen=True)
class Solution:
    """The minimum: weight (C, N), bias (C,), both float64.

    Args:
        losses: mean over classes of the loss with its penalty, before each Newton step and after the last.
        gradient: the largest norm of a class's gradient that is left.
    """

    weight: Tensor
    bias: Tensor
    losses: tuple[float, ...]
    gradient: float


def find_axes(rows: Rows, *, intercept: bool = True) -> Axes:
    """The features' mean and covariance over all processes, the latter decomposed once for every penalty.

    Without an intercept, the mean stays where it is."""
    width = rows.features.shape[1]
    device = rows.features.device
    sums = torch.zeros(width + 1, dtype=torch.float64, device=device)
    for at in _parts(rows):
        weights = rows.weights[at].double()
        sums[:-1] += weights @ rows.features[at].double()
        sums[-1] += weights.sum()
    sums = all_reduce_sum(sums)
    total = float(sums[-1])
    mean = sums[:-1] / total if intercept else torch.zeros_like(sums[:-1])
    full = width <= WIDEST
    spread = torch.zeros((width, width) if full else (width,), dtype=torch.float64, device=device)
    for at in _parts(rows):
        centred = rows.features[at].double() - mean
        weighted = centred * rows.weights[at].double()[:, None]
        spread += centred.T @ weighted if full else (centred * weighted).sum(0)
    spread = all_reduce_sum(spread) / total
    if not full:
        return Axes(mean, None, spread)
    variances, axes = torch.linalg.eigh(spread)
    return Axes(mean, broadcast_first(axes), broadcast_first(variances).clamp(min=0))


def solve(
    rows: Rows,
    axes: Axes,
    classes: int,
    *,
    l2: float,
    pos_weight: Tensor,
    prior: Tensor | None = None,
    intercept: bool = True,
    start: Solution | None = None,
    tolerance: float = SOLVER_TOLERANCE,
    progress: Callable[[int, int], None] | None = None,
) -> Solution:
    """The minimum over w, b of, for each class, the mean over images of its weighted binary cross-entropy
    plus l2 |w - prior|^2.

    Args:
        pos_weight: (C,) weight of a positive label.
        prior: (C, N) weights to shrink to; zero by default.
        intercept: False leaves b at zero; `axes` must then be found without one.
        start: where to begin, such as the solution for a stronger penalty.
        tolerance: how far a weight may be from the minimum.
        progress: called with (classes done, C).
    """
    most = max(all_gather(len(rows)))
    block = max(1, min(classes, MEMORY // max(1, most * 24)))
    found = list[Solution]()
    for ids in torch.arange(classes, device=rows.features.device).split(block):
        begin = _centred(start, axes, ids)
        found.append(
            _solve_block(rows, axes, ids, l2, pos_weight, prior, begin, intercept, 2 * l2 * tolerance)
        )
        if progress:
            progress(int(ids[-1]) + 1, classes)
    length = max(len(part.losses) for part in found)
    curves = [[*part.losses, *[part.losses[-1]] * (length - len(part.losses))] for part in found]
    shares = [len(part.bias) / classes for part in found]
    losses = tuple(sum(s * curve[i] for s, curve in zip(shares, curves, strict=True)) for i in range(length))
    weight = torch.cat([part.weight for part in found])
    return Solution(weight, torch.cat([p.bias for p in found]), losses, max(p.gradient for p in found))


def _parts(rows: Rows) -> Iterator[slice]:
    return (slice(i, i + ROWS_PER_CHUNK) for i in range(0, len(rows), ROWS_PER_CHUNK))


def _centred(start: Solution | None, axes: Axes, ids: Tensor) -> Tensor | None:
    """(K, N + 1) weights and biases for features with their mean taken off."""
    if start is None:
        return None
    weight = start.weight[ids]
    return torch.cat([weight, (start.bias[ids] + weight @ axes.mean)[:, None]], 1)


# ------------------------------------------------------------------------------------------ Newton's method


def _solve_block(
    rows: Rows,
    axes: Axes,
    ids: Tensor,
    l2: float,
    pos_weight: Tensor,
    prior: Tensor | None,
    begin: Tensor | None,
    intercept: bool,
    tolerance: float,
) -> Solution:
    width, device = rows.features.shape[1], rows.features.device
    centre = torch.zeros(len(ids), width + 1, dtype=torch.float64, device=device)
    if prior is not None:
        centre[:, :-1] = prior[ids].double()
    v = centre.clone() if begin is None else begin.clone()
    penalty = torch.full((width + 1,), l2, dtype=torch.float64, device=device)
    penalty[-1] = BIAS_PENALTY if intercept else 1e12
    design = _Design(rows, axes)
    targets, pos = rows.targets(ids), pos_weight[ids].double()
    scale = rows.weights.double()[:, None]  # (n, 1)
    scale = scale / all_reduce_sum(scale.sum())
    z = design.logits(v)  # (n, K) float64
    losses = list[float]()
    left = torch.arange(len(ids), device=device)  # classes that are not at their minimum yet
    value, norms = torch.zeros_like(pos), torch.zeros_like(pos)
    for _ in range(STEPS):
        here = _Here(z[:, left], targets[:, left], pos[left], scale, v[left] - centre[left], penalty)
        value[left] = here.value()
        losses.append(float(value.mean()))
        slope, bend = here.derivatives()
        gradient = all_reduce_sum(design.back(slope)) + 2 * penalty * here.off
        norms[left] = gradient.norm(dim=1)
        going = norms[left] > tolerance
        if not bool(going.any()):
            break
        left, here, gradient = left[going], here.some(going), gradient[going]
        step = _direction(design, gradient, bend[:, going], penalty)
        change = design.logits(step)
        length = _line_search(here, step, change, value[left], (gradient * step).sum(1))
        v[left] += length[:, None] * step
        z[:, left] += length * change
    else:
        count = f"{int((norms > tolerance).sum())} of {len(ids)} classes"
        raise DataError(f"the fit of {count} did not converge at l2={l2:g}: try a stronger one.")
    weight = v[:, :-1]
    return Solution(weight, v[:, -1] - weight @ axes.mean, tuple(losses), float(norms.max()))


class _Design:
    """Products with the features, their mean taken off and a column of ones added."""

    def __init__(self, rows: Rows, axes: Axes) -> None:
        self.rows, self.axes = rows, axes
        small = rows.features.numel() * 4 <= MEMORY // 4
        self.kept = [self._made(at) for at in _parts(rows)] if small else None

    def _made(self, at: slice) -> Tensor:
        return (self.rows.features[at].double() - self.axes.mean).float()

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(which rows, their features in float32)."""
        for i, at in enumerate(_parts(self.rows)):
            yield at, self.kept[i] if self.kept is not None else self._made(at)

    def logits(self, v: Tensor) -> Tensor:
        """(n, K) in the precision of v (K, N + 1)."""
        out = v.new_empty(len(self.rows), len(v))
        for at, part in self.parts():
            out[at] = part.to(v.dtype) @ v[:, :-1].T + v[:, -1]
        return out

    def back(self, slopes: Tensor) -> Tensor:
        """(K, N + 1) from (n, K), in its precision; of this process alone."""
        out = slopes.new_zeros(slopes.shape[1], self.rows.features.shape[1] + 1)
        for at, part in self.parts():
            out[:, :-1] += slopes[at].T @ part.to(slopes.dtype)
        out[:, -1] = slopes.sum(0)
        return out


class _Here(NamedTuple):
    """Where some classes stand: logits and targets (n, K), weights of positives (K,) and of images (n, 1),
    and weights less what they are drawn to (K, N + 1)."""

    z: Tensor
    y: Tensor
    pos: Tensor
    scale: Tensor
    off: Tensor
    penalty: Tensor

    def value(self) -> Tensor:
        """(K,) loss and penalty, over all processes."""
        yes = self.y.bool()
        weight = torch.where(yes, self.pos, 1.0) * self.scale
        loss = (weight * F.softplus(torch.where(yes, -self.z, self.z))).sum(0)
        return all_reduce_sum(loss) + (self.penalty * self.off**2).sum(1)

    def derivatives(self) -> tuple[Tensor, Tensor]:
        """First, and in float32 second, derivatives (n, K) of the loss by the logits."""
        weight, p = torch.where(self.y.bool(), self.pos, 1.0) * self.scale, self.z.sigmoid()
        return weight * (p - self.y), (weight * p * (1 - p)).float()

    def some(self, chosen: Tensor) -> _Here:
        """The same for some of the classes."""
        columns = (self.z[:, chosen], self.y[:, chosen], self.pos[chosen])
        return _Here(*columns, self.scale, self.off[chosen], self.penalty)


def _line_search(here: _Here, step: Tensor, change: Tensor, now: Tensor, slope: Tensor) -> Tensor:
    """For each class, the longest of the steps 1, 1/2, 1/4, ... that goes down far enough (Armijo)."""
    length = torch.ones_like(now)
    for _ in range(30):
        there = here._replace(z=here.z + length * change, off=here.off + length[:, None] * step)
        good = there.value() <= now + 1e-4 * length * slope + 1e-14 * now.abs()  # the last: rounding
        if bool(good.all()):
            break
        length = torch.where(good, length, length / 2)
    return length


def _direction(design: _Design, gradient: Tensor, bend: Tensor, penalty: Tensor) -> Tensor:
    """-H^-1 gradient (K, N + 1), as exactly as the gradient is small: conjugate gradients, each class its
    own."""
    axes, curvature = design.axes, all_reduce_sum(bend.sum(0))  # (K,)
    soft = 2 * penalty.float()
    total = curvature[:, None] * axes.variances.float() + soft[:-1]
    turn = None if axes.axes is None else axes.axes.float()

    def preconditioned(r: Tensor) -> Tensor:
        body = r[:, :-1] / total if turn is None else ((r[:, :-1] @ turn) / total) @ turn.T
        return torch.cat([body, r[:, -1:] / (curvature[:, None] + soft[-1])], 1)

    def product(d: Tensor) -> Tensor:
        return all_reduce_sum(design.back(bend * design.logits(d))) + soft * d

    size = gradient.norm(dim=1, keepdim=True).clamp(min=1e-300)
    r = -(gradient / size).float()  # float32 has no room for gradients of 1e-10
    goal = size[:, 0].sqrt().clamp(1e-3, 0.1).float()
    x, z = torch.zeros_like(r), preconditioned(r)
    d, rz = z.clone(), (r * z).sum(1)
    for _ in range(DIRECTIONS):
        hd = product(d)
        a = rz / (d * hd).sum(1).clamp(min=1e-30)
        x, r = x + a[:, None] * d, r - a[:, None] * hd
        if bool((r.norm(dim=1) <= goal).all()):
            break
        z = preconditioned(r)
        before, rz = rz, (r * z).sum(1)
        d = z + (rz / before.clamp(min=1e-30))[:, None] * d
    found: Tensor = x.double() * size
    return found


def chosen_penalty(scores: Sequence[tuple[float, Tensor]]) -> tuple[float, float]:
    """(l2, standard error) of the strongest penalty whose mean score is within one standard error, over
    classes, of the best; from (l2, (C,) scores), NaN for classes that could not be scored."""
    means = {
        l2: float(each.nan_to_num(0.0).mean() if each.isnan().all() else each.nanmean())
        for l2, each in scores
    }
    best = max(means, key=lambda l2: (means[l2], l2))
    known = next(each for l2, each in scores if l2 == best)
    known = known[~known.isnan()]
    error = float(known.std() / len(known) ** 0.5) if len(known) > 1 else 0.0
    return max(l2 for l2, mean in means.items() if mean >= means[best] - error), error
