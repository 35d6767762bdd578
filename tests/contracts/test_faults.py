"""Commands that are killed, or whose disk is full or read-only: no file under its final name is half-written,
one line says what to do, and the next run ends as if nothing had happened.

`make test` runs a few of each, from fixed seeds; `make soak` many.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from support.bench import write_wsol_dataset
from support.faults import Ended, Run, Server
from support.soak import soak_count

MODEL = """
import torch
from torch import nn
from sigcam.models.preprocess import Preprocess

def make_large(num_classes=8):
    return make(num_classes)[0], Preprocess(224, 224)

def make(num_classes=3):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 5, 4, 2), nn.ReLU(), nn.Conv2d(8, 6, 3, 2, 1), nn.ReLU())
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, num_classes))
    return model.eval(), Preprocess(48, 48)
"""
DATA = ["--data", "data/cub", "--model", "file:model.py:make"]
SMALL = ["--batch-size", "2"]
BACKGROUND = ["--background", "1", "--zooms", "1,2"]
COMMANDS: dict[str, list[str]] = {  # each writes to the folder out/result
    "explain": ["explain", "data/cub/images/test", *DATA[2:], "--branch", "fitted", *SMALL],
    "evaluate": ["evaluate", *DATA, "--branch", "fitted", "--report", *SMALL],
    "fit, fast": ["fit", *DATA, "--cache", "out/cache", "--l2", "0.1"],
    "fit, background": ["fit", *DATA, *BACKGROUND, "--cache", "out/cache", "--l2", "0.1"],
    "fit, paper": ["fit", *DATA, "--cache", "out/cache", "--recipe", "paper", "--epochs", "3", *SMALL],
    "train-classifier": ["train-classifier", *DATA, "--epochs", "3", *SMALL],
    "train-classifier, probe": ["train-classifier", *DATA, "--probe"],
    "bench": ["bench", "table2", "--data", "data", *DATA[2:], "--quick", *SMALL],
    "demo": ["demo", "--images", "64", "--test-images", "32"],
}
RESUMES = ("explain", "evaluate", "fit", "train-classifier", "bench")
TIMES = {"made", "date", "command", "seconds", "fit_seconds", "maps_per_second", "training"}
DISTURBED = [*COMMANDS][: soak_count(-1, len(COMMANDS))]  # the demo takes long
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class World:
    """A folder with data, a model and a fitted branch, in which commands run."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server = folder, server
        self._known = dict[str, tuple[Ended, dict[str, Any]]]()
        write_wsol_dataset(folder / "data", "cub", classes=3, per_class=2)
        (folder / "model.py").write_text(MODEL)
        ended = server.run(Run(["fit", *DATA, "--cache", "cache", "--output", "fitted"], str(folder)))
        assert ended.code == 0, ended.errors

    def run(self, name: str, **fault: Any) -> Ended:
        words = [*COMMANDS[name], "--output", "out/result"]
        return self.server.run(Run(words, str(self.folder), **fault))

    def clear(self) -> None:
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "out").mkdir()

    def whole(self, name: str) -> tuple[Ended, dict[str, Any]]:
        """How a run ends that nothing disturbs, and what it leaves; the folder is empty afterwards."""
        if name not in self._known:
            self.clear()
            ended = self.run(name)
            assert ended.code == 0, ended.errors
            self._known[name] = ended, contents(self.folder / "out/result")
        self.clear()
        return self._known[name]

    def check_next_run(self, name: str) -> None:
        """The next run ends as one that nothing disturbed."""
        wanted = self._known[name][1]
        ended = self.run(name)
        assert ended.code == 0, ended.errors
        found = contents(self.folder / "out/result")
        assert found.keys() == wanted.keys()
        for file, content in wanted.items():
            assert found[file] == content, file


@pytest.fixture(scope="module")
def world(server: Server, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("faults"), server)


def contents(folder: Path) -> dict[str, Any]:
    """What the files of a folder hold, each of them whole; without times, and without unfinished work."""
    found = dict[str, Any]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or path.name.startswith("."):
            continue
        if path.suffix == ".npy":
            found[name] = np.load(path, allow_pickle=False).tobytes()
        elif path.suffix == ".png":
            with Image.open(path) as image:
                found[name] = image.size, image.tobytes()
        elif path.suffix == ".json":
            found[name] = without_times(json.loads(path.read_text()))
        elif path.suffix == ".safetensors":
            found[name] = {key: tensor.tolist() for key, tensor in load_file(path).items()}
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>"), name
            found[name] = "a page"
        elif path.suffix == ".csv":
            found[name] = path.read_text()
        elif path.suffix == ".pt" or "unfinished" in path.name:
            torch.load(path, weights_only=True)
        else:
            assert path.suffix in (".md", ".bin"), name
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(held) for key, held in value.items() if key not in TIMES}
    return [without_times(held) for held in value] if isinstance(value, list) else value


