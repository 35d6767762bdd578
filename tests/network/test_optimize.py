"""optimized: a private copy with the same names and logits; BatchNorm folded where that is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations, prune

from sigcam import attach, explain
from sigcam.core.errors import AttachError
from sigcam.network.dilate import dilated
from sigcam.network.optimize import PackedConv2d, PackedLinear, optimized
from sigcam.network.trace import agree
from support.nets import FunctionalRelu, Residual, SharedRelu
from support.tiny import Gap, Normed, Vgg, attached, images, untouched


def seasoned(model: nn.Module) -> nn.Module:
    """In eval mode, its BatchNorms as if they had been trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
                norm.running_mean.normal_(0, 0.3, generator=generator)
                norm.running_var.uniform_(0.5, 2, generator=generator)
                if norm.affine:
                    norm.weight.uniform_(0.5, 1.5, generator=generator)
                    norm.bias.normal_(0, 0.3, generator=generator)
    return model.eval()


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def checked(model: nn.Module, batch: Tensor) -> nn.Module:
    """The copy, after the claims that hold for every network."""
    with untouched(model):
        fast = optimized(model, batch[:1])
    names = [name for name, _ in model.named_modules()]
    assert [name for name, _ in fast.named_modules()] == names
    assert not any(p.requires_grad for p in fast.parameters())
    assert not any(module.training for module in fast.modules())
    assert not {id(p) for p in fast.parameters()} & {id(p) for p in model.parameters()}
    with torch.no_grad():
        assert agree(fast(batch), model.eval()(batch))
    return fast


class Body(nn.Module):
    """What `steps` make of the image, pooled, and a linear layer."""

    def __init__(self, *steps: nn.Module, channels: int = 6) -> None:
        super().__init__()
        self.body, self.fc = nn.Sequential(*steps), nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).mean((2, 3)))


