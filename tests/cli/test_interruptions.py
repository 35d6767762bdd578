"""Real processes that are stopped, started twice or run out of disk: one line, nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigcam.core.lock import LOCK
from support.commands import NET, run, spec
from support.disks import fill

SLOW = """
import time
from pathlib import Path

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny()

    def forward(self, images):  # waits once the first map is kept
        while Path("PLACE/o/.explain.checkpoint").exists() and not Path("PLACE/go").exists():
            time.sleep(0.02)
        return self.inner(images)

def slow():
    return Slow()
"""


@pytest.fixture
def slow_place(place: Path) -> Path:
    (place / "net.py").write_text(NET + SLOW.replace("PLACE", str(place)))
    return place


def explain_words(place: Path, output: Path) -> tuple[object, ...]:
    model = ("--model", spec(place, "slow"), "--branch", "centred", "--batch-size", 1)
    return ("explain", place / "data", *model, "--output", output)


@contextmanager
def start(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Starts the command as a terminal does, whatever signals this process ignores; ends it at any rate."""
    command = [sys.executable, "-m", "sigcam", *map(str, words)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=heed_interrupts) as process:
        try:
            yield process
        finally:
            process.kill()


def heed_interrupts() -> None:
    """Undoes what a shell does to background jobs: they ignore SIGINT, and so do the processes they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begun(process: subprocess.Popen[str], output: Path) -> None:
    """Waits until the first map is kept."""
    while not (output / ".explain.checkpoint").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_says_so_and_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, slow_place: Path, number: int, code: int, workers: int
) -> None:
    out, whole = slow_place / "o", slow_place / "whole"
    with start(*explain_words(slow_place, out), "--workers", workers) as process:
        begun(process, out)
        os.killpg(process.pid, number)  # as a terminal does, and a service manager
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (code, "")
    assert errors == "sigcam: stopped. The same command goes on from here.\n"
    left = {path.name for path in out.iterdir()}
    assert LOCK not in left and not any(name.endswith(".part") for name in left)
    assert 0 < sum(name.endswith(".npy") for name in left) < 8
    (slow_place / "go").touch()
    for folder in (out, whole):
        assert run(monkeypatch, *explain_words(slow_place, folder)) == 0
    assert json.loads((out / "explanation.json").read_text()) == json.loads(
        (whole / "explanation.json").read_text()
    )
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.glob("*.npy"):
        np.testing.assert_array_equal(np.load(out / path.name), np.load(path))


@pytest.mark.slow
def test_a_second_run_into_the_same_folder_is_refused_and_the_first_ends_well(
    monkeypatch: pytest.MonkeyPatch, slow_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = slow_place / "o"
    with start(*explain_words(slow_place, out)) as process:
        begun(process, out)
        data, model = ("--data", slow_place / "data"), ("--model", spec(slow_place))
        for words in (
            ("explain", slow_place / "data", *model, "--branch", "centred"),
            ("fit", *data, *model),
            ("train-classifier", *data, *model),
            ("evaluate", *data, *model),
            ("inspect", *data),
            ("bench", "table3", "--data", slow_place),
            ("demo",),
        ):
            assert run(monkeypatch, *words, "--output", out) == 2, words
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{out} is in use by process {process.pid}" in line
        (slow_place / "go").touch()
        process.communicate(timeout=60)
    assert process.returncode == 0 and len(json.loads((out / "explanation.json").read_text())) == 8
    assert not (out / LOCK).exists()


@pytest.mark.slow
def test_a_full_disk_leaves_whole_files_and_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, place: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("explain", place / "data" / "cat", "--model", spec(place), "--branch", "centred")
    words = (*words, "--batch-size", 1)
    assert run(monkeypatch, *words, "--output", place / "whole") == 0
    capsys.readouterr()
    out = small_disk / "o"
    fill(small_disk, spare=40_000)  # a map takes 9,088 bytes, an overlay about as much
    assert run(monkeypatch, *words, "--output", out) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sigcam:")]
    assert f"disk full: {out}" in line and line.endswith("The same command goes on from here.")
    for path in out.glob("*.npy"):
        assert np.load(path).shape == (40, 56)
    assert not list(out.glob("*.part")) and not list(out.glob(".sigcam*"))
    (small_disk / "filling").unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert run(monkeypatch, *words, "--output", out) == 0
    for path in (place / "whole").glob("*.map.*"):
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "suffix", [".png", ".npy", "explanation.json", "manifest.json", ".explain.checkpoint"]
)
def test_a_write_that_fails_leaves_no_file_under_its_final_name(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    replace = Path.replace

    def full(draft: Path, target: Path) -> Path:
        if target.name.endswith(suffix):
            raise OSError(28, "No space left on device")
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", full)
    words = ("explain", place / "data" / "cat", "--model", spec(place), "--branch", "centred", "--output")
    assert run(monkeypatch, *words, place / "o") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"sigcam: disk full: {place / 'o'}") and "goes on from here" in line
    names = [path.name for path in (place / "o").iterdir()] if (place / "o").exists() else []
    assert not [name for name in names if name.endswith((suffix, ".part"))]
