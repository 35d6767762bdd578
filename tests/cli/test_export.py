"""`sigcam export`: a file from a classifier and its branch; one line and exit code 2 for bad input."""

import json
from pathlib import Path

import numpy as np
import pytest

from support.commands import fitted, run, spec


@pytest.mark.slow
def test_export_writes_a_file_that_runs_without_us(monkeypatch, place: Path, capsys):
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    branch, path = fitted(monkeypatch, place), place / "model.onnx"
    capsys.readouterr()
    words = ("export", path, "--model", spec(place), "--branch", branch, "--class", "dog", "--json")
    assert run(monkeypatch, *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"path": str(path), "bytes": path.stat().st_size}
    session = ort.InferenceSession(path)
    pixels = np.zeros((2, 30, 50, 3), np.uint8)
    names = [each.name for each in session.get_outputs()]
    out = dict(zip(names, session.run(None, {"image": pixels}), strict=True))
    assert out["probability"].shape == (2, 2) and out["classes"].tolist() == [[1], [1]]
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["class_names"]) == ["cat", "dog"] and about["preprocessing"] == "inside"


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
    ],
)
def test_bad_input_is_one_line(monkeypatch, tmp_path: Path, capsys, words, said):
    pytest.importorskip("onnxscript")
    assert run(monkeypatch, "export", tmp_path / "model.onnx", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not any(tmp_path.iterdir())
