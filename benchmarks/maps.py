"""Grad-CAM maps of a batch: sigcam, its peers and the plain forward pass, side by side in one run.

    make bench

Repeats are interleaved, so that a busy moment of the machine falls on all alike; what counts is the ratio.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
import torchvision
from captum.attr import LayerGradCam
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torchcam.methods import GradCAM as TorchCam

import sigcam

BATCH, REPEATS = 8, 7
LAYERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "resnet50": lambda model: model.layer4,
    "vgg16": lambda model: model.features[29],
}


def rivals(name: str, images: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed: each call gives one Grad-CAM map per image at image size."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None).eval()
    layer, size = LAYERS[name](model), images.shape[-2:]
    net = sigcam.attach(model)
    net.fitted = True  # how fast a map is does not depend on the branch's weights
    peer = GradCAM(model, [layer])
    torchcam = TorchCam(model, layer)
    captum = LayerGradCam(model, layer)

    def plain() -> object:
        with torch.inference_mode():
            return model(images)

    def with_grad_cam() -> object:
        return peer(images, [ClassifierOutputTarget(1)] * len(images))

    def with_torchcam() -> object:
        scores = model(images)
        return torchcam(scores.argmax(1).tolist(), scores)

    def with_captum() -> object:
        maps = captum.attribute(images, target=[1] * len(images), relu_attributions=True)
        return nn.functional.interpolate(maps, size, mode="bilinear")

    return {
        "plain forward": plain,
        "sigcam, sigmoid branch": lambda: sigcam.explain(net, images, "grad-cam"),
        "pytorch-grad-cam": with_grad_cam,
        "torch-cam": with_torchcam,
        "captum": with_captum,
    }


def measure(name: str) -> dict[str, float]:
    """Median seconds per batch of each rival."""
    images = torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    calls = rivals(name, images)
    seconds: dict[str, list[float]] = {rival: [] for rival in calls}
    for repeat in range(REPEATS + 1):
        for rival, call in calls.items():
            began = time.perf_counter()
            call()
            if repeat:  # the first round warms up
                seconds[rival].append(time.perf_counter() - began)
    return {rival: statistics.median(values) for rival, values in seconds.items()}


def main() -> None:
    """Prints a table and writes results/maps.json."""
    warnings.simplefilter("ignore")
    rows = []
    for name in LAYERS:
        medians = measure(name)
        for rival, seconds in medians.items():
            ratio = seconds / medians["plain forward"]
            rows.append(
                {"model": name, "what": rival, "seconds_per_batch": seconds, "ratio_to_forward": ratio}
            )
            print(
                f"{name:10s} {rival:24s} {seconds:7.3f} s per batch of {BATCH}   {ratio:5.2f} x plain forward"
            )
    packages = ("torch", "grad-cam", "torchcam", "captum")
    result = {
        "command": "make bench",
        "date": datetime.now(UTC).date().isoformat(),
        "batch": BATCH,
        "repeats": REPEATS,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {package: version(package) for package in packages},
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / "maps.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
