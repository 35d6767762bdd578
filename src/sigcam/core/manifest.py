"""manifest.json: what made an output folder, so that it can be made again."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sigcam.core.files import write_text_atomic

PACKAGES = ("sigcam", "torch", "torchvision", "timm", "torchmetrics", "numpy", "numba", "pillow")


def versions() -> dict[str, str]:
    """Python and the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def provenance() -> dict[str, str]:
    """The command and the time, in words."""
    return {
        "command": shlex.join(["sigcam", *sys.argv[1:]]),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_manifest(folder: Path, **facts: Any) -> Path:
    """Writes manifest.json with the command, versions, time, and the given facts."""
    about = {
        "command": ["sigcam", *sys.argv[1:]],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **facts,
    }
    return write_text_atomic(folder / "manifest.json", json.dumps(about, indent=1, default=str) + "\n")
