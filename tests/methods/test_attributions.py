"""Attributions to pixels: captum's own on a plain model, their sums, networks that captum gets wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import captum.attr as captum
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import ConfigError, MissingExtra
from sigcam.methods import METHODS, attributions
from sigcam.methods.backpropagation import guided_gradients
from sigcam.methods.explainer import explain
from sigcam.methods.probe import Probe
from sigcam.methods.registry import MapConfig
from sigcam.methods.targets import Branch, softmax_score
from sigcam.network.dual import DualBranch
from support.method_cases import BRANCHES, fitted, network, pictures, quick
from support.tiny import Vgg, attached, images, untouched

PIXELS = [name for name, facts in METHODS.items() if facts.gives == "pixels"]
CLASSES = torch.tensor([[0, 3], [2, 2]])


class Modules(nn.Module):
    """As captum wants a network: each activation a module that runs once; batch norm and windows that do not
    overlap."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1, self.norm, self.act1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.pool, self.conv2, self.act2 = nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()
        self.head = nn.Linear(8, classes)
        self.average = nn.AdaptiveAvgPool2d(1)
        generator = torch.Generator().manual_seed(0)
        self.norm.running_mean = torch.randn(6, generator=generator) * 0.3
        self.norm.running_var = torch.rand(6, generator=generator) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm(self.conv1(x)))
        logits: Tensor = self.head(self.average(self.act2(self.conv2(self.pool(1.0 * x)))).flatten(1))
        return logits


class Functions(Modules):
    """The same numbers from functions, one ReLU module that runs twice, and changes in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x)), inplace=True), 2)
        logits: Tensor = self.head(torch.relu_(self.conv2(x)).mean((2, 3)))
        return logits


class Residual(Modules):
    """Overlapping max pooling, a ReLU module that runs twice, sums in place and a gate."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__(classes)
        self.same, self.gate = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.act1(self.norm(self.conv1(x))), 3, 2, 1)
        y = self.same(x)
        y += x
        logits: Tensor = self.head(self.act1(self.conv2(self.act1(y))).mean((2, 3)))
        return logits


class Gated(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm(self.conv1(x)))
        x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()
        logits: Tensor = self.head(self.act2(self.conv2(x)).mean((2, 3)))
        return logits


def made(make: Callable[[], nn.Module], seed: int = 0) -> tuple[DualBranch, Tensor]:
    torch.manual_seed(seed)
    net = fitted(make().eval(), (12, 16), seed)
    return net, torch.randn(2, 3, 12, 16, dtype=torch.float64)


def probe(net: DualBranch, x: Tensor, branch: Branch = "softmax", **options: Any) -> Probe:
    return Probe(net, net.run(x), branch, CLASSES, **{"samples": 50, **options})


def of_branch(net: DualBranch, branch: Branch) -> nn.Module:
    """The plain model with this branch in place of its head."""
    model = type(net.model)().double().eval()
    model.load_state_dict(net.model.state_dict())
    model.norm.running_mean, model.norm.running_var = net.model.norm.running_mean, net.model.norm.running_var
    last = net.last_layer("sigmoid" if branch == "sigmoid" else "softmax")
    with torch.no_grad():
        for name in ("weight", "bias"):
            values = last.get_parameter(name)
            values = values - values.mean(0) if branch == "centred" else values
            model.head.get_parameter(name).copy_(values)
    return model


CAPTUM: dict[str, Callable[[nn.Module, Tensor, int], Tensor]] = {
    "saliency": lambda m, x, k: captum.Saliency(m).attribute(x, target=k, abs=False),
    "integrated_gradients": lambda m, x, k: captum.IntegratedGradients(m).attribute(x, target=k, n_steps=50),
    "deeplift": lambda m, x, k: captum.DeepLift(m).attribute(x, target=k),
    "lrp": lambda m, x, k: captum.LRP(m).attribute(x, target=k),
}


