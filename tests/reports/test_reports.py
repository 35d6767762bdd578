"""Reports: their numbers are the results', they load nothing, and they say what they cannot show."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.sample import Samples
from sigcam.drawing.charts import STYLES, Line, line_chart
from sigcam.evaluation.batch import Variant
from sigcam.evaluation.evaluator import evaluate
from sigcam.evaluation.examples import MAX_EXAMPLES, MIN_EXAMPLES, Examples, collect_examples
from sigcam.evaluation.result import curves_of
from sigcam.methods.explanation import data_uri
from sigcam.methods.postprocess import disagreement
from sigcam.metrics.classification import calibration
from sigcam.metrics.localization import MaxBoxAccV2, PxAP
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.dual import DualBranch
from sigcam.network.opening import open_network
from sigcam.reports import html as reports
from sigcam.reports.evaluation_report import evaluation_page
from sigcam.reports.explain_report import evenly
from sigcam.reports.html import (
    Card,
    Charts,
    Figure,
    Gallery,
    NoteList,
    Number,
    ReportTable,
    Section,
    Shot,
    render_page,
)
from support.commands import fitted, place, run, spec
from support.method_cases import Signed
from support.samples import CLASSES, prepared, sample, samples
from support.tiny import Gap

__all__ = ["place", "samples"]  # fixtures

EVIL = "<script>alert('x')</script> & \"co\""


class Read(HTMLParser):
    """The elements of a page with their attributes, its text, and whether every element is closed."""

    VOID = ("meta", "img", "br", "input", "path", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def all(self, tag: str, style: str = "") -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and style in [*(a.get("class") or "").split(), ""]]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def checked(text: str) -> Read:
    """The page, if it is whole, loads nothing, and describes its pictures."""
    read = Read(text)
    for tag, attributes in read.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/", "#")), (tag, name, value)
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        assert "style" not in attributes or "url(" not in (attributes["style"] or "")
        if tag == "img":
            assert attributes.get("alt"), attributes
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden")
    styles = re.findall(r"<style>(.*?)</style>", text, re.S)
    assert len(styles) == 1 and "url(" not in styles[0] and "@import" not in styles[0]
    assert "prefers-color-scheme: dark" in styles[0] and "@media print" in styles[0]
    assert len(read.all("script")) == 1
    return read


def everything(**changed: Any) -> str:
    shot = Shot(data_uri(Image.new("RGB", (8, 8))), EVIL, EVIL)
    card = Card(EVIL, [shot], EVIL, {"a": 0.5, "b": None}, [(EVIL, 0.5, 0.25)], [(EVIL, EVIL)], [EVIL])
    other = replace(card, group="plain", keys={"a": None, "b": 0.1}, scores=[("x", 0.2, None)])
    chart = line_chart(EVIL, [Line(EVIL, [(0, 1), (1, 2)])], x_name=EVIL, y_name=EVIL)
    parts = [
        ReportTable((EVIL, EVIL), [(EVIL, [EVIL])], EVIL, EVIL),
        Charts([chart], EVIL, EVIL),
        Figure(shot, EVIL),
        Gallery([card, other], EVIL, EVIL, EVIL, **changed),
        NoteList(EVIL, [(EVIL, EVIL)]),
    ]
    section = Section(EVIL, parts, EVIL, EVIL, EVIL, EVIL)
    words: Any = {"lead": EVIL, "facts": [(EVIL, EVIL)], "warnings": [EVIL], "command": EVIL, "made": EVIL}
    return render_page(EVIL, [section, Section("none", empty=EVIL)], **words)


# --- the page and its parts ---


def test_whatever_is_named_script_is_text_everywhere_on_the_page():
    text = everything()
    assert "<script>alert" not in text and text.count("&lt;script&gt;alert") > 20
    read = checked(text)
    assert read.all("article", "card")[0]["data-group"] == EVIL


def test_a_table_shows_value_interval_difference_mark_and_note():
    row = ("row", [Number(12.345, 10.04, 14.06, (-1.5, -2.04, -0.96), False, "paper 13.00"), None, "words"])
    good = ("good", [Number(1.0, better=True, difference=(1, 0.5, 2)), Number(0.12345, digits=3), ""])
    text = render_page("t", [Section("s", [ReportTable(("maps", "a", "b", "c"), [row, good])])])
    read = checked(text)
    for part in ("12.35", "10.0 to 14.1", "-1.50 (-2.0 to -1.0) worse", "paper 13.00", "words", "0.123"):
        assert part in read.text.replace("12.35 10.0", "12.35 10.0"), part
    assert read.all("td")[0]["data-value"] == "12.345"
    assert [a["class"] for a in read.all("small") if a.get("class")] == ["worse", "better"]
    assert "None" not in read.text


def test_a_gallery_can_be_filtered_and_sorted_by_what_its_cards_have():
    read = checked(everything())
    selects = [a.get("name") for a in read.all("select")]
    assert selects == ["group", "key", "order"]
    cards = read.all("article", "card")
    assert [card["data-group"] for card in cards] == [EVIL, "plain"]
    assert [(card.get("data-key0"), card.get("data-key1")) for card in cards] == [
        ("0.5", None),
        (None, "0.1"),
    ]
    options = [a["value"] for a in read.all("option")]
    assert options == ["", EVIL, "plain", "", "0", "1", "high", "low"]


def test_a_gallery_of_one_group_offers_no_filter():
    shot = Shot(data_uri(Image.new("RGB", (8, 8))), "alt")
    read = checked(
        render_page("t", [Section("s", [Gallery([Card("a", [shot], "one"), Card("b", [shot], "one")])])])
    )
    assert not read.all("select") and len(read.all("article")) == 2


def test_the_colours_of_raw_maps_are_said_to_be_logits():
    assert "logits" in checked(everything(signed=True)).text
    assert "logits" not in checked(everything()).text


def test_a_section_without_parts_says_why():
    read = checked(render_page("t", [Section("s", empty="there are no boxes")]))
    assert "there are no boxes" in read.text and len(read.all("p", "empty")) == 1


def test_a_missing_extra_is_named_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'sigcam\[report\]'"):
        reports.require_report_extra()
    assert not reports.can_report()


def test_every_template_is_shipped():
    root = Path(__file__).parents[2]
    assert '"reports/templates/*"' in (root / "pyproject.toml").read_text()
    for part in (ReportTable, Charts, Figure, Gallery, NoteList):
        assert (reports.TEMPLATES / part.template).is_file()


# --- charts ---


def test_a_chart_puts_points_where_its_numbers_say():
    svg = line_chart("t", [Line("one", [(0, 0), (1, 100)], [(0.5, 50, 3)])], x_name="x", y_name="y")
    path, _ = Read(svg).all("path", "s0")  # the line, and its sample beside its name
    assert path["d"] == "M40.0 230.0 L408.0 26.0"
    (dot,) = Read(svg).all("circle")
    assert (dot["cx"], dot["cy"], dot["r"]) == ("224.0", "128.0", "3.0")


def test_lines_of_a_chart_differ_in_dashes_and_are_all_named():
    lines = [Line(f"line {i}", [(0, 0), (1, 1)]) for i in range(6)]
    svg = line_chart("t", lines, x_name="x", y_name="y", y_range=(0, 1), rule=0.2, diagonal=True)
    read = Read(svg)
    assert [read.text.count(f"line {i}") for i in range(6)] == [1] * 6
    dashes = [a.get("stroke-dasharray", "") for a in read.all("path", "line")]
    assert dashes == 2 * list(STYLES) and len(set(STYLES)) == 6  # the lines, then the samples
    assert len(read.all("path", "rule")) == 2


def test_numbers_on_the_axes_are_inside_the_drawing():
    svg = line_chart("t", [Line("a", [(0, 0)])], x_name="recall, %", y_name="y", x_range=(0, 100))
    for text in Read(svg).all("text"):
        assert 0 <= float(text["x"] or -1) <= 420 and 10 <= float(text["y"] or -1) <= 270


# --- what is looked at ---


def test_disagreement_is_one_minus_the_overlap():
    a, b = torch.rand(9, 9), torch.rand(9, 9)
    x, y = ((m / m.max()).double().numpy() for m in (a, b))
    expected = 1 - np.minimum(x, y).sum() / np.maximum(x, y).sum()
    assert float(disagreement(a, b)) == pytest.approx(expected)
    assert disagreement(a, a) == 0 and disagreement(a, 2 * a) == 0 and disagreement(a, -a) == 1
    blank = torch.zeros(9, 9)
    assert disagreement(a, blank) == 1 and disagreement(blank, blank) == 0 and disagreement(a, blank / 0) == 1
    signed = a - 0.5
    assert 0 < disagreement(signed, b) < 1 and disagreement(signed, 4 * signed) == 0
    assert disagreement(torch.stack([a, b]), torch.stack([b, b])).tolist() == [disagreement(a, b), 0]


def test_disagreement_tells_nearly_equal_maps_apart_where_a_correlation_does_not():
    a = torch.rand(9, 9, generator=torch.Generator().manual_seed(0))
    b = (a + 0.02 * torch.randn(9, 9, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    assert 1 - np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1] < 0.005 < 0.01 < disagreement(a, b)


def test_even_choices_span_the_list_and_never_repeat():
    assert evenly(5, 10) == [0, 1, 2, 3, 4]
    chosen = evenly(1003, 500)
    assert len(set(chosen)) == 500 and chosen[0] == 0 and chosen[-1] >= 1000


def quiet(*_: object) -> None:
    pass


def test_a_look_keeps_the_iou_of_the_box_at_two_tenths(samples: Samples):
    net = prepared(Gap())
    result = evaluate(net, samples, methods=["grad-cam"], metrics=["gt_known_loc", "top1_cls"])
    seen = collect_examples(net, samples, result, batch_size=5, progress=quiet)
    assert [g.index for g in seen.images] == list(range(len(samples)))
    assert seen.variants == (Variant("grad-cam", "softmax", False), Variant("grad-cam", "sigmoid", True))
    for i, branch in enumerate(("softmax", "sigmoid")):
        found = 100 * sum(g.ious[i] >= 0.5 for g in seen.images) / len(samples)
        assert found == pytest.approx(result.value("gt_known_loc", branch=branch))
    right = sum(samples[g.index].label == g.predicted for g in seen.images)
    assert 100 * right / len(samples) == pytest.approx(result.value("top1_cls"))


@pytest.mark.slow
def test_a_look_is_at_a_bounded_number_of_images_drawn_with_the_seed(samples: Samples):
    net = prepared(Gap())
    result = evaluate(net, samples, methods=["grad-cam"], metrics=["gt_known_loc"])
    for images, looked_at in ((4 * MAX_EXAMPLES + 30, MAX_EXAMPLES), (400, 100), (60, MIN_EXAMPLES)):
        many = Samples(tuple(replace(samples[i % 12], id=f"{i}") for i in range(images)), CLASSES)
        looks = [
            collect_examples(net, many, result, batch_size=64, seed=seed, progress=quiet)
            for seed in (0, 0, 1)
        ]
        chosen = [[g.index for g in each.images] for each in looks]
        assert chosen[0] == chosen[1] != chosen[2]
        assert all(len(set(c)) == looked_at and c == sorted(c) for c in chosen)


def test_curves_end_where_the_metrics_do(samples: Samples):
    net = prepared(Gap())
    result = evaluate(net, samples, methods=["cam"], metrics=["max_box_acc_v2", "pxap"])
    curves = curves_of(result)
    for name, key in (("cam softmax", ("cam", "softmax", False)), ("cam sigmoid", ("cam", "sigmoid", True))):
        best = curves.boxes[name].max(1).values.tolist()
        assert best == pytest.approx([result.value(f"max_box_acc_{n}", branch=key[1]) for n in (30, 50, 70)])
        metric = result.metrics[*key, "max_box_acc_v2"]
        assert isinstance(metric, MaxBoxAccV2)
        at = metric.accuracy_at(0.35)
        assert curves.boxes[name][1, 350] == pytest.approx(float(at["max_box_acc_50"]))
        recall, precision = curves.pixels[name] / 100
        area = float((recall.diff(prepend=torch.zeros(1)) * precision).sum())
        pixels = result.metrics[*key, "pxap"]
        assert isinstance(pixels, PxAP)
        assert 100 * area == pytest.approx(float(pixels.compute()))


# --- the report of an evaluation ---


def evaluated(net: DualBranch, samples: Samples, **asked: Any) -> tuple[Any, Examples, Read]:
    result = evaluate(net, samples, methods=["grad-cam"], **asked)
    seen = collect_examples(net, samples, result, progress=quiet)
    return result, seen, checked(evaluation_page(result, curves_of(result), seen))


def values(read: Read) -> list[float]:
    return [float(a["data-value"] or "nan") for a in read.all("td") if "data-value" in a]


@pytest.mark.slow
def test_the_numbers_of_the_page_are_those_of_the_result_with_their_intervals(samples: Samples):
    result, _, read = evaluated(prepared(Gap()), samples, intervals=True)
    assert sorted(values(read)) == sorted(r["value"] for r in result.rows if r["method"] is not None)
    for row in result.rows:
        assert f"{row['value']:.2f}" in read.text
        if row["low"] is not None and row["method"] is not None:
            assert f"{row['low']:.1f} to {row['high']:.1f}" in read.text
    assert "paired" in read.text
    assert len(read.all("figure", "chart")) == 5  # three IoUs, pixels, reliability


@pytest.mark.slow
def test_a_difference_is_marked_only_where_its_interval_excludes_zero(samples: Samples):
    result, _, _ = evaluated(prepared(Gap()), samples, intervals=True)
    curves = curves_of(result)
    text = evaluation_page(result, curves, None)
    sure = [
        d
        for (key, name, _), d in curves.differences.items()
        if not d.low <= 0 <= d.high
        and not name.startswith("threshold_")
        and result.metrics[key].higher_is_better is not None
    ]
    marks = [a["class"] for a in Read(text).all("small") if a.get("class")]
    assert len(marks) == len(sure) > 0


def test_best_worst_and_disagreeing_images_are_shown_in_their_order(samples: Samples):
    _, seen, read = evaluated(prepared(Gap()), samples)
    ranked = sorted(seen.images, key=lambda g: -g.ious[-1])
    ids = [samples[g.index].id for g in ranked]
    apart = [samples[g.index].id for g in sorted(seen.images, key=lambda g: -(g.disagreement or 0))]
    titles = re.findall(r"x/\d+\.png", read.text)
    assert titles == [*ids[:6], *ids[::-1][:6], *apart[:6]]
    assert f"sigmoid: IoU {ranked[0].ious[-1]:.2f}" in read.text


def test_without_boxes_images_are_ordered_by_drop_and_the_page_says_so(samples: Samples):
    bare = Samples(tuple(replace(s, boxes=None, open_mask=None) for s in samples), CLASSES)
    result, seen, read = evaluated(prepared(Gap()), bare, metrics=["average_drop"])
    assert "Mean map: the mean value of" in evaluated(prepared(Gap()), bare)[2].text
    mean = [100 * sum(g.drops[i] for g in seen.images) / len(bare) for i in (0, 1)]
    assert mean == pytest.approx([result.value("average_drop", branch=b) for b in ("softmax", "sigmoid")])
    assert "has no boxes, so images are ordered by" in read.text and "Mean map:" not in read.text
    assert "has no boxes and no masks" in read.text and not read.all("path", "s2")


@pytest.mark.parametrize("class_from", ["label", "predicted"])
@pytest.mark.parametrize("method", ["cam", "grad-cam", "grad-cam++"])
def test_the_cards_numbers_average_to_the_tables(samples: Samples, method: str, class_from: Any):
    net = prepared(Signed())
    asked: Any = {
        "methods": [method],
        "clamps": [None, False],
        "zoom": 2,
        "class_from": class_from,
        "batch_size": 5,
    }
    bare = Samples(tuple(replace(s, boxes=None, open_mask=None) for s in samples), CLASSES)
    for data, metric in ((bare, "average_drop"), (samples, "gt_known_loc")):
        result = evaluate(net, data, metrics=[metric], **asked)
        seen = collect_examples(net, data, result, batch_size=5, progress=quiet)
        rows = [row for row in result.rows if row["metric"] == metric]
        assert len(rows) == len(seen.variants) == 3
        for i, row in enumerate(rows):
            each = [g.drops[i] if data is bare else g.ious[i] >= 0.5 for g in seen.images]
            assert 100 * sum(each) / len(data) == pytest.approx(row["value"], abs=1e-9), row


def test_a_batch_without_a_readable_picture_has_no_examples(samples: Samples):
    def unreadable() -> Image.Image:
        raise DataError("no picture")

    broken = Samples((replace(samples[0], open=unreadable), *samples[1:4]), CLASSES)
    net = prepared(Gap())
    result = evaluate(net, broken, methods=["grad-cam"], skip_unreadable=True, batch_size=1)
    seen = collect_examples(net, broken, result, batch_size=1, progress=quiet)
    assert [g.index for g in seen.images] == [1, 2, 3]


def test_without_labels_or_a_fitted_branch_the_page_says_so(samples: Samples):
    net = prepared(Gap())
    unlabelled = Samples(tuple(replace(s, label=None) for s in samples), CLASSES)
    read = evaluated(net, unlabelled, metrics=["mean_map"], class_from="predicted")[2]
    assert "no labels that the classifier knows" in read.text
    net.fitted = False
    _, seen, read = evaluated(net, samples, metrics=["gt_known_loc"], branches=["softmax"])
    assert "the sigmoid branch is not fitted, so there is no evidence" in read.text.lower()
    assert "Maps of one branch alone were evaluated." in read.text
    assert "evidence 0." not in read.text and not seen.images[0].evidence


def test_one_image_is_too_few_to_be_the_best(samples: Samples):
    read = evaluated(prepared(Gap()), samples[:1])[2]
    assert "Too few images." in read.text


def test_a_page_without_any_map_measured_says_so_and_still_tells_how_reliable_scores_are(samples: Samples):
    _, seen, read = evaluated(prepared(Gap()), samples, metrics=["top1_cls"])
    assert "No number that needs a map was asked for." in read.text and "top1 cls" in read.text
    right = [samples[g.index].label == g.predicted for g in seen.images]
    scores = torch.tensor([g.probability for g in seen.images])[:, None]
    error = calibration(scores, torch.tensor(right)[:, None]).error
    assert f"softmax probability, error {error:.3f}" in read.text
    assert "sigmoid evidence, error" in read.text


CALIBRATION = BranchCalibration(LogitScale(1.5, -0.2), {1.0: LogitScale(2.0, 0.1)})


def test_maps_in_probabilities_have_rows_columns_and_colours_of_their_own(samples: Samples):
    net = prepared(Gap())
    net.fitted, net.calibration = True, CALIBRATION
    metrics = ["box_acc_at_half", "false_alarm", "gt_known_loc", "average_drop"]
    result, seen, read = evaluated(net, samples, metrics=metrics, scales=["unit", "probability"])
    tables = read.text.partition("How each number is defined")[0]
    assert "grad-cam sigmoid probability" in tables and "sigmoid probability: IoU" in tables
    half = tables.partition("Maps cut at the value 0.5")[2].partition("Other measures of place")[0]
    for title in (
        "box accuracy",
        "false alarms: maps of an absent class",
        "area of false alarms, % of the image",
    ):
        assert title in half
    for name in ("box_acc_at_half", "false_alarm", "false_alarm_area"):
        assert f"{result.value(name, branch='sigmoid', scale='probability'):.2f}" in half
    assert "false alarm" not in tables.partition("Does the class depend on it?")[2].partition("Thresholds")[0]
    assert "range or probability" in tables
    evidence = seen.images[0].evidence or 0.0
    assert f"{evidence:.3f}, {'present' if evidence > 0.5 else 'not present'}" in tables
    net.calibration = BranchCalibration()
    assert "present" not in evaluated(net, samples, metrics=["gt_known_loc"])[2].text


# --- the commands ---


@pytest.mark.slow
def test_explain_writes_a_report_that_shows_every_picture_and_both_heads(monkeypatch, place, capsys):
    (place / "data" / "cat").rename(place / "data" / "<script>cat")
    branch = fitted(monkeypatch, place)
    words = ("explain", place / "data", "--model", spec(place), "--branch", branch, "--output", place / "out")
    assert run(monkeypatch, *words, "--report", "--captions") == 0
    assert "report.html" in capsys.readouterr().out
    text = (place / "out" / "report.html").read_text()
    read, rows = checked(text), json.loads((place / "out" / "explanation.json").read_text())
    cards = read.all("article", "card")
    assert len(cards) == len(rows) == 8 and len(read.all("img")) == 16
    assert [card["data-group"] for card in cards] == [row["top"][0]["class_name"] for row in rows]
    for card, row in zip(cards, rows, strict=True):
        assert float(card["data-key0"] or "nan") == row["probability"]
        assert float(card["data-key1"] or "nan") == row["evidence"]
        assert float(card["data-key2"] or "nan") == abs(row["probability"] - row["evidence"])
        assert 0 <= float(card["data-key3"] or "nan") <= 2
    assert "<script>cat" not in text
    with Image.open(next((place / "out").glob("*.map.png"))) as drawn:
        assert drawn.width == 224 and drawn.height > 160 + 60  # the caption and the colour bar


def test_the_report_of_an_unfitted_head_has_no_evidence_and_says_so(monkeypatch, place):
    words = ("explain", place / "data" / "cat", "--model", spec(place), "--branch", "centred")
    assert run(monkeypatch, *words, "--output", place / "out", "--report", "--scale", "raw") == 0
    read = checked((place / "out" / "report.html").read_text())
    assert "so there is no evidence" in read.text and "evid." not in read.text
    assert "logits" in read.text
    assert [a["value"] for a in read.all("option")].count("1") == 0  # nothing but probability to sort by


@pytest.mark.slow
def test_the_report_of_absolute_maps_names_scale_threshold_and_presence(monkeypatch, place, capsys):
    branch = fitted(monkeypatch, place)
    words = ("explain", place / "data", "--model", spec(place), "--branch", branch, "--report", "--captions")

    def page(scale: str) -> tuple[str, list[dict[str, Any]]]:
        capsys.readouterr()
        assert run(monkeypatch, *words, "--scale", scale, "--output", place / scale) == 0
        text = checked((place / scale / "report.html").read_text()).text
        return text, json.loads((place / scale / "explanation.json").read_text())

    text, rows = page("unit")
    assert rows[0]["present"] is None and "present" not in text + capsys.readouterr().out
    net = open_network(spec(place), None, str(branch)).net
    net.calibration = CALIBRATION
    net.save(branch)
    expected = {
        "unit": (
            "scale unit: each map from 0 to 1",
            "above 0.2 of the map's peak",
            "0 of this map's range 1",
        ),
        "logit": (
            "scale logit: the mean of a map",
            "above 0.2 of the map's peak",
            "against 0 logits for the",
        ),
        "probability": ("scale probability per cell", "above probability 0.5", "0 probability 0.5 1"),
    }
    for scale, parts in expected.items():
        text, rows = page(scale)
        assert all(part in text for part in parts), text
        assert ("disagreement of the heads' maps" in text) == (scale != "probability")
        for row in rows:
            assert row["present"] == (row["evidence"] > 0.5)
            words_shown = "present" if row["present"] else "not present"
            assert f"its evidence {row['evidence']:.3f}, {words_shown}" in text
        printed = capsys.readouterr().out
        assert "present" in printed and ("yes" if rows[0]["present"] else "no") in printed


def test_a_missing_extra_stops_the_commands_before_they_work(monkeypatch, place, capsys):
    monkeypatch.setattr(reports, "find_spec", lambda name: None)
    for words in (("explain", place / "data"), ("evaluate", "--data", "shapes:4")):
        assert run(monkeypatch, *words, "--report", "--output", place / "o") == 2
        assert "pip install 'sigcam[report]'" in capsys.readouterr().err
    assert not (place / "o").exists()


NINE = """
import torch
from torch import nn

