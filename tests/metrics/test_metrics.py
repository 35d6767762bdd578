"""Metrics: golden and hand-worked numbers, shards that add up, and refusals that name the image."""

import ast
import itertools
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import Metric, MetricCollection

import sigcam
from sigcam import metrics
from sigcam.core.errors import ConfigError, DataError
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.boxes import best_ious, scaled_boxes
from sigcam.metrics.fidelity import (
    AverageDrop,
    Deletion,
    IncreaseInConfidence,
    Insertion,
    MeanMap,
    insertion_deletion_curves,
)
from sigcam.metrics.localization import (
    EnergyInBox,
    GTKnownLoc,
    MaxBoxAcc,
    MaxBoxAccV2,
    PointingGame,
    PxAP,
    Top1Cls,
    Top1Loc,
    Top5Loc,
    in_top,
    without_peeking,
)
from support.metric_cases import CASES, HEIGHT, WIDTH, made, made_boxes, made_maps, numbers, take

GOLDEN = Path(__file__).parents[1] / "golden"
every_metric = pytest.mark.parametrize("name", CASES)


def filled(name: str, inputs: dict[str, Any], **options: Any) -> ImageMetric:
    metric = CASES[name].make(**options)
    metric.update(**inputs)
    return metric


# Golden and hand-worked numbers


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """Sixty made maps with boxes and masks, as the public WSOL evaluator was given them."""
    counts, masks = np.load(GOLDEN / "wsol_counts.npz"), np.load(GOLDEN / "wsol_masks.npz")
    maps = torch.from_numpy(counts["maps"].astype(np.float32))
    boxes = [
        scaled_boxes(torch.from_numpy(each[each[:, 0] >= 0]), (int(w), int(h)), (224, 224))
        for each, (w, h) in zip(counts["boxes"], counts["sizes"], strict=True)
    ]
    bits = {k: np.unpackbits(masks[k], count=maps.numel()).reshape(maps.shape) for k in ("object", "ignored")}
    return {
        "maps": maps,
        "boxes": boxes,
        "masks": torch.from_numpy(np.where(bits["ignored"], 255, bits["object"]).astype(np.uint8)),
        "counts": counts,
    }


def test_max_box_acc_v2_equals_the_public_evaluator(golden: dict[str, Any]):
    metric = MaxBoxAccV2()
    metric.update(golden["maps"], golden["boxes"])
    assert torch.equal(metric.counts, torch.from_numpy(golden["counts"]["correct_multi"]).long())
    found = numbers(metric)
    assert found["max_box_acc_v2"] == pytest.approx(10.000000000000002, abs=1e-9)
    assert found["max_box_acc_30"] == pytest.approx(21.666666666666668, abs=1e-9)
    assert found["max_box_acc_50"] == pytest.approx(6.666666666666667, abs=1e-9)
    assert found["max_box_acc_70"] == pytest.approx(1.6666666666666667, abs=1e-9)


def test_max_box_acc_and_gt_known_equal_the_public_evaluator(golden: dict[str, Any]):
    metric, known = MaxBoxAcc(), GTKnownLoc()
    for each in (metric, known):
        each.update(golden["maps"], golden["boxes"])
    assert torch.equal(metric.counts, torch.from_numpy(golden["counts"]["correct_largest"]).long())
    assert float(metric.compute()) == pytest.approx(5.0, abs=1e-9)
    assert float(known.compute()) == pytest.approx(1.6666666666666667, abs=1e-9)


def test_pxap_equals_the_public_evaluator(golden: dict[str, Any]):
    metric = PxAP()
    for part in range(0, 60, 7):  # in batches, as nobody has room for all
        metric.update(golden["maps"][part : part + 7], golden["masks"][part : part + 7])
    assert float(metric.compute()) == pytest.approx(6.621635171153524, abs=1e-9)


