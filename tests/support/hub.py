"""A Hugging Face hub on this machine: as much of the real one as its client needs for small files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "hf_whoMayWrite"


class LocalHub(ThreadingHTTPServer):
    """Repositories with their commits, each of them all files by name; the requests that were made."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repository, commit, file
        self.gated = set[str]()
        self.requests = list[tuple[str, str]]()
        self.address = f"http://127.0.0.1:{self.server_port}"

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes] | None:
        """The files of a commit, `main` being the latest; None if there is no such commit."""
        commits = self.commits[repo]
        return commits.get(next(reversed(commits), "") if revision == "main" else revision)

    def downloads(self) -> int:
        return sum(method == "GET" for method, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.server.requests.append((self.command, self.path))
        if self.path == "/":
            return self._send(200)
        repo, _, rest = self.path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo in self.server.gated:
            return self._send(403, X_Error_Code="GatedRepo")
        if repo not in self.server.commits:
            return self._send(404, X_Error_Code="RepoNotFound")
        files = self.server.files(repo, revision)
        if files is None:
            return self._send(404, X_Error_Code="RevisionNotFound")
        if name not in files:
            return self._send(404, X_Error_Code="EntryNotFound")
        commit = next(key for key, value in self.server.commits[repo].items() if value is files)
        etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
        return self._send(200, files[name], ETag=etag, X_Repo_Commit=commit)

    do_GET = do_HEAD

    def do_POST(self) -> None:
        self.server.requests.append((self.command, self.path))
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        asked = [json.loads(line) for line in lines]
        words = self.path.split("/")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401)
        if self.path == "/api/repos/create":
            repo = f"{asked[0]['organization']}/{asked[0]['name']}"
            known = repo in self.server.commits
            self.server.commits.setdefault(repo, {})
            return self._send(
                409 if known else 200, json.dumps({"url": f"{self.server.address}/{repo}"}).encode()
            )
        if words[-2] == "preupload":
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked[0]["files"]
            ]
            return self._send(200, json.dumps({"files": modes}).encode())
        if words[-2] == "commit":
            repo, values = "/".join(words[3:5]), [line["value"] for line in asked if line["key"] == "file"]
            files = {value["path"]: base64.b64decode(value["content"]) for value in values}
            oid = hashlib.sha1(repr((len(self.server.commits[repo]), files)).encode()).hexdigest()
            self.server.commits[repo][oid] = {**(self.server.files(repo) or {}), **files}
            url = f"{self.server.address}/{repo}/commit/{oid}"
            return self._send(200, json.dumps({"success": True, "commitUrl": url, "commitOid": oid}).encode())
        return self._send(200)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    """A hub that this process talks to instead of the real one, with an empty cache; the token may write."""
    from huggingface_hub import constants

    with LocalHub() as server:
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
