"""Maps of many images in a folder: an interrupted run continues, but only with the same images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import sigcam
from sigcam.core.errors import DataError
from sigcam.core.types import ImageSize
from sigcam.data.images import images_from_paths
from sigcam.data.readers.shapes import shapes
from sigcam.data.sample import Sample, Samples
from sigcam.methods import folder
from sigcam.methods.folder import ExplainConfig, MapFolder, explain_samples
from sigcam.methods.placement import place_map
from sigcam.models.preprocess import Preprocess
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.dual import DualBranch
from support.nets import convs

CONFIG = ExplainConfig(branch="centred")


@pytest.fixture
def net() -> DualBranch:
    torch.manual_seed(0)
    model = nn.Sequential(convs(3, 8, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))
    return sigcam.attach(model, example=torch.zeros(1, 3, 64, 64), transform=Preprocess(64, 64))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(5):
        pixels = rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    return tmp_path / "images"


def draw(net: DualBranch, images: Path, config: ExplainConfig = CONFIG, **options: object) -> MapFolder:
    samples = images_from_paths([images])
    return explain_samples(net, samples, images.parent / "out", config, batch_size=2, **options)  # type: ignore[arg-type]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of each call of explain."""
    calls, explain = list[int](), folder.explain

    def counted(net, images, **settings):
        calls.append(len(images))
        return explain(net, images, **settings)

    monkeypatch.setattr(folder, "explain", counted)
    return calls


def test_rows_and_files_are_those_of_explain(net: DualBranch, images: Path) -> None:
    drawn = draw(net, images)
    ex = sigcam.explain(net, sorted(images.iterdir()), branch="centred")
    for row, expected, values in zip(drawn.rows, ex.rows(), ex.maps, strict=True):
        assert row["class"] == expected["class"]
        assert row["logit"] == pytest.approx(expected["logit"], abs=1e-5)
        placed = place_map(values, ImageSize(50, 40), (0, 0, 50, 40), unit=True)
        np.testing.assert_allclose(np.load(images.parent / "out" / row["map"]), placed.numpy(), atol=1e-5)
        with Image.open(images.parent / "out" / row["overlay"]) as overlay:
            assert overlay.size == (50, 40) and row["size"] == [50, 40]


def test_several_classes_have_a_row_and_files_each_and_resume_together(
    net: DualBranch, images: Path, calls: list[int]
) -> None:
    net.class_names = ("tabby, tabby cat", "pug/dog", "?")
    (images / "0.tabby-tabby-cat.png").write_bytes((images / "0.png").read_bytes())
    out, drawn = images.parent / "out", draw(net, images, classes=[0, 2, 1, 0])
    assert [(row["image"], row["class"]) for row in drawn.rows[:3]] == [("0.png", k) for k in (0, 2, 1)]
    names = [row["map"] for row in drawn.rows]
    assert len(set(names)) == len(names) == 18 and all((out / name).is_file() for name in names)
    assert names[:3] == ["0.tabby-tabby-cat.map.npy", "0.2.map.npy", "0.pug-dog.map.npy"]
    for k in (0, 1, 2):
        one = explain_samples(net, images_from_paths([images]), images.parent / str(k), CONFIG, classes=[k])
        for row in (row for row in drawn.rows if row["class"] == k):
            alone = next(each for each in one.rows if each["image"] == row["image"])
            a, b = (np.load(f) for f in (out / row["map"], images.parent / str(k) / alone["map"]))
            assert np.abs(a - b).max() < 1e-5 and row["box"] == alone["box"]
    calls.clear()
    (out / "1.2.map.png").unlink()
    again = draw(net, images, classes=[0, 2, 1]).rows
    assert calls == [1] and [row["map"] for row in again] == names
    assert [row["box"] for row in again] == [row["box"] for row in drawn.rows]


