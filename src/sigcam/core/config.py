"""Training settings as frozen dataclasses. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import Literal

Recipe = Literal["fast", "paper", "paper-code"]


@dataclass(frozen=True)
class FitConfig:
    """Settings for training the sigmoid branch with class-balanced binary cross-entropy.

    Args:
        recipe: "fast" extracts features once, then solves a linear head exactly and trains any other head
            with Adam and early stopping. "paper" is the paper's text: Adam on features of freshly cropped and
            flipped images in every epoch. "paper-code" is its published training loop: SGD with Nesterov
            momentum, step decay and weight decay.
        l2: "fast" only: L2 penalty, multiplied by the sum of squared weights over C. "auto" takes the largest
            of several whose held-out average precision is within one standard error of the best.
        pos_weight: weight of positive labels. "balanced" is C - 1 (for a single logit: negatives /
            positives); "counts" is negatives / positives per class.
        views: "fast" only: 1 uses each image once, 2 adds its mirror image.
        prior: what a linear head's weights shrink towards: "zero", or the "softmax" head's weights minus
            their mean over classes, for few images per class.
        negatives_weight: weight of images that show none of the classes.
        background: weight of an image's own background, as an example that shows none of the classes, against
            the weight of the image; 0 is the paper's fit. "auto" takes the largest of 0, 1 and 3 whose
            held-out average precision is within one standard error of that of 0.
        background_threshold: cells where the softmax head's map of the label is below this fraction of its
            range are background.
        loss: "sigmoid" is the paper's. "background-softmax" fits a softmax over the classes and background,
            and takes the background's row off each class's; for linear heads and images of one class each.
        zooms: enlargements of the image at which maps in probabilities will be drawn; each is calibrated.
        holdout: fraction of each class's images that quality is measured on.
        calibrate: subtract log(pos_weight) from the logits after training, so that scores are probabilities
            at the class frequencies of the data.
        epochs: epochs of gradient training; None for 10, or at most 30 with "fast". Not used when "fast"
            solves a linear head.
        lr: learning rate of gradient training; None for 0.001. Not used when "fast" solves a linear head.
        decay_every: "paper-code" only: the learning rate is divided by 10 at the start of every
            `decay_every`-th epoch.
        weight_decay: "paper-code" only: L2 penalty of SGD, on all weights and biases of the branch.
        batch_norm: "paper-code" only: "eval" uses the running statistics, "batch" those of each batch.
        batch_size: images per gradient step.
        precision: dtype of cached features; use bfloat16 if they exceed 65504.
        autocast: run the backbone in half precision where that is faster.
        workers: number of image-decoding processes.
        seed: random seed.
    """

    recipe: Recipe = "fast"
    l2: float | Literal["auto"] = "auto"
    pos_weight: float | Literal["balanced", "counts"] = "balanced"
    views: Literal[1, 2] = 1
    prior: Literal["zero", "softmax"] = "zero"
    negatives_weight: float = 1.0
    background: float | Literal["auto"] = "auto"
    background_threshold: float = 0.35
    loss: Literal["sigmoid", "background-softmax"] = "sigmoid"
    zooms: tuple[float, ...] = (1.0,)
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
    """Settings for training a softmax classifier: SGD with Nesterov momentum 0.9 on random crops and flips,
    like the paper's baselines; the defaults are those for Stanford Cars.

    Args:
        epochs: number of epochs; None for 10, or 30 for a probe.
        lr: learning rate of the features, or of Adam for a probe.
        head_lr_ratio: learning rate of the last stage, as a multiple of `lr`.
        weight_decay: L2 penalty of SGD on weights and biases; None for 1e-4 on a ResNet, 5e-4 otherwise.
        decay_every: the learning rate is divided by 10 at the start of every `decay_every`-th epoch.
        freeze_until: name of the first module to train; modules defined before it keep their weights and
            statistics. None trains all.
        wsol: trainer of weakly supervised localisation: has, adversarial-erasing, acol, adl, tap or ts-cam.
            None is plain training.
        pretrained: False starts from random weights.
        batch_size: images per step.
        autocast: run the network in bfloat16 where that is faster.
        workers: number of image-decoding processes.
        seed: random seed.
    """

    epochs: int | None = None
    lr: float = 1e-3
    head_lr_ratio: float = 10.0
    weight_decay: float | None = None
    decay_every: int = 15
    freeze_until: str | None = None
    wsol: str | None = None
    pretrained: bool = True
    batch_size: int = 32
    autocast: bool = False
    workers: int = 0
    seed: int = 0
