"""Open the images and networks that the options of `sigcam ui` name."""

from __future__ import annotations

from pathlib import Path

from sigcam.core.errors import DataError
from sigcam.data.images import images_from_paths
from sigcam.data.readers.shapes import scenes, shapes
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.network.dual import DualBranch
from sigcam.network.opening import has_shipped_branch, open_network
from sigcam.ui.images import ImageGallery
from sigcam.ui.serve import UiOptions

EXAMPLES = (42, 86, 58, 64, 73, 90)  # birds of the test split that the embedded classifier localizes
SYNTHETIC_NOTICE = (
    "The examples are synthetic birds, unlike anything an ImageNet classifier has seen: it calls them "
    "pinwheels and envelopes, but it finds them. Drop a photograph to see real predictions."
)


def open_gallery(data: str, format: str | None) -> tuple[ImageGallery, bool]:
    """Return the images to choose from, and whether they have labels to fit a branch on."""
    if not data:
        birds = shapes(max(EXAMPLES) + 1, split="test", size=320)
        empty_scene = scenes(EXAMPLES[0] + 1, size=320)[-1]  # the first example without its bird
        return ImageGallery(Samples((*(birds[i] for i in EXAMPLES), empty_scene), birds.classes)), False
    if data.partition(":")[0] == "shapes" and format in (None, "shapes"):
        return ImageGallery(open_dataset(data, format=format, split="test")), True
    labelled = True
    try:
        samples = open_dataset(data, format=format, split="test")
    except DataError:
        if format is not None:
            raise
        samples, labelled = images_from_paths([data]), False  # raises if there are no images either
    if not len(samples):
        raise DataError(f"{data} contains no images.")
    return ImageGallery(samples, Path(data)), labelled


def open_networks(options: UiOptions) -> tuple[dict[str, DualBranch], str]:
    """Return the networks by name, and the notice to show above the page (may be empty)."""
    o = options
    first, notice = _open(o.model, o.weights, o.branch, o.device)
    nets, notices = {_display_name(o.model): first}, [notice]
    if (o.compare_model, o.compare_branch, o.compare_weights) != (None, None, None):
        model = o.compare_model or o.model
        weights = o.compare_weights or (o.weights if o.compare_model is None else None)
        second, notice = _open(model, weights, o.compare_branch or "sigmoid", o.device)
        names = [_display_name(o.model), _display_name(model)]
        if names[0] == names[1]:
            names = [f"{names[0]} A", f"{names[1]} B"]
        nets = dict(zip(names, (first, second), strict=True))
        notices.append(notice)
    if not o.data and "embedded" in nets and o.weights is None:
        notices.append(SYNTHETIC_NOTICE)
    return nets, " ".join(dict.fromkeys(filter(None, notices)))


def _display_name(model: str) -> str:
    """Return the model's name without the folder of its file, which visitors need not know."""
    kind, _, path = model.partition(":")
    return Path(path).name if kind == "file" else model


def _open(model: str, weights: Path | None, branch: str, device: str) -> tuple[DualBranch, str]:
    """Return the network and a notice: a model without a fitted branch opens with an unfitted one."""
    if branch != "sigmoid" or has_shipped_branch(model, weights):
        return open_network(model, weights, branch, device=device).net, ""
    net = open_network(model, weights, None, device=device).net
    return net, (
        f"{_display_name(model)} has no fitted branch, so its maps come from the centred softmax head and "
        "there is no evidence score. Fit a branch (on this page with --data, or with `sigcam fit`) and "
        "pass it as --branch."
    )
