"""What `sigcam explain` does: open pictures and a network, draw maps batch by batch, go on after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from PIL import Image

from sigcam.cli.console import progress_bar, show_maps, show_skips
from sigcam.core.errors import DataError
from sigcam.core.files import check_writable, write_text_atomic
from sigcam.core.manifest import write_manifest
from sigcam.data.fingerprint import data_fingerprint
from sigcam.data.images import images_from_paths as open_pictures
from sigcam.data.maps import map_names
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Sample, Samples
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import Explanation
from sigcam.methods.map_config import MapConfig
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch
from sigcam.network.opening import find_branch_file, open_network
from sigcam.reports.explain_report import explain_page
from sigcam.reports.html import require_report_extra

Row = dict[str, Any]


@dataclass(frozen=True)
class ExplainOptions:
    """The command's options."""

    images_from_paths: Sequence[Path]
    data: str
    format: str | None
    model: str
    weights: Path | None
    branch: str
    method: str
    target: str
    layers: str | None
    zoom: float
    stride: int | None
    aug_smooth: bool
    top_n: int | None
    classes: str | None
    scale: str
    clamp: bool | None
    threshold: float
    output: Path
    batch_size: int
    workers: int
    device: str
    head: str | None
    layer: str | None
    crop: bool
    captions: bool
    report: bool


def draw_pictures(options: ExplainOptions, as_json: bool) -> None:
    """Writes overlay, map and scores of every picture that can be read; prints the scores."""
    o: Any = options
    if o.report:
        require_report_extra()
    if not o.pictures and not o.data:
        raise DataError("no pictures: give image files or a folder, e.g. `sigcam explain photo.jpg`.")
    fitted = o.branch not in ("softmax", "centred")
    source: Any = "sigmoid" if fitted else o.branch
    MapConfig(o.method, source, o.clamp, o.target, o.scale, top_n=o.top_n).checked()
    samples = open_pictures(o.pictures) if o.pictures else open_dataset(o.data, format=o.format, split="test")
    if fitted:
        find_branch_file(o.branch, o.model, o.weights)
        if o.head or o.layer:
            raise DataError("--head and --layer are part of a fitted branch: leave them out, or refit.")
    check_writable(o.output)
    place = {"head": o.head, "layer": o.layer, "crop": o.crop, "device": o.device}
    opened = open_network(o.model, o.weights, o.branch, **place)
    net, classifier = opened.net, opened.classifier
    journal = Journal.open(o.output, net, samples, options)
    rows, skipped = _drawn(net, samples, options, source, journal)
    if not rows:
        journal.path.unlink()
        with suppress(OSError):  # others' files are in it
            o.output.rmdir()
        raise DataError(f"none of the {len(samples)} pictures could be read; the first: {skipped[0][1]}")
    write_text_atomic(o.output / "explanation.json", json.dumps(rows, indent=1))
    if o.report:
        write_text_atomic(o.output / "report.html", _report(net, samples, options, source, rows, skipped))
    write_manifest(
        o.output,
        model=classifier.name,
        model_fingerprint=fingerprint(net.original),
        data_fingerprint=data_fingerprint(samples),
        **{name: getattr(o, name) for name in ("branch", "method", "target", "layers", "zoom", "stride")},
        aug_smooth=o.aug_smooth,
        skipped=skipped,
        numbers=rows,
    )
    journal.path.unlink(missing_ok=True)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show_maps(rows, fitted)
    show_skips(skipped)
    written = "explanation.json and report.html" if o.report else "explanation.json"
    typer.echo(f"{len(rows)} overlay(s), maps and {written} are in {o.output}")


def _report(
    net: DualBranch,
    samples: Samples,
    options: ExplainOptions,
    branch: Any,
    rows: Sequence[Row],
    skipped: Sequence[tuple[str, str]],
) -> str:
    """The page; where a fitted branch was drawn from, beside the maps of the softmax head."""
    names = zip(samples, map_names(sample.id for sample in samples), strict=True)
    maps = {sample.id: options.output / f"{name}.npy" for sample, name in names}

    def redraw(images_from_paths: list[Image.Image], classes: list[int]) -> Explanation:
        return _explained(net, images_from_paths, options, "softmax", classes, None)

    with progress_bar() as progress:
        other = redraw if branch == "sigmoid" else None
        return explain_page(rows, maps, samples, net, redraw=other, skipped=skipped, progress=progress)


