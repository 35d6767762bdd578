"""Data of the page: what a visitor requests, and the panels that answer it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sigcam.methods.registry import METHODS
from sigcam.ui.sources import Source

Colours = Literal["evidence", "signed"]


@dataclass(frozen=True)
class Request:
    """The maps that a visitor wants to see of an image."""

    classes: tuple[int, ...]  # of the first network
    sources: tuple[Source, ...]
    methods: tuple[str, ...]
    colours: Colours = "evidence"
    shared_scale: bool = True


@dataclass
class Panel:
    """One map on the page."""

    source: Source
    method: str
    class_index: int
    class_name: str
    raw_map: Tensor  # (1, 1, P, Q), signed, in logits if the method gives them
    logit: float
    positive_share: float  # of the evidence
    note: str
    scale_max: float = 1.0  # value drawn in full colour
    image_uri: str = ""
    unit_map: Tensor = field(default_factory=lambda: torch.zeros(1, 1, 1))  # (1, H, W) in [0, 1]

    @property
    def in_logits(self) -> bool:
        """Whether the values are logits."""
        return METHODS[self.method].in_logits

    @property
    def unit(self) -> str:
        """Unit of the values; panels of the same unit can share a scale."""
        return "logits" if self.in_logits else self.method

    @property
    def follows_shift(self) -> bool:
        """Whether a shift of the softmax head changes the map."""
        linear = "softmax" in self.source.net.linear and self.source.net.classes > 1
        return linear and self.source.branch != "sigmoid" and METHODS[self.method].follows_head


@dataclass(frozen=True)
class TopClasses:
    """The most probable classes of an image according to one network."""

    title: str
    rows: tuple[tuple[str, float, float | None], ...]  # name, probability, evidence (None: no fitted branch)
