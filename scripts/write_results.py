"""Write the tables of docs/results.md and README.md from the results in benchmarks/results.

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`.

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
PAPER_METHOD = ("sigmoid", True)
ROWS = {
    ("softmax", False): "softmax, signed (the paper's baseline)",
    ("softmax", True): "softmax, clamped",
    ("centred", False): "centred, signed",
    ("centred", True): "centred, clamped",
    ("sigmoid", False): "sigmoid, signed",
    PAPER_METHOD: "sigmoid, clamped (the paper's method)",
}
DATASETS = {"cub": "CUB", "cars": "Cars", "ilsvrc": "ImageNet", "pets": "Pets (PxAP)"}
Row = dict[str, Any]


@cache
def rows_of(table: str) -> tuple[Row, ...]:
    """Return the rows of a result."""
    return tuple(json.loads((ROOT / "benchmarks/results" / f"{table}.json").read_text())["rows"])


def find_row(table: str, variant: tuple[str, bool], metric: str = "dataset", **wanted: Any) -> Row:
    """Return the one row of a variant (branch, clamp) with the wanted values and a number called `metric`."""
    wanted |= {"branch": variant[0], "clamp": variant[1]}
    (row,) = (r for r in rows_of(table) if metric in r and all(r.get(k) == v for k, v in wanted.items()))
    return row


def metric_of(dataset: str) -> str:
    """Return the metric of localisation on a data set."""
    return "pxap" if dataset == "pets" else "max_box_acc_v2"


def between(found: Sequence[float]) -> str:
    """Format a difference with its interval."""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([_line(head), "|---" * len(head) + "|", *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def by_row(head: Sequence[str], *cells: Callable[[tuple[str, bool]], str], bold: int = 0) -> str:
    """Return a table with a line for each variant; the first cells of the paper's method are bold."""
    lines = [[name, *(cell(variant) for cell in cells)] for variant, name in ROWS.items()]
    lines[-1] = [f"**{text}**" if i <= bold else text for i, text in enumerate(lines[-1])]
    return table(["map from", *head], lines)


def localisation() -> str:
    """Return the localisation of CAM, at the network's own size and from images twice as large."""

    def cell(variant: tuple[str, bool], dataset: str) -> str:
        rows = (find_row("table2", variant, dataset=dataset, method="cam", zoom=zoom) for zoom in (1.0, 2.0))
        return " / ".join(f"{row[metric_of(dataset)]:.1f}" for row in rows)

    cells = [lambda variant, dataset=dataset: cell(variant, dataset) for dataset in DATASETS]
    return by_row(list(DATASETS.values()), *cells, bold=len(DATASETS))


def gradients() -> str:
    """Return the localisation of Grad-CAM, at the network's own size."""

    def cell(variant: tuple[str, bool], dataset: str) -> str:
        return f"{find_row('table2', variant, dataset=dataset, method='grad-cam')[metric_of(dataset)]:.1f}"

    return by_row(
        list(DATASETS.values()),
        *(lambda variant, d=d: cell(variant, d) for d in DATASETS),
        bold=len(DATASETS),
    )


def differences() -> str:
    """Return the differences of CAM's localisation from signed and from clamped softmax maps."""

    def line(name: str, variant: tuple[str, bool], which: str, zoom: float = 1.0) -> list[str]:
        rows = {d: find_row("table2", variant, dataset=d, method="cam", zoom=zoom) for d in DATASETS}
        return [name, *(between(row[which][metric_of(d)]) for d, row in rows.items())]

    lines = [line(name, variant, "delta") for variant, name in list(ROWS.items())[1:]]
    lines.append(line("*sigmoid, clamped, instead of clamped softmax maps*", PAPER_METHOD, "beside"))
    lines.append(line("*the same, images twice as large*", PAPER_METHOD, "beside", 2.0))
    return table(["instead of signed softmax maps", *DATASETS.values()], lines)


def fidelity_text(row: Row) -> str:
    """Format the fidelity metrics: average drop, increase in confidence, mean map."""
    return f"{row['average_drop']:.1f} / {row['increase_in_confidence']:.1f} / {row['mean_map']:.0f}"


def confidence() -> str:
    """Return the fidelity of CAM and Grad-CAM."""
    columns = [(d, m) for d in ("cub", "cars") for m in ("cam", "grad-cam")]
    cells = [
        lambda variant, d=d, m=m: fidelity_text(find_row("table1", variant, dataset=d, method=m))
        for d, m in columns
    ]
    titles = {"cam": "CAM", "grad-cam": "Grad-CAM"}
    return by_row([f"{DATASETS[d]}, {titles[m]}" for d, m in columns], *cells)


