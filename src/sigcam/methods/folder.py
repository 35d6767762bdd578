"""Draw the maps of many images into a folder; an interrupted run continues where it stopped."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from torch import Tensor

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.errors import ConfigError, DataError
from sigcam.core.files import exact_stamp, write_png
from sigcam.core.types import Progress, Skipped
from sigcam.data.loader import load_batches
from sigcam.data.maps import map_names
from sigcam.data.sample import Samples, source_stamp
from sigcam.methods.cost import is_long, passes_reported
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import Explanation, write_map
from sigcam.methods.inputs import Classes, ImageSource
from sigcam.methods.registry import MapConfig
from sigcam.network.dual import DualBranch
from sigcam.network.identity import network_facts

DRAWN_SIDE = 2048  # pixels; a map of a 12-megapixel photograph would take 49 MB


@dataclass(frozen=True)
class ExplainConfig(MapConfig):
    """The settings of `explain` that are the same for all images of a folder; see its arguments."""

    layers: tuple[str, ...] | None = None
    zoom: float = 1.0
    stride: Literal[1] | None = None
    aug_smooth: bool = False

    def checked(self) -> Self:
        """As MapConfig's; ConfigError also if there is nothing to fuse."""
        checked = super().checked()
        checked.check_fusion(self.layers)
        return checked

    def explain(self, net: DualBranch, images: Sequence[ImageSource], classes: Classes = None) -> Explanation:
        """Return the explanation of these images."""
        return explain(net, images, classes=classes, **vars(self))

    def with_best_scale(self, net: DualBranch) -> "ExplainConfig":
        """Return the settings with scale "probability" if the branch and the method have it, else "unit"."""
        try:
            best = replace(self, scale="probability").checked()
            net.calibration.map_scale(self.zoom)
        except ConfigError:
            return replace(self, scale="unit").checked()
        return replace(self, scale="unit").checked() if self.layers or self.stride else best


@dataclass(frozen=True)
class MapFolder:
    """Maps of many images in a folder.

    Args:
        rows: class, scores, box and files of each map, in the order of the samples.
        skipped: images that could not be read.
        checkpoint: holds the rows until the caller, who may have more to write, removes it.
    """

    rows: list[dict[str, Any]]
    skipped: list[Skipped]
    checkpoint: Checkpoint


