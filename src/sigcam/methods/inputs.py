"""The inputs of `explain`: images as a batch, classes as indices, and the scores of those classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.errors import ConfigError, DataError
from sigcam.data.images import open_image
from sigcam.methods.targets import Branch, at_least_float32, branch_logits, class_logits
from sigcam.network.dual import DualBranch, ForwardPass

ImageSource = Image.Image | str | Path
Classes = int | Sequence[int] | Tensor | Literal["top5", "positive", "all"] | None


def as_batch(
    net: DualBranch, images: Tensor | ImageSource | Sequence[ImageSource]
) -> tuple[Tensor, tuple[Image.Image, ...]]:
    """Return a (B, C, H, W) batch and the part of each PIL image that the network sees, where it is known."""
    if isinstance(images, Tensor):
        if images.ndim != 4 or not len(images):
            raise DataError(f"images must be (B, C, H, W) with B >= 1, not {tuple(images.shape)}.")
        if images.device != net.device:
            raise DataError(f"images are on {images.device}, the network on {net.device}: move one of them.")
        return images, ()
    if net.transform is None:
        raise DataError("images need preprocessing: set net.transform, or give a (B, C, H, W) tensor.")
    sources = [images] if isinstance(images, ImageSource) else list(images)
    if not sources:
        raise DataError("no images were given.")
    for source in sources:
        if not isinstance(source, ImageSource):
            expected = "a (B, C, H, W) tensor, or a list of PIL images or paths"
            raise DataError(f"images must be {expected}, not {type(source).__name__}.")
    opened = [s.convert("RGB") if isinstance(s, Image.Image) else open_image(Path(s)) for s in sources]
    batch = torch.stack([net.transform(image) for image in opened])
    crop = getattr(net.transform, "picture", None)
    visible = tuple(crop(image) for image in opened) if crop else ()
    return batch.to(net.device, next(net.model.parameters()).dtype), visible


def choose_classes(net: DualBranch, forward_pass: ForwardPass, classes: Classes) -> tuple[Tensor, bool]:
    """Return (B, K) class indices, -1 where "positive" has fewer, and whether there can be several."""
    softmax = forward_pass.softmax
    batch, count = len(softmax), max(net.classes, 2)  # a single logit tells two classes apart
    if classes is None:
        if net.classes == 1:
            level = 0.5 if net.split.output == "probabilities" else 0.0
            return (softmax > level).long(), False
        return softmax.argmax(1, keepdim=True), False
    if isinstance(classes, str):
        if classes == "all":
            return torch.arange(count, device=softmax.device).expand(batch, count), True
        if classes == "top5":
            return class_logits(softmax).topk(min(5, count), dim=1).indices, True
        if classes == "positive":
            logits = class_logits(forward_pass.sigmoid.detach())
            top = logits.topk(max(1, int((logits > 0).sum(1).max())), dim=1)
            return torch.where(top.values > 0, top.indices, -1), True
        raise ConfigError(f"classes={classes!r} is unknown: give indices, 'top5', 'positive' or 'all'.")
    index = torch.as_tensor(classes, device=softmax.device)
    if index.is_floating_point() or index.dtype == torch.bool:
        raise ConfigError(f"classes must be whole numbers, not {index.dtype}.")
    several, shape = index.ndim == 2, tuple(index.shape)
    index = index.expand(batch)[:, None] if index.ndim == 0 else index[:, None] if index.ndim == 1 else index
    if index.ndim != 2 or len(index) != batch:
        expected = "one int, one per image, or a (B, K) tensor"
        raise ConfigError(f"classes of shape {shape} do not fit {batch} image(s): give {expected}.")
    wrong = index[(index < 0) | (index >= count)].tolist()
    if wrong:
        raise ConfigError(f"class {wrong[0]} does not exist: this classifier has classes 0 to {count - 1}.")
    return index.long(), several


@dataclass(frozen=True)
class Scores:
    """Three numbers for each (image, class), all (B, K)."""

    probability: Tensor
    evidence: Tensor
    logits: Tensor

    @staticmethod
    def of(net: DualBranch, forward_pass: ForwardPass, branch: Branch, classes: Tensor) -> Scores:
        """The softmax head's probability, the sigmoid branch's evidence, and the branch's logit."""
        index = classes.clamp(min=0)
        explained, sigmoid = (
            class_logits(at_least_float32(branch_logits(forward_pass, b).detach())).gather(1, index)
            for b in (branch, "sigmoid")
        )
        return Scores(class_probabilities(net, forward_pass).gather(1, index), sigmoid.sigmoid(), explained)


def class_probabilities(net: DualBranch, forward_pass: ForwardPass) -> Tensor:
    """Return the softmax head's probability of each class: (B, C), or (B, 2) for a single logit."""
    output = at_least_float32(forward_pass.softmax)
    if net.split.output == "logits":
        output = output.sigmoid() if net.classes == 1 else output.softmax(1)
    return torch.cat([1 - output, output], 1) if net.classes == 1 else output
