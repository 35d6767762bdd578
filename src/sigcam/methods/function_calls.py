"""FunctionCalls: a function of images as a module in which calls of torch functions are modules too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sigcam.core.errors import ConfigError
from sigcam.network.trace import agree

Arguments = dict[str, Any]
Rewriter = Callable[[str, tuple[Any, ...], Arguments], Callable[[], Tensor] | None]
Chooser = Callable[[str, tuple[Any, ...], Arguments, list[Tensor]], nn.Module | None]


class NoRule(Exception):
    """A function for which a method has no rule, and whose result depends on the image."""


class FunctionCalls(nn.Module):
    """Runs `function`; hooks on a module that `choose` returns for a call of a torch function see the call.

    Methods that hook modules work with it whatever a network calls: functions instead of modules, a module
    several times, or in place. The network's own modules get no hook, and only these modules are visible.

    Args:
        choose: takes the function's name, its arguments and those of them that depend on the image. To a
            module with `gated = True`, all of these but the largest are constants.
        rewrite: returns what to run in place of a call of a function, if anything.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        choose: Chooser,
        images: Tensor,
        rewrite: Rewriter = lambda name, args, kwargs: None,
    ) -> None:
        super().__init__()
        self.calls = nn.ModuleList()
        self.function, self.choose, self.rewrite = function, choose, rewrite
        leaf = images.detach().clone().requires_grad_()
        with torch.enable_grad():
            plain = function(leaf)
            with _Routing(self, adding=True):
                routed = function(leaf)
        if not agree(routed.detach(), plain.detach()):
            raise ConfigError("this network changes tensors in place in a way that cannot be followed.")

    def forward(self, images: Tensor) -> Tensor:
        """Return the function's value, through the modules."""
        with torch.enable_grad(), _Routing(self) as routing:
            out = self.function(images)
        if routing.done != len(self.calls):
            raise ConfigError("this network does not run the same functions in each pass.")
        return out


class _Routing(TorchFunctionMode):
    """Sends calls of torch functions through the modules, in order; with `adding`, makes these first."""

    def __init__(self, calls: FunctionCalls, *, adding: bool = False) -> None:
        super().__init__()
        self.owner, self.adding, self.done = calls, adding, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        varied = [i for i, leaf in enumerate(leaves) if depends_on_image(leaf)]
        if not varied or name == "__get__":
            return func(*args, **kwargs)
        instead = self.owner.rewrite(name, args, kwargs)
        if instead is not None:
            with self:
                return instead()
        try:
            module = self.owner.choose(name, args, kwargs, [leaves[i] for i in varied])
        except NoRule:
            out = func(*args, **kwargs)
            if any(map(depends_on_image, pytree.tree_leaves(out))):
                raise
            return out  # such as a size or a comparison
        if module is None:
            return func(*args, **kwargs)
        if self.adding:
            self.owner.calls.append(module)
        elif self.done == len(self.owner.calls):
            raise ConfigError("this network does not run the same functions in each pass.")
        module, self.done = self.owner.calls[self.done], self.done + 1

        def run(*tensors: Tensor) -> Tensor:
            called, largest = list(leaves), max(tensors, key=Tensor.numel)
            if getattr(module, "gated", False):
                tensors = tuple(t if t is largest else t.detach() for t in tensors)
            for i, tensor in zip(varied, tensors, strict=True):
                called[i] = tensor.clone()  # it may be changed in place
            again, named = pytree.tree_unflatten(called, spec)
            out: Tensor = func(*again, **named)
            return out

        module.forward = run
        try:
            return module(
                *(leaves[i].view_as(leaves[i]) for i in varied)
            )  # for hooks that see this call alone
        finally:
            del module.forward


def depends_on_image(leaf: Any) -> bool:
    """Whether it is a tensor through which gradient flows to the images."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter)
