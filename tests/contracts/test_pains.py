"""What users of map libraries complain about: each complaint is shown to hold of a peer, and not of sigcam.

A complaint that another file tests, peer included, is not repeated:
12 batches      test_compat: test_a_short_list_of_targets_raises_where_the_peer_draws_nothing_for_the_rest;
                test_methods: test_a_batchs_maps_are_its_images_own
13 swallowed    test_compat: test_with_reraises_the_index_error_that_the_peer_swallows
18 formulas     test_peers: test_difference_*, with ..._ablation_cam_negative_score for flipped weights
Our side of others is tested more widely elsewhere:
1 blank maps    test_explaining: test_a_large_negative_shift_blanks_the_softmax_map_and_no_other
2, 3 gradients  test_footprint: test_results_do_not_depend_on_gradient_modes
4 leaks         test_footprint: test_a_thousand_explanations_leave_no_tensor_no_hook_and_no_memory_behind
7, 8 ViTs       test_split: test_any_grid_behind_any_number_of_tokens_is_folded; test_architectures
17 outputs      test_split: test_logits_are_found_in_what_the_model_returns
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import numpy as np
import pytest
import pytorch_grad_cam as pgc
import torch
from captum.attr import LayerGradCam
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torchcam import methods as torchcam

import sigcam
from sigcam.core.errors import AttachError
from sigcam.methods.explainer import explain
from sigcam.methods.registry import METHODS
from support.nets import PlainVit, Returns
from support.tiny import Gap, Vgg, attached, images, untouched

CNN_METHODS = [
    n
    for n, facts in METHODS.items()
    if facts.gives != "pixels" and facts.needs not in ("attention", "patches")
]


def pgc_maps(model: nn.Module, layer: nn.Module, x: Tensor, targets: Any = None, **options: Any) -> Any:
    """What pytorch-grad-cam's Grad-CAM gives; outside `with`, where it swallows no exception."""
    cam = pgc.GradCAM(model, [layer], **options)
    try:
        return cam(x, targets)
    finally:
        cam.activations_and_grads.activations.clear()  # else its __del__ may raise
        cam.activations_and_grads.gradients.clear()
        cam.activations_and_grads.release()


def torchcam_maps(
    model: nn.Module, layer: str, x: Tensor, k: int = 0, method: Any = torchcam.GradCAM
) -> Tensor:
    with method(model, layer) as cam:
        maps: Tensor = cam(k, model(x))[0]
    return maps


def captum_maps(model: nn.Module, layer: nn.Module, x: Tensor, k: int = 0) -> Tensor:
    maps: Tensor = LayerGradCam(model, layer).attribute(x, k).detach()
    return maps


def raw(net: sigcam.DualBranch, x: Tensor, **options: Any) -> Tensor:
    return explain(net, x, branch="softmax", scale="raw", size="features", **options).maps


# ------------------------------------------------------------------------------------------------ rows 1 to 4


def test_row_1_a_blank_map_is_reported_with_its_cause_and_can_be_seen_signed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Gap().eval()
    best = model(images()).argmax(1)
    with torch.no_grad():
        model.fc.weight.sub_(100)  # of every class alike: the prediction stays
    assert torch.equal(model(images()).argmax(1), best)
    assert not pgc_maps(model, model.body, images()).any()
    assert not torchcam_maps(model, "body", images()).any()
    assert not caplog.records and not capsys.readouterr().err  # without a word
    net = sigcam.attach(model)
    ex = explain(net, images(), branch="softmax")
    assert ex.blank.all() and len(caplog.records) == 3
    assert "all evidence is negative and the ReLU removes it" in ex.notes[0]
    signed = explain(net, images(), branch="softmax", scale="raw")
    assert (signed.maps <= 0).all() and not signed.blank.any()
    assert not explain(net, images(), branch="centred").blank.any()


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_rows_2_and_3_frozen_models_and_validation_loops_get_the_same_maps(
    context: Callable[[], AbstractContextManager[None]], frozen: bool
) -> None:
    torch.manual_seed(0)
    model = Vgg().eval()
    net, x = attached(model), images()
    expected = explain(net, x).maps
    model.requires_grad_(not frozen)
    with context():
        if frozen or context is not torch.enable_grad:
            with pytest.raises(RuntimeError, match="does not require grad"):
                pgc_maps(model, model.features, x)
            with pytest.raises(RuntimeError, match="not connected"):
                torchcam_maps(model, "features", x)
        if context is torch.inference_mode:
            with pytest.raises(RuntimeError, match="does not require grad"):
                captum_maps(model, model.features, x)
        with untouched(model):
            assert torch.equal(explain(net, x).maps, expected)


