"""Explaining: the paper's identities, oracles for every step, what may be asked, and what is refused."""

import base64
import copy
import io
import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from sigcam.core.errors import AttachError, DataError
from sigcam.methods.explainer import explain
from sigcam.methods.explanation import Explanation
from sigcam.methods.postprocess import finish_maps, unit_range
from sigcam.methods.registry import METHODS
from sigcam.methods.targets import Branch
from sigcam.models.preprocess import Preprocess
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from support.oracles import grad_cam_map, path_a, path_b
from support.tiny import Gap, InPlace, Probabilities, TwoHeads, Vgg, attached, images

BRANCHES: tuple[Branch, ...] = ("sigmoid", "softmax", "centred")
CNN_METHODS = [name for name, facts in METHODS.items() if facts.weights_channels and facts.needs != "patches"]


def gap_net(
    classes: int = 4, channels: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64
) -> DualBranch:
    """A GAP + linear network in float64, so that identities hold to the last digits."""
    torch.manual_seed(seed)
    return attached(Gap(classes, channels)).to(dtype)


def exact(count: int = 3, seed: int = 0) -> Tensor:
    return images(count, seed).double()


def layer(net: DualBranch, branch: Branch) -> nn.Linear:
    found = net.last_layer("sigmoid" if branch == "sigmoid" else "softmax")
    assert isinstance(found, nn.Linear)
    return found


# ------------------------------------------------------------------------------------------- identities


@given(
    st.integers(2, 6), st.integers(1, 8), st.integers(1, 4), st.sampled_from(BRANCHES), st.integers(0, 999)
)
def test_cam_equals_grad_cam_on_a_gap_linear_head(
    classes: int, channels: int, batch: int, branch: Branch, seed: int
) -> None:
    net, x = gap_net(classes, channels, seed), exact(batch, seed)
    for clamp in (False, True):
        one, other = (
            explain(net, x, m, branch=branch, scale="raw", size="features", clamp=clamp).maps
            for m in ("cam", "grad-cam")
        )
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@given(
    st.integers(1, 6), st.sampled_from(BRANCHES), st.sampled_from(["cam", "grad-cam"]), st.integers(0, 999)
)
def test_the_mean_of_a_raw_map_plus_the_bias_is_the_logit(
    classes: int, branch: Branch, method: str, seed: int
) -> None:
    if classes == 1 and branch == "centred":
        return
    net, x = gap_net(classes, seed=seed), exact(3, seed)
    ex = explain(net, x, method, branch=branch, scale="raw", size="features")
    bias = layer(net, branch).bias.detach()
    if branch == "centred":
        bias = bias - bias.mean()
    signs = 2 * ex.classes - 1 if classes == 1 else torch.ones_like(ex.classes)
    of_class = bias[0].expand(3) if classes == 1 else bias[ex.classes]
    assert torch.allclose(ex.maps.mean((1, 2)) + signs * of_class, ex.logits, rtol=1e-9, atol=1e-12)
    out = net(x)
    logits = out.sigmoid if branch == "sigmoid" else out.softmax
    if branch == "centred":
        logits = logits - logits.mean(1, keepdim=True)
    expected = logits[:, 0] * signs if classes == 1 else logits.gather(1, ex.classes[:, None])[:, 0]
    assert torch.allclose(ex.logits, expected.detach(), rtol=1e-12)


@given(st.integers(0, 5), st.floats(-20, 20), st.integers(2, 6), st.integers(0, 999))
def test_a_shifted_column_keeps_probabilities_and_moves_the_map_by_delta_times_its_feature(
    channel: int, delta: float, classes: int, seed: int
) -> None:
    net, x = gap_net(classes, seed=seed), exact(3, seed)

    def look(branch: Branch) -> Explanation:
        return explain(net, x, "grad-cam", branch=branch, classes=1, scale="raw", size="features")

    before = {branch: look(branch) for branch in BRANCHES}
    with torch.no_grad():
        layer(net, "softmax").weight[:, channel] += delta  # Eq. 8: of every class
    after = {branch: look(branch) for branch in BRANCHES}
    for branch in BRANCHES:
        assert torch.allclose(after[branch].probability, before[branch].probability, atol=1e-9)
    moved = after["softmax"].maps - before["softmax"].maps
    assert torch.allclose(moved, delta * net(x).features[:, channel], atol=1e-9)  # Eq. 9
    assert torch.equal(after["sigmoid"].maps, before["sigmoid"].maps)
    assert torch.allclose(after["centred"].maps, before["centred"].maps, atol=1e-9)


@given(st.integers(2, 6), st.integers(0, 999))
def test_a_large_negative_shift_blanks_the_softmax_map_and_no_other(classes: int, seed: int) -> None:
    net, x = gap_net(classes, seed=seed), exact(3, seed)
    before = {branch: explain(net, x, branch=branch) for branch in BRANCHES}
    with torch.no_grad():
        layer(net, "softmax").weight.sub_(100.0)  # Eq. 10
    after = {branch: explain(net, x, branch=branch) for branch in BRANCHES}
    assert after["softmax"].blank.all()
    assert not after["softmax"].maps.any()
    assert len(after["softmax"].notes) == 3
    assert all("all evidence is negative" in note for note in after["softmax"].notes)
    assert torch.allclose(after["softmax"].probability, before["softmax"].probability, atol=1e-9)
    assert torch.equal(after["softmax"].classes, before["softmax"].classes)
    assert torch.equal(after["sigmoid"].maps, before["sigmoid"].maps)
    assert torch.allclose(after["centred"].maps, before["centred"].maps, atol=1e-7)


