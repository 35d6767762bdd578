"""manifest.json: the command, versions and facts that an output folder was made with."""

import json
import platform
import shlex
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sigcam.core.files import write_text_atomic

PACKAGES = ("sigcam", "torch", "torchvision", "timm", "torchmetrics", "numpy", "numba", "pillow")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    return dict(_versions())


@cache  # each takes a millisecond, and there are several for every kept result
def _versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def provenance() -> dict[str, str]:
    """Return the command and the time as text."""
    return {
        "command": shlex.join(["sigcam", *sys.argv[1:]]),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_manifest(folder: Path, **facts: Any) -> Path:
    """Write manifest.json with the command, time, versions and the given facts."""
    about = {
        "command": ["sigcam", *sys.argv[1:]],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **facts,
    }
    return write_text_atomic(folder / "manifest.json", json.dumps(about, indent=1, default=str) + "\n")
