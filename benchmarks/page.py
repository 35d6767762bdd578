"""The page under load: several people at once on loopback; answers, errors, response times and memory.

    .venv/bin/python benchmarks/page.py --people 8 --seconds 120

Each person sends a picture, then drags both sliders, changes classes and methods, makes files, and starts
again.
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
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sigcam.data.shapes import shapes

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
        self.url, self.folder, self.until = url, folder, until
        self.chance = random.Random(seed)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.errors: list[str] = []

    def run(self) -> None:
        """Picture after picture."""
        from gradio_client import Client

        client = Client(self.url, verbose=False)
        while time.monotonic() < self.until:
            self.one_picture(client)

    def one_picture(self, client: Any) -> None:
        """Send, drag, change, make files."""
        from gradio_client import handle_file

        picture = handle_file(str(self.chance.choice(sorted(self.folder.iterdir()))))
        self.ask(client, "upload", picture, SOURCES, ["grad-cam"], "evidence", True, 0.2, 0.0)
        for _ in range(15):
            self.ask(client, "move_box", round(self.chance.random(), 2))
        for _ in range(15):
            self.ask(client, "move_head", round(self.chance.uniform(-5, 5), 1))
        classes = self.chance.sample(range(1000), 2)
        method = self.chance.choice(["cam", "grad-cam", "layer-cam", "grad-cam++"])
        self.ask(
            client, "redraw", classes, SOURCES, [method], self.chance.choice(["evidence", "signed"]), True
        )
        self.ask(client, "links")

    def ask(self, client: Any, what: str, *words: Any) -> None:
        """One request, timed; an error is noted."""
        if time.monotonic() >= self.until:
            return
        began = time.perf_counter()
        try:
            client.predict(*words, api_name=f"/{what}")
            self.seconds[what].append(time.perf_counter() - began)
        except Exception as error:
            self.errors.append(f"{what}: {type(error).__name__}: {error}")


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