@pytest.mark.filterwarnings("ignore:(?s)Setting forward, backward hooks")
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", CAPTUM)
def test_an_attribution_is_captums_own_on_a_plain_model(name: str, branch: Branch) -> None:
    net, x = made(Modules)
    model = of_branch(net, branch)
    with torch.no_grad():
        found = getattr(attributions, f"signed_{name}")(probe(net, x, branch))
    for i in range(2):
        for k in range(2):
            image = x[i : i + 1].clone().requires_grad_()
            expected = CAPTUM[name](model, image, int(CLASSES[i, k])).detach()
            assert float((found[i, k] - expected[0]).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_smoothgrad_is_captums_noise_tunnel_with_the_noise_of_each_sample() -> None:
    net, x = made(Modules)
    with torch.no_grad():
        found = attributions.signed_smoothgrad(probe(net, x, samples=5))
    for i in range(2):
        image, spread = x[i : i + 1], 0.15 * float(x[i].max() - x[i].min())
        draws, total = torch.Generator().manual_seed(0), torch.zeros_like(x[:1])
        for _ in range(5):
            noisy = (image + spread * torch.randn(image.shape, generator=draws)).requires_grad_()
            total += captum.Saliency(of_branch(net, "softmax")).attribute(
                noisy, target=int(CLASSES[i, 0]), abs=False
            )
        assert torch.allclose(found[i, 0], total[0] / 5, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["deeplift", "lrp"])
def test_functions_and_modules_that_run_twice_count_as_modules_do(name: str) -> None:
    net, x = made(Modules)
    other, _ = made(Functions)
    other.model.load_state_dict(net.model.state_dict())
    signed = getattr(attributions, f"signed_{name}")
    with torch.no_grad():
        one, two = signed(probe(net, x)), signed(probe(other, x))
    assert float((one - two).abs().max()) <= 1e-5 * float(one.abs().max())  # an epsilon for each step


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("make", [Modules, Functions, Residual])
@pytest.mark.parametrize("name", ["integrated_gradients", "deeplift"])
def test_attributions_add_up_to_the_scores_difference(
    name: str, make: type[Modules], branch: Branch, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = made(make)
    asked = probe(net, x, branch, samples=800, batch_size=200)
    reference = probe(net, torch.zeros_like(x), branch)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "sigcam"):
        sums = getattr(attributions, f"signed_{name}")(asked).sum((2, 3, 4))
    difference = (asked.scores - reference.scores).detach()
    assert bool(((sums - difference).abs() <= 0.01 * difference.abs().clamp(min=0.01)).all())
    assert not caplog.records


def test_attributions_that_do_not_add_up_are_told(caplog: pytest.LogCaptureFixture) -> None:
    net, x = network("vit"), pictures("vit")
    with caplog.at_level(logging.WARNING, "sigcam"):
        explain(net, x, "deeplift", branch="softmax")
    assert "only activations and max pooling have rules" in caplog.text


def test_relevance_of_a_network_without_biases_adds_up_to_the_score() -> None:
    torch.manual_seed(0)
    for make in (Residual, Gated):
        net, x = made(make)
        with torch.no_grad():
            for name, parameter in net.model.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
            net.model.norm.running_mean.zero_()
        asked = probe(net, x)
        with torch.no_grad():
            sums = attributions.signed_lrp(asked).sum((2, 3, 4))
        assert torch.allclose(sums, asked.scores.detach(), rtol=1e-4, atol=1e-6)


def test_lrp_refuses_what_it_has_no_rule_for() -> None:
    with pytest.raises(ConfigError, match="lrp has no rule for layer_norm, which PlainVit applies"):
        explain(network("vit"), pictures("vit"), "lrp", branch="softmax")


@pytest.mark.parametrize("name", PIXELS)
def test_a_map_of_pixels_is_that_of_each_image_and_class_alone(name: str) -> None:
    net, x = made(Residual)
    asked: dict[str, Any] = {"branch": "centred", "scale": "raw", **quick(name)}
    maps = explain(net, x, name, classes=CLASSES, **asked).maps
    assert maps.shape == (2, 2, 12, 16) and torch.isfinite(maps).all()
    assert torch.equal(maps[1, 0], maps[1, 1])  # the same class twice
    for i in range(2):
        for k in range(2):
            alone = explain(net, x[i : i + 1], name, classes=int(CLASSES[i, k]), **asked).maps[0]
            assert torch.allclose(alone, maps[i, k], rtol=1e-7, atol=1e-12)
    again = explain(net, x, name, classes=CLASSES, batch_size=2, **asked).maps
    assert torch.allclose(again, maps, rtol=1e-7, atol=1e-9)
    small = explain(net, x, name, classes=CLASSES, size="features", **asked).maps
    assert torch.allclose(small, F.adaptive_avg_pool2d(maps, tuple(small.shape[-2:])))


@pytest.mark.parametrize("name", PIXELS)
def test_a_map_of_pixels_leaves_the_model_alone(name: str) -> None:
    model = Vgg().train()
    net, x = attached(model), images(2)
    with untouched(model):
        with torch.inference_mode():
            explain(net, x, name, **quick(name))
        state = torch.random.get_rng_state()
        explain(net, x, name, branch="softmax", **quick(name))
        assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", PIXELS)
def test_a_frozen_trunk_and_half_precision_work(name: str) -> None:
    class Frozen(Modules):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.act1(self.conv1(x)).detach()
            logits: Tensor = self.head(self.act2(self.conv2(x)).mean((2, 3)))
            return logits

    torch.manual_seed(0)
    net, x = attached(Frozen()), images(1)
    assert not explain(net, x, name, **quick(name)).blank.any()
    half = explain(net.to(torch.bfloat16), x.bfloat16(), name, **quick(name))
    assert half.maps.dtype == torch.float32 and torch.isfinite(half.maps).all()


def test_a_probability_is_explained_by_its_gradient() -> None:
    net, x = made(Modules)
    with torch.no_grad():
        found = attributions.signed_saliency(probe(net, x, target=softmax_score))
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net.model(leaf).softmax(1).gather(1, CLASSES[:, :1]).sum(), leaf)
    assert torch.allclose(found[:, 0], expected, rtol=1e-9)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "saliency", "samples": 3}, "samples is a number of masks, noises or steps, for smoothgrad"),
    ({"method": "rise", "samples": 0}, "samples must be 1 or more"),
    (
        {"method": "rise", "top_n": 3},
        "top_n is a number of channels to try, for score-cam, ss-cam and is-cam: rise tries none",
    ),
    ({"method": "deeplift", "eigen_smooth": True}, "weights none"),
    ({"method": "lrp", "scale": "logit"}, "needs maps in logits"),
    ({"method": "saliency", "layers": ["conv1"]}, "saliency explains pixels, not a layer: leave layers out"),
    ({"method": "saliency", "target": lambda logits, k: logits[:, 0].detach()}, "not differentiable"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_does_not_apply_is_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    net, x = made(Modules)
    with pytest.raises(ConfigError, match=message):
        explain(net, x, **options)


def test_a_missing_captum_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigcam.methods.registry.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"saliency needs captum: pip install 'sigcam\[attribution\]'"):
        MapConfig("saliency").checked()
    MapConfig("rise").checked()


