"""Finer maps at stride 1: the last stride taken out of a copy that shares the weights, what follows it
spread, so that the fine map holds the coarse one's cells, unchanged, among those between them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import DataError
from sigcam.core.types import GridSize
from sigcam.network.dual import DualBranch
from sigcam.network.trace import ModuleOutput, Trace, eval_mode, listed, run_traced
from sigcam.network.zoom import grid_of, no_side_effects, said, shared_copy

Pair = tuple[int, int]  # of a kernel, stride or padding: rows, columns
_PLANS: weakref.WeakKeyDictionary[DualBranch, tuple[Change, ...]] = weakref.WeakKeyDictionary()

# functions that carry values from cell to cell: inside a module they are its own, elsewhere out of our reach
_FUNCTIONS = (
    "conv2d conv_transpose2d max_pool2d avg_pool2d lp_pool2d unfold fold pad interpolate grid_sample "
    "pixel_shuffle pixel_unshuffle roll scaled_dot_product_attention multi_head_attention_forward matmul "
    "__matmul__ bmm baddbmm einsum lstm gru rnn_tanh rnn_relu"
)
_MIXING = frozenset(_FUNCTIONS.split())


@dataclass(frozen=True)
class Change:
    """What becomes of one module: its stride halved, its window spread twice as wide, or made global.

    Args:
        before, after: cells of padding added to its input, (rows, columns).
    """

    name: str
    how: Literal["stride", "spread", "global"]
    before: Pair = (0, 0)
    after: Pair = (0, 0)


class _Refused(Exception):
    """Why stride 1 cannot be had."""


def dilated(net: DualBranch) -> DualBranch:
    """A network whose F is twice as fine each way: the last stride before F taken out, all later windows
    spread to match.

    Every second cell of the fine F is the coarse F, to rounding; only what looks at all cells of the last
    stage at once (squeeze-and-excitation, group norm) sees more of them. Windows of 2 give 2P - 1 cells, none
    of which looks past the image's edge: padding to 2P would shift the whole map by half a fine cell.
    """
    kind = type(net.model).__name__
    try:
        if net.split.fold.layout not in ("NCHW", "NHWC"):
            raise _Refused("its features are tokens, not the output of convolutions")
        with no_side_effects():
            plan, model = _PLANS.get(net), shared_copy(net.model)
            if plan is None:
                example = torch.randn(1, *net.input_shape, generator=torch.Generator().manual_seed(0))
                example = example.to(next(net.model.parameters()))
                plan = _planned(net, model, example)
                finer = _checked(net, net.with_model(model), example)
                _PLANS[net] = plan
            else:
                for change in plan:
                    _apply(change, model.get_submodule(change.name))
                finer = net.with_model(model)
    except _Refused as refusal:
        raise DataError(
            f"stride=1 cannot be had for this {kind}: {refusal}. Use zoom= for a finer map."
        ) from refusal
    return finer


def _planned(net: DualBranch, model: nn.Module, example: Tensor) -> tuple[Change, ...]:
    try:
        return _Planner(net, model, example).plan()
    except _Refused:
        raise
    except Exception as error:  # any user network, any failure
        raise _Refused(f"its steps cannot be followed ({said(error)})") from error


def _checked(net: DualBranch, finer: DualBranch, example: Tensor) -> DualBranch:
    rows, columns = grid_of(net, example)
    try:
        passage = finer.run(example)
    except Exception as error:  # any user network, any failure
        raise _Refused(f"it does not run on a finer grid ({said(error)})") from error
    fine = passage.features.shape[-2:]
    if not all(n < m and m in (2 * n - 1, 2 * n) for n, m in zip((rows, columns), fine, strict=True)):
        raise _Refused(f"its map would be {fine[0]}x{fine[1]} instead of {rows}x{columns}")
    if not bool(torch.isfinite(passage.features).all()):
        raise _Refused("its finer map is not finite")
    return finer


@dataclass(frozen=True)
class _Trial:
    """A module with half its stride, alone: what it returned for noise before, how much it returns now, and
    which of its first cells is the first of those."""

    output: ModuleOutput
    noise: Tensor
    wanted: Tensor
    size: GridSize
    phase: Pair


class _Planner:
    """Finds from one traced pass what must change, and changes it in the copy, each module checked alone."""

    def __init__(self, net: DualBranch, model: nn.Module, example: Tensor) -> None:
        self.net, self.model, self.shapes = net, model, dict[nn.Module, list[torch.Size]]()
        self.odd = [0, 0]  # 1 where the finer grid has 2P - 1 cells
        self.trace = self.traced(example)
        made = {value for call in self.trace.calls for value in call.outputs}
        steps = [(call.time, call.inputs, call.outputs, call.name) for call in self.trace.calls]
        steps += [  # by a function of the user's own, which no mode sees
            (o.end, o.inputs, (o.value,), "") for o in self.trace.outputs if o.value not in made
        ]
        self.steps = sorted(steps, key=lambda step: step[0])
        self.spatial = [o for o in self.trace.outputs if _window(o.module) is not None]
        layer = [o for o in self.trace.outputs if o.name == net.split.layer and o.call == net.split.call]
        self.features = layer[0]
        self.grid = GridSize.of(net.split.fold(self.features.tensor, GridSize.of(example)))

    def traced(self, example: Tensor) -> Trace:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                self.shapes.setdefault(module, []).append(args[0].shape)

        with eval_mode(self.model) as handles:
            for module in self.model.modules():
                if _window(module) is not None:
                    handles.append(module.register_forward_pre_hook(note))
            return run_traced(self.model, example)[0]

    def plan(self) -> tuple[Change, ...]:
        strided = self.last_strided()
        reached = self.reached({o.value for o in strided})
        later = [o for o in self.spatial if reached & {*o.inputs} and o not in strided and self.spreads(o)]
        self.check_reach(strided, later, reached)
        changes = self.halve(strided)
        changes += [self.spread(o) for o in {o.module: o for o in later}.values()]
        return tuple(changes)

    def reached(self, values: set[int]) -> set[int]:
        """The values and all that is computed from them, up to pooling to a fixed grid."""
        reached = set(values)
        for _, inputs, outputs, name in self.steps:
            if not reached.isdisjoint(inputs) and not name.startswith("adaptive_"):
                reached.update(outputs)
        return reached

    def last_strided(self) -> list[ModuleOutput]:
        """The strided modules before F with no other one between them and F, and those beside them, whose
        outputs may be joined after F."""
        strided = [o for o in self.spatial if max(_pair(o.module.stride)) > 1]
        after = {id(o): self.reached({o.value}) for o in strided}
        before = [o for o in strided if self.features.value in after[id(o)]]
        last = [o for o in before if not any(after[id(o)] & {*p.inputs} for p in before if p is not o)]
        if not last:
            raise _Refused("no convolution or pooling module before its features has a stride")
        grids = {o.tensor.shape[-2:] for o in last}
        downstream = set[int]().union(*(after[id(o)] for o in last))
        beside = [o for o in strided if o not in before and not downstream & {*o.inputs}]
        return last + [o for o in beside if o.tensor.shape[-2:] in grids]

    def spreads(self, output: ModuleOutput) -> bool:
        rows, columns = self.shapes[output.module][0][-2:]
        return max(_window(output.module) or (1, 1)) > 1 and rows * columns > 1

    def check_reach(self, strided: list[ModuleOutput], later: list[ModuleOutput], reached: set[int]) -> None:
        """Refuses what a change of these modules would not reach, or would reach twice."""
        touched = [*strided, *later]
        for o in touched:
            calls = [p for p in self.spatial if p.module is o.module]
            if len(calls) > 1 and (o in strided or not all(p in later for p in calls)):
                raise _Refused(f"{o.name!r} runs several times in one pass")
            if any(o.name == head or o.name.startswith(head + ".") for head in self.net.split.heads):
                raise _Refused(f"its head reads neighbouring cells, in {o.name!r}")
        inside, mixing = [(o.start, o.end) for o in self.spatial], dict[str, None]()
        for time, inputs, outputs, name in self.steps:
            if name in _MIXING and not reached.isdisjoint(inputs):
                own = any(start < time < end for start, end in inside)
                if not own and self.features.value in self.reached(set(outputs)):
                    mixing[name] = None
        if mixing:
            raise _Refused(f"its last stage uses {listed(mixing)}, with no stride or dilation to change")
        narrowed = any(o.tensor.shape[-2:] != self.shapes[o.module][0][-2:] for o in later)
        for o in strided:
            if GridSize.of(o.tensor) != self.grid and not narrowed:
                raise _Refused(f"the grid shrinks between {o.name!r} and its features, in no module")

    def halve(self, strided: list[ModuleOutput]) -> list[Change]:
        """Half the stride; what modules side by side return is padded to one size and one alignment."""
        trials = [self.trial(o) for o in strided]
        before, after = dict[str, list[int]](), dict[str, list[int]]()
        phase = [max(t.phase[axis] for t in trials) for axis in (0, 1)]
        for axis in (0, 1):
            sizes = [t.size[axis] - t.phase[axis] for t in trials]
            sizes += [2 * t.wanted.shape[axis - 2] - 1 for t in trials]
            size = max(sizes) + phase[axis]
            self.odd[axis] = size % 2
            for t in trials:
                first, step = phase[axis] - t.phase[axis], _pair(t.output.module.stride)[axis] // 2
                before.setdefault(t.output.name, []).append(first * step)
                after.setdefault(t.output.name, []).append((size - t.size[axis] - first) * step)
        changes = [Change(n, "stride", _pair(before[n]), _pair(after[n])) for n in before]
        for change, t in zip(changes, trials, strict=True):
            got = self.changed(change)(t.noise)
            self.check(t.output, got[..., phase[0] :: 2, phase[1] :: 2], t.wanted)
        return changes

    def trial(self, output: ModuleOutput) -> _Trial:
        """What becomes of noise when the module's stride is halved and nothing else."""
        module = self.model.get_submodule(output.name)
        if any(step % 2 for step in _pair(module.stride)):
            raise _Refused(f"the stride of {output.name!r} is {_pair(module.stride)}, not 2")
        noise = _noise(self.shapes[module][0], output.tensor)
        _apply(Change(output.name, "stride"), alone := _alone(module))
        wanted, got = module.forward(noise), alone.forward(noise)
        # padding of TensorFlow's 'same' kind goes to the left first when the stride goes
        phase = next(
            (k for k in product((0, 1), (0, 1)) if _agree(got[..., k[0] :: 2, k[1] :: 2], wanted)), (0, 0)
        )
        return _Trial(output, noise, wanted, GridSize.of(got), phase)

    def spread(self, output: ModuleOutput) -> Change:
        """The window twice as wide; checked on noise against the window as it was on every second cell."""
        module = self.model.get_submodule(output.name)
        shape, window = self.shapes[module][0], _window(module)
        assert window is not None
        pools = isinstance(module, nn.MaxPool2d | nn.AvgPool2d)
        if pools and window[0] >= shape[-2] and window[1] >= shape[-1] and output.tensor[0, 0].numel() == 1:
            change = Change(output.name, "global")
            self.changed(change)
            return change
        sides = (2 * shape[2] - self.odd[0], 2 * shape[3] - self.odd[1])
        fine = _noise(torch.Size((*shape[:2], *sides)), output.tensor)
        wanted = module.forward(fine[..., ::2, ::2])
        change = Change(output.name, "spread")
        _apply(change, alone := _alone(module))
        size = alone.forward(fine).shape[-2:]
        short = [max(0, 2 * n - 1 - m) for n, m in zip(wanted.shape[-2:], size, strict=True)]
        steps = _pair(module.stride)
        change = replace(change, after=(short[0] * steps[0], short[1] * steps[1]))  # rounded up, it was
        self.check(output, self.changed(change)(fine)[..., ::2, ::2], wanted)
        return change

    def changed(self, change: Change) -> Callable[..., Tensor]:
        module = self.model.get_submodule(change.name)
        _apply(change, module)
        forward: Callable[..., Tensor] = module.forward  # past the hooks, which are the user's
        return forward

    def check(self, output: ModuleOutput, got: Tensor, wanted: Tensor) -> None:
        if not _agree(got, wanted):
            raise _Refused(f"{output.name!r} ({type(output.module).__name__}) cannot be made finer exactly")


