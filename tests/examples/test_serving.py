"""The serving example on loopback: shared batches, the token, hostile uploads, SIGTERM under load."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.folders import png_header

pytest.importorskip("fastapi", reason="needs fastapi and uvicorn: pip install 'sigcam[ui]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'sigcam[export]'")
pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def serving() -> Iterator[Any]:
    """The load test, whose clients and server are used here too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import serving

        yield serving


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    picture.save(held, kind)
    return held.getvalue()


def ask(server: Any, body: Any, token: str) -> tuple[int, Any]:
    """Send a body; return status and content of the answer."""
    headers = {"Authorization": f"Bearer {token}".encode()} if token else {}
    with closing(server.connect()) as connection:
        connection.request("POST", "/explain", body, headers)
        response = connection.getresponse()
        said = response.read()
        return response.status, json.loads(said) if said[:1] == b"{" else said


def begin(connection: http.client.HTTPConnection, token: str, length: int, first: bytes) -> None:
    """Send the head of a request and the first part of its body."""
    connection.putrequest("POST", "/explain")
    connection.putheader("Authorization", f"Bearer {token}")
    connection.putheader("Content-Length", str(length))
    connection.endheaders(first)


def test_requests_share_batches_and_a_stop_under_load_loses_none(
    serving: Any, red_square: Image.Image, exported_file: Path, tmp_path: Path
) -> None:
    picture, log = encoded(red_square), tmp_path / "log"
    with serving.started(exported_file, log) as server:
        late = server.connect()  # an upload that begins before SIGTERM and ends after the port is closed
        begin(late, serving.TOKEN, len(picture), picture[:100])
        rest = threading.Timer(4, lambda: late.send(picture[100:]))
        rest.start()
        seen = serving.load(server, serving.photographs(4), clients=16, seconds=1)
        with pytest.raises(ConnectionRefusedError):
            server.get("/health")
        response = late.getresponse()
        assert response.status == 200 and json.loads(response.read())["classes"][0]["class"] == "red"
        late.close()
    assert seen["errors"] == [] and seen["sent_away"] == 16, log.read_text()
    assert seen["requests"] > 32 and seen["pictures_per_batch"] > 1
    assert "Traceback" not in log.read_text()


def test_only_pictures_of_bearers_of_the_token_are_taken(
    serving: Any, red_square: Image.Image, exported_file: Path, tmp_path: Path
) -> None:
    picture = encoded(red_square)
    with serving.started(exported_file, tmp_path / "log") as server:
        for token in ("", "wrong", serving.TOKEN + "x", "ä"):
            status, said = ask(server, picture, token)
            assert status == 401 and "Authorization" in said["detail"], token
        before = server.megabytes()
        refused = {
            "a text": b"no picture",
            "nothing": b"",
            "half a picture": encoded(red_square, "JPEG")[:300],
            "a format that is not taken": encoded(red_square, "TIFF"),
            "a bomb": png_header(30_000, 30_000),
            "a smaller bomb": png_header(7_000, 6_000),
        }
        for name, body in refused.items():
            status, said = ask(server, body, serving.TOKEN)
            assert status == 422 and "picture of at most" in said["detail"], name
        with closing(server.connect()) as large:
            begin(large, serving.TOKEN, 20_000_000, bytes(10_000_001))
            assert large.getresponse().status == 413
        with closing(server.connect()) as gone:  # somebody who goes away in the middle
            begin(gone, serving.TOKEN, 1000, b"half of it")
        crowd = [server.connect() for _ in range(64)]
        for each in crowd:
            begin(each, serving.TOKEN, 1000, b"half of it")
        assert ask(server, picture, serving.TOKEN)[0] == 503
        for each in crowd:
            each.close()
        while ask(server, b"", serving.TOKEN)[0] == 503:
            time.sleep(0.01)  # until the server has seen them go
        assert server.megabytes() < before + 60
        for kind in ("JPEG", "PNG", "WEBP"):
            status, said = ask(server, encoded(red_square, kind), serving.TOKEN)
            assert status == 200 and said["size"] == [300, 200]
            assert said["classes"][0]["class"] == "red"
        status, said = ask(server, picture, serving.TOKEN)
        status, seen = server.get("/health")
        assert status == 200 and seen["pictures"] == seen["batches"] >= 3
        assert server.get("/docs")[0] == 404
    assert "Traceback" not in (tmp_path / "log").read_text()
    session = onnxruntime.InferenceSession(exported_file)  # the picture at its own size
    nodes = [node.name for node in session.get_outputs()]
    outputs = dict(zip(nodes, session.run(None, {"image": np.asarray(red_square)[None]}), strict=True))
    for rank, each in enumerate(said["classes"]):
        assert each["box"] == outputs["boxes"][0, rank].tolist()
        assert each["evidence"] == pytest.approx(outputs["evidence"][0, rank], abs=1e-4)
        assert each["present"] == outputs["present"][0, rank]
