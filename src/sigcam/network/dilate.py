"""Finer maps by removing the last stride and dilating what follows, in a copy that shares the weights.

The fine map holds the coarse map's cells unchanged, with new cells between them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import ConfigError
from sigcam.core.files import error_line
from sigcam.core.memory import is_out_of_memory
from sigcam.core.types import GridSize
from sigcam.network.dual import DualBranch
from sigcam.network.modules import is_within
from sigcam.network.pass_memory import no_side_effects
from sigcam.network.trace import ModuleOutput, listed, run_traced
from sigcam.network.zoom import grid_of, shared_copy

Pair = tuple[int, int]  # rows, columns of a kernel, stride or padding
_PLANS: weakref.WeakKeyDictionary[DualBranch, tuple[Change, ...]] = weakref.WeakKeyDictionary()

# functions that mix cells: outside of a module with a stride or dilation they cannot be adjusted
_FUNCTIONS = (
    "conv2d conv_transpose2d max_pool2d avg_pool2d lp_pool2d unfold fold pad interpolate grid_sample "
    "pixel_shuffle pixel_unshuffle roll scaled_dot_product_attention multi_head_attention_forward matmul "
    "__matmul__ bmm baddbmm einsum lstm gru rnn_tanh rnn_relu"
)
_MIXING = frozenset(_FUNCTIONS.split())


@dataclass(frozen=True)
class Change:
    """A change of one module: its stride halved, its dilation doubled, or its pooling made global."""

    name: str
    kind: Literal["stride", "dilation", "global"]
    before: Pair = (0, 0)  # cells of padding added to its input, (rows, columns)
    after: Pair = (0, 0)


class _CannotDilate(Exception):
    """The reason why stride 1 is not possible."""


def dilated(net: DualBranch) -> DualBranch:
    """Return a network whose F is twice as fine each way: the last stride before F is removed, and all later
    windows are dilated to match.

    Every second cell of the fine F equals the coarse F, up to rounding; only layers that read all cells of
    the last stage at once (squeeze-and-excitation, group norm) see more of them. Windows of 2 give 2P - 1
    cells, none of which reads past the image's edge: padding to 2P would shift the map by half a fine cell.
    """
    try:
        if net.split.fold.layout not in ("NCHW", "NHWC"):
            raise _CannotDilate("its features are tokens, not the output of convolutions")
        with no_side_effects():
            plan, model = _PLANS.get(net), shared_copy(net.model)
            if plan is None:
                _PLANS[net] = _make_plan(net, model)
            for change in plan or ():
                _apply(change, model.get_submodule(change.name))
    except _CannotDilate as reason:
        text = f"stride=1 is not possible for this {type(net.model).__name__}: {reason}."
        raise ConfigError(f"{text} Use zoom= for a finer map.") from reason
    return net.with_model(model)


def _make_plan(net: DualBranch, model: nn.Module) -> tuple[Change, ...]:
    """Find the changes, apply them to the copy and check its finer grid."""
    rows, columns = grid_of(net, net.example)
    try:
        plan = _Planner(net, model).plan()
        features = net.with_model(model).run(net.example).features
    except _CannotDilate:
        raise
    except Exception as error:  # any user network, any failure
        if is_out_of_memory(error):
            raise
        reason = "it cannot be traced, or does not run on a finer grid"
        raise _CannotDilate(f"{reason} ({error_line(error)})") from error
    fine = features.shape[-2:]
    if not all(n < m and m in (2 * n - 1, 2 * n) for n, m in zip((rows, columns), fine, strict=True)):
        raise _CannotDilate(f"its map would be {fine[0]}x{fine[1]} instead of {rows}x{columns}")
    if not bool(torch.isfinite(features).all()):
        raise _CannotDilate("its finer map is not finite")
    return plan


@dataclass(frozen=True)
class _Trial:
    """A module run alone on noise, before and after its stride is halved."""

    output: ModuleOutput
    noise: Tensor
    expected: Tensor  # before
    size: GridSize  # after
    phase: Pair  # the cell of the new output that equals the first cell of the old


class _Planner:
    """Finds the changes from one traced pass and applies them to the copy, checking each module alone."""

    def __init__(self, net: DualBranch, model: nn.Module) -> None:
        self.net, self.model, (self.trace, _) = net, model, run_traced(model, net.example)
        self.odd = [0, 0]  # 1 where the finer grid has 2P - 1 cells
        recorded = {value for call in self.trace.calls for value in call.outputs}
        steps = [(call.time, call.inputs, call.outputs, call.name) for call in self.trace.calls]
        steps += [  # an autograd function of the user's, which no function mode sees
            (o.end, o.inputs, (o.value,), "") for o in self.trace.outputs if o.value not in recorded
        ]
        self.steps = sorted(steps, key=lambda step: step[0])
        self.spatial = [o for o in self.trace.outputs if _window(o.module) is not None]
        layer = net.split.layer, net.split.call
        self.features = next(o for o in self.trace.outputs if (o.name, o.call) == layer)
        self.grid = GridSize.of(
            net.split.fold(torch.empty(self.features.shape, device="meta"), GridSize.of(net.example))
        )

    def plan(self) -> tuple[Change, ...]:
        strided = self.last_strided()
        reached = self.reached({o.value for o in strided})
        later = [o for o in self.spatial if reached & {*o.inputs} and o not in strided and self.has_window(o)]
        self.check_reach(strided, later, reached)
        return *self.halve(strided), *(self.dilate(o) for o in {o.module: o for o in later}.values())

    def reached(self, values: set[int]) -> set[int]:
        """The values and all that are computed from them, up to pooling to a fixed grid."""
        reached = set(values)
        for _, inputs, outputs, name in self.steps:
            if not reached.isdisjoint(inputs) and not name.startswith("adaptive_"):
                reached.update(outputs)
        return reached

    def last_strided(self) -> list[ModuleOutput]:
        """The last strided modules before F, and parallel ones, whose outputs may be joined after F."""
        strided = [o for o in self.spatial if max(_pair(o.module.stride)) > 1]
        after = {id(o): self.reached({o.value}) for o in strided}
        before = [o for o in strided if self.features.value in after[id(o)]]
        last = [o for o in before if not any(after[id(o)] & {*p.inputs} for p in before if p is not o)]
        if not last:
            raise _CannotDilate("no convolution or pooling module before its features has a stride")
        grids = {o.shape[-2:] for o in last}
        downstream = set[int]().union(*(after[id(o)] for o in last))
        parallel = [o for o in strided if o not in before and not downstream & {*o.inputs}]
        return last + [o for o in parallel if o.shape[-2:] in grids]

    def has_window(self, output: ModuleOutput) -> bool:
        return max(_window(output.module) or (1, 1)) > 1 and self.input_shape(output)[-2:].numel() > 1

    def input_shape(self, output: ModuleOutput) -> torch.Size:
        return self.trace.flow.shapes[output.inputs[0]]

    def check_reach(self, strided: list[ModuleOutput], later: list[ModuleOutput], reached: set[int]) -> None:
        """Refuse models where changing these modules would miss a step, or change one twice."""
        for o in (*strided, *later):
            calls = [p for p in self.spatial if p.module is o.module]
            if len(calls) > 1 and (o in strided or not all(p in later for p in calls)):
                raise _CannotDilate(f"{o.name!r} runs several times in one pass")
            if any(is_within(o.name, head) for head in self.net.split.heads):
                raise _CannotDilate(f"its head reads neighbouring cells, in {o.name!r}")
        inside, mixing = [(o.start, o.end) for o in self.spatial], dict[str, None]()
        for time, inputs, outputs, name in self.steps:
            if name in _MIXING and not reached.isdisjoint(inputs):
                in_module = any(start < time < end for start, end in inside)
                if not in_module and self.features.value in self.reached(set(outputs)):
                    mixing[name] = None
        if mixing:
            raise _CannotDilate(f"its last stage uses {listed(mixing)}, with no stride or dilation to change")
        narrowed = any(o.shape[-2:] != self.input_shape(o)[-2:] for o in later)
        for o in strided:
            if tuple(o.shape[-2:]) != self.grid and not narrowed:
                raise _CannotDilate(f"the grid shrinks between {o.name!r} and its features, in no module")

    def halve(self, strided: list[ModuleOutput]) -> list[Change]:
        """Halve the strides; pad parallel modules so that their outputs have one size and alignment."""
        trials = [self.trial(o) for o in strided]
        before, after = dict[str, list[int]](), dict[str, list[int]]()
        phase = [max(t.phase[axis] for t in trials) for axis in (0, 1)]
        for axis in (0, 1):
            sizes = [t.size[axis] - t.phase[axis] for t in trials]
            sizes += [2 * t.expected.shape[axis - 2] - 1 for t in trials]
            size = max(sizes) + phase[axis]
            self.odd[axis] = size % 2
            for t in trials:
                first, step = phase[axis] - t.phase[axis], _pair(t.output.module.stride)[axis] // 2
                before.setdefault(t.output.name, []).append(first * step)
                after.setdefault(t.output.name, []).append((size - t.size[axis] - first) * step)
        changes = [Change(n, "stride", _pair(before[n]), _pair(after[n])) for n in before]
        for change, t in zip(changes, trials, strict=True):
            self.apply(change, t.noise, phase, t.expected)
        return changes

    def trial(self, output: ModuleOutput) -> _Trial:
        """Run the module on noise with its stride halved and nothing else changed."""
        module = self.model.get_submodule(output.name)
        if any(step % 2 for step in _pair(module.stride)):
            raise _CannotDilate(f"the stride of {output.name!r} is {_pair(module.stride)}, not 2")
        noise = _random(self.input_shape(output), output)
        _apply(Change(output.name, "stride"), alone := _alone(module))
        expected, actual = module.forward(noise), alone.forward(noise)
        # TensorFlow's "same" padding moves to the left when the stride is removed
        phases = (k for k in product((0, 1), (0, 1)) if _agree(actual[..., k[0] :: 2, k[1] :: 2], expected))
        return _Trial(output, noise, expected, GridSize.of(actual), next(phases, (0, 0)))

    def dilate(self, output: ModuleOutput) -> Change:
        """Double the dilation; checked on noise against the old window on every second cell."""
        module = self.model.get_submodule(output.name)
        shape, window = self.input_shape(output), _window(module)
        assert window is not None
        pools = isinstance(module, nn.MaxPool2d | nn.AvgPool2d)
        if pools and window[0] >= shape[-2] and window[1] >= shape[-1] and output.shape[2:].numel() == 1:
            _apply(change := Change(output.name, "global"), module)
            return change
        sides = (2 * shape[2] - self.odd[0], 2 * shape[3] - self.odd[1])
        fine = _random(torch.Size((*shape[:2], *sides)), output)
        expected = module.forward(fine[..., ::2, ::2])
        change = Change(output.name, "dilation")
        _apply(change, alone := _alone(module))
        size = alone.forward(fine).shape[-2:]
        short = [max(0, 2 * n - 1 - m) for n, m in zip(expected.shape[-2:], size, strict=True)]
        steps = _pair(module.stride)
        change = replace(change, after=(short[0] * steps[0], short[1] * steps[1]))  # as ceil_mode did
        self.apply(change, fine, (0, 0), expected)
        return change

    def apply(self, change: Change, noise: Tensor, phase: Sequence[int], expected: Tensor) -> None:
        """Change a module of the copy; every second cell of its output for noise must be as expected."""
        module = self.model.get_submodule(change.name)
        _apply(change, module)
        actual = module.forward(noise)  # without the user's hooks
        if not _agree(actual[..., phase[0] :: 2, phase[1] :: 2], expected):
            raise _CannotDilate(_inexact(change.name, module))


def _alone(module: nn.Module) -> nn.Module:
    """A shallow copy of the module; copy.copy refuses one with parametrised weights."""
    other = nn.Module.__new__(type(module))
    other.__dict__.update(vars(module))
    return other


def _random(shape: torch.Size, like: ModuleOutput) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(like.device, like.dtype)


def _agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether both are equal at the precision of a GPU's convolutions; another cell's value is far off."""
    same_shape = actual.shape == expected.shape
    return same_shape and bool((actual - expected).abs().max() <= 0.01 * expected.abs().max())


