"""What `sigcam bench` does: run the targets, write their tables and the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from sigcam.bench.figures import distortions, qualitative
from sigcam.bench.networks import network
from sigcam.bench.overhead import overhead
from sigcam.bench.plan import DATASETS, FINE, MASKED_DATASETS, Plan
from sigcam.bench.render import html, write_table
from sigcam.bench.tables import ALL, TABLES
from sigcam.cli.console import progress_bar
from sigcam.core.config import FitConfig
from sigcam.core.distributed import process_group, rank, world_size
from sigcam.core.errors import DataError, SigcamError
from sigcam.core.files import check_writable, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress
from sigcam.network.opening import check_device
from sigcam.reports.html import require_report_extra

TARGETS = (*TABLES, "overhead", "figures", "all")


def run_bench(target: str, plan: Plan, threads: int | None) -> None:
    """Runs a target, or all, with the other processes if torchrun started some."""
    if target not in TARGETS:
        raise DataError(f"there is no target {target!r}: choose one of {', '.join(TARGETS)}.")
    if target in ("lite2", "stages", "vgg16") and plan.backbone != "embedded":
        raise DataError(f"{target} brings its own classifier: leave --model out.")
    require_report_extra()
    if not plan.data.is_dir():
        raise DataError(f"{plan.data} does not exist: give the folder that holds {', '.join(DATASETS)}.")
    plan.available(FINE if target == "overhead" else TABLES[target][1] if target in TABLES else DATASETS)
    if threads:
        torch.set_num_threads(threads)
    failed = list[str]()

    def tried(name: str, work: Callable[[], Any]) -> Any:
        """What the work gives; what keeps one part of `all` from being made is told in the end."""
        try:
            return work()
        except SigcamError as error:
            if target != "all" or world_size() > 1:  # the other processes may be elsewhere
                raise
            failed.append(f"{name} could not be made: {error}")

    with process_group(plan.device) as device:
        plan = replace(plan, device=check_device(device))
        first = rank() == 0
        if first:
            check_writable(plan.output)
        with progress_bar(quiet=not first) as progress:
            for name in ALL if target == "all" else [target] if target in TABLES else ():
                make, needed = TABLES[name]
                if target == "all" and not any(plan.has(dataset) for dataset in needed):
                    typer.echo(f"{name} is left out: {plan.data} has none of {', '.join(needed)}.", err=True)
                    continue
                rows = tried(name, partial(make, plan, progress))
                if first and rows is not None:
                    write_table(plan, name, rows)
    if first:  # alone: the other processes have gone
        with progress_bar() as progress:
            if target == "overhead" or (target == "all" and any(map(plan.has, FINE))):
                tried("overhead", partial(overhead, plan, progress))
            if target in ("figures", "all"):
                for dataset in plan.available(DATASETS):
                    tried(f"figure {dataset}", partial(_figures, plan, dataset, progress))
        _finish(plan)
    if failed:
        raise DataError(" ".join(failed))


def _figures(plan: Plan, dataset: str, progress: Progress) -> None:
    """What maps look like; where there are masks, what a shift of the head does to them."""
    qualitative(plan, dataset, progress)
    if dataset in MASKED_DATASETS:
        distortions(plan, network(plan, dataset, FitConfig(seed=plan.seed), progress), dataset)


def _finish(plan: Plan) -> None:
    """The page of all tables that are there, and what was written."""
    held = [table for name in TABLES if (table := _written(plan.output / f"{name}.json"))]
    overheads = _written(plan.output / "overhead.json")
    figures = sorted((plan.output / "figures").glob("*.png"))
    if held or overheads or figures:
        write_text_atomic(plan.output / "index.html", html(held, overheads, figures))
        for table in held:
            typer.echo((plan.output / f"{table['table']}.md").read_text())
    about = {"data": str(plan.data), "seed": plan.seed, "backbone": plan.backbone}
    write_manifest(plan.output, **about, numbers={table["table"]: table["rows"] for table in held})
    typer.echo(f"tables, figures and index.html are in {plan.output}")


def _written(path: Path) -> dict[str, Any] | None:
    """What the file holds, if it is there and can be read."""
    if not path.is_file():
        return None
    with suppress(ValueError):
        held = json.loads(path.read_text())
        if isinstance(held, dict) and "table" in held:
            return held
    typer.echo(f"{path} is damaged and left off the page: make it again, or remove it.", err=True)
    return None
