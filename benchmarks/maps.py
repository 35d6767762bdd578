"""Time maps of a batch by every method: sigcam, other libraries and the plain forward pass in one run.

    make bench                                   # everything, about 20 minutes on two cores
    .venv/bin/python benchmarks/maps.py resnet50 # one model; results of the others are kept

Repeats are interleaved in random order, so that a busy machine slows all of them alike. Results are medians,
and ratios to the same model's plain forward pass under `inference_mode`. Calls with a budget are timed in
turns with the plain pass alone. Peak memory is the most that a call adds to the process (Linux only). Methods
that perturb the image or its features take minutes in other libraries: those are timed on 64 channels, and
the time is multiplied.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import json
import logging
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_grad_cam
import timm
import torch
import torchcam.methods
import torchvision
from captum.attr import LayerGradCam
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import sigcam
from sigcam.network.dual import DualBranch

Call = Callable[[], object]
Row = dict[str, Any]

REPEATS, PAIRS = 2, 9  # of every method; of calls with a budget
SOME_CHANNELS = 64
OURS = ("grad-cam", "grad-cam++", "xgrad-cam", "layer-cam", "hires-cam", "eigen-cam", "eigengrad-cam")
GRAD_CAM = "grad-cam"
GRAD_CAM_NAMES = {
    "grad-cam": "GradCAM",
    "grad-cam++": "GradCAMPlusPlus",
    "xgrad-cam": "XGradCAM",
    "layer-cam": "LayerCAM",
    "hires-cam": "HiResCAM",
    "eigen-cam": "EigenCAM",
    "eigengrad-cam": "EigenGradCAM",
}
TORCHCAM_NAMES = {
    "grad-cam": "GradCAM",
    "grad-cam++": "GradCAMpp",
    "xgrad-cam": "XGradCAM",
    "layer-cam": "LayerCAM",
}


def vit_grid(tokens: Tensor) -> Tensor:
    """Arrange the tokens of a ViT at 224 pixels as (B, N, 14, 14), for pytorch-grad-cam."""
    return tokens[:, 1:].transpose(1, 2).reshape(len(tokens), -1, 14, 14)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {  # builder, and the layer for other libraries
    "resnet50": (lambda: torchvision.models.resnet50(weights=None), "layer4"),
    "vgg16": (lambda: torchvision.models.vgg16(weights=None), "features.29"),
    "efficientnet_lite0": (lambda: timm.create_model("tf_efficientnet_lite0"), "bn2"),
    "vit_b_16": (lambda: timm.create_model("vit_base_patch16_224"), "blocks.11.norm1"),
}


# ---------------------------------------------------------------------------------------- what is timed


class Bench:
    """One model, with a copy for each library, so that the hooks of one do not slow another down."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        make, layer = MODELS[name]
        self.name, self.layer, self.model = name, layer, make().eval()
        self.peer, self.torchcam, self.captum = (copy.deepcopy(self.model) for _ in range(3))
        self.net, self.fast = sigcam.attach(self.model), sigcam.attach(self.model, optimize=True)
        self.net.fitted = self.fast.fitted = True  # an unfitted branch takes the same time
        self.is_vit = name.startswith("vit")

    def plain(self, images: Tensor) -> object:
        with torch.inference_mode():
            return self.model(images)

    def ours(self, net: DualBranch, images: Tensor, method: str, **options: Any) -> object:
        return sigcam.explain(net, images, method, **options).maps

    def with_peer(self, images: Tensor, kind: str, **options: Any) -> object:
        layer = self.peer.get_submodule(self.layer)
        reshape = {"reshape_transform": vit_grid} if self.is_vit else {}
        with getattr(pytorch_grad_cam, kind)(self.peer, [layer], **reshape, **options) as cam:
            return cam(images, [ClassifierOutputTarget(1)] * len(images))

    def with_torchcam(self, images: Tensor, kind: str) -> object:
        cam = getattr(torchcam.methods, kind)(self.torchcam, self.torchcam.get_submodule(self.layer))
        try:
            scores = self.torchcam(images)
            return cam([1] * len(images), scores)
        finally:
            cam.remove_hooks()

    def with_captum(self, images: Tensor) -> object:
        cam = LayerGradCam(self.captum, self.captum.get_submodule(self.layer))
        maps = cam.attribute(images, target=[1] * len(images), relu_attributions=True)
        return nn.functional.interpolate(maps, images.shape[-2:], mode="bilinear")

    def calls(self, images: Tensor) -> dict[tuple[str, str], Call]:
        """Return the calls to time by (method, library)."""
        calls: dict[tuple[str, str], Call] = {("forward", "plain"): lambda: self.plain(images)}

        def add(method: str, who: str, function: Callable[..., object], *args: Any, **options: Any) -> None:
            calls[method, who] = lambda: function(*args, **options)

        for method in OURS:
            add(method, "sigcam", self.ours, self.net, images, method)
            add(method, "pytorch-grad-cam", self.with_peer, images, GRAD_CAM_NAMES[method])
        add(GRAD_CAM, "sigcam, softmax branch", self.ours, self.net, images, GRAD_CAM, branch="softmax")
        add(GRAD_CAM, "sigcam, optimize=True", self.ours, self.fast, images, GRAD_CAM)
        if self.net.linear:
            add("cam", "sigcam", self.ours, self.net, images, "cam")
            add("all classes", "sigcam", self.ours, self.net, images, GRAD_CAM, classes="all")
        if not self.is_vit:  # both take (B, N, P, Q) layers only
            for method, kind in TORCHCAM_NAMES.items():
                add(method, "torch-cam", self.with_torchcam, images, kind)
            add(GRAD_CAM, "captum", self.with_captum, images)
        return calls