def _alone(module: nn.Module) -> nn.Module:
    """A copy of the module that shares all it has; copy.copy would refuse one with parametrised weights."""
    other = nn.Module.__new__(type(module))
    other.__dict__.update(vars(module))
    return other


def _noise(shape: torch.Size, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(like.device, like.dtype)


def _agree(got: Tensor, wanted: Tensor) -> bool:
    """Equal to rounding, at the precision of a GPU's convolutions; another cell's value would be far off."""
    if got.shape != wanted.shape:
        return False
    return bool((got - wanted).abs().max() <= 0.01 * wanted.abs().max())


def _pair(value: Any) -> Pair:
    return (int(value[0]), int(value[-1])) if isinstance(value, tuple | list) else (int(value), int(value))


def _window(module: nn.Module) -> Pair | None:
    """The extent of a module that reads neighbouring cells and whose stride we can change; else None."""
    if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
        return _pair(module.kernel_size)
    if type(module).__name__ == "BlurPool2d" and hasattr(module, "stride"):  # timm's
        return (2, 2)
    return None


def _apply(change: Change, module: Any) -> None:
    """Changes a module of a copy; attributes where they suffice, since others may read them."""
    pads = (change.before[1], change.after[1], change.before[0], change.after[0])
    factor = 2 if change.how == "spread" else 1
    rows, columns = _pair(module.stride)
    stride = (rows // 2, columns // 2) if change.how == "stride" else (rows, columns)
    if change.how == "global":
        _runs(module, _mean if isinstance(module, nn.AvgPool2d) else _max)
    elif isinstance(module, nn.AvgPool2d):
        _runs(module, partial(_average, module, stride, factor, pads))
    elif isinstance(module, nn.MaxPool2d):
        rows, columns = _times(factor, module.padding)
        own = (columns + pads[0], columns + pads[1], rows + pads[2], rows + pads[3])
        module.stride, module.dilation = stride, _times(factor, module.dilation)
        module.padding, module.ceil_mode = 0, False  # torch pads by half a window at most, dilated or not
        _runs(module, partial(_padded, module.forward, own, -math.inf))
    elif isinstance(module, nn.Conv2d):
        module.stride, module.dilation = stride, _times(factor, module.dilation)
        if not isinstance(module.padding, str):  # "same" follows the dilation by itself
            module.padding = _times(factor, module.padding)
            around = module._reversed_padding_repeated_twice
            module._reversed_padding_repeated_twice = [factor * n for n in around]
        if any(pads):
            _runs(module, partial(_padded, module.forward, pads, 0.0))
    elif factor == 1 and not any(pads):
        module.stride = stride[0]
    else:
        raise _Refused(f"{change.name!r} ({type(module).__name__}) cannot be made finer exactly")


def _runs(module: Any, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _times(factor: int, value: Any) -> Pair:
    rows, columns = _pair(value)
    return factor * rows, factor * columns


def _padded(forward: Callable[[Tensor], Tensor], pads: tuple[int, ...], fill: float, x: Tensor) -> Tensor:
    return forward(F.pad(x, pads, value=fill))


def _mean(x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


def _max(x: Tensor) -> Tensor:
    return x.amax((-2, -1), keepdim=True)


def _average(pool: nn.AvgPool2d, stride: Pair, dilation: int, pads: tuple[int, ...], x: Tensor) -> Tensor:
    """Average pooling with dilation, which torch's lacks; cells in `pads` count for nothing."""
    window = x.new_ones(1, 1, *_pair(pool.kernel_size))
    rows, columns = _times(dilation, pool.padding)
    own = (columns, columns, rows, rows)
    counted = F.pad(x.new_ones(1, 1, *x.shape[-2:]), own, value=float(pool.count_include_pad))

    def total(values: Tensor) -> Tensor:
        return F.conv2d(F.pad(values, pads), window, stride=stride, dilation=dilation)

    sums = total(F.pad(x, own).flatten(0, 1)[:, None])[:, 0].unflatten(0, x.shape[:2])
    averages: Tensor = sums / (pool.divisor_override or total(counted))
    return averages