def test_a_blank_map_is_reported_in_the_log_and_its_reason_told(caplog: pytest.LogCaptureFixture) -> None:
    net = gap_net()
    with torch.no_grad():
        layer(net, "softmax").weight.sub_(100.0)
        layer(net, "sigmoid").weight.sub_(100.0)
    with caplog.at_level(logging.WARNING, "sigcam"):
        softmax, sigmoid = explain(net, exact(1), branch="softmax"), explain(net, exact(1))
    assert softmax.notes == (
        "the map of image 0 is blank: all evidence is negative and the ReLU removes it: "
        "see scale='raw', or the sigmoid branch.",
    )
    assert sigmoid.blank.tolist() == [True]
    assert "no channel has a positive weight" in sigmoid.notes[0]
    assert [record.getMessage() for record in caplog.records] == [softmax.notes[0], sigmoid.notes[0]]
    raw = explain(net, exact(1), scale="raw")
    assert not raw.blank.any()
    assert (raw.maps <= 0).all()
    assert raw.positive_share.item() == 0


# ----------------------------------------------------------------------------------------------- oracles


def plain_twin(net: DualBranch, branch: Branch) -> nn.Module:
    """The user's model, or the same with the branch in the place of its head."""
    twin = copy.deepcopy(net.model).eval()
    if branch == "sigmoid":
        setattr(twin, net.split.heads[0], copy.deepcopy(net.sigmoid.copies[0]).eval())
    return twin.requires_grad_(True)


@pytest.mark.parametrize("make", [Vgg, Gap])
@pytest.mark.parametrize("branch", ["sigmoid", "softmax"])
@pytest.mark.parametrize("clamp", [False, True])
def test_grad_cam_is_what_plain_autograd_gives(
    make: Callable[[], nn.Module], branch: Branch, clamp: bool
) -> None:
    net = attached(make()).to(torch.float64)
    ex = explain(net, exact(), branch=branch, clamp=clamp, scale="raw", size="features", classes=[0, 3, 2])
    twin = plain_twin(net, branch)
    for i, k in enumerate([0, 3, 2]):
        place = twin.get_submodule(net.split.layer)
        expected = grad_cam_map(twin, place, exact()[i], k, clamp=clamp, relu=False)
        cells = expected.size  # raw maps are in logits: a gradient per cell becomes a weight of the mean
        assert np.allclose(ex.maps[i].numpy(), cells * expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [Vgg, Gap])
@pytest.mark.parametrize("branch", ["sigmoid", "softmax"])
def test_a_unit_map_is_the_oracles_from_image_to_pixels(
    make: Callable[[], nn.Module], branch: Branch
) -> None:
    net = attached(make())
    ex = explain(net, images(), branch=branch, size=(20, 33))
    twin = plain_twin(net, branch).double()
    for i, k in enumerate(ex.classes.tolist()):
        place = twin.get_submodule(net.split.layer)
        low = grad_cam_map(twin, place, exact()[i], k, clamp=branch == "sigmoid", relu=True)
        assert np.abs(path_b(low, 20, 33) - ex.maps[i].numpy()).max() < 1e-4


def test_a_functional_activation_counts_as_a_module_does() -> None:
    function, module = attached(InPlace()), attached(Gap())
    with torch.no_grad():
        for name, parameter in function.model.named_parameters():
            module.model.get_parameter(name.replace("conv", "body.0")).copy_(parameter)
    for method in CNN_METHODS:
        for branch in BRANCHES:
            one, other = (explain(net, images(), method, branch=branch).maps for net in (function, module))
            assert torch.equal(one, other)


@given(st.integers(2, 14), st.integers(1, 14), st.integers(14, 70), st.integers(14, 70), st.integers(0, 9999))
def test_finishing_is_what_opencv_does_on_both_paths(p: int, q: int, h: int, w: int, seed: int) -> None:
    low = torch.randn(2, p, q, generator=torch.Generator().manual_seed(seed))
    a, b = (finish_maps(low[None], method, (h, w), "unit")[0] for method in ("cam", "grad-cam"))
    for i in range(2):  # absolute bicubic weights sum to up to 1.375 per axis, bilinear ones to 1
        assert np.abs(a[i].numpy() - path_a(low[i].numpy(), h, w)).max() < 1.9 * scaling_error(low[i])
        assert np.abs(b[i].numpy() - path_b(low[i].numpy(), h, w)).max() < scaling_error(low[i].relu())


def scaling_error(values: Tensor) -> float:
    """2e-6, times the factor by which min-max scaling amplifies float32 rounding: largest size over range."""
    span = (values.max() - values.min()).clamp(min=1e-30)  # a blank map is exact
    return 2e-6 * max(1.0, float(values.abs().max() / span))


@pytest.mark.parametrize("method", METHODS)
def test_a_finished_map_fills_zero_to_one_and_a_hopeless_one_is_zero(method: str) -> None:
    low = torch.randn(4, 5, 7)
    low[1, 2, 3] = float("nan")
    low[2] = 0.25
    low[3] = 0
    maps = finish_maps(low[None], method, (30, 40), "unit")[0]
    assert maps.shape == (4, 30, 40)
    assert (float(maps[0].min()), float(maps[0].max())) == (0, 1)
    assert not maps[1:].any()
    assert not unit_range(torch.full((1, 2, 2), float("inf"))).any()


