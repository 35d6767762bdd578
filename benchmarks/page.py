"""Load test of the page: several visitors at once on loopback; errors, response times and memory.

    .venv/bin/python benchmarks/page.py --people 8 --seconds 120

Each visitor uploads an image, drags both sliders, changes classes and methods, downloads files, and starts
again, with a pause of 0.1 to 0.5 s after each response. The requests are those of the browser.
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
    """Start the page with the embedded model in its own process; return it and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sigcam", "ui", "--no-open", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if "the page is at" in line:
            return server, f"http://127.0.0.1:{port}/"
    raise SystemExit("the page did not start")


def memory(pid: int) -> dict[str, float]:
    """Return the resident megabytes of a process, now and at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith("Vm")}
    return {"now": sizes["VmRSS"], "peak": sizes["VmHWM"]}


class Visitor(threading.Thread):
    """A thread that uses the page until the time is up."""

    def __init__(self, url: str, folder: Path, seed: int, until: float) -> None:
        super().__init__(daemon=True)
        self.url, self.until, self.session = url, until, f"visitor{seed}"
        self.images = [path.read_bytes() for path in sorted(folder.iterdir())]
        self.random = random.Random(seed)
        self.function_ids: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.errors: list[str] = []

    def run(self) -> None:
        """View one image after the other."""
        config = json.loads(self.send("config"))
        self.function_ids = {each["api_name"]: each["id"] for each in config["dependencies"]}
        while time.monotonic() < self.until:
            self.view_image()

    def view_image(self) -> None:
        """Upload, drag, change, download."""
        controls = (SOURCES, ["grad-cam"], "absolute", 0.5, 0.0)
        self.timed("upload", lambda: self.call_queued("upload", self.upload(), *controls))
        for _ in range(15):
            self.timed("threshold", lambda: self.call("set_threshold", round(self.random.random(), 2)))
        for _ in range(15):
            self.timed("delta", lambda: self.call("set_delta", round(self.random.uniform(-5, 5), 1)))
        classes, scale = (
            self.random.sample(range(1000), 2),
            self.random.choice(["unit", "signed", "absolute"]),
        )
        method = self.random.choice(["cam", "grad-cam", "layer-cam", "grad-cam++"])
        self.timed("redraw", lambda: self.call_queued("redraw", classes, SOURCES, [method], scale))
        self.timed("files", lambda: self.call_queued("download"))

    def timed(self, name: str, send: Callable[[], None]) -> None:
        """Send one request and record its time or error."""
        if time.monotonic() >= self.until:
            return
        began = time.perf_counter()
        try:
            send()
            self.seconds[name].append(time.perf_counter() - began)
        except Exception as error:
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
        time.sleep(self.random.uniform(0.1, 0.5))

    def send(self, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        """Return the body of the server's response."""
        request = urllib.request.Request(self.url + path, body, {"content-type": kind} if body else {})
        with urllib.request.urlopen(request, timeout=300) as response:
            return bytes(response.read())

    def upload(self) -> dict[str, Any]:
        """Upload an image and return the value of the page's file control."""
        head = b'--cut\r\nContent-Disposition: form-data; name="files"; filename="a.jpg"\r\n\r\n'
        body = head + self.random.choice(self.images) + b"\r\n--cut--\r\n"
        path = json.loads(self.send("gradio_api/upload", body, "multipart/form-data; boundary=cut"))[0]
        return {"path": path, "orig_name": "a.jpg", "meta": {"_type": "gradio.FileData"}}

    def request_body(self, name: str, data: tuple[Any, ...]) -> bytes:
        body = {"data": list(data), "fn_index": self.function_ids[name], "session_hash": self.session}
        return json.dumps(body).encode()

    def call(self, name: str, *data: Any) -> None:
        """Call a handler outside the queue, as the sliders do."""
        if "data" not in json.loads(self.send("gradio_api/run/predict", self.request_body(name, data))):
            raise RuntimeError("no data")

    def call_queued(self, name: str, *data: Any) -> None:
        """Call a handler in the queue and read its event stream."""
        self.send("gradio_api/queue/join", self.request_body(name, data))
        stream = f"{self.url}gradio_api/queue/data?session_hash={self.session}"
        with urllib.request.urlopen(stream, timeout=300) as lines:
            for line in lines:
                event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if event.get("msg") == "process_completed":
                    if not event["success"]:
                        raise RuntimeError(str(event["output"])[:200])
                    return
        raise RuntimeError("the stream ended without a result")


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile of the values."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    server, url = start_server()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for i, sample in enumerate(shapes(16, split="test", size=640)):
                sample.open().save(folder / f"{i}.jpg")
            before = memory(server.pid)
            until = time.monotonic() + args.seconds
            visitors = [Visitor(url, folder, seed, until) for seed in range(args.people)]
            for visitor in visitors:
                visitor.start()
            time.sleep(args.seconds / 2)
            middle = memory(server.pid)
            for visitor in visitors:
                visitor.join()
            after = memory(server.pid)
    finally:
        server.terminate()
        server.wait(20)
    errors = [error for visitor in visitors for error in visitor.errors]
    seconds: dict[str, list[float]] = defaultdict(list)
    for visitor in visitors:
        for what, values in visitor.seconds.items():
            seconds[what] += values
    requests = {
        what: {
            "count": len(values),
            "median_ms": round(1000 * quantile(values, 0.5), 1),
            "p95_ms": round(1000 * quantile(values, 0.95), 1),
            "worst_ms": round(1000 * max(values), 1),
        }
        for what, values in seconds.items()
    }
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "gradio", "sigcam")},
        "people": args.people,
        "seconds": args.seconds,
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
    target.write_text(json.dumps(report, indent=1) + "\n")
    table = Table(
        title=f"{args.people} visitors for {args.seconds:.0f} s: {len(errors)} errors", title_justify="left"
    )
    for heading in ("request", "count", "median ms", "95 % ms", "worst ms"):
        table.add_column(heading)
    for what, row in requests.items():
        table.add_row(what, *(str(value) for value in row.values()))
    Console(width=100).print(table)
    print("resident megabytes:", report["megabytes"])
    for error in errors[:5]:
        print(error)


if __name__ == "__main__":
    main()
