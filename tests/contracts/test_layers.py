"""The house: packages in layers, files of a readable size, names that mean one thing."""

import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sigcam"
sys.path.insert(0, str(ROOT / "scripts"))
FILES = sorted(SOURCE.rglob("*.py"))


def test_the_diagram_is_drawn_from_the_contract():
    from draw_layers import layers, svg

    assert (ROOT / "docs" / "images" / "layers.svg").read_text() == svg()
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {name for layer in layers() for name in layer} == packages


@pytest.mark.slow
def test_an_import_against_the_layers_is_refused(tmp_path: Path):
    """A copy of the package in which `core` imports from `cli` breaks the contract, which names both."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(SOURCE, tmp_path / "sigcam", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "sigcam" / "core" / "types.py").open("a") as file:
        file.write("\nfrom sigcam.cli import app  # noqa\n")
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.is_file():
        pytest.skip("needs import-linter: pip install import-linter")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [str(tool), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"sigcam\.core\.types -> sigcam\.cli\.app", done.stdout)


def test_no_file_is_longer_than_400_lines_but_the_sweep():
    long = {p.relative_to(SOURCE).as_posix(): n for p in FILES if (n := p.read_text().count("\n")) > 400}
    assert set(long) <= {"metrics/threshold_sweep.py"}, long


def test_only_the_doors_lie_beside_the_packages():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py", "bootstrap.py"}


def test_no_top_level_name_means_two_things():
    homes = defaultdict[str, list[str]](list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            for name in names:
                if not name.startswith("_") and name != "log":  # each module has its logger
                    homes[name].append(path.relative_to(SOURCE).as_posix())
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_no_file_bears_the_name_of_a_public_function_that_it_could_shadow():
    import sigcam

    taken = {path.stem for path in SOURCE.iterdir()} & {*sigcam.__all__}
    assert taken == {"bootstrap", "callbacks", "metrics"}  # public as modules
    for name in ("fit", "explain", "evaluate", "attach", "load"):
        assert callable(getattr(sigcam, name))


def test_the_map_of_the_code_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|svg))`", text)) - {"data/readers/x.py", "cli/x.py"}
    assert len(named) >= 12
    assert not {name for name in named if not ((SOURCE / name).is_file() or (ROOT / name).is_file())}
