"""Make a private copy of a classifier that computes the same logits faster; each step is checked."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from sigcam.core.errors import AttachError
from sigcam.core.files import error_line
from sigcam.core.memory import is_out_of_memory
from sigcam.network.dataflow import tensors_in
from sigcam.network.modules import replace_module
from sigcam.network.trace import (
    Call,
    ModuleOutput,
    agree,
    are_layers_plain,
    lock_of,
    logits_of,
    run_traced,
)

log = logging.getLogger("sigcam")
MIN_PACKED = 2**14  # numbers in a linear layer: small ones gain nothing


def optimized(model: nn.Module, example: Tensor, *, keep: Collection[str] = ()) -> nn.Module:
    """Return a copy in eval mode with the same module names, whose logits agree within 1e-4 of their scale.

    Args:
        example: a (1, C, H, W) input; a step that changes its logits is not taken.
        keep: names of modules whose outputs must not change, such as F's layer.
    """
    try:
        with lock_of(model):
            tensors = [t for module in model.modules() for t in tensors_in(list(vars(module).values()))]
            computed = {id(t): t.detach().clone() for t in tensors if not t.is_leaf}  # pruning, weight norm
            best = deepcopy(model, computed)
    except Exception as error:  # any user network, any failure
        if is_out_of_memory(error):
            raise
        what = f"this {type(model).__name__} cannot be copied ({error_line(error)})"
        raise AttachError(f"{what}, so it cannot be optimised: attach it without optimize.") from error
    best.eval().requires_grad_(False).zero_grad()
    with torch.inference_mode(False), torch.no_grad():
        example = example.clone()  # a copy outside inference mode
        logits = _logits(best, example)
        for step in (_fold_batchnorm, _pack_layers, _fuse_activations):
            try:
                candidate = deepcopy(best)
                step(candidate, example, keep)
                if agree(_logits(candidate, example), logits):
                    best = candidate
            except Exception as error:  # `view` on channels-last maps, an attribute of a folded BatchNorm
                if is_out_of_memory(error):
                    raise
                log.debug("%s: %s", step.__name__, error)
    return best


def _logits(model: nn.Module, example: Tensor) -> Tensor:
    return logits_of(model(example.clone()), len(example))  # a model may change its input in place


class _Graph:
    """Which module made a value, and who reads it, from one traced pass."""

    def __init__(self, model: nn.Module, example: Tensor, keep: Collection[str]) -> None:
        self.trace, output = run_traced(model, example)
        self.keep = keep
        self.runs = Counter(o.module for o in self.trace.outputs)
        self.reads = Counter(value for call in self.trace.calls for value in call.inputs)
        self.makers = {value: call for call in self.trace.calls for value in call.outputs}
        self.returned = {self.trace.value(tensor) for tensor in tensors_in(output)}

    def private_maker(self, value: int) -> ModuleOutput | None:
        """The module that returns the value, if it runs once and the value is read once and is not kept."""
        same = [o for o in self.trace.outputs if o.value == value]  # the layer, and containers that end in it
        if not same or self.reads[value] != 1 or value in self.returned or self.runs[same[0].module] > 1:
            return None
        return None if any(o.name in self.keep or _is_hooked(o.module) for o in same) else same[0]


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _fold_batchnorm(model: nn.Module, example: Tensor, keep: Collection[str]) -> None:
    """Fold each BatchNorm that alone reads a convolution or linear layer into that layer's weights."""
    graph = _Graph(model, example, keep)
    for output in graph.trace.outputs:
        norm = output.module
        if not isinstance(norm, _BatchNorm) or graph.runs[norm] > 1 or _is_hooked(norm):
            continue
        call, rest = _normalising_call(graph, output)
        maker = graph.private_maker(call.inputs[0]) if call else None
        if maker is None or not _is_product(graph, maker):
            continue
        layer: Any = maker.module
        tensors = (layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        # in float64 on the CPU, since not every device has it; the formula holds for linear layers too
        doubles: Any = [t if t is None else t.detach().cpu().double() for t in tensors]
        w, b, mean, var, gamma, beta = doubles
        fused = fuse_conv_bn_weights(w, b, mean, var, norm.eps, gamma, beta)
        layer.weight, layer.bias = (nn.Parameter(t.to(layer.weight), requires_grad=False) for t in fused)
        replace_module(model, norm, (nn.Sequential(OrderedDict(rest)) if rest else nn.Identity()).eval())


def _normalising_call(graph: _Graph, norm: ModuleOutput) -> tuple[Call | None, list[tuple[str, nn.Module]]]:
    """The one batch_norm call of a module, and the children that follow it in a chain (timm's BatchNormAct2d
    drops and activates); None where it does anything else."""
    trace, module, rest = graph.trace, norm.module, list[tuple[str, nn.Module]]()
    inside = [call for call in trace.calls if norm.start < call.time < norm.end and call.name == "batch_norm"]
    statistics = [s for s in (module.running_mean, module.running_var) if isinstance(s, Tensor)]
    if len(inside) != 1 or len(statistics) != 2:
        return None, rest
    call = inside[0]
    if call.inputs[0] not in norm.inputs or call.inputs[1:3] != tuple(map(trace.value, statistics)):
        return None, rest
    value = call.outputs[0]
    for name, child in module.named_children():
        ran = [o for o in trace.outputs if o.module is child and norm.start < o.start < norm.end]
        if len(ran) != 1 or ran[0].inputs[:1] != (value,):
            return None, rest
        value = ran[0].value
        rest.append((name, child))
    return (call if value == norm.value else None), rest


def _is_product(graph: _Graph, layer: ModuleOutput) -> bool:
    """Whether the output is one product with the layer's own weight, which nothing else reads."""
    module = layer.module
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    if isinstance(module, nn.Linear) and len(layer.shape) != 2:
        return False  # of tokens, a BatchNorm1d normalises axis 1, which is not the layer's
    call = graph.makers.get(layer.value)
    if call is None or "weight" not in module._parameters:
        return False  # computed in every pass: weight norm, a parametrization, pruning
    parameters = tuple(graph.trace.value(p) for p in (module.weight, module.bias) if p is not None)
    product = call.name in ("linear", "conv1d", "conv2d", "conv3d") and call.inputs[1:] == parameters
    return product and all(graph.reads[value] == 1 for value in parameters)


Fused = tuple[str, list[float], str]  # an activation, its numbers and its form, in oneDNN's terms
NOTHING: Fused = ("none", [], "")


class _Packed:
    """A layer that keeps its weights in oneDNN's own order.

    It is a plain layer where a gradient is recorded, on another device or type, in `plain_layers`.
    """

    packed: tuple[tuple[Any, ...], Tensor] | None = None  # for such inputs, and this many threads
    activation: Fused = NOTHING  # fused into the layer

    def is_usual(self, input: Tensor) -> bool:
        """Whether the packed weights serve for this input."""
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        recorded = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        usual = input.dtype == weight.dtype == torch.float32 and input.device.type == "cpu"
        return usual and not (recorded or are_layers_plain() or torch.is_autocast_enabled("cpu"))

    def finished(self, out: Tensor) -> Tensor:
        """Mark the output for an activation that was fused."""
        out.activated = self.activation is not NOTHING  # type: ignore[attr-defined]
        return out

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.packed = None  # of weights as they were
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}  # cannot be copied


