"""Data sets as they are published, boxes beside class folders, and what `inspect` tells of them."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigcam.cli.main import main
from sigcam.core.errors import DataError
from sigcam.data.readers.ilsvrc import read_notes
from sigcam.data.registry import READERS, guess_format, open_dataset
from sigcam.data.sample import Samples
from sigcam.drawing.contact_sheet import annotated, contact_sheet
from sigcam.reports.inspection import open_splits, unreadable

RED, YELLOW = (229, 57, 53), (255, 235, 59)


def put(path: Path, size: tuple[int, int] = (40, 30), colour: int | tuple[int, int, int] = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB" if isinstance(colour, tuple) else "L", size, colour).save(path)
    return path


def put_mask(path: Path, rows: list[list[int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(rows, np.uint8)).save(path)
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refuses(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def mask_of(samples: Samples, index: int) -> list[list[int]]:
    open_mask = samples[index].open_mask
    assert open_mask is not None
    mask = open_mask()
    assert mask.dtype == np.uint8
    return mask.tolist()


def check_paths(samples: Samples) -> None:
    """Every picture tells its file, opens, and can be sent to another process."""
    for sample in pickle.loads(pickle.dumps(samples)):
        assert sample.path is not None and sample.path.is_file()
        assert sample.open().mode == "RGB"


# --- CUB-200-2011 ---

CUB = {
    "images.txt": "1 001.Black/a_46.jpg\n2 001.Black/b.jpg\n3 002.Laysan/c.jpg",
    "classes.txt": "1 001.Black\n2 002.Laysan\n",
    "image_class_labels.txt": "1 1\n2 1\n3 2\n",
    "train_test_split.txt": "1 0\n2 1\n3 1\n",
    "bounding_boxes.txt": "1 60.0 27.0 325.0 304.0\n2 0.0 1.0 39.0 28.0\n\n3 5.0 5.0 1.0 1.0\n",
}


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    root = tmp_path / "CUB_200_2011"
    for name, text in CUB.items():
        write(root / name, text)
    put(root / "images/001.Black/a_46.jpg", (500, 335))
    put(root / "images/001.Black/b.jpg")
    put(root / "images/002.Laysan/c.jpg")
    return root


def test_cub_is_read_from_its_own_lists(cub: Path) -> None:
    for root in (cub, cub.parent):  # the folder itself, or where it was unpacked
        assert guess_format(root) == "cub"
        train, test = (open_dataset(root, split=split) for split in ("train", "test"))
        assert [sample.id for sample in train] == ["001.Black/b.jpg", "002.Laysan/c.jpg"]
        assert [sample.label for sample in train] == [0, 1]
        assert train.classes == test.classes == ("001.Black", "002.Laysan")
        assert [sample.boxes for sample in train] == [((0, 1, 39, 29),), ((5, 5, 6, 6),)]
        assert train[0].open_mask is None
        check_paths(train)


def test_a_cub_box_is_that_of_the_public_evaluator(cub: Path) -> None:
    # PROTOCOL 5.6: this bird's line in localization.txt is 60,27,385,331
    assert open_dataset(cub, split="test")[0].boxes == ((60, 27, 385, 331),)


def test_a_cub_mask_is_where_most_of_five_annotators_saw_the_bird(cub: Path) -> None:
    for home in (cub, cub.parent):
        put_mask(home / "segmentations/001.Black/b.png", [[0, 51, 102], [153, 204, 255]])
        samples = open_dataset(cub, split="train")
        assert mask_of(samples, 0) == [[0, 0, 0], [1, 1, 1]]
        assert samples[1].open_mask is None  # no file, no mask
        (home / "segmentations/001.Black/b.png").unlink()
        (home / "segmentations/001.Black").rmdir()
        (home / "segmentations").rmdir()


def test_cub_without_boxes_has_none(cub: Path) -> None:
    (cub / "bounding_boxes.txt").unlink()
    assert open_dataset(cub, split="train")[0].boxes is None


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("image_class_labels.txt", "1 1\n2 1\n", ["images.txt line 3", "c.jpg", "image_class_labels.txt"]),
        ("image_class_labels.txt", "1 1\n2 1\n3 7", ["image_class_labels.txt line 3", "c.jpg", "class 7"]),
        ("train_test_split.txt", "1 0\n2 1\n3 2", ["train_test_split.txt line 3", "'2'"]),
        ("bounding_boxes.txt", "1 1 1 1 1\n3 1 1 1 1", ["images.txt line 2", "b.jpg", "bounding_boxes.txt"]),
        ("bounding_boxes.txt", "1 1 1 1 1\n2 1 1 -1 1\n3 1 1 1 1", ["bounding_boxes.txt line 2", "inverted"]),
        ("bounding_boxes.txt", "1 1 1 1 1\n2 1 1 1\n3 1 1 1 1", ["bounding_boxes.txt line 2", "width"]),
        ("bounding_boxes.txt", "1 1 1 1 1\n2 nan 1 1 1\n3 1 1 1 1", ["bounding_boxes.txt line 2"]),
        (
            "bounding_boxes.txt",
            "1 1 1 1 1\n3 1 1 1 1\n2 5 5 36 2",
            ["bounding_boxes.txt line 3", "b.jpg", "(5, 5, 41, 7)", "40 x 30"],
        ),
        ("bounding_boxes.txt", "1 1 1 1 1\n2 1 1 1 1\n3 0 0 1 1e300", ["line 3", "c.jpg", "40 x 30"]),
        ("images.txt", "1 001.Black/a_46.jpg\n2 001.Black/gone.jpg", ["images.txt line 2", "gone.jpg"]),
        ("images.txt", "1 001.Black/a_46.jpg\n1 001.Black/b.jpg", ["images.txt line 2", "line 1"]),
        ("images.txt", "x.jpg", ["images.txt line 1", "number"]),
        (
            "images.txt",
            "1 001.Black/a_46.jpg\n2 001.Black/b.jpg\n\n3 001.Black/a_46.jpg",
            ["images.txt line 4", "a_46.jpg", "line 1"],
        ),
    ],
)
def test_a_mistake_in_cubs_lists_is_named_by_file_and_line(
    cub: Path, file: str, text: str, words: list[str]
) -> None:
    write(cub / file, text)
    refuses(lambda: open_dataset(cub, split="train"), *words)


def test_a_cub_box_may_end_at_the_edge_of_the_stored_picture(cub: Path) -> None:
    turned = Image.new("RGB", (40, 30))
    turned.getexif()[0x0112] = 6
    turned.save(cub / "images/001.Black/b.jpg", exif=turned.getexif())
    write(cub / "bounding_boxes.txt", "1 1 1 1 1\n2 0.4 0 39.6 30\n3 1 1 1 1")
    assert open_dataset(cub, split="train")[0].boxes == ((0, 0, 40, 30),)


def test_a_split_that_a_data_set_does_not_have_is_never_replaced(cub: Path) -> None:
    refuses(lambda: open_dataset(cub, split="val"), "has no split 'val'", "train, test")


# --- Stanford Cars ---


def put_cars(root: Path, *, changed: dict[str, object] | None = None, labels: bool = True) -> Path:
    io = pytest.importorskip("scipy.io", reason="scipy writes the MATLAB files of this test")
    names = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
    fields = [(name, object) for name in names if labels or name != "class"]
    for split, file in (
        ("train", "devkit/cars_train_annos.mat"),
        ("test", "cars_test_annos_withlabels.mat" if labels else "devkit/cars_test_annos.mat"),
    ):
        count = 2 if split == "train" else 1
        rows = np.zeros((1, count), dtype=fields)
        for i in range(count):
            row = {"bbox_x1": 1, "bbox_y1": 3, "bbox_x2": 40, "bbox_y2": 30, "class": i + 1}
            row |= {"fname": f"0000{i + 1}.jpg"} | (changed or {})
            for name, _ in fields:
                rows[0, i][name] = row[name]
            put(root / f"cars_{split}" / f"0000{i + 1}.jpg")
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        io.savemat(root / file, {"annotations": rows})
    classes = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]], dtype=object)
    io.savemat(root / "devkit" / "cars_meta.mat", {"class_names": classes})
    return root


def test_cars_are_read_from_the_devkit_and_their_boxes_counted_from_0(tmp_path: Path) -> None:
    put_cars(tmp_path)
    assert guess_format(tmp_path) == "cars"
    train, test = (open_dataset(tmp_path, split=split) for split in ("train", "test"))
    assert [sample.label for sample in train] == [0, 1] and len(test) == 1
    assert train.classes == ("AM General Hummer SUV 2000", "Acura RL Sedan 2012")
    assert train[0].boxes == ((0, 2, 39, 29),)  # of a picture of 40 x 30: the last pixel is inside it
    check_paths(train)
    check_paths(test)


def test_cars_of_the_test_split_have_no_label_where_the_file_has_none(tmp_path: Path) -> None:
    put_cars(tmp_path, labels=False)
    (sample,) = open_dataset(tmp_path, split="test")
    assert sample.label is None and sample.boxes == ((0, 2, 39, 29),)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bbox_x1": 0}, ["cars_train_annos.mat annotation 1", "00001.jpg", "pixel 1"]),
        ({"bbox_x2": 0}, ["cars_train_annos.mat annotation 1", "inverted"]),
        ({"class": 3}, ["cars_train_annos.mat annotation 1", "class 3 of 2"]),
        ({"fname": "gone.jpg"}, ["cars_train_annos.mat annotation 1", "gone.jpg", "cars_train"]),
        ({"fname": "00001.jpg"}, ["cars_train_annos.mat annotation 2", "00001.jpg", "annotation 1 already"]),
        ({"bbox_x2": 41}, ["annotation 1", "00001.jpg", "(1, 3, 41, 30)", "40 x 30"]),
        ({"bbox_y2": 31}, ["annotation 1", "00001.jpg", "(1, 3, 40, 31)", "40 x 30"]),
        ({"bbox_x1": np.zeros((0, 0))}, ["annotation 1", "00001.jpg", "'[]' as bbox_x1"]),
        ({"bbox_y1": float("nan")}, ["annotation 1", "00001.jpg", "'nan' as bbox_y1"]),
        ({"bbox_y2": float("inf")}, ["annotation 1", "00001.jpg", "'inf' as bbox_y2"]),
        ({"bbox_x2": "wide"}, ["annotation 1", "00001.jpg", "'wide' as bbox_x2"]),
        ({"class": np.zeros((0, 0))}, ["annotation 1", "00001.jpg", "'[]' as class"]),
        ({"class": float("nan")}, ["annotation 1", "00001.jpg", "'nan' as class"]),
    ],
)
def test_a_mistake_in_the_cars_files_is_named(
    tmp_path: Path, changed: dict[str, object], words: list[str]
) -> None:
    put_cars(tmp_path, changed=changed)
    refuses(lambda: open_dataset(tmp_path, split="train"), *words)


def test_annotations_of_cars_without_a_field_are_refused(tmp_path: Path) -> None:
    put_cars(tmp_path)
    io = pytest.importorskip("scipy.io")
    io.savemat(tmp_path / "devkit" / "cars_train_annos.mat", {"annotations": np.array(["a", "b"], object)})
    refuses(lambda: open_dataset(tmp_path, split="train"), "cars_train_annos.mat", "bbox_x1", "devkit")


def test_a_damaged_matlab_file_is_named(tmp_path: Path) -> None:
    put_cars(tmp_path)
    (tmp_path / "devkit" / "cars_train_annos.mat").write_bytes(b"nothing")
    refuses(lambda: open_dataset(tmp_path, split="train"), "cars_train_annos.mat")


def test_cars_without_scipy_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cars_train_annos.mat", "cars_meta.mat"):
        write(tmp_path / "devkit" / name, "")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    refuses(lambda: open_dataset(tmp_path, split="train"), "MATLAB", "pip install scipy")


# --- Oxford-IIIT Pet ---


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    write(root / "annotations/trainval.txt", "Abyssinian_1 1 1 1\namerican_bulldog_10 2 2 1\n")
    write(root / "annotations/test.txt", "american_bulldog_2 2 2 1\nBirman_3 3 1 2")
    for name in ("Abyssinian_1", "american_bulldog_10", "american_bulldog_2", "Birman_3"):
        put(root / "images" / f"{name}.jpg")
        put_mask(root / "annotations/trimaps" / f"{name}.png", [[1, 2, 3], [2, 1, 3]])
    write(root / "annotations/xmls/Abyssinian_1.xml", "<annotation/>")
    return root


def test_pets_have_masks_without_their_border_and_no_boxes_of_heads(pets: Path) -> None:
    assert guess_format(pets) == "pets"
    train, test = (open_dataset(pets, split=split) for split in ("train", "test"))
    assert train.classes == test.classes == ("Abyssinian", "american_bulldog", "Birman")
    assert [sample.label for sample in train] == [0, 1] and [sample.label for sample in test] == [1, 2]
    assert mask_of(train, 0) == [[1, 0, 255], [0, 1, 255]]
    assert all(sample.boxes is None for sample in (*train, *test))
    check_paths(train)


def test_a_pet_without_trimap_has_no_mask_and_a_trimap_of_other_values_is_refused(pets: Path) -> None:
    (pets / "annotations/trimaps/Abyssinian_1.png").unlink()
    put_mask(pets / "annotations/trimaps/american_bulldog_10.png", [[1, 2, 0]])
    samples = open_dataset(pets, split="train")
    assert samples[0].open_mask is None and samples[1].open_mask is not None
    refuses(samples[1].open_mask, "american_bulldog_10.png", "1, 2 and 3, not 0")
    write(pets / "annotations/trimaps/american_bulldog_10.png", "nothing")
    refuses(samples[1].open_mask, "american_bulldog_10.png")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Abyssinian_1 1 1 1\n\nAbyssinian_9 1 1 1", ["trainval.txt line 3", "Abyssinian_9", "is not in"]),
        ("Abyssinian_1 one 1 1", ["trainval.txt line 1", "class"]),
        ("Abyssinian_1 0 1 1", ["trainval.txt line 1", "from 1"]),
        ("Abyssinian_1 2 1 1", ["line 1", "Abyssinian", "american_bulldog"]),
        ("#\nAbyssinian_1 99999999 1 1", ["trainval.txt line 2", "99999999", "from 1 to 100000"]),
        (f"Abyssinian_1 {'1' * 5000} 1 1", ["trainval.txt line 1", "class"]),
        ("Abyssinian_1 1 1 1\nAbyssinian_1 1 1 1", ["trainval.txt line 2", "line 1"]),
    ],
)
def test_a_mistake_in_the_pets_lists_is_named_by_file_and_line(
    pets: Path, text: str, words: list[str]
) -> None:
    write(pets / "annotations/trainval.txt", text)
    refuses(lambda: open_dataset(pets, split="train"), *words)


# --- ILSVRC ---


def notes(*objects: tuple[str, int, int, int, int], size: tuple[int, int] = (40, 30)) -> str:
    parts = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax>"
        f"<ymax>{y1}</ymax></bndbox></object>"
        for name, x0, y0, x1, y1 in objects
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{parts}</annotation>"


TENCH, GOLDFISH, SHARK = "n01440764", "n01443537", "n01484850"


@pytest.fixture(params=["plain", "kaggle"])
def ilsvrc(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folders of synsets to train on, a flat val folder, boxes for some."""
    kaggle = request.param == "kaggle"
    pictures = tmp_path / ("ILSVRC/Data/CLS-LOC" if kaggle else "")
    boxes = tmp_path / ("ILSVRC/Annotations/CLS-LOC" if kaggle else "Annotations")
    for synset in (SHARK, TENCH, GOLDFISH):
        put(pictures / "train" / synset / f"{synset}_1.JPEG")
    for number, synset in ((1, SHARK), (2, TENCH)):
        put(pictures / "val" / f"ILSVRC2012_val_0000000{number}.JPEG")
        text = notes((synset, 1, 2, 10, 20), (synset, 0, 0, 39, 29))
        write(boxes / "val" / f"ILSVRC2012_val_0000000{number}.xml", text)
    write(boxes / "train" / TENCH / f"{TENCH}_1.xml", notes((TENCH, 2, 2, 80, 60), size=(80, 60)))
    return tmp_path


