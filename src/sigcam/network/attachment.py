"""attach: add a sigmoid branch to a trained classifier."""

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
    """Add a sigmoid branch to a trained classifier, which itself stays unchanged.

    Args:
        head: name of the module that returns the logits, where it cannot be found.
        layer: name of the module whose output is F, to use another than the last.
        example: a (1, C, H, W) input to probe with; by default what the model declares, else 224x224.
        init: "fresh" starts the branch at Normal(0, 0.01), "copy" at the softmax head's weights.
        optimize: run a private copy of the model, made faster (folded BatchNorm, memory layout); its logits
            agree with the model's within 1e-4, but are no longer bit-equal.
        seed: random seed of the example and of the branch's weights.
        transform: preprocessing, from an image to a (C, H, W) tensor; by default what the model declares.
        class_names: one per logit.
    """
    model = original = unwrap(model)
    for argument, name in (("head", head), ("layer", layer)):
        if name is not None and not isinstance(name, str):
            raise AttachError(f"{argument}= takes the module's name, a string, not {type(name).__name__}.")
    if example is not None and not isinstance(example, Tensor):
        raise AttachError(f"example= takes a (1, C, H, W) tensor, not {type(example).__name__}.")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise AttachError(
            f"this {type(model).__name__} was made inside torch.inference_mode(), so no gradient can pass "
            "its weights: make it, or a copy of it, outside."
        )
    with torch.inference_mode(False), fresh_autocast_cache():
        given = None if example is None else example.clone()  # a copy outside inference mode
        split, probed = find_split(model, head=head, layer=layer, example=given, seed=seed)
        heads = [model.get_submodule(name) for name in split.heads]
        sigmoid = SigmoidHead(heads, classes=split.classes, init=init, seed=seed)
        if optimize:
            model = optimized(model, probed, keep=(split.layer, *split.heads, *split.last))
        probabilities = split.output == "probabilities"
        tail = record_tail(model, split, probed) if probabilities or not split.whole else None
        sigmoid.tail = None if split.whole else tail
        if transform is None:
            transform = declared_transform(model)
            if isinstance(transform, Preprocess) and example is None:  # timm may build it for another size
                transform = replace(transform, height=probed.shape[2], width=probed.shape[3])
        net = DualBranch(
            model,
            split,
            sigmoid,
            example=probed.detach(),
            original=original,
            requested={"head": head, "layer": layer},
            softmax_tail=tail if probabilities else None,
            transform=transform,
            class_names=class_names,
        )
        with torch.no_grad():
            sigmoid.prepare(net._hooked((split.point,), probed).inputs)
        net.grad_mode((split.point,))  # an error now rather than with the first images
        net.linear = frozenset(b for b in ("softmax", "sigmoid") if _is_gap_linear(net, b))
    return net


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside DataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = model.module if parallel else getattr(model, "_orig_mod", None)
    return model if inner is None else unwrap(inner)


@torch.no_grad()
def _is_gap_linear(net: DualBranch, branch: Literal["softmax", "sigmoid"]) -> bool:
    """Whether the branch's logits are its last layer's weight times the mean of F over the grid (Eq. 3)."""
    weight = linear_weight(net.last_layer(branch))
    forward_pass = net.run(net.example)
    mean = forward_pass.features.double().mean((2, 3))  # (B, N)
    if len(net.split.heads) > 1 or weight is None or weight[0].shape != (net.classes, mean.shape[1]):
        return False
    logits = forward_pass.softmax_logits if branch == "softmax" else forward_pass.sigmoid
    predicted = mean @ weight[0].double().T + weight[1].double()
    scale = logits.double().abs().max().clamp(min=1e-12)
    tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2
    agrees = (predicted - logits.double()).abs().max() <= tolerance * scale
    return bool(agrees and weight[0].any())  # an all-zero head would agree with anything
