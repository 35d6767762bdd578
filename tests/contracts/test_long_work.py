"""Long work that cannot fit into memory, or images that cannot be run, are refused before it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from sigcam import metrics as M
from sigcam.core import memory
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from sigcam.data.sample import Samples
from sigcam.evaluation.evaluator import evaluate
from sigcam.methods.explainer import explain
from sigcam.metrics.bootstrap import interval
from sigcam.network import pass_memory, zoom
from sigcam.training.branch import fit
from support.commands import run
from support.samples import prepared
from support.tiny import Gap, attached, images

Little = Callable[[int], None]


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> Little:
    """Sets the free memory of this machine."""

    def set_free(count: int) -> None:
        for module in (memory, pass_memory, zoom):
            monkeypatch.setattr(module, "free_memory", lambda device="cpu": count)
        monkeypatch.setattr(memory, "SMALL", 0)

    return set_free


def test_intervals_whose_rows_do_not_fit_are_refused(samples: Samples, little: Little) -> None:
    net, chosen = prepared(Gap()), ["max_box_acc_v2", "pxap"]
    row = (3 * 1001 + 7) // 8 + 16 + 2 * 1001 * 4 + 16  # bits, counts, and a key each
    little(2 * row * len(samples) - 1)
    evaluate(net, samples, metrics=chosen)
    with pytest.raises(
        DataError, match=r"intervals over \d+ images needs about \d+ kB of memory, \d+ kB are"
    ):
        evaluate(net, samples, metrics=chosen, intervals=True)
    little(2 * row * len(samples) + 10**6)
    evaluate(net, samples, metrics=chosen, intervals=True)


def test_kept_rows_are_as_many_bytes_as_are_counted() -> None:
    for metric in (M.MaxBoxAccV2(intervals=True), M.PxAP(intervals=True), M.AverageDrop(intervals=True)):
        rows, keys = metric.rows[0], metric.keys[0]
        assert metric.row_bytes == rows.shape[1] * rows.element_size() + keys.shape[1] * keys.element_size()


def test_more_resamples_than_fit_are_refused(little: Little) -> None:
    metric = M.AverageDrop(intervals=True)
    metric.update(torch.rand(10), torch.rand(10))
    little(2 * 10 * 1000)
    interval(metric, resamples=1000)
    with pytest.raises(
        DataError, match=r"drawing 1001 resamples of 10 images needs .*: use fewer resamples\."
    ):
        interval(metric, resamples=1001)


def test_features_that_do_not_fit_are_refused(little: Little) -> None:
    data = TensorDataset(images(8), torch.arange(8) % 4)
    little(2 * 8 * 6 - 1)
    with pytest.raises(
        DataError, match=r"keeping features of 8 images needs about 96 bytes .*cache them on disk"
    ):
        fit(attached(Gap()), data, FitConfig(l2=0.1))


def test_features_of_samples_without_a_cache_are_refused_too(samples: Samples, little: Little) -> None:
    little(11)
    with pytest.raises(DataError, match=rf"keeping features of {2 * len(samples)} images needs"):
        fit(prepared(Gap()), samples, FitConfig(l2=0.1, views=2))


def test_evaluate_refuses_a_zoom_that_does_not_fit(samples: Samples, little: Little) -> None:
    little(10**6)
    with pytest.raises(
        DataError, match=r"a batch of \d+ images at zoom=50 needs about \d+ MB .*zoom=[\d.]+ fits"
    ):
        evaluate(prepared(Gap()), samples, zoom=50)


def test_evaluate_names_what_is_wrong_with_the_images_of_a_transform(samples: Samples) -> None:
    net = prepared(Gap())
    with pytest.raises(DataError, match=r"have 1 channel\(s\), and this Gap takes 3"):
        evaluate(net, samples, transform=lambda picture: torch.zeros(1, 16, 16))


def test_an_overlay_that_does_not_fit_is_refused(little: Little) -> None:
    ex = explain(attached(Gap()), images(1), size=(300, 400))
    little(150 * 300 * 400 - 1)
    with pytest.raises(
        DataError, match=r"an overlay of 400 x 300 pixels needs about 18 MB .*: draw a smaller map"
    ):
        ex.overlay()
    little(150 * 300 * 400)
    assert ex.overlay()[0].size == (400, 300)


@pytest.mark.parametrize("threshold", ["nan", "2", "-0.1"])
def test_the_command_refuses_a_threshold_outside_zero_to_one(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str], threshold: str
) -> None:
    words = ("explain", place / "data", "--branch", "centred", f"--threshold={threshold}")
    assert run(monkeypatch, *words, "--output", place / "maps") == 2
    line = capsys.readouterr().err
    assert "Invalid value for '--threshold'" in line and line.count("\n") == 1
    assert not (place / "maps").exists()
