"""Access control: the login, and middleware that checks requests and limits uploads."""

import json
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sigcam.core.errors import ConfigError

MAX_UPLOAD_BYTES = 20 * 2**20
MAX_UPLOADS = 64  # files kept on disk
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


def parse_login(host: str, share: bool, auth: str | None) -> tuple[str, str] | None:
    """Return the user and password of `--auth`; ConfigError if others could open the page without."""
    if auth is None:
        if share or host not in LOOPBACK:
            option = "--share" if share else f"--host {host}"
            raise ConfigError(f"{option} lets others in, so it needs a login: add --auth user:password.")
        return None
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise ConfigError("--auth takes user:password, neither of them empty.")
    return user, password


class Guard:
    """ASGI middleware: adds security headers, limits uploads, and checks the Host header.

    Args:
        local: the page has no login, so only local host names are answered (against DNS rebinding).
    """

    def __init__(self, app: Any, *, local: bool) -> None:
        self.app, self.local = app, local
        self._uploads = deque[Path]()  # files on disk, oldest first

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        is_upload = scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload")
        length = headers.get("content-length", "")
        if self.local and _host_name(headers.get("host", "")) not in LOOPBACK:
            await _refuse(send, 400, "this page answers to local host names only: start it with --auth.")
            return
        if is_upload and not length.isdecimal():
            await _refuse(send, 411, "an upload needs a Content-Length header.")
            return
        if is_upload and int(length) > MAX_UPLOAD_BYTES + 2**16:  # room for the multipart envelope
            await _refuse(send, 413, f"an image may have at most {MAX_UPLOAD_BYTES >> 20} MB.")
            return
        response_body = bytearray()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            elif is_upload:
                response_body.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, send_with_headers)
        if is_upload:
            self._remove_oldest_uploads(bytes(response_body))

    def _remove_oldest_uploads(self, response: bytes) -> None:
        """Record the files that an upload's response lists, and delete the oldest beyond the limit."""
        with suppress(ValueError):
            for path in (Path(path) for path in json.loads(response) if isinstance(path, str)):
                if path in self._uploads:  # the same image again is the same file
                    self._uploads.remove(path)
                self._uploads.append(path)
        while len(self._uploads) > MAX_UPLOADS:
            self._uploads.popleft().unlink(missing_ok=True)


def _host_name(header: str) -> str:
    """Return the name in a Host header, without its port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


async def _refuse(send: Send, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})