def test_raw_maps_keep_their_sign_and_size() -> None:
    low = torch.randn(2, 1, 4, 4) * 50
    for method in METHODS:
        assert torch.equal(finish_maps(low, method, (4, 4), "raw"), low)
        assert finish_maps(low, method, (16, 16), "raw").min() < -10


# ------------------------------------------------------------------------------------- clamp, branch, target


def test_clamping_is_the_default_on_the_sigmoid_branchs_unit_maps_only() -> None:
    net = attached(Vgg())
    for branch in BRANCHES:
        assert explain(net, images(), branch=branch).clamp == (branch == "sigmoid")
        assert not explain(net, images(), branch=branch, scale="raw").clamp
    ours = explain(net, images())
    assert torch.equal(ours.maps, explain(net, images(), clamp=True).maps)
    assert not torch.allclose(ours.maps, explain(net, images(), clamp=False).maps, atol=1e-3)


def test_the_positive_share_is_of_all_evidence_before_clamping() -> None:
    net = gap_net()
    ex = explain(net, exact(), branch="softmax", classes=2)
    products = layer(net, "softmax").weight[2].detach()[None, :, None, None] * net(exact()).features
    expected = products.clamp(min=0).sum((1, 2, 3)) / products.abs().sum((1, 2, 3))
    assert torch.allclose(ex.positive_share, expected, atol=1e-9)


