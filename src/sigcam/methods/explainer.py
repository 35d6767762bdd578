"""explain: from images to evidence maps (Eq. 4, 6)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.methods.explanation import Explanation, Scale
from sigcam.methods.formulas import METHODS, method_name
from sigcam.methods.inputs import Classes, Picture, Scores, as_batch, choose_classes
from sigcam.methods.probe import (
    Branch,
    Probe,
    Target,
    TargetName,
    as_target,
    full_precision,
    resize,
    unit_range,
)
from sigcam.network.dilate import dilated
from sigcam.network.dual import DualBranch, Passage
from sigcam.network.layout import Place
from sigcam.network.trace import Size
from sigcam.network.zoom import zoomed

log = logging.getLogger("sigcam")
MapSize = Literal["image", "features"] | Size | None
AT_ONCE = 2**25  # numbers in the weights of as many classes as are asked together
FACTORS = (0.9, 1.0, 1.1)  # of aug_smooth
MOST_NOTES = 5


@dataclass(frozen=True)
class Drawing:
    """How maps are drawn; what `explain` says of its arguments."""

    method: str = "grad-cam"
    branch: Branch = "sigmoid"
    clamp: bool | None = None
    target: Target | TargetName = "class"
    scale: Scale = "unit"
    batch_size: int | None = None
    top_n: int | None = None

    def checked(self) -> Drawing:
        """The same with its defaults filled in; DataError for what does not exist."""
        if self.branch not in ("sigmoid", "softmax", "centred"):
            raise DataError(f"unknown branch {self.branch!r}: there are sigmoid, softmax and centred.")
        if self.scale not in ("unit", "raw"):
            raise DataError(f"unknown scale {self.scale!r}: there are unit and raw.")
        for name, value in (("batch_size", self.batch_size), ("top_n", self.top_n)):
            if value is not None and value < 1:
                raise DataError(f"{name} must be 1 or more, not {value}.")
        as_target(self.target, self.branch)
        clamp = self.clamp
        if clamp is None:  # the softmax baseline keeps its signed weights
            clamp = self.branch == "sigmoid" and self.scale == "unit"
        return replace(self, method=method_name(self.method), clamp=clamp)

    @property
    def target_name(self) -> str:
        """The target's name, or its function's."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "custom")


def explain(
    net: DualBranch,
    images: Tensor | Picture | Sequence[Picture],
    method: str = "grad-cam",
    *,
    branch: Branch = "sigmoid",
    clamp: bool | None = None,
    classes: Classes = None,
    target: Target | TargetName = "class",
    scale: Scale = "unit",
    size: MapSize = None,
    layers: Sequence[str | torch.nn.Module] | None = None,
    zoom: float = 1.0,
    stride: Literal[1] | None = None,
    aug_smooth: bool = False,
    batch_size: int | None = None,
    top_n: int | None = None,
) -> Explanation:
    """Evidence maps for one class per image, in [0, 1], at image size (Eq. 4, 6; clamp: Sec. 3.3).

    Args:
        images: a (B, C, H, W) batch as the model takes it; or pictures (PIL or paths) where `net.transform`
            is known.
        branch: "sigmoid", "softmax", or "centred": the softmax head with the mean over classes taken off.
        clamp: keep positive channel weights only; by default on the sigmoid branch's unit maps.
        classes: an int for all images, one per image, (B, K), "top5", "positive" (evidence above one half)
            or "all"; by default what the softmax head predicts.
        target: the score explained: "class", its logit; "probability"; "finer-cam", its logit against those
            of the classes most like it; or a function of (B, C) logits and (B,) classes that gives (B,)
            scores.
        scale: "unit" is each map from 0 to 1; "raw" is signed, in logits: no ReLU, no scaling.
        size: "image" (default), "features" keeps P x Q (default for "all"), or (height, width).
        layers: maps of these layers (names or modules), fused: their mean, or Layer-CAM's own fusion.
        zoom: how much larger the image is that the maps are drawn from; class and scores stay as they are.
        stride: 1 runs a convolutional network's last stage without its stride: maps twice as fine.
        aug_smooth: the mean over the image and its mirror image, each at 0.9, 1 and 1.1 times its values.
        batch_size: masked images (Score-CAM) or variants of F (Ablation-CAM) in one pass.
        top_n: Score-CAM tries this many channels, those that vary most over the image.
    """
    if not isinstance(net, DualBranch):
        raise DataError(
            f"explain takes what attach returns, not {type(net).__name__}: net = sigcam.attach(model)."
        )
    how = Drawing(method, branch, clamp, target, scale, batch_size, top_n).checked()
    if stride not in (None, 1):
        raise DataError(f"stride is 1 (no stride in the last stage) or None, not {stride!r}.")
    batch, pictures = as_batch(net, images)
    places = tuple(net.place(layer) for layer in layers) if layers else (net.split.place,)
    if len(places) > 1 and scale == "raw":
        raise DataError("scale='raw' is in logits of one layer: name one in layers=, or use scale='unit'.")
    altered = zoom != 1 or stride is not None or aug_smooth
    passages = net.run_at(places, batch, grad=_needs_graph(net, how, places) and not altered)
    plain = iter([View(net, passages)])
    views = _views(net, batch, places, how, zoom, stride, aug_smooth) if altered else plain
    found = _explained(net, passages[0], views, how, classes, size)
    for note in found.notes:
        log.warning(note)
    return replace(found, pictures=pictures, images=batch)


