"""Run a user's network in eval mode, under a lock, and record module outputs and torch functions."""

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sigcam.core.errors import AttachError, ExampleNeeded, NoLogits
from sigcam.core.files import error_line
from sigcam.core.memory import is_out_of_memory
from sigcam.core.types import GridSize
from sigcam.network.dataflow import Dataflow, tensors_in
from sigcam.network.modules import has_parameters, is_within

SIZES_TO_TRY = (224, 32, 28, 64, 96, 128, 256, 299, 384)  # after the sizes that the model declares
MAX_IMAGE_CHANNELS = 16  # a convolution with more inputs does not read the image
LOGIT_TOLERANCE = 1e-4  # of the largest logit: how near an optimised copy comes
MAX_LOGITS = 2**14  # numbers that may be logits in an output with more axes than (B, C)

_QUERIES = frozenset({"__get__", "size", "dim", "numel", "is_floating_point", "is_contiguous", "__len__"})
_PLAIN = ContextVar("plain", default=False)
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_GUARD = threading.Lock()  # networks that share a model share its lock, so neither can own it


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the one lock under which sigcam hooks into this model."""
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(model, threading.RLock())


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Make the hook do nothing where another thread runs the model."""
    thread = threading.get_ident()

    def limited(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return limited


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[list[Any]]:
    """Lock the model, in eval mode; on exit, restore the modes and remove the hooks in the yielded list."""
    handles: list[Any] = []
    with lock_of(model):
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            yield handles
        finally:
            for handle in handles:
                handle.remove()
            for module in training:
                module.training = True


@contextmanager
def plain_layers() -> Iterator[None]:
    """Let an optimised copy run its layers one by one, unpacked: as it was, only slower."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def are_layers_plain() -> bool:
    """Whether this is inside `plain_layers`."""
    return _PLAIN.get()


def chunks(images: Tensor) -> tuple[Tensor, ...]:
    """Split the batch into parts that suit its device. On a CPU, 8 images at a time can be twice as fast as
    32, whose activations take fresh memory pages."""
    return images.split(8) if images.device.type == "cpu" else (images,)


def logits_of(output: Any, batch: int) -> Tensor:
    """The (B, C) logits in a model's output: a tensor, a tuple, a dict, or an object with `.logits`."""
    logits = output
    if isinstance(output, Mapping):
        named = [output[key] for key in ("logits", "out", "output", "pred", "preds") if key in output]
        logits = named[0] if named else _first_flat(output.values(), output)
    elif not isinstance(output, Tensor) and hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, tuple | list):
        logits = _first_flat(output, output)
    if not isinstance(logits, Tensor):
        raise NoLogits(
            f"the model returned {type(output).__name__}, in which no logits were found. Let it return a "
            "tensor, a tuple that starts with it, a dict with 'logits', or an object with .logits."
        )
    if logits.ndim < 2 and (batch == 1 or logits.shape == (batch,)):
        return logits.reshape(batch, -1)  # squeezed: one logit per image, or one image
    if logits.ndim > 2 and logits.shape[2:].numel() == 1:
        logits = logits.flatten(1)
    if logits.ndim != 2 or logits.shape[0] != batch:
        raise NoLogits(
            f"the model returned {tuple(logits.shape)} for {batch} image(s), not (B, C) logits: sigcam "
            "explains image classifiers. Attach one, or let this model return its logits first."
        )
    return logits


def agree(logits: Tensor, expected: Tensor) -> bool:
    """Whether both are equal within 1e-4 of the largest logit; False if one is not finite."""
    scale = expected.double().abs().max().clamp(min=1e-12)
    return bool((logits.double() - expected.double()).abs().max() <= LOGIT_TOLERANCE * scale)


def _first_flat(values: Iterable[Any], default: Any) -> Any:
    """The first tensor that may be logits, skipping feature maps; else the first tensor."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    flat = [tensor for tensor in tensors if tensor.ndim <= 2 or tensor.shape[2:].numel() == 1]
    return next(iter(flat + tensors), default)


@dataclass(eq=False)
class ModuleOutput:
    """The output of one call of a module: what it was, not the tensor itself."""

    name: str
    module: nn.Module
    call: int
    value: int  # equal for outputs that are the same tensor, passed up through containers
    inputs: tuple[int, ...]  # values of its arguments
    start: int
    end: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    digest: bytes | None  # of its numbers in their order, whatever the shape; None if too many for logits


@dataclass
class Call:
    """One call of a torch function that returned or changed tensors."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    time: int


