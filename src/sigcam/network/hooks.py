"""Tap: what hooks take from one pass of a user's network, and what they may put in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sigcam.core.errors import AttachError
from sigcam.network.layout import FeaturePoint
from sigcam.network.sigmoid_head import Inputs, on_tensors
from sigcam.network.split import ACTIVATIONS, Split
from sigcam.network.trace import eval_mode, logits_of


class HookedPass(TorchFunctionMode):
    """The features at each place, what enters the heads, what leaves the output layers, and the logits.

    With `grad`, autograd records from the first place on, whose output is cut off from what made it. A
    function mode only where one is needed.

    Args:
        outputs: keep what the output layers return.
        forced: record even where the model itself says no_grad.
        swap: features to put in place of the (one) place's output, any number of them.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        places: Sequence[FeaturePoint],
        *,
        grad: bool,
        forced: bool = False,
        outputs: bool = False,
        swap: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model, self.split, self.places = model, split, tuple(places)
        self.grad, self.forced, self.last, self.swap = grad, forced, split.last if outputs else (), swap
        self.thread = threading.get_ident()
        self.inputs: list[Inputs] = []
        self.outputs: list[Tensor] = []
        self.logits: Tensor
        self._cuts: dict[FeaturePoint, Tensor] = {}
        self._awaited: tuple[Tensor, FeaturePoint] | None = None

    @property
    def cuts(self) -> list[Tensor]:
        """The layers' outputs as they came, place by place."""
        return [self._cuts[place] for place in self.places]

    def run(self, images: Tensor) -> HookedPass:
        """Runs the model with our hooks on it, and only for as long as that takes."""
        with ExitStack() as stack:
            handles = stack.enter_context(eval_mode(self.model))
            self._hook_into(handles)
            if any(place.activation for place in self.places) or (self.grad and self.forced):
                stack.enter_context(self)
            stack.enter_context(torch.no_grad())  # also what ends the recording that a hook began
            output = self.model(images.clone())  # a model may change its input in place
        self._check()
        self.logits = logits_of(output, len(images) if self.swap is None else self._variants())
        return self

    def _variants(self) -> int:
        assert self.swap is not None
        return self.swap.shape[1 if self.places[0].fold.layout == "LNC" else 0]

    def _hook_into(self, handles: list[Any]) -> None:
        """Registers our hooks, each into the list as it is made, so that an error leaves none behind."""
        for place in self.places:
            layer = self.model.get_submodule(place.layer)
            handles.append(layer.register_forward_hook(self._at(place)))
        for name in self.split.heads:
            head = self.model.get_submodule(name)
            handles.append(head.register_forward_pre_hook(self._before_head, with_kwargs=True))
        last = [self.model.get_submodule(name) for name in self.last]
        handles.extend(layer.register_forward_hook(self._after_last) for layer in last)

    def _at(self, place: FeaturePoint) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        calls = 0

        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
            nonlocal calls
            if threading.get_ident() != self.thread:
                return None  # somebody else is using the model meanwhile
            calls += 1
            if calls != place.call:
                return None
            if place.activation:
                self._awaited = (out, place)
                return None
            return self._take(out, place)

        return hook

    def _take(self, out: Tensor, place: FeaturePoint) -> Tensor:
        """Keeps F, cut off from what made it, and hands the model a copy, which an in-place step may
        change."""
        if self.swap is not None:
            self._cuts[place] = out
            return self.swap.to(out.dtype).clone()
        if self.grad and not out.requires_grad:
            out = out.detach().requires_grad_()
            torch.set_grad_enabled(True)  # from here on; the no_grad around the pass ends it
        self._cuts[place] = out if self.grad else out.detach()
        return out.clone()

    def _before_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self.thread:
            self.inputs.append(on_tensors(Tensor.clone, (args, kwargs)))

    def _after_last(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if threading.get_ident() == self.thread:
            self.outputs.append(out.clone())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._awaited and args and args[0] is self._awaited[0] and func.__name__ in ACTIVATIONS:
            place, self._awaited = self._awaited[1], None
            with torch.set_grad_enabled(self.grad and bool(self._cuts)):
                out = func(*args, **kwargs)
            return self._take(out, place)
        if self._cuts and self.grad:
            if self.forced and func.__name__ == "detach":  # a frozen trunk may end in one
                return args[0]
            with torch.enable_grad():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _check(self) -> None:
        missing = next((place.layer for place in self.places if place not in self._cuts), None)
        if missing is not None:
            raise AttachError(f"layer {missing!r} did not run in this pass as it did when it was found.")
        if len(self.inputs) != len(self.split.heads):
            raise AttachError(
                f"head {self.split.heads[0]!r} did not run once in this pass, as it did when sigcam was "
                "attached."
            )


@contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Autocast keeps no cast weights: ours change when fitted, and the user's must not lose their graph to a
    pass without gradient."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
