"""What a method that runs many images takes, told before it starts and while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from sigcam.core.types import Progress
from sigcam.methods.probe import shares_reported
from sigcam.methods.registry import METHODS, MapConfig
from sigcam.network.dual import DualBranch

LONG = 200  # passes an image
TIMED = 4  # images in the passes that are timed
BACKWARD = 3  # what a pass with gradients takes, in forward passes


def is_long(config: MapConfig) -> bool:
    """Whether the method takes so long that it goes image by image, and tells what it takes."""
    return config.checked().passes >= LONG


def cost_note(net: DualBranch, config: MapConfig) -> str:
    """Return how many passes an image takes, and about how long on this machine, by the time of one:
    "rise: 4000 passes an image, about 2 minutes"."""
    config = config.checked()
    method, images = METHODS[config.method], net.example.repeat(TIMED, 1, 1, 1)
    times = list[float]()
    for _ in range(3):  # the first one takes longer
        began = perf_counter()
        float(net.run(images).softmax[0, 0])  # waits for a GPU
        times.append((perf_counter() - began) / TIMED)
    seconds = min(times) * config.passes * (1 if method.perturbs == "images" else BACKWARD)
    about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    each = "" if method.perturbs == "images" else ", and class"
    return f"{config.method}: {config.passes} passes an image{each}, about {about}"


@contextmanager
def passes_reported(
    progress: Progress | None, config: MapConfig, done: int, count: int, total: int
) -> Iterator[None]:
    """Report passes while the block explains `count` of `total` images, after `done` of them."""
    if progress is None:
        yield
        return
    most = 0

    def report(share: float) -> None:
        nonlocal most
        most = max(most, round(config.passes * (done + count * min(share, 1))))
        progress("passes", most, total * config.passes)

    with shares_reported(report):
        yield
