"""METHODS: every CAM method by name, with all that is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.methods.probe import Probe


@dataclass(frozen=True)
class Method:
    """A function of a Probe, and what it returns.

    Args:
        gives: "weights" that broadcast over F (B, K, N, P, Q); "gradients", which are weights per cell, to be
            multiplied by P x Q where they are to be logits; or "maps" (B, K, P, Q).
        light: needs no more than (B, K, N) numbers, so that any number of classes can be asked at once.
    """

    function: Callable[[Probe], Tensor]
    gives: Literal["weights", "gradients", "maps"]
    light: bool

    def __call__(self, probe: Probe) -> Tensor:
        """What the function returns."""
        return self.function(probe)


METHODS: dict[str, Method] = {}


SPELLINGS = {
    **{"gradcam++": "grad-cam++", "gradcampp": "grad-cam++", "gradcamplusplus": "grad-cam++"},
    **{"hirescam": "hires-cam", "rollout": "attention-rollout"},
}


def method(
    name: str, *, gives: Literal["weights", "gradients", "maps"] = "weights", light: bool = False
) -> Callable[[Callable[[Probe], Tensor]], Callable[[Probe], Tensor]]:
    """Registers a method under its name."""

    def register(function: Callable[[Probe], Tensor]) -> Callable[[Probe], Tensor]:
        METHODS[name] = Method(function, gives, light)
        return function

    return register


def method_name(name: str) -> str:
    """The registered name for a common spelling; DataError with the nearest names for an unknown one."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    bare = plain.replace("-", "")
    plain = SPELLINGS.get(bare) or next((n for n in METHODS if n.replace("-", "") == bare), plain)
    if plain not in METHODS:
        if bare == "finercam":
            raise DataError("'finer-cam' is a target, for any method: explain(..., target='finer-cam').")
        close = get_close_matches(plain, METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(f"unknown method {name!r}: {hint}there are {', '.join(METHODS)}.")
    return plain
