"""A table is added in one place, TABLES, and then works everywhere; finished rows are reused only if nothing
that they depend on has changed."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sigcam.bench import measure
from sigcam.bench.networks import network
from sigcam.bench.paper import BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.registry import TABLES, TableSpec, targets
from sigcam.bench.runner import _read_result, run_bench
from sigcam.cli.main import main
from sigcam.core import checkpoint
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from sigcam.core.types import Progress
from support.bench import QUIET, write_model, write_wsol_dataset

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    write_wsol_dataset(tmp_path / "data")
    model = write_model(tmp_path / "model.py")
    return Plan(tmp_path / "data", tmp_path / "out", backbone=model, zoom=1.0, batch_size=8)


def rows(plan: Plan, progress: Progress) -> list[BenchRow]:
    net = network(plan, "cub", FitConfig(seed=plan.seed), progress)
    settings: Any = {
        "methods": ["hires-cam"],
        "branches": ["softmax", "sigmoid"],
        "metrics": ["pointing_game"],
    }
    samples = plan.samples("cub", "test", 8)
    return measure.evaluate_rows(plan, "mine", net, "cub", samples, progress, **settings)


SPEC = TableSpec(
    "My own table",
    "the pointing game of HiResCAM",
    rows,
    ("cub",),
    ("pointing_game",),
    note="A note of mine.",
    in_all=False,
)


@pytest.mark.slow
def test_a_table_registered_from_outside_works_everywhere(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TABLES, "mine", SPEC)

    def sigcam(*words: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["sigcam", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    out = plan.output
    printed = sigcam(
        "bench", "mine", "--data", plan.data, "--model", plan.backbone, "--output", out, "--quick"
    )
    content = json.loads((out / "mine.json").read_text())
    assert [row["branch"] for row in content["rows"]] == ["softmax", "sigmoid"]
    assert all(0 <= row["pointing_game"] <= 100 and row["images"] == 8 for row in content["rows"])
    assert content["foot"].endswith("A note of mine.")
    (first, *_) = csv.DictReader((out / "mine.csv").read_text().splitlines())
    assert float(first["pointing_game"]) == content["rows"][0]["pointing_game"]
    text = (out / "mine.md").read_text()
    assert text in printed and text.startswith("# My own table\n") and "pointing game" in text
    page = (out / "index.html").read_text()
    assert "My own table" in page and "A note of mine." in page
    assert json.loads((out / "manifest.json").read_text())["numbers"] == {"mine": content["rows"]}
    assert "mine" in sigcam("bench", "--help")
    assert targets()["mine"] == "the pointing game of HiResCAM"
    script = importlib.util.spec_from_file_location("document", ROOT / "scripts/document_lists.py")
    assert script and script.loader
    document: Any = importlib.util.module_from_spec(script)
    script.loader.exec_module(document)
    page = document.on_page_markdown("<!-- list: tables -->\n<!-- end -->")
    assert "| `mine` | the pointing game of HiResCAM |" in page


@pytest.mark.slow
def test_rows_made_by_other_code_are_not_served(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated, evaluate = list[int](), measure.evaluate
    monkeypatch.setattr(measure, "evaluate", lambda *a, **k: evaluated.append(1) or evaluate(*a, **k))
    before = rows(plan, QUIET)
    assert rows(plan, QUIET) == before and len(evaluated) == 1
    (home,) = (plan.output / "models").iterdir()
    monkeypatch.setattr(checkpoint, "code_fingerprint", lambda: "other code of the same version")
    assert rows(plan, QUIET) == before and len(evaluated) == 2
    assert len(list((plan.output / "models").iterdir())) == 2 and home.is_dir()  # the classifier is new too


def test_every_table_is_complete_and_the_list_needs_no_torch() -> None:
    for name, spec in TABLES.items():
        assert spec.title and spec.summary and spec.note and spec.columns and spec.datasets, name
    code = (
        "import sys; from sigcam.bench.registry import targets_help as t; print(t(), 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith(
        "table1, table2, nwc, pos-weight, sources, background, overhead, figures, or all of these; "
    )
    assert printed.endswith("also lite2, stages, trainers, systems, vgg16, resnet50, inception_v3. False\n")


def test_a_table_needs_one_of_its_data_sets(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "mine", replace(SPEC, datasets=("pets",)))
    with pytest.raises(DataError, match="holds none of pets"):
        run_bench("mine", plan)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "[]",
        '{"table": "../table1"}',
        '{"table": "table2"}',
        '{"table": ["table2"]}',
        '{"table": "table2", "command": "x", "date": "y", "foot": "z", "rows": [{"zoom": "a"}]}',
        '{"table": "table2", "command": "x", "date": "y", "foot": "z", "rows": 3}',
    ],
)
def test_a_result_that_cannot_be_drawn_is_left_off_the_page(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table2.json"
    path.write_text(content)
    assert _read_result(path) is None and "table2.json is damaged" in caplog.text