def check_words(name: str, ended: Ended, *words: str) -> None:
    """The last line, and no other, is ours; it says what happened, and that the command resumes if it had
    begun to write."""
    ours = [line for line in ended.errors.splitlines() if line.startswith("sigcam: ")]
    assert len(ours) == 1 and ended.errors.splitlines()[-1] == ours[0], ended.errors
    assert "Traceback" not in ended.errors
    for word in words:
        assert word in ours[0]
    if name.partition(",")[0] in RESUMES and "probe" not in name and ended.writes:
        assert "The same command goes on from here" in ours[0]


KILLS, CHAIN = soak_count(2, 21), 3
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("name", DISTURBED)
def test_a_run_that_was_killed_again_and_again_ends_as_if_it_had_not(name: str, world: World) -> None:
    whole, _ = world.whole(name)
    draw = random.Random(name)
    killed = 0
    for number in range(KILLS):
        kill = SIGNALS[(number + len(name)) % 3]
        instant: dict[str, Any] = {"at": draw.randint(1, whole.events)}
        if number % CHAIN == 2:
            instant = {"after": draw.uniform(0, whole.seconds)}
        ended = world.run(name, kill=int(kill), **instant)
        contents(world.folder / "out")  # all of them whole
        if ended.code != 0:  # else it was done before
            killed += 1
            assert ended.code in (-kill, 128 + kill), (kill, ended)
        if ended.code == 128 + kill:
            check_words(name, ended, "stopped.")
        if number % CHAIN == CHAIN - 1 or number == KILLS - 1:
            world.check_next_run(name)
            world.clear()
    assert killed


FULL = soak_count(1, 30)


@pytest.mark.parametrize("name", DISTURBED)
def test_a_disk_that_is_full_at_a_write_is_named_and_leaves_whole_files(name: str, world: World) -> None:
    whole, _ = world.whole(name)
    writes, draw = range(1, whole.writes + 1), random.Random(name)
    chosen = list(writes) if len(writes) <= FULL else draw.sample(writes, FULL)
    for number, write in enumerate(chosen):
        ended = world.run(name, full=write)
        contents(world.folder / "out")
        if ended.code != 0:  # else what it had kept was enough
            assert ended.code == 2, ended
            if "feature cache out/" in ended.errors:
                assert "No space left on device" in ended.errors and "--cache" in ended.errors
            else:
                check_words(name, ended, "disk full: out")
            assert not list((world.folder / "out").rglob("*.part"))
        if number % CHAIN == CHAIN - 1 or number == len(chosen) - 1:
            world.check_next_run(name)
            world.clear()


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes; the test is skipped where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={max(size, 4096)}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


SIZES = soak_count(1, 8)


@pytest.mark.parametrize("name", [*COMMANDS][: soak_count(2, len(COMMANDS))])
def test_a_small_disk_leaves_whole_files_and_a_larger_one_the_result(name: str, world: World) -> None:
    world.whole(name)
    world.run(name)
    files = [path for path in (world.folder / "out").rglob("*") if path.is_file()]
    needed = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    world.clear()
    draw = random.Random(name)
    for _ in range(SIZES):
        with mounted(world.folder / "out", draw.randrange(2 * 4096, needed)):
            ended = world.run(name)
            contents(world.folder / "out")
            assert ended.code == 2, ended
            if "the feature cache needs" not in ended.errors:  # which is known before
                check_words(name, ended, "disk full: out")
            subprocess.run(["mount", "-o", "remount,size=1g", str(world.folder / "out")], check=True)
            world.check_next_run(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_only_folder_is_refused_in_one_line_before_any_work(name: str, world: World) -> None:
    world.clear()
    with mounted(world.folder / "out", 2**20):
        subprocess.run(["mount", "-o", "remount,ro", str(world.folder / "out")], check=True)
        ended = world.run(name)
        assert ended.code == 2, ended
        assert "sigcam: cannot write to the output folder" in ended.errors
        assert len(ended.errors.splitlines()) == 1
