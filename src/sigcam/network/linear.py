"""OneDnnLinear: a linear layer through oneDNN, which takes less than half the time of MKL for a few rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.network.trace import are_layers_plain

MIN_NUMBERS = 2**20  # in the weight: products with smaller ones take no time that matters
_CONSTANT = ContextVar("constant", default=False)


@contextmanager
def constant_weights() -> Iterator[None]:
    """Compute no gradient of the weights of such layers inside the block, only of their inputs."""
    token = _CONSTANT.set(True)
    try:
        yield
    finally:
        _CONSTANT.reset(token)


class OneDnnLinear(nn.Linear):
    """A linear layer that oneDNN multiplies where its weights are constant: float32 on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and self.weight.requires_grad and not _CONSTANT.get()
        usual = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu"
        usual = usual and bool(input.numel()) and torch.backends.mkldnn.is_available()
        usual = usual and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
        if trained or not usual or are_layers_plain():
            return super().forward(input)
        bias = None if self.bias is None else self.bias.detach()
        out: Tensor = _Product.apply(input, self.weight.detach(), bias)
        return out


class _Product(torch.autograd.Function):
    """input @ weight.T + bias, and its gradient with respect to the input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input.contiguous(), weight, bias, "none", [], "")
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _Product.apply(gradient, weight.T, None), None, None


def use_onednn(head: nn.Module) -> None:
    """Let oneDNN multiply in the large linear layers of a head."""
    for module in head.modules():
        if type(module) is nn.Linear and module.weight.numel() >= MIN_NUMBERS:
            module.__class__ = OneDnnLinear