class Trace(TorchFunctionMode):
    """A record of one pass: module outputs in order of return, torch functions in order of call."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[ModuleOutput] = []
        self.calls: list[Call] = []
        self.flow = Dataflow()
        self.value = self.flow.value
        self.clock = 0
        self._open: dict[nn.Module, list[tuple[int, tuple[int, ...]]]] = {}
        self._counts: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the block."""
        with torch.inference_mode(False), torch.no_grad(), plain_layers(), self, self.flow:
            yield

    @cached_property
    def runs(self) -> dict[str, int]:
        """How often each module that returned a tensor ran."""
        return {output.name: output.call for output in self.outputs}  # the last call's number

    def last_output(self, name: str) -> ModuleOutput | None:
        """The last output of the module of that name."""
        return next((output for output in reversed(self.outputs) if output.name == name), None)

    def outermost(self, output: ModuleOutput, *, without: str | None = None) -> ModuleOutput:
        """The output of the outermost module, not around `without`, that runs once and returns the same."""
        same = [o for o in self.outputs if o.value == output.value and self.runs[o.name] == 1 and o.name]
        same = [o for o in same if without is None or not is_within(without, o.name)]
        return min(same, key=lambda o: (not has_parameters(o.module), o.name.count(".")), default=output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _QUERIES:  # most calls of all: `.shape`, `.dtype`
            out = func(*args, **(kwargs or {}))
            if not isinstance(out, Tensor):
                return out
        tensors = list(tensors_in((args, kwargs or {})))
        inputs = tuple(map(self.value, tensors))
        if torch.is_inference_mode_enabled():  # by the model itself; its tensors would have no versions
            with torch.inference_mode(False), torch.no_grad():
                out = func(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        made = [self.value(tensor) for tensor in tensors_in(out)]
        changed = [value for value in map(self.value, tensors) if value not in (*inputs, *made)]
        if made or changed:
            self.clock += 1
            self.calls.append(Call(name, inputs, (*made, *changed), self.clock))
        return out

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.clock += 1
        with torch._C.DisableTorchFunction():
            inputs = tuple(self.value(tensor) for tensor in tensors_in((args, kwargs)))
        self._open.setdefault(module, []).append((self.clock, inputs))

    def _leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        start, inputs = self._open[module].pop()
        self.clock += 1
        call = self._counts[name] = self._counts.get(name, 0) + 1
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if isinstance(out, Tensor) and out.dtype.is_floating_point:
                value = self.value(out)
                self.flow.link(value, inputs)
                facts = (value, inputs, start, self.clock, out.shape, out.dtype, out.device, digest(out))
                self.outputs.append(ModuleOutput(name, module, call, *facts))


def digest(tensor: Tensor) -> bytes | None:
    """A hash of the numbers in the tensor, as float32 and in their order; None if too many for logits."""
    if tensor.numel() > MAX_LOGITS and sum(size > 1 for size in tensor.shape[1:]) > 1:
        return None
    numbers = tensor.detach().to("cpu", torch.float32).contiguous() + 0.0  # -0.0 equals 0.0
    return hashlib.blake2b(numbers.numpy().data, digest_size=16).digest()


def run_traced(model: nn.Module, example: Tensor) -> tuple[Trace, Any]:
    """Run one eval-mode pass; return its trace and the model's output."""
    trace = Trace()
    with torch.inference_mode(False), eval_mode(model) as handles:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                what = f"{name or 'the model'} is a TorchScript module, which takes no hooks"
                raise AttachError(f"{what}: attach the eager model.")
            handles.append(module.register_forward_pre_hook(trace._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(trace._leave, name)))
        image = example.detach().clone()  # a model may change its input in place
        trace.value(image, given=True)
        with trace.recording():
            output = model(image)
    return trace, output


def probe_model(model: nn.Module, example: Tensor | None, seed: int) -> tuple[Tensor, Trace, Any]:
    """Run the model on the example, or on the first default one that it takes; return that one, too."""
    failures: dict[str, Exception] = {}
    for candidate in [example] if example is not None else default_examples(model, seed):
        if candidate.ndim != 4:
            raise AttachError(f"example must be (1, C, H, W), not {tuple(candidate.shape)}.")
        try:
            return candidate, *run_traced(model, candidate)
        except AttachError:
            raise
        except Exception as error:  # any user network, any failure: try the next size
            if is_out_of_memory(error):
                raise
            failures["x".join(map(str, candidate.shape[1:]))] = error
    failure = next(iter(failures.values()))
    raise (AttachError if example is not None else ExampleNeeded)(
        f"{type(model).__name__} could not be run on a random image of {listed(failures)} "
        f"({error_line(failure)}). Pass one: attach(model, example=tensor of (1, C, H, W))."
    ) from failure


def listed(words: Iterable[str], most: int = 10) -> str:
    """The first few words, separated by commas."""
    words = list(words)
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def default_examples(model: nn.Module, seed: int) -> Iterator[Tensor]:
    """Yield random (1, C, H, W) inputs to probe with: sizes that the model declares, then usual ones."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    channels, sizes = list[int](), list[GridSize]()
    for module in model.modules():
        for holder in (getattr(module, "patch_embed", None), module):  # timm's own size, torchvision's ViT
            for attribute in ("img_size", "image_size"):
                sizes += _as_size(getattr(holder, attribute, None))
        for cfg in (getattr(module, "pretrained_cfg", None), getattr(module, "default_cfg", None)):
            if isinstance(cfg, Mapping) and len(cfg.get("input_size") or ()) == 3:
                sizes += _as_size(cfg["input_size"][1:])
        sizes += _as_size(getattr(getattr(module, "config", None), "image_size", None))
        if isinstance(module, nn.Conv2d) and module.in_channels <= MAX_IMAGE_CHANNELS:
            channels.append(module.in_channels)
    generator = torch.Generator().manual_seed(seed)
    every_size = dict.fromkeys(sizes + [(size, size) for size in SIZES_TO_TRY])
    for depth, (height, width) in product(dict.fromkeys([*channels, 3, 1]), every_size):
        noise = torch.randn(1, depth, height, width, generator=generator)
        yield noise.to(device=weight.device, dtype=weight.dtype)


def _as_size(value: Any) -> list[GridSize]:
    if isinstance(value, int) and value > 1:
        return [GridSize(value, value)]
    pair = tuple(value) if isinstance(value, tuple | list) else ()
    return [GridSize(*pair)] if len(pair) == 2 and all(isinstance(v, int) and v > 1 for v in pair) else []
