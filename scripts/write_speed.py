"""Write the tables of speed in docs and in the README from benchmarks/results.

A page holds a table between `<!-- speed: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("speed", "export", "serving")))
TABLE = re.compile(r"<!-- speed: ([\w-]+) -->\n.*?<!-- end -->", re.S)
NAMES = {
    "resnet50": "ResNet-50",
    "vgg16": "VGG-16",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "vit_b_16": "ViT-B/16",
    "swin_t": "Swin-T",
    "embedded": "EfficientNet-Lite0",
    "mobilenetv3": "MobileNetV3",
    "convnext_tiny": "ConvNeXt-tiny",
    "vgg16-cam": "VGG-16, CAM form",
}
GRAD_CAM = "grad-cam"
PEERS = ("torch-cam", "captum", "pytorch-grad-cam")
Row = dict[str, Any]


def read(name: str) -> Any:
    """Return a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def measured(field: str) -> dict[tuple[str, int, str, str], Any]:
    """Return a number of each call of maps.json by model, batch, method and library."""
    rows = read("maps")["rows"]
    return {(row["model"], row["batch"], row["method"], row["who"]): row[field] for row in rows}


def shown(value: float | None, form: str = ".2f") -> str:
    """Return a number as text; a dash for none."""
    return "-" if value is None else format(value, form)


def grad_cam(batches: Sequence[int], batch_column: bool, softmax: bool) -> str:
    """Return the time of Grad-CAM by model and library, as a multiple of a plain pass."""
    ratios = measured("ratio_to_forward")
    ours = ("sigcam", *(["sigcam, softmax branch"] if softmax else []), "sigcam, optimize=True")
    titles = ("sigcam", *(["softmax branch"] if softmax else []), "`optimize=True`")
    rows = [
        [
            *([str(batch)] if batch_column else []),
            NAMES[model],
            *(shown(ratios.get((model, batch, GRAD_CAM, who))) for who in (*ours, *PEERS)),
        ]
        for batch in batches
        for model in ("resnet50", "vgg16", "efficientnet_lite0", "vit_b_16")
    ]
    return markdown([*(["batch"] if batch_column else []), "model", *titles, *PEERS], rows)


def others() -> str:
    """Return the time of the other gradient methods at batch 8."""
    ratios = measured("ratio_to_forward")
    models = ("resnet50", "vgg16", "efficientnet_lite0", "vit_b_16")
    methods = [key[2] for key in ratios if key[:2] == ("resnet50", 8) and key[3] == "pytorch-grad-cam"]
    rows = [
        [
            f"`{method}`",
            *(
                " / ".join(
                    shown(ratios.get((model, 8, method, who)))
                    for who in ("sigcam", "torch-cam", "pytorch-grad-cam")
                )
                for model in models
            ),
        ]
        for method in methods
        if method != GRAD_CAM
    ]
    return markdown(["batch 8", *(NAMES[model] for model in models)], rows)


def perturbation() -> str:
    """Return the time of the methods that change features or images."""
    times, rows = measured("ms_per_image"), []
    for model in ("resnet50", "efficientnet_lite0"):
        for method in ("ablation-cam", "score-cam"):
            ours, theirs = (times[model, 1, method, who] / 1000 for who in ("sigcam", "pytorch-grad-cam"))
            seconds = f"{ours:.2f} s", f"{theirs:.1f} s"
            rows.append([f"{NAMES[model]}, `{method}`", *seconds, f"{ours / theirs:.4f}"])
    return markdown(["one image", "sigcam", "pytorch-grad-cam", "ratio"], rows)


def memory() -> str:
    """Return the peak memory of Grad-CAM."""
    peaks = measured("peak_mb")
    calls = [(GRAD_CAM, who) for who in ("sigcam", *PEERS)] + [("forward", "plain")]
    rows = [
        [NAMES[model], *(shown(peaks.get((model, 8, *call)), ".0f") for call in calls)]
        for model in ("resnet50", "vgg16", "efficientnet_lite0", "vit_b_16")
    ]
    return markdown(["batch 8, peak MB above the process", "sigcam", *PEERS, "plain forward"], rows)


