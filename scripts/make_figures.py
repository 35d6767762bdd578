"""Draws the figures of docs/mathematics.md, reading-maps.md and results.md from what `sigcam demo` made.

    sigcam demo --output sigcam-demo && python scripts/make_figures.py sigcam-demo docs/images

It prints the numbers that those pages quote.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib
import torch
from PIL import Image
from torch import Tensor

import sigcam
from sigcam.bench.paper import ROWS
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.sample import Sample
from sigcam.drawing.overlay import HEAT, SIGNED, grid, overlay, with_boxes, with_outline
from sigcam.methods.explainer import explain_pass
from sigcam.methods.map_config import MapConfig
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch

matplotlib.use("agg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "sigcam",  # the same bytes in every run
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "figure.facecolor": "white",
    }
)
import matplotlib.pyplot as plt  # noqa: E402 (after the back end is chosen)
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm  # noqa: E402

COLOURS: dict[Branch, str] = {"softmax": "#4a0c6b", "centred": "#cf4446", "sigmoid": "#e07b00"}
GREY, RED = "#6b6b70", "#e53935"
WARM = LinearSegmentedColormap.from_list("heat", [f"#{c}" for c in HEAT])
BOTH = LinearSegmentedColormap.from_list("signed", [f"#{c}" for c in SIGNED])


def main(demo: Path, images: Path, *names: str) -> None:
    """Writes every figure to `images`, or those that are named."""
    net = opened(demo)
    tests = shapes(64, split="test")
    sample, index = next((s, i) for i, s in enumerate(tests) if rightly(net, s))
    empty = scenes(index + 1)[index]
    drawn: dict[str, Callable[[], Any]] = {
        "shift.svg": shift,
        "collapse.svg": lambda: collapse(net, sample),
        "balanced.svg": balanced,
        "clamping.png": lambda: clamping(net, sample),
        "methods.png": lambda: methods(net, sample),
        "additive.png": lambda: additive(net, sample),
        "nothing.png": lambda: nothing(net, sample, empty),
        "results-maps.jpg": lambda: controls(net, list(islice((s for s in tests if rightly(net, s)), 4))),
    }
    for name in names or drawn:
        figure = drawn[name]()
        options: dict[str, Any] = {"metadata": {"Date": None}} if name.endswith("svg") else {"dpi": 100}
        if isinstance(figure, Image.Image):
            figure.save(images / name, quality=75)
        else:
            figure.savefig(images / name, bbox_inches="tight", **options)
            plt.close(figure)
        print(f"{name}: {(images / name).stat().st_size / 1000:.0f} kB")
    rows = net.last_layer("softmax").get_parameter("weight").detach().double()
    published = sigcam.load_classifier("embedded").model.get_parameter("classifier.weight").detach().double()
    for name, weight in (("the demo's head", rows), ("the embedded classifier's own head", published)):
        size = float(weight.mean(0).norm() / weight.norm(dim=1).mean())
        print(f"{name}: the mean row is {size:.1%} as long as a row is on average")


def opened(demo: Path) -> DualBranch:
    """The demo's classifier with its branch, in double precision, so that identities are seen to hold."""
    classifier = sigcam.load_classifier("embedded", weights=demo / "classifier.safetensors")
    known = {"transform": classifier.transform, "class_names": classifier.classes}
    return sigcam.load(demo / "branch.safetensors", classifier.model, **known).double()


def batch(net: DualBranch, sample: Sample) -> Tensor:
    """(1, 3, H, W), as the network takes it."""
    assert net.transform is not None
    return net.transform(sample.open())[None].double()


def rightly(net: DualBranch, sample: Sample) -> bool:
    """Whether the classifier is right, and the branch agrees."""
    ex = sigcam.explain(net, batch(net, sample))
    return int(ex.classes[0]) == sample.label and float(ex.evidence[0]) > 0.5


# ------------------------------------------------------------------------------------------------- plots


