"""sigcam bench: rows with intervals and differences, losing cells named, published numbers where they fit."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sigcam.bench import measure, runner
from sigcam.bench import tables as bench_run
from sigcam.bench.figures import qualitative
from sigcam.bench.networks import network
from sigcam.bench.overhead import overhead
from sigcam.bench.paper import PAPER_METHODS, PUBLISHED, ROWS, published_value
from sigcam.bench.plan import Plan
from sigcam.bench.registry import TABLES, targets
from sigcam.bench.render import html, markdown, verdict, write_table
from sigcam.bench.runner import run_bench
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.metrics.bootstrap import Interval
from sigcam.metrics.classification import auroc
from sigcam.models.classifier import load_classifier, save_classifier
from sigcam.network.attachment import attach
from support.bench import QUIET, write_model, write_wsol_dataset
from support.torchrun import MLP, MODEL
from support.torchrun import run as start

BACKGROUND = [(f"{head} + background", clamp) for head in ("sigmoid", "softmax") for clamp in (False, True)]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    write_wsol_dataset(tmp_path / "data")
    model = write_model(tmp_path / "model.py")
    return Plan(tmp_path / "data", tmp_path / "out", 12, 24, 1.0, model, batch_size=8)


@pytest.mark.slow
def test_a_table_has_every_row_with_interval_and_difference_and_goes_on_where_it_was(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_bench("table2", plan, None)
    held = json.loads((plan.output / "table2.json").read_text())
    kinds = {(row["method"], row["branch"], row["clamp"]) for row in held["rows"] if row["scale"] == "unit"}
    drawn = (*ROWS.values(), *BACKGROUND)
    assert kinds == {(method, *kind) for method in ("cam", "grad-cam") for kind in drawn}
    absolute = [row for row in held["rows"] if row["scale"] == "probability"]
    assert absolute and all(row["branch"].endswith("+ background") for row in absolute)
    assert all({"box_acc_at_half", "false_alarm", "false_alarm_area"} <= set(row) for row in absolute)
    for row in held["rows"]:
        low, high = row["intervals"]["max_box_acc_v2"]
        assert low <= row["max_box_acc_v2"] <= high
        assert row["images"] == 24
        base = (row["branch"], row["clamp"]) == ("softmax", False)
        assert ("max_box_acc_v2" in row["delta"]) != base
        if not base:
            own = next(
                r
                for r in held["rows"]
                if r["method"] == row["method"] and r["row"].startswith("softmax (the")
            )
            delta, low, high = row["delta"]["max_box_acc_v2"]
            assert delta == pytest.approx(row["max_box_acc_v2"] - own["max_box_acc_v2"])
            assert low <= delta <= high
        if row["branch"].endswith("+ background"):
            versus = row["versus"]["max_box_acc_v2"]
            others = [
                r["max_box_acc_v2"]
                for r in held["rows"]
                if r["method"] == row["method"] and (r["branch"], r["clamp"]) in ROWS.values()
            ]
            assert versus["difference"][0] == pytest.approx(row["max_box_acc_v2"] - max(others))
        control = row["clamp"] and row["branch"] != "softmax"
        assert ("max_box_acc_v2" in row["beside"]) == control
        if control:
            clamped = next(
                r
                for r in held["rows"]
                if r["method"] == row["method"] and (r["branch"], r["clamp"]) == ("softmax", True)
            )
            assert row["beside"]["max_box_acc_v2"][0] == pytest.approx(
                row["max_box_acc_v2"] - clamped["max_box_acc_v2"]
            )
    assert "cub: 24" in held["foot"]
    for name in ("table2.md", "table2.csv", "index.html", "manifest.json"):
        assert (plan.output / name).stat().st_size > 100
    before = (plan.output / "table2.json").read_text()
    manifest = json.loads((plan.output / "manifest.json").read_text())
    assert manifest["numbers"] == {"table2": held["rows"]}
    assert all(row["data_fingerprint"] and row["model_fingerprint"] for row in held["rows"])

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("it was evaluated before")

    monkeypatch.setattr(measure, "evaluate", never)
    run_bench("table2", plan, None)
    assert json.loads((plan.output / "table2.json").read_text())["rows"] == json.loads(before)["rows"]
    run_bench("nwc", plan, None)
    assert len(json.loads((plan.output / "nwc.json").read_text())["rows"]) == 12
    with pytest.raises(AssertionError, match="evaluated before"):
        bench_run.table1(plan, QUIET)
    assert "map from" in capsys.readouterr().out


@pytest.mark.slow
def test_fidelity_has_both_scorers_and_the_mean_map(plan: Plan) -> None:
    rows = bench_run.table1(plan, QUIET)
    assert len([row for row in rows if row["scale"] == "unit"]) == 5 * (6 + len(BACKGROUND))
    for row in rows:
        assert ("insertion" in row) == (row["method"] == "cam" and row["scale"] == "unit")
        assert {"average_drop", "increase_in_confidence", "mean_map", "average_drop:branch"} <= set(row)
        assert row["images"] == 12
    same = {
        (row["method"], row["branch"]): row["average_drop"]
        for row in rows
        if row["clamp"] and row["branch"] == "sigmoid"
    }
    assert same["layer-cam", "sigmoid"] == same["grad-cam", "sigmoid"]  # by an identity: one evaluation


def test_fewer_images_can_be_learned_from(plan: Plan) -> None:
    told = list[tuple[str, int]]()
    few = replace(plan, train_images=12)
    network(few, "cub", FitConfig(), lambda stage, done, total: told.append((stage, total)))
    assert {total for stage, total in told if stage == "features"} == {12}


@pytest.mark.slow
def test_the_weight_of_positives_is_tried_at_three_values(plan: Plan) -> None:
    rows = bench_run.pos_weight(plan, QUIET)
    assert [row.get("pos_weight") for row in rows] == [None] * 8 + [1] * 4 + [2] * 4  # C - 1 is 2
    assert {row["branch"] for row in rows[:8]} == {"softmax", "centred"}  # which no weight shapes
    assert {row["branch"] for row in rows[8:]} == {"sigmoid"}


def test_published_cells_are_the_papers_and_only_where_backbone_and_data_coincide() -> None:
    assert len([cell for cell in PUBLISHED if cell.table == "table1"]) == 2 * 5 * 2 * 2 * 2
    table2 = [cell for cell in PUBLISHED if cell.table == "table2" and cell.metric != "top1_cls"]
    assert len(table2) == 3 * 2 * 2 * 4
    row = {
        "dataset": "cub",
        "backbone": "wsol:vgg16-cam",
        "method": "cam",
        "branch": "sigmoid",
        "clamp": True,
    }
    assert published_value(row, "table1", "average_drop:branch") == 37.20  # as it was scored
    assert published_value(row, "table1", "average_drop") is None
    assert published_value({**row, "branch": "softmax", "clamp": False}, "table1", "average_drop") == 45.36
    assert published_value({**row, "clamp": False}, "table1", "average_drop") is None
    assert published_value({**row, "backbone": "embedded"}, "table1", "average_drop") is None
    assert published_value({**row, "dataset": "pets"}, "table1", "average_drop:branch") is None
    assert published_value({**row, "zoom": 2.0}, "table1", "average_drop:branch") is None
    assert published_value({**row, "backbone": "timm:vgg16_bn"}, "table1", "average_drop:branch") is None
    gradient = {**row, "method": "grad-cam"}  # made with the plain network, which has another head
    assert published_value(gradient, "table1", "average_drop:branch") is None
    assert published_value({**gradient, "backbone": "wsol:vgg16"}, "table1", "average_drop:branch") == 35.66
    wide = {**row, "backbone": "wsol:resnet50-cam-28", "dataset": "ilsvrc"}
    assert published_value({**wide, "backbone": "torchvision:resnet50"}, "nwc", "max_box_acc_v2") is None
    assert published_value(wide, "nwc", "max_box_acc_v2") == 64.73
    assert published_value({**wide, "clamp": False}, "nwc", "max_box_acc_v2") == 55.78
    assert published_value({**wide, "pos_weight": 1}, "pos-weight", "max_box_acc_v2") == 61.54
    assert published_value({**wide, "pos_weight": 499}, "pos-weight", "max_box_acc_v2") == 64.59
    assert published_value({**wide, "dataset": "openimages"}, "table2", "pxap") == 60.49
    assert published_value(wide, "nwc", "gt_known_loc") is None  # of any box; the paper counted the first
    assert published_value(wide, "nwc", "gt_known_loc_first") == 62.68


def row(
    value: float, delta: tuple[float, float, float] | None = None, metric: str = "max_box_acc_v2"
) -> dict[str, Any]:
    return {
        **{"dataset": "cub", "backbone": "embedded", "classifier": "a linear probe", "method": "cam"},
        **{"zoom": 1.0, "images": 9, "beside": {}},
        **{"branch": "softmax" if delta is None else "sigmoid", "clamp": delta is not None, metric: value},
        **{
            "intervals": {metric: [value - 1, value + 1]},
            "delta": {} if delta is None else {metric: list(delta)},
        },
    }


def test_losses_are_printed_as_losses(plan: Plan) -> None:
    rows = [row(50.0), row(40.0, (-10.0, -12.0, -8.0))]
    held = write_table(plan, "table2", rows)
    assert "-10.00 (-12.0 to -8.0) worse" in markdown(held)
    page = html([held], ())
    assert re.search(r'class="[^"]*worse', page) and "http" not in page.replace("http-equiv", "")
    assert verdict(row(40.0, (-10.0, -12.0, 1.0)), "max_box_acc_v2") is None
    assert verdict(row(40.0, (-10.0, -12.0, -1.0), "average_drop"), "average_drop") is True
    assert verdict(row(40.0, (10.0, 8.0, 12.0), "mean_map"), "mean_map") is None


@pytest.mark.slow
@pytest.mark.parametrize(("table", "rows"), [("table2", 2 * 2 * 11), ("sources", 19)])
def test_two_processes_make_the_table_of_one(plan: Plan, tmp_path: Path, table: str, rows: int) -> None:
    write_wsol_dataset(plan.data, "pets", per_class=30, seed=1, masks=True)  # more than a chunk of features
    found = []
    for processes in (1, 2):
        output = tmp_path / f"by{processes}"
        words = ("--data", plan.data, "--model", plan.backbone, "--output", output, "--quick")
        start(processes, "bench", table, *words, "--batch-size", 8, "--threads", 1)
        found.append(json.loads((output / f"{table}.json").read_text())["rows"])
    assert len(found[0]) == len(found[1]) == rows
    for one, two in zip(*found, strict=True):
        assert {k: v for k, v in one.items() if k != "intervals"} == {
            k: v for k, v in two.items() if k != "intervals"
        }
        for metric, ends in one["intervals"].items():
            assert two["intervals"][metric] == pytest.approx(ends)


@pytest.mark.slow
def test_sources_tell_clamping_centring_training_and_penalty_apart(plan: Plan) -> None:
    write_wsol_dataset(plan.data, "pets", seed=1)
    write_wsol_dataset(plan.data, "cars", seed=2)
    rows = bench_run.sources(plan, QUIET)
    assert [row["branch"] for row in rows].count("softmax") == 2 * 2  # once a data set, not once per fit
    assert {row["dataset"] for row in rows if "fit" not in row} == {"cub", "cars"}
    rows = [row for row in rows if row["dataset"] == "cub"]
    fits = [row["fit"] for row in rows if row["branch"] == "sigmoid" and row["clamp"] and "fit" in row]
    assert fits == ["L2 0.1", "L2 0.01", "L2 0.001", "L2 0.0001", "L2 0.1, with negatives"]
    signed = {row.get("fit"): row for row in rows if row["branch"] == "sigmoid" and not row["clamp"]}
    assert len({row["auroc_nothing"] for row in signed.values()}) > 1  # other weights
    for row in rows:
        if row["branch"] != "centred":
            low, high = row["intervals"]["auroc_nothing"]
            assert 0 <= low <= row["auroc_nothing"] <= high <= 100


def test_the_best_score_is_judged_by_pairs_of_images() -> None:
    inside, outside = torch.randn(40) + 1, torch.randn(30)
    inside[:3] = outside[:3]  # a tie counts half
    found = measure.auroc_interval(inside, outside)
    targets = torch.cat([torch.ones(40, 1), torch.zeros(30, 1)])
    assert found.value == pytest.approx(100 * float(auroc(torch.cat([inside, outside])[:, None], targets)))
    assert found.low < found.value < found.high
    assert measure.auroc_interval(inside + 9, outside) == Interval(100.0, 100.0, 100.0)


def test_the_shift_of_a_head_is_the_part_that_no_probability_sees() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    model.append(torch.nn.Linear(2, 2))
    net = attach(model.eval(), example=torch.randn(1, 3, 8, 8))
    weight = net.last_layer("softmax").get_parameter("weight").data
    weight.copy_(torch.tensor([[3.0, 4.0], [3.0, -4.0]]))  # rows of length 5, a mean of length 3
    assert measure.logit_shift(net) == pytest.approx(60.0)
    weight.sub_(weight.mean(0))
    assert measure.logit_shift(net) == pytest.approx(0.0)


@pytest.mark.slow
def test_masks_are_scored_by_pixels_and_imagenet_keeps_the_published_head(plan: Plan) -> None:
    write_wsol_dataset(plan.data, "openimages", masks=True)
    write_wsol_dataset(plan.data, "ilsvrc", seed=1)
    rows = bench_run.table2(plan, QUIET)
    assert {row["dataset"] for row in rows} == {"cub", "ilsvrc", "openimages"}
    for row in rows:
        assert ("pxap" in row) == (row["dataset"] == "openimages") != ("max_box_acc_v2" in row)
    assert {row["dataset"] for row in bench_run.nwc(plan, QUIET)} == {"cub", "ilsvrc", "openimages"}
    net = network(plan, "ilsvrc", FitConfig(), QUIET)
    own = load_classifier(plan.backbone).model
    assert all(map(torch.equal, net.model.parameters(), own.parameters()))
    trained = network(plan, "cub", FitConfig(), QUIET)
    assert not all(map(torch.equal, trained.model.parameters(), own.parameters()))


@pytest.mark.slow
def test_given_classifiers_are_taken_and_without_vanilla_cam_where_the_head_is_deep(plan: Plan) -> None:
    path = plan.output.parent / "deep.py"
    path.write_text(MODEL.format(head=MLP.format(classes=3)))
    plan = replace(plan, backbone=f"file:{path}:make", classifiers=plan.output.parent / "given")
    with pytest.raises(DataError, match=r"cub/classifier\.safetensors does not exist: `sigcam train-c"):
        bench_run.table1(plan, QUIET)
    torch.manual_seed(3)
    classifier = load_classifier(plan.backbone).model
    torch.nn.init.normal_(classifier.get_parameter("3.2.weight"))
    where = plan.classifiers / "cub/classifier.safetensors"  # type: ignore[operator]
    save_classifier(where, classifier, spec=plan.backbone, classes=["0", "1", "2"])
    rows = bench_run.table1(plan, QUIET)
    assert {row["method"] for row in rows} == set(PAPER_METHODS) - {"cam"}
    assert qualitative(plan, "cub", QUIET, rows=1).stat().st_size > 1000
    net = network(plan, "cub", FitConfig(), QUIET)
    assert all(map(torch.equal, net.model.parameters(), classifier.parameters()))


@pytest.mark.slow
def test_all_makes_what_it_can_and_then_says_what_it_could_not(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: Plan, progress: Any) -> Any:
        raise ModelError("no such head.")

    for name, spec in TABLES.items():
        monkeypatch.setitem(TABLES, name, replace(spec, in_all=name in ("table1", "table2")))
    monkeypatch.setitem(TABLES, "table1", replace(TABLES["table1"], make=broken))
    monkeypatch.setattr(runner, "overhead", broken)
    with pytest.raises(DataError, match=r"table1 could not be made: no such head\. overhead could not"):
        run_bench("all", plan, None)
    made = {path.name for path in plan.output.iterdir()}
    assert {"table2.json", "index.html", "manifest.json", "figures"} <= made
    assert not {"table1.json", "overhead.json"} & made


@pytest.mark.slow
def test_damaged_work_is_made_anew_or_named(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    run_bench("table2", plan, None)
    before = json.loads((plan.output / "table2.json").read_text())["rows"]
    (part,) = (plan.output / "parts").glob("*.pt")
    part.write_bytes(part.read_bytes()[:500])
    (plan.output / "table1.json").write_text("{}")
    (plan.output / "nwc.json").write_text('{"table')
    run_bench("table2", plan, None)
    assert json.loads((plan.output / "table2.json").read_text())["rows"] == before
    assert "table1.json is damaged" in caplog.text and "nwc.json is damaged" in caplog.text
    branches = sorted((plan.output / "models").glob("*/branch-*.safetensors"))
    assert len(branches) == 3  # the paper's, and two with background
    branch = branches[0]
    branch.write_bytes(branch.read_bytes()[:40])
    with pytest.raises(DataError, match=f"remove {branch} and run again"):
        run_bench("table2", plan, None)


def test_what_cannot_be_measured_is_said_before_the_work(plan: Plan) -> None:
    with pytest.raises(DataError, match="vgg16 brings its own classifier: leave --model out"):
        run_bench("vgg16", plan, None)
    for split in ("train", "test"):
        (plan.data / "cub" / "metadata" / split / "localization.txt").unlink()
    with pytest.raises(DataError, match="cub has no boxes to measure maps by"):
        run_bench("table2", plan, None)
    assert not (plan.output / "models").exists()


def test_images_that_were_learned_from_are_not_measured(plan: Plan) -> None:
    home = plan.data / "cub"
    shutil.rmtree(home / "metadata")
    for name, bird in (("train", "robin"), ("test", "wren")):  # class folders, of no split
        (home / "images" / name).rename(home / bird)
    (home / "images").rmdir()
    with pytest.raises(DataError, match=r"72 of 72 images, the first .*, are in both splits of .*cub: "):
        bench_run.table1(plan, QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["pictures", "masks", "graph", "threads"])
def test_what_was_measured_of_other_files_is_not_taken(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    shutil.rmtree(plan.data / "cub")
    write_wsol_dataset(plan.data, "openimages", masks=True)
    run_bench("table2", plan, None)
    home, model = plan.data / "openimages", Path(plan.backbone.split(":")[1])
    told, real = list[int](), measure.evaluate
    monkeypatch.setattr(measure, "evaluate", lambda *a, **how: told.append(1) or real(*a, **how))
    run_bench("table2", plan, None)
    assert not told
    if change == "graph":  # the same weights, other strides
        model.write_text(model.read_text().replace("Conv2d(3, 16, 5, 4, 2)", "Conv2d(3, 16, 5, 2, 2)"))
    elif change != "threads":
        kind = "images" if change == "pictures" else "masks"
        for path in (home / kind / "test").iterdir():
            Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    threads = torch.get_num_threads()
    try:
        run_bench("table2", plan, threads + 1 if change == "threads" else None)
    finally:
        torch.set_num_threads(threads)
    assert told


@pytest.mark.slow
def test_another_classifier_is_tried_on_fewer_images_of_each_data_set(plan: Plan) -> None:
    write_wsol_dataset(plan.data, "cars", seed=1)
    plan = replace(plan, fidelity_images=200, localization_images=None)
    rows = bench_run.other_classifier(plan, ("cub", "cars"), QUIET)
    for dataset in ("cub", "cars"):
        mine = [row for row in rows if row["dataset"] == dataset]
        unit, count = [row for row in mine if row["scale"] == "unit"], 6 + len(BACKGROUND)
        assert len([row for row in unit if "average_drop" in row]) == 5 * count
        assert len([row for row in unit if "max_box_acc_v2" in row]) == 2 * count
        assert {row["images"] for row in mine} == {36}  # all: there are fewer than asked for
    assert not any({"insertion", "weights"} & row.keys() for row in rows)


@pytest.mark.slow
def test_last_stages_learn_and_what_is_before_them_does_not(plan: Plan) -> None:
    plan = replace(plan, backbone="embedded", fidelity_images=2, localization_images=4)
    rows = bench_run.stages(plan, QUIET)
    assert {row["images"] for row in rows} == {2, 4}
    (home,) = (plan.output / "models").iterdir()
    learned = load_file(home / "classifier.safetensors")
    published_value = load_classifier("embedded").model.state_dict()
    moved = {name for name, held in published_value.items() if not torch.equal(held, learned[name])}
    assert any(name.startswith("blocks.5") for name in moved)
    assert all(name.startswith(("blocks.5", "blocks.6", "conv_head", "bn2", "classifier")) for name in moved)
    assert not (home / "checkpoint.pt").exists()


@pytest.mark.slow
def test_overhead_counts_parameters_and_times_training_of_both(plan: Plan) -> None:
    held = overhead(plan, QUIET)
    net = network(plan, "cub", FitConfig(), QUIET)
    assert held["parameters"]["branch"] == sum(p.numel() for p in net.sigmoid.parameters())
    assert held["training"]["images"] == 36
    assert all(value > 0 for value in held["training"].values())
    for shown in ((plan.output / "overhead.md").read_text(), html([held], [])):
        assert "20.46 / 21.49" in shown and "batches of 8" in shown  # the paper's; ours


def test_bad_targets_and_folders_are_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no target 'table3': choose one of table1, table2"):
        run_bench("table3", plan, None)
    empty = Plan(tmp_path, tmp_path / "out")
    for target in targets():
        with pytest.raises(DataError, match="holds none of cub, cars"):
            run_bench(target, empty, None)
    assert not empty.output.exists()
    with pytest.raises(DataError, match="does not exist: give the folder"):
        run_bench("table1", Plan(tmp_path / "no", tmp_path / "out"), None)
