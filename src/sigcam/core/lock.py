"""A lock on an output folder, which ends with the process that holds it."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sigcam.core.errors import ConfigError
from sigcam.core.files import DRAFTS, check_writable, raise_if_full, remove_empty

LOCK = ".sigcam.lock"
_held = dict[Path, int]()  # folder and file descriptor of each lock of this process


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create the folder and keep other processes out of it; ConfigError if one is in it, or it is read-only.

    A folder that is empty at the end is removed. A folder that this process holds may be taken again.
    """
    place = folder.resolve()
    if place in _held:
        yield
        return
    missing = [parent for parent in (place, *place.parents) if not parent.exists()]
    check_writable(folder)
    try:
        _held[place] = _acquire(place, folder)
    except OSError as error:
        remove_empty(missing)
        raise_if_full(error, folder)
        raise ConfigError(
            f"cannot write to the output folder {folder}: {error.strerror or error}."
        ) from error
    _remove_drafts(place)
    try:
        yield
    finally:
        _release(place / LOCK, _held.pop(place))
        remove_empty(missing)


def _acquire(place: Path, shown: Path) -> int:
    """Return the descriptor of the locked file."""
    path = place / LOCK
    while True:
        place.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except FileNotFoundError:  # the run that ended meanwhile removed the folder that it had made
            continue
        if not _lock(file):
            process = os.read(file, 20).decode(errors="ignore")
            os.close(file)
            who = f"process {process}" if process.isdecimal() else "another process"
            raise ConfigError(f"{shown} is in use by {who}: wait until it ends, or choose another --output.")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):  # not removed by the one who had it before
                with suppress(OSError):  # a full disk
                    os.ftruncate(file, 0)
                    os.write(file, str(os.getpid()).encode())
                return file
        os.close(file)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> bool:
        os.lseek(file, 1024, os.SEEK_SET)  # beyond the text, which others may then read
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(file, 0, os.SEEK_SET)
        return True

    def _release(path: Path, file: int) -> None:
        os.close(file)
        with suppress(OSError):  # another process has it open
            path.unlink()

else:
    import fcntl

    def _lock(file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def _release(path: Path, file: int) -> None:
        with suppress(OSError):
            path.unlink()  # before the lock ends: whoever waits for this file sees that it is another's
        os.close(file)

    def _forget() -> None:
        """In a forked process: it must not keep a lock when the one that took it is killed."""
        for file in _held.values():
            os.close(file)
        _held.clear()

    os.register_at_fork(after_in_child=_forget)


def _remove_drafts(place: Path) -> None:
    """Remove what killed processes left half-written."""
    for draft in place.glob(DRAFTS.format(process="*", name="*")):
        process = re.match(r"\.sigcam-(\d+)-", draft.name)
        if process and not _is_running(int(process[1])):
            with suppress(OSError):
                draft.unlink()


def _is_running(process: int) -> bool:
    if sys.platform == "win32":  # there, os.kill ends it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
