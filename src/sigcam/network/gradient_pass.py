"""One pass that records gradients from chosen module outputs on, and tells which of them get any."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sigcam.network.dataflow import tensors_in
from sigcam.network.trace import ModuleOutput, eval_mode, in_this_thread, logits_of, plain_layers

GridPart = Callable[[Tensor], Tensor]  # takes the cells of the grid out of a module's output


class GradientPass(TorchFunctionMode):
    """Asks, for each output, whether its grid gets gradient from the inputs of each output layer.

    Nothing is recorded before the first of the outputs, and nothing of weights: memory is that of the tail.
    The model's own no_grad and detach are ignored.

    Args:
        outputs: with different values.
        last: the output layers.
    """

    def __init__(self, outputs: Sequence[tuple[ModuleOutput, GridPart]], last: list[ModuleOutput]) -> None:
        super().__init__()
        self.outputs, self.last = outputs, last
        self.reached = [[False] * len(last) for _ in outputs]  # by output, by output layer
        self._recording = False
        self._leaves: list[Tensor] = []
        self._entering: list[list[Tensor]] = [[] for _ in last]
        self._current = 0  # the output layer whose gradient is computed

    def run(self, model: nn.Module, example: Tensor) -> list[list[bool]]:
        """Return by output, by output layer, whether any gradient reaches the grid."""
        try:
            self._run(model, example)
        finally:  # the graph's hooks refer to this object: a circle that no garbage collection sees
            self._leaves.clear()
            self._entering.clear()
        return self.reached

    def _run(self, model: nn.Module, example: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad(), plain_layers(), eval_mode(model) as handles:
            for index, (output, _) in enumerate(self.outputs):
                take = _at_call(output.call, partial(self._take, index))
                handles.append(output.module.register_forward_hook(take))
            for index, layer in enumerate(self.last):
                enter = _at_call(layer.call, partial(self._enter, index))
                handles.append(layer.module.register_forward_pre_hook(enter, with_kwargs=True))
            with self:
                logits = logits_of(model(example.detach().clone()), len(example))
        for index, entering in enumerate(self._entering):
            self._current = index
            scores = entering if self.last[index].inputs else [logits]
            self._differentiate(scores, keep=index + 1 < len(self.last))

    def _take(self, index: int, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self._recording = True
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            if not out.requires_grad:
                self._leaves.append(out.detach().requires_grad_())
                out = self._leaves[-1].clone()  # a leaf could not be changed in place
            out.register_hook(partial(self._note, index))
            return out

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._entering[index] = list(tensors_in((args, kwargs)))

    def _note(self, index: int, gradient: Tensor) -> None:
        if bool(self.outputs[index][1](gradient).any()):
            self.reached[index][self._current] = True

    def _differentiate(self, scores: list[Tensor], *, keep: bool) -> None:
        scores = [tensor for tensor in scores if tensor.requires_grad]
        generator = torch.Generator().manual_seed(0)
        noise = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in scores]
        if scores and self._leaves:
            torch.autograd.grad(scores, self._leaves, noise, allow_unused=True, retain_graph=keep)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._recording:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(nn.Parameter, Tensor.detach, (args, kwargs or {}))
        with torch.inference_mode(False), torch.enable_grad():
            is_cut = getattr(func, "__name__", "") == "detach"
            return args[0].view_as(args[0]) if is_cut else func(*args, **kwargs)


def _at_call(number: int, hook: Any) -> Any:
    """Make the hook act at the module's call of that number in this thread alone."""
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return hook(*args) if calls == number else None

    return in_this_thread(counted)