@pytest.mark.slow
def test_captum_is_not_imported_before_it_is_used() -> None:
    code = "import sys, sigcam; sigcam.list_methods(), sigcam.explain; assert 'captum' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_zoom_and_smoothing_work_with_pixels() -> None:
    net, x = attached(Modules()), images(2, size=16)
    plain_maps = explain(net, x, "saliency").maps
    for options in ({"zoom": 2.0}, {"aug_smooth": True}):
        maps = explain(net, x, "saliency", **options).maps
        assert maps.shape == plain_maps.shape and float(maps.amax()) == 1
        assert not torch.allclose(maps, plain_maps, atol=1e-3)


# ---------------------------------------------------------------------------------- deliberate differences

# Peer, method: what the peer does; what we do; why. The page docs/differences.md shows these rows.
DIFFERENCES: dict[str, tuple[str, str, str, str, str]] = {
    "saliency_channels": (
        "captum",
        "Saliency",
        "absolute gradients of each channel",
        "their sum over channels; the paper takes the largest",
        "one map for an image, to which each channel adds",
    ),
    "smoothgrad_noise": (
        "captum",
        "SmoothGrad (`NoiseTunnel`)",
        "noise of standard deviation 1 unless told; also a mean of squares (`smoothgrad_sq`)",
        "noise of 15 % of the image's range; the mean of gradients",
        "the paper recommends 10 to 20 %, and its formula is the mean; squares are from another paper "
        "(Hooker et al., 2019)",
    ),
    "attributions_without_inputs": (
        "captum",
        "integrated gradients, DeepLIFT",
        "`multiply_by_inputs=False` leaves the factor (image - reference) out",
        "always multiplies",
        "without it attributions do not add up to the score's difference",
    ),
    "deeplift_activations": (
        "captum",
        "DeepLIFT",
        "has a rule for modules of six activations; functions, ReLU6, SiLU or GELU get the plain "
        "gradient without a word",
        "the same rule for every call of an elementwise activation",
        "sums hold on MobileNet and EfficientNet too",
    ),
    "deeplift_windows": (
        "captum",
        "DeepLIFT with max pooling",
        "where windows overlap, keeps one of several values that go to the same pixel",
        "pools copies of the windows side by side, with captum's rule",
        "sums hold on ResNet and DenseNet too",
    ),
    "deeplift_pooled_activations": (
        "captum",
        "DeepLIFT with max pooling",
        "gives another attribution where pooling directly follows an activation than where it follows "
        "the same values",
        "the attribution does not depend on it",
        "the rule is about values",
    ),
    "lrp_sums": (
        "captum",
        "LRP",
        "counts relevance twice where features are added by `+`; refuses a module without a rule",
        "the epsilon rule for every call of a function, sums included; a gate (squeeze and excitation) "
        "is a constant",
        "relevance adds up to the score, but for biases",
    ),
    "guided_functions": (
        "captum",
        "guided backpropagation",
        "guides modules of ReLU; functions get the plain gradient",
        "guides every call of a ReLU, module or function",
        "what a network computes does not depend on how it is written",
    ),
}


