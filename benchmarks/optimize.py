"""Measure the gain of each step of `attach(model, optimize=True)`, and of steps that it does not take.

    .venv/bin/python benchmarks/optimize.py    # about 5 minutes on two cores

Times forward passes of 8 images in turns with the plain model; reports ratios of medians.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sigcam.network.optimize import _fold_batchnorm, _fuse_activations, _pack_layers

REPEATS = 9


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def variants(model: nn.Module, images: Tensor) -> dict[str, tuple[Callable[[Tensor], object], float]]:
    """Return ways to run the model, each with the seconds that its preparation takes."""
    ways: dict[str, tuple[Callable[[Tensor], object], float]] = {}
    ways["channels-last"] = copy.deepcopy(model).to(memory_format=torch.channels_last), 0.0  # type: ignore[call-overload]
    best, seconds, name = copy.deepcopy(model), 0.0, "as it is"
    for step in (_fold_batchnorm, _pack_layers, _fuse_activations):
        best, start = copy.deepcopy(best), time.perf_counter()
        step(best, images[:1], ())
        seconds += time.perf_counter() - start
        name += f" + {step.__name__.strip('_').replace('_', ' ')}"
        ways[name.removeprefix("as it is + ")] = best, seconds
    fast = best
    ways["all of these, 2 images at a time"] = (lambda x: [fast(part) for part in x.split(2)]), seconds
    inductor.freezing = True
    compiled = torch.compile(copy.deepcopy(model))
    ways["torch.compile with frozen weights"] = compiled, seconds_of(lambda: compiled(images))
    return ways


@torch.no_grad()
def main() -> None:
    """Measure, print a table and write results/optimize.json."""
    rows = list[dict[str, Any]]()
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    for model_name in ("resnet50", "vgg16"):
        torch.manual_seed(0)
        model = getattr(torchvision.models, model_name)(weights=None).eval()
        expected = model(images)
        for name, (run, seconds) in variants(model, images).items():
            logits = run(images)
            logits = torch.cat(logits) if isinstance(logits, list) else logits
            run(images)
            pairs = [
                (seconds_of(lambda run=run: run(images)), seconds_of(lambda m=model: m(images)))  # type: ignore[misc]
                for _ in range(REPEATS)
            ]
            ours, plain = (statistics.median(values) for values in zip(*pairs, strict=True))
            error = float((logits - expected).abs().max() / expected.abs().max())
            rows.append(
                {
                    "model": model_name,
                    "what": name,
                    "ratio": ours / plain,
                    "seconds_to_make": seconds,
                    "off": error,
                }
            )
    table = Table("model", "what", "x plain forward", "seconds to make", "logits off by")
    for r in rows:
        table.add_row(
            r["model"], r["what"], f"{r['ratio']:.3f}", f"{r['seconds_to_make']:.1f}", f"{r['off']:.0e}"
        )
    Console(width=120).print(table)
    result = {
        "command": "python benchmarks/optimize.py",
        "date": datetime.now(UTC).date().isoformat(),
        "threads": torch.get_num_threads(),
        "repeats": REPEATS,
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / "optimize.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
