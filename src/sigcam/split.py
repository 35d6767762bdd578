"""Where a classifier splits: which module is its head, which output is F, how F folds to (B, N, P, Q).

One probing pass records what every module returns. The *output layers* are the last layers with parameters on
the way to the logits. F is the last spatial output before them through which gradient still reaches the grid;
the head is the outermost module around the output layer that starts after F and returns the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sigcam.errors import AttachError
from sigcam.trace import Output, Size, Trace, default_examples, logits_of, run_traced

Layout = Literal["NCHW", "NHWC", "NLC"]

MAX_PREFIX_TOKENS = 32  # class, distillation and register tokens in front of a grid
ACTIVATIONS = frozenset(
    name + suffix
    for name in (
        *(
            "relu",
            "relu6",
            "leaky_relu",
            "prelu",
            "rrelu",
            "elu",
            "selu",
            "celu",
            "silu",
            "gelu",
            "mish",
            "softplus",
        ),
        *("hardswish", "hardsigmoid", "hardtanh", "tanh", "sigmoid", "logsigmoid", "softsign", "threshold"),
        *("clamp", "clip"),
    )
    for suffix in ("", "_")
)
OUTPUT_ACTIVATIONS = ACTIVATIONS | {"softmax", "log_softmax", "softmin"}


@dataclass(frozen=True)
class Fold:
    """How a layer's output folds to (B, N, P, Q): its layout, its tokens before the grid, and the grid
    probed."""

    layout: Layout
    grid: Size
    image: Size
    prefix: int = 0

    def __call__(self, output: Tensor, image: Size) -> Tensor:
        """The output as (B, N, P, Q), for an input of `image` (height, width) pixels."""
        if self.layout == "NCHW":
            return output
        if self.layout == "NHWC":
            return output.permute(0, 3, 1, 2)
        tokens = output[:, self.prefix :]  # (B, P*Q, N)
        rows, columns = self.grid_at(tokens.shape[1], image)
        return tokens.transpose(1, 2).reshape(len(tokens), -1, rows, columns)

    def grid_at(self, tokens: int, image: Size) -> Size:
        """(P, Q) of a sequence of `tokens` grid tokens: the probed grid, scaled as the image was."""
        if tokens == self.grid[0] * self.grid[1] and image == self.image:
            return self.grid
        wanted = self.grid[0] * image[0] / self.image[0]
        rows = min(
            (rows for rows in range(1, tokens + 1) if tokens % rows == 0), key=lambda rows: abs(rows - wanted)
        )
        return rows, tokens // rows


@dataclass(frozen=True)
class Split:
    """The places at which sigcam taps a network, by module name.

    Args:
        heads: the head module; several where the model combines several outputs (a distilled DeiT).
        whole: the one head module returns the logits up to a reshape, so its copy does too. Otherwise the
            model's
            own steps from the head modules' outputs to the logits are repeated with the copies' outputs.
        last: the output layers inside the heads: the last layers with parameters, with C outputs each.
        layer: the module whose output is F, at its `call`-th call of a pass.
        activation: F is taken after the functional activation that follows the layer.
        classes: number of logits, C.
        output: "probabilities" if the model returns a softmax or a sigmoid instead of logits.
        spatial: other layers whose output folds to a map and gets gradient, with N, P, Q; the last is F.
    """

    heads: tuple[str, ...]
    whole: bool
    last: tuple[str, ...]
    layer: str
    call: int
    activation: bool
    fold: Fold
    classes: int
    output: Literal["logits", "probabilities"]
    spatial: tuple[tuple[str, int, int, int], ...]


def find_split(
    model: nn.Module,
    *,
    head: str | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    seed: int = 0,
) -> tuple[Split, Tensor]:
    """The split of the model, and the example it was found with; AttachError says what cannot be told."""
    names = dict(model.named_modules())
    for argument, name in (("head", head), ("layer", layer)):
        if name is not None and name not in names:
            raise AttachError(
                f"{argument}={name!r} is not a module of {type(model).__name__}{_nearest(name, names)}."
            )
    example, trace, output = _probe(model, example, seed)
    logits = logits_of(output, len(example))
    if not bool(torch.isfinite(logits).all()):
        raise AttachError(
            f"{type(model).__name__} returns NaN or infinite logits for a random input: check its weights."
        )
    return _Finder(model, trace, logits, (example.shape[-2], example.shape[-1])).split(head, layer), example


def _probe(model: nn.Module, example: Tensor | None, seed: int) -> tuple[Tensor, Trace, Any]:
    failure: Exception | None = None
    tried: list[Size] = []
    for candidate in [example] if example is not None else default_examples(model, seed):
        if candidate.ndim != 4:
            raise AttachError(f"example must be (1, C, H, W), not {tuple(candidate.shape)}.")
        try:
            return candidate, *run_traced(model, candidate)
        except AttachError:
            raise
        except Exception as error:  # any user network, any failure: the next size, then one line
            failure, tried = failure or error, [*tried, (candidate.shape[-2], candidate.shape[-1])]
    what = " ".join(str(failure).split())[:200]
    sizes = ", ".join(f"{h}x{w}" for h, w in tried)
    raise AttachError(
        f"{type(model).__name__} could not be run on a random image of {sizes} ({type(failure).__name__}: "
        f"{what}). "
        "Pass one that it takes: attach(model, example=tensor of (1, C, H, W))."
    ) from failure


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [n for n in names if n], n=3, cutoff=0.4)
    return f": did you mean {', '.join(map(repr, close))}?" if close else ""


# -------------------------------------------------------------------------------------------- deciding


class _Finder:
    """Decides from one trace."""

    def __init__(self, model: nn.Module, trace: Trace, logits: Tensor, image: Size) -> None:
        self.model, self.trace, self.logits, self.image = model, trace, logits, image
        self.names = dict(model.named_modules())
        self.kind = type(model).__name__
        self.classes = logits.shape[1]
        self.calls: dict[str, int] = {}
        for output in trace.outputs:
            self.calls[output.name] = max(self.calls.get(output.name, 0), output.call)

    def split(self, head: str | None, layer: str | None) -> Split:
        last = self.named_head(head) if head is not None else self.output_layers()
        candidates = self.candidates(last)
        alive = self.alive(candidates, last)
        chosen = (
            self.named_layer(layer, candidates, alive) if layer is not None else self.frontier(alive, last)
        )
        where = self.outermost(chosen)
        heads, whole = self.heads(last, where.name, named=head is not None)
        spatial = list[tuple[str, int, int, int]]()
        for output, fold in alive:
            n, p, q = fold(output.tensor, self.image).shape[1:]
            if self.outermost(output) is output and output.end <= chosen.end:
                spatial.append((output.name, n, p, q))
        fold = next(fold for output, fold in candidates if output.value == chosen.value)
        return Split(
            heads=heads,
            whole=whole,
            last=tuple(o.name for o in last),
            layer=where.name,
            call=where.call,
            activation=self.activation_after(chosen),
            fold=fold,
            classes=self.classes,
            output=self.output_kind(),
            spatial=tuple(spatial),
        )

    # --- the head

    def output_layers(self) -> list[Output]:
        """The last layers with parameters before the logits; each must have C outputs."""
        operations = [o for o in self.trace.outputs if _is_operation(o.module)]
        gradients = _gradients(self.logits, [o.tensor for o in operations])
        reaching = [o for o, g in zip(operations, gradients, strict=True) if g is not None]
        ancestors = self.ancestry(reaching)
        last = [o for o in reaching if not any(o.value in ancestors[p.value] for p in reaching if p is not o)]
        without = (
            f"{self.kind} has no head with parameters: its {tuple(self.logits.shape)} output is not made by "
            "a layer "
            f"with {self.classes} outputs. Is it a feature extractor (num_classes=0)? Give it a classifier, "
            "or name "
            "the module: attach(model, head='...')."
        )
        if not last or any(is_norm(o.module) or not _has_outputs(o, self.classes) for o in last):
            raise AttachError(without)
        return last

    def named_head(self, name: str) -> list[Output]:
        outputs = [o for o in self.trace.outputs if o.name == name]
        if not outputs:
            raise AttachError(f"head={name!r} did not run, or returned no tensor, in a pass of {self.kind}.")
        if not any(True for _ in outputs[-1].module.parameters()):
            raise AttachError(f"head={name!r} ({type(outputs[-1].module).__name__}) has no parameters.")
        if not _has_outputs(outputs[-1], self.classes):
            raise AttachError(
                f"head={name!r} returns {tuple(outputs[-1].tensor.shape)}, but {self.kind} has "
                f"{self.classes} logits."
            )
        return [outputs[-1]]

    def heads(self, last: list[Output], layer: str, *, named: bool) -> tuple[tuple[str, ...], bool]:
        """The outermost module that starts after F and returns the logits; else the output layers
        themselves."""
        names = tuple(o.name for o in last)
        if len(last) > 1:
            return names, False
        if named:
            return names, self.returns_logits(last[0])
        found = None
        for output in self.trace.outputs:  # inner modules return before the ones around them
            around = output.name == names[0] or names[0].startswith(output.name + ".")
            holds_layer = output.name == "" or layer == output.name or layer.startswith(output.name + ".")
            if around and not holds_layer and self.calls[output.name] == 1 and self.returns_logits(output):
                found = output.name
        if found is None or self.activated_in_passing(last[0], found):
            return names, False
        return (found,), True

    def activated_in_passing(self, last: Output, head: str) -> bool:
        """Whether an activation after the output layer is no module of the head, which its copy could leave
        out."""
        left_out = [
            o
            for o in self.trace.outputs
            if o.start > last.end
            and o.name.startswith(head + ".")
            and is_activation(o.module)
            and self.calls[o.name] == 1
        ]
        after = (c for c in self.trace.calls if c.time > last.end and c.name in OUTPUT_ACTIVATIONS)
        return any(not any(o.start < call.time < o.end for o in left_out) for call in after)

    def returns_logits(self, output: Output) -> bool:
        return output.tensor.numel() == self.logits.numel() and torch.equal(
            output.tensor.detach().reshape(self.logits.shape).float(), self.logits.detach().float()
        )

    def output_kind(self) -> Literal["logits", "probabilities"]:
        rows = self.logits.detach().double()
        if self.classes == 1:
            made_by = [c.name for c in self.trace.calls if c.output == self.trace.value(self.logits)]
            return "probabilities" if "sigmoid" in made_by else "logits"
        sums_to_one = torch.allclose(
            rows.sum(1), torch.ones(len(rows), dtype=rows.dtype, device=rows.device), atol=1e-3
        )
        return "probabilities" if bool((rows >= 0).all()) and sums_to_one else "logits"

    # --- the features

    def candidates(self, last: list[Output]) -> list[tuple[Output, Fold]]:
        """Outputs before the head that fold to a map, pooling left out, in order of return."""
        begin = min(o.start for o in last)
        grids, found = list[Size](), dict[int, Fold]()
        pooled, outputs = set[int](), list[Output]()
        for output in self.trace.outputs:
            if output.end > begin:
                continue
            fold = self.fold_of(output, grids)
            if fold is None:
                continue
            if fold.layout != "NLC":
                grids.append(fold.grid)
            if _is_pooling(output.module):
                pooled.add(output.value)
            has_parameters = any(True for _ in output.module.parameters())
            follows = any(value in found for value in output.inputs) and not has_parameters
            if not has_parameters and (not follows or self.calls[output.name] > 1):
                # a step without parameters counts as an activation of the layer before it, once per pass
                continue
            if follows and fold != found[next(value for value in output.inputs if value in found)]:
                continue  # it moved the cells (a permute, a resize)
            found.setdefault(output.value, fold)
            outputs.append(output)
        linear = [o for o in outputs if o.tensor.ndim == 3 and isinstance(o.module, nn.Linear)]
        kept = [o for o in outputs if o not in linear] or outputs  # a projection inside attention is no layer
        return [(o, found[o.value]) for o in kept if o.value not in pooled]

    def fold_of(self, output: Output, grids: Sequence[Size]) -> Fold | None:
        shape = tuple(output.tensor.shape)
        if len(shape) == 4:
            first, last = self.plausible(shape[2], shape[3]), self.plausible(shape[1], shape[2])
            normalises_last = getattr(output.module, "normalized_shape", None) == (shape[3],)
            if last and (not first or normalises_last):
                return Fold("NHWC", (shape[1], shape[2]), self.image)
            return Fold("NCHW", (shape[2], shape[3]), self.image) if first else None
        if len(shape) != 3:
            return None
        fits = list[Fold]()
        for halvings in range(7):  # stages may merge tokens 2x2 after the last map that was seen as one
            for rows, columns in grids or self.regular_grids():
                p, q = -(-rows // 2**halvings), -(-columns // 2**halvings)
                if p * q > 1 and 0 <= shape[1] - p * q <= MAX_PREFIX_TOKENS:
                    fits.append(Fold("NLC", (p, q), self.image, prefix=shape[1] - p * q))
        return min(fits, key=lambda fold: fold.prefix, default=None)

    def plausible(self, rows: int, columns: int) -> bool:
        """Whether one stride takes the image to rows x columns, each rounded by less than one cell."""
        (height, width), most = self.image, float("inf")
        if rows * columns < 2 or rows > height or columns > width:
            return False
        low = max(height / (rows + 1), width / (columns + 1))
        high = min(height / (rows - 1) if rows > 1 else most, width / (columns - 1) if columns > 1 else most)
        return low < high

    def regular_grids(self) -> list[Size]:
        """Grids that a stride dividing both sides gives: patches cut without a convolution."""
        height, width = self.image
        return [
            (height // s, width // s)
            for s in range(1, min(height, width) + 1)
            if not (height % s or width % s)
        ]

    def alive(self, candidates: list[tuple[Output, Fold]], last: list[Output]) -> list[tuple[Output, Fold]]:
        """The candidates whose grid gets gradient from what enters the head (a CLS-pooled last block's does
        not)."""
        entering = [value for output in last for value in output.inputs]
        tensors = [t for t, _, value in self.trace._values.values() if value in entering and t.requires_grad]
        if not tensors:
            tensors = [self.logits]
        generator = torch.Generator().manual_seed(0)
        score = sum(
            (t.double() * torch.randn(t.shape, generator=generator).to(t.device, torch.double)).sum()
            for t in tensors
        )
        assert isinstance(score, Tensor)
        gradients = _gradients(score, [output.tensor for output, _ in candidates])
        return [
            (output, fold)
            for (output, fold), gradient in zip(candidates, gradients, strict=True)
            if gradient is not None and bool(fold(gradient, self.image).count_nonzero())
        ]

    def frontier(self, alive: list[tuple[Output, Fold]], last: list[Output]) -> Output:
        """The last spatial output; where several end side by side, the last one that all of them come
        from."""
        outputs = [output for output, _ in alive]
        if not outputs:
            raise AttachError(
                f"no layer of {self.kind} before its head {last[0].name!r} gives a map (B, N, P, Q) that "
                "gets gradient. "
                "Name one: attach(model, layer='...')."
            )
        ancestors = self.ancestry(outputs)
        ends = {o.value for o in outputs} - set[int]().union(*(ancestors[o.value] for o in outputs))
        if len(ends) == 1:
            return next(o for o in outputs if o.value in ends)
        common = set.intersection(*(ancestors[value] for value in ends))
        shared = [o for o in outputs if o.value in common]
        if shared:
            return shared[-1]
        names = ", ".join(repr(self.outermost(o).name) for o in outputs if o.value in ends)
        raise AttachError(
            f"several layers of {self.kind} feed its head: {names}. Name one: attach(model, layer='...')."
        )

    def named_layer(
        self, name: str, candidates: list[tuple[Output, Fold]], alive: list[tuple[Output, Fold]]
    ) -> Output:
        valid = ", ".join(dict.fromkeys(repr(self.outermost(o).name) for o, _ in alive[-3:]))
        outputs = [o for o in self.trace.outputs if o.name == name]
        if not outputs:
            raise AttachError(
                f"layer={name!r} did not run, or returned no tensor. Layers that give a map: {valid}."
            )
        output = outputs[-1]
        fold = self.fold_of(output, [f.grid for _, f in candidates if f.layout != "NLC"])
        if fold is None:
            raise AttachError(
                f"layer={name!r} ({type(output.module).__name__}) returns {tuple(output.tensor.shape)}, "
                "which does not "
                f"fold to a map. Layers that do: {valid}."
            )
        if not self.alive([(output, fold)], self.output_layers()):
            raise AttachError(f"layer={name!r} gets no gradient on its grid. Layers that do: {valid}.")
        candidates.append((output, fold))
        return output

    def outermost(self, output: Output) -> Output:
        """The outermost module that returned this very tensor and runs once per pass."""
        same = [
            o for o in self.trace.outputs if o.value == output.value and self.calls[o.name] == 1 and o.name
        ]
        bare = {id(o): not any(True for _ in o.module.parameters()) for o in same}
        return min(same, key=lambda o: (bare[id(o)], o.name.count(".")), default=output)

    def activation_after(self, output: Output) -> bool:
        """Whether a functional activation (or a shared activation module) is the next step on this output."""
        next_call = next((call for call in self.trace.calls if output.value in call.inputs), None)
        return next_call is not None and next_call.name in ACTIVATIONS

    def ancestry(self, outputs: list[Output]) -> dict[int, set[int]]:
        """For each output's value, the values among these that it was computed from (by the autograd
        graph)."""
        node_values: dict[Any, set[int]] = {}
        for output in outputs:
            node = output.tensor.grad_fn
            if node is None:
                node = _leaf_node(output.tensor)
            node_values.setdefault(node, set()).add(output.value)
        above: dict[Any, set[int]] = {}
        stack = [(node, False) for node in node_values]
        while stack:
            node, done = stack.pop()
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if done:
                above[node] = set[int]().union(*(above[p] | node_values.get(p, set()) for p in parents))
            elif node not in above:
                stack += [(node, True), *((p, False) for p in parents if p not in above)]
        result = dict[int, set[int]]()
        for node, values in node_values.items():
            for value in values:
                result[value] = result.get(value, set()) | above[node] - {value}
        return result


def _leaf_node(tensor: Tensor) -> Any:
    """The node under which autograd accumulates into a leaf."""
    return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _gradients(score: Tensor, tensors: list[Tensor]) -> list[Tensor | None]:
    with torch.inference_mode(False), torch.enable_grad():
        return (
            list(torch.autograd.grad(score.sum(), tensors, allow_unused=True, retain_graph=True))
            if tensors
            else []
        )


def _is_operation(module: nn.Module) -> bool:
    """Has parameters of its own, and no children that have some: a layer, not a container."""
    own = any(True for _ in module.parameters(recurse=False))
    return own and not any(True for child in module.children() for _ in child.parameters())


def is_activation(module: nn.Module) -> bool:
    """A module without parameters and children from torch's own activations, a softmax included."""
    return type(module).__module__ == "torch.nn.modules.activation" and not any(
        True for _ in module.parameters()
    )


def is_norm(module: nn.Module) -> bool:
    """A normalisation layer, by the name of its class."""
    return "norm" in type(module).__name__.lower()


def _is_pooling(module: nn.Module) -> bool:
    return "pool" in type(module).__name__.lower() and not any(True for _ in module.parameters())


def _has_outputs(output: Output, classes: int) -> bool:
    shape = output.tensor.shape
    return (
        shape[-1] == classes or (len(shape) > 1 and shape[1] == classes) or (classes == 1 and len(shape) == 1)
    )
