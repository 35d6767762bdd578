"""Oxford-IIIT Pet: the published lists are read, mistakes in them are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.registry import guess_format, open_dataset
from support.data_files import (
    check_paths,
    mask_of,
    put,
    put_mask,
    refuses,
    write,
)


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


def test_a_breed_of_pets_has_one_number(tmp_path: Path) -> None:
    at = tmp_path / "annotations"
    at.mkdir()
    (tmp_path / "images").mkdir()
    for name in ("cat_1", "cat_2"):
        Image.new("RGB", (9, 9)).save(tmp_path / "images" / f"{name}.jpg")
    (at / "trainval.txt").write_text("cat_1 1 1 1\ncat_2 9 1 1\n")
    with pytest.raises(DataError, match=r"trainval\.txt line 2: image cat_2 has class 9; cat is 1 elsewhere"):
        open_dataset(tmp_path, format="pets")
