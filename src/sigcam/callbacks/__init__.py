"""Callbacks that draw maps while a classifier trains; lightning and transformers are imported when used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sigcam.callbacks.lightning_maps import LightningMaps as LightningMaps
    from sigcam.callbacks.trainer_maps import TrainerMaps as TrainerMaps

__all__ = ["LightningMaps", "TrainerMaps"]
_MODULE_OF = {"LightningMaps": "lightning_maps", "TrainerMaps": "trainer_maps"}


def __getattr__(name: str) -> Any:
    """Import a callback, and the library that it is for, on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sigcam.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sigcam.callbacks.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
