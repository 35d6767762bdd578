"""Recipe "fast" for a linear head: choose the penalty on held-out images, then solve for the minimum."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather
from sigcam.core.errors import ConfigError
from sigcam.core.types import Progress
from sigcam.metrics.classification import average_precision, both_ways, quality_of
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.sigmoid_head import SigmoidHead
from sigcam.training.logistic import Solution, find_axes, solve
from sigcam.training.training_set import TrainedHead, TrainingSet

L2_CANDIDATES = (1.0, 0.1, 0.01, 0.001)  # the strongest first
L2_WITHOUT_SEARCH = 0.1  # if no image can be held out
SEARCH_GRADIENT = 1e-3  # gradient norm at which solving stops during the search


def solve_head(
    net: DualBranch,
    layer: nn.Module,
    data: TrainingSet,
    pos_weight: Tensor,
    config: FitConfig,
    progress: Progress | None,
) -> TrainedHead:
    """Return the head whose linear `layer` minimises the loss and penalty (Eq. 12)."""
    began, device = time.perf_counter(), data.features.device
    intercept = getattr(layer, "bias", None) is not None
    solver = partial(
        solve,
        axes=find_axes(data, intercept=intercept),
        classes=net.classes,
        pos_weight=pos_weight.to(device),
        prior=_softmax_prior(net).to(device) if config.prior == "softmax" else None,
        intercept=intercept,
    )
    candidates = L2_CANDIDATES if config.l2 == "auto" else (float(config.l2),)
    l2 = L2_WITHOUT_SEARCH if config.l2 == "auto" else float(config.l2)
    solutions, scores, quality = dict[float, Solution](), list[tuple[float, Tensor]](), None
    if sum(all_gather(int(data.scored.sum()))):
        train, solution = data.select(~data.held_out), None
        for number, strength in enumerate(candidates):
            tolerance = SEARCH_GRADIENT / (2 * strength)
            solution = solver(train, l2=strength, start=solution, tolerance=tolerance)
            solutions[strength] = solution
            held_out = data.held_out_logits(solution.logits, net.classes)
            scores.append((strength, average_precision(*both_ways(*held_out))))
            stop = _is_falling(scores)
            if progress:
                progress("penalty", len(candidates) if stop else number + 1, len(candidates))
            if stop:
                break
        l2, _ = choose_l2(scores)
        quality = quality_of(*data.held_out_logits(solutions[l2].logits, net.classes), pos_weight)
    searched = time.perf_counter()
    step = partial(progress, "training") if progress else None
    final = solver(data, l2=l2, start=solutions.get(l2), progress=step)
    search = tuple((strength, float(score.nanmean())) for strength, score in scores)
    return TrainedHead(
        head=_head_with(net, layer, final),
        losses=(*(solutions[l2].losses if l2 in solutions else ()), *final.losses),
        l2=l2,
        search=search if config.l2 == "auto" else (),
        quality=quality,
        gradient=final.gradient,
        seconds={"penalty": searched - began, "training": time.perf_counter() - searched},
    )


def choose_l2(scores: Sequence[tuple[float, Tensor]]) -> tuple[float, float]:
    """Return the strongest penalty whose mean score is within one standard error of the best, and that error.

    Args:
        scores: (l2, (C,) scores), NaN for classes without a score.
    """
    means = {
        l2: float(score.nan_to_num(0.0).mean() if score.isnan().all() else score.nanmean())
        for l2, score in scores
    }
    best = max(means, key=lambda l2: (means[l2], l2))
    known = next(score[~score.isnan()] for l2, score in scores if l2 == best)
    error = float(known.std() / len(known) ** 0.5) if len(known) > 1 else 0.0
    return max(l2 for l2, mean in means.items() if mean >= means[best] - error), error


def _is_falling(scores: list[tuple[float, Tensor]]) -> bool:
    """Return whether the last two penalties are both worse than the best by more than its standard error."""
    means = [float(score.nanmean()) for _, score in scores]
    _, error = choose_l2(scores)
    return len(means) > 2 and max(means[-2:]) < max(means) - error


@torch.no_grad()
def _softmax_prior(net: DualBranch) -> Tensor:
    """Return the softmax head's weights (C, N) less their mean over classes, which probabilities ignore."""
    parameters = linear_weight(net.last_layer("softmax"))
    if parameters is None or net.classes == 1:
        raise ConfigError("prior='softmax' needs a softmax head that is one linear layer: use prior='zero'.")
    weight = parameters[0].double()
    return weight - weight.mean(0)


@torch.no_grad()
def _head_with(net: DualBranch, layer: nn.Module, solution: Solution) -> SigmoidHead:
    """Return a copy of the branch's head with the solution in its linear layer."""
    head = copy.deepcopy(net.sigmoid)
    names = {module: name for name, module in net.sigmoid.named_modules()}
    target = head.get_submodule(names[layer])
    weight = target.get_parameter("weight")
    weight.copy_(solution.weight.reshape(weight.shape))
    if getattr(target, "bias", None) is not None:
        target.get_parameter("bias").copy_(solution.bias)
    return head
