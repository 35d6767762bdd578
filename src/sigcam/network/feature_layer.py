"""Which output of a traced network is F, the last feature map before its head, and how it folds."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError
from sigcam.core.memory import is_out_of_memory
from sigcam.core.types import GridSize
from sigcam.network.modules import ACTIVATIONS, has_parameters, is_pooling
from sigcam.network.trace import ModuleOutput, Trace, ancestry, gradients, listed, run_traced

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
        return tokens.transpose(1, 2).reshape(len(tokens), -1, rows, columns)

    def grid_at(self, tokens: int, image: GridSize) -> GridSize:
        """(P, Q) of a sequence of `tokens` grid tokens: the probed grid, scaled as the image was."""
        if tokens == self.grid[0] * self.grid[1] and image == self.image:
            return self.grid
        expected = self.grid[0] * image[0] / self.image[0]
        divisors = (rows for rows in range(1, tokens + 1) if tokens % rows == 0)
        rows = min(divisors, key=lambda rows: abs(rows - expected))
        return GridSize(rows, tokens // rows)

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


Candidate = tuple[ModuleOutput, FeatureLayout]


class FeatureFinder:
    """Finds F in one trace: an output before the output layers, `last`."""

    def __init__(
        self, model: nn.Module, trace: Trace, logits: Tensor, example: Tensor, last: list[ModuleOutput]
    ) -> None:
        self.model, self.trace, self.logits, self.example, self.last = model, trace, logits, example, last
        self.image, self.kind = GridSize.of(example), type(model).__name__
        self.candidates = self.find_candidates()
        self.alive = self.with_gradient(self.candidates)

    def last_layer(self) -> Candidate:
        """The last spatial output; where several end side by side, the last that all of them come from."""
        if not self.alive:
            raise AttachError(
                f"no layer of {self.kind} before its head {self.last[0].name!r} gives a map (B, N, P, Q) "
                "that gets gradient. Name one: attach(model, layer='...')."
            )
        ancestors = ancestry([output for output, _ in self.alive])
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
        valid = f"Layers that do: {listed(names, most=3)}."
        output = self.trace.last_output(name)
        if output is None:
            raise AttachError(f"layer={name!r} did not run, or returned no tensor, so gives no map. {valid}")
        maps = [fold.grid for _, fold in self.candidates if fold.layout in ("NCHW", "NHWC")]
        fold = self.layout_of(output, maps, {fold.prefix for _, fold in self.candidates})
        if fold is None:
            kind, shape = type(output.module).__name__, tuple(output.tensor.shape)
            what = f"layer={name!r} ({kind}) returns {shape}"
            raise AttachError(f"{what}, which does not fold to a map. {valid}")
        if not self.with_gradient([(output, fold)]):
            raise AttachError(f"layer={name!r} gets no gradient on its grid. {valid}")
        return output, fold

    def layers_until(self, features: ModuleOutput) -> tuple[tuple[str, int, int, int], ...]:
        """Name, N, P and Q of the layers that could be F, up to the one that is."""
        outputs = [pair for pair in self.alive if pair[0].end <= features.end]
        shapes = [(o, fold(o.tensor, self.image).shape[1:]) for o, fold in outputs]
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
        layers = [o for o in outputs if o.tensor.ndim != 3 or not isinstance(o.module, nn.Linear)] or outputs
        return [(o, layouts[o.value]) for o in layers if o.value not in pooled]

    def layout_of(
        self, output: ModuleOutput, grids: list[GridSize], prefixes: set[int]
    ) -> FeatureLayout | None:
        """How the output folds, given the grids and the numbers of prefix tokens of the outputs before it."""
        shape, batch = tuple(output.tensor.shape), len(self.example)
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
        """Whether a wider image leaves the last axis unchanged: then it holds channels."""
        wider = self.shapes_of_wider_image.get((output.name, output.call))
        return wider is not None and wider[3] == output.tensor.shape[3] and wider[2] != output.tensor.shape[2]

    @cached_property
    def shapes_of_wider_image(self) -> dict[tuple[str, int], torch.Size]:
        """What each call returns for an image 1.5 times as wide; empty if the model does not take one."""
        image = torch.cat([self.example, self.example[..., : self.image[1] // 2]], -1)
        try:
            trace, _ = run_traced(self.model, image)
        except Exception as error:  # any user network, any failure
            if is_out_of_memory(error):
                raise
            return {}
        return {(o.name, o.call): o.tensor.shape for o in trace.outputs}

    def with_gradient(self, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates whose grid gets gradient from the output layers' inputs (a CLS-pooled last block's
        does not); of several output layers, from as many as any candidate."""
        reached = [0] * len(candidates)
        for layer in self.last:
            entering = self.trace.tensors(set(layer.inputs)) or [self.logits]
            generator = torch.Generator().manual_seed(0)
            noise = [torch.randn(t.shape, generator=generator).to(t.device, torch.double) for t in entering]
            score = torch.stack([(t.double() * n).sum() for t, n in zip(entering, noise, strict=True)]).sum()
            for index, gradient in enumerate(gradients(score, [output.tensor for output, _ in candidates])):
                fold = candidates[index][1]
                if gradient is not None and bool(fold(gradient, self.image).count_nonzero()):
                    reached[index] += 1
        return [pair for pair, heads in zip(candidates, reached, strict=True) if 0 < heads == max(reached)]
