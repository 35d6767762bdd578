"""The inputs of `explain`: images as a batch, classes as indices with their scores, the size of maps."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.errors import ConfigError, DataError
from sigcam.core.types import GridSize
from sigcam.data.images import open_image
from sigcam.methods.placement import Region
from sigcam.methods.registry import MapSize
from sigcam.methods.targets import Branch, at_least_float32, branch_logits, class_logits
from sigcam.network.dual import DualBranch, ForwardPass
from sigcam.network.image_errors import image_fault

ImageSource = Image.Image | str | Path
Classes = int | str | Sequence[int] | Sequence[str] | Tensor | None  # names, or top5, positive, all
MAX_NAMES = 10  # in an error


def as_batch(
    net: DualBranch, images: Tensor | ImageSource | Sequence[ImageSource]
) -> tuple[Tensor, tuple[tuple[Image.Image, Region], ...]]:
    """Return a (B, C, H, W) batch; where it is known which part of each image the network sees, also each
    image with that part."""
    if isinstance(images, Tensor):
        if images.ndim != 4 or not images.numel() or images.device != net.device or images.is_meta:
            raise DataError(image_fault(net, images))
        return images, ()
    given: Any = images  # of any type
    many = isinstance(given, Iterable) and not isinstance(given, ImageSource)
    sources = list(given) if many else [given]
    if not sources:
        raise DataError("no images were given.")
    for source in sources:
        if isinstance(source, Tensor):
            raise DataError("images are a list of tensors: make one of them, torch.stack(images).")
        if not isinstance(source, ImageSource):
            expected = "a (B, C, H, W) tensor, or a list of PIL images or paths"
            raise DataError(f"images must be {expected}, not {type(source).__name__}.")
    if net.transform is None:
        raise DataError("images need preprocessing: set net.transform, or give a (B, C, H, W) tensor.")
    opened = [s.convert("RGB") if isinstance(s, Image.Image) else open_image(Path(s)) for s in sources]
    made = [net.transform(image) for image in opened]
    shapes = {tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in made}
    if len(shapes) > 1 or not isinstance(made[0], Tensor):
        seen = " and ".join(sorted(map(str, shapes)))
        raise DataError(f"net.transform returned {seen}: let it return tensors of one shape, (C, H, W).")
    batch = torch.stack(made)
    batch = batch.to(net.device, next(net.model.parameters()).dtype)
    region = getattr(net.transform, "region", None)
    if region is None:
        return batch, ()
    return batch, tuple((image, region(image.size)) for image in opened)


def choose_classes(net: DualBranch, forward_pass: ForwardPass, classes: Classes) -> tuple[Tensor, bool]:
    """Return (B, K) class indices, -1 where "positive" has fewer, and whether there can be several."""
    softmax = forward_pass.softmax
    batch, count = len(softmax), max(net.classes, 2)  # a single logit tells two classes apart
    if net.classes == 1 and net.split.output == "probabilities":
        softmax = softmax - 0.5  # as a logit: positive for class 1
    if classes is None:
        return (softmax > 0).long() if net.classes == 1 else softmax.argmax(1, keepdim=True), False
    if isinstance(classes, str):
        if classes == "all":
            return torch.arange(count, device=softmax.device).expand(batch, count), True
        if classes == "top5":
            return class_logits(softmax).topk(min(5, count), dim=1).indices, True
        if classes == "positive":
            logits = class_logits(net.calibration.evidence(forward_pass.sigmoid.detach()))
            top = logits.topk(max(1, int((logits > 0).sum(1).max())), dim=1)
            return torch.where(top.values > 0, top.indices, -1), True
    try:
        index = torch.as_tensor(_as_numbers(net, classes), device=softmax.device)
    except (TypeError, ValueError, RuntimeError) as error:
        given = f"{str(classes)[:60]} ({type(classes).__name__})"
        raise ConfigError(f"classes must be whole numbers or class names, not {given}.") from error
    several, shape = index.ndim == 2, tuple(index.shape)
    if not index.numel():
        raise ConfigError(f"classes of shape {shape} hold no class: give at least one per image.")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ConfigError(f"classes must be whole numbers, not {index.dtype}.")
    index = index.expand(batch)[:, None] if index.ndim == 0 else index[:, None] if index.ndim == 1 else index
    if index.ndim != 2 or len(index) != batch:
        expected = "one int, one per image, or a (B, K) tensor"
        raise ConfigError(f"classes of shape {shape} do not fit {batch} image(s): give {expected}.")
    wrong = index[(index < 0) | (index >= count)].tolist()
    if wrong:
        raise ConfigError(f"class {wrong[0]} does not exist: this classifier has classes 0 to {count - 1}.")
    return index.long(), several


def _as_numbers(net: DualBranch, classes: Any) -> Any:
    """The classes, or nested lists of them, with names replaced by their numbers."""
    if isinstance(classes, str):
        return class_number(net, classes)
    return [_as_numbers(net, each) for each in classes] if isinstance(classes, list | tuple) else classes


def class_number(net: DualBranch, name: str) -> int:
    """Return the number of the one class that `name` means: its name, one of the synonyms in it, a word of
    it, or its number; ConfigError lists the classes that it may mean."""
    names = net.class_names or ()
    found = [number for number, each in enumerate(names) if each == name]
    if len(found) > 1:
        numbers = ", ".join(map(str, found))
        raise ConfigError(f"{len(found)} classes are named {name!r}: give one of their numbers, {numbers}.")
    if not found and name.isdecimal():
        return int(name)
    if not names:
        raise ConfigError(f"classes={name!r} is unknown: give indices, 'top5', 'positive' or 'all'.")
    wanted = _words(name)
    if not found and wanted.strip():
        spelled = [[_words(part) for part in (each, *re.split("[,;/]", each))] for each in names]
        for fits in (
            lambda each: wanted == each[0],
            lambda each: wanted in each,
            lambda each: wanted in each[0],
        ):
            found = found or [number for number, each in enumerate(spelled) if fits(each)]
    if len(found) == 1:
        return found[0]
    close = [names[number] for number in found]
    close += [each for each in names if name and name.casefold() in each.casefold() and each not in close]
    if close:
        more = f" and {len(close) - MAX_NAMES} more" if len(close) > MAX_NAMES else ""
        listed = f"{', '.join(close[:MAX_NAMES])}{more}"
        raise ConfigError(f"no class is named {name!r}; these names contain it: {listed}. Give one of them.")
    close = get_close_matches(name, names, n=3)
    raise ConfigError(
        f"no class is named {name!r}" + (f": did you mean {', '.join(close)}?" if close else ".")
    )


def _words(name: str) -> str:
    """Return the words of a name in lower case, with a space around each."""
    return " ".join(["", *re.findall(r"[^\W_]+", name.casefold()), ""])


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
        logits = at_least_float32(branch_logits(forward_pass, branch).detach())
        sigmoid = net.calibration.evidence(at_least_float32(forward_pass.sigmoid.detach()))
        return Scores(
            class_probabilities(net, forward_pass).gather(1, index),
            class_logits(sigmoid).gather(1, index).sigmoid(),
            class_logits(logits).gather(1, index),
        )


def class_probabilities(net: DualBranch, forward_pass: ForwardPass) -> Tensor:
    """Return the softmax head's probability of each class: (B, C), or (B, 2) for a single logit."""
    output = at_least_float32(forward_pass.softmax)
    if net.split.output == "logits":
        output = output.sigmoid() if net.classes == 1 else output.softmax(1)
    return torch.cat([1 - output, output], 1) if net.classes == 1 else output


def output_size(size: MapSize, classes: Classes, image: GridSize) -> GridSize | None:
    """Return the maps' size; None for that of the features."""
    if size is None:
        size = "features" if isinstance(classes, str) and classes == "all" else "image"
    if isinstance(size, str) and size in ("image", "features"):
        return image if size == "image" else None
    try:
        if isinstance(size, str) or len(size) != 2 or any(isinstance(side, bool) for side in size):
            raise TypeError
        height, width = map(operator.index, size)
    except TypeError:
        raise ConfigError(f"size is 'image', 'features' or (height, width), not {size!r}.") from None
    if height < 1 or width < 1:
        raise ConfigError(f"size must be at least (1, 1), not {(height, width)}.")
    return GridSize(height, width)
