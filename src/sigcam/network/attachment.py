"""attach: a `DualBranch` around a trained classifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError
from sigcam.models.preprocess import Preprocess, declared_transform
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.hooks import fresh_autocast_cache
from sigcam.network.optimize import optimized
from sigcam.network.output_tail import record_tail
from sigcam.network.sigmoid_head import Init, SigmoidHead
from sigcam.network.split import find_split


def attach(
    model: nn.Module,
    *,
    head: str | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    init: Init = "fresh",
    optimize: bool = False,
    seed: int = 0,
    transform: Callable[[Any], Tensor] | None = None,
    class_names: Sequence[str] | None = None,
) -> DualBranch:
    """A DualBranch around the trained classifier, which itself stays as it is.

    Args:
        head: name of the module that returns the logits, where it cannot be found.
        layer: name of the module whose output is F, where another one is wanted.
        example: a (1, C, H, W) input to probe with; by default what the model declares, else 224x224.
        init: "fresh" starts the branch at Normal(0, 0.01), "copy" at the softmax head's weights.
        optimize: works on a private copy of the model as it is now, made faster (folded BatchNorm, memory
            layout); its logits agree with the model's within 1e-4, but are no longer bit-equal.
        transform: preprocessing, from a picture to a (C, H, W) tensor; by default what the model declares.
        class_names: one per logit.
    """
    model, told = unwrap(model), example is not None
    for argument, name in (("head", head), ("layer", layer)):
        if name is not None and not isinstance(name, str):
            raise AttachError(f"{argument}= takes the module's name, a string, not {type(name).__name__}.")
    if example is not None and not isinstance(example, Tensor):
        raise AttachError(f"example= takes a (1, C, H, W) tensor, not {type(example).__name__}.")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise AttachError(
            f"this {type(model).__name__} was made inside torch.inference_mode(), so that no gradient can "
            "pass its weights: make it, or a copy of it, outside."
        )
    with torch.inference_mode(False), fresh_autocast_cache():
        example = None if example is None else example.clone()  # it may have been made in inference mode
        split, example = find_split(model, head=head, layer=layer, example=example, seed=seed)
        heads = [model.get_submodule(name) for name in split.heads]
        sigmoid = SigmoidHead(heads, classes=split.classes, init=init, seed=seed)
        original = model
        if optimize:
            model = optimized(model, example, keep=(split.layer, *split.heads, *split.last))
        net = DualBranch(model, split, sigmoid)
        net.original = original
        net.requested = {"head": head, "layer": layer}
        if not split.whole:
            sigmoid.tail = record_tail(model, split, example)
        if split.output == "probabilities":
            net._softmax_tail = sigmoid.tail or record_tail(model, split, example)
        with torch.no_grad():
            inputs = net._tap((split.point,), example).inputs
        sigmoid.prepare(inputs)
        net.example = example.detach()
        net.grad_mode((split.point,))
        net.linear = frozenset(b for b in ("softmax", "sigmoid") if _is_gap_linear(net, b, example))
        net.input_shape = (int(example.shape[1]), int(example.shape[2]), int(example.shape[3]))
    net.class_names = tuple(class_names) if class_names else None
    net.transform = transform or declared_transform(model)
    if (
        isinstance(net.transform, Preprocess) and not told and transform is None
    ):  # a timm model may be built for another size
        net.transform = replace(net.transform, height=net.input_shape[1], width=net.input_shape[2])
    return net


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside DataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    return model if inner is None else unwrap(inner)


def _is_gap_linear(net: DualBranch, branch: Literal["softmax", "sigmoid"], example: Tensor) -> bool:
    """Whether the branch's logits are its last layer's weight times the mean of F over the grid (Eq. 3)."""
    weight = linear_weight(net.last_layer(branch))
    with torch.no_grad():
        passage = net.run(example)
        mean = passage.features.double().mean((2, 3))  # (B, N)
        if len(net.split.heads) > 1 or weight is None or weight[0].shape != (net.classes, mean.shape[1]):
            return False
        if not bool(weight[0].count_nonzero()):
            return False  # an all-zero head would agree with anything
        logits = passage.softmax_logits if branch == "softmax" else passage.sigmoid
        predicted = mean @ weight[0].double().T + weight[1].double()
        scale = logits.double().abs().max().clamp(min=1e-12)
        tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2
        return bool((predicted - logits.double()).abs().max() <= tolerance * scale)
