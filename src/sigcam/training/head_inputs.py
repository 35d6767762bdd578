"""HeadInputs: what enters the sigmoid head, and whether the head is a single linear layer."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from sigcam.core.config import FitConfig
from sigcam.core.errors import AttachError, DataError
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.optimize import optimized
from sigcam.network.trace import chunks
from sigcam.training.feature_cache import DTYPES


class HeadInputs:
    """The input of a network's sigmoid head, found with one pass of the example image.

    Attributes:
        layer: the output layer, if the branch's logits are its weight times the stored features plus a
            bias; None for any other head.
        shape: of the features stored per image. For a linear head on maps, the mean over the grid suffices.
    """

    def __init__(self, net: DualBranch) -> None:
        assert net.example is not None
        with torch.no_grad():
            shape = tuple(net(net.example.to(next(net.model.parameters()))).pooled.shape[1:])
        layer = net.last_layer("sigmoid")
        linear = _is_linear(net, layer, shape)
        self.net = net
        self.layer: nn.Module | None = layer if linear else None
        self.shape: tuple[int, ...] = shape[:1] if linear else shape

    @property
    def linear(self) -> bool:
        """Whether the head is one linear layer."""
        return self.layer is not None

    @cached_property
    def fast_net(self) -> DualBranch:
        """The network around an optimised copy of its model, on a CPU; the difference in its features is
        smaller than the rounding of the cache."""
        net = self.net
        if net.device.type != "cpu" or net.model is not net.original or net.example is None:
            return net
        names = (net.split.layer, *net.split.heads, *net.split.last)
        example = net.example.to(next(net.model.parameters()))
        try:
            return net.with_model(optimized(net.model, example, keep=names))
        except AttachError:  # the model cannot be copied
            return net

    @torch.no_grad()
    def compute(self, images: Tensor, config: FitConfig, who: str) -> Tensor:
        """Return the head's input (B, ...) for images (B, 3, H, W), on the CPU, in the cache's precision.

        Args:
            who: the images' names, for error messages.
        """
        net = self.fast_net
        dtype = next(net.model.parameters()).dtype if images.is_floating_point() else images.dtype
        images = images.to(net.device, dtype, non_blocking=True)
        half = torch.bfloat16 if net.device.type == "cpu" else torch.float16
        with torch.autocast(net.device.type, dtype=half, enabled=config.autocast):
            exact = torch.cat([_reduced(net(part).pooled, self.linear).float() for part in chunks(images)])
        rows = exact.to(DTYPES[config.precision]).cpu()
        if not bool(torch.isfinite(rows).all()):
            if bool(torch.isfinite(exact).all()):
                raise DataError(f"features of {who} are too large for float16: set precision to bfloat16.")
            raise DataError(f"features are not finite among {who}: check images and weights.")
        return rows


def _reduced(pooled: Tensor, linear: bool) -> Tensor:
    return pooled.mean((2, 3)) if linear and pooled.ndim == 4 else pooled


@torch.no_grad()
def _is_linear(net: DualBranch, layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether the branch's logits are the layer applied to its input, or to the mean over the grid."""
    head, parameters = net.sigmoid, linear_weight(layer)
    if len(head.copies) > 1 or parameters is None or len(shape) not in (1, 3):
        return False
    weight, bias = (part.detach().double() for part in parameters)
    if weight.shape != (net.classes, shape[0]):
        return False
    dtype = next(head.parameters()).dtype
    pooled = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(net.device, dtype)
    logits = head.from_pooled(pooled).double()
    expected = _reduced(pooled, linear=True).double() @ weight.T + bias
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-12))
