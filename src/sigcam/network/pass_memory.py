"""How much memory a pass of a network takes, measured on one image, for any number and size of images."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sigcam.core.memory import free_memory
from sigcam.network.dataflow import tensors_in
from sigcam.network.dual import DualBranch, FeaturePoints

KERNELS = 1.6  # a pass takes up to this many times its tensors, since kernels reorder them (VGG on a CPU)


@contextmanager
def no_side_effects() -> Iterator[None]:
    """Disable autograd and restore the random state afterwards."""
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


class LiveBytes(TorchDispatchMode):
    """Records the bytes of each tensor that torch allocates in the block, and frees, in `events`.

    Memory that the kernels use inside is not seen: the sum is a lower bound.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[int] = []
        self._before = dict[int, Any]()  # storages of weights and images, kept so that no key is used again
        self._alive = set[int]()

    @property
    def peak(self) -> int:
        """The most bytes that lived at once."""
        return max(accumulate(self.events), default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for key, storage in _storages((args, kwargs)):
            if key not in self._alive:
                self._before[key] = storage
        out = func(*args, **kwargs)
        for key, storage in _storages(out):
            if key not in self._alive and key not in self._before and storage.nbytes():
                self._alive.add(key)
                self.events.append(storage.nbytes())
                weakref.finalize(storage, self._remove, key, storage.nbytes())
        return out

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.events.append(-size)


def _storages(values: Any) -> Iterator[tuple[int, Any]]:
    for tensor in tensors_in(values):
        with suppress(NotImplementedError, RuntimeError):  # a sparse or packed tensor has none
            storage = tensor.untyped_storage()
            yield storage._cdata, storage


@dataclass(frozen=True)
class PassMemory:
    """The allocations (above zero) and releases of one image's pass, in order, and how each one grows."""

    pixels: int
    events: Sequence[int]  # bytes
    powers: Sequence[float]  # of the number of pixels

    def peak(self, pixels: float) -> float:
        """Estimate the most bytes that live at once in the pass of an image of that many pixels."""
        ratio = pixels / self.pixels
        grown = (size * ratio**power for size, power in zip(self.events, self.powers, strict=True))
        return max(accumulate(grown), default=0.0)

    def compared(self, smaller: PassMemory) -> PassMemory:
        """Return the memory with the growth that the pass of a smaller image shows: none for weights, 1 for
        features, 2 for what relates every cell to every other. Unchanged if that pass took other steps."""
        pairs = list(zip(self.events, smaller.events, strict=False))
        if len(self.events) != len(smaller.events) or any((a > 0) != (b > 0) for a, b in pairs):
            return self
        growth = math.log(self.pixels / smaller.pixels)
        powers = [round(2 * math.log(a / b) / growth) / 2 for a, b in pairs]
        return PassMemory(self.pixels, self.events, powers)


_MEASURED: weakref.WeakKeyDictionary[DualBranch, dict[Any, PassMemory]] = weakref.WeakKeyDictionary()


def measure_pass(
    net: DualBranch, points: FeaturePoints, image: Tensor, *, grad: bool | Literal["images"]
) -> PassMemory:
    """Run one image (1, C, H, W), once per network and size; every allocation grows with the pixels. With
    `grad`, gradients are recorded from the first of the points on, or from the images on."""
    known = _MEASURED.setdefault(net, {})
    autocast = torch.is_autocast_enabled(image.device.type)
    key = tuple(points), grad, image.shape, image.dtype, image.device, autocast
    if key not in known:
        if grad is True:
            net.grad_mode(tuple(points))  # tried once, and not part of a pass
        with no_side_effects(), LiveBytes() as live:
            if grad == "images":
                passes = [net.run_from_images(image.clone().requires_grad_())]
            else:
                passes = net.run_at(points, image, grad=grad)
        known[key] = PassMemory(image.shape[-2:].numel(), events := tuple(live.events), (1.0,) * len(events))
        del passes  # not freed before the events were taken
    return known[key]


def smaller_batch(
    batch: int, net: DualBranch, images: Tensor, *, grad: Literal[False, "images"] = False
) -> int:
    """Return how many images like these fit into one pass, at least 1 and at most `batch`."""
    free = free_memory(images.device)
    if batch == 1 or free is None:
        return batch
    needed = bytes_of_altered(net, images, grad=grad)
    return batch if needed is None else max(1, min(batch, int(free / needed)))


def bytes_of_altered(
    net: DualBranch, images: Tensor, *, grad: Literal[False, "images"] = False
) -> float | None:
    """Return about how much memory each altered image in a pass takes, besides the weights; None if the pass
    fails."""
    try:
        memory = measure_pass(net, (net.split.point,), images[:1], grad=grad)
    except Exception:  # any user network; the pass itself will tell
        return None
    return KERNELS * (memory.peak(memory.pixels) + 2 * images[0].nbytes)  # a mask and a copy
