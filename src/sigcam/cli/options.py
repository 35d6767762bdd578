"""Command-line options made from dataclasses, so that an option's name, type, default and help exist once."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from sigcam.cli.running import running
from sigcam.cli.weights import with_imagenet_weights
from sigcam.core.errors import ConfigError
from sigcam.data.registry import list_readers

NUMBER_LIST = tuple[float, ...]  # the type of an option with comma-separated numbers


def option(help: str | Callable[[], str], default: Any = MISSING, **settings: Any) -> Any:
    """Return a dataclass field with help, or a function that returns it when the application is built.

    `settings` are `name`, `argument` and what `typer.Option` takes.
    """
    return field(default=default, metadata={"help": help, **settings})


# ------------------------------------------------------------------- options that several commands have


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    json: bool = option("Print JSON instead of a table.", False)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(JsonOptions):
    model: str = option(
        "Classifier: timm:NAME, torchvision:NAME, hf:NAME, wsol:NAME, file:PATH.py:FUNCTION or embedded.",
        "embedded",
    )
    weights: Path | None = option(
        "Weights of the classifier: .safetensors or .pth; or imagenet: the published ones, from a package if "
        "torchvision's cannot be downloaded.",
        None,
    )

    @property
    def needs_head(self) -> bool:
        """Whether the command needs a trained head."""
        return True


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ModelOptions):
    data: str = option("Folder with one folder of images per class, or `shapes`.")
    format: str | None = option(
        lambda: f"Layout of the data: {', '.join(list_readers())}; default: detected.", None
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    output: Path = option("Folder to write to.")
    device: str = option("Device to run on: cpu, cuda, cuda:1 or mps.", "cpu")

    @property
    def resumes(self) -> bool:
        """Whether the command, interrupted, goes on where it stopped."""
        return False


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    head: str | None = option("Module that returns the logits, if it is not found.", None)
    layer: str | None = option("Module whose output the maps are made of.", None)


@dataclass(frozen=True, kw_only=True)
class CropOptions:
    crop: bool = option("Crop images as the model's own preprocessing does; default: squash.", False)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    workers: int = option("Processes that decode images.", 0, min=0)


@dataclass(frozen=True, kw_only=True)
class BatchOptions(WorkerOptions):
    batch_size: int = option("Images per pass.", 16, min=1)


@dataclass(frozen=True, kw_only=True)
class ThreadOptions:
    threads: int | None = option("Threads of torch, per process.", None, min=1)


@dataclass(frozen=True, kw_only=True)
class SkipOptions:
    skip_unreadable: bool = option("Skip images that cannot be read.", False)


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    cache: Path | None = option("Folder of cached features; default: $SIGCAM_CACHE.", None)


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    seed: int = option("Random seed.", 0, min=0, max=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    report: bool = option("Also write report.html, a page with everything in one file.", False)


# ------------------------------------------------------------------------------- from dataclass to options


def with_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Return the command as typer takes it, with one keyword argument per option.

    Args:
        command: a function of one dataclass. Each field is an option, with the help that `option` or the
            `Args:` of the docstring gives it; the fields of a nested dataclass are options too.
    """
    (options,) = (hint for name, hint in get_type_hints(command).items() if name != "return")

    def run(**values: Any) -> None:
        built = _build(options, values)
        with running(built):
            command(with_imagenet_weights(built))

    parameters = list(_parameters(options))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _parameters(options: type[Any], nested: bool = False) -> Iterator[inspect.Parameter]:
    """Yield one parameter per option: the command's own, those it shares, those of nested dataclasses."""
    types, helps = get_type_hints(options), _helps(options)
    defaults = {each.name: each.default for each in fields(options)}
    own_first = dict.fromkeys(name for cls in options.__mro__ for name in inspect.get_annotations(cls))
    for name in own_first:
        hint, default = types[name], defaults[name]
        if is_dataclass(hint):
            continue
        if hint == NUMBER_LIST and isinstance(default, tuple):
            hint, default = str, ",".join(f"{number:g}" for number in default)
        elif _choices(hint):  # parsed by _parse, not by typer
            hint = str | None if default is None else str
            default = default if default in (None, MISSING) else str(default)
        settings = {"help": helps.get(name), **_settings(options, name)}
        if callable(settings["help"]):
            settings["help"] = settings["help"]()
        make = typer.Argument if settings.pop("argument", False) else typer.Option
        names = [settings.pop("name")] if "name" in settings else []
        if hint is bool and default is False and not nested:
            names = names or [_flag(name)]  # a switch without a --no- form
        info: Any = make(*names, **settings)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[hint, info],
        )
    for name in own_first:
        if is_dataclass(types[name]):
            yield from _parameters(types[name], nested=True)


def _settings(options: type[Any], name: str) -> dict[str, Any]:
    """Return what `option` says of a field: in the class itself, else in the first base class that does."""
    declared = (vars(cls).get("__dataclass_fields__", {}).get(name) for cls in options.__mro__)
    return dict(next((each.metadata for each in declared if each and each.metadata), {}))


def _build(options: type[Any], values: dict[str, Any]) -> Any:
    """Return the dataclass that the values of all options make."""
    types, arguments = get_type_hints(options), dict[str, Any]()
    for name in (each.name for each in fields(options)):
        nested = is_dataclass(types[name])
        arguments[name] = _build(types[name], values) if nested else _parse(name, values[name], types[name])
    return options(**arguments)


def _choices(hint: Any) -> dict[str, Any]:
    """Return the values that a type names, by their text."""
    parts = [hint, *get_args(hint)]
    return {str(value): value for part in parts if get_origin(part) is Literal for value in get_args(part)}


def _parse(name: str, value: Any, hint: Any) -> Any:
    """Return an option's value as the field's type."""
    if hint == NUMBER_LIST:
        try:
            return tuple(float(number) for number in value.split(","))
        except ValueError:
            raise ConfigError(f"{_flag(name)} takes numbers such as 1,2, not {value!r}.") from None
    choices = _choices(hint)
    if not choices or value is None:
        return value
    if value in choices:
        return choices[value]
    numbers = [t for t in get_args(hint) if t in (int, float)]
    try:
        return numbers[0](value)
    except (ValueError, IndexError):
        words = " or ".join([*choices, *(["a number"] if numbers else [])])
        raise ConfigError(f"{_flag(name)} takes {words}, not {value!r}.") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _helps(options: type[Any]) -> dict[str, str]:
    """Return the help of each field that the docstring describes under `Args:`."""
    _, _, described = (inspect.getdoc(options) or "").partition("Args:\n")
    helps = dict[str, str]()
    for names, text in re.findall(r"^ {4}([a-z0-9_, ]+): (.+(?:\n {8}.+)*)", described, re.MULTILINE):
        sentence = " ".join(text.split())
        helps |= dict.fromkeys(names.split(", "), sentence[0].upper() + sentence[1:])
    return helps
