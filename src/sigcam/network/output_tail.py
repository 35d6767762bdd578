"""Record the steps from the output layers to the logits, so that a copy of the head can repeat them."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sigcam.core.errors import AttachError
from sigcam.network.modules import OUTPUT_ACTIVATIONS
from sigcam.network.split import Split
from sigcam.network.trace import eval_mode, logits_of

BATCH = -1  # the slot that holds the number of images


@dataclass(frozen=True)
class _Slot:
    """Placeholder in a recorded step for an earlier result."""

    index: int


@dataclass
class Tail:
    """The model's own steps from its output layers' outputs to its logits, without activations."""

    steps: list[tuple[Callable[..., Any], Any, Any, int]] = field(default_factory=list)
    result: int = 0

    def __call__(self, outputs: Sequence[Tensor]) -> Tensor:
        values: dict[int, Any] = {BATCH: outputs[0].shape[0], **dict(enumerate(outputs))}
        for function, args, kwargs, slot in self.steps:
            args, kwargs = pytree.tree_map_only(_Slot, lambda leaf: values[leaf.index], (args, kwargs))
            values[slot] = function(*args, **kwargs)
        result: Tensor = values[self.result]
        return result


class _Recorder(TorchFunctionMode):
    """Records every step that depends on the output layers' outputs."""

    def __init__(self, model: nn.Module, batch: int, outputs: int) -> None:
        super().__init__()
        self.tail, self.batch, self.next = Tail(), batch, outputs
        self.constants = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.slots: dict[int, int] = {}  # id of a result -> slot
        self.alive: list[Any] = []  # keeps those ids valid
        self.skipped_activation = False

    def note(self, value: Any, slot: int) -> None:
        self.slots[id(value)] = slot
        self.alive.append(value)

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
            if leaf.numel() > 1 and id(leaf) not in self.constants:
                raise AttachError(
                    "the outputs of the heads are combined with other values of the same pass, which the "
                    "branch cannot repeat. Name one head: attach(model, head='...')."
                )
        return leaf

    def size(self, leaf: Any) -> Any:
        return _Slot(BATCH) if type(leaf) is int and leaf == self.batch else leaf

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
            self.note(out, read[0])  # skipped: the next step reads its input
            self.skipped_activation = True
            return out
        if name in ("view", "reshape", "expand") and len(recorded) > 1:  # the first size is the batch
            first = recorded[1]
            is_shape = isinstance(first, tuple | list) and first
            first = (self.size(first[0]), *first[1:]) if is_shape else self.size(first)
            recorded = (recorded[0], first, *recorded[2:])
        self.step(func, recorded, named, out)
        return out


def record_tail(model: nn.Module, split: Split, example: Tensor) -> Tail:
    """Record the tail after `split.last` in one pass over the example."""
    recorder = _Recorder(model, len(example), len(split.last))
    outputs: dict[int, Tensor] = {}

    def keep_output(index: int, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            outputs[index] = out.clone()
            out = out.clone()  # an in-place activation must not change the recorded output
        recorder.note(out, index)
        return out

    with torch.inference_mode(False), torch.no_grad(), eval_mode(model) as handles:
        for index, name in enumerate(split.last):
            handles.append(model.get_submodule(name).register_forward_hook(partial(keep_output, index)))
        with recorder:
            logits = logits_of(model(example), len(example))
        tail = recorder.tail
        tail.result = recorder.slots.get(id(logits), -1)
        followed = tail.result >= 0
        if followed and not recorder.skipped_activation:
            again = tail([outputs[index] for index in range(len(outputs))])
            followed = again.shape == logits.shape and torch.allclose(again, logits, rtol=1e-3, atol=1e-6)
    if not followed:
        raise AttachError(
            f"cannot follow {type(model).__name__} from {', '.join(split.last)} to its logits. "
            "Name a module that returns them: attach(model, head='...')."
        )
    return tail
