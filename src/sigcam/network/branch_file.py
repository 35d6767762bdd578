"""Branch files: safetensors with the sigmoid branch's weights and what it was fitted to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.errors import CheckpointError
from sigcam.core.files import write_atomic
from sigcam.models.state_dict import fingerprint
from sigcam.network.attachment import attach, unwrap
from sigcam.network.dual import DualBranch

KEY = "sigcam-branch"  # of the metadata entry that describes the branch, as JSON


def save_branch(net: DualBranch, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write the branch in `dtype`; the file is replaced whole or not at all."""
    from safetensors.torch import save

    about = {
        "fingerprint": fingerprint(net.original),
        "heads": list(net.split.heads),
        "layer": net.split.layer,
        "input": list(net.input_shape),
        "named": net.requested,
        "classes": net.classes,
        "class_names": list(net.class_names) if net.class_names else None,
        "fitted": net.fitted,
        "recipe": net.recipe,
    }
    tensors = {
        name: t.detach().to("cpu", dtype if t.is_floating_point() else None, copy=True).contiguous()
        for name, t in net.state_dict().items()
    }
    try:
        write_atomic(path, save(tensors, metadata={KEY: json.dumps(about)}))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}.") from error


def load(
    path: str | Path,
    model: nn.Module,
    *,
    example: Tensor | None = None,
    optimize: bool = False,
    transform: Callable[[Any], Tensor] | None = None,
    class_names: Sequence[str] | None = None,
) -> DualBranch:
    """Load a branch that `DualBranch.save` wrote onto the classifier it was fitted to.

    `example`, `optimize` and `transform` are those of `attach`; `class_names` are used where the file has
    none. Raises CheckpointError if the file was fitted to another classifier.
    """
    if not isinstance(path, str | Path):
        raise CheckpointError(f"load takes a path, then the model, not {type(path).__name__} first.")
    path, model = Path(path), unwrap(model)
    about, tensors = _read(path)
    requested, heads, classes, layer = (about[key] for key in ("named", "heads", "classes", "layer"))
    modules = dict(model.named_modules())
    known = {argument: name for argument, name in requested.items() if name is None or name in modules}
    if example is None:
        noise = torch.randn(1, *about["input"], generator=torch.Generator().manual_seed(0))
        example = noise.to(next(model.parameters()))
    net = attach(
        model,
        head=known.get("head"),
        layer=known.get("layer"),
        example=example,
        optimize=optimize,
        transform=transform,
        class_names=about["class_names"] or class_names,
    )
    kind, split = type(net.model).__name__, net.split
    if known != requested or classes != net.classes or (list(split.heads), split.layer) != (heads, layer):
        raise CheckpointError(
            f"{path} was fitted to a head {', '.join(heads)} with {classes} classes after the layer {layer}; "
            f"this {kind} has {', '.join(split.heads)} with {net.classes} after {split.layer}. "
            "Load it onto the model it was fitted to."
        )
    if about["fingerprint"] != fingerprint(net.original):
        raise CheckpointError(
            f"{path} was fitted to a {kind} with other weights, so its maps would mean nothing here. "
            "Load it onto the model it was fitted to, or fit again."
        )
    bad = next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    if bad:
        raise CheckpointError(f"{path} holds NaN or infinite numbers in {bad}: fit again.")
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} does not fit this {kind}: {reason}") from error
    net.recipe, net.fitted = about["recipe"], about["fitted"]
    return net


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the tensors of a branch file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable branch file ({error}).") from error
    if KEY not in metadata:
        raise CheckpointError(f"{path} is a safetensors file, but not a sigcam branch, see `sigcam fit`.")
    keys = {"fingerprint", "heads", "layer", "input", "named", "classes", "class_names", "fitted", "recipe"}
    try:
        about = json.loads(metadata[KEY])
    except ValueError:
        about = None
    if not isinstance(about, dict) or not keys <= about.keys():
        raise CheckpointError(f"{path} does not say what it was fitted to: fit again.")
    return about, tensors
