"""The report of `sigcam explain`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sigcam.core.manifest import provenance
from sigcam.core.types import GridSize, Progress
from sigcam.data.sample import Samples
from sigcam.drawing.overlay import PROBABILITY, RANGE, ends, largest, overlay, with_boxes
from sigcam.methods.explanation import Explanation, data_uri, presence_words
from sigcam.methods.placement import fade_unseen
from sigcam.methods.postprocess import disagreement, resize
from sigcam.network.dual import DualBranch
from sigcam.reports.html import Card, Gallery, Section, Shot, render_page

Redraw = Callable[[list[Image.Image], list[int]], Explanation]  # images and the class of each

MAX_IMAGES = 500  # on a page
CARD_SIDE = 256  # pixels
JPEG_QUALITY = 80  # 500 images of this size, each with two maps, stay below 25 MB
BATCH_SIZE = 16
SCALE_TEXTS = {
    "unit": "unit: each map from 0 to 1",
    "raw": "raw, in logits",
    "logit": "logit: the mean of a map is the class's logit, bias included",
    "probability": "probability per cell, the same scale for all images",
}


@dataclass(frozen=True)
class MapGallery(Gallery):
    """A gallery of maps, with the unit of those that are not signed."""

    unit: str = RANGE

    @property
    def ends(self) -> tuple[str, str, str]:
        """Text below the colour bar: left, middle, right."""
        return super().ends if self.signed else ends(None, self.unit)


def explain_page(
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    samples: Samples,
    net: DualBranch,
    *,
    redraw: Redraw | None,
    skipped: Sequence[tuple[str, str]] = (),
    progress: Progress,
) -> str:
    """The HTML page of drawn maps: every image with its map and box, its likely classes, and the
    disagreement of the two heads.

    Args:
        rows: as `sigcam explain` writes them.
        folder: holds the files of the maps.
        redraw: draws the other head's maps of the same classes; None if there is no other head.
    """
    shown = evenly(len(rows), MAX_IMAGES)
    by_id, first = {sample.id: sample for sample in samples}, rows[0]
    cards = list[Card]()
    for start in range(0, len(shown), BATCH_SIZE):
        part = [rows[i] for i in shown[start : start + BATCH_SIZE]]
        images = [by_id[row["image"]].open() for row in part]
        values = [torch.from_numpy(np.load(folder / row["map"])) for row in part]
        other = redraw(images, [row["class"] for row in part]) if redraw else None
        for i, (row, image) in enumerate(zip(part, images, strict=True)):
            label = by_id[row["image"]].label
            name = "" if label is None else samples.classes[label]
            small, other_map = _small(values[i]), None
            if other is not None:
                _, other_map = other.on_picture(i, other.first_maps()[i], max(small.shape))
                other_map = resize(other_map.cpu()[None, None], GridSize.of(small), "bilinear")[0, 0]
            cards.append(_card(row, name, image, small, other_map))
        progress("report", len(cards), len(shown))
    head = "sigmoid branch" if first["branch"] == "sigmoid" else f"{first['branch']} head"
    weights = "clamped" if first["clamp"] else "signed weights"
    intro = (
        "Probability says which class, by the softmax head; evidence says whether it is there at all, by "
        "the sigmoid branch, each class judged by itself."
        if first["evidence"] is not None
        else "No fitted branch was used, so there is no evidence: probability says which class, not whether."
    )
    if redraw:
        intro += (
            " Beside each map is the softmax head's of the same class; their disagreement is 1 minus "
            "their overlap, from 0 (equal) to 1 (nothing in common)."
        )
    absolute, signed = first["scale"] == "probability", first["scale"] in ("raw", "logit")
    if absolute:
        intro += " Only the sigmoid branch has maps in probabilities, so the softmax head's are not shown."
    if first["present"] is not None:
        intro += " A class counts as present if its evidence is above 0.5."
    unit = PROBABILITY if absolute else RANGE
    gallery = MapGallery(cards, grouped_by="predicted class", signed=signed, unit=unit)
    cut = f"{first['threshold']:g}"
    foot = f"{len(cards)} of {len(rows)} images are shown, evenly chosen." if len(cards) < len(rows) else ""
    return render_page(
        "Evidence maps",
        [Section("Images", [gallery], intro=intro, foot=foot)],
        facts=[
            ("images", str(len({row["image"] for row in rows}))),
            ("maps", f"{first['method']} of the {head}, {weights}"),
            ("score explained", first["target"]),
            ("scale", SCALE_TEXTS[first["scale"]]),
            ("box", f"above probability {cut}" if absolute else f"above {cut} of the map's peak"),
            ("blank maps", str(sum(bool(row["blank"]) for row in rows))),
        ],
        warnings=[f"{len(skipped)} picture(s) could not be read, the first {skipped[0][0]}."]
        if skipped
        else [],
        **provenance(),
    )


def _card(
    row: Mapping[str, Any], label: str, image: Image.Image, values: Tensor, other_map: Tensor | None
) -> Card:
    """The card of one image, with the softmax head's map beside its own if there is one."""
    raw, top, name = row["scale"] in ("raw", "logit"), row["top"], row["class_name"]
    factor = values.shape[1] / row["size"][0]
    box, seen = ([factor * side for side in row[key]] for key in ("box", "seen"))
    drawn = with_boxes(fade_unseen(overlay(image, values, signed=raw), seen), [box])
    shots = [_shot(drawn, values, row["branch"], f"{name} on {row['image']}", raw)]
    facts = [("label", label)] if label else []
    facts.append(("map of", name))
    presence = "" if row["present"] is None else f", {presence_words(row['evidence'])}"
    listed = row["class"] == top[0]["class"]  # then its scores head the list of likely classes
    facts += [] if listed else [("its probability", f"{row['probability']:.3f}")]
    if presence or not listed:
        facts += [("its evidence", f"{row['evidence']:.3f}{presence}")] if row["evidence"] is not None else []
    apart = None
    if other_map is not None:
        other_drawn = fade_unseen(overlay(image, other_map, signed=raw), seen)
        shots.append(_shot(other_drawn, other_map, "softmax", name, raw))
        apart = float(disagreement(values, other_map))
        facts.append(("disagreement", f"{apart:.3f}"))
    difference = None if row["evidence"] is None else abs(row["probability"] - row["evidence"])
    return Card(
        row["image"],
        shots,
        group=top[0]["class_name"],
        keys={
            "probability": row["probability"],
            "evidence": row["evidence"],
            "|probability - evidence|": difference,
            "disagreement of the heads' maps": apart,
        },
        scores=[(each["class_name"], each["probability"], each["evidence"]) for each in top],
        facts=facts,
        notes=[f"blank map: {row['positive_share']:.0%} of the evidence is positive"] if row["blank"] else [],
    )


def _small(values: Tensor) -> Tensor:
    """Return the map with at most CARD_SIDE pixels a side."""
    factor = CARD_SIDE / max(values.shape)
    if factor >= 1:
        return values
    size = [max(1, round(side * factor)) for side in values.shape]
    return F.interpolate(values[None, None], size, mode="area")[0, 0]


def _shot(drawn: Image.Image, values: Tensor, branch: str, what: str, raw: bool) -> Shot:
    """A drawn map; the caption of a raw one gives the range of its colours."""
    reach = f", ± {largest(values):.3g} logits" if raw else ""
    return Shot(data_uri(drawn, JPEG_QUALITY), f"{branch} map of {what}", branch + reach)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spaced."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def input_image(net: DualBranch, image: Image.Image) -> Image.Image:
    """The part of an image that the network's transform keeps."""
    kept = getattr(net.transform, "picture", None)
    return kept(image) if kept else image
