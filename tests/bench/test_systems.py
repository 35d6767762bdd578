"""sigcam bench systems: every method on every head, slow ones on fewer images, with differences and cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigcam.bench import measure
from sigcam.bench import systems as table
from sigcam.bench.cost import TooSlow, map_cost
from sigcam.bench.plan import Plan
from sigcam.bench.runner import run_bench
from sigcam.core.errors import MissingExtra
from sigcam.methods.registry import METHODS, method
from sigcam.network.attachment import attach
from support.bench import write_model, write_wsol_dataset
from support.samples import prepared
from support.tiny import SIZE, Gap

PUBLISHED, CLAMPED = ("softmax", False), ("softmax", True)
KEPT = ("cam", "grad-cam", "layer-cam", "score-cam", "eigen-cam", "attention-rollout")
HEADS = [PUBLISHED, CLAMPED, ("sigmoid", True), ("sigmoid + background", True)]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    write_wsol_dataset(tmp_path / "data")
    write_wsol_dataset(tmp_path / "data", "pets", masks=True)
    return Plan(tmp_path / "data", tmp_path / "out", 12, 12, backbone=write_model(tmp_path / "model.py"))


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Register a method for the test alone; afterwards all methods are there, in their order."""
    registered = dict(METHODS)

    def register(name: str, function: Any, **facts: Any) -> None:
        method(name, **facts)(function)

    yield register
    METHODS.clear()
    METHODS.update(registered)


def slow(probe: Any) -> Tensor:
    """Weights that take a pass for each sample."""
    for number in range(probe.samples):
        probe.rescore(0, images=probe.forward_pass.images[:1] * number)
    return probe.mean_grads


def endless(probe: Any) -> Tensor:
    while True:
        probe.rescore(0, images=probe.forward_pass.images[:1])


def missing(probe: Any) -> Tensor:
    raise MissingExtra("missing", "some-package", "some-extra")


@pytest.mark.slow
def test_every_method_has_a_row_for_each_head_that_its_maps_depend_on(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, register: Callable[..., None]
) -> None:
    for name in set(METHODS) - set(KEPT):
        del METHODS[name]
    monkeypatch.setattr(table, "QUICK", replace(table.QUICK, most_passes=5, limit=10))
    monkeypatch.setattr(table, "CHEAP", 3)
    register("slow", slow, samples=100)
    register("endless", endless)
    register("missing", missing)
    run_bench("systems", plan, announce=lambda text: None)
    content = json.loads((plan.output / "systems.json").read_text())
    rows = content["rows"]
    left_out = {"attention-rollout", "endless", "missing"}
    for dataset in ("cub", "pets"):
        for name, facts in METHODS.items():
            found = [row for row in rows if (row["dataset"], row["method"]) == (dataset, name)]
            kinds = [(row["branch"], row["clamp"]) for row in found]
            if name in left_out:
                assert not kinds
            elif not facts.class_specific:
                assert kinds == [("any head", False)] and not found[0]["delta"]
            else:
                assert kinds == [kind for kind in HEADS if facts.signed or kind != CLAMPED], name
            assert all(row["images"] == table.QUICK.images_of(row["passes"]) for row in found)
    columns = {"average_drop", "insertion", "deletion"}
    for row in rows:
        located = "pxap" if row["dataset"] == "pets" else "max_box_acc_v2"
        assert {located, "mean_map", *columns} <= row.keys()
        assert row["curve_images"] == 4 and row["curve_steps"] == 7
        assert row["passes"] >= 1 and row["seconds"] > 0 and row["times_a_pass"] > 0
        base = next(r for r in rows if all(r[key] == row[key] for key in ("dataset", "method")))
        compared = row is not base
        assert compared == (row["branch"] not in ("softmax", "any head") or row["clamp"])
        for column in (located, *columns) if compared else ():
            value, low, high = row["delta"][column]
            assert value == pytest.approx(row[column] - base[column], abs=1e-9) and low <= value <= high
    (passes,) = {row["passes"] for row in rows if row["method"] == "slow"}
    assert passes == pytest.approx(6, rel=0.01)
    assert {row["row"] for row in rows if row["method"] == "score-cam"} == {
        "softmax (the paper's baseline), 5 channels tried",
        "sigmoid, clamped (the paper's method), 5 channels tried",
        "sigmoid + background, clamped, 5 channels tried",
    }
    foot = content["foot"]
    assert {row["samples"] for row in rows if row["method"] == "slow"} == {5}
    assert "cub: 12 for cam, grad-cam, layer-cam, eigen-cam (4 for insertion and deletion, by 7" in foot
    assert "cub: 5 for score-cam, slow (4 for insertion" in foot
    assert "endless (it takes more than 10 passes for a map)" in foot
    assert "missing (missing needs some-package: pip install 'sigcam[some-extra]')" in foot
    assert "attention-rollout (attention-rollout is for plain ViTs, and " in foot
    page = (plan.output / "systems.md").read_text()
    assert page.count("## ") == 2 and "| eigen-cam, 12 images: any head, signed | " in page

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(measure, "evaluate", never)
    monkeypatch.setattr(table, "map_cost", never)
    run_bench("systems", plan, announce=lambda text: None)
    assert json.loads((plan.output / "systems.json").read_text())["rows"] == rows


