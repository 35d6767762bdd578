"""Run commands that are stopped half-way: by signals, and by a disk that is full.

`Server` is a process that has imported everything and forks a child for each run, so that a run takes a
fraction of a second. It computes nothing itself: torch's threads do not survive a fork.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "os.truncate")


@dataclass(frozen=True)
class Run:
    """A command, and what happens to it.

    Args:
        kill: signal that it receives at the `at`-th operation on files.
        after: seconds after which it receives the signal, instead.
        full: number of the write at which the disk is full, from 1; later ones fail, too.
    """

    words: list[str]
    folder: str
    kill: int | None = None
    at: int | None = None
    after: float | None = None
    full: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Args:
        code: exit code; negative for the number of the signal that ended it.
        events, writes: operations on files, and writes among them.
    """

    code: int
    errors: str
    events: int
    writes: int
    seconds: float


class Server:
    """Starts runs, one after the other."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from support.faults import serve; serve()"]
        tests = str(Path(__file__).parents[1])
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, run: Run) -> Ended:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(asdict(run)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the server is gone"
        return Ended(**json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)


def serve() -> None:
    """Answer each line of stdin, a `Run`, by a line of stdout, an `Ended`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    for line in sys.stdin:
        answers.write(json.dumps(asdict(_forked(Run(**json.loads(line))))) + "\n")
        answers.flush()


def _import_all() -> None:
    import importlib
    import pkgutil

    import matplotlib.pyplot  # noqa: F401
    import torch

    import sigcam

    for module in pkgutil.walk_packages(sigcam.__path__, "sigcam."):
        if not module.name.startswith(("sigcam.ui", "sigcam.__main__", "sigcam.bootstrap")):
            importlib.import_module(module.name)
    torch.set_num_threads(1)


def _forked(run: Run) -> Ended:
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as counts:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(run, errors.fileno(), counts.fileno())
        timer = None
        if run.after is not None and run.kill is not None:
            timer = threading.Timer(run.after, os.kill, (child, run.kill))
            timer.start()
        _, status = os.waitpid(child, 0)
        if timer:
            timer.cancel()
        seconds = time.monotonic() - began
        code = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        counts.seek(0)
        lines = counts.read().split()
        events, writes = (int(lines[-2]), int(lines[-1])) if len(lines) > 1 else (0, 0)
        return Ended(code, errors.read(), events, writes, seconds)


def _child(run: Run, errors: int, counts: int) -> None:
    """Run the command in this process, and end the process."""
    code: Any = 70
    try:
        os.dup2(errors, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from sigcam.cli.main import main
        from sigcam.evaluation import metric_table
        from sigcam.reports import demo

        metric_table.EVERY = 0.0  # save after every batch
        demo.EMPTY, demo.SHOWN, demo.load_classifier = 8, 2, _small_classifier
        os.chdir(run.folder)
        sys.argv = ["sigcam", *run.words]
        disk = Disk(run.full)
        disk.watch()
        watch = Watch(run)
        sys.addaudithook(watch)
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            watch.live = False
            os.write(counts, f"{watch.events} {disk.writes}\n".encode())
            sys.stderr.flush()
    except BaseException as error:
        os.write(2, f"\nTraceback: {error!r}\n".encode())
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _small_classifier(spec: str, **options: Any) -> Any:
    """Instead of the embedded network, which takes longer."""
    from sigcam.models.classifier import load_classifier

    return load_classifier("file:model.py:make_large", **options)


class Watch:
    """Counts operations on files; kills the process at one of them."""

    def __init__(self, run: Run) -> None:
        self.run, self.events, self.live = run, 0, True

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.live and event in WATCHED:
            self.events += 1
            if self.run.kill is not None and self.events == self.run.at:
                os.kill(os.getpid(), self.run.kill)


class Disk:
    """Counts what is written to files; is full from the n-th write on."""

    def __init__(self, full: int | None) -> None:
        self.full, self.writes = full, 0

    def write(self) -> None:
        self.writes += 1
        if self.full is not None and self.writes >= self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def watch(self) -> None:
        real_open, pwrite, allocate = io.open, os.pwrite, os.posix_fallocate

        def watched_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            opened = real_open(file, mode, *args, **options)
            return WatchedFile(opened, self) if set(mode) & set("wax+") and file not in (1, 2) else opened

        def watched_pwrite(file: int, data: Any, offset: int) -> int:
            self.write()
            return pwrite(file, data, offset)

        def watched_allocate(file: int, offset: int, length: int) -> None:
            self.write()
            allocate(file, offset, length)

        io.open = builtins.open = watched_open  # type: ignore[assignment]
        os.pwrite, os.posix_fallocate = watched_pwrite, watched_allocate


class WatchedFile:
    """A file that is being written; half of what does not fit is there."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        try:
            self._disk.write()
        except OSError:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)
