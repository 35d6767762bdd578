"""`sigcam ui`: open the networks and images, then serve the page."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sigcam.core.errors import MissingExtra
from sigcam.ui.security import parse_login


@dataclass(frozen=True)
class UiOptions:
    """Options of `sigcam ui`.

    Args:
        model: classifier: timm:NAME, torchvision:NAME, hf:NAME, wsol:NAME, file:PATH.py:FUNCTION or embedded.
        weights: weights file of the model, or imagenet for published ones.
        branch: file of a fitted branch, hf://USER/REPO, softmax or centred; the embedded model has a branch.
        data: folder of images to browse, sort and fit on; empty for built-in examples.
        format: layout of the data; guessed if not given.
        compare_model: second model, shown beside the first.
        compare_weights: weights file of the second model, or imagenet.
        compare_branch: second branch, of the same or of the second model.
        host: address to listen on; any but a loopback address needs --auth.
        port: port to listen on.
        share: publish the page through gradio's tunnel; needs --auth.
        auth: user:password that visitors must enter.
        device: device to run the models on.
        open: open the page in the browser.
    """

    model: str = "embedded"
    weights: Path | None = None
    branch: str = "sigmoid"
    data: str = ""
    format: str | None = None
    compare_model: str | None = None
    compare_weights: Path | None = None
    compare_branch: str | None = None
    host: str = "127.0.0.1"
    port: int = field(default=7860, metadata={"min": 1, "max": 65535})
    share: bool = False
    auth: str | None = field(default=None, metadata={"envvar": "SIGCAM_AUTH"})
    device: str = "cpu"
    open: bool = True


def serve(options: UiOptions, announce: Callable[[str], None]) -> None:
    """Serve the page until it is stopped by Ctrl-C or another signal; `announce` receives its address."""
    from sigcam.data.registry import open_training_data

    login = parse_login(options.host, options.share, options.auth)
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # before the import
    try:
        from sigcam.ui.handlers import Page
        from sigcam.ui.images import open_gallery
        from sigcam.ui.layout import launch
        from sigcam.ui.sources import open_networks
    except ImportError as error:
        if not (error.name or "").startswith("gradio"):
            raise
        raise MissingExtra("the page", "gradio", "ui") from error
    gallery, labelled = open_gallery(options.data, options.format)
    nets, notice = open_networks(options)
    training = partial(open_training_data, options.data, options.format) if labelled else None
    with (
        stopped_by_signals(),
        tempfile.TemporaryDirectory(prefix="sigcam-page-", ignore_cleanup_errors=True) as folder,
    ):
        os.environ["GRADIO_TEMP_DIR"] = folder
        first = options.branch if options.branch in ("softmax", "centred") else None
        page = Page(nets, gallery, Path(folder), notice=notice, first=first, training=training)
        launch(page, options, login, announce)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM (service managers) and SIGHUP (a closed terminal) end the block as Ctrl-C does.

    The exit code is then 128 plus the signal's number.
    """
    received = list[int]()

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:  # no second one interrupts the clean-up
            raise KeyboardInterrupt

    signals = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        signals = []
    ignored = (None, signal.SIG_IGN)  # as under nohup
    before = {n: signal.signal(n, stop) for n in signals if signal.getsignal(n) not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            raise SystemExit(128 + received[0])
