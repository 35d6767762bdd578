"""Say what is wrong with images that a network fails on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.errors import DataError, SigcamError
from sigcam.core.memory import is_out_of_memory
from sigcam.core.types import GridSize

if TYPE_CHECKING:
    from sigcam.network.dual import DualBranch


@contextmanager
def blame_images(net: DualBranch, images: Any) -> Iterator[None]:
    """Turn an error of the network into a DataError that names the fault of the images, if they have one.

    Images are looked at only after the network has failed: a model may take what others do not.
    """
    try:
        yield
    except Exception as error:  # any user network, any failure
        ours = isinstance(error, SigcamError) or is_out_of_memory(error)
        fault = None if ours else image_fault(net, images)
        if fault is None:
            raise
        raise DataError(fault) from error


def image_fault(net: DualBranch, images: Any) -> str | None:
    """Return how images differ from what the network takes, in a sentence; None if they do not."""
    if not isinstance(images, Tensor):
        return (
            f"images must be a (B, C, H, W) tensor, not {type(images).__name__}: torch.from_numpy makes one."
        )
    weight, kind = next(net.model.parameters()), type(net.model).__name__
    if images.layout != torch.strided or images.is_quantized:
        return "images must be dense tensors: call .to_dense() or .dequantize()."
    if images.ndim != 4 or not images.numel():
        return f"images must be (B, C, H, W) with B >= 1, not {tuple(images.shape)}."
    if "meta" in (images.device.type, weight.device.type):
        return "tensors on the meta device hold no values: load the weights and images onto a real device."
    if images.device != net.device:
        return f"images are on {images.device}, the network on {net.device}: move one of them."
    if images.dtype != weight.dtype and not images.is_floating_point():
        wanted = "give floating-point images, normalised as for training, or PIL images and net.transform"
        return f"images are {_name(images.dtype)}: {wanted}."
    if images.dtype != weight.dtype:
        dtypes = f"images are {_name(images.dtype)}, the network {_name(weight.dtype)}"
        return f"{dtypes}: convert one, as by images.to({weight.dtype})."
    channels, height, width = net.input_shape
    if images.shape[1] != channels:
        given = f"images of shape {tuple(images.shape)} have {images.shape[1]} channel(s)"
        return f"{given}, and this {kind} takes {channels}: give (B, {channels}, H, W)."
    if GridSize.of(images) != (height, width) and _runs(net, F.interpolate(images[:1], (height, width))):
        given = f"images are {images.shape[2]}x{images.shape[3]}"
        return f"{given}, and this {kind} does not take that size: resize them to {height}x{width}."
    return None


def _runs(net: DualBranch, images: Tensor) -> bool:
    try:
        net.run(images)
    except Exception:  # any user network, any failure
        return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
