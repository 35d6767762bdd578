"""The commands: what they write, and one helpful line with exit code 2 for each kind of bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from support.commands import NET, fitted, run, spec


@pytest.mark.slow
def test_fit_then_explain_writes_overlay_map_scores_and_manifest(monkeypatch, place, capsys):
    branch = fitted(monkeypatch, place)
    manifest = json.loads((place / "fit" / "manifest.json").read_text())
    assert (
        manifest["numbers"]["l2"] == 0.1 and manifest["model_fingerprint"] and manifest["versions"]["torch"]
    )
    told = json.loads((place / "fit" / "fit.json").read_text())
    assert told["losses"][-1] < told["losses"][0] and len(told["classes"]) == 2
    assert (place / "fit" / "fit.png").stat().st_size > 10_000
    picture = place / "data" / "cat" / "0.png"
    words = (
        "explain",
        picture,
        "--model",
        spec(place),
        "--branch",
        branch,
        "--output",
        place / "out",
        "--json",
    )
    capsys.readouterr()
    assert run(monkeypatch, *words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["class_name"] in ("cat", "dog") and 0 <= row["evidence"] <= 1
    values = np.load(place / "out" / "0.map.npy")
    assert values.shape == (40, 56) and 0 < values.max() <= 1  # the picture's own size
    with Image.open(place / "out" / "0.map.png") as overlay:
        assert overlay.size == (56, 40)
    assert json.loads((place / "out" / "explanation.json").read_text()) == [row]
    assert json.loads((place / "out" / "manifest.json").read_text())["numbers"] == [row]


@pytest.mark.slow
def test_explain_takes_a_class_by_name_and_needs_no_branch_file_for_softmax_and_centred(
    monkeypatch, place, capsys
):
    pictures = place / "data" / "dog"
    for branch in ("softmax", "centred"):
        words = ("explain", pictures, "--model", spec(place), "--branch", branch, "--class", "1", "--json")
        assert run(monkeypatch, *words, "--output", place / branch) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["class"] for row in rows] == [1] * 4
        assert len(list((place / branch).glob("*.png"))) == 4


@pytest.mark.slow
def test_probe_trains_a_head_that_fit_and_explain_take(monkeypatch, place, capsys):
    words = (
        "train-classifier",
        "--probe",
        "--data",
        place / "data",
        "--model",
        "timm:test_resnet",
        "--epochs",
        5,
    )
    assert run(monkeypatch, *words, "--output", place / "c", "--weights", _weights(place)) == 0
    weights = ("--model", "timm:test_resnet", "--weights", place / "c" / "classifier.safetensors")
    assert (
        run(monkeypatch, "fit", "--data", place / "data", *weights, "--output", place / "f", "--l2", 0.1) == 0
    )
    capsys.readouterr()
    words = ("explain", place / "data" / "cat", *weights, "--branch", place / "f" / "branch.safetensors")
    assert run(monkeypatch, *words, "--output", place / "o", "--json", "--class", "dog") == 0
    assert {row["class_name"] for row in json.loads(capsys.readouterr().out)} == {"dog"}


def _weights(place: Path) -> Path:
    import timm

    path = place / "random.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    return path


def test_inspect_names_head_layer_and_map_size(monkeypatch, place, capsys):
    assert run(monkeypatch, "inspect", "--model", spec(place), "--data", place / "data", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["head"] == "6" and facts["model"]["layer"] == "3"
    assert facts["model"]["map"].startswith("56 x 56") and facts["data"]["images"] == 8
    assert facts["model"]["finer layers"] == "1 (8 x 112 x 112)"
    assert run(monkeypatch, "inspect", "--model", spec(place)) == 0
    assert "grad-cam" in capsys.readouterr().out


@pytest.mark.slow
def test_an_unreadable_picture_among_good_ones_is_named_and_left_out(monkeypatch, place, capsys):
    (place / "data" / "cat" / "bad.png").write_bytes(b"not a picture")
    words = ("explain", place / "data" / "cat", "--model", spec(place), "--branch", "centred")
    assert run(monkeypatch, *words, "--output", place / "o") == 0
    said = capsys.readouterr()
    assert "bad.png" in said.err and "4 overlay(s)" in said.out
    assert (
        run(monkeypatch, "fit", "--model", spec(place), "--data", place / "data", "--output", place / "f")
        == 0
    )
    assert "bad.png" in capsys.readouterr().err


def refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Runs the command, which must end with exit code 2 and one line on stderr; returns the line."""
    capsys.readouterr()
    assert run(monkeypatch, *words) == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if line]
    assert len(lines) == 1 and "Traceback" not in lines[0], lines
    return lines[0]


