"""What a map costs: passes of the network, counted, and seconds, measured."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sigcam.core.errors import SigcamError
from sigcam.methods.explainer import explain_pass
from sigcam.methods.registry import MapConfig
from sigcam.network.dual import DualBranch

FEW_PASSES = 10  # up to which maps are timed several times, in a batch
REPEATS = 5


@dataclass(frozen=True)
class Cost:
    """The cost of one image's map, for one head and class.

    Args:
        passes: multiplications, as a multiple of those in a forward pass.
        seconds: time, and `times_a_pass`, the same as a multiple of the time of a forward pass.
    """

    passes: float
    seconds: float
    times_a_pass: float


class TooSlow(SigcamError):
    """A map that takes more passes than allowed."""


class _Multiplications(TorchDispatchMode):
    """Counts the multiplications of convolutions and matrix products; TooSlow beyond the `most`."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.most = 0.0, most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.count += flop_registry[packet](*args, **(kwargs or {}), out_val=out) / 2
        elif func.namespace == "mkldnn" and "pointwise" in func.__name__:  # of an optimised copy
            weight = args[1].shape[-3:] if "convolution" in func.__name__ else args[0].shape[-1:]
            self.count += out.numel() * math.prod(weight)
        if self.count > self.most:
            raise TooSlow("the maps take too many passes")
        return out


def map_cost(
    net: DualBranch,
    images: Tensor,
    method: str,
    settings: Mapping[str, Any],
    *,
    most_passes: float | None = None,
) -> Cost:
    """Return the cost of a method's maps of the sigmoid branch; TooSlow if it is more than `most_passes`.

    Args:
        images: the batch to time; the first one is enough to count, and to time slow maps.
        settings: further fields of `MapConfig`.
    """
    one, config = images[:1], replace(MapConfig(method), **settings).checked()
    with torch.no_grad(), _Multiplications() as forward:
        net.run(one)
    with _Multiplications((most_passes or math.inf) * forward.count) as drawing:
        _draw(net, one, config)
    passes, slow = drawing.count / forward.count, drawing.count > FEW_PASSES * forward.count
    drawn, forward_times, map_times = one if slow else images, list[float](), list[float]()
    for repeat in range(REPEATS):
        start = time.perf_counter()
        with torch.no_grad():
            net.run(images)
        forward_times.append(_seconds_since(start, net) / len(images))
        if slow and repeat:
            continue
        start = time.perf_counter()
        _draw(net, drawn, config)
        map_times.append(_seconds_since(start, net) / len(drawn))
    seconds = median(map_times)
    return Cost(passes, seconds, seconds / median(forward_times))


def _draw(net: DualBranch, images: Tensor, config: MapConfig) -> None:
    explain_pass(net, net.run(images, grad="sigmoid" not in net.linear), config)


def _seconds_since(start: float, net: DualBranch) -> float:
    torch.zeros(1, device=net.device).item()  # wait for the device
    return time.perf_counter() - start
