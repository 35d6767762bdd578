"""The metadata layout of the public WSOL evaluator (PROTOCOL 5.6).

<split>/image_ids.txt lists the images; class_labels.txt, image_sizes.txt and localization.txt beside it hold
their annotations, one comma-separated line per image, box or mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import open_image, open_masks, read_image_size
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import (
    MAX_CLASSES,
    MAX_SIDE,
    check_box,
    check_inside,
    is_file,
    numbered_lines,
    quoted,
    whole_numbers,
)

if TYPE_CHECKING:
    from PIL import Image

IDS_FILE, LABELS_FILE = "image_ids.txt", "class_labels.txt"
SIZES_FILE, LOCALIZATION_FILE = "image_sizes.txt", "localization.txt"
SPLIT_NAMES = {"train": ("train", "train-weaksup"), "val": ("val", "train-fullsup")}  # of the two releases
PROXY = "-proxy"  # suffix of a split's name that selects its shorter list, image_ids_proxy.txt
PROBED_FILES = 16  # images whose size is read when the data set is opened
ENDS_IN_NUMBER = re.compile(r"(^|,)\s*[-+]?(\d[\d.e+-]*|\.\d+|nan|inf)$", re.IGNORECASE)
WsolLine = tuple[int, str]  # line number from 1, text
LineBoxes = tuple[tuple[int, Box], ...]  # line number and box
MaskFiles = tuple[list[Path], list[Path]]  # of objects, and of regions to ignore


def wsol(root: str | Path, *, split: str = "train", pictures: bool = True) -> Samples:
    """Return the images of one split with the labels, sizes, boxes or masks that the metadata has.

    Boxes and `Sample.size` are in pixels of the original image; the files may be copies resized to one size.
    Metadata is looked for in root/metadata/<split>, root/<split>, root itself, and beside a `dataset/<name>`
    folder in `metadata/<name>/<split>`; images in `images` or directly in the data set's folder, those of
    Cars in `cars_<split>`; masks in `masks` or beside the images.

    Args:
        split: name of the split's folder; "train-proxy" takes the shorter list of train, image_ids_proxy.txt.
        pictures: False does not look for image files, which scoring existing maps does not need.
    """
    root = Path(root)
    base_split = split.removesuffix(PROXY)
    home = _split_folder(root, base_split)
    id_list = home / (IDS_FILE if base_split == split else f"{Path(IDS_FILE).stem}_proxy.txt")
    ids = _read_ids(id_list)
    labels, sizes = _read_class_labels(home / LABELS_FILE), _read_sizes(home / SIZES_FILE)
    boxes, masks = dict[str, LineBoxes](), dict[str, MaskFiles]()
    places = home / LOCALIZATION_FILE
    lines = list(_lines(places))
    if lines and ENDS_IN_NUMBER.search(lines[0][1]):
        boxes = _read_boxes(places, sizes)
    elif lines:
        folders = (f for top in _dataset_folders(root, home) for f in (top / "masks", top, top / "images"))
        masks = _read_masks(places, lines, list(dict.fromkeys(folders)))
    objects = boxes or masks, LOCALIZATION_FILE, "box or mask"
    for known, file, what in ((labels, LABELS_FILE, "label"), (sizes, SIZES_FILE, "size"), objects):
        missing = next((id for id in ids if id not in known), None) if known else None
        if missing is not None:
            raise DataError(f"{id_list} line {ids[missing]}: image {missing} has no {what} in {file}.")
    classes = _class_names(home, [label for label, _ in labels.values()])
    files = _image_files(root, id_list, base_split, ids) if pictures else {}
    common_size = _common_size(files, sizes, home / SIZES_FILE)
    for id, (label, number) in labels.items():
        if label >= len(classes):
            where = f"{home / LABELS_FILE} line {number}: image {id}"
            raise DataError(f"{where} has label {label}, but there are {len(classes)} classes, from 0.")
    items = list[Sample]()
    for id in ids:
        path, stored_size = files.get(id), common_size or sizes.get(id)
        unchecked = () if sizes else boxes.get(id, ())
        image = partial(open_stored, path, id, stored_size, common_size is not None, places, unchecked)
        class_index = labels[id][0] if labels else None
        image_boxes = tuple(box for _, box in boxes[id]) if boxes else None
        mask = partial(open_masks, *map(tuple, masks[id])) if masks else None
        items.append(Sample(id, image, class_index, image_boxes, mask, sizes.get(id), path))
    return Samples(tuple(items), classes)


def is_wsol(root: str | Path) -> bool:
    """Return whether there is a list of image ids for some split."""
    root = Path(root)
    homes = _metadata_folders(root)
    return (root / IDS_FILE).is_file() or any(next(home.glob(f"*/{IDS_FILE}"), None) for home in homes)


def open_stored(
    path: Path | None, id: str, expected: ImageSize | None, resized: bool, places: Path, boxes: LineBoxes
) -> Image.Image:
    """Decode the image as stored, ignoring EXIF rotation: annotations refer to these pixels.

    Args:
        expected: the size it must have, if known; `resized` if that is the common size of resized copies.
        boxes: lines of the file `places` to check against the size, if there is no list of sizes.
    """
    if path is None:
        raise DataError(f"{id} was read without its image: open the data set with pictures=True.")
    image = open_image(path, upright=False)
    size = ImageSize(*image.size)
    if expected is not None and size != expected:
        other = "the other files are" if resized else f"in {SIZES_FILE} it is"
        raise DataError(f"image {id}: {path} is {_by(size)} pixels, but {other} {_by(expected)}.")
    for number, box in boxes:
        check_box(box, size, f"{places} line {number}: image {id}")
    return image


def _metadata_folders(root: Path) -> tuple[Path, ...]:
    """Return the folders that may hold splits: root/metadata, root, and ../../metadata/<name> if root is, or
    links to, a folder dataset/<name>."""
    beside = (path.parent.parent / "metadata" / path.name for path in (root.absolute(), root.resolve()))
    return root / "metadata", root, *beside


def _split_folder(root: Path, split: str) -> Path:
    homes = _metadata_folders(root)
    for home in homes:
        for name in SPLIT_NAMES.get(split, (split,)):
            if (home / name / IDS_FILE).is_file():
                return home / name
    if (root / IDS_FILE).is_file():
        return root  # a single split, whatever its name
    splits = sorted({path.parent.name for home in homes for path in home.glob(f"*/{IDS_FILE}")})
    if splits:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(splits)}.")
    raise DataError(f"{root} holds no metadata: looked for metadata/{split}/{IDS_FILE} in it.")


def _dataset_folders(root: Path, home: Path) -> list[Path]:
    """Return the folders that may hold the images and masks, seen from root and from the split's metadata."""
    folders = [root]
    for path in (home.absolute(), home.resolve()):
        above = [*path.parents][:3]
        folders += above[:2]
        folders += [above[2] / "dataset" / above[0].name] if len(above) == 3 else []
    return folders


