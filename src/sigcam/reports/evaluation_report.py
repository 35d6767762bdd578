"""The report of an evaluation: tables with intervals, threshold curves, reliability, example images."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sigcam.core.manifest import provenance
from sigcam.drawing.charts import Line, line_chart
from sigcam.drawing.overlay import PROBABILITY, RANGE, TRUTH_COLOUR, overlay, with_boxes
from sigcam.evaluation.examples import Example, Examples, compared
from sigcam.evaluation.registry import METRICS, metric_of
from sigcam.evaluation.result import (
    FIXED,
    MEAN_MAP,
    Curves,
    MetricKey,
    Result,
    Row,
    number_label,
    variant_words,
)
from sigcam.methods.explanation import data_uri, is_calibrated, presence_words
from sigcam.metrics.base import IOUS
from sigcam.metrics.boxes import THRESHOLDS
from sigcam.metrics.classification import calibration
from sigcam.reports.explain_report import JPEG_QUALITY, MapGallery, input_image
from sigcam.reports.html import (
    Card,
    Charts,
    NoteList,
    Number,
    ReportTable,
    Section,
    Shot,
    render_page,
)

MAX_CARDS = 6  # images per section
MAX_LINES = 6  # lines per chart
CHART_STEP = 10  # draw every tenth of the 1001 thresholds: a chart has no more pixels
TABLE_TITLES = {
    "oracle": "Boxes, at the threshold that is best for these very images",
    "transferred": "Boxes, at the threshold that was best on the validation split",
    "fixed": f"Boxes, at threshold {FIXED}",
    "half": "Maps cut at the value 0.5, so that no threshold is chosen",
    "place": "Other measures of place",
    "class": "Does the class depend on it?",
}
AT_HALF = {  # titles of the numbers of maps that are cut at one half
    "box_acc_at_half": "box accuracy",
    "false_alarm": "false alarms: maps of an absent class",
    "false_alarm_area": "area of false alarms, % of the image",
}


def evaluation_page(
    result: Result, curves: Curves, examples: Examples | None, facts: Sequence[tuple[str, str]] = ()
) -> str:
    """The HTML page of an evaluation; without examples, tables and curves only."""
    numbers = [(number_label(row), f"{row['value']:.2f} %") for row in result.rows if row["method"] is None]
    sections = [_tables(result, curves), _threshold_curves(curves, result.about.get("threshold", "maximum"))]
    sections += [_reliability(examples), *_example_sections(examples)] if examples else []
    about = [(k, _plain_text(v)) for k, v in result.about.items() if k not in ("definitions", "images")]
    notes = [
        NoteList("How each number is defined", list(result.about["definitions"].items())),
        NoteList("What was evaluated, and with what", about),
    ]
    foot = f"Not measured: {result.left_out_words()}." if result.left_out else ""
    sections.append(Section("Small print", notes, foot=foot))
    skipped = len(result.skipped)
    return render_page(
        "What the maps are worth",
        sections,
        lead="All numbers are in percent of images unless they say otherwise.",
        facts=[*facts, ("images", str(result.about["images"])), *numbers],
        warnings=[f"{skipped} picture(s) could not be read and do not count."] if skipped else [],
        **provenance(),
    )


def _plain_text(value: object) -> str:
    """Lists and mappings as comma-separated text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _tables(result: Result, curves: Curves) -> Section:
    """Tables with a row per variant and a column per number."""
    by_table = dict[str, list[Row]]()
    for row in result.rows:
        if row["method"] is not None:
            spec = METRICS.get(metric_of(row["metric"]))
            kind = "place" if spec is not None and spec.uses == "maps" else "class"
            kind = "half" if row["metric"] in AT_HALF else row["threshold_from"] or kind
            by_table.setdefault(kind, []).append(row)
    tables = list[ReportTable]()
    for kind, title in TABLE_TITLES.items():
        if rows := by_table.get(kind):
            heads = list(dict.fromkeys(_title(row) for row in rows))
            lines = dict[str, dict[str, Number]]()
            for row in rows:
                lines.setdefault(variant_words(row), {})[_title(row)] = _number(row, result, curves)
            body = [(name, [numbers.get(head) for head in heads]) for name, numbers in lines.items()]
            explained = f"Mean map: {MEAN_MAP}." if any(row["metric"] == "mean_map" for row in rows) else ""
            tables.append(ReportTable(("maps", *heads), body, title, explained))
    foot = "No intervals were asked for."
    if any(row["low"] is not None for row in result.rows):
        foot = "Below a number are the ends of its 95 % bootstrap interval"
        if curves.differences:
            foot += ", then its difference from the softmax head's signed maps on the same images with a "
            foot += "paired interval, marked where that excludes zero"
        foot += "."
    return Section("Numbers", tables, empty="No number that needs a map was asked for.", foot=foot)


