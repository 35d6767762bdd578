"""Write the tables of docs/results.md, docs/systems.md and README.md from the results in benchmarks/results.

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`.

python scripts/write_results.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs/results.md", ROOT / "docs/systems.md", ROOT / "README.md")
PAPER_METHOD = ("sigmoid", True)
PAPER_ROWS = {
    ("softmax", False): "softmax, signed (the paper's baseline)",
    ("softmax", True): "softmax, clamped",
    ("centred", False): "centred, signed",
    ("centred", True): "centred, clamped",
    ("sigmoid", False): "sigmoid, signed",
    PAPER_METHOD: "sigmoid, clamped (the paper's method)",
}
KINDS: dict[bool | str, str] = {False: "signed", True: "clamped", "probability": "absolute"}
BACKGROUND_ROWS = {
    ("sigmoid + background", kind): f"sigmoid + background, {text}" for kind, text in KINDS.items()
}
CONTRAST_ROWS = {
    ("softmax + background", kind): f"softmax + background class, {text}" for kind, text in KINDS.items()
}
ROWS = PAPER_ROWS | BACKGROUND_ROWS | CONTRAST_ROWS
Variant = tuple[str, bool | str]  # branch; whether negative weights are clamped, or "probability"
DATASETS = {"cub": "CUB", "cars": "Cars", "ilsvrc": "ImageNet", "pets": "Pets (PxAP)"}
Row = dict[str, Any]


@cache
def rows_of(table: str) -> tuple[Row, ...]:
    """Return the rows of a result."""
    return tuple(json.loads((ROOT / "benchmarks/results" / f"{table}.json").read_text())["rows"])


def find_row(table: str, variant: Variant, metric: str = "dataset", **wanted: Any) -> Row:
    """Return the one row of a variant with the wanted values and a number called `metric`."""
    absolute = variant[1] == "probability"
    wanted |= {"branch": variant[0], "clamp": False if absolute else variant[1]}
    wanted |= {"scale": "probability" if absolute else "unit"}
    (row,) = (
        r
        for r in ({"scale": "unit", **row} for row in rows_of(table))
        if metric in r and all(r.get(k) == v for k, v in wanted.items())
    )
    return row


def variant_of(row: Row) -> Variant:
    """Return the variant of a row."""
    return row["branch"], "probability" if row.get("scale", "unit") == "probability" else row["clamp"]


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


def by_row(
    head: Sequence[str],
    *cells: Callable[[Variant], str],
    bold: int = 0,
    rows: dict[Any, str] = PAPER_ROWS,
) -> str:
    """Return a table with a line for each variant; the first cells of the paper's method are bold."""
    lines = list[list[str]]()
    for variant, name in rows.items():
        line = [name, *(cell(variant) for cell in cells)]
        if variant == PAPER_METHOD:
            line = [f"**{text}**" if i <= bold else text for i, text in enumerate(line)]
        lines.append(line)
    return table(["map from", *head], lines)


def localisation() -> str:
    """Return the localisation of CAM, at the network's own size and from images twice as large."""

    def cell(variant: Variant, dataset: str) -> str:
        rows = (find_row("table2", variant, dataset=dataset, method="cam", zoom=zoom) for zoom in (1.0, 2.0))
        return " / ".join(f"{row[metric_of(dataset)]:.1f}" for row in rows)

    cells = [lambda variant, dataset=dataset: cell(variant, dataset) for dataset in DATASETS]
    return by_row(list(DATASETS.values()), *cells, bold=len(DATASETS), rows=ROWS)


def background_gain() -> str:
    """Return what background evidence gains over the strongest control of each data set, by size."""
    lines = list[list[str]]()
    for zoom, size in ((1.0, "own size"), (2.0, "twice as large")):
        for variant, name in (BACKGROUND_ROWS | CONTRAST_ROWS).items():
            line = [f"{name}, {size}"]
            for dataset in DATASETS:
                row = find_row("table2", variant, dataset=dataset, method="cam", zoom=zoom)
                found = row["versus"][metric_of(dataset)]
                line.append(f"{between(found['difference'])} [{found['control']}]")
            lines.append(line)
    return table(["instead of the strongest control", *DATASETS.values()], lines)


