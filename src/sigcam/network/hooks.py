"""One pass of a user's network with hooks: take features, head inputs and logits, or swap features in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sigcam.core.errors import AttachError
from sigcam.network.dataflow import tensors_in
from sigcam.network.feature_layer import FeaturePoint
from sigcam.network.modules import ACTIVATIONS, run_model
from sigcam.network.sigmoid_head import Inputs, on_tensors
from sigcam.network.split import Split
from sigcam.network.trace import agree, eval_mode, in_this_thread, logits_of


class HookedPass(TorchFunctionMode):
    """The features at each point, the heads' inputs, the output layers' outputs, and the logits.

    With `grad`, autograd records from the first point on, whose output is detached from what precedes it.
    The function mode is entered only where it is needed.

    Args:
        whole: record from the images on, and nothing of weights; no_grad and detach of the model are ignored.
        outputs: keep what the output layers return.
        forced: record even where the model itself uses no_grad.
        swap: features that replace the output at the (only) point, any number of them.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        points: Sequence[FeaturePoint],
        *,
        grad: bool = False,
        whole: bool = False,
        forced: bool = False,
        outputs: bool = False,
        swap: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model, self.split, self.points = model, split, tuple(points)
        self.grad, self.forced, self.last, self.swap = grad, forced, split.last if outputs else (), swap
        self.whole = whole
        self.inputs: list[Inputs] = []
        self.outputs: list[Tensor] = []
        self.logits: Tensor
        self._cuts: dict[FeaturePoint, Tensor] = {}
        self._before_activation: tuple[Tensor, FeaturePoint] | None = None

    @property
    def cuts(self) -> list[Tensor]:
        """The layers' unfolded outputs, point by point."""
        return [self._cuts[point] for point in self.points]

    def run(self, images: Tensor) -> HookedPass:
        """Run the model; the hooks are on it only during this call."""
        self._device = images.device.type
        self._autocast = torch.is_autocast_enabled(self._device)
        with ExitStack() as stack:
            handles = stack.enter_context(eval_mode(self.model))
            self._register_hooks(handles)
            if any(point.activation for point in self.points) or (self.grad and self.forced) or self.whole:
                stack.enter_context(self)
            # no_grad also ends the recording that a hook switches on
            stack.enter_context(torch.set_grad_enabled(self.whole))
            output = run_model(self.model, images.clone())  # a model may change its input in place
        missing = next((point.layer for point in self.points if point not in self._cuts), None)
        if missing is not None:
            raise AttachError(f"layer {missing!r} did not run in this pass as it did when it was found.")
        if len(self.inputs) != len(self.split.heads):
            raise AttachError(f"head {self.split.heads[0]!r} did not run once in this pass, as at first.")
        swapped = None if self.swap is None else self.swap.shape[self.points[0].fold.batch_axis]
        self.logits = logits_of(output, swapped or len(images))
        return self

    def bits(self) -> bytes:
        """A hash of what enters the heads and of the logits; equal if these are equal bit by bit."""
        found = hashlib.blake2b(digest_size=16)
        for tensor in (*tensors_in(self.inputs), self.logits):
            numbers = tensor.detach().cpu().flatten() + 0  # -0.0 equals 0.0
            found.update(numbers.view(torch.uint8).numpy().data)
        return found.digest()

    def _register_hooks(self, handles: list[Any]) -> None:
        """Register our hooks, each put into the list at once, so that an error leaves none behind."""
        for point in self.points:
            layer = self.model.get_submodule(point.layer)
            handles.append(layer.register_forward_hook(in_this_thread(self._hook_at(point))))
        before, after = in_this_thread(self._before_head), in_this_thread(self._after_last)
        heads = map(self.model.get_submodule, self.split.heads)
        handles.extend(head.register_forward_pre_hook(before, with_kwargs=True) for head in heads)
        last = map(self.model.get_submodule, self.last)
        handles.extend(layer.register_forward_hook(after) for layer in last)

    def _hook_at(self, point: FeaturePoint) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        calls = 0

        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
            nonlocal calls
            calls += 1
            if calls != point.call:
                return None
            if point.activation:
                self._before_activation = (out, point)
                return None
            return self._take(out, point)

        return hook

    def _take(self, out: Tensor, point: FeaturePoint) -> Tensor:
        """Keep F, detached, and give the model a copy, which it may change in place."""
        if self.swap is not None:
            self._cuts[point] = out
            return self.swap.to(out.dtype).clone()
        if self.grad and not out.requires_grad:
            out = out.detach().requires_grad_()
            torch.set_grad_enabled(True)  # until the no_grad around the pass ends it
        self._cuts[point] = out if self.grad or self.whole else out.detach()
        return out.clone()

    def _before_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        inside = torch.is_autocast_enabled(self._device) and not self._autocast  # our heads run outside of it
        self.inputs.append(
            on_tensors(
                lambda t: t.to(dtype, copy=True) if inside and t.is_floating_point() else t.clone(),
                (args, kwargs),
            )
        )

    def _after_last(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.outputs.append(out.clone())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, waiting = kwargs or {}, self._before_activation
        if self.whole:
            args, kwargs = pytree.tree_map_only(nn.Parameter, Tensor.detach, (args, kwargs))
        if waiting and args and args[0] is waiting[0] and func.__name__ in ACTIVATIONS:
            self._before_activation = None
            with torch.set_grad_enabled(self.whole or (self.grad and bool(self._cuts))):
                out = func(*args, **kwargs)
            return self._take(out, waiting[1])
        if self.whole or (self._cuts and self.grad):
            if (self.whole or self.forced) and func.__name__ == "detach":  # a frozen trunk may end in one
                return args[0]
            with torch.inference_mode(False), torch.enable_grad():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class GradMode:
    """How autograd records the part of the model after some feature points."""

    inline: bool = True  # in the pass that predicts; False: recording changes the arithmetic, run another
    forced: bool = False  # the model computes F or what follows under a no_grad of its own


def choose_grad_mode(run: Callable[..., HookedPass], bits: bytes | None, logits: Tensor) -> GradMode:
    """Find out, by `run` on the example, whether the pass that predicts can record and stay as it is.

    Args:
        bits: of the same pass without gradient; None if its logits need only be near: an optimised copy runs
            packed layers plainly where it records.
    """
    for forced in (False, True):
        recorded = run(grad=True, forced=forced)
        if any(tensor.requires_grad for tensor in tensors_in(recorded.inputs)):
            same = agree(recorded.logits.detach(), logits) if bits is None else recorded.bits() == bits
            return GradMode(same, forced)
    layer, head = recorded.points[0].layer, recorded.split.heads[0]
    raise AttachError(
        f"no gradient passes from layer {layer!r} to the head {head!r}. "
        "Name another layer: attach(model, layer='...')."
    )


@contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache of cast weights: it outlives a fit, and holds weights without a graph."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
