"""What the branch costs: time, parameters."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from sigcam.bench.networks import network
from sigcam.bench.paper import OVERHEAD
from sigcam.bench.plan import FINE, Plan
from sigcam.core.config import FitConfig
from sigcam.core.files import write_text_atomic
from sigcam.core.manifest import versions
from sigcam.core.types import Progress
from sigcam.methods.explainer import explain
from sigcam.models.classifier import load_classifier
from sigcam.network.attachment import attach
from sigcam.training.branch import fit
from sigcam.training.linear_probe import train_probe

_REPEATS = 21


_PUBLISHED = ("hours", "ms per image", "million parameters")


_PAPERS = ("the paper's, without / with the branch", *_PUBLISHED)


def overhead(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Parameters, seconds per image and training time, without and with the branch, in turns."""
    dataset = plan.available(FINE)[0]
    net = network(plan, dataset, FitConfig(seed=plan.seed), progress)
    images = torch.randn(8, *net.input_shape, generator=torch.Generator().manual_seed(0)).to(net.device)
    own = sum(p.numel() for p in net.model.parameters())
    branch = sum(p.numel() for p in net.parameters())
    calls: dict[str, Any] = {
        "classifier alone": lambda: net.model(images),
        "both branches": lambda: net(images),
        "Grad-CAM, softmax head": lambda: explain(net, images, "grad-cam", branch="softmax"),
        "Grad-CAM, sigmoid branch": lambda: explain(net, images, "grad-cam"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for repeat in range(_REPEATS + 1):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                torch.zeros(1, device=net.device).item()  # waits for all that a device was given before
                if repeat:
                    seconds[name].append(time.perf_counter() - began)
            progress("overhead", repeat + 1, _REPEATS + 1)
    held = {
        "table": "overhead",
        **_made(plan),
        "backbone": plan.backbone,
        "dataset": dataset,
        "parameters": {"classifier": own, "branch": branch},
        "ms_per_image": {name: 1000 * median(each) / len(images) for name, each in seconds.items()},
        "training": _training(plan, dataset, progress),
        "published": {name: dict(zip(_PUBLISHED, pairs, strict=True)) for name, pairs in OVERHEAD.items()},
    }
    write_text_atomic(plan.output / "overhead.json", json.dumps(held, indent=1) + "\n")
    write_text_atomic(plan.output / "overhead.md", "\n".join(_overhead_lines(held)) + "\n")
    return held


def _training(plan: Plan, dataset: str, progress: Progress) -> dict[str, float]:
    """Seconds to train a linear probe and, beside it, the branch, each from pictures; and the part of the
    latter that is not the backbone's."""
    train = plan.samples(dataset, "train", 512)
    classifier = load_classifier(plan.backbone, num_classes=len(train.classes), device=plan.device)
    began = time.perf_counter()
    train_probe(classifier, train, seed=plan.seed, workers=plan.workers, progress=progress)
    probe = time.perf_counter() - began
    net = attach(classifier.model, transform=classifier.transform, class_names=train.classes)
    began = time.perf_counter()
    result = fit(net, train, FitConfig(seed=plan.seed), progress=progress)
    both = time.perf_counter() - began
    return {
        "images": len(train),
        "classifier, seconds": probe,
        "branch, seconds": both,
        "branch without the backbone's pass, seconds": both - result.seconds["features"],
    }


def _overhead_facts(held: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(f"parameters, {name}", f"{count:,}") for name, count in held["parameters"].items()]
    found += [(f"ms per image, {name}", f"{value:.2f}") for name, value in held["ms_per_image"].items()]
    return found + [(f"training, {name}", f"{value:.4g}") for name, value in held["training"].items()]


def _overhead_published() -> list[tuple[str, list[str]]]:
    return [(name, [f"{a:g} / {b:g}" for a, b in pairs]) for name, pairs in OVERHEAD.items()]


def _overhead_foot(held: dict[str, Any]) -> str:
    said = f"{held['backbone']} on {held['dataset']}, batches of 8, {held['threads']} threads, medians of "
    return f"{said}{_REPEATS}, in turns."


def _overhead_lines(held: dict[str, Any]) -> list[str]:
    """The measurement as a page; the paper's numbers below it."""
    lines = ["# Overhead of the branch", "", "| what | number |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in _overhead_facts(held)]
    lines += ["", f"| {' | '.join(_PAPERS)} |", "|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(pairs)} |" for name, pairs in _overhead_published()]
    return [*lines, "", _overhead_foot(held), "", f"`{held['command']}`, {held['date']}."]


def _made(plan: Plan) -> dict[str, Any]:
    """How and when a table was made."""
    return {
        "command": " ".join(["sigcam", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "seed": plan.seed,
        "device": torch.device(plan.device).type,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
