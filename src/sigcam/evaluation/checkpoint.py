"""Where a long evaluation stands, on disk, so that one that was killed goes on from there."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sigcam.core.distributed import rank, world_size
from sigcam.core.manifest import versions
from sigcam.data.fingerprint import data_fingerprint, files_fingerprint
from sigcam.data.sample import Samples
from sigcam.metrics.base import ImageMetric
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch

EVERY = 15.0  # seconds of work that a kill costs at most, beside the batch in flight
Skips = list[tuple[str, str]]


def shaping(net: DualBranch, samples: Samples, transform: Any) -> list[Any]:
    """All of a network, of images and of this machine that numbers depend on, in a form to compare."""
    prints = fingerprint(net.original), fingerprint(net.sigmoid), repr(net.original), repr(net.split)
    return [*prints, net.model is net.original, *circumstances(samples, transform, net.device)]


def circumstances(samples: Samples, transform: Any, device: torch.device) -> list[Any]:
    """What numbers depend on besides a network: images, preprocessing, machine."""
    images = data_fingerprint(samples), files_fingerprint(samples), str(transform)
    return [*images, device.type, torch.get_num_threads(), versions()]


class EvalCheckpoint:
    """Sums so far and how many images they are of, in a file that is written whole now and then.

    Args:
        path: of the file, each process with its own; None keeps nothing.
        about: all that shapes the numbers: a file about anything else is written over.
    """

    def __init__(self, path: Path | None, about: Any) -> None:
        text = json.dumps([about, world_size()], sort_keys=True, default=str)
        self._about = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._path = path and path.with_name(f"{path.name}.{rank()}")
        self._written = time.monotonic()

    def resume(self, metrics: Mapping[Any, ImageMetric], blank: Mapping[Any, list[int]]) -> tuple[int, Skips]:
        """Puts the sums back; returns how many images they are of, and what of these was skipped."""
        if self._path is None or not self._path.is_file():
            return 0, []
        try:
            held: dict[str, Any] = torch.load(self._path, weights_only=True)
            if held["about"] != self._about:
                return 0, []
            states, counted = held["states"], held["blank"]
            skipped = [(str(name), str(reason)) for name, reason in held["skipped"]]
        except (RuntimeError, pickle.UnpicklingError, KeyError, EOFError, OSError):  # cut short, or not ours
            return 0, []
        for metric, state in zip(metrics.values(), states, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count = 1
        for numbers, before in zip(blank.values(), counted, strict=True):
            numbers[:] = before
        return int(held["done"]), skipped

    def note(
        self,
        done: int,
        skipped: Skips,
        metrics: Mapping[Any, ImageMetric],
        blank: Mapping[Any, list[int]],
    ) -> None:
        """Writes where things stand, if that was not done lately."""
        if self._path is None or time.monotonic() - self._written < EVERY:
            return
        held = {
            "about": self._about,
            "done": done,
            "skipped": skipped,
            "states": [metric.metric_state for metric in metrics.values()],
            "blank": list(blank.values()),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(self._path.name + ".part")
        torch.save(held, draft)
        draft.replace(self._path)
        self._written = time.monotonic()

    def close(self) -> None:
        """Removes the file: the evaluation is done."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
