"""The numbers that the documentation states are those that were measured, and the tables say how."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = {p.stem: json.loads(p.read_text()) for p in sorted((ROOT / "benchmarks/results").glob("*.json"))}
TABLES = [name for name, held in RESULTS.items() if "table" in held and "rows" in held]


def script(name: str) -> Any:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITE, SPEED = script("write_results"), script("write_speed")


def test_tables_of_the_pages_are_the_measured_ones() -> None:
    used = list[str]()
    for path in WRITE.PAGES:
        page = path.read_text()
        assert WRITE.filled(page) == page, f"run scripts/write_results.py: {path.name} is out of date"
        used += re.findall(r"<!-- table: (\S+) -->", page)
    assert set(used) == set(WRITE.TABLES)


def test_the_tables_of_speed_are_the_measured_ones() -> None:
    used = list[str]()
    for path in SPEED.PAGES:
        page = path.read_text()
        assert SPEED.filled(page) == page, f"run scripts/write_speed.py: {path.name} is out of date"
        used += re.findall(r"<!-- speed: (\S+) -->", page)
    assert set(used) == set(SPEED.TABLES)


def test_a_number_that_changed_is_written() -> None:
    page = (ROOT / "README.md").read_text()
    changed = re.sub(r"\| \d+\.\d /", "| 99.9 /", page, count=1)
    assert changed != page
    assert WRITE.filled(changed) == page


def test_differences_in_the_text_are_measured_ones() -> None:
    measured = {
        WRITE.between(found)
        for name in TABLES
        for row in RESULTS[name]["rows"]
        for found in (
            *row["delta"].values(),
            *row["beside"].values(),
            *(each["difference"] for each in row.get("versus", {}).values()),
        )
    }
    text = " ".join((ROOT / "docs/results.md").read_text().split())
    stated = re.findall(r"[+-]\d+\.\d \([+-]\d+\.\d to [+-]\d+\.\d\)", text)
    assert len(stated) > 30
    assert set(stated) <= measured


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_how_it_was_made_and_how_sure_it_is(name: str) -> None:
    held = RESULTS[name]
    assert held["command"].startswith("sigcam bench ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", held["date"])
    assert {"torch", "torchvision", "timm", "numpy"} <= set(held["versions"])
    assert {"seed", "threads", "foot"} <= set(held)
    for row in held["rows"]:
        assert {"dataset", "branch", "clamp", "images", "backbone"} <= set(row)
        numbers = {"average_drop", "increase_in_confidence", "max_box_acc_v2", "pxap"} & set(row)
        assert numbers
        for number in numbers:
            low, high = row["intervals"][number]
            assert low <= row[number] <= high
            published = (row["branch"], row["clamp"]) in (("softmax", False), ("any head", False))
            assert (number in row["delta"]) != published


def test_tables_name_no_place_of_one_machine() -> None:
    for name, held in RESULTS.items():
        assert not re.search(r"/(tmp|home|work|root|Users)/", json.dumps(held)), name