class PackedConv2d(_Packed, nn.Conv2d):
    """A packed convolution with channels-last maps."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_usual(input) or input.ndim != 4:
            return super().forward(input)
        geometry = (self.padding, self.stride, self.dilation, self.groups)
        key = (input.shape, torch.get_num_threads(), geometry)  # the best order depends on all
        if self.packed is None or self.packed[0] != key:
            reorder = torch.ops.aten.mkldnn_reorder_conv2d_weight
            self.packed = key, reorder(self.weight.detach().to_mkldnn(), *geometry, input.shape)
        last = input.contiguous(memory_format=torch.channels_last)
        convolve = torch.ops.mkldnn._convolution_pointwise
        return self.finished(convolve(last, self.packed[1], self.bias, *geometry, *self.activation))


class PackedLinear(_Packed, nn.Linear):
    """A packed linear layer; MKL, which torch uses, can take twice as long."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_usual(input) or not input.numel():
            return super().forward(input)
        key = (torch.get_num_threads(),)
        if self.packed is None or self.packed[0] != key:
            self.packed = key, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        multiply = torch.ops.mkldnn._linear_pointwise
        return self.finished(multiply(input.contiguous(), self.packed[1], self.bias, *self.activation))


def _pack_layers(model: nn.Module, example: Tensor, keep: Collection[str]) -> None:
    """Make weights channels-last, and convolutions and linear layers packed, where oneDNN computes."""
    plain = example.device.type == "cpu" and example.dtype == torch.float32
    if not plain or not torch.backends.mkldnn.is_available():
        return
    model.to(memory_format=torch.channels_last)
    for module in model.modules():
        if "weight" not in module._parameters:  # computed in every pass: weight norm, a parametrization
            continue
        if type(module) is nn.Conv2d and module.padding_mode == "zeros" and module.padding != "same":
            module.__class__ = PackedConv2d
        elif type(module) is nn.Linear and module.weight.numel() >= MIN_PACKED:
            module.__class__ = PackedLinear


class _SkipIfFused:
    """An activation that returns its input where the convolution before it has applied it."""

    def forward(self, input: Tensor) -> Tensor:
        if getattr(input, "activated", False):
            return input
        out: Tensor = super().forward(input)  # type: ignore[misc]
        return out


class _FusedReLU(_SkipIfFused, nn.ReLU):
    pass


class _FusedReLU6(_SkipIfFused, nn.ReLU6):
    pass


class _FusedGELU(_SkipIfFused, nn.GELU):
    pass


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.ReLU: _FusedReLU,
    nn.ReLU6: _FusedReLU6,
    nn.GELU: _FusedGELU,
}


def _in_onednn(activation: Any) -> Fused:
    """Return an activation in oneDNN's terms."""
    if isinstance(activation, nn.GELU):
        return "gelu", [], activation.approximate
    return ("hardtanh", [0.0, 6.0], "") if isinstance(activation, nn.ReLU6) else ("relu", [], "")


def _fuse_activations(model: nn.Module, example: Tensor, keep: Collection[str]) -> None:
    """Let a packed layer apply the activation that alone reads its output, which saves a pass over memory.
    The activation's module stays, for other inputs and where gradients are recorded."""
    graph = _Graph(model, example, keep)
    for reader in graph.trace.outputs:
        if type(reader.module) not in _FUSED or len(reader.inputs) != 1 or _is_hooked(reader.module):
            continue
        layer = graph.private_maker(reader.inputs[0])
        if layer and isinstance(layer.module, _Packed):
            layer.module.activation = _in_onednn(reader.module)
            model.hides_nan = True  # type: ignore[assignment]  # oneDNN's activations turn NaN into 0
    for module in model.modules():
        if type(module) in _FUSED and not _is_hooked(module):
            module.__class__ = _FUSED[type(module)]
