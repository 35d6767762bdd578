"""What goes wrong is told in one line: whose fault it is, what to do, and where a bug is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sigcam.cli.main import describe
from sigcam.core.errors import DataError, DiskFull
from sigcam.methods import folder
from sigcam.network.branch_file import KEY
from support.commands import NET, run, spec

PICKY = """
class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny()

    def forward(self, images):
        if len(images) > 2:
            raise ValueError("one pair at a time")
        return self.inner(images)

def picky():
    return Picky()
"""
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


def explain_words(place: Path, function: str = "tiny", branch: object = "centred") -> tuple[object, ...]:
    model = ("--model", spec(place, function), "--branch", branch)
    return ("explain", place / "data" / "cat", *model, "--output", place / "o")


def failing(monkeypatch: pytest.MonkeyPatch, error: Callable[[], object]) -> None:
    def explain(*args: object, **settings: object) -> None:
        raise error()  # type: ignore[misc]

    monkeypatch.setattr(folder, "explain", explain)


def test_a_bug_is_one_line_with_its_place_and_a_traceback_on_request(monkeypatch, place, capsys):
    failing(monkeypatch, lambda: RuntimeError("wrong shapes\nsecond line"))
    words = explain_words(place)
    assert run(monkeypatch, *words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "bug in sigcam, at methods/folder.py:" in line and "RuntimeError: wrong shapes." in line
    assert "--traceback" in line and "second line" not in line
    for asked in (("--traceback", *words), (*words, "--traceback")):
        assert run(monkeypatch, *asked) == 1
        told = capsys.readouterr().err
        assert "Traceback (most recent call last)" in told and told.splitlines()[-1] == line
    monkeypatch.setenv("SIGCAM_TRACEBACK", "1")
    assert run(monkeypatch, *words) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert not (place / "o").exists()


def test_a_network_that_fails_on_the_images_is_named(monkeypatch, place, capsys):
    (place / "net.py").write_text(NET + PICKY)
    assert run(monkeypatch, *explain_words(place, "picky")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Picky could not be run on 4 images of 3x224x224 (ValueError: one pair at a time)" in line
    assert run(monkeypatch, *explain_words(place, "picky"), "--batch-size", 2) == 0


def real(allocate: Callable[[], object]) -> Exception:
    try:
        allocate()
    except Exception as error:
        return error
    raise AssertionError("there was enough memory")


@pytest.mark.parametrize(
    "error",
    [
        lambda: MemoryError(),
        lambda: RuntimeError(ALLOCATOR),
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        lambda: real(lambda: np.ones(10**15)),
        lambda: real(lambda: torch.ones(10**15)),
        lambda: OSError(12, "Cannot allocate memory"),
    ],
)
def test_a_lack_of_memory_is_named_with_what_to_reduce(monkeypatch, place, capsys, error):
    failing(monkeypatch, error)
    assert run(monkeypatch, *explain_words(place)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sigcam: out of memory (") and "--batch-size" in line


def test_a_lack_of_memory_is_found_below_another_error():
    try:
        try:
            raise RuntimeError(ALLOCATOR)
        except RuntimeError as error:
            raise DataError("this network takes one size only") from error
    except DataError as error:
        line, code = describe(error)
    assert line.startswith("out of memory") and code == 2


def test_a_worker_that_the_kernel_ended_and_one_that_raised_are_told_apart_from_bugs():
    killed = RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly")
    assert "--workers" in describe(killed)[0] and describe(killed)[1] == 2
    raised = MemoryError(
        "Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback\nMemoryError: 9"
    )
    assert describe(raised)[0].startswith("out of memory (MemoryError: 9)")
    assert describe(KeyError("x"))[1] == 1


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 10, '{"a":' * 100_000, "[]"])
def test_a_branch_file_with_hostile_metadata_is_to_blame(monkeypatch, place, capsys, text):
    path = place / "hostile.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={KEY: text})
    assert run(monkeypatch, *explain_words(place, branch=path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "hostile.safetensors does not say what it was fitted to: fit again." in line


def test_weights_with_hostile_metadata_have_no_class_names(monkeypatch, place, capsys):
    import runpy

    state = runpy.run_path(str(place / "net.py"))["tiny"]().state_dict()
    save_file(state, place / "w.safetensors", metadata={"classes": "[" * 100_000})
    assert run(monkeypatch, *explain_words(place), "--weights", place / "w.safetensors") == 0


def test_a_full_disk_says_whether_the_command_goes_on():
    full = DiskFull("disk full: out (No space left on device). Free some space.")
    assert describe(full) == (str(full), 2)
    full.add_note("The same command goes on from here.")
    assert describe(full)[0].endswith("Free some space. The same command goes on from here.")
    assert describe(OSError(28, "No space left on device")) == ("disk full: No space left on device", 2)


def test_the_options_say_which_commands_go_on(tmp_path):
    from sigcam.cli.bench import BenchOptions
    from sigcam.cli.demo import DemoOptions
    from sigcam.cli.evaluate import EvaluateOptions
    from sigcam.cli.explain import ExplainOptions
    from sigcam.cli.fit import FitOptions
    from sigcam.cli.train import TrainOptions

    assert ExplainOptions().resumes and BenchOptions(target="all", data=tmp_path).resumes
    assert EvaluateOptions(data="x").resumes and not EvaluateOptions(data="x", maps=tmp_path).resumes
    assert FitOptions(data="x").resumes and not FitOptions(data="x", no_cache=True).resumes
    assert TrainOptions(data="x").resumes and not TrainOptions(data="x", probe=True).resumes
    assert not DemoOptions().resumes


def started(*words: object, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "sigcam", *map(str, words)], **options)  # type: ignore[call-overload]


def test_a_reader_that_stops_reading_or_a_closed_output_is_no_error_message(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    for words in (("--help",), ("cache", "list", "--cache", tmp_path)):
        with started(*words, stdout=writer, stderr=subprocess.PIPE) as process:
            assert process.communicate()[1] == b"" and process.returncode == 1
    os.close(writer)
    command = f'"{sys.executable}" -m sigcam cache list --cache "{tmp_path}"'
    done = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    done = subprocess.run(["sh", "-c", f"{command} 2>&-"], capture_output=True)
    assert done.returncode == 0 and b"0 cache(s)" in done.stdout
