"""METHODS: every CAM method, one short function each, from a Probe to channel weights (Eq. 4, 5, 7)."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from torch import Tensor

from sigcam.errors import DataError
from sigcam.probe import Probe

Method = Callable[[Probe], Tensor]
METHODS: dict[str, Method] = {}
SPELLINGS = {"gradcam": "grad-cam"}


def method(name: str) -> Callable[[Method], Method]:
    """Registers a method under its name."""

    def register(function: Method) -> Method:
        METHODS[name] = function
        return function

    return register


def method_name(name: str) -> str:
    """The registered name for a common spelling; DataError with the nearest names for an unknown one."""
    plain = name.lower().replace("_", "-")
    plain = SPELLINGS.get(plain.replace("-", ""), plain)
    if plain not in METHODS:
        close = get_close_matches(plain, METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(f"unknown method {name!r}: {hint}there are {', '.join(METHODS)}.")
    return plain


@method("cam")
def cam(probe: Probe) -> Tensor:
    """The class's row of the last layer (Zhou et al., 2016), for heads that are global average + linear."""
    return probe.head_weight[:, :, None, None]  # (B, N, 1, 1)


@method("grad-cam")
def grad_cam(probe: Probe) -> Tensor:
    """Each channel's mean gradient (Selvaraju et al., 2017; Eq. 5)."""
    return probe.grads.mean((2, 3), keepdim=True)  # (B, N, 1, 1)
