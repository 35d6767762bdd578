"""State dicts: read without running code, rename to fit a model, load strictly."""

import hashlib
import logging
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sigcam.core.errors import ModelError
from sigcam.core.files import error_line, parse_json
from sigcam.core.manifest import versions

log = logging.getLogger(__name__)

WRAPPERS = ("state_dict", "model_state_dict", "model")  # where training scripts save the state dict
PACKAGE_FACTS = ("package", "version", "registry", "archive", "archive_sha256", "licence", "form")
PREFIXES = ("module.", "_orig_mod.", "model.")  # added by DataParallel, torch.compile, Lightning


def read_weights(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...] | None, str | None]:
    """Return a file's state dict, class names and model spec (None if absent), without running code in it."""
    if not path.is_file():
        raise ModelError(f"no weights at {path}: give a .safetensors file or a torch state dict.")
    content: Any
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                content = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path}: {error_line(error)}") from error
        classes, spec = None, metadata.get("model")
        with suppress(ValueError):  # files of other programs may use "classes" differently
            classes = class_names_in(parse_json(metadata.get("classes", "null")))
    else:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged pickles raise almost anything
            pickled = re.search(r"GLOBAL (\S+)", str(error))
            if not isinstance(error, pickle.UnpicklingError) or not pickled:
                raise ModelError(f"cannot read {path} as a torch file: {error_line(error)}") from error
            raise ModelError(
                f"{path} holds a pickled {pickled[1]}, which runs code when read: save model.state_dict() "
                "instead, or build the model with file:PATH.py:FUNCTION."
            ) from error
        outer: Any = content if isinstance(content, Mapping) else {}
        classes, spec = class_names_in(outer.get("classes")), None
        content = next((outer[key] for key in WRAPPERS if isinstance(outer.get(key), Mapping)), content)
    pairs = content.items() if isinstance(content, Mapping) else ()
    if not pairs or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in pairs):
        keys = isinstance(content, Mapping)
        found = ", ".join(map(str, list(content)[:5])) if keys else type(content).__name__
        raise ModelError(f"{path} holds no state dict but {found or 'nothing'}: save model.state_dict().")
    return dict(content), classes, spec


def weights_facts(model: str, path: Path | None) -> Any:
    """Return what a manifest says of a classifier's weights: the package, its version and the hash of its
    archive for weights that come by package name; otherwise the path; None for a model's own weights."""
    if path is None:
        library = {"package": "torchvision", "version": versions().get("torchvision")}
        return library if model.startswith(("torchvision:", "wsol:")) else None
    facts: dict[str, str] = {}
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            facts = {key: metadata[key] for key in PACKAGE_FACTS if key in metadata}
    return {"path": str(path), **facts} if "package" in facts else str(path)