def _title(row: Row) -> str:
    """The heading of a number."""
    return AT_HALF.get(row["metric"]) or number_label(row, threshold=False)


def _number(row: Row, result: Result, curves: Curves) -> Number:
    """The row as a cell, with its difference from the softmax head's signed maps."""
    metric = metric_of(row["metric"])
    key = MetricKey(row["method"], row["branch"], row["clamp"], metric, row["scorer"], row["scale"])
    difference = curves.differences.get((key, row["metric"], row["threshold_from"]))
    better = None
    if difference is not None and not difference.low <= 0 <= difference.high:
        higher = METRICS[metric].higher_is_better
        better = None if higher is None else (difference.value > 0) == higher
    threshold = row["threshold"] if row["threshold_from"] in ("oracle", "transferred") else None
    note = "" if threshold is None else f"at {threshold:g}"
    apart = None if difference is None else (difference.value, difference.low, difference.high)
    return Number(row["value"], row["low"], row["high"], apart, better, note)


def _threshold_curves(curves: Curves, threshold: str) -> Section:
    """Box accuracy against the threshold, and precision against recall."""
    parts, groups = list[Charts](), dict[str, list[str]]()
    variants = dict.fromkeys((*curves.boxes, *curves.pixels))
    for name in variants:  # all in one chart, or one chart per method if there are many
        groups.setdefault(name.split()[0] if len(variants) > MAX_LINES else "", []).append(name)
    for method, names in groups.items():
        boxed = [(name, curves.boxes[name]) for name in names if name in curves.boxes]
        masked = [(name, curves.pixels[name]) for name in names if name in curves.pixels]
        figures = [_box_chart(boxed, i, threshold) for i in range(len(IOUS))] if boxed else []
        figures += [_pixel_chart(masked)] if masked else []
        parts.append(Charts(figures, method))
    intro = f"Any contour's box counts. Dots: the best threshold. Dashed: {FIXED}." if curves.boxes else ""
    missing = "The data has no boxes and no masks, or neither max_box_acc_v2 nor pxap was measured"
    return Section("Thresholds", parts, intro, f"{missing}, so there are no curves.")


def _box_chart(curves: Sequence[tuple[str, Tensor]], i: int, threshold: str) -> str:
    """Share of images located at the i-th IoU, against the threshold."""
    whole = {"maximum": "peak", "percentile": "90th percentile"}[threshold]
    lines = []
    for name, values in curves:
        best = int(values[i].argmax())
        xs, ys = THRESHOLDS[::CHART_STEP].tolist(), values[i, ::CHART_STEP].tolist()
        dot = (float(THRESHOLDS[best]), float(values[i, best]), 4)
        lines.append(Line(name, list(zip(xs, ys, strict=True)), [dot]))
    axes: Any = {"x_name": f"threshold, share of the map's {whole}", "y_name": "images, %", "rule": FIXED}
    return line_chart(f"boxes found, IoU at least {IOUS[i]}", lines, **axes)


def _pixel_chart(curves: Sequence[tuple[str, Tensor]]) -> str:
    """Precision against recall of the object's pixels."""
    lines = []
    for name, (recall, precision) in curves:
        steps = (recall * 2).floor()  # draw points that are half a percent of recall apart, and the last
        shown = torch.cat([torch.tensor([True]), steps[1:] != steps[:-1]])
        shown[-1] = True
        lines.append(Line(name, list(zip(recall[shown].tolist(), precision[shown].tolist(), strict=True))))
    axes: Any = {"x_name": "recall, %", "y_name": "precision, %", "x_range": (0, 100)}
    return line_chart("pixels of the object", lines, **axes)


