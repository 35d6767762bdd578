"""Smaller files compute nearly the same, and what they change is measured."""

from dataclasses import replace
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize("model", [lambda: Gap(8, channels=600), lambda: Vgg(8)], ids=["linear", "mlp"])
def test_float16_is_smaller_and_nearly_the_same(tmp_path, model):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    net = network(model())
    exact = sigcam.export(net, tmp_path / "exact.onnx", classes=[0, 5])
    with untouched(net.model):
        small = sigcam.export(net, tmp_path / "small.onnx", classes=[0, 5], precision="float16")
    floats, halves = run(exact), run(small)
    for name in ("logits", "branch_logits", "maps", "probability", "evidence"):
        assert halves[name].dtype == np.float32
        assert np.abs(floats[name] - halves[name]).max() < 1e-2 * np.abs(floats[name]).max()
    models = {path: onnx.load(path) for path in (exact, small)}
    about = {path: {e.key: e.value for e in each.metadata_props} for path, each in models.items()}
    assert (about[exact]["precision"], about[small]["precision"]) == ("float32", "float16")
    weights = [each for each in models[small].graph.initializer if len(each.dims) == 4]
    assert weights and all(each.data_type == onnx.TensorProto.FLOAT16 for each in weights)
    assert small.stat().st_size < exact.stat().st_size


@pytest.mark.slow
def test_a_file_compared_with_itself_and_with_another(tmp_path):
    pytest.importorskip("onnxscript")
    net = network(Gap(8))
    exact = sigcam.export(net, tmp_path / "exact.onnx", k=1)
    change = compare_files(net, exact, exact, DATA)
    best = run(exact)["probability"].argmax(1)
    labels = np.array([sample.label for sample in DATA])
    assert (change["images"], change["same_class"]) == (6, 100)
    assert change["top1"] == pytest.approx([100 * (best == labels).mean()] * 2)
    assert change["max_box_acc_v2"][0] == change["max_box_acc_v2"][1]
    other = network(Gap(8))
    with torch.no_grad():
        other.original.fc.bias[(int(best[0]) + 1) % 8] += 1e4  # always the same other class
    changed = compare_files(net, exact, sigcam.export(other, tmp_path / "other.onnx", k=1), DATA)
    assert changed["same_class"] == pytest.approx(100 * (best == (int(best[0]) + 1) % 8).mean())
    plain = Samples(tuple(replace(each, label=None, boxes=None) for each in DATA), DATA.classes)
    assert set(compare_files(net, exact, exact, plain)) == {"images", "same_class"}
    with pytest.raises(DataError, match="could be read"):
        compare_files(net, exact, exact, DATA[:0])


def test_precisions_that_cannot_be_written_are_refused(tmp_path):
    for options, said in (
        ({"precision": "int4"}, "'float32' or 'float16', not 'int4'"),
        ({"precision": "float16", "format": "torch"}, "use format onnx"),
    ):
        with pytest.raises(ConfigError, match=said):
            sigcam.export(network(Gap(8)), tmp_path / "net.pt2", **options)
    assert not any(tmp_path.iterdir())
