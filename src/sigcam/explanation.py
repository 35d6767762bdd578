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

from sigcam.boxes import boxes_at
from sigcam.draw import overlay, with_boxes
from sigcam.probe import Branch, unit_range

Scale = Literal["unit", "raw"]


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
        maps = self.first_maps()
        if self.scale == "raw":
            maps = unit_range(maps if self.method == "cam" else maps.relu())
        return boxes_at(maps, threshold, mode)

    def overlay(self, *, boxes: float | None = None) -> list[Image.Image]:
        """Per image, the picture with its map on it; `boxes` is a threshold at which to draw the box too."""
        drawn = [
            overlay(picture, values, signed=self.scale == "raw")
            for picture, values in zip(self._pictures(), self.first_maps(), strict=True)
        ]
        if boxes is None:
            return drawn
        return [with_boxes(d, b.tolist()) for d, b in zip(drawn, self.boxes(boxes), strict=True)]

    def save(
        self,
        folder: str | Path,
        names: Sequence[str] | None = None,
        *,
        threshold: float | None = None,
        scores: bool = True,
    ) -> list[Path]:
        """Writes overlays (PNG), maps (NPY) and scores (explanation.json); returns the overlays' paths.

        Args:
            names: of the files, without ending; by default 0000, 0001, ...
            threshold: draws the box at this threshold on the overlay.
            scores: False leaves explanation.json out.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = names or [f"{i:04d}" for i in range(len(self))]
        written = []
        for stem, picture, values in zip(names, self.overlay(boxes=threshold), self.maps, strict=True):
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
        cells = []
        for picture, row in zip(self.overlay(), self.rows(), strict=True):
            buffer = io.BytesIO()
            picture.save(buffer, "PNG")
            source = base64.b64encode(buffer.getvalue()).decode()
            first = {k: v[0] if isinstance(v, list) else v for k, v in row.items()}
            said = [escape(first["class_name"]), f"probability {first['probability']:.3f}"]
            said += [f"evidence {first['evidence']:.3f}"] if self.fitted else []
            said += ["blank map"] if first["blank"] else []
            cells.append(
                f"<figure style='display:inline-block;margin:4px'><img src='data:image/png;base64,{source}'>"
                f"<figcaption>{'<br>'.join(said)}</figcaption></figure>"
            )
        return "".join(cells)
