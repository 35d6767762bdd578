"""Smaller files: the precisions there are, and what a smaller file changes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sigcam.core.errors import ConfigError, DataError, MissingExtra
from sigcam.core.types import GridSize, ImageSize
from sigcam.data.loader import load_batches
from sigcam.data.sample import Sample, Samples, match_classes
from sigcam.evaluation.registry import boxes_for
from sigcam.methods.postprocess import finish_maps
from sigcam.metrics import MaxBoxAccV2
from sigcam.models.preprocess import Preprocess
from sigcam.network.dual import DualBranch

FilePrecision = Literal["float32", "float16", "int8"]
CALIBRATION_IMAGES = 100
LAYERS, FOLLOWING = ("Conv", "Gemm", "MatMul"), ("Relu", "Clip")  # kinds of ONNX nodes
Input = NDArray[Any]


def inputs_of(net: DualBranch, samples: Samples, preprocess: bool) -> Iterator[tuple[Sample, Input]]:
    """Yield each readable sample and its picture as a file takes it, a batch of one."""
    for batch in load_batches(samples, None, batch_size=8, keep_pictures=True):
        for index, picture in zip(batch.indices, batch.pictures, strict=True):
            image = np.asarray(picture) if preprocess else net.transform(picture).numpy()  # type: ignore[misc]
            yield samples[index], image[None]


def calibration_inputs(net: DualBranch, samples: Samples, preprocess: bool) -> Iterator[Input]:
    """Yield the inputs of at most 100 samples, taken evenly from all."""
    if not len(samples):
        raise DataError("there are no images to calibrate on.")
    chosen = samples[:: -(-len(samples) // CALIBRATION_IMAGES)]
    return (image for _, image in inputs_of(net, chosen, preprocess))


def quantized(data: bytes, inputs: Iterable[Input]) -> bytes:
    """Return an ONNX file whose layers compute in 8-bit integers, with the ranges that the inputs have.

    Preprocessing, maps, boxes and layers whose weights the maps share stay as they are.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    model = onnx.load_from_string(data)
    nodes = _layers(model.graph)
    if not nodes:
        raise ConfigError("this network has no layer that 8-bit integers could compute: export as float16.")
    ranges = _ranges(model, {name for each in nodes for name in (each.input[0], each.output[0])}, inputs)
    typed = {each.name for each in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
    for name in ranges.keys() - typed:
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        model.graph.value_info.append(info)
    quantizer = QDQQuantizer(
        model,
        per_channel=True,
        reduce_range=True,  # products of 8 bits overflow in processors without VNNI
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=TensorsData(CalibrationMethod.MinMax, ranges),
        nodes_to_quantize=[each.name for each in nodes],
        nodes_to_exclude=[],
        op_types_to_quantize=[*LAYERS, *FOLLOWING],
        extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},  # logits stay exact
    )
    quantizer.quantize_model()
    return bytes(quantizer.model.model.SerializeToString())


def _layers(graph: Any) -> list[Any]:
    """The nodes that logits depend on with weights of their own, and the activations that follow them."""
    from onnx import TensorProto

    makers = {name: node for node in graph.node for name in node.output}
    needed, unseen = set[str](), ["logits", "branch_logits"]
    while unseen:
        node = makers.get(unseen.pop())
        if node is not None and node.name not in needed:
            needed.add(node.name)
            unseen += node.input
    weights = {each.name for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    reads = _reads(graph)
    layers = [
        node
        for node in graph.node
        if node.name in needed
        and node.op_type in LAYERS
        and node.input[1] in weights
        and reads[node.input[1]] == 1
    ]
    made = {node.output[0] for node in layers}
    return layers + [n for n in graph.node if n.op_type in FOLLOWING and n.input[0] in made]


def _reads(graph: Any) -> Counter[str]:
    """How often each tensor is read, in loops too."""
    reads = Counter(name for node in graph.node for name in node.input)
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.HasField("g"):
            reads += _reads(attribute.g)
    return reads


def _ranges(model: Any, names: set[str], inputs: Iterable[Input]) -> dict[str, tuple[Any, Any]]:
    """The lowest and highest value of each tensor over the inputs."""
    import onnx

    watched = copy.deepcopy(model)
    inner = sorted(names - {"image"})
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    session = _session(watched.SerializeToString())
    found = dict[str, tuple[Any, Any]]()
    for image in inputs:
        values = dict(zip(inner, session.run(None, {"image": image}), strict=True))
        for name in names:
            value = values.get(name, image)
            low, high = found.get(name, (value.min(), value.max()))
            found[name] = min(low, value.min()), max(high, value.max())
    if not found:
        raise DataError("none of the images to calibrate on could be read.")
    return {name: (np.array(low), np.array(high)) for name, (low, high) in found.items()}


def check_onnxruntime(work: str) -> None:
    """Raise MissingExtra without onnxruntime, for the work that needs it."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise MissingExtra(work, "onnxruntime", "export") from error


def _session(source: Path | bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


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