@pytest.mark.slow
def test_row_4_objects_that_are_dropped_leave_no_hook_no_gradient_and_no_tensor() -> None:
    model = Gap().eval()
    for _ in range(3):
        torchcam.GradCAM(model, "body")  # never closed: two hooks each, for as long as the model lives
    assert len(model.body._forward_hooks) == 6
    pgc_maps(model, model.body, images())
    assert all(parameter.grad is not None for parameter in model.parameters())  # the next step would add them

    model, x = Gap().eval(), images()
    sigcam.GradCAM(model, [model.body])(x)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    before = live()
    with untouched(model):
        for _ in range(20):
            sigcam.GradCAM(model, [model.body])(x)
    assert live() == before


# ------------------------------------------------------------------------------------------------ rows 5 to 8


@pytest.mark.parametrize("make", [Gap, Vgg])
@pytest.mark.parametrize("branch", ["sigmoid", "softmax", "centred"])
def test_row_5_no_map_passes_through_the_host(
    make: Callable[[], nn.Module], branch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = attached(make()), images()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("copied to the host")

    for name in ("cpu", "numpy", "__array__"):
        monkeypatch.setattr(Tensor, name, refuse)
    with pytest.raises(AssertionError, match="copied to the host"):
        pgc_maps(net.model, net.layer, x)
    for method in CNN_METHODS:
        if method == "cam" and make is Vgg:
            continue
        ex = explain(net, x, method, branch=branch)
        for values in (ex.maps, ex.classes, ex.probability, ex.evidence, ex.logits, ex.positive_share):
            assert type(values) is Tensor and values.device == x.device


@pytest.mark.parametrize("method", ["grad-cam", "hires-cam", "layer-cam", "ablation-cam", "score-cam"])
def test_row_6_whether_a_relu_works_in_place_does_not_matter(method: str) -> None:
    torch.manual_seed(0)
    inplace, plain = Vgg().eval(), Vgg().eval()
    plain.load_state_dict(inplace.state_dict())
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    x, targets = images(), [ClassifierOutputTarget(k) for k in range(3)]
    one, other = (pgc_maps(model, model.features[3], x, targets) for model in (inplace, plain))
    assert np.abs(one - other).max() > 0.01  # the ReLU has overwritten what the peer's hook holds
    for layer in ("features.3", "features.4"):
        nets = [sigcam.attach(model, layer=layer, example=x[:1]) for model in (inplace, plain)]
        maps = [explain(net, x, method, branch="softmax", classes=[0, 1, 2]).maps for net in nets]
        assert torch.equal(*maps)
    assert all(module.inplace for module in inplace.modules() if isinstance(module, nn.ReLU))


def vit() -> PlainVit:
    """A class token, a register, and 4 x 6 patches."""
    torch.manual_seed(0)
    return PlainVit((16, 24), patch=4, registers=1).eval()


def test_row_7_tokens_are_folded_without_being_told_how() -> None:
    model, x = vit(), torch.randn(2, 3, 16, 24)
    with pytest.raises(ValueError, match="Invalid grads shape"):
        pgc_maps(model, model.layers[1].norm1, x)
    assert torchcam_maps(model, "layers.1.norm1", x).shape == (2, 16)  # a number per channel, called a map
    assert captum_maps(model, model.layers[1].norm1, x).shape == (2, 1, 16)
    net = sigcam.attach(model, example=x[:1])
    assert raw(net, x).shape == (2, 4, 6)

    def told(tokens: Tensor) -> Tensor:
        return tokens[:, 2:].transpose(1, 2).reshape(2, -1, 4, 6)

    ours = explain(net, x, branch="softmax", classes=1).maps.numpy()
    targets = [ClassifierOutputTarget(1)] * 2
    theirs = pgc_maps(model, model.layers[1].norm1, x, targets, reshape_transform=told)
    assert np.abs(ours - theirs).max() < 1e-5


def test_row_8_a_layer_whose_patches_no_longer_matter_is_refused_and_not_taken() -> None:
    model, x = vit(), torch.randn(2, 3, 16, 24)

    def told(tokens: Tensor) -> Tensor:
        return tokens[:, 2:].transpose(1, 2).reshape(2, -1, 4, 6)

    assert not pgc_maps(model, model.layers[1], x, reshape_transform=told).any()  # the last block: all zero
    with pytest.raises(
        AttachError, match=r"layer='layers.1' gets no gradient on its grid\. Layers that do: '"
    ):
        sigcam.attach(model, layer="layers.1", example=x[:1])
    net = sigcam.attach(model, example=x[:1])
    assert net.split.layer == "layers.1.norm1"
    assert raw(net, x).all()  # every patch counts


# ----------------------------------------------------------------------------------------------- rows 9 to 11


def test_row_9_a_layer_that_is_no_map_is_a_typed_error_that_names_some_that_are() -> None:
    model = Gap().eval()
    with pytest.raises(ValueError, match="Invalid grads shape") as caught:
        pgc_maps(model, model.fc, images())
    assert "body" not in str(caught.value)
    with pytest.raises(IndexError, match="Dimension out of range"):
        torchcam_maps(model, "fc", images())
    assert captum_maps(model, model.fc, images()).shape == (3, 1)  # without complaint
    for refused in (
        lambda: sigcam.attach(model, layer="fc"),
        lambda: explain(sigcam.attach(model), images(), branch="softmax", layers=["fc"]),
    ):
        with pytest.raises(
            AttachError, match=r"\(Linear\) .* does not fold to a map\. Layers that do: 'body'"
        ):
            refused()


def test_row_10_one_logit_has_two_classes_and_the_predicted_one_is_explained() -> None:
    torch.manual_seed(0)
    model, x = Gap(classes=1).eval(), images(8)
    with torch.no_grad():
        model.fc.bias.sub_(model(x).mean())
    no = (model(x)[:, 0] < 0).nonzero()[:, 0].tolist()
    assert 0 < len(no) < 8
    theirs = pgc_maps(model, model.body, x)
    with pytest.raises(IndexError):
        pgc_maps(model, model.body, x, [ClassifierOutputTarget(1)] * 8)
    net = sigcam.attach(model)
    ex = explain(net, x, branch="softmax")
    against, in_favour = (explain(net, x, branch="softmax", classes=k).maps.numpy() for k in (0, 1))
    for i in range(8):
        assert np.abs(theirs[i] - in_favour[i]).max() < 1e-5  # whatever the model says
        assert int(ex.classes[i]) == (i not in no)
        assert np.array_equal(ex.maps[i].numpy(), against[i] if i in no else in_favour[i])
    assert torch.equal(raw(net, x, classes=0), -raw(net, x, classes=1))


@pytest.mark.parametrize("make", [Gap, Vgg])
def test_row_11_any_number_of_classes_costs_one_pass_of_the_backbone(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    net, x = attached(model), images()
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    calls: list[int] = []
    handle = first.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    with pgc.GradCAM(model, [net.layer]) as peer:
        for k in range(4):
            peer(x, [ClassifierOutputTarget(k)] * 3)
    assert calls == [3] * 4
    for method in ("grad-cam", "grad-cam++", "layer-cam", "eigengrad-cam"):
        calls.clear()
        assert explain(net, x, method, classes="all", size="image").maps.shape == (3, 4, 16, 16)
        assert calls == [3]
    handle.remove()


# ---------------------------------------------------------------------------------------------- rows 14 to 17


@pytest.mark.parametrize("name", ["GradCAM", "GradCAMpp"])
def test_row_14_numbers_that_are_none_are_reported_and_never_hidden(name: str) -> None:
    torch.manual_seed(0)
    model, x = Gap().eval(), images()
    net = sigcam.attach(model)
    with torch.no_grad():
        model.fc.weight[0, 2] = float("nan")
    assert np.isnan(pgc_maps(model, model.body, x, [ClassifierOutputTarget(0)] * 3)).any()
    hidden = torchcam_maps(model, "body", x, method=getattr(torchcam, name))
    assert model(x)[:, 0].isnan().all() and torch.isfinite(hidden).all() and hidden.any()  # looks like a map
    ex = explain(net, x, name, branch="softmax", classes=0)
    assert not ex.maps.any() and ex.blank.all()
    assert "its values are not finite: check the images and the model's weights" in ex.notes[0]
    with pytest.raises(AttachError, match=r"Gap returns NaN or infinite logits .* check its weights"):
        sigcam.attach(model)


@pytest.mark.parametrize("method", CNN_METHODS)
def test_row_14_a_score_that_hangs_on_nothing_gives_a_blank_map_and_no_nan(method: str) -> None:
    net = attached(Gap())
    with torch.no_grad():
        net.last_layer("softmax").get_parameter("weight").zero_()
    ex = explain(net, images(), method, branch="softmax", scale="raw")
    assert torch.isfinite(ex.maps).all()
    if METHODS[method].class_specific and METHODS[method].perturbs != "images":  # others need no gradient
        assert ex.blank.all() and "no gradient reaches the layer" in ex.notes[0]


@pytest.mark.parametrize("make", [Gap, Vgg])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_row_15_half_precision_gives_maps_in_full(make: Callable[[], nn.Module], dtype: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    full = sigcam.attach(model, example=images(1))
    expected = explain(full, images(), branch="softmax", classes=1).maps
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        x = images() if dtype is None else images().to(dtype)
        model.to(x.dtype)
        if dtype is not torch.float16:
            with pytest.raises(TypeError, match="BFloat16"):
                pgc_maps(model, full.layer, x)
            assert torchcam_maps(model, full.split.layer, x).dtype == torch.bfloat16
        for method, scale in product(
            ("grad-cam", "grad-cam++", "ablation-cam", "eigen-cam"), ("unit", "raw")
        ):
            ex = explain(full.to(x.dtype), x, method, branch="softmax", classes=1, scale=scale)
            assert ex.maps.dtype == torch.float32 and torch.isfinite(ex.maps).all()
        ours = explain(full, x, branch="softmax", classes=1).maps
    assert (ours - expected).abs().max() < 0.1


class Halves(nn.DataParallel):
    """What DataParallel does on two devices, on one: each half of the batch passes the module by itself."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat([self.module(half) for half in inputs[0].chunk(2)])


def test_row_16_a_model_split_over_devices_gives_the_whole_batch() -> None:
    model, x = Gap().eval(), images(4)
    assert pgc_maps(Halves(model), model.body, x).shape == (2, 16, 16)  # of four images
    for wrapped in (Halves(model), nn.DataParallel(model)):
        maps = sigcam.GradCAM(wrapped, [model.body])(x)
        assert np.array_equal(maps, sigcam.GradCAM(model)(x)) and len(maps) == 4


class Output(dict[str, Tensor]):
    """Logits by key and by attribute, as transformers returns them."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


@pytest.mark.parametrize(
    "wrap",
    [lambda z: {"logits": z}, lambda z: Output(logits=z), lambda z: (z, z * 2)],
    ids=["dict", "hf", "tuple"],
)
def test_row_17_outputs_that_are_no_tensor_are_opened(wrap: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = Returns(lambda logits, _: wrap(logits)).eval(), torch.randn(2, 3, 32, 48)
    with pytest.raises(AttributeError, match="has no attribute 'cpu'"):
        pgc_maps(model, model.body, x)
    with pytest.raises(TypeError, match="must be a tensor"):
        torchcam_maps(model, "body", x)
    torch.manual_seed(0)
    plain = Returns(lambda logits, _: logits).eval()
    assert np.array_equal(sigcam.GradCAM(model)(x), sigcam.GradCAM(plain)(x))


# --------------------------------------------------------------------------------------------- rows 19 and 20


def test_row_19_the_raw_map_has_a_size_that_the_unit_map_hides() -> None:
    torch.manual_seed(0)
    model, x = Vgg().eval(), images()
    net = sigcam.attach(model, example=x[:1])

    def look() -> tuple[Tensor, Tensor, Any, Tensor]:
        unit = explain(net, x, branch="softmax", classes=1).maps
        theirs = pgc_maps(model, net.layer, x, [ClassifierOutputTarget(1)] * 3)
        return raw(net, x, classes=1), unit, theirs, torchcam_maps(model, net.split.layer, x, 1)

    before = look()
    with torch.no_grad():
        for name in ("weight", "bias"):
            net.last_layer("softmax").get_parameter(name).mul_(2)
    after = look()
    assert torch.allclose(after[0], 2 * before[0], rtol=1e-5)
    assert torch.allclose(after[1], before[1], atol=1e-5)
    assert np.abs(after[2] - before[2]).max() < 1e-4  # all that the peers show by default
    assert torch.allclose(after[3], before[3], atol=1e-4)


@pytest.mark.parametrize("branch", ["sigmoid", "softmax", "centred"])
def test_row_20_a_gap_linear_head_needs_no_autograd(branch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = attached(Gap()), images()
    expected = {method: explain(net, x, method, branch=branch).maps for method in CNN_METHODS}

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a backward pass")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    monkeypatch.setattr(torch.autograd, "backward", refuse)
    with pytest.raises(AssertionError, match="a backward pass"):
        pgc_maps(net.model, net.layer, x)
    with pytest.raises(AssertionError, match="a backward pass"):
        torchcam_maps(net.model, net.split.layer, x)
    with pytest.raises(AssertionError, match="a backward pass"):
        captum_maps(net.model, net.layer, x)
    for method in CNN_METHODS:
        assert torch.equal(explain(net, x, method, branch=branch).maps, expected[method])
        assert explain(net, x, method, branch=branch, classes="all").maps.shape == (3, 4, 8, 8)
