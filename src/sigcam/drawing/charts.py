"""Line charts as inline SVG, coloured by the style sheet of the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 270
LEFT, TOP, RIGHT, BOTTOM = 40, 26, 12, 40  # margins for the axes' numbers and names
STYLES = ("", "7 3", "2 3", "10 3 2 3", "5 5", "1 4")  # dashes, so that lines differ without their colours

Point = tuple[float, float]
Range = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Args:
        points: (x, y) pairs, joined in this order.
        dots: (x, y, radius) of marks on the line.
        faint: draw the line faintly and the dots in full.
    """

    name: str
    points: Sequence[Point]
    dots: Sequence[tuple[float, float, float]] = ()
    faint: bool = False


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_name: str,
    y_name: str,
    x_range: Range = (0, 1),
    y_range: Range = (0, 100),
    rule: float | None = None,
    diagonal: bool = False,
) -> str:
    """An HTML figure with title, chart and legend.

    Args:
        rule: x of a vertical dashed line.
        diagonal: draw a dashed line from corner to corner.
    """

    def at(x: float, y: float) -> Point:
        right = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts, names = _axes(at, x_range, y_range), list[str]()
    parts.append(f'<text x="2" y="13">{escape(y_name)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{escape(x_name)}</text>')
    if diagonal:
        parts.append(_path([at(x_range[0], y_range[0]), at(x_range[1], y_range[1])], "rule"))
    if rule is not None:
        parts.append(_path([at(rule, y_range[0]), at(rule, y_range[1])], "rule"))
    for number, line in enumerate(lines):
        index = number % len(STYLES)
        points, style = [at(*point) for point in line.points], f"line s{index}" + " faint" * line.faint
        parts.append(_path(points, style, STYLES[index]))
        for x, y, radius in line.dots:
            u, v = at(x, y)
            parts.append(f'<circle class="dot s{index}" cx="{u:.1f}" cy="{v:.1f}" r="{radius:.1f}"/>')
        sample = _path([(0, 5), (28, 5)], f"line s{index}", STYLES[index])
        sample = f'<svg viewBox="0 0 28 10" width="28" height="10" aria-hidden="true">{sample}</svg>'
        names.append(f"<li>{sample}{escape(line.name)}</li>")
    description = f"{title}: {y_name} against {x_name}, of {', '.join(line.name for line in lines)}"
    label = f'role="img" aria-label="{escape(description)}"'
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{"".join(parts)}</svg>'
    content = f'<figcaption>{escape(title)}</figcaption>{svg}<ul class="key">{"".join(names)}</ul>'
    return f'<figure class="chart">{content}</figure>'


def _axes(at: Callable[[float, float], Point], x_range: Range, y_range: Range) -> list[str]:
    """Grid lines with numbers, five steps each way."""
    parts = list[str]()
    for step in range(6):
        x = x_range[0] + step / 5 * (x_range[1] - x_range[0])
        y = y_range[0] + step / 5 * (y_range[1] - y_range[0])
        parts.append(_path([at(x, y_range[0]), at(x, y_range[1])], "grid"))
        parts.append(_path([at(x_range[0], y), at(x_range[1], y)], "grid"))
        u, v = at(x, y_range[0])[0], at(x_range[0], y)[1]
        parts.append(f'<text x="{u:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{v + 4:.1f}" text-anchor="end">{y:g}</text>')
    return parts


def _path(points: Sequence[Point], style: str, dashes: str = "") -> str:
    steps = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return f'<path class="{style}" d="{steps}"' + (f' stroke-dasharray="{dashes}"/>' if dashes else "/>")
