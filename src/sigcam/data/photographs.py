"""Example photographs, read from the installed package scikit-image without importing it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from sigcam.core.errors import ConfigError, MissingExtra
from sigcam.data.images import open_image
from sigcam.data.sample import Sample, Samples


class Photograph(NamedTuple):
    """A photograph: its name, its file, and one sentence with what it shows, its author and its terms."""

    name: str
    path: Path
    credit: str


# Name to file in scikit-image's wheel, and credit as its documentation gives it.
PHOTOGRAPHS = {
    "chelsea": ("chelsea.png", "Chelsea the cat, by Stéfan van der Walt: CC0."),
    "coffee": ("coffee.png", "Coffee at Pikolo Espresso Bar, by Rachel Michetti: CC0."),
    "rocket": ("rocket.jpg", "Launch of DSCOVR on a Falcon 9, by SpaceX: public domain."),
    "astronaut": (
        "astronaut.png",
        "Eileen Collins, from the NASA Great Images database: public domain.",
    ),
    "motorcycle": (
        "motorcycle_left.png",
        "Motorcycle of the Middlebury 2014 stereo benchmark, by Nesic, Westling, Wang, Kitajima, "
        "Krathwohl and Scharstein: to cite if published (High-resolution stereo datasets, GCPR 2014).",
    ),
}


def example_photographs(names: Iterable[str] | None = None) -> list[Photograph]:
    """Return the example photographs of these names, or all; MissingExtra without scikit-image."""
    chosen = list(PHOTOGRAPHS if names is None else dict.fromkeys(names))
    unknown = [name for name in chosen if name not in PHOTOGRAPHS]
    if unknown:
        raise ConfigError(f"no example is called {unknown[0]!r}: there are {', '.join(PHOTOGRAPHS)}.")
    package = find_spec("skimage")
    if package is None or not package.submodule_search_locations:
        raise MissingExtra("an example photograph", "scikit-image", "examples")
    folder = Path(package.submodule_search_locations[0]) / "data"
    return [Photograph(name, folder / PHOTOGRAPHS[name][0], PHOTOGRAPHS[name][1]) for name in chosen]


def example_samples(names: Iterable[str] | None = None) -> Samples:
    """Return the example photographs as unlabelled samples, whose ids are their names with the extension."""
    found = ((name + path.suffix, path) for name, path, _ in example_photographs(names))
    return Samples(tuple(Sample(id, partial(open_image, path), path=path) for id, path in found), ())
