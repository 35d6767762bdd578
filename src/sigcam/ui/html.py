"""Pieces of the page as HTML: panels, boxes, legend, classes, progress, links to files; text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from sigcam.drawing.overlay import gradient
from sigcam.ui.sources import Top
from sigcam.ui.viewer import Viewer

Boxes = Sequence[tuple[float, float, float, float] | None]
KINDS = {"npy": "application/octet-stream", "png": "image/png", "json": "application/json"}


def panels_html(look: Viewer) -> str:
    """The picture and its maps side by side, under the scale that they share."""
    ratio = f"{look.base.width} / {look.base.height}"
    cells = [
        f'<figure class="sc-panel"><div class="sc-frame" style="aspect-ratio:{ratio}">'
        f'<img src="{look.base_uri}" decoding="sync" alt="the picture"></div>'
        f"<figcaption><b>{escape(look.name)}</b><br>{look.size[0]} x {look.size[1]} pixels</figcaption>"
        "</figure>"
    ]
    peaks = {panel.peak for panel in look.panels if panel.in_logits}
    for number, panel in enumerate(look.panels):
        what = f"{panel.class_name}: {panel.source.name}, {panel.method}"
        unit = "logits" if panel.in_logits else "in its own unit"
        own = not panel.in_logits or len(peaks) > 1
        lines = [f"<b>{escape(panel.class_name)}</b>", f"{escape(panel.source.name)}, {escape(panel.method)}"]
        lines.append(f"logit {panel.logit:+.3f}; {panel.share:.0%} of its evidence is positive")
        lines += [f"full colour: {panel.peak:.3g} {unit}"] if own else []
        lines += [f'<span class="sc-blank">{escape(panel.note)}</span>'] if panel.note else []
        cells.append(
            f'<figure class="sc-panel sc-p{number}"><div class="sc-frame" style="aspect-ratio:{ratio}">'
            f'<img src="{panel.uri}" decoding="sync" alt="map of {escape(what)}"><i class="sc-box"></i></div>'
            f"<figcaption>{'<br>'.join(lines)}</figcaption></figure>"
        )
    legend = panel_legend_html(look.kind, peaks.pop()) if len(peaks) == 1 else ""
    return f'<div class="sc-grid">{"".join(cells)}</div>{legend}'


def panel_legend_html(kind: str, peak: float) -> str:
    """The colours of the scale that all maps in logits share."""
    signed = kind == "signed"
    ends = (f"-{peak:.3g}", "0", f"+{peak:.3g}") if signed else ("0", f"{peak:.3g}")
    said = "against the class, for it" if signed else "evidence for the class"
    marks = "".join(f"<span>{end}</span>" for end in ends)
    return (
        '<div class="sc-legend">'
        f'<div class="sc-bar" style="background:{gradient(signed=signed)}"></div>'
        f'<div class="sc-ends">{marks}</div><div>logits per cell, {said}; one scale for all maps</div></div>'
    )


def boxes_html(boxes: Boxes, threshold: float) -> str:
    """Where the panels' boxes are: a style sheet, so that a moving box needs no picture sent again."""
    rules = []
    for number, box in enumerate(boxes):
        if box is not None:
            left, top, right, bottom = (100 * share for share in box)
            place = f"left:{left:.2f}%;top:{top:.2f}%;width:{right - left:.2f}%;height:{bottom - top:.2f}%"
            rules.append(f"#panels .sc-p{number} .sc-box{{display:block;{place}}}")
    return f"<style data-threshold={threshold:g}>{''.join(rules)}</style>"


def tops_html(tops: Sequence[Top], delta: float) -> str:
    """The likely classes by each network: softmax probability and sigmoid evidence side by side."""
    parts = []
    for top in tops:
        rows = "".join(
            f"<tr><th scope=row>{escape(name)}</th><td>{_bar(probability, 6)}</td>"
            f"<td>{'not fitted' if evidence is None else _bar(evidence, 3)}</td></tr>"
            for name, probability, evidence in top.rows
        )
        parts.append(
            f'<table class="sc-top"><caption>{escape(top.title)}</caption>'
            "<thead><tr><th scope=col>likely class</th>"
            f"<th scope=col>softmax probability</th><th scope=col>sigmoid evidence</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    moved = (
        ""
        if not delta
        else "<p>The head is shifted: its probabilities above are computed anew, and stand still.</p>"
    )
    return f'<div class="sc-tops">{"".join(parts)}</div>{moved}'


def _bar(share: float, digits: int) -> str:
    number = f'<span class="sc-number">{share:.{digits}f}</span>'
    return f'{number}<span class="sc-meter" style="--share:{share:.4f}"></span>'


def progress_html(said: str, done: int = 0, total: int = 0) -> str:
    """A bar, read aloud as it moves."""
    bar = f'<progress value="{done}" max="{total}"></progress>' if total else ""
    return f'<div class="sc-progress" role="status">{bar}<span>{escape(said)}</span></div>'


def links_html(files: dict[str, bytes]) -> str:
    """Links that hold their files themselves."""
    links = []
    for name, data in files.items():
        kind = KINDS.get(name.rpartition(".")[2], "application/octet-stream")
        source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        size = f"{len(data) / 1e6:.1f} MB" if len(data) >= 1e6 else f"{max(1, len(data) // 1000)} kB"
        links.append(
            f'<a class="sc-link" download="{escape(name)}" href="{source}">{escape(name)} ({size})</a>'
        )
    return f'<div class="sc-links">{"".join(links)}</div>'