def test_a_target_may_be_any_function_of_the_logits() -> None:
    net = gap_net()

    def difference(logits: Tensor, classes: Tensor) -> Tensor:  # Finer-CAM: this class against another
        return logits.gather(1, classes[:, None])[:, 0] - logits[:, 3]

    def raw(classes: int, target: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        options = {"target": target} if target else {}
        return explain(net, exact(), classes=classes, scale="raw", size="features", **options).maps  # type: ignore[arg-type]

    assert torch.allclose(raw(0, difference), raw(0) - raw(3), atol=1e-12)


def test_the_centred_branch_needs_no_fit_and_its_maps_sum_to_zero_over_classes() -> None:
    net = attach(Gap(), example=images(1))
    ex = explain(net, images(), branch="centred", classes="all", scale="raw")
    assert float(ex.maps.sum(1).abs().max()) < 1e-5


# ----------------------------------------------------------------------------------------------- classes


def test_the_class_is_the_softmax_heads_whichever_branch_is_explained() -> None:
    net = attached(Vgg())
    for branch in BRANCHES:
        ex = explain(net, images(), branch=branch)
        assert torch.equal(ex.classes, net(images()).softmax.argmax(1))
        assert torch.allclose(ex.probability, net(images()).softmax.softmax(1).amax(1))


SHAPES: list[tuple[object, tuple[int, ...]]] = [
    (None, (3,)),
    (2, (3,)),
    ([0, 1, 2], (3,)),
    (torch.tensor([3, 0, 1]), (3,)),
    (np.array([3, 0, 1]), (3,)),
    (torch.tensor([[0, 1], [1, 2], [3, 3]]), (3, 2)),
    ([[0, 1], [1, 2], [3, 3]], (3, 2)),
    ("top5", (3, 4)),  # of four classes
    ("all", (3, 4)),
]


@pytest.mark.parametrize(("classes", "shape"), SHAPES)
def test_scores_have_the_shape_of_the_classes_asked_for(classes: object, shape: tuple[int, ...]) -> None:
    net = attached(Gap())
    ex = explain(net, images(), classes=classes)  # type: ignore[arg-type]
    side = 8 if isinstance(classes, str) and classes == "all" else 16
    assert ex.maps.shape == (*shape, side, side)
    for values in (ex.classes, ex.probability, ex.evidence, ex.logits, ex.positive_share, ex.blank):
        assert values.shape == shape
    index = ex.classes.reshape(3, -1)
    out = net(images())
    assert torch.allclose(ex.probability.reshape(3, -1), out.softmax.softmax(1).gather(1, index))
    assert torch.allclose(ex.evidence.reshape(3, -1), out.sigmoid.sigmoid().gather(1, index))
    assert torch.allclose(ex.logits.reshape(3, -1), out.sigmoid.gather(1, index))


def test_every_column_of_several_classes_is_that_classs_own_map() -> None:
    net = attached(Vgg())
    several = explain(net, images(), classes="all", size="image")
    for k in range(4):
        assert torch.allclose(several.maps[:, k], explain(net, images(), classes=k).maps, atol=1e-6)
    mixed = explain(net, images(), classes=[2, 0, 1])
    for i, k in enumerate([2, 0, 1]):
        assert torch.allclose(mixed.maps[i], several.maps[i, k], atol=1e-6)


def test_top5_are_the_five_most_probable_in_order() -> None:
    net = attached(Gap(classes=9))
    ex = explain(net, images(), classes="top5")
    assert torch.equal(ex.classes, net(images()).softmax.argsort(1, descending=True)[:, :5])


def test_positive_are_the_classes_with_evidence_above_a_half_padded_with_minus_one() -> None:
    net = attached(Gap(classes=7))
    with torch.no_grad():
        layer(net, "sigmoid").bias.copy_(torch.tensor([5.0, -5, -5, 0, 5, -5, -5]))
    ex = explain(net, images(6), classes="positive")
    logits = net(images(6)).sigmoid.detach()
    for i in range(6):
        chosen = [k for k in ex.classes[i].tolist() if k >= 0]
        assert chosen == [k for k in logits[i].argsort(descending=True).tolist() if logits[i, k] > 0]
        assert not ex.maps[i, len(chosen) :].any()
    with torch.no_grad():
        layer(net, "sigmoid").bias.fill_(-50.0)
    nothing = explain(net, images(2), classes="positive")
    assert nothing.classes.tolist() == [[-1], [-1]]
    assert nothing.blank.all()
    assert nothing.notes == ()


def test_padding_is_not_reported_as_a_blank_map() -> None:
    net = attached(Gap(classes=3))
    with torch.no_grad():
        layer(net, "sigmoid").weight[0] = -1.0  # class 0, which stands in for padding, is blank
        layer(net, "sigmoid").bias.copy_(torch.tensor([0.0, 9.0, 0.0]))
        logits = net(images(8)).sigmoid[:, 2]
        layer(net, "sigmoid").bias[2] = -logits.median()
    ex = explain(net, images(8), classes="positive")
    assert (ex.classes == -1).any()
    assert len(ex.notes) == int((ex.blank & (ex.classes >= 0)).sum())


def test_a_batch_gives_what_its_images_give_one_by_one() -> None:
    for make in (Gap, Vgg, TwoHeads):
        net = attached(make())
        for branch in BRANCHES:
            whole = explain(net, images(5), branch=branch)
            for i in range(5):
                single = explain(net, images(5)[i : i + 1], branch=branch)
                assert torch.allclose(whole.maps[i], single.maps[0], atol=1e-5)
                assert torch.allclose(whole.evidence[i], single.evidence[0], atol=1e-6)


BAD_CLASSES: list[tuple[object, str]] = [
    ([0, 1], r"classes of shape \(2,\) do not fit 3 image\(s\)"),
    ([0, 1, 2, 3], r"classes of shape \(4,\) do not fit 3 image\(s\)"),
    (torch.zeros(2, 2, dtype=torch.long), r"classes of shape \(2, 2\) do not fit 3"),
    (torch.zeros(3, 1, 1, dtype=torch.long), "do not fit 3"),
    (4, "class 4 does not exist: this classifier has classes 0 to 3"),
    (-1, "class -1 does not exist"),
    ([0, 1, 9], "class 9 does not exist"),
    (1.0, "classes must be whole numbers"),
    ([0.5, 1, 2], "classes must be whole numbers"),
    (True, "classes must be whole numbers"),
    ("top3", "classes='top3' is unknown: give indices, 'top5', 'positive' or 'all'"),
]


@pytest.mark.parametrize(("classes", "sentence"), BAD_CLASSES)
def test_classes_that_do_not_fit_are_refused(classes: object, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        explain(attached(Gap()), images(), classes=classes)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------- one logit, probabilities


@pytest.mark.parametrize("ending", [nn.Identity(), nn.Sigmoid()])
def test_of_one_output_the_more_probable_class_comes_first(ending: nn.Module) -> None:
    net, x = attached(nn.Sequential(Gap(classes=1), ending)), 5 * images(8)
    for ex in (explain(net, x, branch="softmax"), explain(net, x, branch="softmax", classes="top5")):
        assert set(ex.top_classes[:, 0].tolist()) == {0, 1}
        assert (ex.top_probability[:, 0] > 0.5).all() and (ex.top_probability[:, 1] < 0.5).all()
        assert torch.equal(ex.classes if ex.classes.ndim == 1 else ex.classes[:, 0], ex.top_classes[:, 0])


def test_one_logit_tells_two_classes_apart_by_its_sign() -> None:
    net = gap_net(classes=1)
    x = torch.cat([exact(3), -exact(3)])
    with torch.no_grad():
        layer(net, "softmax").bias.sub_(net(x).softmax.median())  # both classes occur
    logits = net(x).softmax[:, 0]
    ex = explain(net, x)
    assert set(ex.classes.tolist()) == {0, 1}
    assert torch.equal(ex.classes, (logits > 0).long())
    yes, no = (explain(net, x, classes=k, scale="raw", size="features") for k in (1, 0))
    assert torch.allclose(yes.probability, logits.sigmoid())
    assert torch.allclose(no.probability, (-logits).sigmoid())
    assert torch.equal(no.maps, -yes.maps)
    assert torch.equal(no.logits, -yes.logits)
    assert torch.allclose(yes.evidence, net(x).sigmoid[:, 0].sigmoid())
    assert torch.allclose(yes.evidence + no.evidence, torch.ones(6, dtype=torch.float64))
    one, other = (explain(net, x, "cam", classes=k, scale="raw", size="features").maps for k in (1, 0))
    assert torch.allclose(one, yes.maps, atol=1e-12)
    assert torch.equal(other, -one)
    assert explain(net, x, classes="all").classes.tolist() == [[0, 1]] * 6
    assert torch.equal(explain(net, x, classes="top5").classes[:, 0], ex.classes)
    with pytest.raises(DataError, match="class 2 does not exist: this classifier has classes 0 to 1"):
        explain(net, x, classes=2)


@pytest.mark.parametrize("method", CNN_METHODS)
def test_one_logit_cannot_be_centred(method: str) -> None:
    with pytest.raises(DataError, match="subtracts the mean over classes; this classifier has one logit"):
        explain(gap_net(classes=1), exact(), method, branch="centred")


def test_two_classes_are_explained_like_any_number() -> None:
    net = gap_net(classes=2)
    ex = explain(net, exact(), branch="centred", classes="all", scale="raw")
    assert ex.maps.shape == (3, 2, 8, 8)
    assert torch.allclose(ex.maps[:, 0], -ex.maps[:, 1], atol=1e-12)


def test_a_model_of_probabilities_keeps_them_and_is_explained_by_its_logits() -> None:
    torch.manual_seed(0)
    model = Probabilities()
    net, plain = attached(model), attached(Gap())
    plain.model.load_state_dict(model.state_dict())
    for branch in BRANCHES:
        ex, expected = (explain(n, images(), branch=branch, scale="raw") for n in (net, plain))
        assert torch.allclose(ex.probability, model(images()).detach().amax(1))
        assert torch.allclose(ex.maps, expected.maps, atol=1e-6)
        assert torch.allclose(ex.logits, expected.logits, atol=1e-6)


def test_one_probability_is_taken_as_such() -> None:
    class Yes(Gap):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sigmoid()

    torch.manual_seed(0)
    model = Yes(classes=1)
    ex = explain(attached(model), images(), classes=1)
    assert torch.allclose(ex.probability, model(images()).detach()[:, 0])
    ex = explain(attached(model), images())
    assert torch.equal(ex.classes, (model(images())[:, 0] > 0.5).long())
    assert (ex.probability >= 0.5).all()


# --------------------------------------------------------------------------------------------- refusals


def test_cam_on_a_head_that_is_no_gap_linear_is_refused_and_grad_cam_named() -> None:
    net = attached(Vgg())
    for branch in BRANCHES:
        with pytest.raises(DataError, match=r"Vgg is not global average .* Use 'grad-cam'"):
            explain(net, images(), "cam", branch=branch)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    net = attached(Gap())
    with pytest.raises(DataError, match=r"unknown method 'grad-cma': did you mean 'grad-cam'\?"):
        explain(net, images(), "grad-cma")
    with pytest.raises(DataError, match="there are cam, grad-cam"):
        explain(net, images(), "xyz")
    with pytest.raises(DataError, match="unknown branch 'sigmod': there are sigmoid, softmax and centred"):
        explain(net, images(), branch="sigmod")  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", ["gradcam", "Grad-CAM", "grad_cam", "GradCAM"])
def test_common_spellings_are_understood(spelling: str) -> None:
    net = attached(Gap())
    ex = explain(net, images(), spelling)
    assert ex.method == "grad-cam"
    assert torch.equal(ex.maps, explain(net, images()).maps)


@pytest.mark.parametrize("shape", [(3, 16, 16), (0, 3, 16, 16), (16, 16)])
def test_images_that_are_no_batch_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=rf"images must be \(B, C, H, W\).*{re.escape(str(shape))}"):
        explain(attached(Gap()), torch.zeros(shape))


def test_images_that_are_not_numbers_give_a_blank_map_that_says_so() -> None:
    ex = explain(attached(Gap()), torch.full((1, 3, 16, 16), float("nan")))
    assert ex.blank.tolist() == [True]
    assert not ex.maps.any()
    assert "not finite" in ex.notes[0]


def test_an_unfitted_branch_warns_once_per_network_and_only_for_itself() -> None:
    model = Gap()
    for net in (attach(model, example=images(1)), attach(model, example=images(1))):
        explain(net, images(), branch="softmax")
        explain(net, images(), branch="centred")
        with pytest.warns(UserWarning, match="not fitted, so these maps are noise") as caught:
            explain(net, images())
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explain(net, images())


# ----------------------------------------------------------------------------------- pictures, files, display


def to_tensor(picture: Image.Image) -> Tensor:
    pixels = np.asarray(picture.resize((16, 16)), dtype=np.float32)
    return torch.from_numpy(pixels / 255).permute(2, 0, 1)


def picture(seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 255, (24, 40, 3), dtype=np.uint8))


