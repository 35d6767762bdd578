"""A command is added in one place: a dataclass and a function in COMMANDS."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sigcam.cli.app import COMMANDS
from sigcam.cli.options import JsonOptions, RunOptions, option
from support.commands import run


@dataclass(frozen=True, kw_only=True)
class CountOptions(RunOptions, JsonOptions):
    """Options of a command from outside."""

    output: Path = Path("counts")
    files: list[Path] | None = option("Files to count.", None, argument=True)
    step: int = option("Number to count by.", 1, min=1)
    twice: bool = option("Count each file twice.", False)


def count_command(options: CountOptions) -> None:
    """Count files, as nobody else does."""
    total = len(options.files or ()) * options.step * (2 if options.twice else 1)
    print(f"counted {total} on {options.device}, json {options.json}")


@pytest.mark.parametrize("name", ["count", "files count"])
def test_a_command_from_outside_is_listed_documented_and_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setitem(COMMANDS, name, count_command)
    words = name.split()
    assert run(monkeypatch, *words[:-1], "--help") == 0
    assert "Count files, as nobody else" in capsys.readouterr().out
    assert run(monkeypatch, *words, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("Files to count.", "--step", "[default: 1; x>=1]", "--twice", "--device", "--json"):
        assert text in shown
    assert "--no-twice" not in shown
    assert run(monkeypatch, *words, "a", "b", "--step", 3, "--twice", "--json") == 0
    assert capsys.readouterr().out == "counted 12 on cpu, json True\n"
    assert run(monkeypatch, *words, "--step", 0) == 2
    assert "--step" in capsys.readouterr().err

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    monkeypatch.delitem(sys.modules, "document_lists", raising=False)
    import document_lists

    page = document_lists.on_page_markdown("<!-- list: commands -->\n<!-- end -->")
    monkeypatch.delitem(sys.modules, "document_lists")
    assert f"## `sigcam {name}`" in page and "| `--step` | `1` | Number to count by. |" in page


def test_a_command_module_imports_nothing_heavy() -> None:
    import subprocess

    names = [command.__module__ for command in COMMANDS.values()]
    code = f"import sys, importlib; [importlib.import_module(name) for name in {names!r}]; "
    code += "print([m for m in ('torch', 'PIL', 'numpy', 'gradio', 'rich.table') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_explaining_a_photograph_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    code = (
        "import sys\n"
        f"sys.argv = ['sigcam', 'explain', '--example', 'chelsea', '--output', {str(tmp_path / 'out')!r}]\n"
        "from sigcam.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torchmetrics', 'transformers', 'matplotlib', 'jinja2', 'gradio', 'skimage'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out" / "explanation.json").is_file()