def shift() -> Any:
    """Four logits, moved together by three amounts, and the probabilities, which stay."""
    logits = torch.tensor([2.0, 1.0, 0.2, -0.8], dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.7), layout="constrained")
    for i, (moved, colour) in enumerate(((0.0, GREY), (3.0, "#e07b00"), (-4.0, "#4a0c6b"))):
        places = [k + 0.25 * (i - 1) for k in range(4)]
        axes[0].bar(places, (logits + moved).tolist(), 0.23, color=colour, label=f"{moved:+.0f}")
        axes[1].bar(places, (logits + moved).softmax(0).tolist(), 0.23, color=colour)
    axes[0].axhline(0, color="black", linewidth=0.8)
    axes[0].set_title("logits, each plus the same number")
    axes[1].set_title("softmax probabilities")
    axes[1].set_ylim(0, 1)
    axes[0].legend(title="shift", frameon=False, ncols=3, fontsize=9, loc="lower left", borderaxespad=0)
    axes[0].set_ylim(-8.5, 6)
    for ax in axes:
        ax.set_xticks(range(4), [f"class {k}" for k in range(4)])
    return figure


def collapse(net: DualBranch, sample: Sample) -> Any:
    """How much of a map is left when a number is taken off every weight of the softmax head."""
    image, moving = batch(net, sample), copy.deepcopy(net)
    weight = moving.last_layer("softmax").get_parameter("weight")
    start = weight.detach().clone()
    spread = float(start.std())
    steps = torch.linspace(0, 0.5, 21, dtype=torch.float64)
    left: dict[Branch, list[float]] = {"softmax": [], "centred": [], "sigmoid": []}
    chance = list[float]()
    for step in steps.tolist():
        with torch.no_grad():
            weight.copy_(start - step * spread)
        forward_pass = moving.run(image)
        for branch, shares in left.items():
            config = MapConfig("cam", branch, clamp=False, scale="raw")
            ex = explain_pass(moving, forward_pass, config, classes=sample.label, size="features")
            shares.append(float((ex.maps > 0).double().mean()))
        chance.append(float(ex.probability[0]))
    gone = next(step for step, share in zip(steps.tolist(), left["softmax"], strict=True) if not share)
    row = start[sample.label] / spread
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.9), layout="constrained")
    for off, colour, name in ((0.0, GREY, "as trained"), (gone, COLOURS["softmax"], "when the map is gone")):
        axes[0].hist((row - off).tolist(), bins=40, range=(-4, 4), histtype="step", color=colour, label=name)
    axes[0].axvline(0, 0, 0.72, color="black", linewidth=0.8)
    axes[0].set_title("the class's weights, one per channel")
    axes[0].set_xlabel("weight, in standard deviations")
    axes[0].set_ylabel("channels")
    axes[0].set_ylim(0, 165)
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    axes[1].plot(steps, [100 * p for p in chance], ":", color="black", label="probability of the class")
    for branch, shares in left.items():
        dashed = "--" if branch == "centred" else "-"
        axes[1].plot(steps, [100 * s for s in shares], dashed, color=COLOURS[branch], label=f"{branch} map")
    axes[1].set_title("cells of the map above zero, and probability")
    axes[1].set_ylabel("%")
    axes[1].set_ylim(-3, 103)
    axes[1].set_xlabel("taken off every weight, in standard deviations")
    axes[1].legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.28))
    print(f"collapse: probability from {min(chance):.12f} to {max(chance):.12f}")
    print("collapse: share of cells above zero", {b: (s[0], s[-1]) for b, s in left.items()})
    positive = [float((row > off).double().mean()) for off in (0.0, gone)]
    print(f"collapse: gone at {gone:.3f}; positive weights before and then: {positive}")
    return figure


