"""The page in Chromium: what visitors see, what the browser requests, two visitors at once."""

import base64
import http.client
import http.server
import io
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sigcam.core.config import FitConfig
from sigcam.data.readers.shapes import SHAPE_CLASSES, shapes
from sigcam.data.registry import open_dataset
from sigcam.models.classifier import load_classifier
from sigcam.network.attachment import attach
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.opening import open_network
from sigcam.training.branch import fit
from support.folders import png_header

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'sigcam[dev]'")
pytest.importorskip("gradio", reason="needs gradio: pip install 'sigcam[ui]'")
CHROMIUM = os.environ.get("SIGCAM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]
ARTIFACTS = Path(os.environ.get("SIGCAM_ARTIFACTS") or "build/screenshots")
NET = """
import torch
from torch import nn

def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 5, 4, 2), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 8))
"""
WATCHED = """
async ([slider, watched, values]) => {
  const range = document.querySelector(`${slider} input[type=range]`), seen = document.querySelector(watched);
  const took = [];
  for (const value of values) {
    const text = () => seen.querySelector(".prose").innerHTML, before = text();
    const changed = new Promise((done) => {
      const watch = new MutationObserver(() => { if (text() !== before) { watch.disconnect(); done(); } });
      watch.observe(seen, { childList: true, subtree: true, characterData: true });
    });
    const began = performance.now();
    range.value = value;
    range.dispatchEvent(new Event("input", { bubbles: true }));
    await changed;
    took.push(performance.now() - began);
    await new Promise((done) => setTimeout(done, 30));
  }
  return took;
}
"""


@contextmanager
def started(*words: object, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the page with these options; yield its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sigcam", "ui", "--no-open", "--port", str(port), *map(str, words)]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    assert server.stdout is not None
    try:
        output = []
        for line in server.stdout:
            output.append(line)
            if "the page is at" in line:
                yield f"http://127.0.0.1:{port}/", server
                return
        pytest.fail("the page did not start: " + "".join(output))
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


@contextmanager
def served(*words: object) -> Iterator[str]:
    """Serve the page with these options; yield its address."""
    with started(*words) as (url, _):
        yield url


@pytest.fixture(scope="session")
def embedded() -> Iterator[str]:
    """The page with default options."""
    with served() as url:
        yield url


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Options for a model from a file, a folder of images, and two branches to compare."""
    place = tmp_path_factory.mktemp("own")
    (place / "net.py").write_text(NET)
    for i, sample in enumerate(shapes(32, size=64)):
        folder = place / "data" / SHAPE_CLASSES[i % 8]
        folder.mkdir(parents=True, exist_ok=True)
        sample.open().save(folder / f"{i}.png")
    (place / "data" / SHAPE_CLASSES[0] / "broken.png").write_bytes(b"no picture")
    model = ("--model", f"file:{place / 'net.py'}:tiny", "--data", place / "data")
    classifier = load_classifier(model[1])
    for name, l2 in (("a", 0.1), ("b", 3.0)):
        net = attach(classifier.model)
        net.transform = classifier.transform
        fit(net, open_dataset(place / "data"), FitConfig(l2=l2))
        net.save(place / name)
    return (*model, "--branch", place / "a", "--compare-branch", place / "b")


@pytest.fixture(scope="session")
def own(options: tuple[object, ...]) -> Iterator[str]:
    with served(*options) as url:
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
    """Open the page in a new browser context; yield it once the first image is drawn."""
    how.setdefault("viewport", {"width": 1180, "height": 900})
    context = browser.new_context(**how)
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.urls = []
    page.on("request", lambda request: page.urls.append(request.url))
    page.goto(url)
    page.wait_for_selector(".sc-p0 img")
    page.wait_for_function("document.querySelector('#boxes style')")
    yield page
    context.close()


def wait_for_link(page: Any) -> str:
    """Click on "Copy link"; return the link's address."""
    page.click("#link")
    page.wait_for_selector("#links a")
    return str(page.evaluate("document.querySelector('#links a').href"))


def keep(page: Any, name: str) -> Path:
    """Save a screenshot of the whole page among the artefacts."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(ARTIFACTS / f"{name}.png"), full_page=True)
    return ARTIFACTS / f"{name}.png"


def sources(page: Any) -> list[str]:
    """Return the sources of the page's images."""
    return [
        image.get_attribute("src")
        for image in page.query_selector_all(".sc-panel .sc-box ~ *, .sc-panel img")
    ]


def luminance(colour: str) -> float:
    """Return the relative luminance of a CSS rgb() colour, as WCAG defines it."""
    channels = [float(each) / 255 for each in re.findall(r"[\d.]+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def send(page: Any, name: str, data: bytes) -> None:
    """Upload a file through the drop area."""
    files = {"name": name, "mimeType": "image/png", "buffer": data}
    page.set_input_files("#drop input[type=file]", files)


def png(picture: Image.Image) -> bytes:
    held = io.BytesIO()
    picture.save(held, "PNG")
    return held.getvalue()


def set_slider(page: Any, slider: str, watched: str, *values: float) -> list[float]:
    """Move a slider; return the milliseconds until each change shows."""
    took: list[float] = page.evaluate(WATCHED, [slider, watched, list(values)])
    return took


def caption(page: Any, number: int = 0) -> str:
    return str(page.inner_text(f".sc-p{number} figcaption"))


def probabilities(page: Any) -> list[str]:
    return [cell.inner_text() for cell in page.query_selector_all(".sc-top td:nth-child(2) .sc-number")]


# -------------------------------------------------------------------------------------------- one image


@pytest.mark.slow
def test_the_first_picture_is_there_without_a_click_and_stays_at_home(browser, embedded):
    with visit(browser, embedded) as page:
        assert len(page.query_selector_all(".sc-panel")) == 3, "the picture, and two heads' maps"
        assert re.fullmatch(r"0\.\d{6}", probabilities(page)[0])
        picture = page.inner_text("figcaption >> nth=0")
        assert picture.startswith("chelsea") and "CC0" in picture, "a photograph, with its credit"
        assert caption(page).startswith("Egyptian cat\nhere, evidence 0.9")
        assert "probability that a place" in page.inner_text(".sc-legend")
        assert page.is_checked("#scale input >> nth=2") and 'data-threshold="0.5"' in page.inner_html(
            "#boxes"
        )
        keep(page, "first")
        page.click("#gallery button >> nth=1")
        page.wait_for_function("document.querySelector('figcaption').innerText.includes('coffee')")
        origins = {
            urllib.parse.urlsplit(url)[:2] for url in page.urls if not url.startswith(("data:", "blob:"))
        }
        assert origins == {urllib.parse.urlsplit(embedded)[:2]}, "nothing is asked of anybody else"
        labels = page.evaluate(
            "[...document.querySelectorAll('input:not([type=file]), button, select')]"
            ".filter((each) => each.offsetParent && !each.ariaLabel && !each.labels?.length"
            " && !each.innerText.trim() && !each.title && !each.getAttribute('aria-labelledby'))"
            ".map((each) => each.outerHTML)"
        )
        assert labels == [], "every control has a name"


@pytest.mark.slow
def test_a_picture_can_be_sent_and_its_classes_chosen(browser, embedded):
    with visit(browser, embedded) as page:
        send(page, "my bird.png", png(shapes(59, split="test", size=320)[58].open()))
        page.wait_for_function("document.querySelector('figcaption').innerText.includes('my bird.png')")
        assert caption(page).startswith("wall clock")
        page.click("#classes input")
        page.keyboard.type("goldfinch")
        page.keyboard.press("Enter")
        page.wait_for_selector(".sc-p3 img")
        assert [caption(page, i).split("\n")[0] for i in range(4)] == ["wall clock", "goldfinch"] * 2
        assert caption(page, 1).split("\n")[1].startswith("not here, evidence 0.")
        page.click("text=centred softmax head")
        page.wait_for_selector(".sc-p5 img")
        page.click("text=signed: logits")
        page.wait_for_function("document.querySelector('.sc-legend').innerText.includes('-')")
        keep(page, "signed")
        page.click("#sources label >> nth=0")
        page.click("#sources label >> nth=1")
        page.click("#sources label >> nth=2")
        page.wait_for_selector("text=choose at least one head")


@pytest.mark.slow
def test_both_sliders_answer_while_they_are_dragged(browser, embedded):
    with visit(browser, embedded) as page:
        before = page.inner_html("#boxes style")
        pictures, shown = sources(page), probabilities(page)
        boxes = set_slider(page, "#threshold", "#boxes", *(0.21 + i / 50 for i in range(20)))
        assert page.inner_html("#boxes style") != before and sources(page) == pictures, "only the box moved"
        heads = set_slider(page, "#delta", "#panels", *(-0.2 * (i + 1) for i in range(20)))
        page.wait_for_timeout(300)
        moved = sources(page)
        assert moved[0] == pictures[0] and moved[1] == pictures[1], "picture and sigmoid map stand still"
        assert moved[2] != pictures[2], "the softmax map does not"
        assert probabilities(page) == shown, "nor does any probability move, to six digits"
        assert "all evidence is negative" in caption(page, 1)
        keep(page, "shifted")
        page.focus("#threshold input[type=range]")
        held = page.inner_html("#boxes style")
        page.keyboard.press("Home")
        page.wait_for_function(
            "(held) => document.querySelector('#boxes style').innerHTML !== held", arg=held
        )
        for name, took in (("threshold", boxes), ("delta", heads)):
            middle, worst = statistics.median(took), max(took)
            print(
                f"\n{name} slider, in the browser: median {middle:.0f} ms, worst {worst:.0f} ms of "
                f"{len(took)} moves"
            )


@pytest.mark.slow
def test_what_is_shown_can_be_taken_away(browser, embedded):
    with visit(browser, embedded) as page:
        page.click("#download")
        page.wait_for_selector(".sc-link")
        files = {}
        for link in page.query_selector_all(".sc-link"):
            with page.expect_download() as held:
                link.click()
            files[held.value.suggested_filename] = Path(held.value.path()).read_bytes()
        assert np.load(io.BytesIO(files["maps.npy"])).shape == (2, 224, 224)
        assert json.loads(files["maps.json"])["maps"][1]["from"] == "softmax head"
        shown = page.get_attribute(".sc-p0 img", "src")
        width = Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))).width
        assert Image.open(io.BytesIO(files["overlay.png"])).width == 2 * width


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("broken's <i>.png", b"this is no picture", "cannot read broken's"),
        ("bomb.png", png_header(10_000, 10_000), "more than 50 megapixels"),
    ],
)
def test_a_bad_file_gives_a_sentence_and_the_page_goes_on(browser, embedded, name, data, why):
    with visit(browser, embedded) as page:
        send(page, name, data)
        page.wait_for_selector(f"text={why}")
        assert "Traceback" not in page.content() and "/tmp" not in page.inner_text("body")
        keep(page, name[:4])
        page.click("#gallery button >> nth=2")
        page.wait_for_function("document.querySelector('figcaption').innerText.includes('motorcycle')")


