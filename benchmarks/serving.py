"""Load test of examples/serving: clients on loopback, then SIGTERM; errors, batches, times, memory.

    .venv/bin/python benchmarks/serving.py --clients 16 --seconds 120

Each client sends photographs of different sizes, one after the other, on one connection. When the time is up
the server is stopped under that load: every request that it took must still be answered. Times are also given
as a ratio to a bare forward of the same file, one picture at a time, with nothing else running.
Writes benchmarks/results/serving.json.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOKEN = "a token"


class Server:
    """A running examples/serving/serve.py."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and content of a page."""
        with closing(self.connect()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def megabytes(self) -> float:
        """Return the resident memory of the process."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def started(model: Path, log: Path) -> Iterator[Server]:
    """Serve the exported file in its own process until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "serve:app",
        "--port",
        str(port),
        "--limit-concurrency",
        "64",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT / "examples" / "serving",
            env=os.environ | {"SIGCAM_MODEL": str(model), "SIGCAM_TOKEN": TOKEN},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, port)
    try:
        for _ in range(600):
            try:
                server.get("/health")
                break
            except ConnectionError:
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start: {log.read_text()}") from None
                time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


class Client(threading.Thread):
    """A thread that sends pictures until the server says that it stops."""

    def __init__(self, server: Server, pictures: Sequence[bytes], seed: int) -> None:
        super().__init__(daemon=True)
        self.server, self.pictures, self.random = server, pictures, random.Random(seed)
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self.sent_away = False

    def run(self) -> None:
        """Send one picture after the other on one connection."""
        connection = self.server.connect()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        while not (self.sent_away or self.errors):
            began = time.perf_counter()
            try:
                connection.request("POST", "/explain", self.random.choice(self.pictures), headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
                if response.status != 200 or not answer["classes"]:
                    self.errors.append(f"{response.status}: {answer}")
                self.sent_away = response.will_close
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self.seconds.append(time.perf_counter() - began)
        connection.close()


def photographs(count: int) -> list[bytes]:
    """Return pictures of different sizes as JPEG files."""
    from sigcam.data.readers.shapes import shapes

    pictures = []
    for i, sample in enumerate(shapes(count, split="test", size=640)):
        held = io.BytesIO()
        sample.open().resize((640 - 32 * (i % 5), 480 + 16 * (i % 7))).save(held, "JPEG", quality=90)
        pictures.append(held.getvalue())
    return pictures


def bare_seconds(model: Path, repeats: int) -> float:
    """Return the median time of the file's forward on one picture of the network's size."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    height, width = json.loads(session.get_modelmeta().custom_metadata_map["input_size"])[1:]
    image = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        session.run(None, {"image": image})
        took.append(time.perf_counter() - began)
    return statistics.median(took[repeats // 5 :])


def load(server: Server, pictures: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Keep the clients at it, stop the server under their load, and return what they saw."""
    crowd = [Client(server, pictures, seed) for seed in range(clients)]
    began, megabytes = time.perf_counter(), []
    for client in crowd:
        client.start()
    for part in (0.1, 0.5, 1.0):
        time.sleep(max(0.0, began + part * seconds - time.perf_counter()))
        megabytes.append(round(server.megabytes()))
    counts, lasted = server.get("/health")[1], time.perf_counter() - began
    code = server.stop()
    for client in crowd:
        client.join(60)
    took = sorted(each for client in crowd for each in client.seconds)
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": len(took),
        "errors": [error for client in crowd for error in client.errors],
        "sent_away": sum(client.sent_away for client in crowd),
        "exit_code": code,
        "pictures_per_second": counts["pictures"] / lasted,
        "pictures_per_batch": counts["pictures"] / counts["batches"],
        "p50_ms": 1000 * took[len(took) // 2],
        "p99_ms": 1000 * took[int(0.99 * len(took))],
        "megabytes": dict(zip(("after_a_tenth", "half_way", "at_the_end"), megabytes, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model", type=Path, help="an exported file; by default the embedded classifier's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = args.model or Path(name) / "model.onnx"
        if not args.model:
            subprocess.run([sys.executable, "-m", "sigcam", "export", str(model)], check=True)
        bare = 1000 * bare_seconds(model, 100)
        with started(model, Path(name) / "log") as server:
            report = load(server, photographs(16), args.clients, args.seconds)
    report |= {
        "bare_forward_ms": bare,
        "p50_ratio": report["p50_ms"] / bare,
        "p99_ratio": report["p99_ms"] / bare,
        "throughput_ratio": report["pictures_per_second"] * bare / 1000,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("onnxruntime", "fastapi", "uvicorn", "sigcam")},
    }
    report = {key: round(value, 3) if isinstance(value, float) else value for key, value in report.items()}
    (ROOT / "benchmarks" / "results" / "serving.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