class Chosen(nn.Module):
    """conv and bn used as `how` says."""

    def __init__(self, how: Callable[[Chosen, Tensor], Tensor], **options: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.conv, self.bn, self.fc = nn.Conv2d(6, 6, 3, 1, 1), nn.BatchNorm2d(6, **options), nn.Linear(6, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.how(self, self.stem(x)).mean((2, 3)))


class Aliased(Body):
    """Its norm is registered twice, and reached by the second name too."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.norm = self.body[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.body[0](x)).mean((2, 3)))


class Loud(nn.BatchNorm2d):
    """Doubles what a BatchNorm returns."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Standardised(nn.Conv2d):
    """Scales its weights in every pass."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight / self.weight.std(), self.bias)


FOLDED: dict[str, Callable[[], nn.Module]] = {
    "conv, norm, ReLU": lambda: Body(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
    "without bias": lambda: Body(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
    "without affine": lambda: Body(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.ReLU()),
    "grouped": lambda: Body(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.SiLU()),
    "padded by name": lambda: Body(nn.Conv2d(3, 6, 3, padding="same"), nn.BatchNorm2d(6), nn.ReLU()),
    "padded by reflection": lambda: Body(
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(6)
    ),
    "nothing between but names": lambda: Body(nn.Sequential(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6)),
    "functions": lambda: FunctionalRelu(),
    "one ReLU for all": lambda: SharedRelu(),
    "residual": lambda: Residual(),
    "norm and activation in one": lambda: Body(
        nn.Conv2d(3, 6, 3), timm.layers.BatchNormAct2d(6, act_layer=nn.SiLU), nn.Conv2d(6, 6, 1)
    ),
    "norm with two names": lambda: Aliased(),
}

LEFT: dict[str, Callable[[], nn.Module]] = {
    "norm after a pooling": lambda: Body(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.BatchNorm2d(6)),
    "norm of the image": lambda: Body(nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3)),
    "transposed convolution": lambda: Body(nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6)),
    "no running statistics": lambda: Body(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU()
    ),
    "weights made anew": lambda: Body(Standardised(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
    "parametrization": lambda: Body(parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6)),
    "pruned": lambda: Body(prune.l1_unstructured(nn.Conv2d(3, 6, 3), "weight", 0.3), nn.BatchNorm2d(6)),
    "norm with more to it": lambda: Body(nn.Conv2d(3, 6, 3), Loud(6)),
    "norm used twice": lambda: Chosen(lambda net, x: net.bn(net.conv(net.bn(x)))),
    "conv used twice": lambda: Chosen(lambda net, x: net.bn(net.conv(net.conv(x)))),
    "conv read twice": lambda: Chosen(lambda net, x: net.bn(y := net.conv(x)) + y),
    "conv read first": lambda: Chosen(lambda net, x: (y := net.conv(x)).relu() + net.bn(y)),
    "weight read twice": lambda: Chosen(lambda net, x: net.bn(net.conv(x)) * net.conv.weight.mean()),
    "changed on the way": lambda: Chosen(lambda net, x: net.bn(net.conv(x).relu_())),
    "attribute read": lambda: Chosen(lambda net, x: net.bn(net.conv(x)) / net.bn.num_features),
}


@pytest.mark.parametrize("kind", FOLDED)
def test_batchnorm_goes_into_the_convolution_before_it(kind: str) -> None:
    model = seasoned(FOLDED[kind]())
    assert norms(model) > 0
    assert norms(checked(model, images())) == 0


@pytest.mark.parametrize("kind", LEFT)
def test_batchnorm_stays_where_folding_would_be_wrong(kind: str) -> None:
    model = seasoned(LEFT[kind]())
    assert norms(checked(model, images())) == 1


def test_shared_weights_stay_shared() -> None:
    model = Body(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1))
    model.body[3].weight = model.body[1].weight
    fast = checked(seasoned(model), images())
    assert norms(fast) == 1
    assert fast.body[3].weight is fast.body[1].weight


def test_linear_layers_take_a_batchnorm_of_vectors_but_not_of_tokens() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.mix, self.bn = nn.Conv2d(3, 6, 4, 4), nn.Linear(16, 16), nn.BatchNorm1d(6)
            self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(self.mix(self.stem(x).flatten(2))).mean(2))

    fast = checked(seasoned(Tokens()), images())
    assert isinstance(fast.bn, nn.BatchNorm1d)
    assert isinstance(fast.head[1], nn.Identity)


def test_a_hooked_or_kept_layer_returns_what_it_did() -> None:
    model = seasoned(FunctionalRelu())
    seen: list[Tensor] = []
    model.conv1.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    fast = checked(model, images())
    assert [norms(fast), isinstance(fast.bn2, nn.Identity)] == [1, True]
    assert norms(optimized(model, images(1), keep=["conv2"])) == 2


@pytest.mark.parametrize(
    "make",
    [Gap, Vgg, Normed, lambda: Body(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))],
    ids=["gap", "vgg", "normed", "body"],
)
def test_other_networks_keep_their_logits(make: Callable[[], nn.Module]) -> None:
    checked(seasoned(make()), images())
    model = make()
    model.train()  # as it may come
    checked(model, images())


class TokenMlp(nn.Module):
    """Patches, a block with an MLP of each kind of GELU, the mean over patches, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.first, self.second = nn.GELU(), nn.GELU("tanh")
        self.wide, self.fc = nn.Linear(64, 256), nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # not contiguous
        tokens = tokens + self.down(self.first(self.up(tokens)))
        logits: Tensor = self.fc(self.second(self.wide(tokens)).mean(1))
        return logits


def test_large_linear_layers_are_packed_with_the_gelu_that_follows() -> None:
    model = TokenMlp().eval()
    fast = checked(model, images(3, size=16))
    assert all(isinstance(fast.get_submodule(name), PackedLinear) for name in ("up", "down", "wide"))
    assert not isinstance(fast.fc, PackedLinear)  # too small to gain anything
    kinds = [fast.get_submodule(name).activation for name in ("up", "down", "wide")]
    assert kinds == [("gelu", [], "none"), ("none", [], ""), ("gelu", [], "tanh")]
    with torch.no_grad():
        for batch in (images(1, size=16), images(5, size=32), images(0, size=16)):  # of other shapes
            assert torch.allclose(fast(batch), model(batch), atol=1e-5)
    grown = images(2, size=16).requires_grad_()
    wanted, got = (torch.autograd.grad(net(grown).sum(), grown)[0] for net in (model, fast))
    assert torch.allclose(wanted, got, atol=1e-5)
    fast.double()
    assert torch.allclose(fast(images(2, size=16).double()).float(), model(images(2, size=16)), atol=1e-4)


@pytest.mark.slow
def test_resnet18_has_no_batchnorm_left() -> None:
    fast = checked(seasoned(torchvision.models.resnet18(num_classes=5)), images(2, size=64))
    assert norms(fast) == 0
    assert all(isinstance(m, PackedConv2d) for m in fast.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("tf_efficientnet_lite0", 0),
        ("resnetv2_18", None),
        ("mobilenetv3_small_050", 0),
        ("test_vit", 0),
        ("test_convnext", 0),
        ("test_byobnet", 0),
    ],
)
def test_timm_models_keep_their_logits(name: str, left: int | None) -> None:
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    model = seasoned(timm.create_model(name, num_classes=5))
    size = model.pretrained_cfg["input_size"][-1] if "vit" in name else 64
    fast = checked(model, images(2, size=size))
    assert left is None or norms(fast) == left


@pytest.mark.slow
def test_maps_agree_with_those_of_the_model_itself() -> None:
    for make in (lambda: Residual(), lambda: seasoned(torchvision.models.resnet18(num_classes=5)), Vgg):
        model, batch = make().eval(), images(4, size=64 if make is not Vgg else 16)
        seasoned(model)
        nets = attached(model), attached(optimized(model, batch[:1]))
        for branch in ("sigmoid", "softmax"):
            maps = [explain(net, batch, "grad-cam", branch=branch).maps for net in nets]
            assert (maps[0] - maps[1]).abs().max() < 1e-4


