"""The report of an evaluation: tables with intervals, threshold curves, reliability, telling images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sigcam.core.manifest import provenance
from sigcam.core.types import ImageSize
from sigcam.drawing.charts import Line, line_chart
from sigcam.drawing.overlay import overlay, with_boxes
from sigcam.evaluation.curves import Curves, cell_name
from sigcam.evaluation.examples import Example, Examples, drawn_by, pair_of
from sigcam.evaluation.registry import boxes_for
from sigcam.evaluation.result import FIXED, Key, Result, Row, cell_words, label_of
from sigcam.methods.explanation import data_uri
from sigcam.metrics.boxes import THRESHOLDS, boxes_at
from sigcam.metrics.classification import calibration
from sigcam.metrics.localization import IOUS
from sigcam.reports.explain_report import QUALITY, seen_by
from sigcam.reports.html import (
    Card,
    Charts,
    Gallery,
    NoteList,
    Number,
    ReportTable,
    Section,
    Shot,
    render_page,
)

TELLING = 6  # images of each kind that is shown
MOST_LINES = 6  # of a chart
TRUTH = "#e53935"
STEP = 10  # of 1001 thresholds, as a chart has not that many pixels


def evaluation_page(
    result: Result, curves: Curves, seen: Examples | None, facts: Sequence[tuple[str, str]] = ()
) -> str:
    """The page of an evaluation; without a network (`seen` is None) tables and curves alone."""
    alone = [row for row in result.rows if row["method"] is None]
    numbers = [(label_of(row), f"{row['value']:.2f} %") for row in alone]
    sections = [_tables(result, curves), _threshold_curves(curves)]
    sections += [_reliability(seen), *_telling(seen)] if seen else []
    about = [(k, _words(v)) for k, v in result.about.items() if k not in ("definitions", "images")]
    notes = [
        NoteList("How each number is defined", list(result.about["definitions"].items())),
        NoteList("What was evaluated, and with what", about),
    ]
    left = [f"{name}: {reason}" for name, reason in result.left_out]
    foot = f"Not measured: {'; '.join(left)}." if left else ""
    sections.append(Section("Small print", notes, foot=foot))
    skipped = result.skipped
    return render_page(
        "What the maps are worth",
        sections,
        lead="All numbers are in percent of images unless they say otherwise.",
        facts=[*facts, ("images", str(result.about["images"])), *numbers],
        warnings=[f"{len(skipped)} picture(s) could not be read and do not count."] if skipped else [],
        **provenance(),
    )


def _words(value: object) -> str:
    """Plain data as a sentence."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


PLACES = ("gt_known_loc", "top1_loc", "top5_loc", "pxap", "pointing_game", "energy_in_box")
SECTION_TITLES = {
    "oracle": "Boxes, at the threshold that is best for these very images",
    "transferred": "Boxes, at the threshold that was best on the validation split",
    "fixed": f"Boxes, at threshold {FIXED}",
    "place": "Other measures of place",
    "class": "Does the class depend on it?",
}


def _tables(result: Result, curves: Curves) -> Section:
    """Tables with a row per cell and a column per number."""
    kinds = dict[str, list[Row]]()
    for row in result.rows:
        if row["method"] is not None:
            place = "place" if row["metric"].removesuffix("_first") in PLACES else "class"
            kinds.setdefault(row["threshold_from"] or place, []).append(row)
    tables = list[ReportTable]()
    for kind, title in SECTION_TITLES.items():
        rows = kinds.get(kind, [])
        columns = list(dict.fromkeys((row["metric"], row["scorer"]) for row in rows))
        cells = list(dict.fromkeys(cell_words(row) for row in rows))
        found = {
            (cell_words(row), row["metric"], row["scorer"]): _number(row, result, curves) for row in rows
        }
        heads = dict.fromkeys(_head(row) for row in rows)
        if rows:
            lines = [(" ".join(cell), [found.get((cell, *column)) for column in columns]) for cell in cells]
            tables.append(ReportTable(("maps", *heads), lines, title))
    foot = "Below a number are the ends of its 95 % bootstrap interval" if _has_ends(result) else ""
    if curves.differences:
        foot += (
            ", then its difference from the softmax head's signed maps on the same images with a paired "
            "interval, marked where that excludes zero"
        )
    foot = f"{foot}." if foot else "No intervals were asked for."
    return Section("Numbers", tables, empty="No number that needs a map was asked for.", foot=foot)


