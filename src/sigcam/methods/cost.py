"""What a method that runs many images takes, told before it starts and while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from sigcam.core.memory import size_text
from sigcam.core.types import Progress
from sigcam.methods.formulas import MANY_MASKS, faster_copy, usual_batch
from sigcam.methods.probe import shares_reported
from sigcam.methods.registry import METHODS, MapConfig
from sigcam.network.dual import DualBranch
from sigcam.network.pass_memory import bytes_of_altered, smaller_batch

LONG = 64  # passes an image
TIMED = 4  # images in the passes that are timed


def is_long(config: MapConfig) -> bool:
    """Whether the method takes so long that it goes image by image, and tells what it takes."""
    return config.checked().passes >= LONG


def cost_note(net: DualBranch, config: MapConfig) -> str:
    """Return how many passes an image takes, about how long on this machine, by the time of one, and about
    how much memory: "rise: 4000 passes an image, about 2 minutes, with about 120 MB of memory besides the
    weights"."""
    config = config.checked()
    forward = METHODS[config.method].perturbs == "images"
    seconds, needed = config.passes * _seconds_a_pass(net, config, forward), _bytes(net, config, forward)
    about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    memory = "" if needed is None else f", with about {size_text(needed)} of memory besides the weights"
    each = "" if forward else ", and class"
    return f"{config.method}: {config.passes} passes an image{each}, about {about}{memory}"


def _seconds_a_pass(net: DualBranch, config: MapConfig, forward: bool) -> float:
    """Return the time of an image's forward pass, or forward and backward pass, in a batch."""
    images = net.example.repeat(TIMED, 1, 1, 1)
    if config.passes >= MANY_MASKS:  # as the method does
        net = faster_copy(net, net.example, net.run(net.example).softmax_logits)
    times = list[float]()
    for _ in range(3):  # the first one takes longer
        began = perf_counter()
        if forward:
            float(net.run(images).softmax[0, 0])  # waits for a GPU
        else:
            leaf = images.clone().requires_grad_()
            score = net.run_from_images(leaf).softmax_logits[:, 0].sum()
            float(torch.autograd.grad(score, leaf)[0][0, 0, 0, 0])
        times.append((perf_counter() - began) / TIMED)
    return min(times)


def _bytes(net: DualBranch, config: MapConfig, forward: bool) -> float | None:
    """Return the memory of a pass of as many images as the method gives to one; None if that is unknown."""
    facts, images = METHODS[config.method], net.example
    together = facts.passes if facts.passes > 1 else config.passes
    usual = min(config.batch_size or usual_batch(images), together)
    each = bytes_of_altered(net, images, grad=False if forward else "images")
    if each is None:
        return None
    return each * smaller_batch(usual, net, images, grad=False if forward else "images")


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
