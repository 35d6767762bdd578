"""A fit in a background thread, with progress, that can be stopped."""

from __future__ import annotations

import threading

from sigcam.core.config import FitConfig
from sigcam.data.sample import Samples
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training.branch import FitResult, fit


class Stopped(Exception):
    """A visitor stopped the fit."""


class FitJob(threading.Thread):
    """A thread that fits a new branch (`net`) of the given network's model; the given network stays as it is.

    `stage`, `done` and `total` are its progress; `result` or `error` is set at the end.
    """

    def __init__(self, net: DualBranch, samples: Samples) -> None:
        super().__init__(name="sigcam-fit", daemon=True)
        self.net = attach(
            net.original,
            head=net.requested["head"],
            layer=net.requested["layer"],
            example=net.example,
            transform=net.transform,
            class_names=net.class_names,
        )
        self.samples = samples
        self.stage, self.done, self.total = "starting", 0, 0
        self.result: FitResult | None = None
        self.error: BaseException | None = None
        self._stop_event = threading.Event()  # Thread has a method _stop

    def run(self) -> None:
        """Fit; called in the new thread by `start`."""
        try:
            self.result = fit(self.net, self.samples, FitConfig(), progress=self._progress)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """Stop at the next progress report and leave the branch unfitted."""
        self._stop_event.set()

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self._stop_event.is_set():
            raise Stopped
        self.stage, self.done, self.total = stage, done, total
