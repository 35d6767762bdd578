"""Draw the synthetic birds and their scenes as filled polygons."""

from __future__ import annotations

import colorsys
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from sigcam.data.sample import Box

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

    Points = NDArray[np.float64]  # (V, 2) x, y; y points down
    Colour = tuple[int, int, int]
    Polygon = tuple[Points, Colour]

MIN_AREA, MAX_AREA = 0.11, 0.59  # of the image: keeps the tight box, in whole pixels, between 10% and 60%
OVERSAMPLING = 3  # draw at this scale and average down, for smooth edges


@dataclass(frozen=True)
class ShapeKey:
    """Everything a drawing depends on."""

    seed: int
    split: str
    index: int
    size: int

    def rng(self, layer: int) -> Generator:
        """Return the random generator of a layer (0 bird, 1 scene), so that boxes need no scene drawn."""
        return np.random.default_rng([self.seed, zlib.crc32(self.split.encode()), self.index, layer])


def draw_image(key: ShapeKey, *, bird: bool = True) -> Image.Image:
    """Draw the RGB image; without the bird, the same scene."""
    rng = key.rng(1)
    backdrop, polygons = _scene(key.size, rng)
    canvas = backdrop.resize((key.size * OVERSAMPLING, key.size * OVERSAMPLING), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(canvas)
    for points, colour in [*polygons, *(_bird(key) if bird else [])]:
        draw.polygon((points * OVERSAMPLING).ravel().tolist(), fill=colour)
    pixels = np.asarray(canvas.reduce(OVERSAMPLING), dtype=np.float32)  # (H, W, 3)
    grain = rng.standard_normal((key.size, key.size, 1), dtype=np.float32) * rng.uniform(2, 6)
    return Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))


def draw_bird_mask(key: ShapeKey) -> NDArray[np.uint8]:
    """Draw the mask of the bird, (H, W): 1 where it covers at least half of the pixel, else 0."""
    return np.asarray(_silhouette(key)).copy()


def tight_box(key: ShapeKey) -> Box:
    """Return the box around the bird's mask."""
    box = _silhouette(key).getbbox()
    assert box is not None
    return box[0], box[1], box[2] - 1, box[3] - 1


def _silhouette(key: ShapeKey) -> Image.Image:
    """Draw the bird in mode L, 1 inside."""
    canvas = Image.new("L", (key.size * OVERSAMPLING, key.size * OVERSAMPLING))
    draw = ImageDraw.Draw(canvas)
    for points, _ in _bird(key):
        draw.polygon((points * OVERSAMPLING).ravel().tolist(), fill=255)
    return canvas.reduce(OVERSAMPLING).point([0] * 128 + [1] * 128)


def _bird(key: ShapeKey) -> list[Polygon]:
    """Return the bird as polygons in image pixels, back to front, entirely inside the image."""
    rng = key.rng(0)
    crown, wing, tail = np.unravel_index(key.index % 8, (2, 2, 2))
    parts = _body(rng, crested=crown == 0, barred=wing == 0, forked=tail == 0)
    turn = rng.uniform(-0.4, 0.4)
    stretch = rng.uniform(0.9, 1.1)
    side = rng.choice((-1, 1))
    matrix = np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    matrix = matrix * (side * stretch, 1 / stretch)  # (2, 2), for rows x, y
    corners = np.concatenate([points for points, _ in parts]) @ matrix
    low, high = corners.min(0), corners.max(0)
    extent = high - low  # (2,) width, height
    area = rng.uniform(MIN_AREA, MAX_AREA)
    scale = min(math.sqrt(area / extent.prod()), 0.98 / extent.max())  # for an image with sides of length 1
    start = 0.01 + rng.random(2) * (0.98 - scale * extent)
    return [(((points @ matrix - low) * scale + start) * key.size, colour) for points, colour in parts]