def explain_passage(
    net: DualBranch, passage: Passage, how: Drawing, *, classes: Classes = None, size: MapSize = None
) -> Explanation:
    """As `explain`, from what `net.run(images, grad=True)` gave: one pass serves any number of them."""
    return _explained(net, passage, iter([View(net, [passage])]), how.checked(), classes, size)


@dataclass(frozen=True)
class View:
    """One pass, seen from each layer, of the network or of a finer copy, over images mirrored or not."""

    net: DualBranch
    passages: list[Passage]
    mirrored: bool = False


def _needs_graph(net: DualBranch, how: Drawing, places: tuple[Place, ...]) -> bool:
    """Whether gradients must come from autograd: a linear head's are its weights."""
    source = "sigmoid" if how.branch == "sigmoid" else "softmax"
    return source not in net.linear or places != (net.split.place,)


def _views(
    net: DualBranch,
    images: Tensor,
    places: tuple[Place, ...],
    how: Drawing,
    zoom: float,
    stride: Literal[1] | None,
    aug_smooth: bool,
) -> Iterator[View]:
    """The passes that maps are drawn from, one after the other."""
    grad = _needs_graph(net, how, places)
    if grad:
        net.recording_at(places)  # at the native size, which a copy for larger images would not take
    net, images = zoomed(net if stride is None else dilated(net), images, zoom)
    for mirrored, factor in product((False, True), FACTORS) if aug_smooth else [(False, 1.0)]:
        view = (images.flip(-1) if mirrored else images) * factor
        yield View(net, net.run_at(places, view, grad=grad), mirrored)


