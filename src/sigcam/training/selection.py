"""Choose the penalty and the weight of backgrounds by scores of held-out images."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sigcam.core.types import Progress
from sigcam.network.calibration import evidence_cases, fit_scale

BACKGROUND_CANDIDATES = (3.0, 1.0)  # the strongest first
# Shares of the kinds of absent classes (`evidence_cases`) when penalties are compared: more of the cases in
# which they differ, the best class of a background and the best other class, than in the question itself.
SELECTION_SHARES = (1.0, 2.0, 1.0)
MIN_HELD_OUT = 50  # images; a choice by fewer would be left to chance
Found = TypeVar("Found")


def choose_background(
    plain: Tensor, solve_with: Callable[[float], tuple[Found, Tensor]], progress: Progress | None
) -> tuple[float, Found | None, list[tuple[float, float]]]:
    """Return the strongest weight of backgrounds whose mean score is within one standard error of that
    without, what was found with it (None for 0), and the mean score of each weight tried.

    Args:
        plain: (C,) scores without backgrounds, NaN for classes without one.
        solve_with: returns what it finds with a weight, and its scores (C,).
    """
    known = plain[~plain.isnan()]
    mean = float(known.mean()) if len(known) else 0.0
    error = float(known.std() / len(known) ** 0.5) if len(known) > 1 else 0.0
    tried = [(0.0, mean)]
    for number, weight in enumerate(BACKGROUND_CANDIDATES):
        found, scores = solve_with(weight)
        tried.append((weight, 0.0 if scores.isnan().all() else float(scores.nanmean())))
        accepted = tried[-1][1] >= mean - error
        if progress:
            most = len(BACKGROUND_CANDIDATES)
            progress("background", most if accepted else number + 1, most)
        if accepted:
            return weight, found, tried
    return 0.0, None, tried


def choose_l2(scores: Sequence[tuple[float, Tensor]]) -> tuple[float, float]:
    """Return the strongest penalty whose mean score is within one standard error of the best, and that error.
    Scores are (C,) for each l2, NaN for classes without one."""
    means = {l2: 0.0 if score.isnan().all() else float(score.nanmean()) for l2, score in scores}
    best = max(means, key=lambda l2: means[l2])
    known = dict(scores)[best]
    known = known[~known.isnan()]
    error = float(known.std() / len(known) ** 0.5) if len(known) > 1 else 0.0
    return max(l2 for l2, mean in means.items() if mean >= means[best] - error), error


def evidence_loss(images: Tensor, targets: Tensor, alone: Tensor) -> tuple[float, float]:
    """Return the mean log loss of evidence for its question (`evidence_cases`, `SELECTION_SHARES`), with one
    scale and one shift fitted to these cases, and its standard error; infinite if the scores do not separate
    them.

    Args:
        images, targets: logits and targets (n, C) of held-out images.
        alone: logits (m, C) of their backgrounds.
    """
    scores, answers, weights = evidence_cases(images, targets.bool(), alone, SELECTION_SHARES)
    scale = fit_scale(scores, answers, weights)
    if scale is None:
        return torch.inf, 0.0
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scale(scores), answers, reduction="none")
    shown = losses[answers > 0]  # one half of the question, and by far the fewest cases
    error = float(shown.std() / len(shown) ** 0.5 / 2) if len(shown) > 1 else 0.0
    return float((weights * losses).sum() / weights.sum()), error


def strongest(losses: Mapping[float, tuple[float, float]]) -> float:
    """Return the strongest penalty whose loss is within one standard error of the lowest, given (loss, error)
    by penalty."""
    lowest, error = min(losses.values())
    return max(l2 for l2, (loss, _) in losses.items() if loss <= lowest + error)
