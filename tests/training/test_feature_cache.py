"""The feature cache: found again, never trusted blindly, damaged parts alone made anew."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sigcam.core.checkpoint import work_key
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from sigcam.data.sample import Sample, Samples
from sigcam.models.preprocess import Preprocess
from sigcam.training import feature_cache as cache_room
from sigcam.training.branch import fit
from sigcam.training.feature_cache import (
    IMAGES_PER_CHUNK,
    SUM,
    FeatureStore,
    clear_caches,
    find_store,
    list_caches,
)
from sigcam.training.feature_reader import HeadInputs
from support.folders import CLASSES, GIVEN, network, tree


def fitted(samples: Samples, root: Path | None, config: FitConfig = GIVEN) -> tuple[Tensor, int]:
    """The branch's weights, and how many images passed the backbone."""
    net, seen = network(), list[int]()

    compute = HeadInputs.compute

    def counted(inputs: HeadInputs, images: Tensor, *args: Any) -> Tensor:
        seen.append(len(images))
        return compute(inputs, images, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadInputs, "compute", counted)
        fit(net, samples, config, cache=root)
    return net.last_layer("sigmoid").get_parameter("weight").detach().clone(), sum(seen)


def only(root: Path) -> Path:
    (found,) = (path for path in root.iterdir() if path.is_dir())
    return found


@pytest.fixture
def made(tmp_path: Path) -> tuple[Samples, Path, Tensor, int]:
    samples, root = tree(tmp_path / "data"), tmp_path / "cache"
    weight, first = fitted(samples, root)
    return samples, root, weight, first - len(samples)  # what a fit takes besides


# ------------------------------------------------------------------------------------------------ finding


@pytest.mark.slow
def test_a_second_fit_runs_no_image_and_gives_the_same_branch(made: Any) -> None:
    samples, root, weight, spare = made
    again, seen = fitted(samples, root)
    assert torch.equal(again, weight)
    assert seen == spare
    without, _ = fitted(samples, None)
    assert torch.equal(without, weight)
    two, seen = fitted(samples, root, FitConfig(l2=0.1, views=2))
    assert seen == spare + len(samples)  # the plain view was there
    assert not torch.equal(two, weight)
    assert len(list_caches(root)) == 2


@pytest.mark.slow
def test_other_weights_pictures_or_preprocessing_are_another_cache(made: Any) -> None:
    samples, root, _, spare = made
    net = network()
    with torch.no_grad():
        net.model.body[0].weight += 0.01
    fit(net, samples, GIVEN, cache=root)
    net = network()
    net.transform = Preprocess(16, 16, mean=(0.4, 0.4, 0.4))
    fit(net, samples, GIVEN, cache=root)
    assert fitted(samples[:100], root)[1] == spare + 100
    assert fitted(samples, root, FitConfig(l2=0.1, precision="bfloat16"))[1] == spare + len(samples)
    assert len(list_caches(root)) == 5
    names = {held.about["images"] for held in list_caches(root)}
    assert names == {100, 150}


def test_a_transform_that_has_no_name_is_not_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples, net = tree(tmp_path / "data", 24), network()
    plain = Preprocess(16, 16)
    fit(net, samples, GIVEN, cache=tmp_path / "cache", transform=lambda picture: plain(picture))
    assert "a transform of your own has no name" in caplog.text
    assert not list_caches(tmp_path / "cache")


def test_labels_may_change_without_new_features(made: Any) -> None:
    samples, root, _, spare = made
    turned = tuple(Sample(s.id, s.open, (s.label + 1) % 4, path=s.path) for s in samples)
    assert fitted(Samples(turned, CLASSES), root)[1] == spare


