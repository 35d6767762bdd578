"""Explanation: maps with the scores of their classes; overlays, boxes, files and notebook display."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sigcam.core.errors import ConfigError
from sigcam.core.files import write_atomic, write_png, write_text_atomic
from sigcam.core.types import GridSize, ImageSize
from sigcam.drawing.overlay import (
    PROBABILITY,
    RANGE,
    ends,
    gradient,
    largest,
    overlay,
    with_boxes,
    with_contour,
    with_strips,
)
from sigcam.methods.placement import Region, fade_unseen, place_boxes, place_map, shrunk
from sigcam.methods.postprocess import unit_range
from sigcam.methods.registry import METHODS, Scale
from sigcam.methods.targets import Branch
from sigcam.metrics.boxes import boxes_at
from sigcam.network.calibration import BranchCalibration
from sigcam.network.dual import DualBranch

NOTEBOOK_IMAGES, NOTEBOOK_MAPS = 12, 5  # images shown in a notebook, and maps of each
NOTEBOOK_SIDE = 448  # pixels: twice as many as are shown, for fine screens


@dataclass(frozen=True, repr=False)
class Explanation:
    """Maps of one class (or K) per image, and the scores of those classes.

    Args:
        maps: (B, H, W), or (B, K, H, W); in [0, 1] unless `scale` is "raw" or "logit".
        classes: (B,) or (B, K) class indices; -1 pads "positive".
        probability: The softmax head's probability of the class.
        evidence: The sigmoid branch's score of the class, in [0, 1], independent of other classes; without
            meaning unless the branch is `fitted`.
        logits: The class's logit in the explained branch.
        positive_share: The positive part of the evidence before clamping, in [0, 1].
        blank: Whether a map is all zero; `notes` says why.
        top_classes, top_probability, top_evidence: (B, 5) the most probable classes (all if there are fewer)
            and their scores.
        pictures: The images as given, if they are no tensors and it is known what the network sees of them.
        regions: The part of each picture that the network sees, xyxy in its pixels.
        images: The (B, C, H, W) batch.
        cells: With scale "logit" or "probability", the logits of cells (B, P, Q) or (B, K, P, Q), whose mean
            is that of the image; otherwise None.
        calibrated: Whether the branch is calibrated, so that one half of `evidence` has a meaning.
    """

    maps: Tensor
    classes: Tensor
    probability: Tensor
    evidence: Tensor
    logits: Tensor
    positive_share: Tensor
    blank: Tensor
    notes: tuple[str, ...]
    top_classes: Tensor
    top_probability: Tensor
    top_evidence: Tensor
    method: str
    target: str
    branch: Branch
    clamp: bool
    scale: Scale
    fitted: bool
    class_names: tuple[str, ...] | None = None
    pictures: tuple[Image.Image, ...] = ()
    regions: tuple[Region, ...] = ()
    images: Tensor | None = None
    cells: Tensor | None = None
    calibrated: bool = False

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.maps.shape))
        settings = f"{self.method}, {self.branch} branch, clamp={self.clamp}, {self.scale}"
        return f"Explanation({shape} maps: {settings})"

    def __len__(self) -> int:
        return len(self.maps)

    def name(self, index: int) -> str:
        """Return the name of class `index`, or its number."""
        names = self.class_names or ()
        return names[index] if 0 <= index < len(names) else f"class {index}"

    def first_maps(self) -> Tensor:
        """Return (B, H, W) maps, the first class of each image if there are several."""
        return self.maps if self.maps.ndim == 3 else self.maps[:, 0]

    def select(self, k: int) -> "Explanation":
        """Return the explanation of each image's k-th class alone, with maps (B, H, W)."""
        names = ("maps", "classes", "probability", "evidence", "logits", "positive_share", "blank", "cells")
        kept: Any = {n: getattr(self, n)[:, k] for n in names if getattr(self, n) is not None}
        return replace(self, **kept)

    @property
    def present(self) -> Tensor:
        """(B,) or (B, K) whether the evidence of the class is above one half."""
        return self.evidence > 0.5

    @property
    def tells_presence(self) -> bool:
        """Whether captions and rows say `present`: the branch is fitted and calibrated."""
        return self.fitted and self.calibrated

    def boxes(
        self, threshold: float | None = None, mode: Literal["largest", "all"] = "largest"
    ) -> list[Tensor]:
        """Return, per image, xyxy boxes (G, 4), in map pixels; zeros if nothing is above the threshold.

        Args:
            threshold: A probability for maps in probabilities, otherwise a fraction of the map's maximum;
                by default `default_threshold`.
        """
        threshold = self.default_threshold if threshold is None else threshold
        return boxes_at(self._unit_maps(), threshold, mode, absolute=self.scale == "probability")

    def picture_boxes(self, threshold: float | None = None) -> list[Tensor]:
        """Return the same in whole pixels of the pictures; of tensors, in map pixels."""
        boxes, grid = self.boxes(threshold), GridSize.of(self.maps)
        if not self.pictures:
            return boxes
        sizes = [ImageSize(*picture.size) for picture in self.pictures]
        return [place_boxes(b, grid, s, r) for b, s, r in zip(boxes, sizes, self.regions, strict=True)]

    def on_picture(self, i: int, values: Tensor, most: int | None = None) -> tuple[Image.Image, Tensor]:
        """Return image i, with at most `most` pixels a side, and a map of it (H, W) at that size; of a
        tensor, the image and the map as they are."""
        if not self.pictures:
            return self._tensor_image(i), values
        picture, region = shrunk(self.pictures[i], self.regions[i], most)
        unit = self.scale == "unit"
        return picture, place_map(values, ImageSize(*picture.size), region, unit=unit)

    @property
    def default_threshold(self) -> float:
        """The threshold of `boxes`: 0.5 for maps in probabilities, 0.2 of the maximum for others."""
        return box_threshold(absolute=self.scale == "probability")

    def contribution(self, box: Sequence[float]) -> Tensor:
        """Return how many logits a region adds to the class's logit, (B,) or (B, K); the contributions of
        regions that cover the image add up to it. For scale "logit" and "probability".

        Args:
            box: xyxy in map pixels; cells that it cuts count in part.
        """
        if self.cells is None:
            raise ConfigError("contributions add up for scale='logit' and scale='probability': draw one.")
        shares = list[Tensor]()
        sides = zip((box[1], box[0]), (box[3], box[2]), (-2, -1), strict=True)
        for low, high, axis in sides:
            count = self.cells.shape[axis]
            edges = torch.linspace(0, self.maps.shape[axis], count + 1, dtype=torch.float64)
            inside = torch.minimum(edges[1:], torch.tensor(high)) - torch.maximum(
                edges[:-1], torch.tensor(low)
            )
            shares.append(inside.clamp(min=0) / self.maps.shape[axis])
        weights = (shares[0][:, None] * shares[1]).to(self.cells)  # (P, Q), 1 in all for the whole image
        return (self.cells * weights).sum((-2, -1))

    @property
    def _unit(self) -> str:
        return PROBABILITY if self.scale == "probability" else RANGE

    def _unit_maps(self) -> Tensor:
        maps = self.first_maps()
        if self.scale in ("unit", "probability"):
            return maps
        return unit_range(maps.relu() if METHODS[self.method].finish == "relu" else maps)

    def overlay(
        self,
        *,
        boxes: float | None = None,
        contour: float | None = None,
        captions: bool = False,
        legend: bool = False,
    ) -> list[Image.Image]:
        """Return each image with its map drawn over it: pictures at their own size, tensors at the map's.

        Args:
            boxes: Threshold at which to draw the box.
            contour: Threshold at which to draw the outline of the region above it.
            captions: Write class, probability and evidence below.
            legend: Draw a colour bar below, in logits for raw maps.
        """
        options: Any = {"contour": contour, "captions": captions, "legend": legend}
        found = [None] * len(self) if boxes is None else self.picture_boxes(boxes)
        return [self.draw(i, boxes=each, **options) for i, each in enumerate(found)]

    def draw(
        self,
        i: int,
        *,
        boxes: Tensor | None = None,
        contour: float | None = None,
        captions: bool = False,
        legend: bool = False,
        most: int | None = None,
    ) -> Image.Image:
        """Return image i with its map drawn over it, at most `most` pixels a side; pale where the network
        does not see it.

        Args:
            boxes: (G, 4) in pixels of the picture, as `picture_boxes` returns them.
            contour, captions, legend: as for `overlay`.
        """
        raw, values = self.scale in ("raw", "logit"), self.first_maps()[i]
        image, placed = self.on_picture(i, values, most)
        drawn = overlay(image, placed, signed=raw)
        if contour is not None:
            outlined = placed
            if raw:
                _, outlined = self.on_picture(i, self._unit_maps()[i], most)
            drawn = with_contour(drawn, outlined, contour, absolute=self.scale == "probability")
        if self.pictures:
            factor = image.width / self.pictures[i].width
            drawn = fade_unseen(drawn, [factor * side for side in self.regions[i]])
        else:
            factor = 1.0
        if boxes is not None:
            drawn = with_boxes(drawn, (factor * boxes).tolist())
        if captions or legend:
            text = "\n".join(self.caption(i)) if captions else ""
            peak = largest(values) if raw else None
            drawn = with_strips(drawn, caption=text, peak=peak, legend=legend, unit=self._unit)
        return drawn

    def caption(self, i: int, k: int = 0) -> list[str]:
        """Return the lines below the map of image i's k-th class: name, scores, and whether it is blank."""
        columns = (self.classes, self.probability, self.evidence, self.blank)
        index, probability, evidence, blank = (column[i].reshape(-1)[k].item() for column in columns)
        lines = [self.name(int(index)), f"probability {probability:.3f}"]
        presence = f", {presence_words(evidence)}" if self.tells_presence else ""
        lines += [f"evidence {evidence:.3f}{presence}"] if self.fitted else []
        return lines + (["blank map"] if blank else [])

    def save(
        self,
        folder: str | Path,
        names: Sequence[str] | None = None,
        *,
        threshold: float | None = None,
        captions: bool = False,
        scores: bool = True,
    ) -> list[Path]:
        """Write overlays (PNG), maps (NPY) and scores (explanation.json); return the overlays' paths.

        Args:
            names: File names without extension; by default 0000, 0001, ...
            threshold: Threshold at which to draw the box on the overlay.
            captions: Write class and scores below the overlay, and draw a colour bar.
            scores: Write explanation.json.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = names or [f"{i:04d}" for i in range(len(self))]
        paths = [folder / f"{name}.png" for name in names]
        overlays = self.overlay(boxes=threshold, captions=captions, legend=captions)
        for path, image, maps in zip(paths, overlays, self.maps, strict=True):
            write_png(path, image)
            write_map(path.with_suffix(".npy"), maps)
        if scores:
            rows = [row | {"name": name} for name, row in zip(names, self.rows(), strict=True)]
            write_text_atomic(folder / "explanation.json", json.dumps(rows, indent=1))
        return paths

    def rows(self) -> list[dict[str, Any]]:
        """Return, per image, plain values: class, scores, positive share, likely classes, settings."""
        rows = []
        settings = {name: getattr(self, name) for name in ("method", "target", "branch", "clamp", "scale")}
        for i in range(len(self)):
            classes = self.classes[i].tolist()
            names = [self.name(k) for k in self.classes[i].reshape(-1).tolist()]
            rows.append(
                {
                    "class": classes,
                    "class_name": names if self.maps.ndim == 4 else names[0],
                    "probability": self.probability[i].tolist(),
                    "evidence": self.evidence[i].tolist() if self.fitted else None,
                    "present": self.present[i].tolist() if self.tells_presence else None,
                    "logit": self.logits[i].tolist(),
                    "positive_share": self.positive_share[i].tolist(),
                    "blank": self.blank[i].tolist(),
                    "top": self._top(i),
                    **settings,
                }
            )
        return rows

    def _top(self, i: int) -> list[dict[str, Any]]:
        columns = (self.top_classes[i], self.top_probability[i], self.top_evidence[i])
        values = zip(*(column.tolist() for column in columns), strict=True)
        rows = [(k, self.name(k), probability, evidence) for k, probability, evidence in values]
        keys = ("class", "class_name", "probability", "evidence")
        return [dict(zip(keys, row if self.fitted else (*row[:3], None), strict=True)) for row in rows]

    def _tensor_image(self, i: int) -> Image.Image:
        """An image given as a tensor; its mean and std are unknown, so it is scaled between its extremes."""
        assert self.images is not None
        image = self.images[i].detach().float()
        low, high = image.amin(), image.amax()
        pixels = (255 * (image - low) / (high - low).clamp(min=1e-12)).byte().cpu()
        pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
        return Image.fromarray(pixels.permute(1, 2, 0).numpy())

    def _repr_html_(self) -> str:
        """Figures for a notebook; text takes the notebook's colour, in light and dark themes."""
        figures = [self._figures(i) for i in range(min(len(self), NOTEBOOK_IMAGES))]
        more = len(self) - len(figures)
        foot = f"<p>and {more} more image{'s' * (more > 1)}: see <code>.overlay()</code></p>" if more else ""
        return f"<div style='color:inherit'>{''.join(figures)}{foot}</div>"

    def _figures(self, i: int) -> str:
        """One image's maps side by side, on one scale with one colour bar; the most probable of many."""
        several = self.maps.ndim == 4
        columns = [k for k, index in enumerate(self.classes[i].reshape(-1).tolist()) if index >= 0]
        if not columns:
            return "<p>no class has evidence above one half in this image</p>"
        more = len(columns) - NOTEBOOK_MAPS
        if more > 0:
            scores = self.probability[i].reshape(-1).tolist()
            columns = sorted(columns, key=lambda k: -scores[k])[:NOTEBOOK_MAPS]
        maps = (self.maps[i] if several else self.maps[i : i + 1])[columns]
        signed = self.scale in ("raw", "logit")
        peak = largest(maps) if signed else None
        figures = []
        for k, values in zip(columns, maps, strict=True):
            drawn = overlay(*self.on_picture(i, values, NOTEBOOK_SIDE), signed=signed, peak=peak)
            name, *lines = map(escape, self.caption(i, k))
            figures.append(
                "<figure style='display:inline-block;vertical-align:top;margin:4px;max-width:224px'>"
                f"<img src='{data_uri(drawn)}' alt='map of {name}' style='width:100%;min-width:128px'>"
                "<figcaption style='font-size:.9em;line-height:1.35;overflow-wrap:anywhere'>"
                f"<b>{name}</b><br>{'<br>'.join(lines)}</figcaption></figure>"
            )
        rest = f"<div style='margin:0 4px'>and {more} more class{'es' * (more > 1)}</div>" if more > 0 else ""
        style = f"display:{'block' if several else 'inline-block;vertical-align:top'};margin:0 8px 12px 0"
        return f"<div style='{style}'>{''.join(figures)}{legend_html(peak, self._unit)}{rest}</div>"


