"""Plot the figures of docs/results.md and docs/systems.md from the tables in benchmarks/results.

python scripts/plot_results.py
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from write_results import (
    CASES,
    CLAIM_ROWS,
    CONTRAST_ROWS,
    ROOT,
    SYSTEM_DATASETS,
    SYSTEM_VARIANTS,
    metric_of,
    row_or_none,
    rows_of,
    systems_of,
    variant_of,
)
from write_results import ROWS as NAMES

COLOURS = {"softmax": "#9a6a00", "centred": "#5b5bd6", "sigmoid": "#0a7d55"}
COLOURS |= {"sigmoid + background": "#c2255c", "softmax + background": "#555555"}
TITLES = {
    "cub": "CUB, boxes",
    "cars": "Cars, boxes",
    "ilsvrc": "ImageNet, boxes",
    "pets": "Pets, pixels (PxAP)",
}


def save(figure: Any, name: str) -> None:
    """Save the figure as SVG, with text as text."""
    path = ROOT / "docs/images" / f"{name}.svg"
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    print(path)


def localisation() -> None:
    """Plot each row of table 2 with its interval, a panel per data set; hollow: images twice as large."""
    rows = [row for row in rows_of("table2") if row["method"] == "cam"]
    figure, axes = plt.subplots(1, 4, figsize=(12, 5.2), sharey=True)
    for axis, (dataset, title) in zip(axes, TITLES.items(), strict=True):
        metric = "pxap" if dataset == "pets" else "max_box_acc_v2"
        for row in rows:
            if row["dataset"] != dataset:
                continue
            y = list(NAMES).index(variant_of(row)) + (0.18 if row["zoom"] > 1 else -0.18)
            low, high = row["intervals"][metric]
            colour = COLOURS[row["branch"]]
            face = "white" if row["zoom"] > 1 else colour
            axis.plot([low, high], [y, y], color=colour, linewidth=1.5)
            axis.plot(row[metric], y, "o", color=colour, markerfacecolor=face, markersize=6)
        axis.set_title(title, fontsize=11)
        axis.grid(axis="x", color="#dddddd")
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(NAMES)), list(NAMES.values()))
    axes[0].invert_yaxis()
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    legend = "percent; filled: the network's own size, hollow: images twice as large"
    figure.text(0.6, 0.02, legend, ha="center", fontsize=10)
    save(figure, "results-localisation")


def claim() -> None:
    """Plot the paper's comparison, its control and background evidence for every network and data set."""
    counts = [sum(dataset in case.datasets for case in CASES) for dataset in TITLES]
    figure, axes = plt.subplots(
        len(TITLES), 1, figsize=(10, 0.42 * sum(counts) + 2.6), height_ratios=[c + 0.8 for c in counts]
    )
    marks = ["o", "D", "s", "^"]
    for axis, (dataset, title) in zip(axes, TITLES.items(), strict=True):
        cases = [case for case in CASES if dataset in case.datasets]
        for y, case in enumerate(cases):
            values = list[float]()
            for mark, (variant, name) in zip(marks, CLAIM_ROWS.items(), strict=True):
                row = row_or_none(case, variant, dataset)
                if row is None:
                    continue
                value, (low, high) = row[metric_of(dataset)], row["intervals"][metric_of(dataset)]
                colour = COLOURS[variant[0]]
                face = colour if variant[1] else "white"
                axis.plot([low, high], [y, y], color=colour, linewidth=1, alpha=0.5)
                axis.plot(value, y, mark, color=colour, markerfacecolor=face, markersize=6.5, label=name)
                values.append(value)
            axis.plot([min(values), max(values)], [y, y], color="#cccccc", linewidth=1, zorder=0)
        axis.set_yticks(range(len(cases)), [case.name for case in cases], fontsize=9)
        axis.set_ylim(len(cases) - 0.4, -0.6)
        axis.set_title(title, fontsize=11, loc="left")
        axis.grid(axis="x", color="#dddddd")
        axis.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.legend(legend.values(), legend, ncol=4, frameon=False, loc="lower center", fontsize=10)
    save(figure, "results-claim")


def fidelity() -> None:
    """Plot the average drop of table 1 by method, on both data sets."""
    rows = rows_of("table1")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure, axes = plt.subplots(1, len(datasets), figsize=(6 * len(datasets), 3.6), squeeze=False)
    for axis, dataset in zip(axes[0], datasets, strict=True):
        shown = {variant: name for variant, name in NAMES.items() if variant not in CONTRAST_ROWS}
        for number, (variant, name) in enumerate(shown.items()):
            variant_rows = [r for r in rows if r["dataset"] == dataset and variant_of(r) == variant]
            if not variant_rows:
                continue
            variant_rows.sort(key=lambda r: methods.index(r["method"]))
            xs = [methods.index(r["method"]) + (number - 4) * 0.09 for r in variant_rows]
            colour = COLOURS[variant[0]]
            face = colour if variant[1] is True else "white" if variant[1] is False else "#f3c6d6"
            for x, row in zip(xs, variant_rows, strict=True):
                axis.plot([x] * 2, row["intervals"]["average_drop"], color=colour, linewidth=1.2)
            values = [r["average_drop"] for r in variant_rows]
            axis.plot(xs, values, "o", color=colour, markerfacecolor=face, markersize=5, label=name)
        axis.set_xticks(range(len(methods)), methods, fontsize=9)
        axis.set_title({"cub": "CUB", "cars": "Cars"}.get(dataset, dataset), fontsize=11)
        axis.set_ylabel("average drop, percent (lower is better)")
        axis.grid(axis="y", color="#dddddd")
        axis.set_axisbelow(True)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, ncol=3, fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0)
    )
    save(figure, "results-fidelity")


