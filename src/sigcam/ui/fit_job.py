"""A fit in the background: it ends by itself, whoever is watching."""

import threading
from collections.abc import Callable
from typing import Any

from sigcam.core.config import FitConfig
from sigcam.data.sample import Samples
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training.branch import FitResult, fit


class Stopped(Exception):
    """A visitor stopped the fit."""


class FitJob(threading.Thread):
    """A thread that fits a new branch (`net`) of the given network's model; the given network stays as it is.

    `stage`, `done` and `total` are its progress; `result` or `error` is set at the end. `stop()` stops it at
    the next progress report and leaves the branch unfitted.

    Args:
        at_end: called in the thread with the job, after `result` or `error` is set.
    """

    def __init__(
        self, net: DualBranch, samples: Samples, at_end: Callable[["FitJob"], None] = lambda job: None
    ) -> None:
        super().__init__(name="sigcam-fit", daemon=True)
        settings: Any = {**net.requested, "example": net.example, "transform": net.transform}
        self.net = attach(net.original, class_names=net.class_names, **settings)
        self.samples, self.at_end = samples, at_end
        self.stage, self.done, self.total = "starting", 0, 0
        self.result: FitResult | None = None
        self.error: BaseException | None = None
        self._stop_event = threading.Event()  # Thread has a method _stop
        self.stop = self._stop_event.set

    def run(self) -> None:
        """Fit; called in the new thread by `start`."""
        try:
            self.result = fit(self.net, self.samples, FitConfig(), progress=self._progress)
        except BaseException as error:
            self.error = error
        self.at_end(self)

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self._stop_event.is_set():
            raise Stopped
        self.stage, self.done, self.total = stage, done, total
