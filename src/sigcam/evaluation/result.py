"""Result: the numbers of an evaluation as rows, tables and JSON."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.evaluation.registry import number_title
from sigcam.metrics.base import BoxAccuracy, ImageMetric
from sigcam.metrics.bootstrap import Interval, interval, paired
from sigcam.metrics.localization import MaxBoxAccV2, PxAP

Row = dict[str, Any]
FIXED = 0.2  # the threshold that needs no data (PROTOCOL 5.4)
MAX_COLUMNS = 4  # of a printed table
MEAN_MAP = (
    "the mean value of the predicted class's map, which is the share of the image that it keeps; the more a "
    "map keeps, the less confidence it loses, so read average drop beside it"
)


class MetricKey(NamedTuple):
    """A metric of a variant; variant and scorer are None where they do not matter."""

    method: str | None
    branch: str | None
    clamp: bool | None
    metric: str
    scorer: str | None = None
    scale: str = "unit"

    @property
    def variant(self) -> tuple[Any, ...]:
        """Method, branch, clamp and scale of the maps."""
        return self.method, self.branch, self.clamp, self.scale

    @property
    def label(self) -> str:
        """The metric's name, with its scorer unless that is the softmax head: "average_drop:sigmoid"."""
        return self.metric if self.scorer in (None, "softmax") else f"{self.metric}:{self.scorer}"


class Metrics(Mapping[MetricKey, ImageMetric]):
    """Metrics by `MetricKey`, or by (method, branch, clamp, label), for maps in probabilities followed by the
    scale."""

    def __init__(self, metrics: Mapping[MetricKey, ImageMetric]) -> None:
        self._metrics = dict(metrics)
        self._keys: dict[Any, MetricKey] = {
            (*key[:3], key.label, *([] if key.scale == "unit" else [key.scale])): key for key in metrics
        }

    def __getitem__(self, key: tuple[Any, ...]) -> ImageMetric:
        return self._metrics[self._keys.get(key, key)]  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[MetricKey]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


@dataclass(frozen=True)
class Result:
    """The numbers of an evaluation.

    Args:
        rows: one dict per number: method, branch, clamp (None if it needs no map), scale, metric, value in
            percent, low and high (the ends of its interval, None without one), threshold, threshold_from
            ("oracle": the best on these very images, "transferred", "fixed"), scorer, images.
        left_out: (metric, reason) of metrics that could not be measured.
        skipped: (id, reason) of images that could not be read.
        about: what was evaluated, with what, and how each metric is defined.
        metrics: the metrics themselves, by (method, branch, clamp, metric), to merge or to compare in pairs;
            with several scorers, "average_drop:sigmoid".
    """

    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    about: dict[str, Any]
    metrics: Metrics = field(repr=False, compare=False)

    def value(self, metric: str, **chosen: Any) -> float:
        """The one value of a metric, told apart by method=, branch=, clamp=, threshold_from= and scorer=."""
        wanted = {"metric": metric, **chosen}
        rows = [row for row in self.rows if all(row[key] == value for key, value in wanted.items())]
        if len(rows) > 1 and "threshold_from" not in chosen:
            rows = [row for row in rows if row["threshold_from"] in (None, "oracle")]
        if len(rows) != 1:
            what = f"{metric!r} with {chosen}" if chosen else f"{metric!r}"
            count = f"{len(rows)} of {len(self.rows)}"
            raise DataError(f"{count} rows are {what}: name method, branch and clamp.")
        return float(rows[0]["value"])

    def blocks(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """(header, lines) of tables with one line per number and up to four variants side by side."""
        variants = list(dict.fromkeys(variant_words(row) for row in self.rows if row["method"])) or [""]
        labels = list(dict.fromkeys(number_label(row) for row in self.rows))
        texts = {(variant_words(row), number_label(row)): _value_text(row) for row in self.rows}
        blocks = []
        for start in range(0, len(variants), MAX_COLUMNS):
            part = variants[start : start + MAX_COLUMNS]
            lines = list[tuple[str, ...]]()
            for label in labels:
                lines.append((label, *(texts.get((v, label)) or texts.get(("", label), "-") for v in part)))
            blocks.append((("metric", *part), lines))
        return blocks

    def table(self) -> str:
        """The numbers as text, in percent, and what was left out and why."""
        lines = list[str]()
        for header, rows in self.blocks():
            widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
            for row in (header, *rows):
                cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
                lines.append("  ".join(cells).rstrip())
            lines.append("")
        return "\n".join([*lines, *self.remarks()])

    def remarks(self) -> list[str]:
        """Sentences to print below the table."""
        lines = [f"{self.about['images']} images, all numbers in percent"]
        if any(row["scorer"] for row in self.rows):
            lines += [f"confidence, {name}: {words}" for name, words in self.about["confidence"].items()]
        if any(row["metric"] == "mean_map" for row in self.rows):
            lines.append(f"mean map: {MEAN_MAP}")
        if self.about.get("threshold") == "percentile":
            lines.append("thresholds of boxes are fractions of each map's 90th percentile")
        if self.left_out:
            lines.append(f"not measured: {self.left_out_words()}")
        if self.skipped:
            lines.append(f"{len(self.skipped)} picture(s) could not be read and do not count")
        return lines

    def left_out_words(self) -> str:
        """The metrics that could not be measured, those with the same reason together, before it."""
        names = dict[str, list[str]]()
        for metric, reason in self.left_out:
            names.setdefault(reason, []).append(metric)
        return "; ".join(f"{', '.join(metrics)} ({reason})" for reason, metrics in names.items())

    def to_dict(self) -> dict[str, Any]:
        """Everything but the metrics, as plain data."""
        return {
            "rows": list(self.rows),
            "left_out": [list(pair) for pair in self.left_out],
            "skipped": [list(pair) for pair in self.skipped],
            "about": self.about,
        }

    def to_json(self) -> str:
        """Everything but the metrics, as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        return self.table()


def metric_rows(key: MetricKey, metric: ImageMetric, *, images: int, val: Result | None) -> list[Row]:
    """The rows of one metric; box accuracies also at a fixed threshold and at the best one of `val`."""
    if not isinstance(metric, BoxAccuracy):
        return _rows_at(key, metric, images, None)
    rows = _rows_at(key, metric, images, "oracle", metric.best_threshold())
    fixed = torch.tensor(FIXED, dtype=torch.float64)
    rows += _rows_at(key, metric.at(fixed), images, "fixed", fixed)
    if val is not None:
        other = val.metrics.get(key)
        if not isinstance(other, BoxAccuracy) or other.percentile != metric.percentile:
            variant = " ".join(str(part) for part in (key.method, key.branch) if part)
            raise DataError(
                f"the validation result has no {key.metric} of {variant}: evaluate the same methods, "
                "branches, metrics and kind of threshold there."
            )
        transferred = other.best_threshold()
        rows += _rows_at(key, metric.at(transferred), images, "transferred", transferred)
    return rows


def _rows_at(
    key: MetricKey, metric: ImageMetric, images: int, origin: str | None, threshold: Any = None
) -> list[Row]:
    """One row per value that the metric computes; `threshold` is that of a single value."""
    computed, ends = metric.compute(), interval(metric) if getattr(metric, "intervals", False) else None
    several = isinstance(computed, dict)
    values: dict[str, Any] = computed if isinstance(computed, dict) else {key.metric: computed}
    rows = list[Row]()
    for number, value in values.items():
        if number.startswith("threshold_"):
            continue
        end: Any = ends[number] if isinstance(ends, dict) else ends
        at = values.get(number.replace("max_box_acc_", "threshold_")) if several else threshold
        row: Row = {"method": key.method, "branch": key.branch, "clamp": key.clamp, "scale": key.scale}
        row["metric"] = number
        row |= {"value": float(value), "low": end and end.low, "high": end and end.high}
        row |= {"threshold": None if at is None else float(at), "threshold_from": origin}
        rows.append(row | {"scorer": key.scorer, "images": images})
    return rows


def variant_words(row: Mapping[str, Any]) -> str:
    """Method, branch, and whether weights are clamped where that is not the branch's default."""
    method, branch, clamp = row["method"], row["branch"], row["clamp"]
    if row.get("scale", "unit") != "unit":
        return f"{method} {branch} {row['scale']}"
    usual = clamp is None or clamp == (branch == "sigmoid")
    return " ".join(filter(None, (method, branch, "" if usual else "clamped" if clamp else "unclamped")))


def number_label(row: Row, *, threshold: bool = True) -> str:
    """The number's title, with its threshold and its scorer where these are not the usual ones."""
    origins = {"fixed": f"at {FIXED}", "transferred": "at val's best"}
    origin = origins.get(row["threshold_from"] or "", "") if threshold else ""
    scorer = f"by {row['scorer']}" if row["scorer"] not in (None, "softmax") else ""
    return " ".join(filter(None, (number_title(row["metric"]), origin, scorer)))


def _value_text(row: Row) -> str:
    ends = "" if row["low"] is None else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['value']:.2f}{ends}"