def test_ilsvrc_classes_are_in_the_order_of_their_synset_ids(ilsvrc: Path) -> None:
    assert guess_format(ilsvrc) == "ilsvrc"
    train, val = (open_dataset(ilsvrc, split=split) for split in ("train", "val"))
    assert train.classes == val.classes == (TENCH, GOLDFISH, SHARK)
    assert [sample.label for sample in train] == [0, 1, 2]
    assert [sample.label for sample in val] == [2, 0]  # a flat folder: the XML files name the classes
    assert val[0].id == "val/ILSVRC2012_val_00000001.JPEG"
    check_paths(train)
    check_paths(val)


def test_ilsvrc_boxes_come_with_the_size_they_refer_to(ilsvrc: Path) -> None:
    train, test = (open_dataset(ilsvrc, split=split) for split in ("train", "test"))
    assert train[0].size == (80, 60) and train[0].boxes == ((2, 2, 79, 59),)  # cut to the picture
    assert train[1].boxes is None and train[1].size is None
    assert test[0].boxes == ((1, 2, 10, 20), (0, 0, 39, 29))  # the test split is ImageNet's val


def test_ilsvrc_boxes_of_other_classes_are_left_out(tmp_path: Path) -> None:
    put(tmp_path / "val" / TENCH / "a.JPEG")
    write(tmp_path / "Annotations/val/a.xml", notes((SHARK, 1, 1, 5, 5), (TENCH, 9, 9, 3, 4)))
    (sample,) = open_dataset(tmp_path, split="val")
    assert sample.boxes == ((3, 4, 9, 9),)  # corners in order