@pytest.mark.parametrize(
    ("scores", "masks", "expected"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 250 / 3),
        ([0.5] * 10, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0], 30),
        ([1, 1, 0, 0], [1, 0, 1, 0], 50),
        ([1, 1, 0, 0], [1, 1, 0, 0], 100),
        ([0.9, 0.5, 0.1, 0.7], [1, 1, 0, 255], 100),
        ([0.9, 0.9995, 0.999, 0.1], [1, 0, 1, 0], 100 * (0.5 * 0.5 + 0.5 * 2 / 3)),  # two in the bin of 0.999
    ],
)
def test_pxap_by_hand(scores: list[float], masks: list[int], expected: float):
    metric = PxAP()
    metric.update(torch.tensor([[scores]], dtype=torch.float32), torch.tensor([[masks]], dtype=torch.uint8))
    assert float(metric.compute()) == pytest.approx(expected, abs=1e-9)


def test_pxap_bins_close_on_the_left_in_float64():
    metric = PxAP()
    edges = torch.arange(1001, dtype=torch.float64) / 1000
    metric.update(edges.view(1, 7, 143), torch.ones(1, 7, 143, dtype=torch.bool))
    assert torch.equal(metric.counts, torch.stack([torch.zeros(1001), torch.ones(1001)]).long())


def protocol_map() -> torch.Tensor:
    """The map of PROTOCOL 8."""
    maps = torch.zeros(1, 224, 224)
    maps[0, 20:60, 30:90], maps[0, 120:200, 100:210] = 1.0, 0.5
    maps[0, 150, 150], maps[0, 5, 5], maps[0, 7, 9] = 0, 0.204, 0.203
    return maps


def test_the_largest_contour_counts_at_the_fixed_threshold_and_any_in_version_two():
    maps, small = protocol_map(), [torch.tensor([[30, 20, 89, 59]])]
    known, one, two = GTKnownLoc(), MaxBoxAcc(), MaxBoxAccV2()
    for metric in (known, one, two):
        metric.update(maps, small)
    assert float(known.compute()) == 0  # at 0.2 the other region is larger
    assert float(one.compute()) == 100
    assert float(one.best_threshold()) == pytest.approx(0.499, abs=0.002)  # where it vanishes
    assert numbers(two)["max_box_acc_v2"] == 100
    assert numbers(two)["threshold_70"] == 0  # any contour, so already at 0


def test_the_first_box_rule_is_an_option():
    maps, boxes = protocol_map(), [torch.tensor([[0, 60, 10, 90], [100, 120, 210, 200]])]  # far, exact
    for metric, expected in ((GTKnownLoc(), 100), (GTKnownLoc(boxes="first"), 0), (MaxBoxAcc(), 100)):
        metric.update(maps, boxes)
        assert float(metric.compute()) == expected
    with pytest.raises(DataError, match='"best" or "first"'):
        GTKnownLoc(boxes="last")  # type: ignore[arg-type]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9, 1.0]))
def test_a_fixed_threshold_is_a_column_of_the_sweep(seed: int, threshold: float):
    inputs = made("GTKnownLoc", 6, seed)
    for rule, first in (("best", False), ("first", True)):
        metric = GTKnownLoc(threshold=threshold, iou=0.5, boxes=rule)  # type: ignore[arg-type]
        metric.update(**inputs)
        ious = best_ious(inputs["maps"], inputs["boxes"], mode="largest", first=first)
        assert metric.counts == (ious[:, round(1000 * threshold)] >= 0.5).sum()


def test_top_loc_counts_what_is_located_and_classified():
    maps = protocol_map().expand(4, -1, -1)
    hit, miss = torch.tensor([[100, 120, 210, 200]]), torch.tensor([[0, 0, 20, 20]])
    correct = torch.tensor([True, False, True, False])
    for metric in (Top1Loc(), Top5Loc()):
        metric.update(maps, [hit, hit, miss, miss], correct)
        assert float(metric.compute()) == 25
        assert metric.images == 4  # the denominator is all images


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_in_top_is_the_place_of_the_label_in_a_stable_order(seed: int, k: int):
    dice = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (8, 6), generator=dice).float()  # with ties
    labels = torch.randint(0, 6, (8,), generator=dice)
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    assert torch.equal(in_top(scores, labels, k), (best == labels[:, None]).any(1))
    assert torch.equal(in_top(scores, labels), scores.argmax(1) == labels)


