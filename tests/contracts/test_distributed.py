"""Several processes, started by torchrun (gloo): the branch and the counts of one, each image once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.folders import tree
from support.torchrun import MLP, branch, model, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "pictures"
    tree(root, 203)  # four chunks, the last one short: no number of processes divides them
    (root / "b" / "001.png").write_bytes(b"no picture")
    return root


@pytest.mark.slow
def test_one_two_and_three_processes_fit_one_branch(data: Path, tmp_path: Path) -> None:
    made, facts = [], []
    for processes in (1, 2, 3):
        output = tmp_path / f"{processes}"
        words = ("--data", data, "--model", model(tmp_path), "--cache", tmp_path / f"cache{processes}")
        done = run(processes, "fit", *words, "--views", 2, "--threads", 1, "--output", output, "--json")
        facts.append(json.loads(done.stdout[done.stdout.index("{") :]))
        made.append(branch(output))
        assert "b/001.png" in (output / "manifest.json").read_text() or facts[-1]["skipped"] == 1
    for other in made[1:]:
        for name, tensor in made[0].items():
            assert torch.allclose(other[name], tensor, atol=1e-5), name
    for fact in facts:
        assert (fact["images"], fact["skipped"], fact["threads"]) == (202, 1, 1)
        for key in ("l2", "held-out images", "loss"):
            assert fact[key] == pytest.approx(facts[0][key], rel=1e-9), key
        for key in ("held-out mean average precision", "calibration error"):  # of roughly solved weights
            assert fact[key] == pytest.approx(facts[0][key], rel=1e-5), key
    assert [fact["processes"] for fact in facts] == [1, 2, 3]


def numbers(value: Any, name: str = "") -> dict[str, float]:
    """All numbers in a JSON value, by their place in it; without times."""
    if isinstance(value, dict):
        inner = [(f"{name}/{key}", held) for key, held in value.items() if key != "seconds"]
    elif isinstance(value, list):
        inner = [(f"{name}/{i}", held) for i, held in enumerate(value)]
    else:
        return {name: value} if isinstance(value, int | float) else {}
    return {place: number for key, held in inner for place, number in numbers(held, key).items()}


@pytest.mark.slow
def test_one_two_and_three_processes_learn_the_same_from_backgrounds(data: Path, tmp_path: Path) -> None:
    made, told = [], []
    for processes in (1, 2, 3):
        output = tmp_path / f"{processes}"
        words = ("--data", data, "--model", model(tmp_path), "--cache", tmp_path / f"cache{processes}")
        settings = ("--background", 1, "--zooms", "1,2", "--threads", 1)
        run(processes, "fit", *words, *settings, "--output", output)
        made.append(branch(output))
        told.append(json.loads((output / "fit.json").read_text()))
    assert told[0]["images"] == 202 and told[0]["evidence_quality"]["images"] > 30
    assert told[0]["calibration"]["maps"].keys() == {"1.0", "2.0"}
    for other, facts in zip(made[1:], told[1:], strict=True):
        for name, tensor in made[0].items():
            assert torch.allclose(other[name], tensor, atol=1e-5), name
        found, wanted = numbers(facts), numbers(told[0])
        assert found.keys() == wanted.keys()
        for place, number in wanted.items():
            assert found[place] == pytest.approx(number, rel=1e-5, abs=1e-5), place


@pytest.mark.slow
def test_processes_share_one_cache_and_each_image_is_seen_once(data: Path, tmp_path: Path) -> None:
    words = ("--data", data, "--model", model(tmp_path), "--l2", 0.1, "--cache", tmp_path / "cache")
    run(2, "fit", *words, "--output", tmp_path / "two")
    done = run(1, "fit", *words, "--output", tmp_path / "one")
    assert "features: 203 of 203" in done.stderr  # all there, at once
    assert done.stderr.count("features:") == 1
    for name, tensor in branch(tmp_path / "one").items():
        assert torch.allclose(branch(tmp_path / "two")[name], tensor, atol=1e-5)


@pytest.mark.slow
def test_a_head_that_is_trained_by_steps_is_the_same_too(data: Path, tmp_path: Path) -> None:
    words = ("--data", data, "--model", model(tmp_path, MLP), "--epochs", 3, "--threads", 1, "--no-cache")
    for processes in (1, 2):
        run(processes, "fit", *words, "--output", tmp_path / f"{processes}")
    for name, tensor in branch(tmp_path / "1").items():
        assert torch.allclose(branch(tmp_path / "2")[name], tensor, atol=1e-5), name


@pytest.mark.slow
def test_counts_are_those_of_one_process(tmp_path: Path) -> None:
    found: list[Any] = []
    for processes in (1, 2, 3):
        output = tmp_path / f"{processes}"
        words = (
            "--data",
            "shapes:50",
            "--model",
            model(tmp_path, classes=8),
            "--batch-size",
            8,
            "--threads",
            1,
        )
        run(processes, "evaluate", *words, "--method", "grad-cam", "--intervals", "--output", output)
        found.append(json.loads((output / "results.json").read_text())["rows"])
    for rows in found[1:]:
        assert len(rows) == len(found[0])
        for row, wanted in zip(rows, found[0], strict=True):
            assert row["images"] == wanted["images"] == 50
            for key in ("value", "low", "high", "threshold"):
                assert row[key] == (None if wanted[key] is None else pytest.approx(wanted[key], rel=1e-12)), (
                    row
                )


@pytest.mark.slow
def test_maps_of_others_are_counted_once(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    from sigcam.data.readers.shapes import shapes

    for sample in shapes(20, split="test"):
        path = tmp_path / "maps" / f"{sample.id}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, random.random((56, 56)).astype(np.float32))
    found = []
    for processes in (1, 2):
        output = tmp_path / f"{processes}"
        run(processes, "evaluate", "--data", "shapes:20", "--maps", tmp_path / "maps", "--output", output)
        found.append(json.loads((output / "results.json").read_text())["rows"])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_with_its_reason_and_the_next_run_goes_on(
    data: Path, tmp_path: Path
) -> None:
    words = ("--data", data, "--model", model(tmp_path), "--l2", 0.1, "--cache", tmp_path / "cache")
    source = (tmp_path / "model.py").read_text()
    dies = """
    import os
    if os.environ.get("RANK") == "1":
        seen = []
        def stop(module, args):
            seen.append(len(args[0]))
            if sum(seen) > 40:
                raise RuntimeError("this rank is out of order")
        made.register_forward_pre_hook(stop)
    return made
"""
    (tmp_path / "model.py").write_text(source.replace("return nn.Sequential", "made = nn.Sequential") + dies)
    done = run(2, "fit", *words, "--output", tmp_path / "dead", check=False)
    assert done.returncode != 0
    assert "this rank is out of order" in done.stderr
    assert not (tmp_path / "dead" / "branch.safetensors").exists()
    (tmp_path / "model.py").write_text(source)
    run(2, "fit", *words, "--output", tmp_path / "alive")
    run(1, "fit", *words, "--no-cache", "--output", tmp_path / "one")
    for name, tensor in branch(tmp_path / "one").items():
        assert torch.allclose(branch(tmp_path / "alive")[name], tensor, atol=1e-5)


@pytest.mark.slow
def test_the_papers_recipes_say_that_they_run_alone(data: Path, tmp_path: Path) -> None:
    words = ("--data", data, "--model", model(tmp_path), "--recipe", "paper", "--output", tmp_path / "x")
    done = run(2, "fit", *words, check=False)
    assert done.returncode != 0
    assert "recipe paper runs in one process" in done.stderr