def test_bad_xml_files_are_named(tmp_path: Path) -> None:
    for text in ("<annotation>", notes((TENCH, 1, 1, 5, 5)).replace("<xmin>1<", "<xmin>one<")):
        refuses(lambda text=text: read_notes(write(tmp_path / "a.xml", text)), "a.xml")
    refuses(lambda: read_notes(write(tmp_path / "a.xml", notes((TENCH, 50, 1, 60, 5)))), "a.xml", "outside")
    text = notes((TENCH, 1, 1, 5, 5))
    for wrong in (text.replace("<xmax>5<", "<xmax>inf<"), f'<?xml version="1.0" encoding="klingon"?>{text}'):
        refuses(lambda wrong=wrong: read_notes(write(tmp_path / "a.xml", wrong)), "cannot read", "a.xml")


def test_a_box_is_held_to_the_picture_where_the_xml_file_has_no_size(tmp_path: Path) -> None:
    put(tmp_path / "val" / TENCH / "a.JPEG")
    file = write(tmp_path / "Annotations/val/a.xml", notes((TENCH, 1, 1, 39, 29), size=(0, 0)))
    assert open_dataset(tmp_path, split="val")[0].boxes == ((1, 1, 39, 29),)
    write(file, notes((TENCH, 1, 1, 41, 29), size=(0, 0)))
    refuses(lambda: open_dataset(tmp_path, split="val"), "a.xml", "(1, 1, 41, 29)", "40 x 30")


