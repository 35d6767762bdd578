"""The demo: the whole job offline, on synthetic images and the embedded model, with a report."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.files import check_writable, write_png, write_text_atomic
from sigcam.core.manifest import provenance, write_manifest
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.sample import Sample, Samples, data_fingerprint
from sigcam.methods.explainer import explain, explain_pass
from sigcam.methods.explanation import data_uri
from sigcam.methods.postprocess import disagreement
from sigcam.methods.registry import MapConfig
from sigcam.methods.targets import Branch
from sigcam.metrics.boxes import foreground
from sigcam.models.classifier import Classifier, load_classifier, save_classifier
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.reports.explain_report import JPEG_QUALITY
from sigcam.reports.figures import BOTH_HEADS, distortions_figure, maps_figure
from sigcam.reports.html import (
    Card,
    Figure,
    Gallery,
    Number,
    ReportTable,
    Section,
    Shot,
    can_report,
    render_page,
)
from sigcam.training.branch import fit
from sigcam.training.linear_probe import train_probe

SHOWN = 24  # test images in the report
EMPTY = 200  # images without a bird, and as many with one
IOU_THRESHOLDS = torch.arange(1, 20) / 20  # 0.05 to 0.95
VARIANTS: tuple[tuple[Branch, bool], ...] = (
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
    """Write figures, report, classifier, branch and manifest.json to the folder; return the numbers."""
    check_writable(output)
    train, test = shapes(images, split="train", seed=seed), shapes(test_images, split="test", seed=seed)
    validation = shapes(max(64, test_images // 4), split="val", seed=seed)
    classifier = load_classifier("embedded", num_classes=len(train.classes), device=device)
    classifier.model.to(memory_format=torch.channels_last)

    train_probe(classifier, train, seed=seed, progress=_staged("classifier", progress))
    path = output / "classifier.safetensors"
    save_classifier(path, classifier.model, spec="embedded", classes=train.classes)
    before = _predictions(classifier, test)
    weights = fingerprint(classifier.model)

    net = attach(classifier.model, seed=seed, transform=classifier.transform, class_names=train.classes)
    fitted = fit(net, train, FitConfig(seed=seed), progress=_staged("branch", progress))
    net.save(output / "branch.safetensors")
    after = _predictions(classifier, test)
    labels = torch.tensor([sample.label for sample in test])

    chosen, _, _ = _measure(net, validation, _staged("threshold", progress))
    _, ious, speed = _measure(net, test, _staged("maps", progress))
    with_bird, without = _top_scores(net, test[:EMPTY]), _top_scores(net, scenes(EMPTY, seed=seed))
    table: dict[str, Any] = {
        "maps": [
            {
                "branch": branch,
                "clamp": "positive only" if clamp else "signed",
                "iou": float(ious[i, chosen[i]]),
                "threshold": float(IOU_THRESHOLDS[chosen[i]]),
            }
            for i, (branch, clamp) in enumerate(VARIANTS)
        ],
        "nothing_there": [
            {
                "score": score,
                "above_half_with_bird": float((with_bird[i] > 0.5).double().mean()),
                "above_half_without": float((without[i] > 0.5).double().mean()),
                "auroc": float((with_bird[i][:, None] > without[i][None]).double().mean()),
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
    write_png(figures["maps"], maps_figure(net, test[:64]))
    write_png(figures["distortions"], distortions_figure(net, test[:64]))
    if can_report():
        write_text_atomic(output / "report.html", demo_page(table, figures, net, test[:SHOWN]))
    fingerprints = {"model_fingerprint": weights, "data_fingerprint": data_fingerprint(train)}
    write_manifest(output, model="embedded", **fingerprints, seed=seed, losses=fitted.losses, numbers=table)
    return table


def _staged(name: str, progress: Progress) -> Progress:
    return lambda stage, done, total: progress(name if stage == name else f"{name} {stage}", done, total)


def _predictions(classifier: Classifier, samples: Samples) -> Tensor:
    """Return the predictions of the classifier alone, (images,)."""
    model, batches = classifier.model, load_batches(samples, classifier.transform, batch_size=8)
    device = next(model.parameters()).device
    with torch.no_grad():
        return torch.cat([model(batch.images.to(device)).argmax(1).cpu() for batch in batches])


def _top_scores(net: DualBranch, samples: Samples) -> tuple[Tensor, Tensor]:
    """Return the highest softmax probability and the highest sigmoid evidence of each image."""
    assert net.transform is not None
    probability, evidence = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for batch in load_batches(samples, net.transform, batch_size=8):
            out = net(batch.images.to(net.device))
            probability.append(out.softmax.softmax(1).amax(1).cpu())
            evidence.append(net.evidence(out.sigmoid).amax(1).cpu())
    return torch.cat(probability), torch.cat(evidence)


def _measure(net: DualBranch, samples: Samples, progress: Progress) -> tuple[Tensor, Tensor, float]:
    """Return each variant's best threshold index, mean IoUs (variants, thresholds) and maps per second."""
    assert net.transform is not None
    total, seconds, count = torch.zeros(len(VARIANTS), len(IOU_THRESHOLDS), dtype=torch.float64), 0.0, 0
    for batch in load_batches(samples, net.transform, batch_size=8):
        masks = torch.stack([_mask(samples, i) for i in batch.indices])
        begin = time.perf_counter()
        forward = net.run(batch.images.to(net.device), grad=True)  # one pass serves all variants
        explain_pass(net, forward, MapConfig())
        seconds += time.perf_counter() - begin
        for row, (branch, clamp) in enumerate(VARIANTS):
            maps = explain_pass(net, forward, MapConfig(branch=branch, clamp=clamp)).maps.cpu()
            for i, threshold in enumerate(IOU_THRESHOLDS.tolist()):
                above = foreground(maps, threshold)
                inside = (above & masks).flatten(1).sum(1)
                total[row, i] += (inside / (above | masks).flatten(1).sum(1)).sum().double()
        count += len(batch.indices)
        progress("measured", count, len(samples))
    ious = total / count
    return ious.argmax(1), ious, count / seconds


