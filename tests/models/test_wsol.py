"""The paper's backbones: sizes and counts of PROTOCOL 1, where published weights go, what attach finds."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sigcam
from sigcam.core.errors import ModelError
from sigcam.models import builders as models
from sigcam.models.classifier import load_classifier, save_classifier
from sigcam.models.preprocess import Preprocess
from sigcam.models.wsol import WSOL_BACKBONES, CamInception, FlatInceptionB

# name: parameters, the sigmoid head's own (PROTOCOL 1.7), head, layer, features at 224 pixels (1.1, 1.2)
EXPECTED: dict[str, tuple[int, int, str, str, tuple[int, int, int]]] = {
    "vgg16": (138_357_544, 123_642_856, "classifier", "features", (512, 14, 14)),
    "vgg16-cam": (20_459_304, 1_025_000, "fc", "relu", (1024, 14, 14)),
    "vgg16-cam-28": (20_459_304, 1_025_000, "fc", "relu", (1024, 28, 28)),
    "resnet50": (25_557_032, 2_049_000, "fc", "layer4", (2048, 14, 14)),
    "resnet50-28": (25_557_032, 2_049_000, "fc", "layer4", (2048, 28, 28)),
    "resnet50-v1": (25_557_032, 2_049_000, "fc", "layer4", (2048, 14, 14)),
    "resnet50-v1-7": (25_557_032, 2_049_000, "fc", "layer4", (2048, 7, 7)),
    "inception_v3": (23_834_568, 2_049_000, "fc", "Mixed_7c", (2048, 5, 5)),
    "inception_v3-cam": (26_507_976, 1_025_000, "SPG_A4", "SPG_A3_2b", (1024, 14, 14)),
    "inception_v3-cam-28": (26_507_976, 1_025_000, "SPG_A4", "SPG_A3_2b", (1024, 28, 28)),
}
SAME = {  # PROTOCOL 1.1: one architecture
    f"resnet50{form}-cam{cells}": f"resnet50{form}{cells}" for form in ("", "-v1") for cells in ("", "-28")
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def output_size(model: nn.Module, name: str) -> tuple[int, ...]:
    """(N, P, Q) of what a module returns for one image of 224 x 224."""
    seen: list[tuple[int, ...]] = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, a, out: seen.append(out.shape[1:]))
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, 224, 224))
    handle.remove()
    return tuple(seen[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_counts_and_map_sizes_are_the_papers_and_attach_finds_head_and_layer(name: str) -> None:
    parameters, branch, head, layer, size = EXPECTED[name]
    loaded = load_classifier(f"wsol:{name}", pretrained=False)
    assert loaded.transform == Preprocess() and loaded.classes is not None and len(loaded.classes) == 1000
    net = sigcam.attach(loaded.model, example=torch.randn(1, 3, 224, 224))
    assert count(loaded.model) == parameters
    assert count(net.sigmoid) == branch
    assert net.head is loaded.model.get_submodule(head)
    assert net.layer is loaded.model.get_submodule(layer)
    assert output_size(loaded.model, layer) == size


def test_the_finer_vgg_lacks_one_more_pool() -> None:
    build = WSOL_BACKBONES["vgg16-28"].build
    with torch.device("meta"):
        model = build(5)
    pools = [m for m in model.get_submodule("features").modules() if isinstance(m, nn.MaxPool2d)]
    assert len(pools) == 3 and count(model) == EXPECTED["vgg16"][0] - 995 * 4097


@pytest.mark.slow
@pytest.mark.parametrize(("cam", "plain"), SAME.items())
def test_resnets_cam_form_is_the_same_network(cam: str, plain: str) -> None:
    strides = [
        [m.stride for m in WSOL_BACKBONES[name].build(3).modules() if isinstance(m, nn.Conv2d)]
        for name in (cam, plain)
    ]
    assert strides[0] == strides[1]


@pytest.mark.slow
def test_resnet_loses_strides_and_nothing_else() -> None:
    from torchvision.models import resnet50

    for name, halved in (("resnet50", ["layer4"]), ("resnet50-28", ["layer3", "layer4"])):
        ours, theirs = WSOL_BACKBONES[name].build(3), resnet50(num_classes=3)
        pairs = zip(ours.named_modules(), theirs.modules(), strict=True)
        differ = [key for (key, one), other in pairs if repr(one) != repr(other)]
        strided = [f"{stage}.0.{part}" for stage in halved for part in ("conv2", "downsample.0")]
        assert [key for key in differ if isinstance(ours.get_submodule(key), nn.Conv2d)] == strided


def first_published_resnet(state: dict[str, Tensor], x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """ResNet-50 as first published, written down: a stage's stride is in its first 1x1 convolution."""

    def layer(name: str, norm: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        x = F.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)
        parts = (state[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts, eps=1e-3)

    x = F.max_pool2d(layer("conv1", "bn1", x, 2, 3).relu(), 3, 2, 1)
    for stage, (blocks, first_stride) in enumerate(zip((3, 4, 6, 3), strides, strict=True), start=1):
        for i in range(blocks):
            block, stride = f"layer{stage}.{i}", first_stride if i == 0 else 1
            kept = layer(f"{block}.downsample.0", f"{block}.downsample.1", x, stride) if i == 0 else x
            x = layer(f"{block}.conv1", f"{block}.bn1", x, stride).relu()
            x = layer(f"{block}.conv2", f"{block}.bn2", x, 1, 1).relu()
            x = (layer(f"{block}.conv3", f"{block}.bn3", x) + kept).relu()
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strides"),
    [("resnet50-v1-7", (1, 2, 2, 2)), ("resnet50-v1", (1, 2, 2, 1)), ("resnet50-v1-cam-28", (1, 2, 1, 1))],
)
def test_the_first_published_resnet_is_what_is_written_down_here(name: str, strides: tuple[int, ...]) -> None:
    model = WSOL_BACKBONES[name].build(5).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # small variances, so that the epsilon is seen
            nn.init.uniform_(module.weight, 0.02, 0.06)
            nn.init.normal_(module.bias, std=0.1)
            module.running_var = torch.rand_like(module.weight) * 0.01
            module.running_mean = torch.randn_like(module.weight) * 0.01
    nn.init.normal_(model.get_parameter("fc.weight"))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = first_published_resnet(model.state_dict(), images, strides)
        found = model(images)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.slow
