"""Run the targets of `sigcam bench`; write their tables and the page."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sigcam.bench.figures import distortions, qualitative
from sigcam.bench.networks import network
from sigcam.bench.overhead import overhead
from sigcam.bench.plan import DATASETS, FINE, MASKED_DATASETS, Plan
from sigcam.bench.render import html, write_table
from sigcam.bench.tables import ALL, TABLES
from sigcam.core.config import FitConfig
from sigcam.core.distributed import process_group, rank, world_size
from sigcam.core.errors import DataError, SigcamError
from sigcam.core.files import check_writable, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress
from sigcam.network.opening import check_device
from sigcam.reports.html import require_report_extra

log = logging.getLogger("sigcam")
TARGETS = (*TABLES, "overhead", "figures", "all")


def run_bench(
    target: str,
    plan: Plan,
    threads: int | None = None,
    *,
    progress: Progress = lambda stage, done, total: None,
    announce: Callable[[str], None] = print,
) -> None:
    """Run one target, or all; under torchrun, together with the other processes.

    Args:
        threads: threads of torch in each process.
        announce: called with each table in Markdown, and with the folder where everything was written.
    """
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

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        """Return the result of the work; `all` goes on after an error, which is reported at the end."""
        try:
            return work()
        except SigcamError as error:
            if target != "all" or world_size() > 1:  # the other processes may have gone on
                raise
            failed.append(f"{name} could not be made: {error}")

    with process_group(plan.device) as device:
        plan = replace(plan, device=check_device(device))
        first = rank() == 0
        if first:
            check_writable(plan.output)
        for name in ALL if target == "all" else [target] if target in TABLES else ():
            make, needed = TABLES[name]
            if target == "all" and not any(plan.has(dataset) for dataset in needed):
                log.warning("%s is left out: %s has none of %s.", name, plan.data, ", ".join(needed))
                continue
            rows = attempt(name, partial(make, plan, progress))
            if first and rows is not None:
                write_table(plan, name, rows)
    if first:  # outside the process group: the other processes have ended
        if target == "overhead" or (target == "all" and any(map(plan.has, FINE))):
            attempt("overhead", partial(overhead, plan, progress))
        if target in ("figures", "all"):
            for dataset in plan.available(DATASETS):
                attempt(f"figure {dataset}", partial(_figures, plan, dataset, progress))
        _finish(plan, announce)
    if failed:
        raise DataError(" ".join(failed))


def _figures(plan: Plan, dataset: str, progress: Progress) -> None:
    """Draw example maps; where there are masks, also the maps of a shifted head."""
    qualitative(plan, dataset, progress)
    if dataset in MASKED_DATASETS:
        distortions(plan, network(plan, dataset, FitConfig(seed=plan.seed), progress), dataset)


def _finish(plan: Plan, announce: Callable[[str], None]) -> None:
    """Write the page with all tables in the output folder and the manifest; announce both."""
    tables = [table for name in TABLES if (table := _read_table(plan.output / f"{name}.json"))]
    overheads = _read_table(plan.output / "overhead.json")
    figures = sorted((plan.output / "figures").glob("*.png"))
    if tables or overheads or figures:
        write_text_atomic(plan.output / "index.html", html(tables, overheads, figures))
        for table in tables:
            announce((plan.output / f"{table['table']}.md").read_text())
    about = {"data": str(plan.data), "seed": plan.seed, "backbone": plan.backbone}
    write_manifest(plan.output, **about, numbers={table["table"]: table["rows"] for table in tables})
    announce(f"tables, figures and index.html are in {plan.output}")


def _read_table(path: Path) -> dict[str, Any] | None:
    """Return the table in the file; None, with a warning if it is damaged, when there is none."""
    if not path.is_file():
        return None
    with suppress(ValueError):
        table = json.loads(path.read_text())
        if isinstance(table, dict) and "table" in table:
            return table
    log.warning("%s is damaged and left off the page: make it again, or remove it.", path)
    return None
