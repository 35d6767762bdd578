"""Explanation: maps with the scores of their classes, and how they are shown, cut into boxes and saved."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from sigcam.drawing.overlay import ends, gradient, largest, overlay, with_boxes, with_contour, with_strips
from sigcam.methods.map_config import Scale
from sigcam.methods.postprocess import unit_range
from sigcam.methods.registry import METHODS
from sigcam.methods.targets import Branch
from sigcam.metrics.boxes import boxes_at

MOST_IMAGES, MOST_MAPS = 12, 5  # that a notebook shows, and of each image


@dataclass(frozen=True, repr=False)
class Explanation:
    """Maps of one class (or K) per image, and the scores of those classes.

    Args:
        maps: (B, H, W), or (B, K, H, W); in [0, 1] unless `scale` is "raw".
        classes: (B,) or (B, K) class indices; -1 pads "positive".
        probability: the softmax head's probability of the class.
        evidence: the sigmoid branch's score of the class, in [0, 1], each class judged by itself; it means
            nothing unless the branch is `fitted`.
        logits: the class's logit in the branch that the maps explain.
        positive_share: how much of the evidence before clamping is positive, in [0, 1].
        blank: whether a map is all zero; `notes` says why.
        top_classes, top_probability, top_evidence: (B, 5) the most probable classes, or all of fewer, and
            their scores, whatever class the map is of.
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
    images: Tensor | None = None

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.maps.shape))
        how = f"{self.method}, {self.branch} branch, clamp={self.clamp}, {self.scale}"
        return f"Explanation({shape} maps: {how})"

    def __len__(self) -> int:
        return len(self.maps)

    def name(self, index: int) -> str:
        """The name of class `index`, or its number."""
        return (
            self.class_names[index]
            if self.class_names and 0 <= index < len(self.class_names)
            else f"class {index}"
        )

    def first_maps(self) -> Tensor:
        """(B, H, W): the maps, or each image's first where there are several."""
        return self.maps if self.maps.ndim == 3 else self.maps[:, 0]

    def boxes(self, threshold: float = 0.2, mode: Literal["largest", "all"] = "largest") -> list[Tensor]:
        """Per image, xyxy boxes (G, 4) in map pixels around what is above `threshold` of the map's peak."""
        return boxes_at(self._unit_maps(), threshold, mode)

    def _unit_maps(self) -> Tensor:
        maps = self.first_maps()
        if self.scale == "unit":
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
        """Per image, the picture with its map on it.

        Args:
            boxes: a threshold at which to draw the box too.
            contour: a threshold at which to draw the outline of what is above it.
            captions: write class, probability and evidence below.
            legend: put a colour bar below, in logits for raw maps.
        """
        raw, maps = self.scale == "raw", self.first_maps()
        drawn = [
            overlay(picture, values, signed=raw)
            for picture, values in zip(self._pictures(), maps, strict=True)
        ]
        if contour is not None:
            drawn = [with_contour(d, m, contour) for d, m in zip(drawn, self._unit_maps(), strict=True)]
        if boxes is not None:
            drawn = [with_boxes(d, b.tolist()) for d, b in zip(drawn, self.boxes(boxes), strict=True)]
        if captions or legend:
            drawn = [
                with_strips(
                    d,
                    caption="\n".join(self.said(i)) if captions else "",
                    legend=legend,
                    peak=largest(maps[i]) if raw else None,
                )
                for i, d in enumerate(drawn)
            ]
        return drawn

    def said(self, i: int, k: int = 0) -> list[str]:
        """What is written below the map of image i's k-th class: its name, its scores, whether it is
        blank."""
        index, probability, evidence, blank = (
            values[i].reshape(-1)[k].item()
            for values in (self.classes, self.probability, self.evidence, self.blank)
        )
        lines = [self.name(int(index)), f"probability {probability:.3f}"]
        lines += [f"evidence {evidence:.3f}"] if self.fitted else []
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
        """Writes overlays (PNG), maps (NPY) and scores (explanation.json); returns the overlays' paths.

        Args:
            names: of the files, without ending; by default 0000, 0001, ...
            threshold: draws the box at this threshold on the overlay.
            captions: writes class and scores below the overlay, and a colour bar.
            scores: False leaves explanation.json out.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = names or [f"{i:04d}" for i in range(len(self))]
        written = []
        overlays = self.overlay(boxes=threshold, captions=captions, legend=captions)
        for stem, picture, values in zip(names, overlays, self.maps, strict=True):
            written.append(folder / f"{stem}.png")
            picture.save(written[-1])
            np.save(folder / f"{stem}.npy", values.detach().cpu().float().numpy())
        about = [row | {"name": stem} for stem, row in zip(names, self.rows(), strict=True)]
        if scores:
            (folder / "explanation.json").write_text(json.dumps(about, indent=1))
        return written

    def rows(self) -> list[dict[str, Any]]:
        """Per image, plain numbers: class, probability, evidence, logit, share of positive evidence."""
        rows = []
        for i in range(len(self)):
            index = self.classes[i].reshape(-1).tolist()
            rows.append(
                {
                    "class": index if self.maps.ndim == 4 else index[0],
                    "class_name": [self.name(k) for k in index]
                    if self.maps.ndim == 4
                    else self.name(index[0]),
                    "probability": self.probability[i].tolist(),
                    "evidence": self.evidence[i].tolist() if self.fitted else None,
                    "logit": self.logits[i].tolist(),
                    "positive_share": self.positive_share[i].tolist(),
                    "blank": self.blank[i].tolist(),
                    "top": self._top(i),
                    "method": self.method,
                    "target": self.target,
                    "branch": self.branch,
                    "clamp": self.clamp,
                    "scale": self.scale,
                }
            )
        return rows

    def _top(self, i: int) -> list[dict[str, Any]]:
        columns = (self.top_classes[i], self.top_probability[i], self.top_evidence[i])
        return [
            {
                "class": k,
                "class_name": self.name(k),
                "probability": probability,
                "evidence": evidence if self.fitted else None,
            }
            for k, probability, evidence in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _pictures(self) -> Sequence[Image.Image]:
        if self.pictures:
            return self.pictures
        assert self.images is not None
        flat = (
            self.images.detach().float().flatten(1)
        )  # shown between their extremes: mean and std are unknown
        low, high = flat.amin(1)[:, None, None, None], flat.amax(1)[:, None, None, None]
        shown = (255 * (self.images.detach().float() - low) / (high - low).clamp(min=1e-12)).byte().cpu()
        shown = shown[:, :3] if shown.shape[1] >= 3 else shown[:, :1].expand(-1, 3, -1, -1)
        return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in shown]

    def _repr_html_(self) -> str:
        """Figures for a notebook: ink and lines take its own colour, so that light and dark both read."""
        shown = [self._figures(i, picture) for i, picture in enumerate(self._pictures()[:MOST_IMAGES])]
        more = len(self) - len(shown)
        foot = f"<p>and {more} more image{'s' * (more > 1)}: see <code>.overlay()</code></p>" if more else ""
        return f"<div style='color:inherit'>{''.join(shown)}{foot}</div>"

    def _figures(self, i: int, picture: Image.Image) -> str:
        """One image's maps, side by side, drawn to one scale with one colour bar; of many classes the most
        probable."""
        several = self.maps.ndim == 4
        asked = [k for k, index in enumerate(self.classes[i].reshape(-1).tolist()) if index >= 0]
        scores = self.probability[i].reshape(-1).tolist()
        shown = asked if len(asked) <= MOST_MAPS else sorted(asked, key=lambda k: -scores[k])[:MOST_MAPS]
        maps = (self.maps[i] if several else self.maps[i : i + 1])[shown]
        peak = largest(maps) if self.scale == "raw" and shown else None
        cells = []
        for k, values in zip(shown, maps, strict=True):
            drawn = overlay(picture, values, signed=self.scale == "raw", peak=peak)
            name, *lines = map(escape, self.said(i, k))
            cells.append(
                "<figure style='display:inline-block;vertical-align:top;margin:4px;max-width:224px'>"
                f"<img src='{data_uri(drawn)}' alt='map of {name}' style='width:100%;min-width:128px'>"
                "<figcaption style='font-size:.9em;line-height:1.35;overflow-wrap:anywhere'>"
                f"<b>{name}</b><br>{'<br>'.join(lines)}</figcaption></figure>"
            )
        if not cells:
            return "<p>no class has evidence above one half in this image</p>"
        more = len(asked) - len(shown)
        told = f"<div style='margin:0 4px'>and {more} more class{'es' * (more > 1)}</div>" if more else ""
        place = "block" if several else "inline-block;vertical-align:top"
        shown_as = f"display:{place};margin:0 8px 12px 0"
        return f"<div style='{shown_as}'>{''.join(cells)}{legend_html(peak)}{told}</div>"


def data_uri(image: Image.Image, quality: int = 85) -> str:
    """The picture itself as the source of an <img>."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def legend_html(peak: float | None) -> str:
    """A small colour bar with its numbers, in the ink of the page around it."""
    left, middle, right = ends(peak)
    bar = f"display:block;height:8px;border-radius:2px;background:{gradient(signed=peak is not None)}"
    return (
        "<div style='width:216px;max-width:100%;margin:0 4px;font-size:.8em'>"
        f"<span style='{bar}'></span><span style='display:flex;justify-content:space-between'>"
        f"<span>{left}</span><span>{middle}</span><span>{right}</span></span></div>"
    )