def test_inceptions_stem_has_the_sizes_of_the_protocol() -> None:
    model = load_classifier("wsol:inception_v3-cam", pretrained=False, num_classes=3).model
    names = ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "maxpool1", "Conv2d_3b_1x1", "Conv2d_4a_3x3")
    sizes = [output_size(model, name)[-1] for name in (*names, "maxpool2", "maxpool3", "Mixed_6a")]
    assert sizes == [112, 110, 110, 56, 56, 54, 28, 14, 14]


@pytest.mark.slow
def test_the_mean_before_the_last_convolution_is_the_mean_after_it() -> None:
    model = CamInception(7, fine=False).eval()
    images = torch.randn(2, 3, 64, 64)
    kept: list[Tensor] = []
    handle = model.SPG_A3_2b.register_forward_hook(lambda m, a, out: kept.append(out))
    with torch.no_grad():
        logits = model(images)
        maps = model.SPG_A4(kept[0])  # (B, C, P, Q)
    handle.remove()
    torch.testing.assert_close(logits, maps.mean((2, 3)), rtol=1e-4, atol=1e-6)


def test_flat_inception_b_is_inception_b_before_its_stride() -> None:
    from torchvision.models.inception import InceptionB

    ours, theirs = FlatInceptionB(8).eval(), InceptionB(8).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 8, 15, 15)
    with torch.no_grad():
        # its windows start at 0, 2, ...; ours are centred at 1, 3, ... there; the double branch pads before
        single = [net.branch3x3(x) for net in (ours, theirs)]
        pooled = ours.pool(x), F.max_pool2d(x, 3, 2)
        assert ours(x).shape == (2, 384 + 96 + 8, 15, 15)
    torch.testing.assert_close(single[0][:, :, 1:-1:2, 1:-1:2], single[1])
    torch.testing.assert_close(pooled[0][:, :, 1:-1:2, 1:-1:2], pooled[1])


# Weights


