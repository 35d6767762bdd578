"""`sigcam evaluate`: measure maps on annotated images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sigcam.cli import options as opt
from sigcam.cli.console import progress_bar, say, show_skips, show_table
from sigcam.cli.options import option
from sigcam.core.errors import ConfigError
from sigcam.core.files import write_text_atomic
from sigcam.core.manifest import write_manifest

if TYPE_CHECKING:
    from sigcam.core.types import Progress
    from sigcam.data.sample import Samples
    from sigcam.evaluation.result import Result
    from sigcam.network.dual import DualBranch


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(
    opt.SourceOptions,
    opt.RunOptions,
    opt.BatchOptions,
    opt.ThreadOptions,
    opt.SkipOptions,
    opt.LayerOptions,
    opt.ReportOptions,
):
    """Options of `sigcam evaluate`; lists are comma-separated."""

    data: str = option("Annotated images, in any layout that can be read, or `shapes`.")
    maps: Path | None = option("Score this folder of .npy or .png maps, named by image id.", None)
    split: str = option("Split of the data.", "test")
    branch: str = option("File of a fitted branch, or hf://USER/REPO.", "")
    branches: str | None = option("Some of softmax,sigmoid,centred; default: two of them.", None)
    method: str = option("Methods, comma-separated: cam,grad-cam, ...", "grad-cam")
    scales: str = option(
        "Scales of the maps: unit (each from 0 to 1), probability (with background evidence), or both.",
        "unit",
    )
    zoom: float = option("Draw maps from images enlarged by this factor: finer, slower.", 1.0)
    map_samples: int | None = option(
        "Number of masks, noises or steps of methods that take them, as --samples of explain.", None, min=1
    )
    metrics: str | None = option("Metrics, comma-separated: max_box_acc_v2,pxap, ....", None)
    scorer: str = option("Heads that score confidence: softmax,sigmoid,branch or some of them.", "softmax")
    val_split: str | None = option("Also choose thresholds on this split.", None)
    limit: int | None = option("Number of images: the first N only.", None, min=1)
    intervals: bool = option("Also give 95 % bootstrap intervals.", False)
    output: Path = Path("evaluation")

    @property
    def resumes(self) -> bool:
        return self.maps is None


def evaluate_command(options: EvaluateOptions) -> None:
    """Measure maps on annotated images: maps in a folder, or maps that a network draws."""
    import torch

    from sigcam.core.distributed import process_group, rank
    from sigcam.evaluation.examples import collect_examples
    from sigcam.evaluation.result import curves_of
    from sigcam.reports.evaluation_report import evaluation_page
    from sigcam.reports.html import require_report_extra

    if options.report:
        require_report_extra()
    if options.threads:
        torch.set_num_threads(options.threads)
    with process_group(options.device) as device:
        o = replace(options, device=device)
        with progress_bar(quiet=rank() > 0) as progress:
            net: DualBranch | None = None
            if o.maps:
                result = _evaluate_folder(o, o.maps, progress)
            else:
                net, samples, result = _evaluate_network(o, progress)
            if rank() == 0:
                _write_results(result, o)
            curves = curves_of(result) if o.report else None  # computed by all processes together
            if curves and rank() == 0:
                examples = None
                if net is not None:
                    loading: Any = {"batch_size": o.batch_size, "workers": o.workers, "progress": progress}
                    examples = collect_examples(net, samples, result, **loading)
                facts = {**_source(o), "data": o.data, "split": o.split}
                page = evaluation_page(result, curves, examples, [item for item in facts.items() if item[1]])
                write_text_atomic(o.output / "report.html", page)
        if rank() == 0:
            _show(result, o)


def _evaluate_folder(options: EvaluateOptions, maps: Path, progress: Progress) -> Result:
    """Evaluate a folder of maps; images are not needed where the metadata has their sizes."""
    from sigcam.data.readers.wsol import wsol
    from sigcam.data.registry import guess_format, open_dataset
    from sigcam.evaluation.evaluator import evaluate_maps

    o = options
    if o.weights or o.branch or o.branches or o.val_split or o.zoom != 1 or o.scales != "unit":
        raise ConfigError(
            "--maps are scored as they are, without a network: leave --weights, --branch, --scales, --zoom "
            "and --val-split out."
        )
    if (o.format or guess_format(o.data)) == "wsol":
        samples = wsol(o.data, split=o.split, pictures=False)
        if any(sample.size is None for sample in samples):
            samples = wsol(o.data, split=o.split)
    else:
        samples = open_dataset(o.data, format=o.format, split=o.split)
    return evaluate_maps(
        maps,
        samples[: o.limit],
        metrics=_words(o.metrics),
        intervals=o.intervals,
        extra=o.limit is not None,
        progress=progress,
    )


def _evaluate_network(options: EvaluateOptions, progress: Progress) -> tuple[DualBranch, Samples, Result]:
    """Evaluate the maps of a network: by default of both heads or, without a fitted branch, of the softmax
    head, unaltered and centred."""
    from sigcam.data.registry import open_dataset
    from sigcam.data.sample import check_disjoint
    from sigcam.evaluation.evaluator import evaluate
    from sigcam.methods.cost import cost_note, is_long
    from sigcam.methods.registry import METHODS, MapConfig, method_name
    from sigcam.network.opening import find_branch_file, has_shipped_branch, open_network

    o, metrics = options, _words(options.metrics)
    shipped = has_shipped_branch(o.model, o.weights) and not (o.head or o.layer)
    branch = o.branch or ("sigmoid" if shipped else None)
    branches: Any = _words(o.branches)
    if not branches:
        only_head = branch in ("softmax", "centred")
        branches = [branch] if only_head else ["softmax", "sigmoid" if branch else "centred"]
    methods = _words(o.method) or ["grad-cam"]
    for method, source in product(methods, branches):
        MapConfig(method, source).checked()  # before anything is opened
    if "sigmoid" in branches:
        branch = o.branch or "sigmoid"
        find_branch_file(branch, o.model, o.weights)  # raises if no branch is fitted
    thresholds = [name for name in metrics or ["max_box_acc_v2"] if name.startswith("max_box_acc")]
    if o.val_split and not thresholds:
        raise ConfigError("--val-split chooses thresholds for max_box_acc and max_box_acc_v2: measure one.")
    samples = open_dataset(o.data, format=o.format, split=o.split)[: o.limit]
    val_samples: Samples | None = None
    if o.val_split:
        val_samples = open_dataset(o.data, format=o.format, split=o.val_split)
        why = f"are in split {o.split} too: thresholds must come from other images than those measured."
        check_disjoint(val_samples, samples, why)
    net = open_network(o.model, o.weights, branch, head=o.head, layer=o.layer, device=o.device).net
    for method in methods:
        samples_of = o.map_samples if METHODS[method_name(method)].samples else None
        if is_long(config := MapConfig(method, samples=samples_of)):
            say(cost_note(net, config), err=True)
    settings: Any = {
        "methods": methods,
        "branches": branches,
        "scales": _words(o.scales) or ["unit"],
        "zoom": o.zoom,
        "map_samples": o.map_samples,
        "batch_size": o.batch_size,
        "workers": o.workers,
        "scorers": _words(o.scorer) or ["softmax"],
        "skip_unreadable": o.skip_unreadable,
        "progress": progress,
    }
    unfinished, val = o.output / "unfinished", None
    if val_samples is not None:
        path = unfinished.with_suffix(".val")
        val = evaluate(net, val_samples, metrics=thresholds, unfinished=path, **settings)
    result = evaluate(
        net, samples, metrics=metrics, intervals=o.intervals, val=val, unfinished=unfinished, **settings
    )
    return net, samples, result


def _write_results(result: Result, options: EvaluateOptions) -> None:
    from sigcam.models.state_dict import weights_facts

    drawn = {} if options.maps else {"weights": weights_facts(options.model, options.weights)}
    write_text_atomic(options.output / "results.json", result.to_json() + "\n")
    write_manifest(
        options.output,
        data=options.data,
        split=options.split,
        limit=options.limit,
        **_source(options),
        **drawn,
        about=result.about,
        left_out=result.left_out,
        skipped=result.skipped,
        numbers=list(result.rows),
    )


def _show(result: Result, options: EvaluateOptions) -> None:
    if options.json:
        typer.echo(result.to_json())
        return
    for header, rows in result.blocks():
        show_table("result", rows, header=header)
    for line in result.remarks():
        say(line)
    show_skips(result.skipped)
    written = "results.json, report.html" if options.report else "results.json"
    say(f"{written} and manifest.json are in {options.output}")


def _source(options: EvaluateOptions) -> dict[str, str]:
    """Return what drew the maps."""
    o = options
    return {"maps": str(o.maps)} if o.maps else {"model": o.model, "branch": o.branch}


def _words(text: str | None) -> list[str] | None:
    """Return the words of a comma-separated list; None if there are none."""
    return [word.strip() for word in (text or "").split(",") if word.strip()] or None
