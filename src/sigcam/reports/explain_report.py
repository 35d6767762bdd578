"""Reports of maps: what `sigcam explain` drew, and what `sigcam demo` found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sigcam.core.manifest import provenance
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.drawing.overlay import largest, overlay, with_boxes
from sigcam.methods.explanation import Explanation, data_uri
from sigcam.methods.postprocess import disagreement
from sigcam.network.dual import DualBranch
from sigcam.reports.html import Card, Gallery, Section, Shot, render_page

Row = dict[str, Any]
Redraw = Callable[[list[Image.Image], list[int]], Explanation]  # pictures and a class of each

MOST = 500  # images on a page
QUALITY = 80  # of JPEG: 500 pictures of 224 x 224, each with two maps, stay below 25 MB
AT_ONCE = 16


def explain_page(
    rows: Sequence[Row],
    maps: Mapping[str, Path],
    samples: Samples,
    net: DualBranch,
    *,
    redraw: Redraw | None,
    skipped: Sequence[tuple[str, str]] = (),
    progress: Progress,
) -> str:
    """The page of drawn maps: every picture with its map and box, its likely classes, and where the two
    heads disagree.

    Args:
        rows: as `sigcam explain` writes them.
        maps: the file of each image's map, by id.
        redraw: draws the other head's maps of the same classes; None where there is no other.
    """
    shown = evenly(len(rows), MOST)
    opened, first = {sample.id: sample for sample in samples}, rows[0]
    cards = list[Card]()
    for start in range(0, len(shown), AT_ONCE):
        part = [rows[i] for i in shown[start : start + AT_ONCE]]
        pictures = [opened[row["image"]].open() for row in part]
        values = [torch.from_numpy(np.load(maps[row["image"]])) for row in part]
        other = redraw(pictures, [row["class"] for row in part]) if redraw else None
        for i, (row, picture) in enumerate(zip(part, pictures, strict=True)):
            label = opened[row["image"]].label
            named = "" if label is None else samples.classes[label]
            cards.append(_explained(row, named, seen_by(net, picture), values[i], other, i))
        progress("report", len(cards), len(shown))
    heads = f"{first['branch']} branch" if first["branch"] == "sigmoid" else f"{first['branch']} head"
    judged = first["evidence"] is not None
    told = (
        "Probability says which class, by the softmax head; evidence says whether it is there at all, by "
        "the sigmoid branch, each class judged by itself."
        if judged
        else "No fitted branch was used, so there is no evidence: probability says which class, not whether."
    )
    if redraw:
        told += (
            " Beside each map is the softmax head's of the same class; their disagreement is 1 minus "
            "their overlap, from 0 (equal) to 1 (nothing in common)."
        )
    gallery = Gallery(cards, grouped_by="predicted class", signed=first["scale"] == "raw")
    blank = sum(bool(row["blank"]) for row in rows)
    few = f"{len(cards)} of {len(rows)} images are shown, evenly chosen." if len(cards) < len(rows) else ""
    return render_page(
        "Evidence maps",
        [Section("Images", [gallery], intro=told, foot=few)],
        facts=[
            ("images", str(len(rows))),
            (
                "maps",
                f"{first['method']} of the {heads}, {'clamped' if first['clamp'] else 'signed weights'}",
            ),
            ("score explained", first["target"]),
            ("scale", "raw, in logits" if first["scale"] == "raw" else "unit: each map from 0 to 1"),
            ("box", f"above {first['threshold']:g} of the map's peak"),
            ("blank maps", str(blank)),
        ],
        warnings=[f"{len(skipped)} picture(s) could not be read, the first {skipped[0][0]}."]
        if skipped
        else [],
        **provenance(),
    )


def _explained(
    row: Row, label: str, picture: Image.Image, values: Tensor, other: Explanation | None, i: int
) -> Card:
    """What is told of one image, whose map by the other head is the i-th."""
    raw, top, name = row["scale"] == "raw", row["top"], row["class_name"]
    drawn = with_boxes(overlay(picture, values, signed=raw), [row["box"]])
    shots = [_shot(drawn, values, row["branch"], f"{name} on {row['image']}", raw)]
    facts = [("label", label)] if label else []
    facts.append(("map of", name))
    if row["class"] != top[0]["class"]:  # whose scores are in the list of likely classes
        facts.append(("its probability", f"{row['probability']:.3f}"))
        facts += [("its evidence", f"{row['evidence']:.3f}")] if row["evidence"] is not None else []
    difference = None
    if other is not None:
        theirs = other.first_maps()[i].cpu()
        shots.append(_shot(overlay(picture, theirs, signed=raw), theirs, other.branch, name, raw))
        difference = float(disagreement(values, theirs))
        facts.append(("disagreement", f"{difference:.3f}"))
    apart = None if row["evidence"] is None else abs(row["probability"] - row["evidence"])
    return Card(
        row["image"],
        shots,
        group=top[0]["class_name"],
        keys={
            "probability": row["probability"],
            "evidence": row["evidence"],
            "|probability - evidence|": apart,
            "disagreement of the heads' maps": difference,
        },
        scores=[(each["class_name"], each["probability"], each["evidence"]) for each in top],
        facts=facts,
        notes=[f"blank map: {row['positive_share']:.0%} of the evidence is positive"] if row["blank"] else [],
    )


def _shot(drawn: Image.Image, values: Tensor, branch: str, what: str, raw: bool) -> Shot:
    """A drawn map; below a raw one, where its colours end."""
    reach = f", ± {largest(values):.3g} logits" if raw else ""
    return Shot(data_uri(drawn, QUALITY), f"{branch} map of {what}", branch + reach)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, at even distances."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def seen_by(net: DualBranch, picture: Image.Image) -> Image.Image:
    """What of a picture the network sees."""
    seen = getattr(net.transform, "picture", None)
    return seen(picture) if seen else picture


# ------------------------------------------------------------------------------------------------- the demo
