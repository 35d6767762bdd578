"""A fit in a background thread, with progress, that can be stopped."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from sigcam.core.config import FitConfig
from sigcam.data.sample import Samples
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training.branch import FitResult, fit


class Stopped(Exception):
    """A visitor stopped the fit."""


@dataclass
class FitJob:
    """A fit in a thread of its own: its progress, then its result or error."""

    net: DualBranch
    samples: Samples
    config: FitConfig
    stage: str = "starting"
    done: int = 0
    total: int = 0
    result: FitResult | None = None
    error: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @staticmethod
    def for_new_branch(net: DualBranch, samples: Samples, config: FitConfig | None = None) -> FitJob:
        """Return a job that fits another branch of the same model; `net` stays as it is."""
        new = attach(
            net.original,
            head=net.requested["head"],
            layer=net.requested["layer"],
            example=net.example,
            transform=net.transform,
            class_names=net.class_names,
        )
        return FitJob(new, samples, config or FitConfig())

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="sigcam-fit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop at the next progress report and leave the branch unfitted."""
        self._stop.set()

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait until the fit ends, at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.result = fit(self.net, self.samples, self.config, progress=self._progress)
        except BaseException as error:
            self.error = error

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self._stop.is_set():
            raise Stopped
        self.stage, self.done, self.total = stage, done, total