def test_the_key_of_a_cache_holds_all_that_features_depend_on(tmp_path: Path) -> None:
    net = network()
    with torch.no_grad():
        for tensor in net.model.parameters():
            tensor.copy_((torch.arange(tensor.numel()) % 7 - 3).reshape(tensor.shape) / 8)
    samples = list[Sample]()
    for i in range(8):
        path = tmp_path / f"{i}.png"
        Image.new("RGB", (16, 16), (30 * i, 255 - 30 * i, 60 * (i % 4))).save(path)
        samples.append(Sample(path.name, partial(Image.open, path), i % 4, path=path))
    data = Samples(tuple(samples), CLASSES)
    fit(net, data, FitConfig(l2=0.1, views=2), cache=tmp_path / "cache")
    stored = list_caches(tmp_path / "cache")
    assert {entry.about["view"] for entry in stored} == {0, 1}
    for entry in stored:
        facts = entry.about
        assert (
            facts
            | {
                "model": "Gap",
                "graph": "b09d0a16e372f625",
                "weights": "1ef065556a4b48a310f4720ba1a1e104",  # of what precedes the last layer
                "layer": "body",
                "heads": ["fc"],
                "autocast": False,
                "optimized": True,
                "device": "cpu",
                "threads": torch.get_num_threads(),
                "software": work_key(None),
                "shape": [6],
                "precision": "float16",
                "images": 8,
            }
            == facts
        )
        assert {"view", "transform", "outputs"} < facts.keys()
        assert find_store(entry.folder.parent, data, (6,), "float16", facts).folder == entry.folder
    mirrored = find_store(tmp_path, data, (6,), "float16", {"model": "Gap", "view": 1})
    assert mirrored.folder.name == "dfdb8b0dc4324e108538b5d4"  # the same in every process and release


# ------------------------------------------------------------------------------------------------- damage


def test_a_flipped_byte_costs_its_chunk_and_no_more(made: Any) -> None:
    samples, root, weight, spare = made
    file = only(root) / "features.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    again, seen = fitted(samples, root)
    assert torch.equal(again, weight)
    assert seen == spare + IMAGES_PER_CHUNK
    assert fitted(samples, root)[1] == spare


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["background", "zoom"])
def test_a_flipped_byte_among_the_backgrounds_is_computed_again(tmp_path: Path, kind: str) -> None:
    samples, root = tree(tmp_path / "data"), tmp_path / "cache"
    config = FitConfig(l2=0.1, background=1.0, zooms=(1.0, 2.0))
    weight, first = fitted(samples, root, config)
    spare = fitted(samples, root, config)[1]
    stores = [entry.folder for entry in list_caches(root)]
    chosen = [
        entry.folder
        for entry in list_caches(root)
        if "background" in entry.about and ("zoom" in entry.about) == (kind == "zoom")
    ]
    assert len(stores) == 4 and len(chosen) == 1
    file = chosen[0] / "features.bin"
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    again, seen = fitted(samples, root, config)
    assert torch.equal(again, weight) and file.read_bytes() == whole
    assert seen == spare + IMAGES_PER_CHUNK < first
    assert fitted(samples, root, config)[1] == spare


@pytest.mark.slow
@pytest.mark.parametrize("name", ["features.bin", "sums.bin"])
def test_a_truncated_or_missing_file_is_made_whole(made: Any, name: str) -> None:
    samples, root, weight, spare = made
    file = only(root) / name
    os.truncate(file, IMAGES_PER_CHUNK * 6 * 2 if name == "features.bin" else SUM)  # the first chunk stays
    again, seen = fitted(samples, root)
    assert torch.equal(again, weight)
    assert seen == spare + len(samples) - IMAGES_PER_CHUNK
    file.unlink()
    assert torch.equal(fitted(samples, root)[0], weight)


def test_a_changed_picture_costs_its_chunk(made: Any) -> None:
    samples, root, weight, spare = made
    path = samples[100].path
    Image.new("RGB", (16, 16), "white").save(path)
    os.utime(path, (1, 1))
    again, seen = fitted(samples, root)
    assert seen == spare + IMAGES_PER_CHUNK
    assert not torch.equal(again, weight)


def test_a_picture_that_changes_while_features_are_computed_is_computed_again(tmp_path: Path) -> None:
    samples, root = tree(tmp_path / "data", 24), tmp_path / "cache"
    compute = HeadInputs.compute

    def replaced(inputs: HeadInputs, images: Tensor, *args: Any) -> Tensor:
        assert samples[0].path is not None
        Image.new("RGB", (16, 16), (200, 10, 90)).save(samples[0].path)  # after it was read
        return compute(inputs, images, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadInputs, "compute", replaced)
        fit(network(), samples, GIVEN, cache=root)
    again, _ = fitted(samples, root)
    assert torch.equal(again, fitted(samples, None)[0])


