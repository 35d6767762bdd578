"""Viewer: the maps that a visitor requests of one image, drawn from one forward pass of each network."""

import io
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sigcam.core.errors import ConfigError, DataError
from sigcam.core.types import GridSize
from sigcam.drawing.overlay import overlay, with_boxes
from sigcam.methods.explainer import cell_probabilities, explain_pass
from sigcam.methods.explanation import box_threshold, data_uri, is_calibrated
from sigcam.methods.inputs import as_batch
from sigcam.methods.postprocess import disagreement, finish_maps
from sigcam.methods.registry import METHODS, MapConfig, MapSize, Scale
from sigcam.methods.targets import at_least_float32, class_logits
from sigcam.metrics.boxes import boxes_at
from sigcam.models.preprocess import Preprocess
from sigcam.network.calibration import LogitScale
from sigcam.network.dual import DualBranch, ForwardPass, linear_weight
from sigcam.ui.sources import MAX_PASSES, ZOOM, Source, class_label, same_class, why_relative

DISPLAY_SIDE = 288  # pixels of the longer side
MAX_PANELS = 12
TOP_CLASSES = 5
PanelScale = Literal["unit", "signed", "absolute"]
RelativeBox = tuple[float, float, float, float]  # xyxy, as fractions of width and height
ClassTable = tuple[str, list[tuple[str, float, float | None]]]  # title; rows of name, probability, evidence


@dataclass(frozen=True)
class Request:
    """The maps that a visitor wants to see of an image."""

    classes: tuple[int, ...]  # of the first network
    sources: tuple[Source, ...]
    methods: tuple[str, ...]
    scale: PanelScale = "unit"


@dataclass
class Panel:
    """One map on the page."""

    source: Source
    method: str
    class_index: int
    class_name: str
    raw_map: Tensor  # (1, 1, P, Q), signed, in logits if the method gives them; absolute: scores of cells
    logit: float
    positive_share: float  # of the evidence
    note: str
    evidence: float | None = None  # of a calibrated sigmoid branch
    calibration: LogitScale | None = None  # from scores of cells to probabilities, for an absolute map
    why_relative: str = ""  # why a map is not absolute although the visitor asks for it
    shortened: str = ""  # what a slow method tried of all its channels or samples
    scale_max: float = 1.0  # value drawn in full colour
    image_uri: str = ""
    unit_map: Tensor = field(default_factory=lambda: torch.zeros(1, 1, 1))  # (1, H, W) in [0, 1]

    @property
    def in_logits(self) -> bool:
        """Whether the values are logits."""
        return METHODS[self.method].in_logits

    @property
    def unit(self) -> str:
        """Unit of the values; panels of the same unit can share a scale."""
        return "logits" if self.in_logits else self.method

    @property
    def absolute(self) -> bool:
        """Whether the map is drawn in probabilities, from 0 to 1."""
        return self.calibration is not None

    def values(self, size: GridSize) -> Tensor:
        """Return the map (H, W): probabilities if it is absolute, else signed values."""
        if self.calibration is None:
            return finish_maps(self.raw_map, self.method, size, "raw")[0, 0]
        index = torch.tensor([[self.class_index]])
        cells = cell_probabilities(self.raw_map, index, self.source.net.classes, self.calibration)
        return finish_maps(cells, self.method, size, "probability")[0, 0]

    @property
    def follows_shift(self) -> bool:
        """Whether a shift of the softmax head changes the map."""
        linear = "softmax" in self.source.net.linear and self.source.net.classes > 1
        return linear and self.source.branch != "sigmoid" and METHODS[self.method].follows_head


