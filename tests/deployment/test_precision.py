"""Smaller files compute nearly the same, and what they change is measured."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sigcam
from sigcam.core.errors import ConfigError, DataError
from sigcam.data.readers.shapes import shapes
from sigcam.data.sample import Samples
from sigcam.deployment.graph import OUTPUTS
from sigcam.deployment.precision import compare_files
from sigcam.models.preprocess import Preprocess
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.dual import DualBranch
from support.tiny import Gap, Vgg, attached, untouched

DATA = shapes(6, split="test", size=32)


def network(model: torch.nn.Module) -> DualBranch:
    net = attached(model, transform=Preprocess(16, 16), class_names=DATA.classes)
    net.calibration = BranchCalibration(LogitScale(0.7, 0.2), {1.0: LogitScale(1.3, -0.1)})
    return net


def run(path: Path) -> dict[str, np.ndarray]:
    """The outputs of a file on all pictures."""
    ort = pytest.importorskip("onnxruntime")
    pictures = np.stack([np.asarray(sample.open()) for sample in DATA])
    values = ort.InferenceSession(path).run(None, {"image": pictures})
    return dict(zip(OUTPUTS, values, strict=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A file in float32 and one in float16, of one network, with the maps of all classes."""
    pytest.importorskip("onnxscript")
    folder, net = tmp_path_factory.mktemp("precision"), network(Gap(8, channels=600))
    exact = sigcam.export(net, folder / "exact.onnx", k=8)
    with untouched(net.model):
        small = sigcam.export(net, folder / "small.onnx", k=8, precision="float16")
        whole = sigcam.export(net, folder / "whole.onnx", k=8, precision="int8", calibrate=DATA)
    return SimpleNamespace(net=net, exact=exact, small=small, whole=whole)


def by_class(out: dict[str, np.ndarray]) -> np.ndarray:
    """The maps of all classes, in the order of classes."""
    return np.take_along_axis(out["maps"], out["classes"].argsort(1)[..., None, None], 1)


@pytest.mark.slow
def test_float16_is_smaller_and_nearly_the_same(made):
    onnx = pytest.importorskip("onnx")
    floats, halves = run(made.exact), run(made.small)
    for name in ("logits", "branch_logits", "probability", "evidence"):
        assert halves[name].dtype == np.float32
        assert 0 < np.abs(floats[name] - halves[name]).max() < 1e-2 * np.abs(floats[name]).max()
    assert np.abs(by_class(floats) - by_class(halves)).max() < 1e-2
    models = [onnx.load(path) for path in (made.exact, made.small)]
    about = [{each.key: each.value for each in model.metadata_props} for model in models]
    assert [each["precision"] for each in about] == ["float32", "float16"]
    weights = [each for each in models[1].graph.initializer if len(each.dims) == 4]
    assert weights and all(each.data_type == onnx.TensorProto.FLOAT16 for each in weights)
    assert made.small.stat().st_size < 0.8 * made.exact.stat().st_size


@pytest.mark.slow
def test_int8_keeps_maps_and_quantises_only_what_the_logits_depend_on(made):
    onnx = pytest.importorskip("onnx")
    floats, integers = run(made.exact), run(made.whole)
    for name in ("logits", "branch_logits"):
        assert 0 < np.abs(floats[name] - integers[name]).max() < 0.05 * np.abs(floats[name]).max()
    assert np.abs(by_class(floats) - by_class(integers)).max() < 0.1
    models = [onnx.load(path) for path in (made.exact, made.whole)]
    assert {each.key: each.value for each in models[1].metadata_props}["precision"] == "int8"
    kinds = [Counter(node.op_type for node in model.graph.node) for model in models]
    assert kinds[1]["QuantizeLinear"] and kinds[0]["Conv"] == kinds[1]["Conv"]
    weights = {each.name: each.data_type for each in models[1].graph.initializer if len(each.dims) == 4}
    assert onnx.TensorProto.INT8 in weights.values()
    loops = [[node for node in model.graph.node if node.op_type == "Loop"] for model in models]
    assert [[each.attribute for each in nodes] for nodes in loops[:1]] == [
        [each.attribute for each in nodes] for nodes in loops[1:]
    ]
    assert made.whole.stat().st_size < 0.7 * made.exact.stat().st_size


@pytest.mark.slow
def test_a_file_compared_with_itself_and_with_another(made):
    onnx, change = pytest.importorskip("onnx"), compare_files(made.net, made.exact, made.exact, DATA)
    best, labels = run(made.exact)["probability"].argmax(1), np.array([each.label for each in DATA])
    assert (change["images"], change["same_class"]) == (6, 100)
    assert change["top1"] == pytest.approx([100 * (best == labels).mean()] * 2)
    assert change["max_box_acc_v2"][0] == change["max_box_acc_v2"][1]
    model = onnx.load(made.exact)
    (bias,) = (each for each in model.graph.initializer if each.name.endswith("model.fc.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32)[3] * 1e4, bias.name))
    other = made.exact.with_name("other.onnx")  # always predicts class 3
    onnx.save(model, other)
    changed = compare_files(made.net, made.exact, other, DATA)
    assert changed["same_class"] == pytest.approx(100 * (best == 3).mean())
    assert changed["top1"] == pytest.approx([100 * (best == labels).mean(), 100 * (labels == 3).mean()])
    plain = Samples(tuple(replace(each, label=None, boxes=None) for each in DATA), DATA.classes)
    assert set(compare_files(made.net, made.exact, made.exact, plain)) == {"images", "same_class"}
    with pytest.raises(DataError, match="could be read"):
        compare_files(made.net, made.exact, made.exact, DATA[:0])


def test_precisions_that_cannot_be_written_are_refused(tmp_path):
    for options, said in (
        ({"precision": "int4"}, "'float16' or 'int8', not 'int4'"),
        ({"precision": "float16", "format": "torch"}, "use format onnx"),
        ({"precision": "int8"}, "needs images that show"),
        ({"calibrate": DATA}, "are for int8, not float32"),
    ):
        with pytest.raises(ConfigError, match=said):
            sigcam.export(network(Gap(8)), tmp_path / "net.pt2", **options)
    assert not any(tmp_path.iterdir())


def test_float16_is_refused_where_maps_need_gradients(tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(ConfigError, match="no gradients"):
        sigcam.export(network(Vgg(8)), tmp_path / "net.onnx", precision="float16")
    assert not any(tmp_path.iterdir())
