"""Measure the cost of the branch: parameters, time per image, training time."""

import time
from statistics import median
from typing import Any

import torch

from sigcam.bench.networks import network, paper_fit, untrained_classifier
from sigcam.bench.paper import published_overhead
from sigcam.bench.plan import Plan
from sigcam.bench.registry import FINE_DATASETS
from sigcam.bench.render import write_result
from sigcam.core.types import Progress
from sigcam.methods.explainer import explain
from sigcam.network.attachment import attach
from sigcam.training.branch import fit
from sigcam.training.linear_probe import train_probe


def overhead(
    plan: Plan, progress: Progress, table: str = "overhead", *, repeats: int = 21, images: int = 512
) -> dict[str, Any]:
    """Measure parameters, time per image and training time without and with the branch; write the result.

    Args:
        table: name of the result.
        repeats: how often each time is measured.
        images: training images for the training time.
    """
    dataset = plan.available(FINE_DATASETS)[0]
    net = network(plan, dataset, paper_fit(plan, dataset), progress)
    batch = torch.randn(8, *net.input_shape, generator=torch.Generator().manual_seed(0)).to(net.device)
    calls: dict[str, Any] = {
        "classifier alone": lambda: net.model(batch),
        "both branches": lambda: net(batch),
        "Grad-CAM, softmax head": lambda: explain(net, batch, "grad-cam", branch="softmax"),
        "Grad-CAM, sigmoid branch": lambda: explain(net, batch, "grad-cam"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for repeat in range(repeats + 1):  # the first is a warm-up
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                torch.zeros(1, device=net.device).item()  # wait for the device
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
            progress("overhead", repeat + 1, repeats + 1)
    content = {
        "table": table,
        **plan.provenance(),
        "backbone": plan.backbone,
        "dataset": dataset,
        "repeats": repeats,
        "parameters": {
            "classifier": sum(p.numel() for p in net.model.parameters()),
            "branch": sum(p.numel() for p in net.parameters()),
        },
        "ms_per_image": {name: 1000 * median(times) / len(batch) for name, times in seconds.items()},
        "training": _training_seconds(plan, dataset, images, progress),
        "published": published_overhead(),
    }
    write_result(plan, content)
    return content


def _training_seconds(plan: Plan, dataset: str, images: int, progress: Progress) -> dict[str, float]:
    """Time the training of a linear probe and of the branch, each from image files."""
    train = plan.samples(dataset, "train", images)
    classifier = untrained_classifier(plan, len(train.classes))
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
