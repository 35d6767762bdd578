"""solve_head: the linear head that minimises loss and penalty, both weighted by what held-out images say."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather
from sigcam.core.errors import ConfigError
from sigcam.core.types import Progress
from sigcam.metrics.classification import average_precision, both_ways, quality_of
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.training.contrast import solve_contrast
from sigcam.training.logistic import Axes, Solution, find_axes, solve
from sigcam.training.recipes import TrainedHead
from sigcam.training.selection import (
    BACKGROUND_CANDIDATES,
    choose_background,
    choose_l2,
    evidence_loss,
    strongest,
)
from sigcam.training.shared_prior import fit_shared_prior
from sigcam.training.training_set import TrainingSet

L2_CANDIDATES = (1.0, 0.1, 0.01, 0.001)  # the strongest first; chosen by average precision
EVIDENCE_L2_CANDIDATES = (1.0, 0.3, 0.1, 0.03, 0.01)  # chosen by the loss of evidence
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
    began, problem = time.perf_counter(), LinearProblem(net, layer, data, pos_weight, config, progress)
    found = problem.choose()
    rows, unseen, quality = data.with_background(found.background), found.unseen, None
    if unseen is not None:
        if found.background:  # evidence is calibrated with it, so that its error counts
            train = rows.training_part()
            prior = problem.prior(train, found.shared_l2)
            unseen = problem.solve(train, found.l2, start=unseen, prior=prior, tolerance=None)
        quality = quality_of(*rows.held_out_logits(unseen.logits, net.classes), pos_weight)
    searched = time.perf_counter()
    step = partial(progress, "training") if progress else None
    prior = problem.prior(rows, found.shared_l2)
    final = problem.solve(rows, found.l2, start=unseen, prior=prior, tolerance=None, progress=step)
    name = next(name for name, module in net.sigmoid.named_modules() if module is layer)
    state = net.sigmoid.state_dict()
    state[f"{name}.weight"] = final.weight.reshape(state[f"{name}.weight"].shape)
    if problem.intercept:
        state[f"{name}.bias"] = final.bias
    return TrainedHead(
        state=state,
        losses=(*(unseen.losses if unseen else ()), *final.losses),
        l2=found.l2,
        background=found.background,
        logits=final.logits,
        unseen_logits=unseen.logits if unseen else None,
        search=found.search if config.l2 == "auto" else (),
        search_by=found.search_by,
        background_search=found.background_search,
        quality=quality,
        gradient=final.gradient,
        seconds={"penalty": searched - began, "training": time.perf_counter() - searched},
    )


@dataclass(frozen=True)
class Choice:
    """What was chosen on held-out images; other fields are those of `TrainedHead`.

    Args:
        unseen: the solution without the held-out images; None if there are none.
        shared_l2: penalty of the part of the prior that all classes share; None if it is not fitted.
    """

    l2: float
    background: float
    unseen: Solution | None = None
    shared_l2: float | None = None
    search: tuple[tuple[float, float], ...] = ()
    search_by: str = "average precision"
    background_search: tuple[tuple[float, float], ...] = ()


@dataclass
class LinearProblem:
    """The problems to solve: all rows or those not held out, with any penalty and weight of backgrounds."""

    net: DualBranch
    layer: nn.Module
    data: TrainingSet
    pos_weight: Tensor
    config: FitConfig
    progress: Progress | None
    _axes: dict[bool, Axes] = field(default_factory=dict)

    @property
    def intercept(self) -> bool:
        """Whether the layer has a bias."""
        return getattr(self.layer, "bias", None) is not None

    def solve(
        self,
        rows: TrainingSet,
        l2: float,
        *,
        start: Solution | None = None,
        prior: Solution | None = None,
        tolerance: float | None = SEARCH_GRADIENT,
        progress: Callable[[int, int], None] | None = None,
    ) -> Solution:
        """Return the solution for the rows, up to a norm of the gradient, or exactly. The penalty is weighed
        against images alone: backgrounds add to the loss, whatever their weight."""
        device, share = rows.features.device, rows.image_share()
        options: Any = {
            "axes": self._find_axes(with_backgrounds=share < 1),
            "classes": self.net.classes,
            "prior": None if prior is None else prior.weight.to(device),
            "intercept": self.intercept,
            "l2": l2 * share,
            "start": start,
            "progress": progress,
        }
        if tolerance is not None:
            options["tolerance"] = tolerance / (2 * l2 * share)
        if self.config.loss == "background-softmax":
            return solve_contrast(rows, **options)
        return solve(rows, pos_weight=self.pos_weight.to(device), **options)

    def prior(self, rows: TrainingSet, shared_l2: float | None) -> Solution | None:
        """Return what weights shrink towards: the softmax head less its mean over classes; given a penalty,
        with a shared part that is fitted to the rows; None for zero."""
        if self.config.prior == "zero":
            return None
        parameters = linear_weight(self.net.last_layer("softmax"))
        if parameters is None or self.net.classes == 1:
            raise ConfigError(
                "prior='softmax' needs a softmax head that is one linear layer: use prior='zero'."
            )
        weight, bias = (part.detach().double().to(rows.features.device) for part in parameters)
        weight, bias = weight - weight.mean(0), bias - bias.mean()
        if shared_l2 is None:
            return Solution(weight, torch.zeros_like(bias), (), 0.0)
        return fit_shared_prior(rows, weight, bias, shared_l2)

    def choose(self) -> Choice:
        """Choose the penalty and the weight of backgrounds on held-out images."""
        config, data = self.config, self.data
        given = 0.0 if config.background == "auto" else float(config.background)
        l2 = L2_WITHOUT_SEARCH if config.l2 == "auto" else float(config.l2)
        if not sum(all_gather(int(data.scored.sum()))):
            shared = L2_WITHOUT_SEARCH if given and config.prior == "softmax" else None
            return Choice(l2, given, shared_l2=shared)
        if config.background == "auto" and data.can_choose_background():
            chosen = self._choose_by_evidence(BACKGROUND_CANDIDATES[0])
            chosen = self._choose_weight(chosen)
            if chosen.background:
                return chosen
            return self._choose_by_precision(chosen.background_search)
        if given and sum(all_gather(int((data.background & data.held_out).sum()))):
            return self._choose_by_evidence(given)
        return self._choose_by_precision()

    def _choose_by_precision(self, background_search: tuple[tuple[float, float], ...] = ()) -> Choice:
        """Choose the penalty by average precision, without backgrounds."""
        given = 0.0 if self.config.background == "auto" else float(self.config.background)
        rows = self.data.with_background(given)
        train, prior, solution = rows.training_part(), self.prior(rows, None), None
        solutions, scores = dict[float, Solution](), list[tuple[float, Tensor]]()
        candidates = self._candidates(L2_CANDIDATES)
        for number, strength in enumerate(candidates):
            solution = self.solve(train, strength, start=solution, prior=prior)
            solutions[strength] = solution
            scores.append((strength, self._precision(solution)))
            l2, error = choose_l2(scores)
            means = [float(score.nanmean()) for _, score in scores]
            stop = len(means) > 2 and max(means[-2:]) < max(means) - error  # worse than the best, twice
            self._tell(number, len(candidates), stop)
            if stop:
                break
        search = tuple((strength, float(score.nanmean())) for strength, score in scores)
        return Choice(l2, given, solutions[l2], search=search, background_search=background_search)

    def _choose_by_evidence(self, weight: float) -> Choice:
        """Choose the penalty by the loss of evidence, with backgrounds of a given weight."""
        rows = self.data.with_background(weight)
        train, shared, solution = rows.training_part(), None, None
        if self.config.prior == "softmax" and self.intercept:
            shared = strongest(
                {l2: self._evidence_loss(self.prior(train, l2)) for l2 in EVIDENCE_L2_CANDIDATES}
            )
        prior = self.prior(train, shared)
        solutions, losses = dict[float, Solution](), dict[float, tuple[float, float]]()
        candidates = self._candidates(EVIDENCE_L2_CANDIDATES)
        for number, strength in enumerate(candidates):
            solution = self.solve(train, strength, start=solution, prior=prior)
            solutions[strength], losses[strength] = solution, self._evidence_loss(solution)
            stop = losses[strength][0] > sum(min(losses.values()))  # past the lowest
            self._tell(number, len(candidates), stop)
            if stop:
                break
        l2 = strongest(losses)
        search = tuple((strength, loss) for strength, (loss, _) in losses.items())
        return Choice(l2, weight, solutions[l2], shared, search, "evidence loss")

    def _choose_weight(self, chosen: Choice) -> Choice:
        """Choose the weight of backgrounds by average precision, at the penalty of the strongest."""
        strongest_solution = chosen.unseen
        assert strongest_solution is not None

        def solve_with(weight: float) -> tuple[Solution, Tensor]:
            if weight == chosen.background:
                return strongest_solution, self._precision(strongest_solution)
            rows = self.data.with_background(weight)
            train = rows.training_part()
            prior = self.prior(train, chosen.shared_l2 if weight else None)
            solution = self.solve(train, chosen.l2, start=strongest_solution, prior=prior)
            return solution, self._precision(solution)

        plain = solve_with(0.0)[1]
        weight, found, tried = choose_background(plain, solve_with, self.progress)
        return Choice(
            chosen.l2, weight, found, chosen.shared_l2, chosen.search, chosen.search_by, tuple(tried)
        )

    def _candidates(self, every: tuple[float, ...]) -> tuple[float, ...]:
        return every if self.config.l2 == "auto" else (float(self.config.l2),)

    def _precision(self, solution: Solution) -> Tensor:
        """Return the average precision (C,) on held-out images."""
        held_out = self.data.held_out_logits(solution.logits, self.net.classes)
        return average_precision(*both_ways(*held_out))

    def _evidence_loss(self, solution: Solution | None) -> tuple[float, float]:
        """Return the loss of evidence on held-out images and their backgrounds, and its error."""
        assert solution is not None
        held_out = self.data.held_out_logits(solution.logits, self.net.classes)
        return evidence_loss(*held_out, self.data.held_out_backgrounds(solution.logits))

    def _find_axes(self, *, with_backgrounds: bool) -> Axes:
        if with_backgrounds not in self._axes:
            rows = self.data.with_background(1.0 if with_backgrounds else 0.0)
            self._axes[with_backgrounds] = find_axes(rows, intercept=self.intercept)
        return self._axes[with_backgrounds]

    def _tell(self, number: int, count: int, stop: bool) -> None:
        if self.progress:
            self.progress("penalty", count if stop else number + 1, count)
