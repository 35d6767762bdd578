"""Checks of FitConfig and TrainConfig; nothing here imports torch, so that a command fails early."""

import math

from sigcam.core.config import FitConfig, TrainConfig
from sigcam.core.errors import ConfigError


def check_fit_config(config: FitConfig, *, linear: bool | None, negatives: bool) -> None:
    """Raise ConfigError for settings that are out of range or have no effect on this recipe and head.

    Args:
        linear: whether the head is one linear layer; None if that is not known yet.
        negatives: whether there are images without any of the classes.
    """
    c, epochs = config, 1 if config.epochs is None else config.epochs
    solved = c.recipe == "fast" and bool(linear)
    faults = {
        "recipe must be fast, paper or paper-code": c.recipe not in ("fast", "paper", "paper-code"),
        "epochs and batch_size must be 1 or more, views 1 or 2, workers 0 or more": (
            epochs < 1 or c.batch_size < 1 or c.views not in (1, 2) or c.workers < 0
        ),
        "lr must be above 0": c.lr is not None and not 0 < c.lr < math.inf,
        "l2 must be 'auto' or a number, 0 or more": c.l2 != "auto"
        and not (isinstance(c.l2, int | float) and 0 <= c.l2 < math.inf),
        "pos_weight must be above 0, 'balanced' or 'counts'": c.pos_weight not in ("balanced", "counts")
        and not (isinstance(c.pos_weight, int | float) and 0 < c.pos_weight < math.inf),
        "prior must be zero or softmax": c.prior not in ("zero", "softmax"),
        "holdout must be from 0 to 0.5": not 0 <= c.holdout <= 0.5,
        "negatives_weight must be above 0": not 0 < c.negatives_weight < math.inf,
        "background must be 'auto' or a number, 0 or more": c.background != "auto"
        and not (isinstance(c.background, int | float) and 0 <= c.background < math.inf),
        "loss must be sigmoid or background-softmax": c.loss not in ("sigmoid", "background-softmax"),
        "loss='background-softmax' needs a weight of backgrounds, such as background=3, and recipe fast": (
            c.loss != "sigmoid" and (c.recipe != "fast" or c.background in ("auto", 0))
        ),
        "loss='background-softmax' is for linear heads": c.loss != "sigmoid" and linear is False,
        "background_threshold must be between 0 and 1": not 0 < c.background_threshold < 1,
        "background is for recipe fast: the paper's recipes have none": c.recipe != "fast"
        and c.background not in ("auto", 0),
        "zooms must be numbers of 1 or more": not c.zooms
        or not all(
            isinstance(z, int | float) and not isinstance(z, bool) and 1 <= z < math.inf for z in c.zooms
        ),
        "zooms are calibrated with backgrounds: leave them out, or background=0": any(z != 1 for z in c.zooms)
        and (c.recipe != "fast" or c.background == 0),
        "calibrate is for fits without background: use background=0": c.calibrate
        and c.background not in ("auto", 0),
        "decay_every must be 1 or more, weight_decay 0 or more": c.decay_every < 1 or not c.weight_decay >= 0,
        "precision must be float16 or bfloat16": c.precision not in ("float16", "bfloat16"),
        "batch_norm must be eval, or batch with recipe paper-code": c.batch_norm not in ("eval", "batch")
        or (c.batch_norm == "batch" and c.recipe != "paper-code"),
        "a linear head is solved for exactly, without epochs or lr: leave them out, or choose recipe paper": (
            solved and (c.epochs is not None or c.lr is not None)
        ),
        "a linear head needs an l2 above 0, or its weights grow without bound": solved and c.l2 == 0,
        "prior='softmax' is for linear heads that recipe fast solves for": c.prior != "zero"
        and (c.recipe != "fast" or linear is False),
        "negatives are for recipe fast": negatives and c.recipe != "fast",
    }
    for sentence, wrong in faults.items():
        if wrong:
            raise ConfigError(f"{sentence}.")


def check_train_config(config: TrainConfig) -> TrainConfig:
    """Return the settings; raise ConfigError for a number out of range or an unknown trainer."""
    minimum = {"epochs": 1, "decay_every": 1, "batch_size": 1, "workers": 0, "weight_decay": 0, "seed": 0}
    for name, low in minimum.items():
        value = getattr(config, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{name} is {value}: give {low} or more.")
    for name in ("lr", "head_lr_ratio"):
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(config, name):g}: give a number above 0.")
    if config.wsol is not None:
        from sigcam.training.wsol import trainer_named  # which imports torch

        trainer_named(config.wsol).check_epochs(config.epochs)
    return config
