"""The metadata layout of the WSOL evaluator is read, mistakes in it are named."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigcam.data.readers.wsol import wsol
from sigcam.data.registry import READERS, guess_format, open_dataset
from sigcam.data.sample import Samples
from sigcam.reports.inspection import unreadable
from support.data_files import (
    check_paths,
    mask_of,
    put,
    put_mask,
    refuses,
    write,
)

PICTURES = {"a/1.png": (40, 30), "a/2.png": (50, 20), "b c/3.png": (30, 30)}


TEXTS = {
    "image_ids.txt": "a/1.png\na/2.png\nb c/3.png",  # no final newline, as in some of the public files
    "class_labels.txt": "a/1.png,0\na/2.png,0\nb c/3.png,1\n",
    "image_sizes.txt": "a/1.png,40,30\na/2.png,50,20\nb c/3.png,30,30",
    "localization.txt": "a/1.png,1,2,10,20\na/1.png,5,5,40,30\na/2.png,0,0,49,19\nb c/3.png,3,4,3,4\n",
}


def write_metadata(folder: Path, **changed: str | None) -> Path:
    """Metadata files with some of them changed or, by None, left out: class_labels="...", ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**TEXTS, **{f"{key}.txt": value for key, value in changed.items()}}.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """Three pictures in images/, their metadata in metadata/test/, two class names."""
    root = tmp_path / "birds"
    for id, size in PICTURES.items():
        put(root / "images" / id, size)
    write_metadata(root / "metadata" / "test")
    (root / "metadata" / "classes.txt").write_text("wren\ntern\n")
    return root


@pytest.fixture
def masked(birds: Path) -> Path:
    """The same with masks: two for the first picture, and an ignore mask on its first line alone."""
    for name in ("a/1_x.png", "a/1_y.png", "a/1_ignore.png", "a/2_x.png", "b c/3_x.png"):
        put(birds / "masks" / name, (6, 4), 0)
    lines = "a/1.png,a/1_x.png,a/1_ignore.png\na/1.png,a/1_y.png,\na/2.png,a/2_x.png,\nb c/3.png,b c/3_x.png,"
    write_metadata(birds / "metadata" / "test", localization=lines)
    return birds


def check(samples: Samples) -> None:
    assert [sample.id for sample in samples] == list(PICTURES)
    assert [sample.label for sample in samples] == [0, 0, 1]
    assert [sample.size for sample in samples] == list(PICTURES.values())
    assert [sample.open().size for sample in samples] == list(PICTURES.values())
    assert samples[0].boxes == ((1, 2, 10, 20), (5, 5, 40, 30))  # x1 = width and y1 = height are taken
    assert samples[1].boxes == ((0, 0, 49, 19),) and samples[1].open_mask is None


def test_ids_labels_sizes_boxes_and_class_names_are_read_as_they_stand(birds: Path) -> None:
    samples = open_dataset(birds, split="test")
    check(samples)
    assert samples.classes == ("wren", "tern")
    assert (
        "wsol" in READERS
        and guess_format(str(birds)) == "wsol"
        and guess_format(birds / "images") == "folder"
    )


@pytest.mark.parametrize(
    "layout", ["bare", "metadata", "split", "dataset", "beside", "link to dataset", "link to metadata"]
)
def test_every_folder_that_people_point_at_is_understood(birds: Path, tmp_path: Path, layout: str) -> None:
    root = birds
    if layout == "bare":  # pictures directly in the data set's folder
        for file in list((birds / "images").iterdir()):
            file.rename(birds / file.name)
    elif layout == "metadata":
        root = birds / "metadata"
    elif layout == "split":
        root = birds / "metadata" / "test"
    else:  # the public evaluator's own: dataset/<name>/<id> and metadata/<name>/<split>/
        (tmp_path / "dataset").mkdir()
        (tmp_path / "metadata").mkdir()
        (birds / "metadata").rename(tmp_path / "metadata" / "BIRDS")
        (birds / "images").rename(tmp_path / "dataset" / "BIRDS")
        root = tmp_path / ("dataset" if "dataset" in layout else "metadata") / "BIRDS"
    if "link" in layout:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "mine").symlink_to(root, target_is_directory=True)
        root = tmp_path / "elsewhere" / "mine"
    assert guess_format(root) == "wsol"
    check(open_dataset(root, split="test"))