def test_pictures_and_paths_are_taken_where_preprocessing_is_known(tmp_path: Path) -> None:
    net = attached(Gap())
    with pytest.raises(DataError, match=r"set net\.transform, or give a \(B, C, H, W\) tensor"):
        explain(net, picture())
    net.transform = to_tensor
    picture().save(tmp_path / "one.png")
    expected = explain(net, to_tensor(picture())[None]).maps
    for given_ in (picture(), [picture()], tmp_path / "one.png", str(tmp_path / "one.png")):
        ex = explain(net, given_)
        assert torch.equal(ex.maps, expected)
        assert ex.overlay()[0].size == (16, 16)
    assert len(explain(net, [picture(), tmp_path / "one.png"])) == 2
    with pytest.raises(DataError, match="PIL images or paths, not ndarray"):
        explain(net, images().numpy())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no images"):
        explain(net, [])
    with pytest.raises(DataError, match=r"none\.png"):
        explain(net, tmp_path / "none.png")


def test_notes_say_that_the_branch_is_not_fitted(caplog: pytest.LogCaptureFixture) -> None:
    net = attach(Gap().eval(), example=images(1))
    ex = explain(net, images(), branch="softmax")
    assert ex.notes == (
        "the sigmoid branch is not fitted, so `evidence` means nothing: fit it (sigcam.fit) or load one.",
    )
    assert not caplog.records
    assert explain(attached(Gap()), images(), branch="softmax").notes == ()