def at_half() -> str:
    """Return box accuracy of absolute maps cut at one half, and false alarms."""
    lines = list[list[str]]()
    for branch in ("sigmoid + background", "softmax + background"):
        for zoom, size in ((1.0, "own size"), (2.0, "twice as large")):
            for dataset in ("cub", "cars", "ilsvrc"):
                row = find_row("table2", (branch, "probability"), dataset=dataset, method="cam", zoom=zoom)
                lines.append(
                    [
                        f"{branch}, {DATASETS[dataset]}, {size}",
                        interval(row, "box_acc_at_half"),
                        interval(row, "max_box_acc_50"),
                        interval(row, "false_alarm"),
                        interval(row, "false_alarm_area"),
                    ]
                )
    return table(
        ["maps in probabilities", "at one half", "at the best threshold", "false alarms", "area lit by them"],
        lines,
    )


def presence() -> str:
    """Return how each score tells images of the data set from photographs of pets."""
    lines = list[list[str]]()
    for dataset in ("cub", "cars"):
        for branch in ("softmax", "sigmoid", "sigmoid + background", "softmax + background"):
            row = find_row("sources", (branch, False), dataset=dataset, fit=None)
            cells = [interval(row, c) for c in ("auroc_nothing", "above_half", "above_half_nothing")]
            lines.append([f"{DATASETS[dataset]}: {branch}", *cells])
    head = ["best class's score", "AUROC against pets", "label above one half", "pets above one half"]
    return table(head, lines)


def interval(row: Row, metric: str) -> str:
    """Format a number with its interval."""
    low, high = row["intervals"][metric]
    digits = 2 if metric == "auroc_nothing" else 1
    return f"{row[metric]:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ablations() -> str:
    """Return what background evidence depends on."""
    found = [row for row in rows_of("background") if "fit" in row]
    lines = list[list[str]]()
    for fit, zoom in dict.fromkeys((row["fit"], row["zoom"]) for row in found):
        by_kind = {
            "absolute" if row["scale"] == "probability" else KINDS[row["clamp"]]: row
            for row in found
            if (row["fit"], row["zoom"]) == (fit, zoom)
        }
        absolute = by_kind["absolute"]
        columns = ("max_box_acc_50", "box_acc_at_half", "false_alarm", "above_half", "above_half_nothing")
        numbers = [f"{absolute[c]:.1f}" if c in absolute else "-" for c in columns]
        boxes = " / ".join(f"{by_kind[kind]['max_box_acc_v2']:.1f}" for kind in KINDS.values())
        size = "" if zoom == 1 else f", images {zoom:g} times as large"
        lines.append([f"{fit}{size}", boxes, f"{absolute['held_out_ap']:.1f}", *numbers])
    head = ["fit", "MaxBoxAccV2 signed / clamped / absolute", "held-out AP", "best threshold", "at one half"]
    return table([*head, "false alarms", "label above half", "pets above half"], lines)


def gradients() -> str:
    """Return the localisation of Grad-CAM, at the network's own size."""

    def cell(variant: Variant, dataset: str) -> str:
        return f"{find_row('table2', variant, dataset=dataset, method='grad-cam')[metric_of(dataset)]:.1f}"

    cells = [lambda variant, d=d: cell(variant, d) for d in DATASETS]
    return by_row(list(DATASETS.values()), *cells, bold=len(DATASETS), rows=ROWS)


def differences() -> str:
    """Return the differences of CAM's localisation from signed and from clamped softmax maps."""

    def line(name: str, variant: Variant, which: str, zoom: float = 1.0) -> list[str]:
        rows = {d: find_row("table2", variant, dataset=d, method="cam", zoom=zoom) for d in DATASETS}
        return [name, *(between(row[which][metric_of(d)]) for d, row in rows.items())]

    lines = [line(name, variant, "delta") for variant, name in list(PAPER_ROWS.items())[1:]]
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
    rows = {variant: name for variant, name in ROWS.items() if variant in map(variant_of, rows_of("table1"))}
    return by_row([f"{DATASETS[d]}, {titles[m]}" for d, m in columns], *cells, rows=rows)


def curves() -> str:
    """Return insertion and deletion of CAM, where higher and lower are better."""

    def cell(variant: Variant, dataset: str) -> str:
        row = find_row("table1", variant, "insertion", dataset=dataset, method="cam")
        return " / ".join(interval(row, name) for name in ("insertion", "deletion"))

    cells = [lambda variant, d=d: cell(variant, d) for d in ("cub", "cars")]
    heads = [f"{DATASETS[d]}: insertion / deletion" for d in ("cub", "cars")]
    rows = {variant: name for variant, name in ROWS.items() if variant[1] != "probability"}
    return by_row(heads, *cells, rows=rows)


