"""The page without a browser: maps, access control, uploads, sessions and fits."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from html import unescape
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.cli.main import main
from sigcam.core.errors import DataError, MissingExtra
from sigcam.data.images import images_from_paths
from sigcam.data.readers.shapes import shapes
from sigcam.data.sample import Sample, Samples
from sigcam.drawing.overlay import overlay
from sigcam.methods.explainer import explain
from sigcam.models.preprocess import Preprocess
from sigcam.network.attachment import attach
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.dual import DualBranch
from sigcam.network.trace import lock_of
from sigcam.ui.fit_job import FitJob, Stopped
from sigcam.ui.handlers import Page
from sigcam.ui.html import boxes_html, links_html, panels_html, state_link_html, top_classes_html
from sigcam.ui.images import ImageGallery, open_gallery, open_upload
from sigcam.ui.security import HEADERS, MAX_UPLOAD_BYTES, Guard, parse_login
from sigcam.ui.serve import UiOptions
from sigcam.ui.sessions import Sessions
from sigcam.ui.sources import Source, class_choices, open_networks, same_class, sources_of
from sigcam.ui.viewer import Request, Viewer, disagreements, probabilities, shift_head
from support.folders import png_header
from support.tiny import Gap, Vgg

PICTURE = shapes(1, split="test", size=64)[0].open()


def network(classes: int = 4, seed: int = 0) -> DualBranch:
    """Return a tiny classifier with preprocessing, class names and a random branch."""
    torch.manual_seed(seed)
    net = attach(Gap(classes, channels=12))
    net.transform, net.fitted = Preprocess(32, 48), True
    net.class_names = tuple(f"bird {k}" for k in range(classes))
    torch.nn.init.normal_(net.last_layer("sigmoid").get_parameter("weight"))
    return net


def calibrated(classes: int = 4) -> DualBranch:
    """Return such a network whose branch has a scale for evidence and one for maps."""
    net = network(classes)
    net.calibration = BranchCalibration(LogitScale(2.0, -0.5), {1.0: LogitScale(1.5, 0.3)})
    return net


def view(net: DualBranch, *methods: str, classes=(0, 1), scale: Any = "unit") -> Viewer:
    viewer = Viewer("bird", PICTURE, [net])
    request = Request(tuple(classes), tuple(sources_of(net)), methods or ("grad-cam",), scale)
    viewer.update(request)
    return viewer


def captions(viewer: Viewer) -> list[str]:
    """Return the captions of the panels."""
    panels = panels_html(viewer).partition('<figure class="sc-swipe"')[0]
    return [part.partition("</figcaption>")[0] for part in panels.split("<figcaption>")[2:]]


# ------------------------------------------------------------------------------------------------- maps


def test_a_shift_of_the_head_moves_softmax_maps_and_nothing_else():
    viewer = view(network(), "grad-cam", "cam", scale="signed")
    before = {id(p): (p.raw_map, p.image_uri) for p in viewer.panels}
    table = top_classes_html([viewer.top_classes(viewer.main_net, "")], 0)
    viewer.shift(-2.5)
    features = viewer.forward_pass(viewer.main_net).features[0].sum(0)
    amount = -2.5 * float(viewer.main_net.last_layer("softmax").weight.detach().std())
    for panel in viewer.panels:
        low, uri = before[id(panel)]
        if panel.source.branch == "softmax":
            assert torch.allclose(panel.raw_map[0, 0], low[0, 0] + amount * features, atol=1e-5)
            assert panel.image_uri != uri
        elif panel.source.branch == "sigmoid":
            assert torch.equal(panel.raw_map, low) and panel.image_uri == uri
        else:  # the mean over classes takes the shift off
            assert torch.allclose(panel.raw_map, low, atol=1e-5)
    after = top_classes_html([viewer.top_classes(viewer.main_net, "")], 0)
    assert after == table, "six digits of every probability"


def test_shifted_probabilities_are_computed_anew_and_stand_still():
    net = network()
    forward_pass = Viewer("bird", PICTURE, [net]).forward_pass(net)
    moved = probabilities(net, forward_pass, 3.0)
    assert torch.allclose(moved, probabilities(net, forward_pass), atol=1e-7)
    assert torch.allclose(moved, probabilities(net, forward_pass), rtol=0, atol=1e-12)
    assert torch.allclose(moved.float(), forward_pass.softmax.softmax(1)[0], atol=1e-6)
    other, again = shift_head(net, forward_pass, 3.0)
    assert torch.equal(other.last_layer("softmax").weight, net.last_layer("softmax").weight + 3.0)
    assert not torch.allclose(again.softmax_logits, forward_pass.softmax_logits)
    assert again.softmax_logits.softmax(1).allclose(forward_pass.softmax.softmax(1), atol=1e-5)


@pytest.mark.parametrize("method", ["cam", "grad-cam", "layer-cam", "score-cam"])
def test_boxes_of_the_page_are_those_of_explain(method: str):
    net = network()
    viewer = view(net, method, classes=(2,))
    viewer.threshold = 0.4
    for panel, box in zip(viewer.panels, viewer.boxes(), strict=True):
        ex = explain(net, [PICTURE], method, branch=panel.source.branch, classes=2)
        x0, y0, x1, y1 = ex.boxes(0.4)[0][0].tolist()
        found = None if box is None else (box[0] * 48, box[1] * 32, box[2] * 48, box[3] * 32)
        assert found is None if x1 <= x0 else found == pytest.approx((x0, y0, x1, y1))


def test_signed_maps_in_logits_share_one_scale_around_zero_and_others_keep_their_own():
    viewer = view(network(), "grad-cam", "eigen-cam", scale="signed")
    logits = [p for p in viewer.panels if p.in_logits]
    assert {p.scale_max for p in logits} == {max(float(p.raw_map.abs().max()) for p in logits)}
    assert {p.scale_max for p in viewer.panels if not p.in_logits} != {logits[0].scale_max}
    assert f"<span>-{logits[0].scale_max:.3g}</span><span>0</span>" in panels_html(viewer)
    viewer.update(Request((0, 1), tuple(sources_of(viewer.main_net)), ("grad-cam",), "unit"))
    assert len({p.scale_max for p in viewer.panels}) > 1


@pytest.mark.parametrize("method", ["cam", "grad-cam", "layer-cam"])
def test_probabilities_of_the_page_are_those_of_explain_and_never_stretched(method: str):
    net = calibrated()
    viewer = view(net, method, scale="absolute")
    viewer.threshold = 0.5
    files = viewer.files()
    maps, rows = np.load(io.BytesIO(files["maps.npy"])), json.loads(files["maps.json"])["maps"]
    height, width = viewer.display.height, viewer.display.width
    for i, (panel, box) in enumerate(zip(viewer.panels, viewer.boxes(), strict=True)):
        assert panel.absolute == (panel.source.branch == "sigmoid")
        if not panel.absolute:
            continue
        asked: Any = {"classes": panel.class_index, "scale": "probability"}
        ex = explain(net, [PICTURE], method, **asked)
        assert torch.allclose(panel.unit_map, ex.maps, atol=1e-6) and panel.scale_max == 1
        assert np.allclose(maps[i], ex.maps[0].numpy(), atol=1e-6)
        assert rows[i]["unit"] == "probability" and rows[i]["present"] == bool(ex.present[0])
        x0, y0, x1, y1 = ex.boxes()[0][0].tolist()
        found = None if box is None else (box[0] * 48, box[1] * 32, box[2] * 48, box[3] * 32)
        assert found is None if x1 <= x0 else found == pytest.approx((x0, y0, x1, y1))
        drawn = explain(net, [PICTURE], method, size=(height, width), **asked).maps[0]
        expected = overlay(viewer.display, drawn)
        difference = np.asarray(viewer._overlay(panel)).astype(int) - np.asarray(expected).astype(int)
        assert abs(difference).max() <= 1, "0 and 1 have the same colours in every map"


def test_a_map_of_low_probabilities_is_not_called_blank():
    net = calibrated()
    net.last_layer("sigmoid").get_parameter("bias").data -= 100
    absolute = [p for p in view(net, "cam", scale="absolute").panels if p.absolute]
    assert all(bool((p.raw_map < 0).all()) and p.unit_map.max() < 0.01 and not p.note for p in absolute)


def test_both_classes_of_one_logit_have_complementary_probabilities_on_the_page():
    viewer = view(calibrated(1), "cam", scale="absolute")
    one, other = [p for p in viewer.panels if p.absolute]
    assert torch.allclose(one.unit_map + other.unit_map, torch.ones(1, 32, 48), atol=1e-5)


def test_maps_without_an_absolute_scale_keep_their_own_and_say_why():
    viewer = view(calibrated(), "cam", "eigen-cam", classes=(0,), scale="absolute")
    own = view(viewer.main_net, "cam", "eigen-cam", classes=(0,), scale="unit")
    reasons = {
        ("sigmoid", "cam"): "",
        ("sigmoid", "eigen-cam"): "no absolute scale: maps by eigen-cam are not in logits",
        ("softmax", "cam"): "no absolute scale: the softmax head has none",
        ("centred", "cam"): "no absolute scale: the centred softmax head has none",
    }
    for panel, plain, caption in zip(viewer.panels, own.panels, captions(viewer), strict=True):
        why = reasons.get((panel.source.branch, panel.method), "softmax head has none")
        assert (why in caption) if why else ("no absolute scale" not in caption)
        assert ("full colour" in caption) == bool(why)
        if why:
            assert torch.equal(panel.raw_map, plain.raw_map) and panel.image_uri == plain.image_uri
    legend = panels_html(viewer).partition("sc-legend")[2]
    assert "<span>0</span><span>0.5</span><span>1</span>" in legend and "probability that a place" in legend
    pair = tuple(s for s in sources_of(viewer.main_net) if s.branch != "centred")
    viewer.update(Request((0,), pair, ("cam",), "absolute"))
    assert ["full colour" in caption for caption in captions(viewer)] == [False, True]
    relative = view(network(), "cam", scale="absolute")
    assert "sc-legend" not in panels_html(relative) and not any(p.absolute for p in relative.panels)
    assert "no absolute scale: this branch is not calibrated at this size" in captions(relative)[0]
    other_size = calibrated()
    other_size.calibration = BranchCalibration(LogitScale(), {2.0: LogitScale(2.0)})
    assert "not calibrated at this size" in captions(view(other_size, "cam", scale="absolute"))[0]


def test_a_calibrated_branch_says_whether_the_class_is_here_on_every_scale():
    net = network()
    middle = float(explain(net, [PICTURE], classes="all").logits.mean())
    net.calibration = BranchCalibration(LogitScale(1.0, -middle), {1.0: LogitScale()})
    ex = explain(net, [PICTURE], classes="all")
    assert len(set(ex.present[0].tolist())) == 2, "some classes are there and some are not"
    for scale in ("unit", "signed", "absolute"):
        viewer = view(net, "cam", classes=range(4), scale=scale)
        for panel, caption in zip(viewer.panels, captions(viewer), strict=True):
            k = panel.class_index
            words = ">here</b>" if ex.present[0, k] else ">not here</b>"
            line = f"{words}, evidence {float(ex.evidence[0, k]):.3f}"
            assert (line in caption) == (panel.source.branch == "sigmoid")
        assert not any("here</b>" in caption for caption in captions(view(network(), "cam", scale=scale)))


def test_a_head_that_is_not_linear_is_drawn_but_not_shifted():
    net = attach(Vgg(), example=torch.randn(1, 3, 16, 16))
    net.transform = Preprocess(16, 16)
    viewer = view(net, "grad-cam")
    before = [p.image_uri for p in viewer.panels]
    viewer.shift(4.0)
    assert [p.image_uri for p in viewer.panels] == before and len(before) == 4
    assert "not fitted" in top_classes_html([viewer.top_classes(net, "")], 0)


def test_two_heads_of_one_class_are_laid_over_one_another_with_a_divider():
    viewer = view(network(), "cam", classes=(2, 0))
    html = panels_html(viewer)
    swipe = html.partition('class="sc-swipe"')[2].partition("</figure>")[0]
    left, right = viewer.panels[0], viewer.panels[2]
    assert (left.class_index, right.class_index) == (2, 2) and left.source != right.source
    assert f'class="sc-over" src="{left.image_uri}"' in swipe and f'<img src="{right.image_uri}"' in swipe
    assert f'aria-label="Divider: {left.source.name} to the left of the line, {right.source.name}' in swipe
    for sources, methods in (
        (sources_of(viewer.main_net)[:1], ("cam", "layer-cam")),
        ([left.source], ("cam",)),
    ):
        viewer.update(Request((2, 0), tuple(sources), methods))
        assert "sc-swipe" not in panels_html(viewer), "one head is not compared with itself"


def test_files_hold_signed_maps_overlays_and_numbers():
    viewer = view(network(), "cam", scale="signed")
    viewer.threshold = 0.3
    files = viewer.files()
    maps = np.load(io.BytesIO(files["maps.npy"]))
    assert maps.shape == (len(viewer.panels), 32, 48) and maps.min() < 0
    about = json.loads(files["maps.json"])
    assert about["threshold"] == 0.3 and len(about["maps"]) == len(viewer.panels)
    row = next(r for r in about["maps"] if r["from"] == "softmax head" and r["class"] == 1)
    ex = explain(viewer.main_net, [PICTURE], "cam", branch="softmax", classes=1)
    assert row["probability"] == pytest.approx(float(ex.probability[0]), abs=1e-6)
    assert row["evidence"] == pytest.approx(float(ex.evidence[0]), abs=1e-6)
    assert Image.open(io.BytesIO(files["overlay.png"])).width == viewer.display.width * len(viewer.panels)
    assert links_html(files).count("<a ") == 3


def test_what_is_asked_is_checked():
    net = network()
    viewer = Viewer("bird", PICTURE, [net])
    with pytest.raises(DataError, match="at least one"):
        viewer.update(Request((0,), (), ("cam",)))
    with pytest.raises(DataError, match="12 at most"):
        viewer.update(Request((0, 1, 2), tuple(sources_of(net)), ("cam", "grad-cam")))
    with pytest.raises(DataError, match="does not exist"):
        viewer.update(Request((99,), tuple(sources_of(net)), ("cam",)))


def test_two_networks_are_compared_by_name_then_by_number():
    one, other = network(4), network(4, seed=1)
    other.class_names = ("bird 3", "bird 2", "bird 1", "owl")
    assert same_class(3, one, other) == 0 and same_class(0, one, other) is None
    other.class_names = None
    assert same_class(3, one, other) == 3
    assert same_class(1, one, network(3)) == 1
    assert disagreements(sources_of(one)[0], sources_of(one)[0], [PICTURE]) == [0.0]
    assert 0 < disagreements(sources_of(one)[0], sources_of(other)[0], [PICTURE])[0] <= 1


def test_equal_class_names_are_told_apart_by_number():
    net = network()
    net.class_names = ("crane", "owl", "crane", "jay")
    assert class_choices(net) == [("crane (0)", 0), ("owl", 1), ("crane (2)", 2), ("jay", 3)]


def test_names_cannot_write_html():
    net = network()
    net.class_names = ("<script>alert(1)</script>",) * 4
    viewer = Viewer("<img src=x onerror=alert(1)>", PICTURE, [net], credit="<script>")
    viewer.update(Request((0,), tuple(sources_of(net)), ("cam",)))
    page = panels_html(viewer) + top_classes_html([viewer.top_classes(net, "<b>")], 0)
    assert "sc-swipe" in page
    page += state_link_html('"><script>')
    page += links_html({'"><script>.npy': b""})
    assert "<script" not in page and "<img src=x" not in page and "&lt;script&gt;" in page
    assert boxes_html([None, (0, 0, 0.5, 1)], 0.4).startswith(
        "<style data-threshold=0.4>#panels .sc-p1 .sc-box{display:block;left:0.00%"
    )


# --------------------------------------------------------------------------------------------- access


@pytest.mark.parametrize(
    ("host", "share", "auth"), [("0.0.0.0", False, None), ("127.0.0.1", True, None), ("::", True, None)]
)
def test_nobody_else_is_let_in_without_a_login(host: str, share: bool, auth: str | None):
    with pytest.raises(DataError, match="--auth user:password"):
        parse_login(host, share, auth)
    assert parse_login(host, share, "me:a:b") == ("me", "a:b")
    assert parse_login("localhost", False, None) is None


@pytest.mark.parametrize("auth", ["", "me", "me:", ":secret"])
def test_half_a_login_is_refused(auth: str):
    with pytest.raises(DataError, match="user:password"):
        parse_login("127.0.0.1", False, auth)


def test_the_command_ends_with_two_and_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sigcam", "ui", "--host", "0.0.0.0", "--no-open"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "--auth user:password" in capsys.readouterr().err


def test_a_missing_gradio_is_named_with_its_pip_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    for room in ("sigcam.ui.handlers", "sigcam.ui.layout"):
        monkeypatch.delitem(sys.modules, room, raising=False)
    monkeypatch.setattr(sys, "argv", ["sigcam", "ui", "--no-open"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "pip install 'sigcam[ui]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_that_does_not_answer_in_time_ends_with_two_and_a_sentence():
    code = (
        "import sys, gradio\n"
        "def launch(*args, **options):\n    raise ValueError('When localhost is not accessible, a link')\n"
        "gradio.Blocks.launch = launch\n"
        "sys.argv = ['sigcam', 'ui', '--no-open', '--port', '17861']\n"
        "from sigcam.cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("sigcam:")]
    assert done.returncode == 2 and "127.0.0.1:17861 did not answer in time" in line


@pytest.mark.parametrize("module", ["sigcam.cli.app", "sigcam.ui.serve"])
def test_help_imports_no_gradio(module: str):
    code = f"import sys, {module}; print([m for m in ('gradio', 'torch', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def response(
    guard: Guard, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str]]:
    """Return the status and headers of the response to a request through the guard."""
    sent = []

    async def send(message) -> None:
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": given}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}


async def fine(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


def test_the_guard_answers_to_local_names_only_unless_there_is_a_login():
    local, open_to_all = (Guard(fine, local=value) for value in (True, False))
    for host in ("127.0.0.1:7860", "localhost", "[::1]:7860"):
        assert response(local, host=host)[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        assert response(local, host=host)[0] == 400
    assert response(open_to_all, host="page.example")[0] == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:7860", "http://127.0.0.1:7860", 200),
        ("LocalHost:7860", "http://localhost:7860", 200),
        ("[::1]:7860", "http://[::1]:7860", 200),
        ("page.example", "https://page.example", 200),  # TLS ends at a proxy or a tunnel
        ("page.example:443", "https://page.example", 200),
        ("page.example", "https://page.example:443", 200),
        ("page.example:8443", "https://page.example:8443", 200),
        ("127.0.0.1:7860", "http://127.0.0.1:8000", 403),
        ("127.0.0.1:7860", "http://127.0.0.1", 403),
        ("127.0.0.1:7860", "http://localhost:7860", 403),
        ("page.example", "https://evil.example", 403),
        ("page.example", "https://page.example.evil.example", 403),
        ("page.example", "https://page.example@evil.example", 403),
        ("page.example", "https://evil.example#page.example", 403),
        ("page.example", "null", 403),
        ("page.example", "", 403),
        ("page.example", "page.example", 403),
        ("page.example", "file://page.example", 403),
        ("page.example", "https://page.example:port", 403),
        ("page.example", "https://[page.example", 403),
        ("", "https://", 403),
    ],
)
def test_only_the_pages_own_origin_is_answered(host: str, origin: str, status: int):
    guard = Guard(fine, local=False)
    for method in ("POST", "GET", "DELETE"):
        assert response(guard, "/gradio_api/queue/join", method, host=host, origin=origin)[0] == status
    assert response(guard, "/gradio_api/queue/join", "POST", host=host)[0] == 200, "curl sends no origin"


@pytest.mark.parametrize(
    ("method", "site", "mode", "status"),
    [
        ("POST", "same-origin", "cors", 200),
        ("POST", "none", "navigate", 200),
        ("POST", "cross-site", "no-cors", 403),
        ("POST", "cross-site", "navigate", 403),  # a form
        ("POST", "same-site", "cors", 403),  # another port
        ("GET", "cross-site", "navigate", 200),  # a link
        ("GET", "cross-site", "no-cors", 403),  # an image or a script
    ],
)
def test_what_a_browser_says_of_a_requests_site_decides(method: str, site: str, mode: str, status: int):
    guard = Guard(fine, local=False)
    found = response(guard, "/", method, host="page.example", sec_fetch_site=site, sec_fetch_mode=mode)
    assert found[0] == status
    if site == "same-origin":  # a proxy may rewrite the host; no web site can write this header
        assert response(guard, "/", method, host="inside:80", origin="null", sec_fetch_site=site)[0] == 200


def test_a_proxy_may_forward_the_host():
    forwarded = {"host": "127.0.0.1:7860", "x_forwarded_host": "page.example"}
    guard = Guard(fine, local=True)
    assert response(guard, "/", "POST", origin="https://page.example", **forwarded)[0] == 200
    assert response(guard, "/", "POST", origin="https://evil.example", **forwarded)[0] == 403


def test_a_websocket_of_another_site_is_closed():
    sent = []

    async def send(message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"origin", b"http://evil.example")]
    scope = {"type": "websocket", "path": "/", "headers": headers}
    asyncio.run(Guard(fine, local=True)(scope, fine, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_the_guard_keeps_the_browser_here_and_uploads_small():
    guard = Guard(fine, local=False)
    status, headers = response(guard)
    assert status == 200 and headers == HEADERS
    assert "default-src 'self'" in headers["content-security-policy"]
    upload = "/gradio_api/upload"
    assert response(guard, upload, content_length=str(MAX_UPLOAD_BYTES))[0] == 200
    assert response(guard, upload, content_length=str(2 * MAX_UPLOAD_BYTES))[0] == 413
    assert response(guard, upload)[0] == 411


def test_only_the_latest_uploads_stay_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("sigcam.ui.security.MAX_UPLOADS", 2)
    files = [tmp_path / f"{i}.png" for i in range(5)]

    async def stored(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(
            {"type": "http.response.body", "body": json.dumps([str(files[int(scope["path"][1])])]).encode()}
        )

    guard = Guard(stored, local=False)
    for i, file in enumerate(files):
        file.write_bytes(b"x")
        response(guard, f"/{i}/upload", content_length="1")
    (tmp_path / "thumbnail.webp").write_bytes(b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3.png", "4.png", "thumbnail.webp"]
    files[0].write_bytes(b"x")
    for i in (3, 0, 3):  # sent again, it is the latest
        response(guard, f"/{i}/upload", content_length="1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.png", "3.png", "thumbnail.webp"]


# --------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("bomb.png", png_header(10_000, 10_000), "more than 50 megapixels"),
        ("huge.png", png_header(60_000, 60_000), "more than 50 megapixels"),
        ("text.png", b"this is no picture", "damaged"),
        ("empty.jpg", b"", "damaged"),
        ("cut.png", png_header(20, 20), "cannot read cut.png"),
        ("large.jpg", b"\xff" * (MAX_UPLOAD_BYTES + 1), "more than 20 MB"),
        ("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "damaged, or not a JPEG"),
    ],
)
def test_a_file_that_cannot_be_shown_gives_a_sentence_without_a_path(tmp_path, name, data, why):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=why) as said:
        open_upload(tmp_path / name, tmp_path)
    assert str(tmp_path) not in str(said.value) and name in str(said.value)


def test_a_file_from_elsewhere_is_not_opened(tmp_path):
    (tmp_path / "up").mkdir()
    PICTURE.save(tmp_path / "a.png")
    PICTURE.save(tmp_path / "up" / "b.png")
    (tmp_path / "up" / "link.png").symlink_to(tmp_path / "a.png")
    for path in (tmp_path / "a.png", tmp_path / "up" / ".." / "a.png", tmp_path / "up" / "link.png"):
        with pytest.raises(DataError, match="was not uploaded to this page"):
            open_upload(path, tmp_path / "up")
    for _ in range(2):  # two people who send the same picture share its file
        assert open_upload(tmp_path / "up" / "b.png", tmp_path / "up").size == PICTURE.size


def test_the_gallery_opens_what_is_on_it_and_nothing_else(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir(), outside.mkdir()
    PICTURE.save(outside / "secret.png")
    PICTURE.save(inside / "a.png")
    (inside / "link.png").symlink_to(outside / "secret.png")
    gallery = ImageGallery(images_from_paths([inside]), inside)
    assert gallery.open(0)[0] == "a.png"
    with pytest.raises(DataError, match="outside the folder"):
        gallery.open(1)
    for index in (-1, 2, "0", "../out/secret.png", None, True, 0.0):
        with pytest.raises(DataError, match="no such image"):
            gallery.open(index)
    up = Samples((Sample("up", lambda: PICTURE, path=inside / ".." / "out" / "secret.png"),), ())
    with pytest.raises(DataError, match="outside the folder"):
        ImageGallery(up, inside).open(0)


def test_a_file_of_the_folder_that_is_gone_gives_a_sentence(tmp_path):
    for i in range(4):
        PICTURE.save(tmp_path / f"{i}.png")
    gallery = ImageGallery(images_from_paths([tmp_path]), tmp_path)
    for i in range(4):
        (tmp_path / f"{i}.png").unlink()
    (tmp_path / "1.png").symlink_to(tmp_path / "1.png")
    (tmp_path / "2.png").mkdir()
    os.mkfifo(tmp_path / "3.png")  # to open it would wait for ever
    for i in range(4):
        with pytest.raises(DataError, match=f"^{i}.png is no longer a file in the folder"):
            gallery.open(i)


def test_a_thumbnail_is_written_once_and_follows_its_file(tmp_path):
    folder, uploads = tmp_path / "in", tmp_path / "up"
    folder.mkdir(), uploads.mkdir()
    PICTURE.save(folder / "a.png")
    page = Page({"net": network()}, ImageGallery(images_from_paths([folder]), folder), uploads)

    def colour() -> tuple[int, ...]:
        return Image.open(page.thumbnails()[0][0]).convert("RGB").getpixel((5, 5))

    before = [Path(page.thumbnails()[0][0]).stat().st_ino for _ in range(2)]
    assert before[0] == before[1], "who loads it does not see it change"
    Image.new("RGB", (50, 40), "red").save(folder / "a.png")
    assert colour() == pytest.approx((255, 0, 0), abs=5)
    (folder / "a.png").unlink()
    assert colour() == pytest.approx((0x88, 0x88, 0x88), abs=5)
    Path(page.thumbnails()[0][0]).unlink()  # as gradio does with old files
    assert colour() == pytest.approx((0x88, 0x88, 0x88), abs=5)


# ------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("value", [float("nan"), "x", [], {}])
def test_a_slider_that_sends_no_number_gives_a_sentence(tmp_path, value):
    page, request = made_page(network(), tmp_path), gr.Request(session_hash="a")
    page.load(request)
    controls = (["softmax head"], ["cam"], "unit")
    for call in (
        lambda: page.set_threshold(request, value),
        lambda: page.set_delta(request, value),
        lambda: page.thumbnails(value),
        lambda: list(page.sort(request, "softmax head", "centred softmax head", value)),
        lambda: page.select(
            request, gr.SelectData(None, {"index": 0, "value": ""}), value, *controls, 0.4, 0
        ),
        lambda: page.select(request, gr.SelectData(None, {"index": 0, "value": ""}), 1, *controls, value, 0),
        lambda: page.select(
            request, gr.SelectData(None, {"index": 0, "value": ""}), 1, *controls, 0.4, value
        ),
    ):
        with pytest.raises(gr.Error, match="numbers only"):
            call()
    viewer = page.viewers.get(":a")
    assert (viewer.threshold, viewer.delta) == (0.2, 0.0), "nothing of it is kept"


def test_a_slider_stays_in_its_limits_and_an_empty_field_changes_nothing(tmp_path):
    page, request = made_page(network(), tmp_path), gr.Request(session_hash="a")
    page.load(request)
    viewer = page.viewers.get(":a")
    page.set_threshold(request, 0.7), page.set_delta(request, -1.5)
    page.set_threshold(request, None), page.set_delta(request, None)
    assert (viewer.threshold, viewer.delta) == (0.7, -1.5)
    page.set_threshold(request, 10**30), page.set_delta(request, float("-inf"))
    assert (viewer.threshold, viewer.delta) == (1.0, -5.0)
    assert len(page.thumbnails(None)) == len(page.thumbnails(-7)) == 4 and page.thumbnails(1e300) == []
    assert "4 of 4" in list(page.sort(request, "softmax head", "centred softmax head", None))[-1][0]
    with pytest.raises(gr.Error, match="two different heads"):
        list(page.sort(request, [], "softmax head", 4))


def test_the_threshold_is_a_probability_while_maps_are_and_starts_anew_when_its_meaning_changes(tmp_path):
    page, request = made_page(calibrated(8), tmp_path), gr.Request(session_hash="a")
    loaded = page.load(request)
    viewer = page.viewers.get(":a")
    assert (loaded[7], loaded[8]["value"], viewer.threshold) == ("absolute", 0.5, 0.5)

    def scaled(scale: str, head: str = "sigmoid branch") -> Any:
        return page.redraw(request, [0], [head], ["cam"], scale)[-1]

    page.set_threshold(request, 0.9)
    assert "value" not in scaled("absolute") and viewer.threshold == 0.9, "a probability stays what it was"
    slider = scaled("unit")
    assert (slider["value"], viewer.threshold) == (0.2, 0.2) and "fraction" in slider["info"]
    page.set_threshold(request, 0.7)
    assert "value" not in scaled("signed") and "value" not in scaled("nonsense")
    assert (viewer.threshold, viewer.request.scale) == (0.7, "unit")
    slider = scaled("absolute")
    assert (slider["value"], viewer.threshold) == (0.5, 0.5) and "this probability" in slider["info"]
    assert scaled("absolute", "softmax head")["value"] == 0.2, "no map is in probabilities"
    click = gr.SelectData(None, {"index": 0, "value": ""})
    page.select(request, click, 1, ["sigmoid branch"], ["cam"], "absolute", None, 0)
    assert page.viewers.get(":a").threshold == 0.5, "the default while the field is empty"


def test_the_page_and_explain_draw_boxes_at_the_same_default(tmp_path):
    for net, scale in ((network(), "unit"), (calibrated(), "probability")):
        page, request = made_page(net, tmp_path), gr.Request(session_hash="a")
        page.load(request)
        assert page.viewers.get(":a").threshold == explain(net, [PICTURE], scale=scale).default_threshold


def test_a_choice_that_fails_warns_and_leaves_the_threshold_for_the_next_one(tmp_path, monkeypatch):
    said = list[str]()
    monkeypatch.setattr(gr, "Warning", lambda message, **how: said.append(message))
    page, request = made_page(calibrated(8), tmp_path), gr.Request(session_hash="a")
    page.load(request)
    page.redraw(request, [0], ["sigmoid branch"], ["cam"], "unit")
    assert page.redraw(request, [0], [], ["cam"], "absolute") == [gr.skip()] * 5
    assert said == ["choose at least one head and one method to see maps."]
    slider = page.redraw(request, [0], ["sigmoid branch"], ["cam"], "absolute")[-1]
    assert slider["value"] == page.viewers.get(":a").threshold == 0.5


# ---------------------------------------------------------------------------------------------- links


def test_a_link_restores_what_it_was_made_of(tmp_path):
    page, request = made_page(calibrated(8), tmp_path), gr.Request(session_hash="a")
    page.load(request)
    click = gr.SelectData(None, {"index": 2, "value": ""})
    page.select(request, click, 1, ["softmax head", "sigmoid branch"], ["cam", "layer-cam"], "signed", 0.3, 0)
    page.redraw(request, [5, 1], ["softmax head", "sigmoid branch"], ["cam", "layer-cam"], "signed")
    page.set_threshold(request, 0.35), page.set_delta(request, -1.5)
    query = unescape(re.search(r'href="([^"]*)"', page.link(request)).group(1))
    assert page.link(request).count("here is no") == 0 and query.startswith("?class=bird+5&class=bird+1&")
    other = gr.Request(session_hash="b")
    loaded = page.load(other, query)
    first, second = page.viewers.get(":a"), page.viewers.get(":b")
    assert (first.request, first.threshold, first.delta, first.example) == (
        second.request,
        second.threshold,
        second.delta,
        second.example,
    )
    assert loaded[4] == [5, 1] and loaded[5]["value"] == ["softmax head", "sigmoid branch"]
    assert loaded[6:8] == [["cam", "layer-cam"], "signed"]
    assert loaded[8]["value"] == 0.35 and loaded[9] == -1.5
    assert panels_html(first) == panels_html(second)


@pytest.mark.parametrize(
    "query",
    [
        "?scale=%00&class=nobody&head=<script>&method=__init__&threshold=nan&delta=inf&example=../../etc/passwd",
        "?class=" + "x" * 10_000,
        "?" + "&".join(f"head=head{i}" for i in range(500)),
        "?threshold=1e999&delta=&threshold=&scale",
        "?threshold=0.5;delta=1&%ff%fe=%zz",
        ["scale=signed"],
        {"scale": "signed"},
        None,
        7,
    ],
)
def test_an_address_that_nobody_made_here_opens_the_default(tmp_path, query):
    page = made_page(calibrated(8), tmp_path)
    plain, odd = gr.Request(session_hash="a"), gr.Request(session_hash="b")
    expected, found = page.load(plain), page.load(odd, query)
    assert found[4:8] == expected[4:8] and found[9] in (0.0, 5.0)
    assert 0 <= page.viewers.get(":b").threshold <= 1


def test_a_link_to_too_many_maps_opens_the_default_and_repeated_values_count_once(tmp_path):
    page, request = made_page(calibrated(8), tmp_path), gr.Request(session_hash="a")
    many = "&".join(f"class=bird+{k}" for k in range(8)) + "&head=softmax+head&head=sigmoid+branch"
    page.load(request, many)
    assert len(page.viewers.get(":a").panels) == 2
    page.load(request, "class=bird+3&class=bird+3&head=softmax+head&head=softmax+head")
    assert len(page.viewers.get(":a").panels) == 1


def test_a_link_never_names_a_file_or_an_upload(tmp_path):
    folder, uploads = tmp_path / "in", tmp_path / "up"
    folder.mkdir(), uploads.mkdir()
    PICTURE.save(folder / "private.png"), PICTURE.save(uploads / "secret.png")
    net = network()
    for gallery in (ImageGallery(images_from_paths([folder]), folder), ImageGallery(birds(4))):
        page, request = Page({"net": net}, gallery, uploads), gr.Request(session_hash="a")
        page.load(request, "?example=private.png")
        assert ("example=" in page.link(request)) == (gallery.root is None)
        page.upload(request, str(uploads / "secret.png"), ["softmax head"], ["cam"], "unit", None, 0)
        assert "example=" not in page.link(request) and "png" not in page.link(request)


def test_the_examples_are_photographs_with_their_credit_or_synthetic_without_the_extra(tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    gallery, labelled = open_gallery("", None)
    assert gallery.sample(0).id == "chelsea" and "CC0" in gallery.credits["chelsea"] and not labelled
    assert set(gallery.credits) == {sample.id for sample in gallery.samples} and gallery.open(0)[1].size > (
        9,
        9,
    )
    page, request = Page({"net": network()}, gallery, tmp_path), gr.Request(session_hash="a")
    assert "CC0" in page.load(request)[0] and page.viewers.get(":a").example == "chelsea"

    def missing(names: Any = None) -> Any:
        raise MissingExtra("an example photograph", "scikit-image", "examples")

    monkeypatch.setattr("sigcam.ui.images.example_photographs", missing)
    assert len(open_gallery("", None)[0]) >= 6 and not open_gallery("", None)[0].credits


def test_requests_of_one_tab_take_turns(tmp_path, monkeypatch):
    page, request = made_page(network(), tmp_path), gr.Request(session_hash="a")
    page.load(request)
    order, begun, go_on = list[str](), threading.Event(), threading.Event()
    update, shift = Viewer.update, Viewer.shift

    def slow_update(viewer: Viewer, wanted: Request) -> None:
        begun.set()
        go_on.wait(30)
        update(viewer, wanted)
        order.append("update")

    monkeypatch.setattr(Viewer, "update", slow_update)
    monkeypatch.setattr(Viewer, "shift", lambda viewer, delta: (order.append("shift"), shift(viewer, delta)))
    choices = (["softmax head"], ["cam"], "signed")
    threads = [
        threading.Thread(target=page.redraw, args=(request, [1], *choices)),
        threading.Thread(target=page.set_delta, args=(request, 2.0)),
    ]
    threads[0].start()
    begun.wait(30)
    threads[1].start()
    threads[1].join(0.3)  # time for the shift to come first, if it could
    go_on.set()
    for thread in threads:
        thread.join()
    assert order == ["update", "shift"]


# ---------------------------------------------------------------------------------- sessions and fits


def test_sessions_are_few_and_end():
    now = [0.0]
    sessions = Sessions[int](max_count=2, max_idle=10, clock=lambda: now[0])
    for i in range(3):
        sessions.put(str(i), i)
    assert len(sessions) == 2 and sessions.get("2") == 2
    with pytest.raises(DataError, match="select the image again"):
        sessions.get("0")
    now[0] = 9
    assert sessions.get("1") == 1
    now[0] = 15
    sessions.put("3", 3)
    assert sessions.get("1") == 1 and len(sessions) == 2, "what was just used stays"
    now[0] = 40
    with pytest.raises(DataError):
        sessions.get("3")
    assert len(sessions) == 0


def birds(count: int) -> Samples:
    made = shapes(count, size=64)
    return Samples(tuple(made), tuple(f"bird {k}" for k in range(8)))


def locks_meanwhile(model: torch.nn.Module, busy: threading.Thread) -> int:
    """Count how often this thread gets the model's lock while another one uses the model."""
    got = 0
    while busy.is_alive():
        if lock_of(model).acquire(timeout=5):
            got += busy.is_alive()
            lock_of(model).release()
        busy.join(0.001)
    return got


