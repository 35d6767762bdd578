"""The tables of docs/results.md and README.md from those in benchmarks/results: a table stands between
`<!-- table: NAME -->` and `<!-- end -->`.

python scripts/write_results.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs/results.md", ROOT / "README.md")
METHOD = ("sigmoid", True)
ROWS = {
    ("softmax", False): "softmax, signed (the paper's baseline)",
    ("softmax", True): "softmax, clamped",
    ("centred", False): "centred, signed",
    ("centred", True): "centred, clamped",
    ("sigmoid", False): "sigmoid, signed",
    METHOD: "sigmoid, clamped (the paper's method)",
}
SETS = {"cub": "CUB", "cars": "Cars", "ilsvrc": "ImageNet", "pets": "Pets (PxAP)"}
Row = dict[str, Any]


@cache
def rows_of(table: str) -> tuple[Row, ...]:
    """The rows of a committed table."""
    return tuple(json.loads((ROOT / "benchmarks/results" / f"{table}.json").read_text())["rows"])


def one(table: str, kind: tuple[str, bool], holds: str = "dataset", **wanted: Any) -> Row:
    """The one row of a way to draw maps that has these values and holds that number."""
    wanted |= {"branch": kind[0], "clamp": kind[1]}
    (row,) = (r for r in rows_of(table) if holds in r and all(r.get(k) == v for k, v in wanted.items()))
    return row


def located(dataset: str) -> str:
    """The number that says how well maps locate objects."""
    return "pxap" if dataset == "pets" else "max_box_acc_v2"


def between(found: Sequence[float]) -> str:
    """A difference with its interval."""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join([_line(head), "|---" * len(head) + "|", *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def by_row(head: Sequence[str], *cells: Callable[[tuple[str, bool]], str], bold: int = 0) -> str:
    """A line for each way to draw maps; the first cells of the paper's method are bold."""
    lines = [[name, *(cell(kind) for cell in cells)] for kind, name in ROWS.items()]
    lines[-1] = [f"**{text}**" if i <= bold else text for i, text in enumerate(lines[-1])]
    return table(["map from", *head], lines)


def localisation() -> str:
    def cell(kind: tuple[str, bool], dataset: str) -> str:
        rows = (one("table2", kind, dataset=dataset, method="cam", zoom=zoom) for zoom in (1.0, 2.0))
        return " / ".join(f"{row[located(dataset)]:.1f}" for row in rows)

    cells = [lambda kind, dataset=dataset: cell(kind, dataset) for dataset in SETS]
    return by_row(list(SETS.values()), *cells, bold=len(SETS))


def gradients() -> str:
    """The same for Grad-CAM, at the network's own size."""

    def cell(kind: tuple[str, bool], dataset: str) -> str:
        return f"{one('table2', kind, dataset=dataset, method='grad-cam')[located(dataset)]:.1f}"

    return by_row(list(SETS.values()), *(lambda kind, d=d: cell(kind, d) for d in SETS), bold=len(SETS))


def differences() -> str:
    def line(name: str, kind: tuple[str, bool], which: str, zoom: float = 1.0) -> list[str]:
        rows = {d: one("table2", kind, dataset=d, method="cam", zoom=zoom) for d in SETS}
        return [name, *(between(row[which][located(d)]) for d, row in rows.items())]

    lines = [line(name, kind, "delta") for kind, name in list(ROWS.items())[1:]]
    lines.append(line("*sigmoid, clamped, instead of clamped softmax maps*", METHOD, "beside"))
    lines.append(line("*the same, images twice as large*", METHOD, "beside", 2.0))
    return table(["instead of signed softmax maps", *SETS.values()], lines)


def kept(row: Row) -> str:
    """What masks keep: average drop, increase, mean map."""
    return f"{row['average_drop']:.1f} / {row['increase_in_confidence']:.1f} / {row['mean_map']:.0f}"


def confidence() -> str:
    columns = [(d, m) for d in ("cub", "cars") for m in ("cam", "grad-cam")]
    cells = [lambda kind, d=d, m=m: kept(one("table1", kind, dataset=d, method=m)) for d, m in columns]
    said = {"cam": "CAM", "grad-cam": "Grad-CAM"}
    return by_row([f"{SETS[d]}, {said[m]}" for d, m in columns], *cells)


