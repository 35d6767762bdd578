"""Intervals: equal to a slow loop, as wide as theory says, the same however images were sharded."""

import math
from typing import Any

import pytest
import torch

from sigcam.core.errors import DataError
from sigcam.metrics.base import ImageMetric, packed, unpacked
from sigcam.metrics.bootstrap import Interval, _draws, interval, paired
from sigcam.metrics.localization import MaxBoxAccV2, PxAP, Top1Cls
from support.metric_cases import CASES, made, numbers, take

every_metric = pytest.mark.parametrize("name", CASES)


def filled(name: str, inputs: dict[str, Any], **options: Any) -> ImageMetric:
    metric = CASES[name].make(intervals=True, **options)
    metric.update(**inputs)
    return metric


def named(found: Interval | dict[str, Interval]) -> dict[str, Interval]:
    return found if isinstance(found, dict) else {"": found}


def in_table_order(metric: ImageMetric, ids: list[str]) -> list[int]:
    """Which image each row of the table is: the draws are over rows."""
    single = [filled("Top1Cls", {"correct": torch.tensor([True]), "ids": [i]}).table()[1][0] for i in ids]
    return [next(i for i, key in enumerate(single) if torch.equal(key, row)) for row in metric.table()[1]]


def quantiles(values: list[float]) -> tuple[float, float]:
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.tensor(values, dtype=torch.float64).quantile(ends).tolist()
    return low, high


@every_metric
def test_the_interval_equals_a_loop_that_counts_every_resample_anew(name: str):
    inputs = made(name, 9)
    metric = filled(name, inputs)
    order = in_table_order(metric, inputs["ids"])
    slow = list[dict[str, float]]()
    for counts in _draws(9, 40, seed=3):
        again = CASES[name].make()
        drawn = [order[row] for row, times in enumerate(counts.tolist()) for _ in range(times)]
        again.update(**take(inputs, drawn))  # a best threshold is that of the resample
        slow.append(numbers(again))
    found = named(interval(metric, resamples=40, seed=3))
    assert found.keys() == slow[0].keys()
    for key, each in found.items():
        assert each.value == numbers(metric)[key]
        assert (each.low, each.high) == pytest.approx(quantiles([s[key] for s in slow]), rel=1e-9, abs=1e-9)


@every_metric
def test_the_paired_interval_equals_a_loop_over_differences(name: str):
    one, two = made(name, 9, seed=1), made(name, 9, seed=2)
    a, b = filled(name, one), filled(name, take(two, [4, 2, 0, 8, 6, 7, 5, 3, 1]))  # any order
    order, slow = in_table_order(a, one["ids"]), list[dict[str, float]]()
    for counts in _draws(9, 40, seed=3):
        drawn = [order[row] for row, times in enumerate(counts.tolist()) for _ in range(times)]
        results = []
        for inputs in (one, two):
            again = CASES[name].make()
            again.update(**take(inputs, drawn))
            results.append(numbers(again))
        slow.append({k: results[0][k] - results[1][k] for k in results[0]})
    found = named(paired(a, b, resamples=40, seed=3))
    for key, each in found.items():
        assert each.value == pytest.approx(numbers(a)[key] - numbers(b)[key])
        assert (each.low, each.high) == pytest.approx(quantiles([s[key] for s in slow]), rel=1e-9, abs=1e-9)


@every_metric
def test_a_metric_against_itself_is_zero_and_zero_wide(name: str):
    metric = filled(name, made(name, 7))
    for each in named(paired(metric, metric, resamples=25)).values():
        assert each == Interval(0, 0, 0)


@every_metric
def test_the_interval_of_named_images_does_not_depend_on_order_or_shards(name: str):
    inputs = made(name, 8)
    whole = named(interval(filled(name, inputs), resamples=30))
    sharded = filled(name, take(inputs, [6, 1, 3]))
    sharded.merge_state(filled(name, take(inputs, [7, 0, 5, 2, 4])))
    for key, each in named(interval(sharded, resamples=30)).items():
        assert (each.value, each.low, each.high) == pytest.approx(
            (whole[key].value, whole[key].low, whole[key].high), rel=1e-12
        )


def test_ranks_gather_their_rows_even_if_one_has_no_image():
    inputs = made("MaxBoxAccV2", 8)
    ranks = [filled("MaxBoxAccV2", take(inputs, w)) for w in ([0, 2, 4], [1, 3, 5, 6, 7])] + [
        MaxBoxAccV2(intervals=True)
    ]
    states = [[torch.cat(v) if isinstance(v, list) else v for v in r.metric_state.values()] for r in ranks]
    calls = 0

    def gather(*_: Any, **__: Any) -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        return [state[(calls - 1) % len(state)] for state in states]

    first = filled(
        "MaxBoxAccV2", take(inputs, [0, 2, 4]), dist_sync_fn=gather, distributed_available_fn=lambda: True
    )
    assert interval(first, resamples=30) == interval(filled("MaxBoxAccV2", inputs), resamples=30)


def coin(right: torch.Tensor, ids: list[str] | None = None) -> Top1Cls:
    metric = Top1Cls(intervals=True)
    metric.update(right, ids=ids)
    return metric