@pytest.mark.slow
def test_a_fit_is_a_new_branch_and_lets_others_at_the_model_between_chunks():
    net = network(8)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    job = FitJob(net, birds(96))
    job.start()
    got = locks_meanwhile(net.original, job)
    assert job.error is None and job.result is not None and job.net.fitted and got > 3
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert job.net.original is net.original and job.done == job.total


@pytest.mark.slow
def test_a_fit_can_be_stopped():
    job = FitJob(network(8), birds(200))
    job.stop()
    job.start()
    job.join(30)
    assert isinstance(job.error, Stopped) and not job.net.fitted and job.result is None


def made_page(net: DualBranch, folder: Path, count: int = 16, **how: Any) -> Page:
    """Return a page whose gallery, and training data, are birds."""
    return Page({"net": net}, ImageGallery(birds(4)), folder, training=lambda: birds(count), **how)


def followed(page: Page) -> tuple[list[Any], str]:
    """Return the last that a tab sees of the page's fit, and the error that pops up."""
    shown: list[Any] = []

    async def follow() -> str:
        try:
            async for outputs in page.follow_fit():
                shown[:] = outputs
        except gr.Error as error:
            return error.message
        return ""

    return shown, asyncio.run(follow())


def test_a_fit_ends_by_itself_and_everybody_who_comes_later_gets_its_branch(tmp_path):
    page = made_page(network(8), tmp_path)
    before = page.sources
    page.fit()
    page.fit_job.join()  # nobody watches
    assert set(page.sources) - set(before) == {"fitted here: sigmoid branch"}
    for _ in range(2):  # a reload is no different
        (status, link, *heads), error = followed(page)
        assert "done in" in status and "branch.safetensors" in link and not error
        assert [head["choices"][-1] for head in heads] == ["fitted here: sigmoid branch"] * 3
    outputs = page.load(gr.Request(session_hash="new"))
    assert len(outputs) == 12 and outputs[5]["choices"][-1] == "fitted here: sigmoid branch"