def test_a_map_of_one_cell_says_so() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU())
    net = attached(nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)))
    ex = explain(net, images(1, size=4), branch="softmax", size="features", classes=1, clamp=True)
    assert ex.maps.shape[1:] == (1, 1) and ex.blank.all()
    assert "its layer has 1 x 1 cells: use larger images, or an earlier layer" in ex.notes[0]


@pytest.fixture
def explanation() -> Explanation:
    net = attached(Gap())
    net.class_names = ("hawk", "owl", "heron", "<b>wren</b>")
    net.transform = to_tensor
    return explain(net, [picture(0), picture(1)], classes=[1, 3])


def test_saving_writes_overlays_maps_and_scores(explanation: Explanation, tmp_path: Path) -> None:
    written = explanation.save(tmp_path / "out" / "deep", names=["a", "b"])
    assert [path.name for path in written] == ["a.png", "b.png"]
    assert sorted(p.name for p in written[0].parent.iterdir()) == [
        "a.npy",
        "a.png",
        "b.npy",
        "b.png",
        "explanation.json",
    ]
    assert np.array_equal(np.load(written[0].parent / "a.npy"), explanation.maps[0].numpy())
    with Image.open(written[1]) as overlay:
        assert overlay.size == (16, 16)
    rows = json.loads((written[0].parent / "explanation.json").read_text())
    assert [row["name"] for row in rows] == ["a", "b"]
    assert rows[0]["class_name"] == "owl"
    assert [path.name for path in explanation.save(tmp_path)] == ["0000.png", "0001.png"]


def test_rows_are_plain_numbers_for_one_class_and_for_several(explanation: Explanation) -> None:
    rows = explanation.rows()
    assert json.loads(json.dumps(rows)) == rows
    assert (rows[0]["class"], rows[0]["class_name"], rows[0]["method"]) == (1, "owl", "grad-cam")
    assert rows[1]["evidence"] == pytest.approx(float(explanation.evidence[1]))
    several = explain(attached(Gap()), images(2), classes="top5").rows()
    assert json.loads(json.dumps(several)) == several
    assert [len(row["class"]) for row in several] == [4, 4]
    assert several[0]["class_name"][0].startswith("class ")


def pictures_of(page: str) -> list[Image.Image]:
    sources = re.findall(r"<img src='data:image/jpeg;base64,([^']+)' alt='map of [^']+'", page)
    return [Image.open(io.BytesIO(base64.b64decode(source))) for source in sources]


def test_the_notebook_shows_one_picture_per_image_with_scores_and_a_legend(explanation: Explanation) -> None:
    page = explanation._repr_html_()
    assert [p.size for p in pictures_of(page)] == [(16, 16)] * 2
    assert "owl" in page and "<b>wren" not in page
    for i in range(2):
        assert f"probability {float(explanation.probability[i]):.3f}" in page
        assert f"evidence {float(explanation.evidence[i]):.3f}" in page
    assert page.count("linear-gradient") == 2 and "logits" not in page
    assert "color:inherit" in page and "background:#" not in page  # the notebook's own ink and paper


def test_the_notebook_shows_several_classes_side_by_side_and_counts_the_rest() -> None:
    ex = explain(attached(Gap(classes=9)), images(14), classes="all", scale="raw")
    page = ex._repr_html_()
    assert len(pictures_of(page)) == 12 * 5
    assert page.count("and 4 more classes") == 12 and "and 2 more images" in page
    likely = ex.probability[0].topk(5).indices  # of many classes the most probable are shown
    assert all(f"probability {float(ex.probability[0, k]):.3f}" in page for k in likely)
    peak = float(ex.maps[0, likely].abs().max())
    assert f"+{peak:.3g}" in page and f"-{peak:.3g}" in page and "0 logits" in page


def test_the_notebook_leaves_out_what_pads_positive_classes() -> None:
    ex = explain(attached(Gap()), images(3), classes="positive")
    shown = int((ex.classes >= 0).sum())
    assert (ex.classes < 0).any() and len(pictures_of(ex._repr_html_())) == shown
    nothing = Explanation(**{**vars(ex), "classes": torch.full_like(ex.classes, -1)})
    assert "no class has evidence" in nothing._repr_html_()


def test_an_overlay_carries_outline_caption_and_legend_on_request() -> None:
    net = attached(Gap())
    net.class_names = ("a", "b", "c", "d")
    for scale in ("unit", "raw"):
        ex = explain(net, images(2, size=224), scale=scale)  # type: ignore[arg-type]
        plain, outlined = ex.overlay()[0], ex.overlay(contour=0.5)[0]
        assert np.asarray(plain).tobytes() != np.asarray(outlined).tobytes()
        captioned, legend, both = (
            ex.overlay(**how)[0]  # type: ignore[arg-type]
            for how in ({"captions": True}, {"legend": True}, {"captions": True, "legend": True})
        )
        assert plain.height < legend.height < captioned.height < both.height
        assert np.array_equal(np.asarray(both)[:224], np.asarray(plain))
    assert ex.caption(0)[1:] == [
        f"probability {float(ex.probability[0]):.3f}",
        f"evidence {float(ex.evidence[0]):.3f}",
    ]


