"""A checkpoint is resumed by exactly the same work, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sigcam.core import checkpoint
from sigcam.core.checkpoint import Checkpoint, code_fingerprint

FACTS = {"lr": 0.1, "labels": [0, 1], "file": Path("x.jpg")}
STATE = {"epoch": 3, "losses": [0.5, 0.25], "head": {"weight": torch.arange(4.0)}, "skipped": [("a", "why")]}


def test_the_same_facts_resume(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.pt"
    assert Checkpoint(path, FACTS).load() is None
    Checkpoint(path, FACTS).save(STATE)
    state = Checkpoint(path, dict(reversed(FACTS.items()))).load(map_location="cpu")
    assert state is not None and state.keys() == STATE.keys()
    assert torch.equal(state["head"]["weight"], torch.arange(4.0))
    assert {name: state[name] for name in ("epoch", "losses", "skipped")} == {
        name: STATE[name] for name in ("epoch", "losses", "skipped")
    }
    assert [file.name for file in path.parent.iterdir()] == ["state.pt"]


def test_a_later_state_replaces_an_earlier_one(tmp_path: Path) -> None:
    work = Checkpoint(tmp_path / "state.pt", FACTS)
    for epoch in (1, 2):
        work.save({"epoch": epoch})
    assert work.load() == {"epoch": 2}


@pytest.mark.parametrize("facts", [{**FACTS, "lr": 0.2}, {**FACTS, "labels": [1, 0]}, {**FACTS, "more": 1}])
def test_other_facts_do_not_resume(tmp_path: Path, facts: dict[str, object]) -> None:
    Checkpoint(tmp_path / "state.pt", FACTS).save(STATE)
    assert Checkpoint(tmp_path / "state.pt", facts).load() is None


def test_the_facts_that_differ_are_named(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    assert Checkpoint(path, FACTS).differences() == Checkpoint(None, FACTS).differences() == []
    Checkpoint(path, FACTS).save(STATE)
    assert Checkpoint(path, FACTS).differences() == []
    assert Checkpoint(path, {**FACTS, "lr": 0.2, "more": 1}).differences() == ["lr", "more"]
    path.write_bytes(b"not a checkpoint")
    assert Checkpoint(path, FACTS).differences() == ["content"]


def test_other_versions_and_other_code_do_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoint(tmp_path / "state.pt", FACTS).save(STATE)
    for name, value in (("versions", {"torch": "0.1"}), ("code_fingerprint", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, lambda value=value: value)
            assert Checkpoint(tmp_path / "state.pt", FACTS).load() is None
    assert Checkpoint(tmp_path / "state.pt", FACTS).load() is not None


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "folder", "foreign"])
def test_a_damaged_or_foreign_file_does_not_resume(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.pt"
    work = Checkpoint(path, FACTS)
    work.save(STATE)
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "foreign":
        torch.save([1, 2, 3], path)
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"not a file"}[damage])
    assert work.load() is None


def test_without_a_path_nothing_is_written_or_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = Checkpoint(None, FACTS)
    work.save(STATE)
    assert work.load() is None
    work.remove()
    assert list(tmp_path.iterdir()) == []


def test_finished_work_leaves_no_file(tmp_path: Path) -> None:
    work = Checkpoint(tmp_path / "state.pt", FACTS)
    work.save(STATE)
    work.remove()
    work.remove()
    assert list(tmp_path.iterdir()) == [] and work.load() is None


def test_the_code_fingerprint_is_stable_within_a_process() -> None:
    assert code_fingerprint() == code_fingerprint() and len(code_fingerprint()) == 32


def test_no_flipped_byte_changes_the_state_that_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    Checkpoint(path, FACTS).save({"weight": torch.arange(64.0), "rows": ["a"] * 20})
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        state = Checkpoint(path, FACTS).load()
        assert state is None or (
            torch.equal(state["weight"], torch.arange(64.0)) and state["rows"] == ["a"] * 20
        )


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02]", b"\x80\x02U", bytes(200)])
def test_a_file_of_anything_else_does_not_resume(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    assert Checkpoint(tmp_path / "state.pt", FACTS).load() is None
