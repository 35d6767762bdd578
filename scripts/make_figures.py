"""Draw the figures of README.md, docs/mathematics.md, reading-maps.md and results.md from the output of
`sigcam demo`; absent.jpg from the embedded classifier and its branch.

    sigcam demo --output sigcam-demo && python scripts/make_figures.py sigcam-demo docs/images

Prints the numbers that those pages quote.
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
from sigcam.methods.explanation import presence_words
from sigcam.methods.registry import MapConfig
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch
from sigcam.network.opening import open_network

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
HEAT_CMAP = LinearSegmentedColormap.from_list("heat", [f"#{c}" for c in HEAT])
SIGNED_CMAP = LinearSegmentedColormap.from_list("signed", [f"#{c}" for c in SIGNED])


def main(demo: Path, images: Path, *names: str) -> None:
    """Write every figure to `images`, or only those named."""
    net = open_demo(demo)
    tests = shapes(64, split="test")
    sample, index = next((s, i) for i, s in enumerate(tests) if is_correct(net, s))
    empty = scenes(index + 1)[index]
    figures: dict[str, Callable[[], Any]] = {
        "shift.svg": shift,
        "collapse.svg": lambda: collapse(net, sample),
        "balanced.svg": balanced,
        "clamping.png": lambda: clamping(net, sample),
        "methods.png": lambda: methods(net, sample),
        "additive.png": lambda: additive(net, sample),
        "nothing.png": lambda: nothing(net, sample, empty),
        "absent.jpg": lambda: absent(open_network("embedded").net),
        "results-maps.jpg": lambda: controls(net, list(islice((s for s in tests if is_correct(net, s)), 4))),
    }
    for name in names or figures:
        figure = figures[name]()
        options: dict[str, Any] = {"metadata": {"Date": None}} if name.endswith("svg") else {"dpi": 100}
        if isinstance(figure, Image.Image):
            figure.save(images / name, quality=75)
        else:
            figure.savefig(images / name, bbox_inches="tight", **options)
            plt.close(figure)
        print(f"{name}: {(images / name).stat().st_size / 1000:.0f} kB")
    rows = net.last_layer("softmax").get_parameter("weight").detach().double()
    imagenet = sigcam.load_classifier("embedded").model.get_parameter("classifier.weight").detach().double()
    for name, weight in (("the demo's head", rows), ("the embedded classifier's own head", imagenet)):
        ratio = float(weight.mean(0).norm() / weight.norm(dim=1).mean())
        print(f"{name}: the mean row is {ratio:.1%} as long as a row is on average")


def open_demo(demo: Path) -> DualBranch:
    """Return the demo's classifier with its branch, in double precision so that identities hold exactly."""
    classifier = sigcam.load_classifier("embedded", weights=demo / "classifier.safetensors")
    known = {"transform": classifier.transform, "class_names": classifier.classes}
    return sigcam.load(demo / "branch.safetensors", classifier.model, **known).double()


def model_input(net: DualBranch, sample: Sample) -> Tensor:
    """Return the network's input for a sample, (1, 3, H, W)."""
    assert net.transform is not None
    return net.transform(sample.open())[None].double()


def is_correct(net: DualBranch, sample: Sample) -> bool:
    """Return whether the classifier predicts the label and the branch agrees."""
    ex = sigcam.explain(net, model_input(net, sample))
    return int(ex.classes[0]) == sample.label and float(ex.evidence[0]) > 0.5


# ------------------------------------------------------------------------------------------------- plots


