"""Where a classifier splits: which module is its head, and which output is F.

One probing pass records what every module returns. The *output layers* are the last layers with a weight
matrix on the way to the logits. F is the last spatial output before them through which gradient still reaches
the grid (see `feature_layer`); the head is the outermost module around the output layer that starts after F
and returns the logits.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError, NoLogits
from sigcam.core.types import GridSize
from sigcam.network.feature_layer import FeatureFinder, FeatureLayout, FeaturePoint
from sigcam.network.modules import (
    ACTIVATIONS,
    OUTPUT_ACTIVATIONS,
    has_parameters,
    is_activation,
    is_norm,
    is_within,
)
from sigcam.network.trace import ModuleOutput, Trace, digest, listed, logits_of, probe_model


@dataclass(frozen=True)
class Split:
    """Where sigcam hooks into a network, by module name.

    Args:
        heads: the head module; several where the model combines several outputs (a distilled DeiT).
        whole: the one head module returns the logits up to a reshape, so its copy does too. Otherwise the
            model's own steps from the output layers to the logits are repeated with the copies' outputs.
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
        """Where F is taken."""
        return FeaturePoint(self.layer, self.call, self.activation, self.fold)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Split":
        """Return what `to_json` wrote; KeyError, TypeError or ValueError for most else."""
        fold = dict(values["fold"])
        sizes = {name: GridSize(*map(int, fold[name])) for name in ("grid", "image")}
        names = {name: tuple(map(str, values[name])) for name in ("heads", "last")}
        spatial = tuple((str(name), int(n), int(p), int(q)) for name, n, p, q in values["spatial"])
        changed: Any = {"fold": FeatureLayout(**{**fold, **sizes}), **names, "spatial": spatial}
        return Split(**{**values, **changed})


def find_split(
    model: nn.Module,
    *,
    head: str | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    seed: int = 0,
) -> tuple[Split, Tensor]:
    """Return the model's split and the example it was found with; AttachError says what is ambiguous."""
    names = [name for name, _ in model.named_modules() if name]
    for argument, name in (("head", head), ("layer", layer)):
        if name is not None and name not in names:
            close = ", ".join(map(repr, get_close_matches(name, names, n=3, cutoff=0.4)))
            hint = f": did you mean {close}?" if close else f". Its modules: {listed(names)}."
            raise AttachError(f"{argument}={name!r} is not a module of {type(model).__name__}{hint}")
    example, trace, output = probe_model(model, example, seed)
    with trace.recording():
        logits = logits_of(output, len(example))
    if not bool(torch.isfinite(logits).all()):
        raise AttachError(
            f"{type(model).__name__} returns NaN or infinite logits for a random input: check its weights, "
            "or pass an input that it knows: attach(model, example=...)."
        )
    head_finder = _HeadFinder(model, trace, logits)
    last = head_finder.output_layers() if head is None else [head_finder.named_head(head)]
    feature_finder = FeatureFinder(model, trace, logits, example, last)
    features, fold = feature_finder.last_layer() if layer is None else feature_finder.named_layer(layer)
    module = trace.outermost(features)
    if head is None:
        heads, whole = head_finder.heads(last, module.name)
    else:
        heads, whole = (head,), head_finder.returns_logits(last[0])
        inner = head_finder.last_layers(head)
        if whole and len(inner) == 1 and _has_outputs(inner[0], logits.shape[1]):
            last = inner
    split = Split(
        heads=heads,
        whole=whole,
        last=tuple(o.name for o in last),
        layer=module.name,
        call=module.call,
        activation=feature_finder.activation_follows(features),
        fold=fold,
        classes=logits.shape[1],
        output=head_finder.output_kind(last),
        spatial=feature_finder.layers_until(features),
    )
    return split, example


