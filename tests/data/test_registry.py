"""Data sets are recognized and opened by name; a reader is added in one place."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sigcam.data.registry import READERS, guess_format, open_dataset
from sigcam.data.sample import Samples
from support.data_files import (
    make_class_folders,
    make_cub,
    put,
    refuses,
    says,
    write,
)


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    return make_cub(tmp_path / "CUB_200_2011")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return make_class_folders(tmp_path / "data")


def test_importing_data_imports_no_torch_numpy_or_pillow() -> None:
    code = "import sys, sigcam.data; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_open_dataset_guesses_shapes_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "shapes" / "cat" / "1.png")
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset("shapes:5", split="test")) == 5
    assert open_dataset("shapes:1", split="test")[0].id == "test/000000"
    for place in ("./shapes", Path("shapes"), str(tmp_path / "shapes")):
        assert open_dataset(place).classes == ("cat",)
    assert open_dataset("shapes", format="folder").classes == ("cat",)


def test_a_reader_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_nothing(path: str | Path, *, split: str) -> Samples:
        return Samples((), (str(path), split))

    monkeypatch.setitem(READERS, "nothing", read_nothing)
    assert open_dataset("here", format="nothing", split="val").classes == ("here", "val")


@pytest.mark.slow
def test_a_reader_added_from_outside_works_everywhere(tmp_path: Path) -> None:
    put(tmp_path / "set" / "test" / "cat.png")
    (tmp_path / "set" / "mine.txt").touch()
    script = write(tmp_path / "script.py", PLUGIN)
    words = [sys.executable, script, tmp_path / "set", ROOT / "scripts"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
    facts, help, docs = done.stdout.split("=====")
    assert facts.split() == ["mine", "cat.png", "cat.png", "cat.png", "mine", "True"]
    assert "ilsvrc, mine" in " ".join(help.split())
    assert "| `mine` | my images: `mine.txt` |" in docs and "| `cub` | CUB-200-2011" in docs


PLUGIN = """
import sys
from functools import partial
from pathlib import Path

import sigcam
from sigcam.data import READERS, Reader, Sample, Samples
from sigcam.data.images import open_image


def read_mine(path, *, split="train"):
    files = sorted((Path(path) / split).glob("*.png"))
    return Samples(tuple(Sample(f.name, partial(open_image, f), label=0, path=f) for f in files), ("mine",))


READERS["mine"] = Reader("my images: `mine.txt`", read_mine, lambda path: (Path(path) / "mine.txt").is_file())
path = sys.argv[1]
print(sigcam.list_readers()[-1])
print(sigcam.open_dataset(path, split="test")[0].id)
print(sigcam.open_dataset(path, format="mine", split="test")[0].id)
print(READERS["mine"](path, split="test")[0].id)

from sigcam.cli.main import main
from sigcam.reports.inspection import inspect_data

facts = inspect_data(path)
print(facts["format"], facts["images"] == 1)
print("=====")
sys.path.insert(0, sys.argv[2])
sys.argv = ["sigcam", "explain", "--help"]
try:
    main()
except SystemExit:
    pass
print("=====")
import document_lists
print(document_lists.on_page_markdown("<!-- list: readers -->\\n<!-- end -->"))
"""
ROOT = Path(__file__).resolve().parents[2]


def test_open_dataset_names_what_is_wrong() -> None:
    says(
        "there is no data format 'coco': choose one of shapes, folder, wsol, cub, cars, pets, ilsvrc.",
        partial(open_dataset, "x", format="coco"),
    )
    for bad in ("shapes:many", "shapes:", "birds"):
        says(
            f"cannot read {bad!r} as shapes: write shapes, or shapes:500 for a count.",
            partial(open_dataset, bad, format="shapes"),
        )


def test_every_reader_can_be_named_and_class_folders_are_the_rest(folders: Path, cub: Path) -> None:
    assert set(READERS) >= {"shapes", "folder", "wsol", "cub", "cars", "pets", "ilsvrc"}
    assert guess_format("shapes:20") == "shapes" and guess_format(folders) == "folder"
    assert guess_format(cub / "images") == "folder"
    assert len(open_dataset(cub, format="cub", split="test")) == 1
    refuses(lambda: open_dataset(folders, format="cub"), "images.txt")
    refuses(lambda: open_dataset(folders, format="cars"), "cars_train_annos.mat")
    refuses(lambda: open_dataset(folders, format="pets"), "no split 'train'", "annotations")
    refuses(lambda: open_dataset(folders, format="ilsvrc"), "no split 'train'", "neither")
