"""Run the targets of `sigcam bench`; write their tables and the page."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sigcam.bench.figures import draw_figures
from sigcam.bench.overhead import overhead
from sigcam.bench.plan import Plan
from sigcam.bench.registry import DATASETS, FINE_DATASETS, TABLES, targets
from sigcam.bench.render import html, is_overhead, markdown, write_table
from sigcam.core.distributed import process_group, rank, world_size
from sigcam.core.errors import ConfigError, DataError, SigcamError
from sigcam.core.files import check_writable, parse_json, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress
from sigcam.network.opening import check_device
from sigcam.reports.html import require_report_extra

log = logging.getLogger("sigcam")


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
    if target not in targets():
        raise ConfigError(f"there is no target {target!r}: choose one of {', '.join(targets())}.")
    if target in TABLES and TABLES[target].own_classifier and plan.backbone != "embedded":
        raise ConfigError(f"{target} brings its own classifier: leave --model out.")
    require_report_extra()
    if not plan.data.is_dir():
        raise ConfigError(f"{plan.data} does not exist: give the folder that holds {', '.join(DATASETS)}.")
    others = FINE_DATASETS if target == "overhead" else DATASETS
    plan.available(TABLES[target].datasets if target in TABLES else others)
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
        for name, spec in TABLES.items():
            if name != target and not (target == "all" and spec.in_all):
                continue
            if target == "all" and not any(map(plan.has, spec.datasets)):
                log.warning("%s is left out: %s has none of %s.", name, plan.data, ", ".join(spec.datasets))
                continue
            rows = attempt(name, partial(spec.rows, plan, progress))
            if first and rows is not None:
                write_table(plan, name, rows)
            if first and rows is not None and spec.network:
                own = replace(plan, backbone=spec.network, classifier_recipe="last-stage")
                if any(map(plan.has, FINE_DATASETS)):
                    few: Any = {"repeats": 5, "images": 128}
                    overhead(own, progress, f"overhead-{name}", **few)
    if first:  # outside the process group: the other processes have ended
        if target == "overhead" or (target == "all" and any(map(plan.has, FINE_DATASETS))):
            attempt("overhead", partial(overhead, plan, progress))
        if target in ("figures", "all"):
            for dataset in plan.available(DATASETS):
                attempt(f"figure {dataset}", partial(draw_figures, plan, dataset, progress))
        _finish(plan, announce)
    if failed:
        raise DataError(" ".join(failed))


def _finish(plan: Plan, announce: Callable[[str], None]) -> None:
    """Write the page with all results in the output folder and the manifest; announce both."""
    overheads = ["overhead", *(f"overhead-{name}" for name in TABLES)]
    results = [r for name in (*TABLES, *overheads) if (r := _read_result(plan.output / f"{name}.json"))]
    tables = [result for result in results if not is_overhead(result)]
    figures = sorted((plan.output / "figures").glob("*.png"))
    if results or figures:
        write_text_atomic(plan.output / "index.html", html(results, figures))
        for table in tables:
            announce((plan.output / f"{table['table']}.md").read_text())
    about = {"data": str(plan.data), "seed": plan.seed, "backbone": plan.backbone}
    write_manifest(plan.output, **about, numbers={table["table"]: table["rows"] for table in tables})
    announce(f"tables, figures and index.html are in {plan.output}")


def _read_result(path: Path) -> dict[str, Any] | None:
    """Return the result in the file; None, with a warning if it is damaged, when there is none."""
    if not path.is_file():
        return None
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        result = parse_json(path.read_text())
        if isinstance(result, dict) and result["table"] == path.stem:
            markdown(result)  # raises if a part is missing, or is no number
            return result
    log.warning("%s is damaged and left off the page: make it again, or remove it.", path)
    return None