def test_blank_lines_windows_endings_and_a_byte_order_mark_change_nothing(birds: Path) -> None:
    for file in (birds / "metadata" / "test").iterdir():
        text = file.read_text().replace("\n", "\r\n\r\n  \r\n")
        file.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\r\n")
    check(open_dataset(birds, split="test"))


def test_what_the_metadata_does_not_have_is_none(birds: Path) -> None:
    at = birds / "metadata" / "test"
    for name in ("class_labels.txt", "localization.txt", "image_sizes.txt"):
        (at / name).unlink()
    (at / "image_sizes.txt").touch()  # OpenImages has an empty one
    for sample in open_dataset(birds, split="test"):
        assert (sample.label, sample.boxes, sample.open_mask, sample.size) == (None, None, None, None)


def test_lines_of_images_that_are_not_listed_are_passed_over(birds: Path) -> None:
    write_metadata(birds / "metadata" / "test", image_ids="a/2.png\n")  # a shortened list
    (sample,) = open_dataset(birds, split="test")
    assert sample.boxes == ((0, 0, 49, 19),)


def test_cars_are_in_a_folder_per_split(tmp_path: Path) -> None:
    for split, size in (("train", (9, 9)), ("test", (8, 8))):
        put(tmp_path / f"cars_{split}" / "1.png", size)
        text = {"image_sizes": f"1.png,{size[0]},{size[1]}", "localization": "1.png,1,1,8,8"}
        write_metadata(tmp_path / "metadata" / split, image_ids="1.png", class_labels="1.png,0", **text)
    assert open_dataset(tmp_path, split="test")[0].open().size == (8, 8)
    assert open_dataset(tmp_path, split="train")[0].open().size == (9, 9)


def test_classes_without_names_are_numbered(birds: Path) -> None:
    (birds / "metadata" / "classes.txt").unlink()
    assert open_dataset(birds, split="test").classes == ("class 0", "class 1")


def test_the_other_release_names_its_splits_otherwise(birds: Path) -> None:
    (birds / "metadata" / "test").rename(birds / "metadata" / "train-fullsup")
    check(open_dataset(birds, split="val"))


def test_squashed_copies_keep_the_original_size_and_boxes(birds: Path) -> None:
    for id in PICTURES:
        put(birds / "images" / id, (16, 16))
    samples = open_dataset(birds, split="test")
    assert [sample.size for sample in samples] == list(PICTURES.values())
    assert {sample.open().size for sample in samples} == {(16, 16)}
    put(birds / "images" / "a/2.png", (16, 17))
    refuses(samples[1].open, "image a/2.png", "16 x 17", "16 x 16")


def test_pictures_are_as_stored_because_boxes_are(birds: Path) -> None:
    turned = Image.new("RGB", (40, 30))
    turned.getexif()[0x0112] = 6
    turned.save(birds / "images" / "a/1.png", exif=turned.getexif())
    assert open_dataset(birds, split="test")[0].open().size == (40, 30)


def test_maps_can_be_scored_without_pictures(birds: Path) -> None:
    (birds / "images").rename(birds / "elsewhere")
    refuses(lambda: wsol(birds, split="test"), "image_ids.txt", "a/1.png", "looked in")
    samples = wsol(birds, split="test", pictures=False)
    assert samples[0].size == (40, 30)
    refuses(samples[0].open, "a/1.png", "pictures=True")


def test_samples_can_be_sent_to_other_processes(masked: Path) -> None:
    samples = pickle.loads(pickle.dumps(open_dataset(masked, split="test")))
    assert samples[0].open().size == (40, 30) and samples[0].open_mask().shape == (4, 6)


