"""The main job on the embedded default, offline: data, classifier, branch, maps, tables, a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.files import check_writable, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.core.types import Progress
from sigcam.data.fingerprint import data_fingerprint
from sigcam.data.loader import load_batches
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.sample import Samples
from sigcam.methods.explainer import explain_pass
from sigcam.methods.map_config import MapConfig
from sigcam.methods.targets import Branch
from sigcam.metrics.boxes import foreground
from sigcam.models.classifier import Classifier, load_classifier, save_classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.reports.demo_report import demo_page
from sigcam.reports.figures import distortions_figure, maps_figure
from sigcam.reports.html import can_report
from sigcam.training.branch import fit
from sigcam.training.linear_probe import train_probe

SHOWN = 24  # test pictures in the report
EMPTY = 200  # pictures without a bird, and as many with one
IOU_THRESHOLDS = torch.arange(1, 20) / 20  # 0.05 to 0.95
CELLS: tuple[tuple[Branch, bool], ...] = (
    ("softmax", False),
    ("softmax", True),
    ("centred", False),
    ("sigmoid", False),
    ("sigmoid", True),
)


def run_demo(
    output: Path,
    *,
    images: int = 1600,
    test_images: int = 400,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress,
) -> dict[str, Any]:
    """Writes figures, report, classifier, branch and manifest.json to the folder; returns the table."""
    check_writable(output)
    train, test = shapes(images, split="train", seed=seed), shapes(test_images, split="test", seed=seed)
    validation = shapes(max(64, test_images // 4), split="val", seed=seed)
    classifier = load_classifier("embedded", num_classes=len(train.classes), device=device)
    classifier.model.to(memory_format=torch.channels_last)

    train_probe(classifier, train, seed=seed, progress=_staged("classifier", progress))
    save_classifier(
        output / "classifier.safetensors", classifier.model, spec="embedded", classes=train.classes
    )
    before = _predictions(classifier, test, progress)
    weights = fingerprint(classifier.model)

    net = attach(classifier.model, seed=seed, transform=classifier.transform, class_names=train.classes)
    fitted = fit(net, train, FitConfig(seed=seed), progress=_staged("branch", progress))
    net.save(output / "branch.safetensors")
    after = _predictions(classifier, test, progress)
    labels = torch.tensor([sample.label for sample in test])

    chosen, _, _ = _measure(net, validation, _staged("threshold", progress))
    _, ious, speed = _measure(net, test, _staged("maps", progress))
    there, nothing = _top_scores(net, test[:EMPTY]), _top_scores(net, scenes(EMPTY, seed=seed))
    table: dict[str, Any] = {
        "maps": [
            {
                "branch": branch,
                "clamp": "positive only" if clamp else "signed",
                "iou": float(ious[i, chosen[i]]),
                "threshold": float(IOU_THRESHOLDS[chosen[i]]),
            }
            for i, (branch, clamp) in enumerate(CELLS)
        ],
        "nothing_there": [
            {
                "score": score,
                "above_half_with_bird": float((there[i] > 0.5).double().mean()),
                "above_half_without": float((nothing[i] > 0.5).double().mean()),
                "auroc": float((there[i][:, None] > nothing[i][None]).double().mean()),
            }
            for i, score in enumerate(("softmax probability", "sigmoid evidence"))
        ],
        "accuracy_before": float((before == labels).double().mean()),
        "accuracy_after": float((after == labels).double().mean()),
        "predictions_changed": int((before != after).sum()),
        "weights_unchanged": weights == fingerprint(classifier.model),
        "maps_per_second": round(speed, 1),
        "fit_seconds": round(sum(fitted.seconds.values()), 1),
    }
    figures = {name: output / f"{name}.png" for name in ("distortions", "maps")}
    maps_figure(net, test[:64]).save(figures["maps"])
    distortions_figure(net, test[:64]).save(figures["distortions"])
    if can_report():
        write_text_atomic(output / "report.html", demo_page(table, figures, net, test[:SHOWN]))
    write_manifest(
        output,
        model="embedded",
        model_fingerprint=weights,
        data_fingerprint=data_fingerprint(train),
        seed=seed,
        losses=fitted.losses,
        numbers=table,
    )
    return table


def _staged(name: str, progress: Progress) -> Progress:
    return lambda stage, done, total: progress(name if stage == name else f"{name} {stage}", done, total)


def _predictions(classifier: Classifier, samples: Samples, progress: Progress) -> Tensor:
    """What the bare classifier says, (images,)."""
    found = []
    with torch.no_grad():
        for batch in load_batches(samples, classifier.transform, batch_size=8):
            device = next(classifier.model.parameters()).device
            found.append(classifier.model(batch.images.to(device)).argmax(1).cpu())
    return torch.cat(found)


def _top_scores(net: DualBranch, samples: Samples) -> tuple[Tensor, Tensor]:
    """Of each picture's best class, the softmax head's probability and the sigmoid branch's evidence."""
    assert net.transform is not None
    probability, evidence = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for batch in load_batches(samples, net.transform, batch_size=8):
            seen = net(batch.images.to(net.device))
            probability.append(seen.softmax.softmax(1).amax(1).cpu())
            evidence.append(seen.sigmoid.sigmoid().amax(1).cpu())
    return torch.cat(probability), torch.cat(evidence)


def _measure(net: DualBranch, samples: Samples, progress: Progress) -> tuple[Tensor, Tensor, float]:
    """Best threshold index per cell, mean IoU (cells, thresholds), and maps per second of one branch."""
    assert net.transform is not None
    total, seconds, count = torch.zeros(len(CELLS), len(IOU_THRESHOLDS), dtype=torch.float64), 0.0, 0
    for batch in load_batches(samples, net.transform, batch_size=8):
        masks = torch.stack([_mask(samples, i) for i in batch.indices])
        began = time.perf_counter()
        passage = net.run(batch.images.to(net.device), grad=True)  # one pass serves every cell of the table
        explain_pass(net, passage, MapConfig())
        seconds += time.perf_counter() - began
        for cell, (branch, clamp) in enumerate(CELLS):
            maps = explain_pass(net, passage, MapConfig(branch=branch, clamp=clamp)).maps.cpu()
            for i, threshold in enumerate(IOU_THRESHOLDS.tolist()):
                above = foreground(maps, threshold)
                inside = (above & masks).flatten(1).sum(1)
                total[cell, i] += (inside / (above | masks).flatten(1).sum(1)).sum().double()
        count += len(batch.indices)
        progress("measured", count, len(samples))
    ious = total / count
    return ious.argmax(1), ious, count / seconds


def _mask(samples: Samples, index: int) -> Tensor:
    opened = samples[index].open_mask
    assert opened is not None
    return torch.from_numpy(opened()) == 1
