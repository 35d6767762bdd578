"""solve: class-balanced logistic regression with an L2 penalty, for all classes at once (Eq. 12).

The classes are independent convex problems on the same features, so a truncated Newton step for many classes
takes a few matrix products. Directions come from conjugate gradients in float32, preconditioned by the
features' covariance. Losses and gradients are float64 and decide when a class has converged, so the solution
depends on the data alone, not on batches, processes or a learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.distributed import all_gather, all_reduce_sum, broadcast_first
from sigcam.core.errors import DataError

SOLVER_TOLERANCE = 1e-6  # error of the weights: the gradient's norm is at most 2 l2 times this
STEPS, DIRECTIONS = 100, 40  # Newton steps; conjugate gradient steps for each
WIDEST = 4096  # most channels for which the full covariance is used; beyond, its diagonal
BIAS_PENALTY = 1e-8  # a class without images has a minimum too
ROWS_PER_CHUNK = 8192  # rows converted at a time
MEMORY = 2**31  # bytes for arrays of images x classes; more classes are solved block by block


@dataclass(frozen=True)
class Rows:
    """Labelled features of this process.

    Args:
        features: (n, N), in the precision of the cache.
        labels: (n,) class indices, -1 for an image that shows none; or (n, C) zeros and ones.
        weights: (n,) weight of each image in the loss.
    """

    features: Tensor
    labels: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.features)

    def targets(self, classes: Tensor) -> Tensor:
        """Return (n, K) zeros and ones for K classes."""
        classes = classes.to(self.labels.device)
        if self.labels.ndim == 2:
            return self.labels[:, classes].to(torch.uint8)
        return (self.labels[:, None] == classes).to(torch.uint8)

    def select(self, chosen: Tensor) -> Rows:
        """Return some of the rows, by a mask or by indices."""
        return Rows(self.features[chosen], self.labels[chosen], self.weights[chosen])


@dataclass(frozen=True)
class Axes:
    """Mean (N,) of the features; principal axes (N, N) and variances (N,) of the centred features."""

    mean: Tensor
    axes: Tensor | None
    variances: Tensor


@dataclass(frozen=True)
class Solution:
    """The minimum: weight (C, N) and bias (C,), both float64.

    Args:
        losses: mean over classes of loss plus penalty, before each Newton step and after the last.
        gradient: largest norm of a class's gradient at the solution.
    """

    weight: Tensor
    bias: Tensor
    losses: tuple[float, ...]
    gradient: float

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (n, C) of features (n, N)."""
        return features.double() @ self.weight.T + self.bias


def find_axes(rows: Rows, *, intercept: bool = True) -> Axes:
    """Return the mean and the principal axes of the features of all processes, for `solve` at any penalty;
    without an intercept the features are not centred."""
    width, device = rows.features.shape[1], rows.features.device
    sums = torch.zeros(width + 1, dtype=torch.float64, device=device)
    for at in _row_slices(rows):
        weights = rows.weights[at].double()
        sums[:-1] += weights @ rows.features[at].double()
        sums[-1] += weights.sum()
    sums = all_reduce_sum(sums)
    total = float(sums[-1])
    mean = sums[:-1] / total if intercept else torch.zeros_like(sums[:-1])
    full = width <= WIDEST
    spread = torch.zeros((width, width) if full else (width,), dtype=torch.float64, device=device)
    for at in _row_slices(rows):
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
    """Minimise over w, b, for each class, the weighted mean binary cross-entropy plus l2 |w - prior|^2.

    Args:
        pos_weight: (C,) weight of a positive label.
        prior: (C, N) weights to shrink towards; zero by default.
        intercept: False keeps b at zero; `axes` must then be without an intercept too.
        start: where to start, such as the solution for a stronger penalty.
        tolerance: distance of the weights from the minimum at which to stop.
        progress: called with (classes done, C).
    """
    most = max(all_gather(len(rows)))
    block = max(1, min(classes, MEMORY // max(1, most * 24)))
    parts = list[Solution]()
    for ids in torch.arange(classes, device=rows.features.device).split(block):
        part = _solve_block(rows, axes, ids, l2, pos_weight, prior, start, intercept, 2 * l2 * tolerance)
        parts.append(part)
        if progress:
            progress(int(ids[-1]) + 1, classes)
    length = max(len(part.losses) for part in parts)
    curves = [[*part.losses, *[part.losses[-1]] * (length - len(part.losses))] for part in parts]
    shares = [len(part.bias) / classes for part in parts]
    losses = tuple(sum(s * curve[i] for s, curve in zip(shares, curves, strict=True)) for i in range(length))
    weight, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "bias"))
    return Solution(weight, bias, losses, max(part.gradient for part in parts))