@pytest.mark.slow
def test_an_emptied_field_is_waited_for_and_the_next_picture_shown(browser, embedded):
    with visit(browser, embedded) as page:
        for field in ("#threshold", "#delta"):
            page.fill(f"{field} input[type=number]", "")
        page.click("#gallery button >> nth=1")
        page.wait_for_function("document.querySelector('figcaption').innerText.includes('coffee')")
        assert not page.query_selector_all(".toast-body")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["IMG [edited].png", "<img src=x onerror=alert(1)>.png", "字" * 90 + ".png"])
def test_a_picture_with_an_odd_name_is_shown_under_it(browser, embedded, name):
    with visit(browser, embedded, viewport={"width": 390, "height": 844}) as page:
        send(page, name, png(shapes(1, split="test", size=64)[0].open()))
        page.wait_for_function("document.querySelector('figcaption').innerText.includes('64 x 64')")
        shown = page.inner_text("figcaption >> nth=0").split("\n")[0]
        assert (
            shown.removesuffix(".png") in name and len(shown) > 12
        )  # gradio drops < and >, cuts at 200 bytes
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing to scroll sideways"


@pytest.mark.slow
def test_every_thumbnail_arrives_whole_whoever_else_loads_them(browser, own):
    images = "[...document.querySelectorAll('#gallery img')]"
    with visit(browser, own) as one, visit(browser, own) as other:
        for _ in range(3):
            for page in (one, other):
                page.goto(own, wait_until="commit")
            for page in (one, other):
                page.wait_for_selector(".sc-p0 img")
                page.wait_for_function(f"{images}.length === 24 && {images}.every((each) => each.complete)")
                assert all(page.evaluate(f"{images}.map((each) => each.naturalWidth)"))


