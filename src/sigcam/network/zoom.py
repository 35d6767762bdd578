"""Finer maps from enlarged images, with position embeddings resampled where the network needs it."""

import copy
import inspect
import math
import types
import weakref
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import ConfigError, DataError
from sigcam.core.files import error_line
from sigcam.core.memory import check_memory, free_memory, is_out_of_memory
from sigcam.core.types import GridSize
from sigcam.network.dataflow import tensors_in
from sigcam.network.dual import DualBranch, FeaturePoints
from sigcam.network.modules import is_within
from sigcam.network.pass_memory import KERNELS, PassMemory, measure_pass, no_side_effects
from sigcam.network.trace import lock_of

MAX_ZOOM = 1000


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


# native and enlarged sizes at which a network is known to give a finer map; these are not tried again
_CHECKED: weakref.WeakKeyDictionary[DualBranch, set[tuple[GridSize, GridSize]]] = weakref.WeakKeyDictionary()


def zoomed(net: DualBranch, images: Tensor, zoom: float) -> tuple[DualBranch, Tensor]:
    """Enlarge (B, C, H, W) images `zoom` times; return the network to run on them, and the images.

    Sides are rounded to whole cells of F. A network that takes images of any size is returned unchanged; one
    built for a fixed size, as a copy whose position embeddings are resampled by its own library's method.
    """
    if check_zoom(zoom) == 1:
        return net, images
    native, kind = GridSize.of(images), type(net.model).__name__
    size = _enlarged(net, native, zoom)
    known = _CHECKED.setdefault(net, set())
    with no_side_effects():
        try:
            larger = F.interpolate(images, size=size, mode="bicubic", align_corners=False)
            finer = _resized_net(net, size)
            if (native, size) not in known:
                before = net.split.fold.grid if native == net.split.fold.image else grid_of(net, images)
                after = grid_of(finer, larger)
                if after[0] <= before[0] or after[1] <= before[1]:
                    raise ConfigError(
                        f"zoom={zoom:g} makes images of {size[0]}x{size[1]}, but the map of this {kind} does "
                        "not grow with them: use a larger zoom, or none if the model resizes its input."
                    )
                known.add((native, size))
        except DataError:
            raise
        except Exception as error:  # any user network, any failure
            what = f"zoom={zoom:g} needs images of {size[0]}x{size[1]}"
            if is_out_of_memory(error):
                raise DataError(f"{what}, which do not fit into memory: use a smaller zoom.") from error
            raise DataError(f"{what}, and this {kind} takes one size only ({error_line(error)}).") from error
    return finer, larger


def check_zoom(zoom: float) -> float:
    """Return the zoom; ConfigError if it is no number of at least 1, or absurd."""
    if isinstance(zoom, bool) or not isinstance(zoom, Real) or not math.isfinite(zoom) or zoom < 1:
        raise ConfigError(f"zoom must be a number of at least 1, not {zoom!r}.")
    if zoom > MAX_ZOOM:
        raise ConfigError(f"zoom={zoom:g} is too large: use {MAX_ZOOM} at most.")
    return zoom


def zoom_batch(
    net: DualBranch,
    images: Tensor,
    zoom: float,
    points: FeaturePoints = (),
    *,
    grad: bool = True,
    whole: bool = False,
) -> int:
    """Return how many of the images fit into memory when they are enlarged and run at once, at least 1.

    ConfigError if not even one does (with `whole`, if not all do), and what fits. What a pass takes is
    measured once, on an image of the native size; where attention may make it grow faster than the pixels, on
    a smaller one too.
    """
    free, points, image = free_memory(images.device), points or (net.split.point,), images[:1]
    if check_zoom(zoom) == 1 or free is None:
        return len(images)
    native = GridSize.of(image)
    _enlarged(net, native, zoom)  # it may be refused for less
    memory = measure_pass(net, points, image, grad=grad)

    def needed(zoom: float) -> float:
        pixels = math.prod(_whole_cells(net, native, zoom))
        return memory.peak(pixels) + 2 * pixels / memory.pixels * image.nbytes  # enlarged, and a view of it

    if needed(zoom) <= free < memory.peak(memory.pixels) * zoom**4:
        memory = _compared(net, points, image, memory, grad)
    count, most = len(images) if whole else 1, int(free / (KERNELS * needed(zoom)))
    if count * needed(zoom) > free:
        fits = next((z / 10 for z in range(int(10 * zoom), 10, -1) if KERNELS * needed(z / 10) <= free), 0)
        advice = f"zoom={fits:g} fits" if fits else "use no zoom, or free some memory"
        advice = f"a batch size of {most} fits" if most else advice
        shown = f"a batch of {count} images" if count > 1 else "one image"
        check_memory(count * needed(zoom), f"{shown} at zoom={zoom:g}", advice, images.device)
    return max(1, min(len(images), most))


def _compared(
    net: DualBranch, points: FeaturePoints, image: Tensor, memory: PassMemory, grad: bool
) -> PassMemory:
    """The memory with its growth, from an image of half the size, where the network takes one."""
    try:
        with no_side_effects():
            size = _whole_cells(net, GridSize.of(image), 0.5)
            smaller = F.interpolate(image, size=size, mode="bilinear")
            return memory.compared(measure_pass(_resized_net(net, size), points, smaller, grad=grad))
    except Exception:  # any user network; growth with the pixels is the least
        return memory


def _cell(net: DualBranch) -> tuple[int, int]:
    """Height and width of a cell of F in pixels; 1 where it is no whole number of them."""
    fold = net.split.fold
    rows, columns = (pixels / cells for pixels, cells in zip(fold.image, fold.grid, strict=True))
    return int(rows) if rows.is_integer() else 1, int(columns) if columns.is_integer() else 1


def _whole_cells(net: DualBranch, native: GridSize, zoom: float) -> GridSize:
    """The size of the images, enlarged or reduced, in whole cells of F."""
    return GridSize(*(int(n * zoom / step + 0.5) * step for n, step in zip(native, _cell(net), strict=True)))


def _enlarged(net: DualBranch, native: GridSize, zoom: float) -> GridSize:
    """The size of the enlarged images; ConfigError if it adds no cell."""
    size = _whole_cells(net, native, zoom)
    if size[0] <= native[0] or size[1] <= native[1]:
        least = max((n + step) / n for n, step in zip(native, _cell(net), strict=True))
        what = f"zoom={zoom:g} adds no cell to the map of {native[0]}x{native[1]} images"
        raise ConfigError(f"{what}: zoom={least:.3g} does.")
    return size


def grid_of(net: DualBranch, images: Tensor) -> GridSize:
    """(P, Q) of the features of the first image."""
    return GridSize.of(net.run(images[:1]).features)


def _resized_net(net: DualBranch, size: GridSize) -> DualBranch:
    """The network, or one around a copy of its model for images of that size."""
    model = _resized(net.model, size)
    return net if model is net.model else net.with_model(model)


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