def _row_slices(rows: Rows) -> Iterator[slice]:
    return (slice(i, i + ROWS_PER_CHUNK) for i in range(0, len(rows), ROWS_PER_CHUNK))


def _solve_block(
    rows: Rows,
    axes: Axes,
    ids: Tensor,
    l2: float,
    pos_weight: Tensor,
    prior: Tensor | None,
    start: Solution | None,
    intercept: bool,
    tolerance: float,
) -> Solution:
    """Minimise by Newton's method for the classes `ids`; converged classes drop out."""
    width, device = rows.features.shape[1], rows.features.device
    centre = torch.zeros(len(ids), width + 1, dtype=torch.float64, device=device)
    if prior is not None:
        centre[:, :-1] = prior[ids].double()
    v = centre.clone()  # weights and biases (K, N + 1) for centred features
    if start is not None:
        v[:, :-1] = start.weight[ids]
        v[:, -1] = start.bias[ids] + start.weight[ids] @ axes.mean
    penalty = torch.full((width + 1,), l2, dtype=torch.float64, device=device)
    penalty[-1] = BIAS_PENALTY if intercept else 1e12
    design = _Design(rows, axes)
    targets, pos = rows.targets(ids), pos_weight[ids].double()
    scale = rows.weights.double()[:, None]  # (n, 1)
    scale = scale / all_reduce_sum(scale.sum())
    z = design.logits(v)  # (n, K) float64
    losses = list[float]()
    left = torch.arange(len(ids), device=device)  # classes that have not converged
    value, norms = torch.zeros_like(pos), torch.zeros_like(pos)
    for _ in range(STEPS):
        offset = v[left] - centre[left]
        objective = _Objective(z[:, left], targets[:, left], pos[left], scale, offset, penalty)
        value[left] = objective.value()
        losses.append(float(value.mean()))
        slope, second = objective.derivatives()
        gradient = all_reduce_sum(design.transposed(slope)) + 2 * penalty * objective.offset
        norms[left] = gradient.norm(dim=1)
        going = norms[left] > tolerance
        if not bool(going.any()):
            break
        left, objective, gradient = left[going], objective.select(going), gradient[going]
        step = _direction(design, gradient, second[:, going], penalty)
        change = design.logits(step)
        length = _line_search(objective, step, change, value[left], (gradient * step).sum(1))
        v[left] += length[:, None] * step
        z[:, left] += length * change
    else:
        count = f"{int((norms > tolerance).sum())} of {len(ids)} classes"
        raise DataError(f"the fit of {count} did not converge at l2={l2:g}: try a stronger one.")
    weight = v[:, :-1]
    return Solution(weight, v[:, -1] - weight @ axes.mean, tuple(losses), float(norms.max()))


