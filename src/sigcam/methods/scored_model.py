"""Networks for the drop-in classes: a classifier at its layers, or any model with a score as its logit."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from sigcam.core.errors import AttachError, ConfigError, DataError
from sigcam.methods.row_scores import RowScore, one_number
from sigcam.network.attachment import assemble, attach, unwrap
from sigcam.network.dual import DualBranch
from sigcam.network.trace import eval_mode

Layers = Sequence[str | nn.Module] | None


class ScoredModel(nn.Module):
    """A model of any output, made a classifier with one logit: the target's score of that output."""

    def __init__(self, model: nn.Module, target: RowScore) -> None:
        super().__init__()
        self.model, self.target = model, target
        own = next(model.parameters(), torch.zeros(()))
        self.head = skip_init(nn.Linear, 1, 1, bias=False, device=own.device, dtype=own.dtype)
        nn.init.ones_(self.head.weight.requires_grad_(False))

    def forward(self, images: Tensor) -> Tensor:
        scores = torch.stack([one_number(self.target(row)) for row in _rows(self.model(images))])
        logits: Tensor = self.head(scores[:, None].to(self.head.weight))
        return logits


def scored_networks(
    model: nn.Module, layers: Layers, images: Tensor, targets: Sequence[RowScore]
) -> Iterator[tuple[DualBranch, Layers]]:
    """Yield a network for each image, of the score of its target, and the `layers` argument that is left for
    `explain`."""
    with torch.no_grad(), eval_mode(model):  # errors of a target are its own here
        rows = _rows(model(images))
        if len(rows) != len(images):
            raise DataError(f"targets score a row for each image: {len(rows)} for {len(images)} image(s).")
        for row, target in zip(rows, targets, strict=True):
            one_number(target(row))
    score = _any_score if all(isinstance(row, Tensor) for row in rows) else targets[0]
    net, left = _attach_scored(model, layers, score, images[:1].detach())
    facts: Any = {"requested": net.requested, "transform": None, "class_names": None}
    for image, target in zip(images.split(1), targets, strict=True):
        each = assemble(ScoredModel(unwrap(model), target), net.split, image.detach(), **facts)
        each.prepare(grad=True)
        yield each, left


def can_be_scored(model: nn.Module, layers: Layers) -> bool:
    """Whether the layers give a map of some score of the model's output."""
    if isinstance(model, DualBranch):
        return False
    try:
        _attach_scored(model, layers, _any_score)
    except (AttachError, AttributeError):
        return False
    return True


def _attach_scored(
    model: nn.Module, layers: Layers, target: RowScore, example: Tensor | None = None
) -> tuple[DualBranch, Layers]:
    model = unwrap(model)
    if layers:
        layers = [model.get_submodule(each) if isinstance(each, str) else each for each in layers]
    return attach_at(ScoredModel(model, target), layers, example)


def _any_score(row: Tensor) -> Tensor:
    """Return a number that depends on all of a model's output for an image."""
    return (row * torch.linspace(1, 2, row.numel()).to(row).view_as(row)).sum()


def _rows(output: Any) -> Sequence[Any]:
    """Return what a model returned for each image; DataError if it is no tensor and no list."""
    if isinstance(output, Tensor | list | tuple):
        return cast(Sequence[Any], output)
    kind = type(output).__name__
    raise DataError(
        f"targets score a tensor or list with a row for each image, and the model returned {kind}."
    )


def attach_at(model: nn.Module, layers: Layers, example: Tensor | None = None) -> tuple[DualBranch, Layers]:
    """Attach to the model; return the network and the `layers` argument that is left for `explain`."""
    if layers is not None and (isinstance(layers, str | nn.Module) or not len(layers)):
        raise ConfigError("target_layers is a list of modules or names, e.g. [model.layer4], or left out.")
    if layers is not None and len(layers) == 1 and not isinstance(model, DualBranch):
        layer, model = layers[0], unwrap(model)
        name = layer if isinstance(layer, str) else {m: n for n, m in model.named_modules()}.get(layer)
        if name is None:
            raise AttachError(f"this {type(layer).__name__} is no module of {type(model).__name__}.")
        return attach(model, layer=name, example=example), None
    net = model if isinstance(model, DualBranch) else attach(model, example=example)
    for layer in layers or ():
        net.feature_point(layer)  # raise now rather than with the first images
    return net, layers
