"""Score maps on disk, .npy or .png, named by the ids of the images they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from sigcam.core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDING = 1e-6  # how far a value may leave [0, 1], as the resizing of float32 maps does


def find_maps(folder: str | Path, ids: Sequence[str], *, extra: bool = False) -> list[Path]:
    """The file of each image's map: for `a/b.jpg` a/b.jpg.npy, a/b.npy, a__b.npy or a__b.map.npy, which is
    what `sigcam explain` writes; or .png instead of .npy.

    Args:
        extra: let maps be there that belong to none of the images.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of maps.")
    files = dict[str, list[Path]]()
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in (".npy", ".png") and not path.name.lower().endswith(".map.png"):
            files.setdefault(_flat(path.relative_to(folder).with_suffix("").as_posix()), []).append(path)
    stems = Counter(_flat(id.removesuffix(PurePosixPath(id).suffix)) for id in ids)
    found, owners = list[Path](), dict[str, str]()
    for id in ids:
        stem = _flat(id.removesuffix(PurePosixPath(id).suffix))
        names = (_flat(id), *([stem] if stems[stem] == 1 else []))  # two images may differ in ending alone
        keys = [key for name in dict.fromkeys(names) for key in (name, f"{name}.map") if key in files]
        paths = [path for key in keys for path in files[key]]
        if not paths:
            looked = ", ".join(f"{name}.npy" for name in names)
            raise DataError(
                f"image {id} has no map in {folder}: looked for {looked} and .png, / as __ or as folder."
            )
        if len(paths) > 1:
            raise DataError(f"image {id} has several maps: {paths[0]} and {paths[1]}: remove one.")
        if keys[0] in owners:
            raise DataError(
                f"{paths[0]} could be the map of image {owners[keys[0]]} and of {id}: use folders."
            )
        owners[keys[0]] = id
        found.append(paths[0])
    strangers = [path for key, paths in files.items() if key not in owners for path in paths]
    if strangers and not extra:
        raise DataError(
            f"{strangers[0]} is the map of no image of the data ({len(strangers)} such in all): take it out, "
            "or score the split it belongs to."
        )
    return found


def map_names(ids: Iterable[str]) -> list[str]:
    """A file name without ending for each image's map, `photo.map` for `photo.jpg`; no two are equal."""
    flat = [_flat(id) for id in ids]
    stems = [name.rsplit(".", 1)[0] for name in flat]
    repeated = {stem for stem, count in Counter(stems).items() if count > 1}
    return [f"{name if stem in repeated else stem}.map" for name, stem in zip(flat, stems, strict=True)]


def open_map(path: Path, id: str) -> NDArray[Any]:
    """The map, (H, W) float32 in [0, 1]: .npy as it stands, .png of 8 or 16 bits by its full range."""
    import numpy as np

    try:
        values = np.load(path, allow_pickle=False) if path.suffix.lower() == ".npy" else _open_png(path)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise DataError(f"image {id}: cannot read its map {path}: {error}.") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        raise DataError(f"image {id}: its map {path} holds no real numbers.")
    shape = values.shape
    values = values.reshape([n for n in shape if n != 1] if len(shape) > 2 else shape)
    if values.ndim != 2 or not values.size:
        raise DataError(f"image {id}: its map {path} has the shape {shape}: (height, width) is expected.")
    if not np.isfinite(values).all():
        raise DataError(f"image {id}: its map {path} holds NaN or infinite values.")
    low, high = float(values.min()), float(values.max())
    if low < -ROUNDING or high > 1 + ROUNDING:
        raise DataError(
            f"image {id}: its map {path} has values from {low:.6g} to {high:.6g}: scale each map to [0, 1]."
        )
    return values.astype(np.float32).clip(0, 1)


def _open_png(path: Path) -> NDArray[Any]:
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        if image.mode not in ("1", "L", "I", "I;16", "I;16B"):
            raise ValueError("it is a colour picture, not a grey one of 8 or 16 bits")
        pixels = np.asarray(image, dtype=np.float64)
        return pixels / {"1": 1, "L": 255}.get(image.mode, 65535)


def _flat(name: str) -> str:
    return name.replace("\\", "/").strip("/").replace("/", "__")


def same_shape(
    maps: Iterable[tuple[int, NDArray[Any]]], most: int
) -> Iterable[list[tuple[int, NDArray[Any]]]]:
    """Runs of neighbours of one shape, at most `most` long."""
    run = list[tuple[int, "NDArray[Any]"]]()
    for index, values in maps:
        if run and (len(run) == most or values.shape != run[0][1].shape):
            yield run
            run = []
        run.append((index, values))
    if run:
        yield run
