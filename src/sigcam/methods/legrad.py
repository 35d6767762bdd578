"""LeGrad: what flows back to the attention of each block of a plain vision transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sigcam.core.errors import DataError
from sigcam.methods.backpropagation import SeenCalls, scored_images
from sigcam.methods.probe import Probe
from sigcam.methods.registry import method
from sigcam.methods.targets import at_least_float32
from sigcam.network.trace import eval_mode, in_this_thread


@method("legrad", gives="maps", needs="attention", signed=False)
def legrad(probe: Probe) -> Tensor:
    """The positive gradient, by each block's attention to a patch, of the head's score of the mean of that
    block's tokens; the mean over blocks, heads and tokens (Bousselham et al., 2025)."""
    calls = AttentionCalls()
    blocks = _find_blocks(probe, calls)
    p, q = probe.features.shape[-2:]
    total = torch.zeros(())
    for last in range(len(blocks)):
        rows = []
        with _ending_after(probe.net.model, blocks, last):
            for _, scores in scored_images(probe, calls):
                weights = calls.weights[last]
                found = [torch.autograd.grad(score, [weights], retain_graph=True)[0] for score in scores]
                each = [
                    at_least_float32(gradient).relu().flatten(0, -2).mean(0) for gradient in found
                ]  # (L,)
                rows.append(torch.stack(each))
        total = total + torch.stack(rows)[..., -p * q :] / len(blocks)
    return total.reshape(*total.shape[:2], p, q)


class AttentionCalls(SeenCalls):
    """Keeps where gradient reaches the attention weights (..., L, L) of a pass, and L."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[GradientEdge] = []
        self.tokens: list[int] = []

    def clear(self) -> None:
        self.weights.clear()
        self.tokens.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            need_weights, average = kwargs.get("need_weights", True), kwargs.get("average_attn_weights", True)
            out, weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
            (viewed, *_) = weights.grad_fn.next_functions  # it returns a view of what it goes on with
            self._keep(GradientEdge(*viewed), weights)
            return out, (weights.mean(-3) if average else weights) if need_weights else None
        if name == "scaled_dot_product_attention":
            return self._attended(*args, **kwargs)
        out = func(*args, **kwargs)
        square = name in ("softmax", "special_softmax") and out.ndim > 2 and out.shape[-1] == out.shape[-2]
        if square and out.requires_grad:
            self._keep(get_gradient_edge(out), out)
        return out

    def _keep(self, edge: GradientEdge, weights: Tensor) -> None:
        self.weights.append(edge)
        self.tokens.append(weights.shape[-1])

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return what a fused kernel does, step by step."""
        if is_causal or enable_gqa or (attn_mask is not None and attn_mask.dtype == torch.bool):
            raise DataError("legrad is for plain ViTs, whose attention has no mask: use 'grad-cam'.")
        products = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        weights = (products if attn_mask is None else products + attn_mask).softmax(-1)
        self._keep(get_gradient_edge(weights), weights)
        return weights @ value


def _find_blocks(probe: Probe, calls: AttentionCalls) -> list[nn.Module]:
    """Return the model's blocks in order: children of one module with one attention layer each, which return
    tokens of the shape that they take."""
    model, began, blocks = probe.net.model, dict[nn.Module, int](), set[nn.Module]()

    def enter(module: nn.Module, args: Any) -> None:
        began[module] = len(calls.weights)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        tokens = bool(args) and isinstance(first, Tensor) and first.ndim == 3
        if tokens and first.shape == args[0].shape and len(calls.weights) == began[module] + 1:
            blocks.add(module)

    with eval_mode(model) as handles:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(in_this_thread(enter)))
            handles.append(module.register_forward_hook(in_this_thread(leave)))
        next(scored_images(probe, calls))
    rows = [[child for child in module.children() if child in blocks] for module in model.modules()]
    found = max(rows, key=len)
    cells = probe.features.shape[-2:].numel()
    if not found or len(found) != len(calls.weights):
        _refuse(model, "is no row of blocks with one attention layer each")
    if min(calls.tokens) < cells:
        _refuse(model, f"attends over fewer tokens than the {cells} cells of its map")
    return found


@contextmanager
def _ending_after(model: nn.Module, blocks: Sequence[nn.Module], last: int) -> Iterator[None]:
    """Let the head see the mean of one block's tokens in the place of each, for one image at a time: later
    blocks return what they are given."""

    def average(module: nn.Module, args: Any, out: Any) -> Any:
        tokens = out[0] if isinstance(out, tuple) else out  # (1, L, N) or (L, 1, N)
        mean = tokens.mean((0, 1), keepdim=True).expand_as(tokens)
        return (mean, *out[1:]) if isinstance(out, tuple) else mean

    def skip(module: nn.Module, args: Any, out: Any) -> Any:
        return (args[0], *out[1:]) if isinstance(out, tuple) else args[0]

    with ExitStack() as stack:
        handles = stack.enter_context(eval_mode(model))
        handles.append(blocks[last].register_forward_hook(in_this_thread(average)))
        handles += [block.register_forward_hook(in_this_thread(skip)) for block in blocks[last + 1 :]]
        yield


def _refuse(model: nn.Module, why: str) -> NoReturn:
    raise DataError(f"legrad is for plain ViTs, and {type(model).__name__} {why}: use 'grad-cam'.")
