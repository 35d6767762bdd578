"""What the page knows of one picture: a pass of each network, and maps, shifts and boxes made from it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sigcam.core.errors import DataError
from sigcam.core.types import GridSize
from sigcam.drawing.overlay import overlay, with_boxes
from sigcam.methods.explainer import explain_pass
from sigcam.methods.explanation import data_uri
from sigcam.methods.inputs import as_batch
from sigcam.methods.map_config import MapConfig
from sigcam.methods.postprocess import disagreement, finish_maps
from sigcam.methods.targets import at_least_float32, branch_logits
from sigcam.metrics.boxes import boxes_at
from sigcam.models.preprocess import Preprocess
from sigcam.network.dual import DualBranch, ForwardPass, linear_weight
from sigcam.ui.sources import Kind, Panel, Request, Source, Top, class_label, same_class

SIDE = 288  # pixels of a drawn picture's longer side
MOST_PANELS = 12
CHANNELS = 64  # tried by Score-CAM
TOP = 5


# --------------------------------------------------------------------------------------------- networks


def shifted(net: DualBranch, passage: ForwardPass, delta: float) -> tuple[DualBranch, ForwardPass]:
    """The network and its pass had `delta` been added to every weight of the softmax head (Eq. 8): for heads
    that are global average + linear, whose maps need no more of the model than its last layer."""
    found = linear_weight(net.last_layer("softmax"))
    assert found is not None
    layer = nn.Module()
    layer.weight, layer.bias = found[0].detach() + delta, found[1].detach()
    *parents, leaf = net.split.last[0].split(".")
    root = at = nn.Module()
    for name in parents:
        at.add_module(name, nn.Module())
        at = at.get_submodule(name)
    at.add_module(leaf, layer)
    moved = passage.softmax_logits.detach() + delta * at_least_float32(passage.features).mean((2, 3)).sum(
        1, keepdim=True
    )
    return net.with_model(root), replace(passage, softmax_logits=moved)


@torch.no_grad()
def probabilities(net: DualBranch, passage: ForwardPass, delta: float = 0.0) -> Tensor:
    """(C,) of the softmax head, computed anew in float64 from its shifted weights; of one logit, (2,)."""
    found = linear_weight(net.last_layer("softmax")) if delta and "softmax" in net.linear else None
    logits = passage.softmax_logits.detach().double()
    if found is not None:
        mean = passage.features.detach().double().mean((2, 3))  # (1, N)
        logits = mean @ (found[0].detach().double() + delta).T + found[1].detach().double()
    if net.classes == 1:
        logits = torch.cat([-logits, logits], 1) / 2  # whose softmax is the sigmoid
    return logits.softmax(1)[0]


def spread(net: DualBranch) -> float | None:
    """The standard deviation of the softmax head's weights, the unit of a shift; None if it cannot be shifted
    without being seen, or not without another pass."""
    found = linear_weight(net.last_layer("softmax")) if "softmax" in net.linear and net.classes > 1 else None
    return None if found is None else float(found[0].detach().std())


# -------------------------------------------------------------------------------------------- one picture


class Viewer:
    """One picture in one person's browser: seen once by each network, then drawn as often as asked."""

    def __init__(self, name: str, picture: Image.Image, nets: Sequence[DualBranch]) -> None:
        self.name, self.size, self.first = name, picture.size, nets[0]
        self._inputs: dict[Any, Tensor] = {}
        for net in nets:
            if net.transform not in self._inputs:
                self._inputs[net.transform] = as_batch(net, [picture])[0]
        transform = nets[0].transform
        self.whole = isinstance(transform, Preprocess) and transform.resize is None  # squashed, not cut
        seen = picture if self.whole else getattr(transform, "picture", lambda image: image)(picture)
        scale = SIDE / max(seen.size)
        shape = (max(1, round(seen.width * scale)), max(1, round(seen.height * scale)))
        self.base = seen.convert("RGB").resize(shape, Image.Resampling.BILINEAR, reducing_gap=3)
        self.base_uri = data_uri(self.base)
        self._passages: dict[DualBranch, ForwardPass] = {}
        self._spreads: dict[DualBranch, float] = {}
        self.panels: list[Panel] = []
        self.kind: Kind = "evidence"
        self.threshold, self.delta = 0.2, 0.0

    def passage(self, net: DualBranch) -> ForwardPass:
        """The network's one pass over the picture."""
        if net not in self._passages:
            graph = net.linear != {"softmax", "sigmoid"}
            self._passages[net] = net.run(self._inputs[net.transform], grad=graph)
        return self._passages[net]

    def likely(self, net: DualBranch) -> int:
        """The class that the softmax head predicts."""
        return int(probabilities(net, self.passage(net)).argmax())

    def top(self, net: DualBranch, title: str) -> Top:
        """The likely classes, with the probabilities of the head as it is shifted now."""
        passage, rows = self.passage(net), []
        best = probabilities(net, passage).topk(min(TOP, max(net.classes, 2)))
        now = probabilities(net, passage, self._delta(net))
        for k in best.indices.tolist():
            logit = at_least_float32(passage.sigmoid.detach())[0, min(k, net.classes - 1)]
            evidence = (
                float((-logit if net.classes == 1 and k == 0 else logit).sigmoid()) if net.fitted else None
            )
            rows.append((class_label(net, k), float(now[k]), evidence))
        return Top(title, tuple(rows))

    def ask(self, asked: Request) -> None:
        """Makes the panels anew, on one scale, and draws them."""
        count = max(1, len(asked.classes)) * len(asked.sources) * len(asked.methods)
        if not asked.sources or not asked.methods:
            raise DataError("choose at least one head and one method to see maps.")
        if count > MOST_PANELS:
            raise DataError(
                f"that would be {count} maps: choose fewer heads, methods or classes, {MOST_PANELS} at most."
            )
        panels = [p for s in asked.sources for m in asked.methods for p in self._panels(s, m, asked, 0.0)]
        sizes = [float(p.low.abs().max() if asked.kind == "signed" else p.low.max()) for p in panels]
        for panel, size in zip(panels, sizes, strict=True):
            alike = [s for p, s in zip(panels, sizes, strict=True) if p.measure == panel.measure]
            peak = max(alike) if asked.shared else size
            panel.peak = peak if 0 < peak < math.inf else 1.0  # nothing is positive: all blank
        self.asked, self.panels, self.kind = asked, panels, asked.kind
        if self.delta:
            self.shift(self.delta)
        else:
            self._draw(panels)

    def shift(self, delta: float) -> None:
        """Draws the softmax panels with the head shifted by delta times its weights' spread; the scale stays,
        and so do all other panels."""
        self.delta = delta
        keys = dict.fromkeys((p.source, p.method) for p in self.panels if p.shifts)
        for source, method in keys:
            made = iter(self._panels(source, method, self.asked, self._delta(source.net)))
            for panel in self.panels:
                if (panel.source, panel.method) == (source, method):
                    new = next(made)
                    panel.low, panel.logit, panel.share, panel.note = new.low, new.logit, new.share, new.note
        self._draw([p for p in self.panels if p.shifts or not p.uri])

    def boxes(self) -> list[tuple[float, float, float, float] | None]:
        """For each panel the box at `threshold` of its peak, as shares of width and height; None if there is
        none."""
        found: list[tuple[float, float, float, float] | None] = []
        for panel in self.panels:
            height, width = panel.unit.shape[1:]
            x0, y0, x1, y1 = boxes_at(panel.unit, self.threshold)[0][0].tolist()
            found.append((x0 / width, y0 / height, x1 / width, y1 / height) if x1 > x0 and y1 > y0 else None)
        return found

    def files(self) -> dict[str, bytes]:
        """Maps (.npy: panels x height x width), overlays side by side (.png), and all numbers (.json)."""
        if not self.panels:
            raise DataError("there is no map yet: choose a picture first.")
        held, overlays = io.BytesIO(), io.BytesIO()
        maps = [finish_maps(p.low, p.method, GridSize.of(p.unit), "raw")[0, 0] for p in self.panels]
        same = GridSize(max(m.shape[0] for m in maps), max(m.shape[1] for m in maps))  # two models may differ
        maps = [
            m if tuple(m.shape) == same else finish_maps(p.low, p.method, same, "raw")[0, 0]
            for p, m in zip(self.panels, maps, strict=True)
        ]
        np.save(held, torch.stack(maps).float().cpu().numpy())
        boxes = self.boxes()
        wide, high = self.base.size
        sheet = Image.new("RGB", (wide * len(self.panels), high), "white")
        for i, (panel, box) in enumerate(zip(self.panels, boxes, strict=True)):
            drawn = self._overlay(panel)
            scaled = [] if box is None else [[box[0] * wide, box[1] * high, box[2] * wide, box[3] * high]]
            sheet.paste(with_boxes(drawn, scaled), (i * wide, 0))
        sheet.save(overlays, "PNG")
        about = {
            "picture": self.name,
            "size": list(self.size),
            "view": self.kind,
            "threshold": self.threshold,
            "delta": self.delta,
            "maps": [self._row(panel, box) for panel, box in zip(self.panels, boxes, strict=True)],
        }
        return {
            "maps.npy": held.getvalue(),
            "overlay.png": overlays.getvalue(),
            "maps.json": json.dumps(about, indent=1).encode(),
        }

    def _row(self, panel: Panel, box: tuple[float, float, float, float] | None) -> dict[str, Any]:
        passage, net = self.passage(panel.source.net), panel.source.net
        wide, high = self.size if self.whole else self.base.size
        sign = -1 if net.classes == 1 and panel.index == 0 else 1
        evidence = at_least_float32(passage.sigmoid.detach())[0, min(panel.index, net.classes - 1)] * sign
        return {
            "from": panel.source.name,
            "method": panel.method,
            "class": panel.index,
            "class_name": panel.class_name,
            "probability": float(probabilities(net, passage, self._delta(net))[panel.index]),
            "evidence": float(evidence.sigmoid()) if net.fitted else None,
            "logit": panel.logit,
            "positive_share": panel.share,
            "peak": float(panel.low.max()),
            "unit": "logits" if panel.in_logits else "the method's own",
            "box": None
            if box is None
            else [round(box[0] * wide), round(box[1] * high), round(box[2] * wide), round(box[3] * high)],
            "note": panel.note,
        }

    def _delta(self, net: DualBranch) -> float:
        if self.delta and net not in self._spreads:
            self._spreads[net] = spread(net) or 0.0
        return self.delta * self._spreads[net] if self.delta else 0.0

    def _panels(self, source: Source, method: str, asked: Request, delta: float) -> list[Panel]:
        """The panels of one source and method, one per class that its network knows."""
        net, passage = source.net, self.passage(source.net)
        wanted = [same_class(k, self.first, net) for k in asked.classes or (self.likely(self.first),)]
        index = list(dict.fromkeys(k for k in wanted if k is not None)) or [self.likely(net)]
        if delta:
            net, passage = shifted(net, passage, delta)
        clamp = source.branch == "sigmoid" and asked.kind == "evidence"
        how = MapConfig(method, source.branch, clamp, scale="raw", top_n=CHANNELS)
        ex = explain_pass(
            net, passage, how, classes=torch.tensor([index], device=source.net.device), size="features"
        )
        panels = []
        for i, k in enumerate(index):
            low = ex.maps[:, i : i + 1].detach().cpu()
            note = _why_dark(low, asked.kind, clamp)
            panels.append(
                Panel(
                    source,
                    method,
                    k,
                    class_label(source.net, k),
                    low,
                    float(ex.logits[0, i]),
                    float(ex.positive_share[0, i]),
                    note,
                )
            )
        return panels

    def _draw(self, panels: Sequence[Panel]) -> None:
        for panel in panels:
            panel.uri = data_uri(self._overlay(panel))
            size = GridSize.of(self._inputs[panel.source.net.transform])
            panel.unit = finish_maps(panel.low, panel.method, size, "unit")[0]

    def _overlay(self, panel: Panel) -> Image.Image:
        size = GridSize(self.base.height, self.base.width)
        values = (finish_maps(panel.low, panel.method, size, "raw")[0, 0] / panel.peak).nan_to_num(0.0)
        if self.kind == "signed":
            return overlay(self.base, values.clamp(-1, 1), signed=True, peak=1.0)
        return overlay(self.base, values.clamp(0, 1))


