"""Where a classifier splits: which module is its head, which output is F, how F folds to (B, N, P, Q).

One probing pass records what every module returns. The *output layers* are the last layers with a weight
matrix on the way to the logits. F is the last spatial output before them through which gradient still reaches
the grid; the head is the outermost module around the output layer that starts after F and returns the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError
from sigcam.core.types import GridSize
from sigcam.network.layout import AxisOrder, FeatureLayout, FeaturePoint
from sigcam.network.trace import ModuleOutput, Trace, listed, logits_of, probe_model, run_traced

MAX_PREFIX_TOKENS = 32  # class, distillation and register tokens in front of a grid
_ACTIVATIONS = (
    "relu relu6 leaky_relu prelu rrelu elu selu celu silu gelu mish softplus hardswish hardsigmoid hardtanh "
    "tanh sigmoid logsigmoid softsign threshold clamp clip"
)
ACTIVATIONS = frozenset(name + suffix for name in _ACTIVATIONS.split() for suffix in ("", "_"))
OUTPUT_ACTIVATIONS = ACTIVATIONS | {"softmax", "log_softmax", "softmin"}


@dataclass(frozen=True)
class Split:
    """The places at which sigcam taps a network, by module name.

    Args:
        heads: the head module; several where the model combines several outputs (a distilled DeiT).
        whole: the one head module returns the logits up to a reshape, so its copy does too. Otherwise the
            model's own steps from the output layers' outputs to the logits are repeated with the copies'.
        last: the output layers inside the heads: the last layers with a weight matrix, with C outputs each.
        layer: the module whose output is F, at its `call`-th call of a pass.
        activation: F is taken after the functional activation that follows the layer.
        classes: number of logits, C.
        output: "probabilities" if the model returns a softmax or a sigmoid instead of logits.
        spatial: layers whose output folds to a map and gets gradient, with N, P, Q; the last is F.
    """

    heads: tuple[str, ...]
    whole: bool
    last: tuple[str, ...]
    layer: str
    call: int
    activation: bool
    fold: FeatureLayout
    classes: int
    output: Literal["logits", "probabilities"]
    spatial: tuple[tuple[str, int, int, int], ...]

    @property
    def point(self) -> FeaturePoint:
        """Where F leaves the network."""
        return FeaturePoint(self.layer, self.call, self.activation, self.fold)


def find_split(
    model: nn.Module,
    *,
    head: str | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    seed: int = 0,
) -> tuple[Split, Tensor]:
    """The split of the model, and the example it was found with; AttachError says what cannot be told."""
    names = [name for name, _ in model.named_modules() if name]
    for argument, name in (("head", head), ("layer", layer)):
        if name is not None and name not in names:
            close = ", ".join(map(repr, get_close_matches(name, names, n=3, cutoff=0.4)))
            hint = f": did you mean {close}?" if close else f". Its modules: {listed(names)}."
            raise AttachError(f"{argument}={name!r} is not a module of {type(model).__name__}{hint}")
    example, trace, output = probe_model(model, example, seed)
    logits = logits_of(output, len(example))
    if not bool(torch.isfinite(logits).all()):
        raise AttachError(
            f"{type(model).__name__} returns NaN or infinite logits for a random input: check its weights, "
            "or pass an input that it knows: attach(model, example=...)."
        )
    return _Finder(model, trace, logits, example).split(head, layer), example


# -------------------------------------------------------------------------------------------- deciding

Spatial = list[tuple[ModuleOutput, FeatureLayout]]


class _Finder:
    """Decides from one trace."""

    def __init__(self, model: nn.Module, trace: Trace, logits: Tensor, example: Tensor) -> None:
        self.model, self.trace, self.logits, self.example = model, trace, logits, example
        self.image = GridSize.of(example)
        self.kind = type(model).__name__
        self.batch, self.classes = logits.shape
        self.calls = {output.name: output.call for output in trace.outputs}  # the last one counts them

    def split(self, head: str | None, layer: str | None) -> Split:
        last = self.output_layers() if head is None else [self.named_head(head)]
        candidates = self.candidates(last)
        alive = self.alive(candidates, last)
        if layer is None:
            chosen, fold = self.frontier(alive, last)
        else:
            chosen, fold = self.named_layer(layer, last, candidates, alive)
        where = self.outermost(chosen)
        if head is None:
            heads, whole = self.heads(last, where.name)
        else:
            heads, whole = (head,), self.returns_logits(last[0])
            inner = self.last_layers(head)
            if whole and len(inner) == 1 and _has_outputs(inner[0], self.classes):
                last = inner
        before = [(o, f(o.tensor, self.image).shape[1:]) for o, f in alive if o.end <= chosen.end]
        return Split(
            heads=heads,
            whole=whole,
            last=tuple(o.name for o in last),
            layer=where.name,
            call=where.call,
            activation=self.activation_after(chosen),
            fold=fold,
            classes=self.classes,
            output=self.output_kind(last),
            spatial=tuple((o.name, n, p, q) for o, (n, p, q) in before if self.outermost(o) is o),
        )

    # --- the head

    def last_layers(self, inside: str = "") -> list[ModuleOutput]:
        """The last layers with a weight matrix before the logits, inside the module; or norms after them."""
        layers = [o for o in self.trace.outputs if self.is_layer(o.module) and _within(o.name, inside)]
        made = {o.value for o in layers}  # a norm right on an output layer's logits is part of the tail
        norms = [o for o in self.trace.outputs if is_norm(o.module)]
        layers += [o for o in norms if o.tensor.ndim > 2 or not made & {*o.inputs}]
        gradients = _gradients(self.logits, [o.tensor for o in layers])
        reaching = [o for o, g in zip(layers, gradients, strict=True) if g is not None]
        ancestors = self.ancestry(reaching)
        return [o for o in reaching if not any(o.value in ancestors[p.value] for p in reaching if p is not o)]

    def output_layers(self) -> list[ModuleOutput]:
        """The last layers, which must have C outputs each and run once."""
        last = self.last_layers()
        wrong = not last or any(is_norm(o.module) or not _has_outputs(o, self.classes) for o in last)
        none = getattr(self.model, "num_classes", None) == 0  # as timm says it
        if wrong or none or self.head_was_taken_off(last[-1].end):
            raise AttachError(
                f"{self.kind} has no head with parameters: its {tuple(self.logits.shape)} output is not made "
                f"by a layer with {self.classes} outputs. Is it a feature extractor (num_classes=0)? Give it "
                "a classifier, or name the module: attach(model, head='...')."
            )
        if any(self.calls[o.name] > 1 for o in last):
            raise AttachError(
                f"the output layer {last[0].name!r} of {self.kind} runs several times in one pass. Put what "
                "makes one output of these into one module and name it: attach(model, head='...')."
            )
        return last

    def head_was_taken_off(self, time: int) -> bool:
        """Whether an Identity returns the "logits", and they come out of a hidden layer's activation."""
        replaced = any(type(o.module) is nn.Identity and self.returns_logits(o) for o in self.trace.outputs)
        hidden = ACTIVATIONS - {"sigmoid", "sigmoid_", "logsigmoid"}
        return replaced and any(call.name in hidden for call in self.trace.calls if call.time > time)

    def is_layer(self, module: nn.Module) -> bool:
        """Has a weight matrix of its own, and no children with parameters unless the matrix is C wide."""
        named = [(name.split("."), p) for name, p in module.named_parameters()]
        own = [p for path, p in named if len(path) == 1 or path[0] == "parametrizations"]
        matrices = [p for p in own if p.ndim > 1]
        if not matrices or is_norm(module):
            return False
        return len(own) == len(named) or any(p.ndim == 2 and self.classes in p.shape for p in matrices)

    def named_head(self, name: str) -> ModuleOutput:
        able = [o for o in self.trace.outputs if _has_parameters(o.module) and _has_outputs(o, self.classes)]
        able_names = listed([repr(o.name) for o in able[::-1] if o.name], most=3)
        valid = f"Modules with {self.classes} outputs: {able_names or 'none'}."
        output = next((o for o in reversed(self.trace.outputs) if o.name == name), None)
        if output is None:
            raise AttachError(f"head={name!r} did not run, or returned no tensor. {valid}")
        if output not in able:
            what = f"head={name!r} ({type(output.module).__name__})"
            raise AttachError(
                f"{what} returns {tuple(output.tensor.shape)}, not {self.classes} logits. {valid}"
                if _has_parameters(output.module)
                else f"{what} has no parameters. {valid}"
            )
        return output

    def heads(self, last: list[ModuleOutput], layer: str) -> tuple[tuple[str, ...], bool]:
        """The outermost module that starts after F and returns the logits; else those around each output
        layer that return what it does."""
        for output in reversed(self.trace.outputs):  # the ones around return after the inner ones
            around = all(_within(o.name, output.name) for o in last) and not _within(layer, output.name)
            if around and self.calls[output.name] == 1 and self.returns_logits(output):
                if self.activated_in_passing(last[-1].end, output.name):
                    break
                return (output.name,), True
        return tuple(self.outermost(o, without=layer).name for o in last), False

    def activated_in_passing(self, time: int, head: str) -> bool:
        """Whether an activation after that time is no module of the head, which a copy could leave out."""
        left_out = [
            (o.start, o.end)
            for o in self.trace.outputs
            if o.start > time
            and _within(o.name, head)
            and is_activation(o.module)
            and self.calls[o.name] == 1
        ]
        after = [c.time for c in self.trace.calls if c.time > time and c.name in OUTPUT_ACTIVATIONS]
        return any(not any(start < t < end for start, end in left_out) for t in after)

    def returns_logits(self, output: ModuleOutput) -> bool:
        return output.tensor.numel() == self.logits.numel() and torch.equal(
            output.tensor.detach().reshape(self.logits.shape).float(), self.logits.detach().float()
        )

    def output_kind(self, last: list[ModuleOutput]) -> Literal["logits", "probabilities"]:
        rows = self.logits.detach().double()
        if bool((rows < 0).any()) or bool((rows > 1).any()):
            return "logits"
        sums_to_one = self.classes > 1 and torch.allclose(rows.sum(1), torch.ones_like(rows[:, 0]), atol=1e-3)
        after = {call.name for call in self.trace.calls if call.time > last[-1].end}
        return "probabilities" if sums_to_one or after & {"sigmoid", "sigmoid_"} else "logits"

    # --- the features

    def candidates(self, last: list[ModuleOutput]) -> Spatial:
        """Outputs before the head that fold to a map, pooling left out, in order of return."""
        begin = min(o.start for o in last)
        grids, found = list[GridSize](), dict[int, FeatureLayout]()
        pooled, outputs = set[int](), list[ModuleOutput]()
        for output in self.trace.outputs:
            if output.end > begin:
                continue
            fold = self.fold_of(output, grids, {fold.prefix for fold in found.values()})
            has_parameters = _has_parameters(output.module)
            fed = next((found[value] for value in output.inputs if value in found), None)
            if fold is None or not (has_parameters or fed):
                continue
            if fold.layout in ("NCHW", "NHWC"):
                grids.append(fold.grid)
            if _is_pooling(output.module):
                pooled.add(output.value)
            # a step without parameters counts as an activation of the layer before it: once per pass, no
            # cell moved (by a permute, a resize)
            if has_parameters or (self.calls[output.name] == 1 and fold == fed):
                found.setdefault(output.value, fold)
                outputs.append(output)
        linear = [o for o in outputs if o.tensor.ndim == 3 and isinstance(o.module, nn.Linear)]
        kept = [o for o in outputs if o not in linear] or outputs  # a projection inside attention is no layer
        return [(o, found[o.value]) for o in kept if o.value not in pooled]

    def fold_of(
        self, output: ModuleOutput, grids: list[GridSize], prefixes: set[int]
    ) -> FeatureLayout | None:
        """How the output folds, given the grids of maps and the numbers of prefix tokens seen before it."""
        shape = tuple(output.tensor.shape)
        if len(shape) == 4 and shape[0] == self.batch:
            first, last = self.plausible(shape[2], shape[3]), self.plausible(shape[1], shape[2])
            if getattr(output.module, "normalized_shape", None) == (shape[3],) != (shape[1],):
                first = False  # it normalises the last axis, which therefore holds channels
            elif first and last:
                first = not self.keeps_last_axis(output)
            if first:
                return FeatureLayout("NCHW", GridSize(shape[2], shape[3]), self.image)
            return FeatureLayout("NHWC", GridSize(shape[1], shape[2]), self.image) if last else None
        if len(shape) != 3 or self.batch not in shape[:2]:
            return None
        layout: AxisOrder = "NLC" if shape[0] == self.batch else "LNC"
        tokens = shape[1] if layout == "NLC" else shape[0]
        fits = list[FeatureLayout]()
        for halvings in range(7):  # stages may merge tokens 2x2 after the last map that was seen as one
            for rows, columns in grids or self.regular_grids():
                p, q = -(-rows // 2**halvings), -(-columns // 2**halvings)
                if p * q > 1 and 0 <= tokens - p * q <= MAX_PREFIX_TOKENS:
                    fits.append(FeatureLayout(layout, GridSize(p, q), self.image, prefix=tokens - p * q))
        if tokens in prefixes:
            return None  # the tokens that stood in front of a grid, by themselves
        return min(fits, key=lambda fold: fold.prefix, default=None)

    def keeps_last_axis(self, output: ModuleOutput) -> bool:
        """Whether a wider image leaves the last axis as it is: then it holds channels."""
        wider = self.shapes_of_wider_image.get((output.name, output.call))
        return wider is not None and wider[3] == output.tensor.shape[3] and wider[2] != output.tensor.shape[2]

    @cached_property
    def shapes_of_wider_image(self) -> dict[tuple[str, int], torch.Size]:
        """What each call returns for an image half as wide again; nothing if the model does not take one."""
        image = torch.cat([self.example, self.example[..., : self.image[1] // 2]], -1)
        try:
            trace, _ = run_traced(self.model, image)
        except Exception:  # any user network, any failure
            return {}
        return {(o.name, o.call): o.tensor.shape for o in trace.outputs}

    def plausible(self, rows: int, columns: int) -> bool:
        """Whether one stride takes the image to rows x columns, each rounded by less than one cell."""
        (height, width), most = self.image, float("inf")
        if rows * columns < 2 or rows > height or columns > width:
            return False
        low = max(height / (rows + 1), width / (columns + 1))
        high = min(height / (rows - 1) if rows > 1 else most, width / (columns - 1) if columns > 1 else most)
        return low < high

    def regular_grids(self) -> list[GridSize]:
        """Grids that a stride dividing both sides gives: patches cut without a convolution."""
        height, width = self.image
        strides = (s for s in range(1, min(height, width) + 1) if not (height % s or width % s))
        return [GridSize(height // s, width // s) for s in strides]

    def alive(self, candidates: Spatial, last: list[ModuleOutput]) -> Spatial:
        """The candidates whose grid gets gradient from what enters the head (a CLS-pooled last block's does
        not); of several heads, from as many as any."""
        reached = [0] * len(candidates)
        for layer in last:
            entering = self.trace.tensors(set(layer.inputs)) or [self.logits]
            generator = torch.Generator().manual_seed(0)
            noise = [torch.randn(t.shape, generator=generator).to(t.device, torch.double) for t in entering]
            score = torch.stack([(t.double() * n).sum() for t, n in zip(entering, noise, strict=True)]).sum()
            gradients = _gradients(score, [output.tensor for output, _ in candidates])
            for index, gradient in enumerate(gradients):
                fold = candidates[index][1]
                if gradient is not None and bool(fold(gradient, self.image).count_nonzero()):
                    reached[index] += 1
        return [pair for pair, heads in zip(candidates, reached, strict=True) if 0 < heads == max(reached)]

    def frontier(self, alive: Spatial, last: list[ModuleOutput]) -> tuple[ModuleOutput, FeatureLayout]:
        """The last spatial output; where several end side by side, the last that all of them come from."""
        if not alive:
            raise AttachError(
                f"no layer of {self.kind} before its head {last[0].name!r} gives a map (B, N, P, Q) that "
                "gets gradient. Name one: attach(model, layer='...')."
            )
        ancestors = self.ancestry([output for output, _ in alive])
        ends = set(ancestors).difference(*ancestors.values())
        if len(ends) == 1:
            return next((o, fold) for o, fold in alive if o.value in ends)
        common = set.intersection(*(ancestors[value] for value in ends))
        shared = [(o, fold) for o, fold in alive if o.value in common]
        if shared:
            return shared[-1]
        names = ", ".join(dict.fromkeys(repr(self.outermost(o).name) for o, _ in alive if o.value in ends))
        raise AttachError(
            f"several layers of {self.kind} feed its head: {names}. Name one: attach(model, layer='...')."
        )

    def named_layer(
        self, name: str, last: list[ModuleOutput], candidates: Spatial, alive: Spatial
    ) -> tuple[ModuleOutput, FeatureLayout]:
        names = dict.fromkeys(repr(self.outermost(o).name) for o, _ in alive[::-1])
        valid = f"Layers that do: {listed(names, most=3)}."
        output = next((o for o in reversed(self.trace.outputs) if o.name == name), None)
        if output is None:
            raise AttachError(f"layer={name!r} did not run, or returned no tensor, so gives no map. {valid}")
        maps = [fold.grid for _, fold in candidates if fold.layout in ("NCHW", "NHWC")]
        fold = self.fold_of(output, maps, {fold.prefix for _, fold in candidates})
        if fold is None:
            raise AttachError(
                f"layer={name!r} ({type(output.module).__name__}) returns {tuple(output.tensor.shape)}, "
                f"which does not fold to a map. {valid}"
            )
        if not self.alive([(output, fold)], last):
            raise AttachError(f"layer={name!r} gets no gradient on its grid. {valid}")
        return output, fold

    def outermost(self, output: ModuleOutput, *, without: str | None = None) -> ModuleOutput:
        """The outermost module that returned this very tensor and runs once per pass, and holds not
        `without`."""
        same = [
            o
            for o in self.trace.outputs
            if o.value == output.value and self.calls[o.name] == 1 and o.name
            if without is None or not _within(without, o.name)
        ]
        return min(same, key=lambda o: (not _has_parameters(o.module), o.name.count(".")), default=output)

    def activation_after(self, output: ModuleOutput) -> bool:
        """Whether a functional activation (or a shared activation module) is the only step on this output."""
        steps = [call.name for call in self.trace.calls if output.value in call.inputs]
        return len(steps) == 1 and steps[0] in ACTIVATIONS

    def ancestry(self, outputs: list[ModuleOutput]) -> dict[int, set[int]]:
        """For each output's value, the values among these that it was computed from, by autograd's graph."""
        values_at: dict[Any, set[int]] = {}
        for output in outputs:
            values_at.setdefault(_node(output.tensor), set()).add(output.value)
        above: dict[Any, set[int]] = {}
        stack = [(node, False) for node in values_at]
        while stack:
            node, done = stack.pop()
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if done:
                above[node] = set[int]().union(*(above[p] | values_at.get(p, set()) for p in parents))
            elif node not in above:
                stack += [(node, True), *((p, False) for p in parents if p not in above)]
        return {value: above[node] - {value} for node, values in values_at.items() for value in values}


def _node(tensor: Tensor) -> Any:
    """The tensor's node in the autograd graph; a leaf's is the one that would accumulate its gradient."""
    return tensor.grad_fn or tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _gradients(score: Tensor, tensors: list[Tensor]) -> list[Tensor | None]:
    if not tensors:
        return []
    with torch.inference_mode(False), torch.enable_grad():
        return list(torch.autograd.grad(score.sum(), tensors, allow_unused=True, retain_graph=True))


def _within(name: str, module: str) -> bool:
    """Whether the module of that name is the other one, or inside it."""
    return module in ("", name) or name.startswith(module + ".")


def is_activation(module: nn.Module) -> bool:
    """One of torch's own activations without parameters, a softmax included."""
    return type(module).__module__ == "torch.nn.modules.activation" and not _has_parameters(module)


def is_norm(module: nn.Module) -> bool:
    """A normalisation layer, by the name of its class; one with a matrix, or with layers inside, is more."""
    named = "norm" in type(module).__name__.lower() and not any(map(_has_parameters, module.children()))
    return named and not any(p.ndim == 2 for p in module.parameters())


def _is_pooling(module: nn.Module) -> bool:
    return "pool" in type(module).__name__.lower() and not _has_parameters(module)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _has_outputs(output: ModuleOutput, classes: int) -> bool:
    """Whether the output has C channels, last or after the batch; one channel may be squeezed off."""
    shape = tuple(output.tensor.shape)
    return classes in (shape[-1:] + shape[1:2]) or (classes == 1 and len(shape) < 2)
