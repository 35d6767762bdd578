"""Tables of the benchmark as JSON, CSV, Markdown and one HTML page; pictures of maps and boxes."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from sigcam.bench.networks import network
from sigcam.bench.paper import OVERHEAD, ROWS, Row, published, row_name
from sigcam.bench.plan import FINE, Plan, methods_of, there
from sigcam.core.config import FitConfig
from sigcam.core.manifest import versions, write_text
from sigcam.data.sample import Samples
from sigcam.drawing.overlay import grid, overlay, with_boxes
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import data_uri
from sigcam.metrics.boxes import scaled_boxes
from sigcam.models.classifier import load_classifier
from sigcam.network.dual import DualBranch, attach
from sigcam.reports.html import Figure, Number, Section, Shot, Table, page
from sigcam.training.branch import fit
from sigcam.training.features import Progress
from sigcam.training.linear_probe import train_probe

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
            {"row": row_name(row), **row, "published": {c: published(row, table, c) for c in shown}}
            for row in rows
        ],
    }
    write_text(plan.output / f"{table}.json", json.dumps(held, indent=1) + "\n")
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
    write_text(plan.output / f"{table}.csv", out.getvalue())
    write_text(plan.output / f"{table}.md", markdown(table, held))
    return held


def _made(plan: Plan) -> dict[str, Any]:
    """How and when a table was made."""
    return {
        "command": " ".join(["sigcam", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "seed": plan.seed,
        "device": torch.device(plan.device).type,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


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
                    Table(("what", "number"), [(name, [text]) for name, text in _overhead_facts(overheads)]),
                    Table(_PAPERS, [(name, pairs) for name, pairs in _overhead_published()]),
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
    return page(
        "sigcam bench", sections, lead="The paper's tables on these data, with controls and intervals."
    )


def _report_table(table: str, name: str, rows: Sequence[Row]) -> Table:
    columns = columns_of(table, rows)
    header = ("map from", *(column.replace("_", " ") for column in columns))
    return Table(header, [(row["row"], [_number(row, c) for c in columns]) for row in rows], title=name)


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

_REPEATS = 21
_PUBLISHED = ("hours", "ms per image", "million parameters")
_PAPERS = ("the paper's, without / with the branch", *_PUBLISHED)


def overhead(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Parameters, seconds per image and training time, without and with the branch, in turns."""
    dataset = there(plan, FINE)[0]
    net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
    images = torch.randn(8, *net.input_shape, generator=torch.Generator().manual_seed(0)).to(net.device)
    own = sum(p.numel() for p in net.model.parameters())
    branch = sum(p.numel() for p in net.parameters())
    calls: dict[str, Any] = {
        "classifier alone": lambda: net.model(images),
        "both branches": lambda: net(images),
        "Grad-CAM, softmax head": lambda: explain(net, images, "grad-cam", branch="softmax"),
        "Grad-CAM, sigmoid branch": lambda: explain(net, images, "grad-cam"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for repeat in range(_REPEATS + 1):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                torch.zeros(1, device=net.device).item()  # waits for all that a device was given before
                if repeat:
                    seconds[name].append(time.perf_counter() - began)
            progress("overhead", repeat + 1, _REPEATS + 1)
    held = {
        "table": "overhead",
        **_made(plan),
        "backbone": plan.backbone,
        "dataset": dataset,
        "parameters": {"classifier": own, "branch": branch},
        "ms_per_image": {name: 1000 * median(each) / len(images) for name, each in seconds.items()},
        "training": _training(plan, dataset, progress),
        "published": {name: dict(zip(_PUBLISHED, pairs, strict=True)) for name, pairs in OVERHEAD.items()},
    }
    write_text(plan.output / "overhead.json", json.dumps(held, indent=1) + "\n")
    write_text(plan.output / "overhead.md", "\n".join(_overhead_lines(held)) + "\n")
    return held


def _training(plan: Plan, dataset: str, progress: Progress) -> dict[str, float]:
    """Seconds to train a linear probe and, beside it, the branch, each from pictures; and the part of the
    latter that is not the backbone's."""
    train = plan.samples(dataset, "train", 512)
    classifier = load_classifier(plan.backbone, num_classes=len(train.classes), device=plan.device)
    began = time.perf_counter()
    train_probe(classifier, train, seed=plan.seed, workers=plan.workers, progress=progress)
    probe = time.perf_counter() - began
    net = attach(classifier.model)
    net.transform, net.class_names = classifier.transform, train.classes
    began = time.perf_counter()
    result = fit(net, train, FitConfig(seed=plan.seed), progress=progress)
    both = time.perf_counter() - began
    return {
        "images": len(train),
        "classifier, seconds": probe,
        "branch, seconds": both,
        "branch without the backbone's pass, seconds": both - result.seconds["features"],
    }


def _overhead_facts(held: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(f"parameters, {name}", f"{count:,}") for name, count in held["parameters"].items()]
    found += [(f"ms per image, {name}", f"{value:.2f}") for name, value in held["ms_per_image"].items()]
    return found + [(f"training, {name}", f"{value:.4g}") for name, value in held["training"].items()]


def _overhead_published() -> list[tuple[str, list[str]]]:
    return [(name, [f"{a:g} / {b:g}" for a, b in pairs]) for name, pairs in OVERHEAD.items()]


def _overhead_foot(held: dict[str, Any]) -> str:
    said = f"{held['backbone']} on {held['dataset']}, batches of 8, {held['threads']} threads, medians of "
    return f"{said}{_REPEATS}, in turns."


def _overhead_lines(held: dict[str, Any]) -> list[str]:
    """The measurement as a page; the paper's numbers below it."""
    lines = ["# Overhead of the branch", "", "| what | number |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in _overhead_facts(held)]
    lines += ["", f"| {' | '.join(_PAPERS)} |", "|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(pairs)} |" for name, pairs in _overhead_published()]
    return [*lines, "", _overhead_foot(held), "", f"`{held['command']}`, {held['date']}."]


# ---------------------------------------------------------------------------------------------- figures


def qualitative(plan: Plan, dataset: str, progress: Progress, rows: int = 6) -> Path:
    """Maps of some test pictures by each head, predicted box green, ground truth red."""
    net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
    samples = plan.samples(dataset, "test", rows)
    names, method = [*[*ROWS][:2], *[*ROWS][4:]], methods_of(net)[0]
    names += [] if plan.zoom == 1 else ["sigmoid, clamped, enlarged"]
    drawn, captions = list[list[Any]](), list[list[str]]()
    for number, sample in enumerate(samples):
        picture = sample.open()
        width, height = net.input_shape[2], net.input_shape[1]
        truth = []
        if sample.boxes:
            boxes = torch.tensor(sample.boxes, dtype=torch.int64)
            truth = scaled_boxes(boxes, sample.size or picture.size, (width, height)).tolist()
        squashed = with_boxes(picture.resize((width, height)), truth, "#e53935")
        line, said = [squashed], ["" if sample.label is None else samples.classes[sample.label]]
        for name in names:
            branch, clamp = ROWS.get(name, ("sigmoid", True))
            zoom = plan.zoom if name not in ROWS else 1.0
            ex = explain(net, [picture], method, branch=branch, clamp=clamp, zoom=zoom)  # type: ignore[arg-type]
            shown = with_boxes(overlay(picture, ex.maps[0]), truth, "#e53935")
            line.append(with_boxes(shown, ex.boxes(0.2)[0].tolist()))
            kind, score = (
                ("probability", ex.probability) if branch == "softmax" else ("evidence", ex.evidence)
            )
            said.append(f"{ex.name(int(ex.classes[0]))}\n{kind} {float(score[0]):.3f}")
        drawn.append(line)
        captions.append(said)
        progress("figures", number + 1, len(samples))
    heads = (
        "ground truth",
        *(name.replace(" (the paper's", "\n(the paper's").replace(", ", ",\n", 1) for name in names),
    )
    path = plan.output / "figures" / f"maps-{dataset}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(drawn, columns=heads, captions=captions).save(path)
    return path


def distortions(plan: Plan, net: DualBranch, dataset: str) -> Path | None:
    """How far the softmax head's map moves while its probabilities stand still, on one picture."""
    from sigcam.cli.demo import distortions_figure

    found = plan.samples(dataset, "test", 64)
    usable = (sample for sample in found if sample.open_mask is not None and sample.label is not None)
    samples = Samples(tuple(usable), found.classes)
    if not net.linear or not samples:
        return None
    path = plan.output / "figures" / f"distortions-{dataset}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    distortions_figure(net, samples).save(path)
    return path