def sources() -> None:
    """Plot localisation, and how well scores recognise images of no class, against the L2 penalty."""
    rows = [
        row for row in rows_of("sources") if row["dataset"] == "cub" and variant_of(row)[1] != "probability"
    ]
    fits = list(dict.fromkeys(row["fit"] for row in rows if "fit" in row))
    fits.sort(key=lambda fit: ("negatives" in fit, float(fit.split()[1].strip(","))))
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.4))
    panels = (
        (axes[0], "max_box_acc_v2", "MaxBoxAccV2, percent"),
        (axes[1], "auroc_nothing", "AUROC, percent"),
    )
    for axis, metric, label in panels:
        for clamp in (False, True) if metric == "max_box_acc_v2" else (True,):
            name = ("sigmoid, clamped" if clamp else "sigmoid, signed") if len(panels) > 1 else "sigmoid"
            name = name if metric == "max_box_acc_v2" else "sigmoid evidence"
            by_fit = {row.get("fit"): row for row in rows if variant_of(row) == ("sigmoid", clamp)}
            values = [by_fit[fit][metric] for fit in fits]
            face = COLOURS["sigmoid"] if clamp else "white"
            axis.plot(fits, values, "o-", color=COLOURS["sigmoid"], markerfacecolor=face, label=name)
        for row in rows:
            if (
                row["branch"] == "sigmoid"
                or metric not in row
                or (metric == "auroc_nothing" and row["clamp"])
            ):
                continue
            style = "-" if row["clamp"] else "--"
            name = NAMES[row["branch"], row["clamp"]].replace(" (the paper's baseline)", "")
            name = name if metric == "max_box_acc_v2" else row["branch"]
            axis.axhline(
                row[metric], color=COLOURS[row["branch"]], linestyle=style, linewidth=1.2, label=name
            )
        axis.set_ylabel(label)
        axis.set_xticks(range(len(fits)), [fit.replace(", with ", "\nwith ") for fit in fits])
        axis.grid(axis="y", color="#dddddd")
        axis.legend(fontsize=8, frameon=False)
    axes[0].set_title("Maps locate the bird (CUB)", fontsize=11)
    axes[1].set_title("Scores tell birds from pets", fontsize=11)
    figure.tight_layout()
    save(figure, "results-sources")


def systems(table: str) -> None:
    """Plot what clamping, the branch and background evidence add to the softmax head's maps, by method."""
    held = systems_of(table)
    methods = [method for method, found in held.items() if any(len(v) > 1 for v in found.values())]
    size = (11, 0.3 * len(methods) + 1.6)
    figure, axes = plt.subplots(1, len(SYSTEM_DATASETS), figsize=size, sharey=True)
    for axis, dataset in zip(axes, SYSTEM_DATASETS, strict=True):
        for y, method in enumerate(methods):
            variants = held[method].get(dataset, {})
            for mark, variant, shift in zip("Dos", SYSTEM_VARIANTS[1:], (-0.22, 0, 0.22), strict=True):
                if variant not in variants:
                    continue
                value, low, high = variants[variant]["delta"][metric_of(dataset)]
                colour = COLOURS[variant[0]]
                face = "white" if low <= 0 <= high else colour
                axis.plot([low, high], [y + shift] * 2, color=colour, linewidth=1)
                style: Any = {"color": colour, "markerfacecolor": face, "markersize": 4.5}
                axis.plot(value, y + shift, mark, label=NAMES[variant].split(" (")[0], **style)
        axis.axvline(0, color="#888888", linewidth=1)
        axis.set_title(TITLES[dataset], fontsize=11, loc="left")
        axis.grid(axis="x", color="#dddddd")
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(methods)), methods, fontsize=9)
    axes[0].set_ylim(len(methods) - 0.4, -0.6)
    legend = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.tight_layout(rect=(0, 0.6 / size[1], 1, 1))
    figure.legend(legend.values(), legend, ncol=3, frameon=False, loc="lower center", fontsize=10)
    save(figure, f"results-{table}")


if __name__ == "__main__":
    mpl.rcParams |= {"svg.fonttype": "none", "font.family": "sans-serif", "figure.facecolor": "white"}
    mpl.rcParams["svg.hashsalt"] = "sigcam"
    claim()
    localisation()
    fidelity()
    sources()
    systems("systems")
    systems("systems-resnet50")
