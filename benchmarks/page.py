"""The page under load: several people at once on loopback; answers, errors, response times and memory.

    .venv/bin/python benchmarks/page.py --people 8 --seconds 120

Each person sends a picture, then drags both sliders, changes classes and methods, makes files, and starts
again, with a pause of 0.1 to 0.5 s after each answer. Requests are those that the browser makes.
Writes benchmarks/results/page.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sigcam.data.readers.shapes import shapes

SOURCES = ["sigmoid branch", "softmax head"]


def start_server() -> tuple[subprocess.Popen[str], str]:
    """The page with the embedded model, in a process of its own, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "sigcam", "ui", "--no-open", "--port", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if "the page is at" in line:
            return server, f"http://127.0.0.1:{port}/"
    raise SystemExit("the page did not start")


def memory(pid: int) -> dict[str, float]:
    """Resident megabytes of a process, now and at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith("Vm")}
    return {"now": held["VmRSS"], "peak": held["VmHWM"]}


class Person(threading.Thread):
    """Somebody who uses the page until the time is up."""

    def __init__(self, url: str, folder: Path, seed: int, until: float) -> None:
        super().__init__(daemon=True)
        self.url, self.until, self.session = url, until, f"person{seed}"
        self.pictures = [path.read_bytes() for path in sorted(folder.iterdir())]
        self.chance = random.Random(seed)
        self.numbers: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.errors: list[str] = []

    def run(self) -> None:
        """Picture after picture."""
        config = json.loads(self.send("config"))
        self.numbers = {each["api_name"]: each["id"] for each in config["dependencies"]}
        while time.monotonic() < self.until:
            self.one_picture()

    def one_picture(self) -> None:
        """Send, drag, change, make files."""
        controls = (SOURCES, ["grad-cam"], "evidence", True, 0.4, 0.0)
        self.timed("upload", lambda: self.queued("upload", self.uploaded(), *controls))
        for _ in range(15):
            self.timed("threshold", lambda: self.at_once("set_threshold", round(self.chance.random(), 2)))
        for _ in range(15):
            self.timed("delta", lambda: self.at_once("set_delta", round(self.chance.uniform(-5, 5), 1)))
        classes, kind = self.chance.sample(range(1000), 2), self.chance.choice(["evidence", "signed"])
        method = self.chance.choice(["cam", "grad-cam", "layer-cam", "grad-cam++"])
        self.timed("redraw", lambda: self.queued("redraw", classes, SOURCES, [method], kind, True))
        self.timed("files", lambda: self.queued("download"))

    def timed(self, what: str, ask: Callable[[], None]) -> None:
        """One request; an error is noted."""
        if time.monotonic() >= self.until:
            return
        began = time.perf_counter()
        try:
            ask()
            self.seconds[what].append(time.perf_counter() - began)
        except Exception as error:
            self.errors.append(f"{what}: {type(error).__name__}: {error}")
        time.sleep(self.chance.uniform(0.1, 0.5))

    def send(self, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        """The server's answer."""
        request = urllib.request.Request(self.url + path, body, {"content-type": kind} if body else {})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return bytes(answer.read())

    def uploaded(self) -> dict[str, Any]:
        """A picture on the server, as the page's control names it."""
        head = b'--cut\r\nContent-Disposition: form-data; name="files"; filename="a.jpg"\r\n\r\n'
        body = head + self.chance.choice(self.pictures) + b"\r\n--cut--\r\n"
        path = json.loads(self.send("gradio_api/upload", body, "multipart/form-data; boundary=cut"))[0]
        return {"path": path, "orig_name": "a.jpg", "meta": {"_type": "gradio.FileData"}}

    def asked(self, name: str, data: tuple[Any, ...]) -> bytes:
        words = {"data": list(data), "fn_index": self.numbers[name], "session_hash": self.session}
        return json.dumps(words).encode()

    def at_once(self, name: str, *data: Any) -> None:
        """What the sliders ask."""
        if "data" not in json.loads(self.send("gradio_api/run/predict", self.asked(name, data))):
            raise RuntimeError("no data")

    def queued(self, name: str, *data: Any) -> None:
        """What waits in line: the answer comes in a stream."""
        self.send("gradio_api/queue/join", self.asked(name, data))
        stream = f"{self.url}gradio_api/queue/data?session_hash={self.session}"
        with urllib.request.urlopen(stream, timeout=300) as lines:
            for line in lines:
                said = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if said.get("msg") == "process_completed":
                    if not said["success"]:
                        raise RuntimeError(str(said["output"])[:200])
                    return
        raise RuntimeError("the stream ended without an answer")


def share(values: list[float], part: float) -> float:
    """A quantile."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    server, url = start_server()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for i, sample in enumerate(shapes(16, split="test", size=640)):
                sample.open().save(folder / f"{i}.jpg")
            before = memory(server.pid)
            until = time.monotonic() + given.seconds
            people = [Person(url, folder, seed, until) for seed in range(given.people)]
            middle = dict[str, float]()
            for person in people:
                person.start()
            time.sleep(given.seconds / 2)
            middle = memory(server.pid)
            for person in people:
                person.join()
            after = memory(server.pid)
    finally:
        server.terminate()
        server.wait(20)
    errors = [error for person in people for error in person.errors]
    seconds: dict[str, list[float]] = defaultdict(list)
    for person in people:
        for what, values in person.seconds.items():
            seconds[what] += values
    requests = {
        what: {
            "count": len(values),
            "median_ms": round(1000 * share(values, 0.5), 1),
            "p95_ms": round(1000 * share(values, 0.95), 1),
            "worst_ms": round(1000 * max(values), 1),
        }
        for what, values in seconds.items()
    }
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "gradio", "sigcam")},
        "people": given.people,
        "seconds": given.seconds,
        "errors": len(errors),
        "first_errors": errors[:5],
        "requests": requests,
        "megabytes": {
            "before": round(before["now"]),
            "half_way": round(middle["now"]),
            "after": round(after["now"]),
            "peak": round(after["peak"]),
        },
    }
    target = Path(__file__).parent / "results" / "page.json"
    target.write_text(json.dumps(found, indent=1) + "\n")
    table = Table(
        title=f"{given.people} people for {given.seconds:.0f} s: {len(errors)} errors", title_justify="left"
    )
    for heading in ("request", "count", "median ms", "95 % ms", "worst ms"):
        table.add_column(heading)
    for what, row in requests.items():
        table.add_row(what, *(str(value) for value in row.values()))
    Console(width=100).print(table)
    print("resident megabytes:", found["megabytes"])
    for error in errors[:5]:
        print(error)


if __name__ == "__main__":
    main()
