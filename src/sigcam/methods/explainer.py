"""explain: evidence maps of images (Eq. 4, 6)."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from sigcam.core.errors import ConfigError
from sigcam.core.memory import check_memory
from sigcam.core.types import GridSize
from sigcam.methods.cost import is_long
from sigcam.methods.explanation import Explanation, is_calibrated
from sigcam.methods.formulas import first_component
from sigcam.methods.inputs import Classes, ImageSource, Scores, as_batch, choose_classes, output_size
from sigcam.methods.postprocess import fuse_layers, unit_range
from sigcam.methods.probe import Probe, no_autocast
from sigcam.methods.registry import METHODS, Fusion, MapConfig, MapSize, Scale
from sigcam.methods.targets import Branch, Target, TargetName, as_target, at_least_float32, head_of
from sigcam.network.calibration import LogitScale
from sigcam.network.dilate import dilated
from sigcam.network.dual import DualBranch, ForwardPass
from sigcam.network.feature_layer import FeaturePoint
from sigcam.network.image_errors import blame_images
from sigcam.network.zoom import check_zoom, zoom_batch, zoomed

log = logging.getLogger("sigcam")
BRIGHTNESS = (0.9, 1.0, 1.1)  # factors of aug_smooth
MAX_NOTES = 5
UNFITTED = "the sigmoid branch is not fitted, so `evidence` means nothing: fit it (sigcam.fit) or load one."
MAX_WEIGHTS = 2**25  # numbers in the weights of the classes that are computed together


def explain(
    net: DualBranch,
    images: Tensor | ImageSource | Sequence[ImageSource],
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
    eigen_smooth: bool = False,
    batch_size: int | None = None,
    top_n: int | None = None,
    samples: int | None = None,
    fusion: Fusion | None = None,
) -> Explanation:
    """Return evidence maps for one class per image, in [0, 1], at image size (Eq. 4, 6; clamp: Sec. 3.3).

    Args:
        images: A preprocessed (B, C, H, W) batch, or PIL images or paths if `net.transform` is known.
        method: A name of `sigcam.list_methods()`.
        branch: "sigmoid", "softmax", or "centred": the softmax head minus its mean over classes.
        clamp: Keep positive channel weights only; by default for unit maps of the sigmoid branch.
        classes: A class for all images, one per image, (B, K), "top5", "positive" (evidence above one half)
            or "all"; by default the softmax head's prediction. Classes are ints, or names of
            `net.class_names`.
        target: The score to explain: "class", its logit; "probability"; "finer-cam", its logit against those
            of the most similar classes; or a function of (B, C) logits and (B,) classes that returns (B,)
            scores.
        scale: "unit" scales each map to [0, 1]; "raw" is signed, in logits: no ReLU, no scaling; "logit"
            scores cells so that their mean is the branch's logit, bias included; "probability" is the sigmoid
            of that, calibrated for this size of image, and can be compared between images and classes.
        size: "image" (default), "features" keeps P x Q (default for "all"), or (height, width); maps of
            pixels are averaged where they become smaller.
        layers: Layers (names or modules) whose maps are fused.
        zoom: Draw maps from the image enlarged by this factor; class and scores stay those of the image.
        stride: 1 runs a convolutional network's last stage without its stride: maps twice as fine.
        aug_smooth: Average over the image and its mirror image, each at 0.9, 1 and 1.1 times its values.
        eigen_smooth: Keep the first principal component of the weighted channels, instead of their sum: less
            noise. For methods that weight channels, and unit or raw maps.
        batch_size: Number of altered images (Score-CAM, maps of pixels) or variants of F (Ablation-CAM) per
            pass; fewer where memory is short.
        top_n: Number of channels that Score-CAM tries: those that vary most over the image.
        samples: Number of masks (RISE), noises (SmoothGrad) or steps (integrated gradients, extremal
            perturbation).
        fusion: "mean", "max" (Layer-CAM's) or "product" (RefineCAM) of layers; by default the method's own.
    """
    if not isinstance(net, DualBranch):
        kind = type(net).__name__
        raise ConfigError(f"explain takes what attach returns, not {kind}: net = sigcam.attach(model).")
    config = MapConfig(
        method, branch, clamp, target, scale, batch_size, top_n, eigen_smooth, samples, fusion
    ).checked()
    if stride is not None and (isinstance(stride, bool) or stride != 1):
        raise ConfigError(f"stride is 1 (no stride in the last stage) or None, not {stride!r}.")
    if aug_smooth not in (False, True):
        raise ConfigError(f"aug_smooth is True or False, not {aug_smooth!r}.")
    if isinstance(layers, str | torch.nn.Module):
        raise ConfigError("layers is a list of layers, such as layers=['layer3', 'layer4'].")
    if layers and METHODS[config.method].gives == "pixels":
        raise ConfigError(f"{config.method} explains pixels, not a layer: leave layers out.")
    config.check_fusion(layers)
    if is_long(config):
        log.info("%s: %d passes an image", config.method, config.passes)
    batch, seen = as_batch(net, images)
    points = tuple(net.feature_point(layer) for layer in layers) if layers else (net.split.point,)
    if len(points) > 1 and scale != "unit":
        raise ConfigError(
            f"scale={scale!r} is in logits of one layer: name one in layers=, or use scale='unit'."
        )
    if scale == "probability" and (stride is not None or points != (net.split.point,)):
        raise ConfigError("scale='probability' is calibrated without stride= and layers=: use 'logit'.")
    map_scale = _map_scale(net, config, check_zoom(zoom))
    grad = head_of(branch) not in net.linear or points != (net.split.point,)  # else gradients are weights
    altered = zoom != 1 or stride is not None or aug_smooth
    with blame_images(net, batch):
        passes = net.run_at(points, batch, grad=grad and not altered)  # classes and scores come from here
    parts: Iterable[Iterable[View]] = [[View(net, passes)]]
    if altered:
        parts = _altered_parts(net, batch, points, grad, zoom, stride, aug_smooth)
    explanation = _explain_parts(net, passes[0], parts, config, classes, size, map_scale)
    for note in explanation.notes:
        if note != UNFITTED:  # a warning has said so, where maps depend on it
            log.warning(note)
    pictures, regions = zip(*seen, strict=True) if seen else ((), ())
    return replace(explanation, pictures=pictures, regions=regions, images=batch)


def explain_pass(
    net: DualBranch,
    forward_pass: ForwardPass,
    config: MapConfig,
    *,
    classes: Classes = None,
    size: MapSize = None,
    zoom: float = 1.0,
) -> Explanation:
    """Explain the result of `net.run(images, grad=True)`; one pass serves any number of explanations.

    `zoom` tells by how much the images were enlarged, for maps in probabilities.
    """
    views, config = [View(net, [forward_pass])], config.checked()
    map_scale = _map_scale(net, config, zoom)
    return _explain_parts(net, forward_pass, [views], config, classes, size, map_scale)


def _map_scale(net: DualBranch, config: MapConfig, zoom: float) -> LogitScale:
    """Return the scale of maps in probabilities; ConfigError if the branch has none for this size."""
    return net.calibration.map_scale(zoom) if config.scale == "probability" else LogitScale()


@dataclass(frozen=True)
class View:
    """A version of images to draw maps from: one forward pass, with the features of each layer."""

    net: DualBranch
    passes: list[ForwardPass]
    mirrored: bool = False


def _altered_parts(
    net: DualBranch,
    images: Tensor,
    points: tuple[FeaturePoint, ...],
    grad: bool,
    zoom: float,
    stride: Literal[1] | None,
    aug_smooth: bool,
) -> Iterator[Iterator[View]]:
    """Yield the enlarged, finer or augmented views of the batch, in parts that fit into memory."""
    net = net if stride is None else dilated(net)
    for part in images.split(zoom_batch(net, images, zoom, points, grad=grad)):
        yield _views(*zoomed(net, part, zoom), points, grad, aug_smooth)


def _views(
    net: DualBranch, images: Tensor, points: tuple[FeaturePoint, ...], grad: bool, aug_smooth: bool
) -> Iterator[View]:
    """Run the views of the images, one after the other."""
    for mirrored, factor in product((False, True), BRIGHTNESS) if aug_smooth else [(False, 1.0)]:
        view = (images.flip(-1) if mirrored else images) * factor
        yield View(net, net.run_at(points, view, grad=grad), mirrored)


def _explain_parts(
    net: DualBranch,
    native: ForwardPass,
    parts: Iterable[Iterable[View]],
    config: MapConfig,
    classes: Classes,
    size: MapSize,
    map_scale: LogitScale,
) -> Explanation:
    """Explain classes of the `native` pass by the mean map of all views, part by part of the batch."""
    grid = output_size(size, classes, native.image)
    if config.branch == "sigmoid" and not net.fitted and not net.warned:
        net.warned = True
        warnings.warn(
            "the sigmoid branch is not fitted, so these maps are noise: fit it (sigcam.fit), load one "
            "(sigcam.load), or use branch='centred', which needs no training.",
            stacklevel=3,  # the caller of explain
        )
    with torch.inference_mode(False), torch.no_grad():
        chosen, several = choose_classes(net, native, classes)  # (B, K)
        drawn, done = list[tuple[Tensor, RawMaps]](), 0
        for views in parts:
            drawn.append(_draw_maps(views, chosen[done:], config, grid, map_scale))
            done += len(drawn[-1][0])
        maps, raw = drawn[0] if len(drawn) == 1 else _joined(drawn)  # (B, K, H, W)
        if isinstance(classes, str) and classes == "positive":
            maps = torch.where((chosen >= 0)[:, :, None, None], maps, 0.0)
        blank = ~maps.flatten(2).any(2)
        scores = Scores.of(net, native, config.branch, chosen)
        top_classes, _ = choose_classes(net, native, "top5")
        top = Scores.of(net, native, config.branch, top_classes)
    k, unfitted = slice(None) if several else 0, () if net.fitted else (UNFITTED,)
    return Explanation(
        maps=maps[:, k],
        classes=chosen[:, k],
        probability=scores.probability[:, k],
        evidence=scores.evidence[:, k],
        logits=scores.logits[:, k],
        positive_share=raw.positive_share[:, k],
        blank=blank[:, k],
        notes=tuple(_blank_notes(blank, chosen, raw, config, several)) + unfitted,
        top_classes=top_classes,
        top_probability=top.probability,
        top_evidence=top.evidence,
        method=config.method,
        target=config.target_name,
        branch=config.branch,
        clamp=bool(config.clamp),
        scale=config.scale,
        fitted=net.fitted,
        class_names=net.class_names,
        cells=raw.maps[:, k] if config.absolute else None,
        calibrated=is_calibrated(net),
    )


def _draw_maps(
    views: Iterable[View], classes: Tensor, config: MapConfig, size: GridSize | None, map_scale: LogitScale
) -> tuple[Tensor, RawMaps]:
    """Return (B, K, H, W) maps of the first B classes, the mean over all views, and the raw maps of the last
    layer: those of the last view or, where they are scores of cells, the mean too."""
    total, scores, count = torch.zeros(()), torch.zeros(()), 0
    for view in views:
        rows = classes[: len(view.passes[0].softmax)]
        raw = [draw_raw_maps(view.net, each, rows, config) for each in view.passes]
        cells = size or GridSize.of(view.passes[-1].features)
        layers = [each.maps for each in raw]
        if config.scale == "probability":
            layers = [cell_probabilities(maps, rows, view.net.classes, map_scale) for maps in layers]
        maps = _finished(layers, config, cells)
        maps, last = (each.flip(-1) if view.mirrored else each for each in (maps, raw[-1].maps))
        scores = scores + last if count and config.absolute else last
        total, count = total + maps if count else maps, count + 1
        del view  # its features and graph, before the next one runs
    if count > 1:
        maps = total / count
        maps = unit_range(maps) if config.scale == "unit" else maps
    return maps, replace(raw[-1], maps=scores / count) if config.absolute else raw[-1]


def cell_probabilities(logits: Tensor, classes: Tensor, count: int, scale: LogitScale) -> Tensor:
    """Return the probabilities of cells (B, K, P, Q) of the classes (B, K). They are enlarged afterwards: a
    cell of strong evidence would otherwise spread over its neighbours."""
    sign = torch.where(classes == 0, -1, 1)[:, :, None, None] if count == 1 else 1  # of a single logit
    return (sign * scale(sign * logits)).sigmoid()


def _joined(drawn: list[tuple[Tensor, RawMaps]]) -> tuple[Tensor, RawMaps]:
    """The maps of all parts of the batch, and their raw maps."""
    maps, raw = zip(*drawn, strict=True)
    columns = zip(*(vars(each).values() for each in raw), strict=True)
    return torch.cat(maps), RawMaps(*(torch.cat(values) for values in columns))


def _finished(layers: list[Tensor], config: MapConfig, size: GridSize) -> Tensor:
    """Finish the layers' (B, K, P, Q) maps, as many classes at a time as fit; ConfigError if one does not."""
    batch, classes = layers[0].shape[:2]
    numbers = batch * math.prod(size)  # of one class
    step = max(1, MAX_WEIGHTS // numbers)
    copies = classes + 3 * min(step, classes)  # scaling takes three of each part
    needed = copies * numbers * layers[0].element_size()
    shown = f"drawing {batch * classes} map(s) of {size.height}x{size.width}"
    check_memory(needed, shown, "ask for smaller maps (size=), fewer images or classes", layers[0].device)
    if classes <= step:
        return fuse_layers(layers, config, size)
    finished = layers[0].new_empty(batch, classes, *size)
    for start in range(0, classes, step):
        part = slice(start, start + step)
        finished[:, part] = fuse_layers([maps[:, part] for maps in layers], config, size)
    return finished


def _blank_notes(
    blank: Tensor, classes: Tensor, raw: RawMaps, config: MapConfig, several: bool
) -> Iterator[str]:
    """Yield a sentence for each of the first blank maps, and the number of further ones."""
    places = (blank & (classes >= 0)).nonzero().tolist()
    for i, k in places[:MAX_NOTES]:
        which = f"image {i}, class {int(classes[i, k])}," if several else f"image {i}"
        yield f"the map of {which} is blank: {raw.blank_reason(i, k, config)}."
    if len(places) > MAX_NOTES:
        yield f"{len(places) - MAX_NOTES} more maps are blank, see `blank`."


@dataclass(frozen=True)
class RawMaps:
    """Maps of one layer before post-processing, and what may explain a blank one."""

    maps: Tensor  # M (B, K, P, Q)
    positive_share: Tensor  # (B, K)
    all_zero: Tensor  # (B, K) every weight is zero
    none_positive: Tensor  # (B, K) no weight is positive

    def blank_reason(self, image: int, k: int, config: MapConfig) -> str:
        """Say why the finished map is blank."""
        maps = self.maps[image, k]
        if not bool(torch.isfinite(maps).all()):
            return "its values are not finite: check the images and the model's weights"
        if maps.numel() == 1:
            return (
                "its layer has 1 x 1 cells: use larger images, or an earlier layer: attach(model, layer=...)"
            )
        if bool(self.all_zero[image, k]):
            return "no gradient reaches the layer: name another one in attach(model, layer=...)"
        if config.clamp and bool(self.none_positive[image, k]):
            return "no channel has a positive weight, and clamping keeps positive ones only: see scale='raw'"
        if not bool(maps.any()):
            return "it is zero everywhere: no pixel or feature contributes"
        if bool((maps <= 0).all()):
            return "all evidence is negative and the ReLU removes it: see scale='raw', or the sigmoid branch"
        shared = "no pixel is above zero in the maps of all layers"
        return shared if config.fusion == "product" else "it is constant"


def draw_raw_maps(net: DualBranch, forward_pass: ForwardPass, classes: Tensor, config: MapConfig) -> RawMaps:
    """Return the weighted sums of features (Eq. 4), or maps of pixels, for (B, K) classes, as many at a time
    as fit in memory."""
    of_pixels = METHODS[config.method].gives == "pixels"
    features = forward_pass.images if of_pixels else forward_pass.features
    light = METHODS[config.method].light and not config.eigen_smooth
    numbers = features[..., 0, 0].numel() if light else features.numel()
    parts = classes.clamp(min=0).split(max(1, MAX_WEIGHTS // numbers), 1)
    columns = zip(*(vars(_draw_part(net, forward_pass, p, config)).values() for p in parts), strict=True)
    return RawMaps(*(torch.cat(values, 1) for values in columns))


def _draw_part(net: DualBranch, forward_pass: ForwardPass, classes: Tensor, config: MapConfig) -> RawMaps:
    method, target = METHODS[config.method], as_target(config.target, config.branch)
    counts = config.batch_size, config.top_n, config.samples or method.samples or 1
    probe = Probe(net, forward_pass, config.branch, classes, target, *counts)
    weights = method(probe).detach()  # w  (B, K, N, 1, 1) or (B, K, N, P, Q)
    if not method.weights_channels:
        ones = torch.ones_like(classes, dtype=weights.dtype)
        return RawMaps(weights.expand(-1, classes.shape[1], -1, -1), ones, ones == 0, ones == 0)
    if config.scale != "unit" and method.gives == "gradients":
        weights = weights * probe.cells  # from a gradient per cell to the weight of the mean
    if weights.stride(-1) == weights.stride(-2) == 0:
        weights = weights[..., :1, :1]  # the same for all cells
    clamped = weights.clamp(min=0) if config.clamp else weights  # keep evidence, drop inhibition
    if config.eigen_smooth:
        products = (clamped * probe.features).flatten(-2)  # (B, K, N, P*Q)
        clamped = clamped * first_component(products, products.sum(-2))[..., None, None]
    with no_autocast(weights):
        maps, share = _weighted_sum(clamped, probe.features), _positive_share(weights, probe.features)
    if config.absolute:  # what no cell accounts for is shared by all: the bias of global average + linear
        rest = at_least_float32(probe.scores.detach()) - maps.mean((-2, -1))
        maps = maps + rest[..., None, None]
    flat = weights.flatten(2)
    values = maps, share, ~flat.any(2), ~(flat > 0).any(2)
    return RawMaps(*(v.expand(*classes.shape, *v.shape[2:]) for v in values))


def _weighted_sum(weights: Tensor, features: Tensor) -> Tensor:
    """Return M (B, K, P, Q) of Eq. 4; one matrix product if the weights are the same for all cells."""
    if weights.shape[-2:] != (1, 1):
        return (weights * features).sum(2)
    flat = features[:, 0].flatten(2)  # (B, N, P*Q)
    rows = weights[..., 0, 0]  # (B, K, N), or (1, K, N) for all images
    maps = (flat.mT @ rows[0].mT).mT if len(rows) == 1 else rows @ flat
    return maps.reshape(len(flat), -1, *features.shape[-2:])


def _positive_share(weights: Tensor, features: Tensor) -> Tensor:
    """Return (B, K) the positive part of all weight x feature products, as a fraction of their sizes."""
    if weights.shape[-2:] != (1, 1):
        products = (weights * features).flatten(2)
        return products.clamp(min=0).sum(2) / products.abs().sum(2).clamp(min=1e-30)
    positive, size = features.clamp(min=0).sum((-2, -1)), features.abs().sum((-2, -1))  # (B, 1, N)
    weights = weights[..., 0, 0]
    share = (weights.clamp(min=0) @ positive.mT + (-weights).clamp(min=0) @ (size - positive).mT)[..., 0]
    return share / (weights.abs() @ size.mT)[..., 0].clamp(min=1e-30)
