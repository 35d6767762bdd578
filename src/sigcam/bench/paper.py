"""The paper's tables and what they compare, as data: published cells to print beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class PublishedNumber:
    """One published number: of which table, backbone, method and row, on which data set, by which metric."""

    table: str
    backbone: str
    method: str
    row: str
    dataset: str
    metric: str
    value: float


# Rows of our tables: branch, clamped. The paper prints the first and the last; the others are controls.
ROWS: dict[str, tuple[str, bool]] = {
    "softmax (the paper's baseline)": ("softmax", False),
    "softmax, clamped": ("softmax", True),
    "centred": ("centred", False),
    "centred, clamped": ("centred", True),
    "sigmoid, signed": ("sigmoid", False),
    "sigmoid, clamped (the paper's method)": ("sigmoid", True),
}
PAPER_METHODS = (
    "cam",
    "grad-cam",
    "grad-cam++",
    "xgrad-cam",
    "layer-cam",
)  # of Table 1; Table 2 has the first two
FIDELITY = ("average_drop", "increase_in_confidence", "mean_map")
FIRST = ("gt_known_loc_first", "top1_loc_first")  # as the paper counted where images have several boxes
PAPER_BACKBONES = {"vgg16": "VGG-16", "resnet50": "ResNet-50", "inception_v3": "InceptionV3"}

_CELLS = """
table1 VGG-16 cam baseline cub average_drop 45.36
table1 VGG-16 cam baseline cub increase_in_confidence 7.08
table1 VGG-16 cam baseline cars average_drop 31.45
table1 VGG-16 cam baseline cars increase_in_confidence 9.68
table1 VGG-16 cam ours cub average_drop 37.2
table1 VGG-16 cam ours cub increase_in_confidence 18.86
table1 VGG-16 cam ours cars average_drop 43.58
table1 VGG-16 cam ours cars increase_in_confidence 10.74
table1 VGG-16 grad-cam baseline cub average_drop 38.88
table1 VGG-16 grad-cam baseline cub increase_in_confidence 11.36
table1 VGG-16 grad-cam baseline cars average_drop 56.1
table1 VGG-16 grad-cam baseline cars increase_in_confidence 8.11
table1 VGG-16 grad-cam ours cub average_drop 35.66
table1 VGG-16 grad-cam ours cub increase_in_confidence 22.06
table1 VGG-16 grad-cam ours cars average_drop 9.96
table1 VGG-16 grad-cam ours cars increase_in_confidence 19.46
table1 VGG-16 grad-cam++ baseline cub average_drop 31.11
table1 VGG-16 grad-cam++ baseline cub increase_in_confidence 14.46
table1 VGG-16 grad-cam++ baseline cars average_drop 39.63
table1 VGG-16 grad-cam++ baseline cars increase_in_confidence 11.71
table1 VGG-16 grad-cam++ ours cub average_drop 33.98
table1 VGG-16 grad-cam++ ours cub increase_in_confidence 21.75
table1 VGG-16 grad-cam++ ours cars average_drop 9.46
table1 VGG-16 grad-cam++ ours cars increase_in_confidence 18.46
table1 VGG-16 xgrad-cam baseline cub average_drop 38.56
table1 VGG-16 xgrad-cam baseline cub increase_in_confidence 11.1
table1 VGG-16 xgrad-cam baseline cars average_drop 50.59
table1 VGG-16 xgrad-cam baseline cars increase_in_confidence 9.14
table1 VGG-16 xgrad-cam ours cub average_drop 38.04
table1 VGG-16 xgrad-cam ours cub increase_in_confidence 20.99
table1 VGG-16 xgrad-cam ours cars average_drop 9.69
table1 VGG-16 xgrad-cam ours cars increase_in_confidence 20.53
table1 VGG-16 layer-cam baseline cub average_drop 37.19
table1 VGG-16 layer-cam baseline cub increase_in_confidence 11.27
table1 VGG-16 layer-cam baseline cars average_drop 47.51
table1 VGG-16 layer-cam baseline cars increase_in_confidence 9.7
table1 VGG-16 layer-cam ours cub average_drop 41.58
table1 VGG-16 layer-cam ours cub increase_in_confidence 19.5
table1 VGG-16 layer-cam ours cars average_drop 10.51
table1 VGG-16 layer-cam ours cars increase_in_confidence 19.39
table1 ResNet-50 cam baseline cub average_drop 44.17
table1 ResNet-50 cam baseline cub increase_in_confidence 14.76
table1 ResNet-50 cam baseline cars average_drop 48.86
table1 ResNet-50 cam baseline cars increase_in_confidence 4.32
table1 ResNet-50 cam ours cub average_drop 13.86
table1 ResNet-50 cam ours cub increase_in_confidence 18.42
table1 ResNet-50 cam ours cars average_drop 3.77
table1 ResNet-50 cam ours cars increase_in_confidence 40.62
table1 ResNet-50 grad-cam baseline cub average_drop 46.38
table1 ResNet-50 grad-cam baseline cub increase_in_confidence 13.07
table1 ResNet-50 grad-cam baseline cars average_drop 29.53
table1 ResNet-50 grad-cam baseline cars increase_in_confidence 14.56
table1 ResNet-50 grad-cam ours cub average_drop 19.07
table1 ResNet-50 grad-cam ours cub increase_in_confidence 13.22
table1 ResNet-50 grad-cam ours cars average_drop 3.66
table1 ResNet-50 grad-cam ours cars increase_in_confidence 41.41
table1 ResNet-50 grad-cam++ baseline cub average_drop 43.15
table1 ResNet-50 grad-cam++ baseline cub increase_in_confidence 14.5
table1 ResNet-50 grad-cam++ baseline cars average_drop 24.68
table1 ResNet-50 grad-cam++ baseline cars increase_in_confidence 17.31
table1 ResNet-50 grad-cam++ ours cub average_drop 18.88
table1 ResNet-50 grad-cam++ ours cub increase_in_confidence 13.72
table1 ResNet-50 grad-cam++ ours cars average_drop 3.65
table1 ResNet-50 grad-cam++ ours cars increase_in_confidence 41.62
table1 ResNet-50 xgrad-cam baseline cub average_drop 46.38
table1 ResNet-50 xgrad-cam baseline cub increase_in_confidence 13.07
table1 ResNet-50 xgrad-cam baseline cars average_drop 29.53
table1 ResNet-50 xgrad-cam baseline cars increase_in_confidence 14.56
table1 ResNet-50 xgrad-cam ours cub average_drop 19.07
table1 ResNet-50 xgrad-cam ours cub increase_in_confidence 13.22
table1 ResNet-50 xgrad-cam ours cars average_drop 3.66
table1 ResNet-50 xgrad-cam ours cars increase_in_confidence 41.41
table1 ResNet-50 layer-cam baseline cub average_drop 43.69
table1 ResNet-50 layer-cam baseline cub increase_in_confidence 13.91
table1 ResNet-50 layer-cam baseline cars average_drop 22.64
table1 ResNet-50 layer-cam baseline cars increase_in_confidence 18.9
table1 ResNet-50 layer-cam ours cub average_drop 19.07
table1 ResNet-50 layer-cam ours cub increase_in_confidence 13.22
table1 ResNet-50 layer-cam ours cars average_drop 3.66
table1 ResNet-50 layer-cam ours cars increase_in_confidence 41.39
table2 VGG-16 cam baseline ilsvrc top1_loc 43.13
table2 VGG-16 cam baseline ilsvrc gt_known_loc 59.54
table2 VGG-16 cam baseline ilsvrc max_box_acc_v2 60.0
table2 VGG-16 cam baseline openimages pxap 58.17
table2 VGG-16 cam baseline ilsvrc top1_cls 66.56
table2 VGG-16 cam baseline openimages top1_cls 70.0
table2 VGG-16 cam ours ilsvrc top1_loc 43.14
table2 VGG-16 cam ours ilsvrc gt_known_loc 59.57
table2 VGG-16 cam ours ilsvrc max_box_acc_v2 60.25
table2 VGG-16 cam ours openimages pxap 60.11
table2 VGG-16 grad-cam baseline ilsvrc top1_loc 37.04
table2 VGG-16 grad-cam baseline ilsvrc gt_known_loc 49.02
table2 VGG-16 grad-cam baseline ilsvrc max_box_acc_v2 52.49
table2 VGG-16 grad-cam baseline openimages pxap 55.25
table2 VGG-16 grad-cam baseline ilsvrc top1_cls 69.61
table2 VGG-16 grad-cam baseline openimages top1_cls 70.12
table2 VGG-16 grad-cam ours ilsvrc top1_loc 44.68
table2 VGG-16 grad-cam ours ilsvrc gt_known_loc 59.43
table2 VGG-16 grad-cam ours ilsvrc max_box_acc_v2 60.17
table2 VGG-16 grad-cam ours openimages pxap 56.53
table2 ResNet-50 cam baseline ilsvrc top1_loc 47.69
table2 ResNet-50 cam baseline ilsvrc gt_known_loc 60.8
table2 ResNet-50 cam baseline ilsvrc max_box_acc_v2 63.53
table2 ResNet-50 cam baseline openimages pxap 59.36
table2 ResNet-50 cam baseline ilsvrc top1_cls 73.89
table2 ResNet-50 cam baseline openimages top1_cls 74.02
table2 ResNet-50 cam ours ilsvrc top1_loc 49.44
table2 ResNet-50 cam ours ilsvrc gt_known_loc 62.68
table2 ResNet-50 cam ours ilsvrc max_box_acc_v2 64.73
table2 ResNet-50 cam ours openimages pxap 60.49
table2 ResNet-50 grad-cam baseline ilsvrc top1_loc 41.14
table2 ResNet-50 grad-cam baseline ilsvrc gt_known_loc 55.28
table2 ResNet-50 grad-cam baseline ilsvrc max_box_acc_v2 57.04
table2 ResNet-50 grad-cam baseline openimages pxap 60.56
table2 ResNet-50 grad-cam baseline ilsvrc top1_cls 69.01
table2 ResNet-50 grad-cam baseline openimages top1_cls 74.02
table2 ResNet-50 grad-cam ours ilsvrc top1_loc 40.34
table2 ResNet-50 grad-cam ours ilsvrc gt_known_loc 53.61
table2 ResNet-50 grad-cam ours ilsvrc max_box_acc_v2 57.98
table2 ResNet-50 grad-cam ours openimages pxap 60.24
table2 InceptionV3 cam baseline ilsvrc top1_loc 42.16
table2 InceptionV3 cam baseline ilsvrc gt_known_loc 57.69
table2 InceptionV3 cam baseline ilsvrc max_box_acc_v2 63.51
table2 InceptionV3 cam baseline openimages pxap 62.25
table2 InceptionV3 cam baseline ilsvrc top1_cls 69.72
table2 InceptionV3 cam baseline openimages top1_cls 56.22
table2 InceptionV3 cam ours ilsvrc top1_loc 44.11
table2 InceptionV3 cam ours ilsvrc gt_known_loc 60.12
table2 InceptionV3 cam ours ilsvrc max_box_acc_v2 64.98
table2 InceptionV3 cam ours openimages pxap 63.65
table2 InceptionV3 grad-cam baseline ilsvrc top1_loc 34.57
table2 InceptionV3 grad-cam baseline ilsvrc gt_known_loc 46.35
table2 InceptionV3 grad-cam baseline ilsvrc max_box_acc_v2 52.3
table2 InceptionV3 grad-cam baseline openimages pxap 49.64
table2 InceptionV3 grad-cam baseline ilsvrc top1_cls 67.79
table2 InceptionV3 grad-cam baseline openimages top1_cls 68.56
table2 InceptionV3 grad-cam ours ilsvrc top1_loc 33.72
table2 InceptionV3 grad-cam ours ilsvrc gt_known_loc 45.18
table2 InceptionV3 grad-cam ours ilsvrc max_box_acc_v2 53.06
table2 InceptionV3 grad-cam ours openimages pxap 48.16
nwc VGG-16 cam baseline ilsvrc top1_loc 43.13
nwc VGG-16 cam baseline ilsvrc gt_known_loc 59.54
nwc VGG-16 cam baseline ilsvrc max_box_acc_v2 60.0
nwc VGG-16 cam baseline ilsvrc top1_cls 66.56
nwc VGG-16 cam ours_no_nwc ilsvrc top1_loc 40.12
nwc VGG-16 cam ours_no_nwc ilsvrc gt_known_loc 53.92
nwc VGG-16 cam ours_no_nwc ilsvrc max_box_acc_v2 55.24
nwc VGG-16 cam ours_nwc ilsvrc top1_loc 43.14
nwc VGG-16 cam ours_nwc ilsvrc gt_known_loc 59.57
nwc VGG-16 cam ours_nwc ilsvrc max_box_acc_v2 60.25
nwc VGG-16 grad-cam baseline ilsvrc top1_loc 37.04
nwc VGG-16 grad-cam baseline ilsvrc gt_known_loc 49.02
nwc VGG-16 grad-cam baseline ilsvrc max_box_acc_v2 52.49
nwc VGG-16 grad-cam baseline ilsvrc top1_cls 69.61
nwc VGG-16 grad-cam ours_no_nwc ilsvrc top1_loc 43.24
nwc VGG-16 grad-cam ours_no_nwc ilsvrc gt_known_loc 56.9
nwc VGG-16 grad-cam ours_no_nwc ilsvrc max_box_acc_v2 58.45
nwc VGG-16 grad-cam ours_nwc ilsvrc top1_loc 44.68
nwc VGG-16 grad-cam ours_nwc ilsvrc gt_known_loc 59.43
nwc VGG-16 grad-cam ours_nwc ilsvrc max_box_acc_v2 60.17
nwc ResNet-50 cam baseline ilsvrc top1_loc 47.69
nwc ResNet-50 cam baseline ilsvrc gt_known_loc 60.8
nwc ResNet-50 cam baseline ilsvrc max_box_acc_v2 63.53
nwc ResNet-50 cam baseline ilsvrc top1_cls 73.89
nwc ResNet-50 cam ours_no_nwc ilsvrc top1_loc 39.82
nwc ResNet-50 cam ours_no_nwc ilsvrc gt_known_loc 50.22
nwc ResNet-50 cam ours_no_nwc ilsvrc max_box_acc_v2 55.78
nwc ResNet-50 cam ours_nwc ilsvrc top1_loc 49.44
nwc ResNet-50 cam ours_nwc ilsvrc gt_known_loc 62.68
nwc ResNet-50 cam ours_nwc ilsvrc max_box_acc_v2 64.73
nwc ResNet-50 grad-cam baseline ilsvrc top1_loc 41.14
nwc ResNet-50 grad-cam baseline ilsvrc gt_known_loc 55.28
nwc ResNet-50 grad-cam baseline ilsvrc max_box_acc_v2 57.04
nwc ResNet-50 grad-cam baseline ilsvrc top1_cls 69.01
nwc ResNet-50 grad-cam ours_no_nwc ilsvrc top1_loc 41.11
nwc ResNet-50 grad-cam ours_no_nwc ilsvrc gt_known_loc 54.6
nwc ResNet-50 grad-cam ours_no_nwc ilsvrc max_box_acc_v2 56.31
nwc ResNet-50 grad-cam ours_nwc ilsvrc top1_loc 40.34
nwc ResNet-50 grad-cam ours_nwc ilsvrc gt_known_loc 53.61
nwc ResNet-50 grad-cam ours_nwc ilsvrc max_box_acc_v2 57.98
pos-weight VGG-16 cam baseline ilsvrc top1_loc 43.13
pos-weight VGG-16 cam baseline ilsvrc gt_known_loc 59.54
pos-weight VGG-16 cam baseline ilsvrc max_box_acc_v2 60.0
pos-weight VGG-16 cam baseline ilsvrc top1_cls 66.56
pos-weight VGG-16 cam ours_1to1 ilsvrc top1_loc 43.6
pos-weight VGG-16 cam ours_1to1 ilsvrc gt_known_loc 60.7
pos-weight VGG-16 cam ours_1to1 ilsvrc max_box_acc_v2 61.34
pos-weight VGG-16 cam ours_499to1 ilsvrc top1_loc 43.19
pos-weight VGG-16 cam ours_499to1 ilsvrc gt_known_loc 59.57
pos-weight VGG-16 cam ours_499to1 ilsvrc max_box_acc_v2 60.28
pos-weight VGG-16 cam ours_999to1 ilsvrc top1_loc 43.14
pos-weight VGG-16 cam ours_999to1 ilsvrc gt_known_loc 59.57
pos-weight VGG-16 cam ours_999to1 ilsvrc max_box_acc_v2 60.25
pos-weight VGG-16 grad-cam baseline ilsvrc top1_loc 37.04
pos-weight VGG-16 grad-cam baseline ilsvrc gt_known_loc 49.02
pos-weight VGG-16 grad-cam baseline ilsvrc max_box_acc_v2 52.49
pos-weight VGG-16 grad-cam baseline ilsvrc top1_cls 69.61
pos-weight VGG-16 grad-cam ours_1to1 ilsvrc top1_loc 9.28
pos-weight VGG-16 grad-cam ours_1to1 ilsvrc gt_known_loc 12.45
pos-weight VGG-16 grad-cam ours_1to1 ilsvrc max_box_acc_v2 44.17
pos-weight VGG-16 grad-cam ours_499to1 ilsvrc top1_loc 44.97
pos-weight VGG-16 grad-cam ours_499to1 ilsvrc gt_known_loc 59.79
pos-weight VGG-16 grad-cam ours_499to1 ilsvrc max_box_acc_v2 60.76
pos-weight VGG-16 grad-cam ours_999to1 ilsvrc top1_loc 44.68
pos-weight VGG-16 grad-cam ours_999to1 ilsvrc gt_known_loc 59.43
pos-weight VGG-16 grad-cam ours_999to1 ilsvrc max_box_acc_v2 60.17
pos-weight ResNet-50 cam baseline ilsvrc top1_loc 47.69
pos-weight ResNet-50 cam baseline ilsvrc gt_known_loc 60.8
pos-weight ResNet-50 cam baseline ilsvrc max_box_acc_v2 63.53
pos-weight ResNet-50 cam baseline ilsvrc top1_cls 73.89
pos-weight ResNet-50 cam ours_1to1 ilsvrc top1_loc 47.29
pos-weight ResNet-50 cam ours_1to1 ilsvrc gt_known_loc 59.84
pos-weight ResNet-50 cam ours_1to1 ilsvrc max_box_acc_v2 61.54
pos-weight ResNet-50 cam ours_499to1 ilsvrc top1_loc 49.27
pos-weight ResNet-50 cam ours_499to1 ilsvrc gt_known_loc 62.36
pos-weight ResNet-50 cam ours_499to1 ilsvrc max_box_acc_v2 64.59
pos-weight ResNet-50 cam ours_999to1 ilsvrc top1_loc 49.44
pos-weight ResNet-50 cam ours_999to1 ilsvrc gt_known_loc 62.68
pos-weight ResNet-50 cam ours_999to1 ilsvrc max_box_acc_v2 64.73
pos-weight ResNet-50 grad-cam baseline ilsvrc top1_loc 41.14
pos-weight ResNet-50 grad-cam baseline ilsvrc gt_known_loc 55.28
pos-weight ResNet-50 grad-cam baseline ilsvrc max_box_acc_v2 57.04
pos-weight ResNet-50 grad-cam baseline ilsvrc top1_cls 69.01
pos-weight ResNet-50 grad-cam ours_1to1 ilsvrc top1_loc 35.66
pos-weight ResNet-50 grad-cam ours_1to1 ilsvrc gt_known_loc 47.17
pos-weight ResNet-50 grad-cam ours_1to1 ilsvrc max_box_acc_v2 54.77
pos-weight ResNet-50 grad-cam ours_499to1 ilsvrc top1_loc 40.55
pos-weight ResNet-50 grad-cam ours_499to1 ilsvrc gt_known_loc 53.9
pos-weight ResNet-50 grad-cam ours_499to1 ilsvrc max_box_acc_v2 58.05
pos-weight ResNet-50 grad-cam ours_999to1 ilsvrc top1_loc 40.34
pos-weight ResNet-50 grad-cam ours_999to1 ilsvrc gt_known_loc 53.61
pos-weight ResNet-50 grad-cam ours_999to1 ilsvrc max_box_acc_v2 57.98
"""


def _cell(line: str) -> PublishedNumber:
    table, backbone, method, row, dataset, metric, value = line.split()
    return PublishedNumber(table, backbone, method, row, dataset, metric, float(value))


PUBLISHED: tuple[PublishedNumber, ...] = tuple(_cell(line) for line in _CELLS.split("\n") if line)

# Hours of training, milliseconds per image and millions of parameters, each without and with the branch.
OVERHEAD: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "VGG-16": ((17.67, 20.87), (84.7, 101.2), (20.46, 21.49)),
    "ResNet-50": ((58.19, 70.69), (117.4, 138.4), (25.56, 27.61)),
    "InceptionV3": ((50.42, 52.84), (108.1, 123.4), (26.51, 27.54)),
}


def row_name(row: Row) -> str:
    """What the row is called in a table."""
    names = {kind: name for name, kind in ROWS.items()}
    name = names.get((row["branch"], row["clamp"]), f"{row['branch']}, {row['clamp']}")
    name += f", positive weight {row['pos_weight']:g}" if "pos_weight" in row else ""
    return name + (f", {row['fit']}" if "fit" in row else "")


def _backbone(row: Row) -> str | None:
    """What the paper calls the row's network, if it made this method's maps with it."""
    scheme, _, name = row["backbone"].partition(":")
    plain = name.removesuffix("-28").removesuffix("-cam")
    form = plain == "resnet50" or ("-cam" in name) == (row["method"] == "cam")  # which is but one network
    return PAPER_BACKBONES.get(plain) if scheme == "wsol" and form else None


def published_value(row: Row, table: str, metric: str) -> float | None:
    """The paper's number for the same data set, backbone, method and row; it scored the confidence of its
    own maps by its own branch."""
    kind = {("softmax", False): "baseline", ("sigmoid", True): "ours", ("sigmoid", False): "ours_no_nwc"}.get(
        (row["branch"], row["clamp"])
    )
    if table == "nwc" and kind == "ours":
        kind = "ours_nwc"
    if table == "pos-weight" and kind == "ours":
        kind = f"ours_{row['pos_weight']}to1"
    name, _, scorer = metric.partition(":")
    if row["dataset"] == "ilsvrc" and (name in FIRST or f"{name}_first" in FIRST):
        name = name.removesuffix("_first") if name in FIRST else "of any box"
    if table not in ("nwc", "pos-weight"):  # tables of other classifiers hold what these two do
        table = "table1" if name in FIDELITY else "table2"
    fair = table != "table1" or kind == "baseline" or bool(scorer)
    wanted = (table, _backbone(row), row["method"], kind, row["dataset"], name)
    found = [
        c.value for c in PUBLISHED if (c.table, c.backbone, c.method, c.row, c.dataset, c.metric) == wanted
    ]
    return found[0] if found and fair and row.get("zoom", 1) == 1 else None