def _image_files(root: Path, id_list: Path, split: str, ids: Mapping[str, int]) -> dict[str, Path]:
    """Return the file of each image; all images of a split are in one folder."""
    tops = [folder for top in _dataset_folders(root, id_list.parent) for folder in (top / "images", top)]
    folders = list(dict.fromkeys(f for top in tops for f in (top, top / f"cars_{split}")))
    home = _folder_with(folders, list(ids))
    if home is None:
        tried = ", ".join(str(folder) for folder in folders if folder.is_dir())
        raise DataError(f"{id_list}: none of its images is there, e.g. {next(iter(ids))}: looked in {tried}.")
    for id, line in ids.items():
        if not is_file(home / id):
            raise DataError(f"{id_list} line {line}: image {id} is not in {home}: add it there.")
    return {id: home / id for id in ids}


def _folder_with(folders: Iterable[Path], names: Sequence[str]) -> Path | None:
    """Return the first folder that holds the first of the names that is in any folder."""
    folders = [folder for folder in folders if folder.is_dir()]
    return next((f for name in names[:100] for f in folders if is_file(f / name)), None)


def _class_names(home: Path, labels: Sequence[int]) -> tuple[str, ...]:
    """Return the lines of classes.txt in or above the split's folder, else class 0, class 1, ..."""
    file = next((f for f in (home / "classes.txt", home.parent / "classes.txt") if f.is_file()), None)
    if file is None:
        return tuple(f"class {label}" for label in range(max(labels, default=-1) + 1))
    line_of = dict[str, int]()
    for number, name in _lines(file):
        if line_of.setdefault(name, number) != number:
            raise DataError(f"{file} line {number}: class {quoted(name)} is in line {line_of[name]} already.")
    return tuple(line_of)