def _reliability(examples: Examples) -> Section:
    """How often the predicted class is right, by its probability and by its evidence."""
    if not examples.labelled:
        empty = "The data has no labels that the classifier knows, so nothing is right or wrong."
        return Section("Reliability", empty=empty)
    right = torch.tensor([examples.samples[e.index].label == e.predicted for e in examples.images])[:, None]
    scores = {"softmax probability": [e.probability for e in examples.images]}
    if examples.net.fitted:
        scores["sigmoid evidence"] = [e.evidence or 0.0 for e in examples.images]
    lines = []
    for name, values in scores.items():
        found = calibration(torch.tensor(values)[:, None], right)
        dots = [
            (score, 100 * share, 2.5 + 5 * (count / max(found.count)) ** 0.5)
            for score, share, count in zip(found.score, found.share, found.count, strict=True)
            if count
        ]
        lines.append(Line(f"{name}, error {found.error:.3f}", [dot[:2] for dot in dots], dots, faint=True))
    chart = line_chart("the predicted class", lines, x_name="its score", y_name="right, %", diagonal=True)
    evidence = (
        "Evidence is a frequency only if the branch was calibrated: with positives weighted, it is the odds "
        "against an average class."
        if examples.net.fitted
        else "The sigmoid branch is not fitted, so there is no evidence to show."
    )
    legend = "Larger dots stand for more images; a frequency lies on the dashed line."
    intro = f"{_which_images(examples)} {legend} {evidence}"
    return Section("Reliability", [Charts([chart])], intro=intro)


def _which_images(examples: Examples) -> str:
    shown, count = len(examples.images), len(examples.samples)
    return f"All {count} images." if shown == count else f"{shown} of {count} images, drawn at random."


def _example_sections(examples: Examples) -> list[Section]:
    """The images that are located best and worst, and those that the branches disagree about most."""
    name = variant_words(examples.variants[-1]._asdict())
    half = min(MAX_CARDS, len(examples.images) // 2)
    if examples.boxed:
        ranked = sorted(examples.images, key=lambda e: -e.ious[-1])
        order = f"By the IoU of the box of {name} at {FIXED} of its peak, green, with the true one, red."
    else:
        ranked = sorted(examples.images, key=lambda e: e.drops[-1])
        order = (
            "The data has no boxes, so images are ordered by the share of confidence that is lost when only "
            f"what the map of {name} shows is kept."
        )
    intro = f"{_which_images(examples)} {order}"
    sections = list[Section]()
    for title, some in (("Best images", ranked[:half]), ("Worst images", ranked[::-1][:half])):
        parts = [_gallery(examples, some)] if some else []
        sections.append(Section(title, parts, intro, "Too few images."))
    title, pair = "Where the branches disagree", compared(examples.variants)
    if pair is None:
        return [*sections, Section(title, empty="Maps of one branch alone were evaluated.")]
    disagreeing = sorted(examples.images, key=lambda e: -(e.disagreement or 0))[:MAX_CARDS]
    both = " and ".join(variant_words(examples.variants[i]._asdict()) for i in pair)
    order = f"By 1 minus the overlap of the maps of {both}: 0 is equal, 1 nothing in common."
    intro = f"{_which_images(examples)} {order}"
    return [*sections, Section(title, [_gallery(examples, disagreeing)], intro)]


def _gallery(examples: Examples, some: Sequence[Example]) -> MapGallery:
    """The cards of some images; unit maps and probabilities may be side by side."""
    scales = {variant.scale for variant in examples.variants}
    unit = {frozenset(["unit"]): RANGE, frozenset(["probability"]): PROBABILITY}
    cards = [_card(examples, each) for each in some]
    return MapGallery(cards, unit=unit.get(frozenset(scales), "range or probability"))


def _card(examples: Examples, example: Example) -> Card:
    """One image with the maps of all variants."""
    sample = examples.samples[example.index]
    image = input_image(examples.net, sample.open())
    shots = []
    for i, variant in enumerate(examples.variants):
        name = variant_words(variant._asdict()).partition(" ")[2] or variant.method
        drawn = overlay(image, example.maps[i] / 255)
        drawn = with_boxes(with_boxes(drawn, example.truth, TRUTH_COLOUR), [example.boxes[i]])
        measure = f"IoU {example.ious[i]:.2f}" if examples.boxed else f"drop {example.drops[i]:.2f}"
        caption = f"{name}: {measure}" + ("" if example.maps[i].any() else ", blank map")
        shots.append(Shot(data_uri(drawn, JPEG_QUALITY), f"map of {sample.id} by {name}", caption))
    facts = []
    if examples.labelled and sample.label is not None:
        facts.append(("label", examples.class_name(sample.label)))
    facts += [("predicted", examples.class_name(example.predicted))]
    facts += [("probability", f"{example.probability:.3f}")]
    if example.evidence is not None:
        presence = f", {presence_words(example.evidence)}" if is_calibrated(examples.net) else ""
        facts.append(("evidence", f"{example.evidence:.3f}{presence}"))
    facts += [] if example.disagreement is None else [("disagreement", f"{example.disagreement:.3f}")]
    return Card(sample.id, shots, facts=facts)