def published(name: str) -> dict[str, Tensor]:
    """A random state dict in the shapes of torchvision's file."""
    from torchvision.models import get_model

    options: dict[str, Any] = {"init_weights": False} if name == "inception_v3" else {}
    model = get_model(name, weights=None, **options)
    return {key: torch.rand(tensor.shape).to(tensor.dtype) for key, tensor in model.state_dict().items()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that torchvision downloads to, without a network."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(models, "_reachable", lambda url: False)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def changed(model: nn.Module, state: dict[str, Tensor]) -> set[str]:
    """First parts of names whose tensors are not the published ones."""
    own = model.state_dict()
    return {
        key.split(".")[0] for key in own if key not in state or not torch.equal(own[key], state[key].cpu())
    }


@pytest.mark.slow
def test_resnet_takes_the_published_weights_and_drops_the_head_of_other_classes(hub: Path) -> None:
    state = published("resnet50")
    torch.save(state, hub / "resnet50-0676ba61.pth")
    assert changed(load_classifier("wsol:resnet50").model, state) == set()
    assert changed(load_classifier("wsol:resnet50-cam-28", num_classes=9).model, state) == {"fc"}


@pytest.mark.slow
def test_inception_drops_what_it_has_no_place_for_and_reads_the_earlier_file(hub: Path) -> None:
    state = published("inception_v3")
    assert any(key.startswith("AuxLogits.") for key in state)
    torch.save(state, hub / "inception_v3_google-1a9a5a14.pth")
    assert changed(load_classifier("wsol:inception_v3").model, state) == set()
    cam = load_classifier("wsol:inception_v3-cam", num_classes=9).model
    assert changed(cam, state) == {"SPG_A3_1b", "SPG_A3_2b", "SPG_A4"}


def test_vggs_convolutions_go_in_by_order_and_its_classifier_is_new_for_other_classes() -> None:
    vgg = WSOL_BACKBONES["vgg16"]
    with torch.device("meta"):
        plain, fine = vgg.build(1000), WSOL_BACKBONES["vgg16-28"].build(1000)
        other, cam = vgg.build(9), WSOL_BACKBONES["vgg16-cam-28"].build(9)
    state = dict(reversed(plain.state_dict().items()))  # in no helpful order
    names = {id(tensor): key for key, tensor in state.items()}

    def origin(name: str, model: nn.Module, classes: int) -> dict[str, str | None]:
        found = WSOL_BACKBONES[name].initial_state(model, state, classes)
        assert found.keys() == model.state_dict().keys()
        return {key: names.get(id(tensor)) for key, tensor in found.items()}

    assert all(key == source for key, source in origin("vgg16", plain, 1000).items())
    moved = origin("vgg16-28", fine, 1000)
    assert moved["features.21.weight"] == "features.21.weight"
    assert [moved[f"features.{i}.bias"] for i in (23, 25, 27)] == [f"features.{i}.bias" for i in (24, 26, 28)]
    new = {key.split(".")[0] for key, source in origin("vgg16", other, 9).items() if source is None}
    assert new == {"classifier"}
    new = {key.split(".")[0] for key, source in origin("vgg16-cam-28", cam, 9).items() if source is None}
    assert new == {"conv6", "fc"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("vgg16-cam", "vgg16-397923af.pth"),
        ("resnet50", "resnet50-0676ba61.pth"),
        ("inception_v3-cam", "inception_v3_google-0cc3c7bd.pth"),
    ],
)
def test_without_network_the_file_to_place_and_its_folder_are_named(name: str, file: str, hub: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_classifier(f"wsol:{name}", num_classes=3)
    message = str(caught.value)
    assert f"put {file} into {hub}" in message and "pretrained=False" in message and "\n" not in message


def test_a_head_that_nobody_published_is_not_made_up() -> None:
    with pytest.raises(ModelError, match="train-classifier"):
        load_classifier("wsol:vgg16-cam")


def test_an_unknown_backbone_is_told_the_names() -> None:
    with pytest.raises(ModelError, match="inception_v3-cam-28"):
        load_classifier("wsol:resnet18", pretrained=False)


@pytest.mark.slow
def test_a_saved_backbone_comes_back_with_its_classes(tmp_path: Path) -> None:
    spec, names = "wsol:inception_v3-cam", ("ant", "bee", "cow")
    made = load_classifier(spec, pretrained=False, num_classes=3)
    save_classifier(tmp_path / "c.safetensors", made.model, spec=spec, classes=names)
    back = load_classifier(spec, weights=tmp_path / "c.safetensors")
    images = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(back.model(images), made.model(images))
    assert back.classes == names


@pytest.mark.slow
@torch.no_grad()
def test_new_heads_start_as_the_protocol_says() -> None:
    resnet = WSOL_BACKBONES["resnet50"].build(200).get_submodule("fc")
    assert abs(float(resnet.get_parameter("weight").std()) - 0.01) < 1e-4
    assert not resnet.get_parameter("bias").any()
    inception = WSOL_BACKBONES["inception_v3"].build(200).get_submodule("fc")
    assert abs(float(inception.get_parameter("weight").std()) - 0.1) < 1e-3
    assert float(inception.get_parameter("bias").abs().max()) <= 2048**-0.5
    spg = WSOL_BACKBONES["inception_v3-cam"].build(200).get_submodule("SPG_A4")
    assert abs(float(spg.get_parameter("weight").abs().max()) - (6 / 1224) ** 0.5) < 1e-4
    assert not spg.get_parameter("bias").any()
