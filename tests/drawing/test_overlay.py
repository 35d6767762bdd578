"""Pictures show what they should at known places."""

import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.drawing.overlay import (
    HEAT,
    MIN_WIDTH,
    PAPER,
    SIGNED,
    _truncate,
    colour_bar,
    colours,
    font,
    gradient,
    grid,
    overlay,
    with_boxes,
    with_contour,
    with_outline,
    with_strips,
)


def rgb(code: str) -> tuple[int, ...]:
    return tuple(int(code[i : i + 2], 16) for i in (0, 2, 4))


def test_a_map_runs_from_the_first_to_the_last_colour():
    picture = colours(torch.tensor([[0.0, 0.5, 1.0]]))
    assert picture.getpixel((0, 0)) == rgb(HEAT[0])
    assert picture.getpixel((2, 0)) == rgb(HEAT[-1])


def test_lightness_rises_steadily_along_the_heat_colours():
    ramp = np.asarray(colours(torch.linspace(0, 1, 256)[None]), dtype=float)[0] @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(ramp) > -0.6).all()  # rounding to 8 bits may step back by less than one level
    assert ramp[-1] - ramp[0] > 230


def test_zero_is_the_neutral_colour_of_a_signed_map_whatever_its_range():
    for values in ([[-4.0, 0.0, 1.0]], [[-0.1, 0.0, 3.0]]):
        picture = colours(torch.tensor(values), signed=True)
        assert picture.getpixel((1, 0)) == rgb(SIGNED[4])
    left, right = picture.getpixel((0, 0)), picture.getpixel((2, 0))
    assert left[2] > left[0] and right[0] > right[2]  # blue against, red for


def test_a_given_peak_puts_several_signed_maps_on_one_scale():
    weak, strong = torch.tensor([[1.0, 0.0]]), torch.tensor([[4.0, 0.0]])
    assert colours(weak, signed=True).getpixel((0, 0)) == rgb(SIGNED[-1])
    assert colours(weak, signed=True, peak=4.0).getpixel((0, 0)) == rgb(SIGNED[5])  # a quarter of the way
    assert colours(strong, signed=True, peak=4.0).getpixel((0, 0)) == rgb(SIGNED[-1])
    ground = Image.new("RGB", (2, 1), "black")
    faint, full = (np.asarray(overlay(ground, v, signed=True, peak=4.0))[0, 0] for v in (weak, strong))
    assert full[0] == pytest.approx(0.75 * rgb(SIGNED[-1])[0], abs=1)
    assert faint[0] == pytest.approx(0.1875 * rgb(SIGNED[5])[0], abs=1)


def test_the_css_colours_are_those_of_the_pictures():
    assert gradient().startswith(f"linear-gradient(to right, #{HEAT[0]},") and HEAT[-1] in gradient()
    assert gradient(signed=True).endswith(f"#{SIGNED[-1]})")


def test_a_contour_outlines_what_is_above_the_threshold_and_nothing_else():
    values = torch.zeros(60, 60)
    values[10:40, 20:50] = 0.5
    values[20:25, 30:35] = 1.0
    ground = Image.new("RGB", (60, 60), "black")
    low = np.asarray(with_contour(ground, values, 0.2, "#00e5ff"))
    drawn = (low == (0, 229, 255)).all(2)
    assert drawn[10, 20:50].all() and drawn[39, 20:50].all() and drawn[10:40, 20].all()
    assert not drawn[14:36, 24:46].any() and not drawn[:10].any() and not drawn[40:].any()
    high = np.asarray(with_contour(ground, values, 0.8)).any(2)
    assert high[20, 30] and not high[10, 20] and high.sum() <= 25
    assert not np.asarray(with_contour(ground, torch.zeros(60, 60), 0.2)).any()


def ink(picture: Image.Image) -> np.ndarray:
    return (np.asarray(picture) != PAPER).any(2)