def _explained(
    net: DualBranch, native: Passage, views: Iterator[View], how: Drawing, classes: Classes, size: MapSize
) -> Explanation:
    """The explanation of what `native` predicts, by the mean of the maps of all views."""
    if not (size in (None, "image", "features") or (isinstance(size, tuple | list) and len(size) == 2)):
        raise DataError(f"size is 'image', 'features' or (height, width), not {size!r}.")
    if how.branch == "sigmoid" and not net.fitted:
        _warn_unfitted(net)
    with torch.inference_mode(False), torch.no_grad():
        chosen, several = choose_classes(net, native, classes)  # (B, K)
        if size is None:
            size = "features" if isinstance(classes, str) and classes == "all" else "image"
        seen, low = list[Tensor](), list[Low]()
        for view in views:
            low = [_low(view.net, passage, chosen, how) for passage in view.passages]
            grid = view.passages[-1].features.shape[-2:]
            out = native.image if size == "image" else grid if size == "features" else size
            maps = _fused(low, how, (int(out[0]), int(out[1])))
            seen.append(maps.flip(-1) if view.mirrored else maps)
        if len(seen) > 1:
            maps = torch.stack(seen).mean(0)
            maps = maps if how.scale == "raw" else unit_range(maps)
        maps = torch.where((chosen >= 0)[:, :, None, None], maps, 0.0)  # (B, K, H, W)
        blank = ~maps.flatten(2).any(2)
        scores = Scores.of(net, native, how.branch, chosen)
        best, _ = choose_classes(net, native, "top5")
        top = Scores.of(net, native, how.branch, best)

    def shape(values: Tensor) -> Tensor:
        return values if several else values[:, 0]

    return Explanation(
        maps=shape(maps),
        classes=shape(chosen),
        probability=shape(scores.probability),
        evidence=shape(scores.evidence),
        logits=shape(scores.logits),
        positive_share=shape(low[-1].positive_share),
        blank=shape(blank),
        notes=tuple(_why_blank(blank, chosen, low[-1], bool(how.clamp), several)),
        top_classes=best,
        top_probability=top.probability,
        top_evidence=top.evidence,
        method=how.method,
        target=how.target_name,
        branch=how.branch,
        clamp=bool(how.clamp),
        scale=how.scale,
        fitted=net.fitted,
        class_names=net.class_names,
    )


# --------------------------------------------------------------------- from one pass to low-resolution maps


@dataclass(frozen=True)
class Low:
    """Maps of one layer, before they are finished, and what a blank one may be due to."""

    maps: Tensor  # M (B, K, P, Q)
    positive_share: Tensor  # (B, K)
    dead: Tensor  # (B, K) all weights are zero
    denied: Tensor  # (B, K) no weight is positive


