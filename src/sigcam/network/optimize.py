"""A private copy of a classifier that computes the same logits faster; each step is checked when taken."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sigcam.core.errors import AttachError
from sigcam.network.trace import Call, ModuleOutput, Trace, lock_of, logits_of, run_traced, tensors_in

log = logging.getLogger("sigcam")
LOGIT_TOLERANCE = 1e-4  # of the largest logit


def optimized(model: nn.Module, example: Tensor, *, keep: Collection[str] = ()) -> nn.Module:
    """A copy in eval mode with the same module names, whose logits agree within 1e-4 of their scale.

    Args:
        example: a (1, C, H, W) input; a step that changes its logits is not taken.
        keep: names of modules whose outputs must stay what they are, as that of a layer to be tapped.
    """
    try:
        with lock_of(model):
            kept = [t for module in model.modules() for t in tensors_in(list(vars(module).values()))]
            made = {id(t): t.detach().clone() for t in kept if not t.is_leaf}  # by pruning, weight norm
            best = deepcopy(model, made)
    except Exception as error:  # any user network, any failure
        raise AttachError(
            f"this {type(model).__name__} cannot be copied ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}), so that it cannot be optimised: attach it as it is."
        ) from error
    best.eval().requires_grad_(False).zero_grad()
    with torch.inference_mode(False), torch.no_grad():
        example = example.clone()  # it may have been made in inference mode
        wanted = _logits(best, example)
        for step in _STEPS:
            try:
                candidate = deepcopy(best)
                step(candidate, example, keep)
                taken = agree(_logits(candidate, example), wanted)
            except Exception as error:  # `view` on channels-last maps, an attribute of a folded BatchNorm
                log.debug("%s: %s", step.__name__, error)
                taken = False
            best = candidate if taken else best
    return best


def _logits(model: nn.Module, example: Tensor) -> Tensor:
    return logits_of(model(example.clone()), len(example))  # a model may change its input in place


def agree(logits: Tensor, wanted: Tensor) -> bool:
    """Whether both are equal within 1e-4 of the largest one; never, if one is not finite."""
    scale = wanted.double().abs().max().clamp(min=1e-12)
    return bool((logits.double() - wanted.double()).abs().max() <= LOGIT_TOLERANCE * scale)


# ------------------------------------------------------------------------------------------ folding BatchNorm


def _fold_batchnorm(model: nn.Module, example: Tensor, keep: Collection[str]) -> None:
    """Puts each BatchNorm that alone reads a convolution or linear layer into that layer's weights."""
    trace, output = run_traced(model, example)
    for layer, norm, rest in _pairs(trace, output, keep):
        mean, var = norm.running_mean, norm.running_var
        assert mean is not None and var is not None
        scale = (_double(var) + norm.eps).rsqrt()  # (N,)
        if norm.affine:
            scale = scale * _double(norm.weight)
        bias = -_double(mean) if layer.bias is None else _double(layer.bias) - _double(mean)
        bias = bias * scale + (_double(norm.bias) if norm.affine else 0.0)
        weight = _double(layer.weight) * scale.reshape(-1, *[1] * (layer.weight.ndim - 1))
        layer.weight, layer.bias = (
            nn.Parameter(value.to(layer.weight), requires_grad=False) for value in (weight, bias)
        )
        left = nn.Sequential(OrderedDict(rest)) if rest else nn.Identity()
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if child is norm:
                    setattr(parent, name, left.eval())


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()  # on the CPU: not every device has float64


_Pair = tuple[Any, _BatchNorm, list[tuple[str, nn.Module]]]  # a layer, its norm, modules inside the norm


def _pairs(trace: Trace, output: Any, keep: Collection[str]) -> Iterator[_Pair]:
    """Layers and the norms that can be folded into them, with what the norm does after normalising."""
    runs = Counter(o.module for o in trace.outputs)
    reads = Counter(value for call in trace.calls for value in call.inputs)
    makers = {value: call for call in trace.calls for value in call.outputs}
    returned = {trace.value(tensor) for tensor in tensors_in(output)}
    for norm in trace.outputs:
        if not isinstance(norm.module, _BatchNorm) or runs[norm.module] > 1 or _is_hooked(norm.module):
            continue
        found = _normalising(trace, norm)
        if found is None:
            continue
        call, rest = found
        value = call.inputs[0]
        same = [o for o in trace.outputs if o.value == value]  # the layer, and containers that end in it
        alone = reads[value] == 1 and value not in returned
        free = not any(o.name in keep or _is_hooked(o.module) for o in same)
        if same and alone and free and runs[same[0].module] == 1:
            layer = same[0]
            if value in makers and _is_foldable(trace, layer, makers[value], reads):
                yield layer.module, norm.module, rest


def _normalising(trace: Trace, norm: ModuleOutput) -> tuple[Call, list[tuple[str, nn.Module]]] | None:
    """The one batch_norm call of a module, by its running statistics, and the children that follow it in a
    chain (timm's BatchNormAct2d drops and activates); None where it does anything else."""
    inside = [call for call in trace.calls if norm.start < call.time < norm.end and call.name == "batch_norm"]
    module = norm.module
    stats = [s for s in (module.running_mean, module.running_var) if isinstance(s, Tensor)]
    if len(inside) != 1 or len(stats) != 2:
        return None
    call = inside[0]
    if call.inputs[0] not in norm.inputs or call.inputs[1:3] != tuple(map(trace.value, stats)):
        return None
    value, rest = call.outputs[0], list[tuple[str, nn.Module]]()
    for name, child in module.named_children():
        ran = [o for o in trace.outputs if o.module is child and norm.start < o.start < norm.end]
        if len(ran) != 1 or ran[0].inputs[:1] != (value,):
            return None
        value = ran[0].value
        rest.append((name, child))
    return (call, rest) if value == norm.value else None


