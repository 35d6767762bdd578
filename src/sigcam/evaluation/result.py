"""Result: what an evaluation found, as rows, as a table, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sigcam.core.distributed import all_reduce_sum
from sigcam.core.errors import DataError
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.bootstrap import interval
from sigcam.metrics.localization import MaxBoxAcc, MaxBoxAccV2

Row = dict[str, Any]
Key = tuple[str | None, str | None, bool | None, str]  # method, branch, clamp, metric
FIXED = 0.2  # the threshold that needs no data (PROTOCOL 5.4)
SIDE_BY_SIDE = 4  # columns of a table


@dataclass(frozen=True)
class Result:
    """Numbers of an evaluation.

    Args:
        rows: one dict per number: method, branch, clamp (None where no map is needed), metric, value in
            percent, low and high (the ends of its interval, None without intervals), threshold and where it
            is from ("oracle": the best on these very images, "transferred", "fixed"), scorer, images.
        left_out: (metric, reason) of what could not be measured.
        skipped: (id, reason) of pictures that could not be read.
        about: what was evaluated, with what, and how each metric is defined.
        metrics: the metrics themselves, by (method, branch, clamp, metric), to merge or to compare in pairs;
            where there are several scorers, "average_drop:sigmoid".
    """

    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    about: dict[str, Any]
    metrics: Mapping[Key, ImageMetric] = field(repr=False, compare=False)

    def value(self, metric: str, **chosen: Any) -> float:
        """The one value of a metric; method=, branch=, clamp=, threshold_from=, scorer= tell values apart."""
        named = [row for row in self.rows if row["metric"] == metric]
        found = [row for row in named if all(row[key] == value for key, value in chosen.items())]
        if len(found) > 1 and "threshold_from" not in chosen:
            found = [row for row in found if row["threshold_from"] in (None, "oracle")]
        if len(found) != 1:
            what = f"{metric!r} with {chosen}" if chosen else f"{metric!r}"
            raise DataError(
                f"{len(found)} of {len(self.rows)} rows are {what}: name method, branch and clamp."
            )
        return float(found[0]["value"])

    def blocks(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """(header, lines) of tables with a line per metric and a few cells side by side."""
        cells = list(dict.fromkeys(cell_words(row) for row in self.rows if row["method"] is not None)) or [
            _NONE
        ]
        names = list(dict.fromkeys(label_of(row) for row in self.rows))
        texts = {(cell_words(row), label_of(row)): _text(row) for row in self.rows}
        return [
            (
                ("metric", *(" ".join(cell) for cell in part)),
                [
                    (name, *(texts.get((c, name)) or texts.get((_NONE, name), "-") for c in part))
                    for name in names
                ],
            )
            for part in (cells[i : i + SIDE_BY_SIDE] for i in range(0, len(cells), SIDE_BY_SIDE))
        ]

    def table(self) -> str:
        """The numbers as text, in percent, and what was left out and why."""
        lines = list[str]()
        for header, rows in self.blocks():
            widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
            for row in (header, *rows):
                first, *rest = (text.ljust(width) for text, width in zip(row, widths, strict=True))
                lines.append("  ".join([first, *rest]).rstrip())
            lines.append("")
        return "\n".join([*lines, *self.remarks()])

    def remarks(self) -> list[str]:
        """What a reader of the table must know besides."""
        said = [f"{self.about['images']} images, all numbers in percent"]
        if any(row["scorer"] for row in self.rows):
            said += [f"confidence, {name}: {words}" for name, words in self.about["confidence"].items()]
        said += [f"not measured: {metric}, {reason}" for metric, reason in self.left_out]
        if self.skipped:
            said.append(f"{len(self.skipped)} picture(s) could not be read and do not count")
        return said

    def to_dict(self) -> dict[str, Any]:
        """All of it but the metrics, as plain data."""
        return {
            "rows": list(self.rows),
            "left_out": [list(pair) for pair in self.left_out],
            "skipped": [list(pair) for pair in self.skipped],
            "about": self.about,
        }

    def to_json(self) -> str:
        """All of it but the metrics, as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        return self.table()


def metric_rows(key: Key, metric: ImageMetric, *, scorer: str | None, val: Result | None) -> list[Row]:
    """The rows of one metric of one cell; `val` is what thresholds are transferred from, if given."""
    method, branch, clamp, name = *key[:3], key[3].partition(":")[0]

    def row(metric_name: str, value: Any, ends: Any, threshold: float | None, origin: str | None) -> Row:
        return {
            "method": method,
            "branch": branch,
            "clamp": clamp,
            "metric": metric_name,
            "value": float(value),
            "low": None if ends is None else ends.low,
            "high": None if ends is None else ends.high,
            "threshold": threshold,
            "threshold_from": origin,
            "scorer": scorer,
            "images": int(all_reduce_sum(metric.images.clone())),
        }

    if not isinstance(metric, MaxBoxAcc | MaxBoxAccV2):
        return [row(name, metric.compute(), interval(metric) if metric.intervals else None, None, None)]
    chosen = {"oracle": metric.best_threshold(), "fixed": torch.tensor(FIXED, dtype=torch.float64)}
    if val is not None:
        theirs = val.metrics.get(key)
        if not isinstance(theirs, MaxBoxAcc | MaxBoxAccV2):
            cell = " ".join(str(part) for part in (method, branch) if part)
            raise DataError(f"the validation result has no {name} of {cell}: evaluate the same there.")
        chosen["transferred"] = theirs.best_threshold()
    rows = list[Row]()
    for origin, at in chosen.items():
        column = metric if origin == "oracle" else metric.at(at)
        values, ends = column.compute(), interval(column) if column.intervals else None
        if not isinstance(values, dict):
            rows.append(row(name, values, ends, float(at), origin))
            continue
        for named, value in values.items():
            threshold = values.get(named.replace("max_box_acc_", "threshold_"))  # the mean over IoUs has none
            if not named.startswith("threshold_"):
                own = ends[named] if isinstance(ends, dict) else None
                rows.append(row(named, value, own, None if threshold is None else float(threshold), origin))
    return rows


_NONE = ("",)


def cell_words(row: Row) -> tuple[str, ...]:
    """Method, branch, and whether weights are clamped where that is not the branch's default."""
    if row["method"] is None:
        return _NONE
    default = row["branch"] == "sigmoid"
    said = () if row["clamp"] in (None, default) else ("clamped" if row["clamp"] else "unclamped",)
    return (row["method"], *([row["branch"]] if row["branch"] else []), *said)


def label_of(row: Row) -> str:
    """The metric's name, with what distinguishes it from others of that name."""
    origin = {"fixed": f"at {FIXED}", "transferred": "at val's best"}.get(row["threshold_from"] or "", "")
    scorer = f"by {row['scorer']}" if row["scorer"] not in (None, "softmax") else ""
    return " ".join(filter(None, (row["metric"].replace("_", " "), origin, scorer)))


def _text(row: Row) -> str:
    ends = "" if row["low"] is None else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['value']:.2f}{ends}"
