"""What `sigcam inspect` tells: how a network is split, which methods it takes, which of those coincide; what
a data set holds."""

from __future__ import annotations

import torch
from torch import Tensor

from sigcam.attention import attention_rollout
from sigcam.data import Samples
from sigcam.dual import DualBranch
from sigcam.errors import DataError
from sigcam.explaining import Drawing, explain_passage
from sigcam.methods import METHODS
from sigcam.models import Classifier

COMPARED = ("cam", "grad-cam", "grad-cam++", "xgrad-cam", "layer-cam", "hires-cam", "ablation-cam")
ALIKE = 1e-3  # of a map's largest value


def model_facts(classifier: Classifier, net: DualBranch) -> dict[str, str]:
    """Words for each thing that a user may want to check, or to change, before drawing maps."""
    split, size = net.split, net.split.fold.image
    same = {how: "; ".join(map(" = ".join, groups)) for how, groups in coinciding(net).items()}
    return {
        "model": classifier.name,
        "classes": f"{net.classes}"
        + (f" ({', '.join(classifier.classes[:3])}, ...)" if classifier.classes else ""),
        "head": ", ".join(split.heads) + ("" if split.whole else " (combined by the model's own last steps)"),
        "layer": split.layer + (" and the activation after it" if split.activation else ""),
        "map": f"{split.fold.grid[0]} x {split.fold.grid[1]} cells of a {size[0]} x {size[1]} input"
        + (f", after {split.fold.prefix} prefix token(s)" if split.fold.prefix else ""),
        "layout": split.fold.layout,
        "returns": split.output,
        "global average + linear": ", ".join(sorted(net.linear)) or "no",
        "methods": ", ".join(usable_methods(net)),
        **{f"the same map, {how}": groups or "none" for how, groups in same.items()},
        "branch parameters": f"{sum(p.numel() for p in net.parameters() if p.requires_grad):,}",
        "finer layers": "; ".join(_finer_layers(net)) or "none",
        "preprocessing": str(classifier.transform),
    }


def data_facts(samples: Samples) -> dict[str, str | int]:
    """How many images, classes, boxes and masks a data set has."""
    counts = [0] * len(samples.classes)
    for sample in samples:
        if sample.label is not None:
            counts[sample.label] += 1
    return {
        "images": len(samples),
        "classes": len(samples.classes),
        "images per class": f"{min(counts)} to {max(counts)}" if counts else "no labels",
        "boxes": sum(sample.boxes is not None for sample in samples),
        "masks": sum(sample.open_mask is not None for sample in samples),
    }


def usable_methods(net: DualBranch) -> list[str]:
    """The methods that this network takes: `cam` reads a linear head, the rollout a plain ViT's attention."""
    without = set() if net.linear else {"cam"}
    try:
        attention_rollout(net, random_images(net))
    except DataError:
        without.add("attention-rollout")
    return [name for name in METHODS if name not in without]


def random_images(net: DualBranch) -> Tensor:
    """Two images of noise such as the network takes."""
    noise = torch.randn(2, *net.input_shape, generator=torch.Generator().manual_seed(0))
    return noise.to(next(net.model.parameters()))


def coinciding(net: DualBranch) -> dict[str, list[list[str]]]:
    """Groups of methods whose signed, and whose clamped, softmax maps are one map up to scale; by trying
    them on two random images."""
    passage = net.run(random_images(net), grad=True)
    tried = [name for name in COMPARED if name != "cam" or "softmax" in net.linear]
    found = {}
    for how, clamp in (("signed weights", False), ("positive weights only", True)):
        groups = list[tuple[Tensor, list[str]]]()
        for name in tried:
            drawing = Drawing(name, "softmax", clamp, scale="raw")
            low = explain_passage(net, passage, drawing, classes=0, size="features").maps
            low = low / low.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            alike = (names for maps, names in groups if bool(((maps - low).abs() <= ALIKE).all()))
            names = next(alike, None) if bool(low.any()) else None  # two blank maps are no finding
            if names is None:
                groups.append((low, [name]))
            else:
                names.append(name)
        found[how] = [names for _, names in groups if len(names) > 1]
    return found


def _finer_layers(net: DualBranch) -> list[str]:
    """For each finer grid that the network passes through, the last layer on it."""
    last = {(p, q): f"{name} ({n} x {p} x {q})" for name, n, p, q in net.split.spatial}
    return [text for grid, text in last.items() if grid[0] > net.split.fold.grid[0]]