def signed_clamped(table: str, branch: str, **wanted: Any) -> list[str]:
    """Return MaxBoxAccV2 of signed and of clamped CAM maps."""
    rows = (find_row(table, (branch, clamp), method="cam", **wanted) for clamp in (False, True))
    return [f"{row['max_box_acc_v2']:.1f}" for row in rows]


def sources() -> str:
    """Return localisation and AUROC by branch and fit."""
    lines = list[list[str]]()
    fits = dict.fromkeys(row.get("fit") for row in rows_of("sources"))
    for branch, fit in [("softmax", None), ("centred", None), *(("sigmoid", f) for f in fits if f)]:
        row = find_row("sources", (branch, False), fit=fit)
        auroc = f"{row['auroc_nothing']:.1f}" if "auroc_nothing" in row else "-"
        name = f"{branch}, {fit}" if fit else branch
        lines.append([name, *signed_clamped("sources", branch, fit=fit), auroc])
    return table(["map from", "MaxBoxAccV2 signed", "clamped", "knows birds from pets (AUROC)"], lines)


def pos_weight() -> str:
    """Return the localisation for each weight of a positive label."""
    weights = dict.fromkeys(row["pos_weight"] for row in rows_of("pos-weight") if "pos_weight" in row)
    lines = [[f"{w:g}", *signed_clamped("pos-weight", "sigmoid", pos_weight=w)] for w in weights]
    return table(["positive weight", "signed", "clamped"], lines)


def classifier(name: str) -> str:
    """Return the localisation of CAM and the fidelity of Grad-CAM for another classifier."""
    datasets = [d for d in DATASETS if any(row["dataset"] == d for row in rows_of(name))]
    masked = [d for d in datasets if d != "pets"]
    cells = [
        lambda variant, d=d: (
            f"{find_row(name, variant, metric_of(d), dataset=d, method='cam')[metric_of(d)]:.1f}"
        )
        for d in datasets
    ] + [
        lambda variant, d=d: fidelity_text(
            find_row(name, variant, "average_drop", dataset=d, method="grad-cam")
        )
        for d in masked
    ]
    head = [f"{DATASETS[d]}, CAM: {'PxAP' if d == 'pets' else 'MaxBoxAccV2'}" for d in datasets]
    head = [text.replace(" (PxAP)", "") for text in head]
    head += [f"{DATASETS[d]}, Grad-CAM: average drop / increase / mean map" for d in masked]
    beside = (
        find_row(name, PAPER_METHOD, metric_of(d), dataset=d, method="cam")["beside"][metric_of(d)]
        for d in datasets
    )
    last_line = [
        "*sigmoid, clamped, instead of clamped softmax maps*",
        *map(between, beside),
        *("-" for _ in masked),
    ]
    return f"{by_row(head, *cells, bold=len(datasets))}\n{_line(last_line)}"


def shift() -> str:
    """Return the logit shift of each classifier, and what centring gains."""
    lines = list[list[str]]()
    cases = [("EfficientNet-Lite0", "table2", d) for d in DATASETS]
    cases += [("EfficientNet-Lite2", "lite2", d) for d in ("cub", "cars", "pets")]
    cases += [("EfficientNet-Lite0, last stages", "stages", "cub"), ("VGG-16", "vgg16", "cub")]
    for name, table_name, dataset in cases:
        row = find_row(
            table_name, ("centred", False), metric_of(dataset), dataset=dataset, method="cam", zoom=1.0
        )
        lines.append(
            [
                f"{DATASETS[dataset]}: {name}",
                f"{row['shift']:.1f} %",
                between(row["delta"][metric_of(dataset)]),
            ]
        )
    return table(["classifier", "mean row, of a row's length", "centring gives"], lines)


def published() -> str:
    """Return our fidelity and the paper's where data set, network, method and scorer coincide."""

    def line(variant: tuple[str, bool]) -> list[str]:
        row = find_row("vgg16", variant, "average_drop:branch", dataset="cub", method="cam")
        names = ("average_drop:branch", "increase_in_confidence:branch")
        return [
            ROWS[variant],
            *(" / ".join(f"{source[n]:.1f}" for n in names) for source in (row, row["published"])),
        ]

    return table(
        ["CAM, scored by its own branch", "here", "the paper"], [line(("softmax", False)), line(PAPER_METHOD)]
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
    """Return the page with its tables made anew from benchmarks/results."""
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
