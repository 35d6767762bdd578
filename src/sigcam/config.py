"""Settings as frozen dataclasses; nothing here imports torch, so that `--help` is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FitConfig:
    """How the sigmoid branch is trained: Adam on cached features, class-balanced binary cross-entropy.

    Args:
        epochs: passes over the cached features.
        lr: learning rate of Adam.
        batch_size: images per step, and per pass of the backbone.
        views: 1 takes each image as it is, 2 adds its mirror image.
        pos_weight: weight of a positive label; "balanced" is C - 1 (for one logit: negatives / positives).
        l2: strength of the penalty, times the sum of squared weights over C.
        workers: processes that decode images.
        seed: of the order of images and of dropout inside the head.
    """

    epochs: int = 30
    lr: float = 1e-3
    batch_size: int = 32
    views: Literal[1, 2] = 1
    pos_weight: float | Literal["balanced"] = "balanced"
    l2: float = 0.01
    workers: int = 0
    seed: int = 0
