"""HTML of the page: panels, boxes, legend, classes, progress and download links, with text escaped."""

import base64
import mimetypes
from collections.abc import Sequence
from html import escape

from sigcam.drawing.overlay import gradient
from sigcam.ui.viewer import ClassTable, Panel, RelativeBox, Viewer

SWIPE = "document.documentElement.style.setProperty('--sc-cut', this.value + '%')"  # outlives a new picture


def panels_html(viewer: Viewer) -> str:
    """Render the image and its maps side by side, with a legend if they share a scale."""
    width, height = viewer.image_size
    caption = f"<b>{escape(viewer.name)}</b><br>{width} x {height} pixels"
    caption += f"<br><small>{escape(viewer.credit)}</small>" if viewer.credit else ""
    figures = [_figure_html(viewer, "", viewer.display_uri, "the image", caption)]
    absolute = any(panel.absolute for panel in viewer.panels)
    scales = {panel.scale_max for panel in viewer.panels if panel.in_logits}
    one_scale = len(scales) == 1 and viewer.request.scale == "signed"
    for number, panel in enumerate(viewer.panels):
        alt = f"map of {panel.class_name}: {panel.source.name}, {panel.method}"
        own_scale = not panel.absolute and not (one_scale and panel.in_logits)
        caption = _caption_html(panel, own_scale)
        figures.append(_figure_html(viewer, f"sc-p{number}", panel.image_uri, alt, caption))
    legend = _logit_legend_html(scales.pop()) if one_scale else ""
    legend = _probability_legend_html() if absolute else legend
    return f'<div class="sc-grid">{"".join(figures)}{_swipe_html(viewer)}</div>{legend}'


def _swipe_html(viewer: Viewer) -> str:
    """Render the maps of the first class by the first two heads as one picture with a movable divider."""
    left, *others = viewer.panels
    same = (p for p in others if (p.method, p.class_name) == (left.method, left.class_name))
    right = next((p for p in same if p.source != left.source), None)
    if right is None:
        return ""
    label = f"{left.source.name} to the left of the line, {right.source.name} to the right"
    ratio = f"{viewer.display.width} / {viewer.display.height}"
    return (
        f'<figure class="sc-swipe"><div class="sc-frame" style="aspect-ratio:{ratio}">'
        f'<img src="{right.image_uri}" alt=""><img class="sc-over" src="{left.image_uri}" alt="">'
        f'<input type="range" value="50" aria-label="Divider: {escape(label)}" oninput="{SWIPE}"></div>'
        f"<figcaption><b>{escape(left.class_name)}</b><br>{escape(label)}<br>drag the line, or use the arrow "
        "keys</figcaption></figure>"
    )


