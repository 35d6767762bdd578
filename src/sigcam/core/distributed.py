"""More than one process, as torchrun starts them: who am I, my share, sums over all (torch.distributed)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sigcam.core.errors import DataError

T = TypeVar("T")
_ALONE = ContextVar("alone", default=False)
PATIENCE = timedelta(hours=2)  # how long a rank may be ahead of another: a slice of features takes its time


@contextmanager
def process_group(device: str = "cpu") -> Iterator[str]:
    """Joins the processes that torchrun started, if it did; the device that is this one's, `cuda` to
    `cuda:1`."""
    if "LOCAL_RANK" not in os.environ or dist.is_initialized():
        yield device
        return
    on_gpu = device.partition(":")[0] == "cuda"
    try:
        if on_gpu:
            device = device if ":" in device else f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise DataError(f"torchrun's processes cannot work together on {device}: {error}") from error
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def single_process() -> Iterator[None]:
    """As if this process were the only one: what is summed in there is summed in the order of one."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def rank() -> int:
    """Which of the processes this is, from 0."""
    return dist.get_rank() if dist.is_initialized() and not _ALONE.get() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() and not _ALONE.get() else 1


def local_batches(batches: int) -> range:
    """Which of a number of batches are this process's: every n-th, so that each is worked on exactly once."""
    return range(rank(), batches, world_size())


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum over all processes, to each of them."""
    if world_size() > 1:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
    return tensor


def broadcast_first(tensor: Tensor) -> Tensor:
    """The first process's tensor, to each of them."""
    if world_size() > 1:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
    return tensor


def all_gather(value: T) -> list[T]:
    """Each process's value, in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def barrier() -> None:
    """Until all processes are here."""
    if world_size() > 1:
        dist.barrier()