# -------------------------------------------------------------------------------------------- measuring


def seconds_of(call: Call) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_of(call: Call) -> float | None:
    """Return the most megabytes that the call adds to the process; None where the system does not tell."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        call()
        return (_status("VmHWM") - before) / 1024
    except OSError:
        return None


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def measure(bench: Bench, batch: int) -> list[Row]:
    """Return a row for each method and library."""
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    calls, order = bench.calls(images), random.Random(0)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    plain, paired = ("forward", "plain"), dict[tuple[str, str], float]()
    # Calls with a budget: in turns with the plain pass alone, before others fill the memory.
    for key in sorted(calls, key=lambda key: key[1] == "pytorch-grad-cam"):
        if key[0] in (GRAD_CAM, "all classes"):
            calls[key](), calls[plain]()
            pairs = [(seconds_of(calls[key]), seconds_of(calls[plain])) for _ in range(PAIRS)]
            ours, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
            paired[key] = ours / theirs
    peaks = {key: peak_of(call) for key, call in calls.items()}  # which warms up, too
    for _ in range(REPEATS):
        keys = [*calls, plain]
        order.shuffle(keys)
        for key in keys:
            seconds[key].append(seconds_of(calls[key]))
    forward = statistics.median(seconds[plain])
    ratios = {key: statistics.median(values) / forward for key, values in seconds.items()}
    ratios |= paired
    return [
        {
            "model": bench.name,
            "batch": batch,
            "method": method,
            "who": who,
            "ms_per_image": 1000 * ratio * forward / batch,
            "ratio_to_forward": ratio,
            "peak_mb": peaks[method, who],
        }
        for (method, who), ratio in ratios.items()
    ]


def measure_perturbation(bench: Bench) -> list[Row]:
    """Time Ablation-CAM and Score-CAM of one image: pytorch-grad-cam on 64 channels, multiplied."""
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    channels = bench.net(image).features.shape[1]
    plain = statistics.median(seconds_of(lambda: bench.plain(image)) for _ in range(9))
    rows = []

    def add(method: str, who: str, seconds: float, peak: float | None, note: str = "") -> None:
        row = {"model": bench.name, "batch": 1, "method": method, "who": who, "peak_mb": peak, "note": note}
        rows.append(row | {"ms_per_image": 1000 * seconds, "ratio_to_forward": seconds / plain})

    for method in ("ablation-cam", "score-cam"):
        some = {"top_n": SOME_CHANNELS} if method == "score-cam" else {}
        peak = peak_of(lambda m=method, s=some: bench.ours(bench.net, image, m, **s))  # type: ignore[misc]
        add(method, "sigcam", seconds_of(lambda m=method: bench.ours(bench.net, image, m)), peak)  # type: ignore[misc]
    factor = channels / SOME_CHANNELS
    note = f"{SOME_CHANNELS} of {channels} channels, multiplied"
    with redirect_stderr(io.StringIO()):  # its progress bar
        ratio = SOME_CHANNELS / 2 / channels  # it takes as many from either end
        ablate = lambda: bench.with_peer(image, "AblationCAM", ratio_channels_to_ablate=ratio)  # noqa: E731
        add("ablation-cam", "pytorch-grad-cam", factor * seconds_of(ablate), None, note)
        add(
            "score-cam",
            "pytorch-grad-cam",
            factor * seconds_of(lambda: score_cam_of_some(bench, image)),
            None,
            note,
        )
    return rows


def score_cam_of_some(bench: Bench, image: Tensor) -> object:
    """Run pytorch-grad-cam's Score-CAM on the first channels only."""
    layer = bench.peer.get_submodule(bench.layer)
    with pytorch_grad_cam.ScoreCAM(bench.peer, [layer]) as cam, torch.no_grad():
        bench.peer(image)
        features: list[Tensor] = []
        handle = layer.register_forward_hook(lambda module, args, out: features.append(out))
        bench.peer(image)
        handle.remove()
        some = features[0][:, :SOME_CHANNELS].numpy()
        return cam.get_cam_weights(image, layer, [ClassifierOutputTarget(1)], some, None)