def _is_foldable(trace: Trace, layer: ModuleOutput, call: Call, reads: Counter[int]) -> bool:
    """Whether the output is one product of the layer's own weight, which nothing else reads."""
    module = layer.module
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    if isinstance(module, nn.Linear) and layer.tensor.ndim != 2:
        return False  # of tokens, a BatchNorm1d normalises axis 1, which is not the layer's
    if "weight" not in module._parameters:
        return False  # made anew in every pass: weight norm, a parametrization, pruning
    own = tuple(trace.value(p) for p in (module.weight, module.bias) if p is not None)
    product = call.name in ("linear", "conv1d", "conv2d", "conv3d") and call.inputs[1:] == own
    return product and all(reads[value] == 1 for value in own)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


# -------------------------------------------------------------------------------------------- memory layout


class PackedConv2d(nn.Conv2d):
    """A convolution that keeps its weights in the order in which oneDNN reads them, and maps channels last.

    Where a gradient is recorded, or on another device or type, it is the plain one.
    """

    packed: tuple[tuple[int, ...], Tensor] | None = None  # for inputs of this shape, and these threads
    activation: tuple[str, list[float]] = ("none", [])  # that it computes along, in oneDNN's words

    def forward(self, input: Tensor) -> Tensor:
        recorded = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        usual = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu"
        if recorded or not usual or input.ndim != 4 or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        where = (self.padding, self.stride, self.dilation, self.groups)
        use = (*input.shape, torch.get_num_threads())  # the best order depends on them
        if self.packed is None or self.packed[0] != use:
            reorder = torch.ops.aten.mkldnn_reorder_conv2d_weight
            self.packed = use, reorder(self.weight.detach().to_mkldnn(), *where, input.shape)
        last = input.contiguous(memory_format=torch.channels_last)
        convolve = torch.ops.mkldnn._convolution_pointwise
        out: Tensor = convolve(last, self.packed[1], self.bias, *where, *self.activation, "")
        out.activated = self.activation[0] != "none"  # type: ignore[attr-defined]
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}  # cannot be copied


def _pack_convolutions(model: nn.Module, example: Tensor, keep: Collection[str]) -> None:
    """Channels-last weights, and packed ones, where oneDNN computes."""
    if (
        example.device.type != "cpu"
        or example.dtype != torch.float32
        or not torch.backends.mkldnn.is_available()
    ):
        return
    model.to(memory_format=torch.channels_last)
    for module in model.modules():
        plain = type(module) is nn.Conv2d and module.padding_mode == "zeros" and module.padding != "same"
        if plain and "weight" in module._parameters:
            module.__class__ = PackedConv2d


class _Spared:
    """An activation that is not computed where the convolution before it has done so."""

    def forward(self, input: Tensor) -> Tensor:
        if getattr(input, "activated", False):
            return input
        out: Tensor = super().forward(input)  # type: ignore[misc]
        return out


class SparedReLU(_Spared, nn.ReLU):
    """See `_Spared`."""


class SparedReLU6(_Spared, nn.ReLU6):
    """See `_Spared`."""


_FUSED: dict[type[nn.Module], tuple[type[nn.Module], tuple[str, list[float]]]] = {
    nn.ReLU: (SparedReLU, ("relu", [])),
    nn.ReLU6: (SparedReLU6, ("hardtanh", [0.0, 6.0])),
}


def _fuse_activations(model: nn.Module, example: Tensor, keep: Collection[str]) -> None:
    """Lets a packed convolution compute the activation that alone reads its output: one pass over memory
    less. The activation's module stays, for the outputs of others and where gradients are recorded."""
    trace, output = run_traced(model, example)
    runs = Counter(o.module for o in trace.outputs)
    reads = Counter(value for call in trace.calls for value in call.inputs)
    returned = {trace.value(tensor) for tensor in tensors_in(output)}
    for reader in trace.outputs:
        if type(reader.module) not in _FUSED or len(reader.inputs) != 1 or _is_hooked(reader.module):
            continue
        value = reader.inputs[0]
        same = [o for o in trace.outputs if o.value == value]
        if not same or not isinstance(same[0].module, PackedConv2d) or runs[same[0].module] > 1:
            continue
        free = not any(o.name in keep or _is_hooked(o.module) for o in same)
        if free and reads[value] == 1 and value not in returned:
            same[0].module.activation = _FUSED[type(reader.module)][1]
            model.hides_nan = True  # type: ignore[assignment]  # oneDNN's activations make it 0
    for module in model.modules():
        if type(module) in _FUSED and not _is_hooked(module):
            module.__class__ = _FUSED[type(module)][0]


_STEPS: tuple[Callable[[nn.Module, Tensor, Collection[str]], None], ...] = (
    _fold_batchnorm,
    _pack_convolutions,
    _fuse_activations,
)
