"""Draw docs/images/layers.svg: the packages of sigcam in their import order, read from the layer contract."""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "images" / "layers.svg"
WIDTH, ROW, GAP, MARGIN = 760, 46, 8, 12
DESCRIPTIONS = {
    "cli": "the sigcam command: one file per command, typer and rich",
    "bench": "the paper's tables and figures",
    "ui": "the web page (gradio)",
    "callbacks": "maps while Lightning or Trainer trains",
    "reports": "results to one self-contained HTML file",
    "deployment": "a DualBranch to one ONNX file",
    "evaluation": "a network and annotated samples to a Result",
    "methods": "a forward pass to an Explanation",
    "training": "a branch, or a classifier, from data",
    "network": "any nn.Module to a DualBranch: split, attach, save, load",
    "drawing": "tensors to pictures: overlays, charts, contact sheets",
    "data": "files to Samples",
    "models": "a name to a classifier",
    "metrics": "torchmetrics on anybody's maps",
    "core": "errors, settings, files, checkpoints, torch.distributed; imports nothing of ours",
}


def layers() -> list[list[str]]:
    """Return the packages of each layer, the highest layer first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def svg() -> str:
    """Return the diagram: one row per layer; arrows are left out, since every import points down."""
    rows = layers()
    height = len(rows) * (ROW + GAP) - GAP + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img" '
        'aria-label="Packages of sigcam: each imports only from packages below it">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, names in enumerate(rows):
        top = MARGIN + number * (ROW + GAP)
        width = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            left = MARGIN + column * (width + GAP)
            parts += [
                f'<rect x="{left:g}" y="{top}" width="{width:g}" height="{ROW}" rx="5" fill="#eef3f8" '
                'stroke="#8aa4bd"/>',
                f'<text x="{left + 10:g}" y="{top + 19}" font-size="14" font-weight="600" '
                f'fill="#1b2b3a">{escape(name)}</text>',
            ]
            limit = int((width - 20) / 5.6)  # characters of the small font
            words = DESCRIPTIONS[name]
            assert len(words) <= limit, f"{name}: {len(words)} characters, at most {limit} fit"
            parts.append(
                f'<text x="{left + 10:g}" y="{top + 36}" font-size="11" fill="#4a5b6b">{escape(words)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(svg())
    print(f"wrote {TARGET.relative_to(ROOT)}")
