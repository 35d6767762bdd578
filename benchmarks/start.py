"""Time what comes before the first map: a cold `sigcam explain`, attaching, loading and compiling.

    .venv/bin/python benchmarks/start.py     # about five minutes on two cores

Both sides of each ratio are timed in turns in this run; numbers are medians.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
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

REPEATS = 9
# what is compared with: the packages that any tool on timm's models imports, and one pass of the model
REFERENCE = (
    "import torch, timm\n"
    "model = timm.create_model('tf_efficientnet_lite0').eval()\n"
    "with torch.inference_mode():\n    model(torch.randn(1, 3, 224, 224))\n"
)
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "resnet50": lambda: torchvision.models.resnet50(weights=None),
    "vit_b_16": lambda: timm.create_model("vit_base_patch16_224"),
    "swin_t": lambda: timm.create_model("swin_tiny_patch4_window7_224"),
}
BUDGETS = {
    "cold explain / imports and one pass": 1.4,
    "attach / one pass": 4.0,
    "load / one pass": 1.5,
    "optimize=True, batch 8 / plain": None,
    "compiled, batch 8 / plain": 0.68,
}


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median seconds of both calls, after one warm-up each."""
    ours(), theirs()
    pairs = [(seconds_of(ours), seconds_of(theirs)) for _ in range(repeats)]
    first, second = (statistics.median(values) for values in zip(*pairs, strict=True))
    return first, second


def plain_pass(model: torch.nn.Module, images: torch.Tensor) -> object:
    """Run the model alone."""
    with torch.inference_mode():
        return model(images)


def cold(folder: Path) -> list[dict[str, Any]]:
    """Time a first map from the shell."""
    command = [sys.executable, "-m", "sigcam", "explain", "--example", "chelsea", "--output"]
    runs = iter(range(1000))
    ours, theirs = in_turns(
        lambda: subprocess.run([*command, str(folder / str(next(runs)))], capture_output=True, check=True),
        lambda: subprocess.run([sys.executable, "-c", REFERENCE], check=True),
        5,
    )
    what = "cold explain / imports and one pass"
    return [{"model": "embedded", "what": what, "seconds": ours, "ratio": ours / theirs}]


def attaching(name: str, folder: Path) -> list[dict[str, Any]]:
    """Time attaching to a model, loading a branch of it, and its faster copies."""
    torch.manual_seed(0)
    model, rows = MODELS[name]().eval(), list[dict[str, Any]]()
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    file = folder / f"{name}.safetensors"
    sigcam.attach(model).save(file)
    calls: dict[str, Callable[[], object]] = {
        "attach / one pass": lambda: sigcam.attach(model),
        "load / one pass": lambda: sigcam.load(file, model),
    }
    for what, call in calls.items():
        ours, theirs = in_turns(call, lambda: plain_pass(model, image), REPEATS)
        rows.append({"model": name, "what": what, "seconds": ours, "ratio": ours / theirs})
    images = image.repeat(8, 1, 1, 1) + 0.1 * torch.randn(8, 3, 224, 224)
    for what, optimize in (("optimize=True", True), ("compiled", "compile")):
        start = time.perf_counter()
        net = sigcam.attach(model, optimize=optimize)  # type: ignore[arg-type]
        made = time.perf_counter() - start
        with torch.no_grad():
            ours, theirs = in_turns(lambda: net(images), lambda: plain_pass(model, images), REPEATS)  # noqa: B023
        row = {"model": name, "what": f"{what}, batch 8 / plain", "seconds": ours, "ratio": ours / theirs}
        rows.append(row | {"seconds_to_make": made})
    return rows


def main() -> None:
    """Measure, print a table and write results/start.json."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as place:
        rows = cold(Path(place))
        for name in MODELS:
            rows += attaching(name, Path(place))
    table = Table("model", "what", "seconds", "ratio", "at most")
    for row in rows:
        limit = BUDGETS[row["what"]]
        row["budget"] = limit
        shown = "-" if limit is None else f"{limit:g}"
        table.add_row(row["model"], row["what"], f"{row['seconds']:.3f}", f"{row['ratio']:.2f}", shown)
    Console(width=100).print(table)
    result = {
        "command": "python benchmarks/start.py",
        "date": datetime.now(UTC).date().isoformat(),
        "threads": torch.get_num_threads(),
        "repeats": REPEATS,
        "rows": rows,
    }
    (Path(__file__).parent / "results" / "start.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