def test_gradients_pass_the_copy() -> None:
    model = seasoned(FunctionalRelu())
    batch = images().requires_grad_()
    fast = optimized(model, batch[:1].detach())
    ours, theirs = (torch.autograd.grad(net(batch)[:, 1].sum(), batch)[0] for net in (fast, model))
    assert agree(ours, theirs)


def test_any_batch_and_size_after_another() -> None:
    model = seasoned(FunctionalRelu())
    fast = optimized(model, images(1))
    with torch.no_grad():
        for count, size in ((1, 16), (5, 16), (2, 40), (1, 16)):
            batch = images(count, size=size)
            assert agree(fast(batch), model(batch))
            assert agree(fast(batch.contiguous(memory_format=torch.channels_last)), model(batch))
    with torch.inference_mode():
        assert agree(fast(batch), model(batch))


def test_the_copy_can_be_copied_and_changed() -> None:
    fast = optimized(seasoned(FunctionalRelu()), images(1))
    with torch.no_grad():
        again = deepcopy(fast)
        assert torch.equal(again(images()), fast(images()))
        assert agree(deepcopy(fast).double()(images().double()), fast(images()))
        with torch.autocast("cpu", torch.bfloat16):
            rough = fast(images())
    assert rough.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_are_right_or_left_alone(dtype: torch.dtype) -> None:
    model = seasoned(FunctionalRelu()).to(dtype)
    fast = checked(model, images().to(dtype))
    assert not any(isinstance(module, PackedConv2d) for module in fast.modules())
    if dtype == torch.float64:
        assert norms(fast) == 0
        with torch.no_grad():
            batch = images().double()
            assert (fast(batch) - model(batch)).abs().max() < 1e-12


def test_a_view_that_needs_channels_first_keeps_them() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(3, 6, 4, 4), nn.BatchNorm2d(6), nn.Linear(6 * 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.relu(self.bn(self.conv(x))).view(len(x), -1))

    fast = checked(seasoned(Viewing()), images())
    assert norms(fast) == 0
    assert not isinstance(fast.conv, PackedConv2d)


def test_a_model_that_cannot_be_copied_says_so() -> None:
    model = Gap()
    model.lock = threading.Lock()  # deepcopy takes no such thing
    with untouched(model), pytest.raises(AttachError, match="attach it without optimize"):
        optimized(model, images(1))


def test_inference_mode_and_its_tensors_are_fine() -> None:
    model = seasoned(FunctionalRelu())
    with torch.inference_mode():
        fast = optimized(model, images(1))
    assert norms(fast) == 0
    assert not any(tensor.is_inference() for tensor in (*fast.parameters(), *fast.buffers()))
    fast(images().requires_grad_()).sum().backward()


def with_nan(batch: Tensor) -> Tensor:
    """The batch with one NaN in its second image."""
    batch = batch.clone()
    batch[1, 0, 5, 5] = torch.nan
    return batch


def fused() -> nn.Module:
    """Two convolutions, each followed by a ReLU module that can be fused into it."""
    return seasoned(
        Body(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.ReLU())
    )


@pytest.mark.slow
def test_nan_in_an_image_is_not_hidden_by_a_fused_activation() -> None:
    net = attach(torchvision.models.resnet18(weights=None).eval(), optimize=True)
    seen = net(with_nan(torch.randn(2, 3, 64, 64)))
    assert bool(seen.features[0].isfinite().all()) and bool(seen.features[1].isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nan_in_an_image_is_seen_by_the_copy_in_any_type(dtype: torch.dtype) -> None:
    model = fused()
    net = attach(model, example=images(1), optimize=True)
    assert net.model.hides_nan
    net.to(dtype)
    with untouched(model):
        seen = net(with_nan(images()).to(dtype))
    assert seen.features.dtype == dtype
    assert bool(seen.features[0].isfinite().all()) and bool(seen.features[1].isnan().any())
    assert bool(seen.softmax[1].isnan().all()) and bool(seen.softmax[0].isfinite().all())


def test_nan_in_an_image_is_seen_by_a_finer_copy_too() -> None:
    net = attach(fused(), example=images(1), optimize=True)
    coarse, fine = net(images()).features, dilated(net)(with_nan(images())).features
    assert fine.shape[-1] > coarse.shape[-1] and bool(fine[1].isnan().any())


def test_packed_weights_follow_the_weights() -> None:
    fast = optimized(fused(), images(1))
    with torch.no_grad():
        before = fast(images())
        fast.bfloat16().float()  # which rounds them
        after = fast(images())
        with torch.enable_grad():
            plain = fast(images().requires_grad_()).detach()  # by plain convolutions
    assert not torch.equal(after, before)
    assert agree(after, plain)