def test_a_flat_picture_whose_class_is_not_known_is_named(ilsvrc: Path) -> None:
    file = next(ilsvrc.rglob("ILSVRC2012_val_00000002.xml"))
    write(file, notes((TENCH, 1, 1, 2, 2), (SHARK, 1, 1, 2, 2)))
    refuses(lambda: open_dataset(ilsvrc, split="val"), "ILSVRC2012_val_00000002.JPEG", "2 classes")
    file.unlink()
    refuses(lambda: open_dataset(ilsvrc, split="val"), "ILSVRC2012_val_00000002.JPEG", "Annotations")


def test_folders_that_are_no_synsets_or_not_in_train_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "train" / TENCH / "a.JPEG")
    put(tmp_path / "val" / SHARK / "b.JPEG")
    refuses(lambda: open_dataset(tmp_path, split="val"), SHARK, "train")
    put(tmp_path / "train" / "tench" / "c.JPEG")
    refuses(lambda: open_dataset(tmp_path, split="train"), "tench", "synset")


# --- class folders with boxes ---


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("cat/1.png", "cat/2 b.png", "dog/3.png"):
        put(tmp_path / "data" / name)
    return tmp_path / "data"


@pytest.mark.parametrize("header", ["", "image,x0,y0,x1,y1,label\n"])
def test_boxes_csv_gives_pictures_several_boxes_or_none(folders: Path, header: str) -> None:
    text = '\ufeff{}cat/1.png,1,2,10,20\n\n"cat/2 b.png",0,0,40,30,cat\ncat/1.png,5,5,5,5,cat'
    write(folders / "boxes.csv", text.format(header))
    assert guess_format(folders) == "folder"
    samples = open_dataset(folders)
    assert [sample.boxes for sample in samples] == [((1, 2, 10, 20), (5, 5, 5, 5)), ((0, 0, 40, 30),), None]
    check_paths(samples)


