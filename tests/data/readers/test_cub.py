"""CUB-200-2011: the published lists are read, mistakes in them are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from sigcam.data.registry import guess_format, open_dataset
from support.data_files import (
    check_paths,
    make_cub,
    mask_of,
    put_mask,
    refuses,
    write,
)


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    return make_cub(tmp_path / "CUB_200_2011")


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
