"""Choices on the page: heads, methods and classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sigcam.methods.registry import METHODS
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch


@dataclass(frozen=True)
class Source:
    """One head of one network, to draw maps from."""

    name: str
    net: DualBranch
    branch: Branch


def sources_of(net: DualBranch, prefix: str = "") -> list[Source]:
    """Return the heads of a network to draw maps from, the recommended one first."""
    branches: list[tuple[Branch, str]] = [("softmax", "softmax head")]
    if net.classes > 1:
        branches.append(("centred", "centred softmax head"))
    if net.fitted:
        branches.insert(0, ("sigmoid", "sigmoid branch"))
    else:
        branches.reverse()
    return [Source(f"{prefix}{name}", net, branch) for branch, name in branches]


def available_methods(nets: Sequence[DualBranch]) -> list[str]:
    """Return the methods that the heads of all networks support."""
    linear = all("softmax" in net.linear for net in nets)
    missing = "attention" if linear else "linear"
    return [name for name, method in METHODS.items() if method.needs != missing]


def class_label(net: DualBranch, index: int) -> str:
    """Return the name of a class, or "class 3" if it has none."""
    names = net.class_names or ()
    return names[index] if index < len(names) else f"class {index}"


def class_choices(net: DualBranch) -> list[tuple[str, int]]:
    """Return every class as (label, index), with the index in labels that occur more than once."""
    labels = [class_label(net, k) for k in range(max(net.classes, 2))]
    counts = Counter(labels)
    return [(f"{label} ({k})" if counts[label] > 1 else label, k) for k, label in enumerate(labels)]


def same_class(index: int, net: DualBranch, other: DualBranch) -> int | None:
    """Return the class's index in another network, matched by name, or by index if the counts agree."""
    if other is net or other.class_names == net.class_names:
        return index if other.classes == net.classes else None
    if net.class_names and other.class_names:
        name = class_label(net, index)
        return other.class_names.index(name) if name in other.class_names else None
    return index if other.classes == net.classes else None