def balanced() -> Any:
    """The score at which Eq. 12 is smallest, by how many of the images alike show the class."""
    share = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    figure, ax = plt.subplots(figsize=(4.6, 3.1), layout="constrained")
    for weight, name, colour in ((1, "weight 1", GREY), (7, "weight C - 1 = 7", "#e07b00")):
        ax.plot(share, weight * share / (weight * share + 1 - share), color=colour, label=name)
    ax.plot([1 / 8, 1 / 8, 0], [0, 0.5, 0.5], ":", color="black", linewidth=1)
    ax.annotate("the average class:\n1 image in C = 8", (1 / 8, 0.5), (0.15, 0.02), fontsize=9)
    ax.set_xlabel("share of images with these features that show the class")
    ax.set_ylabel("score that Eq. 12 asks for")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


# ------------------------------------------------------------------------------------------------ pictures


def clamping(net: DualBranch, sample: Sample) -> Any:
    """A signed map as the sum of what positive weights give and what negative ones give."""
    image = batch(net, sample)
    signed, kept = (
        sigcam.explain(net, image, "cam", clamp=clamp, scale="raw", size="features").maps[0]
        for clamp in (False, True)
    )
    parts = [signed, kept, signed - kept]
    names = ["all weights", "positive weights only\n(what clamping keeps)", "negative weights only"]
    return in_logits(sample.open(), parts, [*names], [float(part.mean()) for part in parts])


def in_logits(picture: Image.Image, maps: list[Tensor], names: list[str], means: list[float]) -> Any:
    """A picture, and maps beside it on one signed scale."""
    figure, axes = plt.subplots(1, len(maps) + 1, figsize=(2.35 * (len(maps) + 1), 2.9), layout="constrained")
    peak = max(float(values.abs().max()) for values in maps)
    shown = None
    axes[0].imshow(picture)
    axes[0].set_title("input")
    for ax, values, name, mean in zip(axes[1:], maps, names, means, strict=True):
        shown = ax.imshow(values, cmap=BOTH, norm=TwoSlopeNorm(0, -peak, peak))
        ax.set_title(name)
        ax.set_xlabel(f"mean {mean:+.2f}")
    for ax in axes:
        bare(ax)
    figure.colorbar(shown, ax=axes[-1], shrink=0.7, label="logits")
    return figure


def methods(net: DualBranch, sample: Sample) -> Any:
    """Unit maps of six methods from the softmax head, which is global average + linear."""
    image = batch(net, sample)
    names = ("cam", "grad-cam", "xgrad-cam", "hires-cam", "layer-cam", "grad-cam++", "ablation-cam")
    figure, axes = plt.subplots(2, 4, figsize=(8.4, 5.0), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)
    axes = axes.flatten()
    axes[0].imshow(with_outline(sample.open(), sample.open_mask()) if sample.open_mask else sample.open())
    axes[0].set_title("input, object outlined")
    low = dict[str, Tensor]()
    for ax, name in zip(axes[1:], names, strict=True):
        raw: Any = {"branch": "softmax", "classes": sample.label, "scale": "raw", "size": "features"}
        maps = sigcam.explain(net, image, name, **raw).maps[0]
        low[name] = maps / maps.abs().max()
        ax.imshow(low[name].relu() / low[name].max(), cmap=WARM, vmin=0, vmax=1)
        ax.set_title(name)
        same = bool((low[name] - low["cam"]).abs().max() < 1e-3)
        said = (
            "the same as cam" if same else "cam of positive weights" if name == "layer-cam" else "another map"
        )
        ax.set_xlabel(" " if name == "cam" else said)
    for ax in axes:
        bare(ax)
    return figure