def test_boxes_of_another_class_than_the_pictures_are_left_out(folders: Path) -> None:
    write(folders / "boxes.csv", "cat/1.png,1,2,10,20,cat\ncat/1.png,0,0,5,5,dog\n")
    assert open_dataset(folders)[0].boxes == ((1, 2, 10, 20),)


def test_boxes_csv_may_be_beside_the_classes_of_a_split_or_beside_the_splits(folders: Path) -> None:
    root = folders.parent
    put(root / "set/train/cat/1.png")
    put(root / "set/test/cat/2.png")
    write(root / "set/boxes.csv", "train/cat/1.png,1,1,2,2\ntest/cat/2.png,3,3,4,4\n")
    assert open_dataset(root / "set", split="train")[0].boxes == ((1, 1, 2, 2),)
    assert open_dataset(root / "set", split="test")[0].boxes == ((3, 3, 4, 4),)
    write(root / "set/test/boxes.csv", "cat/2.png,5,5,6,6\n")
    assert open_dataset(root / "set", split="test")[0].boxes == ((5, 5, 6, 6),)


def test_boxes_csv_is_in_pixels_of_the_upright_picture(folders: Path) -> None:
    turned = Image.new("RGB", (40, 30))
    turned.getexif()[0x0112] = 6
    turned.save(folders / "cat" / "1.png", exif=turned.getexif())
    write(folders / "boxes.csv", "cat/1.png,0,0,29,39\n")
    (sample, *_) = open_dataset(folders)
    assert sample.open().size == (30, 40) and sample.boxes == ((0, 0, 29, 39),)
    write(folders / "boxes.csv", "cat/1.png,0,0,39,29\n")
    refuses(lambda: open_dataset(folders), "boxes.csv line 1", "30 x 40")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cat/1.png,1,2,10", ["boxes.csv line 1", "image,x0,y0,x1,y1"]),
        ("cat/1.png,1,2,10,20\n\ncat/9.png,1,2,3,4", ["boxes.csv line 3", "cat/9.png", "is not in"]),
        ("../data/cat/1.png,1,2,3,4", ["boxes.csv line 1", "is not in"]),
        ("cat/1.png,1,2,41,20", ["boxes.csv line 1", "beyond", "40 x 30"]),
        ("cat/1.png,10,2,1,20", ["boxes.csv line 1", "inverted"]),
        ("cat/1.png,-1,2,1,20", ["boxes.csv line 1", "'-1'"]),
        ("cat/1.png,1.5,2,1,20", ["boxes.csv line 1", "'1.5'"]),
        ("cat/1.png,1,2,10,20,bird", ["boxes.csv line 1", "'bird'"]),
        (f"cat/1.png,1,2,10,20\n{'a' * 200_000},1,2,10,20", ["boxes.csv line 2", "field limit", "quote"]),
        (f"cat/1.png,1,2,{'1' * 5000},20", ["boxes.csv line 1", "cat/1.png", "'111", "...", "whole"]),
    ],
)
def test_a_mistake_in_boxes_csv_is_named_by_line(folders: Path, text: str, words: list[str]) -> None:
    write(folders / "boxes.csv", text)
    refuses(lambda: open_dataset(folders), *words)


