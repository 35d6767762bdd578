"""Does the paper's claim hold? Its published differences beside ours, cell by cell."""

from collections.abc import Sequence
from typing import Any

from sigcam.bench.paper import BenchRow, published_value
from sigcam.bench.registry import TABLES

_BASELINE, _METHOD = ("softmax", False), ("sigmoid", True)  # branch and clamp of the two sides


def agreement(table: str, rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    """Return a cell for each number that the paper published of both sides of its main comparison (signed
    softmax maps, clamped sigmoid maps) and that these rows have too, with the paper's values and ours.

    `agrees` says whether the difference has the paper's sign; `certain`, whether the interval of ours
    excludes zero. Confidence is scored as in the paper, by each side's own branch; `same_scorer` is our
    difference with the softmax head as the scorer of both.
    """
    baselines = {_place(row): row for row in rows if _is_side(row, _BASELINE)}
    cells = list[dict[str, Any]]()
    for row in rows:
        base = baselines.get(_place(row))
        if not _is_side(row, _METHOD) or base is None or "pos_weight" in row:
            continue
        for metric in TABLES[table].columns:
            if metric not in row or metric not in base or metric not in row["delta"]:
                continue
            paper = [published_value(each, table, metric) for each in (base, row)]
            if paper[0] is None or paper[1] is None:
                continue
            value, low, high = row["delta"][metric]
            same_scorer = row["delta"].get(metric.partition(":")[0]) if ":" in metric else None
            cells.append(
                {key: row[key] for key in ("backbone", "classifier", "dataset", "method", "images")}
                | {"metric": metric, "paper": paper, "here": [base[metric], row[metric]]}
                | {"difference": [value, low, high], "same_scorer": same_scorer}
                | {"agrees": (paper[1] - paper[0]) * value > 0, "certain": not low <= 0 <= high}
            )
    return cells


def agreement_words(cells: Sequence[dict[str, Any]]) -> str:
    """Return a sentence with the count of cells that have the paper's direction."""
    agreeing = sum(cell["agrees"] for cell in cells)
    certain = [cell for cell in cells if cell["certain"]]
    sure = sum(cell["agrees"] for cell in certain)
    return (
        f"{agreeing} of {len(cells)} cells have the paper's direction; {sure} of the {len(certain)} whose "
        "interval excludes zero."
    )


def _place(row: BenchRow) -> tuple[Any, ...]:
    """Return what both sides of a comparison share."""
    keys = ("backbone", "classifier", "dataset", "method", "zoom", "images")
    return (*(row[key] for key in keys), "average_drop" in row)


def _is_side(row: BenchRow, side: tuple[str, bool]) -> bool:
    return (row["branch"], row["clamp"]) == side and row.get("scale", "unit") == "unit" and "fit" not in row