def test_the_error_of_a_fit_is_shown_once_to_the_first_who_returns(tmp_path, monkeypatch):
    def broken(*args: Any, **how: Any) -> None:
        raise DataError("no picture of <b> can be read.")

    monkeypatch.setattr("sigcam.ui.fit_job.fit", broken)
    page = made_page(network(8), tmp_path)
    page.fit()
    page.fit_job.join()

    async def close_the_tab() -> None:
        tab = page.follow_fit()
        await anext(tab)
        await tab.aclose()

    asyncio.run(close_the_tab())
    (status, link, *_), error = followed(page)
    assert "failed: no picture of &lt;b&gt; can be read." in status and not link
    assert error == "no picture of &lt;b&gt; can be read."
    (status, *_), error = followed(page)
    assert (status, error) == ("", "")


def test_an_unexpected_error_of_a_fit_goes_to_the_log_and_not_to_visitors(tmp_path, monkeypatch, caplog):
    def broken(*args: Any, **how: Any) -> None:
        raise ValueError("secret")

    monkeypatch.setattr("sigcam.ui.fit_job.fit", broken)
    page = made_page(network(8), tmp_path)
    page.fit()
    page.fit_job.join()
    assert followed(page)[1].startswith("Unexpected error: see the server") and "secret" in caplog.text


