"""Layout of the page, with the handler of each control, and its server."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from sigcam.core.errors import ConfigError
from sigcam.ui.handlers import MAX_DELTA, MAX_SORTED, METHOD, PAGE_SIZE, SORTED, THRESHOLD_INFO, Page
from sigcam.ui.security import MAX_UPLOAD_BYTES, Guard
from sigcam.ui.serve import UiOptions
from sigcam.ui.sessions import IDLE_SECONDS
from sigcam.ui.sources import class_choices
from sigcam.ui.viewer import weight_std

EXTENSIONS = [".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"]
SCALES = [
    ("unit: each map goes from 0 to its own maximum, so it shows where, not how much.", "unit"),
    (
        "signed: logits for (red) and against (blue) the class, on one scale for maps of the same unit.",
        "signed",
    ),
    ("absolute: the probability that a place shows the class, on the same scale in every image.", "absolute"),
]
COPY = """(html) => {
    const link = new DOMParser().parseFromString(html, "text/html").querySelector("a");
    navigator.clipboard?.writeText(new URL(link.getAttribute("href"), location.href).href).catch(() => {});
}"""
GALLERY: Any = {"allow_preview": False, "interactive": False, "object_fit": "cover", "buttons": []}
SLIDER_EVENT: Any = {"queue": False, "trigger_mode": "always_last", "show_progress": "hidden"}
SHIFT = (
    "Adds delta times the standard deviation of the head's weights to every weight. Probabilities and "
    "sigmoid maps stay the same; softmax maps change."
)
NO_SHIFT = "Not available: needs global average pooling and a linear layer, with two or more classes."


def _slider(*settings: Any, **more: Any) -> gr.Slider:
    """Return a slider that leaves all checks to its handler; for gradio an empty field is a bug."""
    slider = gr.Slider(*settings, **more)
    slider.preprocess = lambda payload: payload  # gradio writes a file beside the code of a subclass
    return slider


def launch(
    page: Page, options: UiOptions, login: tuple[str, str] | None, announce: Callable[[str], None]
) -> None:
    """Start the server and block; gradio serves only its own files and the thumbnails from disk."""
    blocks = build_page(page)
    theme = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
    try:
        _, url, shared_url = blocks.launch(
            server_name=options.host,
            server_port=options.port,
            share=options.share,
            auth=login,
            inbrowser=options.open,
            max_file_size=MAX_UPLOAD_BYTES,
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
        address = f"{options.host}:{options.port} ({error})"
        raise ConfigError(f"cannot serve on {address}: choose another --port, or free this one.") from error
    except ValueError as error:  # gradio asks its own server for the page, and waits three seconds
        blocks.close(verbose=False)
        if "localhost" not in str(error):
            raise
        raise ConfigError(
            f"the page on {options.host}:{options.port} did not answer in time: try again when the machine "
            "is less busy, and let proxy settings pass localhost."
        ) from error
    announce(f"the page is at {shared_url or url} (press Ctrl-C to stop)")
    try:
        blocks.block_thread()
    finally:
        blocks.close(verbose=False)


def build_page(page: Page) -> gr.Blocks:
    """Return the page as gradio blocks."""
    with gr.Blocks(title="sigcam", analytics_enabled=False, delete_cache=(600, IDLE_SECONDS)) as blocks:
        notice = f"<p class='sc-notice'>{escape(page.notice)}</p>" if page.notice else ""
        models = f"{'Models' if len(page.nets) > 1 else 'Model'}: {' and '.join(page.nets)}"
        gr.HTML(f"<h1>sigcam</h1><p>Class activation maps. {escape(models)}</p>{notice}")
        query = gr.Textbox(visible=False)  # of the address
        with gr.Tabs(selected="view") as tabs:
            with gr.Tab("View an image", id="view"):
                view = _view_tab(page)
            heads = [view["sources"]]
            if page.can_sort:
                with gr.Tab("Sort the folder", id="sort"):
                    heads += _sort_tab(page, view, tabs)
            outputs = [*view["outputs"], view["classes"], *view["controls"], *heads[1:]]
            load = blocks.load(page.load, query, outputs, js="() => location.search", show_progress="hidden")
            if page.training is not None:
                with gr.Tab("Fit a branch", id="fit"):
                    _fit_tab(page, load, heads)
        blocks.unload(page.leave)
    blocks.queue(default_concurrency_limit=4, max_size=64)
    return blocks


def _view_tab(page: Page) -> dict[str, Any]:
    pages = -(-len(page.gallery) // PAGE_SIZE)
    can_shift = bool(weight_std(page.net))
    with gr.Row():
        with gr.Column(scale=1, min_width=280, elem_classes="sc-left"):
            file = gr.File(
                label="Drop an image here", file_types=EXTENSIONS, type="filepath", height=150, elem_id="drop"
            )
            label = "Or choose one from the folder" if page.gallery.root else "Or choose an example"
            thumbnails = gr.Gallery(page.thumbnails, elem_id="gallery", label=label, columns=4, **GALLERY)
            page_number = _slider(
                1, max(pages, 2), 1, step=1, label="Page", visible=pages > 1, elem_id="gallery-page"
            )
            classes = gr.Dropdown(
                class_choices(page.net), multiselect=True, label="Classes", max_choices=6, elem_id="classes"
            )
            sources = gr.CheckboxGroup(
                list(page.sources), value=page.default_sources, label="Maps from", elem_id="sources"
            )
            methods = gr.Dropdown(
                page.methods, value=[METHOD], multiselect=True, label="Methods", elem_id="methods"
            )
            scale = gr.Radio(SCALES, value=page.default_scale, label="Scale", elem_id="scale")
        with gr.Column(scale=3, min_width=300, elem_classes="sc-right"):
            panels = gr.HTML(elem_id="panels", label="Maps")
            boxes = gr.HTML(elem_id="boxes", label="Boxes", padding=False)
            threshold = _slider(
                0, 1, 0, step=0.01, label="Box threshold", elem_id="threshold", info=THRESHOLD_INFO[False]
            )
            delta = _slider(
                -MAX_DELTA, MAX_DELTA, 0, step=0.1, label="Delta: shift of the softmax head", elem_id="delta",
                info=SHIFT if can_shift else NO_SHIFT, interactive=can_shift,
            )  # fmt: skip
            top_classes = gr.HTML(elem_id="top-classes", label="Likely classes")
            with gr.Row(elem_id="take-away"):
                download = gr.Button("Prepare downloads", elem_id="download", size="sm")
                link = gr.Button("Copy link", elem_id="link", size="sm")
            links = gr.HTML(elem_id="links", label="Files")
    outputs = [panels, boxes, top_classes, links]
    choices = [sources, methods, scale]
    controls = [*choices, threshold, delta]
    draw: Any = {"show_progress": "minimal", "show_progress_on": panels, "concurrency_id": "draw"}
    file.upload(page.upload, [file, *controls], [*outputs, classes, file], **draw)
    thumbnails.select(page.select, [page_number, *controls], [*outputs, classes], **draw)
    page_number.input(
        page.thumbnails, page_number, thumbnails, trigger_mode="always_last", show_progress="hidden"
    )
    redrawn = [*outputs, threshold]
    gr.on(  # one event of all controls: of several changes during a drawing, one waits
        [control.input for control in (classes, *choices)],
        page.redraw, [classes, *choices], redrawn, trigger_mode="always_last", **draw,
    )  # fmt: skip
    threshold.input(page.set_threshold, threshold, boxes, **SLIDER_EVENT)
    delta.input(page.set_delta, delta, [panels, boxes, top_classes], **SLIDER_EVENT)
    download.click(page.download, None, links, show_progress="minimal")
    link.click(page.link, None, links, show_progress="hidden").success(None, links, None, js=COPY)
    return {"outputs": outputs, "classes": classes, "sources": sources, "controls": controls}


def _sort_tab(page: Page, view: dict[str, Any], tabs: gr.Tabs) -> list[Any]:
    names, count = list(page.sources), len(page.gallery)
    gr.Markdown("Sorts images by how much the Grad-CAM maps of two heads disagree: 0 not at all, 1 entirely.")
    with gr.Row():
        first = gr.Dropdown(names, value=page.default_sources[0], label="First head")
        second = gr.Dropdown(names, value=page.default_sources[-1], label="Second head")
        limit = _slider(
            1, max(2, min(count, MAX_SORTED)), min(count, SORTED), step=1, label="Images to compare"
        )
    with gr.Row():
        sort = gr.Button("Sort", variant="primary", elem_id="sort")
        stop = gr.Button("Stop", elem_id="stop-sort")
    status = gr.HTML(elem_id="sort-status", label="Progress")
    ranked = gr.Gallery(label="Largest disagreement first", elem_id="ranked", columns=6, **GALLERY)
    sort.click(
        page.sort, [first, second, limit], [status, ranked], show_progress="hidden", concurrency_limit=2
    )
    stop.click(page.stop_sort, None, None, queue=False)
    outputs = [*view["outputs"], view["classes"], tabs]
    ranked.select(page.select_ranked, view["controls"], outputs, show_progress="hidden")
    return [first, second]


def _fit_tab(page: Page, load: Any, heads: list[Any]) -> None:
    gr.Markdown("Fits a new sigmoid branch on the folder's training images. The other heads do not change.")
    with gr.Row():
        fit = gr.Button("Fit", variant="primary", elem_id="fit")
        stop = gr.Button("Stop", elem_id="stop-fit")
    status = gr.HTML(elem_id="fit-status", label="Progress")
    link = gr.HTML(elem_id="fit-link", label="File")
    follow: Any = {"show_progress": "hidden", "concurrency_limit": None}
    started = fit.click(page.fit, None, status, show_progress="hidden")
    for event in (started.success, load.then):  # a reloaded page follows a fit that goes on
        event(page.follow_fit, None, [status, link, *heads], **follow)
    stop.click(page.stop_fit, None, None, queue=False)
