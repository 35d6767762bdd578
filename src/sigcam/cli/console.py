"""What the commands print: tables, files left out, and progress with an ETA."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


def show_skips(skipped: Sequence[tuple[str, str]]) -> None:
    """Names the first files that were left out, and counts them."""
    for name, reason in skipped[:5]:
        typer.echo(f"left out {name}: {reason}", err=True)
    if len(skipped) > 5:
        typer.echo(f"left out {len(skipped)} files in all", err=True)


def show_report(facts: dict[str, Any], skipped: Sequence[tuple[str, str]], as_json: bool) -> None:
    """The numbers of a run, as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    show_table("result", [(k, f"{v:.4g}" if isinstance(v, float) else str(v)) for k, v in facts.items()])
    show_skips(skipped)


def show_table(title: str, rows: Sequence[Sequence[object]], header: tuple[str, ...] = ()) -> None:
    """A table on stdout; cells fold where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=bool(header), title_justify="left")
    for i in range(len(header) or 2):
        table.add_column(header[i] if header else "", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def show_maps(rows: Sequence[dict[str, Any]], fitted: bool) -> None:
    """The maps' classes and scores; of a few pictures, the other likely classes too; names of blank maps."""

    def scores(row: dict[str, Any]) -> tuple[str, str]:
        return f"{row['probability']:.3f}", f"{row['evidence']:.3f}" if fitted else "-"

    shown = [(r["image"], r["class_name"], *scores(r)) for r in rows[:20]]
    show_table("maps", shown, header=("image", "class", "probability", "evidence"))
    for row in rows if len(rows) <= 3 else ():
        top = [(each["class_name"], *scores(each)) for each in row["top"]]
        show_table(f"likely classes of {row['image']}", top, header=("class", "probability", "evidence"))
    for row in rows:
        if row["blank"]:
            share = f"share of positive evidence {row['positive_share']:.0%}"
            typer.echo(f"blank map: {row['image']} ({share})", err=True)


def show_caches(root: Path, held: Sequence[Any], as_json: bool) -> None:
    """Caches of features, the latest used first."""
    rows = [
        {
            "name": each.folder.name,
            "model": each.about.get("model", "?"),
            "layer": each.about.get("layer", "?"),
            "view": "mirrored" if each.about.get("view") else "plain",
            "images": each.about.get("images", 0),
            "megabytes": round(each.size / 1e6, 1),
        }
        for each in held
    ]
    if as_json:
        typer.echo(json.dumps({"folder": str(root), "caches": rows}, indent=1))
        return
    if rows:
        show_table("caches", [tuple(row.values()) for row in rows], header=tuple(rows[0]))
    typer.echo(f"{len(rows)} cache(s), {sum(row['megabytes'] for row in rows):.1f} MB in {root}")


@contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with an ETA on a terminal, plain lines elsewhere; both on stderr. Nothing if quiet."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}
        ended = set[str]()

        def update(stage: str, done: int, total: int) -> None:
            if _comes_again(stage, done, total, tasks, ended):
                return
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def _plain_lines() -> Callable[[str, int, int], None]:
    from time import monotonic

    began: dict[str, tuple[float, int]] = {}  # when, and how much was done: a run may go on from another
    told: dict[str, float] = {}
    ended = set[str]()

    def update(stage: str, done: int, total: int) -> None:
        if _comes_again(stage, done, total, began, ended):
            return
        now = monotonic()
        if stage not in began:
            began[stage], told[stage] = (now, done), now
        start, before = began[stage]
        if done >= total or now - told[stage] >= 10:
            told[stage] = now
            left = (now - start) / max(done - before, 1) * (total - done)
            eta = f", about {left:.0f} s left" if done < total else f", {now - start:.0f} s"
            typer.echo(f"{stage}: {done} of {total}{eta}", err=True)

    return update


def _comes_again(stage: str, done: int, total: int, shown: dict[str, Any], ended: set[str]) -> bool:
    """Whether an end is told of twice; a stage that begins again after its end is forgotten, to be shown
    anew."""
    if done >= total > 0:
        twice = stage in ended
        ended.add(stage)
        return twice
    if stage in ended:
        ended.remove(stage)
        del shown[stage]
    return False
