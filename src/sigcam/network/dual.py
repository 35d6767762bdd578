"""A network with two heads: the user's own, untouched, and a sigmoid branch beside it (Eq. 1-3, 11)."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sigcam.core.errors import AttachError, CheckpointError
from sigcam.models.classifier import Preprocess, declared_transform
from sigcam.models.state_dict import write_whole
from sigcam.network.hooks import Tap, casting_anew
from sigcam.network.layout import Place
from sigcam.network.optimize import optimized
from sigcam.network.sigmoid_head import Init, SigmoidHead, Tail, record_tail
from sigcam.network.split import Split, find_split
from sigcam.network.trace import Size


@dataclass(frozen=True)
class Branches:
    """What one pass of the backbone gives: both heads' outputs, and the features they read."""

    softmax: Tensor  # (B, C) what the model itself returns
    sigmoid: Tensor  # (B, C) logits of the sigmoid branch
    features: Tensor  # F (B, N, P, Q)
    pooled: Tensor  # input of the sigmoid head's first trainable layer


@dataclass(frozen=True)
class Passage(Branches):
    """Branches still tied by autograd to `cut`, the output of the layer at `place` as it came, before folding
    to `features`."""

    cut: Tensor
    softmax_logits: Tensor  # (B, C) equal to `softmax`, but before an activation with which the model ends
    images: Tensor  # (B, C, H, W) what the model was given
    place: Place

    @property
    def image(self) -> Size:
        """Height and width of the images."""
        return self.images.shape[-2], self.images.shape[-1]