def is_calibrated(net: DualBranch) -> bool:
    """Whether the network has a fitted and calibrated branch, which tells if a class is present."""
    return net.fitted and net.calibration != BranchCalibration()


def box_threshold(*, absolute: bool) -> float:
    """Return the default threshold of boxes: 0.5 for maps in probabilities, 0.2 of the maximum for others."""
    return 0.5 if absolute else 0.2


def presence_words(evidence: float) -> str:
    """Return "present" if the evidence of a calibrated branch is above one half, else "not present"."""
    return "present" if evidence > 0.5 else "not present"


def write_map(path: Path, values: Tensor) -> None:
    """Write a map as .npy in float32, whole or not at all."""
    content = io.BytesIO()
    np.save(content, values.detach().cpu().float().numpy())
    write_atomic(path, content.getvalue())


def data_uri(image: Image.Image, quality: int = 85) -> str:
    """Return the image as a JPEG data URI, for the source of an <img>."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def legend_html(peak: float | None, unit: str) -> str:
    """Return a small colour bar with its numbers, in the text colour of the page."""
    left, middle, right = ends(peak, unit)
    bar = f"display:block;height:8px;border-radius:2px;background:{gradient(signed=peak is not None)}"
    return (
        "<div style='width:216px;max-width:100%;margin:0 4px;font-size:.8em'>"
        f"<span style='{bar}'></span><span style='display:flex;justify-content:space-between'>"
        f"<span>{left}</span><span>{middle}</span><span>{right}</span></span></div>"
    )
