"""Annotated pictures listed in text files: the metadata layout of the public WSOL evaluator (PROTOCOL 5.6).

<split>/image_ids.txt names the pictures; class_labels.txt, image_sizes.txt and localization.txt beside it
hold what is known of each, one comma-separated line per picture, box or mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sigcam.core.types import ImageSize
from sigcam.data.images import open_image
from sigcam.data.text_files import check_box

if TYPE_CHECKING:
    from PIL import Image

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import DataError
from sigcam.data.masks import open_masks
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import MOST_CLASSES, is_whole_number, numbered_lines

if TYPE_CHECKING:
    pass

IDS, LABELS, SIZES, PLACES = "image_ids.txt", "class_labels.txt", "image_sizes.txt", "localization.txt"
SPLIT_NAMES = {
    "train": ("train", "train-weaksup"),
    "val": ("val", "train-fullsup"),
}  # the two releases' names
PROXY = "-proxy"  # behind a split's name: its shorter list, image_ids_proxy.txt
PEEKED = 16  # pictures whose size is looked at before any is opened
WsolLine = tuple[int, str]  # its number, from 1, and its text
Marks = tuple[tuple[int, Box], ...]  # line number and box
Masks = tuple[list[Path], list[Path]]  # of objects, and of what to ignore


def wsol(root: str | Path, *, split: str = "train", pictures: bool = True) -> Samples:
    """The pictures of one split with labels and boxes or masks, as far as the metadata has them.

    Boxes and `Sample.size` are in pixels of the original image; the files may be squashed copies, all of one
    size. Metadata is looked for in root/metadata/<split>, root/<split>, root itself, and beside a
    `dataset/<name>` folder in `metadata/<name>/<split>`; pictures in `images` or directly in the data set's
    folder, those of Cars in `cars_<split>`; masks in `masks` or beside the pictures.

    Args:
        split: its folder's name; "train-proxy" takes the shorter list of train, image_ids_proxy.txt.
        pictures: False neither looks for pictures nor opens them: enough to score maps.
    """
    root = Path(root)
    whole = split.removesuffix(PROXY)
    at = _split_folder(root, whole)
    listed = at / (IDS if whole == split else f"{Path(IDS).stem}_proxy.txt")
    ids = _ids(listed)
    labels, sizes, boxes = _labels(at / LABELS), _sizes(at / SIZES), dict[str, Marks]()
    masks, lines = dict[str, Masks](), list(_lines(at / PLACES))
    if lines and _box_fields(lines[0][1]):
        boxes = _boxes(at / PLACES, lines, sizes)
    elif lines:
        masks = _masks(at / PLACES, lines, _mask_folders(root, at))
    for found, file, what in (
        (labels, LABELS, "label"),
        (sizes, SIZES, "size"),
        (boxes or masks, PLACES, "box or mask"),
    ):
        lost = next((i for i in ids if i not in found), None) if found else None
        if lost is not None:
            number = next(n for n, text in _lines(listed) if text == lost)
            raise DataError(
                f"{listed} line {number}: image {lost} has no {what} in {file}: add it there, or remove this."
            )
    classes = _class_names(at, [label for label, _ in labels.values()])
    files = _picture_files(root, listed, whole, ids) if pictures else {}
    squashed = _squashed(files, sizes, at / SIZES)
    items = [
        Sample(
            id,
            partial(
                open_stored,
                files.get(id),
                id,
                squashed or sizes.get(id),
                squashed is not None,
                at / PLACES,
                () if sizes else boxes.get(id, ()),
            ),
            labels[id][0] if labels else None,
            tuple(box for _, box in boxes[id]) if boxes else None,
            partial(open_masks, *map(tuple, masks[id])) if masks else None,
            sizes.get(id),
            files.get(id),
        )
        for id in ids
    ]
    for id, (label, number) in labels.items():
        if label >= len(classes):
            raise DataError(
                f"{at / LABELS} line {number}: image {id} has label {label}, but there are {len(classes)} "
                f"classes (0 to {len(classes) - 1})."
            )
    return Samples(tuple(items), classes)


def holds_metadata(root: str | Path) -> bool:
    """Whether some split of the folder can be read here."""
    root = Path(root)
    return (root / IDS).is_file() or any(next(home.glob(f"*/{IDS}"), None) for home in _homes(root))


# ------------------------------------------------------------------------------------------ where things are


def _homes(root: Path) -> tuple[Path, ...]:
    """Folders that may hold splits: root/metadata, root, and ../../metadata/<name> of dataset/<name>, root
    being that folder or a link to it."""
    beside = (here.parent.parent / "metadata" / here.name for here in (root.absolute(), root.resolve()))
    return root / "metadata", root, *beside


def _split_folder(root: Path, split: str) -> Path:
    homes = _homes(root)
    for home in homes:
        for name in SPLIT_NAMES.get(split, (split,)):
            if (home / name / IDS).is_file():
                return home / name
    if (root / IDS).is_file():
        return root  # one split, whatever its name
    found = sorted({path.parent.name for home in homes for path in home.glob(f"*/{IDS}")})
    if found:
        raise DataError(f"{root} has no split {split!r}: it has {', '.join(found)}.")
    raise DataError(f"{root} holds no metadata: looked for metadata/{split}/{IDS} in it.")


def _tops(root: Path, at: Path) -> list[Path]:
    """Where pictures and masks may be: the data set's folder, from wherever root points into it."""
    tops = [root]
    for here in (at.absolute(), at.resolve()):
        above = [*here.parents][:3]
        tops += above[:2]
        tops += [above[2] / "dataset" / above[0].name] if len(above) == 3 else []
    return tops


