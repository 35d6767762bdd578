"""The report of a fit: main numbers, details and a plot."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sigcam.core.files import write_atomic
from sigcam.metrics.classification import Calibration
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
            facts["the same without background at this l2"] = tried[0.0]
        facts["images with too little background"] = result.without_background
        scale = result.calibration.evidence
        facts["evidence"] = f"sigmoid({scale.scale:.3g} logit {scale.shift:+.3g})"
        if evidence := result.evidence_quality:
            facts["calibration error of evidence"] = evidence.reliability.error
            facts["label's evidence above one half, % of images"] = evidence.label_above_half
            facts["best evidence above one half, % of backgrounds"] = evidence.background_above_half
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
    evidence = facts.pop("evidence_quality")
    if evidence:
        evidence["reliability"]["weight"] = evidence["reliability"].pop("count")  # cases have weights
        facts["evidence_quality"] = evidence
    return facts


def _finite(value: float) -> float | None:
    return value if value == value else None  # JSON has no NaN


def plot_fit(result: FitResult, path: Path) -> bool:
    """Plot loss, penalty search, classes and reliability to a file, and the search for the weight of
    backgrounds and the reliability of evidence if there were any; return False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels = [_plot_loss, _plot_penalty, _plot_classes, _plot_reliability]
    if result.background_search:
        panels.insert(2, _plot_background)
    if result.evidence_quality:
        panels.append(_plot_evidence)
    columns = -(-len(panels) // 2)
    figure = Figure(figsize=(5.5 * columns, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(2, columns).flat)
    for panel, axes in zip(panels, places, strict=False):
        panel(axes, result)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_atomic(path, content.getvalue())
    return True


def _plot_loss(axes: Any, result: FitResult) -> None:
    axes.plot(range(len(result.losses)), result.losses, marker="o", color=BLUE)
    epochs = "epoch, or step: first without the held-out images, then with all"
    axes.set(title="loss", xlabel=epochs, ylabel="mean over classes")


def _plot_penalty(axes: Any, result: FitResult) -> None:
    if result.search:
        strengths, scores = zip(*result.search, strict=True)
        factor = 100 if result.search_by == "average precision" else 1
        axes.semilogx(strengths, [factor * score for score in scores], marker="o", color=BLUE)
        axes.axvline(result.l2, color=RED, linestyle="--", label=f"chosen: {result.l2:g}")
        axes.legend(frameon=False)
    _placeholder(axes, not result.search, "the penalty was given, or there was no image to choose by")
    scores_are = {"average precision": "mean average precision, %", "evidence loss": "log loss of evidence"}
    axes.set(title="penalty", xlabel="l2", ylabel=f"held-out {scores_are[result.search_by]}")


def _plot_background(axes: Any, result: FitResult) -> None:
    weights, scores = zip(*sorted(result.background_search), strict=True)
    axes.plot(weights, [100 * score for score in scores], marker="o", color=BLUE)
    axes.axvline(result.background, color=RED, linestyle="--", label=f"chosen: {result.background:g}")
    axes.set_xticks(weights)
    axes.legend(frameon=False)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(title="background", xlabel="weight", ylabel="held-out mean average precision, %")


def _plot_classes(axes: Any, result: FitResult) -> None:
    if quality := result.quality:
        precisions = sorted((100 * ap for ap in quality.average_precision if ap == ap), reverse=True)
        axes.plot(range(1, len(precisions) + 1), precisions, color=BLUE)
        axes.set_ylim(0, 103)
    _placeholder(axes, result.quality is None, "no image was held out")
    axes.set(title="classes, best first", xlabel="class", ylabel="held-out average precision, %")


def _plot_reliability(axes: Any, result: FitResult) -> None:
    if quality := result.quality:
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
        _plot_bins(axes, quality.calibration, "as fitted", BLUE)
        _plot_bins(axes, quality.shifted, "less log(positive weight)", RED)
        axes.legend(frameon=False, loc="lower right")
    _placeholder(axes, result.quality is None, "no image was held out")
    axes.set(title="reliability", xlabel="score", ylabel="share of images that show the class")


def _plot_evidence(axes: Any, result: FitResult) -> None:
    quality = result.evidence_quality
    assert quality
    bins = quality.reliability
    filled = [i for i, weight in enumerate(bins.count) if weight]
    points = [bins.score[i] for i in filled], [bins.share[i] for i in filled]
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    axes.plot(*points, color=BLUE, alpha=0.4, linewidth=1)
    axes.scatter(*points, [10 + 300 * bins.count[i] for i in filled], color=BLUE, zorder=2)
    shares = (
        f"calibration error {bins.error:.3f}\nevidence above one half:\n"
        f"{quality.label_above_half:.1f} % of labels\n{quality.background_above_half:.1f} % of backgrounds"
    )
    axes.text(0.04, 0.96, shares, va="top", transform=axes.transAxes)
    axes.set(title="reliability of evidence (larger dots: more cases)")
    question = "evidence\n(half of the cases show the class, the others another one or none)"
    axes.set(xlabel=question, ylabel="share of cases that show the class")


def _plot_bins(axes: Any, bins: Calibration, name: str, colour: str) -> None:
    filled = [i for i, count in enumerate(bins.count) if count]
    points = [bins.score[i] for i in filled], [bins.share[i] for i in filled]
    label = f"{name}: error {bins.error:.3f}"
    axes.plot(*points, marker="o", markersize=4, color=colour, label=label)


def _placeholder(axes: Any, empty: bool, sentence: str) -> None:
    if empty:
        axes.text(0.5, 0.5, sentence, ha="center", va="center", transform=axes.transAxes, color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
