"""Measure the cost of the branch: parameters, time per image, training time."""

import time
from statistics import median
from typing import Any

import torch

from sigcam.bench.networks import network, paper_fit
from sigcam.bench.paper import published_overhead
from sigcam.bench.plan import Plan
from sigcam.bench.registry import FINE_DATASETS
from sigcam.bench.render import OVERHEAD_REPEATS, write_result
from sigcam.core.types import Progress
from sigcam.methods.explainer import explain
from sigcam.models.classifier import load_classifier
from sigcam.network.attachment import attach
from sigcam.training.branch import fit
from sigcam.training.linear_probe import train_probe


def overhead(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Measure parameters, time per image and training time without and with the branch; write the result."""
    dataset = plan.available(FINE_DATASETS)[0]
    net = network(plan, dataset, paper_fit(plan, dataset), progress)
    images = torch.randn(8, *net.input_shape, generator=torch.Generator().manual_seed(0)).to(net.device)
    calls: dict[str, Any] = {
        "classifier alone": lambda: net.model(images),
        "both branches": lambda: net(images),
        "Grad-CAM, softmax head": lambda: explain(net, images, "grad-cam", branch="softmax"),
        "Grad-CAM, sigmoid branch": lambda: explain(net, images, "grad-cam"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for repeat in range(OVERHEAD_REPEATS + 1):  # the first is a warm-up
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                torch.zeros(1, device=net.device).item()  # wait for the device
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
            progress("overhead", repeat + 1, OVERHEAD_REPEATS + 1)
    content = {
        "table": "overhead",
        **plan.provenance(),
        "backbone": plan.backbone,
        "dataset": dataset,
        "parameters": {
            "classifier": sum(p.numel() for p in net.model.parameters()),
            "branch": sum(p.numel() for p in net.parameters()),
        },
        "ms_per_image": {name: 1000 * median(times) / len(images) for name, times in seconds.items()},
        "training": _training_seconds(plan, dataset, progress),
        "published": published_overhead(),
    }
    write_result(plan, content)
    return content


def _training_seconds(plan: Plan, dataset: str, progress: Progress) -> dict[str, float]:
    """Time the training of a linear probe and of the branch, each from image files."""
    train = plan.samples(dataset, "train", 512)
    classifier = load_classifier(plan.backbone, num_classes=len(train.classes), device=plan.device)
    start = time.perf_counter()
    train_probe(classifier, train, seed=plan.seed, workers=plan.workers, progress=progress)
    probe = time.perf_counter() - start
    net = attach(classifier.model, transform=classifier.transform, class_names=train.classes)
    start = time.perf_counter()
    result = fit(net, train, paper_fit(plan, dataset), progress=progress)
    branch = time.perf_counter() - start
    return {
        "images": len(train),
        "classifier, seconds": probe,
        "branch, seconds": branch,
        "branch without the backbone's pass, seconds": branch - result.seconds["features"],
    }