@pytest.mark.slow
def test_two_people_see_their_own_pictures(browser, embedded):
    with visit(browser, embedded) as one, visit(browser, embedded) as other:
        one.click("#gallery button >> nth=1")
        send(other, "other.png", png(shapes(59, split="test", size=320)[58].open()))
        one.wait_for_function("document.querySelector('figcaption').innerText.includes('coffee')")
        other.wait_for_function("document.querySelector('figcaption').innerText.includes('other.png')")
        for value in (-1.0, 2.0):
            for page in (one, other):
                set_slider(page, "#delta", "#panels", value)
        one.wait_for_timeout(300)
        assert "coffee" in one.inner_text("figcaption >> nth=0")
        assert "other.png" in other.inner_text("figcaption >> nth=0")
        assert caption(other).startswith("wall clock") and not caption(one).startswith("wall clock")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("desktop", 1180, "light"),
        ("dark", 1180, "dark"),
        ("phone", 390, "light"),
        ("phone-dark", 390, "dark"),
    ],
)
def test_the_page_fits_its_screen_and_can_be_read(browser, embedded, name, width, scheme):
    how = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme, "has_touch": width < 400}
    with visit(browser, f"{embedded}?class=Egyptian+cat&class=pug&example=chelsea", **how) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
        colours = page.evaluate(
            "['body', '.sc-p0 figcaption', '.sc-here', '.sc-not-here'].map((each) => {"
            " const style = getComputedStyle(document.querySelector(each));"
            " return each === 'body' ? style.backgroundColor : style.color; })"
        )
        ground, *inks = map(luminance, colours)
        for ink in inks:
            assert (ground > ink) == (scheme == "light")
            dark, light = sorted((ground, ink))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"contrast of {colours}"
        keep(page, name)
        if width > 400:
            return
        tops = [
            page.query_selector(each).bounding_box()["y"]
            for each in ("#gallery", "#panels", "#threshold", "#classes")
        ]
        assert tops == sorted(tops), "maps come before the controls that are used less"


