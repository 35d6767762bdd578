"""The attention of a plain ViT to each cell: multiplied over its layers (rollout), or their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sigcam.core.errors import DataError
from sigcam.core.types import GridSize
from sigcam.methods.targets import at_least_float32
from sigcam.network.dataflow import tensors_in
from sigcam.network.dual import DualBranch
from sigcam.network.feature_layer import MAX_PREFIX_TOKENS
from sigcam.network.hooks import fresh_autocast_cache
from sigcam.network.modules import run_model
from sigcam.network.trace import chunks, eval_mode, in_this_thread, logits_of


def rollout_maps(net: DualBranch, images: Tensor) -> Tensor:
    """Return (B, P, Q) non-negative shares of the cells in the tokens that the head reads (Abnar & Zuidema,
    2020). Together with the shares of the tokens before the grid they sum to 1."""
    shares, (p, q) = token_shares(net, images)
    return shares[:, -p * q :].reshape(-1, p, q)


def class_attention(net: DualBranch, images: Tensor, method: str) -> Tensor:
    """Return (B, P, Q) the attention of the class token, the first one, to each cell: the mean over layers of
    the mean over heads. `method` is named in errors."""
    rows, (p, q) = _over_batch(net, images, method, lambda seen, _: seen.from_first_token())
    return rows[:, -p * q :].reshape(-1, p, q)


def token_shares(net: DualBranch, images: Tensor) -> tuple[Tensor, GridSize]:
    """Return (B, L) shares of all tokens, which sum to 1, and the grid of the last P * Q."""
    return _over_batch(net, images, "attention-rollout", lambda seen, reading: seen.shares(reading))


def _over_batch(
    net: DualBranch, images: Tensor, method: str, take: Callable[[_AttentionRecorder, Tensor], Tensor]
) -> tuple[Tensor, GridSize]:
    """Return what `take` returns of all images, (B, L), and the grid of the last P * Q. It is given the (L,)
    weights of the tokens that the head reads."""
    with torch.inference_mode(False), torch.no_grad(), fresh_autocast_cache():
        first = _AttentionRecorder(net, method, grad=True).run(images[:1])  # one reveals the architecture
        reading, grid = _reading_weights(first), first.grid
        taken = [take(first, reading)]
        parts = images[1:].split(1) if first.one_by_one else chunks(images[1:])
        del first  # and its graph
        taken += [take(_AttentionRecorder(net, method).run(part), reading) for part in parts if len(part)]
        return torch.cat(taken), grid


Tokens = tuple[Tensor, int]  # a tensor and its token axis


class _AttentionRecorder(TorchFunctionMode):
    """Multiplies the attention matrices of one forward pass; with `grad`, records how the model is built.

    While a function mode is active, torch's attention modules take no fused path that would hide from it.
    """

    def __init__(self, net: DualBranch, method: str, *, grad: bool = False) -> None:
        super().__init__()
        self.net, self.method, self.grad = net, method, grad
        self.batch = 0
        self.one_by_one = False  # images and heads share an axis, in unknown order
        self.other_softmaxes = set[GridSize]()  # shapes of softmaxes that are not self-attention
        self.layers: list[tuple[list[Tokens], Tokens]] = []  # inputs and output of each attention layer
        self.sequences: list[Tokens] = []  # token sequences computed after the last attention layer, in order
        self.head_inputs: list[Tensor] = []
        self.logits: Tensor
        self.grid = GridSize(0, 0)
        self._product: Tensor | None = None
        self._first_rows: list[Tensor] = []  # (B, L) by layer: the first token's attention

    @property
    def product(self) -> Tensor:
        """(B, L, L): row i holds the shares of all input tokens in output token i; it sums to 1."""
        assert self._product is not None
        return self._product

    def shares(self, reading: Tensor) -> Tensor:
        """Return (B, L), the mean of the rows with (L,) weights."""
        with torch.autocast(reading.device.type, enabled=False):
            return reading @ self.product

    def from_first_token(self) -> Tensor:
        """Return (B, L), the first token's attention to each, the mean over layers."""
        if self.product.shape[-1] == math.prod(self.grid):
            self._refuse("has no class token")
        return torch.stack(self._first_rows).mean(0)

    def run(self, images: Tensor) -> _AttentionRecorder:
        """Run the model, and check that its attention is that of a plain ViT."""
        self.batch, split = len(images), self.net.split
        size = GridSize.of(images)

        def record_grid(module: nn.Module, args: Any, out: Tensor) -> None:
            self.grid = GridSize.of(split.fold(out, size))

        def record_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.head_inputs += tensors_in((args, kwargs))

        with ExitStack() as stack:
            handles = stack.enter_context(eval_mode(self.net.model))
            handles.append(self.net.layer.register_forward_hook(in_this_thread(record_grid)))
            for name in split.last if self.grad else ():
                module = self.net.model.get_submodule(name)
                hook = in_this_thread(record_inputs)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            images = images.clone().detach().requires_grad_(self.grad)  # may be an inference tensor
            stack.enter_context(self)
            output = run_model(self.net.model, images.clone())  # a model may change its input in place
        self.logits = logits_of(output, self.batch)
        self._check()
        return self

    def _check(self) -> None:
        (p, q), prefix = self.grid, self.net.split.fold.prefix
        if self._product is None:
            self._refuse("has no visible attention layer")
        tokens = self._product.shape[-1]
        extra = tokens - p * q  # F may be taken before the class token is added
        if extra != prefix and (prefix or not 0 <= extra <= MAX_PREFIX_TOKENS):
            self._refuse(f"attends over {tokens} tokens at a time where its map has {p} x {q} cells")
        for rows, columns in sorted(self.other_softmaxes):
            if columns in (tokens, p * q):
                self._refuse(f"pools or mixes its {columns} tokens by a softmax into {rows}")

    def _refuse(self, why: str) -> NoReturn:
        kind = type(self.net.model).__name__
        raise DataError(f"{self.method} is for plain ViTs, and {kind} {why}: use 'grad-cam'.")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad):  # whatever the model sets
            if name == "detach" and self.grad:
                return args[0].view_as(args[0])
            if name == "multi_head_attention_forward":
                return self._record_multi_head(func, args, kwargs)
            out = func(*args, **kwargs)
            if name == "scaled_dot_product_attention":
                self._record_fused(out, *args, **kwargs)
            elif name in ("softmax", "special_softmax"):
                self._record_softmax(out, *args, **kwargs)
        if self.grad and self._product is not None:
            self.sequences += [(t, axis) for t in tensors_in(out) for axis in self._token_axis(t)]
        return out

    def _token_axis(self, tensor: Tensor) -> list[int]:
        """Return the token axis, if the tensor holds all tokens of the one image."""
        if tensor.ndim != 3 or not tensor.requires_grad:
            return []
        length = self.product.shape[-1]
        return {(1, length): [1], (length, 1): [0]}.get((tensor.shape[0], tensor.shape[1]), [])

    def _record_multi_head(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Record nn.MultiheadAttention, which can return its weights, (B, heads, L, L)."""
        need_weights, average = kwargs.get("need_weights", True), kwargs.get("average_attn_weights", True)
        out, weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
        self._multiply(weights, [(x, 0) for x in args[:3]], (out, 0))
        if not need_weights:
            return out, None
        return out, weights.mean(-3) if average else weights

    def _record_fused(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Record a fused kernel, which returns no weights: compute them again, head by head."""
        shape = (*query.shape[:-1], key.shape[-2])  # (B, heads, L, L)
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            if is_causal:
                attn_mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
            bias = query.new_zeros(()) if attn_mask is None else attn_mask
            if bias.dtype == torch.bool:
                bias = torch.zeros(bias.shape, device=query.device).masked_fill(~bias, -math.inf)
            bias, scale = bias.expand(shape), query.shape[-1] ** -0.5 if scale is None else scale
            heads = 1 if query.ndim < 4 else query.shape[-3]
            groups = heads // key.shape[-3] if enable_gqa else 1
            mean = torch.zeros((), device=query.device)
            for head in range(heads):
                q, k, b = query, key, bias
                if query.ndim > 3:
                    q, k, b = q.select(-3, head), k.select(-3, head // groups), b.select(-3, head)
                q, k, b = map(at_least_float32, (q, k, b))
                mean = mean + (q @ k.mT * scale + b).softmax(-1) / heads
        self._multiply(mean, [(query, -2), (key, -2), (value, -2)], (out, -2))

    def _record_softmax(
        self, out: Tensor, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Record a softmax over one of the last two axes: attention if these have the same length."""
        axis = dim - out.ndim if dim is not None and dim >= 0 else dim
        if out.ndim < 3 or axis not in (-1, -2):
            return
        scores, weights = (input, out) if axis == -1 else (input.mT, out.mT)
        if weights.shape[-2] != weights.shape[-1]:
            self.other_softmaxes.add(GridSize.of(weights))
        else:
            diagonal = scores.diagonal(dim1=-2, dim2=-1)  # scores of a token with itself depend on no other
            self._multiply(weights, [(diagonal, -1)], (out, -3 - axis))

    def _multiply(self, weights: Tensor, inputs: list[Tokens], output: Tokens) -> None:
        """Multiply the product of the layers before by (A + I) / 2, where A is the mean over heads."""
        rows, columns = weights.shape[-2:]
        before = columns if self._product is None else self._product.shape[-1]
        if rows != columns:
            self._refuse(f"attends from {rows} to {columns} tokens")
        if columns != before:
            self._refuse(f"attends over {before} tokens, then over {columns}")
        if len(weights) != self.batch and self.batch > 1:
            self._refuse(f"has {tuple(weights.shape)} attention for {self.batch} images")
        self.one_by_one |= len(weights) != self.batch
        with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
            mean = at_least_float32(weights.detach()).reshape(self.batch, -1, rows, columns).mean(1)
            mean = mean / mean.sum(-1, keepdim=True)  # (B, L, L), rounded in half precision
            self._first_rows.append(mean[:, 0].clone())
            mean.diagonal(dim1=-2, dim2=-1).add_(1)
            mean.div_(2)
            self._product = mean if self._product is None else mean @ self._product
        if self.grad:
            self.layers.append((inputs, output))
            self.sequences = [output]


def _reading_weights(first: _AttentionRecorder) -> Tensor:
    """Return (L,) weights of the tokens that the head reads, summing to 1; DataError if tokens mix elsewhere.

    The head reads the tokens that receive gradient: individual ones before the grid, and all or none of the
    grid (a maximum would pass gradient to one cell). Tokens of a kind have equal weights; if a head reads
    both kinds, the gradient's size divides the weight between them.
    """
    product, (p, q) = first.product, first.grid
    for (_, output), (inputs, _) in pairwise(first.layers):
        _check_no_mixing(first, inputs, output)
    outputs = [t for t in first.head_inputs if t.is_floating_point() and t.requires_grad]
    if not outputs or any(t.shape[2:].numel() > 1 for t in outputs):
        outputs = [first.logits]  # the head runs on every token
    with torch.enable_grad():
        score = torch.stack([_signed_sum(t) for t in outputs]).sum()
    sequences = [t for t, _ in first.sequences]
    gradients = torch.autograd.grad(score, sequences, allow_unused=True, retain_graph=True)
    reached = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not reached:
        first._refuse("has a head that reads no token of its last attention layer")
    (last, axis), gradient = first.sequences[reached[-1]], gradients[reached[-1]]
    assert gradient is not None
    if reached[-1]:
        _check_no_mixing(first, [(last, axis)], first.layers[-1][1])
    sizes = gradient.movedim(axis, 0).flatten(1).to(product.dtype).norm(dim=1)  # (L,)
    reading = torch.zeros_like(sizes)
    read = (sizes[: -p * q] > 0).to(sizes)
    reading[: -p * q] = read * sizes[: -p * q].sum() / read.sum().clamp(min=1)
    reading[-p * q :] = sizes[-p * q :].mean()
    return reading / reading.sum()


def _check_no_mixing(first: _AttentionRecorder, inputs: list[Tokens], output: Tokens) -> None:
    """Raise if tokens mix between the output of one attention layer and the inputs of the next."""
    tensor, axis = output
    token = first.product.shape[-1] // 2
    with torch.enable_grad():
        score = torch.stack([_signed_sum(x.select(along, token)) for x, along in inputs]).sum()
    (gradient,) = torch.autograd.grad(score, tensor, allow_unused=True, retain_graph=True)
    if gradient is None:
        first._refuse("has attention layers side by side")
    touched = gradient.movedim(axis, 0).flatten(1).any(1)  # (L,)
    touched[token] = False
    if bool(touched.any()):
        first._refuse("mixes its tokens by other steps than attention")


def _signed_sum(tensor: Tensor) -> Tensor:
    """Sum with random signs, so that every entry has gradient (the plain sum of a LayerNorm is constant)."""
    signs = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return (tensor * signs.to(tensor)).sum()
