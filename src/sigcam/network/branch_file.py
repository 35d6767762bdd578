"""Branch files: what `DualBranch.save` writes and `load` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.errors import CheckpointError
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach, unwrap
from sigcam.network.dual import DualBranch


def load(
    path: str | Path,
    model: nn.Module,
    *,
    example: Tensor | None = None,
    optimize: bool = False,
    transform: Callable[[Any], Tensor] | None = None,
    class_names: Sequence[str] | None = None,
) -> DualBranch:
    """The DualBranch that `save` wrote, around the same trained classifier; CheckpointError if it is
    another. `optimize` and `transform` as for `attach`; `class_names` where the file has none."""
    from safetensors import SafetensorError, safe_open

    if not isinstance(path, str | Path):
        raise CheckpointError(f"load takes a path, then the model, not {type(path).__name__} first.")
    path, model = Path(path), unwrap(model)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable branch file ({error}).") from error
    if "sigcam-branch" not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a sigcam branch: make one with `sigcam fit`."
        )
    try:
        about = json.loads(metadata["sigcam-branch"])
        named, heads, classes = about["named"], about["heads"], about["classes"]
        layer, shape = about["layer"], tuple(about["input"])
        wanted, names, recipe, fitted = (about[k] for k in ("fingerprint", "class_names", "recipe", "fitted"))
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} does not say what it was fitted to: make it anew.") from None
    known = {name: value for name, value in named.items() if value is None or _has_module(model, value)}
    if example is None:
        weight = next(model.parameters())
        example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(weight)
    head, place = known.get("head"), known.get("layer")
    net = attach(model, head=head, layer=place, example=example, optimize=optimize, transform=transform)
    name = type(net.model).__name__
    ours, theirs = (net.split.heads, net.split.layer), (tuple(heads), layer)
    if known != named or classes != net.classes or ours != theirs:
        raise CheckpointError(
            f"{path} was fitted to a head {', '.join(heads)} with {classes} classes after the layer {layer}; "
            f"this {name} has {', '.join(net.split.heads)} with {net.classes} after {net.split.layer}. "
            "Load it onto the model it was fitted to."
        )
    if wanted != fingerprint(net.original):
        raise CheckpointError(
            f"{path} was fitted to a {name} with other weights, so its maps would mean nothing here. "
            "Load it onto the model it was fitted to, or fit again."
        )
    bad = next((key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    if bad:
        raise CheckpointError(f"{path} holds NaN or infinite numbers in {bad}: fit again.")
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit this {name}: {' '.join(str(error).split())[:200]}"
        ) from error
    net.class_names = tuple(names or class_names or ()) or None
    net.recipe, net.fitted = recipe, fitted
    return net


def _has_module(model: nn.Module, name: str) -> bool:
    return name in dict(model.named_modules())
