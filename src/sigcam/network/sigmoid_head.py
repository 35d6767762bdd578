"""SigmoidHead: copies of a classifier's head modules, fed what the originals are fed (Eq. 11)."""

from __future__ import annotations

import copy
import math
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sigcam.core.errors import AttachError
from sigcam.network.split import OUTPUT_ACTIVATIONS, Split, is_activation, is_norm
from sigcam.network.trace import borrowed, logits_of

Init = Literal["fresh", "copy"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # what one call of a head module was given


class SigmoidHead(nn.Module):
    """Copies of the head modules with fresh layers; normalisation keeps its trained values, frozen."""

    def __init__(self, heads: Sequence[nn.Module], *, classes: int, init: Init, seed: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(_copy(head) for head in heads)
        self.classes = classes
        self.tail: Tail | None = None  # None: the one copy returns the logits up to a reshape
        self._entries: tuple[str, ...] = ("",) * len(heads)  # in each copy, the layer that `pooled` enters
        self._shapes: tuple[tuple[int, ...], ...] = ()  # of one image's part of `pooled`, for each copy
        self._blanks: list[Inputs] = []  # one image's zero inputs, for running from `pooled`
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            keep = is_norm(module)
            for name, parameter in module.named_parameters(recurse=False):
                parameter.requires_grad_(not keep and parameter.is_floating_point())
                parameter.grad = None
                if not keep and init == "fresh":
                    _renew(name, parameter, generator)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SigmoidHead:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._blanks = on_tensors(fn, self._blanks)
        return self

    def train(self, mode: bool = True) -> SigmoidHead:
        """Dropout follows the mode; normalisation stays in eval mode, on its trained statistics."""
        super().train(mode)
        for module in self.modules():
            if is_norm(module):
                module.training = False
        return self

    def forward(self, inputs: Sequence[Inputs]) -> tuple[Tensor, Tensor]:
        """(logits (B, C), pooled), from what each head module was given."""
        pooled: list[Tensor] = []
        with _pre_hooks(self._entered(), lambda module, args: pooled.append(args[0])):
            outputs = [c(*args, **kwargs) for c, (args, kwargs) in zip(self.copies, inputs, strict=True)]
        joined = pooled[0] if len(pooled) == 1 else torch.cat([part.flatten(1) for part in pooled], 1)
        return self._finish(outputs), joined

    def from_pooled(self, pooled: Tensor) -> Tensor:
        """Logits (B, C) from `pooled`, skipping what stands before the first trainable layer."""
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
        """Leaves out activations after the last layers (a logit may be negative), and notes where `pooled`
        enters; from one pass over what the heads were given."""
        entries = list[str]()
        for head, given in zip(self.copies, inputs, strict=True):
            order = _order(head, given)
            last = max((i for i, m in enumerate(order) if list(m.parameters())), default=len(order))
            for module in order[last + 1 :]:
                if is_activation(module) and order.count(module) == 1:
                    _replace(head, module, nn.Identity())
            names = {module: name for name, module in head.named_modules()}
            trainable = (m for m in order if any(p.requires_grad for p in m.parameters(recurse=False)))
            entries.append(names[next(trainable, head)])
        self._blanks = on_tensors(lambda leaf: torch.zeros_like(leaf[:1]), list(inputs))
        for tried in (tuple(entries), ("",) * len(self.copies)):  # a layer, else the whole head
            self._entries = tried
            if self._agrees(inputs):
                return
        raise AttachError(
            f"the head takes {len(pytree.tree_leaves(inputs))} inputs, of which no one layer reads all that "
            "counts. Name a module that one tensor enters: attach(model, head='...')."
        )

    def _agrees(self, inputs: Sequence[Inputs]) -> bool:
        """Whether running from `pooled` gives the logits that running from the heads' inputs gives."""
        shapes: list[tuple[int, ...]] = []
        try:
            with _pre_hooks(self._entered(), lambda module, args: shapes.append(tuple(args[0].shape[1:]))):
                logits, pooled = self(on_tensors(Tensor.clone, list(inputs)))
            self._shapes = tuple(shapes)
            return len(shapes) == len(self.copies) and torch.allclose(
                self.from_pooled(pooled), logits, rtol=1e-3, atol=1e-7
            )
        except (IndexError, TypeError, RuntimeError):  # no positional tensor, or shapes that do not join
            return False

    def _entered(self) -> list[nn.Module]:
        return [c.get_submodule(name) for c, name in zip(self.copies, self._entries, strict=True)]

    def _finish(self, outputs: list[Tensor]) -> Tensor:
        logits = outputs[0] if self.tail is None else self.tail(outputs)
        return logits.reshape(-1, self.classes)


def on_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with the function applied to every tensor in it."""
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _copy(head: nn.Module) -> nn.Module:
    """A copy without the user's hooks, which watch the user's head; a hook may hold what cannot be copied."""
    memo: dict[int, Any] = {}
    for module in head.modules():
        hooks = module._forward_pre_hooks
        ours = {key: h for key, h in hooks.items() if type(h).__module__.startswith("torch.nn.utils")}
        memo[id(hooks)] = OrderedDict(ours)  # weight norm computes its weight in one
        for other in (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks):
            memo[id(other)] = OrderedDict[int, Any]()
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:  # refuses to be copied as it is
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(head, memo).eval()


@torch.no_grad()
def _renew(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Normal(0, 0.01) for weights, 0 for biases (PROTOCOL 1.5); a scale or slope keeps its trained value,
    since zero would block all gradient."""
    if parameter.ndim >= 2:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    elif "bias" in name or name in ("b", "beta"):
        parameter.zero_()


def _order(head: nn.Module, given: Inputs) -> list[nn.Module]:
    """The layers of the head in the order in which they run."""
    order: list[nn.Module] = []
    layers = [m for m in head.modules() if not list(m.children()) or list(m.parameters(recurse=False))]
    with _pre_hooks(layers, lambda module, args: order.append(module)):
        args, kwargs = on_tensors(Tensor.clone, given)
        head(*args, **kwargs)
    return order


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in root.modules():
        for name, child in parent.named_children():
            if child is old:
                setattr(parent, name, new)


@contextmanager
def _pre_hooks(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """A hook on modules of our own, for this thread's calls only."""
    thread = threading.get_ident()

    def mine(module: nn.Module, args: Any) -> Any:
        return hook(module, args) if threading.get_ident() == thread else None

    handles = [module.register_forward_pre_hook(mine) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --------------------------------------------------------------------- from output layers to logits


@dataclass(frozen=True)
class _Slot:
    """Stands in a recorded step for an earlier result."""

    index: int


@dataclass(frozen=True)
class _Batch:
    """Stands in a recorded shape for the number of images."""


@dataclass
class Tail:
    """The model's own steps from its output layers' outputs to its logits, activations left out, to be
    repeated."""

    steps: list[tuple[Callable[..., Any], Any, Any, int]] = field(default_factory=list)
    result: int = 0

    def __call__(self, outputs: Sequence[Tensor]) -> Tensor:
        values: dict[int, Any] = dict(enumerate(outputs))

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, _Slot):
                return values[leaf.index]
            return len(outputs[0]) if isinstance(leaf, _Batch) else leaf

        for function, args, kwargs, slot in self.steps:
            args, kwargs = pytree.tree_map(filled, (args, kwargs))
            values[slot] = function(*args, **kwargs)
        result = values[self.result]
        assert isinstance(result, Tensor)
        return result


class _Recorder(TorchFunctionMode):
    """Notes every step that depends on the output layers' outputs."""

    def __init__(self, model: nn.Module, batch: int, outputs: int) -> None:
        super().__init__()
        self.tail, self.batch, self.next = Tail(), batch, outputs
        self.own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.slots: dict[int, int] = {}  # id of a result -> slot
        self.kept: list[Any] = []  # keeps those ids in use
        self.left_out = False  # an activation

    def note(self, value: Any, slot: int) -> None:
        self.slots[id(value)] = slot
        self.kept.append(value)

    def step(self, function: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> None:
        slot, self.next = self.next, self.next + 1
        self.note(value, slot)
        self.tail.steps.append((function, args, kwargs, slot))
        if isinstance(value, tuple | list):  # of a chunk or an unbind: each part by itself
            for index, part in enumerate(value):
                self.step(operator.getitem, (_Slot(slot), index), {}, part)

    def reference(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) in self.slots:
                return _Slot(self.slots[id(leaf)])
            if leaf.numel() > 1 and id(leaf) not in self.own:
                raise AttachError(
                    "the outputs of the heads are combined with other values of the same pass, so the "
                    "branch cannot stand beside them. Name one head: attach(model, head='...')."
                )
        return leaf

    def size(self, leaf: Any) -> Any:
        return _Batch() if type(leaf) is int and leaf == self.batch else leaf

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [self.slots[id(x)] for x in pytree.tree_leaves((args, kwargs)) if id(x) in self.slots]
        recorded, named = pytree.tree_map(self.reference, (args, kwargs)) if read else (args, kwargs)
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not read or not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            return out
        if name in OUTPUT_ACTIVATIONS:
            self.note(out, read[0])  # left out: what follows reads its input
            self.left_out = True
            return out
        if name in ("view", "reshape", "expand") and len(recorded) > 1:  # its first size is the batch
            first = recorded[1]
            many = isinstance(first, tuple | list) and first
            recorded = (
                recorded[0],
                (self.size(first[0]), *first[1:]) if many else self.size(first),
                *recorded[2:],
            )
        self.step(func, recorded, named, out)
        return out


def record_tail(model: nn.Module, split: Split, example: Tensor) -> Tail:
    """The tail after `split.last`, from one pass over the example."""
    recorder = _Recorder(model, len(example), len(split.last))
    outputs: dict[int, Tensor] = {}

    def source(index: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                outputs[index] = out.clone()
                out = out.clone()  # an in-place activation must not rename the output layer's result
            recorder.note(out, index)
            return out

        return hook

    with torch.inference_mode(False), torch.no_grad(), borrowed(model) as handles:
        for index, name in enumerate(split.last):
            handles.append(model.get_submodule(name).register_forward_hook(source(index)))
        with recorder:
            logits = logits_of(model(example), len(example))
        tail = recorder.tail
        tail.result = recorder.slots.get(id(logits), -1)
        followed = tail.result >= 0
        if followed and not recorder.left_out:
            again = tail([outputs[index] for index in range(len(outputs))])
            followed = again.shape == logits.shape and torch.allclose(again, logits, rtol=1e-3, atol=1e-6)
    if not followed:
        raise AttachError(
            f"cannot follow {type(model).__name__} from {', '.join(split.last)} to its logits. "
            "Name a module that returns them: attach(model, head='...')."
        )
    return tail
