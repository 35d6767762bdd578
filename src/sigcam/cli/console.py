"""What the commands print: tables, skipped files, and progress with an ETA."""

import json
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from sigcam.core.types import Progress, Skipped


def printable(text: str) -> str:
    """Return the text with escapes for characters that move the cursor, colour or hide text: \\n, \\x1b."""

    def shown(character: str) -> str:
        hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        joins = character in "\u200c\u200d"  # inside words of some languages, and emoji
        return character.encode("unicode_escape").decode() if hidden and not joins else character

    return text if text.isprintable() else "".join(map(shown, text))


def say(text: str, err: bool = False) -> None:
    """Print one line; names in it may hold anything."""
    typer.echo(printable(text), err=err)


def show_skips(skipped: Sequence[Skipped]) -> None:
    """Print the first files that were skipped, and their number."""
    for name, reason in skipped[:5]:
        say(f"left out {name}: {reason}", err=True)
    if len(skipped) > 5:
        say(f"left out {len(skipped)} files in all", err=True)


def show_result(numbers: dict[str, Any], skipped: Sequence[Skipped], as_json: bool) -> None:
    """Print the numbers of a run, as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(numbers, indent=1))
        return
    show_table("result", [(name, as_text(value)) for name, value in numbers.items()])
    show_skips(skipped)


def as_text(value: object) -> str:
    """Return a value as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_table(title: str, rows: Sequence[Sequence[object]], header: tuple[str, ...] = ()) -> None:
    """Print a table; cells wrap where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def plain(value: object) -> Text:  # brackets are no markup
        return Text(printable(str(value)))

    table = Table(title=plain(title), show_header=bool(header), title_justify="left")
    for name in header or ("", ""):
        table.add_column(plain(name), overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    Console(width=None if on_terminal else 110, highlight=False, emoji=False).print(table)


@contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Progress]:
    """Yield a function that shows progress on stderr: bars on a terminal, plain lines elsewhere."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if sys.stderr is None or not sys.stderr.isatty():
        yield _with_clock(_PlainLines())
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description:>10}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("ETA"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), get_time=time.monotonic) as bars:
        tasks = dict[str, rich.TaskID]()

        def update(stage: str, done: int, total: int, began: float | None) -> None:
            if began is not None:
                tasks[stage] = bars.add_task(printable(stage), total=total)
                bars.tasks[-1].start_time = began
            bars.update(tasks[stage], completed=done, total=total)

        yield _with_clock(update)


class _PlainLines:
    """Print a line every 10 seconds and at the end of each stage."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}
        self.first: dict[str, tuple[float, int]] = {}  # time and images done: a run may continue another
        self.printed: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int, began: float | None) -> None:
        now = time.monotonic()
        if began is not None:
            self.begun[stage], self.first[stage], self.printed[stage] = began, (now, done), now
        first, before = self.first[stage]
        if done >= total or now - self.printed[stage] >= 10:
            self.printed[stage] = now
            left = (now - first) / max(done - before, 1) * (total - done)
            eta = f", about {left:.0f} s left" if done < total else f", {now - self.begun[stage]:.0f} s"
            say(f"{stage}: {done} of {total}{eta}", err=True)


def _with_clock(update: Callable[[str, int, int, float | None], None]) -> Progress:
    """Return a progress function that reports the end of a stage once, and says when a stage began, None
    afterwards: with a first report of nothing done; without one, where the last report of any stage was."""
    running, ended, last = set[str](), set[str](), time.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        ends = done >= total > 0
        if ends and stage in ended:
            return
        began = None if stage in running else before if done else last
        (running, ended)[ends].add(stage)
        (ended, running)[ends].discard(stage)
        update(stage, done, total, began)

    return progress