def test_a_mask_is_the_union_of_objects_and_ignored_where_no_object_is(masked: Path) -> None:
    parts = {name: np.zeros((4, 6), np.uint8) for name in ("1_x", "1_y", "1_ignore")}
    parts["1_x"][0, 0], parts["1_y"][1, 1], parts["1_ignore"][0:2, 0:3] = 1, 255, 200
    for name, pixels in parts.items():
        Image.fromarray(pixels).save(masked / "masks" / "a" / f"{name}.png")
    first, second, _ = open_dataset(masked, split="test")
    assert first.boxes is None and first.open_mask is not None and second.open_mask is not None
    expected = np.zeros((4, 6))
    expected[0:2, 0:3] = 255
    expected[0, 0] = expected[1, 1] = 1
    assert first.open_mask().dtype == np.uint8 and np.array_equal(first.open_mask(), expected)
    assert not second.open_mask().any()  # no ignore mask is no mistake


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("image_ids", "a/1.png\n\na/1.png", ["image_ids.txt line 3", "a/1.png", "line 1"]),
        ("image_ids", "../a/1.png", ["image_ids.txt line 1", "../a/1.png", "below"]),
        ("image_ids", "/a/1.png", ["image_ids.txt line 1", "/a/1.png", "below"]),
        ("image_ids", "\n\n", ["image_ids.txt lists no images"]),
        (
            "class_labels",
            "a/1.png,0\nb c/3.png,1",
            ["image_ids.txt line", "a/2.png", "no label in class_labels.txt"],
        ),
        ("class_labels", "a/1.png,0\na/2.png", ["class_labels.txt line 2", "a/2.png", "<id>,<label>"]),
        ("class_labels", "a/1.png,0\na/2.png,wren", ["class_labels.txt line 2", "a/2.png", "'wren'"]),
        ("class_labels", "a/1.png,0\na/1.png,1", ["class_labels.txt line 2", "a/1.png", "line 1"]),
        ("class_labels", "a/1.png,0\na/2.png,20000000000", ["class_labels.txt line 2", "a/2.png", "100000"]),
        ("class_labels", "a/1.png," + "1" * 5000, ["class_labels.txt line 1", "a/1.png", "'111", "..."]),
        (
            "class_labels",
            "a/1.png,0\na/2.png,2\nb c/3.png,1",
            ["class_labels.txt line 2", "label 2", "2 classes"],
        ),
        (
            "image_sizes",
            "a/1.png,40,30\nb c/3.png,30,30",
            ["image_ids.txt line", "a/2.png", "no size in image_sizes"],
        ),
        ("image_sizes", "a/1.png,40,0", ["image_sizes.txt line 1", "a/1.png", "no pixels"]),
        ("image_sizes", "a/1.png,40", ["image_sizes.txt line 1", "<width>"]),
        ("image_sizes", "a/1.png,40,30\na/1.png,30,40", ["image_sizes.txt line 2", "a/1.png"]),
        (
            "image_sizes",
            "a/1.png,41,30\na/2.png,50,20\nb c/3.png,30,30",
            ["image_sizes.txt line 1", "a/1.png", "41 x 30", "40 x 30"],
        ),
        (
            "localization",
            "a/1.png,1,2,10,20\nb c/3.png,3,4,9,9",
            ["image_ids.txt line", "a/2.png", "no box or mask in loc"],
        ),
        ("localization", "\na/1.png,10,2,1,20", ["localization.txt line 2", "a/1.png", "inverted"]),
        ("localization", "a/1.png,1,20,10,2", ["localization.txt line 1", "a/1.png", "inverted"]),
        ("localization", "a/1.png,1,2,41,20", ["localization.txt line 1", "a/1.png", "beyond", "40 x 30"]),
        ("localization", "a/1.png,-1,2,10,20", ["localization.txt line 1", "a/1.png", "'-1'"]),
        ("localization", "a/1.png,1,2,10.5,20", ["localization.txt line 1", "a/1.png", "'10.5'"]),
        ("localization", "a/1.png,2,10,20", ["localization.txt line 1", "<x0>,<y0>,<x1>,<y1>"]),
        (
            "localization",
            "a/1.png,a/1_x.png,",
            ["localization.txt line 1", "a/1.png", "a/1_x.png", "is not in"],
        ),
        ("localization", "a/1.png,,", ["localization.txt line 1", "a/1.png", "no mask"]),
        ("localization", "a/1.png,mask.png", ["localization.txt line 1", "<mask>"]),
    ],
)
def test_bad_metadata_is_named_by_file_line_and_image(
    birds: Path, file: str, text: str, words: list[str]
) -> None:
    write_metadata(birds / "metadata" / "test", **{file: text})
    refuses(lambda: open_dataset(birds, split="test"), *words)


