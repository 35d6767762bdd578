"""State of each visitor, kept for a limited time."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from sigcam.core.errors import DataError

IDLE_SECONDS = 30 * 60
SessionValue = TypeVar("SessionValue")


class Sessions(Generic[SessionValue]):
    """A thread-safe store that keeps the most recently used values until they are idle for too long."""

    def __init__(
        self, max_count: int = 32, max_idle: float = IDLE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_count, self.max_idle, self.clock = max_count, max_idle, clock
        self._values = dict[str, tuple[float, SessionValue]]()  # last use, value; oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._values)

    def put(self, key: str, value: SessionValue) -> None:
        """Store a value and drop what is expired or too much."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = (self.clock(), value)
            self._expire()

    def get(self, key: str) -> SessionValue:
        """Return the value of `key`; DataError if it is gone."""
        with self._lock:
            self._expire()
            if key not in self._values:
                raise DataError("Session expired: select the image again.")
            value = self._values.pop(key)[1]
            self._values[key] = (self.clock(), value)
            return value

    def drop(self, key: str) -> None:
        """Remove the value of `key`, if there is one."""
        with self._lock:
            self._values.pop(key, None)

    def _expire(self) -> None:
        now = self.clock()
        for key, (last_used, _) in list(self._values.items()):
            if len(self._values) > self.max_count or now - last_used > self.max_idle:
                del self._values[key]