def signed_clamped(table: str, branch: str, **wanted: Any) -> list[str]:
    """MaxBoxAccV2 of signed and of clamped CAM maps."""
    rows = (one(table, (branch, clamp), method="cam", **wanted) for clamp in (False, True))
    return [f"{row['max_box_acc_v2']:.1f}" for row in rows]


def sources() -> str:
    lines = list[list[str]]()
    fits = dict.fromkeys(row.get("fit") for row in rows_of("sources"))
    for branch, fit in [("softmax", None), ("centred", None), *(("sigmoid", f) for f in fits if f)]:
        row = one("sources", (branch, False), fit=fit)
        knows = f"{row['auroc_nothing']:.1f}" if "auroc_nothing" in row else "-"
        name = f"{branch}, {fit}" if fit else branch
        lines.append([name, *signed_clamped("sources", branch, fit=fit), knows])
    return table(["map from", "MaxBoxAccV2 signed", "clamped", "knows birds from pets (AUROC)"], lines)


def pos_weight() -> str:
    weights = dict.fromkeys(row["pos_weight"] for row in rows_of("pos-weight") if "pos_weight" in row)
    lines = [[f"{w:g}", *signed_clamped("pos-weight", "sigmoid", pos_weight=w)] for w in weights]
    return table(["positive weight", "signed", "clamped"], lines)


def classifier(name: str) -> str:
    """Of another classifier: how well CAM locates in each data set, and what Grad-CAM masks keep."""
    sets = [d for d in SETS if any(row["dataset"] == d for row in rows_of(name))]
    masked = [d for d in sets if d != "pets"]
    cells = [
        lambda kind, d=d: f"{one(name, kind, located(d), dataset=d, method='cam')[located(d)]:.1f}"
        for d in sets
    ] + [
        lambda kind, d=d: kept(one(name, kind, "average_drop", dataset=d, method="grad-cam")) for d in masked
    ]
    head = [f"{SETS[d]}, CAM: {'PxAP' if d == 'pets' else 'MaxBoxAccV2'}" for d in sets]
    head = [text.replace(" (PxAP)", "") for text in head]
    head += [f"{SETS[d]}, Grad-CAM: average drop / increase / mean map" for d in masked]
    beside = (one(name, METHOD, located(d), dataset=d, method="cam")["beside"][located(d)] for d in sets)
    above = [
        "*sigmoid, clamped, instead of clamped softmax maps*",
        *map(between, beside),
        *("-" for _ in masked),
    ]
    return f"{by_row(head, *cells, bold=len(sets))}\n{_line(above)}"


def shift() -> str:
    """How large the shift of each classifier is, and what taking it off gives."""
    lines = list[list[str]]()
    cases = [("EfficientNet-Lite0", "table2", d) for d in SETS]
    cases += [("EfficientNet-Lite2", "lite2", d) for d in ("cub", "cars", "pets")]
    cases += [("EfficientNet-Lite0, last stages", "stages", "cub"), ("VGG-16", "vgg16", "cub")]
    for name, held, dataset in cases:
        row = one(held, ("centred", False), located(dataset), dataset=dataset, method="cam", zoom=1.0)
        lines.append(
            [f"{SETS[dataset]}: {name}", f"{row['shift']:.1f} %", between(row["delta"][located(dataset)])]
        )
    return table(["classifier", "mean row, of a row's length", "centring gives"], lines)


def published() -> str:
    """Where data set, network, method and scorer are the paper's: what masks keep, here and there."""

    def line(kind: tuple[str, bool]) -> list[str]:
        row = one("vgg16", kind, "average_drop:branch", dataset="cub", method="cam")
        names = ("average_drop:branch", "increase_in_confidence:branch")
        return [
            ROWS[kind],
            *(" / ".join(f"{held[n]:.1f}" for n in names) for held in (row, row["published"])),
        ]

    return table(
        ["CAM, scored by its own branch", "here", "the paper"], [line(("softmax", False)), line(METHOD)]
    )


TABLES: dict[str, Callable[[], str]] = {
    "localisation": localisation,
    "gradients": gradients,
    "differences": differences,
    "confidence": confidence,
    "sources": sources,
    "pos-weight": pos_weight,
    "shift": shift,
    "published": published,
    **{name: partial(classifier, name) for name in ("vgg16", "lite2", "stages")},
}


def filled(page: str) -> str:
    """The page with its tables as they are in benchmarks/results."""
    return re.sub(
        r"(?<=<!-- table: )([\w-]+) -->\n.*?<!-- end -->",
        lambda found: f"{found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
        print(path)
