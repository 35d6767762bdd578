"""Access control: the login, and middleware that checks requests and limits uploads."""

import json
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
    """ASGI middleware: adds security headers, limits uploads, refuses other web sites' requests.

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
            reason = "this page answers to local host names only: start it with --auth."
            await _refuse(scope, send, 400, reason)
            return
        if _is_foreign(headers, navigable=scope.get("method") in ("GET", "HEAD")):
            await _refuse(
                scope, send, 403, "this page takes no requests from other web sites: open it itself."
            )
            return
        if is_upload and not length.isdecimal():
            await _refuse(scope, send, 411, "an upload needs a Content-Length header.")
            return
        if is_upload and int(length) > MAX_UPLOAD_BYTES + 2**16:  # room for the multipart envelope
            await _refuse(scope, send, 413, f"an image may have at most {MAX_UPLOAD_BYTES >> 20} MB.")
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


def _is_foreign(headers: dict[str, str], *, navigable: bool) -> bool:
    """Return whether a browser sent the request for another web site; `navigable` if it may follow a link.

    Browsers say so themselves in Sec-Fetch-Site, which holds behind any proxy. Those that do not, or that
    reached the page without TLS, send an Origin: its host and port must be those that were asked for.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        follows_link = navigable and headers.get("sec-fetch-mode") == "navigate"
        return site not in ("same-origin", "none") and not follows_link
    hosts = (headers.get("host"), headers.get("x-forwarded-host"))  # no web site can send the latter unasked
    return origin is not None and not any(host and _same_host(origin, host) for host in hosts)


def _same_host(origin: str, host: str) -> bool:
    """Return whether an Origin names the host and port of a Host header; TLS may end at a proxy."""
    default_port = {"http": 80, "https": 443}.get(origin.partition("://")[0].lower())
    try:
        asked, sent = urlsplit(f"//{host}"), urlsplit(origin)
        same_port = (asked.port or default_port) == (sent.port or default_port)
    except ValueError:  # a port that is no number
        return False
    return default_port is not None and asked.hostname == sent.hostname is not None and same_port


async def _refuse(scope: Message, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})