def test_boxes_without_a_list_of_sizes_are_held_to_the_pictures_when_these_are_opened(birds: Path) -> None:
    at = birds / "metadata" / "test"
    (at / "image_sizes.txt").unlink()
    assert unreadable(open_dataset(birds, split="test")) == []  # x1 = width and y1 = height are taken
    (at / "localization.txt").write_text(TEXTS["localization.txt"].replace("0,0,49,19", "0,0,49,21"))
    ((id, reason),) = unreadable(open_dataset(birds, split="test"))
    assert id == "a/2.png"
    for words in ("localization.txt line 3", "image a/2.png", "(0, 0, 49, 21)", "50 x 20"):
        assert words in reason


def test_the_shorter_list_of_a_split_can_be_asked_for(birds: Path) -> None:
    (birds / "metadata" / "test" / "image_ids_proxy.txt").write_text("a/2.png")
    (only,) = open_dataset(birds, split="test-proxy")
    whole = {sample.id: sample for sample in open_dataset(birds, split="test")}
    assert (only.id, only.label, only.boxes) == ("a/2.png", whole["a/2.png"].label, whole["a/2.png"].boxes)
    refuses(lambda: open_dataset(birds, split="val-proxy"), "no split 'val'")


def test_a_missing_picture_is_named(birds: Path) -> None:
    (birds / "images" / "a/2.png").unlink()
    refuses(lambda: open_dataset(birds, split="test"), "image_ids.txt line 2", "a/2.png", "is not in")


def test_a_missing_ignore_mask_is_named(masked: Path) -> None:
    (masked / "masks" / "a" / "1_ignore.png").unlink()
    refuses(lambda: open_dataset(masked, split="test"), "line 1", "a/1.png", "a/1_ignore.png")


def test_a_damaged_mask_is_named_when_it_is_opened(masked: Path) -> None:
    (masked / "masks" / "a" / "2_x.png").write_bytes(b"nothing")
    sample = open_dataset(masked, split="test")[1]
    assert sample.open_mask is not None
    refuses(sample.open_mask, "2_x.png")


def test_a_picture_of_another_size_than_its_metadata_is_named_when_it_is_opened(birds: Path) -> None:
    samples = open_dataset(birds, split="test")
    put(birds / "images" / "a/2.png", (51, 20))
    refuses(samples[1].open, "a/2.png", "51 x 20", "50 x 20", "image_sizes.txt")


def test_a_split_that_is_not_there_is_never_replaced_by_another(birds: Path) -> None:
    refuses(lambda: open_dataset(birds, split="val"), "no split 'val'", "it has test")
    refuses(lambda: open_dataset(birds / "images", format="wsol", split="test"), "holds no metadata")


def test_class_names_that_occur_twice_and_text_in_other_encodings_are_refused(birds: Path) -> None:
    (birds / "metadata" / "classes.txt").write_text("wren\nwren\n")
    refuses(lambda: open_dataset(birds, split="test"), "classes.txt line 2", "'wren'", "line 1")
    (birds / "metadata" / "test" / "image_ids.txt").write_bytes(b"\xff\xfea")
    refuses(lambda: open_dataset(birds, split="test"), "image_ids.txt", "UTF-8")


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "count", "classes"),
    [("cub", 2864, 100), ("cars", 1222, 30), ("pets", 740, 37), ("ilsvrc", 1000, 1000)],
)
def test_annotated_photographs_are_read(real_data: Path, name: str, count: int, classes: int) -> None:
    samples = open_dataset(real_data / name, split="test")
    assert (len(samples), len(samples.classes)) == (count, classes)
    assert {sample.label for sample in samples} == set(range(classes))
    for sample in samples[::200]:
        assert sample.open().size == (256, 256) and sample.size is not None
        if sample.open_mask is None:
            assert sample.boxes and all(0 <= b[0] < b[2] <= sample.size[0] for b in sample.boxes)
        else:
            assert set(np.unique(sample.open_mask())) == {0, 1, 255}


@pytest.mark.realdata
def test_photographs_have_as_many_boxes_as_their_readme_says(real_data: Path) -> None:
    samples = open_dataset(real_data / "ilsvrc", split="test")
    counts = [len(sample.boxes or ()) for sample in samples]
    assert sum(counts) == 1605 and sum(count > 1 for count in counts) == 252


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
