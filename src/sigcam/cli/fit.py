"""What `sigcam fit` does: open the data and the network, fit, write the branch and what is known of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
import typer

from sigcam.cli.console import progress_bar, show_report
from sigcam.core.config import FitConfig
from sigcam.core.distributed import process_group, rank, world_size
from sigcam.core.errors import DataError
from sigcam.core.files import check_writable, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.data.fingerprint import data_fingerprint
from sigcam.data.labels import match_classes
from sigcam.data.registry import open_training_data
from sigcam.models.state_dict import fingerprint
from sigcam.network.opening import open_network
from sigcam.training.branch import FitResult, fit
from sigcam.training.feature_cache import default_folder
from sigcam.training.features import Features
from sigcam.training.settings import check_fit_config


@dataclass(frozen=True)
class FitOptions:
    """The command's options besides the recipe's."""

    data: str
    format: str | None
    features: Path | None
    negatives: Path | None
    model: str
    weights: Path | None
    output: Path
    cache: Path | None
    no_cache: bool
    device: str
    threads: int | None
    head: str | None
    layer: str | None
    crop: bool


def make_branch(options: FitOptions, config: FitConfig, as_json: bool) -> None:
    """Fits the branch, with the other processes if torchrun started some; the first one writes and prints."""
    if bool(options.data) == bool(options.features):
        raise DataError("give the images to fit on (--data), or their features (--features): one of them.")
    check_fit_config(config, linear=None, negatives=bool(options.negatives))
    if options.threads:
        torch.set_num_threads(options.threads)
    with process_group(options.device) as device:
        if options.features:
            data: Any = read_features(options.features)
            known = {"features": str(options.features)}
        else:
            data = open_training_data(options.data, options.format)
            known = {"data": options.data}
        if rank() == 0:
            check_writable(options.output)
        place: Any = {"head": options.head, "layer": options.layer, "crop": options.crop, "device": device}
        opened = open_network(options.model, options.weights, None, **place)
        net, classifier = opened.net, opened.classifier
        if not options.features:
            data = match_classes(data, net.classes, net.class_names)
            known["data_fingerprint"] = data_fingerprint(data)
        cache = None if options.no_cache else options.cache or default_folder()
        with progress_bar(quiet=rank() > 0) as progress:
            result = fit(net, data, config, negatives=options.negatives, cache=cache, progress=progress)
        if rank() > 0:
            return
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "branch.safetensors"
        net.save(path)
        names = net.class_names or tuple(f"class {k}" for k in range(max(net.classes, 2)))
        write_text_atomic(options.output / "fit.json", json.dumps(details(result, names), indent=1) + "\n")
        facts = summary(result) | {"processes": world_size(), "threads": torch.get_num_threads()}
        facts |= {"branch": str(path)}
        write_manifest(
            options.output,
            model=classifier.name,
            model_fingerprint=fingerprint(net.original),
            **known,
            negatives=str(options.negatives) if options.negatives else None,
            seed=config.seed,
            config=asdict(config),
            numbers=facts,
        )
        figure = draw_fit(result, options.output / "fit.png")
        show_report(facts, result.skipped, as_json)
        if not as_json:
            typer.echo(
                f"branch, fit.json{', fit.png' if figure else ''} and manifest.json are in {options.output}"
            )


def read_features(path: Path) -> Features:
    """Features that somebody else computed: an .npz with `plain` (n, N), perhaps `mirrored`, and `labels`."""
    import numpy as np

    try:
        with np.load(path) as held:
            views = [torch.from_numpy(held[name]) for name in ("plain", "mirrored") if name in held]
            labels = torch.from_numpy(held["labels"].astype(np.int64))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise DataError(
            f"cannot read {path} as features: {error}. It must be an .npz file with arrays plain and labels."
        ) from error
    if not views:
        raise DataError(f"{path} holds no array named plain: the features of images as they are.")
    return Features(tuple(views), labels)


def summary(result: FitResult) -> dict[str, Any]:
    """The few numbers that everybody wants to see."""
    quality, weight = result.quality, result.pos_weight
    facts: dict[str, Any] = {
        "images": result.images,
        "classes": len(result.label_counts),
        "images per class": f"{min(result.label_counts)} to {max(result.label_counts)}",
        "positive weight": weight if isinstance(weight, float) else f"{min(weight):.4g} to {max(weight):.4g}",
        "l2": result.l2,
        "loss": result.losses[-1],
    }
    if quality:
        facts |= {
            "held-out images": quality.images,
            "held-out mean average precision": quality.mean_average_precision,
            "held-out mean AUC": quality.mean_auroc,
            "calibration error": quality.calibration.error,
            "calibration error less log(positive weight)": quality.shifted.error,
        }
    shares = result.positive_share
    facts |= {
        "positive weights": f"{min(shares):.0%} to {max(shares):.0%} per class",
        "seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in result.seconds.items()),
        "skipped": len(result.skipped),
    }
    return facts


def details(result: FitResult, names: tuple[str, ...]) -> dict[str, Any]:
    """All that is known of a fit, as plain data."""
    found = asdict(result)
    found["classes"] = [
        {
            "name": name,
            "images": result.label_counts[k],
            "average_precision": _number(result.quality.average_precision[k]) if result.quality else None,
            "auroc": _number(result.quality.auroc[k]) if result.quality else None,
            "positive_share": result.positive_share[min(k, len(result.positive_share) - 1)],
        }
        for k, name in enumerate(names)
    ]
    if result.quality:
        found["quality"] = {
            "images": result.quality.images,
            "mean_average_precision": result.quality.mean_average_precision,
            "mean_auroc": result.quality.mean_auroc,
            "calibration": asdict(result.quality.calibration),
            "shifted": asdict(result.quality.shifted),
        }
    return found


def _number(value: float) -> float | None:
    return value if value == value else None  # JSON has no NaN


def draw_fit(result: FitResult, path: Path) -> bool:
    """A picture of the fit: loss, search for the penalty, classes, reliability; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, search, classes, reliable = figure.subplots(2, 2).flat
    loss.plot(range(len(result.losses)), result.losses, marker="o", color="#1f6fb4")
    loss.set(
        title="loss",
        xlabel="epoch, or step: first without the held-out images, then with all",
        ylabel="mean over classes",
    )
    if result.search:
        strengths, scores = zip(*result.search, strict=True)
        search.semilogx(strengths, [100 * score for score in scores], marker="o", color="#1f6fb4")
        search.axvline(result.l2, color="#d1495b", linestyle="--", label=f"chosen: {result.l2:g}")
        search.legend(frameon=False)
    _empty(search, not result.search, "the penalty was given, or there was no image to choose by")
    search.set(title="penalty", xlabel="l2", ylabel="held-out mean average precision, %")
    quality = result.quality
    if quality:
        known = sorted((100 * ap for ap in quality.average_precision if ap == ap), reverse=True)
        classes.plot(range(1, len(known) + 1), known, color="#1f6fb4")
        classes.set_ylim(0, 103)
        bins = [(c.score, c.share, c.count) for c in (quality.calibration, quality.shifted)]
        reliable.plot([0, 1], [0, 1], color="0.6", linewidth=1)
        names = (
            f"as fitted: error {quality.calibration.error:.3f}",
            f"less log(positive weight): error {quality.shifted.error:.3f}",
        )
        for (score, share, count), name, colour in zip(bins, names, ("#1f6fb4", "#d1495b"), strict=True):
            shown = [i for i, n in enumerate(count) if n]
            points = [score[i] for i in shown], [share[i] for i in shown]
            reliable.plot(*points, marker="o", markersize=4, color=colour, label=name)
        reliable.legend(frameon=False, loc="lower right")
    _empty(classes, quality is None, "no image was held out")
    _empty(reliable, quality is None, "no image was held out")
    classes.set(title="classes, best first", xlabel="class", ylabel="held-out average precision, %")
    reliable.set(title="reliability", xlabel="score", ylabel="share of images that show the class")
    figure.savefig(path, dpi=110)
    return True


def _empty(axes: Any, empty: bool, sentence: str) -> None:
    if empty:
        axes.text(0.5, 0.5, sentence, ha="center", va="center", transform=axes.transAxes, color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
