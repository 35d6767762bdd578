"""An evaluation that was killed goes on from there, with the same numbers; no other one takes its sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sigcam.core.errors import DataError
from sigcam.data.sample import Samples, files_fingerprint
from sigcam.evaluation import metric_table as resuming
from sigcam.evaluation.evaluator import evaluate
from sigcam.models.preprocess import Preprocess
from support.samples import CLASSES, COUNT, prepared, sample
from support.tiny import Gap

METRICS = ["max_box_acc_v2", "pxap", "average_drop", "top1_cls"]


class Killed(BaseException):
    """What ends the run."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "EVERY", 0.0)


def samples(opened: list[str] | None = None) -> Samples:
    def counted(item: Any) -> Any:
        plain = item.open

        def open_it() -> Any:
            if opened is not None:
                opened.append(item.id)
            return plain()

        return replace(item, open=open_it, size=(40, 30), path=Path(item.id))

    return Samples(tuple(counted(sample(index)) for index in range(COUNT)), CLASSES)


def run(path: Path | None, after: int | None = None, opened: list[str] | None = None, **more: Any) -> Any:
    """Evaluates; kills the run after so many images."""

    def progress(_: str, done: int, total: int) -> None:
        if after is not None and done >= after:
            raise Killed

    torch.manual_seed(0)
    net = prepared(Gap())
    how: Any = {"metrics": METRICS, "clamps": (False, True), "intervals": True, "batch_size": 4}
    return evaluate(net, samples(opened), progress=progress, unfinished=path, **(how | more))


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_and_ends_with_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "unfinished"
    with pytest.raises(Killed):
        run(path, after=8)
    opened = list[str]()
    found = run(path, opened=opened)
    assert set(opened) == {f"x/{i}.png" for i in range(8, COUNT)}  # the others are in the sums
    whole = run(None)
    assert found.rows == whole.rows
    assert found.about["images"] == COUNT
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 3},
        {"metrics": METRICS[:2]},
        {"clamps": (True,)},
        {"class_from": "predicted"},
        {"zoom": 2.0},
        {"scorers": ("branch",)},
        {"transform": Preprocess(32, 48, bgr=True)},
    ],
)
def test_sums_of_another_evaluation_are_not_taken(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "unfinished"
    with pytest.raises(Killed):
        run(path, after=8)
    opened = list[str]()
    found = run(path, opened=opened, **other)
    assert len(set(opened)) == COUNT
    assert found.rows == run(None, **other).rows


def test_pictures_and_masks_that_changed_since_are_told(tmp_path: Path) -> None:
    def print_of() -> str:
        item = replace(
            sample(0), path=tmp_path / "a.png", open_mask=partial(print, (tmp_path / "m.png",), ())
        )
        return files_fingerprint(Samples((item,), CLASSES))

    seen = [print_of()]
    for name in ("a.png", "m.png", "a.png"):
        (tmp_path / name).write_bytes(b"x" * len(seen))
        seen.append(print_of())
    assert len(set(seen)) == 4 and print_of() == seen[-1]


@pytest.mark.slow
def test_a_file_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "unfinished"
    with pytest.raises(Killed):
        run(path, after=4)
    (held,) = tmp_path.iterdir()
    held.write_bytes(held.read_bytes()[:50])
    assert run(path).rows == run(None).rows


def test_images_that_an_earlier_run_skipped_are_an_error_where_they_are_not_to_be_skipped(
    tmp_path: Path,
) -> None:
    def unreadable() -> Any:
        raise DataError("cannot be read.")

    def evaluate_them(skip: bool, stop: bool) -> None:
        def progress(_: str, done: int, total: int) -> None:
            if stop and done >= 8:
                raise Killed

        items = (replace(sample(0), open=unreadable), *(sample(index) for index in range(1, COUNT)))
        torch.manual_seed(0)
        net, path = prepared(Gap()), tmp_path / "unfinished"
        how: Any = {"metrics": ["top1_cls"], "batch_size": 4, "progress": progress, "unfinished": path}
        evaluate(net, Samples(items, CLASSES), skip_unreadable=skip, **how)

    with pytest.raises(Killed):
        evaluate_them(skip=True, stop=True)
    with pytest.raises(DataError, match="skip_unreadable"):
        evaluate_them(skip=False, stop=False)