Differences = dict[tuple[MetricKey, str, str | None], Interval]  # by key, name, origin of the threshold


@dataclass(frozen=True)
class Curves:
    """Curves by variant, and differences from the softmax head's signed maps, over all processes."""

    boxes: Mapping[str, Tensor]  # percent of images located at IoU 0.3, 0.5, 0.7 and every threshold, (3, T)
    pixels: Mapping[str, Tensor]  # recall and precision in percent from the highest threshold down, (2, T)
    differences: Differences


def curves_of(result: Result) -> Curves:
    """The curves of a result; every process must call this, since it adds up the counts of all."""
    boxes, pixels, differences = dict[str, Tensor](), dict[str, Tensor](), Differences()
    for key, metric in result.metrics.items():
        name = variant_words(key._asdict())
        if isinstance(metric, MaxBoxAccV2 | PxAP):
            with metric.sync_context(dist_sync_fn=metric.dist_sync_fn):
                counts, images = metric.counts.cpu().double(), metric.images.cpu()
            if isinstance(metric, MaxBoxAccV2):
                boxes[name] = 100 * counts / images
            else:
                false, true = counts.flip(-1).cumsum(-1)
                pixels[name] = 100 * torch.stack([true / true[-1], true / (true + false).clamp(min=1)])
        base = result.metrics.get(key._replace(branch="softmax", clamp=False, scale="unit"))
        if base is not None and base is not metric and getattr(metric, "intervals", False):
            differences |= _differences(key, metric, base)
    return Curves(boxes, pixels, differences)


def _differences(key: MetricKey, metric: ImageMetric, base: ImageMetric) -> Differences:
    """The metric minus the base on the same images, by name and by the origin of the threshold."""
    pairs: dict[str | None, tuple[ImageMetric, ImageMetric]] = {None: (metric, base)}
    if isinstance(metric, BoxAccuracy) and isinstance(base, BoxAccuracy):
        pairs = {"oracle": (metric, base), "fixed": (metric.at(FIXED), base.at(FIXED))}
    found = Differences()
    for origin, pair in pairs.items():
        difference = paired(*pair)
        named = difference if isinstance(difference, dict) else {key.metric: difference}
        found |= {(key, name, origin): each for name, each in named.items()}
    return found