def shift() -> Any:
    """Plot four logits shifted together by three amounts, and their probabilities, which do not change."""
    logits = torch.tensor([2.0, 1.0, 0.2, -0.8], dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.7), layout="constrained")
    for i, (amount, colour) in enumerate(((0.0, GREY), (3.0, "#e07b00"), (-4.0, "#4a0c6b"))):
        xs = [k + 0.25 * (i - 1) for k in range(4)]
        axes[0].bar(xs, (logits + amount).tolist(), 0.23, color=colour, label=f"{amount:+.0f}")
        axes[1].bar(xs, (logits + amount).softmax(0).tolist(), 0.23, color=colour)
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
    """Plot how much of a map stays positive while a number is subtracted from all softmax weights."""
    image, shifted = model_input(net, sample), copy.deepcopy(net)
    weight = shifted.last_layer("softmax").get_parameter("weight")
    original = weight.detach().clone()
    spread = float(original.std())
    steps = torch.linspace(0, 0.5, 21, dtype=torch.float64)
    positive: dict[Branch, list[float]] = {"softmax": [], "centred": [], "sigmoid": []}
    probabilities = list[float]()
    for step in steps.tolist():
        with torch.no_grad():
            weight.copy_(original - step * spread)
        forward_pass = shifted.run(image)
        for branch, shares in positive.items():
            config = MapConfig("cam", branch, clamp=False, scale="raw")
            ex = explain_pass(shifted, forward_pass, config, classes=sample.label, size="features")
            shares.append(float((ex.maps > 0).double().mean()))
        probabilities.append(float(ex.probability[0]))
    vanished = next(
        step for step, share in zip(steps.tolist(), positive["softmax"], strict=True) if not share
    )
    row = original[sample.label] / spread
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.9), layout="constrained")
    for off, colour, name in (
        (0.0, GREY, "as trained"),
        (vanished, COLOURS["softmax"], "when the map is gone"),
    ):
        axes[0].hist((row - off).tolist(), bins=40, range=(-4, 4), histtype="step", color=colour, label=name)
    axes[0].axvline(0, 0, 0.72, color="black", linewidth=0.8)
    axes[0].set_title("the class's weights, one per channel")
    axes[0].set_xlabel("weight, in standard deviations")
    axes[0].set_ylabel("channels")
    axes[0].set_ylim(0, 165)
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    axes[1].plot(
        steps, [100 * p for p in probabilities], ":", color="black", label="probability of the class"
    )
    for branch, shares in positive.items():
        dashed = "--" if branch == "centred" else "-"
        axes[1].plot(steps, [100 * s for s in shares], dashed, color=COLOURS[branch], label=f"{branch} map")
    axes[1].set_title("cells of the map above zero, and probability")
    axes[1].set_ylabel("%")
    axes[1].set_ylim(-3, 103)
    axes[1].set_xlabel("taken off every weight, in standard deviations")
    axes[1].legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.28))
    print(f"collapse: probability from {min(probabilities):.12f} to {max(probabilities):.12f}")
    print("collapse: share of cells above zero", {b: (s[0], s[-1]) for b, s in positive.items()})
    weights = [float((row > off).double().mean()) for off in (0.0, vanished)]
    print(f"collapse: gone at {vanished:.3f}; positive weights before and then: {weights}")
    return figure


def balanced() -> Any:
    """Plot the score that minimises Eq. 12 by the share of images with equal features that show the class."""
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
    """Draw a signed map as the sum of the maps of its positive and of its negative weights."""
    image = model_input(net, sample)
    signed, kept = (
        sigcam.explain(net, image, "cam", clamp=clamp, scale="raw", size="features").maps[0]
        for clamp in (False, True)
    )
    parts = [signed, kept, signed - kept]
    names = ["all weights", "positive weights only\n(what clamping keeps)", "negative weights only"]
    return draw_in_logits(sample.open(), parts, [*names], [float(part.mean()) for part in parts])


def draw_in_logits(picture: Image.Image, maps: list[Tensor], names: list[str], means: list[float]) -> Any:
    """Draw an image and, beside it, maps in logits on one signed scale."""
    figure, axes = plt.subplots(1, len(maps) + 1, figsize=(2.35 * (len(maps) + 1), 2.9), layout="constrained")
    peak = max(float(values.abs().max()) for values in maps)
    shown = None
    axes[0].imshow(picture)
    axes[0].set_title("input")
    for ax, values, name, mean in zip(axes[1:], maps, names, means, strict=True):
        shown = ax.imshow(values, cmap=SIGNED_CMAP, norm=TwoSlopeNorm(0, -peak, peak))
        ax.set_title(name)
        ax.set_xlabel(f"mean {mean:+.2f}")
    for ax in axes:
        remove_frame(ax)
    figure.colorbar(shown, ax=axes[-1], shrink=0.7, label="logits")
    return figure


