"""`sigcam export`: a file from a classifier and its branch; one line and exit code 2 for bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sigcam.cli.export import show_change
from sigcam.methods.explainer import explain
from sigcam.network.opening import open_network
from support.commands import fitted, run, spec


@pytest.mark.slow
def test_the_embedded_classifier_is_one_file_that_runs_without_us(monkeypatch, tmp_path: Path, capsys):
    ort, data = pytest.importorskip("onnxruntime"), pytest.importorskip("skimage.data")
    pytest.importorskip("onnxscript")
    path, pixels = tmp_path / "model.onnx", data.chelsea()
    assert run(monkeypatch, "export", path, "--k", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(path), "bytes": path.stat().st_size}
    session = ort.InferenceSession(path)
    names = [each.name for each in session.get_outputs()]
    values = session.run(None, {"image": np.stack([pixels, pixels[:, ::-1]])})
    out = {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}
    about = session.get_modelmeta().custom_metadata_map
    assert "cat" in json.loads(about["class_names"])[int(out["classes"][0, 0])]
    net = open_network("embedded").net
    pictures = [Image.fromarray(pixels), Image.fromarray(np.ascontiguousarray(pixels[:, ::-1]))]
    with torch.no_grad():
        expected = net(torch.stack([net.transform(each) for each in pictures]))
    for key, wanted in (("logits", expected.softmax), ("branch_logits", expected.sigmoid)):
        assert float((out[key] - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    assert torch.allclose(out["evidence"], net.evidence(expected.sigmoid), atol=1e-4)
    ex = explain(net, pictures, classes=out["classes"], scale="probability")
    cells = explain(net, pictures, classes=out["classes"], scale="probability", size="features")
    assert torch.allclose(out["maps"], cells.maps, atol=1e-4)
    boxes = [torch.cat(ex.select(k).picture_boxes()) for k in range(3)]
    assert torch.equal(out["boxes"].long(), torch.stack(boxes, 1))


@pytest.mark.slow
def test_a_smaller_file_comes_with_what_it_changes(monkeypatch, place: Path, capsys):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    model = ("--model", spec(place), "--branch", fitted(monkeypatch, place))
    smaller = ("--int8", "--calibrate", place / "data")
    measured = (*model, *smaller, "--data", place / "data", "--limit", 6, "--format", "triton")
    capsys.readouterr()
    assert run(monkeypatch, "export", place / "served", *measured, "--json") == 0
    change = json.loads(capsys.readouterr().out)["change"]
    assert change["images"] == 6 and set(change) == {"images", "same_class", "top1"}
    show_change(change, "int8")
    shown = capsys.readouterr().out
    assert "6 images" in shown and "int8" in shown and f"{change['top1'][1]:.1f}" in shown
    assert not list(place.glob("**/exact.onnx"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--class", "nosuchclass"], "no class is named 'nosuchclass'"),
        (["--k", "0"], "k is a number of classes"),
        (["--opset", "11"], "opset 11 is too old"),
        (["--format", "tflite"], "--format takes onnx or torch or triton"),
        (["--format", "torch"], "ends in .pt2"),
        (["--scale", "unit"], "--scale takes probability or logit"),
        (["--branch", "softmax"], "is not fitted"),
        (["--branch", "missing.safetensors"], "no such file"),
        (["--data", "shapes:2"], "what --fp16 or --int8 changes"),
        (["--int8"], "add --calibrate DIR"),
        (["--int8", "--fp16"], "exclude each other"),
        (["--calibrate", "shapes:2"], "are for int8, not float32"),
        (["--fp16", "--data", "shapes:2"], "the data has 8 classes"),
        (["--fp16", "--format", "torch"], "format torch holds float32"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, tmp_path: Path, capsys, words, said):
    pytest.importorskip("onnxscript")
    assert run(monkeypatch, "export", tmp_path / "model.onnx", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not any(tmp_path.iterdir())