def _body(rng: Generator, *, crested: bool, barred: bool, forked: bool) -> list[Polygon]:
    """Return a bird that faces right, about 2 wide and 1.6 high, with its body around the origin."""
    hue = rng.random()
    body = _colour(hue, rng.uniform(0.45, 0.9), rng.uniform(0.6, 0.95))
    coat = _colour(hue + rng.uniform(-0.08, 0.08), rng.uniform(0.5, 0.9), rng.uniform(0.3, 0.5))
    belly = _colour(hue + rng.uniform(-0.15, 0.15), rng.uniform(0.1, 0.35), rng.uniform(0.88, 1))
    accent = _colour(hue + rng.uniform(0.3, 0.7), rng.uniform(0.6, 0.95), rng.uniform(0.75, 1))
    mark = _colour(hue + rng.uniform(-0.2, 0.2), rng.uniform(0.05, 0.25), rng.uniform(0.92, 1))
    bill = _colour(rng.uniform(0.04, 0.14), rng.uniform(0.6, 0.95), rng.uniform(0.6, 1))

    plump = rng.uniform(0.9, 1.15)
    x, y = rng.uniform(0.46, 0.58), rng.uniform(-0.5, -0.36)  # centre of the head
    r = rng.uniform(0.26, 0.3)  # radius of the head
    back = [(-0.62, 0.02), (-0.3, -0.26), (0.1, -0.36), (x - 0.16, y - 0.12), (x + 0.2, y + 0.1), (0.6, 0.0)]
    front = [(0.42, 0.32 * plump), (0.0, 0.42 * plump), (-0.4, 0.26 * plump)]
    breast = [(-0.35, 0.2 * plump), (0.1, 0.16), (0.36, -0.1), (0.56, -0.02), (0.42, 0.28 * plump)]
    breast.append((0.0, 0.4 * plump))
    length, depth = rng.uniform(0.24, 0.36), rng.uniform(0.07, 0.1)
    tip = (x + r + length, y + rng.uniform(0.0, 0.08))
    parts = [*_legs(rng, bill), *_bird_tail(rng, coat, mark, forked=forked)]
    if crested:
        parts += [(feather + np.array((x, y)), accent) for feather in _crest(rng, r)]
    parts += [
        (np.array([(x + 0.7 * r, y - depth), tip, (x + 0.7 * r, y + depth + 0.04)]), bill),
        (_smooth(back + front), body),
        (_smooth(breast), belly),
        (_ellipse((x, y), r, r), body),
    ]
    if not crested:
        angles = np.linspace(-1.12 * math.pi, -0.25, 20)  # from the nape over the top to the bill
        parts.append((_on_circle(angles) * (r + 0.01) + (x, y), accent))
    parts.append((_ellipse((x + 0.09, y - 0.02), 0.075, 0.075), (250, 250, 245)))
    parts.append((_ellipse((x + 0.105, y - 0.02), 0.045, 0.045), (20, 18, 24)))
    return parts + _wing(rng, coat, mark, barred=barred)


def _legs(rng: Generator, colour: Colour) -> list[Polygon]:
    stand, stride = rng.uniform(0.56, 0.68), rng.uniform(0.02, 0.16)
    parts = []
    for hip, foot in ((-0.02, -0.02 - stride), (0.14, 0.14 + stride)):
        parts.append((_limb((hip, 0.3), (foot, stand), 0.06), colour))
        parts.append((_limb((foot - 0.05, stand), (foot + 0.15, stand + 0.01), 0.055), colour))
    return parts


def _bird_tail(rng: Generator, colour: Colour, edge: Colour, *, forked: bool) -> list[Polygon]:
    """Return two long prongs with a deep notch, or a round fan of feathers with an edge."""
    root, angle = np.array([-0.5, 0.06]), math.pi + rng.uniform(-0.1, 0.35)
    long = rng.uniform(0.62, 0.76)
    if forked:
        shape = [(0.0, -0.1), (0.45, -0.17), (1.1, -0.44), (0.5, 0.0), (1.1, 0.44), (0.45, 0.17), (0.0, 0.1)]
        return [(_rotate(np.array(shape) * long, angle) + root, colour)]
    spread = np.linspace(-0.8, 0.8, 31)
    rim = 0.92 + 0.08 * np.abs(np.cos(spread / 0.8 * 2.5 * math.pi))  # five feathers
    fan = _on_circle(spread) * rim[:, None] * long  # (31, 2)
    base = np.array([(0.0, 0.1), (0.0, -0.1)]) * long
    outer, inner = np.concatenate([base, fan]), np.concatenate([base, fan * 0.78])
    return [(_rotate(outer, angle) + root, edge), (_rotate(inner, angle) + root, colour)]


def _crest(rng: Generator, r: float) -> list[Points]:
    """Return five pointed feathers that stand up from a head of radius r around the origin."""
    feathers = []
    for angle, length in ((-3.0, 1.9), (-2.6, 2.2), (-2.2, 2.3), (-1.8, 2.2), (-1.4, 1.9)):
        end = r * (0.7 + length * rng.uniform(0.95, 1.1))
        feather = np.array([(0.0, -0.4 * r), (end, 0.0), (0.0, 0.4 * r)])
        feathers.append(_rotate(feather, angle + rng.uniform(-0.08, 0.08)))
    return feathers


