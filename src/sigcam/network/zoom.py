"""Finer maps from enlarged images, with position embeddings resampled where the network needs it."""

import copy
import inspect
import math
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import ConfigError, DataError
from sigcam.core.files import error_line
from sigcam.core.types import GridSize
from sigcam.network.dual import DualBranch
from sigcam.network.modules import is_within
from sigcam.network.trace import lock_of, tensors_in


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy the modules; parameters, buffers and hooks are shared with the original."""
    memo: dict[int, Any] = {}
    with lock_of(model):  # so that none of our hooks is on it
        hook_dicts = list[dict[int, Any]]()
        for module in model.modules():
            for name, value in vars(module).items():  # parameters, buffers and other tensors
                if name.endswith("hooks") and isinstance(value, dict):
                    memo[id(value)] = copy.copy(value)  # a hook may hold what cannot be copied
                    hook_dicts.append(value)
                else:
                    memo.update((id(tensor), tensor) for tensor in tensors_in(value))
        try:
            copied = copy.deepcopy(model, memo)
        except Exception as error:  # any user network, any failure
            raise DataError(f"this {type(model).__name__} cannot be copied ({error_line(error)}).") from error
        for hooks in hook_dicts:
            memo[id(hooks)].update({key: _rebound(hook, memo) for key, hook in hooks.items()})
    return copied


def _rebound(hook: Any, memo: dict[int, Any]) -> Any:
    """Bind a hook that is a method of one of the modules to its copy; return any other unchanged."""
    owner = getattr(hook, "__self__", None)
    if isinstance(hook, types.MethodType) and isinstance(owner, nn.Module) and id(owner) in memo:
        return types.MethodType(hook.__func__, memo[id(owner)])
    return hook


@contextmanager
def no_side_effects() -> Iterator[None]:
    """Disable autograd and restore the random state afterwards."""
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


# native and enlarged sizes at which a network is known to give a finer map; these are not tried again
_CHECKED: weakref.WeakKeyDictionary[DualBranch, set[tuple[GridSize, GridSize]]] = weakref.WeakKeyDictionary()


def zoomed(net: DualBranch, images: Tensor, zoom: float) -> tuple[DualBranch, Tensor]:
    """Enlarge (B, C, H, W) images `zoom` times; return the network to run on them, and the images.

    Sides are rounded to whole cells of F. A network that takes images of any size is returned unchanged; one
    built for a fixed size, as a copy whose position embeddings are resampled by its own library's method.
    """
    if isinstance(zoom, bool) or not isinstance(zoom, int | float) or not math.isfinite(zoom) or zoom < 1:
        raise ConfigError(f"zoom must be a number of at least 1, not {zoom!r}.")
    if zoom == 1:
        return net, images
    native = GridSize.of(images)
    fold, kind = net.split.fold, type(net.model).__name__
    steps = [pixels / cells for pixels, cells in zip(fold.image, fold.grid, strict=True)]
    steps = [step if step.is_integer() else 1.0 for step in steps]
    rows, columns = (int(n * zoom / step + 0.5) * int(step) for n, step in zip(native, steps, strict=True))
    if rows <= native[0] or columns <= native[1]:
        least = max((n + step) / n for n, step in zip(native, steps, strict=True))
        what = f"zoom={zoom:g} adds no cell to the map of {native[0]}x{native[1]} images"
        raise ConfigError(f"{what}: zoom={least:.3g} does.")
    known = _CHECKED.setdefault(net, set())
    with no_side_effects():
        larger = F.interpolate(images, size=(rows, columns), mode="bicubic", align_corners=False)
        try:
            model = _resized(net.model, GridSize(rows, columns))
            finer = net if model is net.model else net.with_model(model)
            if (native, (rows, columns)) not in known:
                before = fold.grid if native == fold.image else grid_of(net, images)
                after = grid_of(finer, larger)
                if after[0] <= before[0] or after[1] <= before[1]:
                    raise ConfigError(
                        f"zoom={zoom:g} makes images of {rows}x{columns}, but the map of this {kind} does "
                        "not grow with them: use a larger zoom, or none if the model resizes its input."
                    )
                known.add((native, GridSize(rows, columns)))
        except (DataError, MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:  # any user network, any failure
            what = f"zoom={zoom:g} needs images of {rows}x{columns}, and this {kind} takes one size only"
            raise DataError(f"{what} ({error_line(error)}).") from error
    return finer, larger


def grid_of(net: DualBranch, images: Tensor) -> GridSize:
    """(P, Q) of the features of the first image."""
    return GridSize.of(net.run(images[:1]).features)


def _resized(model: nn.Module, size: GridSize) -> nn.Module:
    """The model, or a copy for images of that size where modules of it can be set to another size."""
    if not any(_resizer(module) for module in model.modules()):
        return model
    model, done = shared_copy(model), list[str]()
    for name, module in list(model.named_modules()):
        resize = _resizer(module)
        if resize and not any(is_within(name, outer) for outer in done):  # the outermost resizes its parts
            resize(module, size)
            done.append(name)
    return model


def _resizer(module: nn.Module) -> Callable[[Any, GridSize], None] | None:
    """The function that sets this module to another input size; None if there is none."""
    if _takes(getattr(module, "set_input_size", None), "img_size"):
        return _resize_timm
    if _takes(module.forward, "interpolate_pos_encoding"):
        return _resize_transformers
    family = ("torchvision.models.vision_transformer", "VisionTransformer")
    if any((base.__module__, base.__name__) == family for base in type(module).__mro__):
        return _resize_torchvision
    return None


def _takes(function: Any, argument: str) -> bool:
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):  # none, or one without a signature
        return False


def _resize_timm(module: Any, size: GridSize) -> None:
    options: dict[str, Any] = {"img_size": size}
    windows = [m.window_size for m in module.modules() if isinstance(getattr(m, "window_size", None), tuple)]
    if windows and _takes(module.set_input_size, "window_size"):
        # as trained; timm would choose an eighth of the image and resample the weights
        options["window_size"] = tuple(map(max, zip(*windows, strict=True)))
    module.set_input_size(**options)


def _resize_transformers(module: Any, size: GridSize) -> None:
    def interpolate(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "interpolate_pos_encoding": True}

    module.register_forward_pre_hook(interpolate, with_kwargs=True)


def _resize_torchvision(module: Any, size: GridSize) -> None:
    from torchvision.models.vision_transformer import interpolate_embeddings

    if size[0] != size[1]:
        raise ValueError("a torchvision VisionTransformer takes square images")
    name, old = "encoder.pos_embedding", module.encoder.pos_embedding
    new = interpolate_embeddings(size[0], module.patch_size, {name: old.detach()})[name]
    module.encoder.pos_embedding = nn.Parameter(new, requires_grad=old.requires_grad)
    module.image_size, module.seq_length = size[0], new.shape[1]
