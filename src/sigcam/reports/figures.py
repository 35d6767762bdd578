"""Figures of maps: both heads side by side, and the two distortions of the softmax head."""

import copy
from typing import Any

import torch
from torch.nn import functional as F

from sigcam.data.sample import Samples
from sigcam.drawing.overlay import colours, grid, overlay, with_outline
from sigcam.methods.explainer import explain, explain_pass
from sigcam.methods.explanation import is_calibrated, presence_words
from sigcam.methods.registry import MapConfig, Scale
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch

BOTH_HEADS: tuple[Branch, Branch] = ("softmax", "sigmoid")


def maps_figure(net: DualBranch, samples: Samples, rows: int = 6) -> Any:
    """Input, ground truth, softmax map and sigmoid map, a row per class with a correctly classified image."""
    images, captions, shown = [], [], set[int]()
    for sample in samples:
        if sample.label is None or sample.label in shown or sample.boxes is None or sample.open_mask is None:
            continue
        image = sample.open()
        softmax, sigmoid = (explain(net, [image], branch=branch) for branch in BOTH_HEADS)
        if int(softmax.classes[0]) != sample.label:
            continue
        shown.add(sample.label)
        truth = with_outline(image, sample.open_mask())
        images.append([image, truth, overlay(image, softmax.maps[0]), overlay(image, sigmoid.maps[0])])
        scores = f"probability {softmax.probability[0]:.3f}", f"evidence {sigmoid.evidence[0]:.3f}"
        captions.append([samples.classes[sample.label], "object mask", *scores])
        if len(images) == rows:
            break
    columns = "input", "ground truth", "Grad-CAM, softmax head", "Grad-CAM, sigmoid branch"
    return grid(images, columns=columns, captions=captions)


def absence_figure(net: DualBranch, samples: Samples, empty: Samples, rows: int = 4) -> Any:
    """Images with their object and the same scenes without it (`empty`, in the same order), side by side: the
    softmax head's map, stretched to its range, and that of the branch in probabilities, on one scale.

    Where the branch is not calibrated, its map is stretched too. One row per class, predicted correctly.
    """
    scale: Scale = "probability" if is_calibrated(net) and 1.0 in net.calibration.maps else "unit"
    images, captions, shown = [], [], set[int]()
    for sample, scene in zip(samples, empty, strict=False):
        picture, label = sample.open(), sample.label
        if label is None or label in shown:
            continue
        if int(explain(net, [picture], branch="softmax").classes[0]) != label:
            continue
        shown.add(label)
        row, texts = [], []
        for image in (picture, scene.open()):
            softmax = explain(net, [image], branch="softmax")
            sigmoid = explain(net, [image], scale=scale)
            best, evidence = softmax.name(int(softmax.classes[0])), float(sigmoid.evidence[0])
            row += [image, colours(softmax.maps[0]), colours(sigmoid.maps[0])]
            words = f"\n{presence_words(evidence)}" if sigmoid.tells_presence else ""
            texts += [best, f"probability {softmax.probability[0]:.3f}", f"evidence {evidence:.3f}{words}"]
        images.append(row)
        captions.append(texts)
        if len(images) == rows:
            break
    maps = (
        "softmax head,\nits own range",
        "absolute evidence,\n0 to 1" if scale == "probability" else "sigmoid",
    )
    return grid(images, columns=("with a bird", *maps, "without it", *maps), captions=captions)


def distortions_figure(net: DualBranch, samples: Samples) -> Any:
    """Eq. 8-10 on one image: probabilities and maps as trained and after two shifts of the softmax head."""
    correct = (s for s in samples if int(explain(net, [s.open()], branch="softmax").classes[0]) == s.label)
    sample = next(correct, samples[0])
    picture, label = sample.open(), sample.label
    assert net.transform is not None and sample.open_mask is not None and label is not None
    image = net.transform(picture)[None].to(net.device).double()
    double = copy.deepcopy(net).double()
    layer = double.last_layer("softmax")
    weight = layer.get_parameter("weight")
    original = weight.detach().clone()
    features = double(image).features[0]
    mask = (torch.from_numpy(sample.open_mask()) == 1).to(features)[None]
    outside = 1 - F.adaptive_max_pool2d(mask, list(features.shape[-2:]))  # 1 in cells without the object
    channel = int((features * outside).mean((1, 2)).argmax())  # strongest outside the object
    spread = float(original.std())
    shifts = (
        ("as trained", 0.0, slice(0, 0)),
        ("one channel + delta", 25 * spread, slice(channel, channel + 1)),
        ("every channel - delta", -5 * spread, slice(None)),
    )
    rows: list[list[Any]] = [[picture], [picture]]
    captions: list[list[str]] = [["softmax head"], ["sigmoid branch"]]
    for _, delta, channels in shifts:
        with torch.no_grad():
            weight.copy_(original)
            weight[:, channels] += delta
        forward = double.run(image, grad=True)
        top = forward.softmax.softmax(1)[0].sort(descending=True).values
        evidence = net.evidence(forward.sigmoid[0, label])
        texts = f"probabilities {top[0]:.6f}, {top[1]:.6f}", f"evidence {evidence:.6f}"
        for row, branch in enumerate(BOTH_HEADS):
            ex = explain_pass(double, forward, MapConfig(branch=branch))
            rows[row].append(colours(ex.maps[0]))
            captions[row].append(texts[row] + ("\nblank map" if bool(ex.blank[0]) else ""))
    columns = "input", *(f"{name}\ndelta = {delta:+.2f}" for name, delta, _ in shifts)
    return grid(rows, columns=columns, captions=captions)
