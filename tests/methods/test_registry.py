"""A method is added in one place: its registration."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sigcam
from sigcam.core.errors import ConfigError
from sigcam.methods import METHODS, method
from sigcam.methods.probe import Probe
from sigcam.methods.registry import MapConfig, method_name
from sigcam.network.attachment import attach
from sigcam.ui.sources import available_methods, sources_of
from sigcam.ui.viewer import Request, Viewer
from support.commands import place, run, spec
from support.method_cases import Signed, quick
from support.samples import picture, prepared, samples
from support.tiny import Gap, attached

__all__ = ["place", "samples"]  # fixtures
NAME = "Squared_CAM"  # spelled as no method of ours


@pytest.fixture
def squared() -> Iterator[str]:
    @method(NAME)
    def squared_cam(probe: Probe) -> Tensor:
        """Each channel weighted by its squared mean gradient."""
        return probe.mean_grads.square()

    yield NAME
    del METHODS[NAME]


def test_a_new_method_is_listed_and_explains(squared):
    assert squared in sigcam.list_methods() and method_name("squaredcam") == squared
    net, images = attach(Gap(4)), torch.rand(2, 3, 32, 32)
    ex = sigcam.explain(net, images, squared, branch="softmax", size="features", scale="raw")
    features = net.run(images).features.detach()
    weights = sigcam.explain(net, images, "grad-cam", branch="softmax", scale="raw", size="features")
    row = net.last_layer("softmax").weight.detach()[ex.classes] / features[0, 0].numel()
    expected = (row.square()[:, :, None, None] * features).sum(1)
    assert torch.allclose(ex.maps, expected, atol=1e-6) and not torch.allclose(ex.maps, weights.maps)
    unit = sigcam.explain(net, images, "squared-cam", branch="softmax")
    assert unit.method == squared and unit.maps.amax() == 1
    assert len(unit.boxes()) == 2


def test_a_new_method_is_evaluated_beside_the_others(squared, samples):
    result = sigcam.evaluate(prepared(Gap(4)), samples, methods=["cam", squared], branches=["softmax"])
    assert {row["method"] for row in result.rows} >= {"cam", squared}


def test_a_new_method_is_an_option_of_the_commands(squared, place: Path, monkeypatch: pytest.MonkeyPatch):
    data = ("--model", spec(place), "--branch", "softmax", "--method", squared)
    words = ("explain", place / "data" / "cat" / "0.png", *data, "--output", place / "maps")
    assert run(monkeypatch, *words) == 0
    assert squared in (place / "maps" / "explanation.json").read_text()
    words = ("evaluate", *data, "--data", place / "data", "--output", place / "numbers")
    assert run(monkeypatch, *words) == 0
    rows = json.loads((place / "numbers" / "results.json").read_text())["rows"]
    assert squared in {row["method"] for row in rows}


def test_a_new_method_is_on_the_page_and_follows_a_shift_of_the_head(squared):
    net = prepared(Gap(4))
    assert squared in available_methods([net])
    viewer = Viewer("bird", picture(0), [net])
    viewer.update(Request((0,), tuple(sources_of(net)), (squared,)))
    before = [panel.raw_map for panel in viewer.panels]
    viewer.shift(2.0)
    assert all(panel.unit == squared for panel in viewer.panels)
    moved = {
        panel.source.branch: not torch.equal(panel.raw_map, low)
        for panel, low in zip(viewer.panels, before, strict=True)
    }
    assert moved["softmax"]


@pytest.mark.parametrize("model", [Gap, Signed])
@pytest.mark.parametrize(
    "name", [name for name, facts in METHODS.items() if facts.needs not in ("attention", "patches")]
)
def test_the_facts_of_a_method_are_true_of_its_maps(name: str, model: type[Gap]):
    facts, net = METHODS[name], attached(model(4))
    with torch.no_grad():
        net.last_layer("softmax").get_parameter("weight").mul_(30)  # for a step of Grad-CAM++ below -2
    asked: dict[str, Any] = {"branch": "softmax", "classes": "all", "scale": "raw", **quick(name)}
    ex = sigcam.explain(net, torch.rand(2, 3, 16, 16), name, **asked)
    assert bool((ex.maps[:, 0] != ex.maps[:, 1]).any()) == facts.class_specific
    if facts.in_logits and facts.signed:
        bias = net.last_layer("softmax").bias.detach()
        assert torch.allclose(ex.maps.mean((2, 3)) + bias, ex.logits, atol=1e-5)
    if facts.linear_twin:
        clamp = not facts.signed
        same = [
            sigcam.explain(net, ex.images, each, branch="softmax", clamp=clamp).maps
            for each in (name, facts.linear_twin)
        ]
        assert torch.allclose(*same, atol=1e-5)
    if not facts.signed:
        clamped = sigcam.explain(net, ex.images, name, clamp=True, **asked)
        assert torch.equal(clamped.maps, ex.maps)


@pytest.mark.parametrize("name", METHODS)
def test_a_slow_method_is_told_to_stay_within_a_number_of_passes(name: str):
    facts, most, channels = METHODS[name], 60, 1000
    told = MapConfig(name).within(most, channels)
    tried = told.top_n or channels if facts.tries_channels else 1
    if facts.tries_channels or facts.samples:
        assert told.passes * tried <= most
    assert told.within(most, channels) == told
    assert MapConfig(name).within(10**9, channels) == MapConfig(name)


def test_spellings_are_facts_of_a_method():
    for spelling, name in {
        "gradcam": "grad-cam",
        "GradCAM++": "grad-cam++",
        "gradcampp": "grad-cam++",
        "GradCAMPlusPlus": "grad-cam++",
        "hires_cam": "hires-cam",
        "Rollout": "attention-rollout",
        "layer cam": "layer-cam",
    }.items():
        assert method_name(spelling) == name
    with pytest.raises(ConfigError, match="did you mean 'score-cam'"):
        method_name("scor-cam")


@pytest.mark.slow
def test_no_module_branches_on_the_name_of_a_method():
    """Names may be defaults and data; comparisons and sets of them are facts of a registration."""
    package = Path(sigcam.__file__).parent
    for path in package.rglob("*.py"):
        if path.relative_to(package).as_posix() in ("methods/formulas.py", "bench/paper.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Set):
                names = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & METHODS.keys()
                assert not names, f"{path}:{node.lineno} branches on {names}"


def test_a_method_needs_a_name_of_its_own() -> None:
    with pytest.raises(ConfigError, match="needs a name"):
        method(lambda probe: probe.mean_grads)  # type: ignore[arg-type]
    known = METHODS["grad-cam"]
    with pytest.raises(ConfigError, match="already"):
        method("grad-cam")(lambda probe: probe.mean_grads)
    assert METHODS["grad-cam"] is known
