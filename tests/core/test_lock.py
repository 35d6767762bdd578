"""An output folder belongs to one process at a time, and to nobody once that process is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sigcam.core import lock
from sigcam.core.errors import ConfigError
from sigcam.core.lock import LOCK, locked_folder

HOLD = """
import os, sys, time
from pathlib import Path
from sigcam.core.lock import locked_folder
with locked_folder(Path(sys.argv[1])):
    if "fork" not in sys.argv or os.fork() == 0:
        print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Starts a process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_with_the_number_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with holder(folder) as other:
        try:
            before = sorted(folder.iterdir())
            with pytest.raises(ConfigError, match=f"out is in use by process {other.pid}: wait"):
                locked_folder(folder).__enter__()
            assert sorted(folder.iterdir()) == before == [folder / LOCK]
        finally:
            other.kill()
    with locked_folder(folder):  # the lock died with the process
        assert (folder / LOCK).read_text() == str(os.getpid())
    assert folder.is_dir() and list(folder.iterdir()) == []


def test_a_forked_process_that_outlives_the_holder_keeps_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path, "fork") as other:
        try:
            other.send_signal(signal.SIGKILL)
            other.wait()
            with locked_folder(tmp_path):
                pass
        finally:
            os.killpg(other.pid, signal.SIGKILL)


def test_a_folder_is_taken_again_by_its_holder_and_released_once(tmp_path: Path) -> None:
    with locked_folder(tmp_path):
        with locked_folder(tmp_path / "." / "x" / ".."):
            pass
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_a_new_folder_stays_only_if_something_is_in_it(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no"), locked_folder(tmp_path / "a" / "b"):
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []
    with locked_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "x").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["x"]


def test_a_lock_file_that_its_holder_removed_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = lock._lock, list[int]()

    def removed_first(file: int) -> bool:
        tries.append(file)
        if len(tries) == 1:
            (tmp_path / LOCK).unlink()
        return real(file)

    monkeypatch.setattr(lock, "_lock", removed_first)
    with locked_folder(tmp_path):
        assert len(tries) == 2 and (tmp_path / LOCK).exists()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="out"):
        locked_folder(tmp_path / "out").__enter__()
    assert (tmp_path / "precious").read_text() == "mine"


def test_drafts_of_dead_processes_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = f".sigcam-{ended.pid}-0123.part", f".sigcam-{os.getpid()}-0123.part"
    for name in (dead, alive, "movie.7.part"):
        (tmp_path / name).touch()
    with locked_folder(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {alive, "movie.7.part"}