def methods(net: DualBranch, sample: Sample) -> Any:
    """Draw unit maps of seven methods from the softmax head, which is global average + linear."""
    image = model_input(net, sample)
    names = ("cam", "grad-cam", "xgrad-cam", "hires-cam", "layer-cam", "grad-cam++", "ablation-cam")
    figure, axes = plt.subplots(2, 4, figsize=(8.4, 5.0), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)
    axes = axes.flatten()
    axes[0].imshow(with_outline(sample.open(), sample.open_mask()) if sample.open_mask else sample.open())
    axes[0].set_title("input, object outlined")
    unit_maps = dict[str, Tensor]()
    for ax, name in zip(axes[1:], names, strict=True):
        raw: Any = {"branch": "softmax", "classes": sample.label, "scale": "raw", "size": "features"}
        maps = sigcam.explain(net, image, name, **raw).maps[0]
        unit_maps[name] = maps / maps.abs().max()
        ax.imshow(unit_maps[name].relu() / unit_maps[name].max(), cmap=HEAT_CMAP, vmin=0, vmax=1)
        ax.set_title(name)
        same = bool((unit_maps[name] - unit_maps["cam"]).abs().max() < 1e-3)
        note = (
            "the same as cam" if same else "cam of positive weights" if name == "layer-cam" else "another map"
        )
        ax.set_xlabel(" " if name == "cam" else note)
    for ax in axes:
        remove_frame(ax)
    return figure


def additive(net: DualBranch, sample: Sample) -> Any:
    """Draw a raw map with its numbers: their mean plus the bias is the logit."""
    image = model_input(net, sample)
    ex = sigcam.explain(net, image, "cam", scale="raw", size="features")
    values, label = ex.maps[0], int(ex.classes[0])
    bias = float(net.last_layer("sigmoid").get_parameter("bias").detach()[label])
    mean, logit = float(values.mean()), float(ex.logits[0])
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 4.0), layout="constrained")
    axes[0].imshow(sample.open())
    axes[0].set_title(f"input: {ex.name(label)}")
    peak = float(values.abs().max())
    axes[1].imshow(values, cmap=SIGNED_CMAP, norm=TwoSlopeNorm(0, -peak, peak))
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
        remove_frame(ax)
    print(f"additive: {mean:.12f} + {bias:.12f} = {mean + bias:.12f}, logit {logit:.12f}")
    return figure


def nothing(net: DualBranch, sample: Sample, empty: Sample) -> Any:
    """Draw the same scene with and without its bird: maps scaled one by one, and both in logits."""
    figure, axes = plt.subplots(2, 3, figsize=(7.6, 5.4), layout="constrained")
    label, peak, shown = sample.label, 0.0, None
    results = []
    for scene in (sample, empty):
        image = model_input(net, scene)
        unit = sigcam.explain(net, image, "cam", classes=label, size="features")
        raw = sigcam.explain(net, image, "cam", classes=label, scale="raw", size="features")
        peak = max(peak, float(raw.maps.abs().max()))
        results.append((scene.open(), unit, raw))
    for row, (picture, unit, raw) in enumerate(results):
        axes[row, 0].imshow(picture)
        axes[row, 0].set_ylabel("with the bird" if row == 0 else "the same without it")
        axes[row, 1].imshow(unit.maps[0], cmap=HEAT_CMAP, vmin=0, vmax=1)
        shown = axes[row, 2].imshow(raw.maps[0], cmap=SIGNED_CMAP, norm=TwoSlopeNorm(0, -peak, peak))
        mean, logit = float(raw.maps.mean()), float(raw.logits[0])
        axes[row, 1].set_xlabel(f"evidence {float(unit.evidence[0]):.3f}")
        axes[row, 2].set_xlabel(f"mean {mean:+.2f}, logit {logit:+.2f}")
    for ax, name in zip(
        axes[0], ("input", "scale='unit', positive weights", "scale='raw', all weights"), strict=True
    ):
        ax.set_title(name)
    for ax in axes.flatten():
        remove_frame(ax)
    figure.colorbar(shown, ax=axes[:, 2], shrink=0.6, label="logits")
    return figure


