"""Figures of the benchmark: maps with boxes, and the two distortions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sigcam.bench.networks import network
from sigcam.bench.paper import ROWS
from sigcam.bench.plan import Plan
from sigcam.bench.tables import paper_methods_for
from sigcam.core.config import FitConfig
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.drawing.overlay import grid, overlay, with_boxes
from sigcam.methods.explainer import explain
from sigcam.metrics.boxes import scaled_boxes
from sigcam.network.dual import DualBranch


def qualitative(plan: Plan, dataset: str, progress: Progress, rows: int = 6) -> Path:
    """Maps of some test pictures by each head, predicted box green, ground truth red."""
    net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
    samples = plan.samples(dataset, "test", rows)
    names, method = [*[*ROWS][:2], *[*ROWS][4:]], paper_methods_for(net)[0]
    names += [] if plan.zoom == 1 else ["sigmoid, clamped, enlarged"]
    drawn, captions = list[list[Any]](), list[list[str]]()
    for number, sample in enumerate(samples):
        picture = sample.open()
        width, height = net.input_shape[2], net.input_shape[1]
        truth = []
        if sample.boxes:
            boxes = torch.tensor(sample.boxes, dtype=torch.int64)
            truth = scaled_boxes(boxes, sample.size or picture.size, (width, height)).tolist()
        squashed = with_boxes(picture.resize((width, height)), truth, "#e53935")
        line, said = [squashed], ["" if sample.label is None else samples.classes[sample.label]]
        for name in names:
            branch, clamp = ROWS.get(name, ("sigmoid", True))
            zoom = plan.zoom if name not in ROWS else 1.0
            ex = explain(net, [picture], method, branch=branch, clamp=clamp, zoom=zoom)  # type: ignore[arg-type]
            shown = with_boxes(overlay(picture, ex.maps[0]), truth, "#e53935")
            line.append(with_boxes(shown, ex.boxes(0.2)[0].tolist()))
            kind, score = (
                ("probability", ex.probability) if branch == "softmax" else ("evidence", ex.evidence)
            )
            said.append(f"{ex.name(int(ex.classes[0]))}\n{kind} {float(score[0]):.3f}")
        drawn.append(line)
        captions.append(said)
        progress("figures", number + 1, len(samples))
    heads = (
        "ground truth",
        *(name.replace(" (the paper's", "\n(the paper's").replace(", ", ",\n", 1) for name in names),
    )
    path = plan.output / "figures" / f"maps-{dataset}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(drawn, columns=heads, captions=captions).save(path)
    return path


def distortions(plan: Plan, net: DualBranch, dataset: str) -> Path | None:
    """How far the softmax head's map moves while its probabilities stand still, on one picture."""
    from sigcam.reports.figures import distortions_figure

    found = plan.samples(dataset, "test", 64)
    usable = (sample for sample in found if sample.open_mask is not None and sample.label is not None)
    samples = Samples(tuple(usable), found.classes)
    if not net.linear or not samples:
        return None
    path = plan.output / "figures" / f"distortions-{dataset}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    distortions_figure(net, samples).save(path)
    return path
