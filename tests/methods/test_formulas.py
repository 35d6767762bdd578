"""Every CAM method against its formula, and against the others."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import support.method_oracles as oracle
from sigcam.methods import formulas
from sigcam.methods.explainer import explain
from sigcam.methods.probe import Probe
from sigcam.methods.targets import Branch
from sigcam.network.attachment import attach
from support.method_cases import (
    BRANCHES,
    CASES,
    CHOSEN,
    METHODS,
    Signed,
    close,
    differ,
    fitted,
    linear_layer,
    network,
    ours,
    pictures,
    plain,
    raw,
    unit,
)
from support.method_oracles import GRADIENT_METHODS, MAPS, REPEATED_METHODS, Target, low_map
from support.nets import PlainVit
from support.tiny import Gap

# --------------------------------------------------------------------------------------------------- oracles


PAIRS = [("cam", name) for name in ("gap", "signed")] + [(m, name) for m in METHODS for name in CASES]


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_a_method_is_its_formula(method: str, name: str, branch: Branch) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), branch, name)
    for clamp in (False, True):
        maps = raw(net, x, method, branch=branch, clamp=clamp, classes=CHOSEN)
        units = explain(net, x, method, branch=branch, clamp=clamp, classes=CHOSEN).maps
        for i, k in enumerate(CHOSEN):
            low = oracle.raw_map(method, twin, x[i], k, oracle.logit, clamp=clamp)
            assert close(maps[i], low, 1e-7)
            assert np.abs(units[i].numpy() - unit(low, name, method)).max() < 1e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", MAPS)
def test_a_method_without_weights_is_its_formula(method: str, name: str) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), "softmax", name)
    for branch in BRANCHES:
        maps = raw(net, x, method, branch=branch, classes=CHOSEN)
        units = explain(net, x, method, branch=branch, classes=CHOSEN).maps
        for i in range(2):
            low = MAPS[method](twin, x[i])
            assert close(maps[i], low, 1e-7)
            assert np.abs(units[i].numpy() - unit(low, name, method)).max() < 1e-5
            alone = raw(net, x[i : i + 1], method, branch=branch, classes="all")
            assert close(alone[0, 1], maps[i].numpy(), 1e-9)


@pytest.mark.parametrize(
    ("name", "branch", "target"),
    [("gap", "sigmoid", "class"), ("vgg", "softmax", "probability"), ("normed", "centred", "finer-cam")],
)
@pytest.mark.parametrize("method", REPEATED_METHODS)
def test_a_method_of_many_passes_is_its_formula(method: str, name: str, branch: Branch, target: Any) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), branch, name)
    options: Any = {"branch": branch, "target": target}
    for clamp in (False, True):
        maps = raw(net, x, method, classes=CHOSEN, clamp=clamp, **options)
        for i, k in enumerate(CHOSEN):
            rivals = oracle.nearest(twin.run(x[i])[0], k)
            finer = partial(oracle.finer, rivals=rivals)
            scores = {"class": oracle.logit, "probability": probability(branch), "finer-cam": finer}
            assert close(maps[i], oracle.raw_map(method, twin, x[i], k, scores[target], clamp=clamp), 1e-7)
    alone = raw(net, x[1:], method, classes="all", clamp=True, batch_size=3, **options)
    assert close(alone[0, CHOSEN[1]], maps[1].numpy(), 1e-9)


def test_without_noise_smoothgrad_cam_pp_is_grad_cam_pp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "SMOOTH_NOISE", 0.0)
    for name in ("gap", "vgg", "vit"):
        smooth, sharp = (raw(network(name), pictures(name), f"{m}grad-cam++") for m in ("smooth", ""))
        assert close(smooth, sharp.numpy(), 1e-9)


@pytest.mark.parametrize("name", ["vgg", "normed", "vit"])
def test_shapley_cam_is_grad_cam_where_scores_are_linear_and_elsewhere_another(name: str) -> None:
    net, x = network(name), pictures(name)
    linear = network("gap"), pictures("gap")
    one, other = (raw(*linear, method, branch="softmax") for method in ("shapley-cam", "grad-cam"))
    assert torch.allclose(one, other, rtol=1e-12)
    for target in ("class", "probability"):
        one, other = (
            raw(net, x, method, branch="softmax", target=target) for method in ("shapley-cam", "grad-cam")
        )
        assert close(one, other.numpy(), 1e-3) == (target == "class" and name != "vit")


def test_shapley_values_add_up_to_the_score_to_second_order() -> None:
    net, x = network("gap"), pictures("gap")
    probe = Probe(net, net.run(x, grad=True), "softmax", torch.tensor(CHOSEN)[:, None], squared)
    values = (probe.features * (probe.grads - probe.curvature / 2)).sum((2, 3, 4))
    zeros = torch.zeros_like(probe.features[0])
    nothing = torch.cat([probe.rescore(i, features=zeros) for i in range(2)])
    assert torch.allclose(values, probe.scores - nothing, rtol=1e-9)  # a quadratic has no third order


def squared(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None])[:, 0] ** 2


@pytest.mark.parametrize("name", CASES)
def test_random_weights_are_the_same_for_all_and_of_both_signs(name: str) -> None:
    net, x = network(name), pictures(name)
    every = raw(net, x, "random-cam", branch="softmax", classes="all")
    assert close(every[:, 0], every[:, 1].numpy(), 1e-12)
    assert close(raw(net, x, "random-cam", branch="sigmoid"), every[:, 0].numpy(), 1e-12)
    clamped = raw(net, x, "random-cam", branch="softmax", clamp=True)
    assert not close(clamped, every[:, 0].numpy(), 1e-3)


def probability(branch: Branch) -> Target:
    return oracle.sigmoid_probability if branch == "sigmoid" else oracle.softmax_probability


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["gap", "vgg", "vit"])
def test_a_probability_can_be_explained_by_every_method(method: str, name: str, branch: Branch) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), branch, name)
    maps = raw(net, x, method, branch=branch, classes=CHOSEN, target="probability")
    for i, k in enumerate(CHOSEN):
        assert close(maps[i], oracle.raw_map(method, twin, x[i], k, probability(branch), clamp=False), 1e-7)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("method", GRADIENT_METHODS)
@pytest.mark.parametrize("name", ["gap", "vgg", "vit"])
def test_finer_cam_takes_the_nearest_classes_off_the_score(method: str, name: str, branch: Branch) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), branch, name)
    maps = raw(net, x, method, branch=branch, classes=CHOSEN, target="finer-cam")
    for i, k in enumerate(CHOSEN):
        assert close(maps[i], oracle.raw_map(method, twin, x[i], k, oracle.finer, clamp=False), 1e-7)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("method", ["ablation-cam", "score-cam"])
def test_finer_cam_compares_with_the_clean_images_rivals_throughout(method: str, branch: Branch) -> None:
    torch.manual_seed(0)
    net, x = fitted(Gap(classes=10), (16, 24)), pictures("gap")
    twin = plain(net, branch, "gap")
    maps = raw(net, x, method, branch=branch, classes=CHOSEN, target="finer-cam")
    for i, k in enumerate(CHOSEN):
        target = partial(oracle.finer, rivals=oracle.nearest(twin.run(x[i])[0], k))
        assert close(maps[i], oracle.raw_map(method, twin, x[i], k, target, clamp=False), 1e-7)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("method", METHODS)
def test_any_function_of_the_logits_can_be_explained_by_every_method(method: str, branch: Branch) -> None:
    net, x, twin = network("vgg"), pictures("vgg"), plain(network("vgg"), branch, "vgg")

    def ahead(logits: Tensor, k: int) -> Tensor:
        return logits[k] - 0.3 * logits[1] * logits[2]

    def batched(logits: Tensor, classes: Tensor) -> Tensor:
        return logits.gather(1, classes[:, None])[:, 0] - 0.3 * logits[:, 1] * logits[:, 2]

    maps = raw(net, x, method, branch=branch, classes=CHOSEN, target=batched)
    for i, k in enumerate(CHOSEN):
        assert close(maps[i], oracle.raw_map(method, twin, x[i], k, ahead, clamp=False), 1e-7)


@pytest.mark.parametrize("branch", ["sigmoid", "softmax"])
@pytest.mark.parametrize("method", ["cam", *METHODS])
def test_of_one_logit_class_1_is_for_it_and_class_0_against(method: str, branch: Branch) -> None:
    torch.manual_seed(0)
    net, x = fitted(Gap(classes=1), (16, 24)), pictures("gap")
    twin = plain(net, branch, "gap")
    for k in (1, 0):
        sign = 2 * k - 1
        maps = raw(net, x, method, branch=branch, classes=k)
        for i in range(2):
            low = oracle.raw_map(method, twin, x[i], 0, lambda z, _, s=sign: s * z[0], clamp=False)
            assert close(maps[i], sign * low if method == "cam" else low, 1e-7), k


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("method", METHODS)
def test_maps_of_several_layers_are_fused_as_their_paper_says(method: str, branch: Branch) -> None:
    net, x, layers = network("vgg"), pictures("vgg"), ["features.1", "features.4"]
    for clamp in (False, True):
        maps = explain(net, x, method, branch=branch, clamp=clamp, classes=CHOSEN, layers=layers).maps
        for i, k in enumerate(CHOSEN):
            lows = []
            for layer in layers:
                twin = plain(net, branch, "vgg")
                twin.layer = layer
                lows.append(low_map(method, twin, x[i], k, clamp=clamp))
            assert np.abs(maps[i].numpy() - oracle.fused(method, lows, 8, 32)).max() < 1e-5


@pytest.mark.parametrize("fusion", ["mean", "max", "product"])
@pytest.mark.parametrize("method", ["grad-cam++", "layer-cam", "score-cam"])
def test_maps_of_several_layers_are_fused_as_asked(method: str, fusion: Any) -> None:
    net, x, layers = network("vgg"), pictures("vgg"), ["features.1", "features.4"]
    fuse = {"mean": oracle.averaged, "max": partial(oracle.fused, "layer-cam"), "product": oracle.multiplied}
    options: Any = {"branch": "softmax", "classes": CHOSEN, "layers": layers}
    maps = explain(net, x, method, **options, fusion=fusion).maps
    for i, k in enumerate(CHOSEN):
        lows = []
        for layer in layers:
            twin = plain(net, "softmax", "vgg")
            twin.layer = layer
            lows.append(low_map(method, twin, x[i], k))
        assert np.abs(maps[i].numpy() - fuse[fusion](lows, 8, 32)).max() < 1e-5
    usual = "max" if method == "layer-cam" else "mean"
    assert (fusion == usual) == torch.equal(maps, explain(net, x, method, **options).maps)


def test_a_product_of_maps_that_share_no_pixel_is_blank_and_says_so() -> None:
    first, second = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(1, 2))
    with torch.no_grad():
        for layer, weight, bias in ((first, 1.0, 0.0), (second, -1.0, 1.0)):  # x, then 1 - x
            layer.weight.fill_(weight)
            layer.bias.fill_(bias)  # type: ignore[union-attr]
    x = torch.zeros(1, 1, 4, 6)
    x[..., :3] = 1
    net, options = attach(model, example=x), {"branch": "softmax", "layers": ["1", "3"]}
    apart = explain(net, x, "eigen-cam", **options, fusion="product")  # type: ignore[arg-type]
    assert bool(apart.blank) and "no pixel is above zero in the maps of all layers" in apart.notes[0]
    together = explain(net, x, "eigen-cam", **options, fusion="max")  # type: ignore[arg-type]
    assert not bool(together.blank)


# ------------------------------------------------------------------------------------------------ identities


@given(st.integers(2, 6), st.integers(1, 8), st.sampled_from(BRANCHES), st.booleans(), st.integers(0, 999))
def test_on_a_gap_linear_head_four_methods_are_one(
    classes: int, channels: int, branch: Branch, clamp: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    net, x = fitted(Gap(classes, channels), (16, 24), seed), pictures("gap", 3, seed)
    options: dict[str, Any] = {"branch": branch, "clamp": clamp}
    cam, *others = (raw(net, x, m, **options) for m in ("cam", "grad-cam", "hires-cam", "xgrad-cam"))
    for other in others[:2]:
        assert torch.allclose(cam, other, rtol=1e-9, atol=1e-12)
    # XGrad-CAM has S / (S + 1e-7) of each channel's weight, and no cell holds more than S
    slack = 1e-7 * float(linear_layer(net, branch).weight.detach().abs().sum())
    assert float((cam - others[2]).abs().max()) <= 2 * slack
    if clamp:
        assert torch.allclose(cam, raw(net, x, "layer-cam", **options), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@given(st.sampled_from(["vgg", "normed", "vit"]), st.sampled_from(BRANCHES), st.integers(0, 5))
def test_clamped_hires_cam_is_layer_cam_on_any_head(name: str, branch: Branch, seed: int) -> None:
    net, x = network(name, seed), pictures(name, 3, seed)
    one, other = (raw(net, x, m, branch=branch, clamp=True) for m in ("hires-cam", "layer-cam"))
    assert torch.allclose(one, other, rtol=1e-12)
    assert torch.equal(other, raw(net, x, "layer-cam", branch=branch, clamp=False))


@pytest.mark.parametrize("branch", BRANCHES)
def test_an_mlp_head_tells_the_methods_apart(branch: Branch) -> None:
    maps = {m: explain(network("vgg"), pictures("vgg"), m, branch=branch, classes=CHOSEN).maps.numpy()
            for m in ("grad-cam", "xgrad-cam", "hires-cam", "grad-cam++")}  # fmt: skip
    maps["clamped"] = ours("grad-cam", "vgg", branch=branch, clamp=True)
    maps["layer-cam"] = ours("layer-cam", "vgg", branch=branch)
    for one, other in [
        ("grad-cam", "xgrad-cam"),
        ("grad-cam", "hires-cam"),
        ("xgrad-cam", "hires-cam"),
        ("grad-cam", "grad-cam++"),
        ("clamped", "layer-cam"),
    ]:
        assert differ(maps[one], maps[other], 0.01), (one, other)


@pytest.mark.slow
@given(st.sampled_from(["gap", "vgg", "normed"]), st.booleans(), st.integers(0, 5))
def test_on_the_sigmoid_branch_explaining_the_probability_changes_grad_cam_pp_alone(
    name: str, clamp: bool, seed: int
) -> None:
    net, x = network(name, seed), pictures(name, 2, seed)
    for method in set(GRADIENT_METHODS) - {"shapley-cam"}:  # which turns over where the sigmoid is flat
        a, b = (
            explain(net, x, method, clamp=clamp, classes=CHOSEN, target=target).maps.numpy()
            for target in ("class", "probability")
        )
        if method == "grad-cam++":
            assert np.abs(a - b).max() > 1e-5
        else:
            assert np.abs(a - b).max() < 1e-8


@pytest.mark.slow
@given(st.sampled_from(["gap", "vgg", "normed"]), st.sampled_from(BRANCHES), st.integers(0, 5))
def test_clamping_does_nothing_where_weights_are_never_negative(name: str, branch: Branch, seed: int) -> None:
    net, x = network(name, seed), pictures(name, 2, seed)
    assert float(net(x).features.min()) >= 0
    for method in ("layer-cam", "grad-cam++", "score-cam", "eigen-cam"):
        one, other = (raw(net, x, method, branch=branch, clamp=clamp) for clamp in (False, True))
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), method


@given(st.sampled_from([Gap, Signed]), st.integers(2, 6), st.sampled_from(BRANCHES), st.integers(0, 999))
def test_ablation_cam_on_a_gap_linear_head_is_each_channels_share_of_the_logit(
    make: type[Gap], classes: int, branch: Branch, seed: int
) -> None:
    torch.manual_seed(seed)
    net, x = fitted(make(classes), (16, 24), seed), pictures("gap", 3, seed)
    ex = explain(net, x, "ablation-cam", branch=branch, scale="raw", size="features")
    weight, features = linear_layer(net, branch).weight.detach(), net(x).features.detach()
    if branch == "centred":
        weight = weight - weight.mean(0)
    shares = weight[ex.classes] * features.mean((2, 3)) / ex.logits.abs()[:, None]
    assert torch.allclose(ex.maps, torch.einsum("bn,bnpq->bpq", shares, features), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", ["gap", "signed"])
def test_ablation_cams_closed_form_is_what_running_the_tail_again_gives(name: str, branch: Branch) -> None:
    torch.manual_seed(0)
    net, x = fitted(CASES[name].make(), CASES[name].size), pictures(name, 3)
    assert {"softmax", "sigmoid"} <= net.linear
    closed = raw(net, x, "ablation-cam", branch=branch, classes="all")
    net.linear = frozenset()
    again = raw(net, x, "ablation-cam", branch=branch, classes="all")
    assert torch.allclose(closed, again, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@given(st.sampled_from(["gap", "signed", "vgg", "vit"]), st.integers(0, 5))
def test_eigen_cam_asks_for_no_class_and_is_positive_where_activation_is(name: str, seed: int) -> None:
    net, x = network(name, seed), pictures(name, 3, seed)
    maps = raw(net, x, "eigen-cam", branch="softmax", classes=0)
    for branch in BRANCHES:
        assert torch.equal(maps, raw(net, x, "eigen-cam", branch=branch, classes=[1, 2, 3]))
    activation = net(x).features.detach().norm(dim=1)
    assert ((maps * activation).sum((1, 2)) > 0).all()


def test_eigen_cams_sign_does_not_hang_on_rounding() -> None:
    model = PlainVit((16, 24), patch=4).double()  # channels of its LayerNorm sum to zero in every cell
    net, x = attach(model, example=torch.randn(1, 3, 16, 24).double()), pictures("vit", 8)
    together = raw(net, x, "eigen-cam", branch="softmax")
    for i, one in enumerate(x):
        assert close(raw(net, one[None], "eigen-cam", branch="softmax")[0], together[i].numpy(), 1e-7)


@pytest.mark.parametrize("factor", [-1.0, 3.0, -0.01])
def test_features_of_the_other_sign_or_size_scale_the_eigen_cam_map(factor: float) -> None:
    class Scaled(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            return factor * super().forward(x)

    model, x = Signed(), pictures("signed")
    other = copy.deepcopy(model)
    other.body[1] = Scaled()
    one, two = (raw(fitted(m, (16, 24)), x, "eigen-cam", branch="softmax") for m in (model, other))
    assert torch.allclose(two, abs(factor) * one, rtol=1e-7, atol=1e-10)


SHIFTED = [("cam", "gap"), *((method, name) for method in METHODS for name in ("gap", "vgg", "vit"))]


@pytest.mark.parametrize(("method", "name"), SHIFTED)
@settings(max_examples=2)
@given(st.integers(0, 5), st.floats(2, 20), st.integers(0, 99))
def test_the_centred_branch_does_not_see_what_softmax_does_not(
    method: str, name: str, channel: int, delta: float, seed: int
) -> None:
    torch.manual_seed(seed)
    net, x = fitted(CASES[name].make(), CASES[name].size, seed), pictures(name, 2, seed)

    def look(branch: Branch) -> Any:
        return explain(net, x, method, branch=branch, classes=CHOSEN, scale="raw", size="features")

    before, entered = {branch: look(branch) for branch in BRANCHES}, list[Tensor]()
    last = linear_layer(net, "softmax")
    handle = last.register_forward_pre_hook(lambda module, args: entered.append(args[0].detach()))
    net(x)
    handle.remove()
    with torch.no_grad():
        last.weight[:, channel] += delta  # Eq. 8: of every class
    for branch in BRANCHES:
        after = look(branch)
        assert torch.allclose(after.probability, before[branch].probability, rtol=1e-9)
        unmoved = close(after.maps, before[branch].maps.numpy(), 1e-6)
        if branch != "softmax" or method in ("eigen-cam", "random-cam"):
            assert unmoved, branch
        elif entered[0][:, channel].any():  # a hidden unit that is off for both images has no say
            assert not unmoved


def test_the_centred_branchs_probabilities_are_the_softmax_heads_to_rounding() -> None:
    for name in CASES:
        x, soft, centred = pictures(name), *(plain(network(name), b, name) for b in ("softmax", "centred"))
        one, other = (twin.model(x).detach() for twin in (soft, centred))
        assert torch.allclose(one.softmax(1), other.softmax(1), rtol=1e-12)
        assert float(other.sum(1).abs().max()) < 1e-12
        for method in METHODS:
            ex = explain(network(name), x, method, branch="centred", classes=CHOSEN)
            assert torch.allclose(
                ex.probability, torch.stack([one[i].softmax(0)[k] for i, k in enumerate(CHOSEN)])
            )
            assert torch.allclose(ex.logits, torch.stack([other[i, k] for i, k in enumerate(CHOSEN)]))


# --------------------------------------------------------------------------------- batches, classes, channels


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_a_batchs_maps_are_its_images_own(method: str, name: str) -> None:
    net, x, classes = network(name), pictures(name, 3), [2, 0, 1]
    for branch in BRANCHES:
        together = raw(net, x, method, branch=branch, classes=classes)
        for i, k in enumerate(classes):
            alone = raw(net, x[i : i + 1], method, branch=branch, classes=k)
            assert close(together[i], alone[0].numpy(), 1e-9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_several_classes_at_once_are_each_classs_own_map(method: str, name: str) -> None:
    net, x = network(name), pictures(name)
    for branch, target in (("sigmoid", "class"), ("softmax", "probability"), ("centred", "finer-cam")):
        every = raw(net, x, method, branch=branch, classes="all", target=target)
        for k in range(every.shape[1]):
            alone = raw(net, x, method, branch=branch, classes=k, target=target)
            assert close(every[:, k], alone.numpy(), 1e-8), (branch, k)


@pytest.mark.parametrize("method", ["score-cam", "ablation-cam"])
@pytest.mark.parametrize("name", ["gap", "vgg", "normed", "vit"])
def test_chunks_of_any_size_give_the_same_map(method: str, name: str) -> None:
    net, x = network(name), pictures(name)
    expected = raw(net, x, method, classes=CHOSEN).numpy()
    for batch_size in (1, 3, 4, 1000):
        assert close(raw(net, x, method, classes=CHOSEN, batch_size=batch_size), expected, 1e-9)


def many_channels() -> nn.Sequential:
    """A classifier with 256 channels and BatchNorm statistics of its own."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 256, 3, 2), nn.BatchNorm2d(256)
    model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 4))
    with torch.no_grad():
        for _ in range(20):
            model(3 * torch.randn(8, 3, 32, 32) + 1)
    return model.eval()


