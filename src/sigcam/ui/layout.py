"""The page's controls: which there are, where they stand, and what of `page` answers to each."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from sigcam.ui.handlers import PAGE_SIZE, THRESHOLD, Page
from sigcam.ui.security import IDLE_SECONDS
from sigcam.ui.sources import available_methods, class_choices
from sigcam.ui.viewer import spread

VIEWS = [("evidence for the class", "evidence"), ("signed: for and against, in logits", "signed")]
SCALES = [("one for all maps", True), ("each map its own", False)]
FAST: Any = {"queue": False, "trigger_mode": "always_last", "show_progress": "hidden"}  # sliders
SHIFT = (
    "Adds delta times the spread of the head's weights to every weight of every class: no probability "
    "changes, softmax maps do, sigmoid maps do not."
)
NO_SHIFT = "This head is not global average + linear with several classes, so it is not shifted here."


def build_page(page: Page) -> gr.Blocks:
    """The page."""
    with gr.Blocks(title="sigcam", analytics_enabled=False, delete_cache=(600, IDLE_SECONDS)) as blocks:
        said = f"<p class='sc-notice'>{escape(page.notice)}</p>" if page.notice else ""
        gr.HTML(f"<h1>sigcam</h1><p>{escape(' and '.join(page.nets))}: which evidence is where?</p>{said}")
        with gr.Tabs(selected="look") as tabs:
            with gr.Tab("Look at a picture", id="look"):
                view = _look_tab(page)
            if page.training is not None or page.gallery.root is not None:
                with gr.Tab("Sort the folder", id="sort"):
                    _sort_tab(page, view, tabs)
            if page.training is not None:
                with gr.Tab("Fit a branch", id="fit"):
                    _fit_tab(page, view)
        blocks.load(
            page.start, None, [*view["drawn"], view["classes"], view["sources"]], show_progress="hidden"
        )
        blocks.unload(page.leave)
    blocks.queue(default_concurrency_limit=4, max_size=64)
    return blocks


def _look_tab(page: Page) -> dict[str, Any]:
    net, pages = page.net, -(-len(page.gallery) // PAGE_SIZE)
    with gr.Row():
        with gr.Column(scale=1, min_width=280, elem_classes="sc-left"):
            kinds = [".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"]
            file = gr.File(
                label="Drop a picture here", file_types=kinds, type="filepath", height=150, elem_id="drop"
            )
            label = "Or choose one of the folder" if page.gallery.root else "Or choose an example"
            thumbs = gr.Gallery(
                page.thumbs(), label=label, columns=4, allow_preview=False, interactive=False,
                object_fit="cover", buttons=[], elem_id="gallery",
            )  # fmt: skip
            at = gr.Slider(
                1,
                max(pages, 2),
                1,
                step=1,
                label="Page of the folder",
                visible=pages > 1,
                elem_id="gallery-page",
            )
            classes = gr.Dropdown(
                class_choices(net), multiselect=True, label="Classes", max_choices=6, elem_id="classes"
            )
            sources = gr.CheckboxGroup(
                list(page.sources), value=page.chosen, label="Maps from", elem_id="sources"
            )
            methods = gr.Dropdown(
                available_methods(list(page.nets.values())),
                value=["grad-cam"],
                multiselect=True,
                label="Methods",
                elem_id="methods",
            )
            kind = gr.Radio(VIEWS, value="evidence", label="Colours", elem_id="kind")
            shared = gr.Radio(SCALES, value=True, label="Scale", elem_id="scale")
        with gr.Column(scale=3, min_width=300, elem_classes="sc-right"):
            panels = gr.HTML(elem_id="panels", label="Maps")
            boxes = gr.HTML(elem_id="boxes", label="Boxes", padding=False)
            threshold = gr.Slider(
                0, 1, THRESHOLD, step=0.01, label="Threshold of the box", elem_id="threshold",
                info="The box holds what is above this share of the map's own peak.",
            )  # fmt: skip
            unit = spread(net)
            delta = gr.Slider(
                -5,
                5,
                0,
                step=0.1,
                label="Delta: shift of the softmax head",
                info=SHIFT if unit else NO_SHIFT,
                interactive=bool(unit),
                elem_id="delta",
            )
            tops = gr.HTML(elem_id="tops", label="Likely classes")
            make = gr.Button("Make files to download", elem_id="make", size="sm")
            links = gr.HTML(elem_id="links", label="Files")
    drawn = [panels, boxes, tops, links]
    controls = [sources, methods, kind, shared, threshold, delta]
    quiet: Any = {"show_progress": "minimal", "show_progress_on": panels, "concurrency_id": "draw"}
    file.upload(page.upload, [file, *controls], [*drawn, classes, file], **quiet)
    thumbs.select(page.pick, [at, *controls], [*drawn, classes], **quiet)
    at.input(page.thumbs, at, thumbs, trigger_mode="always_last", show_progress="hidden")
    for control in (classes, sources, methods, kind, shared):
        control.input(
            page.redraw, [classes, sources, methods, kind, shared], drawn, trigger_mode="always_last", **quiet
        )
    threshold.input(page.move_box, threshold, boxes, **FAST)
    delta.input(page.move_head, delta, [panels, boxes, tops], **FAST)
    make.click(page.links, None, links, show_progress="minimal")
    return {"drawn": drawn, "classes": classes, "sources": sources, "controls": controls}


def _sort_tab(page: Page, view: dict[str, Any], tabs: gr.Tabs) -> None:
    names = list(page.sources)
    gr.Markdown(
        "Pictures on which two heads' Grad-CAM maps have least in common come first: 0 is equal, 1 disjoint."
    )
    with gr.Row():
        first = gr.Dropdown(names, value=page.chosen[0], label="One head")
        second = gr.Dropdown(names, value=page.chosen[-1], label="The other")
        most = gr.Slider(
            1,
            max(2, min(len(page.gallery), 1000)),
            min(len(page.gallery), 64),
            step=1,
            label="Pictures to look at",
        )
    with gr.Row():
        go, stop = (
            gr.Button("Sort", variant="primary", elem_id="sort"),
            gr.Button("Stop", elem_id="stop-sort"),
        )
    status = gr.HTML(elem_id="sort-status", label="Progress")
    ranked = gr.Gallery(
        label="Least in common first", columns=6, allow_preview=False, interactive=False, object_fit="cover",
        buttons=[], elem_id="ranked",
    )  # fmt: skip
    go.click(page.sort, [first, second, most], [status, ranked], show_progress="hidden", concurrency_limit=2)
    stop.click(page.stop_sort, None, None, queue=False)
    ranked.select(
        page.pick_ranked, view["controls"], [*view["drawn"], view["classes"], tabs], show_progress="hidden"
    )


def _fit_tab(page: Page, view: dict[str, Any]) -> None:
    gr.Markdown(
        "Fits a sigmoid branch on the folder's training images, beside the heads that are there. The model "
        "and what others see stay as they are."
    )
    with gr.Row():
        go, stop = gr.Button("Fit", variant="primary", elem_id="fit"), gr.Button("Stop", elem_id="stop-fit")
    status, link = gr.HTML(elem_id="fit-status", label="Progress"), gr.HTML(elem_id="fit-link", label="File")
    go.click(page.fit, None, [status, link, view["sources"]], show_progress="hidden", concurrency_limit=4)
    stop.click(page.stop_fit, None, None, queue=False)
