"""Reports of maps: what `sigcam explain` drew, and what `sigcam demo` found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sigcam.core.manifest import how_made
from sigcam.data.sample import Sample, Samples
from sigcam.drawing.overlay import largest, overlay, with_boxes
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import Explanation, data_uri
from sigcam.methods.probe import Branch
from sigcam.network.dual import DualBranch
from sigcam.reports.html import Card, Figure, Gallery, Number, Section, Shot, Table, page
from sigcam.training.features import Progress

Row = dict[str, Any]
Redraw = Callable[[list[Image.Image], list[int]], Explanation]  # pictures and a class of each

MOST = 500  # images on a page
QUALITY = 80  # of JPEG: 500 pictures of 224 x 224, each with two maps, stay below 25 MB
AT_ONCE = 16


def explained_page(
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
            " Beside each map is the softmax head's of the same class; their disagreement is 1 less their "
            "correlation, from 0 (alike) to 2 (opposite)."
        )
    gallery = Gallery(cards, grouped_by="predicted class", signed=first["scale"] == "raw")
    blank = sum(bool(row["blank"]) for row in rows)
    few = f"{len(cards)} of {len(rows)} images are shown, evenly chosen." if len(cards) < len(rows) else ""
    return page(
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
        **how_made(),
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
    disagreement = None
    if other is not None:
        theirs = other.first_maps()[i].cpu()
        shots.append(_shot(overlay(picture, theirs, signed=raw), theirs, other.branch, name, raw))
        disagreement = disagree(values, theirs)
        facts.append(("disagreement", f"{disagreement:.2f}"))
    apart = None if row["evidence"] is None else abs(row["probability"] - row["evidence"])
    return Card(
        row["image"],
        shots,
        group=top[0]["class_name"],
        keys={
            "probability": row["probability"],
            "evidence": row["evidence"],
            "|probability - evidence|": apart,
            "disagreement of the heads' maps": disagreement,
        },
        scores=[(each["class_name"], each["probability"], each["evidence"]) for each in top],
        facts=facts,
        notes=[f"blank map: {row['positive_share']:.0%} of the evidence is positive"] if row["blank"] else [],
    )


def _shot(drawn: Image.Image, values: Tensor, branch: str, what: str, raw: bool) -> Shot:
    """A drawn map; below a raw one, where its colours end."""
    reach = f", ± {largest(values):.3g} logits" if raw else ""
    return Shot(data_uri(drawn, QUALITY), f"{branch} map of {what}", branch + reach)


def disagree(a: Tensor, b: Tensor) -> float:
    """1 less the correlation of two maps, in [0, 2]; 1 where one of them is constant, 0 where both are."""
    centred = [x.double().flatten() - x.double().mean() for x in (a, b)]
    sizes = [float(x.norm()) for x in centred]
    if min(sizes) <= 1e-12:
        return float(max(sizes) > 1e-12)
    return 1 - max(-1.0, min(1.0, float(centred[0] @ centred[1]) / (sizes[0] * sizes[1])))


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, at even distances."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def seen_by(net: DualBranch, picture: Image.Image) -> Image.Image:
    """What of a picture the network sees."""
    seen = getattr(net.transform, "picture", None)
    return seen(picture) if seen else picture


# ------------------------------------------------------------------------------------------------- the demo


def demo_page(
    table: Mapping[str, Any], figures: Mapping[str, Path], net: DualBranch, samples: Samples
) -> str:
    """The demo's numbers, its figures, and the maps of some test pictures by both heads."""
    places = Table(
        ("map from", "weights", "mean IoU", "threshold"),
        [
            (row["branch"], [row["clamp"], Number(row["iou"], digits=3), Number(row["threshold"])])
            for row in table["maps"]
        ],
        foot="Of the thresholded map with the object's mask, at the threshold that was best on other images.",
    )
    presence = Table(
        ("score of the best class", "above 0.5 with a bird, %", "above 0.5 without, %", "AUROC"),
        [
            (
                row["score"],
                [
                    Number(100 * row["above_half_with_bird"], digits=1),
                    Number(100 * row["above_half_without"], digits=1),
                    Number(row["auroc"], digits=3),
                ],
            )
            for row in table["nothing_there"]
        ],
        foot="AUROC: the chance that a picture with a bird scores higher than a scene without one.",
    )
    captions = {
        "distortions": "The softmax head shifted in two ways that no probability can tell; the sigmoid "
        "branch has no such freedom.",
        "maps": "Input, the object's mask, and the same method on both heads.",
    }
    drawn = []
    for name, path in figures.items():
        with Image.open(path) as picture:
            drawn.append(Figure(Shot(data_uri(picture, 88), f"figure: {captions[name]}", captions[name])))
    return page(
        "sigcam demo",
        [
            Section("Where is it?", [places]),
            Section("Is it there at all?", [presence]),
            Section("Figures", drawn),
            Section(
                "Maps of test pictures",
                [Gallery([_both_heads(net, sample, samples.classes) for sample in samples], "class")],
                intro="Grad-CAM of the predicted class, from the softmax head and from the sigmoid branch.",
            ),
        ],
        lead="Synthetic birds: a linear head is trained on the frozen embedded network, a sigmoid branch is "
        "fitted beside it, and both are asked where the bird is, and whether there is one.",
        facts=[
            ("accuracy before and after", f"{table['accuracy_before']:.1%}, {table['accuracy_after']:.1%}"),
            ("predictions changed", str(table["predictions_changed"])),
            ("weights unchanged", "yes" if table["weights_unchanged"] else "no"),
            ("seconds to fit the branch", str(table["fit_seconds"])),
            ("maps per second", str(table["maps_per_second"])),
        ],
        **how_made(),
    )


def _both_heads(net: DualBranch, sample: Sample, classes: Sequence[str]) -> Card:
    """One picture with the maps of both heads."""
    picture = sample.open()
    branches: tuple[Branch, Branch] = ("softmax", "sigmoid")
    found = [explain(net, [picture], branch=branch) for branch in branches]
    name, label = found[0].name(int(found[0].classes[0])), classes[sample.label or 0]
    probability, evidence = float(found[0].probability[0]), float(found[1].evidence[0])
    top = found[1].rows()[0]["top"]
    return Card(
        label,
        [
            Shot(data_uri(ex.overlay(boxes=0.2)[0], QUALITY), f"{ex.branch} map of {name}", ex.branch)
            for ex in found
        ],
        group=label,
        keys={
            "probability": probability,
            "evidence": evidence,
            "disagreement of the heads' maps": disagree(found[0].maps[0], found[1].maps[0]),
        },
        scores=[(each["class_name"], each["probability"], each["evidence"]) for each in top],
        notes=[] if name == label else [f"taken for {name}"],
    )