def test_in_top_refuses_what_it_cannot_rank():
    with pytest.raises(DataError, match=r"\(B, C\)"):
        in_top(torch.rand(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match=r"0\.\.3"):
        in_top(torch.rand(2, 4), torch.tensor([0, 4]))
    with pytest.raises(DataError, match="NaN"):
        in_top(torch.full((2, 4), math.nan), torch.tensor([0, 1]))


def test_drop_and_increase_by_hand():
    before, after = torch.tensor([0.8, 0.5, 0.4, 0.0]), torch.tensor([0.6, 0.5, 0.5, 0.0])
    drop, gain = AverageDrop(), IncreaseInConfidence()
    for metric in (drop, gain):
        metric.update(before, after)
    expected = 100 * (float(before[0]) - float(after[0])) / (float(before[0]) + 1e-7) / 4
    assert float(drop.compute()) == pytest.approx(expected, abs=1e-12)
    assert float(gain.compute()) == 25  # strictly: an equal score is no gain


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20))
def test_a_map_of_ones_drops_nothing_and_gains_nothing_and_its_mean_says_so(scores: list[float]):
    before = torch.tensor(scores)
    drop, gain, mean = AverageDrop(), IncreaseInConfidence(), MeanMap()
    for metric in (drop, gain):
        metric.update(before, before.clone())  # image times one
    mean.update(torch.ones(len(scores), 3, 4))
    assert float(drop.compute()) == float(gain.compute()) == 0
    assert float(mean.compute()) == 100


def test_pointing_game_by_hand():
    maps = torch.zeros(3, 30, 40)
    maps[0, 10, 20] = maps[1, 10, 20] = 1.0  # the third is blank: it points at the corner
    boxes = [
        torch.tensor([[0, 0, 2, 2], [20, 10, 21, 11]]),
        torch.tensor([[29, 22, 35, 25]]),  # 9 to the right and 12 below: 15 away
        torch.tensor([[5, 5, 9, 9]]),
    ]
    for tolerance, expected in ((0, 100 / 3), (14.9, 200 / 3), (15, 100)):
        metric = PointingGame(tolerance=tolerance)
        metric.update(maps, boxes)
        # from the corner the third box is 7.07 away
        assert float(metric.compute()) == pytest.approx(expected)


def test_energy_counts_overlapping_boxes_once_and_a_blank_map_as_none():
    maps = torch.ones(2, 10, 10)
    maps[1] = 0
    boxes = [torch.tensor([[0, 0, 4, 4], [2, 2, 4, 4]]), torch.tensor([[0, 0, 9, 9]])]
    metric = EnergyInBox()
    metric.update(maps, boxes)
    assert float(metric.compute()) == pytest.approx((25 + 0) / 2)


def test_the_end_of_a_box_may_be_the_width_and_the_height():
    metric = EnergyInBox()
    metric.update(torch.ones(1, 10, 20), [torch.tensor([[0, 0, 20, 10]])])
    assert float(metric.compute()) == 100


def test_the_area_under_a_curve_by_hand():
    scores = torch.tensor([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]])
    for metric in (Insertion(), Deletion()):
        metric.update(scores)
        assert float(metric.compute()) == pytest.approx((75 + 50) / 2)


