"""evaluate: its numbers are those of explain and metrics by hand; what it leaves out or refuses is named."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import sigcam
from sigcam import metrics as M
from sigcam.core.errors import DataError
from sigcam.data.maps import find_maps, open_map
from sigcam.data.registry import open_dataset
from sigcam.data.sample import Samples
from sigcam.evaluation.evaluator import evaluate, evaluate_maps
from sigcam.evaluation.registry import METRICS, mask_for
from sigcam.metrics.boxes import scaled_boxes
from sigcam.models.classifier import load_classifier
from sigcam.models.preprocess import Preprocess
from sigcam.network.dual import DualBranch
from support.commands import NET, run
from support.samples import CLASSES, COUNT, FIT, mask, prepared, sample
from support.tiny import SIZE, Gap, Probabilities, Vgg, untouched

LOCATING = ["max_box_acc_v2", "gt_known_loc", "pxap"]


@pytest.fixture
def net() -> DualBranch:
    return prepared(Gap())


def tensors(samples: Samples) -> Tensor:
    return torch.stack([FIT(item.open()) for item in samples])


def boxes(samples: Samples, size: int = SIZE) -> list[Tensor]:
    return [scaled_boxes(torch.tensor(item.boxes), (40, 30), (size, size)) for item in samples]


def refuses(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(DataError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- the numbers ---


@pytest.mark.slow
@pytest.mark.parametrize("model", [Gap, Vgg])
@pytest.mark.parametrize("method", ["grad-cam", "layer-cam"])
@pytest.mark.parametrize("branch", ["softmax", "sigmoid", "centred"])
def test_numbers_equal_those_of_explain_and_the_metrics_by_hand(
    samples: Samples, model: type, method: str, branch: Any
) -> None:
    net = prepared(model())
    images, labels = tensors(samples), torch.tensor([item.label for item in samples])
    with torch.no_grad():
        softmax = net(images).softmax
    located = sigcam.explain(net, images, method, branch=branch, classes=labels).maps
    kept = sigcam.explain(net, images, method, branch=branch).maps
    best = softmax.argmax(1)
    before = softmax.softmax(1)[range(COUNT), best]
    with torch.no_grad():
        after = net(images * kept[:, None]).softmax.softmax(1)[range(COUNT), best]
    masks = [torch.from_numpy(np.array(Image.fromarray(mask(i)))) for i in range(COUNT)]
    shrunk = torch.stack(
        [torch.nn.functional.interpolate(m[None, None].float(), (SIZE, SIZE))[0, 0].byte() for m in masks]
    )
    by_hand = {
        "gt_known_loc": (M.GTKnownLoc(), (located, boxes(samples))),
        "gt_known_loc_first": (M.GTKnownLoc(boxes="first"), (located, boxes(samples))),
        "top1_loc": (M.Top1Loc(), (located, boxes(samples), best == labels)),
        "pxap": (M.PxAP(), (located, shrunk)),
        "pointing_game": (M.PointingGame(), (located, boxes(samples))),
        "energy_in_box": (M.EnergyInBox(), (located, boxes(samples))),
        "top1_cls": (M.Top1Cls(), (best == labels,)),
        "average_drop": (M.AverageDrop(), (before, after)),
        "increase_in_confidence": (M.IncreaseInConfidence(), (before, after)),
        "mean_map": (M.MeanMap(), (kept,)),
    }
    result = evaluate(net, samples, methods=[method], branches=[branch], batch_size=COUNT)
    for name, (metric, told) in by_hand.items():
        metric.update(*told)
        assert result.value(name) == pytest.approx(float(metric.compute()), abs=1e-4), name
    swept = M.MaxBoxAccV2()
    swept.update(located, boxes(samples))
    for name, value in swept.compute().items():
        if not name.startswith("threshold"):
            assert result.value(name) == float(value), name
            assert result.value(name, threshold_from="fixed") == float(swept.accuracy_at(0.2)[name])
    assert {row["images"] for row in result.rows} == {COUNT}


def test_cam_masks_images_scaled_at_low_resolution_and_then_resized(
    net: DualBranch, samples: Samples
) -> None:
    images = tensors(samples)
    weights = net.last_layer("sigmoid").weight.detach().clamp(min=0)  # type: ignore[operator]
    with torch.no_grad():
        out = net(images)
        best = out.softmax.argmax(1)
        low = (weights[best][:, :, None, None] * out.features).sum(1, keepdim=True)
        least, most = low.amin((2, 3), keepdim=True), low.amax((2, 3), keepdim=True)
        unit = (low - least) / (most - least + 1e-7)
        kept = torch.nn.functional.interpolate(unit, (SIZE, SIZE), mode="bilinear")
        before, after = (net(x).softmax.softmax(1)[range(COUNT), best] for x in (images, images * kept))
    metric = M.AverageDrop()
    metric.update(before, after)
    names = ["average_drop", "mean_map"]
    result = evaluate(net, samples, methods=["cam"], branches=["sigmoid"], metrics=names)
    assert result.value("average_drop") == pytest.approx(float(metric.compute()), abs=1e-3)
    assert result.value("mean_map") == pytest.approx(100 * float(kept.mean()), abs=1e-3)


def test_batches_and_workers_do_not_change_the_numbers(net: DualBranch, samples: Samples) -> None:
    whole = evaluate(net, samples, methods=["grad-cam"], batch_size=COUNT)
    parts = evaluate(net, samples, methods=["grad-cam"], batch_size=5)
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert {**one, "value": None} == {**other, "value": None}
        assert one["value"] == pytest.approx(other["value"], abs=1e-3)


def test_one_pass_of_the_backbone_serves_all_cells(net: DualBranch, samples: Samples) -> None:
    passes = list[int]()
    hook = net.model.body.register_forward_hook(lambda module, inputs, output: passes.append(len(inputs[0])))
    methods, branches = ["cam", "grad-cam", "layer-cam"], ["softmax", "sigmoid"]
    evaluate(net, samples, methods=methods, branches=branches, metrics=LOCATING, batch_size=4)  # type: ignore[arg-type]
    assert passes == [4, 4, 4]
    passes.clear()
    names = [*LOCATING, "average_drop", "increase_in_confidence", "mean_map"]
    evaluate(net, samples, methods=methods, branches=branches, metrics=names, batch_size=4)  # type: ignore[arg-type]
    # Confidence takes one more for each cell, but clamped Grad-CAM is Layer-CAM on this head.
    assert len(passes) == 3 * (1 + 5)
    hook.remove()


def test_every_cell_is_there_once_with_its_defaults(net: DualBranch, samples: Samples) -> None:
    result = evaluate(
        net,
        samples[:4],
        methods=["gradcam", "grad-cam", "cam"],
        branches=["softmax", "sigmoid"],
        clamps=[None, True],
        metrics=["gt_known_loc"],
    )
    cells = {(row["method"], row["branch"], row["clamp"]) for row in result.rows}
    kinds = {("softmax", False), ("softmax", True), ("sigmoid", True)}
    assert cells == {(method, *kind) for method in ("grad-cam", "cam") for kind in kinds}
    assert "cam softmax clamped" in result.table()


def test_maps_of_the_predicted_class_need_no_labels(net: DualBranch, samples: Samples) -> None:
    unlabelled = [replace(item, label=None) for item in samples]
    labelled = evaluate(net, samples, class_from="predicted", branches=["softmax"])
    result = evaluate(net, unlabelled, class_from="predicted", branches=["softmax"])
    assert result.value("gt_known_loc") == labelled.value("gt_known_loc")
    said = dict(result.left_out)
    assert set(said) == {"top1_loc", "top1_loc_first", "top1_cls"} and "no labels" in said["top1_cls"]


def test_the_predicted_class_is_evaluated_without_a_look_at_labels(net: DualBranch, samples: Samples) -> None:
    wanted: Any = {"class_from": "predicted", "metrics": ["max_box_acc_v2", "pxap", "average_drop"]}
    wrong = Samples(tuple(replace(s, label=((s.label or 0) + 1) % 4) for s in samples), CLASSES)
    none = Samples(tuple(replace(s, label=None) for s in samples), CLASSES)
    found = [evaluate(net, each, **wanted).rows for each in (samples, wrong, none)]
    assert found[0] == found[1] == found[2]
    labelled = evaluate(net, samples, metrics=["max_box_acc_v2"]).rows
    assert labelled != evaluate(net, wrong, metrics=["max_box_acc_v2"]).rows  # there they do count


def test_fidelity_never_looks_at_boxes_masks_or_labels(net: DualBranch, samples: Samples) -> None:
    def never() -> Any:
        raise AssertionError("a mask was opened")

    wanted: Any = {"metrics": ["average_drop", "increase_in_confidence", "mean_map"]}
    moved = Samples(
        tuple(replace(s, boxes=((0, 0, 1, 1),), open_mask=never, label=3 - (s.label or 0)) for s in samples),
        CLASSES,
    )
    bare = Samples(tuple(replace(s, boxes=None, open_mask=None, label=None) for s in samples), CLASSES)
    found = [evaluate(net, each, **wanted).rows for each in (samples, moved, bare)]
    assert found[0] == found[1] == found[2]


def test_scorers_are_the_head_the_branch_and_a_softmax_over_it(net: DualBranch, samples: Samples) -> None:
    scorers: Any = ["softmax", "sigmoid", "branch"]
    result = evaluate(
        net, samples, methods=["grad-cam"], branches=["sigmoid"], metrics=["average_drop"], scorers=scorers
    )
    images = tensors(samples)
    kept = sigcam.explain(net, images, "grad-cam").maps
    with torch.no_grad():
        clean, masked = net(images), net(images * kept[:, None])
    best = clean.softmax.argmax(1)
    for scorer, score in {
        "softmax": lambda out: out.softmax.softmax(1),
        "sigmoid": lambda out: out.sigmoid.sigmoid(),
        "branch": lambda out: out.sigmoid.softmax(1),
    }.items():
        metric = M.AverageDrop()
        metric.update(*(score(out)[range(COUNT), best] for out in (clean, masked)))
        assert result.value("average_drop", scorer=scorer) == pytest.approx(float(metric.compute()), abs=1e-3)
    assert "average drop by sigmoid" in result.table()


def test_a_model_that_returns_probabilities_is_scored_by_them(samples: Samples) -> None:
    plain, ending = Gap(), Probabilities()
    ending.load_state_dict(plain.state_dict())
    one, other = (
        evaluate(prepared(model), samples, methods=["grad-cam"], branches=["softmax"])
        for model in (plain, ending)
    )
    for name in ("average_drop", "top1_cls", "gt_known_loc"):
        assert one.value(name) == pytest.approx(other.value(name), abs=1e-2)


def test_one_logit_tells_two_classes_apart(samples: Samples) -> None:
    two = Samples(tuple(replace(item, label=i % 2) for i, item in enumerate(samples)), ("no", "yes"))
    net = prepared(Gap(classes=1))
    result = evaluate(net, two, methods=["grad-cam"], scorers=["softmax", "branch"])
    with torch.no_grad():
        found = (net(tensors(samples)).softmax[:, 0] > 0).long()
    right = (found == torch.tensor([item.label for item in two])).double().mean()
    assert result.value("top1_cls") == pytest.approx(100 * float(right))


def test_curves_are_measured_when_asked_for(net: DualBranch, samples: Samples) -> None:
    names = ["insertion", "deletion", "road_least", "road_most"]
    result = evaluate(net, samples[:2], methods=["grad-cam"], branches=["softmax"], metrics=names)
    assert all(0 <= result.value(name) <= 100 for name in names)


def test_heads_share_the_passes_of_masked_images(
    net: DualBranch, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, passes, run = copy.deepcopy(net), list[int](), DualBranch.run
    with torch.no_grad():
        other.last_layer("sigmoid").get_parameter("weight").mul_(-1)
    other = other.with_model(net.model)
    other.original = net.original

    def counted(self: DualBranch, images: Tensor, **options: Any) -> Any:
        passes.append(len(images))
        return run(self, images, **options)

    monkeypatch.setattr(DualBranch, "run", counted)
    settings: Any = {"methods": ["score-cam"], "metrics": ["pxap"], "batch_size": COUNT}
    first = evaluate(net, samples, branches=["softmax"], **settings)
    one, images, labels = sum(passes), tensors(samples), [item.label for item in samples]
    passes.clear()
    both = evaluate(net, samples, branches=["softmax", "sigmoid"], others={"other": other}, **settings)
    assert sum(passes) == one > COUNT
    assert both.value("pxap", branch="softmax") == first.value("pxap")
    maps = {"sigmoid": net, "other": other}
    for branch, each in maps.items():
        metric = M.PxAP()
        drawn = sigcam.explain(each, images, "score-cam", classes=labels).maps  # type: ignore[arg-type]
        masks = [mask_for(item, SIZE, SIZE) for item in samples]
        metric.update(drawn, masks)
        assert both.value("pxap", branch=branch) == pytest.approx(float(metric.compute()), abs=1e-4)
    assert both.value("pxap", branch="sigmoid") != both.value("pxap", branch="other")


def test_a_method_can_be_told_to_try_less(net: DualBranch, samples: Samples) -> None:
    settings: Any = {"methods": ["score-cam"], "branches": ["softmax"], "metrics": ["pxap"]}
    less = evaluate(net, samples, map_top_n=2, **settings)
    labels: Any = [item.label for item in samples]
    drawn = sigcam.explain(net, tensors(samples), "score-cam", branch="softmax", classes=labels, top_n=2).maps
    metric = M.PxAP()
    metric.update(drawn, [mask_for(item, SIZE, SIZE) for item in samples])
    assert less.value("pxap") == pytest.approx(float(metric.compute()), abs=1e-4)
    assert less.about["map_top_n"] == 2
    settings |= {"methods": ["cam"]}
    assert evaluate(net, samples, map_top_n=2, **settings).rows == evaluate(net, samples, **settings).rows


def test_thresholds_chosen_on_another_split_stand_beside_the_oracle(
    net: DualBranch, samples: Samples
) -> None:
    options: Any = {"methods": ["cam"], "branches": ["softmax"], "metrics": ["max_box_acc", "max_box_acc_v2"]}
    val = evaluate(net, samples[:6], **options)
    result = evaluate(net, samples[6:], val=val, **options)
    key = ("cam", "softmax", False, "max_box_acc_v2")
    chosen = val.metrics[key].best_threshold()  # type: ignore[attr-defined]
    expected = result.metrics[key].accuracy_at(chosen)  # type: ignore[attr-defined]
    for name in ("max_box_acc_v2", "max_box_acc_30", "max_box_acc_70"):
        assert result.value(name, threshold_from="transferred") == float(expected[name])
        assert result.value(name, threshold_from="transferred") <= result.value(name)
    rows = [row for row in result.rows if row["metric"] == "max_box_acc_30"]
    assert {row["threshold_from"] for row in rows} == {"oracle", "fixed", "transferred"}
    assert next(r["threshold"] for r in rows if r["threshold_from"] == "transferred") == float(chosen[0])
    (single,) = (
        r["threshold"] for r in val.rows if r["metric"] == "max_box_acc" and r["threshold_from"] == "oracle"
    )
    assert 0 <= single <= 1
    other = evaluate(net, samples[:6], methods=["grad-cam"], branches=["softmax"], metrics=["max_box_acc"])
    refuses(
        lambda: evaluate(net, samples[6:], val=other, **options), "validation", "max_box_acc", "cam softmax"
    )


def test_intervals_hold_the_values(net: DualBranch, samples: Samples) -> None:
    result = evaluate(net, samples, branches=["softmax"], intervals=True)
    rows = [row for row in result.rows if row["metric"] != "blank_maps"]
    assert all(row["low"] <= row["value"] + 1e-9 and row["value"] <= row["high"] + 1e-9 for row in rows)
    assert "[" in result.table()
    key = ("cam", "softmax", False, "gt_known_loc")
    assert sigcam.bootstrap.paired(result.metrics[key], result.metrics[key]).high == 0  # type: ignore[union-attr]


def test_blank_maps_are_counted(samples: Samples) -> None:
    net = prepared(Gap())
    with torch.no_grad():
        net.last_layer("softmax").weight.copy_(-net.last_layer("softmax").weight.abs())  # type: ignore[operator,union-attr]
    result = evaluate(net, samples, methods=["grad-cam"], branches=["softmax"], metrics=["gt_known_loc"])
    assert result.value("blank_maps") == 100


def test_evaluating_leaves_the_model_as_it_was(net: DualBranch, samples: Samples) -> None:
    with untouched(net.model):
        evaluate(net, samples, methods=["cam", "grad-cam"])


# --- the result ---


def test_the_result_is_a_table_and_json_with_its_provenance(net: DualBranch, samples: Samples) -> None:
    steps = list[tuple[str, int, int]]()
    result = evaluate(net, samples, batch_size=8, progress=lambda *step: steps.append(step))
    assert steps == [("maps", 8, COUNT), ("maps", COUNT, COUNT)]
    told = json.loads(result.to_json())
    assert told["rows"] == list(result.rows) and told["about"]["versions"]["torch"]
    assert told["about"]["model_fingerprint"] and told["about"]["data_fingerprint"]
    assert (
        "normalised" in told["about"]["masking"] and "IoU" in told["about"]["definitions"]["max_box_acc_v2"]
    )
    lines = result.table().splitlines()
    assert lines[0].split("  ")[0] == "metric" and "cam softmax" in lines[0] and "cam sigmoid" in lines[0]
    assert f"{result.value('gt_known_loc', branch='sigmoid'):.2f}" in result.table()
    assert f"{COUNT} images" in lines[-3]
    assert lines[-2].startswith("confidence, softmax: ") and "for all branches alike" in lines[-2]
    assert lines[-1].startswith("mean map: the mean value")
    refuses(lambda: result.value("gt_known_loc"), "2 of", "branch")
    refuses(lambda: result.value("gt_known_lok"), "0 of")


def test_more_cells_than_fit_side_by_side_go_below_each_other(net: DualBranch, samples: Samples) -> None:
    methods = ["cam", "grad-cam", "layer-cam"]
    result = evaluate(net, samples[:4], methods=methods, metrics=["gt_known_loc", "top1_cls"])
    (first, _), (second, lines) = result.blocks()
    assert (len(first), len(second)) == (5, 3)
    assert lines[-1][0] == "blank maps" and len({len(line) for line in lines}) == 1


def test_metrics_without_annotations_are_left_out_and_said_so(net: DualBranch, samples: Samples) -> None:
    bare = [replace(item, boxes=None, open_mask=None) for item in samples]
    result = evaluate(net, bare)
    said = dict(result.left_out)
    assert set(said) >= {"max_box_acc_v2", "pxap"} and "no masks" in said["pxap"]
    assert {row["metric"] for row in result.rows} == {
        *("top1_cls", "average_drop", "increase_in_confidence", "mean_map", "blank_maps")
    }
    (line,) = [line for line in result.remarks() if line.startswith("not measured: ")]  # a reason stands once
    assert line.count("the data has no boxes)") == line.count("the data has no masks)") == 1
    assert all(metric in line for metric in said)
    assert any(line.startswith("mean map: the mean value") for line in result.remarks())
    assert "mean map: " not in evaluate(net, bare, metrics=["average_drop"]).table()


# --- what is refused ---


def test_some_images_without_annotation_are_named(net: DualBranch, samples: Samples) -> None:
    holed = [*samples[:5], sample(5, boxes=None), *samples[6:]]
    refuses(lambda: evaluate(net, holed), "x/5.png", "boxes", "max_box_acc_v2")
    assert evaluate(net, holed, metrics=["pxap"]).value("pxap", branch="softmax") > 0
    refuses(
        lambda: evaluate(net, [sample(0), sample(1, label=None)], metrics=["top1_cls"]), "x/1.png", "labels"
    )


def test_nonsense_is_refused_before_anything_is_drawn(net: DualBranch, samples: Samples) -> None:
    some: Any = partial(evaluate, net, samples)
    refuses(lambda: some(methods=["grad-kam"]), "grad-kam")
    refuses(lambda: some(methods="cam"), "list")
    refuses(lambda: some(methods=[]), "nothing to draw")
    refuses(lambda: some(branches=["tanh"]), "tanh")
    refuses(lambda: some(metrics=["pxab"]), "pxab", "pxap")
    refuses(lambda: some(metrics="pxap"), "['pxap']")
    refuses(lambda: some(metrics=[]), "nothing can be measured")
    refuses(lambda: some(scorers=["relu"]), "relu")
    refuses(lambda: some(class_from="both"), "both")
    refuses(lambda: some(batch_size=0), "batch_size")
    refuses(lambda: evaluate(net, []), "no samples")
    refuses(lambda: evaluate(net.model, samples), "attach")  # type: ignore[arg-type]
    refuses(lambda: some(transform=replace(FIT, resize=20)), "cuts the middle")
    refuses(lambda: evaluate(net, Samples(samples.items, ("a", "b", "c"))), "3 classes", "label 3")
    net.transform = None
    refuses(lambda: evaluate(net, samples), "transform")


def test_thresholds_of_a_percentile_are_those_of_the_metrics_by_hand(
    net: DualBranch, samples: Samples
) -> None:
    images, labels = tensors(samples), torch.tensor([item.label for item in samples])
    maps = sigcam.explain(net, images, "grad-cam", branch="softmax", classes=labels, clamp=True).maps
    by_hand = {"max_box_acc_v2": M.MaxBoxAccV2(percentile=90), "gt_known_loc": M.GTKnownLoc(percentile=90)}
    for metric in by_hand.values():
        metric.update(maps, boxes(samples))
    settings: dict[str, Any] = {"methods": ["grad-cam"], "branches": ["softmax"], "clamps": [True]}
    result = evaluate(net, samples, threshold="percentile", metrics=[*by_hand, "energy_in_box"], **settings)
    assert result.value("max_box_acc_v2") == float(by_hand["max_box_acc_v2"].compute()["max_box_acc_v2"])
    assert result.value("gt_known_loc") == float(by_hand["gt_known_loc"].compute())
    assert result.about["threshold"] == "percentile"
    assert any("90th percentile" in line for line in result.remarks())
    usual = evaluate(net, samples, metrics=["energy_in_box"], **settings)
    assert usual.value("energy_in_box") == result.value("energy_in_box")  # which has no threshold
    refuses(lambda: evaluate(net, samples, val=result, **settings), "kind of threshold")
    with pytest.raises(DataError, match="use one kind for both"):
        M.without_peeking(by_hand["max_box_acc_v2"], M.MaxBoxAccV2())
    refuses(lambda: evaluate(net, samples, threshold="percentile", metrics=["pxap"]), "is for boxes")
    refuses(lambda: evaluate(net, samples, threshold="mean", **settings), "maximum or a percentile")


def test_an_unfitted_branch_does_not_score(samples: Samples) -> None:
    net = prepared(Gap())
    net.fitted = False
    refuses(lambda: evaluate(net, samples, branches=["softmax"], scorers=["sigmoid"]), "not fitted")


def test_an_unreadable_picture_is_named_or_skipped_aloud(net: DualBranch, samples: Samples) -> None:
    def damaged() -> Image.Image:
        raise DataError("cannot read five: it is empty.")

    holed = [*samples[:5], sample(5, open=damaged), *samples[6:]]
    refuses(lambda: evaluate(net, holed), "x/5.png", "it is empty", "skip_unreadable")
    result = evaluate(net, holed, skip_unreadable=True, branches=["softmax"])
    assert result.skipped == (("x/5.png", "cannot read five: it is empty."),)
    assert result.about["images"] == COUNT - 1 and {row["images"] for row in result.rows} == {COUNT - 1}
    assert "1 picture(s) could not be read" in result.table()
    refuses(lambda: evaluate(net, [sample(5, open=damaged)], skip_unreadable=True), "none of the 1")


def test_a_mask_that_cannot_be_read_is_named_by_its_image(net: DualBranch, samples: Samples) -> None:
    def damaged() -> Any:
        raise DataError("cannot read the mask m.png.")

    refuses(lambda: evaluate(net, [*samples[:3], sample(3, open_mask=damaged)]), "x/3.png", "m.png")


# --- maps on disk ---


def saved(folder: Path, net: DualBranch, samples: Samples) -> Path:
    labels = [item.label or 0 for item in samples]
    maps = sigcam.explain(net, tensors(samples), "cam", branch="softmax", classes=labels).maps
    for item, values in zip(samples, maps, strict=True):
        path = folder / f"{item.id}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values.numpy())
    return folder


@pytest.mark.slow
def test_saved_maps_score_what_drawn_ones_do(tmp_path: Path, net: DualBranch, samples: Samples) -> None:
    drawn = evaluate(net, samples, branches=["softmax"], batch_size=COUNT, intervals=True)
    read = evaluate_maps(saved(tmp_path, net, samples), samples, batch_size=5, intervals=True)
    names = {row["metric"] for row in read.rows} - {"mean_map"}  # there of the predicted class, here of these
    assert names >= {
        "max_box_acc_70",
        "gt_known_loc",
        "gt_known_loc_first",
        "pxap",
        "pointing_game",
        "blank_maps",
    }
    for row in read.rows:
        same = [r for r in drawn.rows if all(r[k] == row[k] for k in ("metric", "threshold_from"))]
        if row["metric"] in names:
            assert row == {**same[0], "method": "maps", "branch": None, "clamp": None}
    said = dict(read.left_out)
    assert said["average_drop"] == said["top1_loc"] == "it needs a network"
    assert read.about["map_sizes"] == ["16 x 16"]


def test_maps_of_any_size_are_scored_at_their_own(tmp_path: Path, samples: Samples) -> None:
    rng = np.random.default_rng(0)
    metric, sizes = M.GTKnownLoc(), [(24, 24), (24, 24), (20, 50), (24, 24)]
    for item, size in zip(samples[:4], sizes, strict=True):
        values = rng.random(size).astype(np.float32)
        (tmp_path / "x").mkdir(exist_ok=True)
        np.save(tmp_path / "x" / f"{Path(item.id).name}.npy", values)
        box = scaled_boxes(torch.tensor(item.boxes), (40, 30), (size[1], size[0]))
        metric.update(torch.from_numpy(values)[None], [box])
    result = evaluate_maps(tmp_path, samples[:4])
    assert result.value("gt_known_loc") == float(metric.compute())
    assert result.about["map_sizes"] == ["24 x 24", "50 x 20"]


@pytest.mark.parametrize(
    "name", ["x/0.png.npy", "x/0.npy", "x__0.npy", "x__0.png.npy", "x__0.map.npy", "x/0.png", "x__0.png.png"]
)
def test_maps_are_found_by_every_usual_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith("npy"):
        np.save(path, np.ones((4, 4)))
    else:
        Image.new("L", (4, 4), 255).save(path)
    Image.new("RGB", (4, 4)).save(tmp_path / "x__0.map.png")  # an overlay, as `sigcam explain` draws them
    (tmp_path / "manifest.json").touch()
    assert find_maps(tmp_path, ["x/0.png"]) == [path]
    assert open_map(path, "x/0.png").dtype == np.float32 and open_map(path, "x/0.png").max() == 1


def test_what_explain_saves_is_found(tmp_path: Path, net: DualBranch, samples: Samples) -> None:
    from sigcam.data.maps import map_names

    sigcam.explain(net, tensors(samples), "cam").save(tmp_path, map_names(item.id for item in samples))
    found = find_maps(tmp_path, [item.id for item in samples])
    assert [path.name for path in found] == [f"x__{i}.map.npy" for i in range(COUNT)]


def test_images_that_differ_in_ending_alone_keep_their_maps_apart(tmp_path: Path) -> None:
    for name in ("0.jpg.npy", "0.png.npy"):
        np.save(tmp_path / name, np.ones((2, 2)))
    assert [path.name for path in find_maps(tmp_path, ["0.png", "0.jpg"])] == ["0.png.npy", "0.jpg.npy"]
    (tmp_path / "0.jpg.npy").rename(tmp_path / "0.npy")
    refuses(lambda: find_maps(tmp_path, ["0.png", "0.jpg"]), "0.jpg", "no map")


def test_missing_extra_and_doubtful_maps_are_named(tmp_path: Path) -> None:
    refuses(lambda: find_maps(tmp_path / "none", ["x/0.png"]), "not a folder")
    refuses(lambda: find_maps(tmp_path, ["x/0.png"]), "x/0.png", "no map", "x__0.npy")
    np.save(tmp_path / "x__0.npy", np.ones((2, 2)))
    np.save(tmp_path / "x__1.npy", np.ones((2, 2)))
    refuses(lambda: find_maps(tmp_path, ["x/0.png"]), "x__1.npy", "no image")
    assert find_maps(tmp_path, ["x/0.png"], extra=True) == [tmp_path / "x__0.npy"]
    refuses(lambda: find_maps(tmp_path, ["x/0.png", "x__0.png"]), "no map")
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x" / "0.npy", np.ones((2, 2)))
    refuses(lambda: find_maps(tmp_path, ["x/0.png", "x/1.png"]), "x/0.png", "several", "x__0.npy")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([[0.0, np.nan]]), ["NaN"]),
        (np.array([[0.0, np.inf]]), ["NaN or infinite"]),
        (np.array([[0.0, 1.01]]), ["0 to 1.01", "[0, 1]"]),
        (np.array([[-0.5, 1.0]]), ["-0.5 to 1"]),
        (np.array([[0, 255]], np.uint8), ["0 to 255"]),
        (np.ones((2, 3, 4)), ["(2, 3, 4)", "(height, width)"]),
        (np.ones((0, 3)), ["(0, 3)"]),
        (np.ones(3), ["(3,)"]),
        (np.array([["a"]]), ["no real numbers"]),
        (np.array([[1j]]), ["no real numbers"]),
    ],
)
def test_bad_maps_are_named_by_image_and_file(tmp_path: Path, values: Any, words: list[str]) -> None:
    np.save(tmp_path / "m.npy", values)
    refuses(lambda: open_map(tmp_path / "m.npy", "x/7.png"), "x/7.png", "m.npy", *words)


def test_files_that_hold_no_map_are_named(tmp_path: Path) -> None:
    for name, content in (("a.npy", b""), ("b.npy", b"nothing"), ("c.png", b"nothing")):
        (tmp_path / name).write_bytes(content)
        refuses(lambda name=name: open_map(tmp_path / name, "x/7.png"), "x/7.png", name)  # type: ignore[misc]
    np.save(tmp_path / "d.npy", np.array([{}], dtype=object), allow_pickle=True)
    refuses(lambda: open_map(tmp_path / "d.npy", "x/7.png"), "x/7.png", "d.npy")
    Image.new("RGB", (2, 2)).save(tmp_path / "e.png")
    refuses(lambda: open_map(tmp_path / "e.png", "x/7.png"), "x/7.png", "colour")


def test_png_maps_keep_all_their_levels(tmp_path: Path) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(levels).save(tmp_path / "m.png")
    assert np.array_equal(np.floor(255 * open_map(tmp_path / "m.png", "m")), levels)
    Image.fromarray((np.arange(65536, dtype=np.uint16)).reshape(256, 256)).save(tmp_path / "n.png")
    deep = open_map(tmp_path / "n.png", "n")
    assert deep.min() == 0 and deep.max() == 1 and len(np.unique(deep)) == 65536
    assert open_map(tmp_path / "n.png", "n")[128, 0] == pytest.approx(32768 / 65535)


def test_a_channel_of_one_is_no_obstacle(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.full((1, 3, 4, 1), 0.5, np.float16))
    assert open_map(tmp_path / "m.npy", "m").shape == (3, 4)


# --- the doors ---


@pytest.mark.slow
def test_public_names_come_without_torch_until_they_are_used() -> None:
    code = (
        "import sys, sigcam; assert 'torch' not in sys.modules; assert 'evaluate' in dir(sigcam)\n"
        "assert sigcam.metrics.MaxBoxAccV2.__name__ == 'MaxBoxAccV2'; assert callable(sigcam.evaluate)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sigcam.evaluate is evaluate and sigcam.evaluate_maps is evaluate_maps
    assert {"evaluate", "evaluate_maps", "metrics", "Result"} <= set(sigcam.__all__)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model file, and eight boxed pictures of two classes in the layout of the WSOL evaluator."""
    (tmp_path / "net.py").write_text(NET)
    rng, texts = np.random.default_rng(0), dict[str, list[str]]()
    for i in range(8):
        id, x = f"k{i % 2}/{i}.png", int(rng.integers(0, 20))
        (tmp_path / "birds" / "images" / id).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(
            tmp_path / "birds" / "images" / id
        )
        rows = {"image_ids": id, "class_labels": f"{id},{i % 2}", "image_sizes": f"{id},40,30"}
        for name, text in (rows | {"localization": f"{id},{x},3,{x + 15},25"}).items():
            texts.setdefault(name, []).append(text)
    for split, part in (("val", slice(0, 3)), ("test", slice(3, None))):
        (tmp_path / "birds" / "metadata" / split).mkdir(parents=True)
        for name, lines in texts.items():
            (tmp_path / "birds" / "metadata" / split / f"{name}.txt").write_text("\n".join(lines[part]))
    return tmp_path


