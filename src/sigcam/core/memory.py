"""Free memory, and refusals in numbers of work that does not fit. Importing this module imports no torch."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sigcam.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import device as Device

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
SMALL = 2**26  # bytes that are not worth a look at what is free
_FAILED = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
)


def check_memory(needed: float, what: str, advice: str, device: Device | str = "cpu") -> None:
    """Raise ConfigError if `needed` bytes exceed the memory that is free; where that is unknown, do nothing.

    The message reads "`what` needs about 61 GB of memory, 22 GB are free: `advice`."
    """
    if needed < SMALL:
        return
    free = free_memory(device)
    if free is not None and needed > free:
        numbers = f"about {size_text(needed)} of memory, {size_text(free)} are free"
        raise ConfigError(f"{what} needs {numbers}: {advice}.")


def free_memory(device: Device | str = "cpu") -> int | None:
    """Return the bytes that can still be allocated on the device; None if that is unknown.

    On a CPU, the least of what the machine has (swap included), what its control groups leave, and what the
    limit of this process's address space leaves.
    """
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if kind != "cpu" or sys.platform != "linux":
        return None
    return max(0, min([_machine_free(), *_control_group_free(), *_address_space_free()]))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, says that memory could not be allocated."""
    if error is None:
        return False
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, for CUDA
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(words in text for words in _FAILED))
        or is_out_of_memory(error.__cause__)
    )


def size_text(count: float) -> str:
    """Return a number of bytes as a person reads it: 61 GB, 4.5 GB, 830 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{0 if count >= 10 * scale else 1}f} {unit}"
    return f"{count:.0f} bytes"


def _machine_free() -> int:
    """MemAvailable plus free swap; all memory of the machine where /proc is not mounted."""
    facts = _numbers(PROC / "meminfo")
    if "MemAvailable:" not in facts:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * (facts["MemAvailable:"] + facts.get("SwapFree:", 0))


def _control_group_free() -> Iterator[int]:
    """What each control group of this process leaves, version 1 or 2; cached files can be dropped."""
    for line in _text(PROC / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            root, limit, usage, prefix = CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                with suppress(ValueError):  # no such file, or "max"
                    free = int(_text(folder / limit)) - int(_text(folder / usage))
                    files = _numbers(folder / "memory.stat")
                    yield free + sum(files.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


def _address_space_free() -> Iterator[int]:
    """What RLIMIT_AS (ulimit -v) leaves, if it is set."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _text(PROC / "self" / "statm").split()
    if limit != resource.RLIM_INFINITY and pages:
        yield limit - int(pages[0]) * os.sysconf("SC_PAGE_SIZE")


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line: a name and a number."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