def test_the_width_is_that_of_a_proportion():
    right = torch.arange(400) % 10 < 7  # 70 %
    found = interval(coin(right), resamples=4000)
    assert isinstance(found, Interval)
    half = 100 * 1.96 * math.sqrt(0.7 * 0.3 / 400)
    assert found.value == pytest.approx(70)
    assert found.high - found.value == pytest.approx(half, rel=0.08)
    assert found.value - found.low == pytest.approx(half, rel=0.08)
    narrow = interval(coin(right), level=0.5, resamples=4000)
    assert isinstance(narrow, Interval)
    assert narrow.high - narrow.low == pytest.approx(2 * half * 0.6745 / 1.96, rel=0.15)


@pytest.mark.slow
def test_about_nineteen_in_twenty_intervals_hold_the_truth():
    dice = torch.Generator().manual_seed(0)
    held = 0
    for trial in range(300):
        found = interval(coin(torch.rand(100, generator=dice) < 0.7), resamples=200, seed=trial)
        assert isinstance(found, Interval)
        assert found.low <= found.value <= found.high
        held += found.low <= 70 <= found.high
    assert 0.90 < held / 300 < 0.98


def test_pairs_of_like_results_are_closer_than_their_intervals():
    dice = torch.Generator().manual_seed(0)
    right = torch.rand(300, generator=dice) < 0.6
    better = right | (torch.rand(300, generator=dice) < 0.1)  # the same images right, and a few more
    difference, alone = paired(coin(better), coin(right)), interval(coin(right))
    assert isinstance(difference, Interval)
    assert isinstance(alone, Interval)
    assert 0 < difference.low < difference.value < difference.high
    assert difference.high - difference.low < 0.6 * (alone.high - alone.low)


def test_a_seed_fixes_the_draws_and_each_resample_is_as_large_as_the_set():
    assert torch.equal(_draws(50, 10, seed=1), _draws(50, 10, seed=1))
    assert not torch.equal(_draws(50, 10, seed=1), _draws(50, 10, seed=2))
    assert (_draws(50, 10, seed=1).sum(1) == 50).all()


def test_a_chosen_threshold_has_an_interval_too():
    metric = filled("MaxBoxAccV2", made("MaxBoxAccV2", 12))
    assert isinstance(metric, MaxBoxAccV2)
    found = named(interval(metric.at(0.2), resamples=50))
    assert found["threshold_50"] == Interval(0.2, 0.2, 0.2)
    oracle = named(interval(metric, resamples=50))
    assert found["max_box_acc_v2"].low <= oracle["max_box_acc_v2"].low
    difference = named(paired(metric, metric.at(0.2), resamples=50))
    assert difference["max_box_acc_v2"].low >= 0  # in every resample the oracle is at least as good


def test_what_is_kept_for_5000_images_is_small():
    metric = filled("MaxBoxAccV2", made("MaxBoxAccV2", 10))
    per_image = (sum(r.nbytes for r in metric.rows) + sum(k.nbytes for k in metric.keys)) / 10
    assert 5000 * per_image < 3e6
    pixels = filled("PxAP", made("PxAP", 10))
    assert sum(r.nbytes for r in pixels.rows) / 10 == 2 * 1001 * 4
    plain = CASES["Top1Cls"].make(intervals=True)
    plain.update(torch.ones(10, dtype=torch.bool))
    assert sum(r.nbytes for r in plain.rows) == 10


@pytest.mark.parametrize("width", [1, 7, 8, 9, 3003])
def test_packing_flags_loses_nothing(width: int):
    flags = torch.rand(5, width, generator=torch.Generator().manual_seed(width)) > 0.5
    assert torch.equal(unpacked(packed(flags), width), flags.float())
    assert packed(flags).shape == (5, math.ceil(width / 8))


def test_a_resample_without_an_object_is_left_out():
    metric = PxAP(intervals=True)
    masks = torch.zeros(3, 4, 4, dtype=torch.uint8)
    masks[0, 0, 0] = 1
    metric.update(torch.rand(3, 4, 4), masks, ids=["a", "b", "c"])
    found = interval(metric, resamples=60)
    assert isinstance(found, Interval)
    assert 0 < found.low <= found.high <= 100


def test_what_cannot_be_resampled_or_paired_is_refused():
    right = torch.tensor([True, False, True])
    plain = Top1Cls()
    plain.update(right)
    with pytest.raises(DataError, match=r"Top1Cls\(intervals=True\)"):
        interval(plain)
    with pytest.raises(DataError, match="has no images"):
        interval(Top1Cls(intervals=True))
    with pytest.raises(DataError, match="level"):
        interval(coin(right), level=95)
    with pytest.raises(DataError, match="resamples"):
        interval(coin(right), resamples=0)
    with pytest.raises(DataError, match="3 images against 2"):
        paired(coin(right), coin(right[:2]))
    with pytest.raises(DataError, match="2 ids occur on one side only"):
        paired(coin(right, ["a", "b", "c"]), coin(right, ["a", "b", "d"]))
    with pytest.raises(DataError, match="one side only"):
        paired(coin(right, ["a", "b", "c"]), coin(right))
    with pytest.raises(DataError, match="more than once"):
        paired(coin(right, ["a", "a", "c"]), coin(right, ["a", "a", "c"]))
    with pytest.raises(DataError, match="use one metric for both"):
        paired(coin(right), filled("MeanMap", made("MeanMap", 3)))


def test_images_without_ids_are_paired_in_their_order():
    right = torch.tensor([True, False, True, True])
    assert paired(coin(right), coin(right)) == Interval(0, 0, 0)


def test_an_interval_prints_as_people_write_it():
    assert str(Interval(61.234, 58.9, 63.456)) == "61.23 [58.90, 63.46]"