def budgets() -> str:
    """Return every budget of every benchmark."""
    found = [(v["what"], v["ratio"], v["budget"], False) for v in read("maps")["budgets"]]
    for name in ("metrics", "evaluate"):
        budget = read(name)["budget"]
        found.append((budget["what"], budget["ratio"], budget["at_most"], False))
    for verdict in read("fit")["verdicts"]:
        limit = verdict.get("at_most", verdict.get("at_least"))
        found.append((verdict["what"], verdict["ratio"], limit, "at_least" in verdict))
    found += [
        (f"{NAMES[row['model']]}: {row['what']}", row["ratio"], row["budget"], False)
        for row in read("start")["rows"]
        if row["budget"] is not None
    ]
    found += [
        (f"{NAMES[row['model']]}, batch {row['batch']}: exported / bare", row["file_to_bare"], 1.05, False)
        for row in read("export")["speed"]
    ]
    rows = []
    for what, ratio, limit, least in found:
        kept = ratio >= limit if least else ratio <= limit
        bound = f"at least {limit:g}" if least else f"at most {limit:g}"
        number = f"{ratio:.4f}" if ratio < 0.05 else f"{ratio:.3f}"
        rows.append([what, number, bound, "yes" if kept else "**no**"])
    return markdown(["ratio", "measured", "budget", "kept"], rows)


def export_speed() -> str:
    """Return the time of exported files beside that of the bare classifier and of `explain`."""
    rows = []
    for row in read("export")["speed"]:
        times = (f"{row['milliseconds'][key]:.1f}" for key in ("file", "bare", "explain"))
        ratios = f"{row['file_to_bare']:.2f}", f"{row['file_to_explain']:.2f}"
        rows.append([NAMES[row["model"]], str(row["batch"]), *times, *ratios])
    header = ["model", "batch", "file, ms", "bare, ms", "`explain`, ms", "file / bare", "file / explain"]
    return markdown(header, rows)


def export_parity() -> str:
    """Return how far exported files are from PyTorch."""
    keys = ("logits", "branch_logits", "evidence", "maps")
    rows = [
        [NAMES[row["model"]], *(f"{row['differences'][key]:.0e}" for key in keys)]
        for row in read("export")["parity"]
    ]
    return markdown(["model", *(f"`{key}`" for key in keys)], rows)


def serving() -> str:
    """Return what the load test of the server found."""
    found = read("serving")
    memory = found["megabytes"]
    rows = [
        ["requests in 2 minutes by 16 clients; errors", f"{found['requests']}; {len(found['errors'])}"],
        ["pictures per batch", f"{found['pictures_per_batch']:.1f}"],
        ["p50 and p99, as multiples of a bare forward of one picture",
         f"{found['p50_ratio']:.1f} and {found['p99_ratio']:.1f}"],
        ["pictures per second, as a share of a bare forward's", f"{found['throughput_ratio']:.2f}"],
        ["memory after a tenth, at half, at the end", " / ".join(f"{value} MB" for value in memory.values())],
        ["clients sent away by SIGTERM without losing a request", str(found["sent_away"])],
    ]  # fmt: skip
    return markdown(["", "measured"], rows)


def start() -> str:
    """Return what comes before the first map."""
    rows = [
        [NAMES[row["model"]], row["what"], f"{row['seconds']:.2f} s", f"{row['ratio']:.2f}"]
        for row in read("start")["rows"]
    ]
    return markdown(["model", "what", "seconds", "ratio"], rows)


def steps() -> str:
    """Return what each step of `optimize=True` gains."""
    rows = read("optimize")["rows"]
    ratios = {(row["model"], row["what"]): row for row in rows}
    steps = dict.fromkeys(row["what"] for row in rows)
    lines = [
        [
            step,
            *(shown(ratios[model, step]["ratio"]) for model in ("resnet50", "vgg16")),
            shown(ratios["resnet50", step]["seconds_to_make"], ".1f"),
        ]
        for step in steps
    ]
    return markdown(["", "ResNet-50", "VGG-16", "setup in seconds (ResNet-50)"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "readme": partial(grad_cam, (8,), False, False),
    "grad-cam": partial(grad_cam, (8, 1), True, True),
    "others": others,
    "perturbation": perturbation,
    "memory": memory,
    "budgets": budgets,
    "export": export_speed,
    "parity": export_parity,
    "serving": serving,
    "start": start,
    "steps": steps,
}


def filled(page: str) -> str:
    """Return the text of a page with its tables as they are measured now."""
    marked = "<!-- speed: {0} -->\n\n{1}\n\n<!-- end -->"
    return TABLE.sub(lambda found: marked.format(found[1], TABLES[found[1]]()), page)


def main() -> None:
    """Write the tables."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
