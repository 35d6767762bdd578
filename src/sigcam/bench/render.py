"""Write results as JSON, CSV and Markdown, and all of them as one HTML page."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sigcam.bench.agreement import agreement, agreement_words
from sigcam.bench.paper import HEADS, BenchRow, published_overhead, published_value, row_name
from sigcam.bench.plan import Plan
from sigcam.bench.registry import TABLES
from sigcam.core.files import write_text_atomic
from sigcam.evaluation.registry import METRICS, metric_of
from sigcam.methods.explanation import data_uri
from sigcam.reports.html import Figure, Number, ReportTable, Section, Shot, render_page

VERDICTS = {True: "better", False: "worse", None: ""}
CSV_KEYS = ("dataset", "backbone", "classifier", "method", "row", "branch", "clamp", "zoom", "images")
CSV_DIFFERENCES = {
    "delta": " from softmax signed",
    "beside": " from softmax clamped",
    "versus": " from strongest control",
}
ENDS = (" strongest control", " published")  # the last columns of a number
DIGITS = {"passes": 1, "seconds": 4, "times_a_pass": 1}


def write_table(plan: Plan, table: str, rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Write TABLE.json, TABLE.csv and TABLE.md; return the content of the first."""
    columns = columns_of(table, rows)
    content: dict[str, Any] = {
        "table": table,
        **plan.provenance(),
        "foot": _table_foot(table, rows),
        "rows": [
            {"row": row_name(row), **row, "published": {c: published_value(row, table, c) for c in columns}}
            for row in rows
        ],
        "agreement": agreement(table, rows),
    }
    write_result(plan, content)
    out = io.StringIO()
    writer = csv.writer(out)
    suffixes = [f"{kind}{end}" for kind in ("", *CSV_DIFFERENCES.values()) for end in ("", " low", " high")]
    writer.writerow([*CSV_KEYS, *(f"{c}{suffix}" for c in columns for suffix in (*suffixes, *ENDS))])
    for row in content["rows"]:
        line = [row[key] for key in CSV_KEYS]
        for c in columns:
            line += [row.get(c), *row["intervals"].get(c, (None, None))]
            line += [end for key in CSV_DIFFERENCES for end in difference(row, c, key) or (None, None, None)]
            line += [row.get("versus", {}).get(c, {}).get("control"), row["published"][c]]
        writer.writerow(line)
    write_text_atomic(plan.output / f"{table}.csv", out.getvalue())
    return content


def write_result(plan: Plan, content: dict[str, Any]) -> None:
    """Write the JSON and the Markdown file of a table, or of the overhead."""
    write_text_atomic(plan.output / f"{content['table']}.json", json.dumps(content, indent=1) + "\n")
    write_text_atomic(plan.output / f"{content['table']}.md", markdown(content))


def columns_of(table: str, rows: Sequence[BenchRow]) -> list[str]:
    """Return the table's columns that some of the rows have."""
    return [column for column in TABLES[table].columns if any(column in row for row in rows)]


def difference(row: BenchRow, column: str, versus: str = "delta") -> Sequence[float] | None:
    """Return the row's difference from the signed softmax maps (versus="beside": from the clamped ones,
    "versus": from the strongest control) with the ends of its interval."""
    found: Any = row.get(versus, {}).get(column)
    values: Sequence[float] | None = found["difference"] if versus == "versus" and found else found
    return values


def verdict(row: BenchRow, column: str, versus: str = "delta") -> bool | None:
    """Return whether the row is significantly better (True) or worse (False) than what `difference` compares
    it with; None if neither."""
    found, spec = difference(row, column, versus), METRICS.get(metric_of(column.partition(":")[0]))
    if found is None or found[1] <= 0 <= found[2] or spec is None:
        return None
    return None if spec.higher_is_better is None else bool((found[0] > 0) == spec.higher_is_better)


def markdown(content: dict[str, Any]) -> str:
    """Return a result as a Markdown page."""
    section = _section(content)
    lines = [f"# {section.title}", ""]
    for part in section.parts:
        assert isinstance(part, ReportTable)
        lines += [f"## {part.title}", ""] if part.title else []
        lines += [f"| {' | '.join(part.header)} |", "|---" * len(part.header) + "|"]
        lines += [f"| {' | '.join([name, *map(_cell_text, cells)])} |" for name, cells in part.rows]
        lines += [""]
    return "\n".join([*lines, section.foot, "", f"`{content['command']}`, {content['date']}."]) + "\n"