def _picture_files(root: Path, listed: Path, split: str, ids: Sequence[str]) -> dict[str, Path]:
    """The file of each picture; all of a split are in one folder."""
    tops = [folder for top in _tops(root, listed.parent) for folder in (top / "images", top)]
    folders = list(dict.fromkeys(f for top in tops for f in (top, top / f"cars_{split}")))
    home = _holder(folders, ids)
    if home is None:
        raise DataError(
            f"{listed}: none of its pictures is there, e.g. {ids[0]}: looked in "
            f"{', '.join(str(folder) for folder in folders if folder.is_dir())}."
        )
    files = {id: home / id for id in ids}
    lost = next((id for id, file in files.items() if not file.is_file()), None)
    if lost is not None:
        number = next(n for n, text in _lines(listed) if text == lost)
        raise DataError(
            f"{listed} line {number}: picture {lost} is not in {home}: add it, or remove its line."
        )
    return files


def _mask_folders(root: Path, at: Path) -> list[Path]:
    tops = _tops(root, at)
    return list(dict.fromkeys(folder for top in tops for folder in (top / "masks", top, top / "images")))


def _holder(folders: Iterable[Path], names: Sequence[str]) -> Path | None:
    """The first folder that holds the first of the names that any of them holds."""
    folders = [folder for folder in folders if folder.is_dir()]
    return next((f for name in names[:100] for f in folders if (f / name).is_file()), None)


def _class_names(at: Path, labels: Sequence[int]) -> tuple[str, ...]:
    """The lines of classes.txt in or above the split's folder, else class 0, class 1, ..."""
    file = next((f for f in (at / "classes.txt", at.parent / "classes.txt") if f.is_file()), None)
    if file is None:
        return tuple(f"class {label}" for label in range(max(labels, default=-1) + 1))
    names = dict[str, int]()
    for number, name in _lines(file):
        if names.setdefault(name, number) != number:
            raise DataError(
                f"{file} line {number}: class {name!r} is in line {names[name]} already: rename one."
            )
    return tuple(names)


