"""torch.distributed with torchrun: process group, rank, sharding, collectives. No-ops in a single process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from importlib import import_module
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sigcam.core.errors import ConfigError

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)  # a rank may wait for another's shard of features
_SINGLE_PROCESS = ContextVar("single_process", default=False)


@contextmanager
def process_group(device: str = "cpu") -> Iterator[str]:
    """Initialize the default process group if torchrun started this process; yield this rank's device.

    `cuda` becomes `cuda:LOCAL_RANK`. The group is destroyed on exit.
    """
    if "LOCAL_RANK" not in os.environ or dist.is_initialized():
        yield device
        return
    on_gpu = device.partition(":")[0] == "cuda"
    # This module's functions have the current group as a default argument. Imported later, by torch._dynamo,
    # it would keep the group's threads alive, and such a thread may abort the interpreter at its end.
    import_module("torch.distributed.nn.functional")
    try:
        if on_gpu:
            device = device if ":" in device else f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(f"cannot initialize the process group on {device}: {error}") from error
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def single_process() -> Iterator[None]:
    """Run the block as a single process; collectives become no-ops."""
    token = _SINGLE_PROCESS.set(True)
    try:
        yield
    finally:
        _SINGLE_PROCESS.reset(token)


def rank() -> int:
    """Return the rank of this process; 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() and not _SINGLE_PROCESS.get() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() and not _SINGLE_PROCESS.get() else 1


def local_batches(batches: int) -> range:
    """Return the indices of the batches of this rank: every `world_size`-th one."""
    return range(rank(), batches, world_size())


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor over all ranks."""
    if world_size() > 1:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
    return tensor


def broadcast_first(tensor: Tensor) -> Tensor:
    """Return the tensor of rank 0."""
    if world_size() > 1:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
    return tensor


def all_gather(value: T) -> list[T]:
    """Return the values of all ranks, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()
