"""MapConfig: the settings that maps are drawn with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from sigcam.core.errors import ConfigError
from sigcam.methods.registry import method_name
from sigcam.methods.targets import Branch, Target, TargetName, as_target

Scale = Literal["unit", "raw"]
MapSize = Literal["image", "features"] | tuple[int, int] | None  # (height, width)


@dataclass(frozen=True)
class MapConfig:
    """Settings of a map; see the arguments of `explain`."""

    method: str = "grad-cam"
    branch: Branch = "sigmoid"
    clamp: bool | None = None
    target: Target | TargetName = "class"
    scale: Scale = "unit"
    batch_size: int | None = None
    top_n: int | None = None

    def checked(self) -> Self:
        """Return the config with its defaults filled in; ConfigError if a value is unknown."""
        if self.branch not in ("sigmoid", "softmax", "centred"):
            raise ConfigError(f"unknown branch {self.branch!r}: there are sigmoid, softmax and centred.")
        if self.scale not in ("unit", "raw"):
            raise ConfigError(f"unknown scale {self.scale!r}: there are unit and raw.")
        for name, value in (("batch_size", self.batch_size), ("top_n", self.top_n)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}.")
        as_target(self.target, self.branch)
        clamp = self.clamp
        if clamp is None:  # the softmax baseline keeps its signed weights
            clamp = self.branch == "sigmoid" and self.scale == "unit"
        return replace(self, method=method_name(self.method), clamp=clamp)

    @property
    def target_name(self) -> str:
        """The name of the target or of its function."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "custom")
