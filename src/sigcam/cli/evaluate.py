"""What `sigcam evaluate` does: open the data and the maps or the network, evaluate, write what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

from sigcam.cli.console import progress_bar, show_skips, show_table
from sigcam.core.distributed import process_group, rank
from sigcam.core.errors import DataError
from sigcam.core.files import check_writable, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress
from sigcam.data.labels import check_disjoint
from sigcam.data.readers.wsol import wsol
from sigcam.data.registry import guess_format, open_dataset
from sigcam.data.sample import Samples
from sigcam.evaluation.curves import Curves, curves_of
from sigcam.evaluation.evaluator import evaluate, evaluate_maps
from sigcam.evaluation.examples import collect_examples
from sigcam.evaluation.result import Result
from sigcam.methods.map_config import MapConfig
from sigcam.network.dual import DualBranch
from sigcam.network.opening import find_branch_file, has_shipped_branch, open_network
from sigcam.reports.evaluation_report import evaluation_page
from sigcam.reports.html import require_report_extra


@dataclass(frozen=True)
class EvaluateOptions:
    """The command's options; lists are comma-separated."""

    data: str
    format: str | None
    split: str
    val_split: str | None
    limit: int | None
    maps: Path | None
    model: str
    weights: Path | None
    branch: str
    branches: str | None
    method: str
    metrics: str | None
    scorer: str
    intervals: bool
    head: str | None
    layer: str | None
    output: Path
    batch_size: int
    workers: int
    device: str
    report: bool
    skip_unreadable: bool


class Measured(NamedTuple):
    """A result, and the network that drew the maps; None where others drew them."""

    result: Result
    net: DualBranch | None
    samples: Samples


def measure_and_report(options: EvaluateOptions, threads: int | None, as_json: bool) -> None:
    """Measures, with the other processes if torchrun started some; the first one writes and prints."""
    if options.report:
        require_report_extra()
    if threads:
        torch.set_num_threads(threads)
    with process_group(options.device) as device:
        options = replace(options, device=device)
        with progress_bar(quiet=rank() > 0) as progress:
            found = measure(options, progress)
            if rank() == 0:
                write_results(found.result, options)
            curves = curves_of(found.result) if options.report else None
            if curves and rank() == 0:
                write_report(found, curves, options, progress)
        if rank() == 0:
            show(found.result, options, as_json)


def measure(options: EvaluateOptions, progress: Progress) -> Measured:
    """The result that the options ask for; nothing is written."""
    if options.maps is None:
        return _measure_network(options, progress)
    if options.weights or options.branch or options.branches or options.val_split:
        raise DataError("--maps are scored without a network: leave --weights, --branch and --val-split out.")
    return _measure_maps(options, options.maps, progress)


def write_results(result: Result, options: EvaluateOptions) -> None:
    """Writes results.json and manifest.json."""
    output = options.output
    write_text_atomic(output / "results.json", result.to_json() + "\n")
    drawn = (
        {"maps": str(options.maps)} if options.maps else {"model": options.model, "branch": options.branch}
    )
    write_manifest(
        output,
        data=options.data,
        split=options.split,
        limit=options.limit,
        **drawn,
        about=result.about,
        left_out=result.left_out,
        skipped=result.skipped,
        numbers=list(result.rows),
    )


def show(result: Result, options: EvaluateOptions, as_json: bool) -> None:
    """Prints the table or the JSON."""
    if as_json:
        typer.echo(result.to_json())
        return
    for header, rows in result.blocks():
        show_table("result", rows, header=header)
    for line in result.remarks():
        typer.echo(line)
    show_skips(result.skipped)
    written = "results.json, report.html" if options.report else "results.json"
    typer.echo(f"{written} and manifest.json are in {options.output}")


