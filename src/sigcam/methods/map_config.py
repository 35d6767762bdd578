"""MapConfig: how maps are drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sigcam.core.errors import DataError
from sigcam.core.types import GridSize
from sigcam.methods.registry import method_name
from sigcam.methods.targets import Branch, Target, TargetName, as_target

Scale = Literal["unit", "raw"]


MapSize = Literal["image", "features"] | GridSize | None


@dataclass(frozen=True)
class MapConfig:
    """How maps are drawn; what `explain` says of its arguments."""

    method: str = "grad-cam"
    branch: Branch = "sigmoid"
    clamp: bool | None = None
    target: Target | TargetName = "class"
    scale: Scale = "unit"
    batch_size: int | None = None
    top_n: int | None = None

    def checked(self) -> MapConfig:
        """The same with its defaults filled in; DataError for what does not exist."""
        if self.branch not in ("sigmoid", "softmax", "centred"):
            raise DataError(f"unknown branch {self.branch!r}: there are sigmoid, softmax and centred.")
        if self.scale not in ("unit", "raw"):
            raise DataError(f"unknown scale {self.scale!r}: there are unit and raw.")
        for name, value in (("batch_size", self.batch_size), ("top_n", self.top_n)):
            if value is not None and value < 1:
                raise DataError(f"{name} must be 1 or more, not {value}.")
        as_target(self.target, self.branch)
        clamp = self.clamp
        if clamp is None:  # the softmax baseline keeps its signed weights
            clamp = self.branch == "sigmoid" and self.scale == "unit"
        return replace(self, method=method_name(self.method), clamp=clamp)

    @property
    def target_name(self) -> str:
        """The target's name, or its function's."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "custom")