def _figure_html(viewer: Viewer, panel_class: str, uri: str, alt: str, caption: str) -> str:
    ratio = f"{viewer.display.width} / {viewer.display.height}"
    box = '<i class="sc-box"></i>' if panel_class else ""
    return (
        f'<figure class="sc-panel {panel_class}"><div class="sc-frame" style="aspect-ratio:{ratio}">'
        f'<img src="{uri}" decoding="sync" alt="{escape(alt)}">{box}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _caption_html(panel: Panel, own_scale: bool) -> str:
    unit = "logits" if panel.in_logits else "in the method's own unit"
    lines = [
        f"<b>{escape(panel.class_name)}</b>",
        f"{escape(panel.source.name)}, {escape(panel.method)}",
        f"logit {panel.logit:+.3f}; {panel.positive_share:.0%} of the map speaks for the class",
    ]
    if panel.evidence is not None:
        words = "here" if panel.evidence > 0.5 else "not here"
        lines.insert(1, f'<b class="sc-{words.replace(" ", "-")}">{words}</b>, evidence {panel.evidence:.3f}')
    lines += [f"full colour: {panel.scale_max:.3g} {unit}"] if own_scale else []
    lines += [f"no absolute scale: {escape(panel.why_relative)}"] if panel.why_relative else []
    lines += [panel.shortened] if panel.shortened else []
    lines += [f'<span class="sc-blank">{escape(panel.note)}</span>'] if panel.note else []
    return "<br>".join(lines)


def _logit_legend_html(scale_max: float) -> str:
    """Render the colour bar of the signed scale that all maps in logits share."""
    ticks = (f"-{scale_max:.3g}", "0", f"+{scale_max:.3g}")
    text = "logits per cell: blue is against the class, red for it; one scale for all maps"
    return _legend_html(ticks, text, signed=True)


def _probability_legend_html() -> str:
    """Render the colour bar of the maps in probabilities."""
    text = "probability that a place shows the class; the same scale for every image"
    return _legend_html(("0", "0.5", "1"), text, signed=False)


def _legend_html(ticks: Sequence[str], text: str, *, signed: bool) -> str:
    return (
        '<div class="sc-legend">'
        f'<div class="sc-bar" style="background:{gradient(signed=signed)}"></div>'
        f'<div class="sc-ends">{"".join(f"<span>{tick}</span>" for tick in ticks)}</div>'
        f"<div>{text}</div></div>"
    )


def boxes_html(boxes: Sequence[RelativeBox | None], threshold: float) -> str:
    """Render the panels' boxes as a style sheet, so that a box moves without sending an image again."""
    rules = []
    for number, box in enumerate(boxes):
        if box is not None:
            left, top, right, bottom = (100 * share for share in box)
            place = f"left:{left:.2f}%;top:{top:.2f}%;width:{right - left:.2f}%;height:{bottom - top:.2f}%"
            rules.append(f"#panels .sc-p{number} .sc-box{{display:block;{place}}}")
    return f"<style data-threshold={threshold:g}>{''.join(rules)}</style>"


def top_classes_html(tables: Sequence[ClassTable], delta: float) -> str:
    """Render each network's most probable classes with softmax probability and sigmoid evidence."""
    parts = []
    for title, classes in tables:
        rows = "".join(
            f"<tr><th scope=row>{escape(name)}</th><td>{_bar(probability, 6)}</td>"
            f"<td>{'not fitted' if evidence is None else _bar(evidence, 3)}</td></tr>"
            for name, probability, evidence in classes
        )
        parts.append(
            f'<table class="sc-top"><caption>{escape(title)}</caption>'
            "<thead><tr><th scope=col>likely class</th>"
            "<th scope=col>softmax probability</th><th scope=col>sigmoid evidence</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    note = "<p>The probabilities above are recomputed with the shifted head: they do not change.</p>"
    return f'<div class="sc-tops">{"".join(parts)}</div>{note if delta else ""}'


def _bar(share: float, digits: int) -> str:
    number = f'<span class="sc-number">{share:.{digits}f}</span>'
    return f'{number}<span class="sc-meter" style="--share:{share:.4f}"></span>'


def progress_html(message: str, done: int = 0, total: int = 0) -> str:
    """Render a message, with a progress bar if `total` is known; screen readers announce changes."""
    bar = f'<progress value="{done}" max="{total}"></progress>' if total else ""
    return f'<div class="sc-progress" role="status">{bar}<span>{escape(message)}</span></div>'


def state_link_html(query: str) -> str:
    """Render a link to the page's state."""
    return (
        '<div class="sc-links" role="status">Copied, if your browser allows it: '
        f'<a class="sc-link" href="{escape(query)}">link to the page as it is now</a></div>'
    )


def links_html(files: dict[str, bytes]) -> str:
    """Render download links that contain their files as data URIs."""
    links = []
    for name, data in files.items():
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        uri = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        size = f"{len(data) / 1e6:.1f} MB" if len(data) >= 1e6 else f"{max(1, len(data) // 1000)} kB"
        links.append(f'<a class="sc-link" download="{escape(name)}" href="{uri}">{escape(name)} ({size})</a>')
    return f'<div class="sc-links">{"".join(links)}</div>'
