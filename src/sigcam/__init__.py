"""sigcam: evidence maps for any image classifier, drawn from a sigmoid branch beside its softmax head."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sigcam import bootstrap as bootstrap
    from sigcam import metrics as metrics
    from sigcam.compat import CAM as CAM
    from sigcam.compat import AblationCAM as AblationCAM
    from sigcam.compat import EigenCAM as EigenCAM
    from sigcam.compat import EigenGradCAM as EigenGradCAM
    from sigcam.compat import FinerCAM as FinerCAM
    from sigcam.compat import GradCAM as GradCAM
    from sigcam.compat import GradCAMPlusPlus as GradCAMPlusPlus
    from sigcam.compat import HiResCAM as HiResCAM
    from sigcam.compat import LayerCAM as LayerCAM
    from sigcam.compat import ScoreCAM as ScoreCAM
    from sigcam.compat import XGradCAM as XGradCAM
    from sigcam.config import FitConfig as FitConfig
    from sigcam.data import Sample as Sample
    from sigcam.data import Samples as Samples
    from sigcam.data import open_dataset as open_dataset
    from sigcam.dual import Branches as Branches
    from sigcam.dual import DualBranch as DualBranch
    from sigcam.dual import attach as attach
    from sigcam.dual import load as load
    from sigcam.errors import AttachError as AttachError
    from sigcam.errors import CheckpointError as CheckpointError
    from sigcam.errors import DataError as DataError
    from sigcam.errors import ModelError as ModelError
    from sigcam.errors import SigcamError as SigcamError
    from sigcam.evaluating import evaluate as evaluate
    from sigcam.evaluating import evaluate_maps as evaluate_maps
    from sigcam.explaining import explain as explain
    from sigcam.explanation import Explanation as Explanation
    from sigcam.features import Features as Features
    from sigcam.fitting import FitResult as FitResult
    from sigcam.fitting import fit as fit
    from sigcam.labels import balanced_bce as balanced_bce
    from sigcam.models import load_classifier as load_classifier
    from sigcam.result import Result as Result

_ROOMS = {
    "compat": (
        "AblationCAM",
        "CAM",
        "EigenCAM",
        "EigenGradCAM",
        "FinerCAM",
        "GradCAM",
        "GradCAMPlusPlus",
        "HiResCAM",
        "LayerCAM",
        "ScoreCAM",
        "XGradCAM",
    ),
    "config": ("FitConfig",),
    "data": ("Sample", "Samples", "open_dataset"),
    "dual": ("Branches", "DualBranch", "attach", "load"),
    "errors": ("AttachError", "CheckpointError", "DataError", "ModelError", "SigcamError"),
    "evaluating": ("evaluate", "evaluate_maps"),
    "explaining": ("explain",),
    "explanation": ("Explanation",),
    "features": ("Features",),
    "fitting": ("FitResult", "fit"),
    "labels": ("balanced_bce",),
    "models": ("load_classifier",),
    "result": ("Result",),
}
_OPEN = ("bootstrap", "metrics")  # rooms that are public as they are
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = [*sorted([*_HOME, *_OPEN]), "__version__"]


def __getattr__(name: str) -> Any:
    """Public names come from their rooms on first use, so that `import sigcam` imports no torch."""
    if name in _OPEN:
        return importlib.import_module(f"sigcam.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'sigcam' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sigcam.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
