"""State dicts: read from files without running code, brought under a model's names, loaded strictly."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.errors import ModelError
from sigcam.core.files import error_line

log = logging.getLogger(__name__)

WRAPPERS = ("state_dict", "model_state_dict", "model")  # where training scripts put the state dict
PREFIXES = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile, Lightning


def read_weights(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...] | None, str | None]:
    """The state dict in a file, and the class names and spec where it holds them; no code in it is run."""
    if not path.is_file():
        raise ModelError(f"no weights at {path}: give a .safetensors file or a torch state dict.")
    held: Any
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                held, notes = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path}: {error_line(error)}") from error
        classes, origin = None, notes.get("model")
        with suppress(ValueError):  # other people's files may say "classes" in other words
            classes = class_names_in(json.loads(notes.get("classes", "null")))
    else:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle raises anything
            found = re.search(r"GLOBAL (\S+)", str(error))
            if not isinstance(error, pickle.UnpicklingError) or not found:
                raise ModelError(f"cannot read {path} as a torch file: {error_line(error)}") from error
            raise ModelError(
                f"{path} holds a pickled {found[1]}, which runs code when read: save model.state_dict() "
                "instead, or build the model with file:PATH.py:FUNCTION."
            ) from error
        outer: Any = held if isinstance(held, Mapping) else {}
        classes, origin = class_names_in(outer.get("classes")), None
        held = next((outer[key] for key in WRAPPERS if isinstance(outer.get(key), Mapping)), held)
    pairs = held.items() if isinstance(held, Mapping) else ()
    if not pairs or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in pairs):
        seen = ", ".join(map(str, list(held)[:5])) if isinstance(held, Mapping) else type(held).__name__
        raise ModelError(f"{path} holds no state dict but {seen or 'nothing'}: save model.state_dict().")
    return dict(held), classes, origin


def match_names(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The state dict under the model's names: prefixes, DenseNet's old names and auxiliary heads go."""
    own = list(model.state_dict())
    matched = dict(state)
    for prefix in PREFIXES * 2:  # they nest, in any order
        if all(key.startswith(prefix) for key in matched) and not all(key.startswith(prefix) for key in own):
            matched = {key.removeprefix(prefix): tensor for key, tensor in matched.items()}
    old = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
    if any(old.search(key) for key in matched) and not any(old.search(key) for key in own):
        matched = {old.sub(r"\1", key): tensor for key, tensor in matched.items()}
    if getattr(model, "aux_logits", None) is False:
        matched = {k: v for k, v in matched.items() if not k.startswith(("AuxLogits.", "aux1.", "aux2."))}
    return matched


def match_hf_names(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The state dict under this transformers version's names, which need not be those of its own files."""
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
    """How many classes the state dict has, where that is all in which it differs from the model's shapes."""
    own = model.state_dict()
    differ = [key for key in own if key in state and state[key].shape != own[key].shape]
    counts = {tuple(state[key].shape[:1]) for key in differ}
    same_rows = all(state[key].shape[1:] == own[key].shape[1:] for key in differ)
    return next(iter(counts))[0] if same_rows and len(counts) == 1 and () not in counts else None


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], *, source: str, target: str, num_classes: int | None
) -> bool:
    """Load the state dict strictly; True where num_classes was asked for and the head stays new."""
    own = model.state_dict()
    wrong = {key: (tuple(state[key].shape), tuple(own[key].shape)) for key in own if key in state}
    wrong = {key: (theirs, ours) for key, (theirs, ours) in wrong.items() if theirs != ours}
    head = [key for key, (theirs, ours) in wrong.items() if ours == (num_classes, *theirs[1:]) and theirs]
    found = {
        "missing": [key for key in own if key not in state and not key.endswith("num_batches_tracked")],
        "unexpected": [key for key in state if key not in own],
        "wrong shape": [
            f"{key} {theirs} for {ours}" for key, (theirs, ours) in wrong.items() if key not in head
        ],
    }
    faults = [f"{what} {', '.join(keys[:3])} ({len(keys)} in all)" for what, keys in found.items() if keys]
    if faults:
        raise ModelError(f"{source} does not fit {target}: {'; '.join(faults)}.")
    if head:
        log.info("%s: the head of %s classes is new (%s)", target, num_classes, ", ".join(head))
    kept = OrderedDict((key, tensor) for key, tensor in state.items() if key not in head)
    kept._metadata = own._metadata  # type: ignore[attr-defined]  # versions: MNASNet refuses to load without
    model.load_state_dict(kept, strict=False)  # all but the head and old BatchNorm counters is there
    return bool(head)


def check_finite(model: nn.Module, source: str) -> None:
    """Refuse NaN and infinite weights; a mask among the buffers may be infinite."""
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
    """Class names where `value` is a list of them."""
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    return None


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter and buffer that shapes what the model computes in eval mode."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or name.endswith("num_batches_tracked"):
            continue
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(data.shape)} {data.dtype}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