# --- the lists of the public evaluator, as PROTOCOL 5.6 quotes them ---


def lists(root: Path, split: str, ids: str, labels: str, sizes: str, places: str) -> None:
    names = ("image_ids", "class_labels", "image_sizes", "localization")
    for name, text in zip(names, (ids, labels, sizes, places), strict=True):
        write(root / split / f"{name}.txt", text)


def test_the_evaluators_imagenet_lines_are_read(tmp_path: Path) -> None:
    first, second = (f"val/ILSVRC2012_val_0000000{i}.JPEG" for i in (1, 2))
    for id in (first, second):
        put(tmp_path / "dataset/ILSVRC" / id, (500, 375))
    lists(
        tmp_path / "metadata/ILSVRC",
        "test",
        f"{first}\n{second}",
        f"{first},65\n{second},970",
        f"{first},500,375\n{second},500,375\n",
        f"{first},111,108,441,193\n{second},0,0,499,374\n{first},1,1,2,2",
    )
    samples = open_dataset(tmp_path / "dataset/ILSVRC", split="test")
    assert guess_format(tmp_path / "dataset/ILSVRC") == "wsol"
    assert samples[0].boxes == ((111, 108, 441, 193), (1, 1, 2, 2)) and samples[0].size == (500, 375)
    assert [sample.label for sample in samples] == [65, 970] and len(samples.classes) == 971
    check_paths(samples)


def test_a_breed_of_pets_has_one_number(tmp_path: Path) -> None:
    at = tmp_path / "annotations"
    at.mkdir()
    (tmp_path / "images").mkdir()
    for name in ("cat_1", "cat_2"):
        Image.new("RGB", (9, 9)).save(tmp_path / "images" / f"{name}.jpg")
    (at / "trainval.txt").write_text("cat_1 1 1 1\ncat_2 9 1 1\n")
    with pytest.raises(DataError, match=r"trainval\.txt line 2: image cat_2 has class 9; cat is 1 elsewhere"):
        open_dataset(tmp_path, format="pets")


def test_the_evaluators_second_set_of_birds_is_the_val_split(tmp_path: Path) -> None:
    id = "001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg"
    for split, path in (("val", "val2/0/0.jpeg"), ("test", id)):
        put(tmp_path / "CUB" / path, (500, 335))
        box = f"{path},60,27,385,331"
        lists(tmp_path / "CUB/metadata", split, path, f"{path},0", f"{path},500,335", box)
    val, test = (open_dataset(tmp_path / "CUB", split=split) for split in ("val", "test"))
    assert (val[0].id, test[0].id) == ("val2/0/0.jpeg", id)
    assert test[0].boxes == val[0].boxes == ((60, 27, 385, 331),)