def _key(row: Row) -> Key:
    """The key of the metric that the row is from."""
    name = row["metric"]
    if name.startswith("max_box_acc_"):
        name = "max_box_acc_v2"
    scorer = "" if row["scorer"] in (None, "softmax") else f":{row['scorer']}"
    return row["method"], row["branch"], row["clamp"], name + scorer


def _head(row: Row) -> str:
    scorer = f" by {row['scorer']}" if row["scorer"] not in (None, "softmax") else ""
    return str(row["metric"]).replace("_", " ") + scorer


def _has_ends(result: Result) -> bool:
    return any(row["low"] is not None for row in result.rows)


def _number(row: Row, result: Result, curves: Curves) -> Number:
    """The row as a cell, with its difference from the softmax head's."""
    key = _key(row)
    apart = curves.differences.get((key, row["metric"], row["threshold_from"]))
    good = result.metrics[key].higher_is_better if key in result.metrics else None
    sure = apart is not None and not apart.low <= 0 <= apart.high
    threshold = row["threshold"] if row["threshold_from"] in ("oracle", "transferred") else None
    return Number(
        row["value"],
        row["low"],
        row["high"],
        None if apart is None else (apart.value, apart.low, apart.high),
        (apart.value > 0) == good if apart is not None and sure and good is not None else None,
        "" if threshold is None else f"at {threshold:g}",
    )


def _threshold_curves(curves: Curves) -> Section:
    """Box accuracy against the threshold, and precision against recall."""
    parts = list[Charts]()
    for method, names in _lots(list(dict.fromkeys((*curves.boxes, *curves.pixels)))).items():
        boxed = [(name, curves.boxes[name]) for name in names if name in curves.boxes]
        masked = [(name, curves.pixels[name]) for name in names if name in curves.pixels]
        figures = [_box_chart(boxed, which) for which in range(len(IOUS))] if boxed else []
        figures += [_pixel_chart(masked)] if masked else []
        parts.append(Charts(figures, method))
    told = f"Any contour's box counts. Dots: the best threshold. Dashed: {FIXED}." if curves.boxes else ""
    return Section(
        "Thresholds",
        parts,
        told,
        "The data has no boxes and no masks, or neither max_box_acc_v2 nor pxap was measured, so there are "
        "no curves.",
    )


def _box_chart(curves: Sequence[tuple[str, Tensor]], which: int) -> str:
    """Images found at one IoU, against the threshold."""
    lines = []
    for name, values in curves:
        best = int(values[which].argmax())
        points = list(zip(THRESHOLDS[::STEP].tolist(), values[which, ::STEP].tolist(), strict=True))
        lines.append(Line(name, points, [(float(THRESHOLDS[best]), float(values[which, best]), 4)]))
    axes: Any = {"x_name": "threshold, share of the map's peak", "y_name": "images, %", "rule": FIXED}
    return line_chart(f"boxes found, IoU at least {IOUS[which]}", lines, **axes)


def _pixel_chart(curves: Sequence[tuple[str, Tensor]]) -> str:
    """Precision against recall of the object's pixels."""
    lines = []
    for name, (recall, precision) in curves:
        kept = _spread(recall)
        lines.append(Line(name, list(zip(recall[kept].tolist(), precision[kept].tolist(), strict=True))))
    axes: Any = {"x_name": "recall, %", "y_name": "precision, %", "x_range": (0, 100)}
    return line_chart("pixels of the object", lines, **axes)


def _spread(recall: Tensor) -> Tensor:
    """Indices of points that are half a percent of recall apart, the last included."""
    steps = (recall * 2).floor()
    first = torch.ones_like(steps, dtype=torch.bool)
    first[1:] = steps[1:] != steps[:-1]
    first[-1] = True
    return first.nonzero()[:, 0]


def _lots(names: Sequence[str]) -> dict[str, list[str]]:
    """Names for each set of charts by its title: all, or those of one method where there are many."""
    lots = dict[str, list[str]]()
    for name in names:
        lots.setdefault(name.split()[0] if len(names) > MOST_LINES else "", []).append(name)
    return lots


