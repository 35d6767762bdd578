"""What is asked of a network: images as it takes them, classes to explain, and the scores of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.methods.targets import Branch, at_least_float32, branch_logits
from sigcam.network.dual import DualBranch, ForwardPass

Picture = Image.Image | str | Path
Classes = int | Sequence[int] | Tensor | Literal["top5", "positive", "all"] | None


@dataclass(frozen=True)
class Scores:
    """Three numbers for each (image, class), all (B, K)."""

    probability: Tensor
    evidence: Tensor
    logits: Tensor

    @staticmethod
    def of(net: DualBranch, passage: ForwardPass, branch: Branch, chosen: Tensor) -> Scores:
        """The softmax head's probability, the sigmoid branch's evidence, and the branch's logit."""
        explained, evidence = (
            at_least_float32(branch_logits(passage, b).detach()) for b in (branch, "sigmoid")
        )
        probability = at_least_float32(passage.softmax)
        if net.split.output == "logits":
            probability = probability.sigmoid() if net.classes == 1 else probability.softmax(1)
        index = chosen.clamp(min=0)
        if net.classes == 1:
            sign = 2 * index - 1
            probability = torch.where(index == 1, probability, 1 - probability)
            return Scores(probability, (evidence * sign).sigmoid(), explained * sign)
        return Scores(
            probability.gather(1, index), evidence.gather(1, index).sigmoid(), explained.gather(1, index)
        )


def as_batch(
    net: DualBranch, images: Tensor | Picture | Sequence[Picture]
) -> tuple[Tensor, tuple[Image.Image, ...]]:
    if isinstance(images, Tensor):
        if images.ndim != 4 or not len(images):
            raise DataError(f"images must be (B, C, H, W) with B >= 1, not {tuple(images.shape)}.")
        if images.device != net.device:
            raise DataError(
                f"images are on {images.device}, the network on {net.device}: move one with .to(...)."
            )
        return images, ()
    if net.transform is None:
        raise DataError("pictures need preprocessing: set net.transform, or give a (B, C, H, W) tensor.")
    from sigcam.data.images import open_image

    given = [images] if isinstance(images, Image.Image | str | Path) else list(images)
    if not given:
        raise DataError("no pictures were given.")
    for item in given:
        if not isinstance(item, Image.Image | str | Path):
            what = "a (B, C, H, W) tensor, or pictures: PIL images or paths"
            raise DataError(f"images must be {what}, not {type(item).__name__}.")
    pictures = tuple(p.convert("RGB") if isinstance(p, Image.Image) else open_image(Path(p)) for p in given)
    batch = torch.stack([net.transform(p) for p in pictures])
    seen = getattr(
        net.transform, "picture", None
    )  # what of a picture the network sees; else it is drawn from
    shown = (
        tuple(seen(p) for p in pictures) if seen else ()
    )  # the batch itself, so that maps lie where they belong
    return batch.to(net.device, next(net.model.parameters()).dtype), shown


def choose_classes(net: DualBranch, passage: ForwardPass, classes: Classes) -> tuple[Tensor, bool]:
    """(B, K) class indices, and whether the caller asked for several per image."""
    batch, device = len(passage.softmax), passage.softmax.device
    count = max(net.classes, 2)  # one logit tells two classes apart
    if classes is None:
        if net.classes == 1:
            level = 0.5 if net.split.output == "probabilities" else 0.0
            return (passage.softmax > level).long(), False
        return passage.softmax.argmax(1, keepdim=True), False
    if isinstance(classes, str):
        if classes == "all":
            return torch.arange(count, device=device).expand(batch, count), True
        if classes == "top5":
            logits = passage.softmax
            ranked = torch.cat([-logits, logits], 1) if net.classes == 1 else logits
            return ranked.topk(min(5, count), dim=1).indices, True
        if classes == "positive":
            logits = passage.sigmoid.detach()
            ranked = torch.cat([-logits, logits], 1) if net.classes == 1 else logits
            most = max(1, int((ranked > 0).sum(1).max()))
            top = ranked.topk(most, dim=1)
            return torch.where(top.values > 0, top.indices, -1), True
        raise DataError(f"classes={classes!r} is unknown: give indices, 'top5', 'positive' or 'all'.")
    index = torch.as_tensor(classes, device=device)
    if index.is_floating_point() or index.dtype == torch.bool:
        raise DataError(f"classes must be whole numbers, not {index.dtype}.")
    several = index.ndim == 2
    if index.ndim == 0:
        index = index.expand(batch)[:, None]
    elif index.ndim == 1:
        index = index[:, None]
    if index.ndim != 2 or len(index) != batch:
        raise DataError(
            f"classes of shape {tuple(torch.as_tensor(classes).shape)} do not fit {batch} image(s): give "
            "one int, "
            "one per image, or a (B, K) tensor."
        )
    if bool(((index < 0) | (index >= count)).any()):
        wrong = int(index[(index < 0) | (index >= count)][0])
        raise DataError(f"class {wrong} does not exist: this classifier has classes 0 to {count - 1}.")
    return index.long(), several