@dataclass(frozen=True)
class Recording:
    """How autograd gets at the part of the model after some places."""

    inline: bool = True  # gradients from the pass that predicts; False: recording them changes the arithmetic
    forced: bool = False  # the model leaves F under a no_grad of its own


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
        self.named: dict[str, str | None] = {"head": None, "layer": None}  # what the user told `attach`
        self.fitted = False
        self.class_names: tuple[str, ...] | None = None
        self.recipe: dict[str, Any] = {}
        self.transform: Callable[[Any], Tensor] | None = None
        self.input_shape = (3, 224, 224)  # of the image that it was attached with
        self.warned = False  # that the branch is not fitted
        self.linear = frozenset[str]()  # branches whose logits are W mean(F) + b, checked at attach
        self.example: Tensor | None = None  # that it was attached with
        self._recording = dict[tuple[Place, ...], Recording]()
        self._places = dict[str, Place]()
        self._softmax_tail: Tail | None = None
        self.model = self.origin = model  # `origin` is the user's, where `model` is a private copy
        self.eval()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("model", "origin", "transform"):  # modules, but the user's: not registered
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

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
        return self

    def forward(self, images: Tensor) -> Branches:
        """Both branches for (B, C, H, W) images; `.softmax` is bit-equal to the bare model's output in eval
        mode."""
        passage = self.run(images)
        return Branches(passage.softmax, passage.sigmoid, passage.features, passage.pooled)

    def run(self, images: Tensor, *, grad: bool = False) -> Passage:
        """One pass. With `grad`, both heads' logits can be differentiated with respect to `.cut`."""
        return self.run_at((self.split.place,), images, grad=grad)[0]

    def run_at(
        self, places: Sequence[Place], images: Tensor, *, grad: bool = False, swap: Tensor | None = None
    ) -> list[Passage]:
        """One pass, seen from several places: they differ in `.features` and `.cut` alone.

        Args:
            swap: what the model goes on with instead of the (one) place's output; the logits are then theirs.
        """
        recording = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad(), casting_anew():
            how = self.recording_at(tuple(places)) if grad else Recording()
            tap = self._tap(places, images, grad=grad and how.inline, forced=how.forced, swap=swap)
            bare = tap.logits
            if grad and not how.inline:
                tap = self._tap(places, images, grad=True, forced=how.forced)
            with torch.set_grad_enabled(grad or recording):
                sigmoid, pooled = self.sigmoid(tap.inputs)
                tail = self._softmax_tail
                logits = tap.logits if tail is None else tail(tap.outputs).reshape(-1, self.classes)
                size = (images.shape[-2], images.shape[-1])
                return [
                    Passage(bare.detach(), sigmoid, p.fold(cut, size), pooled, cut, logits, images, p)
                    for p, cut in zip(places, tap.cuts, strict=True)
                ]

    def rescore(self, passage: Passage, index: int, features: Tensor) -> Passage:
        """The logits of image `index` had its features been (R, N, P, Q) others: the part of the model after
        F runs on those, the part before it on the one image."""
        fold, image = passage.place.fold, passage.images[index : index + 1]
        swap = fold.undone(features, fold.one_image(passage.cut.detach(), index))
        try:
            return self.run_at((passage.place,), image, swap=swap)[0]
        except RuntimeError:  # what bypasses F has the batch's size: run the model on as many images
            return self.run_at((passage.place,), image.expand(len(features), -1, -1, -1), swap=swap)[0]

    def _tap(
        self,
        places: Sequence[Place],
        images: Tensor,
        *,
        grad: bool = False,
        forced: bool = False,
        swap: Tensor | None = None,
    ) -> Tap:
        hides = getattr(self.model, "hides_nan", False) and not bool(images.isfinite().all())
        model = self.origin if hides else self.model
        how: Any = {"grad": grad, "forced": forced, "outputs": self._softmax_tail is not None, "swap": swap}
        return Tap(model, self.split, places, **how).run(images)

    def place(self, layer: str | nn.Module) -> Place:
        """Where the features of another layer, given by name or itself, leave the network."""
        names = {module: name for name, module in self.model.named_modules()}
        name = layer if isinstance(layer, str) else names.get(layer)
        if name is None:
            raise AttachError(f"this {type(layer).__name__} is no module of {type(self.model).__name__}.")
        if name in (self.split.layer, *self._places):
            return self._places.get(name, self.split.place)
        with torch.inference_mode(False), casting_anew():
            split, _ = find_split(self.model, head=self.named["head"], layer=name, example=self._example())
        if split.heads != self.split.heads:
            raise AttachError(
                f"layer={name!r} lies inside or after the head {', '.join(self.split.heads)}: name one "
                f"before it."
            )
        self._places[name] = split.place
        return split.place

    def around(self, model: nn.Module) -> DualBranch:
        """The same branch beside another model whose modules have the same names: a finer copy, say."""
        other = copy.copy(self)
        other.model = model
        return other

    def _example(self) -> Tensor:
        """What it was attached with, where the model is now."""
        assert self.example is not None
        return self.example.to(next(self.model.parameters()))

    def recording_at(self, places: tuple[Place, ...]) -> Recording:
        """How autograd gets at what follows the places; tried on the example when first asked."""
        if places not in self._recording:
            self._recording[places] = _choose_recording(self, places)
        return self._recording[places]

    def save(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes the branch alone, and what is needed to check that it fits, as safetensors in `dtype`."""
        from safetensors.torch import save

        path = Path(path)
        about = {
            "fingerprint": fingerprint(self.origin),
            "heads": list(self.split.heads),
            "layer": self.split.layer,
            "input": list(self.input_shape),
            "named": self.named,
            "classes": self.classes,
            "class_names": list(self.class_names) if self.class_names else None,
            "fitted": self.fitted,
            "recipe": self.recipe,
        }
        state = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        tensors = {
            name: t.to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True).contiguous()
            for name, t in state.items()
        }
        try:
            write_whole(path, save(tensors, metadata={"sigcam-branch": json.dumps(about)}))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}.") from error

    def __repr__(self) -> str:
        state = "fitted" if self.fitted else "not fitted"
        heads = ", ".join(self.split.heads)
        return (
            f"DualBranch({type(self.model).__name__}: layer={self.split.layer!r}, head={heads!r}, "
            f"{self.classes} {'logit' if self.classes == 1 else 'classes'}, {state})"
        )


# ------------------------------------------------------------------------------------- attach and load


def attach(
    model: nn.Module,
    *,
    head: str | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    init: Init = "fresh",
    optimize: bool = False,
    seed: int = 0,
) -> DualBranch:
    """A DualBranch around the trained classifier, which itself stays as it is.

    Args:
        head: name of the module that returns the logits, where it cannot be found.
        layer: name of the module whose output is F, where another one is wanted.
        example: a (1, C, H, W) input to probe with; by default what the model declares, else 224x224.
        init: "fresh" starts the branch at Normal(0, 0.01), "copy" at the softmax head's weights.
        optimize: works on a private copy of the model as it is now, made faster (folded BatchNorm, memory
            layout); its logits agree with the model's within 1e-4, but are no longer bit-equal.
    """
    model, told = unwrapped(model), example is not None
    for argument, name in (("head", head), ("layer", layer)):
        if name is not None and not isinstance(name, str):
            raise AttachError(f"{argument}= takes the module's name, a string, not {type(name).__name__}.")
    if example is not None and not isinstance(example, Tensor):
        raise AttachError(f"example= takes a (1, C, H, W) tensor, not {type(example).__name__}.")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise AttachError(
            f"this {type(model).__name__} was made inside torch.inference_mode(), so that no gradient can "
            "pass its weights: make it, or a copy of it, outside."
        )
    with torch.inference_mode(False), casting_anew():
        example = None if example is None else example.clone()  # it may have been made in inference mode
        split, example = find_split(model, head=head, layer=layer, example=example, seed=seed)
        heads = [model.get_submodule(name) for name in split.heads]
        sigmoid = SigmoidHead(heads, classes=split.classes, init=init, seed=seed)
        origin = model
        if optimize:
            model = optimized(model, example, keep=(split.layer, *split.heads, *split.last))
        net = DualBranch(model, split, sigmoid)
        net.origin = origin
        net.named = {"head": head, "layer": layer}
        if not split.whole:
            sigmoid.tail = record_tail(model, split, example)
        if split.output == "probabilities":
            net._softmax_tail = sigmoid.tail or record_tail(model, split, example)
        with torch.no_grad():
            inputs = net._tap((split.place,), example).inputs
        sigmoid.prepare(inputs)
        net.example = example.detach()
        net.recording_at((split.place,))
        net.linear = frozenset(b for b in ("softmax", "sigmoid") if _is_gap_linear(net, b, example))
        net.input_shape = (int(example.shape[1]), int(example.shape[2]), int(example.shape[3]))
    net.transform = declared_transform(model)
    if isinstance(net.transform, Preprocess) and not told:  # a timm model may be built for another size
        net.transform = replace(net.transform, height=net.input_shape[1], width=net.input_shape[2])
    return net


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    return model if inner is None else unwrapped(inner)


def _choose_recording(net: DualBranch, places: tuple[Place, ...]) -> Recording:
    """Whether gradients can come from the pass that predicts, bit for bit; checked by doing it."""
    example = net._example()
    with torch.no_grad():
        bare = net._tap(places, example)
        for forced in (False, True):
            tap = net._tap(places, example, grad=True, forced=forced)
            entering = [leaf for leaf in pytree.tree_leaves(tap.inputs) if isinstance(leaf, Tensor)]
            if any(leaf.requires_grad for leaf in entering):
                before = [leaf for leaf in pytree.tree_leaves(bare.inputs) if isinstance(leaf, Tensor)]
                same = all(torch.equal(a, b) for a, b in zip(before, entering, strict=True))
                return Recording(same and torch.equal(bare.logits, tap.logits), forced)
    raise AttachError(
        f"no gradient passes from layer {places[0].layer!r} to the head {net.split.heads[0]!r}. "
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


def load(
    path: str | Path, model: nn.Module, *, example: Tensor | None = None, optimize: bool = False
) -> DualBranch:
    """The DualBranch that `save` wrote, around the same trained classifier; CheckpointError if it is
    another. `optimize` as for `attach`."""
    from safetensors import SafetensorError, safe_open

    if not isinstance(path, str | Path):
        raise CheckpointError(f"load takes a path, then the model, not {type(path).__name__} first.")
    path, model = Path(path), unwrapped(model)
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
    try:
        about = json.loads(metadata["sigcam-branch"])
        named, heads, classes = about["named"], about["heads"], about["classes"]
        layer, shape = about["layer"], tuple(about["input"])
        wanted, names, recipe, fitted = (about[k] for k in ("fingerprint", "class_names", "recipe", "fitted"))
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} does not say what it was fitted to: make it anew.") from None
    known = {name: value for name, value in named.items() if value is None or _has_module(model, value)}
    if example is None:
        weight = next(model.parameters())
        example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(weight)
    head, place = known.get("head"), known.get("layer")
    net = attach(model, head=head, layer=place, example=example, optimize=optimize)
    name = type(net.model).__name__
    ours, theirs = (net.split.heads, net.split.layer), (tuple(heads), layer)
    if known != named or classes != net.classes or ours != theirs:
        raise CheckpointError(
            f"{path} was fitted to a head {', '.join(heads)} with {classes} classes after the layer {layer}; "
            f"this {name} has {', '.join(net.split.heads)} with {net.classes} after {net.split.layer}. "
            "Load it onto the model it was fitted to."
        )
    if wanted != fingerprint(net.origin):
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
    net.class_names = tuple(names) if names else None
    net.recipe, net.fitted = recipe, fitted
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