def test_the_evaluators_cars_keep_boxes_that_count_from_1(tmp_path: Path) -> None:
    put(tmp_path / "cars_test/00001.jpg", (276, 182))
    put(tmp_path / "cars_test/00002.jpg", (276, 182))
    lists(
        tmp_path / "metadata",
        "test",
        "00001.jpg\n00002.jpg\n",
        "00001.jpg,180\n00002.jpg,0",
        "00001.jpg,276,182\n00002.jpg,276,182",
        "00001.jpg,30,52,246,147\n00002.jpg,1,1,276,182",
    )
    samples = open_dataset(tmp_path, split="test")
    assert [sample.boxes for sample in samples] == [((30, 52, 246, 147),), ((1, 1, 276, 182),)]
    write(tmp_path / "metadata/test/localization.txt", "00001.jpg,30,52,246,147\n00002.jpg,1,1,277,182")
    refuses(lambda: open_dataset(tmp_path, split="test"), "localization.txt line 2", "00002.jpg", "beyond")


def test_the_evaluators_openimages_masks_are_united_and_ignored_where_the_first_line_says(
    tmp_path: Path,
) -> None:
    stem = "test/01226z/7af766bd43da900b"
    other = "test/01226z/other"
    home = tmp_path / "dataset/OpenImages"
    put(home / f"{stem}.jpg", (3, 2))
    put(home / f"{other}.jpg", (3, 2))
    put_mask(home / f"{stem}_m01226z_6554d965.png", [[255, 0, 0], [0, 0, 0]])
    put_mask(home / f"{stem}_m01226z_8856c605.png", [[0, 0, 0], [0, 0, 1]])
    put_mask(home / f"{stem}_ignore.png", [[255, 255, 0], [0, 0, 0]])
    put_mask(home / f"{other}_m.png", [[0, 0, 0], [255, 0, 0]])
    lines = (
        f"{stem}.jpg,{stem}_m01226z_6554d965.png,{stem}_ignore.png\n"
        f"{stem}.jpg,{stem}_m01226z_8856c605.png,\n{other}.jpg,{other}_m.png,"
    )
    ids = f"{stem}.jpg\n{other}.jpg"
    labels = f"{stem}.jpg,0\n{other}.jpg,0"
    lists(tmp_path / "metadata/OpenImages", "test", ids, labels, "", lines)  # no sizes, as published
    samples = open_dataset(home, split="test")
    assert mask_of(samples, 0) == [[1, 255, 0], [0, 0, 1]] and mask_of(samples, 1) == [[0, 0, 0], [1, 0, 0]]
    assert samples[0].size is None and samples[0].boxes is None
    check_paths(samples)
    gone = lines.replace("8856c605", "gone")
    write(tmp_path / "metadata/OpenImages/test/localization.txt", gone)
    refuses(lambda: open_dataset(home, split="test"), "localization.txt line 2", f"{stem}_m01226z_gone.png")


# --- which format ---


def test_every_reader_can_be_named_and_class_folders_are_the_rest(folders: Path, cub: Path) -> None:
    assert set(READERS) >= {"shapes", "folder", "wsol", "cub", "cars", "pets", "ilsvrc"}
    assert guess_format("shapes:20") == "shapes" and guess_format(folders) == "folder"
    assert guess_format(cub / "images") == "folder"
    assert len(open_dataset(cub, format="cub", split="test")) == 1
    refuses(lambda: open_dataset(folders, format="cub"), "images.txt")
    refuses(lambda: open_dataset(folders, format="cars"), "cars_train_annos.mat")
    refuses(lambda: open_dataset(folders, format="pets"), "no split 'train'", "annotations")
    refuses(lambda: open_dataset(folders, format="ilsvrc"), "no split 'train'", "neither")


# --- inspect ---


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sigcam", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_inspect_counts_splits_classes_annotations_and_damaged_files(
    cub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(cub / "images/002.Laysan/c.jpg", "not a picture")
    write(cub / "segmentations/001.Black/a_46.png", "not a mask")
    sheet = tmp_path / "out" / "contact-sheet.png"
    assert run(monkeypatch, "inspect", "--data", cub, "--output", sheet.parent, "--json") == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)["data"]
    assert (facts["format"], facts["images"], facts["classes"]) == ("cub", 3, 2)
    train, test = facts["splits"]
    assert (train["split"], train["images"], train["images per class"]) == ("train", 2, "1 to 1")
    assert (train["boxes"], train["with masks"], train["damaged"]) == (2, 0, 1)
    assert (test["split"], test["images per class"], test["damaged"]) == ("test", "0 to 1", 1)
    assert facts["damaged files"] == 2 and facts["damaged"][0]["image"] == "002.Laysan/c.jpg"
    assert "a_46.png" in facts["damaged"][1]["reason"]
    assert "train: 2 of 2" in captured.err
    assert sheet.read_bytes().startswith(b"\x89PNG") and facts["contact sheet"] == str(sheet)
    manifest = json.loads((sheet.parent / "manifest.json").read_text())
    assert manifest["numbers"]["images"] == 3 and set(manifest["data_fingerprint"]) == {"train", "test"}
    assert run(monkeypatch, "inspect", "--data", cub, "--split", "test") == 0
    printed = capsys.readouterr().out
    assert "damaged" in printed and "a_46" in printed and "Laysan" not in printed