def signed_clamped(table: str, branch: str, **wanted: Any) -> list[str]:
    """Return MaxBoxAccV2 of signed and of clamped CAM maps."""
    rows = (find_row(table, (branch, clamp), method="cam", **wanted) for clamp in (False, True))
    return [f"{row['max_box_acc_v2']:.1f}" for row in rows]


def sources() -> str:
    """Return localisation and AUROC by branch and fit."""
    lines = list[list[str]]()
    fits = dict.fromkeys(row.get("fit") for row in rows_of("sources"))
    branches = ("softmax", "centred", "sigmoid", "sigmoid + background", "softmax + background")
    for branch, fit in [*((b, None) for b in branches), *(("sigmoid", f) for f in fits if f)]:
        row = find_row("sources", (branch, False), dataset="cub", fit=fit)
        auroc = f"{row['auroc_nothing']:.2f}" if "auroc_nothing" in row else "-"
        name = f"{branch}, {fit}" if fit else branch
        lines.append([name, *signed_clamped("sources", branch, dataset="cub", fit=fit), auroc])
    return table(["map from", "MaxBoxAccV2 signed", "clamped", "knows birds from pets (AUROC)"], lines)


def pos_weight() -> str:
    """Return the localisation for each weight of a positive label."""
    weights = dict.fromkeys(row["pos_weight"] for row in rows_of("pos-weight") if "pos_weight" in row)
    lines = [[f"{w:g}", *signed_clamped("pos-weight", "sigmoid", pos_weight=w)] for w in weights]
    return table(["positive weight", "signed", "clamped"], lines)


class Case(NamedTuple):
    """A network with a classifier on top, and where its rows are."""

    name: str
    table: str
    datasets: tuple[str, ...]
    kind: str | None = None  # the rows' classifier; None where the table has one for each data set

    def row(self, variant: Variant, dataset: str, method: str = "cam") -> Row:
        """Return the row of localisation at the network's own size."""
        wanted: dict[str, Any] = {"pos_weight": None, "fit": None, "method": method, "zoom": 1.0}
        wanted |= {"classifier": self.kind} if self.kind else {}
        return find_row(self.table, variant, metric_of(dataset), dataset=dataset, **wanted)


PROBE, TRAINED, PUBLISHED = "a linear probe", "last stage trained", "as published"
PAPER_NETWORKS = {"resnet50": "ResNet-50", "inception_v3": "InceptionV3", "vgg16": "VGG-16"}
CASES = (
    Case("EfficientNet-Lite0, probe", "table2", ("cub", "cars", "pets"), PROBE),
    Case("EfficientNet-Lite0, last stages", "stages", ("cub",)),
    Case("EfficientNet-Lite2, probe", "lite2", ("cub", "cars", "pets")),
    Case("ResNet-50, probe", "resnet50", ("cub", "cars", "pets"), PROBE),
    Case("ResNet-50, last stage", "resnet50", ("cub", "cars"), TRAINED),
    Case("InceptionV3, probe", "inception_v3", ("cub", "cars", "pets"), PROBE),
    Case("InceptionV3, last stage", "inception_v3", ("cub", "cars"), TRAINED),
    Case("VGG-16, conv6 and fc", "vgg16", ("cub", "cars", "pets")),
    Case("EfficientNet-Lite0, published head", "table2", ("ilsvrc",), PUBLISHED),
    Case("ResNet-50, published head", "resnet50", ("ilsvrc",), PUBLISHED),
    Case("InceptionV3, published head", "inception_v3", ("ilsvrc",), PUBLISHED),
)


CLAIM_ROWS: dict[Variant, str] = {
    ("softmax", False): "softmax, signed",
    ("softmax", True): "softmax, clamped",
    PAPER_METHOD: "sigmoid, clamped",
    ("sigmoid + background", True): "sigmoid + background, clamped",
}


def claim() -> str:
    """Return the paper's comparison and its controls for every network and data set, with CAM."""
    shown = CLAIM_ROWS
    lines = list[list[str]]()
    for dataset, title in DATASETS.items():
        for case in CASES:
            if dataset not in case.datasets:
                continue
            held, metric = {v: row_or_none(case, v, dataset) for v in shown}, metric_of(dataset)
            numbers = [f"{row[metric]:.1f}" if row else "-" for row in held.values()]
            ours = case.row(PAPER_METHOD, dataset)
            gains = [between(ours[which][metric]) for which in ("delta", "beside")]
            name = f"{title.replace(' (PxAP)', '')}: {case.name}"
            lines.append([name, f"{ours['top1_cls']:.1f}", *numbers, *gains])
    gain_heads = ["the paper's gain", "of it beyond clamping"]
    return table(["CAM of", "top-1", *shown.values(), *gain_heads], lines)