def words(place: Path, *more: object) -> tuple[object, ...]:
    model = ("--model", f"file:{place / 'net.py'}:tiny")
    return "evaluate", "--data", place / "birds", "--output", place / "out", *model, *more


@pytest.mark.slow
def test_the_command_measures_a_network_and_writes_a_manifest(monkeypatch, place, capsys) -> None:
    more = ("--method", "cam,grad-cam", "--val-split", "val", "--json", "--intervals", "--batch-size", 2)
    assert run(monkeypatch, *words(place, *more)) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert "maps: 5 of 5" in err and told["about"]["images"] == 5
    cells = {(row["method"], row["branch"]) for row in told["rows"] if row["method"]}
    assert cells == {(m, b) for m in ("cam", "grad-cam") for b in ("softmax", "centred")}
    assert {row["threshold_from"] for row in told["rows"]} >= {"oracle", "fixed", "transferred"}
    manifest = json.loads((place / "out" / "manifest.json").read_text())
    assert manifest["numbers"] == told["rows"] and manifest["about"]["model_fingerprint"]
    assert json.loads((place / "out" / "results.json").read_text()) == told
    net = sigcam.attach(load_classifier(f"file:{place / 'net.py'}:tiny").model)
    net.transform = load_classifier(f"file:{place / 'net.py'}:tiny").transform
    samples = open_dataset(place / "birds", split="test")
    result = evaluate(net, samples, branches=["softmax"], metrics=["gt_known_loc", "energy_in_box"])
    for name in ("gt_known_loc", "energy_in_box"):
        (value,) = (
            row["value"]
            for row in told["rows"]
            if (row["metric"], row["method"], row["branch"]) == (name, "cam", "softmax")
        )
        assert value == pytest.approx(result.value(name), abs=1e-2)