# ------------------------------------------------------------------------------------------- reporting

# model, batch, method, library, library to compare with, largest ratio of their times
BUDGETS = [
    ("resnet50", 8, GRAD_CAM, "sigcam", "plain", 1.03),
    ("resnet50", 8, GRAD_CAM, "sigcam, softmax branch", "plain", 1.03),
    ("resnet50", 1, GRAD_CAM, "sigcam", "plain", 1.10),
    ("vit_b_16", 1, GRAD_CAM, "sigcam", "plain", 1.10),
    ("vgg16", 8, GRAD_CAM, "sigcam", "plain", 1.05),
    ("vgg16", 8, GRAD_CAM, "sigcam, softmax branch", "plain", 1.05),
    ("resnet50", 8, GRAD_CAM, "sigcam, optimize=True", "plain", 0.73),
    ("resnet50", 8, GRAD_CAM, "sigcam, optimize=True", "torch-cam", 0.70),
    ("resnet50", 8, GRAD_CAM, "sigcam, optimize=True", "captum", 0.75),
    ("resnet50", 8, GRAD_CAM, "sigcam, optimize=True", "pytorch-grad-cam", 0.23),
    ("vgg16", 8, GRAD_CAM, "sigcam, optimize=True", "plain", 0.85),
    ("vit_b_16", 8, GRAD_CAM, "sigcam, optimize=True", "plain", 0.95),
    ("resnet50", 8, "all classes", "sigcam", "plain", 1.08),
    ("resnet50", 1, "ablation-cam", "sigcam", "pytorch-grad-cam", 0.001),
    ("resnet50", 1, "score-cam", "sigcam", "pytorch-grad-cam", 0.70),
    ("efficientnet_lite0", 1, "score-cam", "sigcam", "pytorch-grad-cam", 0.45),
]


def check_budgets(rows: list[Row]) -> list[Row]:
    """Return each budget with the measured ratio, for the models that were run."""
    milliseconds = {(r["model"], r["batch"], r["method"], r["who"]): r["ms_per_image"] for r in rows}
    verdicts = []
    for model, batch, method, who, rival, limit in BUDGETS:
        against = (model, batch, "forward", "plain") if rival == "plain" else (model, batch, method, rival)
        if (model, batch, method, who) in milliseconds:
            ratio = milliseconds[model, batch, method, who] / milliseconds[against]
            what = f"{model}, batch {batch}, {method}: {who} / {rival}"
            verdicts.append({"what": what, "ratio": ratio, "budget": limit, "kept": ratio <= limit})
    return verdicts


def show(rows: list[Row], verdicts: list[Row], console: Console) -> None:
    """Print the measurements and the budgets."""
    table = Table("model", "batch", "method", "who", "ms / image", "x forward", "peak MB")
    for r in rows:
        peak = "-" if r["peak_mb"] is None else f"{r['peak_mb']:.0f}"
        numbers = f"{r['ms_per_image']:.1f}", f"{r['ratio_to_forward']:.2f}", peak
        table.add_row(r["model"], str(r["batch"]), r["method"], r["who"], *numbers)
    console.print(table)
    table = Table("budget", "measured", "at most", "kept")
    for v in verdicts:
        table.add_row(v["what"], f"{v['ratio']:.3f}", f"{v['budget']:g}", "yes" if v["kept"] else "NO")
    console.print(table)


def main(names: list[str]) -> None:
    """Measure the models named, or all; print tables and write results/maps.json.

    Models that are not named keep their earlier results.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # untrained networks have blank maps
    path = Path(__file__).parent / "results" / "maps.json"
    console, rows, start = Console(width=120), list[Row](), time.monotonic()
    for name in names or MODELS:
        bench, model_rows = Bench(name), list[Row]()
        for batch in (8, 1):
            model_rows += measure(bench, batch)
        if name in ("resnet50", "efficientnet_lite0"):
            model_rows += measure_perturbation(bench)
        rows += [row | {"date": datetime.now(UTC).date().isoformat()} for row in model_rows]
        console.print(f"{name}: done after {(time.monotonic() - start) / 60:.1f} minutes")
    if names:
        other_rows = [row for row in json.loads(path.read_text())["rows"] if row["model"] not in names]
        rows = sorted([*rows, *other_rows], key=lambda row: [*MODELS].index(row["model"]))
    verdicts = check_budgets(rows)
    show(rows, verdicts, console)
    packages = ("torch", "torchvision", "timm", "grad-cam", "torchcam", "captum")
    result = {
        "command": "make bench",
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "repeats": {"grad-cam, batch 8": PAIRS, "others": REPEATS, "perturbation": 1},
        "versions": {package: version(package) for package in packages},
        "budgets": verdicts,
        "rows": rows,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main(sys.argv[1:])
