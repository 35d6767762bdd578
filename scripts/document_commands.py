"""A mkdocs hook: replaces marks in pages by lists of all commands, data set readers and bench targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from sigcam.bench.registry import TABLES, targets
from sigcam.cli.app import build_app
from sigcam.data.registry import READERS


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with tables in place of its marks."""
    marks = {"every command": command_tables, "every reader": reader_table, "every table": target_table}
    for mark, tables in marks.items():
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", "\n\n".join(tables()))
    return markdown


def reader_table() -> Iterator[str]:
    """Yield a table of the names and layouts in READERS."""
    rows = [f"| `{name}` | {_cell(reader.about)} |" for name, reader in READERS.items()]
    yield "\n".join(["| format | files, splits, annotations |", "|---|---|", *rows])


def target_table() -> Iterator[str]:
    """Yield a table of the targets of `sigcam bench`."""
    rows = ["| target | what is compared | in `all` |", "|---|---|---|"]
    for name, summary in targets().items():
        if name != "all":
            in_all = "no" if name in TABLES and not TABLES[name].in_all else "yes"
            rows.append(f"| `{name}` | {_cell(summary)} | {in_all} |")
    yield "\n".join(rows)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command with the words that are typed to run it."""
    yield from _below("sigcam", typer.main.get_command(build_app()))


def _below(words: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _below(f"{words} {name}", command)
        else:
            yield f"{words} {name}", command


def command_tables() -> Iterator[str]:
    """Yield, for each command, a heading, its description, and its options with their defaults."""
    for words, command in commands():
        rows = ["| option | default | what it is |", "|---|---|---|"]
        for param in command.params:
            if param.name == "help":
                continue
            argument = param.param_type_name == "argument"
            name = param.name.upper() if argument else ", ".join([*param.opts, *param.secondary_opts])
            rows.append(f"| `{name}` | {_default(param)} | {_cell(param.help or '')} |")
        yield f"## `{words}`\n\n{command.help}\n\n" + "\n".join(rows)


def _default(param: Any) -> str:
    if param.required:
        return "must be given"
    value = param.default
    if value is None or value is False or value == "" or callable(value):
        return ""
    return f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
