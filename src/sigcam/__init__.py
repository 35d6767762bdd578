"""sigcam: evidence maps for any image classifier, drawn from a sigmoid branch beside its softmax head."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sigcam import bootstrap as bootstrap
    from sigcam import callbacks as callbacks
    from sigcam import metrics as metrics
    from sigcam.core.config import FitConfig as FitConfig
    from sigcam.core.errors import AttachError as AttachError
    from sigcam.core.errors import CheckpointError as CheckpointError
    from sigcam.core.errors import DataError as DataError
    from sigcam.core.errors import ModelError as ModelError
    from sigcam.core.errors import SigcamError as SigcamError
    from sigcam.data.registry import list_readers as list_readers
    from sigcam.data.registry import open_dataset as open_dataset
    from sigcam.data.sample import Sample as Sample
    from sigcam.data.sample import Samples as Samples
    from sigcam.deployment.export import export as export
    from sigcam.evaluation.evaluator import evaluate as evaluate
    from sigcam.evaluation.evaluator import evaluate_maps as evaluate_maps
    from sigcam.evaluation.registry import list_metrics as list_metrics
    from sigcam.evaluation.result import Result as Result
    from sigcam.methods.compat import CAM as CAM
    from sigcam.methods.compat import FEM as FEM
    from sigcam.methods.compat import ISCAM as ISCAM
    from sigcam.methods.compat import KPCA_CAM as KPCA_CAM
    from sigcam.methods.compat import SSCAM as SSCAM
    from sigcam.methods.compat import AblationCAM as AblationCAM
    from sigcam.methods.compat import EigenCAM as EigenCAM
    from sigcam.methods.compat import EigenGradCAM as EigenGradCAM
    from sigcam.methods.compat import FinerCAM as FinerCAM
    from sigcam.methods.compat import FullGrad as FullGrad
    from sigcam.methods.compat import GradCAM as GradCAM
    from sigcam.methods.compat import GradCAMElementWise as GradCAMElementWise
    from sigcam.methods.compat import GradCAMPlusPlus as GradCAMPlusPlus
    from sigcam.methods.compat import HiResCAM as HiResCAM
    from sigcam.methods.compat import LayerCAM as LayerCAM
    from sigcam.methods.compat import RandomCAM as RandomCAM
    from sigcam.methods.compat import RefineCAM as RefineCAM
    from sigcam.methods.compat import ScoreCAM as ScoreCAM
    from sigcam.methods.compat import SegEigenCAM as SegEigenCAM
    from sigcam.methods.compat import ShapleyCAM as ShapleyCAM
    from sigcam.methods.compat import SmoothGradCAMpp as SmoothGradCAMpp
    from sigcam.methods.compat import XGradCAM as XGradCAM
    from sigcam.methods.compat_models import DeepFeatureFactorization as DeepFeatureFactorization
    from sigcam.methods.compat_models import GuidedBackpropReLUModel as GuidedBackpropReLUModel
    from sigcam.methods.concepts import Concepts as Concepts
    from sigcam.methods.concepts import factorize as factorize
    from sigcam.methods.explainer import explain as explain
    from sigcam.methods.explanation import Explanation as Explanation
    from sigcam.methods.registry import list_methods as list_methods
    from sigcam.models.classifier import load_classifier as load_classifier
    from sigcam.network.attachment import attach as attach
    from sigcam.network.branch_file import load as load
    from sigcam.network.dual import Branches as Branches
    from sigcam.network.dual import DualBranch as DualBranch
    from sigcam.training.branch import FitResult as FitResult
    from sigcam.training.branch import fit as fit
    from sigcam.training.features import Features as Features
    from sigcam.training.loss import balanced_bce as balanced_bce

_HOMES = {
    "core.config": ("FitConfig",),
    "core.errors": ("AttachError", "CheckpointError", "DataError", "ModelError", "SigcamError"),
    "data.registry": ("list_readers", "open_dataset"),
    "data.sample": ("Sample", "Samples"),
    "deployment.export": ("export",),
    "evaluation.evaluator": ("evaluate", "evaluate_maps"),
    "evaluation.registry": ("list_metrics",),
    "evaluation.result": ("Result",),
    "methods.compat": (
        "AblationCAM",
        "CAM",
        "EigenCAM",
        "EigenGradCAM",
        "FEM",
        "FinerCAM",
        "FullGrad",
        "GradCAM",
        "GradCAMElementWise",
        "GradCAMPlusPlus",
        "HiResCAM",
        "ISCAM",
        "KPCA_CAM",
        "LayerCAM",
        "RandomCAM",
        "RefineCAM",
        "SSCAM",
        "ScoreCAM",
        "SegEigenCAM",
        "ShapleyCAM",
        "SmoothGradCAMpp",
        "XGradCAM",
    ),
    "methods.compat_models": ("DeepFeatureFactorization", "GuidedBackpropReLUModel"),
    "methods.concepts": ("Concepts", "factorize"),
    "methods.explainer": ("explain",),
    "methods.explanation": ("Explanation",),
    "methods.registry": ("list_methods",),
    "models.classifier": ("load_classifier",),
    "network.attachment": ("attach",),
    "network.branch_file": ("load",),
    "network.dual": ("Branches", "DualBranch"),
    "training.branch": ("FitResult", "fit"),
    "training.features": ("Features",),
    "training.loss": ("balanced_bce",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("bootstrap", "callbacks", "metrics")  # public as modules
__all__ = [*sorted([*_MODULE_OF, *_MODULES]), "__version__"]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import sigcam` does not import torch."""
    if name in _MODULES:
        return importlib.import_module(f"sigcam.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sigcam' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sigcam.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
