"""What can be chosen on the page: sources, methods, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sigcam.methods.registry import METHODS
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch

Kind = Literal["evidence", "signed"]


@dataclass(frozen=True)
class Source:
    """Where maps come from: one head of one network."""

    name: str
    net: DualBranch
    branch: Branch


def sources_of(net: DualBranch, prefix: str = "") -> list[Source]:
    """The heads of a network that maps can come from, the best one first."""
    branches: list[tuple[Branch, str]] = [("softmax", "softmax head")]
    if net.classes > 1:
        branches.append(("centred", "centred softmax head"))
    if net.fitted:
        branches.insert(0, ("sigmoid", "sigmoid branch"))
    else:
        branches.reverse()
    return [Source(f"{prefix}{name}", net, branch) for branch, name in branches]


def available_methods(nets: Sequence[DualBranch]) -> list[str]:
    """The methods that the networks' heads allow."""
    linear = all("softmax" in net.linear for net in nets)
    missing = "attention" if linear else "linear"
    return [name for name, method in METHODS.items() if method.needs != missing]


def class_label(net: DualBranch, index: int) -> str:
    """The name of a class, or its number."""
    names = net.class_names or ()
    return names[index] if index < len(names) else f"class {index}"


def class_choices(net: DualBranch) -> list[tuple[str, int]]:
    """Every class as (label, number); names that occur twice carry their number."""
    labels = [class_label(net, k) for k in range(max(net.classes, 2))]
    twice = (
        {label for label in labels if labels.count(label) > 1} if len(set(labels)) < len(labels) else set()
    )
    return [(f"{label} ({k})" if label in twice else label, k) for k, label in enumerate(labels)]


def same_class(index: int, net: DualBranch, other: DualBranch) -> int | None:
    """The class's number in another network: by name where both have names, by number where counts agree."""
    if other is net or other.class_names == net.class_names:
        return index if other.classes == net.classes else None
    if net.class_names and other.class_names:
        name = class_label(net, index)
        return other.class_names.index(name) if name in other.class_names else None
    return index if other.classes == net.classes else None


@dataclass(frozen=True)
class Request:
    """What a person wants to see of a picture."""

    classes: tuple[int, ...]  # of the first network
    sources: tuple[Source, ...]
    methods: tuple[str, ...]
    kind: Kind = "evidence"
    shared: bool = True  # one scale for all maps


@dataclass
class Panel:
    """One map: where it is from, what it is of, and the P x Q numbers that every drawing is made from."""

    source: Source
    method: str
    index: int
    class_name: str
    low: Tensor  # (1, 1, P, Q), signed, in logits where the method gives them
    logit: float
    share: float  # of the evidence that is positive
    note: str
    peak: float = 1.0
    uri: str = ""
    unit: Tensor = field(
        default_factory=lambda: torch.zeros(1, 1, 1)
    )  # (1, H, W) of the network's input, in [0, 1]

    @property
    def in_logits(self) -> bool:
        """Whether its numbers are logits."""
        return METHODS[self.method].in_logits

    @property
    def measure(self) -> str:
        """What its numbers are in: maps alike in this have one scale."""
        return "logits" if self.in_logits else self.method

    @property
    def shifts(self) -> bool:
        """Whether a shift of the softmax head reaches it."""
        linear = "softmax" in self.source.net.linear and self.source.net.classes > 1
        return linear and self.source.branch != "sigmoid" and METHODS[self.method].follows_head


@dataclass(frozen=True)
class Top:
    """The likely classes of a picture by one network."""

    title: str
    rows: tuple[tuple[str, float, float | None], ...]  # name, probability, evidence where a branch is fitted
