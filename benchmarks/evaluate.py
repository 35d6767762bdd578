"""Time `evaluate` beside one pass of the backbone over the same images: CAM, six variants, localisation.

    SIGCAM_DATA=FOLDER .venv/bin/python benchmarks/evaluate.py    # about five minutes on two cores

FOLDER/cub has annotated photographs; without it, the synthetic birds are used. Weights are random, as they do
not change the time of a pass. The pass alone is given decoded images; `evaluate` also opens the files.
Both are timed in turns in this run; numbers are medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from rich.console import Console
from rich.table import Table

import sigcam
from sigcam.data.loader import load_batches
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.models.preprocess import Preprocess

BUDGET = 1.25
BATCH = 32
METRICS = ("max_box_acc_v2", "gt_known_loc", "top1_loc")
MODELS: dict[str, Callable[[int], torch.nn.Module]] = {
    "resnet50": lambda classes: torchvision.models.resnet50(weights=None, num_classes=classes),
    "efficientnet_lite0": lambda classes: timm.create_model("tf_efficientnet_lite0", num_classes=classes),
}
RESULTS = Path(__file__).parent / "results" / "evaluate.json"


def open_images(count: int) -> tuple[str, Samples]:
    """Return the name of the data and its first images."""
    folder = Path(os.environ.get("SIGCAM_DATA", "")) / "cub"
    if os.environ.get("SIGCAM_DATA") and folder.is_dir():
        samples = open_dataset(folder, split="test")
        return "cub", Samples(tuple(samples[i] for i in range(min(count, len(samples)))), samples.classes)
    return "shapes", open_dataset(f"shapes:{count}", split="test")


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, samples: Samples, repeats: int) -> dict[str, Any]:
    """Return the seconds of both, and of `evaluate` with the optimised copy, which the command runs."""
    torch.manual_seed(0)
    model, transform = MODELS[name](len(samples.classes)).eval(), Preprocess()
    net = sigcam.attach(model, transform=transform)
    fast = sigcam.attach(model, transform=transform, optimize=True)
    with torch.no_grad():
        for each in (net, fast):
            each.sigmoid.load_state_dict(net.sigmoid.state_dict())
            each.fitted = True
    batches = [batch.images for batch in load_batches(samples, transform, batch_size=BATCH)]
    branches, clamps = ["softmax", "centred", "sigmoid"], (False, True)

    def evaluating(each: sigcam.DualBranch) -> object:
        return sigcam.evaluate(
            each,
            samples,
            methods=["cam"],
            branches=branches,
            clamps=clamps,
            metrics=METRICS,
            batch_size=BATCH,
        )

    def passing(run: Callable[[torch.Tensor], object]) -> None:
        with torch.inference_mode():
            for images in batches:
                run(images)

    def passing_fast() -> None:
        with torch.no_grad():
            for images in batches:
                fast(images)

    calls: dict[str, Callable[[], object]] = {
        "decoding": lambda: [None for _ in load_batches(samples, transform, batch_size=BATCH)],
        "pass": lambda: passing(model),
        "evaluate": lambda: evaluating(net),
        "optimised pass": passing_fast,
        "optimised evaluate": lambda: evaluating(fast),
    }
    for call in calls.values():
        call()
    runs = [{what: seconds_of(call) for what, call in calls.items()} for _ in range(repeats)]
    seconds = {what: statistics.median(run[what] for run in runs) for what in calls}
    return {
        "model": name,
        "images": len(samples),
        "seconds": seconds,
        "ratio": seconds["evaluate"] / seconds["pass"],
        "optimised_ratio": seconds["optimised evaluate"] / seconds["optimised pass"],
    }


def main() -> None:
    """Measure, print a table and write results/evaluate.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=256, help="images to evaluate on")
    parser.add_argument("--repeats", type=int, default=5, help="times that each side runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # untrained networks have blank maps
    data, samples = open_images(options.images)
    rows = [measure(name, samples, options.repeats) for name in MODELS]
    table = Table("model", "decoding", "pass", "evaluate", "ratio", "at most", "with the optimised copy")
    for row in rows:
        limit = f"{BUDGET:.2f}" if row["model"] == "resnet50" else "-"
        seconds = (f"{row['seconds'][what]:.2f} s" for what in ("decoding", "pass", "evaluate"))
        table.add_row(row["model"], *seconds, f"{row['ratio']:.2f}", limit, f"{row['optimised_ratio']:.2f}")
    Console(width=110).print(table)
    result = {
        "command": "make bench",
        "date": datetime.now(UTC).date().isoformat(),
        "data": data,
        "batch": BATCH,
        "repeats": options.repeats,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        "budget": {"what": "resnet50: evaluate / pass", "ratio": rows[0]["ratio"], "at_most": BUDGET},
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
