"""The notebooks in examples/ run as they are, and lie in the repository without outputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def notebook(path: Path) -> Any:
    """The parsed notebook."""
    return nbformat.read(path, as_version=4)


def test_there_are_three_and_the_docs_link_each():
    assert [path.stem for path in NOTEBOOKS] == ["first_map", "metrics", "own_model"]
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for path in NOTEBOOKS:
        assert f"](../examples/{path.name})" in pages, path.name


@every_notebook
def test_a_notebook_is_stored_without_outputs_and_begins_with_a_heading(path: Path):
    cells = notebook(path).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    for cell in cells:
        assert not cell.metadata, cell.source
        if cell.cell_type == "code":
            assert cell.execution_count is None and not cell.outputs, cell.source
    assert set(notebook(path).metadata) <= {"kernelspec", "language_info"}


def test_ruff_formats_and_checks_the_notebooks():
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    covered = subprocess.run(
        [*ruff, "check", "--show-files", "."], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {str(path) for path in NOTEBOOKS} <= {*covered.stdout.split()}
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, "examples"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    work = tmp_path / "work"
    work.mkdir()
    source = notebook(path)
    client = NotebookClient(source, timeout=300, resources={"metadata": {"path": str(work)}})
    client.execute()
    shown = [output for cell in source.cells for output in cell.get("outputs", [])]
    pages = "".join(output.get("data", {}).get("text/html", "") for output in shown)
    assert "<img" in pages or any("image/png" in output.get("data", {}) for output in shown)
    assert any(output.get("name") == "stdout" for output in shown)
