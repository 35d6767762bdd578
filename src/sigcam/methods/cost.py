"""What a method that runs many images takes, told before it starts and while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from sigcam.core.types import Progress
from sigcam.methods.probe import shares_reported
from sigcam.methods.registry import METHODS, MapConfig
from sigcam.network.dual import DualBranch

LONG = 200  # passes an image
BACKWARD = 3  # what a pass with gradients takes, in forward passes


def is_long(config: MapConfig) -> bool:
    """Whether the method takes so long that it goes image by image, and tells what it takes."""
    return config.checked().passes >= LONG


def cost_note(net: DualBranch, config: MapConfig) -> str:
    """Return how many passes an image takes, and about how long on this machine: "rise: 4000 passes an image, about
    2 minutes"; by the time of one pass."""
    config = config.checked()
    method, example = METHODS[config.method], net.example
    net.run(example)  # the first one takes longer
    began = perf_counter()
    float(net.run(example).softmax[0, 0])  # waits for a GPU
    seconds = (perf_counter() - began) * config.passes * (1 if method.perturbs == "images" else BACKWARD)
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
