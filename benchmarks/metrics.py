"""Time boxes and their IoUs at all 1001 thresholds: our sweep against the usual OpenCV loop, in one run.

    make bench                                # with the other benchmarks
    .venv/bin/python benchmarks/metrics.py    # this one, about two minutes

The loop is what other evaluators do: 1001 times cv2.threshold, cv2.findContours and a bounding box per
contour, then one matrix of IoUs. Both get the same float32 maps of 224 x 224 pixels and boxes on one core, in
turns, and must agree to the last bit; results are medians. Maps are `real` (CAMs of photographs in
$SIGCAM_DATA/cub by the embedded network, or of drawn birds if there are none), `rings` (many holes) and
`noise` (the worst case: thousands of contours at most thresholds).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

import sigcam
from sigcam.data.loader import load_batches
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.metrics import threshold_sweep as kernels
from sigcam.metrics.boxes import THRESHOLDS, Mode, best_ious, scaled_boxes, to_levels
from sigcam.metrics.localization import MaxBoxAccV2, PxAP
from sigcam.models.classifier import load_classifier

Array = NDArray[Any]
Row = dict[str, Any]

SIZE = 224
REAL, BATCH, REPEATS = 80, 16, 5
BUDGET = 0.02
MODES: tuple[Mode, ...] = ("all", "largest")


@dataclass(frozen=True)
class Case:
    """Maps (B, H, W) with their boxes; the loop is timed on the first `looped` of them."""

    name: str
    maps: Tensor
    boxes: list[Tensor]
    looped: int


# ---------------------------------------------------------------------------------------------------- maps


def real() -> Case:
    """Return CAMs of the class that the embedded network predicts, from its softmax head."""
    folder = Path(os.environ.get("SIGCAM_DATA", "")) / "cub"
    found = os.environ.get("SIGCAM_DATA") and folder.is_dir()
    samples = (
        open_dataset(folder, format="wsol", split="test") if found else open_dataset("shapes", split="test")
    )
    chosen = Samples(samples.items[:: max(1, len(samples) // REAL)][:REAL], samples.classes)
    classifier = load_classifier("embedded")
    net = sigcam.attach(classifier.model)
    maps = [
        sigcam.explain(net, batch.images, "cam", branch="softmax", clamp=False).maps
        for batch in load_batches(chosen, classifier.transform, batch_size=BATCH)
    ]
    boxes = []
    for sample in chosen:
        assert sample.boxes is not None
        size = getattr(sample, "size", None) or sample.open().size
        boxes.append(scaled_boxes(torch.tensor(sample.boxes), size, (SIZE, SIZE)))
    return Case("real" if found else "real (shapes)", torch.cat(maps), boxes, len(boxes))


def rings() -> Case:
    """Return maps of waves around a point."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:SIZE, :SIZE]
    maps = []
    for _ in range(BATCH):
        distance = np.hypot(y - generator.uniform(0, SIZE), x - generator.uniform(0, SIZE))
        maps.append(0.5 + 0.5 * np.sin(distance / generator.uniform(2, 8)))
    return Case("rings", torch.from_numpy(np.stack(maps)).float(), some_boxes(BATCH), 8)