def _pair(value: Any) -> Pair:
    return (int(value[0]), int(value[-1])) if isinstance(value, tuple | list) else (int(value), int(value))


def _window(module: nn.Module) -> Pair | None:
    """The window of a module that reads neighbouring cells and whose stride can be changed; else None."""
    if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
        return _pair(module.kernel_size)
    if type(module).__name__ == "BlurPool2d" and hasattr(module, "stride"):  # timm's
        return (2, 2)
    return None


def _apply(change: Change, module: nn.Module) -> None:
    """Change a module of a copy; by its attributes where they suffice, since others may read them."""
    target: Any = module  # whose forward may be replaced
    pads = (change.before[1], change.after[1], change.before[0], change.after[0])
    factor = 2 if change.kind == "dilation" else 1
    rows, columns = _pair(target.stride)
    stride = (rows // 2, columns // 2) if change.kind == "stride" else (rows, columns)
    if change.kind == "global":
        pool = F.adaptive_avg_pool2d if isinstance(module, nn.AvgPool2d) else F.adaptive_max_pool2d
        target.forward = partial(pool, output_size=1)
    elif isinstance(module, nn.AvgPool2d):
        target.forward = partial(_average, module, stride, factor, pads)
    elif isinstance(module, nn.MaxPool2d):
        rows, columns = _times(factor, module.padding)
        padding = (columns + pads[0], columns + pads[1], rows + pads[2], rows + pads[3])
        module.stride, module.dilation = stride, _times(factor, module.dilation)
        module.padding, module.ceil_mode = 0, False  # torch pads by half a window at most, dilated or not
        target.forward = partial(_padded, module.forward, padding, -math.inf)
    elif isinstance(module, nn.Conv2d):
        module.stride, module.dilation = stride, _times(factor, module.dilation)
        if not isinstance(module.padding, str):  # "same" follows the dilation by itself
            module.padding = _times(factor, module.padding)
            repeated = module._reversed_padding_repeated_twice
            module._reversed_padding_repeated_twice = [factor * n for n in repeated]
        if any(pads):
            target.forward = partial(_padded, module.forward, pads, 0.0)
    elif factor == 1 and not any(pads):
        target.stride = stride[0]
    else:
        raise _CannotDilate(_inexact(change.name, module))


def _inexact(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__}) cannot be made finer exactly"


def _times(factor: int, value: Any) -> Pair:
    rows, columns = _pair(value)
    return factor * rows, factor * columns


def _padded(forward: Callable[[Tensor], Tensor], pads: tuple[int, ...], fill: float, x: Tensor) -> Tensor:
    return forward(F.pad(x, pads, value=fill))


def _average(pool: nn.AvgPool2d, stride: Pair, dilation: int, pads: tuple[int, ...], x: Tensor) -> Tensor:
    """Average pooling with dilation, which torch's lacks; cells in `pads` are not counted."""
    window = x.new_ones(1, 1, *_pair(pool.kernel_size))
    rows, columns = _times(dilation, pool.padding)
    padding = (columns, columns, rows, rows)
    counted = F.pad(x.new_ones(1, 1, *x.shape[-2:]), padding, value=float(pool.count_include_pad))

    def total(values: Tensor) -> Tensor:
        return F.conv2d(F.pad(values, pads), window, stride=stride, dilation=dilation)

    sums = total(F.pad(x, padding).flatten(0, 1)[:, None])[:, 0].unflatten(0, x.shape[:2])
    averages: Tensor = sums / (pool.divisor_override or total(counted))
    return averages
