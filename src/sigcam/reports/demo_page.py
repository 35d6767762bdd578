"""The page of the demo: a photograph, the measured maps, the distortions, and maps of test pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sigcam.core.manifest import provenance
from sigcam.data.sample import Sample, Samples
from sigcam.methods.explanation import data_uri
from sigcam.methods.postprocess import disagreement
from sigcam.reports.explain_report import JPEG_QUALITY
from sigcam.reports.figures import BOTH_HEADS, Passes
from sigcam.reports.html import Card, Figure, Gallery, Number, ReportTable, Section, Shot, render_page

FIT_NAMES = {
    "paper": "the paper's fit",
    "background": "with background",
    "negatives": "with background and empty scenes",
}


def map_source(row: Mapping[str, Any]) -> str:
    """Return what a row of the table of maps is drawn from."""
    return f"{row['branch']}, {FIT_NAMES[row['fit']]}" if row["fit"] else str(row["branch"])


def demo_page(table: Mapping[str, Any], figures: Mapping[str, Path], passes: Passes, samples: Samples) -> str:
    """The demo's numbers and figures in the order of the story, and the maps of test images by both heads."""
    localization = ReportTable(
        ("map from", "weights", "mean IoU", "threshold"),
        [
            (map_source(row), [row["clamp"], Number(row["iou"], digits=3), Number(row["threshold"])])
            for row in table["maps"]
        ],
        foot="Of the thresholded map with the object's mask, at the threshold that was best on other images; "
        "for maps in probabilities no threshold is chosen.",
    )
    scores = list[tuple[str, list[Number]]]()
    for row in table["nothing_there"]:
        shares = [Number(100 * row[f"above_half_{which}"], digits=1) for which in ("with_bird", "without")]
        scores.append((row["score"], [*shares, Number(row["auroc"], digits=3)]))
    presence = ReportTable(
        ("score of the best class", "above 0.5 with a bird, %", "above 0.5 without, %", "AUROC"),
        scores,
        foot="AUROC: the chance that a picture with a bird scores higher than a scene without one. The empty "
        "scenes that the last branch was also fitted on are others than these.",
    )
    return render_page(
        "sigcam demo",
        [
            _photograph_section(table["photograph"], figures),
            Section(
                "2. Where is it?",
                [
                    localization,
                    _figure(figures, "maps", MAPS_CAPTION),
                ],
                intro="Synthetic birds, whose masks are known. A linear head is trained on a frozen network "
                "and a sigmoid branch is fitted beside it from the same pass over the images: once as in the "
                "paper, once with the images' backgrounds as examples of no bird.",
            ),
            Section("3. Is it there at all?", [presence, _figure(figures, "absent", ABSENT_CAPTION)]),
            Section(
                "4. Why a sigmoid branch?",
                [_figure(figures, "distortions", DISTORTIONS_CAPTION)],
                intro="A softmax head's weights can be shifted without any change of its probabilities, and "
                "its maps move all the same.",
            ),
            Section(
                "Maps of test pictures",
                [Gallery([_both_heads(passes, sample, samples.classes) for sample in samples], "class")],
                intro="Grad-CAM of the predicted class, from the softmax head and from the sigmoid branch.",
            ),
        ],
        lead="First one photograph, with the classifier and branch that come with sigcam. Then the whole job "
        "on images that are drawn for it: train a head, fit a branch, ask where the bird is, and whether "
        "there is one.",
        facts=[
            ("accuracy before and after", f"{table['accuracy_before']:.1%}, {table['accuracy_after']:.1%}"),
            ("predictions changed", str(table["predictions_changed"])),
            ("weights unchanged", "yes" if table["weights_unchanged"] else "no"),
            ("weight of backgrounds", f"{table['background']:g}"),
            ("seconds to fit the branch, after the pass", str(table["fit_seconds"])),
            ("maps per second", str(table["maps_per_second"])),
        ],
        **provenance(),
    )


MAPS_CAPTION = "Input, the object's mask, and the same method on both heads."
ABSENT_CAPTION = (
    "The first correctly predicted picture of some classes, and the same scene without its bird. The softmax "
    "head's map is stretched to its own range; probabilities have one scale for all. The branch is the one "
    "that also learned from empty scenes."
)
DISTORTIONS_CAPTION = (
    "The softmax head shifted in two ways that change no probability: one channel more, and every channel "
    "less, which turns all weights negative and the map black. The sigmoid branch has no such freedom."
)


def _figure(figures: Mapping[str, Path], name: str, caption: str) -> Figure:
    with Image.open(figures[name]) as image:
        return Figure(Shot(data_uri(image, 88), f"figure: {caption}", caption))


def _photograph_section(photograph: Mapping[str, Any], figures: Mapping[str, Path]) -> Section:
    """The photograph with its classes and one that is absent; or why there is none."""
    title = "1. One photograph"
    if "left_out" in photograph:
        return Section(title, empty=f"Left out: {photograph['left_out']}")
    rows = [
        (
            row["class_name"],
            [Number(row["probability"], digits=3), Number(row["evidence"], digits=3), row["presence"]],
        )
        for row in photograph["classes"]
    ]
    table = ReportTable(
        ("class", "softmax probability", "sigmoid evidence", "verdict"),
        rows,
        foot="Probabilities share one total among 1000 classes; evidence is of each class alone, and at one "
        "half the class is as likely there as not.",
    )
    caption = (
        "The class that is predicted, and one that is not there. The softmax head's map of an absent class "
        f"looks like any other; absolute evidence stays near 0. {photograph['credit']}"
    )
    return Section(title, [_figure(figures, "photograph", caption), table])


def _both_heads(passes: Passes, sample: Sample, classes: Sequence[str]) -> Card:
    """One image with the maps of both heads."""
    softmax, sigmoid = (passes.explain(passes.net, sample, branch) for branch in BOTH_HEADS)
    top = sigmoid.rows()[0]["top"]
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
        scores=[(each["class_name"], each["probability"], each["evidence"]) for each in top],
        notes=[] if name == label else [f"taken for {name}"],
    )
