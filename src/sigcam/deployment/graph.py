"""ExportedNetwork: all that an exported file computes, as one module without hooks."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from sigcam.deployment.largest_box import Axis, enlarged_extremes, largest_boxes
from sigcam.deployment.pillow_resize import PillowResize
from sigcam.methods.targets import class_logits
from sigcam.network.dual import DualBranch, linear_weight

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
AbsoluteScale = Literal["probability", "logit"]


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
    scale: AbsoluteScale
    threshold: float


class _PlainGradients(TorchFunctionMode):
    """Pools to one cell by a mean, and takes 1x1 convolutions as matrix products, where gradients are
    recorded: ONNX has no operators for the gradients of the others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.adaptive_avg_pool2d:
            given = dict(zip(("input", "output_size"), args, strict=False)) | kwargs
            if given["output_size"] in (1, (1, 1), [1, 1]):
                return given["input"].mean((-2, -1), keepdim=True)
        if func is F.conv2d and args and args[0].requires_grad:
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given = dict(zip(names, args, strict=False)) | kwargs
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            plain = given.get("stride", 1) in (1, (1, 1)) and given.get("padding", 0) in (0, (0, 0), "valid")
            if weight.shape[2:] == (1, 1) and plain and given.get("groups", 1) == 1:
                out = (weight.flatten(1) @ x.flatten(2)).unflatten(2, x.shape[2:])
                return out if bias is None else out + bias[:, None, None]
        return func(*args, **kwargs)


class Scored(nn.Module):
    """From inputs of the network to logits of both heads, the classes to draw, F, and their weights."""

    def __init__(self, net: DualBranch, drawn: Drawn, halved: bool = False) -> None:
        super().__init__()
        self.drawn, self.halved = drawn, halved
        private = copy.copy(net)
        private.__dict__["_modules"] = {"sigmoid": copy.deepcopy(net.sigmoid).eval()}
        private.model = private.original = copy.deepcopy(net.original).eval()
        private.compiled = None
        private.requires_grad_(False), private.model.requires_grad_(False)
        point = (private.split.point,)
        private._grad_modes = {}
        if not self.linear_in(net):  # one pass, whatever its last bits
            private._grad_modes = {point: replace(net.grad_mode(point), inline=True)}
        self.model, self.sigmoid = private.model, private.sigmoid
        if halved:
            self.half()
        self.held = [private]  # in a list, so that it is not registered again
        self.register_buffer("wanted", torch.tensor(drawn.classes or (0,)), persistent=False)

    @staticmethod
    def linear_in(net: DualBranch) -> bool:
        """Whether the weights of all classes are rows of the branch's last layer."""
        return "sigmoid" in net.linear

    def forward(self, images: Tensor) -> Outputs:
        """Return softmax logits and branch logits (B, C), classes (B, K), F, and d logit / d mean of F of
        the classes (B, K, N)."""
        linear = self.linear_in(self.held[0])
        with torch.set_grad_enabled(not linear), nullcontext() if linear else _PlainGradients():
            found = self._scored(images.half() if self.halved else images, linear)
            return tuple(each.detach().float() if each.is_floating_point() else each for each in found)

    def _scored(self, images: Tensor, linear: bool) -> Outputs:
        net: DualBranch = self.held[0]
        point = net.split.point
        (forward_pass,) = net.run_at((point,), images, grad=not linear)
        logits, branch = class_logits(forward_pass.softmax_logits), class_logits(forward_pass.sigmoid)
        if self.drawn.classes is None:
            classes = logits.topk(self.drawn.k, dim=1).indices
        else:
            classes = self.get_buffer("wanted").expand(logits.shape[0], -1)
        if linear:
            found = linear_weight(net.last_layer("sigmoid"))
            assert found is not None
            weights = class_logits(found[0].mT).mT[classes]
        else:  # the gradient of one class at a time, as explain takes it
            cut, each = forward_pass.cut, list[Tensor]()
            for scores in branch.gather(1, classes).unbind(1):
                (gradient,) = torch.autograd.grad(scores.sum(), cut, retain_graph=True)
                each.append(point.fold(gradient, forward_pass.image).sum((2, 3)))
            weights = torch.stack(each, 1)
        return logits, branch, classes, forward_pass.features, weights


class ExportedNetwork(nn.Module):
    """From a batch of pictures, or of inputs of the network, to `OUTPUTS`.

    torch.export records what happens, hooks included. Gradients are recorded before, as the operations that
    compute them. `halved`, the network itself computes in float16, the rest in float32.
    """

    def __init__(
        self, net: DualBranch, drawn: Drawn, preprocess: PillowResize | None, halved: bool = False
    ) -> None:
        super().__init__()
        self.drawn, self.preprocess = drawn, preprocess
        self.calibration, self.single = net.calibration, net.classes == 1
        self.scored: nn.Module = Scored(net, drawn, halved)
        if not Scored.linear_in(net):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                traced = make_fx(self.scored, tracing_mode="symbolic", _allow_non_fake_inputs=True)
                self.scored = traced(net.example.repeat(2, 1, 1, 1))

    def forward(self, image: Tensor) -> Outputs:
        """Return `OUTPUTS`, in their order."""
        images = image if self.preprocess is None else self.preprocess(image)
        logits, branch, classes, features, weights = self.scored(images)
        scores = branch[:, 1:] if self.single else branch  # of a single logit, that of class 1
        evidence = class_logits(self.calibration.evidence(scores)).sigmoid()
        probability = logits.sigmoid() if self.single else logits.softmax(1)
        maps = (weights @ features.flatten(2)).unflatten(2, features.shape[2:])
        maps = maps + (branch.gather(1, classes) - maps.mean((2, 3)))[..., None, None]
        if self.drawn.scale == "probability":
            maps = self._probabilities(maps, classes)
        boxes, scores = self._boxes(maps, images)
        if self.preprocess is not None:
            boxes = self._in_picture(boxes, image)
        present = evidence.gather(1, classes) > 0.5
        return probability, evidence, classes, maps, boxes, scores, present, logits, branch

    def _probabilities(self, maps: Tensor, classes: Tensor) -> Tensor:
        """The probabilities of cells of the classes (B, K)."""
        scale = self.calibration.map_scale(1.0)
        if self.single:  # calibrated for class 1
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