def test_every_difference_is_tested_and_on_the_page() -> None:
    prefix = "test_difference_"
    assert {name.removeprefix(prefix) for name in globals() if name.startswith(prefix)} == DIFFERENCES.keys()
    page = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
    section = page.partition("\n## Attributions")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {' | '.join(row)} |" for row in DIFFERENCES.values()]


def peer(method: type, net: DualBranch, image: Tensor, **options: Any) -> Tensor:
    """captum's attribution to class 0 of the softmax head."""
    with warnings.catch_warnings(action="ignore"):
        model = of_branch(net, "softmax")
        found: Tensor = method(model, **options).attribute(image.clone().requires_grad_(), target=0)
    return found.detach()[0]


def own(name: str, net: DualBranch, x: Tensor) -> Tensor:
    """Our signed attribution of the first image to class 0."""
    with torch.no_grad():
        found: Tensor = getattr(attributions, f"signed_{name}")(probe(net, x))[0, 0]
    return found


def change(net: DualBranch, x: Tensor) -> float:
    """What the score of class 0 changes from the reference to the first image."""
    return float(net(x).softmax[0, 0] - net(torch.zeros_like(x)).softmax[0, 0])


def test_difference_saliency_channels() -> None:
    net, x = made(Modules)
    theirs = peer(captum.Saliency, net, x[:1])
    assert theirs.shape == (3, 12, 16) and bool((theirs >= 0).all())
    ours = explain(net, x[:1], "saliency", branch="softmax", classes=0, scale="raw").maps[0]
    assert torch.allclose(ours, theirs.sum(0)) and not torch.allclose(ours, theirs.amax(0))