def test_explain_refuses_what_it_cannot_open(monkeypatch, place, capsys):
    common = ("--model", spec(place), "--branch", "centred", "--output", place / "o")
    assert "nowhere.jpg" in refuses(monkeypatch, capsys, "explain", place / "nowhere.jpg", *common)
    (place / "text.jpg").write_text("hello")
    assert "text.jpg" in refuses(monkeypatch, capsys, "explain", place / "text.jpg", *common)
    (place / "empty").mkdir()
    assert "empty" in refuses(monkeypatch, capsys, "explain", place / "empty", *common)
    assert "no pictures" in refuses(monkeypatch, capsys, "explain", *common)
    assert "class" in refuses(monkeypatch, capsys, "explain", place / "data" / "cat", *common, "--class", "7")
    assert "did you mean 'grad-cam'" in refuses(
        monkeypatch, capsys, "explain", place / "data" / "cat", *common, "--method", "grad-camm"
    )


@pytest.mark.slow
def test_examples_classes_scale_and_further_rows_are_said(monkeypatch, place, capsys):
    common = ("--model", spec(place), "--branch", "centred", "--output", place / "o")
    assert run(monkeypatch, "explain", "--example", "rocket", *common, "--class", "0", "--class", "1") == 0
    said = capsys.readouterr().out
    assert "scale: unit" in said and "by SpaceX: public domain." in said and "more, in" not in said
    rows = json.loads((place / "o" / "explanation.json").read_text())
    assert [row["map"] for row in rows] == ["rocket.0.map.npy", "rocket.1.map.npy"]
    assert rows[0]["size"] == [640, 427] and np.load(place / "o" / rows[0]["map"]).shape == (427, 640)
    for i in range(4, 21):
        Image.new("RGB", (32, 32), (i, 0, 0)).save(place / "data" / "cat" / f"{i}.png")
    assert run(monkeypatch, "explain", place / "data" / "cat", *common) == 0
    assert f"and 1 more, in {place / 'o' / 'explanation.json'}" in capsys.readouterr().out
    assert "one of them" in refuses(
        monkeypatch, capsys, "explain", place / "data", "--example", "rocket", *common
    )
    said = refuses(monkeypatch, capsys, "explain", place / "data", *common, "--top-n", 4)
    assert "for score-cam, ss-cam and is-cam: grad-cam tries none" in said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["explain", "evaluate"])
def test_an_unknown_model_is_said_before_its_missing_branch(monkeypatch, place, capsys, command):
    images = ("--data", place / "data", "--format", "folder", "--output", place / "o")
    branches = ("--branches", "sigmoid") if command == "evaluate" else ()
    said = refuses(monkeypatch, capsys, command, *images, "--model", "resnet18", *branches)
    assert "unknown model 'resnet18': did you mean timm:resnet18 or torchvision:resnet18?" in said
    said = refuses(monkeypatch, capsys, command, *images, "--model", "timm:resnt18", *branches)
    assert "no timm model is called 'resnt18': did you mean resnet18" in said
    said = refuses(monkeypatch, capsys, command, *images, "--model", "timm:resnet18", *branches)
    assert "the sigmoid branch must be fitted first" in said


@pytest.mark.slow
def test_explain_refuses_a_branch_that_is_missing_unfitted_or_of_another_model(monkeypatch, place, capsys):
    picture, out = place / "data" / "cat" / "0.png", ("--output", place / "o")
    model = ("--model", spec(place))
    assert "sigcam fit" in refuses(monkeypatch, capsys, "explain", picture, *model, *out)
    assert "no such file" in refuses(
        monkeypatch, capsys, "explain", picture, *model, *out, "--branch", "x.safetensors"
    )
    (place / "junk.safetensors").write_bytes(b"junk")
    assert "junk" in refuses(
        monkeypatch, capsys, "explain", picture, *model, *out, "--branch", place / "junk.safetensors"
    )
    branch = fitted(monkeypatch, place)
    (place / "net.py").write_text(NET.replace("manual_seed(0)", "manual_seed(1)"))
    assert "other weights" in refuses(
        monkeypatch, capsys, "explain", picture, *model, *out, "--branch", branch
    )