@pytest.mark.parametrize("branch", BRANCHES)
def test_score_cam_of_many_channels_by_a_faster_copy_is_the_same_to_1e_4(
    branch: Branch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = many_channels(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    net, made = attach(model, example=x[:1], init="copy"), list[Any]()
    net.fitted = True

    def counted(*args: Any, **options: Any) -> nn.Module:
        made.append(formulas_optimized(*args, **options))
        return made[-1]

    formulas_optimized = formulas.optimized
    monkeypatch.setattr(formulas, "optimized", counted)
    fast = explain(net, x, "score-cam", branch=branch)
    assert len(made) == 1 and isinstance(made[0][1], nn.Identity)  # its BatchNorm is folded
    assert net.model is model and isinstance(model[1], nn.BatchNorm2d)
    monkeypatch.setattr(formulas, "MANY_MASKS", 10**9)
    slow = explain(net, x, "score-cam", branch=branch)
    assert len(made) == 1
    assert (fast.maps - slow.maps).abs().max() < 1e-4
    assert torch.equal(fast.probability, slow.probability) and torch.equal(fast.evidence, slow.evidence)


def test_score_cam_by_a_faster_copy_sees_weights_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = many_channels(), torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    net = attach(model, example=x)
    before = explain(net, x, "score-cam", branch="softmax", classes=0).maps
    with torch.no_grad():
        model[3].weight.mul_(-1)
    after = explain(net, x, "score-cam", branch="softmax", classes=0).maps
    monkeypatch.setattr(formulas, "MANY_MASKS", 10**9)
    assert (after - before).abs().max() > 0.01
    assert (after - explain(net, x, "score-cam", branch="softmax", classes=0).maps).abs().max() < 1e-4


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", ["gap", "vgg", "normed", "vit"])
def test_score_cam_of_few_channels_takes_those_that_vary_most(name: str, branch: Branch) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), branch, name)
    features = net(x).features.detach().numpy()
    count = features.shape[1]
    whole = raw(net, x, "score-cam", branch=branch, classes=CHOSEN)
    assert close(raw(net, x, "score-cam", branch=branch, classes=CHOSEN, top_n=count), whole.numpy(), 1e-12)
    for top_n in (1, 3):
        maps = raw(net, x, "score-cam", branch=branch, classes=CHOSEN, top_n=top_n)
        for i, k in enumerate(CHOSEN):
            channels = np.argsort(-features[i].std((1, 2)))[:top_n]
            assert close(maps[i], low_map("score-cam", twin, x[i], k, channels=list(channels)), 1e-7)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    ("method", "name"), [("cam", "gap"), *((m, n) for m in METHODS for n in ("gap", "vgg"))]
)
def test_eigen_smooth_keeps_the_first_component_of_the_weighted_channels(
    method: str, name: str, branch: Branch
) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), branch, name)
    for clamp in (False, True):
        options: Any = {"branch": branch, "clamp": clamp, "classes": CHOSEN, "eigen_smooth": True}
        units = explain(net, x, method, **options).maps
        for i, k in enumerate(CHOSEN):
            low = oracle.eigen_smoothed(method, twin, x[i], k, oracle.logit, clamp=clamp)
            assert np.abs(units[i].numpy() - unit(low, name, method)).max() < 1e-5


def test_hires_cam_smoothed_is_eigengrad_cam() -> None:
    net, x = network("vgg"), pictures("vgg")
    options: Any = {"classes": CHOSEN, "branch": "softmax"}
    smoothed = explain(net, x, "hires-cam", eigen_smooth=True, **options).maps
    assert close(smoothed, explain(net, x, "eigengrad-cam", **options).maps.numpy(), 1e-6)
    assert not close(smoothed, explain(net, x, "hires-cam", **options).maps.numpy(), 1e-2)


def test_eigen_smooth_of_all_classes_is_that_of_each() -> None:
    net, x = network("gap"), pictures("gap")
    options: Any = {"branch": "softmax", "eigen_smooth": True, "size": "image"}
    every = explain(net, x, "cam", classes="all", **options).maps
    assert close(every[:, 2], explain(net, x, "cam", classes=2, **options).maps.numpy(), 1e-9)
