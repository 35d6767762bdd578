"""The report of `sigcam demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sigcam.core.manifest import provenance
from sigcam.data.sample import Sample, Samples
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import data_uri
from sigcam.methods.postprocess import disagreement
from sigcam.network.dual import DualBranch
from sigcam.reports.explain_report import JPEG_QUALITY
from sigcam.reports.figures import BOTH_HEADS
from sigcam.reports.html import Card, Figure, Gallery, Number, ReportTable, Section, Shot, render_page


def demo_page(
    table: Mapping[str, Any], figures: Mapping[str, Path], net: DualBranch, samples: Samples
) -> str:
    """The demo's numbers, its figures, and the maps of some test images by both heads."""
    localization = ReportTable(
        ("map from", "weights", "mean IoU", "threshold"),
        [
            (row["branch"], [row["clamp"], Number(row["iou"], digits=3), Number(row["threshold"])])
            for row in table["maps"]
        ],
        foot="Of the thresholded map with the object's mask, at the threshold that was best on other images.",
    )
    presence = ReportTable(
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
    parts = []
    for name, path in figures.items():
        with Image.open(path) as image:
            parts.append(Figure(Shot(data_uri(image, 88), f"figure: {captions[name]}", captions[name])))
    return render_page(
        "sigcam demo",
        [
            Section("Where is it?", [localization]),
            Section("Is it there at all?", [presence]),
            Section("Figures", parts),
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
        **provenance(),
    )


def _both_heads(net: DualBranch, sample: Sample, classes: Sequence[str]) -> Card:
    """One image with the maps of both heads."""
    image = sample.open()
    softmax, sigmoid = (explain(net, [image], branch=branch) for branch in BOTH_HEADS)
    name, label = softmax.name(int(softmax.classes[0])), classes[sample.label or 0]
    return Card(
        label,
        [
            Shot(data_uri(ex.overlay(boxes=0.2)[0], JPEG_QUALITY), f"{ex.branch} map of {name}", ex.branch)
            for ex in (softmax, sigmoid)
        ],
        group=label,
        keys={
            "probability": float(softmax.probability[0]),
            "evidence": float(sigmoid.evidence[0]),
            "disagreement of the heads' maps": float(disagreement(softmax.maps[0], sigmoid.maps[0])),
        },
        scores=[
            (each["class_name"], each["probability"], each["evidence"]) for each in sigmoid.rows()[0]["top"]
        ],
        notes=[] if name == label else [f"taken for {name}"],
    )