CUT = "getComputedStyle(document.querySelector('.sc-over')).clipPath"


@pytest.mark.slow
def test_two_heads_are_swiped_by_mouse_and_by_keys(browser, embedded):
    with visit(browser, embedded) as page:
        divider = page.get_by_role(
            "slider", name="Divider: sigmoid branch to the left of the line, softmax head"
        )
        assert divider.count() == 1 and "50%" in page.evaluate(CUT)
        place = divider.bounding_box()
        page.mouse.move(place["x"] + place["width"] / 2, place["y"] + 40)
        page.mouse.down()
        page.mouse.move(place["x"] + place["width"] / 4, place["y"] + 50, steps=4)
        page.mouse.up()
        assert int(divider.input_value()) in (24, 25, 26)
        assert f"{100 - int(divider.input_value())}%" in page.evaluate(CUT)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("End")
        assert divider.input_value() == "100" and re.search(r"\b0(%|px)", page.evaluate(CUT)), page.evaluate(
            CUT
        )
        shown = sources(page)
        set_slider(page, "#delta", "#panels", -1.0)
        assert sources(page) != shown
        assert re.search(r"\b0(%|px)", page.evaluate(CUT)), "a new picture is cut at the same place"
        page.click("#sources label >> nth=1")
        page.wait_for_function("!document.querySelector('.sc-swipe')")


