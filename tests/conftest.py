"""What all tests share: one thread per test process, a fixed seed, hypothesis without deadlines."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

pytest_plugins = [
    "support.commands",
    "support.disks",
    "support.exported",
    "support.hub",
    "support.samples",
]  # the fixtures in them
torch.set_num_threads(1)  # two processes on two cores
settings.register_profile("sigcam", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("sigcam")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands keep features where nobody else looks for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGCAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of annotated photographs that $SIGCAM_DATA names; without it the test is skipped."""
    folder = os.environ.get("SIGCAM_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs annotated photographs: set $SIGCAM_DATA to their folder")
    return Path(folder)
