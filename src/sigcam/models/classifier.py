"""Load and save trained classifiers: weights, preprocessing and class names."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from sigcam.core.errors import ModelError
from sigcam.core.files import error_line, write_atomic
from sigcam.models.builders import BUILDERS, LogitsOnly, check_known, similar_models
from sigcam.models.pooling import restore_pooling
from sigcam.models.preprocess import Preprocess, Transform
from sigcam.models.state_dict import (
    check_finite,
    class_count_in,
    load_weights,
    match_hf_names,
    match_names,
    read_weights,
)

SPECS = "timm:NAME, torchvision:NAME, hf:NAME, wsol:NAME, file:PATH.py:FUNCTION or embedded"


@dataclass(frozen=True)
class Classifier:
    """A network in eval mode that returns (B, C) logits, its preprocessing, and its class names if known."""

    model: nn.Module
    transform: Transform
    classes: tuple[str, ...] | None
    name: str


def load_classifier(
    spec: str,
    *,
    weights: Path | None = None,
    device: str | torch.device = "cpu",
    crop: bool = False,
    num_classes: int | None = None,
    pretrained: bool = True,
) -> Classifier:
    """Return the classifier that `spec` names, in eval mode on `device`.

    Args:
        weights: state dict (safetensors or torch) to load instead of downloading the published one.
        crop: use the model's own resize and centre crop instead of squashing the whole image.
        num_classes: size of the head; if the weights have another size, the head is initialised randomly.
        pretrained: False keeps all weights random.
    """
    check_model_name(spec)
    scheme, _, name = spec.partition(":")
    try:
        torch.empty(0, device=device)  # before any download
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"cannot use device {str(device)!r} ({error_line(error)}): try 'cpu'.") from error
    build = BUILDERS[scheme]
    if weights is None:
        model, transform, classes = build(name, num_classes, pretrained)
    else:
        state, saved_classes, saved_spec = read_weights(Path(weights))
        # A user's function may not take num_classes: pass it only if the shapes require it.
        count = len(saved_classes) if saved_classes and scheme != "file" else None
        count = count if num_classes is None else num_classes
        model, transform, classes = build(name, count, False)
        state = match_names(state, _bare(model))
        restore_pooling(_bare(model), state)
        if count is None and (saved_count := class_count_in(state, _bare(model))):
            model, transform, classes = build(name, saved_count, False)
            restore_pooling(_bare(model), state)
        if isinstance(model, LogitsOnly):
            state = match_hf_names(state, model.model)
        differs = saved_spec and saved_spec != spec
        source = f"{weights} (written for {saved_spec})" if differs else str(weights)
        new_head = load_weights(_bare(model), state, source=source, target=spec, num_classes=num_classes)
        classes = None if new_head else saved_classes or classes
    check_finite(model, spec if weights is None else str(weights))
    if isinstance(transform, Preprocess) and not crop:
        transform = replace(transform, resize=None)
    return Classifier(model.to(device).eval(), transform, classes, spec)


def check_model_name(spec: str) -> None:
    """Raise ModelError, with the nearest names, if no model is called so, as far as names alone tell."""
    scheme, _, name = spec.partition(":")
    valid = name in ("", "lite1", "lite2") if scheme == "embedded" else bool(name)
    if scheme not in BUILDERS or not valid:
        near = similar_models(spec) if spec and scheme not in BUILDERS else []
        hint = f"did you mean {' or '.join(near)}? There are" if near else "give"
        raise ModelError(f"unknown model {spec!r}: {hint} {SPECS}.")
    check_known(scheme, name)


def save_classifier(path: Path, model: nn.Module, *, spec: str, classes: Sequence[str]) -> None:
    """Write parameters, buffers, class names and spec to a safetensors file that `load_classifier` reads."""
    from safetensors.torch import save

    dense = torch.contiguous_format
    tensors = {key: value.cpu().clone(memory_format=dense) for key, value in model.state_dict().items()}
    metadata = {"format": "pt", "model": spec, "classes": json.dumps(list(classes))}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save(tensors, metadata))  # save_file would create it readable by its owner only


def _bare(model: nn.Module) -> nn.Module:
    """Return the network whose parameter names a checkpoint uses."""
    return model.model if isinstance(model, LogitsOnly) else model
