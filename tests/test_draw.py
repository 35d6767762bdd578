"""Pictures show what they should at known places."""

import numpy as np
import torch
from PIL import Image

from sigcam.draw import HEAT, SIGNED, _fitted, colours, font, grid, overlay, with_boxes, with_outline


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
    cut = _fitted("a name far too long for a cell of this width\nshort", face, 120).split("\n")
    assert face.getlength(cut[0]) <= 120 and cut[0].endswith("…") and cut[1] == "short"


def test_a_grid_has_a_cell_per_picture_and_no_label_over_a_picture():
    red, blue = Image.new("RGB", (10, 10), "red"), Image.new("RGB", (10, 10), "blue")
    page = np.asarray(
        grid([[red, blue], [blue, red]], columns=("one\ntwo", "three"), captions=[["a", "b"], ["c", "d"]])
    )
    assert int(((page == (255, 0, 0)).all(2)).sum()) == 2 * 224 * 224
    assert int(((page == (0, 0, 255)).all(2)).sum()) == 2 * 224 * 224
