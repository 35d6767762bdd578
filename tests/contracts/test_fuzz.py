"""Every file that sigcam reads may be damaged or hostile: the answer is a result or a sentence."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sigcam
from sigcam.bench.render import html
from sigcam.bench.runner import _read_result
from sigcam.core.checkpoint import Checkpoint
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from sigcam.data.images import open_image, open_levels, open_masks, read_image_size
from sigcam.data.maps import open_map
from sigcam.data.registry import READERS
from sigcam.data.sample import Samples
from sigcam.models.classifier import load_classifier, save_classifier
from sigcam.network.branch_file import load
from sigcam.training.feature_cache import list_caches
from sigcam.training.features import extract, read_features
from support import fuzz
from support.data_files import (
    GOLDFISH,
    SHARK,
    TENCH,
    box_xml,
    make_class_folders,
    make_cub,
    put,
    put_mask,
    write,
)
from support.folders import network, tree
from support.fuzz import (
    STATM,
    Damage,
    damage_bytes,
    damage_json,
    damage_npy,
    damage_png,
    damage_safetensors,
    damage_text,
    damage_zip,
    failures,
)
from support.soak import soak_count
from support.tiny import Gap, attached, images

Target = tuple[list[Path], Callable[[], object], Damage]  # files to damage one at a time, how they are read
COUNT = soak_count(60, 2000)


def pixels(channels: int = 3, kind: type = np.uint8, top: float = 255) -> np.ndarray[Any, Any]:
    shape = (20, 24, channels) if channels > 1 else (20, 24)
    return (np.random.default_rng(0).random(shape) * top).astype(kind)


def branch(folder: Path) -> Target:
    torch.manual_seed(0)
    net = attached(Gap())
    net.class_names = ("hawk", "owl", "heron", "wren")
    net.save(folder / "branch.safetensors")

    def read() -> None:
        back = load(folder / "branch.safetensors", net.original)
        assert back.class_names is None or [type(name) for name in back.class_names] == [str] * 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a branch that says it is not fitted
            explanation = sigcam.explain(back, images(1))
        json.dumps([explanation.rows(), back.fitted, back.recipe])
        back.save(folder / "again.safetensors")

    return [folder / "branch.safetensors"], read, damage_safetensors


MODEL = """
import torch
from torch import nn
def make(num_classes=4):
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(6, num_classes))
"""


def _classifier(folder: Path, weights: Path) -> Callable[[], None]:
    write(folder / "model.py", MODEL)

    def read() -> None:
        found = load_classifier(f"file:{folder / 'model.py'}:make", weights=weights)
        with torch.no_grad():
            found.model(images(1))
        assert found.classes is None or all(isinstance(name, str) for name in found.classes)

    return read


def _model(folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    return load_classifier(f"file:{write(folder / 'model.py', MODEL)}:make").model


def classifier(folder: Path) -> Target:
    path = folder / "classifier.safetensors"
    save_classifier(path, _model(folder), spec="file:model.py:make", classes=["a", "b", "c", "d"])
    return [path], _classifier(folder, path), damage_safetensors


def state_dict(folder: Path) -> Target:
    path = folder / "weights.pth"
    torch.save({"state_dict": _model(folder).state_dict(), "classes": ["a", "b", "c", "d"]}, path)
    return [path], _classifier(folder, path), damage_zip(damage_bytes)


def old_state_dict(folder: Path) -> Target:
    path = folder / "weights.pth"
    torch.save(_model(folder).state_dict(), path, _use_new_zipfile_serialization=False)
    return [path], _classifier(folder, path), damage_bytes


def checkpoint(folder: Path) -> Target:
    state = {"rows": ["a", "b"], "done": 3, "weights": torch.arange(40.0), "nested": {"x": [1, 2.5]}}
    work = Checkpoint(folder / "work.pt", {"labels": [1, 2], "files": "x"})
    work.save(state)

    def read() -> None:
        found = work.load()
        assert all(isinstance(name, str) for name in work.differences())
        if found is not None:
            assert torch.equal(found.pop("weights"), state["weights"])
            assert found == {key: value for key, value in state.items() if key != "weights"}

    return [folder / "work.pt"], read, damage_bytes


def feature_cache(folder: Path) -> Target:
    samples, net, cache = tree(folder / "data", 70), network(), folder / "cache"
    fresh = extract(net, samples, FitConfig(), cache=cache).views[0].clone()
    (home,) = (path for path in cache.iterdir() if path.is_dir())

    def read() -> None:
        for entry in list_caches(cache):
            assert isinstance(entry.about.get("model", "?"), str) and entry.size >= 0
        assert torch.equal(extract(net, samples, FitConfig(), cache=cache).views[0], fresh)

    return [home / "about.json", home / "features.bin", home / "sums.bin"], read, damage_bytes


def cache_description(folder: Path) -> Target:
    files, _, _ = feature_cache(folder)
    root = files[0].parents[1]

    def read() -> None:
        (entry,) = list_caches(root)
        json.dumps({name: entry.about.get(name) for name in ("model", "layer", "view", "images")})

    return files[:1], read, damage_json


def features(folder: Path) -> Target:
    path, random = folder / "features.npz", np.random.default_rng(0)
    rows = random.random((8, 6)).astype(np.float16)
    np.savez(path, plain=rows, mirrored=rows, labels=np.arange(8) % 4)
    net = attached(Gap())

    def read() -> None:
        assert len(extract(net, read_features(path), FitConfig(views=2))) <= 8 * 6

    return [path], read, damage_zip(damage_npy)


def _dataset(name: str, root: Path, split: str = "train") -> Callable[[], None]:
    """Read a data set, and all of its images and masks; what is said of them is right."""

    def read() -> None:
        samples: Samples = READERS[name](root, split=split)
        json.dumps([sample.id for sample in samples])
        for sample in samples:
            assert sample.label is None or 0 <= sample.label < len(samples.classes)
            assert sample.path is None or sample.path.resolve().is_relative_to(root.resolve()), sample.path
            size = sample.open().size
            for x0, y0, x1, y1 in sample.boxes or ():
                assert 0 <= x0 <= x1 <= (sample.size or size)[0] and 0 <= y0 <= y1 <= (sample.size or size)[1]
            if sample.open_mask is not None:
                assert set(np.unique(sample.open_mask())) <= {0, 1, 255}

    return read


def wsol_boxes(folder: Path) -> Target:
    home = folder / "metadata/train"
    for name, size in (("a/1.png", (40, 30)), ("a/2.png", (50, 20)), ("b c/3.png", (30, 30))):
        put(folder / "images" / name, size)
    write(home / "image_ids.txt", "a/1.png\na/2.png\nb c/3.png")
    write(home / "class_labels.txt", "a/1.png,0\na/2.png,0\nb c/3.png,1\n")
    write(home / "image_sizes.txt", "a/1.png,40,30\na/2.png,50,20\nb c/3.png,30,30")
    write(
        home / "localization.txt",
        "a/1.png,1,2,10,20\na/1.png,5,5,40,30\na/2.png,0,0,49,19\nb c/3.png,3,4,3,4\n",
    )
    write(folder / "metadata/classes.txt", "wren\ntern\n")
    return [*sorted(home.iterdir()), folder / "metadata/classes.txt"], _dataset("wsol", folder), damage_text


def wsol_masks(folder: Path) -> Target:
    home = folder / "metadata/train"
    for name in ("1", "2"):
        put(folder / f"images/{name}.png")
        put_mask(folder / f"masks/{name}.png", [[0, 1], [255, 0]])
    write(home / "image_ids.txt", "1.png\n2.png")
    write(home / "class_labels.txt", "1.png,0\n2.png,1")
    write(home / "localization.txt", "1.png,1.png,2.png\n2.png,2.png,\n")
    return sorted(home.iterdir()), _dataset("wsol", folder), damage_text


def cub_lists(folder: Path) -> Target:
    make_cub(folder)
    return sorted(folder.glob("*.txt")), _dataset("cub", folder), damage_text


def pet_lists(folder: Path) -> Target:
    for name in ("Abyssinian_1", "american_bulldog_10"):
        put(folder / f"images/{name}.jpg")
        put_mask(folder / f"annotations/trimaps/{name}.png", [[1, 2, 3], [2, 1, 3]])
    path = write(
        folder / "annotations/trainval.txt", "#name class\nAbyssinian_1 1 1 1\namerican_bulldog_10 2 2 1\n"
    )
    return [path], _dataset("pets", folder), damage_text


def boxes_csv(folder: Path) -> Target:
    make_class_folders(folder)
    lines = (
        'image,x0,y0,x1,y1,class\ncat/1.png,0,0,39,29,cat\n"cat/2 b.png",1,2,3,4,dog\ndog/3.png,5,5,6,6,\n'
    )
    return [write(folder / "boxes.csv", lines)], _dataset("folder", folder), damage_text


def box_files(folder: Path) -> Target:
    files = list[Path]()
    for synset in (TENCH, GOLDFISH):
        put(folder / f"train/{synset}/{synset}_1.png")
        text = box_xml((synset, 1, 2, 30, 20), (SHARK, 0, 0, 5, 5)).replace("><", ">\n<")
        files.append(write(folder / f"Annotations/train/{synset}/{synset}_1.xml", text))
    files.append(write(folder / "LOC_synset_mapping.txt", f"{TENCH} tench\n{GOLDFISH} goldfish\n"))
    return files, _dataset("ilsvrc", folder), damage_xml


ENTITIES = "".join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(12))
BOMB = (
    f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a0 "lol">{ENTITIES}]><annotation>&a12;</annotation>'.encode()
)
OUTSIDE = (
    b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><annotation>&a;</annotation>'
)


def damage_xml(data: bytes, random: Any) -> bytes:
    """Damage the text, or put entities or deep nesting into it."""
    match random.randrange(12):
        case 0:
            return random.choice((BOMB, OUTSIDE, b'<?xml version="1.0" encoding="utf-7"?>' + data))
        case 1:
            tag = random.choice((b"object", b"a"))
            return data.replace(
                b"</annotation>", b"<%s>" % tag * 50_000 + b"</%s>" % tag * 50_000 + b"</annotation>"
            )
        case _:
            return damage_text(data, random)


def car_files(folder: Path) -> Target:
    io = pytest.importorskip("scipy.io", reason="scipy writes the MATLAB files of this test")
    names = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
    rows = np.zeros((1, 2), dtype=[(name, object) for name in names])
    for i in range(2):
        values = (1, 3, 40, 30, i + 1, f"0000{i + 1}.jpg")
        for name, value in zip(names, values, strict=True):
            rows[0, i][name] = value
        put(folder / f"cars_train/0000{i + 1}.jpg")
    classes = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]], dtype=object)
    io.savemat(folder / "cars_train_annos.mat", {"annotations": rows})
    io.savemat(folder / "cars_meta.mat", {"class_names": classes})
    return [folder / "cars_train_annos.mat", folder / "cars_meta.mat"], _dataset("cars", folder), damage_bytes


def npy_map(folder: Path) -> Target:
    path = folder / "x.map.npy"
    np.save(path, pixels(1, np.float32, 1))
    return [path], partial(_map, path), damage_npy


def png_map(folder: Path) -> Target:
    for name, kind, top in (("a.png", np.uint8, 255), ("b.png", np.uint16, 65535)):
        Image.fromarray(pixels(1, kind, top)).save(folder / name)
    files = sorted(folder.iterdir())
    return files, lambda: [_map(path) for path in files], damage_png


def _map(path: Path) -> None:
    values = open_map(path, "x.jpg")
    assert values.ndim == 2 and values.dtype == np.float32 and values.min() >= 0 and values.max() <= 1


def _images(*saved: tuple[str, Image.Image, dict[str, Any]]) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        for name, image, options in saved:
            image.save(folder / name, **options)
        files = sorted(folder.iterdir())

        def read() -> None:
            for path in files:
                size = open_image(path).size
                assert read_image_size(path) == size, (read_image_size(path), size)

        return files, read, damage_png

    return make


def mask_files(folder: Path) -> Target:
    for name, mode in (("a.png", "L"), ("b.png", "P"), ("c.png", "RGBA"), ("d.tif", "1"), ("e.tif", "F")):
        Image.fromarray(pixels(1)).convert(mode).save(folder / name)
    Image.fromarray(pixels(1, np.uint16, 65535)).save(folder / "f.png")
    files = sorted(folder.iterdir())

    def read() -> None:
        for path in files:
            assert set(np.unique(open_masks([path], [path]))) <= {0, 1, 255}
            assert open_levels(path).dtype == np.uint8

    return files, read, damage_png


def bench_result(folder: Path) -> Target:
    row = {
        "row": "sigmoid",
        "dataset": "cub",
        "method": "cam",
        "branch": "sigmoid",
        "clamp": True,
        "zoom": 1.0,
    }
    row |= {"images": 3, "max_box_acc": 50.0, "intervals": {"max_box_acc": [40.0, 60.0]}}
    row |= {"delta": {"max_box_acc": [1.0, 0.5, 2.0]}, "beside": {}, "published": {"max_box_acc": 49.0}}
    about = {"command": "sigcam bench", "date": "today", "foot": "Images."}
    write(folder / "table2.json", json.dumps({"table": "table2", **about, "rows": [row]}))
    over = {
        "table": "overhead",
        **about,
        "backbone": "x",
        "dataset": "cub",
        "threads": 2,
        "parameters": {"a": 1},
    }
    write(folder / "overhead.json", json.dumps({**over, "ms_per_image": {"a": 1.5}, "training": {"s": 2.0}}))
    files = sorted(folder.iterdir())
    return files, lambda: html([r for path in files if (r := _read_result(path))], []), damage_json


RGB, GREY = Image.fromarray(pixels()), Image.fromarray(pixels(1))
EXIF = Image.Exif()
EXIF[0x0112] = 6
DEEP_GREY = Image.fromarray(pixels(1, np.uint16, 65535))
FLOATS = Image.fromarray(pixels(1, np.float32, 1))
TARGETS: dict[str, Callable[[Path], Target]] = {
    "branch": branch,
    "classifier": classifier,
    "state dict": state_dict,
    "old state dict": old_state_dict,
    "checkpoint": checkpoint,
    "feature cache": feature_cache,
    "cache description": cache_description,
    "features": features,
    "wsol boxes": wsol_boxes,
    "wsol masks": wsol_masks,
    "cub": cub_lists,
    "pets": pet_lists,
    "boxes.csv": boxes_csv,
    "xml": box_files,
    "matlab": car_files,
    "npy map": npy_map,
    "png map": png_map,
    "masks": mask_files,
    "jpeg": _images(
        ("a.jpg", RGB, {"exif": EXIF}),
        ("b.jpg", RGB, {"progressive": True}),
        ("c.jpg", RGB.convert("CMYK"), {}),
    ),
    "png": _images(
        ("a.png", RGB, {"exif": EXIF}),
        ("b.png", RGB.convert("P"), {"transparency": 0}),
        ("c.png", DEEP_GREY, {}),
    ),
    "webp": _images(
        ("a.webp", RGB, {}),
        ("b.webp", RGB.convert("RGBA"), {"lossless": True}),
        ("c.webp", RGB, {"save_all": True, "append_images": [RGB], "exif": EXIF}),
    ),
    "gif": _images(
        ("a.gif", RGB, {}),
        ("b.gif", RGB, {"save_all": True, "append_images": [GREY]}),
        ("c.gif", GREY, {"interlace": 1}),
    ),
    "bmp": _images(("a.bmp", RGB, {}), ("b.bmp", RGB.convert("P"), {}), ("c.bmp", RGB.convert("1"), {})),
    "tiff": _images(
        ("a.tif", RGB, {"compression": "tiff_lzw", "exif": EXIF}),
        ("b.tif", FLOATS, {}),
        ("c.tif", RGB.convert("LAB"), {}),
        ("d.tif", GREY.convert("1"), {"compression": "group4"}),
        ("e.tif", DEEP_GREY, {"compression": "tiff_adobe_deflate"}),
        ("f.tif", RGB, {"compression": "jpeg"}),
    ),
    "bench result": bench_result,
}


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="the memory of a process is measured in /proc")
@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_gives_a_result_or_a_sentence(name: str, tmp_path: Path) -> None:
    files, read, damage = TARGETS[name](tmp_path)
    assert failures(files, read, damage, COUNT, name) == {}


def _endless() -> None:
    while True:
        pass


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.skipif(not STATM.exists(), reason="the memory of a process is measured in /proc")
@pytest.mark.parametrize(
    ("misbehave", "kind"),
    [
        (lambda: _raise(KeyError("x")), "KeyError"),
        (lambda: _raise(DataError("two\nlines")), "several lines"),
        (lambda: _raise(DataError("x" * 20_000)), "a long sentence"),
        (_endless, "TooSlow"),
        (lambda: np.ones(10**8, np.uint8).sum(), "TooLarge"),
        (lambda: _raise(DataError("as it should be")), None),
    ],
)
def test_a_reader_that_breaks_the_promise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misbehave: Callable[[], object], kind: str | None
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "MEMORY", 5 * 10**7)
    path = write(tmp_path / "x", "whole")
    found = failures([path], lambda: path.read_text() == "whole" or misbehave(), lambda data, _: b"-", 1, "x")
    assert [name.split(" in ")[0].strip() for name in found] == ([kind] if kind else [])
