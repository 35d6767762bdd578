"""A network with two heads: the user's own, untouched, and a sigmoid branch beside it (Eq. 1-3, 11)."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sigcam.errors import AttachError, CheckpointError
from sigcam.split import ACTIVATIONS, OUTPUT_ACTIVATIONS, Split, find_split, is_activation, is_norm
from sigcam.trace import Size, borrowed, logits_of

Init = Literal["fresh", "copy"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # what one call of a head module was given


@dataclass(frozen=True)
class Branches:
    """What one pass of the backbone gives: both heads' outputs, and the features they read."""

    softmax: Tensor  # (B, C) what the model itself returns
    sigmoid: Tensor  # (B, C) logits of the sigmoid branch
    features: Tensor  # F (B, N, P, Q)
    pooled: Tensor  # input of the sigmoid head's first trainable layer


@dataclass(frozen=True)
class Passage(Branches):
    """Branches still tied by autograd to `cut`, the layer's output as it came, before folding to
    `features`."""

    cut: Tensor
    softmax_logits: Tensor  # (B, C) equal to `softmax`, but before an activation with which the model ends
    image: Size


# ------------------------------------------------------------------------------------ the sigmoid head


@dataclass
class Tail:
    """The model's own steps from its output layers' outputs to its logits, activations left out, to be
    repeated."""

    steps: list[tuple[Callable[..., Any], Any, Any, int]] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)  # id of a recorded tensor -> slot
    kept: list[Any] = field(default_factory=list)  # keeps those ids in use while recording
    result: int = 0
    batch: int = 1

    def __call__(self, outputs: Sequence[Tensor]) -> Tensor:
        values: dict[int, Any] = dict(enumerate(outputs))
        for function, args, kwargs, slot in self.steps:
            args, kwargs = pytree.tree_map(
                lambda leaf: values[leaf.index] if isinstance(leaf, _Slot) else leaf, (args, kwargs)
            )
            if getattr(function, "__name__", "") in (
                "view",
                "reshape",
                "expand",
            ):  # sizes hold the recorded batch
                args = pytree.tree_map(lambda leaf: len(outputs[0]) if leaf is _BATCH else leaf, args)
            values[slot] = function(*args, **kwargs)
        result = values[self.result]
        assert isinstance(result, Tensor)
        return result


@dataclass(frozen=True)
class _Slot:
    index: int


_BATCH = object()