def _why_dark(low: Tensor, kind: Kind, clamp: bool) -> str:
    """A word on a map that shows nothing."""
    if not bool(torch.isfinite(low).all()):
        return "not finite"
    if not bool(low.any()):
        return "blank: no channel has a positive weight" if clamp else "blank: all zero"
    if kind == "evidence" and bool((low <= 0).all()):
        return "blank: all evidence is negative (see the signed view)"
    return ""


# ------------------------------------------------------------------------------------------- many pictures


def disagreements(first: Source, second: Source, pictures: Sequence[Image.Image]) -> list[float]:
    """Return, for each picture, the disagreement of two sources' unit Grad-CAM maps of its likely class."""
    maps, classes = list[Tensor](), None
    for source in (first, second):
        batch, _ = as_batch(source.net, list(pictures))
        passage = source.net.run(batch, grad=source.net.linear != {"softmax", "sigmoid"})
        if classes is None:
            classes = branch_logits(passage, "softmax").detach().argmax(1)
            if first.net.classes == 1:
                classes = (branch_logits(passage, "softmax")[:, 0] > 0).long()
        known = [same_class(k, first.net, source.net) for k in classes.tolist()]
        if any(k is None for k in known):
            raise DataError("the two models do not know the same classes, so their maps cannot be compared.")
        ex = explain_pass(source.net, passage, MapConfig(branch=source.branch), classes=known, size=(56, 56))  # type: ignore[arg-type]
        maps.append(ex.maps.detach().cpu())
    return disagreement(*maps).tolist()