def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))
"""


@pytest.mark.slow
def test_evaluate_writes_a_report_with_the_numbers_of_results_json(monkeypatch, tmp_path, capsys):
    (tmp_path / "net.py").write_text(NINE)
    words = ("evaluate", "--data", "shapes:10", "--model", f"file:{tmp_path / 'net.py'}:tiny", "--report")
    assert run(monkeypatch, *words, "--output", tmp_path / "e") == 0
    assert "report.html" in capsys.readouterr().out
    read = checked((tmp_path / "e" / "report.html").read_text())
    rows = json.loads((tmp_path / "e" / "results.json").read_text())["rows"]
    assert sorted(values(read)) == sorted(row["value"] for row in rows if row["method"] is not None)
    assert "grad-cam centred" in read.text and "No intervals were asked for." in read.text


def test_the_report_of_a_folder_of_maps_has_tables_and_curves_and_no_pictures(monkeypatch, tmp_path):
    from sigcam.data.registry import open_dataset

    for number, each in enumerate(open_dataset("shapes:4", split="test")):
        path = tmp_path / "maps" / f"{each.id}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.default_rng(number).random((56, 56)).astype(np.float32))
    words = ("evaluate", "--data", "shapes:4", "--maps", tmp_path / "maps", "--report", "--intervals")
    assert run(monkeypatch, *words, "--output", tmp_path / "e") == 0
    read = checked((tmp_path / "e" / "report.html").read_text())
    rows = json.loads((tmp_path / "e" / "results.json").read_text())["rows"]
    assert sorted(values(read)) == sorted(row["value"] for row in rows)
    assert len(read.all("figure", "chart")) == 4 and not read.all("img")


def test_a_page_of_unlabelled_boxless_samples_is_whole(samples: Samples):
    bare = Samples(tuple(sample(i, label=None, boxes=None, open_mask=None) for i in range(3)), CLASSES)
    read = evaluated(prepared(Gap()), bare, metrics=["average_drop", "mean_map"])[2]
    assert len(read.all("p", "empty")) == 2  # no curves, no reliability
