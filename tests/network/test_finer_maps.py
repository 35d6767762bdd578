"""Finer networks: the same weights, the same function on the cells both share, the user's model untouched."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import DataError
from sigcam.network.attachment import attach
from sigcam.network.dilate import dilated
from sigcam.network.dual import DualBranch
from sigcam.network.zoom import shared_copy, zoomed
from support.nets import FlatMlp, FunctionalRelu, PlainVit, Residual, SharedLayer, SoftmaxVit, convs
from support.tiny import Gap, Vgg, untouched


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lively(model: nn.Module) -> nn.Module:
    """In eval mode, with statistics that a wrong cell would show in."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif name.endswith("running_mean"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def around(model: nn.Module, *size: int, **options: Any) -> DualBranch:
    torch.manual_seed(1)
    return attach(lively(model), example=noise(1, 3, *size), **options)


def near(got: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return got.shape == wanted.shape and bool((got - wanted).abs().max() <= tolerance * wanted.abs().max())


# -------------------------------------------------------------------------------------- larger images


def test_a_convolutional_network_is_run_itself_on_bicubic_images() -> None:
    model = Gap()
    net, images = around(model, 16, 16), noise(2, 3, 16, 16)
    with untouched(model):
        finer, larger = zoomed(net, images, 1.5)
    assert finer is net
    assert torch.equal(larger, F.interpolate(images, size=(24, 24), mode="bicubic"))
    assert net(larger).features.shape[-2:] == (12, 12)


def test_zoom_one_changes_nothing() -> None:
    net, images = around(Gap(), 16, 16), noise(2, 3, 16, 16)
    finer, larger = zoomed(net, images, 1)
    assert finer is net and larger is images


@pytest.mark.parametrize(
    ("size", "zoom", "larger"),
    [((64, 96), 2, (128, 192)), ((64, 96), 1.43, (96, 128)), ((70, 64), 1.6, (112, 96))],
)
def test_sides_are_rounded_to_whole_cells(
    size: tuple[int, int], zoom: float, larger: tuple[int, int]
) -> None:
    net = around(
        nn.Sequential(convs(3, 4, 4, 4, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), 64, 96
    )
    assert zoomed(net, noise(1, 3, *size), zoom)[1].shape[-2:] == tuple(32 * round(n / 32) for n in larger)


def timm_vit(size: tuple[int, int], **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.models.VisionTransformer(
        img_size=size, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=4, **options
    )


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}, {"reg_tokens": 3}])
def test_a_timm_vit_sees_as_its_own_dynamic_size_does(options: dict[str, Any]) -> None:
    model = timm_vit((32, 48), **options)
    net, images = around(model, 32, 48), noise(2, 3, 32, 48)
    with untouched(model):
        finer, larger = zoomed(net, images, 2)
        got = finer.run(larger, grad=True)
    dynamic = timm_vit((32, 48), dynamic_img_size=True, **options).eval()
    dynamic.load_state_dict(model.state_dict())
    wanted = attach(dynamic, layer=net.split.layer, example=images[:1])(larger)
    assert larger.shape[-2:] == (64, 96) and got.features.shape[-2:] == (8, 12)
    assert near(got.features, wanted.features) and near(got.softmax, wanted.softmax)
    assert finer.sigmoid is net.sigmoid
    assert torch.autograd.grad(got.sigmoid.sum(), got.cut)[0].count_nonzero() > 0


