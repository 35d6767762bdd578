"""Figures of maps: both heads side by side, and the two distortions of the softmax head."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F

from sigcam.data.sample import Sample, Samples
from sigcam.drawing.overlay import colours, grid, overlay, with_outline
from sigcam.methods.explainer import explain_pass
from sigcam.methods.explanation import Explanation, is_calibrated, presence_words
from sigcam.methods.registry import MapConfig, Scale
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch, ForwardPass

BOTH_HEADS: tuple[Branch, Branch] = ("softmax", "sigmoid")


class Passes:
    """The forward passes of pictures, each run once, for branches beside one model."""

    def __init__(self, net: DualBranch) -> None:
        self.net = net
        self._kept = dict[str, tuple[Image.Image, ForwardPass]]()

    def of(self, sample: Sample) -> tuple[Image.Image, ForwardPass]:
        """Return the picture of a sample, whose id names it, and its pass."""
        if sample.id not in self._kept:
            assert self.net.transform is not None
            picture = sample.open()
            image = self.net.transform(picture)[None].to(self.net.device)
            self._kept[sample.id] = picture, self.net.run(image, grad=True)
        return self._kept[sample.id]

    def explain(
        self, net: DualBranch, sample: Sample, branch: Branch, scale: Scale = "unit", classes: Any = None
    ) -> Explanation:
        """Explain a picture by a branch of `net`, as `explain` does."""
        picture, forward_pass = self.of(sample)
        config = MapConfig(branch=branch, scale=scale)
        ex = explain_pass(net, net.reread(forward_pass), config, classes=classes)
        whole = (0.0, 0.0, float(picture.width), float(picture.height))
        return replace(ex, pictures=(picture,), regions=(whole,), images=forward_pass.images)


def photograph_figure(passes: Passes, sample: Sample, classes: Sequence[int]) -> Any:
    """A picture and the maps of two classes: the softmax head's, each stretched to its own range, and the
    branch's in probabilities, on one scale."""
    picture, _ = passes.of(sample)
    columns, images, captions = ["a photograph"], [picture], [""]
    chosen = torch.tensor([list(classes)])
    softmax = passes.explain(passes.net, sample, "softmax", classes=chosen)
    sigmoid = passes.explain(passes.net, sample, "sigmoid", "probability", chosen)
    for k, index in enumerate(classes):
        name, evidence = softmax.name(index), float(sigmoid.evidence[0, k])
        columns += [f"{name}:\nsoftmax, its own range", f"{name}:\nevidence, 0 to 1"]
        images += [overlay(picture, ex.maps[0, k]) for ex in (softmax, sigmoid)]
        captions += [f"probability {softmax.probability[0, k]:.3f}"]
        captions += [f"evidence {evidence:.3f}: {presence_words(evidence)}"]
    return grid([images], columns=columns, captions=[captions])


def maps_figure(passes: Passes, samples: Samples, rows: int = 6) -> Any:
    """Input, ground truth, softmax map and sigmoid map, a row per class with a correctly classified image."""
    images, captions, shown = [], [], set[int]()
    for sample in samples:
        if sample.label is None or sample.label in shown or sample.boxes is None or sample.open_mask is None:
            continue
        image, _ = passes.of(sample)
        softmax, sigmoid = (passes.explain(passes.net, sample, branch) for branch in BOTH_HEADS)
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


def absence_figure(passes: Passes, net: DualBranch, samples: Samples, empty: Samples, rows: int = 4) -> Any:
    """Images with their object and the same scenes without it (`empty`, in the same order), side by side: the
    softmax head's map, stretched to its range, and that of `net`'s branch in probabilities, on one scale.

    Where the branch is not calibrated, its map is stretched too. One row per class, predicted correctly.
    """
    scale: Scale = "probability" if is_calibrated(net) and 1.0 in net.calibration.maps else "unit"
    images, captions, shown = [], [], set[int]()
    for sample, scene in zip(samples, empty, strict=False):
        label = sample.label
        if label is None or label in shown:
            continue
        if int(passes.explain(net, sample, "softmax").classes[0]) != label:
            continue
        shown.add(label)
        row, texts = [], []
        for each in (sample, scene):
            image, _ = passes.of(each)
            softmax = passes.explain(net, each, "softmax")
            sigmoid = passes.explain(net, each, "sigmoid", scale)
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


def distortions_figure(net: DualBranch, samples: Samples, passes: Passes | None = None) -> Any:
    """Eq. 8-10 on one image: probabilities and maps as trained and after two shifts of the softmax head."""
    passes = passes or Passes(net)
    correct = (s for s in samples if int(passes.explain(net, s, "softmax").classes[0]) == s.label)
    sample = next(correct, samples[0])
    picture, label = passes.of(sample)[0], sample.label
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