def test_a_large_picture_has_a_smaller_map_and_a_box_in_its_own_pixels(
    net: DualBranch, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = draw(net, images).rows
    monkeypatch.setattr(folder, "DRAWN_SIDE", 25)
    small = explain_samples(net, images_from_paths([images]), images.parent / "small", CONFIG).rows
    assert [row["box"] for row in small] == [row["box"] for row in whole]
    assert np.load(images.parent / "small" / small[0]["map"]).shape == (20, 25)
    assert small[0]["size"] == [50, 40]


def test_of_a_preprocessing_of_ones_own_maps_keep_the_networks_size(net: DualBranch, images: Path) -> None:
    known = net.transform
    assert known is not None
    net.transform = lambda image: known(image)
    row = draw(net, images).rows[0]
    assert row["size"] == [64, 64] and np.load(images.parent / "out" / row["map"]).shape == (64, 64)


def test_the_scale_is_probability_only_where_branch_method_and_settings_have_it(net: DualBranch) -> None:
    assert ExplainConfig().checked().with_best_scale(net).scale == "unit"  # not calibrated
    net.calibration = BranchCalibration(maps={1.0: LogitScale()})
    best = ExplainConfig().with_best_scale(net)
    assert (best.scale, best.clamp) == ("probability", False)
    for config in (
        ExplainConfig("score-cam"),
        ExplainConfig(branch="centred"),
        ExplainConfig(clamp=True),
        ExplainConfig(target="finer-cam"),
        ExplainConfig(zoom=2.0),
        ExplainConfig(stride=1),
        ExplainConfig(layers=("0",)),
        ExplainConfig(eigen_smooth=True),
    ):
        assert config.with_best_scale(net).scale == "unit"


def test_what_was_drawn_is_not_drawn_again_until_an_image_or_a_setting_changes(
    net: DualBranch, images: Path, calls: list[int]
) -> None:
    first = draw(net, images)
    assert calls == [2, 2, 1]
    calls.clear()
    assert draw(net, images).rows == first.rows and calls == []
    Image.new("RGB", (40, 50), "red").save(images / "3.png")
    os.utime(images / "3.png", ns=(1, 1))
    again = draw(net, images).rows
    assert again[3] != first.rows[3] and calls == [1]
    assert [row for row in again if row["image"] != "3.png"] == first.rows[:3] + first.rows[4:]
    calls.clear()
    draw(net, images, threshold=0.5)
    assert sum(calls) == 5
    calls.clear()
    draw(net, images, ExplainConfig(branch="softmax"))
    assert sum(calls) == 5


def test_a_damaged_or_removed_checkpoint_is_no_error(net: DualBranch, images: Path, calls: list[int]) -> None:
    first = draw(net, images)
    assert first.checkpoint.path is not None
    first.checkpoint.path.write_bytes(first.checkpoint.path.read_bytes()[:100])
    calls.clear()
    again = draw(net, images)
    assert again.rows == first.rows and sum(calls) == 5
    again.checkpoint.remove()
    assert not first.checkpoint.path.exists()


def test_unreadable_images_are_skipped_and_tried_again(net: DualBranch, images: Path) -> None:
    good = (images / "1.png").read_bytes()
    (images / "1.png").write_bytes(b"nothing")
    drawn = draw(net, images, workers=1)
    assert [id for id, _ in drawn.skipped] == ["1.png"] and len(drawn.rows) == 4
    (images / "1.png").write_bytes(good)
    assert len(draw(net, images).rows) == 5
    for path in images.iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="none of the 5 images could be read"):
        draw(net, images)


def test_only_what_was_replaced_added_or_damaged_is_drawn_again(
    net: DualBranch, images: Path, calls: list[int]
) -> None:
    first, out = draw(net, images), images.parent / "out"
    calls.clear()
    (images / "0.png").unlink()
    Image.new("RGB", (40, 50), "blue").save(images / "new.png")
    again = draw(net, images)
    assert calls == [1] and again.rows[:4] == first.rows[1:] and again.rows[4]["image"] == "new.png"
    assert not list(out.glob("0.map.*"))  # as if the run had begun without it

    calls.clear()
    pixels = (out / "2.map.npy").read_bytes()
    (out / "1.map.png").unlink()
    (out / "2.map.npy").write_bytes(pixels[:1000])
    assert draw(net, images).rows == again.rows and calls == [2]
    assert (out / "2.map.npy").read_bytes() == pixels and (out / "1.map.png").is_file()


def test_a_replacement_of_the_same_size_and_date_is_drawn_again(net: DualBranch, images: Path) -> None:
    first, path, other = draw(net, images), images / "2.bmp", images.parent / "other.bmp"
    Image.new("RGB", (40, 50), "blue").save(path)
    Image.new("RGB", (40, 50), "red").save(other)
    assert path.stat().st_size == other.stat().st_size
    before = draw(net, images).rows
    shutil.copystat(path, other)
    other.replace(path)
    changed = [a["image"] for a, b in zip(before, draw(net, images).rows, strict=True) if a != b]
    assert len(first.rows) == 5 and changed == ["2.bmp"]


def test_a_name_that_changes_with_its_neighbours_is_drawn_under_the_new_one(
    net: DualBranch, images: Path, calls: list[int]
) -> None:
    draw(net, images)
    Image.new("RGB", (40, 50), "blue").save(images / "1.bmp")
    calls.clear()
    drawn = draw(net, images)
    names = {path.name for path in (images.parent / "out").glob("*.npy")}
    assert sum(calls) == 2 and names == {row["map"] for row in drawn.rows}
    assert {"1.bmp.map.npy", "1.png.map.npy"} < names and "1.map.npy" not in names


def test_images_without_a_file_are_known_by_what_they_are_drawn_from(
    net: DualBranch, tmp_path: Path, calls: list[int]
) -> None:
    def plain(colour: str) -> Samples:
        return Samples((Sample("x", lambda: Image.new("RGB", (40, 50), colour)),), ())

    birds, others = shapes(3, split="test"), shapes(3, split="test", seed=1)
    for samples, new in (
        (birds, 3),
        (birds, 0),
        (others, 3),
        (plain("red"), 1),
        (plain("red"), 0),
        (plain("blue"), 1),
    ):
        calls.clear()
        explain_samples(net, samples, tmp_path / "out", CONFIG)
        assert sum(calls) == new
