"""A metric is added in one place, from outside: evaluate, the command and the reports then know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

import sigcam
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.evaluation import metric_table
from sigcam.evaluation.batch import BatchEvaluator
from sigcam.evaluation.evaluator import evaluate
from sigcam.evaluation.registry import METRICS, BatchRecord, MetricSpec
from sigcam.evaluation.result import curves_of
from sigcam.metrics.base import ImageMetric
from sigcam.reports.evaluation_report import evaluation_page
from support.commands import run
from support.samples import COUNT, prepared
from support.tiny import Gap


class Peak(ImageMetric):
    """Mean column of the highest pixel, as a share of the width. Lower is better."""

    higher_is_better = False
    value_dtype = torch.float64

    def update(self, maps: Tensor, ids: Any = None) -> None:
        self.add((maps.flatten(1).argmax(1) % maps.shape[2]).double() / maps.shape[2], ids)


class Plain(Metric):
    """The largest mean of a map, by a metric that knows nothing of sigcam."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, maps: Tensor) -> None:
        self.largest = torch.maximum(self.largest, maps.mean((1, 2)).max())

    def compute(self) -> dict[str, Tensor]:
        return {"plain_share": self.largest, "plain_percent": 100 * self.largest}


def maps_of(batch: BatchRecord, _: str | None) -> tuple[Any, ...]:
    return (batch.maps,)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = MetricSpec(Peak, maps_of, title="Peak column")
    plain = MetricSpec(Plain, maps_of, measured="on request", numbers=("plain_share", "plain_percent"))
    monkeypatch.setitem(METRICS, "mine", mine)
    monkeypatch.setitem(METRICS, "plain", plain)


def test_a_new_metric_is_listed_and_knows_its_title_and_direction() -> None:
    assert "mine" in sigcam.list_metrics() and sigcam.list_metrics() == list(METRICS)
    assert METRICS["mine"].higher_is_better is False and METRICS["mine"].unit == "%"
    assert METRICS["plain"].higher_is_better is None
    assert METRICS["gt_known_loc_first"].higher_is_better is True  # of the class behind a partial


def test_evaluate_and_its_report_measure_a_new_metric(samples: Samples) -> None:
    net = prepared(Gap())
    result = evaluate(net, samples, metrics=["mine", "plain"], intervals=True)
    images = torch.stack([net.transform(item.open()) for item in samples])  # type: ignore[misc]
    labels = [item.label or 0 for item in samples]
    maps = sigcam.explain(net, images, "cam", branch="softmax", classes=labels).maps
    expected = Peak()
    expected.update(maps)
    assert result.value("mine", branch="softmax") == pytest.approx(float(expected.compute()))  # type: ignore[arg-type]
    assert result.value("plain_percent", branch="softmax") == pytest.approx(
        100 * float(maps.mean((1, 2)).max())
    )
    row = next(row for row in result.rows if row["metric"] == "mine")
    assert row["low"] <= row["value"] <= row["high"] and row["images"] == COUNT
    assert "Lower is better" in result.about["definitions"]["mine"]
    assert "Peak column" in result.table() and "plain share" in result.table()
    page = evaluation_page(result, curves_of(result), None)
    assert "Peak column" in page and f"{row['value']:.2f}" in page and "plain percent" in page


def test_a_new_metric_resumes_even_if_all_images_were_counted(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: str, done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    monkeypatch.setattr(metric_table, "EVERY", 0.0)
    named: Any = {"metrics": ["mine", "plain"], "intervals": True, "unfinished": tmp_path / "unfinished"}
    with pytest.raises(KeyboardInterrupt):
        evaluate(prepared(Gap()), samples, progress=stop, **named)
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(BatchEvaluator, "records", None)  # there is nothing left to draw
        resumed = evaluate(prepared(Gap()), samples, **named)
    torch.manual_seed(0)
    assert resumed.rows == evaluate(prepared(Gap()), samples, **named).rows


def test_a_new_metric_is_measured_by_default_unless_it_is_on_request(samples: Samples) -> None:
    names = {row["metric"] for row in evaluate(prepared(Gap()), samples[:2]).rows}
    assert "mine" in names and "plain_share" not in names


def test_the_command_measures_a_new_metric(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    for sample in open_dataset("shapes:4", split="test"):
        path = tmp_path / "maps" / f"{sample.id}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.default_rng(0).random((16, 16)).astype(np.float32))
    words = ("evaluate", "--data", "shapes:4", "--maps", tmp_path / "maps", "--metrics", "mine", "--report")
    assert run(monkeypatch, *words, "--output", tmp_path / "out") == 0
    assert "Peak column" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {row["metric"] for row in rows} == {"mine", "blank_maps"}
    assert "Peak column" in (tmp_path / "out" / "report.html").read_text()


def test_metrics_are_read_by_key_and_by_the_documented_tuple(samples: Samples) -> None:
    result = evaluate(
        prepared(Gap()),
        samples,
        branches=["sigmoid"],
        metrics=["pxap", "average_drop"],
        scorers=["softmax", "branch"],
    )
    cell = ("cam", "sigmoid", True)
    labels = ["pxap", "average_drop", "average_drop:branch"]
    assert [key.label for key in result.metrics] == labels and len(result.metrics) == 3
    for key, label in zip(result.metrics, labels, strict=True):
        assert result.metrics[key] is result.metrics[*cell, label]
    assert ("cam", "softmax", False, "pxap") not in result.metrics
