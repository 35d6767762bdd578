"""attach adds a sigmoid branch to a trained classifier; save_branch and load keep it in a file."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.errors import AttachError, CheckpointError
from sigcam.core.files import parse_json, write_atomic
from sigcam.models.preprocess import Preprocess, declared_transform
from sigcam.models.state_dict import fingerprint
from sigcam.network.calibration import BranchCalibration
from sigcam.network.dual import DualBranch
from sigcam.network.hooks import fresh_autocast_cache
from sigcam.network.optimize import optimized
from sigcam.network.output_tail import record_tail
from sigcam.network.sigmoid_head import Init, SigmoidHead
from sigcam.network.split import find_split

KEY = "sigcam-branch"  # of the metadata entry that describes the branch, as JSON
MAX_INPUT = 3 * 2**24  # numbers in an image: a network of any use takes fewer than 4096 x 4096 pixels
ABOUT: dict[str, Callable[[Any], bool]] = {  # what the description must say, and whether a value can be that
    "fingerprint": lambda value: isinstance(value, str),
    "heads": lambda value: bool(value) and _are_texts(value),
    "layer": lambda value: isinstance(value, str),
    "input": lambda value: _are_sizes(value) and len(value) == 3 and math.prod(value) <= MAX_INPUT,
    "named": lambda value: (
        isinstance(value, dict) and _are_texts([v for v in value.values() if v is not None])
    ),
    "classes": lambda value: _are_sizes([value]),
    "class_names": lambda value: value is None or _are_texts(value),
    "fitted": lambda value: isinstance(value, bool),
    "recipe": lambda value: isinstance(value, dict),
}


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
        net.prepare()  # an error now rather than with the first images
    return net


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside DataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    return model if inner is None else unwrap(inner)


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
    if net.calibration != BranchCalibration():
        about["calibration"] = net.calibration.to_json()
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
        example = noise.to(next(model.parameters(), noise))
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
        heads, layer = ", ".join(heads)[:200], layer[:200]
        raise CheckpointError(
            f"{path} was fitted to a head {heads} with {classes} classes after the layer {layer}; "
            f"this {kind} has {', '.join(split.heads)} with {net.classes} after {split.layer}. "
            "Load it onto the model it was fitted to."
        )
    if about["fingerprint"] != fingerprint(net.original):
        raise CheckpointError(
            f"{path} was fitted to a {kind} with other weights, so its maps would mean nothing here. "
            "Load it onto the model it was fitted to, or fit again."
        )
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} does not fit this {kind}: {reason}") from error
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point() != tensors[name].is_floating_point():
            types = f"{tensors[name].dtype} for {tensor.dtype}"
            raise CheckpointError(f"{path} holds {types} in {name}: fit again.")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{path} holds NaN or infinite numbers in {name}: fit again.")
    net.recipe, net.fitted = about["recipe"], about["fitted"]
    if "calibration" in about:
        try:
            net.calibration = BranchCalibration.from_json(about["calibration"])
        except ValueError:
            raise CheckpointError(f"{path} holds a damaged calibration: fit again.") from None
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
    try:
        about = parse_json(metadata[KEY])
    except ValueError:
        about = None
    if not isinstance(about, dict) or not all(k in about and check(about[k]) for k, check in ABOUT.items()):
        raise CheckpointError(f"{path} does not say what it was fitted to: fit again.")
    names, classes = about["class_names"], about["classes"]
    if names is not None and len(names) not in (classes, max(classes, 2)):  # a single logit tells two apart
        raise CheckpointError(f"{path} names {len(names)} of {classes} classes: fit again.")
    return about, tensors


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value > 0 for value in values)
