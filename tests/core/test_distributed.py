"""The process group that torchrun's processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENDS = """
import os
from sigcam.core.distributed import barrier, process_group

with process_group():
    barrier()
    import torch._dynamo  # whose imports take the group that is there as a default argument
print(*(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="/proc lists the threads")
def test_no_thread_of_a_process_group_outlives_it() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
    done = subprocess.run(
        [sys.executable, *torchrun, sys.executable, "-c", ENDS],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert "gloo" not in done.stdout