def write_report(found: Measured, curves: Curves, options: EvaluateOptions, progress: Progress) -> None:
    """Writes report.html; of what a network drew, with a look at some images."""
    seen = None
    if found.net is not None:
        how: Any = {"batch_size": options.batch_size, "workers": options.workers, "progress": progress}
        seen = collect_examples(found.net, found.samples, found.result, **how)
    drawn = ("maps", str(options.maps)) if options.maps else ("model", options.model)
    facts = [drawn, ("data", options.data), ("split", options.split)]
    facts += [("branch", options.branch)] if options.branch else []
    write_text_atomic(options.output / "report.html", evaluation_page(found.result, curves, seen, facts))


def _measure_maps(options: EvaluateOptions, maps: Path, progress: Progress) -> Measured:
    """The result of a folder of maps; pictures are not needed where metadata gives their sizes."""
    data, split = options.data, options.split
    if (options.format or guess_format(data)) == "wsol":
        samples = wsol(data, split=split, pictures=False)
        if any(sample.size is None for sample in samples):
            samples = wsol(data, split=split)
    else:
        samples = open_dataset(data, format=options.format, split=split)
    if rank() == 0:
        check_writable(options.output)
    samples = _first(samples, options.limit)
    result = evaluate_maps(
        maps,
        samples,
        metrics=_words(options.metrics),
        intervals=options.intervals,
        extra=options.limit is not None,
        progress=progress,
    )
    return Measured(result, None, samples)


def _measure_network(options: EvaluateOptions, progress: Progress) -> Measured:
    """The result of what a network draws: by default from both heads or, without a fitted branch, from the
    softmax head as it is and centred."""
    branch, metrics = options.branch, _words(options.metrics)
    shipped = has_shipped_branch(options.model, options.weights)
    fitted = branch not in ("", "softmax", "centred", "sigmoid") or (shipped and branch in ("", "sigmoid"))
    fitted = fitted and not (options.head or options.layer) if branch == "" else fitted
    alone = [branch] if branch in ("softmax", "centred") else ["softmax", "sigmoid" if fitted else "centred"]
    branches: Any = _words(options.branches) or alone
    methods = _words(options.method) or ["grad-cam"]
    for method in methods:
        for source in branches:
            MapConfig(method, source).checked()
    if fitted or branch == "sigmoid" or "sigmoid" in branches:
        find_branch_file(branch or "sigmoid", options.model, options.weights)
        if options.head or options.layer:
            raise DataError("--head and --layer are part of a fitted branch: leave them out, or refit.")
    thresholds = [name for name in metrics or ["max_box_acc_v2"] if name.startswith("max_box_acc")]
    if options.val_split and not thresholds:
        raise DataError("--val-split chooses thresholds for max_box_acc and max_box_acc_v2: measure one.")
    samples = _first(open_dataset(options.data, format=options.format, split=options.split), options.limit)
    held: Samples | None = None
    if options.val_split:
        held = open_dataset(options.data, format=options.format, split=options.val_split)
        why = f"are in split {options.split} too: thresholds must come from other images than those measured."
        check_disjoint(held, samples, why)
    if rank() == 0:
        check_writable(options.output)
    named = (branch or "sigmoid") if fitted else None
    place: Any = {"head": options.head, "layer": options.layer, "device": options.device}
    net = open_network(options.model, options.weights, named, **place).net
    how: Any = {
        "methods": methods,
        "branches": branches,
        "batch_size": options.batch_size,
        "workers": options.workers,
        "scorers": _words(options.scorer) or ["softmax"],
        "skip_unreadable": options.skip_unreadable,
        "progress": progress,
    }
    kept = options.output / "unfinished"
    val = None
    if held is not None:
        val = evaluate(net, held, metrics=thresholds, unfinished=kept.with_suffix(".val"), **how)
    result = evaluate(
        net, samples, metrics=metrics, intervals=options.intervals, val=val, unfinished=kept, **how
    )
    return Measured(result, net, samples)


def _first(samples: Samples, limit: int | None) -> Samples:
    return samples if limit is None else samples[:limit]


def _words(text: str | None) -> Sequence[str] | None:
    """The names in a comma-separated list."""
    return [word.strip() for word in (text or "").split(",") if word.strip()] or None