def test_fit_and_train_classifier_refuse_data_that_teaches_nothing(monkeypatch, place, capsys):
    commands = (("fit", "--model", spec(place)), ("train-classifier", "--probe", "--model", spec(place)))
    (place / "void").mkdir()
    (place / "one" / "cat").mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(place / "one" / "cat" / "a.png")
    Image.new("RGB", (20, 20)).save(place / "one" / "cat" / "b.png")
    (place / "lonely" / "a").mkdir(parents=True)
    (place / "lonely" / "b").mkdir()
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        Image.new("RGB", (20, 20)).save(place / "lonely" / name)
    for command in commands:
        out = ("--output", place / "o")
        assert "missing" in refuses(monkeypatch, capsys, *command, "--data", place / "missing", *out)
        assert "void" in refuses(monkeypatch, capsys, *command, "--data", place / "void", *out)
        assert "one class" in refuses(monkeypatch, capsys, *command, "--data", place / "one", *out)
        assert "'b' has one image" in refuses(monkeypatch, capsys, *command, "--data", place / "lonely", *out)
        assert not (place / "o" / "manifest.json").exists()


def test_fit_says_what_to_do_when_classes_do_not_match(monkeypatch, place, capsys):
    (place / "data" / "fox").mkdir()
    for i in range(2):
        Image.new("RGB", (20, 20)).save(place / "data" / "fox" / f"{i}.png")
    line = refuses(
        monkeypatch, capsys, "fit", "--model", spec(place), "--data", place / "data", "--output", place / "o"
    )
    assert "3 classes" in line and "train-classifier" in line


