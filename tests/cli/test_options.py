"""Options made from a dataclass: each field once, with its default, its help, and words checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from sigcam.cli.console import progress_bar
from sigcam.cli.options import RunOptions, with_options
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
    side: Literal["left", "right"] | None = None


@dataclass(frozen=True)
class DoOptions:
    name: str = "x"
    config: Settings = Settings()


def called(*words: str) -> Settings:
    app, seen = typer.Typer(), list[Settings]()

    def do(options: DoOptions) -> None:
        """Does it."""
        assert options.name == "x"
        seen.append(options.config)

    app.command()(with_options(do))
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0] if seen else Settings(often=-1)


def test_defaults_are_the_dataclass_own_and_every_field_can_be_set() -> None:
    assert called() == Settings()
    words = ("--kind", "two", "--strength", "0.5", "--often", "7", "--seldom", "1", "--loud", "--times", "2")
    assert called(*words) == Settings("two", 0.5, 7, 1, True, 2)
    assert called("--side", "left") == Settings(side="left")
    assert called("--strength", "auto").strength == "auto"


def test_help_is_the_docstrings() -> None:
    app = typer.Typer()

    def do(config: Settings) -> None:
        """Does it."""

    app.command()(with_options(do))
    said = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    for sentence in ("Does it.", "Which of two.", 'How much, or "auto" if nobody knows.', "How many times."):
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
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with progress_bar() as progress:
        for done, seconds in ((1, 30.0), (4, 50.0), (4, 100.0), (1, 102.0), (4, 103.0)):
            now = seconds
            progress("features", done, 4)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["features: 4 of 4, 50 s", "features: 4 of 4, 3 s"]  # since the report before the first


def test_a_shared_option_keeps_its_help_where_a_command_has_another_default() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(RunOptions):
        output: Path = Path("there")

    parameter = inspect.signature(with_options(_command_of(Other))).parameters["output"]
    assert parameter.default == Path("there")
    assert parameter.annotation.__metadata__[0].help == "Folder to write to."


def _command_of(options: type[Any]) -> Callable[[Any], None]:
    def command(options: Any) -> None:
        """Does it."""

    command.__annotations__["options"] = options
    return command
