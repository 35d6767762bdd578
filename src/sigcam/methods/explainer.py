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
from sigcam.core.types import GridSize
from sigcam.methods.explanation import Explanation
from sigcam.methods.inputs import Classes, Picture, Scores, as_batch, choose_classes
from sigcam.methods.map_config import MapConfig, MapSize, Scale
from sigcam.methods.postprocess import fuse_layers, unit_range
from sigcam.methods.raw_maps import RawMaps, draw_raw_maps
from sigcam.methods.targets import Branch, Target, TargetName
from sigcam.network.dilate import dilated
from sigcam.network.dual import DualBranch, ForwardPass
from sigcam.network.layout import FeaturePoint
from sigcam.network.zoom import zoomed

log = logging.getLogger("sigcam")
FACTORS = (0.9, 1.0, 1.1)  # of aug_smooth
MOST_NOTES = 5


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
    how = MapConfig(method, branch, clamp, target, scale, batch_size, top_n).checked()
    if stride not in (None, 1):
        raise DataError(f"stride is 1 (no stride in the last stage) or None, not {stride!r}.")
    batch, pictures = as_batch(net, images)
    places = tuple(net.feature_point(layer) for layer in layers) if layers else (net.split.point,)
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


def explain_pass(
    net: DualBranch, passage: ForwardPass, how: MapConfig, *, classes: Classes = None, size: MapSize = None
) -> Explanation:
    """As `explain`, from what `net.run(images, grad=True)` gave: one pass serves any number of them."""
    return _explained(net, passage, iter([View(net, [passage])]), how.checked(), classes, size)


@dataclass(frozen=True)
class View:
    """One pass, seen from each layer, of the network or of a finer copy, over images mirrored or not."""

    net: DualBranch
    passages: list[ForwardPass]
    mirrored: bool = False


def _needs_graph(net: DualBranch, how: MapConfig, places: tuple[FeaturePoint, ...]) -> bool:
    """Whether gradients must come from autograd: a linear head's are its weights."""
    source = "sigmoid" if how.branch == "sigmoid" else "softmax"
    return source not in net.linear or places != (net.split.point,)


def _views(
    net: DualBranch,
    images: Tensor,
    places: tuple[FeaturePoint, ...],
    how: MapConfig,
    zoom: float,
    stride: Literal[1] | None,
    aug_smooth: bool,
) -> Iterator[View]:
    """The passes that maps are drawn from, one after the other."""
    grad = _needs_graph(net, how, places)
    if grad:
        net.grad_mode(places)  # at the native size, which a copy for larger images would not take
    net, images = zoomed(net if stride is None else dilated(net), images, zoom)
    for mirrored, factor in product((False, True), FACTORS) if aug_smooth else [(False, 1.0)]:
        view = (images.flip(-1) if mirrored else images) * factor
        yield View(net, net.run_at(places, view, grad=grad), mirrored)


def _explained(
    net: DualBranch,
    native: ForwardPass,
    views: Iterator[View],
    how: MapConfig,
    classes: Classes,
    size: MapSize,
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
        seen, low = list[Tensor](), list[RawMaps]()
        for view in views:
            low = [draw_raw_maps(view.net, passage, chosen, how) for passage in view.passages]
            grid = view.passages[-1].features.shape[-2:]
            out = native.image if size == "image" else grid if size == "features" else size
            maps = fuse_layers(low, how, GridSize(int(out[0]), int(out[1])))
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


# ------------------------------------------------------------------------------------- to finished score maps


def _why_blank(blank: Tensor, classes: Tensor, low: RawMaps, clamp: bool, several: bool) -> list[str]:
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
