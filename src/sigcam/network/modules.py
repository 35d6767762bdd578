"""Kinds of modules and torch functions (activations, normalisation, pooling); running and replacing them."""

from typing import Any

from torch import Tensor, nn

from sigcam.core.errors import SigcamError
from sigcam.core.files import error_line
from sigcam.core.memory import is_out_of_memory

_ACTIVATIONS = (
    "relu relu6 leaky_relu prelu rrelu elu selu celu silu gelu mish softplus hardswish hardsigmoid hardtanh "
    "tanh sigmoid logsigmoid softsign threshold clamp clip"
)
ACTIVATIONS = frozenset(name + suffix for name in _ACTIVATIONS.split() for suffix in ("", "_"))
OUTPUT_ACTIVATIONS = ACTIVATIONS | {"softmax", "log_softmax", "softmin"}


def is_activation(module: nn.Module) -> bool:
    """Whether it is one of torch's own activations without parameters, including softmax."""
    return type(module).__module__ == "torch.nn.modules.activation" and not has_parameters(module)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation layer, by its class name; one with a matrix or layers inside is not."""
    named = "norm" in type(module).__name__.lower() and not any(map(has_parameters, module.children()))
    return named and not any(p.ndim == 2 for p in module.parameters())


def is_pooling(module: nn.Module) -> bool:
    """Whether it is pooling, by its class name."""
    return "pool" in type(module).__name__.lower() and not has_parameters(module)


def has_parameters(module: nn.Module) -> bool:
    """Whether the module or one inside it has parameters."""
    return any(True for _ in module.parameters())


def is_within(name: str, module: str) -> bool:
    """Whether the module called `name` is `module` itself or inside it."""
    return module in ("", name) or name.startswith(module + ".")


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module wherever it stands inside `root`."""
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            if child is old:
                setattr(parent, name, new)


def run_model(model: nn.Module, images: Tensor) -> Any:
    """Return the output of a user's network. An error of the network passes through as it is; its attribute
    `network_fault` says in a sentence what failed, unless memory is short."""
    try:
        return model(images)
    except SigcamError:
        raise
    except Exception as error:  # any user network, any failure
        if not is_out_of_memory(error):
            count = f"{len(images)} image{'s' * (len(images) != 1)}"
            batch = f"{count} of {'x'.join(map(str, images.shape[1:]))}"
            error.network_fault = (  # type: ignore[attr-defined]
                f"{type(model).__name__} could not be run on {batch} ({error_line(error)}). Give it images "
                "of a size and type that it takes, and no more of them at once."
            )
        raise
