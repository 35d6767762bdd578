"""Run the command line: every failure is one line on stderr; exit code 2 for bad input, 1 for a bug."""

import atexit
import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from sigcam.cli.app import build_app
from sigcam.cli.console import printable
from sigcam.cli.running import Terminated
from sigcam.core.errors import DiskFull, SigcamError, causes
from sigcam.core.files import FULL, error_line
from sigcam.core.memory import is_out_of_memory

CODE_FOLDER = Path(__file__).parents[1]


def main() -> None:
    """Run the command that was typed; exit with 0, 2 (bad input), 1 (bug), 130 (Ctrl-C) or 143 (SIGTERM)."""
    if "LOCAL_RANK" in os.environ:  # set by torchrun
        _run_as_rank()
    else:
        gc.set_threshold(20_000)  # imports make millions of objects that stay: scanning takes a second
        _run()


def _run_as_rank() -> NoReturn:
    """Run the command and end the process without Python's finalization, during which a thread of gloo that
    frees a tensor aborts the process (the reason is discussed in pytorch/pytorch#179291)."""
    code: Any = 1
    try:
        _run()
    except SystemExit as exiting:
        code = exiting.code
    finally:
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _run() -> None:
    """Run the command; raise SystemExit."""
    words, show = _without_traceback(sys.argv[1:])
    _escape_unprintable()
    try:
        with _sigterm_as_interrupt() as received:
            status = build_app()(words or ["--help"], standalone_mode=False)
            if status == 130:  # typer's, for an interrupt before the command's own code began
                raise Terminated if received else KeyboardInterrupt
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None where they are closed
                stream.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        if show:
            traceback.print_exception(error)
        message, code = describe(error)
        with suppress(OSError):
            print(f"sigcam: {printable(' '.join(message.split()))}", file=sys.stderr)
        raise SystemExit(code) from None
    raise SystemExit(status if isinstance(status, int) else 0)


def describe(error: BaseException) -> tuple[str, int]:
    """Return the line that says what happened, and the exit code."""
    usage_error: Any = typer.BadParameter.__mro__[2]  # ClickException, of the click that typer uses
    chain = list(causes(error))
    hint = next((f" {note}" for cause in chain for note in getattr(cause, "__notes__", ())), "")
    lost = next((str(e) for e in chain if str(e).startswith("DataLoader worker")), "")
    if any(isinstance(cause, Terminated) for cause in chain) or "signal: Terminated" in lost:
        return f"stopped.{hint}", 143
    if any(isinstance(cause, KeyboardInterrupt | typer.Abort) for cause in chain):
        return f"stopped.{hint}", 130
    if isinstance(error, usage_error):
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command
            print(error.format_message())
            raise SystemExit(2)
        return f"{error.format_message().rstrip('.')}. See sigcam --help.", 2
    if memory := [cause for cause in chain if is_out_of_memory(cause)]:
        less = "Use a smaller --batch-size, or less of --zoom, --workers and --top-n, or a larger machine."
        return f"out of memory ({_last_line(memory[-1])}). {less}", 2
    if full := next((cause for cause in chain if isinstance(cause, DiskFull)), None):
        return f"{full}{hint}", 2
    if isinstance(error, SigcamError):
        return str(error), 2
    if fault := next((cause.network_fault for cause in chain if hasattr(cause, "network_fault")), None):
        return str(fault), 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        full_disk = "disk full: " if error.errno in FULL else ""
        return f"{full_disk}{where}{error.strerror or error}", 2
    if lost:  # by the kernel, mostly
        return (
            f"a process that decodes images is gone, maybe for lack of memory: use fewer --workers ({lost})",
            2,
        )
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(CODE_FOLDER)]
    where = f"{Path(ours[-1].filename).relative_to(CODE_FOLDER)}:{ours[-1].lineno}" if ours else "sigcam"
    rerun = "Run it again with --traceback, and report what that prints."
    return f"this is a bug in sigcam, at {where}: {error_line(error)}. {rerun}", 1


def _last_line(error: BaseException) -> str:
    """Return the first line of the message or, of an error in another process, the last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if lines[0].startswith("Caught ") else 0].strip().rstrip(".")


def _without_traceback(words: list[str]) -> tuple[list[str], bool]:
    """Return the words without --traceback, and whether to show tracebacks."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--traceback"] + words[end:]
    return kept, len(kept) < len(words) or os.environ.get("SIGCAM_TRACEBACK", "0") not in ("", "0")


def _escape_unprintable() -> None:
    """Print what the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


@contextmanager
def _sigterm_as_interrupt() -> Iterator[list[int]]:
    """Let SIGTERM, which service managers and schedulers send, end the block as Ctrl-C does; yield the
    list of signals received."""
    received = list[int]()

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        if hasattr(signal, "SIGCHLD"):  # torch's handler raises if a worker received it, too
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        received.append(number)
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _discard_output() -> None:
    """Send to nowhere what is still to be printed: the reader is gone, as with `| head`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