class _Design:
    """Matrix products with the design matrix: the centred features and a column of ones."""

    def __init__(self, rows: Rows, axes: Axes) -> None:
        self.rows, self.axes = rows, axes
        small = rows.features.numel() * 4 <= MEMORY // 4
        self.cached = [self._centred(at) for at in _row_slices(rows)] if small else None

    def _centred(self, at: slice) -> Tensor:
        return (self.rows.features[at].double() - self.axes.mean).float()

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows with their centred features in float32."""
        for i, at in enumerate(_row_slices(self.rows)):
            yield at, self.cached[i] if self.cached is not None else self._centred(at)

    def logits(self, v: Tensor) -> Tensor:
        """Return the logits (n, K) of weights and biases v (K, N + 1), in the precision of v."""
        out = v.new_empty(len(self.rows), len(v))
        for at, part in self.parts():
            out[at] = part.to(v.dtype) @ v[:, :-1].T + v[:, -1]
        return out

    def transposed(self, slopes: Tensor) -> Tensor:
        """Return the transposed product (K, N + 1) with slopes (n, K), over this process's rows only."""
        out = slopes.new_zeros(slopes.shape[1], self.rows.features.shape[1] + 1)
        for at, part in self.parts():
            out[:, :-1] += slopes[at].T @ part.to(slopes.dtype)
        out[:, -1] = slopes.sum(0)
        return out


class _Objective(NamedTuple):
    """Loss and penalty of K classes at a point.

    z and y are logits and targets (n, K), pos the weights of positives (K,), scale those of images (n, 1),
    offset the weights less the prior (K, N + 1).
    """

    z: Tensor
    y: Tensor
    pos: Tensor
    scale: Tensor
    offset: Tensor
    penalty: Tensor

    def value(self) -> Tensor:
        """Return loss plus penalty (K,), over all processes."""
        yes = self.y.bool()
        weight = torch.where(yes, self.pos, 1.0) * self.scale
        loss = (weight * F.softplus(torch.where(yes, -self.z, self.z))).sum(0)
        return all_reduce_sum(loss) + (self.penalty * self.offset**2).sum(1)

    def derivatives(self) -> tuple[Tensor, Tensor]:
        """Return first derivatives, and in float32 second, (n, K) of the loss with respect to the logits."""
        weight, p = torch.where(self.y.bool(), self.pos, 1.0) * self.scale, self.z.sigmoid()
        return weight * (p - self.y), (weight * p * (1 - p)).float()

    def select(self, chosen: Tensor) -> _Objective:
        """Return the objective of some of the classes."""
        columns = (self.z[:, chosen], self.y[:, chosen], self.pos[chosen])
        return _Objective(*columns, self.scale, self.offset[chosen], self.penalty)


def _line_search(objective: _Objective, step: Tensor, change: Tensor, now: Tensor, slope: Tensor) -> Tensor:
    """Return for each class the longest step of 1, 1/2, 1/4, ... that decreases the loss enough (Armijo)."""
    length = torch.ones_like(now)
    for _ in range(30):
        offset = objective.offset + length[:, None] * step
        trial = objective._replace(z=objective.z + length * change, offset=offset)
        good = trial.value() <= now + 1e-4 * length * slope + 1e-14 * now.abs()  # last term: rounding
        if bool(good.all()):
            break
        length = torch.where(good, length, length / 2)
    return length


def _direction(design: _Design, gradient: Tensor, second: Tensor, penalty: Tensor) -> Tensor:
    """Return -H^-1 gradient (K, N + 1) by conjugate gradients per class, more exact for smaller gradients."""
    axes, curvature = design.axes, all_reduce_sum(second.sum(0))  # (K,)
    ridge = 2 * penalty.float()
    diagonal = curvature[:, None] * axes.variances.float() + ridge[:-1]
    basis = None if axes.axes is None else axes.axes.float()

    def preconditioned(r: Tensor) -> Tensor:
        body = r[:, :-1] / diagonal if basis is None else ((r[:, :-1] @ basis) / diagonal) @ basis.T
        return torch.cat([body, r[:, -1:] / (curvature[:, None] + ridge[-1])], 1)

    def product(d: Tensor) -> Tensor:
        return all_reduce_sum(design.transposed(second * design.logits(d))) + ridge * d

    size = gradient.norm(dim=1, keepdim=True).clamp(min=1e-300)
    r = -(gradient / size).float()  # gradients of 1e-10 underflow in float32
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
    direction: Tensor = x.double() * size
    return direction
