"""EvalCheckpoint: resume an evaluation that was interrupted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.distributed import rank, world_size
from sigcam.core.manifest import versions
from sigcam.core.types import Skipped
from sigcam.data.sample import Samples, data_fingerprint, files_fingerprint
from sigcam.evaluation.metric_table import MetricTable
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch

EVERY = 15.0  # seconds between two saves


def evaluation_facts(net: DualBranch, samples: Samples, transform: Any) -> list[Any]:
    """Everything about a network, the samples and this machine that numbers depend on."""
    weights = fingerprint(net.original), fingerprint(net.sigmoid)
    structure = repr(net.original), repr(net.split), net.model is net.original
    return [*weights, *structure, *data_facts(samples, transform, net.device)]


def data_facts(samples: Samples, transform: Any, device: torch.device) -> list[Any]:
    """Everything but the network that numbers depend on: samples, preprocessing, machine."""
    images = data_fingerprint(samples), files_fingerprint(samples), str(transform)
    return [*images, device.type, torch.get_num_threads(), versions()]


class EvalCheckpoint:
    """The state of an unfinished evaluation, one file per process.

    Args:
        path: of the file; None saves nothing.
        facts: everything that the numbers depend on.
        table: the metrics to save and restore.
    """

    def __init__(self, path: Path | None, facts: Any, table: MetricTable) -> None:
        file = path and path.with_name(f"{path.name}.{rank()}")
        self._file = Checkpoint(file, [facts, world_size()])
        self._table = table
        self._saved_at = time.monotonic()

    def resume(self) -> tuple[int, list[Skipped]]:
        """Restore the metrics; return how many samples are done, and those of them that were skipped."""
        state = self._file.load()
        if state is None:
            return 0, []
        self._table.load_state(state["table"])
        return int(state["done"]), [(str(id), str(reason)) for id, reason in state["skipped"]]

    def save(self, done: int, skipped: list[Skipped]) -> None:
        """Save the metrics, at most once in `EVERY` seconds."""
        if self._file.path is not None and time.monotonic() - self._saved_at >= EVERY:
            self._file.save({"done": done, "skipped": skipped, "table": self._table.state()})
            self._saved_at = time.monotonic()

    def remove(self) -> None:
        """Delete the file: the evaluation is done."""
        self._file.remove()