def test_a_second_fit_waits_for_the_first(tmp_path, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr("sigcam.ui.fit_job.fit", lambda *args, **how: end.wait(30))
    page = made_page(network(8), tmp_path)
    page.fit()
    with pytest.raises(gr.Error, match="already running"):
        page.fit()
    page.fit_job.at_end = lambda job: None
    end.set()
    page.fit_job.join()


def test_heads_can_be_read_while_one_is_added(tmp_path):
    net = network()
    page = made_page(net, tmp_path)
    adding = threading.Thread(
        target=lambda: [page._add_source(Source(f"{i}", net, "softmax")) for i in range(2000)]
    )
    adding.start()
    while adding.is_alive():
        for _ in page.sources.values():
            time.sleep(0)
    assert len(page.sources) == 2003


@pytest.mark.slow
def test_a_slow_method_tries_less_on_the_page_and_the_caption_says_so(monkeypatch):
    monkeypatch.setattr("sigcam.ui.viewer.MAX_PASSES", 8)
    viewer = view(network(), "rise", "extremal-perturbation", "score-cam", "grad-cam", classes=(1,))
    said = {"rise": "8 of 4000 samples", "extremal-perturbation": "2 of 800 samples"}
    said |= {"score-cam": "8 of 12 channels tried", "grad-cam": ""}
    for panel in viewer.panels:
        assert panel.shortened == said[panel.method]
        assert panel.shortened in panels_html(viewer)
        if "samples" in panel.shortened:
            asked: Any = {"samples": int(panel.shortened[0]), "scale": "raw", "classes": 1}
            ex = explain(panel.source.net, [PICTURE], panel.method, branch=panel.source.branch, **asked)
            assert torch.allclose(panel.raw_map[0, 0], ex.maps[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_score_cam_lets_others_at_the_model_between_passes():
    torch.manual_seed(0)
    net = attach(Gap(4, channels=512))
    net.transform = Preprocess(64, 64)
    source = next(s for s in sources_of(net) if s.branch == "softmax")
    viewer = Viewer("bird", PICTURE, [net])
    request = Request((0, 1), (Source("s", net, source.branch),), ("score-cam",))
    busy = threading.Thread(target=viewer.update, args=(request,))
    busy.start()
    assert locks_meanwhile(net.original, busy) > 3
    assert len(viewer.panels) == 2


def test_an_unfitted_model_falls_back_to_the_centred_head_and_says_so(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def tiny():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),"
        " nn.Linear(8, 3))\n"
    )
    spec = f"file:{tmp_path / 'net.py'}:tiny"
    nets, notice = open_networks(UiOptions(spec, open=False))
    assert "centred" in notice and str(tmp_path) not in notice
    assert sources_of(nets["net.py:tiny"])[0].branch == "centred"
    with pytest.raises(DataError, match="does not exist"):
        open_gallery(str(Path(tmp_path) / "nowhere"), None)