def absent(net: DualBranch, other: str = "espresso") -> Any:
    """Draw a photograph's maps of the predicted class and of a class that it does not show: those of the
    softmax head, each stretched to its range, and those of the branch in probabilities, on one scale.

    The photograph is skimage.data.chelsea (CC0), from `pip install 'sigcam[examples]'`.
    """
    from skimage.data import chelsea

    photograph = Image.fromarray(chelsea())
    predicted = net.class_names[int(sigcam.explain(net, [photograph], branch="softmax").classes[0])]
    figure, axes = plt.subplots(2, 3, figsize=(8.2, 5.9), layout="constrained")
    shown = None
    for row, name in enumerate((predicted, other)):
        unit = sigcam.explain(net, [photograph], branch="softmax", classes=name)
        absolute = sigcam.explain(net, [photograph], classes=name, scale="probability")
        evidence = float(absolute.evidence[0])
        axes[row, 0].imshow(absolute.pictures[0])
        axes[row, 0].set_ylabel(f"{name.replace('_', ' ')}?")
        axes[row, 1].imshow(unit.maps[0], cmap=HEAT_CMAP, vmin=0, vmax=1)
        axes[row, 1].set_xlabel(f"softmax probability {float(unit.probability[0]):.3f}")
        shown = axes[row, 2].imshow(absolute.maps[0], cmap=HEAT_CMAP, vmin=0, vmax=1)
        axes[row, 2].set_xlabel(f"evidence {evidence:.3f}: {presence_words(evidence)}")
        peak = float(absolute.maps.max())
        print(f"absent: {name}: evidence {evidence:.4f}, highest probability of the map {peak:.4f}")
    names = "photograph", "softmax head, each map\nstretched to its own range", "sigmoid branch,\nprobability"
    for ax, title in zip(axes[0], names, strict=True):
        ax.set_title(title)
    for ax in axes.flatten():
        remove_frame(ax)
    figure.colorbar(shown, ax=axes[:, 2], shrink=0.6)
    return figure


def controls(net: DualBranch, samples: list[Sample]) -> Any:
    """Draw CAM maps for each row of the benchmark's tables; predicted box green, ground truth red."""
    net = copy.deepcopy(net).float()
    rows, captions = list[list[Any]](), list[list[str]]()
    for sample in samples:
        assert sample.boxes is not None and sample.label is not None
        truth = [list(box) for box in sample.boxes]
        images, texts = [with_boxes(sample.open(), truth, RED)], [net.class_names[sample.label]]
        for branch, clamp in ROWS.values():
            ex = sigcam.explain(net, [sample.open()], "cam", branch=branch, clamp=clamp)
            drawn = with_boxes(overlay(sample.open(), ex.maps[0]), truth, RED)
            images.append(with_boxes(drawn, ex.boxes(0.2)[0].tolist()))
            score = float(ex.evidence[0] if branch == "sigmoid" else ex.probability[0])
            texts.append(f"{'evidence' if branch == 'sigmoid' else 'probability'} {score:.2f}")
        rows.append(images)
        captions.append(texts)
    heads = [f"{branch}, {'clamped' if clamp else 'signed'}" for branch, clamp in ROWS.values()]
    drawn = grid(rows, columns=("ground truth", *heads), captions=captions)
    return drawn.resize((drawn.width * 3 // 4, drawn.height * 3 // 4), Image.Resampling.LANCZOS)


def remove_frame(ax: Any) -> None:
    """Remove ticks and frame."""
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
