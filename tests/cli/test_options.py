"""Options made from a dataclass: each field once, with its default, its help, and words checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from sigcam.cli.console import progress_bar
from sigcam.cli.options import options_of
from sigcam.core.errors import DataError


@dataclass(frozen=True)
class Settings:
    """How something is done.

    Args:
        kind: which of two.
        strength: how much, or "auto"
            if nobody knows.
        often, seldom: how many times.
        loud: says so.
    """

    kind: Literal["one", "two"] = "one"
    strength: float | Literal["auto"] = "auto"
    often: int | None = None
    seldom: int = 3
    loud: bool = False
    times: Literal[1, 2] = 1


def called(*words: str) -> Settings:
    app, seen = typer.Typer(), list[Settings]()

    @app.command()
    @options_of(Settings)
    def do(name: str = "x", *, config: Settings) -> None:
        """Does it."""
        assert name == "x"
        seen.append(config)

    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0] if seen else Settings(often=-1)


def test_defaults_are_the_dataclass_own_and_every_field_can_be_set() -> None:
    assert called() == Settings()
    words = ("--kind", "two", "--strength", "0.5", "--often", "7", "--seldom", "1", "--loud", "--times", "2")
    assert called(*words) == Settings("two", 0.5, 7, 1, True, 2)
    assert called("--strength", "auto").strength == "auto"


def test_help_is_the_docstrings() -> None:
    app = typer.Typer()

    @app.command()
    @options_of(Settings)
    def do(*, config: Settings) -> None:
        """Does it."""

    said = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    for sentence in ("Does it.", "which of two.", 'how much, or "auto" if nobody knows.', "how many times."):
        assert sentence in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--kind", "three"), "--kind takes one or two, not 'three'"),
        (("--strength", "much"), "--strength takes auto or a number, not 'much'"),
        (("--times", "3"), "--times takes 1 or 2, not '3'"),
    ],
)
def test_a_word_that_is_none_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        called(*words)


def test_a_stage_that_comes_again_is_timed_anew_and_its_end_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 50.0, 100.0, 103.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress_bar() as progress:
        for done in (1, 4, 4, 1, 4):
            progress("features", done, 4)
    assert capsys.readouterr().err.splitlines() == ["features: 4 of 4, 50 s", "features: 4 of 4, 3 s"]
