"""Numbers published in the paper (published.csv), and the rows, methods and networks that it compares."""

import csv
from importlib.resources import files
from typing import Any, NamedTuple

BenchRow = dict[str, Any]  # a row of a table: what was measured, numbers by metric, intervals, differences


class PublishedNumber(NamedTuple):
    """A number of the paper and the cell of the table that it was printed in."""

    table: str
    backbone: str
    method: str
    row: str
    dataset: str
    metric: str
    value: float


_CSV = files("sigcam.bench").joinpath("published.csv").read_text().splitlines()
PUBLISHED = tuple(
    PublishedNumber(**{**cell, "value": float(cell["value"])})  # type: ignore[arg-type]
    for cell in csv.DictReader(_CSV)
)
_VALUES: dict[tuple[str | None, ...], float] = {number[:-1]: number.value for number in PUBLISHED}

# Rows of our tables: branch, clamped. The paper prints the first and the last; the others are controls.
ROWS: dict[str, tuple[str, bool]] = {
    "softmax (the paper's baseline)": ("softmax", False),
    "softmax, clamped": ("softmax", True),
    "centred": ("centred", False),
    "centred, clamped": ("centred", True),
    "sigmoid, signed": ("sigmoid", False),
    "sigmoid, clamped (the paper's method)": ("sigmoid", True),
}
HEADS = ("softmax", "centred", "sigmoid")  # branches of the rows above; any other is named by its fit
STRONGEST_OF = tuple(ROWS.values())  # the controls of branches with background evidence
PAPER_METHODS = ("cam", "grad-cam", "grad-cam++", "xgrad-cam", "layer-cam")  # Table 2 has the first two
FIDELITY = ("average_drop", "increase_in_confidence", "mean_map")
CURVES = ("insertion", "deletion")
FIRST_BOX = ("gt_known_loc_first", "top1_loc_first")  # the paper's count for images with several boxes
VGG, RESNET, INCEPTION = "wsol:vgg16-cam", "wsol:resnet50-v1", "wsol:inception_v3"
PAPER_BACKBONES = {"vgg16": "VGG-16", "resnet50": "ResNet-50", "inception_v3": "InceptionV3"}


def row_name(row: BenchRow) -> str:
    """Return the row's name in a table."""
    names = {variant: name for name, variant in ROWS.items()}
    kind = {True: "clamped", False: "signed"}.get(row["clamp"], str(row["clamp"]))
    kind = "absolute" if row.get("scale", "unit") != "unit" else kind
    known = None if kind == "absolute" else names.get((row["branch"], row["clamp"]))
    name = known or f"{row['branch']}, {kind}"
    name += f", positive weight {row['pos_weight']:g}" if "pos_weight" in row else ""
    return name + (f", {row['fit']}" if "fit" in row else "")


def published_value(row: BenchRow, table: str, metric: str) -> float | None:
    """Return the paper's number for the same data set, backbone, method, row and scorer, if there is one.

    The paper scored the confidence of its own maps by its own branch, and compared with the first box only.
    """
    variant = (row["branch"], row["clamp"])
    table = "pos-weight" if "pos_weight" in row else table
    if row.get("scale", "unit") != "unit":
        return None
    paper_row = {("softmax", False): "baseline", ("sigmoid", True): "ours"}.get(variant)
    if variant == ("sigmoid", False):
        paper_row = "ours_no_nwc"
    elif paper_row == "ours" and table == "nwc":
        paper_row = "ours_nwc"
    elif paper_row == "ours" and table == "pos-weight":
        paper_row = f"ours_{row['pos_weight']}to1"
    name, _, scorer = metric.partition(":")
    if row["dataset"] == "ilsvrc":
        if f"{name}_first" in FIRST_BOX:
            return None
        name = name.removesuffix("_first")
    if table not in ("nwc", "pos-weight"):  # any other table is compared with Table 1 or 2
        table = "table1" if name in FIDELITY else "nwc" if paper_row == "ours_no_nwc" else "table2"
    if row.get("zoom", 1) != 1 or (table == "table1" and paper_row != "baseline" and not scorer):
        return None
    return _VALUES.get((table, _paper_backbone(row), row["method"], paper_row, row["dataset"], name))


def _paper_backbone(row: BenchRow) -> str | None:
    """Return the paper's name of the row's network, if the paper used it for the row's method."""
    scheme, _, name = row["backbone"].partition(":")
    plain = name.removesuffix("-28").removesuffix("-cam").removesuffix("-v1")
    one_form = plain == "resnet50"  # the others have a second form for CAM
    matches = one_form or ("-cam" in name) == (row["method"] == "cam")
    return PAPER_BACKBONES.get(plain) if scheme == "wsol" and matches else None


def published_overhead() -> dict[str, dict[str, list[float]]]:
    """Return the paper's [without, with the branch] pairs by backbone and metric."""
    pairs = dict[str, dict[str, list[float]]]()
    for number in PUBLISHED:
        if number.table == "overhead":  # each number without the branch is followed by the one with it
            pairs.setdefault(number.backbone, {}).setdefault(number.metric, []).append(number.value)
    return pairs