def _squashed(files: Mapping[str, Path], sizes: Mapping[str, ImageSize], said: Path) -> ImageSize | None:
    """The one size of all files where they are squashed copies of originals of other sizes; None where they
    are the originals. DataError where they are neither."""
    from PIL import Image

    seen = dict[str, ImageSize]()
    for id in list(files)[:: max(1, len(files) // PEEKED)] if sizes else ():
        try:
            with Image.open(files[id]) as image:  # the header alone
                seen[id] = ImageSize(*image.size)
        except Exception:  # a damaged file is told of when it is opened
            continue
    wrong = next((id for id, size in seen.items() if size != sizes[id]), None)
    if wrong is None:
        return None
    others = sum(size != sizes[id] for id, size in seen.items())
    if len(set(seen.values())) == 1 < len(seen) < 2 * others:
        return seen[wrong]
    number = next(n for n, id, _ in _whole_numbers(said, 2, "") if id == wrong)
    raise DataError(
        f"{said} line {number}: image {wrong} is {_by(sizes[wrong])}, but {files[wrong]} is "
        f"{_by(seen[wrong])} pixels: correct one of them."
    )


# ------------------------------------------------------------------------------------------- reading lines


def _lines(path: Path) -> Iterator[WsolLine]:
    """Lines with text on them, with their numbers; none where there is no file."""
    return numbered_lines(path) if path.exists() else iter(())


def _ids(path: Path) -> list[str]:
    ids = dict[str, int]()
    for number, id in _lines(path):
        if id in ids:
            raise DataError(f"{path} line {number}: image {id} is in line {ids[id]} already: remove one.")
        parts = id.split("/")
        if ".." in parts or Path(id).is_absolute():
            raise DataError(f"{path} line {number}: image {id} is not a path below the folder of pictures.")
        ids[id] = number
    if not ids:
        raise DataError(f"{path} names no pictures: write one id per line.")
    return list(ids)


def _labels(path: Path) -> dict[str, tuple[int, int]]:
    """(label, line number) by id."""
    labels = dict[str, tuple[int, int]]()
    for number, id, (label,) in _whole_numbers(path, 1, "<id>,<label>"):
        if label >= MOST_CLASSES:
            raise DataError(
                f"{path} line {number}: image {id} has label {label}: correct it to one below {MOST_CLASSES}."
            )
        if labels.get(id, (label, 0))[0] != label:
            before = labels[id]
            raise DataError(
                f"{path} line {number}: image {id} has label {label} here, {before[0]} in line {before[1]}."
            )
        labels[id] = label, number
    return labels


def _sizes(path: Path) -> dict[str, ImageSize]:
    sizes = dict[str, ImageSize]()
    for number, id, (width, height) in _whole_numbers(path, 2, "<id>,<width>,<height>"):
        if not width or not height:
            raise DataError(f"{path} line {number}: image {id} is {width} x {height}: it has no pixels.")
        if sizes.get(id, (width, height)) != (width, height):
            raise DataError(
                f"{path} line {number}: image {id} is {width} x {height} here, else {_by(sizes[id])}."
            )
        sizes[id] = ImageSize(width, height)
    return sizes


def _boxes(path: Path, lines: Iterable[WsolLine], sizes: Mapping[str, ImageSize]) -> dict[str, Marks]:
    boxes = dict[str, Marks]()
    for number, id, (x0, y0, x1, y1) in _whole_numbers(path, 4, "<id>,<x0>,<y0>,<x1>,<y1>", lines):
        where, box = f"{path} line {number}: image {id}", (x0, y0, x1, y1)
        if x1 < x0 or y1 < y0:
            raise DataError(f"{where} has an inverted box {box}: write x0, y0, x1, y1.")
        check_box(box, sizes.get(id), where)
        boxes[id] = (*boxes.get(id, ()), (number, box))
    return boxes


def _masks(path: Path, lines: Sequence[WsolLine], folders: Sequence[Path]) -> dict[str, Masks]:
    """Masks of objects and ignore masks by id; an ignore mask may be left empty."""
    masks, fields = dict[str, Masks](), list[tuple[int, str, str, str]]()
    for number, text in lines:
        parts = [part.strip() for part in text.rsplit(",", 2)]
        if len(parts) != 3:
            raise DataError(f"{path} line {number}: {text!r} is not <id>,<mask>,<ignore mask>.")
        fields.append((number, parts[0], parts[1], parts[2]))
    home = _holder(folders, [mask for _, _, mask, _ in fields if mask]) or folders[0]
    for number, id, mask, ignore in fields:
        if not mask:
            raise DataError(f"{path} line {number}: image {id} has no mask: name its file.")
        for name, kept in zip((mask, ignore), masks.setdefault(id, ([], [])), strict=True):
            if name and not (home / name).is_file():
                raise DataError(f"{path} line {number}: image {id}: its mask {name} is not in {home}.")
            if name:
                kept.append(home / name)
    return masks


def _box_fields(line: str) -> bool:
    """Whether it ends in a number, as lines of boxes do."""
    try:
        float(line.rsplit(",", 1)[-1])
    except ValueError:
        return False
    return True


def _whole_numbers(
    path: Path, count: int, layout: str, lines: Iterable[WsolLine] | None = None
) -> Iterator[tuple[int, str, list[int]]]:
    """Line number, id and `count` whole numbers, 0 or more, of each line."""
    for number, text in _lines(path) if lines is None else lines:
        id, *fields = (part.strip() for part in text.rsplit(",", count))
        if len(fields) != count or not id:
            raise DataError(f"{path} line {number}: {text!r} is not {layout}.")
        wrong = next((reprlib.repr(field) for field in fields if not is_whole_number(field)), None)
        if wrong is not None:
            raise DataError(
                f"{path} line {number}: image {id} has {wrong} where {layout} has a whole number."
            )
        yield number, id, [int(field) for field in fields]


def _by(size: ImageSize) -> str:
    return f"{size[0]} x {size[1]}"


def open_stored(
    path: Path | None, id: str, expected: ImageSize | None, squashed: bool, places: Path, boxes: Marks
) -> Image.Image:
    """The picture as stored, RGB: boxes are in these pixels, whatever an EXIF tag says of turning it.

    Args:
        boxes: lines of the file `places` that only now, without a list of sizes, can be seen to be wrong.
    """
    if path is None:
        raise DataError(f"{id} was read without its picture: open the data set with pictures=True.")
    picture = open_image(path, upright=False)
    size = ImageSize(*picture.size)
    if expected is not None and size != expected:
        why = "the others, squashed copies," if squashed else f"in {SIZES} it is"
        raise DataError(
            f"image {id}: {path} is {_by(size)} pixels, but {why} "
            f"{'are ' if squashed else ''}{_by(expected)}: correct one of them."
        )
    for number, box in boxes:
        check_box(box, size, f"{places} line {number}: image {id}")
    return picture