def test_saved_overlays_carry_captions_on_request(explanation: Explanation, tmp_path: Path) -> None:
    plain, captioned = (explanation.save(tmp_path / str(c), captions=c)[0] for c in (False, True))
    with Image.open(plain) as small, Image.open(captioned) as large:
        assert small.size == (16, 16) and large.width == 208 and large.height > 208 + 60


def test_an_overlay_of_nothing_is_the_half_grey_picture() -> None:
    net = gap_net(dtype=torch.float32)
    net.transform = Preprocess(24, 40)
    with torch.no_grad():
        layer(net, "softmax").weight.sub_(100.0)
    ex = explain(net, picture(), branch="softmax", size=(24, 40))
    assert ex.blank.all()
    pixels = np.asarray(picture(), dtype=float)
    expected = (pixels.mean(2, keepdims=True) + pixels) / 2
    assert np.abs(np.asarray(ex.overlay()[0], dtype=float) - expected).max() <= 0.5


def test_the_overlay_shows_what_the_network_sees_of_a_cropped_picture() -> None:
    net = gap_net(dtype=torch.float32)
    net.transform = Preprocess(16, 16, resize=16)
    wide = Image.new("RGB", (64, 16), "black")
    wide.paste("white", (0, 0, 16, 16))  # outside the middle square, so outside the map
    ex = explain(net, wide, branch="softmax")
    assert ex.regions == ((24, 0, 40, 16),)
    shown = np.asarray(ex.overlay()[0])
    assert shown.shape == (16, 64, 3) and (shown[:, :24] >= 153).all() and (shown[:, 40:] >= 153).all()
    _, placed = ex.on_picture(0, ex.maps[0])
    assert torch.equal(placed[:, 24:40], ex.maps[0]) and not placed[:, :24].any() and not placed[:, 40:].any()


def test_overlays_of_tensors_show_the_tensor_and_boxes_are_drawn_on_request() -> None:
    net = attached(Gap())
    ex = explain(net, images(2))
    assert [o.size for o in ex.overlay()] == [(16, 16)] * 2
    plain, boxed = ex.overlay()[0], ex.overlay(boxes=0.5)[0]
    assert np.asarray(plain).tobytes() != np.asarray(boxed).tobytes()
    assert [o.size for o in explain(net, images(2), classes="all", scale="raw").overlay()] == [(8, 8)] * 2


def test_boxes_follow_the_maps_and_take_raw_ones_too() -> None:
    values = torch.zeros(1, 20, 30)
    values[0, 4:9, 10:16] = 1
    ex = explain(attached(Gap()), images(1))
    shown = Explanation(**{**vars(ex), "maps": values})
    assert [b.tolist() for b in shown.boxes(0.2)] == [[[10, 4, 16, 9]]]
    raw = Explanation(**{**vars(ex), "maps": 40 * values - 3, "scale": "raw"})
    assert [b.tolist() for b in raw.boxes(0.2)] == [[[10, 4, 16, 9]]]
    nothing = Explanation(**{**vars(ex), "maps": 0 * values})
    assert [b.tolist() for b in nothing.boxes(0.2)] == [[[0, 0, 0, 0]]]


def test_maps_are_made_at_the_size_asked_for() -> None:
    net = attached(Vgg())
    x = images(2)
    assert explain(net, x).maps.shape == (2, 16, 16)
    assert explain(net, x, size="features").maps.shape == (2, 8, 8)
    assert explain(net, x, size=(5, 9)).maps.shape == (2, 5, 9)
    wide = attached(Gap())
    assert explain(wide, torch.randn(2, 3, 16, 28)).maps.shape == (2, 16, 28)


def test_a_bare_model_is_refused_with_the_call_that_is_missing() -> None:
    with pytest.raises(DataError, match=r"net = sigcam\.attach\(model\)"):
        explain(Gap(), images())  # type: ignore[arg-type]


def test_an_unfitted_branch_reports_no_evidence_in_rows_and_pages() -> None:
    net = attached(Gap())
    net.fitted = False
    ex = explain(net, images(), branch="softmax")
    assert ex.rows()[0]["evidence"] is None and "evidence" not in ex._repr_html_()


def test_the_repr_is_one_line() -> None:
    assert "\n" not in repr(explain(attached(Gap()), images(), branch="softmax"))


# ------------------------------------------------------------------------------- finer, smoother, many layers