def _common_size(files: Mapping[str, Path], sizes: Mapping[str, ImageSize], listed: Path) -> ImageSize | None:
    """Return the size of the files if all are copies resized to one size, None if they are the originals.

    Raises DataError if the files, of which a few are probed, are neither.
    """
    probed = list(files)[:: max(1, len(files) // PROBED_FILES)] if sizes else []
    stored = {id: size for id in probed if (size := read_image_size(files[id], upright=False))}
    different = [id for id, size in stored.items() if size != sizes[id]]
    if not different:
        return None
    first = different[0]
    if len(set(stored.values())) == 1 < len(stored) < 2 * len(different):
        return stored[first]
    number = next(n for n, id, _ in _number_rows(listed, 2, "") if id == first)
    where = f"{listed} line {number}: image {first}"
    raise DataError(f"{where} is {_by(sizes[first])}, but {files[first]} is {_by(stored[first])} pixels.")


def _lines(path: Path) -> Iterator[WsolLine]:
    """Yield the numbered lines of a file; none if it does not exist."""
    return numbered_lines(path) if path.exists() else iter(())


def _read_ids(path: Path) -> dict[str, int]:
    """Return the ids and their line numbers."""
    ids = dict[str, int]()
    for number, id in _lines(path):
        if ids.setdefault(id, number) != number:
            raise DataError(f"{path} line {number}: image {id} is in line {ids[id]} already: remove one.")
        check_inside(id, f"{path} line {number}: image {id}")
    if not ids:
        raise DataError(f"{path} lists no images: write one id per line.")
    return ids


def _read_class_labels(path: Path) -> dict[str, tuple[int, int]]:
    """Return (label, line number) by id."""
    labels = dict[str, tuple[int, int]]()
    for number, id, (label,) in _number_rows(path, 1, "<id>,<label>"):
        where = f"{path} line {number}: image {id} has label {label}"
        if label >= MAX_CLASSES:
            raise DataError(f"{where}: correct it to one below {MAX_CLASSES}.")
        before, line = labels.get(id, (label, 0))
        if before != label:
            raise DataError(f"{where} here, {before} in line {line}.")
        labels[id] = label, number
    return labels


def _read_sizes(path: Path) -> dict[str, ImageSize]:
    sizes = dict[str, ImageSize]()
    for number, id, (width, height) in _number_rows(path, 2, "<id>,<width>,<height>"):
        size = ImageSize(width, height)
        if not width or not height:
            raise DataError(f"{path} line {number}: image {id} is {_by(size)}: it has no pixels.")
        if max(size) > MAX_SIDE:
            raise DataError(f"{path} line {number}: image {id} is {_by(size)}: no image is so large.")
        if sizes.setdefault(id, size) != size:
            raise DataError(f"{path} line {number}: image {id} is {_by(size)} here, else {_by(sizes[id])}.")
    return sizes


def _read_boxes(path: Path, sizes: Mapping[str, ImageSize]) -> dict[str, LineBoxes]:
    boxes = dict[str, LineBoxes]()
    for number, id, (x0, y0, x1, y1) in _number_rows(path, 4, "<id>,<x0>,<y0>,<x1>,<y1>"):
        check_box((x0, y0, x1, y1), sizes.get(id), f"{path} line {number}: image {id}")
        boxes[id] = (*boxes.get(id, ()), (number, (x0, y0, x1, y1)))
    return boxes


def _read_masks(path: Path, lines: Sequence[WsolLine], folders: Sequence[Path]) -> dict[str, MaskFiles]:
    """Return object masks and ignore masks by id; an ignore mask may be left empty."""
    masks, rows = dict[str, MaskFiles](), list[tuple[int, str, str, str]]()
    for number, text in lines:
        parts = [part.strip() for part in text.rsplit(",", 2)]
        if len(parts) != 3:
            raise DataError(f"{path} line {number}: {quoted(text)} is not <id>,<mask>,<ignore mask>.")
        rows.append((number, parts[0], parts[1], parts[2]))
    home = _folder_with(folders, [mask for _, _, mask, _ in rows if mask]) or folders[0]
    for number, id, mask, ignore in rows:
        if not mask:
            raise DataError(f"{path} line {number}: image {id} has no mask: name its file.")
        for name, files in zip((mask, ignore), masks.setdefault(id, ([], [])), strict=True):
            check_inside(name, f"{path} line {number}: image {id}: its mask {name}")
            if name and not is_file(home / name):
                raise DataError(f"{path} line {number}: image {id}: its mask {name} is not in {home}.")
            if name:
                files.append(home / name)
    return masks


def _number_rows(path: Path, count: int, layout: str) -> Iterator[tuple[int, str, list[int]]]:
    """Yield (line number, id, `count` whole numbers) of each line."""
    for number, text in _lines(path):
        id, *fields = (part.strip() for part in text.rsplit(",", count))
        if len(fields) != count or not id:
            raise DataError(f"{path} line {number}: {quoted(text)} is not {layout}.")
        yield number, id, whole_numbers(fields, layout, f"{path} line {number}: image {id}")


def _by(size: ImageSize) -> str:
    return f"{size[0]} x {size[1]}"