def _mask(samples: Samples, index: int) -> Tensor:
    open_mask = samples[index].open_mask
    assert open_mask is not None
    return torch.from_numpy(open_mask()) == 1


def demo_page(
    table: Mapping[str, Any], figures: Mapping[str, Path], net: DualBranch, samples: Samples
) -> str:
    """The demo's numbers, its figures, and the maps of some test images by both heads."""
    localization = ReportTable(
        ("map from", "weights", "mean IoU", "threshold"),
        [
            (row["branch"], [row["clamp"], Number(row["iou"], digits=3), Number(row["threshold"])])
            for row in table["maps"]
        ],
        foot="Of the thresholded map with the object's mask, at the threshold that was best on other images.",
    )
    scores = list[tuple[str, list[Number]]]()
    for row in table["nothing_there"]:
        shares = [Number(100 * row[f"above_half_{which}"], digits=1) for which in ("with_bird", "without")]
        scores.append((row["score"], [*shares, Number(row["auroc"], digits=3)]))
    presence = ReportTable(
        ("score of the best class", "above 0.5 with a bird, %", "above 0.5 without, %", "AUROC"),
        scores,
        foot="AUROC: the chance that a picture with a bird scores higher than a scene without one.",
    )
    captions = {
        "distortions": "The softmax head shifted in two ways that change no probability; the sigmoid "
        "branch has no such freedom.",
        "maps": "Input, the object's mask, and the same method on both heads.",
    }
    parts = []
    for name, path in figures.items():
        with Image.open(path) as image:
            parts.append(Figure(Shot(data_uri(image, 88), f"figure: {captions[name]}", captions[name])))
    return render_page(
        "sigcam demo",
        [
            Section("Where is it?", [localization]),
            Section("Is it there at all?", [presence]),
            Section("Figures", parts),
            Section(
                "Maps of test pictures",
                [Gallery([_both_heads(net, sample, samples.classes) for sample in samples], "class")],
                intro="Grad-CAM of the predicted class, from the softmax head and from the sigmoid branch.",
            ),
        ],
        lead="Synthetic birds: a linear head is trained on the frozen embedded network, a sigmoid branch is "
        "fitted beside it, and both are asked where the bird is, and whether there is one.",
        facts=[
            ("accuracy before and after", f"{table['accuracy_before']:.1%}, {table['accuracy_after']:.1%}"),
            ("predictions changed", str(table["predictions_changed"])),
            ("weights unchanged", "yes" if table["weights_unchanged"] else "no"),
            ("seconds to fit the branch", str(table["fit_seconds"])),
            ("maps per second", str(table["maps_per_second"])),
        ],
        **provenance(),
    )


def _both_heads(net: DualBranch, sample: Sample, classes: Sequence[str]) -> Card:
    """One image with the maps of both heads."""
    image = sample.open()
    softmax, sigmoid = (explain(net, [image], branch=branch) for branch in BOTH_HEADS)
    top = sigmoid.rows()[0]["top"]
    name, label = softmax.name(int(softmax.classes[0])), classes[sample.label or 0]
    return Card(
        label,
        [
            Shot(data_uri(ex.overlay(boxes=0.2)[0], JPEG_QUALITY), f"{ex.branch} map of {name}", ex.branch)
            for ex in (softmax, sigmoid)
        ],
        group=label,
        keys={
            "probability": float(softmax.probability[0]),
            "evidence": float(sigmoid.evidence[0]),
            "disagreement of the heads' maps": float(disagreement(softmax.maps[0], sigmoid.maps[0])),
        },
        scores=[(each["class_name"], each["probability"], each["evidence"]) for each in top],
        notes=[] if name == label else [f"taken for {name}"],
    )
