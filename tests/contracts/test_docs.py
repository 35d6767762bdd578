"""Every Python block of the README and the docs runs, every command line in them can be typed, and what the
pages list is what the code has."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import typer
from torch.utils.data import TensorDataset

import sigcam
from sigcam.cli.app import build_app
from sigcam.methods.registry import METHODS

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_the_code_of_a_page_runs(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    images = torch.randn(6, 3, 64, 64)
    model = torchvision.models.resnet18(weights=None, num_classes=3)
    names = {
        "sigcam": sigcam,
        "model": model,
        "net": sigcam.attach(model),
        "images": images,
        "dataset": TensorDataset(images, torch.arange(6) % 3),
    }
    registered = dict(METHODS)
    try:
        exec(compile(block, page, "exec"), names)
    finally:  # a page may register a method
        METHODS.clear()
        METHODS.update(registered)


def test_the_pages_of_the_readme_exist():
    for target in re.findall(r"\]\((docs/[^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).is_file(), target


# -------------------------------------------------------------------------------------------- command lines


def shell_lines(text: str) -> list[str]:
    """The lines of shell and indented blocks, continued ones joined, comments taken off."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    blocks += re.findall(r"(?:^ {4}.*\n?)+", prose, re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s#.*", "", line).strip() for line in lines]


def after_sigcam(line: str) -> list[str] | None:
    """The words behind `sigcam`, where the line calls it."""
    words = shlex.split(line)
    if words[:1] == ["sigcam"]:
        return words[1:]
    return words[words.index("sigcam") + 1 :] if "-m sigcam" in line else None


TYPED = [
    (page, words)
    for page in PAGES
    for line in shell_lines((ROOT / page).read_text())
    if "sigcam" in line and (words := after_sigcam(line)) is not None
]
NAMED = [
    (page, words)
    for page in PAGES
    for line in re.findall(r"`(sigcam [a-z][^`]*)`", (ROOT / page).read_text())
    if (words := after_sigcam(" ".join(line.split()))) is not None
]


def found(words: list[str]) -> tuple[Any, str, list[str]]:
    """The command that the words name, its name, and the words left."""
    command: Any = typer.main.get_command(build_app())
    name = "sigcam"
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"{name} has no command {words[:1]}"
        name, words = words[0], words[1:]
        command = command.commands[name]
    return command, name, words


@pytest.mark.parametrize(("page", "words"), TYPED, ids=[f"{p}: {' '.join(w)}" for p, w in TYPED])
def test_a_command_line_of_a_page_can_be_typed(page: str, words: list[str]):
    command, name, rest = found(words)
    if "--help" not in rest:
        command.make_context(name, rest)  # parses, and raises for what there is not; does not run


@pytest.mark.parametrize(("page", "words"), NAMED, ids=[f"{p}: {' '.join(w)}" for p, w in NAMED])
def test_a_command_named_in_a_sentence_exists_with_its_options(page: str, words: list[str]):
    if words == ["COMMAND", "--help"]:
        return
    command, _, rest = found(words)
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options


def test_the_pages_hold_command_lines_to_check():
    assert len(TYPED) > 15 and len(NAMED) > 10


# ----------------------------------------------------------------------------------------- lists that may rot


def messages() -> list[str]:
    """Every text in the source but docstrings, with a gap for what is put in when it is shown."""
    texts = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                texts.append("".join(str(part) for part in parts))
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            ):
                texts.append(node.value)
    return texts


MESSAGES = messages()
HEADINGS = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_that_is_explained_is_one_that_the_source_has(heading: str):
    pattern = ".*".join(map(re.escape, heading.split("…")))
    assert any(re.search(pattern, text, re.S) for text in MESSAGES), heading


def test_enough_messages_are_explained_and_every_heading_is_one():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(HEADINGS) >= 30 and len(HEADINGS) == len(set(HEADINGS)) == text.count("\n### ")


def test_the_reference_lists_every_public_name():
    listed = set(re.findall(r"^::: sigcam\.(\S+)", (ROOT / "docs" / "api.md").read_text(), re.M))
    alike = set(re.findall(r"`(\w*CAM\w*)`", (ROOT / "docs" / "api.md").read_text()))
    assert {*sigcam.__all__} - {"__version__", "bootstrap", "callbacks", "metrics"} == listed | alike


def test_the_reference_lists_every_metric():
    text = (ROOT / "docs" / "api-metrics.md").read_text()
    rooms = [ROOT / f"src/sigcam/metrics/{name}.py" for name in ("localization", "fidelity", "removal")]
    made = [n for room in rooms for n in ast.parse(room.read_text()).body if hasattr(n, "name")]
    public = {node.name for node in made if not node.name.startswith("_")}
    assert public == set(re.findall(r"^::: sigcam\.metrics\.(\S+)", text, re.M))


# ------------------------------------------------------------------------------------------------- the site


def test_every_picture_says_what_it_shows_and_is_small():
    for page in PAGES:
        for said, name in re.findall(r"!\[(.*?)\]\((\S+?)\)", (ROOT / page).read_text(), re.S):
            assert len(said) > 20, (page, name)
            assert ((ROOT / page).parent / name).stat().st_size < 250_000, name


def test_the_site_asks_no_other_host_for_anything():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings and "http" not in settings
    for path in (*(ROOT / "docs/stylesheets").iterdir(), *(ROOT / "docs/javascripts").iterdir()):
        assert "http" not in path.read_text(), path


def test_the_commands_page_shows_every_option(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import document_lists

    shown = document_lists.on_page_markdown((ROOT / "docs/commands.md").read_text())
    for words, command in document_lists.commands():
        assert f"## `{words}`" in shown
        for param in command.params:
            assert param.name == "help" or param.param_type_name == "argument" or param.opts[0] in shown
    assert "required" in shown and "`grad-cam`" in shown


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_the_lists_of_a_page_are_what_the_code_has(page: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import document_lists

    text = (ROOT / "docs" / page).read_text()
    if page != "commands.md":  # filled when the site is built
        assert document_lists.on_page_markdown(text) == text, "run scripts/document_lists.py"


def test_what_is_registered_from_outside_is_in_the_lists(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import document_lists

    for name in ("methods", "metrics", "readers", "tables"):
        rows = getattr(document_lists, name.upper())
        monkeypatch.setitem(rows, "from-outside", next(iter(rows.values())))
        assert "`from-outside`" in document_lists.LISTS[name]()
    from sigcam.cli.app import COMMANDS

    monkeypatch.setitem(COMMANDS, "from-outside", COMMANDS["demo"])
    assert "## `sigcam from-outside`" in document_lists.LISTS["commands"]()