def html(results: Sequence[dict[str, Any]], figures: Sequence[Path]) -> str:
    """Return all results and figures as one self-contained page."""
    sections = [_section(content) for content in results]
    if figures:
        shots = [Shot(data_uri(Image.open(path)), f"{path.stem}: maps side by side") for path in figures]
        legend = "CAM maps of the predicted class (below); boxes at 0.2 of the peak green, ground truth red."
        sections.append(Section("Figures", [Figure(shot) for shot in shots], intro=legend))
    lead = "The paper's tables on these data, with controls and intervals."
    return render_page("sigcam bench", sections, lead=lead)


def _section(content: dict[str, Any]) -> Section:
    """Return the section of a result, which both Markdown and HTML are made from."""
    command = f"{content['command']}, {content['date']}"
    if is_overhead(content):
        foot = (
            f"{content['backbone']} on {content['dataset']}, batches of 8, {content['threads']} threads, "
            f"medians of {content['repeats']}, in turns."
        )
        return Section("Overhead of the branch", _overhead_tables(content), foot=foot, command=command)
    title = TABLES[content["table"]].title
    parts = [*_report_tables(content), *_agreement_tables(content.get("agreement", ()))]
    return Section(title, parts, foot=content["foot"], command=command)


def is_overhead(content: dict[str, Any]) -> bool:
    """Whether a result is of the branch's cost rather than of its maps."""
    return str(content["table"]).startswith("overhead")


def _agreement_tables(cells: Sequence[dict[str, Any]]) -> list[ReportTable]:
    """Return the paper's differences beside ours, if there are any."""
    if not cells:
        return []
    header = ("cell", "the paper", "here (difference, interval)", "the paper's direction")
    rows = list[tuple[str, list[Number | str | None]]]()
    for cell in cells:
        place = ", ".join(cell[key] for key in ("dataset", "method", "classifier", "metric"))
        values = [" to ".join(f"{value:.2f}" for value in cell[side]) for side in ("paper", "here")]
        values[1] += " ({:+.2f}, {:+.1f} to {:+.1f})".format(*cell["difference"])
        agrees = {True: "yes", False: "NO"}[cell["agrees"]] + ("" if cell["certain"] else ", uncertain")
        rows.append((place.replace("_", " "), [*values, agrees]))
    title = f"From softmax signed to sigmoid clamped, beside the paper: {agreement_words(cells)}"
    return [ReportTable(header, rows, title=title.removesuffix("."))]


def _report_tables(content: dict[str, Any]) -> list[ReportTable]:
    """Return one table for the rows of each data set, method and zoom."""
    together = TABLES[content["table"]].methods_together
    groups = dict[str, list[BenchRow]]()
    several = len({(row["dataset"], row["classifier"]) for row in content["rows"]}) > len(
        {row["dataset"] for row in content["rows"]}
    )
    for row in content["rows"]:
        zoom = f", images x{row['zoom']:g}" if row["zoom"] != 1 else ""
        kind = f", {row['classifier']}" if several else ""
        kind += ", positive weight" if "pos_weight" in row and content["table"] != "pos-weight" else ""
        method = "" if together else f", {row['method']}"
        images = "" if together else f", {row['images']} images"
        title = f"{row['dataset']}{method}{kind}{zoom}{images}"
        title += " for confidence" if several and "average_drop" in row else ""
        groups.setdefault(title, []).append(row)
    tables = list[ReportTable]()
    for title, rows in groups.items():
        columns = columns_of(content["table"], rows)
        header = ("map from", *(column.replace("_", " ") for column in columns))
        names = [f"{r['method']}, {r['images']} images: {r['row']}" if together else r["row"] for r in rows]
        cells = [
            (name, [_cell(row, column) for column in columns]) for name, row in zip(names, rows, strict=True)
        ]
        tables.append(ReportTable(header, cells, title=title))
    return tables


