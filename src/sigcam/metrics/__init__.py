"""Metrics for anybody's maps, as `torchmetrics.Metric`s; results are percent (PROTOCOL 5, 6)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what is imported on first use: torchmetrics takes longer to import than all of sigcam
    from sigcam.metrics.boxes import scaled_boxes as scaled_boxes
    from sigcam.metrics.fidelity import AverageDrop as AverageDrop
    from sigcam.metrics.fidelity import Deletion as Deletion
    from sigcam.metrics.fidelity import IncreaseInConfidence as IncreaseInConfidence
    from sigcam.metrics.fidelity import Insertion as Insertion
    from sigcam.metrics.fidelity import MeanMap as MeanMap
    from sigcam.metrics.fidelity import insertion_deletion_curves as insertion_deletion_curves
    from sigcam.metrics.localization import BoxAccAtHalf as BoxAccAtHalf
    from sigcam.metrics.localization import EnergyInBox as EnergyInBox
    from sigcam.metrics.localization import FalseAlarm as FalseAlarm
    from sigcam.metrics.localization import GTKnownLoc as GTKnownLoc
    from sigcam.metrics.localization import MaxBoxAcc as MaxBoxAcc
    from sigcam.metrics.localization import MaxBoxAccV2 as MaxBoxAccV2
    from sigcam.metrics.localization import PointingGame as PointingGame
    from sigcam.metrics.localization import PxAP as PxAP
    from sigcam.metrics.localization import Top1Cls as Top1Cls
    from sigcam.metrics.localization import Top1Loc as Top1Loc
    from sigcam.metrics.localization import Top5Loc as Top5Loc
    from sigcam.metrics.localization import in_top as in_top
    from sigcam.metrics.localization import without_peeking as without_peeking
    from sigcam.metrics.removal import RoadLeast as RoadLeast
    from sigcam.metrics.removal import RoadMost as RoadMost
    from sigcam.metrics.removal import impute as impute
    from sigcam.metrics.removal import removal_curves as removal_curves

_HOMES = {
    "boxes": ("scaled_boxes",),
    "fidelity": (
        "AverageDrop",
        "Deletion",
        "IncreaseInConfidence",
        "Insertion",
        "MeanMap",
        "insertion_deletion_curves",
    ),
    "localization": (
        "BoxAccAtHalf",
        "EnergyInBox",
        "FalseAlarm",
        "GTKnownLoc",
        "MaxBoxAcc",
        "MaxBoxAccV2",
        "PointingGame",
        "PxAP",
        "Top1Cls",
        "Top1Loc",
        "Top5Loc",
        "in_top",
        "without_peeking",
    ),
    "removal": ("RoadLeast", "RoadMost", "impute", "removal_curves"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted([*_MODULE_OF, "bootstrap"])


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "bootstrap":
        return importlib.import_module("sigcam.metrics.bootstrap")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sigcam.metrics' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sigcam.metrics.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