class AnySize(nn.Module):
    """Two stages, the last one strided; global average and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU())
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.last(self.stem(x)).mean((2, 3)))
        return logits


@pytest.mark.parametrize("method", CNN_METHODS)
@pytest.mark.parametrize(
    "finer", [{"zoom": 2.0}, {"stride": 1}, {"zoom": 1.5, "stride": 1}, {"aug_smooth": True}]
)
def test_what_the_map_is_drawn_from_changes_the_map_and_no_score(method: str, finer: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = attached(AnySize()), images(2)
    plain, fine = (explain(net, x, method, classes=2, **options) for options in ({}, finer))
    assert fine.maps.shape == plain.maps.shape == (2, 16, 16) and not plain.blank.any()
    assert not torch.allclose(fine.maps, plain.maps, atol=1e-3)
    for name in ("classes", "probability", "evidence", "logits"):
        assert torch.equal(getattr(fine, name), getattr(plain, name))
    assert float(fine.maps.amax()) == 1 and float(fine.maps.amin()) == 0


def test_a_zoomed_map_is_that_of_the_enlarged_image_for_the_native_class() -> None:
    net, x = attached(AnySize()), images(2)
    fine = explain(net, x, zoom=2, size="features")
    larger = nn.functional.interpolate(x, (32, 32), mode="bicubic", align_corners=False)
    expected = explain(net, larger, classes=net(x).softmax.argmax(1), size="features")
    assert fine.maps.shape == (2, 8, 8)
    assert torch.allclose(fine.maps, expected.maps, atol=1e-6)


def test_a_smoothed_map_is_the_mean_over_mirror_images_and_brightnesses() -> None:
    net, x = attached(Vgg()), images(2)
    classes = net(x).softmax.argmax(1)
    total = torch.zeros(2, 16, 16)
    for factor in (0.9, 1.0, 1.1):
        total += explain(net, factor * x, classes=classes, scale="raw").maps
        total += explain(net, factor * x.flip(-1), classes=classes, scale="raw").maps.flip(-1)
    smooth = explain(net, x, aug_smooth=True, scale="raw").maps
    assert torch.allclose(smooth, total / 6, atol=1e-5)


def test_maps_of_several_layers_come_from_one_pass_of_the_backbone() -> None:
    net, passes = attached(AnySize()), list[int]()
    with torch.no_grad():
        explain(net, images(2), "layer-cam", layers=["stem", "last"])  # how gradients are had is tried once
    handle = net.model.stem.register_forward_hook(lambda *_: passes.append(1))  # type: ignore[union-attr,operator]
    explain(net, images(2), "layer-cam", layers=["stem", net.model.last])  # type: ignore[list-item]
    handle.remove()
    assert len(passes) == 1


def test_several_layers_have_no_common_unit() -> None:
    with pytest.raises(DataError, match="in logits of one layer"):
        explain(attached(AnySize()), images(), layers=["stem", "last"], scale="raw")


def test_a_layer_without_gradient_or_grid_is_refused_and_valid_ones_named() -> None:
    net = attached(Vgg())
    with pytest.raises(AttachError, match=r"does not fold to a map\. Layers that do: 'features"):
        explain(net, images(), layers=["classifier.0"])
    with pytest.raises(AttachError, match="is no module of Vgg"):
        explain(net, images(), layers=[nn.ReLU()])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"zoom": 0.5}, "zoom must be a number of at least 1, not 0.5"),
        ({"zoom": float("nan")}, "zoom must be"),
        ({"stride": 2}, "stride is 1"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"top_n": -1}, "top_n must be 1 or more"),
        ({"target": "logit"}, "unknown target 'logit': there are class, probability, finer-cam"),
        ({"target": lambda logits, classes: logits}, r"it must give one score per image, \(B,\)"),
        (
            {"target": lambda logits, classes: logits.detach()[:, 0]},
            "not differentiable with respect to the logits",
        ),
        ({"method": "finer-cam"}, "'finer-cam' is a target"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        explain(attached(AnySize()), images(), **options)
    assert "\n" not in str(caught.value)


def test_a_vit_made_for_one_size_is_zoomed_with_every_method_and_layer() -> None:
    timm = pytest.importorskip("timm")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
    net = attach(timm.models.VisionTransformer(**options), example=images(1, size=32))
    for method in ("grad-cam", "ablation-cam", "attention-rollout"):
        ex = explain(net, images(2, size=32), method, branch="centred", zoom=2, size="features")
        assert ex.maps.shape == (2, 8, 8)
    fused = explain(net, images(2, size=32), branch="centred", zoom=2, layers=["blocks.0", "blocks.1.norm1"])
    assert fused.maps.shape == (2, 32, 32) and torch.isfinite(fused.maps).all()


@pytest.mark.parametrize("method", CNN_METHODS)
def test_weights_that_are_not_numbers_give_a_blank_map_that_says_so(method: str) -> None:
    net = attached(Vgg() if method != "cam" else Gap())
    with torch.no_grad():
        for parameter in net.sigmoid.parameters():
            parameter.fill_(float("nan"))
    if not METHODS[method].class_specific:
        return  # asks the features alone
    ex = explain(net, images(2), method)
    assert ex.blank.all() and not ex.maps.any() and "not finite" in ex.notes[0]


def test_more_blank_maps_than_can_be_read_are_counted() -> None:
    net = gap_net(classes=9)
    with torch.no_grad():
        layer(net, "softmax").weight.sub_(100.0)
    notes = explain(net, exact(2), branch="softmax", classes="all").notes
    assert len(notes) == 6 and notes[-1] == "13 more maps are blank, see `blank`."
    assert notes[0].startswith("the map of image 0, class 0, is blank")


def test_all_classes_of_a_linear_head_are_each_classs_own_map_without_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = attached(Gap(classes=11))
    one_by_one = [explain(net, images(2), classes=k, scale="raw", size="features").maps for k in range(11)]
    monkeypatch.setattr(torch.autograd, "grad", None)
    together = explain(net, images(2), classes="all", scale="raw").maps
    assert torch.allclose(together, torch.stack(one_by_one, 1), atol=1e-6)
