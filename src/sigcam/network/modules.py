"""Kinds of modules and torch functions (activations, normalisation, pooling), and replacing a module."""

from torch import nn

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