def test_difference_smoothgrad_noise() -> None:
    net, x = made(Modules)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tunnel = captum.NoiseTunnel(captum.Saliency(of_branch(net, "softmax")))
        image, options = x[:1].clone().requires_grad_(), {"nt_samples": 50, "target": 0, "abs": False}
        spread = 0.15 * float(x[0].max() - x[0].min())
        wide, same, squares = (
            tunnel.attribute(image, stdevs=stdevs, nt_type=kind, **options)[0].detach()
            for stdevs, kind in ((1.0, "smoothgrad"), (spread, "smoothgrad"), (spread, "smoothgrad_sq"))
        )
    ours = own("smoothgrad", net, x)
    near = float((ours - same).abs().mean())  # but for the draws
    assert near < 0.5 * float((ours - wide).abs().mean()) or spread > 0.5
    assert near < float((ours - squares).abs().mean()) and bool((squares >= 0).all())


def test_difference_attributions_without_inputs() -> None:
    net, x = made(Modules)
    for name, method in (("integrated_gradients", captum.IntegratedGradients), ("deeplift", captum.DeepLift)):
        factor = peer(method, net, x[:1], multiply_by_inputs=False)
        assert torch.allclose(own(name, net, x), factor * x[0], rtol=1e-5, atol=1e-9)
        assert abs(float(factor.sum()) - change(net, x)) > 0.05 * abs(change(net, x))


class Clipped(Modules):
    def __init__(self) -> None:
        super().__init__()
        self.act1 = nn.ReLU6()


class Windows(Modules):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, 1)


def assert_ours_alone_adds_up(make: Callable[[], nn.Module]) -> None:
    net, x = made(make)
    x = 20 * x  # so that values are clipped
    expected = change(net, x)
    assert abs(float(own("deeplift", net, x).sum()) - expected) < 1e-6 * abs(expected)
    assert abs(float(peer(captum.DeepLift, net, x[:1]).sum()) - expected) > 0.01 * abs(expected)


def test_difference_deeplift_activations() -> None:
    assert_ours_alone_adds_up(Clipped)


def test_difference_deeplift_windows() -> None:
    assert_ours_alone_adds_up(Windows)


def test_difference_deeplift_pooled_activations() -> None:
    class Direct(Modules):
        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.act1(self.norm(self.conv1(x))))
            logits: Tensor = self.head(self.average(self.act2(self.conv2(x))).flatten(1))
            return logits

    (net, x), (other, _) = made(Modules), made(Direct)
    assert torch.equal(net(x).softmax, other(x).softmax)
    assert torch.allclose(own("deeplift", net, x), own("deeplift", other, x), rtol=1e-9, atol=1e-12)
    theirs = [peer(captum.DeepLift, each, x[:1]) for each in (net, other)]
    assert not torch.allclose(*theirs, rtol=1e-2)


def test_difference_lrp_sums() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.act1, self.conv2 = nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3)
            self.act2, self.average, self.head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act1(self.conv1(x))
            logits: Tensor = self.head(self.average(self.act2(self.conv2(x + x))).flatten(1))
            return logits

    net, x = made(Added)
    theirs = captum.LRP(net.model).attribute(x[:1].clone().requires_grad_(), target=0)[0].detach()
    ours = own("lrp", net, x)
    assert float((theirs - 2 * ours).abs().max()) < 1e-4 * float(ours.abs().max())
    with pytest.raises(TypeError, match="no rule"):
        captum.LRP(made(Clipped)[0].model).attribute(x[:1].clone().requires_grad_(), target=0)


def test_difference_guided_functions() -> None:
    maps = []
    for make in (Modules, Functions):
        net, x = made(make)
        theirs, gradient = (peer(each, net, x[:1]) for each in (captum.GuidedBackprop, captum.Saliency))
        maps.append(guided_gradients(probe(net, x))[0, 0])
        assert torch.allclose(theirs, maps[-1]) == (make is Modules)
        assert torch.allclose(theirs.abs(), gradient) == (make is Functions)
    assert torch.allclose(*maps)