def _reliability(seen: Examples) -> Section:
    """How often the predicted class is right, by its probability and by its evidence."""
    title = "Reliability"
    if not seen.labelled:
        return Section(
            title, empty="The data has no labels that the classifier knows, so nothing is right or wrong."
        )
    right = torch.tensor([seen.samples[g.index].label == g.predicted for g in seen.glances])[:, None]
    scores = {"softmax probability": [g.probability for g in seen.glances]}
    if seen.net.fitted:
        scores["sigmoid evidence"] = [g.evidence or 0.0 for g in seen.glances]
    lines = []
    for name, values in scores.items():
        held = calibration(torch.tensor(values)[:, None], right)
        bins = [i for i, count in enumerate(held.count) if count]
        points = [(held.score[i], 100 * held.share[i]) for i in bins]
        dots = [
            (*p, 2.5 + 5 * (held.count[i] / max(held.count)) ** 0.5)
            for p, i in zip(points, bins, strict=True)
        ]
        lines.append(Line(f"{name}, error {held.error:.3f}", points, dots, faint=True))
    chart = line_chart("the predicted class", lines, x_name="its score", y_name="right, %", diagonal=True)
    told = f"{_whose(seen)} Larger dots stand for more images; a frequency lies on the dashed line."
    told += (
        " Evidence is a frequency only if the branch was calibrated: with positives weighted, it is the odds "
        "against an average class."
        if seen.net.fitted
        else " The sigmoid branch is not fitted, so there is no evidence to show."
    )
    return Section(title, [Charts([chart])], intro=told)


def _whose(seen: Examples) -> str:
    if len(seen.glances) == len(seen.samples):
        return f"All {len(seen.samples)} images."
    return f"{len(seen.glances)} of {len(seen.samples)} images, drawn at random."


def _telling(seen: Examples) -> list[Section]:
    """Images that are located best and worst, and those that the branches disagree about most."""
    cell = seen.cells[-1]
    name = cell_name(cell)
    half = min(TELLING, len(seen.glances) // 2)
    if seen.boxed:
        ranked = sorted(seen.glances, key=lambda g: -g.ious[-1])
        what = f"By the IoU of the box of {name} at threshold {FIXED}, green, with the true one, red."
    else:
        ranked = sorted(seen.glances, key=lambda g: g.drops[-1])
        what = (
            "The data has no boxes, so images are ordered by the share of confidence that is lost when only "
            f"what the map of {name} shows is kept."
        )
    sections = [
        Section(
            title, [Gallery(_cards(seen, some))] if some else (), f"{_whose(seen)} {what}", "Too few images."
        )
        for title, some in (("Best images", ranked[:half]), ("Worst images", ranked[::-1][:half]))
    ]
    pair = pair_of(seen.cells)
    title = "Where the branches disagree"
    if pair is None:
        return [*sections, Section(title, empty="Maps of one branch alone were evaluated.")]
    apart = sorted(seen.glances, key=lambda g: -(g.disagreement or 0))[:TELLING]
    both = " and ".join(cell_name(seen.cells[i]) for i in pair)
    intro = f"{_whose(seen)} By 1 minus the overlap of the maps of {both}: 0 is equal, 1 nothing in common."
    return [*sections, Section(title, [Gallery(_cards(seen, apart))], intro)]


def _cards(seen: Examples, glances: Sequence[Example]) -> list[Card]:
    """The images of some glances, drawn again."""
    cards = list[Card]()
    assert seen.net.transform is not None
    for glance in glances:
        sample = seen.samples[glance.index]
        picture = sample.open()
        labels = torch.tensor([sample.label]) if seen.labelled and seen.boxed else None
        drawn = drawn_by(seen.net, seen.net.transform(picture)[None], seen.cells, labels)
        height, width = drawn[0].maps.shape[1:]
        truth = boxes_for(sample, ImageSize(*picture.size), width, height).tolist() if seen.boxed else []
        shots = []
        for i, ex in enumerate(drawn):
            name = cell_name(seen.cells[i]).partition(" ")[2] or seen.cells[i].method
            shown = overlay(seen_by(seen.net, picture), ex.maps[0])
            shown = with_boxes(shown, truth, TRUTH)
            shown = with_boxes(shown, boxes_at(ex.maps.cpu(), FIXED)[0].tolist())
            worth = f"IoU {glance.ious[i]:.2f}" if seen.boxed else f"drop {glance.drops[i]:.2f}"
            said = f"{name}: {worth}" + (", blank map" if bool(ex.blank[0]) else "")
            shots.append(Shot(data_uri(shown, QUALITY), f"map of {sample.id} by {name}", said))
        first = drawn[0]
        facts = [("label", first.name(sample.label))] if seen.labelled and sample.label is not None else []
        facts += [("predicted", first.name(glance.predicted)), ("probability", f"{glance.probability:.3f}")]
        facts += [] if glance.evidence is None else [("evidence", f"{glance.evidence:.3f}")]
        facts += [] if glance.disagreement is None else [("disagreement", f"{glance.disagreement:.3f}")]
        cards.append(Card(sample.id, shots, facts=facts))
    return cards
