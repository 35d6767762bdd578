"""What is printed shows every name as it is; nothing in a name is markup or moves the cursor."""

from __future__ import annotations

import json
import time

import pytest
import rich.progress
from PIL import Image

from sigcam.cli import console
from support.commands import NET, run, spec

NAMES = [
    "IMG [edited].jpg",
    "[/bold]x.jpg",
    "[red]no.jpg",
    "a\nb\x1b[31m.jpg",
    ":smile:.jpg",
    "caf\udce9.jpg",
]
CLASSES = ("[/bold]x", "[link=http://a]\x07b")
NAMED = f"""
def named():
    model = tiny()
    model.classes = {CLASSES!r}
    return model
"""


@pytest.fixture
def odd(place):
    (place / "net.py").write_text(NET + NAMED)
    for name in NAMES:  # one is in a folder called "["
        (place / "odd" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), "red").save(place / "odd" / name)
    return place


def test_brackets_and_control_characters_in_names_are_printed_as_they_are(monkeypatch, odd, capsys):
    words = (
        "explain",
        odd / "odd",
        "--model",
        spec(odd, "named"),
        "--branch",
        "centred",
        "--output",
        odd / "o",
    )
    assert run(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    for name in (r"IMG [edited].jpg", "[/bold]x.jpg", "[red]no.jpg", r"a\nb\x1b[31m.jpg", ":smile:.jpg"):
        assert name in printed
    assert r"caf\udce9.jpg" in printed and "\x1b" not in printed and "\x07" not in printed
    assert "[/bold]x" in printed or r"[link=http://a]\x07b" in printed
    (odd / "odd" / "IMG [edited].jpg").write_bytes(b"damaged\n")
    one = odd / "odd" / "[red]no.jpg"
    assert run(monkeypatch, words[0], one, odd / "odd" / "IMG [edited].jpg", *words[2:], "--report") == 0
    said = capsys.readouterr()
    assert "left out IMG [edited].jpg" in said.err and "likely classes of [red]no.jpg" in said.out
    rows = json.loads((odd / "o" / "explanation.json").read_text())
    assert [row["image"] for row in rows] == ["[red]no.jpg"]


@pytest.mark.slow
def test_class_folders_may_bear_any_name(monkeypatch, odd, capsys):
    for old, new in (("cat", "[red]x"), ("dog", "d\x1b[31m\nog")):
        (odd / "data" / old).rename(odd / "data" / new)
    data, model = ("--data", odd / "data"), ("--model", spec(odd))
    assert run(monkeypatch, "inspect", *data, "--output", odd / "sheet") == 0
    assert run(monkeypatch, "fit", *data, *model, "--output", odd / "f[x]", "--l2", 0.1) == 0
    assert "f[x]" in capsys.readouterr().out
    branch = ("--branch", odd / "f[x]" / "branch.safetensors")
    assert run(monkeypatch, "explain", odd / "odd", *model, *branch, "--output", odd / "o") == 0
    assert "\x1b" not in capsys.readouterr().out
    assert run(monkeypatch, "explain", odd / "nowhere\x1b[31m[/b]", *model, *branch) == 2
    assert r"nowhere\x1b[31m[/b] does not exist" in capsys.readouterr().err


def test_json_is_alone_on_stdout_whatever_the_names_and_warnings(monkeypatch, odd, capsys):
    (odd / "odd" / "damaged.png").write_bytes(b"")
    words = ("explain", odd / "odd", "--model", spec(odd, "named"), "--branch", "softmax", "--json")
    assert run(monkeypatch, *words, "--output", odd / "o") == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(row["image"] for row in rows) == sorted(NAMES)
    assert {row["class_name"] for row in rows} <= set(CLASSES)


def test_bars_take_stage_names_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with console.progress_bar() as progress:
        progress("[/bold]x\x07", 1, 2)
    assert r"[/bold]x\x07" in capsys.readouterr().err


def test_text_that_a_terminal_can_show_is_left_alone():
    for text in (
        "Größe [b]",
        "\u732b\u3000\U0001f426",
        "\u0645\u06cc\u200c\u062e",
        "\U0001f469\u200d\U0001f52c",
    ):
        assert console.printable(text) == text
    assert console.printable("a\u202eb\r\t\x9b\u2028") == r"a\u202eb\r\t\x9b\u2028"


def clocked(monkeypatch, capsys, steps: list[tuple[float, str, int, int]]) -> list[str]:
    """The lines that are printed for reports at some seconds after the work began."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with console.progress_bar() as progress:
        for now[0], *step in steps:
            progress(*step)
    return capsys.readouterr().err.splitlines()


def test_the_seconds_of_a_stage_include_its_first_batch(monkeypatch, capsys):
    steps = [(7, "features", 64, 128), (9, "features", 128, 128), (12, "solver", 1, 2), (13, "solver", 2, 2)]
    assert clocked(monkeypatch, capsys, steps) == ["features: 128 of 128, 9 s", "solver: 2 of 2, 4 s"]


def test_a_stage_that_says_when_it_begins_does_not_count_what_was_before(monkeypatch, capsys):
    steps = [(5, "maps", 0, 4), (8, "maps", 2, 4), (9, "maps", 4, 4), (20, "maps", 0, 4), (23, "maps", 4, 4)]
    assert clocked(monkeypatch, capsys, steps) == ["maps: 4 of 4, 4 s", "maps: 4 of 4, 3 s"]


def test_the_end_of_a_stage_is_said_once_and_what_was_kept_does_not_speed_up_the_rest(monkeypatch, capsys):
    steps = [(1, "maps", 90, 100), (12, "maps", 91, 100), (13, "maps", 100, 100), (14, "maps", 100, 100)]
    assert clocked(monkeypatch, capsys, steps) == [
        "maps: 91 of 100, about 99 s left",
        "maps: 100 of 100, 13 s",
    ]


def test_a_bar_counts_from_the_beginning_of_its_work(monkeypatch):
    bars, made = [], rich.progress.Progress
    monkeypatch.setattr(rich.progress, "Progress", lambda *a, **k: bars.append(made(*a, **k)) or bars[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    begin = time.monotonic()
    with console.progress_bar() as progress:
        time.sleep(0.3)
        progress("features", 64, 128)
        assert bars[0].tasks[0].elapsed >= 0.3
        assert bars[0].tasks[0].elapsed <= time.monotonic() - begin