def test_tokens_of_an_image_that_is_not_square_fold_row_by_row() -> None:
    model = timm_vit((32, 48), class_token=False, global_pool="avg", pos_embed="none")
    model.blocks = nn.Identity()  # F is the norm of each patch's embedding
    model.norm = nn.LayerNorm(16)
    net = around(model, 32, 48)
    finer, larger = zoomed(net, noise(1, 3, 32, 48), 1.5)
    cells = model.norm(model.patch_embed.proj(larger).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    assert near(finer(larger).features, cells)


def test_a_timm_swin_keeps_its_windows_and_their_weights() -> None:
    timm = pytest.importorskip("timm")
    options = {"patch_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
    model = timm.models.SwinTransformer(img_size=32, num_classes=4, **options)
    net = around(model, 32, 32)
    with untouched(model):
        finer, larger = zoomed(net, noise(2, 3, 32, 32), 2)
    assert [m.window_size for m in finer.model.modules() if hasattr(m, "window_area")] == [(4, 4)] * 8
    assert {id(p) for p in finer.model.parameters()} == {id(p) for p in model.parameters()}
    larger_model = timm.models.SwinTransformer(img_size=64, num_classes=4, **options).eval()
    larger_model.load_state_dict(model.state_dict())
    assert near(finer(larger).softmax, larger_model(larger))
    assert finer(larger).features.shape[-2:] == (8, 8)


HIDDEN = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
FACES: dict[str, dict[str, Any]] = {
    "ViT": {**HIDDEN, "image_size": 32, "patch_size": 8},
    "DeiT": {**HIDDEN, "image_size": 32, "patch_size": 8},
    "Swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "image_size": 32},
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", FACES)
def test_a_transformers_model_is_asked_to_interpolate(kind: str, wrapped: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from sigcam.models.builders import LogitsOnly

    config = getattr(transformers, f"{kind}Config")(num_labels=4, **FACES[kind])
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    net = around(LogitsOnly(model) if wrapped else model, 32, 32)
    with untouched(model):
        finer, larger = zoomed(net, noise(2, 3, 32, 32), 2)
        got = finer(larger)
    assert near(got.softmax, model(larger, interpolate_pos_encoding=True).logits)
    assert got.features.shape[-2:] == tuple(2 * n for n in net.split.fold.grid)


def test_a_torchvision_vit_has_its_embeddings_interpolated() -> None:
    from torchvision.models import VisionTransformer
    from torchvision.models.vision_transformer import interpolate_embeddings

    options: dict[str, int] = {
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 16,
        "mlp_dim": 16,
        "num_classes": 4,
    }
    model = VisionTransformer(32, 8, **options)
    nn.init.normal_(model.heads.head.weight)
    net = around(model, 32, 32)
    with untouched(model):
        finer, larger = zoomed(net, noise(2, 3, 32, 32), 1.5)
    wanted = VisionTransformer(48, 8, **options).eval()
    wanted.load_state_dict(interpolate_embeddings(48, 8, model.state_dict()))
    assert near(finer(larger).softmax, wanted(larger)) and finer(larger).features.shape[-2:] == (6, 6)


@pytest.mark.parametrize("zoom", [0.5, 0, -1, math.nan, math.inf, "2", True, None])
def test_a_zoom_that_is_no_number_of_at_least_one_is_refused(zoom: Any) -> None:
    with pytest.raises(DataError, match="zoom must be a number of at least 1, not"):
        zoomed(around(Gap(), 16, 16), noise(1, 3, 16, 16), zoom)


def test_a_zoom_too_small_for_another_cell_is_refused_with_one_that_is_not() -> None:
    net, images = around(FunctionalRelu(), 32, 32), noise(1, 3, 32, 32)
    with pytest.raises(
        DataError, match=r"zoom=1\.1 adds no cell to the map of 32x32 images: zoom=1\.25 does\."
    ):
        zoomed(net, images, 1.1)
    assert zoomed(net, images, 1.25)[1].shape[-2:] == (40, 40)


@pytest.mark.parametrize("model", [PlainVit((32, 48)), SoftmaxVit(64), FlatMlp((32, 48))])
def test_a_model_of_one_size_says_so_and_what_failed(model: nn.Module) -> None:
    size = (64, 64) if isinstance(model, SoftmaxVit) else (32, 48)
    net = around(model, *size)
    if isinstance(model, SoftmaxVit):  # it has no positions, so takes any size
        finer, larger = zoomed(net, noise(1, 3, *size), 2)
        assert finer(larger).features.shape[-2:] == (8, 8)
        return
    with (
        untouched(model),
        pytest.raises(DataError, match=r"64x96, and this \w+ takes one size only \(RuntimeE"),
    ):
        zoomed(net, noise(1, 3, *size), 2)


def test_a_model_that_resizes_its_images_makes_no_finer_map() -> None:
    class Resizing(Gap):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.interpolate(x, size=(16, 16)))

    with pytest.raises(DataError, match="the map of this Resizing does not grow"):
        zoomed(around(Resizing(), 16, 16), noise(1, 3, 16, 16), 2)


# --------------------------------------------------------------------------------------- a finer stride


def later() -> list[nn.Module]:
    """Every kind of window that a last stage may have after its stride."""
    return [
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.MaxPool2d(3, 1, 1),
        nn.Conv2d(6, 6, (1, 5), padding="same", groups=2),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(6, 6, 3),
        nn.ReLU(),
    ]


STRIDED: dict[str, Callable[[], nn.Module]] = {
    "conv 3": lambda: nn.Conv2d(6, 6, 3, 2, 1),
    "conv 1": lambda: nn.Conv2d(6, 6, 1, 2),
    "conv 2": lambda: nn.Conv2d(6, 6, 2, 2),
    "conv 5, depthwise": lambda: nn.Conv2d(6, 6, 5, 2, 2, groups=6),
    "conv 3, no padding": lambda: nn.Conv2d(6, 6, 3, 2),
    "conv 3, dilated": lambda: nn.Conv2d(6, 6, 3, 2, 2, dilation=2),
    "conv 3, reflecting": lambda: nn.Conv2d(6, 6, 3, 2, 1, padding_mode="reflect"),
    "conv 4, stride 4": lambda: nn.Conv2d(6, 6, 4, 4),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 3, 2, 1)),
    "max 2": lambda: nn.MaxPool2d(2),
    "max 3": lambda: nn.MaxPool2d(3, 2, 1),
    "max 3, rounded up": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "mean 2": lambda: nn.AvgPool2d(2),
    "mean 3": lambda: nn.AvgPool2d(3, 2, 1),
    "mean 3, padding not counted": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "mean 2, rounded up": lambda: nn.AvgPool2d(2, 2, ceil_mode=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [(48, 80), (54, 62)])
@pytest.mark.parametrize("name", STRIDED)
def test_every_second_cell_of_the_dilated_map_is_the_map(name: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), STRIDED[name](), *later())
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    net, images = around(model, *size), noise(2, 3, *size)
    with untouched(model):
        finer = dilated(net)
        got = finer(images).features
    wanted = net(images).features
    assert near(got[..., ::2, ::2], wanted)
    assert all(m in (2 * n - 1, 2 * n) for n, m in zip(wanted.shape[-2:], got.shape[-2:], strict=True))
    assert {id(t) for t in finer.model.state_dict(keep_vars=True).values()} == {
        id(t) for t in model.state_dict(keep_vars=True).values()
    }


class Reduction(nn.Module):
    """An Inception reduction: three branches with a stride each, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = convs(3, 4), nn.Linear(16, 5)
        self.pool, self.left = nn.MaxPool2d(3, 2), nn.Conv2d(4, 6, 3, 2)
        self.right = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2))
        self.last = nn.Conv2d(16, 16, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.last(torch.cat([self.left(x), self.right(x), self.pool(x)], 1))
        return self.fc(x.relu().mean((2, 3)))


class Shortcut(nn.Module):
    """A ResNet-D block: a padded convolution beside average pooling, whose natural sizes differ."""

    def __init__(self, pool: nn.Module | None = None, strided: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.fc = convs(3, 8), nn.Linear(8, 5)
        self.conv1 = strided or nn.Conv2d(8, 8, 3, 2, 1)
        self.conv2, self.pool = nn.Conv2d(8, 8, 3, 1, 1), pool or nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc((self.conv2(self.conv1(x).relu()) + self.pool(x)).relu().mean((2, 3)))


class Squeezing(Shortcut):
    """Squeeze-and-excitation after the stride."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.stem(x))
        x = self.conv2(x * x.mean((2, 3), keepdim=True).sigmoid())
        return self.fc(x.relu().mean((2, 3)))


def torchvision_model(name: str) -> nn.Module:
    import torchvision.models as zoo
    from torchvision.models.convnext import CNBlockConfig

    if name == "densenet":
        return zoo.DenseNet(4, (2, 2, 2), 8, bn_size=2, num_classes=5)
    if name == "convnext":
        widths = [CNBlockConfig(8, 12, 1), CNBlockConfig(12, 16, 1), CNBlockConfig(16, None, 2)]
        return zoo.ConvNeXt(widths, layer_scale=1.0, num_classes=5)
    if name == "mobilenet_v3":
        return zoo.mobilenet_v3_small(num_classes=5)
    return zoo.get_model(name, num_classes=5)


WHOLE: dict[str, tuple[Callable[[], nn.Module], int, float]] = {  # first shared cell, tolerance
    "branches side by side": (Reduction, 0, 1e-5),
    "pooled shortcut": (Shortcut, 0, 1e-5),
    "shortcut rounded up": (
        lambda: Shortcut(nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)),
        0,
        1e-5,
    ),
    "max shortcut": (lambda: Shortcut(nn.MaxPool2d(2)), 0, 1e-5),
    "functional steps before": (FunctionalRelu, 0, 1e-5),
    "inline residual": (Residual, 0, 1e-5),
    "one layer called twice": (SharedLayer, 0, 1e-5),
    "squeezing": (Squeezing, 0, 0.2),
    "resnet18": (lambda: torchvision_model("resnet18"), 0, 1e-5),
    "mobilenet_v2": (lambda: torchvision_model("mobilenet_v2"), 0, 1e-4),
    "mobilenet_v3": (lambda: torchvision_model("mobilenet_v3"), 0, 1e-2),
    "shufflenet": (lambda: torchvision_model("shufflenet_v2_x0_5"), 0, 1e-4),
    "squeezenet": (lambda: torchvision_model("squeezenet1_1"), 0, 1e-5),
    "densenet": (lambda: torchvision_model("densenet"), 0, 1e-5),
    "convnext": (lambda: torchvision_model("convnext"), 0, 1e-5),
    "regnet": (lambda: torchvision_model("regnet_x_400mf"), 0, 1e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_network_keeps_its_map_inside_the_dilated_one(name: str) -> None:
    torch.manual_seed(0)
    model = WHOLE[name][0]()
    net, images = around(model, 64, 64), noise(2, 3, 64, 64)
    check_dilated(net, model, images, *WHOLE[name][1:])


TIMM = [
    ("tf_efficientnet_lite0", 1, 1e-5),  # 'same' padding: the first fine cell is a new one
    ("test_efficientnet", 0, 5e-2),
    ("test_resnet", 0, 5e-2),
    ("test_byobnet", 0, 5e-2),
    ("test_nfnet", 0, 5e-2),
    ("test_convnext", 0, 1e-4),
    ("resnet10t", 0, 1e-4),
    ("mambaout_femto", 0, 1e-4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first", "tolerance"), TIMM)
def test_a_timm_network_keeps_its_map_inside_the_dilated_one(name: str, first: int, tolerance: float) -> None:
    torch.manual_seed(0)
    model = pytest.importorskip("timm").create_model(name, num_classes=5)
    check_dilated(around(model, 64, 64), model, noise(2, 3, 64, 64), first, tolerance)


def check_dilated(net: DualBranch, model: nn.Module, images: Tensor, first: int, tolerance: float) -> None:
    with untouched(model):
        finer = dilated(net)
        got = finer.run(images, grad=True)
    wanted = net(images)
    assert near(got.features[..., first::2, first::2], wanted.features, tolerance)
    assert got.features.shape[-1] > wanted.features.shape[-1]
    if "softmax" in net.linear:
        layer = net.last_layer("softmax")
        assert near(
            got.softmax, F.linear(got.features.mean((2, 3)), layer.weight.flatten(1), layer.bias), 1e-4
        )
    assert finer.sigmoid is net.sigmoid and got.sigmoid.shape == wanted.sigmoid.shape
    (gradient,) = torch.autograd.grad(got.sigmoid[:, 1].sum(), got.cut)
    assert gradient.shape == got.cut.shape and gradient.count_nonzero() > 0
    again = dilated(net)  # by the plan that was remembered
    assert torch.equal(again(images).features, got.features)


@pytest.mark.slow
def test_logits_of_a_smooth_image_stay_close() -> None:
    net = around(torchvision_model("resnet18"), 128, 128)
    images = F.interpolate(noise(4, 3, 4, 4), size=(128, 128), mode="bicubic")
    native, fine = net(images).softmax, dilated(net)(images).softmax
    assert torch.corrcoef(torch.stack([native.flatten(), fine.flatten()]))[0, 1] > 0.95


def test_adaptive_pooling_heads_work_and_pooling_after_the_features_is_spread_too() -> None:
    model = nn.Sequential(
        nn.Sequential(*convs(3, 4, 6), nn.MaxPool2d(2)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    net, images = around(model, 32, 32), noise(2, 3, 32, 32)
    finer = dilated(net)
    assert net.split.layer == "0.1" and finer(images).features.shape[-2:] == (16, 16)
    pooled = finer.model[0][2](finer(images).features)
    assert near(pooled[..., ::2, ::2], model[0][2](net(images).features))


def test_pooling_over_the_whole_grid_stays_pooling_over_the_whole_grid() -> None:
    model = nn.Sequential(convs(3, 4, 6), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(6, 4))
    net, images = around(model, 32, 32), noise(2, 3, 32, 32)
    got = dilated(net)(images)
    assert near(got.softmax, model[3](got.features.mean((2, 3))))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_of_another_kind_is_spread_where_that_is_exact(mode: str) -> None:
    after = nn.Conv2d(6, 6, 3, padding=1, padding_mode=mode)
    net = around(gap_after(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), after), 33, 33)
    images = noise(2, 3, 33, 33)
    assert near(dilated(net)(images).features[..., ::2, ::2], net(images).features)


@pytest.mark.slow
def test_an_earlier_layer_is_twice_as_fine_and_what_follows_it_keeps_its_function() -> None:
    model = torchvision_model("resnet18")
    net, images = around(model, 64, 64, layer="layer2"), noise(2, 3, 64, 64)
    finer = dilated(net)
    assert near(finer(images).features[..., ::2, ::2], net(images).features)
    last, both = "layer4", list[Tensor]()
    for either in (net.model, finer.model):
        handle = either.get_submodule(last).register_forward_hook(lambda m, args, out: both.append(out))
        either(images)
        handle.remove()
    assert near(both[1][..., ::2, ::2], both[0])


def test_dilation_and_zoom_together() -> None:
    net, images = around(FunctionalRelu(), 32, 32), noise(1, 3, 32, 32)
    finer, larger = zoomed(dilated(net), images, 2)
    assert net(images).features.shape[-2:] == (4, 4) and finer(larger).features.shape[-2:] == (16, 16)


@pytest.mark.slow
def test_dilating_twice_takes_out_the_last_two_strides() -> None:
    net, images = around(torchvision_model("resnet18"), 64, 64), noise(2, 3, 64, 64)
    finest = dilated(dilated(net))(images).features
    assert finest.shape[-2:] == (8, 8) and near(finest[..., ::4, ::4], net(images).features)


class PoolTwice(FunctionalRelu):
    """One pooling module, called after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.pool(self.conv1(x)))
        return self.fc(self.bn2(self.pool(x)).mean((2, 3)))


class FunctionalLast(FunctionalRelu):
    """The last stride is a function's."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.avg_pool2d(self.conv2(x), 2)
        return self.fc(self.bn2(x).mean((2, 3)))


class Sliced(Shortcut):
    """A shortcut by slicing, which no module's stride reaches."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc(self.conv2(self.conv1(x) + x[..., ::2, ::2]).relu().mean((2, 3)))


class Attending(Shortcut):
    """Attention between the cells of the last stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.stem(x))
        cells = x.flatten(2).transpose(1, 2)
        x = F.scaled_dot_product_attention(cells, cells, cells).transpose(1, 2).reshape(x.shape)
        return self.fc(self.conv2(x).relu().mean((2, 3)))


class ConvHead(nn.Module):
    """A head with a convolution that reads neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convs(3, 4, 6)
        self.head = nn.Sequential(nn.Conv2d(6, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Merging(nn.Module):
    """The grid is halved by reshaping, two cells side by side becoming channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.fc = convs(3, 4), nn.Conv2d(16, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
        return self.fc(self.mix(x.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)).relu().mean((2, 3)))


def gap_after(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tokens": (lambda: PlainVit((32, 32)), "its features are tokens"),
    "flattened grid": (lambda: Vgg(), "does not run on a finer grid"),
    "module that runs twice": (PoolTwice, "'pool' runs several times in one pass"),
    "functional stride": (FunctionalLast, "its last stage uses avg_pool2d"),
    "sliced shortcut": (Sliced, "does not run on a finer grid"),
    "attention": (Attending, "its last stage uses scaled_dot_product_attention"),
    "head of neighbours": (ConvHead, "its head reads neighbouring cells, in 'head.0'"),
    "reshaped grid": (Merging, "the grid shrinks between 'stem.0.0' and its features, in no module"),
    "no stride": (
        lambda: gap_after(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()),
        "module before its features has a",
    ),
    "odd stride": (
        lambda: gap_after(nn.Conv2d(3, 6, 3, 3), nn.ReLU()),
        r"the stride of '0\.0' is \(3, 3\), not 2",
    ),
    "padding by itself": (
        lambda: gap_after(nn.Conv2d(3, 6, 3, 2, 1), nn.ZeroPad2d(1), nn.Conv2d(6, 6, 3), nn.ReLU()),
        "its last stage uses pad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dilated_exactly_is_refused_in_one_line(name: str) -> None:
    make, why = REFUSED[name]
    model, size = make(), 16 if name == "flattened grid" else 32
    net = around(model, size, size)
    with untouched(model), pytest.raises(DataError, match=why) as caught:
        dilated(net)
    text = str(caught.value)
    assert text.startswith("stride=1 is not possible for this ")
    assert text.endswith("Use zoom= for a finer map.")
    assert "\n" not in text


# ------------------------------------------------------------------------------------------ the copy


def test_a_shared_copy_follows_the_weights_and_keeps_its_own_modules() -> None:
    model = lively(FunctionalRelu())
    other, images = shared_copy(model), noise(1, 3, 32, 32)
    with torch.no_grad():
        model.conv1.weight.mul_(2)
    assert torch.equal(other(images), model(images))
    other.conv1.stride = (1, 1)
    assert model.conv1.stride == (2, 2)


def test_hooks_of_the_users_work_on_the_copy_as_on_the_model() -> None:
    class Catching(Gap):
        """Reads its features from where its own hook has put them."""

        def __init__(self) -> None:
            super().__init__()
            self.caught: list[Tensor] = []
            self.body.register_forward_hook(self.catch)

        def catch(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.caught = [out]

        def forward(self, x: Tensor) -> Tensor:
            self.body(x)
            return self.fc(self.caught[0].mean((2, 3)))

    model = lively(Catching())
    model.body[0].register_forward_hook(lambda module, args, out: 2 * out)
    images = noise(2, 3, 16, 16)
    wanted, kept = model(images), model.caught[0]
    other = shared_copy(model)
    assert torch.equal(other(images), wanted)
    assert model.caught[0] is kept and other.caught[0] is not kept


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = lively(Gap())
    net = around(model, 16, 16)
    model.generator = (n for n in range(3))
    with pytest.raises(DataError, match=r"this Gap cannot be copied \(TypeError"):
        dilated(net)


@pytest.mark.slow
def test_what_is_remembered_of_a_network_goes_with_it() -> None:
    from sigcam.network import dilate as dilating
    from sigcam.network import zoom as zooming

    before = len(dilating._PLANS), len(zooming._CHECKED)
    net = around(FunctionalRelu(), 32, 32)
    zoomed(net, noise(1, 3, 32, 32), 2)
    dilated(net)
    del net
    gc.collect()
    assert (len(dilating._PLANS), len(zooming._CHECKED)) <= before
