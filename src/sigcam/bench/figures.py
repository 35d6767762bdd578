"""Figures of the benchmark: maps with boxes, and the distortions of a shifted head."""

from pathlib import Path
from typing import Any

import torch

from sigcam.bench.networks import network, paper_fit
from sigcam.bench.paper import ROWS
from sigcam.bench.plan import Plan
from sigcam.bench.registry import MASKED_DATASETS
from sigcam.bench.tables import methods_for
from sigcam.core.files import write_png
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.drawing.overlay import TRUTH_COLOUR, grid, overlay, with_boxes
from sigcam.methods.explainer import explain
from sigcam.metrics.boxes import scaled_boxes
from sigcam.reports.figures import distortions_figure


def draw_figures(plan: Plan, dataset: str, progress: Progress) -> None:
    """Draw example maps and, for a linear head and images with masks, the maps of a shifted head."""
    qualitative(plan, dataset, progress)
    if dataset in MASKED_DATASETS:
        net = network(plan, dataset, paper_fit(plan, dataset), progress)
        samples = plan.samples(dataset, "test", 64)
        usable = tuple(s for s in samples if s.open_mask is not None and s.label is not None)
        if net.linear and usable:
            figure = distortions_figure(net, Samples(usable, samples.classes))
            write_png(plan.output / "figures" / f"distortions-{dataset}.png", figure)


def qualitative(plan: Plan, dataset: str, progress: Progress, rows: int = 6) -> Path:
    """Draw maps of some test images by each head, predicted box green, ground truth red; return the file."""
    net = network(plan, dataset, paper_fit(plan, dataset), progress)
    samples, method = plan.samples(dataset, "test", rows), methods_for(net)[0]
    width, height = net.input_shape[2], net.input_shape[1]
    variants: dict[str, tuple[Any, bool, float]] = {
        name: (*variant, 1.0) for name, variant in ROWS.items() if variant[0] != "centred"
    }
    if plan.zoom != 1:
        variants["sigmoid, clamped, enlarged"] = ("sigmoid", True, plan.zoom)
    lines, captions = list[list[Any]](), list[list[str]]()
    for number, sample in enumerate(samples):
        image = sample.open()
        truth = []
        if sample.boxes:
            boxes = torch.tensor(sample.boxes, dtype=torch.int64)
            truth = scaled_boxes(boxes, sample.size or image.size, (width, height)).tolist()
        lines.append([with_boxes(image.resize((width, height)), truth, TRUTH_COLOUR)])
        captions.append(["" if sample.label is None else samples.classes[sample.label]])
        for branch, clamp, zoom in variants.values():
            ex = explain(net, [image], method, branch=branch, clamp=clamp, zoom=zoom)
            drawn = with_boxes(overlay(image, ex.maps[0]), truth, TRUTH_COLOUR)
            lines[-1].append(with_boxes(drawn, ex.boxes(0.2)[0].tolist()))
            kind = "probability" if branch == "softmax" else "evidence"
            captions[-1].append(f"{ex.name(int(ex.classes[0]))}\n{kind} {float(getattr(ex, kind)[0]):.3f}")
        progress("figures", number + 1, len(samples))
    heads = [name.replace(" (the paper's", "\n(the paper's").replace(", ", ",\n", 1) for name in variants]
    path = plan.output / "figures" / f"maps-{dataset}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_png(path, grid(lines, columns=("ground truth", *heads), captions=captions))
    return path
