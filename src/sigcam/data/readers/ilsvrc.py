"""ImageNet ILSVRC as it is published: folders of synsets, or a flat val folder, with boxes in XML files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import is_image, list_images, open_image, read_image_size
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import check_box, numbered_lines

SYNSET = re.compile(r"n\d{8}")
MAPPING = "LOC_synset_mapping.txt"
FOLDERS = {"train": "train", "val": "val", "test": "val"}  # its own test pictures have no labels


@dataclass(frozen=True)
class BoxFile:
    """What an XML file says of a picture: (synset, box) of each object, and the size that boxes refer to."""

    objects: tuple[tuple[str, Box], ...]
    size: ImageSize | None


def ilsvrc(root: str | Path, *, split: str = "train") -> Samples:
    """The pictures of train or val (for test, too: PROTOCOL 5.6), classes in the order of their synset ids.

    Pictures are in <split>/<synset>/ or, where XML files tell their class, directly in <split>; root may also
    be above ILSVRC/Data/CLS-LOC. Boxes are those of the labelled class, from Annotations.
    """
    root = Path(root)
    home = _pictures(root, FOLDERS.get(split, split))
    if home is None or split not in FOLDERS:
        found = [name for name in ("train", "val") if _pictures(root, name)]
        raise DataError(
            f"{root} has no split {split!r}: it has {', '.join(found) or 'neither train nor val'}."
        )
    notes = _note_files(root, home.name)
    read = list[tuple[Path, str, BoxFile | None]]()
    for picture in list_images(home):
        file = notes.get(picture.stem)
        said = read_notes(file) if file else None
        read.append((picture, _synset(home, picture, said), said))
    if not read:
        raise DataError(f"{home} holds no pictures.")
    classes = _classes(root) or sorted({synset for _, synset, _ in read})
    places = {synset: place for place, synset in enumerate(classes)}
    items = list[Sample]()
    for picture, synset, said in read:
        if synset not in places:
            raise DataError(
                f"{picture} is of class {synset}, which {_pictures(root, 'train')} does not have."
            )
        boxes = tuple(box for name, box in said.objects if name == synset) if said else ()
        if said and not said.size:
            for box in boxes:
                check_box(box, read_image_size(picture, upright=False), f"{notes[picture.stem]}: the picture")
        items.append(
            Sample(
                picture.relative_to(home.parent).as_posix(),
                partial(open_image, picture, upright=False),
                places[synset],
                boxes or None,
                size=said.size if said and boxes else None,
                path=picture,
            )
        )
    return Samples(tuple(items), tuple(classes))


def holds_ilsvrc(root: str | Path) -> bool:
    """Whether train or val hold folders named by synset ids, or val pictures beside Annotations."""
    for name in ("train", "val"):
        home = _pictures(Path(root), name)
        if home and any(SYNSET.fullmatch(entry.name) and entry.is_dir() for entry in home.iterdir()):
            return True
        if home and _note_folder(Path(root), name) and any(is_image(entry) for entry in home.iterdir()):
            return True
    return False


def read_notes(path: Path) -> BoxFile:
    """The objects of an XML file. Boxes are cut to the picture, corners put in order: some were drawn beyond
    it, or from the right; x1 and y1 are the last pixel inside."""
    try:
        tree = ElementTree.parse(path).getroot()
        width, height = (int(tree.findtext(f"size/{name}", "0")) for name in ("width", "height"))
        objects = list[tuple[str, Box]]()
        for thing in tree.findall("object"):
            x0, y0, x1, y1 = (
                int(float(thing.findtext(f"bndbox/{name}", ""))) for name in ("xmin", "ymin", "xmax", "ymax")
            )
            x0, x1 = _cut(x0, x1, width)
            y0, y1 = _cut(y0, y1, height)
            objects.append((thing.findtext("name", "").strip(), (x0, y0, x1, y1)))
    except (ElementTree.ParseError, ValueError, OverflowError, LookupError, OSError) as error:
        raise DataError(f"cannot read the boxes of {path}: {error}.") from error
    return BoxFile(tuple(objects), ImageSize(width, height) if width > 0 and height > 0 else None)


def _cut(start: int, end: int, length: int) -> tuple[int, int]:
    start, end = min(start, end), max(start, end)
    last = length - 1 if length > 0 else end
    if end < 0 or start > last:
        raise ValueError(f"a box from {start} to {end} is outside the {length} pixels of the picture")
    return max(start, 0), min(end, last)


def _synset(home: Path, picture: Path, said: BoxFile | None) -> str:
    """The class: the folder's name, else that of the objects."""
    folder = picture.relative_to(home).parts[0]
    if folder != picture.name:
        if not SYNSET.fullmatch(folder):
            raise DataError(f"{home / folder} is not named by a synset id such as n01440764: rename it.")
        return folder
    names = {name for name, _ in said.objects} if said else set[str]()
    if len(names) != 1:
        seen = f"its XML file names {len(names)} classes" if said else "it has no XML file in Annotations"
        raise DataError(
            f"cannot tell the class of {picture}: {seen}. Put it into a folder named by its synset."
        )
    return names.pop()


def _classes(root: Path) -> list[str]:
    """Synset ids in order: of LOC_synset_mapping.txt, else of the train folder, else none."""
    listed = next((f for f in (root / MAPPING, root.parent / MAPPING) if f.is_file()), None)
    if listed is not None:
        return sorted(text.split()[0] for _, text in numbered_lines(listed))
    home = _pictures(root, "train")
    return sorted(e.name for e in home.iterdir() if SYNSET.fullmatch(e.name)) if home else []


def _bases(root: Path) -> tuple[Path, ...]:
    return root, root / "ILSVRC"


def _pictures(root: Path, name: str) -> Path | None:
    places = (place for base in _bases(root) for place in (base / "Data" / "CLS-LOC" / name, base / name))
    return next((place for place in places if place.is_dir()), None)


def _note_folder(root: Path, name: str) -> Path | None:
    homes = [base / "Annotations" for base in _bases(root)]
    places = (place for home in homes for place in (home / "CLS-LOC" / name, home / name, home))
    return next((place for place in places if place.is_dir()), None)


def _note_files(root: Path, name: str) -> dict[str, Path]:
    """The XML files of a split, by the name of their picture."""
    folder = _note_folder(root, name)
    found = dict[str, Path]()
    for at, _, files in os.walk(folder) if folder else ():
        found |= {file.removesuffix(".xml"): Path(at) / file for file in files if file.endswith(".xml")}
    return found
