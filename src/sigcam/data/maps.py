"""Score maps on disk, .npy or .png, named after the images they belong to."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from sigcam.core.errors import DataError
from sigcam.core.files import error_line, hash_of
from sigcam.data.images import decoded

IndexedMap = tuple[int, NDArray[Any]]  # index of the image, (H, W)
MAX_BYTES = 255 - len(".map.npy")
RANGE_TOLERANCE = 1e-6  # resized float32 maps may leave [0, 1] by this much


def find_maps(folder: str | Path, ids: Sequence[str], *, extra: bool = False) -> list[Path]:
    """Return the map file of each image.

    The map of `a/b.jpg` is a/b.jpg.npy, a/b.npy, a__b.npy or, as `sigcam explain` writes it, a__b.map.npy;
    or the same with .png.

    Args:
        extra: allow maps that belong to none of the images.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of maps.")
    files = dict[str, list[Path]]()
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in (".npy", ".png") and not path.name.lower().endswith(".map.png"):
            files.setdefault(_flat(path.relative_to(folder).with_suffix("").as_posix()), []).append(path)
    stems = [_flat(id.removesuffix(PurePosixPath(id).suffix)) for id in ids]
    stem_counts = Counter(stems)
    maps, owners = list[Path](), dict[str, str]()
    for id, stem in zip(ids, stems, strict=True):
        names = (_flat(id), *([stem] if stem_counts[stem] == 1 else []))  # ids may differ in extension only
        known = [key for name in dict.fromkeys(names) for key in (name, f"{_short(name)}.map")]
        keys = [key for key in known if key in files]
        paths = [path for key in keys for path in files[key]]
        if not paths:
            tried = f"{', '.join(f'{name}.npy' for name in names)} and .png, / as __ or as folder"
            raise DataError(f"image {id} has no map in {folder}: looked for {tried}.")
        if len(paths) > 1:
            raise DataError(f"image {id} has several maps: {paths[0]} and {paths[1]}: remove one.")
        if keys[0] in owners:
            raise DataError(f"{paths[0]} could be the map of {owners[keys[0]]} and of {id}: use folders.")
        owners[keys[0]] = id
        maps.append(paths[0])
    unused = [path for key, paths in files.items() if key not in owners for path in paths]
    if unused and not extra:
        raise DataError(
            f"{unused[0]} is the map of no image ({len(unused)} such): remove it, or choose its split."
        )
    return maps


def map_names(ids: Iterable[str]) -> list[str]:
    """Return a unique file name without extension for each image's map: `photo.map` for `photo.jpg`.

    Names differ in more than upper and lower case, which some disks do not tell apart. One that is longer
    than disks take, as from deep folders, is cut and ends in a hash.
    """
    flat = [_flat(id) for id in ids]
    stems = [name.rsplit(".", 1)[0] for name in flat]
    counts = Counter(map(_folded, stems))
    names, taken = list[str](), set[str]()
    for name, stem in zip(flat, stems, strict=True):
        choices = chain(
            [stem] if counts[_folded(stem)] == 1 else [], [name], (f"{name}~{n}" for n in count(2))
        )
        names.append(next(choice for choice in choices if _folded(choice) not in taken))
        taken.add(_folded(names[-1]))
    return [f"{_short(name)}.map" for name in names]


def open_map(path: Path, id: str) -> NDArray[Any]:
    """Return the map of an image, (H, W) float32 in [0, 1]: .npy values as stored, .png by its full range."""
    values = _open_npy(path, id) if path.suffix.lower() == ".npy" else _open_png(path, id)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        raise DataError(f"image {id}: its map {path} holds no real numbers.")
    shape = values.shape
    values = values.reshape([n for n in shape if n != 1] if len(shape) > 2 else shape)
    if values.ndim != 2 or not values.size:
        raise DataError(f"image {id}: its map {path} has the shape {shape}: (height, width) is expected.")
    if not np.isfinite(values).all():
        raise DataError(f"image {id}: its map {path} holds NaN or infinite values.")
    low, high = float(values.min()), float(values.max())
    if low < -RANGE_TOLERANCE or high > 1 + RANGE_TOLERANCE:
        raise DataError(f"image {id}: its map {path} runs from {low:.6g} to {high:.6g}: scale it to [0, 1].")
    return values.astype(np.float32).clip(0, 1)


def same_shape(maps: Iterable[IndexedMap], most: int) -> Iterator[list[IndexedMap]]:
    """Yield batches of consecutive maps of one shape, at most `most` long."""
    for _, group in groupby(maps, key=lambda pair: pair[1].shape):
        while batch := list(islice(group, most)):
            yield batch


def _open_npy(path: Path, id: str) -> Any:
    """Return the array, mapped: a file that is shorter than its header says is refused without allocation."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # hostile headers raise almost anything: TokenError, OverflowError, TypeError
        raise DataError(f"image {id}: cannot read its map {path}: {error_line(error)}.") from error


def _open_png(path: Path, id: str) -> NDArray[Any]:
    with decoded(path, f"the map of image {id}, ") as (image, _):
        if image.mode not in ("1", "L", "I", "I;16", "I;16B"):
            raise ValueError("it is a colour image, not a grey one of 8 or 16 bits")
        return np.asarray(image, dtype=np.float32) / {"1": 1, "L": 255}.get(image.mode, 65535)


def _short(name: str) -> str:
    """Return the name, cut to fit into a file's name together with `.map.npy`."""
    data = name.encode(errors="surrogateescape")
    if len(data) <= MAX_BYTES:
        return name
    return f"{data[: MAX_BYTES - 33].decode(errors='ignore')}-{hash_of(name)}"


def _flat(name: str) -> str:
    return name.replace("\\", "/").strip("/").replace("/", "__")


def _folded(name: str) -> str:
    """Return the name as disks that tell neither case nor composed letters apart see it."""
    return normalize("NFC", normalize("NFC", name).casefold())