def noise() -> Case:
    """Return maps of independent random pixels."""
    maps = torch.rand(BATCH, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return Case("noise", maps, some_boxes(BATCH), 1)


def some_boxes(count: int) -> list[Tensor]:
    corners = torch.randint(0, SIZE, (count, 2, 2), generator=torch.Generator().manual_seed(1))
    return list(corners.sort(1).values.reshape(count, 1, 4))


# -------------------------------------------------------------------------------------------- what is timed


def loop(values: Array, truth: Array, mode: str) -> Array:
    """Return the best IoU at each threshold by OpenCV, one threshold after the other, (T,)."""
    height, width = values.shape
    levels = (values * 255).astype(np.uint8)
    highest = levels.max()
    boxes, counts = [], []
    for threshold in THRESHOLDS.tolist():
        _, mask = cv2.threshold(levels, int(threshold * highest), 255, cv2.THRESH_BINARY)
        contours, _ = cv2.findContours(mask, cv2.RETR_TREE, cv2.CHAIN_APPROX_SIMPLE)
        if mode == "largest" and contours:
            contours = [max(contours, key=cv2.contourArea)]
        counts.append(max(len(contours), 1))
        if not contours:
            boxes.append((0, 0, 0, 0))
        for contour in contours:
            x, y, w, h = cv2.boundingRect(contour)
            boxes.append((x, y, min(x + w, width - 1), min(y + h, height - 1)))
    ious = iou_matrix(np.asarray(boxes), truth).max(1)
    return np.maximum.reduceat(ious, np.cumsum([0, *counts[:-1]]))


def iou_matrix(drawn: Array, truth: Array) -> Array:
    """Return the IoUs of all pairs of boxes with inclusive ends, (D, G)."""
    x0, y0, x1, y1 = (drawn[:, k, None] for k in range(4))
    u0, v0, u1, v1 = (truth[None, :, k] for k in range(4))
    overlap_width = np.maximum(np.minimum(x1, u1) - np.maximum(x0, u0) + 1, 0)
    overlap_height = np.maximum(np.minimum(y1, v1) - np.maximum(y0, v0) + 1, 0)
    intersection = overlap_width * overlap_height
    union = (x1 - x0 + 1) * (y1 - y0 + 1) + (u1 - u0 + 1) * (v1 - v0 + 1) - intersection
    ious: Array = intersection / union
    return ious


def ms(call: Callable[[], object], images: int) -> float:
    """Return the milliseconds per image of one call."""
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start) / images


def measure(case: Case, cores: int) -> list[Row]:
    """Return a row for each mode."""
    rows = []
    for mode in MODES:
        ours = lambda m=mode: best_ious(case.maps, case.boxes, mode=m)  # noqa: E731
        some = [(case.maps[i].numpy(), case.boxes[i].numpy()) for i in range(case.looped)]
        looped, one, all_cores = list[float](), list[float](), list[float]()
        for _ in range(REPEATS):
            torch.set_num_threads(1)
            found = ours()
            one.append(ms(ours, len(case.maps)))
            torch.set_num_threads(cores)
            all_cores.append(ms(ours, len(case.maps)))
            torch.set_num_threads(1)
            if case.name != "noise" or not looped:  # 15 seconds an image
                start = time.perf_counter()
                theirs = [loop(*each, mode) for each in some]
                looped.append(1000 * (time.perf_counter() - start) / case.looped)
                assert np.array_equal(found[: case.looped].numpy(), np.stack(theirs)), (case.name, mode)
        slow, fast = statistics.median(looped), statistics.median(one)
        rows.append(
            {
                "maps": case.name,
                "contours": mode,
                "images": len(case.maps),
                "images_looped": case.looped,
                "loop_ms": slow,
                "sweep_ms": fast,
                "ratio": fast / slow,
                "sweep_ms_all_cores": statistics.median(all_cores),
            }
        )
    return rows


# ------------------------------------------------------------------------------------- where the time goes


@njit
def stage(levels: Any, truth: Any, which: int, repeats: int) -> None:
    """Repeat one stage of the sweep over all contours, after preparing its input."""
    height, width = levels.shape
    pixels = height * width
    codes, labels = np.empty((height, width), np.uint8), np.empty((height + 2) * (width + 2), np.uint32)
    order, starts = np.empty(pixels, np.uint32), np.empty(257, np.int64)
    regions = Regions(
        np.empty(pixels + 1, np.uint32), np.empty((pixels + 1, 4), np.int64), np.empty(pixels + 1, np.int32)
    )
    best, zero, top = np.zeros(256), np.int64(0), np.int64(levels.max())
    compare(levels, codes)
    sort(levels, codes, order, starts)
    for _ in range(repeats):
        if which == 0:
            compare(levels, codes)
        elif which == 1:
            sort(levels, codes, order, starts)
        elif which == 2:
            judge = Judge(truth, best, height, width, 0)
            sweep(order, starts, top, zero, (COUNTS_8, LEADS_8), labels, regions, judge)
        elif which == 3:
            judge = Judge(truth, best, height, width, 1)
            sweep(order, starts, zero, top, (COUNTS_4, LEADS_4), labels, regions, judge)