@pytest.mark.parametrize("peak", [None, 0.0, 3.14159, 0.000123, 98765.4])
@pytest.mark.parametrize("width", [MIN_WIDTH, 224, 448])
def test_a_colour_bar_shows_both_ends_and_its_numbers_are_apart_and_not_clipped(peak, width):
    bar = colour_bar(width, peak)
    first, last = (HEAT[0], HEAT[-1]) if peak is None else (SIGNED[0], SIGNED[-1])
    assert bar.getpixel((8, 10)) == rgb(first) and bar.getpixel((width - 9, 10)) == rgb(last)
    if peak is not None:
        middle = np.array([bar.getpixel((x, 10)) for x in (width // 2 - 1, width // 2)], dtype=float)
        assert np.abs(middle.mean(0) - rgb(SIGNED[4])).max() <= 2  # zero is in the middle
    marked = ink(bar)
    assert not (marked[0] | marked[-1]).any() and not (marked[:, 0] | marked[:, -1]).any()
    words = np.flatnonzero(marked[20:].any(0))
    gaps = np.diff(words)
    assert (gaps > 8).sum() == (0 if peak == 0 else 2)  # three labels with room between them


def test_a_caption_is_cut_to_the_picture_and_nothing_touches_its_edges():
    long = "a class name that is far too long to be written under a picture of this size"
    page = with_strips(Image.new("RGB", (224, 224), "red"), caption=f"{long}\nprobability 0.123", legend=True)
    assert page.width == 224 and page.getpixel((100, 100)) == (255, 0, 0)
    below = ink(page)[224:]
    assert below.any() and not (below[:, 0] | below[:, -1] | below[:, 1] | below[:, -2]).any()
    assert not below[0].any() and not below[-1].any()
    rows = np.flatnonzero(below[:, 8:-8].any(1))
    assert (np.diff(rows) > 1).sum() >= 2  # two lines and the bar are apart


def test_a_picture_too_small_to_be_written_under_is_enlarged_whole():
    picture = Image.new("RGB", (7, 5), "blue")
    picture.putpixel((6, 4), (255, 0, 0))
    page = with_strips(picture, legend=True, peak=2.0)
    assert page.width == 203 and page.width >= MIN_WIDTH
    assert page.getpixel((202, 144)) == (255, 0, 0) and page.getpixel((0, 0)) == (0, 0, 255)


def test_an_all_zero_map_leaves_the_picture_visible():
    picture = Image.new("RGB", (32, 20), (200, 80, 40))
    plain = np.asarray(overlay(picture, torch.zeros(20, 32)))
    assert (plain == plain[0, 0]).all() and plain[0, 0].argmax() == 0


def test_the_overlay_is_strongest_where_the_map_is():
    values = torch.zeros(20, 32)
    values[5, 7] = 1.0
    drawn = np.asarray(overlay(Image.new("RGB", (32, 20), (10, 10, 10)), values)).sum(2)
    assert np.unravel_index(drawn.argmax(), drawn.shape) == (5, 7)


def test_boxes_and_outlines_are_drawn_where_they_belong():
    picture = with_boxes(Image.new("RGB", (60, 60), "white"), [(10, 20, 40, 50)], colour="#00c853")
    assert picture.getpixel((10, 30)) == (0, 200, 83) and picture.getpixel((25, 35)) == (255, 255, 255)
    mask = np.zeros((60, 60), dtype=np.uint8)
    mask[10:30, 10:30] = 1
    outlined = with_outline(Image.new("RGB", (60, 60), "black"), mask)
    assert outlined.getpixel((10, 20)) == (255, 235, 59) and outlined.getpixel((20, 20)) == (0, 0, 0)


def test_a_label_that_is_too_long_is_cut_to_its_cell_with_an_ellipsis():
    face = font(14)
    cut = _truncate("a name far too long for a cell of this width\nshort", face, 120).split("\n")
    assert face.getlength(cut[0]) <= 120 and cut[0].endswith("…") and cut[1] == "short"


def test_a_grid_has_a_cell_per_picture_and_no_label_over_a_picture():
    red, blue = Image.new("RGB", (10, 10), "red"), Image.new("RGB", (10, 10), "blue")
    page = np.asarray(
        grid([[red, blue], [blue, red]], columns=("one\ntwo", "three"), captions=[["a", "b"], ["c", "d"]])
    )
    assert int(((page == (255, 0, 0)).all(2)).sum()) == 2 * 224 * 224
    assert int(((page == (0, 0, 255)).all(2)).sum()) == 2 * 224 * 224


def test_labels_of_a_grid_stay_off_its_edges():
    picture = Image.new("RGB", (10, 10), "red")
    long = "a label that goes on and on, much further than its cell is wide"
    page = grid([[picture, picture]], columns=(long, long), captions=[[long, long]], title=long * 3, cell=80)
    marked = ink(page)
    assert not (marked[0] | marked[-1]).any() and not (marked[:, :10].any() or marked[:, -10:].any())
