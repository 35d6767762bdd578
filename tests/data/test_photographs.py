"""Example photographs from the wheel of scikit-image."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from sigcam.core.errors import ConfigError, MissingExtra
from sigcam.data import photographs
from sigcam.data.photographs import example_photographs, example_samples


def test_all_examples_are_photographs_in_the_wheel_with_their_authors() -> None:
    found = example_photographs()
    assert [each.name for each in found] == ["chelsea", "coffee", "rocket", "astronaut", "motorcycle"]
    for sample in example_samples():
        image = sample.open()
        assert image.mode == "RGB" and min(image.size) >= 300
    assert all("by " in each.credit or "NASA" in each.credit for each in found)


def test_examples_are_chosen_by_name_each_once() -> None:
    names = [sample.id for sample in example_samples(["rocket", "chelsea", "rocket"])]
    assert names == ["rocket.jpg", "chelsea.png"]
    with pytest.raises(ConfigError, match=r"no example is called 'cat': there are chelsea, coffee"):
        example_photographs(["cat"])


def test_without_the_package_the_error_names_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'sigcam\[examples\]'"):
        example_photographs()


def test_finding_an_example_imports_nothing_of_the_package() -> None:
    code = (
        "import sys; from sigcam.data.photographs import example_photographs as find; "
        "assert find()[0].path.is_file(); print('skimage' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    spec = util.find_spec("skimage")
    assert spec is not None and spec.origin is not None
    assert example_photographs()[0].path.is_relative_to(Path(spec.origin).parent)
