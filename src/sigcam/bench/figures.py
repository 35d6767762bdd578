"""Figures of the benchmark: maps with boxes, and the distortions of a shifted head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sigcam.bench.networks import network
from sigcam.bench.paper import ROWS
from sigcam.bench.plan import Plan
from sigcam.bench.registry import MASKED_DATASETS
from sigcam.bench.tables import methods_for
from sigcam.core.config import FitConfig
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.drawing.overlay import TRUTH_COLOUR, grid, overlay, with_boxes
from sigcam.methods.explainer import explain
from sigcam.metrics.boxes import scaled_boxes
from sigcam.network.dual import DualBranch
from sigcam.reports.figures import distortions_figure


def draw_figures(plan: Plan, dataset: str, progress: Progress) -> None:
    """Draw example maps and, if the data set has masks, the maps of a shifted head."""
    qualitative(plan, dataset, progress)
    if dataset in MASKED_DATASETS:
        distortions(plan, network(plan, dataset, FitConfig(seed=plan.seed), progress), dataset)


def qualitative(plan: Plan, dataset: str, progress: Progress, rows: int = 6) -> Path:
    """Draw maps of some test images by each head, predicted box green, ground truth red; return the file."""
    net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
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
            kind, score = (
                ("probability", ex.probability) if branch == "softmax" else ("evidence", ex.evidence)
            )
            captions[-1].append(f"{ex.name(int(ex.classes[0]))}\n{kind} {float(score[0]):.3f}")
        progress("figures", number + 1, len(samples))
    heads = [name.replace(" (the paper's", "\n(the paper's").replace(", ", ",\n", 1) for name in variants]
    path = _figure_path(plan, f"maps-{dataset}.png")
    grid(lines, columns=("ground truth", *heads), captions=captions).save(path)
    return path


def distortions(plan: Plan, net: DualBranch, dataset: str) -> Path | None:
    """Draw how the softmax head's map of an image changes while its probabilities stay; return the file.

    None if the head is not linear, or no image has both a mask and a label.
    """
    samples = plan.samples(dataset, "test", 64)
    usable = tuple(s for s in samples if s.open_mask is not None and s.label is not None)
    if not net.linear or not usable:
        return None
    path = _figure_path(plan, f"distortions-{dataset}.png")
    distortions_figure(net, Samples(usable, samples.classes)).save(path)
    return path


def _figure_path(plan: Plan, name: str) -> Path:
    folder = plan.output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name