def additive(net: DualBranch, sample: Sample) -> Any:
    """The raw map's numbers on the picture: their mean plus the bias is the logit."""
    image = batch(net, sample)
    ex = sigcam.explain(net, image, "cam", scale="raw", size="features")
    values, label = ex.maps[0], int(ex.classes[0])
    bias = float(net.last_layer("sigmoid").get_parameter("bias").detach()[label])
    mean, logit = float(values.mean()), float(ex.logits[0])
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 4.0), layout="constrained")
    axes[0].imshow(sample.open())
    axes[0].set_title(f"input: {ex.name(label)}")
    peak = float(values.abs().max())
    axes[1].imshow(values, cmap=BOTH, norm=TwoSlopeNorm(0, -peak, peak))
    for (row, column), value in zip(
        ((r, c) for r in range(values.shape[0]) for c in range(values.shape[1])),
        values.flatten().tolist(),
        strict=True,
    ):
        dark = abs(value) > 0.6 * peak
        axes[1].text(
            column,
            row,
            f"{value:+.1f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
        )
    axes[1].set_title("the sigmoid branch's raw map, in logits")
    evidence = 1 / (1 + math.exp(-logit))
    axes[1].set_xlabel(
        f"mean {mean:+.3f}, plus the bias {bias:+.3f},\nis the logit {logit:+.3f}: evidence {evidence:.3f}"
    )
    for ax in axes:
        bare(ax)
    print(f"additive: {mean:.12f} + {bias:.12f} = {mean + bias:.12f}, logit {logit:.12f}")
    return figure


def nothing(net: DualBranch, sample: Sample, empty: Sample) -> Any:
    """The same scene with its bird and without: each map stretched for itself, and both in logits."""
    figure, axes = plt.subplots(2, 3, figsize=(7.6, 5.4), layout="constrained")
    label, peak, shown = sample.label, 0.0, None
    found = []
    for each in (sample, empty):
        image = batch(net, each)
        unit = sigcam.explain(net, image, "cam", classes=label, size="features")
        raw = sigcam.explain(net, image, "cam", classes=label, scale="raw", size="features")
        peak = max(peak, float(raw.maps.abs().max()))
        found.append((each.open(), unit, raw))
    for row, (picture, unit, raw) in enumerate(found):
        axes[row, 0].imshow(picture)
        axes[row, 0].set_ylabel("with the bird" if row == 0 else "the same without it")
        axes[row, 1].imshow(unit.maps[0], cmap=WARM, vmin=0, vmax=1)
        shown = axes[row, 2].imshow(raw.maps[0], cmap=BOTH, norm=TwoSlopeNorm(0, -peak, peak))
        mean, logit = float(raw.maps.mean()), float(raw.logits[0])
        axes[row, 1].set_xlabel(f"evidence {float(unit.evidence[0]):.3f}")
        axes[row, 2].set_xlabel(f"mean {mean:+.2f}, logit {logit:+.2f}")
    for ax, name in zip(
        axes[0], ("input", "scale='unit', positive weights", "scale='raw', all weights"), strict=True
    ):
        ax.set_title(name)
    for ax in axes.flatten():
        bare(ax)
    figure.colorbar(shown, ax=axes[:, 2], shrink=0.6, label="logits")
    return figure


def controls(net: DualBranch, samples: list[Sample]) -> Any:
    """CAM maps of some pictures in the six ways of the benchmark's tables; box green, ground truth red."""
    net = copy.deepcopy(net).float()
    lines, captions = list[list[Any]](), list[list[str]]()
    for sample in samples:
        assert sample.boxes is not None and sample.label is not None
        truth = [list(box) for box in sample.boxes]
        line, said = [with_boxes(sample.open(), truth, RED)], [net.class_names[sample.label]]
        for branch, clamp in ROWS.values():
            ex = sigcam.explain(net, [sample.open()], "cam", branch=branch, clamp=clamp)
            shown = with_boxes(overlay(sample.open(), ex.maps[0]), truth, RED)
            line.append(with_boxes(shown, ex.boxes(0.2)[0].tolist()))
            score = float(ex.evidence[0] if branch == "sigmoid" else ex.probability[0])
            said.append(f"{'evidence' if branch == 'sigmoid' else 'probability'} {score:.2f}")
        lines.append(line)
        captions.append(said)
    heads = [f"{branch}, {'clamped' if clamp else 'signed'}" for branch, clamp in ROWS.values()]
    drawn = grid(lines, columns=("ground truth", *heads), captions=captions)
    return drawn.resize((drawn.width * 3 // 4, drawn.height * 3 // 4), Image.Resampling.LANCZOS)


def bare(ax: Any) -> None:
    """No ticks and no frame."""
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
