"""SigmoidHead: copies of a classifier's head modules with the same inputs as the originals (Eq. 11)."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sigcam.core.errors import AttachError
from sigcam.core.memory import is_out_of_memory
from sigcam.network.linear import use_onednn
from sigcam.network.modules import is_activation, is_norm, replace_module
from sigcam.network.output_tail import Tail
from sigcam.network.trace import in_this_thread

Init = Literal["fresh", "copy"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of one call of a head module


class SigmoidHead(nn.Module):
    """Copies of the head modules with new weights; normalisation keeps its trained values, frozen."""

    def __init__(self, heads: Sequence[nn.Module], *, classes: int, init: Init, seed: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(_copy(head) for head in heads)
        use_onednn(self.copies)
        self.classes = classes
        self.tail: Tail | None = None  # None: the one copy returns the logits up to a reshape
        self._entries: tuple[str, ...] = ("",) * len(heads)  # the layer of each copy that reads `pooled`
        self._shapes: tuple[tuple[int, ...], ...] = ()  # of `pooled` for one image, for each copy
        self._blanks: list[Inputs] = []  # one image's zero inputs, for running from `pooled`
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            frozen = is_norm(module)
            for name, parameter in module.named_parameters(recurse=False):
                parameter.requires_grad_(not frozen and parameter.is_floating_point())
                parameter.grad = None
                if not frozen and init == "fresh":
                    _initialize(name, parameter, generator)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SigmoidHead:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._blanks = on_tensors(fn, self._blanks)
        return self

    def train(self, mode: bool = True) -> SigmoidHead:
        """Set the mode; normalisation stays in eval mode, with its trained statistics."""
        super().train(mode)
        for module in self.modules():
            if is_norm(module):
                module.training = False
        return self

    def forward(self, inputs: Sequence[Inputs]) -> tuple[Tensor, Tensor]:
        """Return (logits (B, C), pooled), from the inputs of each head module."""
        pooled: list[Tensor] = []
        with _pre_hooks(self._entered(), lambda module, args: pooled.append(args[0])):
            outputs = [c(*args, **kwargs) for c, (args, kwargs) in zip(self.copies, inputs, strict=True)]
        joined = pooled[0] if len(pooled) == 1 else torch.cat([part.flatten(1) for part in pooled], 1)
        return self._finish(outputs), joined

    def from_pooled(self, pooled: Tensor) -> Tensor:
        """Return logits (B, C) from `pooled`, skipping what precedes the first trainable layer."""
        outputs, rows, parts = [], len(pooled), [pooled]
        if len(self.copies) > 1:
            widths = [math.prod(shape) for shape in self._shapes]
            columns = zip(pooled.split(widths, 1), self._shapes, strict=True)
            parts = [part.reshape(rows, *shape) for part, shape in columns]
        for module, entry, part, blank in zip(self.copies, self._entered(), parts, self._blanks, strict=True):
            if entry is module:
                outputs.append(module(part))
                continue
            args, kwargs = on_tensors(lambda zero: zero.expand(rows, *zero.shape[1:]), blank)
            with _pre_hooks([entry], lambda module, args, part=part: (part, *args[1:])):
                outputs.append(module(*args, **kwargs))
        return self._finish(outputs)

    @torch.no_grad()
    def prepare(self, inputs: Sequence[Inputs]) -> None:
        """Remove activations after the last layers (logits may be negative); find what reads `pooled`."""
        entries = list[str]()
        for head, one in zip(self.copies, inputs, strict=True):
            order = _layers_in_order(head, one)
            last = max((i for i, m in enumerate(order) if list(m.parameters())), default=len(order))
            for module in order[last + 1 :]:
                if is_activation(module) and order.count(module) == 1:
                    replace_module(head, module, nn.Identity())
            names = {module: name for name, module in head.named_modules()}
            trainable = (m for m in order if any(p.requires_grad for p in m.parameters(recurse=False)))
            entries.append(names[next(trainable, head)])
        self._blanks = on_tensors(lambda leaf: torch.zeros_like(leaf[:1]), list(inputs))
        for choice in (tuple(entries), ("",) * len(self.copies)):  # a layer, else the whole head
            self._entries = choice
            if self._agrees(inputs):
                return
        raise AttachError(
            f"the head takes {len(pytree.tree_leaves(inputs))} inputs, and no single layer reads all that "
            "matter. Name a module with one tensor as input: attach(model, head='...')."
        )

    def _agrees(self, inputs: Sequence[Inputs]) -> bool:
        """Whether `from_pooled` gives the same logits as `forward`."""
        shapes: list[tuple[int, ...]] = []
        try:
            with _pre_hooks(self._entered(), lambda module, args: shapes.append(tuple(args[0].shape[1:]))):
                logits, pooled = self(on_tensors(Tensor.clone, list(inputs)))
            self._shapes = tuple(shapes)
            again = self.from_pooled(pooled) if len(shapes) == len(self.copies) else None
            return again is not None and torch.allclose(again, logits, rtol=1e-3, atol=1e-7)
        except (IndexError, TypeError, RuntimeError) as error:  # no positional tensor, or shapes that differ
            if is_out_of_memory(error):
                raise
            return False

    def _entered(self) -> list[nn.Module]:
        return [c.get_submodule(name) for c, name in zip(self.copies, self._entries, strict=True)]

    def _finish(self, outputs: list[Tensor]) -> Tensor:
        logits = outputs[0] if self.tail is None else self.tail(outputs)
        return logits.reshape(-1, self.classes)


def on_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply the function to every tensor in the tree."""
    return pytree.tree_map_only(Tensor, function, tree)


def _copy(head: nn.Module) -> nn.Module:
    """Copy the head without the user's hooks, which may hold what cannot be copied."""
    memo: dict[int, Any] = {}
    for module in head.modules():
        hooks = module._forward_pre_hooks
        torchs = {key: h for key, h in hooks.items() if type(h).__module__.startswith("torch.nn.utils")}
        memo[id(hooks)] = OrderedDict(torchs)  # weight norm computes its weight in one
        for other in (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks):
            memo[id(other)] = OrderedDict[int, Any]()
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:  # deepcopy refuses it
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(head, memo).eval()


@torch.no_grad()
def _initialize(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Set weights to Normal(0, 0.01), biases to 0 (PROTOCOL 1.5); at 0, a scale would block all gradient."""
    if parameter.ndim >= 2:
        parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.01))
    elif "bias" in name or name in ("b", "beta"):
        parameter.zero_()


def _layers_in_order(head: nn.Module, inputs: Inputs) -> list[nn.Module]:
    """The layers of the head in the order in which they run."""
    order: list[nn.Module] = []
    layers = [m for m in head.modules() if not list(m.children()) or list(m.parameters(recurse=False))]
    with _pre_hooks(layers, lambda module, args: order.append(module)):
        args, kwargs = on_tensors(Tensor.clone, inputs)
        head(*args, **kwargs)
    return order


@contextmanager
def _pre_hooks(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Register a hook on modules of the branch that runs in this thread only."""
    handles = [module.register_forward_pre_hook(in_this_thread(hook)) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