class _HeadFinder:
    """Finds the output layers and the head in one trace."""

    def __init__(self, model: nn.Module, trace: Trace, logits: Tensor) -> None:
        self.model, self.trace, self.logits, self.digest = model, trace, logits, digest(logits)
        self.kind, self.classes = type(model).__name__, logits.shape[1]

    def last_layers(self, inside: str = "") -> list[ModuleOutput]:
        """The last layers with a weight matrix before the logits, inside the module; or norms after them."""
        layers = [o for o in self.trace.outputs if self.is_layer(o.module) and is_within(o.name, inside)]
        values = {o.value for o in layers}  # a norm right on an output layer's logits is part of the tail
        norms = [o for o in self.trace.outputs if is_norm(o.module)]
        layers += [o for o in norms if len(o.shape) > 2 or not values & {*o.inputs}]
        before = self.trace.flow.reaching([self.trace.value(self.logits)])
        reaching = [o for o in layers if o.value in before]
        ancestors = self.trace.flow.ancestors(o.value for o in reaching)
        return [o for o in reaching if not any(o.value in ancestors[p.value] for p in reaching if p is not o)]

    def output_layers(self) -> list[ModuleOutput]:
        """The last layers, which must have C outputs each and run once."""
        last = self.last_layers()
        wrong = not last or any(is_norm(o.module) or not _has_outputs(o, self.classes) for o in last)
        headless = getattr(self.model, "num_classes", None) == 0  # timm's feature extractors
        if wrong or headless or self.head_is_removed(last[-1].end):
            raise NoLogits(
                f"{self.kind} has no head with parameters: its {tuple(self.logits.shape)} output is not made "
                f"by a layer with {self.classes} outputs. Is it a feature extractor (num_classes=0)? Give it "
                "a classifier, or name the module: attach(model, head='...')."
            )
        if any(self.trace.runs[o.name] > 1 for o in last):
            raise AttachError(
                f"the output layer {last[0].name!r} of {self.kind} runs several times in one pass. Put what "
                "makes one output of these into one module and name it: attach(model, head='...')."
            )
        return last

    def head_is_removed(self, time: int) -> bool:
        """Whether an Identity returns the "logits", and they come out of a hidden layer's activation."""
        replaced = any(type(o.module) is nn.Identity and self.returns_logits(o) for o in self.trace.outputs)
        hidden = ACTIVATIONS - {"sigmoid", "sigmoid_", "logsigmoid"}
        return replaced and any(call.name in hidden for call in self.trace.calls if call.time > time)

    def is_layer(self, module: nn.Module) -> bool:
        """Whether it has a weight matrix, and no children with parameters unless the matrix is C wide."""
        named = [(name.split("."), p) for name, p in module.named_parameters()]
        direct = [p for path, p in named if len(path) == 1 or path[0] == "parametrizations"]
        matrices = [p for p in direct if p.ndim > 1]
        if not matrices or is_norm(module):
            return False
        return len(direct) == len(named) or any(p.ndim == 2 and self.classes in p.shape for p in matrices)

    def named_head(self, name: str) -> ModuleOutput:
        """The output of the module that `head=` names."""
        able = [o for o in self.trace.outputs if has_parameters(o.module) and _has_outputs(o, self.classes)]
        able_names = listed([repr(o.name) for o in able[::-1] if o.name], most=3)
        valid = f"Modules with {self.classes} outputs: {able_names or 'none'}."
        output = self.trace.last_output(name)
        if output is None:
            raise AttachError(f"head={name!r} did not run, or returned no tensor. {valid}")
        if output not in able:
            returned = f"returns {tuple(output.shape)}, not {self.classes} logits"
            reason = returned if has_parameters(output.module) else "has no parameters"
            raise AttachError(f"head={name!r} ({type(output.module).__name__}) {reason}. {valid}")
        return output

    def heads(self, last: list[ModuleOutput], layer: str) -> tuple[tuple[str, ...], bool]:
        """The outermost module after F that returns the logits, True; else one per output layer, False."""
        for output in reversed(self.trace.outputs):  # outer modules return after inner ones
            holds_last = all(is_within(o.name, output.name) for o in last)
            once = holds_last and not is_within(layer, output.name) and self.trace.runs[output.name] == 1
            if once and self.returns_logits(output):
                if self.has_functional_activation(last[-1].end, output.name):
                    break
                return (output.name,), True
        return tuple(self.trace.outermost(o, without=layer).name for o in last), False

    def has_functional_activation(self, time: int, head: str) -> bool:
        """Whether an activation after that time is not a module of the head, which a copy could leave out."""
        inside = [o for o in self.trace.outputs if o.start > time and is_within(o.name, head)]
        modules = [o for o in inside if is_activation(o.module) and self.trace.runs[o.name] == 1]
        after = [c.time for c in self.trace.calls if c.time > time and c.name in OUTPUT_ACTIVATIONS]
        return any(not any(o.start < t < o.end for o in modules) for t in after)

    def returns_logits(self, output: ModuleOutput) -> bool:
        """Whether the output equals the logits up to a reshape."""
        return output.digest == self.digest

    def output_kind(self, last: list[ModuleOutput]) -> Literal["logits", "probabilities"]:
        """Whether the model's output is logits, or probabilities: rows that sum to 1, or a sigmoid's."""
        rows = self.logits.detach().double()
        if bool((rows < 0).any()) or bool((rows > 1).any()):
            return "logits"
        sums_to_one = self.classes > 1 and torch.allclose(rows.sum(1), torch.ones_like(rows[:, 0]), atol=1e-3)
        after = {call.name for call in self.trace.calls if call.time > last[-1].end}
        return "probabilities" if sums_to_one or after & {"sigmoid", "sigmoid_"} else "logits"


def _has_outputs(output: ModuleOutput, classes: int) -> bool:
    """Whether the output has C channels, last or after the batch; a single channel may be squeezed."""
    shape = tuple(output.shape)
    return classes in (shape[-1:] + shape[1:2]) or (classes == 1 and len(shape) < 2)
