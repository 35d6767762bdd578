"""Metrics for anybody's maps, as `torchmetrics.Metric`s; results are percent (PROTOCOL 5, 6)."""

from sigcam.metrics.boxes import scaled_boxes
from sigcam.metrics.fidelity import (
    AverageDrop,
    Deletion,
    IncreaseInConfidence,
    Insertion,
    MeanMap,
    insertion_deletion_curves,
)
from sigcam.metrics.localization import (
    BoxAccAtHalf,
    EnergyInBox,
    FalseAlarm,
    GTKnownLoc,
    MaxBoxAcc,
    MaxBoxAccV2,
    PointingGame,
    PxAP,
    Top1Cls,
    Top1Loc,
    Top5Loc,
    in_top,
    without_peeking,
)

__all__ = [
    "AverageDrop",
    "BoxAccAtHalf",
    "Deletion",
    "EnergyInBox",
    "FalseAlarm",
    "GTKnownLoc",
    "IncreaseInConfidence",
    "Insertion",
    "MaxBoxAcc",
    "MaxBoxAccV2",
    "MeanMap",
    "PointingGame",
    "PxAP",
    "Top1Cls",
    "Top1Loc",
    "Top5Loc",
    "bootstrap",
    "in_top",
    "insertion_deletion_curves",
    "scaled_boxes",
    "without_peeking",
]
