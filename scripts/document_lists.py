"""Lists of the documentation, made from the code: commands, methods, metrics, data set layouts, tables.

A page holds a list between `<!-- list: NAME -->` and `<!-- end -->`. As a hook of mkdocs this module fills
the lists when the site is built; run as a script, it writes them into the pages (except the commands).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from sigcam.bench.registry import TABLES, targets
from sigcam.cli.app import build_app
from sigcam.data.registry import READERS
from sigcam.evaluation.registry import METRICS
from sigcam.methods.registry import METHODS, Method
from sigcam.training.wsol import WSOL

DOCS = Path(__file__).parents[1] / "docs"
LIST = re.compile(r"<!-- list: (\w+) -->\n.*?<!-- end -->", re.S)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill every list of a page (called by mkdocs)."""
    return LIST.sub(
        lambda found: f"<!-- list: {found[1]} -->\n\n{LISTS[found[1]]()}\n\n<!-- end -->", markdown
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = (header, ["---"] * len(header), *rows)
    lines = ([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def methods() -> str:
    """Return every CAM method: what it weights channels by, and what it costs."""
    rows = [(f"`{name}`", _first_sentence(each.function), _cost(each)) for name, each in METHODS.items()]
    return table(("method", "weights", "costs"), rows)


def _cost(method: Method) -> str:
    """Return what a method costs beyond the forward pass."""
    needs = {
        "linear": "; needs a global average pooling + linear head",
        "attention": "; needs a plain ViT",
        "patches": "; needs a plain ViT with a linear head on its averaged patch tokens",
        "rules": "; no attention or layer normalisation",
        None: "",
    }
    extra = "" if method.package is None else "; extra `attribution`"
    if method.gives == "pixels":
        count = (method.samples or 1) * method.passes
        kind = "forward" if method.perturbs == "images" else "forward and backward"
        each = "" if method.perturbs == "images" else " for each class"
        fewer = " (`samples=`)" if method.samples else ""
        cost = f"{count} {kind} pass{'es' * (count > 1)} of the image{each}{fewer}{extra}"
    elif method.perturbs == "images":
        each = f"{method.samples} forward passes" if method.samples else "one forward pass"
        cost = f"{each} per channel (`top_n=` tries fewer)"
    elif method.perturbs == "noise":
        cost = f"{method.samples} more passes (`samples=`), and a backward pass of the head for each"
    elif method.perturbs == "features":
        cost = "the tail of the network once per channel; nothing if the head is linear"
    elif method.gives == "gradients":
        cost = "a backward pass of the head; nothing if the head is linear"
    else:
        cost = "one more forward pass" if method.needs in ("attention", "patches") else "nothing"
    return cost + needs[method.needs]


def metrics() -> str:
    """Return every metric that `evaluate` knows: its name, what it is, what it needs."""
    rows = []
    for name, spec in METRICS.items():
        default = {"always": "", "with several boxes": " (if images have several boxes)"}
        needs = ", ".join(spec.needs) or "nothing"
        when = default.get(spec.measured, " (on request)")
        rows.append((f"`{name}`", _first_sentence(spec.metric_class), f"{needs}{when}"))
    return table(("name", "what it is", "needs"), rows)


def readers() -> str:
    """Return every data set layout."""
    rows = [(f"`{name}`", reader.about) for name, reader in READERS.items()]
    return table(("format", "what it reads"), rows)


def tables() -> str:
    """Return every table of the benchmark."""
    others = [name for name, spec in TABLES.items() if not spec.in_all]
    rows = [
        (f"`{name}`", summary, "no" if name in others else "yes")
        for name, summary in targets().items()
        if name != "all"
    ]
    return table(("target", "what is compared", "in `all`"), rows)


def command_list() -> str:
    """Return, for each command, a heading, what it does, and its options with their defaults."""
    parts = []
    for words, command in commands():
        rows = []
        for param in command.params:
            if param.name != "help":
                argument = param.param_type_name == "argument"
                name = param.name.upper() if argument else ", ".join([*param.opts, *param.secondary_opts])
                rows.append((f"`{name}`", _default(param), param.help or ""))
        parts.append(f"## `{words}`\n\n{command.help}\n\n{table(('option', 'default', 'what it is'), rows)}")
    return "\n\n".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command as it is typed, and its click command."""
    yield from _commands("sigcam", typer.main.get_command(build_app()))


def _commands(words: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(f"{words} {name}", command)
        else:
            yield f"{words} {name}", command


def _default(param: Any) -> str:
    if param.required:
        return "required"
    value = param.default
    return "" if value is None or value is False or value == "" or callable(value) else f"`{value}`"


def trainers() -> str:
    """Return every trainer of weakly supervised localisation, and what it changes."""
    firsts = ((inspect.getdoc(each) or "").split("\n\n")[0] for each in WSOL.values())
    return table(("`--wsol`", "training"), [(f"`{name}`", t) for name, t in zip(WSOL, firsts, strict=True)])


def _first_sentence(documented: Any) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)[0].rstrip(".")


LISTS: dict[str, Callable[[], str]] = {
    "commands": command_list,
    "methods": methods,
    "metrics": metrics,
    "readers": readers,
    "tables": tables,
    "trainers": trainers,
}

if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if page.name != "commands.md" and (filled := on_page_markdown(text)) != text:
            page.write_text(filled)
            print(f"wrote {page.name}")