class Viewer:
    """One image in one visitor's browser: passed once through each network, then drawn on request.

    Args:
        example: name of the example that it is, for links; "" for a visitor's own image.
        credit: whom the image is from.
    """

    def __init__(
        self,
        name: str,
        image: Image.Image,
        nets: Sequence[DualBranch],
        *,
        example: str = "",
        credit: str = "",
    ) -> None:
        self.name, self.image_size, self.main_net = name, image.size, nets[0]
        self.example, self.credit = example, credit
        self._inputs: dict[Any, Tensor] = {}  # by transform
        for net in nets:
            if net.transform not in self._inputs:
                self._inputs[net.transform] = as_batch(net, [image])[0]
        transform = nets[0].transform
        self.uncropped = isinstance(transform, Preprocess) and transform.resize is None
        if isinstance(transform, Preprocess) and not self.uncropped:
            image = transform.picture(image)
        scale = DISPLAY_SIDE / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        self.display = image.convert("RGB").resize(size, Image.Resampling.BILINEAR, reducing_gap=3)
        self.display_uri = data_uri(self.display)
        self._passes: dict[DualBranch, ForwardPass] = {}
        self.panels: list[Panel] = []
        self.threshold, self.delta = self.default_threshold, 0.0
        self.lock = threading.Lock()  # for callers: a tab may send several requests at once

    @property
    def default_threshold(self) -> float:
        """The threshold of boxes that the maps start with."""
        return box_threshold(absolute=any(panel.absolute for panel in self.panels))

    def forward_pass(self, net: DualBranch) -> ForwardPass:
        """Return the network's forward pass over the image, run on first use."""
        if net not in self._passes:
            needs_graph = net.linear != {"softmax", "sigmoid"}
            self._passes[net] = net.run(self._inputs[net.transform], grad=needs_graph)
        return self._passes[net]

    def predicted_class(self, net: DualBranch) -> int:
        """Return the class that the softmax head predicts."""
        return int(probabilities(net, self.forward_pass(net)).argmax())

    def top_classes(self, net: DualBranch, title: str) -> ClassTable:
        """Return the most probable classes, with probabilities of the softmax head as it is shifted."""
        forward_pass = self.forward_pass(net)
        top = probabilities(net, forward_pass).topk(min(TOP_CLASSES, max(net.classes, 2))).indices.tolist()
        shifted = probabilities(net, forward_pass, self._weight_shift(net))
        return title, [(class_label(net, k), float(shifted[k]), self._evidence(net, k)) for k in top]

    def update(self, request: Request) -> None:
        """Make and draw the requested panels."""
        if not request.sources or not request.methods:
            raise ConfigError("choose at least one head and one method to see maps.")
        count = max(1, len(request.classes)) * len(request.sources) * len(request.methods)
        if count > MAX_PANELS:
            raise ConfigError(f"{count} maps: choose fewer heads, methods or classes ({MAX_PANELS} at most).")
        pairs = [(source, method) for source in request.sources for method in request.methods]
        panels = [panel for pair in pairs for panel in self._panels(*pair, request, 0.0)]
        signed = request.scale == "signed"
        for panel in panels:
            same_scale = [p for p in panels if p.unit == panel.unit] if signed else [panel]
            peak = max(float((p.raw_map.abs() if signed else p.raw_map).max()) for p in same_scale)
            stretched = 0 < peak < math.inf and not panel.absolute  # not if nothing is positive: all blank
            panel.scale_max = peak if stretched else 1.0
        self.request, self.panels = request, panels
        if self.delta:
            self.shift(self.delta)
        else:
            self._draw(panels)

    def shift(self, delta: float) -> None:
        """Redraw the softmax panels with the head shifted by `delta` standard deviations of its weights.

        The scale and all other panels stay as they are.
        """
        self.delta = delta
        for source, method in dict.fromkeys((p.source, p.method) for p in self.panels if p.follows_shift):
            shifted = self._panels(source, method, self.request, self._weight_shift(source.net))
            unshifted = (p for p in self.panels if (p.source, p.method) == (source, method))
            for panel, new in zip(unshifted, shifted, strict=True):
                panel.raw_map, panel.logit = new.raw_map, new.logit
                panel.positive_share, panel.note = new.positive_share, new.note
        self._draw([p for p in self.panels if p.follows_shift or not p.image_uri])

    def boxes(self) -> list[RelativeBox | None]:
        """Return the box of each panel at `threshold`, or None if it has none."""
        boxes: list[RelativeBox | None] = []
        for panel in self.panels:
            height, width = panel.unit_map.shape[1:]
            box = boxes_at(panel.unit_map, self.threshold, absolute=panel.absolute)[0][0]
            x0, y0, x1, y1 = box.tolist()
            boxes.append((x0 / width, y0 / height, x1 / width, y1 / height) if x1 > x0 and y1 > y0 else None)
        return boxes

    def files(self) -> dict[str, bytes]:
        """Return files by name: maps (panels, H, W) as .npy, overlays as one .png, numbers as .json."""
        if not self.panels:
            raise DataError("there are no maps yet: choose an image first.")
        npy, png = io.BytesIO(), io.BytesIO()
        sizes = [GridSize.of(p.unit_map) for p in self.panels]  # two models may differ
        size = GridSize(max(s.height for s in sizes), max(s.width for s in sizes))
        maps = [p.values(size) for p in self.panels]
        np.save(npy, torch.stack(maps).float().cpu().numpy())
        boxes = self.boxes()
        width, height = self.display.size
        sheet = Image.new("RGB", (width * len(self.panels), height), "white")
        for i, (panel, box) in enumerate(zip(self.panels, boxes, strict=True)):
            drawn = [] if box is None else [_scaled(box, width, height)]
            sheet.paste(with_boxes(self._overlay(panel), drawn), (i * width, 0))
        sheet.save(png, "PNG")
        numbers = {
            "picture": self.name,
            "size": list(self.image_size),
            "scale": self.request.scale,
            "threshold": self.threshold,
            "delta": self.delta,
            "maps": [self._numbers(panel, box) for panel, box in zip(self.panels, boxes, strict=True)],
        }
        return {
            "maps.npy": npy.getvalue(),
            "overlay.png": png.getvalue(),
            "maps.json": json.dumps(numbers, indent=1).encode(),
        }

    def _numbers(self, panel: Panel, box: RelativeBox | None) -> dict[str, Any]:
        net = panel.source.net
        size = self.image_size if self.uncropped else self.display.size
        probability = probabilities(net, self.forward_pass(net), self._weight_shift(net))[panel.class_index]
        unit = "logits" if panel.in_logits else "the method's own"
        unit = "probability" if panel.absolute else unit
        return {
            "from": panel.source.name,
            "method": panel.method,
            "class": panel.class_index,
            "class_name": panel.class_name,
            "probability": float(probability),
            "evidence": self._evidence(net, panel.class_index),
            "present": None if panel.evidence is None else panel.evidence > 0.5,
            "logit": panel.logit,
            "positive_share": panel.positive_share,
            "peak": float(panel.values(GridSize.of(panel.raw_map)).max()),
            "unit": unit,
            "box": None if box is None else [round(x) for x in _scaled(box, *size)],
            "note": panel.note,
        }

    def _evidence(self, net: DualBranch, class_index: int) -> float | None:
        """Return the sigmoid score of a class, or None without a fitted branch."""
        logits = net.calibration.evidence(at_least_float32(self.forward_pass(net).sigmoid.detach()))
        return float(class_logits(logits)[0, class_index].sigmoid()) if net.fitted else None

    def _weight_shift(self, net: DualBranch) -> float:
        """Return the shift of the network's softmax weights, `delta` in units of their standard deviation."""
        return self.delta * (weight_std(net) or 0.0) if self.delta else 0.0

    def _panels(self, source: Source, method: str, request: Request, weight_shift: float) -> list[Panel]:
        """Return the panels of one source and method, one per requested class that its network knows."""
        net, forward_pass = source.net, self.forward_pass(source.net)
        requested = request.classes or (self.predicted_class(self.main_net),)
        known = [same_class(k, self.main_net, net) for k in requested]
        indices = list(dict.fromkeys(k for k in known if k is not None)) or [self.predicted_class(net)]
        if weight_shift:
            net, forward_pass = shift_head(net, forward_pass, weight_shift)
        why = why_relative(source, method) if request.scale == "absolute" else ""
        absolute = request.scale == "absolute" and not why
        clamp = source.branch == "sigmoid" and request.scale != "signed" and not absolute
        scale: Scale = "logit" if absolute else "raw"
        facts = METHODS[method]
        channels = forward_pass.features.shape[1]
        config = MapConfig(method, source.branch, clamp, scale=scale).within(MAX_PASSES, channels)
        classes = torch.tensor([indices], device=source.net.device)
        size: MapSize = "image" if facts.gives == "pixels" else "features"
        ex = explain_pass(net, forward_pass, config, classes=classes, size=size)
        panels = []
        for i, k in enumerate(indices):
            raw_map = ex.maps[:, i : i + 1].detach().cpu()
            logit, share = float(ex.logits[0, i]), float(ex.positive_share[0, i])
            panel = Panel(source, method, k, class_label(source.net, k), raw_map, logit, share, "")
            panel.note = _blank_note(raw_map, clamp, signed=absolute or request.scale == "signed")
            panel.calibration = source.net.calibration.map_scale(ZOOM) if absolute else None
            panel.why_relative = why
            panel.shortened = _shortened(config, channels)
            if source.branch == "sigmoid" and is_calibrated(source.net):
                panel.evidence = self._evidence(source.net, k)
            panels.append(panel)
        return panels

    def _draw(self, panels: Sequence[Panel]) -> None:
        for panel in panels:
            panel.image_uri = data_uri(self._overlay(panel))
            size = GridSize.of(self._inputs[panel.source.net.transform])
            relative = finish_maps(panel.raw_map, panel.method, size, "unit")[0]
            panel.unit_map = panel.values(size)[None] if panel.absolute else relative

    def _overlay(self, panel: Panel) -> Image.Image:
        size = GridSize(self.display.height, self.display.width)
        signed = self.request.scale == "signed"
        values = (panel.values(size) / panel.scale_max).nan_to_num(0.0)
        return overlay(self.display, values.clamp(-1 if signed else 0, 1), signed=signed, peak=1.0)