@pytest.mark.slow
def test_a_copied_link_opens_the_same_page(browser, embedded):
    with visit(browser, embedded) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("#gallery button >> nth=1")
        page.wait_for_function("document.querySelector('figcaption').innerText.includes('coffee')")
        page.click("#classes input")
        page.keyboard.type("pug")
        page.keyboard.press("Enter")
        page.wait_for_selector(".sc-p3 img")
        page.click("text=signed: logits")
        page.wait_for_selector("text=logits per cell")
        set_slider(page, "#threshold", "#boxes", 0.37)
        set_slider(page, "#delta", "#panels", -0.5)
        link = wait_for_link(page)
        page.wait_for_timeout(200)
        assert page.evaluate("navigator.clipboard.readText()") == link
        pictures, captions = sources(page), [caption(page, i) for i in range(4)]
    with visit(browser, link) as page:
        assert sources(page) == pictures and [caption(page, i) for i in range(4)] == captions
        assert "coffee" in page.inner_text("figcaption >> nth=0") and page.is_checked("#scale input >> nth=1")
        assert page.input_value("#threshold input[type=number]") == "0.37"
        assert page.input_value("#delta input[type=number]") == "-0.5"
        assert [each.inner_text().strip() for each in page.query_selector_all("#classes .token")] == [
            "espresso",
            "pug",
        ]
        assert wait_for_link(page) == link


@pytest.mark.slow
def test_an_odd_address_opens_the_page_as_usual(browser, embedded):
    odd = "?class=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E&head=nobody&method=x&scale=y&example=/etc/passwd"
    with visit(browser, embedded + odd) as page:
        assert caption(page).startswith("Egyptian cat") and not page.query_selector_all(".toast-body")
        assert "alert" not in page.inner_html("body")


@pytest.mark.slow
def test_quick_changes_while_score_cam_draws_are_drawn_once_and_leave_nothing_grey(browser, embedded):
    with visit(browser, embedded) as page:
        page.click("#methods input")
        page.keyboard.type("score-cam")
        page.keyboard.press("Enter")
        page.wait_for_selector(".sc-p3 img")
        page.wait_for_selector("#panels .pending", state="detached")
        before = sum("queue/join" in url for url in page.urls)
        for control in ("#scale input >> nth=1", "#sources input >> nth=2", "#scale input >> nth=0",
                        "#sources input >> nth=0", "#scale input >> nth=1"):  # fmt: skip
            page.click(control)
        page.wait_for_function(
            "[...document.querySelectorAll('.sc-panel figcaption')].length === 5"
            " && document.querySelector('.sc-p2 figcaption').innerText.includes('centred')"
            " && document.querySelector('.sc-legend')?.innerText.includes('logits')"
        )
        page.wait_for_selector("#panels .pending", state="detached")
        page.wait_for_timeout(1000)
        assert not page.query_selector_all("#panels .pending")
        joined = sum("queue/join" in url for url in page.urls) - before
        assert joined <= 2, f"{joined} drawings: the first change, and the last of those that waited"


@pytest.mark.slow
def test_a_change_that_cannot_be_drawn_does_not_lose_the_one_that_waits(browser, embedded):
    with visit(browser, embedded) as page:
        page.evaluate(
            "async () => { const box = (n) => document.querySelectorAll('#sources input')[n];"
            " const soon = () => new Promise((done) => setTimeout(done, 5));"
            " box(0).click(); await soon(); box(1).click(); await soon(); box(2).click(); await soon();"
            " box(2).click(); await soon(); box(1).click(); await soon(); box(2).click(); }"
        )
        page.wait_for_function(
            "document.querySelector('.sc-p1')?.innerText.includes('centred')"
            " && !document.querySelector('.sc-p2') && !document.querySelector('#panels .pending')"
        )
        page.click("#sources input >> nth=2")
        page.click("#sources input >> nth=1")
        page.wait_for_selector("text=choose at least one head")
        page.wait_for_selector("#panels .pending", state="detached")


ODD = "<img src=x onerror=alert(1)>"