def test_curves_equal_one_image_and_one_step_at_a_time():
    dice = torch.Generator().manual_seed(0)
    images, maps = torch.rand(3, 2, 7, 6, generator=dice), made_maps(3, dice)[:, :7, :6]
    weight, classes = torch.rand(2 * 7 * 6, 4, generator=dice), torch.tensor([2, 0, 3])

    def score(batch: torch.Tensor) -> torch.Tensor:
        return (batch.flatten(1) @ weight / 5).softmax(1)

    insertion, deletion = insertion_deletion_curves(score, images, maps, classes, steps=5, batch_size=4)
    ends = score(images).gather(1, classes[:, None])[:, 0]
    assert torch.allclose(insertion[:, -1], ends)
    assert torch.allclose(deletion[:, 0], ends)
    for i in range(3):
        order = sorted(range(42), key=lambda p, i=i: (-float(maps[i].flatten()[p]), p))
        for step, shown in enumerate((0, 8, 17, 25, 34, 42)):  # 42 * step / 5, rounded
            gone = images[i].clone().view(2, 42)
            gone[:, order[:shown]] = 0
            assert deletion[i, step] == pytest.approx(float(score(gone[None])[0, classes[i]]), abs=1e-6)
    flat = torch.ones(1, 1, 40, 40)
    start = insertion_deletion_curves(
        lambda x: torch.cat([x.mean((1, 2, 3))[:, None]] * 2, 1), flat, flat[0], torch.tensor([1]), steps=2
    )[0]
    assert 0.8 < float(start[0, 0]) < 1  # a blurred plain image is plain but for its border
    assert float(start[0, 2]) == pytest.approx(1)


def test_curves_refuse_maps_of_another_size():
    with pytest.raises(DataError, match="as large as images"):
        insertion_deletion_curves(lambda x: x, torch.rand(1, 3, 8, 8), torch.rand(1, 4, 4), torch.tensor([0]))


# Thresholds without peeking


def v2(seed: int, n: int = 12) -> MaxBoxAccV2:
    metric = MaxBoxAccV2()
    metric.update(**made("MaxBoxAccV2", n, seed))
    return metric


def test_the_oracle_column_is_compute_and_no_other_column_beats_it():
    test, val = v2(0), v2(1)
    columns = without_peeking(test, val)
    assert {k: float(v) for k, v in columns["oracle"].items()} == numbers(test)
    for name in ("max_box_acc_v2", "max_box_acc_30", "max_box_acc_50", "max_box_acc_70"):
        assert columns["transferred"][name] <= columns["oracle"][name]
        assert columns["fixed"][name] <= columns["oracle"][name]
    at = [round(1000 * float(t)) for t in val.best_threshold()]
    for i, name in enumerate(("30", "50", "70")):
        assert float(columns["transferred"][f"threshold_{name}"]) == at[i] / 1000
        right = int(test.counts[i, at[i]])
        assert float(columns["transferred"][f"max_box_acc_{name}"]) == pytest.approx(100 * right / 12)


def test_a_chosen_threshold_leaves_the_metric_as_it_was():
    metric = MaxBoxAcc()
    metric.update(**made("MaxBoxAcc", 12))
    oracle = float(metric.compute())
    assert float(metric.accuracy_at(1.0)) < oracle == float(metric.compute())
    columns = without_peeking(metric, metric)
    assert float(columns["transferred"]["max_box_acc"]) == oracle
    assert float(columns["fixed"]["max_box_acc"]) == pytest.approx(100 * int(metric.counts[1, 200]) / 12)


@pytest.mark.parametrize("threshold", [0.2005, -0.1, 1.001, torch.tensor([0.1, 0.2]), math.nan])
def test_a_threshold_off_the_grid_is_refused(threshold: Any):
    with pytest.raises(DataError, match="threshold"):
        v2(0).accuracy_at(threshold)


def test_thresholds_do_not_pass_between_metrics_or_from_nothing():
    one = MaxBoxAcc()
    with pytest.raises(DataError, match="use one metric for both"):
        without_peeking(v2(0), one)
    with pytest.raises(DataError, match="has no images"):
        without_peeking(v2(0), MaxBoxAccV2())


# Sums that merge


