"""Free memory: the least of what machine, control groups and limits leave; refusals in numbers."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sigcam.core import memory
from sigcam.core.errors import ConfigError
from sigcam.core.memory import check_memory, free_memory, is_out_of_memory, size_text

GB = 10**9
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /proc and /sys/fs/cgroup: 20 GB available, 1 GB of free swap, no groups."""
    for folder in ("proc/self", "cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    lines = ["MemTotal: 24000000 kB", "MemAvailable: 19531250 kB", "SwapFree: 976562 kB", "HugePages: x"]
    (tmp_path / "proc" / "meminfo").write_text("\n".join(lines))
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


@linux
def test_free_is_what_the_machine_has_available_and_its_free_swap(machine: Path) -> None:
    assert free_memory() == 1024 * (19531250 + 976562)
    assert free_memory(torch.device("cpu")) == free_memory("cpu")


@linux
def test_a_control_group_of_version_2_limits_it_and_cached_files_count_as_free(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/jobs/one\n")
    write(machine / "cgroup/jobs/one", max="max\n", current=f"{5 * GB}\n")
    assert free_memory() == 1024 * (19531250 + 976562)
    write(
        machine / "cgroup/jobs",
        max=f"{8 * GB}\n",
        current=f"{6 * GB}\n",
        stat=f"anon {4 * GB}\nactive_file {GB}\ninactive_file {GB}\n",
    )
    assert free_memory() == 4 * GB  # by the parent group
    write(machine / "cgroup/jobs/one", max=f"{6 * GB}\n", current=f"{5 * GB}\n")
    assert free_memory() == GB
    write(machine / "cgroup/jobs/one", current=f"{7 * GB}\n")
    assert free_memory() == 0


@linux
def test_a_control_group_of_version_1_limits_it_where_its_folder_is_the_mounted_one(machine: Path) -> None:
    lines = ["9:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "1:name=systemd:/docker/abc"]
    (machine / "proc/self/cgroup").write_text("\n".join(lines))
    stat = f"active_file 7\ntotal_active_file {GB}\ntotal_inactive_file 0\n"
    write(machine / "cgroup/memory", limit_in_bytes=f"{4 * GB}\n", usage_in_bytes=f"{3 * GB}\n", stat=stat)
    assert free_memory() == 2 * GB


@linux
def test_a_limit_of_the_address_space_counts_from_what_is_mapped(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "proc/self/statm").write_text(f"{GB // resource.getpagesize()} 2 3 4 5 6 7")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GB, resource.RLIM_INFINITY))
    assert free_memory() == 3 * GB - GB // resource.getpagesize() * resource.getpagesize()


@linux
def test_without_proc_it_is_at_most_all_memory_of_the_machine(machine: Path) -> None:
    (machine / "proc" / "meminfo").unlink()
    free = free_memory()
    assert free is not None and free > 2**28


def test_unknown_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory("mps") is None
    check_memory(1e18, "this", "do less", "mps")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert free_memory() is None


def test_a_refusal_has_both_numbers_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 22 * GB)
    with pytest.raises(ConfigError) as caught:
        check_memory(61.3 * GB, "one image at zoom=50", "use zoom=12 at most")
    sentence = "one image at zoom=50 needs about 61 GB of memory, 22 GB are free: use zoom=12 at most."
    assert str(caught.value) == sentence
    check_memory(22 * GB, "what just fits", "")


def test_little_is_not_worth_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", None)
    check_memory(memory.SMALL - 1, "a small map", "")


def test_sizes_read_as_people_write_them() -> None:
    sizes = [0, 999, 1e3, 4.54e6, 830e6, 9.94e9, 61.3e9, 2.5e15]
    texts = ["0 bytes", "999 bytes", "1.0 kB", "4.5 MB", "830 MB", "9.9 GB", "61 GB", "2500 TB"]
    assert [size_text(size) for size in sizes] == texts


def test_a_failed_allocation_is_known_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**56)
    with pytest.raises(MemoryError) as numpys:
        np.empty(2**56)
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2) @ torch.zeros(3)
    assert is_out_of_memory(torchs.value) and is_out_of_memory(numpys.value)
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not is_out_of_memory(other.value) and not is_out_of_memory(OSError(28, "No space left on device"))
    wrapped = ValueError("while drawing")
    wrapped.__cause__ = numpys.value
    assert is_out_of_memory(wrapped)


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, sigcam.core.memory as m; m.free_memory(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