def test_inspect_names_a_few_damaged_files_and_counts_all(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(9):
        write(folders / "cat" / f"bad{number}.png", "")
    assert run(monkeypatch, "inspect", "--data", folders, "--json") == 0
    facts = json.loads(capsys.readouterr().out)["data"]
    assert facts["damaged files"] == 9 and len(facts["damaged"]) == 5


def test_inspect_refuses_what_it_cannot_do_in_one_line(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folders.parent / "file", "in the way")
    for words, said in (
        (("--data", folders, "--output", folders.parent / "file"), "--output"),
        (("--output", folders.parent / "out"), "--data"),
        (("--data", "shapes", "--split", "extra"), "no split 'extra'"),
        (("--data", folders.parent / "gone"), "does not exist"),
    ):
        assert run(monkeypatch, "inspect", *words) == 2
        error = capsys.readouterr().err.strip()
        assert said in error and len(error.splitlines()) == 1, error
    assert not (folders.parent / "out").exists()


def test_a_split_that_several_names_open_is_counted_once(folders: Path) -> None:
    assert list(open_splits(str(folders), "folder")) == ["train, val, test"]
    put(folders.parent / "set/train/cat/1.png")
    put(folders.parent / "set/val/cat/2.png")
    assert list(open_splits(str(folders.parent / "set"), "folder")) == ["train", "val, test"]
    assert list(open_splits("shapes:8", "shapes")) == ["train", "val", "test"]


def test_a_mistake_in_one_split_is_not_taken_for_a_missing_split(cub: Path) -> None:
    write(cub / "bounding_boxes.txt", "1 x 1 1 1\n2 1 1 1 1\n3 1 1 1 1")
    refuses(lambda: open_splits(str(cub), "cub"), "bounding_boxes.txt line 1")


def test_pictures_that_are_not_files_are_not_decoded_to_look_for_damage() -> None:
    assert unreadable(open_dataset("shapes:4")) == []


# --- the contact sheet ---


def test_a_contact_sheet_is_the_same_for_a_seed_and_skips_what_cannot_be_read(folders: Path) -> None:
    write(folders / "cat" / "bad.png", "")
    samples = open_dataset(folders)
    pages = [np.asarray(contact_sheet(samples, seed=seed, cell=64)) for seed in (1, 1)]
    assert np.array_equal(*pages)
    assert contact_sheet(samples, count=2, cell=64).width < contact_sheet(samples, cell=64).width
    for file in folders.rglob("*.png"):
        write(file, "")
    refuses(lambda: contact_sheet(samples), "none of the 4 pictures")


def test_boxes_and_outlines_lie_where_the_annotations_say(tmp_path: Path) -> None:
    put(tmp_path / "images/a_1.jpg", (100, 50))  # half as high as wide: 50 rows of ground above and below
    pixels = np.full((50, 100), 2)
    pixels[10:40, 60:90] = 1
    put_mask(tmp_path / "annotations/trimaps/a_1.png", pixels.tolist())
    write(tmp_path / "annotations/trainval.txt", "a_1 1 1 1")
    (pet,) = open_dataset(tmp_path)
    drawn = np.asarray(annotated(pet, 200))
    rows, columns = np.where((drawn == YELLOW).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (70, 129, 120, 179)
    put(tmp_path / "cat/1.png", (100, 50))
    write(tmp_path / "boxes.csv", "cat/1.png,10,5,49,24")
    cat = next(s for s in open_dataset(tmp_path, format="folder") if s.boxes)
    rows, columns = np.where((np.asarray(annotated(cat, 200)) == RED).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (60, 99, 20, 99)


def test_boxes_are_drawn_in_pixels_of_the_original_of_a_squashed_copy(tmp_path: Path) -> None:
    put(tmp_path / "val" / TENCH / "a.JPEG", (50, 50))
    write(tmp_path / "Annotations/val/a.xml", notes((TENCH, 0, 0, 99, 49), size=(100, 50)))
    (sample,) = open_dataset(tmp_path, split="val")
    rows, columns = np.where((np.asarray(annotated(sample, 200)) == RED).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (50, 149, 0, 199)


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["cub", "cars", "pets", "ilsvrc"])
def test_a_contact_sheet_of_photographs_can_be_drawn(real_data: Path, name: str) -> None:
    sheet = contact_sheet(open_dataset(real_data / name, split="test"))
    assert sheet.width > 1000 and sheet.height > 900
