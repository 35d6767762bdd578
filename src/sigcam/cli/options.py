"""Command-line options made from the fields of a settings dataclass, so that a default exists once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from sigcam.core.errors import DataError


def options_of(settings: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for every field of `settings`, and passes them as the argument `config`."""
    hints, helps = get_type_hints(settings), _helps(settings)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            chosen = {field.name: given.pop(field.name) for field in fields(settings)}
            parsed = {name: _parsed(name, value, hints[name]) for name, value in chosen.items()}
            command(**given, config=settings(**parsed))

        own = inspect.signature(command, eval_str=True)
        made = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_shown(field.default, hints[field.name]),
                annotation=Annotated[_asked(hints[field.name]), typer.Option(help=helps.get(field.name))],
            )
            for field in fields(settings)
            if field.default is not MISSING
        ]
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "config"]
        run.__signature__ = inspect.Signature([*kept, *made])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*kept, *made)}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def _choices(hint: Any) -> list[Any]:
    """The values that a type names."""
    parts = [hint, *get_args(hint)]
    return [value for part in parts if get_origin(part) is Literal for value in get_args(part)]


def _asked(hint: Any) -> Any:
    """The type that the option is read as: words where a number may be one."""
    if hint is bool or hint is int or hint is float or hint is str:
        return hint
    choices = _choices(hint)
    if choices:
        return str
    return hint  # a number or nothing


def _shown(default: Any, hint: Any) -> Any:
    return str(default) if _asked(hint) is str else default


def _parsed(name: str, value: Any, hint: Any) -> Any:
    """The option's text as the field's type."""
    if _asked(hint) is not str or hint is str:
        return value
    choices = _choices(hint)
    named = {str(choice): choice for choice in choices}
    if value in named:
        return named[value]
    numbers = [t for t in get_args(hint) if t in (int, float)]
    try:
        return numbers[0](value)
    except (ValueError, IndexError):
        words = " or ".join([*named, *(["a number"] if numbers else [])])
        raise DataError(f"--{name.replace('_', '-')} takes {words}, not {value!r}.") from None


def _helps(settings: type[Any]) -> dict[str, str]:
    """The sentence on each field in the class's docstring."""
    text = inspect.getdoc(settings) or ""
    _, _, described = text.partition("Args:\n")
    found = dict[str, str]()
    for names, sentence in re.findall(r"^ {4}([a-z0-9_, ]+): (.+(?:\n {8}.+)*)", described, re.MULTILINE):
        for name in names.split(", "):
            found[name] = " ".join(sentence.split())
    return found
