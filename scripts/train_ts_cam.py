"""Train a tiny ViT on synthetic birds, then once more in TS-CAM's form, and measure where its maps lie.

No ViT with a trained head comes with a package, so this one starts from random numbers: first with a head on
its class token, as the networks that the paper starts from, then by `--wsol ts-cam`. A bird's class is its
tail, which so small a network can learn. Takes three minutes on one core, and gives the numbers of
docs/train-classifier.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam import FitConfig, attach, evaluate, fit
from sigcam.data.readers.shapes import shapes
from sigcam.data.sample import Samples
from sigcam.metrics.bootstrap import interval, paired
from sigcam.models import Classifier, Preprocess
from sigcam.training.wsol import TsCam

SIZE, CLASSES = 64, ("forktail", "fantail")
METHODS = ("ts-cam", "cam", "attention-rollout", "random-cam")


def birds(count: int, split: str) -> Samples:
    """Return birds drawn once, labelled by their tails."""
    drawn = ((sample, sample.open()) for sample in shapes(count, split=split, size=SIZE))
    tails = (replace(s, open=image.copy, label=(s.label or 0) % len(CLASSES)) for s, image in drawn)
    return Samples(tuple(tails), CLASSES)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train with AdamW on images mirrored and shifted at random."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps, done = epochs * -(-len(images) // 64), 0
    for _ in range(epochs):
        model.train()
        for chosen in torch.randperm(len(images)).split(64):
            optimizer.param_groups[0]["lr"] = 1e-3 * min((done + 1) / 100, 1 - done / steps)
            mirrored = torch.rand(len(chosen), 1, 1, 1) < 0.5
            batch = torch.where(mirrored, images[chosen].flip(3), images[chosen])
            shift = torch.randint(-4, 5, (2,)).tolist()
            loss = F.cross_entropy(model(batch.roll(shift, (2, 3))), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
    model.eval()
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    print(f"{epochs} epochs: {100 * right.float().mean():.1f} % of the training images", flush=True)


def main() -> None:
    """Train, fit the paper's branch, and print how well boxes by each map fit the birds."""
    torch.set_num_threads(1)  # which the numbers depend on
    torch.manual_seed(0)
    transform, seen, unseen = Preprocess(SIZE, SIZE), birds(1500, "train"), birds(300, "test")
    images = torch.stack([transform(sample.open()) for sample in seen])
    labels = torch.tensor([sample.label for sample in seen])
    size = {"img_size": SIZE, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=len(CLASSES), **size)
    train(model, images, labels, epochs=40)
    TsCam(Classifier(model, transform, CLASSES, "the ViT"))
    train(model, images, labels, epochs=20)
    net = attach(model, transform=transform, class_names=CLASSES)
    fit(net, seen, FitConfig(background=0.0))
    measured: Any = {"metrics": ("max_box_acc_v2", "top1_cls"), "intervals": True}
    result = evaluate(net, unseen, methods=METHODS, branches=("softmax", "sigmoid"), **measured)
    print(f"accuracy: {result.value('top1_cls', method=None):.1f} %, MaxBoxAccV2:")
    boxes = {(key.method, key.branch): each for key, each in result.metrics.items() if key.method}
    for (method, branch), metric in boxes.items():
        show(f"{method}, {branch}", interval(metric))
    show("ts-cam, sigmoid - softmax", paired(boxes["ts-cam", "sigmoid"], boxes["ts-cam", "softmax"]))
    for branch in ("softmax", "sigmoid"):
        show(f"ts-cam - cam, {branch}", paired(boxes["ts-cam", branch], boxes["cam", branch]))


def show(title: str, found: Any) -> None:
    """Print a value with its interval."""
    value = found["max_box_acc_v2"]
    print(f"{title:30}{value.value:6.1f} [{value.low:.1f}, {value.high:.1f}]", flush=True)


if __name__ == "__main__":
    main()