ONE_SIZE = """
def one_size():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 28 * 28, 2))
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--background", "-1"), "background must be 'auto' or a number, 0 or more"),
        (("--background", "much"), "--background takes auto or a number, not 'much'"),
        (("--background-threshold", "1.5"), "background_threshold must be between 0 and 1"),
        (("--zooms", "0.5"), "zooms must be numbers of 1 or more"),
        (("--zooms", "1,x"), "--zooms takes numbers such as 1,2, not '1,x'"),
        (("--zooms", "1,2", "--background", "0"), "zooms are calibrated with backgrounds"),
        (("--zooms", "1,900", "--background", "1"), "one image at zoom=900 needs about"),
        (("--zooms", "1,2000", "--background", "1"), "zoom=2000 is too large"),
        (("--zooms", "1,2", "--background", "1", "--model", "one_size"), "takes one size only"),
        (("--loss", "background-softmax", "--background", "0"), "needs a weight of backgrounds"),
    ],
)
def test_fit_refuses_settings_of_backgrounds_before_any_work(monkeypatch, place, capsys, words, sentence):
    (place / "net.py").write_text(NET + ONE_SIZE)
    words = tuple(spec(place, word) if word == "one_size" else word for word in words)
    common = ("--data", place / "data", "--output", place / "o", "--cache", place / "cache")
    before = sorted(place.rglob("*"))
    assert sentence in refuses(monkeypatch, capsys, "fit", "--model", spec(place), *common, *words)
    made = {path for path in place.rglob("*") if "__pycache__" not in path.parts}
    assert made == set(before)


@pytest.mark.slow
def test_explain_refuses_maps_in_probabilities_that_the_branch_is_not_calibrated_for(
    monkeypatch, place, capsys
):
    words = ("fit", "--model", spec(place), "--data", place / "data", "--output", place / "fit")
    assert run(monkeypatch, *words, "--l2", 0.1, "--background", 1, "--no-cache") == 0
    common = ("--model", spec(place), "--branch", place / "fit", "--output", place / "o")
    words = ("explain", place / "data" / "cat", *common, "--scale", "probability")
    line = refuses(monkeypatch, capsys, *words, "--zoom", 2)
    assert "not calibrated for maps in probabilities at zoom 2" in line and "--zooms 1,2" in line
    line = refuses(monkeypatch, capsys, *words, "--stride", 1)
    assert "calibrated without stride=" in line and "use 'logit'" in line
    assert not (place / "o").exists()
    assert run(monkeypatch, *words) == 0


def test_inspect_refuses_data_and_names_that_are_not_there(monkeypatch, place, capsys):
    assert "missing" in refuses(monkeypatch, capsys, "inspect", "--data", place / "missing")
    assert "net.py" in refuses(monkeypatch, capsys, "inspect", "--data", place / "net.py")
    assert "format" in refuses(monkeypatch, capsys, "inspect", "--data", place / "data", "--format", "zip")
    assert "layer='9'" in refuses(monkeypatch, capsys, "inspect", "--model", spec(place), "--layer", "9")


def test_models_that_are_unknown_or_hold_nan_are_refused(monkeypatch, place, capsys):
    for command in (
        ("inspect",),
        ("fit", "--data", place / "data", "--output", place / "o"),
        ("explain", place / "data" / "cat" / "0.png", "--branch", "centred", "--output", place / "o"),
    ):
        assert "resnet18" in refuses(monkeypatch, capsys, *command, "--model", "torchvision:resnet81")
        assert "NaN" in refuses(monkeypatch, capsys, *command, "--model", spec(place, "broken"))
        assert "no_such" in refuses(monkeypatch, capsys, *command, "--model", "timm:no_such_model_at_all")


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_work(monkeypatch, place, capsys):
    (place / "file").write_text("in the way")
    data, model = ("--data", place / "data"), ("--model", spec(place))
    for command in (
        ("fit", *data, *model),
        ("train-classifier", "--probe", *data, *model),
        ("explain", place / "data" / "cat", *model, "--branch", "centred"),
        ("demo",),
    ):
        assert "--output" in refuses(monkeypatch, capsys, *command, "--output", place / "file" / "out")


def test_a_full_disk_ends_with_one_line_and_leaves_nothing_half_written(monkeypatch, place, capsys):
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.suffix == ".part":
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    words = ("fit", "--model", spec(place), "--data", place / "data", "--output", place / "o", "--no-cache")
    capsys.readouterr()
    assert run(monkeypatch, *words) == 2
    assert "No space left on device" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (place / "o").exists()


def test_an_unusable_device_is_refused(monkeypatch, place, capsys):
    words = ("fit", "--model", spec(place), "--data", place / "data", "--output", place / "o", "--device")
    assert "--device gpu" in refuses(monkeypatch, capsys, *words, "gpu")
    if not torch.cuda.is_available():
        assert "--device cuda" in refuses(monkeypatch, capsys, *words, "cuda")


def test_help_and_import_load_no_torch():
    code = (
        "import sys, sigcam; from sigcam.cli.app import build_app; "
        "build_app()(['--help'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip().endswith("False") and "explain" in done.stdout


@pytest.mark.slow
def test_the_branch_file_holds_the_branch_alone(monkeypatch, place):
    tensors = load_file(fitted(monkeypatch, place))
    assert {tuple(t.shape) for t in tensors.values()} == {(2, 12), (2,)}


def test_explain_never_overwrites_a_picture_or_another_ones_map(monkeypatch, place, capsys):
    folder = place / "own"
    folder.mkdir()
    for name in ("photo.png", "photo.jpg"):
        Image.new("RGB", (32, 32), "red").save(folder / name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (
        run(monkeypatch, "explain", folder, "--model", spec(place), "--branch", "centred", "--output", folder)
        == 0
    )
    assert all((folder / name).read_bytes() == content for name, content in before.items())
    assert {path.name for path in folder.glob("*.npy")} == {"photo.png.map.npy", "photo.jpg.map.npy"}


def test_a_second_run_does_not_read_the_overlays_of_the_first(monkeypatch, place, capsys):
    folder = place / "data" / "cat"
    words = ("explain", folder, "--model", spec(place), "--branch", "centred", "--json", "--output")
    for output in (folder / "maps", folder / "maps", folder, folder / "others"):
        assert run(monkeypatch, *words, output) == 0
        assert len(json.loads(capsys.readouterr().out)) == 4
    drawn = folder / "maps" / "0.map.png"  # asked for by name, it is a picture like any other
    assert run(monkeypatch, words[0], drawn, *words[2:], place / "o") == 0


def test_loops_of_links_are_left_out_or_refused(monkeypatch, place, capsys):
    folder = place / "data" / "cat"
    for name, target in (("loop.png", "loop.png"), ("loop", "loop"), ("self", ".")):
        (folder / name).symlink_to(target)
    words = ("--model", spec(place), "--branch", "centred", "--output", place / "o")
    assert run(monkeypatch, "explain", folder, *words) == 0
    said = capsys.readouterr()
    assert "4 overlay(s)" in said.out and "loop.png" in said.err
    assert "does not exist" in refuses(monkeypatch, capsys, "explain", folder / "loop", *words)


def test_a_folder_that_may_not_be_read_is_named_instead_of_left_out(monkeypatch, place, capsys):
    scan, closed = os.scandir, str(place / "data" / "dog")

    def refused(path):
        if str(path) == closed:
            raise PermissionError(13, "Permission denied", closed)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    words = ("--model", spec(place), "--branch", "centred", "--output", place / "o")
    said = refuses(monkeypatch, capsys, "explain", place / "data", *words)
    assert f"cannot read the folder {closed}: Permission denied" in said


def test_a_slip_on_the_command_line_is_one_line(monkeypatch, place, capsys):
    assert "--nope" in refuses(monkeypatch, capsys, "fit", "--nope")
    assert "--data" in refuses(monkeypatch, capsys, "fit", "--model", spec(place))
    assert "explian" in refuses(monkeypatch, capsys, "explian", "a.jpg")
    assert "batch_size" in refuses(monkeypatch, capsys, "fit", "--data", place / "data", "--batch-size", 0)
    assert "pos_weight" in refuses(
        monkeypatch,
        capsys,
        "fit",
        "--model",
        spec(place),
        "--data",
        place / "data",
        "--pos-weight",
        "-3",
        "--output",
        place / "o",
    )
    assert not (place / "o").exists()


def test_a_misspelt_class_folder_is_named_instead_of_shifting_all_labels(monkeypatch, place, capsys):
    (place / "net.py").write_text(
        NET + "\ndef named():\n    m = tiny()\n    m.classes = ('cat', 'dog')\n    return m\n"
    )
    (place / "data" / "cat").rename(place / "data" / "cta")
    line = refuses(
        monkeypatch,
        capsys,
        "fit",
        "--model",
        spec(place, "named"),
        "--data",
        place / "data",
        "--output",
        place / "o",
    )
    assert "cta" in line


def test_a_branch_that_was_never_fitted_is_refused(monkeypatch, place, capsys):
    import sigcam
    from sigcam.models.classifier import load_classifier

    sigcam.attach(load_classifier(spec(place)).model).save(place / "raw.safetensors")
    words = ("explain", place / "data" / "cat", "--model", spec(place), "--output", place / "o")
    assert "never fitted" in refuses(monkeypatch, capsys, *words, "--branch", place / "raw.safetensors")


@pytest.mark.slow
def test_explain_goes_on_where_it_was_stopped(monkeypatch, place, capsys):
    from sigcam.methods import folder as picturing

    whole, real, seen = place / "whole", picturing.explain, list[int]()
    words = ("explain", place / "data", "--model", spec(place), "--branch", "centred", "--batch-size", 2)
    assert run(monkeypatch, *words, "--output", whole) == 0

    def counted(net, pictures, *args, **options):
        if len(seen) == 2 and not (place / "again").exists():
            raise KeyboardInterrupt
        seen.append(len(pictures))
        return real(net, pictures, *args, **options)

    monkeypatch.setattr(picturing, "explain", counted)
    assert run(monkeypatch, *words, "--output", place / "part") == 130
    assert not (place / "part" / "explanation.json").exists()
    assert (place / "part" / ".explain.checkpoint").is_file()
    (place / "again").touch()
    assert run(monkeypatch, *words, "--output", place / "part") == 0
    rows = [json.loads((folder / "explanation.json").read_text()) for folder in (whole, place / "part")]
    assert rows[0] == rows[1]
    assert sum(seen) == len(rows[0])  # each picture once
    assert sorted(p.name for p in whole.iterdir()) == sorted(p.name for p in (place / "part").iterdir())


@pytest.mark.slow
def test_caches_are_listed_and_cleared(monkeypatch, place, capsys):
    words = ("fit", "--model", spec(place), "--data", place / "data", "--l2", 0.1, "--output", place / "f")
    assert run(monkeypatch, *words, "--cache", place / "cache") == 0
    capsys.readouterr()
    assert run(monkeypatch, "cache", "list", "--cache", place / "cache", "--json") == 0
    (held,) = json.loads(capsys.readouterr().out)["caches"]
    assert held["images"] == len(list((place / "data").glob("*/*.png"))) and held["view"] == "plain"
    assert held["holds"] == "features"
    assert "no cache nonsense" in refuses(
        monkeypatch, capsys, "cache", "clear", "nonsense", "--cache", place / "cache"
    )
    assert run(monkeypatch, "cache", "clear", "--cache", place / "cache") == 0
    assert "removed 1 cache(s)" in capsys.readouterr().out
    assert run(monkeypatch, "cache", "list", "--cache", place / "cache") == 0
    assert "0 cache(s)" in capsys.readouterr().out


def test_fit_takes_images_or_features(monkeypatch, place, capsys, tmp_path):
    assert "one of them" in refuses(monkeypatch, capsys, "fit", "--model", spec(place))
    import numpy as np

    for name, held in (("a.npz", {"labels": np.zeros(3)}), ("b.npz", {"plain": np.zeros((3, 2))})):
        np.savez(tmp_path / name, **held)
        said = refuses(monkeypatch, capsys, "fit", "--model", spec(place), "--features", tmp_path / name)
        assert name in said and ("plain" in said or "labels" in said)
    (tmp_path / "c.npz").write_bytes(b"")
    assert "cannot read" in refuses(
        monkeypatch, capsys, "fit", "--model", spec(place), "--features", tmp_path / "c.npz"
    )
