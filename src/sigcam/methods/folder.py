"""Draw the maps of many images into a folder; an interrupted run continues where it stopped."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sigcam.core.checkpoint import Checkpoint
from sigcam.core.errors import DataError
from sigcam.core.files import exact_stamp
from sigcam.core.types import Progress, Skipped
from sigcam.data.loader import load_batches
from sigcam.data.maps import map_names
from sigcam.data.sample import Samples, source_stamp
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import Explanation
from sigcam.methods.inputs import Classes, ImageSource
from sigcam.methods.registry import MapConfig
from sigcam.network.dual import DualBranch
from sigcam.network.identity import network_facts


@dataclass(frozen=True)
class ExplainConfig(MapConfig):
    """The settings of `explain` that are the same for all images of a folder; see its arguments."""

    layers: tuple[str, ...] | None = None
    zoom: float = 1.0
    stride: Literal[1] | None = None
    aug_smooth: bool = False

    def explain(self, net: DualBranch, images: Sequence[ImageSource], classes: Classes = None) -> Explanation:
        """Return the explanation of these images."""
        return explain(net, images, classes=classes, **vars(self))


@dataclass(frozen=True)
class MapFolder:
    """Maps of many images in a folder.

    Args:
        rows: class, scores and box of each image, in the order of the samples.
        maps: the .npy file of each image's map, by id.
        skipped: images that could not be read.
        checkpoint: holds the rows until the caller, who may have more to write, removes it.
    """

    rows: list[dict[str, Any]]
    maps: dict[str, Path]
    skipped: list[Skipped]
    checkpoint: Checkpoint


def explain_samples(
    net: DualBranch,
    samples: Samples,
    output: Path,
    config: ExplainConfig,
    *,
    classes: int | None = None,
    threshold: float | None = None,
    captions: bool = False,
    batch_size: int = 16,
    workers: int = 0,
    progress: Progress | None = None,
) -> MapFolder:
    """Write overlay and map of every readable image; DataError if there is none.

    Args:
        classes: the class to explain in every image; by default the predicted one.
        threshold: box threshold, as for `Explanation.boxes`.
        captions: write class and scores below the overlays.
    """
    ids = [sample.id for sample in samples]
    names = dict(zip(ids, map_names(ids), strict=True))
    stamps = {  # before any is read
        sample.id: exact_stamp(sample.path) if sample.path else source_stamp(sample.open)
        for sample in samples
    }
    drawn = [vars(config), classes, threshold, captions]
    facts = {"drawn": drawn, **network_facts(net, net.transform)}
    checkpoint = Checkpoint(output / ".explain.checkpoint", facts)
    lines = dict[str, str]()  # of the checkpoint, by id: as JSON, which is fast to save
    rows = dict[str, dict[str, Any]]()
    for line in (checkpoint.load() or {"images": []})["images"]:
        image = json.loads(line)
        id, written = image["row"]["image"], image["files"]
        if stamps.get(id) == image["stamp"] and written == _files(output, names[id]):
            lines[id], rows[id] = line, image["row"]
        else:
            for file in written:
                (output / file).unlink(missing_ok=True)
    todo = Samples(tuple(sample for sample in samples if sample.id not in rows), samples.classes)
    skipped = list[Skipped]()
    options: Any = {"batch_size": batch_size, "workers": workers, "spawn": net.device.type == "cuda"}
    for batch in load_batches(todo, None, keep_pictures=True, **options):
        skipped += batch.skipped
        if batch.pictures:
            ex = config.explain(net, batch.pictures, classes)
            batch_ids = [todo[i].id for i in batch.indices]
            drawn_names = [names[id] for id in batch_ids]
            cut = ex.default_threshold if threshold is None else threshold
            ex.save(output, drawn_names, threshold=cut, captions=captions, scores=False)
            for id, row, boxes in zip(batch_ids, ex.rows(), ex.boxes(threshold), strict=True):
                rows[id] = {"image": id, **row, "box": boxes[0].tolist(), "threshold": cut}
                kept = {"row": rows[id], "stamp": stamps[id], "files": _files(output, names[id])}
                lines[id] = json.dumps(kept)
            checkpoint.save({"images": list(lines.values())})
        if progress and rows:
            progress("maps", len(rows) + len(skipped), len(samples))
    if not rows:
        raise DataError(f"none of the {len(samples)} images could be read; the first: {skipped[0][1]}")
    maps = {id: output / f"{names[id]}.npy" for id in rows}
    return MapFolder([rows[id] for id in ids if id in rows], maps, skipped, checkpoint)


def _files(output: Path, name: str) -> dict[str, int]:
    """Return the names of an image's two files, with their sizes; -1 if there is none."""
    paths = [output / f"{name}.png", output / f"{name}.npy"]
    return {path.name: path.stat().st_size if path.is_file() else -1 for path in paths}
