"""A hook of mkdocs: the notebooks of examples/ become part of the site, where pages link them."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parents[1] / "examples"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the notebooks."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links at them, which lie beside docs/ in the repository and inside it on the site."""
    return markdown.replace("](../examples/", "](examples/")