def test_a_picture_that_cannot_be_read_is_named_every_time_until_it_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples, root = tree(tmp_path / "data"), tmp_path / "cache"
    path = samples[70].path
    assert path is not None
    good = path.read_bytes()
    path.write_bytes(b"no picture")
    for _ in range(2):
        result = fit(network(), samples, GIVEN, cache=root)
        assert [name for name, _ in result.skipped] == [samples[70].id]
        assert "not an image" in result.skipped[0][1]
        assert result.images == len(samples) - 1
    path.write_bytes(good)
    assert fit(network(), samples, GIVEN, cache=root).skipped == ()


def test_features_that_are_not_finite_name_the_images_and_leave_no_chunk(tmp_path: Path) -> None:
    samples, root, net = tree(tmp_path / "data"), tmp_path / "cache", network()
    with torch.no_grad():
        net.model.body[0].bias[0] = torch.nan
    with pytest.raises(DataError, match=r"not finite among images a/000\.png to b/101\.png"):
        fit(net, samples, GIVEN, cache=root)
    assert not np.frombuffer((only(root) / "sums.bin").read_bytes(), np.uint8).any()
    assert not net.fitted


def test_features_beyond_half_precision_say_what_to_set(tmp_path: Path) -> None:
    samples, net = tree(tmp_path / "data", 24), network()
    with torch.no_grad():
        net.model.body[0].bias += 1e6
    with pytest.raises(DataError, match="too large for float16: set precision to bfloat16"):
        fit(net, samples, GIVEN)
    fit(net, samples, FitConfig(l2=0.1, precision="bfloat16"))
    assert net.fitted


# --------------------------------------------------------------------------------------------------- disks


def test_a_disk_that_is_too_small_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, root = tree(tmp_path / "data", 24), tmp_path / "cache"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"the feature cache needs 0\.0 MB, and .*cache has 0\.0 MB left"):
        fit(network(), samples, GIVEN, cache=root)
    assert not root.exists()


