"""What keeps the page safe: who may reach it, which files it takes, how much it remembers; and fits."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.images import open_image

MAX_UPLOAD_BYTES = 20 * 2**20  # of one upload
MAX_PIXELS = 50_000_000  # of one picture, told by its header before anything is decoded
MAX_UPLOADS = 64  # uploads that lie on disk at a time
MAX_SESSIONS, IDLE_SECONDS = 32, 30 * 60
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # some others of Pillow's start programs
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS = {
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


# ------------------------------------------------------------------------------------------- who may come


def parse_login(host: str, share: bool, auth: str | None) -> tuple[str, str] | None:
    """The user and password that `--auth` names; DataError where others could come in without one."""
    if auth is None:
        if share or host not in LOOPBACK:
            asked = "--share" if share else f"--host {host}"
            raise DataError(
                f"{asked} lets others in, so it needs a login: add --auth user:password, or leave it out to "
                "serve this machine alone."
            )
        return None
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise DataError("--auth takes user:password, neither of them empty.")
    return user, password


class Guard:
    """An ASGI layer around the page: headers that keep the browser on this server, a limit on uploads, and
    for a page without login an answer to local names only, so that no other site can be resolved to it.

    Args:
        local: there is no login.
    """

    def __init__(self, app: Any, *, local: bool) -> None:
        self.app, self.local = app, local
        self._uploads = deque[Path]()  # on disk, the oldest first

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        upload = scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload")
        if self.local and _host(given.get("host", "")) not in LOOPBACK:
            await _refuse(send, 400, "this page answers on this machine only: start it with --auth.")
            return
        if upload and not given.get("content-length", "").isdecimal():
            await _refuse(send, 411, "an upload must say how large it is.")
            return
        if upload and int(given["content-length"]) > MAX_UPLOAD_BYTES + 2**16:  # what wraps the file
            await _refuse(send, 413, f"a picture may have at most {MAX_UPLOAD_BYTES >> 20} MB.")
            return

        said = bytearray()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            elif upload:
                said.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, answer)
        if upload:
            self._keep_few(bytes(said))

    def _keep_few(self, answer: bytes) -> None:
        """Removes the oldest uploads; the answer to one is the list of its files."""
        with suppress(ValueError):
            for path in (Path(path) for path in json.loads(answer) if isinstance(path, str)):
                if path in self._uploads:  # the same picture again: its file is one
                    self._uploads.remove(path)
                self._uploads.append(path)
        while len(self._uploads) > MAX_UPLOADS:
            self._uploads.popleft().unlink(missing_ok=True)


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


async def _refuse(send: Send, status: int, why: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode()})


# ------------------------------------------------------------------------------------------ which pictures


def open_upload(path: Path, uploads: Path) -> Image.Image:
    """The picture in a file that somebody sent to `uploads`, if it is small enough and of a usual kind. The
    file stays for now: two people who send the same picture share it."""
    name = path.name
    if not path.resolve().is_relative_to(uploads.resolve()):
        raise DataError(f"{name} was not sent to this page, so it is not opened.")
    try:
        if path.stat().st_size > MAX_UPLOAD_BYTES:
            raise DataError(f"{name} has more than {MAX_UPLOAD_BYTES >> 20} MB: make it smaller first.")
        check_image_header(path, name)
        return open_image(path)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or 'it is not a picture'}.") from error
    except DataError as error:
        raise DataError(str(error).replace(str(path), name)) from error


def check_image_header(path: Path, name: str) -> None:
    """DataError if the header tells of too many pixels, or of no kind of picture that is taken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit is lower
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        width = height = MAX_PIXELS
    except Exception as error:  # decoders raise nearly everything
        kinds = "JPEG, PNG, WebP, GIF, BMP or TIFF"
        raise DataError(f"cannot read {name}: it is damaged, or no {kinds} picture.") from error
    if width * height > MAX_PIXELS:
        limit = f"{MAX_PIXELS // 1_000_000} megapixels"
        raise DataError(f"{name} has more than {limit}: make it smaller first.")


# --------------------------------------------------------------------------------------- what is remembered


# ---------------------------------------------------------------------------------------- fitting on the side
