"""The report of a fit: main numbers, details and a plot."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sigcam.core.files import write_atomic
from sigcam.training.branch import FitResult

BLUE, RED = "#1f6fb4", "#d1495b"


def fit_summary(result: FitResult) -> dict[str, Any]:
    """Return the main numbers of a fit, by name."""
    quality, weight = result.quality, result.pos_weight
    facts: dict[str, Any] = {
        "images": result.images,
        "classes": len(result.label_counts),
        "images per class": f"{min(result.label_counts)} to {max(result.label_counts)}",
        "positive weight": weight if isinstance(weight, float) else f"{min(weight):.4g} to {max(weight):.4g}",
        "l2": result.l2,
        "background": result.background,
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
    if result.calibration:
        tried = dict(result.background_search)
        if result.background in tried:
            facts["held-out mean average precision without background"] = tried[0.0]
        facts["images with too little background"] = result.without_background
        scale = result.calibration.evidence
        facts["evidence"] = f"sigmoid({scale.scale:.3g} logit {scale.shift:+.3g})"
        facts["maps calibrated at zoom"] = ", ".join(f"{zoom:g}" for zoom in result.calibration.maps)
    shares = result.positive_share
    facts |= {
        "positive weights": f"{min(shares):.0%} to {max(shares):.0%} per class",
        "seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in result.seconds.items()),
        "skipped": len(result.skipped),
    }
    return facts


def fit_details(result: FitResult, names: tuple[str, ...]) -> dict[str, Any]:
    """Return everything about a fit as plain data for JSON."""
    facts = asdict(result)
    facts["classes"] = [
        {
            "name": name,
            "images": result.label_counts[k],
            "average_precision": _finite(result.quality.average_precision[k]) if result.quality else None,
            "auroc": _finite(result.quality.auroc[k]) if result.quality else None,
            "positive_share": result.positive_share[min(k, len(result.positive_share) - 1)],
        }
        for k, name in enumerate(names)
    ]
    if result.quality:
        facts["quality"] = {
            "images": result.quality.images,
            "mean_average_precision": result.quality.mean_average_precision,
            "mean_auroc": result.quality.mean_auroc,
            "calibration": asdict(result.quality.calibration),
            "shifted": asdict(result.quality.shifted),
        }
    return facts


def _finite(value: float) -> float | None:
    return value if value == value else None  # JSON has no NaN


def plot_fit(result: FitResult, path: Path) -> bool:
    """Plot loss, penalty search, classes and reliability to a file; return False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, search, classes, reliable = figure.subplots(2, 2).flat
    loss.plot(range(len(result.losses)), result.losses, marker="o", color=BLUE)
    epochs = "epoch, or step: first without the held-out images, then with all"
    loss.set(title="loss", xlabel=epochs, ylabel="mean over classes")
    if result.search:
        strengths, scores = zip(*result.search, strict=True)
        search.semilogx(strengths, [100 * score for score in scores], marker="o", color=BLUE)
        search.axvline(result.l2, color=RED, linestyle="--", label=f"chosen: {result.l2:g}")
        search.legend(frameon=False)
    _placeholder(search, not result.search, "the penalty was given, or there was no image to choose by")
    search.set(title="penalty", xlabel="l2", ylabel="held-out mean average precision, %")
    quality = result.quality
    if quality:
        precisions = sorted((100 * ap for ap in quality.average_precision if ap == ap), reverse=True)
        classes.plot(range(1, len(precisions) + 1), precisions, color=BLUE)
        classes.set_ylim(0, 103)
        reliable.plot([0, 1], [0, 1], color="0.6", linewidth=1)
        shifted = "less log(positive weight)", RED, quality.shifted
        for name, colour, bins in (("as fitted", BLUE, quality.calibration), shifted):
            filled = [i for i, count in enumerate(bins.count) if count]
            points = [bins.score[i] for i in filled], [bins.share[i] for i in filled]
            label = f"{name}: error {bins.error:.3f}"
            reliable.plot(*points, marker="o", markersize=4, color=colour, label=label)
        reliable.legend(frameon=False, loc="lower right")
    _placeholder(classes, quality is None, "no image was held out")
    _placeholder(reliable, quality is None, "no image was held out")
    classes.set(title="classes, best first", xlabel="class", ylabel="held-out average precision, %")
    reliable.set(title="reliability", xlabel="score", ylabel="share of images that show the class")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_atomic(path, content.getvalue())
    return True


def _placeholder(axes: Any, empty: bool, sentence: str) -> None:
    if empty:
        axes.text(0.5, 0.5, sentence, ha="center", va="center", transform=axes.transAxes, color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