def test_a_disk_that_fills_up_half_way_loses_nothing(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    samples, _, weight, spare = made
    root, left = tmp_path / "small", [3]  # writes: one chunk with its sum, and rows without theirs
    real = os.pwrite

    def full(handle: int, data: bytes, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DataError, match=r"No space left on device.*goes on from it"):
            fitted(samples, root)
    again, seen = fitted(samples, root)
    assert torch.equal(again, weight)
    assert seen == spare + len(samples) - IMAGES_PER_CHUNK


def test_a_cache_that_cannot_be_made_says_where_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot use the feature cache .* Choose another place with --cache"):
        fitted(tree(tmp_path / "data", 24), tmp_path / "file")


def test_caches_are_listed_and_cleared_and_nothing_else_is(made: Any) -> None:
    samples, root, _, _ = made
    (root / "notes").mkdir()
    (root / "notes" / "mine.txt").write_text("keep")
    (root / "notes" / "about.json").write_text("{}")  # of somebody's own
    fitted(samples[:64], root)
    held = list_caches(root)
    assert [each.about["images"] for each in held] == [64, 150]
    assert all(each.size > each.about["images"] * 12 for each in held)
    with pytest.raises(DataError, match="there is no cache nonsense"):
        clear_caches(root, ["nonsense"])
    assert [each.folder.name for each in clear_caches(root, [held[0].folder.name])] == [held[0].folder.name]
    assert len(clear_caches(root)) == 1
    assert (root / "notes" / "mine.txt").read_text() == "keep"
    assert list_caches(root) == list_caches(root / "nowhere") == []


def test_the_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIGCAM_CACHE", str(tmp_path))
    assert cache_room.default_folder() == tmp_path
    monkeypatch.delenv("SIGCAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_room.default_folder() == tmp_path / "x" / "sigcam"


def test_processes_fill_one_store_and_see_what_others_wrote(tmp_path: Path) -> None:
    samples = tree(tmp_path / "data", 150)
    stores = [find_store(tmp_path / "c", samples, (3,), "float16", {}) for _ in range(2)]
    for store in stores:
        store.create()
    rows = torch.randn(150, 3).half()
    for chunk in range(3):
        stores[chunk % 2].write(chunk, rows[chunk * IMAGES_PER_CHUNK : (chunk + 1) * IMAGES_PER_CHUNK])
    for store in stores:
        assert store.missing(range(3)) == []
        assert torch.equal(store.read(), rows)
    assert isinstance(stores[0], FeatureStore)
    assert json.loads((stores[0].folder / "about.json").read_text())["images"] == 150


# ------------------------------------------------------------------------------------------------- a kill


SLOW = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from support.folders import GIVEN, network
from sigcam.data.readers.folder import folder
from sigcam.training.branch import fit
net = network()
net.model.register_forward_pre_hook(lambda module, args: time.sleep(0.02))
fit(net, folder(Path({root!r}) / "data"), GIVEN, cache=Path({root!r}) / "cache")
net.save(Path({root!r}) / "branch.safetensors")
"""


def killed(tmp_path: Path, kills: int) -> None:
    samples = tree(tmp_path / "data", 400)
    weight, _ = fitted(samples, None)
    script = SLOW.format(tests=str(Path(__file__).parents[1]), root=str(tmp_path))
    random, done = np.random.default_rng(7), 0
    while done < kills:
        run = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        while run.poll() is None and not list_caches(tmp_path / "cache"):
            time.sleep(0.02)
        time.sleep(random.uniform(0, 1.5))
        run.send_signal(signal.SIGKILL)
        run.wait()
        done += 1
        (tmp_path / "branch.safetensors").unlink(missing_ok=True)  # it was faster than we
        if done % 5 == 4:
            clear_caches(tmp_path / "cache")
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    from sigcam.network.branch_file import load

    net = load(tmp_path / "branch.safetensors", network().model)
    assert torch.equal(net.last_layer("sigmoid").get_parameter("weight").detach(), weight)


@pytest.mark.slow
def test_a_fit_that_was_killed_again_and_again_ends_as_if_it_had_not(tmp_path: Path) -> None:
    killed(tmp_path, int(os.environ.get("SIGCAM_KILLS", "3")))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["paper", "paper-code"])
def test_a_recipe_that_was_stopped_goes_on_after_its_last_epoch(tmp_path: Path, recipe: Any) -> None:
    samples, config = tree(tmp_path / "data", 48), FitConfig(recipe, epochs=4, lr=0.01, batch_size=16)
    whole = network()
    wanted = fit(whole, samples, config)
    net, told = network(), list[str]()

    def stop(stage: str, done: int, total: int) -> None:
        told.append(stage)
        if stage == "epoch 3" and done == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(net, samples, config, cache=tmp_path / "cache", progress=stop)
    assert not net.fitted
    told.clear()
    result = fit(net, samples, config, cache=tmp_path / "cache", progress=lambda s, d, t: told.append(s))
    assert set(told) == {"epoch 3", "epoch 4"}
    assert result.losses == wanted.losses
    for ours, theirs in zip(net.sigmoid.parameters(), whole.sigmoid.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not list((tmp_path / "cache").glob("recipe-*"))


@pytest.mark.parametrize("change", ["labels", "files", "preprocessing"])
def test_a_recipe_with_changed_labels_files_or_preprocessing_starts_anew(tmp_path: Path, change: str) -> None:
    samples, config = tree(tmp_path / "data", 48), FitConfig("paper", epochs=2, lr=0.01, batch_size=16)
    net, stages = network(), list[str]()

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "epoch 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(net, samples, config, cache=tmp_path / "cache", progress=stop)
    if change == "labels":
        samples = Samples((replace(samples[0], label=2), *samples[1:]), CLASSES)
    elif change == "files":
        assert samples[0].path is not None
        os.utime(samples[0].path, (1, 1))
    else:
        net.transform = Preprocess(16, 16, mean=(0.4, 0.4, 0.4))
    fit(net, samples, config, cache=tmp_path / "cache", progress=lambda s, d, t: stages.append(s))
    assert list(dict.fromkeys(stages)) == ["epoch 1", "epoch 2"]


@pytest.mark.parametrize("about", ["[1]", '"x"', "7", "null", "{", "[" * 100_000])
def test_a_cache_with_a_damaged_description_is_listed_and_can_be_removed(tmp_path: Path, about: str) -> None:
    folder = tmp_path / ("a" * 24)
    folder.mkdir()
    (folder / "sums.bin").touch()
    (folder / "about.json").write_text(about)
    (entry,) = list_caches(tmp_path)
    assert entry.about == {} and clear_caches(tmp_path)[0].folder == folder