compare, sort, sweep = kernels._compare, kernels._sort, kernels._sweep
Judge, Regions = kernels.Judge, kernels.Regions
COUNTS_8, LEADS_8, COUNTS_4, LEADS_4 = kernels.COUNTS_8, kernels.LEADS_8, kernels.COUNTS_4, kernels.LEADS_4
STAGES = ("compare with neighbours", "sort by level", "regions above, down", "holes, up")


def stages(case: Case, images: int = 12, repeats: int = 10) -> dict[str, float]:
    """Return the milliseconds per image of each stage on one core."""
    levels, milliseconds = to_levels(case.maps).numpy(), dict[str, float]()
    quantise = [ms(lambda: to_levels(case.maps), len(case.maps)) for _ in range(REPEATS)]
    milliseconds["levels"] = statistics.median(quantise)
    for which, name in enumerate(STAGES):
        times = []
        for i in range(min(images, len(levels))):
            run = lambda n, i=i, w=which: ms(lambda: stage(levels[i], case.boxes[i].numpy(), w, n), 1)  # noqa: E731
            run(0)
            times.append(max(run(repeats) - min(run(0), run(0)), 0) / repeats)
        milliseconds[name] = statistics.mean(times)
    return milliseconds


def stream(count: int = 50_000, size: int = 56, batch: int = 100) -> dict[str, float]:
    """Return the megabytes of the process after a tenth, half and all of a stream of random maps, which two
    metrics count, one by boxes and one by pixels."""
    by_box, by_pixel = MaxBoxAccV2(), PxAP()
    generator, megabytes = torch.Generator().manual_seed(0), dict[str, float]()
    box = torch.tensor([[size // 4, size // 4, size // 2, size // 2]])
    masks = torch.zeros(batch, size, size, dtype=torch.uint8)
    masks[:, size // 4 : size // 2, size // 4 : size // 2] = 1
    for done in range(batch, count + 1, batch):
        coarse = torch.rand(batch, 1, 7, 7, generator=generator)
        maps = torch.nn.functional.interpolate(coarse, size, mode="bilinear")[:, 0]
        by_box.update(maps, [box] * batch)
        by_pixel.update(maps, masks)
        if done in (count // 10, count // 2, count):
            line = next(
                x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS")
            )
            megabytes[f"after {done}"] = int(line.split()[1]) / 1024
    return megabytes


# ----------------------------------------------------------------------------------------------- reporting


def main() -> None:
    """Measure, print tables and write results/metrics.json."""
    cores, start, console = torch.get_num_threads(), time.monotonic(), Console(width=120)
    cases = [real(), rings(), noise()]
    cv2.setNumThreads(1)
    for mode in MODES:  # compile, or read numba's cache, before timing
        best_ious(cases[0].maps[:2], cases[0].boxes[:2], mode=mode)
    rows = [row for case in cases for row in measure(case, cores)]
    memory = stream()
    torch.set_num_threads(1)
    parts = {case.name: stages(case) for case in cases}
    table = Table("maps", "contours", "loop, ms / image", "sweep", "ratio", f"sweep, {cores} cores")
    for r in rows:
        numbers = (
            f"{r['loop_ms']:.1f}",
            f"{r['sweep_ms']:.3f}",
            f"{r['ratio']:.4f}",
            f"{r['sweep_ms_all_cores']:.3f}",
        )
        table.add_row(r["maps"], r["contours"], *numbers)
    console.print(table)
    table = Table("all contours, ms / image", *parts)
    for name in parts[cases[0].name]:
        table.add_row(name, *(f"{part[name]:.3f}" for part in parts.values()))
    console.print(table)
    ratio = rows[0]["ratio"]
    console.print(
        f"real maps: {ratio:.4f} of the loop; at most {BUDGET}: {'kept' if ratio <= BUDGET else 'NOT KEPT'}"
    )
    console.print("memory, MB: " + ", ".join(f"{name} maps {mb:.0f}" for name, mb in memory.items()))
    packages = ("numpy", "numba", "torch", "opencv-python-headless")
    result = {
        "command": "make bench",
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "cores": cores,
        "machine": platform.machine(),
        "repeats": REPEATS,
        "versions": {package: version(package) for package in packages},
        "budget": {"what": "real maps, all contours: sweep / loop", "ratio": ratio, "at_most": BUDGET},
        "rows": rows,
        "stages_ms": parts,
        "stream_mb": memory,
    }
    path = Path(__file__).parent / "results" / "metrics.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