def match_names(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename to the model's names: remove prefixes, DenseNet's old names and unused auxiliary heads."""
    own = list(model.state_dict())
    matched = dict(state)
    for prefix in PREFIXES * 2:  # they may be nested in any order
        if all(key.startswith(prefix) for key in matched) and not all(key.startswith(prefix) for key in own):
            matched = {key.removeprefix(prefix): tensor for key, tensor in matched.items()}
    old = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
    if any(old.search(key) for key in matched) and not any(old.search(key) for key in own):
        matched = {old.sub(r"\1", key): tensor for key, tensor in matched.items()}
    if getattr(model, "aux_logits", None) is False:
        matched = {k: v for k, v in matched.items() if not k.startswith(("AuxLogits.", "aux1.", "aux2."))}
    return matched


def match_hf_names(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename to the names of the installed transformers version, which may differ from those in its files."""
    if state.keys() == model.state_dict().keys():
        return state
    load: Any = type(model)
    filled, report = load.from_pretrained(
        None, config=model.config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        return state
    head = {key: state[key] for key, *_ in report["mismatched_keys"] if key in state}
    return {**filled.state_dict(), **head}


def class_count_in(state: Mapping[str, Tensor], model: nn.Module) -> int | None:
    """Return the state dict's number of classes if its shapes differ from the model's only in that."""
    own = model.state_dict()
    differ = [key for key in own if key in state and state[key].shape != own[key].shape]
    counts = {tuple(state[key].shape[:1]) for key in differ}
    same_rows = all(state[key].shape[1:] == own[key].shape[1:] for key in differ)
    return next(iter(counts))[0] if same_rows and len(counts) == 1 and () not in counts else None


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], *, source: str, target: str, num_classes: int | None
) -> bool:
    """Load the state dict strictly, except for a head of another size than `num_classes`; return whether the
    head was left as initialized."""
    own = model.state_dict()
    shapes = {key: (tuple(state[key].shape), tuple(own[key].shape)) for key in own if key in state}
    different = {key: (theirs, ours) for key, (theirs, ours) in shapes.items() if theirs != ours}
    head = [key for key, (theirs, ours) in different.items() if theirs and ours == (num_classes, *theirs[1:])]
    problems = {
        "missing": [key for key in own if key not in state and not key.endswith("num_batches_tracked")],
        "unexpected": [key for key in state if key not in own],
        "wrong shape": [
            f"{key} {theirs} for {ours}" for key, (theirs, ours) in different.items() if key not in head
        ],
        "wrong type": [
            f"{key} {state[key].dtype}"
            for key in shapes
            if state[key].is_floating_point() != own[key].is_floating_point()
        ],
    }
    faults = [f"{what} {', '.join(keys[:3])} ({len(keys)} in all)" for what, keys in problems.items() if keys]
    if faults:
        raise ModelError(f"{source} does not fit {target}: {'; '.join(faults)}.")
    if head:
        log.info("%s: the head of %s classes is new (%s)", target, num_classes, ", ".join(head))
    used = OrderedDict((key, tensor) for key, tensor in state.items() if key not in head)
    used._metadata = own._metadata  # type: ignore[attr-defined]  # versions, without which MNASNet does not load
    model.load_state_dict(used, strict=False)  # only the head and BatchNorm counters may be missing
    return bool(head)


def check_finite(model: nn.Module, source: str) -> None:
    """Raise ModelError for NaN and infinite weights; buffers may be infinite, such as attention masks."""
    learned = {key for key, _ in model.named_parameters()}
    for key, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        weight = key in learned or key.endswith(("running_mean", "running_var"))
        bad = ~tensor.isfinite() if weight else tensor.isnan()
        if bad.any():
            count = f"{int(bad.sum())} of {tensor.numel()}"
            raise ModelError(f"{source}: {count} numbers in {key} are NaN or infinite: use another file.")


def class_names_in(value: object) -> tuple[str, ...] | None:
    """Return the class names if `value` is a list of strings."""
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    return None


def fingerprint(model: nn.Module, *, without: Iterable[str] = ()) -> str:
    """Return a hash of all parameters and buffers that matter in eval mode, except those of the modules named
    in `without`."""
    digest, left_out = hashlib.blake2b(digest_size=16), tuple(f"{name}." for name in without)
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or name.endswith("num_batches_tracked"):
            continue
        if name.startswith(left_out):
            continue
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(data.shape)} {data.dtype}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksum(model: nn.Module) -> str:
    """Return a hash of the sums of all that `fingerprint` hashes: thirty times as fast, and blind to numbers
    that change places within a tensor. The memory layout does not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or name.endswith("num_batches_tracked"):
            continue
        data = tensor.detach().cpu()
        if data.is_contiguous(memory_format=torch.channels_last):
            data = data.permute(0, 2, 3, 1)  # in the order of its memory, which needs no copy
        words = data.contiguous().reshape(-1).view(torch.uint8).numpy()
        words = words.view(f"u{min(data.element_size(), 8)}")
        total = int(np.add.reduce(words, dtype=words.dtype))  # modulo its largest value
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}".encode())
    return digest.hexdigest()
