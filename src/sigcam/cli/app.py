"""The `sigcam` command: COMMANDS, and the typer application made from them."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from sigcam import __version__
from sigcam.cli.bench import bench_command
from sigcam.cli.cache import clear_caches_command, list_caches_command
from sigcam.cli.demo import demo_command
from sigcam.cli.evaluate import evaluate_command
from sigcam.cli.explain import explain_command
from sigcam.cli.export import export_command
from sigcam.cli.fit import fit_command
from sigcam.cli.inspect import inspect_command
from sigcam.cli.options import with_options
from sigcam.cli.train import train_command
from sigcam.cli.ui import ui_command

# Each command is a function of one dataclass, whose fields are its options. "cache list" is `list` in the
# group `cache`. The modules above import neither torch nor Pillow, so that `--help` is fast.
COMMANDS: dict[str, Callable[[Any], None]] = {
    "inspect": inspect_command,
    "train-classifier": train_command,
    "fit": fit_command,
    "explain": explain_command,
    "evaluate": evaluate_command,
    "export": export_command,
    "bench": bench_command,
    "ui": ui_command,
    "demo": demo_command,
    "cache list": list_caches_command,
    "cache clear": clear_caches_command,
}
VERSIONS_OF = ("python", "torch", "torchvision", "timm")  # printed beside our own
GROUPS = {"cache": "List cached features, or remove them."}


def build_app() -> typer.Typer:
    """Return the application with all COMMANDS."""
    app = typer.Typer(
        help="Evidence maps for any image classifier, from a sigmoid branch; predictions do not change.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_root)
    groups = dict[str, typer.Typer]()
    for words, command in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(help=GROUPS.get(group), no_args_is_help=True)
            app.add_typer(groups[group], name=group)
        groups.get(group, app).command(name)(with_options(command))
    return app


def _root(
    version: Annotated[bool, typer.Option("--version", help="Print versions.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    if version:
        from sigcam.core.manifest import versions

        installed = versions()
        others = ", ".join(f"{name} {installed[name]}" for name in VERSIONS_OF if name in installed)
        typer.echo(f"sigcam {__version__} ({others})")
        raise typer.Exit
