"""Tables of the benchmark as JSON, CSV, Markdown and one HTML page; pictures of maps and boxes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sigcam.bench.overhead import _PAPERS, _made, _overhead_facts, _overhead_foot, _overhead_published
from sigcam.bench.paper import Row, published_value, row_name
from sigcam.bench.plan import Plan
from sigcam.core.files import write_text_atomic
from sigcam.methods.explanation import data_uri
from sigcam.reports.html import Figure, Number, ReportTable, Section, Shot, render_page

_FIDELITY = (
    *("average_drop", "increase_in_confidence", "mean_map"),
    *("average_drop:branch", "increase_in_confidence:branch"),
)
_BOXED = ("max_box_acc_v2", "gt_known_loc", "gt_known_loc_first", "top1_loc", "top1_loc_first")
_LOCATING = (*_BOXED, "pxap", "top1_cls")
COLUMNS: dict[str, tuple[str, ...]] = {
    "table1": _FIDELITY,
    "table2": _LOCATING,
    "nwc": (*_BOXED, "pxap"),
    "pos-weight": _BOXED,
    "sources": ("max_box_acc_v2", "gt_known_loc", "auroc_nothing"),
    **dict.fromkeys(("lite2", "stages", "vgg16"), (*_LOCATING, *_FIDELITY)),
}
TITLES = {
    "table1": "Table 1: fidelity on fine-grained data",
    "table2": "Table 2: localisation",
    "nwc": "Keeping positive weights alone",
    "pos-weight": "The weight of a positive label",
    "sources": "Where the gain comes from",
    "lite2": "A larger network of the family",
    "stages": "Last stages trained on the data",
    "vgg16": "The paper's VGG-16 for CAM",
}
LOWER = ("average_drop", "average_drop:branch")  # is better; of the mean map neither
FEET = {
    "table1": "Confidence is the softmax head's for all rows; columns that end in :branch score each row by "
    "a softmax over the branch that its maps explain, as the paper did. The mean map says how much of the "
    "image is kept: a map of ones loses nothing.",
    "table2": "Maps of the label's class; the threshold of MaxBoxAccV2 is the best on these images, that of "
    "the others 0.2, as the protocol has it. GT-known and Top-1 count any of the image's boxes, those that "
    "end in first its first box alone, as the paper did.",
}
FEET["sources"] = FEET["table2"] + (
    " The last column is the area under the ROC curve by which the best class's score (of the softmax head "
    "its probability, of the sigmoid branch its evidence) tells these images from photographs of pets."
)
FEET |= dict.fromkeys(("lite2", "stages", "vgg16"), f"{FEET['table2']} {FEET['table1']}")
SIGNS = {True: "better", False: "worse", None: ""}


def write_table(plan: Plan, table: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Writes TABLE.json, .csv and .md; returns what is in the first."""
    shown = [column for column in COLUMNS[table] if any(column in row for row in rows)]
    held: dict[str, Any] = {
        "table": table,
        **_made(plan),
        "foot": foot(plan, table, rows),
        "rows": [
            {"row": row_name(row), **row, "published": {c: published_value(row, table, c) for c in shown}}
            for row in rows
        ],
    }
    write_text_atomic(plan.output / f"{table}.json", json.dumps(held, indent=1) + "\n")
    out = io.StringIO()
    keys = ["dataset", "backbone", "classifier", "method", "row", "branch", "clamp", "zoom", "images"]
    pairs = [("delta", " from softmax signed"), ("beside", " from softmax clamped")]
    writer = csv.writer(out)
    ends = ["", " low", " high", *(f"{said}{end}" for _, said in pairs for end in ("", " low", " high"))]
    writer.writerow([*keys, *(f"{c}{end}" for c in shown for end in (*ends, " published"))])
    for row in held["rows"]:
        line = [row[key] for key in keys]
        for c in shown:
            line += [row.get(c), *row["intervals"].get(c, (None, None))]
            line += [end for name, _ in pairs for end in row[name].get(c, (None, None, None))]
            line.append(row["published"][c])
        writer.writerow(line)
    write_text_atomic(plan.output / f"{table}.csv", out.getvalue())
    write_text_atomic(plan.output / f"{table}.md", markdown(table, held))
    return held


def foot(plan: Plan, table: str, rows: Sequence[Row]) -> str:
    """What a reader of the table must know."""
    counts = ", ".join(dict.fromkeys(f"{row['dataset']}: {row['images']}{_measured(row)}" for row in rows))
    networks = ", ".join(dict.fromkeys(f"{row['backbone']}, {row['classifier']}" for row in rows))
    said = (
        f"Images: {counts}. Classifier: {networks}. In percent, with 95 % bootstrap intervals, and with the "
    )
    said += (
        "difference from the softmax head's signed maps on the same images and its paired interval, marked "
    )
    said += "where that excludes zero. Clamped maps of the other heads have the difference from the softmax "
    return f"{said}head's clamped maps too. {FEET.get(table, FEET['table2'])}"


