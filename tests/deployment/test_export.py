"""Exported files compute what the network computes, and say what they hold."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import sigcam
from sigcam.core.errors import AttachError, CheckpointError, ConfigError, DataError, MissingExtra
from sigcam.deployment.graph import OUTPUTS
from sigcam.methods.explainer import explain
from sigcam.models.preprocess import Preprocess
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.dual import DualBranch
from support.tiny import Gap, Vgg, attached, images, untouched

NAMES = ("cat", "dog", "bird", "fish")


def network(model: torch.nn.Module) -> DualBranch:
    net = attached(model, transform=Preprocess(16, 16), class_names=NAMES)
    net.calibration = BranchCalibration(LogitScale(0.7, 0.2), {1.0: LogitScale(1.3, -0.1)})
    return net


def run(path: Path, image: np.ndarray) -> dict[str, torch.Tensor]:
    """The outputs of a file in onnxruntime."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_outputs()] == list(OUTPUTS)
    values = session.run(None, {"image": image})
    return {name: torch.from_numpy(value) for name, value in zip(OUTPUTS, values, strict=True)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A file that takes pictures, made once; its head is an MLP, whose gradients are in the file."""
    pytest.importorskip("onnxscript")
    net, path = network(Vgg()), tmp_path_factory.mktemp("export") / "net.onnx"
    with untouched(net.model):
        assert sigcam.export(net, path, k=3) == path
    return SimpleNamespace(net=net, path=path)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), [(1, (40, 31)), (3, (20, 28))])
def test_a_file_takes_pictures_of_any_number_and_size(made, count, size):
    pixels = np.random.default_rng(count).integers(0, 256, (count, *size, 3), dtype=np.uint8)
    pictures, out = [Image.fromarray(each) for each in pixels], run(made.path, pixels)
    with torch.no_grad():
        expected = made.net(torch.stack([made.net.transform(each) for each in pictures]))
    assert torch.allclose(out["logits"], expected.softmax, atol=1e-4)
    assert torch.allclose(out["branch_logits"], expected.sigmoid, atol=1e-4)
    assert torch.allclose(out["evidence"], made.net.evidence(expected.sigmoid), atol=1e-4)
    assert torch.allclose(out["probability"], expected.softmax.softmax(1), atol=1e-4)
    options = {"classes": out["classes"], "scale": "probability"}
    ex = explain(made.net, pictures, **options)
    assert torch.allclose(
        out["maps"], explain(made.net, pictures, size="features", **options).maps, atol=1e-4
    )
    boxes = [torch.cat(ex.select(k).picture_boxes()) for k in range(3)]
    assert torch.equal(out["boxes"].long(), torch.stack(boxes, 1)) and torch.equal(out["present"], ex.present)


@pytest.mark.slow
def test_the_metadata_says_what_a_file_holds(made):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(made.path)
    onnx.checker.check_model(model, full_check=True)
    assert b"forward" not in made.path.read_bytes(), "nor does it name source files"
    about = {each.key: each.value for each in model.metadata_props}
    assert json.loads(about["class_names"]) == list(NAMES) and json.loads(about["mean"])[0] == 0.485
    assert (about["scale"], about["threshold"], about["k"]) == ("probability", "0.5", "3")
    assert about["preprocessing"] == "inside" and json.loads(about["input_size"]) == [3, 16, 16]
    assert json.loads(about["calibration"]) == made.net.calibration.to_json()
    assert len({about["classifier_fingerprint"], about["branch_fingerprint"]}) == 2
    sizes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    assert sizes == [["N", "H", "W", 3]]


@pytest.mark.slow
def test_a_program_of_torch_computes_the_same(tmp_path):
    pytest.importorskip("onnxscript")
    net, x = network(Gap()), images(3)
    options = {"preprocess": False, "classes": ["fish", 0], "format": "torch"}
    path = sigcam.export(net, tmp_path / "net.pt2", **options)
    texts = {"sigcam.json": ""}
    program = torch.export.load(io.BytesIO(path.read_bytes()), extra_files=texts)
    out = dict(zip(OUTPUTS, program.module()(x), strict=True))
    assert json.loads(texts["sigcam.json"])["class_names"] == list(NAMES)
    assert out["classes"].tolist() == [[3, 0]] * 3
    ex = explain(net, x, classes=out["classes"], scale="probability", size="features")
    assert torch.allclose(out["maps"], ex.maps, atol=1e-5)


def refused(path: Path, error: type[Exception], match: str, net: DualBranch | None = None, **options) -> None:
    """The call raises the error, in one line, and leaves no file."""
    with pytest.raises(error, match=match) as caught:
        sigcam.export(net or network(Gap()), path, **options)
    assert "\n" not in str(caught.value)
    assert not any(path.parent.iterdir())


def test_what_cannot_be_exported_is_said_before_anything_is_written(tmp_path):
    path = tmp_path / "net.onnx"
    unfitted, uncalibrated, unknown = network(Gap()), network(Gap()), network(Gap())
    unfitted.fitted, uncalibrated.calibration, unknown.transform = (
        False,
        BranchCalibration(),
        lambda image: image,
    )
    refused(path, CheckpointError, "not fitted", unfitted)
    refused(path, ConfigError, "not calibrated", uncalibrated, scale="probability")
    refused(path, ConfigError, "preprocess=False", unknown)
    refused(path, ConfigError, "no class is named 'horse'", classes=["horse"])
    refused(path, ConfigError, "class 7 does not exist", classes=[7])
    refused(path, ConfigError, "list", classes="cat")
    refused(path, ConfigError, "at least 1", k=0)
    refused(path, ConfigError, "k= or classes=", k=1, classes=[0])
    refused(path, ConfigError, "opset 11 is too old", opset=11)
    refused(path, ConfigError, "opset 1000 is too new", opset=1000)
    refused(path, ConfigError, "scale", scale="unit")
    refused(path, DataError, "threshold", threshold=2.0)
    refused(path, ConfigError, "format", format="tflite")
    refused(tmp_path / "net.bin", ConfigError, r"ends in \.onnx")
    refused(tmp_path / "net.onnx", ConfigError, "without ending", format="triton")
    with pytest.raises(ConfigError, match="attach"):
        sigcam.export(Gap(), path)  # type: ignore[arg-type]


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .* in another folder"):
        sigcam.export(network(Gap()), tmp_path / "file" / "net.onnx")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    refused(tmp_path / "net.onnx", MissingExtra, r"sigcam\[export\]")


class Branching(Gap):
    """Its steps depend on the numbers in an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


def test_a_network_that_is_no_graph_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    refused(tmp_path / "net.onnx", AttachError, "sigcam.explain", network(Branching()), preprocess=False)
