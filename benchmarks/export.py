"""Check and time exported files: parity with PyTorch, boxes, and milliseconds in onnxruntime.

    make bench                                                   # everything, about 20 minutes on two cores
    .venv/bin/python benchmarks/export.py parity                 # one part; results of the others are kept
    .venv/bin/python benchmarks/export.py boxes --images 20      # fewer photographs

`parity` compares logits, evidence and maps of files with those of PyTorch, relative to the largest value.
`boxes` counts boxes of the embedded classifier on ILSVRC photographs that differ from those of `explain`, and
how many of these are ties. `speed` times a file in turns with the bare classifier's and with `explain`.
Weights of ResNet-50 and the embedded classifier are published ones; others are random, as are branches, since
that changes neither the accuracy of the arithmetic nor the time of a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import timm
import torch
import torchvision
from rich.console import Console
from torch import Tensor, nn

import sigcam
from sigcam.bench.weights import imagenet_weights
from sigcam.core.errors import SigcamError
from sigcam.data.images import images_from_paths
from sigcam.data.photographs import example_samples
from sigcam.deployment.graph import OUTPUTS
from sigcam.models.classifier import load_classifier
from sigcam.models.preprocess import Preprocess
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.opening import open_network

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results" / "export.json"
PAIRS = {1: 41, 8: 11}  # runs of each batch size
TIE = 1e-5  # of a map's value: two programs may round it to either side of the threshold
LIMIT = 1.05
REST = 0.25  # seconds before a call, in which the threads of the one before it fall asleep


def resnet50() -> nn.Module:
    """Return ResNet-50 with published weights; random ones where they cannot be had."""
    try:
        model, weights = imagenet_weights("torchvision:resnet50")
        return load_classifier(model, weights=weights).model
    except SigcamError as error:
        print(f"resnet50 has random weights: {error}")
        return torchvision.models.resnet50(weights=None)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "efficientnet_lite0": lambda: load_classifier("embedded").model,
    "mobilenetv3": lambda: timm.create_model("mobilenetv3_large_100"),
    "convnext_tiny": lambda: torchvision.models.convnext_tiny(weights=None),
    "vgg16-cam": lambda: load_classifier("wsol:vgg16-cam", pretrained=False).model,
}


PUBLISHED = ("resnet50", "efficientnet_lite0")


def network(name: str) -> DualBranch:
    """Return the network with a random branch that counts as fitted and calibrated; where the classifier's
    weights are published, with its own head as the branch, whose maps have the regions of real ones."""
    torch.manual_seed(0)
    net = sigcam.attach(MODELS[name]().eval(), transform=Preprocess())
    own = linear_weight(net.last_layer("softmax")) if name in PUBLISHED else None
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
        if own is not None:
            layer = net.last_layer("sigmoid")
            layer.load_state_dict({"weight": own[0] - own[0].mean(0), "bias": own[1] - own[1].mean()})
    net.fitted = True
    net.calibration = BranchCalibration(LogitScale(0.7, 0.2), {1.0: LogitScale(1.0, 0.0)})
    return net


def session(path: Path) -> ort.InferenceSession:
    """Open a file with as many threads as torch uses."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # would slow what runs next
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(opened: ort.InferenceSession, image: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    """Return the outputs of a file."""
    values = opened.run(None, {"image": image})
    return {name: torch.from_numpy(value) for name, value in zip(OUTPUTS, values, strict=True)}


def inputs(batch: int, shape: tuple[int, ...]) -> Tensor:
    """Return smooth noise, whose maps have components as those of pictures have."""
    coarse = torch.randn(batch, shape[0], 9, 9, generator=torch.Generator().manual_seed(1))
    return nn.functional.interpolate(coarse, shape[1:], mode="bicubic")


def photographs(net: DualBranch, batch: int) -> Tensor:
    """Return the example photographs, again and again, as the network's input."""
    assert net.transform is not None
    samples = example_samples()
    return torch.stack([net.transform(samples[i % len(samples)].open()) for i in range(batch)])


def parity(folder: Path, console: Console) -> list[Row]:
    """Return the largest differences of each network's file from PyTorch."""
    rows = []
    for name in MODELS:
        net, path = network(name), folder / "net.onnx"
        start = time.perf_counter()
        sigcam.export(net, path, preprocess=False, scale="logit")
        seconds, opened, worst = time.perf_counter() - start, session(path), dict[str, float]()
        for batch in (1, 3):
            x = inputs(batch, net.input_shape)
            out = run(opened, x.numpy())
            with torch.no_grad():
                branches = net(x)
            maps = sigcam.explain(net, x, classes=out["classes"], scale="logit", size="features").maps
            expected = {
                "logits": branches.softmax,
                "branch_logits": branches.sigmoid,
                "evidence": net.evidence(branches.sigmoid),
                "maps": maps,
            }
            for key, values in expected.items():
                scale = float(values.abs().max().clamp(min=1e-12))
                worst[key] = max(worst.get(key, 0.0), float((out[key] - values).abs().max()) / scale)
        row = {
            "model": name,
            "differences": worst,
            "seconds": seconds,
            "megabytes": path.stat().st_size / 1e6,
        }
        console.print(row)
        rows.append(row)
    return rows


def boxes(folder: Path, console: Console, count: int) -> Row:
    """Return how many boxes of the embedded classifier's predicted classes differ from those of `explain`."""
    net, path = open_network("embedded").net, folder / "net.onnx"
    sigcam.export(net, path, k=1)
    opened = session(path)
    photographs = images_from_paths([Path(os.environ["SIGCAM_DATA"]) / "ilsvrc"])
    step = max(1, len(photographs) // count)
    chosen = [photographs[i] for i in range(0, len(photographs), step)][:count]
    equal = ties = classes = 0
    for sample in chosen:
        picture = sample.open()
        out = run(opened, np.asarray(picture)[None])
        ex = sigcam.explain(net, picture, classes=out["classes"][0].tolist(), scale="probability")
        classes += int(ex.top_classes[0, 0] != out["classes"][0, 0])
        same = torch.equal(ex.picture_boxes()[0][0], out["boxes"][0, 0].long())
        equal += same
        ties += not same and float((ex.maps - 0.5).abs().min()) < TIE
    row = {"images": len(chosen), "equal": equal, "ties": ties, "other_class": classes}
    console.print(row)
    return row


def bare(net: DualBranch, path: Path) -> ort.InferenceSession:
    """Open the classifier alone, exported by torch."""
    example, batch = net.example.repeat(2, 1, 1, 1), torch.export.Dim("N")
    torch.onnx.export(
        net.model,
        (example,),
        path,
        dynamo=True,
        dynamic_shapes=({0: batch},),
        input_names=["image"],
        external_data=False,
        verbose=False,
    )
    return session(path)


def speed(folder: Path, console: Console, pairs: int | None) -> list[Row]:
    """Return medians of a file with maps, of the bare classifier's file, and of `explain`, taken in turns."""
    rows = []
    for name in PUBLISHED:
        net, path = network(name), folder / "net.onnx"
        sigcam.export(net, path, preprocess=False)
        opened, alone = session(path), bare(net, folder / "bare.onnx")
        for batch, usual in PAIRS.items():
            x = photographs(net, batch)
            fed = {"image": x.numpy()}
            calls: dict[str, Callable[[], object]] = {
                "file": lambda opened=opened, fed=fed: opened.run(None, fed),
                "bare": lambda alone=alone, fed=fed: alone.run(None, fed),
                "explain": lambda net=net, x=x: sigcam.explain(
                    net, x, classes="top5", scale="probability"
                ).boxes(),
            }
            seconds: dict[str, list[float]] = {key: [] for key in calls}
            for turn in range((pairs or usual) + 2):
                for key, call in random.Random(turn).sample(sorted(calls.items()), len(calls)):
                    time.sleep(REST)
                    start = time.perf_counter()
                    call()
                    if turn > 1:  # the first ones warm up
                        seconds[key].append(time.perf_counter() - start)
            median = {key: statistics.median(values) for key, values in seconds.items()}
            row = {
                "model": name,
                "batch": batch,
                "milliseconds": {key: 1000 * value for key, value in median.items()},
                "file_to_bare": median["file"] / median["bare"],
                "file_to_explain": median["file"] / median["explain"],
                "kept": median["file"] / median["bare"] <= LIMIT,
            }
            console.print(row)
            rows.append(row)
    return rows


def main() -> None:
    """Run the parts named, or all; write results/export.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["parity", "boxes", "speed", []], default=[])
    parser.add_argument("--images", type=int, default=1000, help="photographs for boxes")
    parser.add_argument("--pairs", type=int, help="timed runs of each kind")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    console, start = Console(width=120), time.monotonic()
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts = given.parts or ["parity", "boxes", "speed"]
    with tempfile.TemporaryDirectory() as folder:
        if "parity" in parts:
            result["parity"] = parity(Path(folder), console)
        if "boxes" in parts and os.environ.get("SIGCAM_DATA"):
            result["boxes"] = boxes(Path(folder), console, given.images)
        if "speed" in parts:
            result["speed"] = speed(Path(folder), console, given.pairs)
    packages = ("torch", "torchvision", "timm", "onnx", "onnxruntime")
    result |= {
        "command": "make bench",
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {package: version(package) for package in packages},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
