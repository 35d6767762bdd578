"""ExportedNetwork: all that an exported file computes, as one module without hooks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sigcam.deployment.largest_box import Axis, enlarged_extremes, largest_boxes
from sigcam.deployment.pillow_resize import PillowResize
from sigcam.methods.targets import class_logits
from sigcam.network.dual import DualBranch, ForwardPass, linear_weight

OUTPUTS = (
    "probability",  # (B, C) of the softmax head
    "evidence",  # (B, C) of the sigmoid branch
    "classes",  # (B, K) int64
    "maps",  # (B, K, P, Q) probabilities or logits of cells
    "boxes",  # (B, K, 4) xyxy in pixels of the input
    "scores",  # (B, K) the map's mean in the box
    "present",  # (B, K) bool: evidence above one half
    "logits",  # (B, C) of the softmax head
    "branch_logits",  # (B, C) of the sigmoid branch
)
Outputs = tuple[Tensor, ...]
Scale = Literal["probability", "logit"]


@dataclass(frozen=True)
class Drawn:
    """Which maps and boxes a file draws.

    Args:
        k: number of classes per image.
        classes: these classes, instead of the most probable ones.
        scale: "probability", or "logit", whose mean is the branch's logit.
        threshold: of boxes; a probability, or a fraction of the map's maximum.
    """

    k: int
    classes: tuple[int, ...] | None
    scale: Scale
    threshold: float


class ExportedNetwork(nn.Module):
    """From a batch of pictures, or of inputs of the network, to `OUTPUTS`.

    It runs a private copy of the network; torch.export records what happens, hooks included.
    """

    def __init__(self, net: DualBranch, drawn: Drawn, preprocess: PillowResize | None) -> None:
        super().__init__()
        self.drawn, self.preprocess = drawn, preprocess
        private = copy.copy(net)
        private.__dict__["_modules"] = {"sigmoid": copy.deepcopy(net.sigmoid).eval()}
        private.model = private.original = copy.deepcopy(net.original).eval()
        private.compiled = None
        private.requires_grad_(False), private.model.requires_grad_(False)
        self.model, self.sigmoid = private.model, private.sigmoid
        self.held = [private]  # in a list, so that it is not registered again
        wanted = torch.tensor(drawn.classes or (0,), dtype=torch.int64)
        self.register_buffer("wanted", wanted, persistent=False)

    @property
    def net(self) -> DualBranch:
        """The private copy of the network."""
        private: DualBranch = self.held[0]
        return private

    def forward(self, image: Tensor) -> Outputs:
        """Return `OUTPUTS`, in their order."""
        images = image if self.preprocess is None else self.preprocess(image)
        forward_pass = self.net.run(images)
        logits, branch = class_logits(forward_pass.softmax_logits), class_logits(forward_pass.sigmoid)
        evidence = class_logits(self.net.calibration.evidence(forward_pass.sigmoid)).sigmoid()
        probability = logits.sigmoid() if self.net.classes == 1 else logits.softmax(1)
        if self.drawn.classes is None:
            classes = logits.topk(self.drawn.k, dim=1).indices
        else:
            classes = self.get_buffer("wanted").expand(logits.shape[0], -1)
        maps = self._maps(forward_pass, classes, branch.gather(1, classes))
        boxes, scores = self._boxes(maps, images)
        if self.preprocess is not None:
            boxes = self._in_picture(boxes, image)
        present = evidence.gather(1, classes) > 0.5
        return probability, evidence, classes, maps, boxes, scores, present, logits, branch

    def _maps(self, forward_pass: ForwardPass, classes: Tensor, scores: Tensor) -> Tensor:
        """(B, K, P, Q) scores of cells, whose mean is the branch's logit, or their probabilities."""
        features = forward_pass.features
        found = linear_weight(self.net.last_layer("sigmoid"))
        assert found is not None
        rows = class_logits(found[0].detach().mT).mT if self.net.classes == 1 else found[0].detach()
        weights = rows[classes]  # (B, K, N)
        maps = (weights @ features.flatten(2)).unflatten(2, features.shape[2:])
        maps = maps + (scores - maps.mean((2, 3)))[..., None, None]
        if self.drawn.scale == "logit":
            return maps
        scale = self.net.calibration.map_scale(1.0)
        if self.net.classes == 1:  # calibrated for class 1
            sign = torch.where(classes == 0, -1.0, 1.0)[..., None, None]
            return (sign * scale(sign * maps)).sigmoid()
        return scale(maps).sigmoid()

    def _boxes(self, maps: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, 4) boxes in pixels of the network's input, zeros where there is none, and their scores."""
        cells = maps.flatten(0, 1)
        height, width = images.shape[2:]
        rows = Axis.of(maps.shape[2], height, maps.device)
        columns = Axis.of(maps.shape[3], width, maps.device)
        if self.drawn.scale == "probability":
            threshold = torch.full_like(cells[:, 0, 0], self.drawn.threshold)
        else:  # a level of 0 to 255, of the positive part stretched from 0 to 1
            low, high = (each.clamp(min=0) for each in enlarged_extremes(cells, rows, columns))
            level = (int(255 * self.drawn.threshold) + 1) / 255
            threshold = torch.where(high > low, low + (high - low) * level, float("inf"))
        boxes, scores, found = largest_boxes(cells, threshold, rows, columns)
        last = torch.stack([torch.full_like(scores, side - 1) for side in (width, height)] * 2, 1)
        one = torch.tensor([0.0, 0.0, 1.0, 1.0])
        boxes = torch.where(found[:, None], torch.minimum(boxes + one, last), 0.0)
        return boxes.unflatten(0, maps.shape[:2]), scores.unflatten(0, maps.shape[:2])

    def _in_picture(self, boxes: Tensor, pictures: Tensor) -> Tensor:
        """The same boxes in whole pixels of the pictures."""
        assert self.preprocess is not None
        p, sides = self.preprocess.preprocess, list[Tensor]()
        there = boxes.amax(2, keepdim=True) > 0
        for index, ((first, size, resized), count) in enumerate(
            zip(self.preprocess.placement(pictures), (p.height, p.width), strict=True)
        ):
            corners = boxes[..., [1 - index, 3 - index]].double()
            start, end = first * (size / resized), (first + count) * (size / resized)
            placed = corners * ((end - start) / count) + start
            placed = torch.where(corners >= count - 1, end - 1, placed).round().clamp(min=0)
            sides.append(torch.minimum(placed, size - 1))
        (y0, y1), (x0, x1) = (each.unbind(-1) for each in sides)
        return torch.where(there, torch.stack([x0, y0, x1, y1], -1).float(), 0.0)
