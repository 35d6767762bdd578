"""What `sigcam ui` does: open networks and pictures, then serve the page, to this machine unless told."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sigcam.core.errors import DataError
from sigcam.data.images import images_from_paths
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.registry import open_dataset, open_training_data
from sigcam.data.sample import Samples
from sigcam.network.dual import DualBranch
from sigcam.network.opening import has_shipped_branch, open_network
from sigcam.ui.security import MOST_BYTES, Guard, login_of
from sigcam.ui.sessions import Shelf

EXAMPLES = (42, 86, 58, 64, 73, 90)  # birds of the test split that the embedded classifier's maps lie on
DRAWN = (
    "The examples are drawn birds, which an ImageNet classifier has never seen: it calls them pinwheels and "
    "envelopes, but finds them. Drop a photograph to see it at home."
)
HEADS = ("softmax", "centred")


@dataclass(frozen=True)
class UiOptions:
    """The command's options."""

    model: str
    weights: Path | None
    branch: str
    data: str
    format: str | None
    compare_model: str | None
    compare_weights: Path | None
    compare_branch: str | None
    host: str
    port: int
    share: bool
    auth: str | None
    device: str
    open: bool


def serve(options: UiOptions, announce: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `announce` is told its address."""
    o = options
    login = login_of(o.host, o.share, o.auth)
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # before its import
    try:
        from sigcam.ui.handlers import Page
        from sigcam.ui.layout import build_page
    except ImportError as error:
        if not (error.name or "").startswith("gradio"):
            raise
        raise DataError("the page needs gradio: pip install 'sigcam[ui]'.") from error
    shelf, labelled = open_shelf(o.data, o.format)
    nets, notice = open_nets(options)
    if not o.data and "embedded" in nets and o.weights is None:
        notice = f"{notice} {DRAWN}".strip()
    training = partial(open_training_data, o.data, o.format) if labelled else None
    first = o.branch if o.branch in HEADS else None
    with tempfile.TemporaryDirectory(prefix="sigcam-page-", ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        blocks = build_page(Page(nets, shelf, Path(folder), notice=notice, first=first, training=training))
        launch(blocks, options, login, announce)


def launch(
    blocks: Any, options: UiOptions, login: tuple[str, str] | None, announce: Callable[[str], None]
) -> None:
    """Start the server and wait; it serves only gradio's own files and thumbnails from disk."""
    import gradio as gr
    from starlette.middleware import Middleware

    theme = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
    try:
        _, url, shared = blocks.launch(
            server_name=options.host,
            server_port=options.port,
            share=options.share,
            auth=login,
            inbrowser=options.open,
            max_file_size=MOST_BYTES,
            theme=theme,
            css_paths=Path(__file__).with_name("ui.css"),
            ssr_mode=False,
            enable_monitoring=False,
            footer_links=[],
            quiet=True,
            prevent_thread_lock=True,
            app_kwargs={"middleware": [Middleware(Guard, local=login is None)]},
        )
    except OSError as error:
        raise DataError(
            f"cannot serve on {options.host}:{options.port} ({error}): choose another --port, or stop what "
            "uses it."
        ) from error
    announce(f"the page is at {shared or url} (Ctrl-C ends it)")
    try:
        blocks.block_thread()
    finally:
        blocks.close(verbose=False)


def open_shelf(data: str, format: str | None) -> tuple[Shelf, bool]:
    """The pictures to choose from, and whether a branch could be fitted on them."""
    if not data:
        birds = shapes(max(EXAMPLES) + 1, split="test", size=320)
        items = (
            *(birds[i] for i in EXAMPLES),
            scenes(EXAMPLES[0] + 1, size=320)[-1],
        )  # the first, without its bird
        return Shelf(Samples(items, birds.classes)), False
    if data.partition(":")[0] == "shapes" and format in (None, "shapes"):
        return Shelf(open_dataset(data, format=format, split="test")), True
    try:
        found, labelled = open_dataset(data, format=format, split="test"), True
    except DataError:
        if format is not None:
            raise
        found, labelled = images_from_paths([data]), False  # says what is wrong if there are none
    if not len(found):
        raise DataError(f"{data} holds no pictures.")
    return Shelf(found, Path(data)), labelled


def open_nets(options: UiOptions) -> tuple[dict[str, DualBranch], str]:
    """The networks by name, and what has to be said about them."""
    o = options
    first, notice = _opened(o.model, o.weights, o.branch, o.device)
    if o.compare_model is None and o.compare_branch is None and o.compare_weights is None:
        return {_name(o.model): first}, notice
    model = o.compare_model or o.model
    weights = o.compare_weights or (o.weights if o.compare_model is None else None)
    second, more = _opened(model, weights, o.compare_branch or "sigmoid", o.device)
    names = [_name(o.model), _name(model)]
    if names[0] == names[1]:
        names = [f"{names[0]} A", f"{names[1]} B"]
    return dict(zip(names, (first, second), strict=True)), " ".join(
        dict.fromkeys(filter(None, (notice, more)))
    )


def _name(model: str) -> str:
    """The model's name without the folder that its file is in, which is nobody's business."""
    kind, _, path = model.partition(":")
    return Path(path).name if kind == "file" else model


def _opened(model: str, weights: Path | None, branch: str, device: str) -> tuple[DualBranch, str]:
    """A network with its fitted branch; one without where there is none, and a sentence that says so."""
    if branch != "sigmoid" or has_shipped_branch(model, weights):
        return open_network(model, weights, branch, device=device).net, ""
    net = open_network(model, weights, None, device=device).net
    return net, (
        f"{_name(model)} has no fitted branch here, so its maps come from the centred softmax head and "
        "there is no evidence score. Fit one (with --data on this page, or with `sigcam fit`) and "
        "give it as --branch."
    )