def _shortened(config: MapConfig, channels: int) -> str:
    """Return what a method was told to try, or "" if it tries everything."""
    if config.top_n:
        return f"{config.top_n} of {channels} channels tried"
    return f"{config.samples} of {METHODS[config.method].samples} samples" if config.samples else ""


def _scaled(box: RelativeBox, width: int, height: int) -> list[float]:
    return [box[0] * width, box[1] * height, box[2] * width, box[3] * height]


def _blank_note(raw_map: Tensor, clamp: bool, *, signed: bool) -> str:
    """Return why a map shows nothing, or "" if it shows something."""
    if not bool(torch.isfinite(raw_map).all()):
        return "not finite"
    if not bool(raw_map.any()):
        return "blank: no channel has a positive weight" if clamp else "blank: all zero"
    if not signed and bool((raw_map <= 0).all()):
        return "blank: all evidence is negative (see the signed scale)"
    return ""


def disagreements(first: Source, second: Source, images: Sequence[Image.Image]) -> list[float]:
    """Return, for each image, the disagreement of two sources' unit Grad-CAM maps of the predicted class."""
    maps, classes = list[Tensor](), list[int]()
    for source in (first, second):
        batch, _ = as_batch(source.net, list(images))
        forward_pass = source.net.run(batch, grad=source.net.linear != {"softmax", "sigmoid"})
        if source is first:
            classes = class_logits(forward_pass.softmax_logits).argmax(1).tolist()
        known = [k for k in (same_class(k, first.net, source.net) for k in classes) if k is not None]
        if len(known) < len(classes):
            raise DataError("the two models have different classes, so their maps cannot be compared.")
        config = MapConfig(branch=source.branch)
        ex = explain_pass(source.net, forward_pass, config, classes=known, size=GridSize(56, 56))
        maps.append(ex.maps.detach().cpu())
    return disagreement(*maps).tolist()


