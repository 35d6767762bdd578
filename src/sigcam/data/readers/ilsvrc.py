"""ImageNet ILSVRC as published: synset folders or a flat val folder, with boxes in XML files."""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import is_image, list_images, open_image, read_image_size
from sigcam.data.sample import Box, Sample, Samples
from sigcam.data.text_files import MAX_SIDE, check_box, numbered_lines

Objects = list[tuple[str, Box]]  # synset and box of each object in an XML file
SYNSET = re.compile(r"n\d{8}")
SYNSET_LIST = "LOC_synset_mapping.txt"
FOLDER_OF = {"train": "train", "val": "val", "test": "val"}  # the images of the test folder have no labels


def ilsvrc(root: str | Path, *, split: str = "train") -> Samples:
    """Return the images of train or val (also for test: PROTOCOL 5.6); classes are sorted by synset id.

    Images are in <split>/<synset>/ or, if XML files name their class, directly in <split>; root may also be
    the folder above ILSVRC/Data/CLS-LOC. Boxes are those of the labelled class, from Annotations.
    """
    root = Path(root)
    home = _image_folder(root, FOLDER_OF.get(split, split))
    if home is None or split not in FOLDER_OF:
        splits = ", ".join(name for name in ("train", "val") if _image_folder(root, name))
        raise DataError(f"{root} has no split {split!r}: it has {splits or 'neither train nor val'}.")
    xml_folder = _xml_folder(root, home.name)
    xml_files = dict[str, list[Path]]()
    for path in sorted(xml_folder.rglob("*.xml")) if xml_folder else ():
        xml_files.setdefault(path.stem, []).append(path)
    entries = list[tuple[Path, str, Objects, ImageSize | None, Path | None]]()
    for image in list_images(home):
        xml = _box_file(image, xml_files.get(image.stem, []))
        objects, size = read_box_file(xml) if xml else (Objects(), None)
        entries.append((image, _synset(home, image, xml, objects), objects, size, xml))
    if not entries:
        raise DataError(f"{home} holds no images.")
    classes = _classes(root) or sorted({synset for _, synset, *_ in entries})
    label_of = {synset: label for label, synset in enumerate(classes)}
    items = list[Sample]()
    for image, synset, objects, size, xml in entries:
        if synset not in label_of:
            raise DataError(f"{image} is of class {synset}, which is not in {_image_folder(root, 'train')}.")
        boxes = tuple(box for name, box in objects if name == synset) or None
        if boxes and not size:
            for box in boxes:
                check_box(box, read_image_size(image, upright=False), f"{xml}: the image")
        id, opener = image.relative_to(home.parent).as_posix(), partial(open_image, image, upright=False)
        items.append(Sample(id, opener, label_of[synset], boxes, size=size if boxes else None, path=image))
    return Samples(tuple(items), tuple(classes))


def is_ilsvrc(root: str | Path) -> bool:
    """Return whether train or val holds folders named by synset ids, or images with Annotations."""
    for name in ("train", "val"):
        home = _image_folder(Path(root), name)
        if home and any(SYNSET.fullmatch(entry.name) and entry.is_dir() for entry in home.iterdir()):
            return True
        if home and _xml_folder(Path(root), name) and any(is_image(entry) for entry in home.iterdir()):
            return True
    return False


def read_box_file(path: Path) -> tuple[Objects, ImageSize | None]:
    """Return the objects of an XML file and the image size they refer to. Corners are put in order and boxes
    clipped to the image, because some were drawn beyond it or from the right; x1 and y1 are inside."""
    from xml.etree import ElementTree

    try:
        tree = ElementTree.parse(path).getroot()
        width, height = (_side(tree.findtext(f"size/{name}", "0")) for name in ("width", "height"))
        objects = Objects()
        for element in tree.findall("object"):
            corners = (element.findtext(f"bndbox/{name}", "") for name in ("xmin", "ymin", "xmax", "ymax"))
            x0, y0, x1, y1 = (int(float(text)) for text in corners)
            x0, x1 = _clip(x0, x1, width)
            y0, y1 = _clip(y0, y1, height)
            objects.append((element.findtext("name", "").strip(), (x0, y0, x1, y1)))
    except (ElementTree.ParseError, ValueError, OverflowError, LookupError, OSError) as error:
        raise DataError(f"cannot read the boxes of {path}: {str(error)[:300]}.") from error
    return objects, ImageSize(width, height) if width > 0 and height > 0 else None


def _side(text: str) -> int:
    """Return a width or a height; 0 or less if it is not known."""
    if int(text) > MAX_SIDE:
        raise ValueError(f"an image has no {text} pixels in a row")
    return int(text)


def _box_file(image: Path, named_alike: list[Path]) -> Path | None:
    """Return the XML file of an image: the one of its name, or that in a folder of its folder's name."""
    if len(named_alike) < 2:
        return next(iter(named_alike), None)
    beside = [path for path in named_alike if path.parent.name == image.parent.name]
    if len(beside) != 1:
        files = f"{named_alike[0]} and {named_alike[1]}"
        raise DataError(f"cannot tell which is the box file of {image}, {files}: name their folders alike.")
    return beside[0]


def _clip(start: int, end: int, length: int) -> tuple[int, int]:
    start, end = min(start, end), max(start, end)
    last = length - 1 if length > 0 else end
    if end < 0 or start > last:
        raise ValueError(f"a box from {start} to {end} is outside the {length} pixels of the image")
    return max(start, 0), min(end, last)


def _synset(home: Path, image: Path, xml: Path | None, objects: Objects) -> str:
    """Return the class of an image: the name of its folder, or of the objects in its XML file."""
    folder = image.relative_to(home).parts[0]
    if folder != image.name:
        if not SYNSET.fullmatch(folder):
            raise DataError(f"{home / folder} is not named by a synset id such as n01440764: rename it.")
        return folder
    names = {name for name, _ in objects}
    if len(names) != 1:
        reason = f"its XML file names {len(names)} classes" if xml else "it has no XML file in Annotations"
        raise DataError(f"cannot tell the class of {image}: {reason}. Put it into a folder of its synset.")
    return names.pop()


def _classes(root: Path) -> list[str]:
    """Return the sorted synset ids of LOC_synset_mapping.txt, else of the train folder, else nothing."""
    file = next((f for f in (root / SYNSET_LIST, root.parent / SYNSET_LIST) if f.is_file()), None)
    if file is not None:
        return sorted({text.split()[0] for _, text in numbered_lines(file)})
    home = _image_folder(root, "train")
    return sorted(e.name for e in home.iterdir() if SYNSET.fullmatch(e.name)) if home else []


def _image_folder(root: Path, name: str) -> Path | None:
    bases = (root, root / "ILSVRC")
    return _first_folder(f for base in bases for f in (base / "Data" / "CLS-LOC" / name, base / name))


def _xml_folder(root: Path, name: str) -> Path | None:
    homes = (root / "Annotations", root / "ILSVRC" / "Annotations")
    return _first_folder(f for home in homes for f in (home / "CLS-LOC" / name, home / name, home))


def _first_folder(folders: Iterable[Path]) -> Path | None:
    return next((folder for folder in folders if folder.is_dir()), None)
