"""Which output of a traced network is F, the last feature map before its head, and how it folds."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError
from sigcam.core.memory import is_out_of_memory
from sigcam.core.types import GridSize
from sigcam.network.gradient_pass import GradientPass
from sigcam.network.modules import ACTIVATIONS, has_parameters, is_pooling
from sigcam.network.trace import ModuleOutput, Trace, listed, run_traced

MAX_PREFIX_TOKENS = 32  # class, distillation and register tokens in front of a grid
AxisOrder = Literal["NCHW", "NHWC", "NLC", "LNC"]  # here N is the batch, C the channels, L the tokens


@dataclass(frozen=True)
class FeatureLayout:
    """How a layer's output folds to a map: its axes, tokens before the grid, grid for a probed `image`."""

    layout: AxisOrder
    grid: GridSize
    image: GridSize
    prefix: int = 0

    def __call__(self, output: Tensor, image: GridSize) -> Tensor:
        """Fold the output to (B, N, P, Q), for an input of `image` (height, width) pixels."""
        if self.layout == "NCHW":
            return output
        if self.layout == "NHWC":
            return output.permute(0, 3, 1, 2)
        tokens = (output if self.layout == "NLC" else output.transpose(0, 1))[:, self.prefix :]  # (B, P*Q, N)
        rows, columns = self.grid_at(tokens.shape[1], image)
        return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, rows, columns)

    def grid_at(self, tokens: int, image: GridSize) -> GridSize:
        """(P, Q) of a sequence of `tokens` grid tokens: the probed grid, scaled as the image was."""
        if tokens == self.grid[0] * self.grid[1] and image == self.image:
            return self.grid
        expected = self.grid[0] * image[0] / self.image[0]
        divisors = (rows for rows in range(1, tokens + 1) if tokens % rows == 0)
        rows = min(divisors, key=lambda rows: abs(rows - expected))
        return GridSize(rows, tokens // rows)

    def grid_part(self, output: Tensor) -> Tensor:
        """The part of the output that the map is made of: all but the tokens before the grid."""
        if self.layout in ("NCHW", "NHWC"):
            return output
        return output[:, self.prefix :] if self.layout == "NLC" else output[self.prefix :]

    @property
    def batch_axis(self) -> int:
        """The axis of the layer's output that holds the images."""
        return 1 if self.layout == "LNC" else 0

    def unfold(self, features: Tensor, like: Tensor) -> Tensor:
        """Undo the fold of (R, N, P, Q) features; tokens before the grid come from `like`, (1, ...)."""
        if self.layout == "NCHW":
            return features
        if self.layout == "NHWC":
            return features.permute(0, 2, 3, 1)
        tokens = features.flatten(2).transpose(1, 2)  # (R, P*Q, N)
        before = (like if self.layout == "NLC" else like.transpose(0, 1))[:, : self.prefix]
        tokens = torch.cat([before.expand(len(features), -1, -1), tokens], 1)
        return tokens if self.layout == "NLC" else tokens.transpose(0, 1)


@dataclass(frozen=True)
class FeaturePoint:
    """Where features are taken: after a module's `call`-th call of a pass, or the activation that follows."""

    layer: str
    call: int
    activation: bool
    fold: FeatureLayout


# functions through which gradient passes whatever the numbers
_STEPS = "adaptive_avg_pool2d mean flatten view reshape permute transpose squeeze dropout contiguous"
_PASSING = frozenset(_STEPS.split())
Candidate = tuple[ModuleOutput, FeatureLayout]


class FeatureFinder:
    """Finds F in one trace: an output before the output layers, `last`."""

    def __init__(
        self, model: nn.Module, trace: Trace, logits: Tensor, example: Tensor, last: list[ModuleOutput]
    ) -> None:
        self.model, self.trace, self.logits, self.example, self.last = model, trace, logits, example, last
        self.image, self.kind = GridSize.of(example), type(model).__name__
        self.candidates = self.find_candidates()
        values = [o.value for o, _ in self.candidates]
        flow, entering = trace.flow, [o.inputs or (trace.value(logits),) for o in last]
        self._ancestors, self._live = flow.ancestors(values), flow.ancestors(values, live=True)
        self._reaching = [flow.reaching(inputs, live=True) for inputs in entering]
        self._tested: dict[int, list[bool]] = {}  # value -> by output layer, whether its grid gets gradient
        self._doubts_all = False
        self.alive = self.find_alive()

    def find_alive(self) -> list[Candidate]:
        """The candidates whose grid gets gradient from the output layers' inputs (a CLS-pooled last block's
        does not); of several output layers, from as many as any candidate.

        Where tokens precede the grid, the last candidates are tested in a pass that records gradients. What
        one of these was computed from is taken to get gradient, too: testing it would record all of a pass.
        """
        count = 12
        while True:
            alive = [self._alive(index) for index in range(len(self.last))]
            open_ = [c for c in self._untested() if self._is_open(c[0].value, alive)]
            if not open_:
                break
            self._test(open_[-count:])
            count *= 4
        heads = {o.value: sum(o.value in reached for reached in alive) for o, _ in self.candidates}
        most = max(heads.values(), default=0)
        return [(o, fold) for o, fold in self.candidates if 0 < heads[o.value] == most]

    def _alive(self, index: int) -> set[int]:
        """The values that get gradient from one output layer, as far as is known."""
        known, reaching = set[int](), self._reaching[index]
        for output, fold in reversed(self.candidates):
            value = output.value
            if value in self._tested:
                alive = self._tested[value][index]
            elif self._is_doubtful(fold):
                alive = any(value in self._live[later] for later in known)
            else:
                alive = True
            if alive and value in reaching:
                known.add(value)
        return known

    def _is_doubtful(self, fold: FeatureLayout) -> bool:
        """Whether all of the gradient may be that of the tokens before the grid."""
        return fold.prefix > 0 or self._doubts_all

    def _is_open(self, value: int, alive: list[set[int]]) -> bool:
        return any(value in r and value not in a for r, a in zip(self._reaching, alive, strict=True))

    def _untested(self) -> list[Candidate]:
        """The first output of each value that is doubtful and not yet tested."""
        first = {o.value: (o, fold) for o, fold in reversed(self.candidates)}
        doubtful = [pair for pair in first.values() if self._is_doubtful(pair[1])]
        return [pair for pair in reversed(doubtful) if pair[0].value not in self._tested]

    def _test(self, candidates: list[Candidate]) -> None:
        parts = [(output, fold.grid_part) for output, fold in candidates]
        reached = GradientPass(parts, self.last).run(self.model, self.example)
        self._tested.update((o.value, heads) for (o, _), heads in zip(candidates, reached, strict=True))

    def last_layer(self) -> Candidate:
        """The last spatial output through which gradient is seen to pass."""
        while True:
            output, fold = self._last_alive()
            if output.value not in self._tested and not self._is_sure(output, fold):
                self._test([(output, fold)])
            if any(self._tested.get(output.value, [True])):
                return output, fold
            self._doubts_all = True  # numbers, such as those of a dead activation, stop the gradient
            self.alive = self.find_alive()

    def _is_sure(self, output: ModuleOutput, fold: FeatureLayout) -> bool:
        """Whether no step between the output and the output layers can stop the gradient of all cells."""
        begin = min(o.start for o in self.last)
        steps = {call.name for call in self.trace.calls if output.end < call.time < begin}
        return not self._is_doubtful(fold) and steps <= _PASSING

    def _last_alive(self) -> Candidate:
        """The last spatial output; where several end side by side, the last that all of them come from."""
        if not self.alive and any(self.has_one_cell(output) for output in self.trace.outputs):
            raise AttachError(
                f"every layer of {self.kind} that could give a map has 1 x 1 cells at {self.image.height} x "
                f"{self.image.width}: use a larger image, attach(model, example=...)."
            )
        if not self.alive:
            raise AttachError(
                f"no layer of {self.kind} before its head {self.last[0].name!r} gives a map (B, N, P, Q) "
                "that gets gradient. Name one: attach(model, layer='...')."
            )
        alive = {output.value for output, _ in self.alive}
        ancestors = {value: self._ancestors[value] & alive for value in alive}
        ends = set(ancestors).difference(*ancestors.values())
        if len(ends) == 1:
            return next((o, fold) for o, fold in self.alive if o.value in ends)
        common = set.intersection(*(ancestors[value] for value in ends))
        shared = [(o, fold) for o, fold in self.alive if o.value in common]
        if shared:
            return shared[-1]
        outermost = (self.trace.outermost(o) for o, _ in self.alive if o.value in ends)
        names = ", ".join(dict.fromkeys(repr(o.name) for o in outermost))
        what = f"several layers of {self.kind} feed its head: {names}"
        raise AttachError(f"{what}. Name one: attach(model, layer='...').")

    def named_layer(self, name: str) -> Candidate:
        """The output of the module that `layer=` names."""
        names = dict.fromkeys(repr(self.trace.outermost(o).name) for o, _ in self.alive[::-1])
        valid = f"Layers that do: {listed(names, most=3) or 'none'}."
        output = self.trace.last_output(name)
        if output is None:
            raise AttachError(f"layer={name!r} did not run, or returned no tensor, so gives no map. {valid}")
        maps = [fold.grid for _, fold in self.candidates if fold.layout in ("NCHW", "NHWC")]
        fold = self.layout_of(output, maps, {fold.prefix for _, fold in self.candidates})
        if fold is None and self.has_one_cell(output):
            fold = FeatureLayout("NCHW", GridSize(1, 1), self.image)  # a map, if a coarse one
        if fold is None:
            kind, shape = type(output.module).__name__, tuple(output.shape)
            what = f"layer={name!r} ({kind}) returns {shape}"
            raise AttachError(f"{what}, which does not fold to a map. {valid}")
        if output.value not in self._tested:
            self._test([(output, fold)])
        if not any(self._tested[output.value]):
            raise AttachError(f"layer={name!r} gets no gradient on its grid. {valid}")
        return output, fold

    def has_one_cell(self, output: ModuleOutput) -> bool:
        """Whether the output would be a map if the image were larger."""
        return len(output.shape) == 4 and tuple(output.shape[2:]) == (1, 1)

    def layers_until(self, features: ModuleOutput) -> tuple[tuple[str, int, int, int], ...]:
        """Name, N, P and Q of the layers that could be F, up to the one that is."""
        outputs = [pair for pair in self.alive if pair[0].end <= features.end]
        empty = [(o, fold, torch.empty(o.shape, device="meta")) for o, fold in outputs]
        shapes = [(o, fold(tensor, self.image).shape[1:]) for o, fold, tensor in empty]
        return tuple((o.name, n, p, q) for o, (n, p, q) in shapes if self.trace.outermost(o) is o)

    def activation_follows(self, output: ModuleOutput) -> bool:
        """Whether a functional activation (or a shared activation module) is the only step on this output."""
        steps = [call.name for call in self.trace.calls if output.value in call.inputs]
        return len(steps) == 1 and steps[0] in ACTIVATIONS

    def find_candidates(self) -> list[Candidate]:
        """The outputs before the head that fold to a map, without pooling, in order of return."""
        begin = min(o.start for o in self.last)
        grids, layouts = list[GridSize](), dict[int, FeatureLayout]()
        pooled, outputs = set[int](), list[ModuleOutput]()
        for output in self.trace.outputs:
            if output.end > begin:
                continue
            fold = self.layout_of(output, grids, {fold.prefix for fold in layouts.values()})
            has_weights = has_parameters(output.module)
            entering = next((layouts[value] for value in output.inputs if value in layouts), None)
            if fold is None or not (has_weights or entering):
                continue
            if fold.layout in ("NCHW", "NHWC"):
                grids.append(fold.grid)
            if is_pooling(output.module):
                pooled.add(output.value)
            # a step without parameters counts as an activation of the layer before it if it runs once per
            # pass and moves no cell (as a permute or a resize would)
            if has_weights or (self.trace.runs[output.name] == 1 and fold == entering):
                layouts.setdefault(output.value, fold)
                outputs.append(output)
        # a projection inside attention is not a layer
        layers = [o for o in outputs if len(o.shape) != 3 or not isinstance(o.module, nn.Linear)] or outputs
        return [(o, layouts[o.value]) for o in layers if o.value not in pooled]

    def layout_of(
        self, output: ModuleOutput, grids: list[GridSize], prefixes: set[int]
    ) -> FeatureLayout | None:
        """How the output folds, given the grids and the numbers of prefix tokens of the outputs before it."""
        shape, batch = tuple(output.shape), len(self.example)
        if len(shape) == 4 and shape[0] == batch:
            first, last = self.is_plausible(shape[2], shape[3]), self.is_plausible(shape[1], shape[2])
            if getattr(output.module, "normalized_shape", None) == (shape[3],) != (shape[1],):
                first = False  # it normalises the last axis, which therefore holds channels
            elif first and last:
                first = not self.keeps_last_axis(output)
            if first:
                return FeatureLayout("NCHW", GridSize(shape[2], shape[3]), self.image)
            return FeatureLayout("NHWC", GridSize(shape[1], shape[2]), self.image) if last else None
        if len(shape) != 3 or batch not in shape[:2]:
            return None
        layout: AxisOrder = "NLC" if shape[0] == batch else "LNC"
        tokens = shape[1] if layout == "NLC" else shape[0]
        if tokens in prefixes:
            return None  # the prefix tokens by themselves
        fits = list[FeatureLayout]()
        for halvings in range(7):  # stages may merge tokens 2x2 after the last output with two grid axes
            for rows, columns in grids or self.regular_grids():
                p, q = -(-rows // 2**halvings), -(-columns // 2**halvings)
                if p * q > 1 and 0 <= tokens - p * q <= MAX_PREFIX_TOKENS:
                    fits.append(FeatureLayout(layout, GridSize(p, q), self.image, prefix=tokens - p * q))
        return min(fits, key=lambda fold: fold.prefix, default=None)

    def is_plausible(self, rows: int, columns: int) -> bool:
        """Whether one stride takes the image to rows x columns, each rounded by less than one cell."""
        if rows * columns < 2 or rows > self.image.height or columns > self.image.width:
            return False
        sides = ((self.image.height, rows), (self.image.width, columns))
        low = max(pixels / (cells + 1) for pixels, cells in sides)
        return low < min(pixels / (cells - 1) for pixels, cells in sides if cells > 1)

    def regular_grids(self) -> list[GridSize]:
        """The grids of strides that divide both sides: patches cut without a convolution."""
        height, width = self.image
        strides = (s for s in range(1, min(height, width) + 1) if not (height % s or width % s))
        return [GridSize(height // s, width // s) for s in strides]

    def keeps_last_axis(self, output: ModuleOutput) -> bool:
        """Whether an image of another width leaves the last axis unchanged: then it holds channels."""
        other = self.shapes_of_other_width.get((output.name, output.call))
        return other is not None and other[3] == output.shape[3] and other[2] != output.shape[2]

    @cached_property
    def shapes_of_other_width(self) -> dict[tuple[str, int], torch.Size]:
        """What each call returns for an image half as wide, else 1.5 times; empty if it takes neither."""
        half = self.example[..., : self.image[1] // 2]
        for image in (half, torch.cat([self.example, half], -1)):
            try:
                trace, _ = run_traced(self.model, image)
            except Exception as error:  # any user network, any failure
                if is_out_of_memory(error):
                    raise
                continue
            return {(o.name, o.call): o.shape for o in trace.outputs}
        return {}