@every_metric
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 9), max_size=4), seed=st.integers(0, 1000))
def test_shards_add_up_to_one_pass(name: str, cuts: list[int], seed: int):
    inputs = made(name, 9, seed)
    whole = numbers(filled(name, inputs))
    ends = [0, *sorted(cuts), 9]
    parts = [take(inputs, range(a, b)) for a, b in itertools.pairwise(ends)]
    one, merged = CASES[name].make(), CASES[name].make()
    for part in parts:
        one.update(**part)  # an empty batch counts nothing
        merged.merge_state(filled(name, part))
    assert numbers(one) == pytest.approx(whole, rel=1e-12)
    assert numbers(merged) == pytest.approx(whole, rel=1e-12)
    assert one.images == merged.images == 9


@every_metric
@given(order=st.permutations(range(7)))
def test_the_order_of_images_does_not_matter(name: str, order: list[int]):
    inputs = made(name, 7)
    assert numbers(filled(name, take(inputs, order))) == pytest.approx(
        numbers(filled(name, inputs)), rel=1e-12
    )


@every_metric
@pytest.mark.parametrize("intervals", [False, True])
def test_ranks_add_up_even_if_one_has_no_image(name: str, intervals: bool):
    inputs = made(name, 8)
    shards = [take(inputs, [0, 2, 4]), take(inputs, [1, 3, 5, 6, 7]), None]
    ranks = [CASES[name].make(intervals=intervals) for _ in shards]
    for rank, shard in zip(ranks, shards, strict=True):
        if shard:
            rank.update(**shard)
    states = [
        [torch.cat(v) if isinstance(v, list) else v for v in rank.metric_state.values()] for rank in ranks
    ]
    gathered = iter(zip(*states, strict=True))  # what all_gather gives, state after state
    first = CASES[name].make(
        intervals=intervals,
        dist_sync_fn=lambda *_, **__: list(next(gathered)),
        distributed_available_fn=lambda: True,
    )
    first.update(**shards[0])
    assert numbers(first) == pytest.approx(numbers(filled(name, inputs)), rel=1e-12)
    assert first.images == 3  # and goes on with its own


@every_metric
def test_states_are_sums_and_rows_only_on_request(name: str):
    plain, rows = CASES[name].make(), CASES[name].make(intervals=True)
    assert rows.metric_state.keys() - plain.metric_state.keys() == {"rows", "keys"}
    for state in plain.metric_state.values():
        assert isinstance(state, torch.Tensor)
        assert state.dtype in (torch.int64, torch.float64)


@every_metric
def test_calling_a_metric_gives_the_batch_and_keeps_the_sum(name: str):
    inputs = made(name, 8)
    metric = CASES[name].make(intervals=True)
    for which in (range(5), range(5, 8)):
        alone = filled(name, take(inputs, which))
        found = metric(**take(inputs, which))
        found = found if isinstance(found, dict) else {"": found}
        assert {k: float(v) for k, v in found.items()} == pytest.approx(numbers(alone), rel=1e-12)
    assert numbers(metric) == pytest.approx(numbers(filled(name, inputs)), rel=1e-12)
    assert len(metric.table()[0]) == 8


@every_metric
def test_a_metric_survives_pickling_cloning_and_reset(name: str):
    inputs = made(name, 6)
    metric = filled(name, inputs, intervals=True)
    for other in (pickle.loads(pickle.dumps(metric)), metric.clone()):
        assert numbers(other) == numbers(metric)
        other.reset()
        assert other.images == 0
        assert len(other.table()[0]) == 0
        other.update(**inputs)
        assert numbers(other) == numbers(metric)


def test_a_result_computed_before_a_merge_is_not_kept():
    metric = Top1Cls()
    metric.update(torch.tensor([True]))
    assert float(metric.compute()) == 100
    metric.merge_state({**Top1Cls().metric_state, "images": torch.tensor(1)})
    assert float(metric.compute()) == 50


def test_a_metric_of_another_kind_or_setting_is_not_merged():
    for one, other in ((MaxBoxAcc(), MaxBoxAccV2()), (GTKnownLoc(), GTKnownLoc(boxes="first"))):
        with pytest.raises(ConfigError, match="Merge metrics of one kind and setting"):
            one.merge_state(other)
    with pytest.raises(ConfigError, match="rows, keys"):  # sums of images without the rows of some
        GTKnownLoc(intervals=True).merge_state(GTKnownLoc())