def _cell(row: BenchRow, column: str) -> Number | None:
    """Return a number with its interval, differences and the paper's number; None if the row has none."""
    if column not in row:
        return None
    low, high = row["intervals"].get(column, (None, None))
    delta = difference(row, column)
    from_baseline = None if delta is None else (delta[0], delta[1], delta[2])
    notes = list[str]()
    for which, words in (("beside", "beside clamped softmax"), ("versus", "beside {}")):
        if (found := difference(row, column, which)) is not None:
            control = row["versus"][column]["control"] if which == "versus" else ""
            text = "{:+.2f} ({:+.1f} to {:+.1f})".format(*found)
            note = f"{text} {words.format(control)} {VERDICTS[verdict(row, column, which)]}"
            notes.append(note.rstrip())
    if (paper := row["published"].get(column)) is not None:
        notes.append(f"paper {paper:.2f}")
    better, digits = verdict(row, column), DIGITS.get(column, 2)
    return Number(row[column], low, high, from_baseline, better, "; ".join(notes), digits)


def _cell_text(cell: Number | str | None) -> str:
    """Return a cell as it is written in Markdown."""
    if cell is None or isinstance(cell, str):
        return cell or "-"
    parts = [cell.text]
    if cell.low is not None and cell.high is not None:
        parts.append(f"{cell.low:.1f} to {cell.high:.1f}")
    if cell.difference:
        text = "{:+.2f} ({:+.1f} to {:+.1f})".format(*cell.difference)
        parts.append(f"{text} {VERDICTS[cell.better]}".rstrip())
    return "; ".join([*parts, *filter(None, [cell.note])])


def _table_foot(table: str, rows: Sequence[BenchRow]) -> str:
    """Return the notes below a table."""
    networks = (f"{row['backbone']}, {row['classifier']}" for row in rows)
    strongest = ""
    if any(row.get("versus") and row["branch"] not in HEADS for row in rows):
        strongest = (
            " Maps of branches with background have the difference from the strongest of the other heads' "
            "maps in the same column, which is named."
        )
    classifiers, spec = ", ".join(dict.fromkeys(networks)), TABLES[table]
    counts = _image_counts(rows, by_method=spec.methods_together)
    return (
        f"Images: {counts}. Classifier: {classifiers}. In percent, with 95 % bootstrap intervals, and the "
        "difference from the softmax head's signed maps on the same images and its paired interval, marked "
        "where that excludes zero. Clamped maps of the other heads have the difference from the softmax "
        f"head's clamped maps too.{strongest} {spec.note}{_left_out(rows)}"
    )


def _image_counts(rows: Sequence[BenchRow], *, by_method: bool) -> str:
    """Return the number of images of each data set; with `by_method`, of each of its methods."""
    if not by_method:
        purpose = {True: " for confidence", False: ""}
        counts = (f"{row['dataset']}: {row['images']}{purpose['average_drop' in row]}" for row in rows)
        return ", ".join(dict.fromkeys(counts))
    methods = dict[tuple[str, int, int, int], dict[str, None]]()
    for row in rows:
        key = row["dataset"], row["images"], row["curve_images"], row["curve_steps"]
        methods.setdefault(key, {})[row["method"]] = None
    return "; ".join(
        f"{dataset}: {images} for {', '.join(names)} ({few} for insertion and deletion, by {steps} steps)"
        for (dataset, images, few, steps), names in methods.items()
    )


def _left_out(rows: Sequence[BenchRow]) -> str:
    """Return a sentence on the methods that the table leaves out, if there are any."""
    reasons = {name: reason for row in rows for name, reason in row.get("left_out", {}).items()}
    return f" Left out: {'; '.join(f'{n} ({reason})' for n, reason in reasons.items())}." if reasons else ""


def _overhead_tables(content: dict[str, Any]) -> list[ReportTable]:
    """Return our measurements, and the paper's numbers."""
    ours = [(f"parameters, {name}", [f"{count:,}"]) for name, count in content["parameters"].items()]
    ours += [(f"ms per image, {name}", [f"{value:.2f}"]) for name, value in content["ms_per_image"].items()]
    ours += [(f"training, {name}", [f"{value:.4g}"]) for name, value in content["training"].items()]
    paper = published_overhead()
    header = ("the paper's, without / with the branch", *paper["VGG-16"])
    rows = [(name, [f"{a:g} / {b:g}" for a, b in pairs.values()]) for name, pairs in paper.items()]
    return [ReportTable(("what", "number"), ours), ReportTable(header, rows)]
