"""optimize="compile": compiled passes give what the network gives, and stand back where they cannot."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sigcam import FitConfig, Samples, attach, evaluate, explain, fit, load
from sigcam.network.compiled import compiled
from sigcam.network.dual import DualBranch
from sigcam.network.zoom import zoomed
from support.nets import FunctionalRelu
from support.samples import CLASSES, COUNT, FIT, sample
from support.tiny import Gap, Vgg, attached, images, untouched

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


def passes_of(net: DualBranch) -> list[int]:
    """Count compiled passes from here on, by their images."""
    assert net.compiled is not None
    run, seen = net.compiled.run, list[int]()

    def counted(batch: torch.Tensor) -> Any:
        seen.append(len(batch))
        return run(batch)

    net.compiled.run = counted
    return seen


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("make", [Gap, Vgg])
def test_a_compiled_pass_gives_what_the_network_gives_for_any_number_of_images(make: Any) -> None:
    model = make().eval()
    with untouched(model):
        net = attach(model, example=images(1), optimize="compile")
    plain, seen = attach(model, example=images(1)), passes_of(net)
    for count in (1, 8, 11):
        batch = images(count)
        ours, expected = net(batch), plain(batch)
        for name in ("softmax", "sigmoid", "features", "pooled"):
            assert torch.allclose(getattr(ours, name), getattr(expected, name), atol=1e-5), (count, name)
    assert seen == [8, 8, 8, 8]  # filled up, so that nothing is compiled again
    ours_map, expected_map = (explain(each, images(3), branch="softmax").maps for each in (net, plain))
    assert torch.allclose(ours_map, expected_map, atol=1e-4)
    assert len(seen) == 4 + (make is Gap)  # an MLP's maps need gradients, which run layer by layer


@needs_compiler
@pytest.mark.slow
def test_a_branch_loads_compiled_and_enlarged_images_run_layer_by_layer(tmp_path: Path) -> None:
    model = Gap().eval()
    attach(model, example=images(1)).save(tmp_path / "b.safetensors")
    net = load(tmp_path / "b.safetensors", model, optimize="compile")
    seen = passes_of(net)
    net(images(2))
    assert seen == [8]
    larger_net, larger = zoomed(net, images(2), 2)
    assert larger_net(larger).features.shape[-1] == 2 * net(images(2)).features.shape[-1]
    net(images(2)[:0])  # no image
    assert seen == [8, 8]


def test_without_a_compiler_the_network_is_optimised_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no C++ compiler was found\nhere is a long story")

    monkeypatch.setattr(torch, "compile", refuse)
    with caplog.at_level(logging.WARNING, "sigcam"):
        net = attach(Gap().eval(), example=images(1), optimize="compile")
    assert net.compiled is None
    (line,) = caplog.messages
    assert line.startswith("not compiled, but optimised: ")
    assert "no C++ compiler was found" in line
    assert "\n" not in line
    assert net(images(2)).softmax.shape == (2, 4)


def test_a_layer_that_a_compiled_pass_cannot_show_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    net = attached(FunctionalRelu().eval())
    assert net.split.activation
    with caplog.at_level(logging.WARNING, "sigcam"):
        again = attach(net.model, example=net.example, optimize="compile")
    assert again.compiled is None
    assert "cannot be taken in a compiled pass" in caplog.text


@needs_compiler
@pytest.mark.slow
def test_a_fit_and_an_evaluation_of_many_images_are_compiled_and_of_few_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = Samples(tuple(sample(index) for index in range(COUNT)), CLASSES)
    net = attach(Gap().eval(), example=images(1), transform=FIT)
    made = list[bool]()

    def noted(*args: Any) -> Any:
        made.append(True)
        return compiled(*args)

    monkeypatch.setattr("sigcam.network.dual.compiled", noted)
    monkeypatch.setattr("sigcam.network.dual.is_faster", lambda one, other: one() and other() and True)
    config = FitConfig(l2=0.1, background=0.0)
    few = fit(net, samples, config)
    assert not made
    monkeypatch.setattr("sigcam.network.dual.MANY_IMAGES", COUNT)
    many = fit(net, samples, config)
    assert made == [True]
    assert many.losses == pytest.approx(few.losses, rel=1e-3)
    fast = attach(net.model, example=images(1), optimize=True, transform=FIT)
    fast.sigmoid.load_state_dict(net.sigmoid.state_dict())
    fast.fitted = True
    found, plain = (evaluate(each, samples, metrics=["max_box_acc_v2"]) for each in (fast, net))
    assert made == [True, True]
    assert [row["value"] for row in found.rows] == pytest.approx(
        [row["value"] for row in plain.rows], abs=0.1
    )
    assert fast.compiled is None  # the caller's network stays as it was


@needs_compiler
@pytest.mark.slow
def test_a_compiled_pass_that_is_slower_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    net = attach(Gap().eval(), example=images(1), optimize=True)
    monkeypatch.setattr("sigcam.network.dual.is_faster", lambda one, other: False)
    assert net.for_many(20_000).compiled is None
    monkeypatch.setattr("sigcam.network.dual.is_faster", lambda one, other: True)
    assert net.for_many(20_000).compiled is not None
    assert net.for_many(19_999) is net