def _wing(rng: Generator, coat: Colour, mark: Colour, *, barred: bool) -> list[Polygon]:
    """Return a folded wing with three bars across it, or with spots all over."""
    root, angle = np.array([0.2, -0.06]), rng.uniform(-0.12, 0.3)
    shape = _smooth([(0.12, 0.0), (-0.05, -0.19), (-0.4, -0.16), (-0.82, 0.06), (-0.42, 0.2), (-0.02, 0.2)])
    parts = [(shape, coat)]
    if barred:
        for x, low, high in ((0.0, -0.12, 0.14), (-0.19, -0.14, 0.15), (-0.38, -0.11, 0.14)):
            parts.append((_limb((x, low), (x - 0.04, high), rng.uniform(0.07, 0.085)), mark))
    else:
        for x, y in ((-0.02, -0.08), (-0.02, 0.1), (-0.19, 0.01), (-0.33, -0.09), (-0.34, 0.1), (-0.5, 0.02)):
            r = rng.uniform(0.05, 0.06)
            parts.append((_ellipse((x, y), r, r), mark))
    return [(_rotate(points, -angle) + root, colour) for points, colour in parts]


def _scene(size: int, rng: Generator) -> tuple[Image.Image, list[Polygon]]:
    """Return what is behind the bird: a textured backdrop, and distractors as polygons in pixels."""
    hue, dark = rng.random(), rng.random() < 0.4
    low, high = (0.22, 0.42) if dark else (0.62, 0.9)
    first = _colour(hue, rng.uniform(0.12, 0.5), rng.uniform(low, high))
    second = _colour(hue + rng.uniform(-0.12, 0.12), rng.uniform(0.1, 0.45), rng.uniform(low, high))
    kind = rng.integers(5)
    parts: list[Polygon] = []
    blend: NDArray[np.floating] = _smooth_noise(size, int(rng.integers(3, 7)), rng)  # (H, W) in [0, 1]
    if kind == 0:  # clouds, coarse and fine
        blend = 0.65 * blend + 0.35 * _smooth_noise(size, int(rng.integers(12, 40)), rng)
    elif kind == 1:  # stripes, slightly bent
        blend = 0.5 + 0.5 * np.sin(_ramp(size, rng) * rng.uniform(30, 90) + blend * rng.uniform(1, 5))
    elif kind == 2:  # horizon
        blend = ((_ramp(size, rng) + 0.25 * blend - 0.3) * 8).clip(0, 1)
    elif kind == 3:  # foliage
        parts = _leaves(int(rng.integers(25, 60)), hue, (low, high), rng)
    else:  # soft discs
        parts = _discs(int(rng.integers(12, 30)), hue, (low, high), rng)
    one, other = Image.new("RGB", (size, size), first), Image.new("RGB", (size, size), second)
    backdrop = Image.composite(other, one, Image.fromarray((blend * 255).astype(np.uint8)))
    parts += [part for _ in range(rng.integers(2, 5)) for part in _distractor(rng)]
    return backdrop, [(points * size, colour) for points, colour in parts]


def _smooth_noise(size: int, cells: int, rng: Generator) -> NDArray[np.float32]:
    """Return smooth random noise, (H, W) in [0, 1]."""
    grid = Image.fromarray(rng.random((cells, cells), dtype=np.float32))
    return np.asarray(grid.resize((size, size), Image.Resampling.BICUBIC)).clip(0, 1)


def _ramp(size: int, rng: Generator) -> NDArray[np.float32]:
    """Return a ramp from 0 to about 1 in a random direction, (H, W)."""
    angle, steps = rng.uniform(0, math.pi / 2), np.linspace(0, 1, size, dtype=np.float32)
    return math.cos(angle) * steps[None, :] + math.sin(angle) * steps[:, None]


def _leaves(count: int, hue: float, values: tuple[float, float], rng: Generator) -> list[Polygon]:
    leaf = _smooth([(-1.0, 0.0), (0.0, -0.38), (1.0, 0.0), (0.0, 0.38)], steps=3)
    return [
        (
            _rotate(leaf * rng.uniform(0.04, 0.13), rng.uniform(0, 2 * math.pi)) + rng.random(2),
            _colour(hue + rng.uniform(-0.08, 0.08), rng.uniform(0.2, 0.55), rng.uniform(*values)),
        )
        for _ in range(count)
    ]


