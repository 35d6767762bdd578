"""Finer maps from larger images: the network itself where it takes them, else a copy that shares its weights
and has its position embeddings resampled."""

from __future__ import annotations

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

from sigcam.core.errors import DataError
from sigcam.core.types import GridSize
from sigcam.network.dual import DualBranch
from sigcam.network.trace import lock_of, tensors_in

# ------------------------------------------------------------------------------------------- a copy


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares every parameter, buffer and hook with the original."""
    memo: dict[int, Any] = {}
    with lock_of(model):  # so that no hook of ours is on it
        watched = list[dict[int, Any]]()
        for module in model.modules():
            for name, value in vars(module).items():  # parameters and buffers, and what else it keeps
                if name.endswith("hooks") and isinstance(value, dict):
                    memo[id(value)] = copy.copy(value)  # a hook may hold what cannot be copied
                    watched.append(value)
                else:
                    memo.update((id(tensor), tensor) for tensor in tensors_in(value))
        try:
            made = copy.deepcopy(model, memo)
        except Exception as error:  # any user network, any failure
            raise DataError(f"this {type(model).__name__} cannot be copied ({said(error)}).") from error
        for hooks in watched:
            memo[id(hooks)].update({key: _rebound(hook, memo) for key, hook in hooks.items()})
    return made


def _rebound(hook: Any, memo: dict[int, Any]) -> Any:
    """A hook that is a method of one of the modules works on the copy; any other is the user's own."""
    owner = getattr(hook, "__self__", None)
    if isinstance(hook, types.MethodType) and isinstance(owner, nn.Module) and id(owner) in memo:
        return types.MethodType(hook.__func__, memo[id(owner)])
    return hook


def said(error: Exception) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


@contextmanager
def no_side_effects() -> Iterator[None]:
    """Without autograd, and with the random numbers as they were afterwards."""
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


# ------------------------------------------------------------------------------------- larger images

# native and larger sizes at which a network was seen to make a finer map; from then on it is not tried first
_TAKEN: weakref.WeakKeyDictionary[DualBranch, set[tuple[GridSize, GridSize]]] = weakref.WeakKeyDictionary()


def zoomed(net: DualBranch, images: Tensor, zoom: float) -> tuple[DualBranch, Tensor]:
    """The network to run on the (B, C, H, W) images enlarged `zoom` times, and those images.

    Sides are rounded to whole cells of F. A network that takes images of any size is returned itself; one
    made for a size, as a copy whose position embeddings are resampled by its own library's means.
    """
    if isinstance(zoom, bool) or not isinstance(zoom, int | float) or not math.isfinite(zoom) or zoom < 1:
        raise DataError(f"zoom must be a number of at least 1, not {zoom!r}.")
    if zoom == 1:
        return net, images
    native = GridSize.of(images)
    fold, kind = net.split.fold, type(net.model).__name__
    steps = [pixels / cells for pixels, cells in zip(fold.image, fold.grid, strict=True)]
    steps = [step if step.is_integer() else 1.0 for step in steps]
    rows, columns = (int(n * zoom / step + 0.5) * int(step) for n, step in zip(native, steps, strict=True))
    if rows <= native[0] or columns <= native[1]:
        least = max((n + step) / n for n, step in zip(native, steps, strict=True))
        raise DataError(
            f"zoom={zoom:g} adds no cell to the map of {native[0]}x{native[1]} images: zoom={least:.3g} does."
        )
    known = _TAKEN.setdefault(net, set())
    with no_side_effects():
        larger = F.interpolate(images, size=(rows, columns), mode="bicubic", align_corners=False)
        try:
            model = _made_for(net.model, GridSize(rows, columns))
            finer = net if model is net.model else net.with_model(model)
            if (native, (rows, columns)) not in known:
                before = fold.grid if native == fold.image else grid_of(net, images)
                after = grid_of(finer, larger)
                if after[0] <= before[0] or after[1] <= before[1]:
                    raise DataError(
                        f"zoom={zoom:g} makes images of {rows}x{columns}, but the map of this {kind} does "
                        "not grow with them: take a larger zoom, or none if the model resizes them itself."
                    )
                known.add((native, GridSize(rows, columns)))
        except (DataError, MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:  # any user network, any failure
            raise DataError(
                f"zoom={zoom:g} needs images of {rows}x{columns}, and this {kind} takes one size only "
                f"({said(error)})."
            ) from error
    return finer, larger


def grid_of(net: DualBranch, images: Tensor) -> GridSize:
    """(P, Q) of what the network makes of the first image."""
    features = net.run(images[:1]).features
    return GridSize.of(features)


def _made_for(model: nn.Module, size: GridSize) -> nn.Module:
    """The model, or a copy for images of that size where a part of it knows how to be made for another."""
    if not any(_fitting(module) for module in model.modules()):
        return model
    model, fitted = shared_copy(model), list[str]()
    for name, module in list(model.named_modules()):
        fit = _fitting(module)
        if fit and not any(name.startswith(outer + ".") or not outer for outer in fitted):
            fit(module, size)  # the outermost part looks after those inside it
            fitted.append(name)
    return model


def _fitting(module: nn.Module) -> Callable[[Any, GridSize], None] | None:
    """How this module can be made to take another size, if it can."""
    if _takes(getattr(module, "set_input_size", None), "img_size"):
        return _fit_timm
    if _takes(module.forward, "interpolate_pos_encoding"):
        return _fit_transformers
    family = ("torchvision.models.vision_transformer", "VisionTransformer")
    if any((base.__module__, base.__name__) == family for base in type(module).__mro__):
        return _fit_torchvision
    return None


def _takes(function: Any, argument: str) -> bool:
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):  # none, or one without a signature
        return False


def _fit_timm(module: Any, size: GridSize) -> None:
    options: dict[str, Any] = {"img_size": size}
    windows = [m.window_size for m in module.modules() if isinstance(getattr(m, "window_size", None), tuple)]
    if windows and _takes(module.set_input_size, "window_size"):
        # as they were trained; timm's own choice would be an eighth of the image, and resampled weights
        options["window_size"] = tuple(map(max, zip(*windows, strict=True)))
    module.set_input_size(**options)


def _fit_transformers(module: Any, size: GridSize) -> None:
    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "interpolate_pos_encoding": True}

    module.register_forward_pre_hook(ask, with_kwargs=True)


def _fit_torchvision(module: Any, size: GridSize) -> None:
    from torchvision.models.vision_transformer import interpolate_embeddings

    if size[0] != size[1]:
        raise ValueError("a torchvision VisionTransformer takes square images")
    name, old = "encoder.pos_embedding", module.encoder.pos_embedding
    new = interpolate_embeddings(size[0], module.patch_size, {name: old.detach()})[name]
    module.encoder.pos_embedding = nn.Parameter(new, requires_grad=old.requires_grad)
    module.image_size, module.seq_length = size[0], new.shape[1]