def test_the_command_takes_a_fitted_branch_and_prints_a_table(monkeypatch, place, capsys) -> None:
    net = sigcam.attach(load_classifier(f"file:{place / 'net.py'}:tiny").model)
    net.fitted = True
    net.save(place / "branch.safetensors")
    more = ("--branch", place / "branch.safetensors", "--limit", 2, "--metrics", "gt_known_loc,top1_cls,pxap")
    assert run(monkeypatch, *words(place, *more)) == 0
    out = capsys.readouterr().out
    assert "grad-cam sigmoid" in out and "2 images" in out and "not measured: pxap" in out


def test_the_command_scores_maps_without_pictures_or_network(monkeypatch, place, capsys) -> None:
    net = sigcam.attach(load_classifier(f"file:{place / 'net.py'}:tiny").model)
    net.transform = Preprocess()
    samples = open_dataset(place / "birds", split="test")
    options: Any = {"branches": ["softmax"], "metrics": ["max_box_acc_v2"]}
    expected = evaluate(net, samples, batch_size=5, **options)
    images = torch.stack([Preprocess()(item.open()) for item in samples])
    maps = sigcam.explain(net, images, "cam", branch="softmax", classes=[i.label or 0 for i in samples]).maps
    for item, values in zip(samples, maps, strict=True):
        (place / "maps").mkdir(exist_ok=True)
        np.save(place / "maps" / f"{item.id.replace('/', '__')}.npy", values.numpy())
    (place / "birds" / "images").rename(place / "elsewhere")
    assert run(monkeypatch, *words(place, "--maps", place / "maps", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    named = {(row["metric"], row["threshold_from"]): row["value"] for row in told["rows"]}
    assert named["max_box_acc_v2", "oracle"] == expected.value("max_box_acc_v2")
    assert json.loads((place / "out" / "manifest.json").read_text())["maps"] == str(place / "maps")
    assert run(monkeypatch, *words(place, "--maps", place / "maps", "--limit", 2)) == 0
    assert "2 images" in capsys.readouterr().out
    (place / "elsewhere").rename(place / "birds" / "images")
    (place / "birds" / "metadata" / "test" / "image_sizes.txt").unlink()  # then the pictures tell
    assert run(monkeypatch, *words(place, "--maps", place / "maps", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == told["rows"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--split", "train"), "no split 'train'"),
        (("--method", "grad-kam"), "grad-kam"),
        (("--branches", "softmax,sigmoid"), "must be fitted first"),
        (("--branch", "sigmoid"), "must be fitted first"),
        (("--branch", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--branches", "tanh"), "tanh"),
        (("--metrics", "pxab"), "pxab"),
        (("--metrics", "pxap"), "the data has no masks"),
        (("--metrics", "gt_known_loc", "--val-split", "val"), "--val-split"),
        (("--val-split", "test"), "5 of 5 images, the first"),
        (("--maps", "nowhere"), "not a folder"),
        (("--maps", "nowhere", "--branches", "softmax"), "without a network"),
        (("--limit", "0"), "--limit"),
        (("--device", "tpu"), "tpu"),
        (("--model", "file:none.py:tiny"), "none.py"),
        (("--data", "nowhere"), "nowhere"),
        (("--format", "coco"), "coco"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(monkeypatch, place, capsys, more, said) -> None:
    assert run(monkeypatch, *words(place, *more)) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.strip().splitlines()) == 1 and not out
    assert not (place / "out").exists()


def test_a_bad_map_or_picture_leaves_nothing_half_written(monkeypatch, place, capsys) -> None:
    ids = (place / "birds" / "metadata" / "test" / "image_ids.txt").read_text().splitlines()
    for id in ids:
        (place / "maps" / id).parent.mkdir(parents=True, exist_ok=True)
        np.save(place / "maps" / f"{id}.npy", np.full((4, 4), 2.0 if id == ids[-1] else 1.0))
    assert run(monkeypatch, *words(place, "--maps", place / "maps")) == 2
    assert ids[-1] in capsys.readouterr().err
    (place / "birds" / "images" / ids[2]).write_bytes(b"nothing")
    assert run(monkeypatch, *words(place)) == 2
    assert ids[2] in capsys.readouterr().err and not (place / "out").exists()
    assert run(monkeypatch, *words(place, "--skip-unreadable", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["about"]["images"] == 4 and [name for name, _ in told["skipped"]] == [ids[2]]


def test_thresholds_never_come_from_the_pictures_that_are_measured(monkeypatch, place, capsys) -> None:
    for split, count in (("train", 2), ("test", 3)):  # no val: test is taken for it
        for i in range(2 * count):
            path = place / "folder" / split / f"k{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (40 * i, 0, 0)).save(path)
    rows = [f"k{i % 2}/{i}.png,2,2,20,20" for i in range(6)]
    (place / "folder" / "test" / "boxes.csv").write_text("\n".join(["image,x0,y0,x1,y1", *rows]))
    wanted = ("--data", place / "folder", "--split", "test", "--val-split")
    assert run(monkeypatch, *words(place, *wanted, "val")) == 2
    assert "are in split test too" in capsys.readouterr().err
    assert not (place / "out").exists()


def test_every_measure_can_be_asked_for(net: DualBranch, samples: Samples) -> None:
    result = evaluate(net, samples[:2], methods=["cam"], branches=["softmax"], metrics=list(METRICS))
    assert not result.left_out and set(result.about["definitions"]) == set(METRICS)


# --- real data ---


@pytest.mark.realdata
def test_photographs_are_evaluated(real_data: Path) -> None:
    classifier = load_classifier("embedded")
    net = sigcam.attach(classifier.model)
    net.class_names = classifier.classes
    objects = open_dataset(real_data / "ilsvrc", split="test")
    some = Samples(objects.items[::100], objects.classes)
    result = evaluate(net, some, methods=["grad-cam"], branches=["softmax"])
    assert result.value("top1_cls") >= 50 and result.value("max_box_acc_30") >= 50
    assert result.value("gt_known_loc") >= result.value("gt_known_loc_first")
    pets = open_dataset(real_data / "pets", split="test")[:4]
    result = evaluate(
        net, pets, methods=["grad-cam"], branches=["centred"], class_from="predicted", metrics=["pxap"]
    )
    assert result.value("pxap") > 50
