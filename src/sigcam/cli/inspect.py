"""`sigcam inspect`: how a classifier is split, and the contents of a data set."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from sigcam.cli import options as opt
from sigcam.cli.console import progress_bar, show_table
from sigcam.cli.options import option
from sigcam.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InspectOptions(
    opt.SourceOptions, opt.LayerOptions, opt.CropOptions, opt.WorkerOptions, opt.SeedOptions
):
    """Options of `sigcam inspect`."""

    model: str = ""
    data: str = option("Data set to inspect, instead of a model or together with one.", "")
    split: str | None = option("Split of the data; default: all.", None)
    output: Path | None = option("Folder for a contact sheet.", None)

    @property
    def needs_head(self) -> bool:
        return False


def inspect_command(options: InspectOptions) -> None:
    """Show how a classifier is split (head, layer, map size) and what a data set contains."""
    from sigcam.network.opening import open_network
    from sigcam.reports.inspection import inspect_data, model_facts

    o = options
    if (o.output or o.split) and not o.data:
        raise ConfigError("--output and --split are about a data set: name it with --data.")
    facts: dict[str, Any] = {}
    if o.data:
        with progress_bar() as progress:
            facts["data"] = inspect_data(
                o.data,
                format=o.format,
                split=o.split,
                output=o.output,
                workers=o.workers,
                seed=o.seed,
                progress=progress,
            )
    if o.model or not o.data:
        opened = open_network(
            o.model or "embedded",
            o.weights,
            None,
            head=o.head,
            layer=o.layer,
            crop=o.crop,
            pretrained=False,
        )
        facts["model"] = model_facts(opened.classifier, opened.net)
    if o.json:
        typer.echo(json.dumps(facts, indent=1))
        return
    for title, values in facts.items():
        show_table(title, [item for item in values.items() if not isinstance(item[1], list)])
        for name, rows in values.items():
            if isinstance(rows, list) and rows:
                show_table(name, [tuple(row.values()) for row in rows], header=tuple(rows[0]))