@pytest.mark.slow
def test_class_names_are_text_wherever_they_stand(browser, options, tmp_path):
    net = open_network(str(options[1]), None, str(options[5])).net
    net.class_names = tuple(f"{ODD}{k}" for k in range(8))
    net.save(tmp_path / "branch")
    with served(*options[:2], "--branch", tmp_path / "branch") as url, visit(browser, url) as page:
        said = list[str]()
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        assert caption(page).startswith(ODD) and page.inner_text(".sc-swipe figcaption").startswith(ODD)
        assert page.inner_text(".sc-top tbody th >> nth=0").startswith(ODD)
        assert page.inner_text("#classes .token >> nth=0").strip().startswith(ODD)
        page.click("#classes input")
        page.wait_for_selector("[role=option]")
        assert page.inner_text("[role=option] >> nth=3").strip().endswith(f"{ODD}3")
        page.click("[role=option] >> nth=3")
        page.wait_for_selector(".sc-p3 img")
        link = wait_for_link(page)
        page.goto(link)
        page.wait_for_selector(".sc-p3 img")
        assert caption(page, 1).startswith(f"{ODD}3") and wait_for_link(page) == link
        assert not page.query_selector_all("img[src=x]") and not said


# ------------------------------------------------------------------------------- a folder, two branches


@pytest.mark.slow
def test_two_branches_are_compared_side_by_side_on_one_scale(browser, own):
    with visit(browser, own) as page:
        texts = [caption(page, i) for i in range(2)]
        assert "A: sigmoid branch" in texts[0] and "B: sigmoid branch" in texts[1]
        assert (
            len(page.query_selector_all(".sc-top")) == 2 and len(page.query_selector_all(".sc-legend")) == 0
        )
        page.click("text=signed: logits")
        page.wait_for_selector(".sc-legend")
        logits = [float(re.search(r"logit ([+-][\d.]+)", text).group(1)) for text in texts]
        assert logits[0] != logits[1]
        keep(page, "compared")


@pytest.mark.slow
def test_maps_are_shown_in_probabilities_and_the_threshold_becomes_one(browser, options, tmp_path):
    net = open_network(str(options[1]), None, str(options[5])).net
    net.calibration = BranchCalibration(LogitScale(2.0), {1.0: LogitScale(3.0, 0.5)})
    net.save(tmp_path / "branch")
    with served(*options[:4], "--branch", tmp_path / "branch") as url, visit(browser, url) as page:
        threshold = "#threshold input[type=number]"
        assert re.search(r"here, evidence 0\.\d{3}", caption(page)) and "scale" not in caption(page)
        set_slider(page, "#threshold", "#boxes", 0.73)
        page.click("text=unit: each map")
        page.wait_for_function(
            "document.querySelector('#boxes').innerHTML.includes('data-threshold=\"0.2\"')"
        )
        assert page.input_value(threshold) == "0.2" and "of the map's max" in page.inner_text("#threshold")
        assert not page.query_selector_all(".sc-legend")
        page.click("text=absolute: the probability")
        page.wait_for_function("document.querySelector('.sc-legend')?.innerText.includes('probability that')")
        assert page.inner_text(".sc-legend .sc-ends").split() == ["0", "0.5", "1"]
        assert page.input_value(threshold) == "0.5" and "this probability" in page.inner_text("#threshold")
        assert "no absolute scale: the softmax head has none" in caption(page, 1)
        assert 'data-threshold="0.5"' in page.inner_html("#boxes")
        keep(page, "probability")
        set_slider(page, "#threshold", "#boxes", 0.9)
        page.click("#gallery button >> nth=1")
        page.wait_for_function("!document.querySelector('figcaption').innerText.includes('0.png')")
        assert "probability that" in page.inner_text(".sc-legend") and page.input_value(threshold) == "0.9"
        page.click("text=signed: logits")
        page.wait_for_function("document.querySelector('.sc-legend').innerText.includes('logits per cell')")
        low, zero, high = page.inner_text(".sc-legend .sc-ends").split()
        assert (zero, float(low)) == ("0", -float(high)), "colours are centred on zero"
        assert page.input_value(threshold) == "0.2" and "fraction" in page.inner_text("#threshold")