def weight_std(net: DualBranch) -> float | None:
    """Return the standard deviation of the softmax head's weights; None if it cannot be shifted."""
    layer = _softmax_layer(net) if net.classes > 1 else None
    return None if layer is None else float(layer[0].std())


def shift_head(net: DualBranch, forward_pass: ForwardPass, delta: float) -> tuple[DualBranch, ForwardPass]:
    """Return the network and its pass with `delta` added to all weights of a linear softmax head (Eq. 8)."""
    layer = _softmax_layer(net)
    assert layer is not None
    shifted_layer = nn.Module()
    shifted_layer.weight, shifted_layer.bias = layer[0] + delta, layer[1]
    *parents, leaf = net.split.last[0].split(".")
    root = parent = nn.Module()  # the maps of a linear head need only its last layer
    for name in parents:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(leaf, shifted_layer)
    pooled = at_least_float32(forward_pass.features).mean((2, 3))  # (1, N)
    logits = forward_pass.softmax_logits.detach() + delta * pooled.sum(1, keepdim=True)
    return net.with_model(root), replace(forward_pass, softmax_logits=logits)


@torch.no_grad()
def probabilities(net: DualBranch, forward_pass: ForwardPass, delta: float = 0.0) -> Tensor:
    """Return the softmax probabilities (C,) of the shifted head; (2,) for a single logit.

    The change is computed in float64, so that rounding is not mistaken for an effect of the shift.
    """
    logits = forward_pass.softmax_logits.detach().double()
    if delta and (layer := _softmax_layer(net)) is not None:
        pooled = forward_pass.features.detach().double().mean((2, 3))  # (1, N)
        weight = layer[0].double()
        logits = logits + pooled @ (weight + delta).T - pooled @ weight.T
    if net.classes == 1:
        logits = class_logits(logits) / 2  # the softmax of these is the sigmoid
    return logits.softmax(1)[0]


def _softmax_layer(net: DualBranch) -> tuple[Tensor, Tensor] | None:
    """Return weight (C, N) and bias (C,) of a softmax head that is global average pooling and linear."""
    layer = linear_weight(net.last_layer("softmax")) if "softmax" in net.linear else None
    return None if layer is None else (layer[0].detach(), layer[1].detach())
