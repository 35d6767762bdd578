"""One compiled pass of a frozen network, for long jobs: logits, F and what enters the head."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sigcam.core.files import error_line
from sigcam.core.memory import is_out_of_memory
from sigcam.network.feature_layer import FeaturePoint
from sigcam.network.sigmoid_head import Inputs, on_tensors
from sigcam.network.split import Split
from sigcam.network.trace import agree, logits_of

log = logging.getLogger("sigcam")
MANY_IMAGES = 20_000  # from which on the compiler's time, up to half a minute, is well spent
COMPILED_BATCH = (
    8  # images in one compiled pass; smaller batches are filled up, since every size is compiled anew
)


@dataclass(frozen=True)
class CompiledOutputs:
    """What a hooked pass gives, from a compiled one."""

    points: tuple[FeaturePoint, ...]
    cuts: list[Tensor]
    inputs: list[Inputs]
    logits: Tensor
    outputs: tuple[Tensor, ...] = ()


class _Outputs(nn.Module):
    """A network that also returns the output of a layer and what enters its head."""

    def __init__(self, model: nn.Module, layer: str, head: str) -> None:
        super().__init__()
        self.model = model
        self.kept: Any = None
        self.entered: Any = None
        model.get_submodule(layer).register_forward_hook(self._keep)
        model.get_submodule(head).register_forward_pre_hook(self._enter, with_kwargs=True)

    def _keep(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.kept = out
        return out.clone()  # what follows may change it in place

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.entered = args, kwargs

    def forward(self, images: Tensor) -> tuple[Any, Tensor, Any]:
        return self.model(images), self.kept, self.entered


class CompiledPass:
    """Runs a copy of the network through `torch.compile`, with its weights as constants."""

    def __init__(self, model: nn.Module, split: Split, shape: torch.Size) -> None:
        private = copy.deepcopy(model).eval().requires_grad_(False).to(memory_format=torch.channels_last)
        self.point, self.shape = split.point, tuple(shape)
        outputs = _Outputs(private, split.layer, split.heads[0]).eval()
        options: Any = {"freezing": True}
        self.run: Callable[[Tensor], Any] = torch.compile(outputs, dynamic=False, options=options)

    def takes(self, points: Sequence[FeaturePoint], images: Tensor) -> bool:
        """Whether the compiled pass is for these features and images."""
        plain = images.dtype == torch.float32 and images.device.type == "cpu"
        plain = plain and not torch.is_autocast_enabled("cpu") and bool(len(images))
        return plain and tuple(points) == (self.point,) and tuple(images.shape[1:]) == self.shape

    def __call__(self, images: Tensor) -> CompiledOutputs:
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            parts = [self._run(part) for part in images.split(COMPILED_BATCH)]
        joined = parts[0]
        if len(parts) > 1:
            leaves, structure = zip(*map(pytree.tree_flatten, parts), strict=True)
            columns = zip(*leaves, strict=True)
            each = [torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns]
            joined = pytree.tree_unflatten(each, structure[0])
        output, kept, entered = joined
        return CompiledOutputs((self.point,), [kept], [entered], logits_of(output, len(images)))

    def _run(self, images: Tensor) -> Any:
        count = len(images)
        filled = (
            torch.cat([images, images[-1:].expand(COMPILED_BATCH - count, -1, -1, -1)])
            if count < COMPILED_BATCH
            else images
        )
        return on_tensors(lambda out: out[:count].clone(), self.run(filled.clone()))


def compiled(model: nn.Module, split: Split, example: Tensor) -> CompiledPass | None:
    """Return the compiled pass; None, after a warning, where this model or machine does not allow it."""
    reason = why_not(split, example)
    if reason is None:
        try:
            made = CompiledPass(model, split, example.shape[1:])
            with torch.no_grad():
                if agree(made(example).logits, logits_of(model(example.clone()), len(example))):
                    return made
            reason = "its logits differ from the network's"
        except Exception as error:  # of the compiler, or of any user's network
            if is_out_of_memory(error):
                raise
            reason = error_line(error)
    log.warning("not compiled, but optimised: %s.", reason.removesuffix("."))
    return None


def is_faster(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether the first call takes less time than the second: the best of three each, in turns."""
    seconds: list[list[float]] = [[], []]
    for _ in range(3):
        for call, times in zip((one, other), seconds, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return min(seconds[0]) < min(seconds[1])


def why_not(split: Split, example: Tensor) -> str | None:
    """Return why the network cannot be compiled; None if nothing is known against it."""
    if example.device.type != "cpu" or example.dtype != torch.float32:
        return "compiled passes are for float32 on a CPU"
    if split.activation or split.call != 1 or split.fold.batch_axis or len(split.heads) > 1:
        return "the layer's output cannot be taken in a compiled pass"
    return None
