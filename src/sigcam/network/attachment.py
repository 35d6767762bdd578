"""attach adds a sigmoid branch to a trained classifier."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError
from sigcam.models.preprocess import Preprocess, declared_transform
from sigcam.network.compiled import compiled
from sigcam.network.dual import DualBranch
from sigcam.network.hooks import fresh_autocast_cache
from sigcam.network.optimize import optimized
from sigcam.network.output_tail import record_tail
from sigcam.network.sigmoid_head import Init, SigmoidHead
from sigcam.network.split import Split, find_split

Optimize = bool | Literal["compile"]


def attach(
    model: nn.Module,
    *,
    head: str | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    init: Init = "fresh",
    optimize: Optimize = False,
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
            agree with the model's within 1e-4, but are no longer bit-equal. "compile" also compiles it, for
            thousands of images: that takes a while, and a C++ compiler.
        seed: random seed of the example and of the branch's weights.
        transform: preprocessing, from an image to a (C, H, W) tensor; by default what the model declares.
        class_names: one per logit.
    """
    model = unwrap(model)
    for argument, name in (("head", head), ("layer", layer)):
        if name is not None and not isinstance(name, str):
            raise AttachError(f"{argument}= takes the module's name, a string, not {type(name).__name__}.")
    if example is not None and not isinstance(example, Tensor):
        raise AttachError(f"example= takes a (1, C, H, W) tensor, not {type(example).__name__}.")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise AttachError("this model is on the meta device, which holds no values: load its weights first.")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise AttachError(
            f"this {type(model).__name__} was made inside torch.inference_mode(), so no gradient can pass "
            "its weights: make it, or a copy of it, outside."
        )
    with torch.inference_mode(False), fresh_autocast_cache():
        given = None if example is None else example.clone()  # a copy outside inference mode
        split, probed = find_split(model, head=head, layer=layer, example=given, seed=seed)
        if transform is None:
            transform = declared_transform(model)
            if isinstance(transform, Preprocess) and example is None:  # timm may build it for another size
                transform = replace(transform, height=probed.shape[2], width=probed.shape[3])
        net = assemble(
            model,
            split,
            probed.detach(),
            requested={"head": head, "layer": layer},
            init=init,
            optimize=optimize,
            seed=seed,
            transform=transform,
            class_names=class_names,
        )
        net.prepare(grad=True)  # an error now rather than with the first images
    return net


def assemble(
    model: nn.Module,
    split: Split,
    example: Tensor,
    *,
    requested: dict[str, str | None],
    transform: Callable[[Any], Tensor] | None,
    class_names: Sequence[str] | None,
    init: Init = "copy",
    optimize: Optimize = False,
    seed: int = 0,
) -> DualBranch:
    """Return the classifier with a sigmoid branch where it splits; `prepare` makes it ready to run."""
    original, heads = model, [model.get_submodule(name) for name in split.heads]
    sigmoid = SigmoidHead(heads, classes=split.classes, init=init, seed=seed)
    if optimize:
        model = optimized(model, example, keep=(split.layer, *split.heads, *split.last))
    probabilities = split.output == "probabilities"
    tail = record_tail(model, split, example) if probabilities or not split.whole else None
    sigmoid.tail = None if split.whole else tail
    net = DualBranch(
        model,
        split,
        sigmoid,
        example=example,
        original=original,
        requested=requested,
        softmax_tail=tail if probabilities else None,
        transform=transform,
        class_names=class_names,
    )
    if optimize == "compile":
        net.compiled = compiled(original, split, example)
    return net


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside DataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    return model if inner is None else unwrap(inner)