def _measured(row: Row) -> str:
    return " for confidence" if "average_drop" in row else ""


def verdict(row: Row, column: str, than: str = "delta") -> bool | None:
    """Whether the row is better than the baseline (than="beside": than clamped softmax maps) beyond doubt
    (True), worse (False), or neither."""
    delta = row[than].get(column)
    if delta is None or column == "mean_map" or delta[1] <= 0 <= delta[2]:
        return None
    return bool((delta[0] < 0) == (column in LOWER))


def groups(held: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """Rows of one data set, method and size belong together."""
    found = dict[str, list[Row]]()
    for row in held["rows"]:
        size = f", images x{row['zoom']:g}" if row["zoom"] != 1 else ""
        name = f"{row['dataset']}, {row['method']}{size}, {row['images']} images"
        found.setdefault(name, []).append(row)
    return list(found.items())


def columns_of(table: str, rows: Sequence[Row]) -> list[str]:
    """Columns that these rows have."""
    return [column for column in COLUMNS[table] if any(column in row for row in rows)]


def _cell(row: Row, column: str) -> str:
    """A number, its interval, its difference from the baseline, and the paper's own where it fits."""
    number = _number(row, column)
    if number is None:
        return "-"
    said = [number.text]
    if number.low is not None and number.high is not None:
        said.append(f"{number.low:.1f} to {number.high:.1f}")
    if number.difference:
        value, low, high = number.difference
        said.append(f"{value:+.2f} ({low:+.1f} to {high:+.1f}) {SIGNS[number.better]}".rstrip())
    return "; ".join([*said, *filter(None, [number.note])])


def markdown(table: str, held: dict[str, Any]) -> str:
    """The table as a page."""
    lines = [f"# {TITLES[table]}", ""]
    for name, rows in groups(held):
        columns = columns_of(table, rows)
        lines += [f"## {name}", "", "| map from | " + " | ".join(c.replace("_", " ") for c in columns) + " |"]
        lines += ["|---" * (len(columns) + 1) + "|"]
        lines += [f"| {row['row']} | " + " | ".join(_cell(row, c) for c in columns) + " |" for row in rows]
        lines += [""]
    return "\n".join([*lines, held["foot"], "", f"`{held['command']}`, {held['date']}."]) + "\n"


def html(tables: Sequence[dict[str, Any]], overheads: dict[str, Any] | None, figures: Sequence[Path]) -> str:
    """All tables and figures on one page that needs nothing from elsewhere."""
    sections = [
        Section(
            TITLES[held["table"]],
            [_report_table(held["table"], name, rows) for name, rows in groups(held)],
            foot=held["foot"],
            command=f"{held['command']}, {held['date']}",
        )
        for held in tables
    ]
    if overheads:
        sections.append(
            Section(
                "Overhead of the branch",
                [
                    ReportTable(
                        ("what", "number"), [(name, [text]) for name, text in _overhead_facts(overheads)]
                    ),
                    ReportTable(_PAPERS, [(name, pairs) for name, pairs in _overhead_published()]),
                ],
                foot=_overhead_foot(overheads),
                command=f"{overheads['command']}, {overheads['date']}",
            )
        )
    if figures:
        told = (
            "CAM maps of the predicted class, named below; boxes at 0.2 of the peak green, ground truth red."
        )
        shots = [
            Figure(Shot(data_uri(Image.open(path)), f"{path.stem}: maps side by side")) for path in figures
        ]
        sections.append(Section("Figures", shots, intro=told))
    return render_page(
        "sigcam bench", sections, lead="The paper's tables on these data, with controls and intervals."
    )


def _report_table(table: str, name: str, rows: Sequence[Row]) -> ReportTable:
    columns = columns_of(table, rows)
    header = ("map from", *(column.replace("_", " ") for column in columns))
    return ReportTable(header, [(row["row"], [_number(row, c) for c in columns]) for row in rows], title=name)


def _number(row: Row, column: str) -> Number | None:
    if column not in row:
        return None
    low, high = row["intervals"].get(column, (None, None))
    value, least, most = row["delta"].get(column, (None, 0.0, 0.0))
    difference = None if value is None else (value, least, most)
    paper, beside = row["published"].get(column), row.get("beside", {}).get(column)
    notes = list[str]()
    if beside is not None:
        said = "{:+.2f} ({:+.1f} to {:+.1f}) beside clamped softmax".format(*beside)
        notes.append(f"{said} {SIGNS[verdict(row, column, 'beside')]}".rstrip())
    if paper is not None:
        notes.append(f"paper {paper:.2f}")
    return Number(row[column], low, high, difference, verdict(row, column), "; ".join(notes))


# --------------------------------------------------------------------------------------------- overhead


# ---------------------------------------------------------------------------------------------- figures