def test_slow_methods_get_fewer_images_and_the_papers_networks_fewer_of_all(plan: Plan) -> None:
    usual = table.Amounts(images=200, fewest=20)
    assert [usual.images_of(passes) for passes in (1, 12, 24, 4000)] == [200, 200, 100, 20]
    assert table.amounts(plan) is table.QUICK
    whole = replace(plan, fidelity_images=None, localization_images=None)
    assert table.amounts(whole).images_of(4000) is None
    large = replace(plan, localization_images=None, backbone="wsol:resnet50-v1")
    assert table.amounts(large) is table.OF_LARGE
    assert table.amounts(replace(large, backbone="embedded")) == table.Amounts()


def test_methods_with_many_passes_are_told_to_take_fewer(register: Callable[..., None]) -> None:
    how = table.Amounts(most_passes=100)
    register("sampled", slow, samples=400, passes=2)
    register("sampled-channels", slow, perturbs="images", samples=10)
    register("fixed", slow, passes=4000)
    told = {name: table.effort(name, 1280, how) for name in (*KEPT, "sampled", "sampled-channels", "fixed")}
    assert {name: found for name, found in told.items() if found} == {
        "score-cam": {"top_n": 100},
        "sampled": {"samples": 50},
        "sampled-channels": {"top_n": 10},
    }
    assert table.effort("score-cam", 80, how) == {} == table.effort("sampled", 1280, table.WHOLE)


def test_passes_are_counted_with_gradients_and_in_optimised_copies() -> None:
    images = torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for optimize in (False, True):
        net = attach(Gap(), optimize=optimize)
        net.fitted = True
        channels = net(images).features.shape[1]
        cost = map_cost(net, images, "score-cam", {})
        assert 1 + channels <= cost.passes < 2.1 + channels  # one tells how much memory a pass takes
        assert map_cost(net, images, "score-cam", {"top_n": 3}).passes == pytest.approx(4, rel=0.05)
        assert map_cost(net, images, "grad-cam", {}).passes == pytest.approx(1, rel=0.05)
        with pytest.raises(TooSlow):
            map_cost(net, images, "score-cam", {}, most_passes=3)


def test_costs_leave_the_network_as_it_was() -> None:
    net = prepared(Gap())
    images = torch.rand(2, 3, SIZE, SIZE)
    before = net(images).softmax
    map_cost(net, images, "grad-cam++", {})
    assert torch.equal(net(images).softmax, before)
    assert all(p.grad is None for p in net.model.parameters())