def explain_samples(
    net: DualBranch,
    samples: Samples,
    output: Path,
    config: ExplainConfig,
    *,
    classes: Sequence[int] | None = None,
    threshold: float | None = None,
    captions: bool = False,
    batch_size: int = 16,
    workers: int = 0,
    progress: Progress | None = None,
) -> MapFolder:
    """Write overlay and map of every readable image; DataError if there is none.

    Where it is known which part of a picture the network sees, all is in the picture's own size and pixels;
    overlays and maps of larger pictures have DRAWN_SIDE pixels on the longer side.

    Args:
        classes: the classes to explain in every image; by default the predicted one.
        threshold: box threshold, as for `Explanation.boxes`.
        captions: write class and scores below the overlays.
    """
    ids = [sample.id for sample in samples]
    classes = None if classes is None else list(dict.fromkeys(classes))
    names = _names(ids, classes or [], net.class_names or ())
    output.mkdir(parents=True, exist_ok=True)
    stamps = {  # before any is read
        sample.id: exact_stamp(sample.path) if sample.path else source_stamp(sample.open)
        for sample in samples
    }
    drawn = [vars(config), classes, threshold, captions]
    facts = {"drawn": drawn, **network_facts(net, net.transform)}
    checkpoint = Checkpoint(output / ".explain.checkpoint", facts)
    lines = dict[str, str]()  # of the checkpoint, by id: as JSON, which is fast to save
    rows = dict[str, list[dict[str, Any]]]()
    for line in (checkpoint.load() or {"images": []})["images"]:
        image = json.loads(line)
        id, left = image["rows"][0]["image"], image["files"]
        if stamps.get(id) == image["stamp"] and left == _files(output, names[id]):
            lines[id], rows[id] = line, image["rows"]
        else:
            for file in left:
                (output / file).unlink(missing_ok=True)
    slow = is_long(config)
    batch_size = 1 if slow else batch_size  # an interrupted run loses one image
    todo = Samples(tuple(sample for sample in samples if sample.id not in rows), samples.classes)
    skipped = list[Skipped]()
    options: Any = {"batch_size": batch_size, "workers": workers, "spawn": net.device.type == "cuda"}
    for batch in load_batches(todo, None, keep_pictures=True, **options):
        skipped += batch.skipped
        if batch.pictures:
            chosen: Any = None if classes is None else [classes] * len(batch.pictures)
            done, count = len(rows) + len(skipped), len(batch.pictures)
            with passes_reported(progress if slow else None, config, done, count, len(samples)):
                ex = config.explain(net, batch.pictures, chosen)
            batch_ids = [todo[i].id for i in batch.indices]
            written: dict[str, list[dict[str, Any]]] = {id: [] for id in batch_ids}
            for k, one in enumerate([ex] if classes is None else map(ex.select, range(len(classes)))):
                cut = one.default_threshold if threshold is None else threshold
                parts = zip(batch_ids, one.rows(), one.picture_boxes(cut), strict=True)
                for i, (id, row, boxes) in enumerate(parts):
                    files = _write(one, i, boxes, output / names[id][k], captions)
                    found = {"box": boxes[0].tolist(), "threshold": cut}
                    written[id].append({"image": id, **row, **found, **files})
            for id, rows[id] in written.items():
                kept = {"rows": rows[id], "stamp": stamps[id], "files": _files(output, names[id])}
                lines[id] = json.dumps(kept)
            checkpoint.save({"images": list(lines.values())})
        if progress and rows:
            stage, each = ("passes", config.passes) if slow else ("maps", 1)
            progress(stage, each * (len(rows) + len(skipped)), each * len(samples))
    if not rows:
        raise DataError(f"none of the {len(samples)} images could be read; the first: {skipped[0][1]}")
    return MapFolder([row for id in ids for row in rows.get(id, ())], skipped, checkpoint)


def _write(ex: Explanation, i: int, boxes: Tensor, path: Path, captions: bool) -> dict[str, Any]:
    """Write overlay and map of image i; return their names, and the size and the part of the image that box
    and map are of."""
    overlay, file = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.npy")
    _, values = ex.on_picture(i, ex.maps[i], DRAWN_SIDE)
    drawn = ex.draw(i, boxes=boxes, captions=captions, legend=captions, most=DRAWN_SIDE)
    write_png(overlay, drawn)
    write_map(file, values)
    size = ex.pictures[i].size if ex.pictures else (values.shape[1], values.shape[0])
    seen = ex.regions[i] if ex.regions else (0, 0, *size)
    return {"size": list(size), "seen": list(seen), "overlay": overlay.name, "map": file.name}


def _names(ids: Sequence[str], classes: Sequence[int], class_names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of each image's files without extension: one or, of several classes, one for each."""
    if len(classes) < 2:
        return {id: [name] for id, name in zip(ids, map_names(ids), strict=True)}
    labels = [class_names[k] if 0 <= k < len(class_names) else "" for k in classes]
    words = [
        "-".join(re.findall(r"\w+", label))[:60] or str(k) for k, label in zip(classes, labels, strict=True)
    ]
    paths = [(PurePosixPath(id), word) for id in ids for word in words]
    named = map_names(path.with_name(f"{path.stem}.{word}{path.suffix}").as_posix() for path, word in paths)
    return {id: named[i * len(words) : (i + 1) * len(words)] for i, id in enumerate(ids)}


def _files(output: Path, names: Sequence[str]) -> dict[str, int]:
    """Return the names of an image's files, with their sizes; -1 if there is none."""
    paths = [output / f"{name}.{kind}" for name in names for kind in ("png", "npy")]
    return {path.name: path.stat().st_size if path.is_file() else -1 for path in paths}