def _low(net: DualBranch, passage: Passage, chosen: Tensor, how: Drawing) -> Low:
    """Weights by the method, clamped, times the features (Eq. 4), for as many classes at a time as fit."""
    method = METHODS[how.method]
    numbers = passage.features.numel() if not method.light else passage.features[..., 0, 0].numel()
    parts = []
    for classes in chosen.clamp(min=0).split(max(1, AT_ONCE // numbers), 1):
        probe = Probe(
            net,
            passage,
            branch=how.branch,
            classes=classes,
            target=as_target(how.target, how.branch),
            batch_size=how.batch_size,
            top_n=how.top_n,
        )
        weights = method(probe).detach()  # w  (B, K, N, 1, 1) or (B, K, N, P, Q)
        if method.gives == "maps":
            ones = torch.ones_like(classes, dtype=weights.dtype)
            parts.append(Low(weights.expand(-1, classes.shape[1], -1, -1), ones, ones == 0, ones == 0))
            continue
        if how.scale == "raw" and method.gives == "gradients":
            weights = weights * probe.cells  # a gradient per cell, as a weight of the mean
        if weights.stride(-1) == weights.stride(-2) == 0:
            weights = weights[..., :1, :1]  # one view for all cells
        kept = weights.clamp(min=0) if how.clamp else weights  # keep evidence, drop inhibition
        with full_precision(weights):
            maps, share = _combined(kept, probe.features), _positive_share(weights, probe.features)
        flat = weights.flatten(2)
        dead, denied = ~flat.any(2), ~(flat > 0).any(2)
        parts.append(Low(*(v.expand(*classes.shape, *v.shape[2:]) for v in (maps, share, dead, denied))))
    return Low(
        *(torch.cat(values, 1) for values in zip(*(vars(part).values() for part in parts), strict=True))
    )


def _combined(weights: Tensor, features: Tensor) -> Tensor:
    """M (B, K, P, Q), the sum over channels of weights times features (Eq. 4): one product where the weights
    are the same for all cells."""
    if weights.shape[-2:] != (1, 1):
        return (weights * features).sum(2)
    flat = features[:, 0].flatten(2)  # (B, N, P*Q)
    rows = weights[..., 0, 0]  # (B, K, N), or (1, K, N) for all images
    maps = (flat.mT @ rows[0].mT).mT if len(rows) == 1 else rows @ flat
    return maps.reshape(len(flat), -1, *features.shape[-2:])


def _positive_share(weights: Tensor, features: Tensor) -> Tensor:
    """(B, K) sum of positive parts over sum of sizes of all weight x feature products."""
    if weights.shape[-2:] != (1, 1):
        products = (weights * features).flatten(2)
        return products.clamp(min=0).sum(2) / products.abs().sum(2).clamp(min=1e-30)
    up, size = features.clamp(min=0).sum((-2, -1)), features.abs().sum((-2, -1))  # (B, 1, N)
    weights = weights[..., 0, 0]
    positive = (weights.clamp(min=0) @ up.mT + (-weights).clamp(min=0) @ (size - up).mT)[..., 0]
    return positive / (weights.abs() @ size.mT)[..., 0].clamp(min=1e-30)


# ------------------------------------------------------------------------------------- to finished score maps


def _fused(layers: list[Low], how: Drawing, size: Size) -> Tensor:
    """(B, K, H, W) score maps of one layer, or of several in one: the mean of the layers' unit maps; for
    Layer-CAM the maximum, all but the last layer's scaled by tanh(2 M / max M) first (Jiang et al., 2021)."""
    if len(layers) == 1:
        return finish(layers[0].maps, how.method, size, how.scale)
    if how.method != "layer-cam":
        units = [unit_range(layer.maps.relu(), eps=1e-7) for layer in layers]
        return unit_range(torch.stack([resize(maps, size, "bilinear") for maps in units]).mean(0))
    high = []
    for layer in layers:
        maps = layer.maps.relu()
        maps = maps / maps.amax((-2, -1), keepdim=True).clamp(min=1e-30)
        high.append(resize(maps if layer is layers[-1] else (2 * maps).tanh(), size, "bilinear"))
    return unit_range(torch.stack(high).amax(0))


def finish(maps: Tensor, method: str, size: Size, scale: Scale) -> Tensor:
    """(B, K, P, Q) maps to score maps (PROTOCOL 4.3): path A for cam, path B for every other method."""
    if method == "cam":
        if scale == "raw":
            return resize(maps, size, "bicubic")
        varied = maps.amax((-2, -1), keepdim=True) > maps.amin((-2, -1), keepdim=True)
        maps = torch.where(varied, maps, 0.0)  # rounding in the resize would be stretched
        return unit_range(resize(maps, size, "bicubic"))
    if scale == "raw":
        return resize(maps, size, "bilinear")
    maps = unit_range(maps.relu(), eps=1e-7)
    maps = unit_range(resize(maps, size, "bilinear").relu(), eps=1e-7)
    return unit_range(maps)


def _why_blank(blank: Tensor, classes: Tensor, low: Low, clamp: bool, several: bool) -> list[str]:
    """A sentence for each blank map, up to a few, and how many more there are."""
    places = (blank & (classes >= 0)).nonzero().tolist()
    notes = []
    for i, k in places[:MOST_NOTES]:
        if not bool(torch.isfinite(low.maps[i, k]).all()):
            why = "its values are not finite: check the images and the model's weights"
        elif bool(low.dead[i, k]):
            why = "no gradient reaches the layer: name another one in attach(model, layer=...)"
        elif clamp and bool(low.denied[i, k]):
            why = "no channel has a positive weight, and clamping keeps positive ones only: see scale='raw'"
        elif bool((low.maps[i, k] <= 0).all()):
            why = "all evidence is negative and the ReLU removes it: see scale='raw', or the sigmoid branch"
        else:
            why = "it is constant"
        which = f"image {i}, class {int(classes[i, k])}," if several else f"image {i}"
        notes.append(f"the map of {which} is blank: {why}.")
    if len(places) > MOST_NOTES:
        notes.append(f"{len(places) - MOST_NOTES} more maps are blank, see `blank`.")
    return notes


def _warn_unfitted(net: DualBranch) -> None:
    if not net.warned:
        net.warned = True
        warnings.warn(
            "the sigmoid branch is not fitted, so these maps are noise: fit it (sigcam.fit), load one "
            "(sigcam.load), "
            "or use branch='centred', which needs no training.",
            stacklevel=4,  # where explain was called
        )