def _discs(count: int, hue: float, values: tuple[float, float], rng: Generator) -> list[Polygon]:
    return [
        (
            _ellipse(rng.random(2), r, r),
            _colour(hue + rng.uniform(-0.08, 0.08), rng.uniform(0.1, 0.4), rng.uniform(*values)),
        )
        for r in rng.uniform(0.02, 0.1, count)
    ]


def _distractor(rng: Generator) -> list[Polygon]:
    """Return a ball, egg, toadstool, flower or star: bars, spots and points unrelated to the bird."""
    centre, r = rng.random(2), rng.uniform(0.05, 0.11)
    hue, turn = rng.random(), rng.uniform(-0.6, 0.6)
    main = _colour(hue, rng.uniform(0.4, 0.9), rng.uniform(0.45, 0.95))
    pale = _colour(hue + rng.uniform(-0.2, 0.2), rng.uniform(0.05, 0.25), rng.uniform(0.9, 1))
    dots = [(-0.45, -0.25), (0.4, -0.35), (0.0, 0.2), (-0.1, -0.6), (0.5, 0.25), (-0.5, 0.35)]
    kind = rng.integers(5)
    if kind == 0:  # a ball with bars
        parts = [(_ellipse((0, 0), 1, 1), main)]
        parts += [(_limb((x, -w), (x, w), 0.2), pale) for x, w in ((-0.5, 0.75), (0.0, 0.9), (0.5, 0.75))]
    elif kind == 1:  # an egg with spots
        parts = [(_ellipse((0, 0), 0.8, 1), main)]
        parts += [(_ellipse((0.8 * x, y), 0.14, 0.14), pale) for x, y in dots]
    elif kind == 2:  # a toadstool
        hood = _on_circle(np.linspace(-math.pi, 0, 20))
        parts = [(_limb((0, 0), (0, 0.9), 0.45), pale), (hood, main)]
        parts += [(_ellipse((x, y - 0.25), 0.12, 0.12), pale) for x, y in dots[:4] if y < 0.2]
    elif kind == 3:  # a flower
        petals = 0.6 * _on_circle(np.arange(0, 2, 0.4) * math.pi)
        parts = [(_ellipse(petal, 0.4, 0.4), main) for petal in petals]
        parts.append((_ellipse((0, 0), 0.35, 0.35), pale))
    else:  # a star
        points = _on_circle(np.arange(0, 2, 0.2) * math.pi) * np.tile([1, 0.45], 5)[:, None]
        parts = [(points, main)]
    return [(_rotate(outline * r, turn) + centre, colour) for outline, colour in parts]


def _colour(hue: float, saturation: float, value: float) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _rotate(points: Points, angle: float) -> Points:
    """Rotate the points, clockwise on the screen since y points down."""
    cos, sin = math.cos(angle), math.sin(angle)
    turn: Points = np.array([[cos, sin], [-sin, cos]])
    return points @ turn


def _on_circle(angles: NDArray[np.floating]) -> Points:
    """Return points on the unit circle, (V, 2)."""
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def _ellipse(centre: Points | tuple[float, float], a: float, b: float) -> Points:
    return np.asarray(centre) + CIRCLE * (a, b)


def _limb(start: tuple[float, float], end: tuple[float, float], width: float) -> Points:
    """Return a thick line."""
    a, b = np.array(start), np.array(end)
    along = (b - a) / np.hypot(*(b - a)) * width / 2
    across = np.array([-along[1], along[0]])
    return np.array([a + across, a - along, a - across, b - across, b + along, b + across])


def _smooth(corners: list[tuple[float, float]], steps: int = 6) -> Points:
    """Return a closed Catmull-Rom curve through the corners."""
    p1 = np.array(corners, dtype=np.float64)
    p0, p2, p3 = np.roll(p1, 1, 0), np.roll(p1, -1, 0), np.roll(p1, -2, 0)
    t = np.linspace(0, 1, steps, endpoint=False)[:, None, None]  # (steps, 1, 1)
    curve = p1 + 0.5 * t * ((p2 - p0) + t * ((2 * p0 - 5 * p1 + 4 * p2 - p3) + t * (3 * (p1 - p2) + p3 - p0)))
    return curve.transpose(1, 0, 2).reshape(-1, 2)  # (corners * steps, 2)


CIRCLE = _on_circle(np.arange(32) * math.pi / 16)
