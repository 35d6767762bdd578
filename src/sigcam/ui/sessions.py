"""What the page remembers of its visitors, and for how long."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from PIL import Image

from sigcam.core.errors import DataError
from sigcam.data.sample import Sample, Samples
from sigcam.ui.security import IDLE_SECONDS, MAX_SESSIONS, check_image_header

T = TypeVar("T")


@dataclass(frozen=True)
class Gallery:
    """Pictures that a person may choose by number; none lies outside `root`."""

    samples: Samples
    root: Path | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: object) -> Sample:
        """The sample of that number; DataError for whatever else a browser may send."""
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.samples):
            raise DataError(f"there is no such picture: choose one of the {len(self.samples)} shown.")
        return self.samples[index]

    def open(self, index: object) -> tuple[str, Image.Image]:
        """The picture's name and the picture."""
        sample = self.sample(index)
        if sample.path is None:
            return sample.id, sample.open()
        if self.root is not None and not sample.path.resolve().is_relative_to(self.root.resolve()):
            raise DataError(f"{sample.id} leads out of the folder, so it is not opened.")
        check_image_header(sample.path, sample.id)
        try:
            return sample.id, sample.open()
        except DataError as error:
            raise DataError(str(error).replace(str(sample.path), sample.id)) from error


class Sessions(Generic[T]):
    """What the latest few people look at, for as long as they do."""

    def __init__(
        self,
        most: int = MAX_SESSIONS,
        idle: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self.idle, self.clock = most, idle, clock
        self._held: OrderedDict[str, tuple[float, T]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, key: str, value: T) -> None:
        """Remembers it, and forgets what is too old or too much."""
        with self._lock:
            self._held[key] = (self.clock(), value)
            self._held.move_to_end(key)
            self._forget()

    def get(self, key: str) -> T:
        """What was put there; DataError if it is gone."""
        with self._lock:
            self._forget()
            if key not in self._held:
                raise DataError("this picture was put away after a while: choose it again.")
            value = self._held[key][1]
            self._held[key] = (self.clock(), value)
            self._held.move_to_end(key)
            return value

    def drop(self, key: str) -> None:
        """Forgets it, if it is there."""
        with self._lock:
            self._held.pop(key, None)

    def _forget(self) -> None:
        now = self.clock()
        while self._held:
            key, (seen, _) = next(iter(self._held.items()))
            if len(self._held) <= self.most and now - seen <= self.idle:
                return
            del self._held[key]
