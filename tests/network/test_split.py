"""Where a classifier splits: networks written without any convention, and the sentences for those refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sigcam.core.errors import AttachError
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.network.feature_layer import FeatureLayout
from sigcam.network.trace import logits_of
from support.nets import (
    WRAPPINGS,
    Adapter,
    ConvThenMean,
    CosineHead,
    Encoder,
    FlatMlp,
    FrozenTrunk,
    FunctionalRelu,
    HandSwish,
    Normalise,
    PlainVit,
    RawParameters,
    ReluAfterHead,
    Residual,
    Returns,
    SharedLayer,
    SharedRelu,
    SoftmaxVit,
    TwoStreams,
    TwoViews,
    convs,
    footprint,
)

WIDE = (32, 48)


def check(
    model: nn.Module, size: tuple[int, int] = WIDE, channels: int = 3, example: bool = True, **named: Any
) -> DualBranch:
    """Attaches and asserts what holds for every classifier; returns the network."""
    model.train()
    images = torch.randn(2, channels, *size)
    before = footprint(model)
    net = attach(model, example=images[:1] if example else None, **named)
    assert footprint(model) == before
    with torch.no_grad():
        bare = logits_of(model.eval()(images), 2)
    out = net(images)
    assert torch.equal(out.softmax, bare)
    assert out.features.ndim == 4 and len(out.features) == 2
    assert out.sigmoid.shape == bare.shape
    torch.testing.assert_close(net.sigmoid.from_pooled(out.pooled), out.sigmoid)
    forward_pass = net.run(images, grad=True)
    (gradient,) = torch.autograd.grad(forward_pass.sigmoid[:, 0].sum(), forward_pass.cut)
    on_grid = net.split.fold(gradient, size)
    assert on_grid.shape == out.features.shape and on_grid.flatten(1).count_nonzero(1).all()
    return net


def sequential(*tail: nn.Module) -> nn.Sequential:
    return nn.Sequential(*convs(3, 8, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5), *tail)


# model, head, layer, activation after it, (N, P, Q)
OWN: dict[str, tuple[Callable[[], nn.Module], str, str, bool, tuple[int, int, int]]] = {
    "functional relu": (FunctionalRelu, "fc", "bn2", True, (12, 4, 6)),
    "shared relu module": (SharedRelu, "fc", "bn2", True, (12, 8, 12)),
    "x * sigmoid(x)": (HandSwish, "fc", "bn2", False, (12, 8, 12)),
    "inline residual": (Residual, "fc", "conv", False, (8, 16, 24)),
    "bare parameters": (RawParameters, "top", "body", False, (12, 8, 12)),
    "bare parameters and a norm": (lambda: RawParameters(norm=True), "top", "body", False, (12, 8, 12)),
    "cosine head": (
        lambda: Returns(WRAPPINGS["tensor"], head=CosineHead(12, 5)),
        *("fc", "body", False, (12, 8, 12)),
    ),
    "weight norm": (
        lambda: Returns(
            WRAPPINGS["tensor"], head=nn.utils.parametrizations.weight_norm(nn.Linear(12, 5), dim=0)
        ),
        *("fc", "body", False, (12, 8, 12)),
    ),
    "log_softmax function": (
        lambda: Returns(lambda logits, _: nn.functional.log_softmax(logits, 1)),
        *("fc", "body", False, (12, 8, 12)),
    ),
    "softmax function": (
        lambda: Returns(lambda logits, _: logits.softmax(1)),
        *("fc", "body", False, (12, 8, 12)),
    ),
    "temperature": (lambda: Returns(lambda logits, _: logits / 2.5), "fc", "body", False, (12, 8, 12)),
    "LogSoftmax module": (lambda: sequential(nn.LogSoftmax(1)), "4", "1", False, (12, 8, 12)),
    "BatchNorm after the head": (lambda: sequential(nn.BatchNorm1d(5)), "4", "1", False, (12, 8, 12)),
    "convolution, then mean": (ConvThenMean, "last", "body", False, (12, 8, 12)),
    "relu after the head": (ReluAfterHead, "head.out", "body", False, (12, 8, 12)),
    "layer used twice": (SharedLayer, "fc", "block", True, (8, 16, 24)),
    "two streams with a stem": (lambda: TwoStreams(stem=True), "fc", "stem", False, (3, 16, 24)),
    "two heads, one stem": (lambda: TwoStreams(True, True), "fc,fc2", "stem", False, (3, 16, 24)),
    "ViT": (lambda: PlainVit(WIDE), "head", "layers.1.norm1", False, (16, 4, 6)),
    "ViT with registers": (lambda: PlainVit(WIDE, registers=4), "head", "layers.1.norm1", False, (16, 4, 6)),
    "sequence-first ViT": (
        lambda: PlainVit(WIDE, batch_first=False),
        *("head", "layers.1.norm1", False, (16, 4, 6)),
    ),
    "torch's encoder, read at the class token": (
        lambda: Encoder(pooled=False),
        *("head", "encoder.layers.1", False, (16, 4, 6)),
    ),
    "torch's encoder, averaged": (lambda: Encoder(pooled=True), "head", "encoder", False, (16, 4, 6)),
    "normalise first": (
        lambda: nn.Sequential(Normalise(), FunctionalRelu()),
        *("1.fc", "1.bn2", True, (12, 4, 6)),
    ),
    "DataParallel": (lambda: nn.DataParallel(FunctionalRelu()), "fc", "bn2", True, (12, 4, 6)),
}


@pytest.mark.parametrize("habit", OWN)
def test_a_network_without_convention_attaches_by_itself(habit: str) -> None:
    build, heads, layer, activation, shape = OWN[habit]
    net = check(build())
    assert ",".join(net.split.heads) == heads
    assert (net.split.layer, net.split.activation) == (layer, activation)
    assert net(torch.randn(2, 3, *WIDE)).features.shape == (2, *shape)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("classes", [1, 2, 5])
def test_logits_are_found_in_what_the_model_returns(wrapping: str, classes: int) -> None:
    net = check(Returns(WRAPPINGS[wrapping], classes))
    assert (net.classes, net.split.heads, net.split.layer) == (classes, ("fc",), "body")


def test_one_squeezed_logit_per_image_is_one_column() -> None:
    net = check(Returns(lambda logits, _: logits[:, 0], classes=1))
    assert net.classes == 1 and net(torch.randn(3, 3, *WIDE)).softmax.shape == (3, 1)


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_probabilities_are_told_from_logits(classes: int) -> None:
    ends: list[tuple[Any, str]] = [
        (lambda logits, _: logits, "logits"),
        (lambda logits, _: logits.squeeze(-1).sigmoid(), "probabilities"),
        (lambda logits, _: nn.functional.logsigmoid(logits), "logits"),
    ]
    if classes > 1:
        ends += [
            (lambda logits, _: logits.softmax(1), "probabilities"),
            (lambda logits, _: logits.log_softmax(1), "logits"),
        ]
    for end, kind in ends:
        net = check(Returns(end, classes))
        assert net.split.output == kind and net.split.heads == ("fc",)


@pytest.mark.parametrize("how", ["no_grad", "detach", "everything"])
def test_a_trunk_that_records_no_gradient_is_explained_all_the_same(how: str) -> None:
    net = check(FrozenTrunk(how))
    assert (net.split.heads, net.split.layer) == (("fc",), "body")


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (28, 1), (64, 3)])
def test_an_mlp_on_the_flattened_map_finds_its_own_input_size(size: int, channels: int) -> None:
    net = check(FlatMlp(size=(size, size), channels=channels), (size, size), channels, example=False)
    assert (net.split.heads, net.split.layer) == (("classifier",), "features.1")


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 4])
def test_an_adapter_before_a_known_model_is_run_with_its_own_channels(channels: int) -> None:
    model = Adapter(torchvision.models.squeezenet1_1(num_classes=5), channels)
    net = check(model, (64, 96), channels, example=False)
    assert (net.split.heads, net.split.layer) == (("model.classifier",), "model.features")


def test_attention_scores_are_not_taken_for_a_map() -> None:
    net = check(SoftmaxVit(), (64, 64))  # 17 x 17 scores, and 17 x 16 queries, in a 64 x 64 image
    assert net.split.layer == "blocks.1.norm"
    assert net.split.fold == FeatureLayout("NLC", (4, 4), (64, 64), prefix=1)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 6), st.booleans())
def test_any_grid_behind_any_number_of_tokens_is_folded(p: int, q: int, registers: int, first: bool) -> None:
    if p * q == 1:
        return  # one cell is no map
    size = (8 * p, 8 * q)
    net = attach(PlainVit(size, 8, registers, first, depth=1), example=torch.randn(1, 3, *size))
    assert net.split.fold.grid == (p, q) and net.split.fold.prefix == 1 + registers


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(0, 4))
def test_fold_puts_each_token_at_its_row_and_column(batch: int, p: int, q: int, prefix: int) -> None:
    maps = torch.randn(batch, 3, p, q)
    tokens = torch.cat([torch.zeros(batch, prefix, 3), maps.flatten(2).transpose(1, 2)], 1)
    image = (16 * p, 16 * q)
    for layout, output in (("NLC", tokens), ("LNC", tokens.transpose(0, 1))):
        assert torch.equal(FeatureLayout(layout, (p, q), image, prefix)(output, image), maps)
    assert torch.equal(FeatureLayout("NHWC", (p, q), image)(maps.permute(0, 2, 3, 1), image), maps)
    doubled = FeatureLayout("NLC", (p, q), image).grid_at(4 * p * q, (32 * p, 32 * q))
    assert doubled == (2 * p, 2 * q)


@pytest.mark.slow
def test_naming_a_head_or_a_layer_overrides_what_is_found() -> None:
    model = torchvision.models.resnet18(num_classes=5)
    net = check(model, (64, 96), layer="layer3")
    assert net.split.layer == "layer3" and net.split.heads == ("fc",)
    assert net(torch.randn(2, 3, 64, 96)).features.shape == (2, 256, 4, 6)
    net = check(model, (64, 96), layer="layer4.1.bn2")
    assert net.split.layer == "layer4.1.bn2"
    net = check(FlatMlp(), (32, 32), head="classifier.2")
    assert net.split.heads == net.split.last == ("classifier.2",)
    net = check(FlatMlp(), (32, 32), head="classifier")
    assert net.split.heads == ("classifier",) and net.split.last == ("classifier.2",)
    net = check(TwoStreams(), layer="left")
    assert net.split.layer == "left"


# ------------------------------------------------------------------------------------------- refusals


class Bare(nn.Module):
    """Only functions: a mean over cells, and nothing that was trained at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Returning(nn.Module):
    """Returns a constant of its own."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.conv, self.value = nn.Conv2d(3, 4, 3), value

    def forward(self, x: Tensor) -> Any:
        self.conv(x)
        return self.value


def with_nan() -> nn.Module:
    model = FunctionalRelu()
    nn.init.constant_(model.fc.weight, float("nan"))
    return model


def no_map() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 48, 8), nn.ReLU(), nn.Linear(8, 5))


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, str], str]] = {
    "feature extractor": (
        lambda: torchvision.models.squeezenet1_1().features,
        *({}, "the model returned (1, 512, 1, 2) for 1 image(s), not (B, C) logits"),
    ),
    "pooled features": (
        lambda: nn.Sequential(*convs(3, 8, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *({}, "Sequential has no head with parameters: its (1, 12) output"),
    ),
    "identity head": (
        lambda: Returns(WRAPPINGS["tensor"], head=nn.Identity()),
        *({}, "(num_classes=0)? Give it a classifier, or name the module: attach(model, head='...')."),
    ),
    "head taken off": (
        lambda: FlatMlp(size=(32, 48), last=nn.Identity()),
        *({}, "FlatMlp has no head with parameters: its (1, 16) output is not made by a layer with 16"),
    ),
    "no module": (Bare, {}, "Bare has no head with parameters"),
    "no map": (no_map, {}, "no layer of Sequential before its head '3' gives a map"),
    "unknown head": (
        FunctionalRelu,
        {"head": "fcc"},
        "head='fcc' is not a module of FunctionalRelu: did you",
    ),
    "unknown layer": (
        lambda: torchvision.models.resnet18(),
        *({"layer": "layer5"}, "layer='layer5' is not a module of ResNet: did you mean 'layer4'"),
    ),
    "nothing near": (
        FunctionalRelu,
        *({"layer": "xyz"}, "FunctionalRelu. Its modules: conv1, bn1, conv2, bn2, fc."),
    ),
    "head without parameters": (
        SharedRelu,
        *({"head": "relu"}, "head='relu' (ReLU) has no parameters. Modules with 5 outputs: 'fc'."),
    ),
    "head with other outputs": (
        FunctionalRelu,
        *(
            {"head": "bn2"},
            "head='bn2' (BatchNorm2d) returns (1, 12, 4, 6), not 5 logits. Modules with 5 outputs: 'fc'.",
        ),
    ),
    "head that does not run": (
        lambda: nn.ModuleDict({"a": nn.Conv2d(3, 5, 1)}),
        *({}, "ModuleDict could not be run on a random image of 3x32x48"),
    ),
    "layer that gives no map": (
        FunctionalRelu,
        *(
            {"layer": "fc"},
            "layer='fc' (Linear) returns (1, 5), which does not fold to a map. Layers that do: 'bn2'",
        ),
    ),
    "layer without gradient": (
        lambda: PlainVit(WIDE),
        *(
            {"layer": "layers.1"},
            "layer='layers.1' gets no gradient on its grid. Layers that do: 'layers.1.norm1'",
        ),
    ),
    "layer that does not run": (
        lambda: torchvision.models.googlenet(num_classes=5, aux_logits=True, init_weights=False),
        *(
            {"layer": "aux1"},
            "layer='aux1' did not run, or returned no tensor, so gives no map. Layers that do",
        ),
    ),
    "two streams": (TwoStreams, {}, "several layers of TwoStreams feed its head: 'left', 'right'. Name one"),
    "one head, two views": (
        TwoViews,
        {},
        "the output layer 'fc' of TwoViews runs several times in one pass.",
    ),
    "segmentation map": (
        lambda: nn.Conv2d(3, 5, 1),
        *({}, "the model returned (1, 5, 32, 48) for 1 image(s), not (B, C) logits: sigcam explains image"),
    ),
    "string": (lambda: Returning("cat"), {}, "the model returned str, in which no logits were found."),
    "nothing": (lambda: Returning(None), {}, "the model returned NoneType, in which no logits were found."),
    "empty dict": (lambda: Returning({}), {}, "the model returned dict, in which no logits were found."),
    "NaN weights": (
        with_nan,
        {},
        "FunctionalRelu returns NaN or infinite logits for a random input: check its",
    ),
    "wrong input size": (
        lambda: FlatMlp(size=(64, 64)),
        *({}, "FlatMlp could not be run on a random image of 3x32x48 (RuntimeError: mat1 and mat2 shapes"),
    ),
    "no module at all": (lambda: "resnet50", {}, "attach needs a torch.nn.Module, not str."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_in_one_line_what_settles_it_and_leaves_nothing_behind(case: str) -> None:
    build, named, sentence = REFUSED[case]
    model = build()
    example = torch.randn(1, 3, *WIDE)
    before = footprint(model.train()) if isinstance(model, nn.Module) else None
    with pytest.raises(AttachError, match=re.escape(sentence)) as caught:
        attach(model, example=example, **named)
    assert "\n" not in str(caught.value)
    if before is not None:
        assert footprint(model) == before


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_torchscript_is_refused() -> None:
    model = FunctionalRelu().eval()
    for scripted in (torch.jit.script(model), torch.jit.trace(model, torch.randn(1, 3, *WIDE))):
        with pytest.raises(
            AttachError, match="is a TorchScript module, which takes no hooks: attach the eager"
        ):
            attach(scripted)
        with pytest.raises(AttachError, match=r"^1 is a TorchScript module"):
            attach(nn.Sequential(Normalise(), scripted))


def test_a_model_that_takes_none_of_the_usual_sizes_asks_for_an_example() -> None:
    model = FlatMlp(size=(48, 48))
    with pytest.raises(
        AttachError, match=r"of 3x224x224, 3x32x32, .* attach\(model, example=tensor of"
    ) as caught:
        attach(model)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert attach(model, example=torch.randn(1, 3, 48, 48)).split.fold.grid == (24, 24)


def test_an_example_of_another_shape_is_refused() -> None:
    with pytest.raises(AttachError, match=r"example must be \(1, C, H, W\), not \(3, 32, 32\)\."):
        attach(FunctionalRelu(), example=torch.randn(3, 32, 32))


def test_a_failure_in_the_middle_of_a_pass_leaves_hooks_and_modes_as_they_were() -> None:
    class Fails(FunctionalRelu):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model = Fails().train()
    model.bn1.eval()
    model.conv1.register_forward_hook(lambda *_: None)
    example = torch.randn(1, 3, *WIDE)
    before = footprint(model)
    with pytest.raises(KeyboardInterrupt):
        attach(model, example=example)
    assert footprint(model) == before


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid()])
def test_a_whole_classifier_followed_by_an_activation_attaches(last: nn.Module) -> None:
    inner = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    wrapped = nn.Sequential(inner, last).eval()
    x = torch.randn(2, 3, 32, 48)
    net = attach(wrapped, example=x[:1], init="copy")
    assert net.split.heads == ("0.4",) and net.split.layer == "0.1"
    with torch.no_grad():
        assert torch.equal(net(x).softmax, wrapped(x))
        assert torch.allclose(net(x).sigmoid, inner(x), atol=1e-6)


class ChannelsLast(nn.Module):
    """As many channels as rows and columns, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 4, 4)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mix(self.cut(x).permute(0, 2, 3, 1)).mean((1, 2)))


def test_channels_as_many_as_rows_are_told_from_them_by_a_wider_image() -> None:
    net = attach(ChannelsLast(), example=torch.randn(1, 3, 32, 32))
    assert net.split.fold.layout == "NHWC" and net.linear == {"softmax", "sigmoid"}


class FeaturesFirst(nn.Module):
    """Returns its feature map in front of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU()), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, self.fc(features.mean((2, 3)))


def test_logits_are_found_behind_a_feature_map() -> None:
    model, x = FeaturesFirst().eval(), torch.randn(2, 3, 16, 24)
    net = attach(model, example=x[:1])
    assert net.split.heads == ("fc",) and torch.equal(net(x).softmax, model(x)[1])


def test_of_small_images_the_deepest_layer_with_several_cells_is_taken_unless_another_is_named() -> None:
    model, small = torchvision.models.resnet18(), torch.randn(1, 3, 32, 32)
    assert attach(model, example=small).split.layer == "layer3"
    assert attach(model, example=small, layer="layer4").run(small).features.shape == (1, 512, 1, 1)
    with pytest.raises(AttachError, match=r"every layer of ResNet .* has 1 x 1 cells at 2 x 2"):
        attach(model, example=small[..., :2, :2])