def row_or_none(case: Case, variant: Variant, dataset: str) -> Row | None:
    """Return the row, None if the table has no such variant."""
    known = {(row["dataset"], *variant_of(row)) for row in rows_of(case.table)}
    return case.row(variant, dataset) if (dataset, *variant) in known else None


def cells_of(name: str) -> list[Row]:
    """Return the cells in which a network is compared with the paper."""
    held = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    cells: list[Row] = held["agreement"]
    return cells


def agreement() -> str:
    """Return how many cells have the paper's direction, by network, classifier and table."""
    groups = dict[str, list[Row]]()
    for name, title in PAPER_NETWORKS.items():
        for cell in cells_of(name):
            kind = "Table 1" if ":branch" in cell["metric"] else "Table 2"
            groups.setdefault(f"{title}, {cell['classifier']}, {kind}", []).append(cell)
    groups["all"] = [cell for cells in groups.values() for cell in cells]
    lines = list[list[str]]()
    for name, cells in groups.items():
        certain = [cell for cell in cells if cell["certain"]]
        scored = [cell for cell in cells if cell["same_scorer"]]
        same = sum((cell["paper"][1] - cell["paper"][0]) * cell["same_scorer"][0] > 0 for cell in scored)
        lines.append(
            [
                name,
                f"{sum(cell['agrees'] for cell in cells)} of {len(cells)}",
                f"{sum(cell['agrees'] for cell in certain)} of {len(certain)}",
                f"{same} of {len(scored)}" if scored else "-",
            ]
        )
    return table(["cells", "the paper's direction", "where ours is certain", "by one scorer"], lines)


def cells() -> str:
    """Return every number that the paper and we have of both sides of its comparison."""
    titles = {"cub": "CUB", "cars": "Cars", "ilsvrc": "ImageNet"}
    words = {
        "average_drop:branch": "average drop",
        "increase_in_confidence:branch": "increase",
        "max_box_acc_v2": "MaxBoxAccV2",
        "gt_known_loc_first": "GT-known",
        "top1_loc_first": "Top-1 loc.",
    }
    lines = list[list[str]]()
    for name, title in PAPER_NETWORKS.items():
        for cell in cells_of(name):
            place = f"{title}, {cell['classifier']}: {titles[cell['dataset']]}, {cell['method']}"
            paper, here = cell["paper"], cell["difference"]
            sign = "yes" if cell["agrees"] else "**no**"
            lines.append(
                [
                    f"{place}, {words[cell['metric']]}",
                    f"{paper[1] - paper[0]:+.1f}",
                    between(here),
                    between(cell["same_scorer"]) if cell["same_scorer"] else "-",
                    sign if cell["certain"] else f"{sign}, uncertain",
                ]
            )
    head = ["cell", "the paper's difference", "ours, scored as in the paper", "ours, one scorer"]
    return table([*head, "agrees"], lines)


def paper_weights() -> str:
    """Return what the positive weight does when the branch is solved for and by the paper's recipe."""
    lines = list[list[str]]()
    for name, title in PAPER_NETWORKS.items():
        rows = [row for row in rows_of(name) if "pos_weight" in row and row["method"] == "cam"]
        for dataset, fit in dict.fromkeys((row["dataset"], row.get("fit")) for row in rows):
            held = [row for row in rows if (row["dataset"], row.get("fit")) == (dataset, fit)]
            by_weight = dict[int, dict[bool, float]]()
            for row in held:
                by_weight.setdefault(row["pos_weight"], {})[row["clamp"]] = row["max_box_acc_v2"]
            texts = [f"{both[False]:.1f} / {both[True]:.1f}" for both in by_weight.values()]
            lines.append([f"{title}, {DATASETS[dataset]}, {fit or 'solved'}", *texts])
    return table(["signed / clamped", "1", "half of C - 1", "C - 1"], lines)


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


def trainers() -> str:
    """Return the localisation of each trainer's network, and the difference from plain training."""
    variants = (("softmax", False), ("softmax", True), PAPER_METHOD)
    lines = list[list[str]]()
    names = dict.fromkeys((row["classifier"], row["method"]) for row in rows_of("trainers"))
    for name, method in names:
        rows = [find_row("trainers", each, classifier=name, method=method) for each in variants]
        cells = [f"{rows[0]['top1_cls']:.1f}"]
        for row in rows:
            beside = row["versus"].get("max_box_acc_v2")
            cells.append(
                f"{row['max_box_acc_v2']:.1f}" + (f"; {between(beside['difference'])}" if beside else "")
            )
        lines.append([f"{name}, {method}", *cells])
    return table(["trained by, map", "top-1", *(PAPER_ROWS[each] for each in variants)], lines)