class _TailRecorder(TorchFunctionMode):
    def __init__(self, tail: Tail, model: nn.Module) -> None:
        super().__init__()
        self.tail = tail
        self.own = {id(t) for t in (*model.parameters(), *model.buffers())}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tail, name = self.tail, getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        depends = any(isinstance(leaf, Tensor) and id(leaf) in tail.slots for leaf in leaves)
        if not depends or not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            return out
        if name in OUTPUT_ACTIVATIONS:
            tail.slots[id(out)] = tail.slots[id(args[0])]  # left out: what follows reads its input
            tail.kept.append(out)
            return out

        def reference(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if id(leaf) in tail.slots:
                    return _Slot(tail.slots[id(leaf)])
                if leaf.numel() > 1 and id(leaf) not in self.own:
                    raise AttachError(
                        "the outputs of the heads are combined with other values of the same pass, so the "
                        "branch "
                        "cannot stand beside them. Name one head: attach(model, head='...')."
                    )
            return leaf

        def size(leaf: Any) -> Any:
            return _BATCH if type(leaf) is int and leaf == tail.batch else leaf

        recorded, recorded_kwargs = pytree.tree_map(reference, (args, kwargs))
        if name in ("view", "reshape", "expand") and len(recorded) > 1:
            first = recorded[1]
            first = (size(first[0]), *first[1:]) if isinstance(first, tuple | list) and first else size(first)
            recorded = (recorded[0], first, *recorded[2:])
        for leaf in pytree.tree_leaves(out):
            tail.kept.append(leaf)
        slot = len(tail.kept) + 1_000
        tail.slots[id(out)] = slot
        tail.kept.append(out)
        tail.steps.append((func, recorded, recorded_kwargs, slot))
        return out


def record_tail(model: nn.Module, split: Split, example: Tensor) -> Tail:
    """The tail after `split.last`, from one pass over the example."""
    tail = Tail(batch=len(example))

    def source(index: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                out = out.clone()  # an in-place activation must not rename the output layer's result
            tail.slots[id(out)] = index
            tail.kept.append(out)
            return out

        return hook

    with torch.inference_mode(False), torch.no_grad(), borrowed(model) as handles:
        for index, name in enumerate(split.last):
            handles.append(model.get_submodule(name).register_forward_hook(source(index)))
        with _TailRecorder(tail, model):
            logits = logits_of(model(example), len(example))
    if id(logits) not in tail.slots:
        raise AttachError(
            f"cannot follow {type(model).__name__} from {', '.join(split.last)} to its logits. "
            "Name a module that returns them: attach(model, head='...')."
        )
    tail.result = tail.slots[id(logits)]
    tail.slots, tail.kept = {}, []
    return tail


class SigmoidHead(nn.Module):
    """Copies of the head modules with fresh layers, fed what the originals are fed; returns (B, C) logits."""

    def __init__(self, heads: Sequence[nn.Module], *, classes: int, init: Init, seed: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(_copy(head) for head in heads)
        self.classes = classes
        self.tail: Tail | None = None  # None: the one copy returns the logits up to a reshape
        self._widths: tuple[int, ...] = ()  # columns of `pooled` that belong to each copy
        self._blanks: list[Inputs] = []  # one image's zero inputs, for running from `pooled`
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            keep = is_norm(module)
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(not keep and parameter.is_floating_point())
                parameter.grad = None
                if not keep and init == "fresh":
                    _renew(parameter, generator)

    def first_layers(self) -> list[nn.Module]:
        """The first trainable layer of each copy."""
        return [
            next(m for m in c.modules() if any(p.requires_grad for p in m.parameters(recurse=False)))
            for c in self.copies
        ]

    def forward(self, inputs: Sequence[Inputs]) -> tuple[Tensor, Tensor]:
        """(logits (B, C), pooled), from what each head module was given."""
        pooled: list[Tensor] = []
        with _pre_hooks(self.first_layers(), [lambda m, args: pooled.append(args[0])] * len(self.copies)):
            outputs = [c(*args, **kwargs) for c, (args, kwargs) in zip(self.copies, inputs, strict=True)]
        joined = pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)
        return self._finish(outputs), joined

    def from_pooled(self, pooled: Tensor) -> Tensor:
        """Logits (B, C) from `pooled`, skipping what stands before the first trainable layer."""
        parts = pooled.split(self._widths, 1) if len(self.copies) > 1 else (pooled,)
        outputs, rows = [], len(pooled)
        for module, first, part, (args, kwargs) in zip(
            self.copies, self.first_layers(), parts, self._blanks, strict=True
        ):
            if first is module:
                outputs.append(module(part))
                continue
            blank = _on_tensors(lambda zero: zero.expand(rows, *zero.shape[1:]), (args, kwargs))
            with _pre_hooks([first], [lambda m, args, part=part: (part, *args[1:])]):
                outputs.append(module(*blank[0], **blank[1]))
        return self._finish(outputs)

    def remember(self, inputs: Sequence[Inputs]) -> None:
        """Notes the shapes of one image's inputs, which `from_pooled` needs."""
        self._blanks = _on_tensors(lambda leaf: torch.zeros_like(leaf[:1]), list(inputs))
        widths: list[int] = []
        with (
            torch.no_grad(),
            _pre_hooks(
                self.first_layers(), [lambda m, args: widths.append(args[0].shape[1])] * len(self.copies)
            ),
        ):
            for module, (args, kwargs) in zip(self.copies, inputs, strict=True):
                module(*args, **kwargs)
        self._widths = tuple(widths)

    def leave_out_last_activation(self, inputs: Sequence[Inputs]) -> None:
        """Replaces the activations that run after each copy's last layer by nothing: a logit may be
        negative."""
        for head, (args, kwargs) in zip(self.copies, inputs, strict=True):
            order: list[nn.Module] = []
            leaves = [m for m in head.modules() if not list(m.children())]
            with (
                _pre_hooks(leaves, [lambda m, args, seen=order: seen.append(m)] * len(leaves)),
                torch.no_grad(),
            ):
                head(*_on_tensors(Tensor.clone, args), **kwargs)
            last = max((i for i, m in enumerate(order) if any(True for _ in m.parameters())), default=-1)
            for module in order[last + 1 :]:
                if is_activation(module) and order.count(module) == 1:
                    _replace(head, module, nn.Identity())

    def _finish(self, outputs: list[Tensor]) -> Tensor:
        logits = outputs[0] if self.tail is None else self.tail(outputs)
        return logits.reshape(-1, self.classes)


def _on_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _copy(head: nn.Module) -> nn.Module:
    twin = copy.deepcopy(head)
    for module in twin.modules():
        module._forward_hooks.clear()  # the user's hooks watch the user's head
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        for key, hook in list(module._forward_pre_hooks.items()):
            if not type(hook).__module__.startswith(
                "torch.nn.utils"
            ):  # weight norm computes its weight in one
                del module._forward_pre_hooks[key]
    return twin.eval()


@torch.no_grad()
def _renew(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Normal(0, 0.01) for weights, 0 for biases (PROTOCOL 1.5)."""
    if parameter.ndim < 2:
        parameter.zero_()
    else:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in root.modules():
        for name, child in parent.named_children():
            if child is old:
                setattr(parent, name, new)


@contextmanager
def _pre_hooks(modules: Sequence[nn.Module], hooks: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Hooks on modules of our own."""
    handles = [m.register_forward_pre_hook(hook) for m, hook in zip(modules, hooks, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ----------------------------------------------------------------------------------------- the network


class DualBranch(nn.Module):
    """The user's classifier and a sigmoid branch on the same features; calling it gives both from one pass.

    Only the sigmoid head is registered: `parameters()`, `train()` and `state_dict()` reach nothing else.
    Make one with `attach` or `load`.
    """

    def __init__(self, model: nn.Module, split: Split, sigmoid: SigmoidHead) -> None:
        super().__init__()
        self.sigmoid = sigmoid
        self.split = split
        self.fitted = False
        self.class_names: tuple[str, ...] | None = None
        self.recipe: dict[str, Any] = {}
        self.transform: Callable[[Any], Tensor] | None = None
        self.warned = False  # that the branch is not fitted
        self.linear: frozenset[str] = (
            frozenset()
        )  # branches whose logits are W mean(F) + b, checked at attach
        self.inline = True  # gradients from the same pass; False: recording them changes the arithmetic
        self.forced = False  # the model leaves F under a no_grad of its own
        self._softmax_tail: Tail | None = None
        self.__dict__["_model"] = (model,)  # not registered: it stays the user's
        self.eval()

    @property
    def model(self) -> nn.Module:
        """The user's classifier."""
        model: nn.Module = self.__dict__["_model"][0]
        return model

    @property
    def head(self) -> nn.Module | tuple[nn.Module, ...]:
        """The softmax head's module; a tuple where the model combines several."""
        heads = tuple(self.model.get_submodule(name) for name in self.split.heads)
        return heads[0] if len(heads) == 1 else heads

    @property
    def layer(self) -> nn.Module:
        """The module whose output is F."""
        return self.model.get_submodule(self.split.layer)

    @property
    def classes(self) -> int:
        """Number of logits, C."""
        return self.split.classes

    @property
    def device(self) -> torch.device:
        """Where the sigmoid branch lives, and images are expected."""
        return next(self.sigmoid.parameters()).device

    def last_layer(self, branch: Literal["softmax", "sigmoid"]) -> nn.Module:
        """The branch's output layer (the first of several)."""
        name, head = self.split.last[0], self.split.heads[0]
        if branch == "softmax":
            return self.model.get_submodule(name)
        return self.sigmoid.copies[0].get_submodule(name[len(head) :].lstrip("."))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DualBranch:
        self.model._apply(fn, recurse)  # net.to(device) moves both, or the two could not meet
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.sigmoid._blanks = _on_tensors(fn, self.sigmoid._blanks)
        return self

    def forward(self, images: Tensor) -> Branches:
        """Both branches for (B, C, H, W) images; `.softmax` is bit-equal to the bare model's output in eval
        mode."""
        passage = self.run(images)
        return Branches(passage.softmax, passage.sigmoid, passage.features, passage.pooled)

    def run(self, images: Tensor, *, grad: bool = False) -> Passage:
        """One pass. With `grad`, both heads' logits can be differentiated with respect to `.cut`."""
        recording = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            images = images.clone() if images.is_inference() else images
            tap = self._tap(images, grad=grad and self.inline)
            bare = tap.logits
            if grad and not self.inline:
                tap = self._tap(images, grad=True)
            with torch.set_grad_enabled(grad or recording):
                sigmoid, pooled = self.sigmoid(tap.inputs)
                tail = self._softmax_tail
                softmax_logits = tap.logits if tail is None else tail(tap.outputs).reshape(-1, self.classes)
                size = (images.shape[-2], images.shape[-1])
                features = self.split.fold(tap.cut, size)
        return Passage(bare.detach(), sigmoid, features, pooled, tap.cut, softmax_logits, size)

    def _tap(self, images: Tensor, *, grad: bool) -> _Tap:
        """Runs the model with our hooks on it, and only for as long as that takes."""
        tap = _Tap(self, grad)
        with ExitStack() as stack:
            handles = stack.enter_context(borrowed(self.model))
            handles += tap.hooks()
            if self.split.activation or (grad and self.forced):
                stack.enter_context(tap)
            stack.enter_context(torch.no_grad())  # also what ends the recording that a hook began
            output = self.model(images)
        tap.logits = logits_of(output, len(images))
        return tap.checked()

    def save(self, path: str | Path) -> None:
        """Writes the branch alone, with what is needed to check that it fits, as safetensors."""
        from safetensors.torch import save_file

        path = Path(path)
        about = {
            "fingerprint": fingerprint(self.model),
            "heads": list(self.split.heads),
            "layer": self.split.layer,
            "classes": self.classes,
            "class_names": list(self.class_names) if self.class_names else None,
            "fitted": self.fitted,
            "recipe": self.recipe,
        }
        tensors = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.state_dict().items()
        }
        temporary = path.with_name(path.name + ".part")
        try:
            save_file(tensors, temporary, metadata={"sigcam-branch": json.dumps(about)})
            temporary.replace(path)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}.") from error
        finally:
            temporary.unlink(missing_ok=True)

    def __repr__(self) -> str:
        state = "fitted" if self.fitted else "not fitted"
        heads = ", ".join(self.split.heads)
        return (
            f"DualBranch({type(self.model).__name__}: layer={self.split.layer!r}, head={heads!r}, "
            f"{self.classes} classes, {state})"
        )


class _Tap(TorchFunctionMode):
    """What our hooks take from one pass of the model; a function mode only where one is needed."""

    def __init__(self, net: DualBranch, grad: bool) -> None:
        super().__init__()
        self.net, self.grad, self.thread = net, grad, threading.get_ident()
        self.inputs: list[Inputs] = []
        self.outputs: list[Tensor] = []
        self.logits: Tensor
        self._cut: Tensor | None = None
        self._awaited: Tensor | None = None
        self._calls = 0

    @property
    def cut(self) -> Tensor:
        assert self._cut is not None
        return self._cut

    def hooks(self) -> list[Any]:
        model, split = self.net.model, self.net.split
        handles = [model.get_submodule(split.layer).register_forward_hook(self.at_layer)]
        for name in split.heads:
            head = model.get_submodule(name)
            handles.append(head.register_forward_pre_hook(self.before_head, with_kwargs=True))
        if self.net._softmax_tail is not None:
            handles += [
                model.get_submodule(name).register_forward_hook(self.after_last) for name in split.last
            ]
        return handles

    def at_layer(self, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        if threading.get_ident() != self.thread:
            return None  # somebody else is using the model meanwhile
        self._calls += 1
        if self._calls != self.net.split.call:
            return None
        if self.net.split.activation:
            self._awaited = out
            return None
        return self.take(out)

    def take(self, out: Tensor) -> Tensor:
        """Cuts the graph at F and hands the model a copy, which an in-place step may change."""
        self._cut = out.detach()
        if not self.grad:
            return out.clone()
        self._cut.requires_grad_()
        torch.set_grad_enabled(True)  # from here on; the no_grad around the pass ends it
        return self._cut.clone()

    def before_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self.thread:
            self.inputs.append(_on_tensors(Tensor.clone, (args, kwargs)))

    def after_last(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if threading.get_ident() == self.thread:
            self.outputs.append(out.clone())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._awaited is not None and args and args[0] is self._awaited and func.__name__ in ACTIVATIONS:
            self._awaited = None
            return self.take(func(*args, **kwargs))
        if self._cut is not None and self.grad:
            with torch.enable_grad():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def checked(self) -> _Tap:
        split = self.net.split
        if self._cut is None:
            raise AttachError(
                f"layer {split.layer!r} did not run in this pass as it did when sigcam was attached."
            )
        if len(self.inputs) != len(split.heads):
            raise AttachError(
                f"head {split.heads[0]!r} did not run once in this pass, as it did when sigcam was attached."
            )
        return self


# ------------------------------------------------------------------------------------- attach and load


def attach(
    model: nn.Module,
    *,
    head: str | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    init: Init = "fresh",
    seed: int = 0,
) -> DualBranch:
    """A DualBranch around the trained classifier, which itself stays as it is.

    Args:
        head: name of the module that returns the logits, where it cannot be found.
        layer: name of the module whose output is F, where another one is wanted.
        example: a (1, C, H, W) input to probe with; by default what the model declares, else 224x224.
        init: "fresh" starts the branch at Normal(0, 0.01), "copy" at the softmax head's weights.
    """
    given = model
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(
        model, "_orig_mod"
    ):
        inner = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        assert isinstance(inner, nn.Module)
        model = inner
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, not {type(given).__name__}.")
    split, example = find_split(model, head=head, layer=layer, example=example, seed=seed)
    heads = [model.get_submodule(name) for name in split.heads]
    with torch.inference_mode(False):
        sigmoid = SigmoidHead(heads, classes=split.classes, init=init, seed=seed)
        net = DualBranch(model, split, sigmoid)
        if not split.whole:
            sigmoid.tail = record_tail(model, split, example)
        if split.output == "probabilities":
            net._softmax_tail = sigmoid.tail or record_tail(model, split, example)
        with torch.no_grad():
            inputs = net._tap(example, grad=False).inputs
        sigmoid.leave_out_last_activation(inputs)
        sigmoid.remember(inputs)
        _choose_gradients(net, example)
        net.linear = frozenset(b for b in ("softmax", "sigmoid") if _is_gap_linear(net, b, example))
    net.transform = getattr(given, "transform", None)
    return net


def _choose_gradients(net: DualBranch, example: Tensor) -> None:
    """Whether gradients can come from the pass that predicts, bit for bit; checked by doing it."""
    with torch.no_grad():
        bare = net._tap(example, grad=False)
        for net.forced in (False, True):
            tap = net._tap(example, grad=True)
            entering = [leaf for leaf in pytree.tree_leaves(tap.inputs) if isinstance(leaf, Tensor)]
            if any(leaf.requires_grad for leaf in entering):
                before = [leaf for leaf in pytree.tree_leaves(bare.inputs) if isinstance(leaf, Tensor)]
                same = all(torch.equal(a, b) for a, b in zip(before, entering, strict=True))
                net.inline = same and torch.equal(bare.logits, tap.logits)
                return
    raise AttachError(
        f"no gradient passes from layer {net.split.layer!r} to the head {net.split.heads[0]!r}. "
        "Name another layer: attach(model, layer='...')."
    )


def _is_gap_linear(net: DualBranch, branch: Literal["softmax", "sigmoid"], example: Tensor) -> bool:
    """Whether the branch's logits are its last layer's weight times the mean of F over the grid (Eq. 3)."""
    weight = gap_weight(net.last_layer(branch))
    with torch.no_grad():
        passage = net.run(example)
        mean = passage.features.double().mean((2, 3))  # (B, N)
        if len(net.split.heads) > 1 or weight is None or weight[0].shape != (net.classes, mean.shape[1]):
            return False
        if not bool(weight[0].count_nonzero()):
            return False  # an all-zero head would agree with anything
        logits = passage.softmax_logits if branch == "softmax" else passage.sigmoid
        predicted = mean @ weight[0].double().T + weight[1].double()
        scale = logits.double().abs().max().clamp(min=1e-12)
        tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2
        return bool((predicted - logits.double()).abs().max() <= tolerance * scale)


def gap_weight(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """(W (C, N), b (C,)) of a linear layer or 1x1 convolution; None for any other."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2 or weight[0, 0].numel() != 1:
        return None
    bias = getattr(layer, "bias", None)
    return weight.flatten(1), bias if isinstance(bias, Tensor) else weight.new_zeros(len(weight))


def load(path: str | Path, model: nn.Module, *, example: Tensor | None = None) -> DualBranch:
    """The DualBranch that `save` wrote, around the same trained classifier; CheckpointError if it is
    another."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable branch file ({error}).") from error
    if "sigcam-branch" not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a sigcam branch: make one with `sigcam fit`."
        )
    about = json.loads(metadata["sigcam-branch"])
    net = attach(model, layer=about["layer"] if _has_module(model, about["layer"]) else None, example=example)
    name = type(net.model).__name__
    if about["classes"] != net.classes or about["heads"] != list(net.split.heads):
        raise CheckpointError(
            f"{path} was fitted to a head {', '.join(about['heads'])} with {about['classes']} classes; this "
            f"{name} has "
            f"{', '.join(net.split.heads)} with {net.classes}. Load it onto the model it was fitted to."
        )
    if about["fingerprint"] != fingerprint(net.model):
        raise CheckpointError(
            f"{path} was fitted to a {name} with other weights, so its maps would mean nothing here. "
            "Load it onto the model it was fitted to, or fit again."
        )
    bad = next((key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    if bad:
        raise CheckpointError(f"{path} holds NaN or infinite numbers in {bad}: fit again.")
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit this {name}: {' '.join(str(error).split())[:200]}"
        ) from error
    net.class_names = tuple(about["class_names"]) if about["class_names"] else None
    net.recipe, net.fitted = about["recipe"], about["fitted"]
    return net


def _has_module(model: nn.Module, name: str) -> bool:
    return name in dict(model.named_modules())


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter and buffer that shapes what the model computes in eval mode."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or name.endswith("num_batches_tracked"):
            continue
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(data.shape)} {data.dtype}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
