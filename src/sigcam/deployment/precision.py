"""Smaller files: the precisions there are, and what a smaller file changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sigcam.core.errors import DataError, MissingExtra
from sigcam.core.types import GridSize, ImageSize
from sigcam.data.loader import load_batches
from sigcam.data.sample import Sample, Samples, match_classes
from sigcam.evaluation.registry import boxes_for
from sigcam.methods.postprocess import finish_maps
from sigcam.metrics import MaxBoxAccV2
from sigcam.models.preprocess import Preprocess
from sigcam.network.dual import DualBranch

FilePrecision = Literal["float32", "float16"]
Input = NDArray[Any]


def inputs_of(net: DualBranch, samples: Samples, preprocess: bool) -> Iterator[tuple[Sample, Input]]:
    """Yield each readable sample and its picture as a file takes it, a batch of one."""
    for batch in load_batches(samples, None, batch_size=8, keep_pictures=True):
        for index, picture in zip(batch.indices, batch.pictures, strict=True):
            image = np.asarray(picture) if preprocess else net.transform(picture).numpy()  # type: ignore[misc]
            yield samples[index], image[None]


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra("measuring an exported file", "onnxruntime", "export") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def compare_files(
    net: DualBranch, exact: Path, small: Path, samples: Samples, *, preprocess: bool = True
) -> dict[str, Any]:
    """Return what a smaller file changes on the samples, in percent; pairs are of the exact file, then the
    small one.

    "same_class" are images with the same most probable class. "top1" needs labels.
    "max_box_acc_v2", of the maps of the predicted class, needs boxes, a preprocessing that does not crop, and
    files that draw the most probable classes.
    """
    samples = match_classes(samples, net.classes, net.class_names)
    sessions = [_session(each) for each in (exact, small)]
    drawn = sessions[0].get_modelmeta().custom_metadata_map
    height, width = net.input_shape[1:]
    t = net.transform
    whole = isinstance(t, Preprocess) and t.resize in (None, (height, width))  # boxes fit, nothing is cut
    boxed = whole and drawn["classes"] == "null" and all(sample.boxes for sample in samples)
    accuracies: list[Any] = [MaxBoxAccV2(), MaxBoxAccV2()]
    predicted, known = list[list[int]](), list[int]()
    for sample, image in inputs_of(net, samples, preprocess):
        outs = [session.run(["probability", "maps"], {"image": image}) for session in sessions]
        predicted.append([int(probability.argmax()) for probability, _ in outs])
        known.append(-1 if sample.label is None else sample.label)
        if not boxed:
            continue
        size = ImageSize(image.shape[2], image.shape[1]) if preprocess else None
        truth = [boxes_for(sample, size, width, height)]
        for accuracy, (_, maps) in zip(accuracies, outs, strict=True):
            cells = torch.from_numpy(maps)[:, :1]
            accuracy.update(finish_maps(cells, "grad-cam", GridSize(height, width), "unit")[:, 0], truth)
    if not predicted:
        raise DataError("none of the images to measure on could be read.")
    both, labels = torch.tensor(predicted), torch.tensor(known)
    result: dict[str, Any] = {"images": len(both)}
    result["same_class"] = 100 * float((both[:, 0] == both[:, 1]).double().mean())
    if (labels >= 0).all():
        result["top1"] = (100 * (both == labels[:, None]).double().mean(0)).tolist()
    if boxed:
        result["max_box_acc_v2"] = [float(each.compute()["max_box_acc_v2"]) for each in accuracies]
    return result
