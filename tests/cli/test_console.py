"""What is printed shows every name as it is; nothing in a name is markup or moves the cursor."""

from __future__ import annotations

import json

import pytest
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