def shift() -> str:
    """Return the logit shift of each classifier, and what centring gains."""
    lines = list[list[str]]()
    for case, dataset in (
        (case, dataset) for dataset in DATASETS for case in CASES if dataset in case.datasets
    ):
        name, row = case.name, case.row(("centred", False), dataset)
        lines.append(
            [
                f"{DATASETS[dataset]}: {name}",
                f"{row['shift']:.1f} %",
                between(row["delta"][metric_of(dataset)]),
            ]
        )
    return table(["classifier", "mean row, of a row's length", "centring gives"], lines)


SYSTEM_VARIANTS: tuple[Variant, ...] = (
    ("softmax", False),
    ("softmax", True),
    PAPER_METHOD,
    ("sigmoid + background", True),
)
SYSTEM_DATASETS = ("cub", "cars", "pets")
Held = dict[str, dict[str, dict[Variant, Row]]]


def systems_of(name: str) -> Held:
    """Return the rows of every method, by data set and variant; a method for any head has one variant."""
    held: Held = {}
    for row in rows_of(name):
        held.setdefault(row["method"], {}).setdefault(row["dataset"], {})[variant_of(row)] = row
    return held


def systems(name: str, metric: str = "") -> str:
    """Return a number of every method on each head, and the difference of the paper's branch from the softmax
    head as published; localisation by default."""
    lines = list[list[str]]()
    for method, by_dataset in systems_of(name).items():
        line = [method]
        for dataset in SYSTEM_DATASETS:
            number, variants = metric or metric_of(dataset), by_dataset.get(dataset, {})
            line += ["-", "-"] if not variants else [_four(variants, number), _gain(variants, number)]
        lines.append(line)
    return table(
        ["map", *(h for d in SYSTEM_DATASETS for h in (DATASETS[d].split()[0], "branch gives"))], lines
    )


def _four(variants: dict[Variant, Row], number: str) -> str:
    """Return softmax / clamped / branch / with background; a dash where clamping changes nothing."""
    if ("any head", False) in variants:
        return f"{variants['any head', False][number]:.1f}"
    return " / ".join(f"{variants[v][number]:.1f}" if v in variants else "-" for v in SYSTEM_VARIANTS)


def _gain(variants: dict[Variant, Row], number: str) -> str:
    return between(variants[PAPER_METHOD]["delta"][number]) if PAPER_METHOD in variants else "-"


def systems_cost() -> str:
    """Return the passes for a map of each network, its time in passes, and the images it was measured on."""
    by_network = [systems_of(name) for name in ("systems", "systems-resnet50")]
    lines = list[list[str]]()
    for method in dict.fromkeys(method for held in by_network for method in held):
        line = [method]
        for held in by_network:
            rows = {d: next(iter(v.values())) for d, v in held.get(method, {}).items()}
            if not rows:
                line += ["-"] * 3
                continue
            row = rows["cub"]
            both = row["passes"], row["times_a_pass"]
            passes, time = (f"{count:.1f}" if count < 10 else f"{count:.0f}" for count in both)
            images = " / ".join(str(rows[d]["images"]) if d in rows else "-" for d in SYSTEM_DATASETS)
            line += [f"{passes} ({row['fit']})" if "fit" in row else passes, time, images]
        lines.append(line)
    heads = [f"{n}: {what}" for n in ("Lite0", "ResNet-50") for what in ("passes", "time", "images")]
    return table(["map", *heads], lines)


TABLES: dict[str, Callable[[], str]] = {
    "localisation": localisation,
    "gradients": gradients,
    "differences": differences,
    "background-gain": background_gain,
    "at-half": at_half,
    "presence": presence,
    "ablations": ablations,
    "confidence": confidence,
    "curves": curves,
    "sources": sources,
    "pos-weight": pos_weight,
    "shift": shift,
    "trainers": trainers,
    "claim": claim,
    "agreement": agreement,
    "cells": cells,
    "paper-weights": paper_weights,
    **{name: partial(classifier, name) for name in ("lite2", "stages")},
    "systems-cost": systems_cost,
    **{
        f"{name}{metric and f'-{metric}'}": partial(systems, name, metric and metric.replace("-", "_"))
        for name in ("systems", "systems-resnet50")
        for metric in ("", "insertion", "deletion", "average-drop")
    },
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