@pytest.mark.slow
def test_the_folder_is_sorted_by_disagreement_and_a_picture_opened_from_there(browser, own):
    with visit(browser, own) as page:
        page.click("role=tab[name='Sort the folder']")
        page.click("#sort")
        page.wait_for_selector("text=33 of 33 images, 1 unreadable: done")
        scores = [
            float(each.inner_text().split()[0]) for each in page.query_selector_all("#ranked .caption-label")
        ]
        assert len(scores) == 24 and scores == sorted(scores, reverse=True) and scores[0] > 0
        keep(page, "sorted")
        name = page.inner_text("#ranked .caption-label >> nth=3").split(" ", 1)[1]
        page.click("#ranked button >> nth=3")
        page.wait_for_function(
            "(name) => document.querySelector('figcaption').innerText.includes(name)", arg=name
        )


@pytest.mark.slow
def test_a_branch_is_fitted_from_the_page(browser, options):
    with served(*options) as url, visit(browser, url) as page:  # it stays there, for whoever comes next
        page.click("role=tab[name='Fit a branch']")
        page.click("#fit")
        page.wait_for_selector("text=held-out mean average precision", timeout=60_000)
        assert page.get_attribute("#fit-link a", "download") == "branch.safetensors"
        keep(page, "fitted")
        page.click("role=tab[name='View an image']")
        page.click("text=fitted here: sigmoid branch")
        page.wait_for_selector(".sc-p2 img")
        assert "fitted here" in caption(page, 2)


@pytest.mark.slow
def test_a_fit_outlives_its_tab_and_a_new_tab_sees_it(browser, options):
    with served(*options) as url:
        with visit(browser, url) as page:
            page.click("role=tab[name='Fit a branch']")
            page.click("#fit")
            page.wait_for_selector("#fit-status [role=status]")
        with visit(browser, url) as page:
            page.click("role=tab[name='Fit a branch']")
            page.wait_for_selector("text=held-out mean average precision", timeout=60_000)
            assert page.get_attribute("#fit-link a", "download") == "branch.safetensors"
        with visit(browser, url) as page:
            page.click("text=fitted here: sigmoid branch")
            page.wait_for_selector(".sc-p2 img")
            page.click("role=tab[name='Sort the folder']")
            page.get_by_label("Second head").click()
            page.click("role=option[name='fitted here: sigmoid branch']")
            page.click("#sort")
            page.wait_for_selector("text=33 of 33 images, 1 unreadable: done")


# ---------------------------------------------------------------------------------------------- security