def _explained(
    net: DualBranch,
    images_from_paths: list[Image.Image],
    options: ExplainOptions,
    branch: Any,
    classes: Any,
    clamp: bool | None,
) -> Explanation:
    """Maps as the options ask for them."""
    o: Any = options
    return explain(
        net,
        images_from_paths,
        o.method,
        branch=branch,
        clamp=clamp,
        classes=classes,
        target=o.target,
        scale=o.scale,
        layers=o.layers.split(",") if o.layers else None,
        zoom=o.zoom,
        stride=o.stride,
        aug_smooth=o.aug_smooth,
        top_n=o.top_n,
    )


@dataclass(frozen=True)
class Journal:
    """Rows of pictures that are done, in the output folder while there are others to do."""

    path: Path
    done: dict[str, Row]

    @staticmethod
    def open(output: Path, net: DualBranch, samples: Samples, options: ExplainOptions) -> Journal:
        """What an interrupted run of the very same command left; else an empty one."""
        asked = asdict(options) | {"batch_size": 0, "workers": 0, "device": "", "report": False}
        facts = (asked, fingerprint(net.original), fingerprint(net.sigmoid), data_fingerprint(samples))
        key = hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=16).hexdigest()
        path, done = output / ".explain.jsonl", dict[str, Row]()
        lines = path.read_text().splitlines() if path.is_file() else []
        if lines[:1] == [key]:
            for line in lines[1:]:
                try:
                    row = json.loads(line)
                except ValueError:  # cut off by a kill
                    break
                done[row["image"]] = row
        output.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{text}\n" for text in (key, *map(json.dumps, done.values()))))
        return Journal(path, done)

    def add(self, rows: Sequence[Row]) -> None:
        """Notes pictures whose files are written."""
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)


def _drawn(
    net: DualBranch, samples: Samples, options: ExplainOptions, branch: Any, journal: Journal
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows of all pictures in their order, and (id, reason) of those that cannot be read."""
    o: Any = options
    index, names = _class_index(o.classes, net), map_names(sample.id for sample in samples)
    found = dict(journal.done)
    todo = [i for i, sample in enumerate(samples) if sample.id not in found]
    skipped, done = list[tuple[str, str]](), len(samples) - len(todo)
    with progress_bar() as progress, ThreadPoolExecutor(max(o.workers, 1)) as pool:
        for part in (todo[i : i + o.batch_size] for i in range(0, len(todo), o.batch_size)):
            opened = list(pool.map(_opened, [samples[i] for i in part]))
            skipped += [
                (samples[i].id, why) for i, why in zip(part, opened, strict=True) if isinstance(why, str)
            ]
            good = [(i, p) for i, p in zip(part, opened, strict=True) if not isinstance(p, str)]
            if good:
                ex = _explained(net, [picture for _, picture in good], options, branch, index, o.clamp)
                boxes = [{"box": box[0].tolist(), "threshold": o.threshold} for box in ex.boxes(o.threshold)]
                made = [
                    {"image": samples[i].id, **row, **box}
                    for (i, _), row, box in zip(good, ex.rows(), boxes, strict=True)
                ]
                written = [names[i] for i, _ in good]
                ex.save(o.output, written, threshold=o.threshold, captions=o.captions, scores=False)
                journal.add(made)
                found.update({row["image"]: row for row in made})
            done += len(part)
            if found:
                progress("maps", done, len(samples))
    return [found[sample.id] for sample in samples if sample.id in found], skipped


def _opened(sample: Sample) -> Image.Image | str:
    """The picture, or why there is none."""
    try:
        return sample.open()
    except (DataError, OSError) as error:
        return str(error)


def _class_index(name: str | None, net: DualBranch) -> int | None:
    """The index of the class that --class gives by name or number."""
    names = net.class_names or ()
    if name is None or name in names:
        return None if name is None else names.index(name)
    if name.isdecimal():
        return int(name)
    close = get_close_matches(name, names, n=3)
    raise DataError(f"no class is named {name!r}" + (f": did you mean {', '.join(close)}?" if close else "."))