def test_no_private_member_of_torchmetrics_is_used():
    """Under an open range of versions nothing else may be relied on."""
    private = {name for name in (*dir(Metric), *vars(Top1Cls())) if re.fullmatch("_[a-z].*", name)}
    private -= {"_modules", "_parameters", "_buffers", *vars(ImageMetric), "_total", "_empty"}
    assert {"_computed", "_update_count", "_wrap_compute", "_reductions"} <= private
    source = Path(sigcam.__file__).parent
    for file in [*(source / "metrics").glob("*.py"), *(source / "evaluation").glob("*.py")]:
        used = {
            node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
        }
        assert not used & private, file
        defined = {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}
        assert not defined & private, file


def test_a_collection_never_lets_two_metrics_share_their_sums():
    blank, truth = torch.zeros(2, 8, 8), [torch.tensor([[5, 5, 6, 6]])] * 2  # at first all count the same
    right = torch.tensor([True, True])
    collection = MetricCollection(
        {
            "v1": MaxBoxAcc(),
            "v2": MaxBoxAccV2(),
            "best": GTKnownLoc(),
            "first": GTKnownLoc(boxes="first"),
            "top1": Top1Loc(),
            "point": PointingGame(),
            "near": PointingGame(tolerance=6.5),
        }
    )
    for maps, boxes in (
        (blank, truth),
        (protocol_map().expand(2, -1, -1), [torch.tensor([[0, 0, 9, 9]])] * 2),
    ):
        collection.update(maps=maps, boxes=boxes, correct=right)
    assert len(collection.compute_groups) == 7


def test_half_precision_maps_count_as_the_same_values_in_float32():
    maps = made_maps(6, torch.Generator().manual_seed(0)).half()
    boxes = made_boxes(6, torch.Generator().manual_seed(1))
    for make in (MaxBoxAccV2, GTKnownLoc, EnergyInBox):
        half, full = make(), make()
        half.update(maps, boxes)
        full.update(maps.float(), boxes)
        assert numbers(half) == numbers(full)


def test_maps_that_need_a_gradient_and_leave_the_range_by_rounding_are_taken():
    maps = (made_maps(4, torch.Generator().manual_seed(0)) * (1 + 1e-7)).requires_grad_()
    metric = MaxBoxAccV2()
    metric.update(maps, made_boxes(4, torch.Generator().manual_seed(1)))
    assert metric.images == 4


@pytest.mark.slow
def test_a_long_stream_keeps_the_states_as_small_as_they_were():
    streams = {name: CASES[name].make() for name in CASES}
    inputs = {name: made(name, 50) for name in CASES}

    def size() -> int:
        return sum(s.nbytes for m in streams.values() for s in m.metric_state.values())

    before = size()
    for _ in range(40):  # 2,000 maps for each
        for name, metric in streams.items():
            metric.update(**inputs[name])
    assert size() == before
    assert all(metric.images == 2000 for metric in streams.values())


# Refusals


@every_metric
def test_no_image_is_an_error_not_a_warning(name: str):
    metric = CASES[name].make()
    with pytest.raises(DataError, match="has no images: call update"):
        metric.compute()