def status(url: str, data: bytes | None = None, **headers: str) -> int:
    """Return the status of the server's response."""
    request = urllib.request.Request(
        url, data, {key.replace("_", "-"): value for key, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_no_file_of_the_machine_can_be_had(own):
    here = Path(__file__).resolve()
    for path in (
        "/etc/passwd",
        here,
        "../../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "pyproject.toml",
    ):
        assert status(f"{own}gradio_api/file={path}") in (403, 404), path
    assert status(f"{own}gradio_api/file=http://example.com/") in (400, 403, 404, 422)
    assert status(own, host="evil.example") == 400
    there = urllib.parse.urlsplit(own).netloc
    line = http.client.HTTPConnection(there, timeout=60)
    line.putrequest("POST", "/gradio_api/upload")
    line.putheader("content-length", str(22 * 2**20))
    line.endheaders()
    assert line.getresponse().status == 413, "before a byte of it is read"
    line.close()


def multipart(name: str, data: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of an upload."""
    start = f'--end\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
    return start.encode() + data + b"\r\n--end--\r\n", {"content-type": "multipart/form-data; boundary=end"}


@contextmanager
def other_site() -> Iterator[str]:
    """Serve an empty web site on another port; yield its address."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_another_site_cannot_upload(browser, embedded):
    body, headers = multipart("a.png", png(shapes(1)[0].open()))
    assert status(f"{embedded}gradio_api/upload", body, **headers) == 200
    for origin in ("https://evil.example", "null", embedded.rstrip("/")[:-1]):
        assert status(f"{embedded}gradio_api/upload", body, **headers, origin=origin) == 403
    own = embedded.rstrip("/")
    assert status(f"{embedded}gradio_api/upload", body, **headers, origin=own) == 200
    context = browser.new_context()
    page = context.new_page()
    with other_site() as there:
        page.goto(there)
        with page.expect_response(lambda answer: answer.url.endswith("/upload")) as answer:
            page.evaluate(
                "(url) => { const form = new FormData(); form.append('files', new Blob(['x']), 'a.png');"
                " fetch(url, { method: 'POST', mode: 'no-cors', body: form }); }",
                f"{embedded}gradio_api/upload",
            )
        assert answer.value.status == 403
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_page_leaves_no_upload_behind(tmp_path, number):
    if signal.getsignal(number) == signal.SIG_IGN:  # the tests run under nohup, and the page inherits it
        pytest.skip(f"{signal.Signals(number).name} is ignored here")
    (tmp_path / "net.py").write_text(NET)
    place = tmp_path / "temporary"
    place.mkdir()
    model = ("--model", f"file:{tmp_path / 'net.py'}:tiny")
    with started(*model, TMPDIR=str(place)) as (url, server):
        body, headers = multipart("private.png", png(shapes(1)[0].open()))
        assert status(f"{url}gradio_api/upload", body, **headers) == 200
        assert [path.name for path in place.rglob("*.png")] == ["private.png"]
        server.send_signal(number)
        assert server.wait(60) == 128 + number
    assert [path.name for path in place.rglob("*") if path.is_file() or "sigcam" in path.name] == []


def called(url: str, name: str, *data: Any) -> str:
    """Call a handler with arbitrary data; return the event stream."""
    body = json.dumps({"data": list(data)}).encode()
    asked = urllib.request.Request(f"{url}gradio_api/call/{name}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}gradio_api/call/{name}/{event}", timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, 10**30])
def test_a_value_that_no_slider_has_gives_a_sentence_or_a_result(embedded, value):
    for name in ("set_threshold", "set_delta"):
        assert '"error": "Session expired: select the image again."' in called(embedded, name, value)
    said = called(embedded, "thumbnails", value)
    assert "event: complete" in said or '"error": "a slider takes numbers only."' in said


def test_a_path_from_the_browser_is_not_opened(embedded):
    picture = Path(__file__).parents[2] / "docs" / "images" / "distortions.png"
    controls = (["softmax head"], ["grad-cam"], "unit", 0.2, 0.0)
    for path in (picture, Path("/etc/passwd"), Path("../../../etc/passwd")):
        said = called(
            embedded, "upload", {"path": str(path), "meta": {"_type": "gradio.FileData"}}, *controls
        )
        assert "event: error" in said and "sc-panel" not in said, said[:300]
    assert picture.is_file(), "nor removed"


@pytest.mark.slow
def test_a_login_is_asked_for_where_there_is_one(browser, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    with served("--model", f"file:{tmp_path / 'net.py'}:tiny", "--auth", "me:secret") as url:
        assert status(f"{url}gradio_api/info") == 401
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.fill("input >> nth=0", "me")
        page.fill("input[type=password]", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector(".sc-p0 img", timeout=60_000)
        assert "has no fitted branch" in page.inner_text(".sc-notice") and "centred" in caption(page)
        context.close()


@pytest.mark.skipif(
    "SIGCAM_SCREENSHOT" not in os.environ, reason="$SIGCAM_SCREENSHOT names the file to write"
)
def test_the_picture_for_the_readme(browser, embedded):
    link = f"{embedded}?class=Egyptian+cat&class=pug&example=chelsea"  # one is there, one is not
    with visit(browser, link, viewport={"width": 1240, "height": 1010}) as page:
        page.wait_for_timeout(500)
        page.locator("#gallery button.thumbnail-item").last.evaluate(
            "each => each.remove()"
        )  # motorcycle: no CC0
        page.screenshot(path=os.environ["SIGCAM_SCREENSHOT"])
