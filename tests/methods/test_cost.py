"""Slow methods say what they take, report passes, and lose one image at most when they are stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sigcam.methods.cost import cost_note, is_long
from sigcam.methods.explainer import explain
from sigcam.methods.folder import ExplainConfig, explain_samples
from sigcam.methods.registry import MapConfig
from sigcam.network.pass_memory import LiveBytes
from support.commands import place, run, spec
from support.samples import prepared, samples
from support.tiny import Gap

__all__ = ["place", "samples"]  # fixtures


def test_a_long_method_tells_its_passes() -> None:
    net = prepared(Gap(4))
    assert cost_note(net, MapConfig("rise")).startswith("rise: 4000 passes an image, about ")
    assert "extremal-perturbation: 40 passes an image, and class, about" in cost_note(
        net, MapConfig("extremal-perturbation", samples=10)
    )
    assert [is_long(MapConfig(name)) for name in ("grad-cam", "smoothgrad", "rise")] == [False, False, True]
    assert [is_long(MapConfig("rise", samples=count)) for count in (50, 64)] == [False, True]


def test_the_memory_that_is_told_holds_the_method_and_does_not_grow_with_its_samples() -> None:
    net = prepared(Gap(4))
    images = torch.rand(1, *net.example.shape[1:])

    def told(method: str, samples: int) -> str:
        note = cost_note(net, MapConfig(method, "softmax", samples=samples))
        return note.partition(", with about ")[2]

    def used(method: str, samples: int) -> int:
        with LiveBytes() as live:
            explain(net, images, method, branch="softmax", classes=1, samples=samples)
        return live.peak

    for method in ("rise", "extremal-perturbation", "smoothgrad"):
        assert told(method, 512) == told(method, 64)
    number, unit, *words = told("rise", 64).split()
    assert words == ["of", "memory", "besides", "the", "weights"]
    assert used("rise", 64) < float(number) * {"kB": 1e3, "MB": 1e6}[unit]
    assert used("extremal-perturbation", 24) <= 1.01 * used("extremal-perturbation", 12)
    maps = net.example.shape[-2:].numel() * 8
    assert used("rise", 256) - used("rise", 128) < maps + 128 * 7 * 7 * 8  # the grids of the masks


def test_passes_are_reported_and_a_stopped_run_loses_one_image(samples, tmp_path: Path) -> None:
    net, config = prepared(Gap(4)), ExplainConfig("rise", "softmax", samples=200).checked()
    seen = list[tuple[str, int, int]]()

    def stop(stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))
        if done > 450:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explain_samples(net, samples, tmp_path, config, progress=stop)
    assert len(list(tmp_path.glob("*.npy"))) == 2  # of the third, nothing
    assert {stage for stage, _, _ in seen} == {"passes"}
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts) and seen[-1][2] == 200 * len(samples)
    seen.clear()
    explain_samples(net, samples, tmp_path, config, progress=lambda *report: seen.append(report))
    assert seen[0][1] > 400 and seen[-1][1:] == (200 * len(samples), 200 * len(samples))
    assert len(list(tmp_path.glob("*.npy"))) == len(samples)


def test_the_command_says_what_an_image_takes(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = place / "data" / "cat" / "0.png"
    words = ("--model", spec(place), "--branch", "softmax", "--output", place / "maps")
    assert run(monkeypatch, "explain", picture, "--method", "rise", "--samples", "200", *words) == 0
    shown = capsys.readouterr().err
    assert "rise: 200 passes an image, about " in shown and "passes: 200 of 200" in shown
    assert run(monkeypatch, "explain", picture, "--method", "grad-cam", "--samples", "200", *words) == 2
    assert "samples is a number of masks" in capsys.readouterr().err
    words = ("--data", place / "data", "--model", spec(place), "--branch", "softmax", "--map-samples", "2")
    numbers = ("--method", "smoothgrad,rise", "--output", place / "numbers")
    assert run(monkeypatch, "evaluate", *words, *numbers) == 0