def test_pxap_without_an_object_says_so():
    metric = PxAP()
    metric.update(torch.rand(2, 4, 4), torch.zeros(2, 4, 4, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"no pixel of any mask is 1"):
        metric.compute()


OK = torch.full((3, HEIGHT, WIDTH), 0.5)
BOXES = [torch.tensor([[1, 2, 5, 6]])] * 3


def spoilt(value: float) -> torch.Tensor:
    maps = OK.clone()
    maps[1, 4, 4] = value
    return maps


def with_box(*box: float) -> list[torch.Tensor]:
    return [BOXES[0], torch.tensor([[0, 0, 2, 2], list(box)]), BOXES[0]]


BAD_MAPS = {
    "NaN": (spoilt(math.nan), "image 'b'.*NaN"),
    "infinity": (spoilt(math.inf), "image 'b'"),
    "above one": (spoilt(1.01), "image 'b'.*1.01"),
    "below zero": (spoilt(-0.01), "image 'b'.*-0.01"),
    "no batch": (OK[0], "B, H, W.*image '?a"),
    "with channels": (OK[:, None], "B, H, W.*image '?a"),
    "no pixels": (OK[:, :0], "B, H, W.*image '?a"),
    "whole numbers": (OK.long(), "floats in .*image '?a"),
    "an array": (OK.numpy(), "must be a tensor"),
}
BAD_BOXES = {
    "x inverted": (with_box(5, 2, 4, 6), "image 'b'.*inverted"),
    "y inverted": (with_box(1, 6, 5, 2), "image 'b'.*inverted"),
    "too wide": (with_box(1, 2, WIDTH + 1, 6), "image 'b'.*beyond"),
    "too high": (with_box(1, 2, 5, HEIGHT + 1), "image 'b'.*beyond"),
    "negative": (with_box(-1, 2, 5, 6), "image 'b'.*beyond"),
    "between pixels": (with_box(1.5, 2, 5, 6), "image 'b'.*whole pixels"),
    "NaN": (with_box(math.nan, 2, 5, 6), "image 'b'"),
    "no box": ([BOXES[0], torch.zeros(0, 4), BOXES[0]], "image 'b' has no ground-truth box"),
    "None": ([BOXES[0], None, BOXES[0]], "image 'b' has no ground-truth box"),
    "not four": ([BOXES[0], torch.zeros(1, 5), BOXES[0]], "image 'b'.*G, 4"),
    "one flat box": ([BOXES[0], torch.tensor([1, 2, 5, 6]), BOXES[0]], "image 'b'.*G, 4"),
    "too few": (BOXES[:2], "image 'c' has none"),
    "too many": (BOXES * 2, "6 sets of boxes for 3 images"),
    "missing": (None, "image 'a' has none"),
}
GREY = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
BAD_MASKS = {
    "another value": ([GREY[0], GREY[0] + 128, GREY[0]], "image 'b' holds .*128"),
    "another size": ([GREY[0], GREY[0, 1:], GREY[0]], "image 'b' is .*resize"),
    "missing": ([GREY[0], None, GREY[0]], "image 'b' has no mask"),
    "too few": (GREY[:2], "image 'c' has none"),
}


def refused(metric: ImageMetric, expected: str, **inputs: Any) -> None:
    """The metric raises, by update and by call, and has counted nothing more."""
    before = {k: torch.cat(v) if isinstance(v, list) else v.clone() for k, v in metric.metric_state.items()}
    for way in (metric.update, metric.__call__):
        with pytest.raises(DataError, match=expected):
            way(**inputs)
        for k, v in metric.metric_state.items():
            assert torch.equal(torch.cat(v) if isinstance(v, list) else v, before[k])


BOXED = {"MaxBoxAcc", "MaxBoxAccV2", "GTKnownLoc", "Top1Loc", "Top5Loc", "PointingGame", "EnergyInBox"}


@pytest.mark.parametrize("name", sorted({*BOXED, "PxAP", "MeanMap"}))
@pytest.mark.parametrize("maps", BAD_MAPS)
def test_bad_maps_are_refused_by_name_and_not_counted(name: str, maps: str):
    good = made(name, 3)
    metric = filled(name, good, intervals=True)
    given, expected = BAD_MAPS[maps]
    ids = ["a", "b", "c"] if len(given) == 3 else [f"a{i}" for i in range(len(given))]
    refused(metric, expected, **(good | {"maps": given, "ids": ids}))


@pytest.mark.parametrize("name", sorted(BOXED))
@pytest.mark.parametrize("boxes", BAD_BOXES)
def test_bad_boxes_are_refused_by_name_and_not_counted(name: str, boxes: str):
    good = made(name, 3)
    given, expected = BAD_BOXES[boxes]
    refused(filled(name, good), expected, **(good | {"maps": OK, "boxes": given, "ids": ["a", "b", "c"]}))


@pytest.mark.parametrize("masks", BAD_MASKS)
def test_bad_masks_are_refused_by_name_and_not_counted(masks: str):
    given, expected = BAD_MASKS[masks]
    refused(filled("PxAP", made("PxAP", 3)), expected, maps=OK, masks=given, ids=["a", "b", "c"])


@pytest.mark.parametrize("name", ["AverageDrop", "IncreaseInConfidence"])
def test_bad_scores_are_refused_by_name_and_not_counted(name: str):
    metric, ids, ok = filled(name, made(name, 3)), ["a", "b", "c"], torch.full((3,), 0.5)
    refused(metric, "before of image 'b'.*NaN", before=torch.tensor([0.5, math.nan, 0.5]), after=ok, ids=ids)
    refused(metric, "after of image 'c'.*1.5", before=ok, after=torch.tensor([0.5, 0.5, 1.5]), ids=ids)
    refused(metric, "image 'c' has none", before=ok, after=ok[:2], ids=ids)
    refused(metric, r"must be \(B\)", before=ok[:, None], after=ok, ids=ids)


def test_bad_curves_and_flags_are_refused():
    ids = ["a", "b", "c"]
    refused(filled("Insertion", made("Insertion", 3)), "image 'b'", scores=spoilt(2.0)[:, 4], ids=ids)
    refused(filled("Deletion", made("Deletion", 3)), "two scores", scores=torch.rand(3, 1), ids=ids)
    loc = filled("Top1Loc", made("Top1Loc", 3))
    for correct, expected in (
        (torch.tensor([0, 2, 1]), "yes or no"),
        (torch.tensor([True]), "image 'b' has none"),
    ):
        refused(loc, expected, maps=OK, boxes=BOXES, correct=correct, ids=ids)


def test_an_image_without_id_is_named_by_its_place_in_the_stream():
    metric = MaxBoxAccV2()
    metric.update(OK, BOXES)
    with pytest.raises(DataError, match="image 4 must be in"):
        metric.update(spoilt(2.0), BOXES)
    with pytest.raises(DataError, match="image 4 has an inverted box"):
        metric.update(OK, with_box(5, 2, 4, 6))


@pytest.mark.parametrize("ids", [["a", "b"], "abc"])
def test_ids_are_one_for_each_image(ids: Any):
    with pytest.raises(DataError, match="one id per image"):
        MeanMap().update(OK, ids=ids)


def test_metrics_need_nothing_of_the_rest_of_the_library():
    room = Path(metrics.__file__).parent
    trees = [ast.parse(file.read_text()) for file in room.glob("*.py")]
    froms = {n.module or "" for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {module for module in froms if module.split(".")[0] == "sigcam"}
    assert {m for m in ours if not m.startswith("sigcam.metrics")} <= {
        "sigcam.core.errors",
        "sigcam.core.memory",
    }


def test_a_percentile_finds_what_one_hot_pixel_hides_and_100_is_the_maximum() -> None:
    maps = torch.zeros(1, 40, 40)
    maps[0, 8:28, 10:30], maps[0, 12, 12] = 0.15, 1.0
    truth = [torch.tensor([[10, 8, 29, 27]])]
    for make in (GTKnownLoc, MaxBoxAccV2):
        by_maximum, by_90, by_100 = make(), make(percentile=90), make(percentile=100)
        for metric in (by_maximum, by_90, by_100):
            metric.update(maps, truth)
        assert torch.equal(by_100.counts, by_maximum.counts)
    located = GTKnownLoc(), GTKnownLoc(percentile=90)
    for metric in located:
        metric.update(maps, truth)
    assert [float(metric.compute()) for metric in located] == [0.0, 100.0]
    with pytest.raises(ConfigError, match="cannot add the states"):
        located[0].merge_state(located[1])
    with pytest.raises(ConfigError, match="a percentile is above 0 and at most 100"):
        MaxBoxAccV2(percentile=0)
