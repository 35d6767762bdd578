"""save_branch and load keep a sigmoid branch in a file, with what tells the classifier that it belongs to."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.errors import CheckpointError
from sigcam.core.files import parse_json, write_atomic
from sigcam.core.memory import is_out_of_memory
from sigcam.models.preprocess import declared_transform
from sigcam.models.state_dict import checksum, fingerprint
from sigcam.network.attachment import Optimize, assemble, attach, unwrap
from sigcam.network.calibration import BranchCalibration
from sigcam.network.dual import DualBranch
from sigcam.network.hooks import fresh_autocast_cache
from sigcam.network.hub import download_branch, is_hub_address
from sigcam.network.modules import run_model
from sigcam.network.split import Split
from sigcam.network.trace import eval_mode, logits_of

KEY = "sigcam-branch"  # of the metadata entry that describes the branch, as JSON
KEPT_LOGITS = 100  # kept in a file
LOAD_TOLERANCE = 1e-2  # of the largest logit: devices differ by less, networks by more
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
        "found": {
            "split": net.split.to_json(),
            "checksum": checksum(net.original),
            "logits": _noise_logits(net).tolist(),
        },
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
    optimize: Optimize = False,
    transform: Callable[[Any], Tensor] | None = None,
    class_names: Sequence[str] | None = None,
) -> DualBranch:
    """Load a branch that `DualBranch.save` wrote onto the classifier it was fitted to.

    `path` is a file, or hf://USER/REPO or hf://USER/REPO@REVISION for one on the Hugging Face hub. `example`,
    `optimize` and `transform` are those of `attach`; `class_names` are used where the file has none. Raises
    CheckpointError if the file was fitted to another classifier.
    """
    if not isinstance(path, str | Path):
        raise CheckpointError(f"load takes a path, then the model, not {type(path).__name__} first.")
    file = download_branch(str(path)) if is_hub_address(path) else Path(path)
    about, tensors = _read(file, str(path))
    model = unwrap(model)
    requested, heads, classes, layer = (about[key] for key in ("named", "heads", "classes", "layer"))
    modules = dict(model.named_modules())
    known = {argument: name for argument, name in requested.items() if name is None or name in modules}
    settings: Any = {"optimize": optimize, "class_names": about["class_names"] or class_names}
    net = _as_recorded(model, about, transform, settings) if example is None else None
    recorded = net is not None
    if net is None:
        noise = _noise(about["input"], model) if example is None else example
        names: Any = {"head": known.get("head"), "layer": known.get("layer")}
        net = attach(model, **names, example=noise, transform=transform, **settings)
    kind, split = type(net.model).__name__, net.split
    if known != requested or classes != net.classes or (list(split.heads), split.layer) != (heads, layer):
        heads, layer = ", ".join(heads)[:200], layer[:200]
        raise CheckpointError(
            f"{path} was fitted to a head {heads} with {classes} classes after the layer {layer}; "
            f"this {kind} has {', '.join(split.heads)} with {net.classes} after {split.layer}. "
            "Load it onto the model it was fitted to."
        )
    if not recorded and about["fingerprint"] != fingerprint(net.original):
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


def _as_recorded(
    model: nn.Module, about: Mapping[str, Any], transform: Any, settings: Mapping[str, Any]
) -> DualBranch | None:
    """Return the network split where the file says, after one pass; None if the file does not say it, or
    this model has other weights or computes other logits, so that head and layer are to be found again."""
    try:
        found = about["found"]
        split, expected = Split.from_json(found["split"]), torch.tensor(found["logits"])
        named = [list(split.heads), split.layer, split.classes]
        if (
            named != [about["heads"], about["layer"], about["classes"]]
            or list(split.fold.image) != about["input"][1:]
        ):
            return None
        if found["checksum"] != checksum(model):
            return None
        with torch.inference_mode(False), fresh_autocast_cache():
            example, transform = _noise(about["input"], model), transform or declared_transform(model)
            net = assemble(
                model, split, example, requested=dict(about["named"]), transform=transform, **settings
            )
            logits = _some(net.prepare())
    except Exception as error:  # a damaged description, or another network: attach says what is wrong
        if is_out_of_memory(error):
            raise
        return None
    close = logits.shape == expected.shape and _differ(logits, expected) <= LOAD_TOLERANCE
    return net if close else None


def _differ(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest logit; NaN if one is."""
    scale = expected.abs().max().clamp(min=1e-12)
    return float((logits - expected).abs().max() / scale)


def _noise(shape: Sequence[int], model: nn.Module) -> Tensor:
    """Return a (1, C, H, W) input, the same in every process."""
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    return noise.to(next(model.parameters(), noise))


@torch.no_grad()
def _noise_logits(net: DualBranch) -> Tensor:
    """Return some of the classifier's logits of `_noise`."""
    model = net.original
    with eval_mode(model):
        return _some(logits_of(run_model(model, _noise(net.input_shape, model)), 1))


def _some(logits: Tensor) -> Tensor:
    """Return at most a hundred of an image's logits (1, C), as float32 on the CPU."""
    step = -(-logits.shape[1] // KEPT_LOGITS)
    return logits.detach()[0, ::step].float().cpu()


def _read(file: Path, path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the tensors of a branch file; `path` is its name in errors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
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
