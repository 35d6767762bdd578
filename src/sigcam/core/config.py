"""Settings as frozen dataclasses; nothing here imports torch, so that `--help` is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recipe = Literal["fast", "paper", "paper-code"]


@dataclass(frozen=True)
class FitConfig:
    """How the sigmoid branch is trained: class-balanced binary cross-entropy on a frozen backbone.

    Args:
        recipe: "fast" computes features once; a linear head is then solved for exactly, another trained with
            Adam until its held-out loss no longer falls. "paper" is what the paper says: Adam on
            features of freshly cropped and mirrored images in every epoch. "paper-code" is what its training
            loop does: SGD with Nesterov momentum, step decay and weight decay.
        l2: of "fast", the strength of the penalty: times the sum of squared weights over C. "auto" takes the
            strongest of several whose held-out average precision is within one standard error of the best.
        pos_weight: weight of a positive label. "balanced" is C - 1 (for one logit: negatives / positives);
            "counts" is negatives / positives of each class.
        views: of "fast", 1 takes each image as it is, 2 adds its mirror image.
        prior: what a linear head's weights are drawn to: "zero", or the "softmax" head's weights with their
            mean over classes taken off, for few images per class.
        negatives_weight: how much an image without any of the classes counts.
        holdout: the share of images, of each class, that quality is measured on.
        calibrate: takes log(pos_weight) off the logits in the end, so that scores are probabilities at the
            data's own frequencies rather than odds against the average class.
        epochs, lr: of training by gradient steps; None for the recipe's own (10 and 0.001; heads that "fast"
            trains: at most 30). "fast" has none for a linear head.
        decay_every, weight_decay: of "paper-code": the learning rate is divided by 10 at the start of every
            such epoch.
        batch_norm: of "paper-code": "eval" uses trained statistics, "batch" those of each batch.
        batch_size: images per gradient step.
        precision: of cached features; bfloat16 for those beyond 65504.
        autocast: runs the backbone in half precision where that is faster.
        workers: processes that decode images.
        seed: of whatever is random.
    """

    recipe: Recipe = "fast"
    l2: float | Literal["auto"] = "auto"
    pos_weight: float | Literal["balanced", "counts"] = "balanced"
    views: Literal[1, 2] = 1
    prior: Literal["zero", "softmax"] = "zero"
    negatives_weight: float = 1.0
    holdout: float = 0.2
    calibrate: bool = False
    epochs: int | None = None
    lr: float | None = None
    decay_every: int = 3
    weight_decay: float = 5e-4
    batch_norm: Literal["eval", "batch"] = "eval"
    batch_size: int = 32
    precision: Literal["float16", "bfloat16"] = "float16"
    autocast: bool = False
    workers: int = 0
    seed: int = 0


@dataclass(frozen=True)
class TrainConfig:
    """How a softmax classifier is trained: SGD with Nesterov momentum 0.9 on random crops and mirror images,
    as the paper's baselines are; the defaults are those of its cars.

    Args:
        epochs: passes over the images; None for 10, of a probe 30.
        lr: learning rate of the features; of a probe, that of Adam.
        head_lr_ratio: how many times faster the last stage learns.
        weight_decay: of weights and biases; None for 1e-4 if the network is a ResNet, else 5e-4.
        decay_every: the learning rate is divided by 10 at the start of every such epoch.
        freeze_until: name of the first module that is trained, with all that is defined after it; what comes
            before keeps its weights and statistics. None trains all.
        pretrained: False starts from random weights.
        batch_size: images per step.
        autocast: runs the network in bfloat16 where that is faster.
        workers: processes that decode images.
        seed: of whatever is random.
    """

    epochs: int | None = None
    lr: float = 1e-3
    head_lr_ratio: float = 10.0
    weight_decay: float | None = None
    decay_every: int = 15
    freeze_until: str | None = None
    pretrained: bool = True
    batch_size: int = 32
    autocast: bool = False
    workers: int = 0
    seed: int = 0
