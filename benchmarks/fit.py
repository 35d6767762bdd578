"""Compare our fit of a branch with the paper's recipe on the same images: time and average precision.

    SIGCAM_DATA=FOLDER .venv/bin/python benchmarks/fit.py    # about 10 minutes on two cores

FOLDER/cub has annotated bird photographs; without it, the synthetic birds are used. The classifier is a
linear probe on the embedded EfficientNet-Lite0. Average precision is measured on held-out training images,
which neither fit uses.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sigcam.core.config import FitConfig
from sigcam.data.loader import load_batches
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.metrics.classification import average_precision
from sigcam.models.classifier import load_classifier
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training.branch import fit
from sigcam.training.feature_reader import HeadInputs
from sigcam.training.linear_probe import train_probe
from sigcam.training.loss import as_targets
from sigcam.training.training_set import choose_held_out

MOST_REFIT = 0.10  # seconds of a refit with cached features, as a share of one backbone pass
LEAST_SPEEDUP = 8.0  # over the paper's recipe, end to end
EPOCHS = 10


def open_data() -> tuple[str, Samples]:
    """Return the name and samples of the real birds, or of the synthetic ones if there are none."""
    folder = Path(os.environ.get("SIGCAM_DATA", "")) / "cub"
    real = bool(os.environ.get("SIGCAM_DATA")) and folder.is_dir()
    return ("cub", open_dataset(folder)) if real else ("shapes", open_dataset("shapes:1600"))


def timed(function: Any, *args: Any, **options: Any) -> tuple[Any, float]:
    """Return the result of a call, and the seconds it took."""
    start = time.perf_counter()
    result = function(*args, **options)
    return result, time.perf_counter() - start


@torch.no_grad()
def precision_of(net: DualBranch, samples: Samples) -> float:
    """Return the mean average precision of the branch."""
    assert net.transform is not None
    logits, labels = list[torch.Tensor](), list[torch.Tensor]()
    for batch in load_batches(samples, net.transform, batch_size=8):
        assert batch.labels is not None
        logits.append(net(batch.images).sigmoid)
        labels.append(batch.labels)
    return float(average_precision(torch.cat(logits), as_targets(torch.cat(labels), net.classes)).nanmean())


def images_per_second(net: DualBranch, samples: Samples) -> dict[str, float]:
    """Return how many images per second one process decodes, and the backbone takes."""
    assert net.transform is not None
    some = samples[:256]
    batches, decoding = timed(list, load_batches(some, net.transform, batch_size=64))
    inputs, config = HeadInputs(net), FitConfig()
    inputs.fast_net = net  # unoptimized, as in the rest of this benchmark
    _, running = timed(lambda: [inputs.compute(batch.images, config, "") for batch in batches])
    return {"decoded_per_second": len(some) / decoding, "backbone_per_second": len(some) / running}


def main() -> None:
    """Measure, print a table and write results/fit.json."""
    console = Console(width=110)
    name, samples = open_data()
    classifier = load_classifier("embedded", num_classes=len(samples.classes))
    classifier.model.to(memory_format=torch.channels_last)
    train_probe(classifier, samples)

    def new_branch() -> DualBranch:
        return attach(classifier.model, transform=classifier.transform, class_names=samples.classes)

    config = FitConfig()
    with tempfile.TemporaryDirectory() as cache:
        cold, cold_seconds = timed(fit, new_branch(), samples, config, cache=cache)
        warm, warm_seconds = timed(fit, new_branch(), samples, FitConfig(l2=cold.l2), cache=cache)
        searched, searched_seconds = timed(fit, new_branch(), samples, config, cache=cache)
    console.print(f"fast: {cold_seconds:.1f} s, again {warm_seconds:.1f} s")
    labels = torch.tensor([sample.label for sample in samples])
    held_out = choose_held_out(labels, config)
    parts = [
        Samples(tuple(s for s, h in zip(samples, held_out.tolist(), strict=True) if h == k), samples.classes)
        for k in (False, True)
    ]
    net = new_branch()
    _, epoch = timed(fit, net, samples, FitConfig("paper", epochs=1))
    console.print(f"paper: {epoch:.1f} s per epoch")
    net = new_branch()
    _, paper_seconds = timed(fit, net, parts[0], FitConfig("paper", epochs=EPOCHS))
    paper_precision = precision_of(net, parts[1])
    assert cold.quality and warm.quality and searched.quality
    our_precision = cold.quality.mean_average_precision
    backbone = cold.seconds["features"]
    rows: list[dict[str, Any]] = [
        {"what": f"paper's recipe, {EPOCHS} epochs (one measured, multiplied)", "seconds": EPOCHS * epoch},
        {
            "what": "the same without the held-out images, measured",
            "seconds": paper_seconds,
            "map": paper_precision,
        },
        {"what": "ours, end to end, l2 searched", "seconds": cold_seconds, "map": our_precision},
        {"what": "ours, features cached, l2 searched", "seconds": searched_seconds, "map": our_precision},
        {
            "what": "ours, features cached, l2 given",
            "seconds": warm_seconds,
            "map": warm.quality.mean_average_precision,
        },
    ]
    solving = warm.seconds["penalty"] + warm.seconds["training"]
    verdicts = [
        {
            "what": "paper's recipe / ours end to end",
            "ratio": EPOCHS * epoch / cold_seconds,
            "at_least": LEAST_SPEEDUP,
        },
        {
            "what": "warm refit at a given l2 / one backbone pass",
            "ratio": solving / backbone,
            "at_most": MOST_REFIT,
        },
        {
            "what": "held-out average precision, ours less the paper's",
            "ratio": our_precision - paper_precision,
            "at_least": 0.0,
        },
    ]
    for verdict in verdicts:
        least, most = verdict.get("at_least", -torch.inf), verdict.get("at_most", torch.inf)
        verdict["kept"] = least <= verdict["ratio"] <= most
    table = Table("what", "seconds", "held-out mean average precision, %")
    for row in rows:
        table.add_row(
            row["what"], f"{row['seconds']:.1f}", f"{100 * row['map']:.2f}" if "map" in row else "-"
        )
    console.print(table)
    for verdict in verdicts:
        console.print(
            f"{verdict['what']}: {verdict['ratio']:.3f}, {'kept' if verdict['kept'] else 'NOT KEPT'}"
        )
    result = {
        "command": "python benchmarks/fit.py",
        "date": datetime.now(UTC).date().isoformat(),
        "data": name,
        "images": len(samples),
        "classes": len(samples.classes),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {package: version(package) for package in ("torch", "torchvision", "timm")},
        "speeds": images_per_second(new_branch(), samples),
        "seconds": {"cold": cold.seconds, "warm": warm.seconds, "searched": searched.seconds},
        "l2": cold.l2,
        "search": cold.search,
        "rows": rows,
        "verdicts": verdicts,
    }
    path = Path(__file__).parent / "results" / "fit.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
