"""What each step of `attach(model, optimize=True)` gives, and what steps that it does not take would give.

    .venv/bin/python benchmarks/optimize.py    # about 5 minutes on two cores

Forward passes of 8 images, each in turns with the plain model; medians and ratios.
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

from sigcam.network.optimize import _fold_batchnorm, _fuse_activations, _pack_convolutions

REPEATS = 9


def seconds_of(call: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def variants(model: nn.Module, images: Tensor) -> dict[str, tuple[Callable[[Tensor], object], float]]:
    """Ways to run the model, each with the seconds that it takes to make it."""
    made: dict[str, tuple[Callable[[Tensor], object], float]] = {}
    made["channels-last"] = copy.deepcopy(model).to(memory_format=torch.channels_last), 0.0  # type: ignore[call-overload]
    best, spent, name = copy.deepcopy(model), 0.0, "as it is"
    for step in (_fold_batchnorm, _pack_convolutions, _fuse_activations):
        best, began = copy.deepcopy(best), time.perf_counter()
        step(best, images[:1], ())
        spent += time.perf_counter() - began
        name += f" + {step.__name__.strip('_').replace('_', ' ')}"
        made[name.removeprefix("as it is + ")] = best, spent
    fast = best
    made["all of these, 2 images at a time"] = (lambda x: [fast(part) for part in x.split(2)]), spent
    inductor.freezing = True
    compiled = torch.compile(copy.deepcopy(model))
    made["torch.compile with frozen weights"] = compiled, seconds_of(lambda: compiled(images))
    return made


@torch.no_grad()
def main() -> None:
    """Measures, prints a table, writes results/optimize.json."""
    rows = list[dict[str, Any]]()
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    for model_name in ("resnet50", "vgg16"):
        torch.manual_seed(0)
        model = getattr(torchvision.models, model_name)(weights=None).eval()
        wanted = model(images)
        for name, (run, made) in variants(model, images).items():
            seen = run(images)
            seen = torch.cat(seen) if isinstance(seen, list) else seen
            run(images)
            pairs = [
                (seconds_of(lambda run=run: run(images)), seconds_of(lambda m=model: m(images)))  # type: ignore[misc]
                for _ in range(REPEATS)
            ]
            ours, plain = (statistics.median(values) for values in zip(*pairs, strict=True))
            off = float((seen - wanted).abs().max() / wanted.abs().max())
            rows.append(
                {
                    "model": model_name,
                    "what": name,
                    "ratio": ours / plain,
                    "seconds_to_make": made,
                    "off": off,
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
