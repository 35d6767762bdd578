"""A hook of mkdocs: puts a table of options for every `sigcam` command into the page that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from sigcam.cli.app import build_app

HERE = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the tables in place of the mark."""
    return markdown.replace(HERE, "\n\n".join(tables())) if HERE in markdown else markdown


def commands() -> Iterator[tuple[str, Any]]:
    """Each command's words, as they are typed, and the command."""
    yield from _below("sigcam", typer.main.get_command(build_app()))


def _below(words: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _below(f"{words} {name}", command)
        else:
            yield f"{words} {name}", command


def tables() -> Iterator[str]:
    """For each command a heading, what it does, and its options with their defaults."""
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
