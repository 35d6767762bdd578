"""Maps in probabilities in an evaluation: what is drawn, metrics without a threshold, what is refused."""

import pytest
import torch
from PIL import Image
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.errors import ConfigError
from sigcam.core.types import ImageSize
from sigcam.data.sample import Sample, Samples
from sigcam.evaluation.batch import absent_classes
from sigcam.evaluation.evaluator import evaluate
from sigcam.methods.explainer import explain
from sigcam.metrics import BoxAccAtHalf, FalseAlarm
from sigcam.network.dual import DualBranch
from sigcam.training.branch import fit
from support.patches import patch_network, patches

IDS = [f"{i}.png" for i in range(24)]


def pixels(image: Image.Image) -> Tensor:
    return patches(24, seed=9)[:][0][int(image.getpixel((0, 0))[0])]


def picture(index: int) -> Image.Image:
    return Image.new("RGB", (16, 16), (index, 0, 0))  # names the image that `pixels` returns


@pytest.fixture(scope="module")
def net() -> DualBranch:
    net = patch_network()
    fit(net, patches(), FitConfig(l2=1e-3, background=1.0, zooms=(1.0, 2.0)))
    net.transform = pixels
    return net


@pytest.fixture(scope="module")
def samples() -> Samples:
    x, labels = patches(24, seed=9)[:]
    items = list[Sample]()
    for i in range(24):
        shown = x[i].sum(0) > 1.1
        rows, columns = shown.any(1).nonzero()[:, 0], shown.any(0).nonzero()[:, 0]
        box = (int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1]))
        opener = lambda i=i: picture(i)  # noqa: E731
        items.append(Sample(IDS[i], opener, int(labels[i]), (box,), size=ImageSize(16, 16)))
    return Samples(tuple(items), ("a", "b", "c", "d"))


def test_box_accuracy_at_half_needs_no_threshold() -> None:
    maps = torch.zeros(3, 20, 20)
    maps[0, 5:15, 5:15] = 0.6  # the box, and above one half
    maps[1, 5:15, 5:15] = 0.4  # the box, but below
    maps[2, 0:3, 0:3], maps[2, 5:15, 5:15] = 0.9, 0.7  # any contour counts
    boxes = [torch.tensor([[5, 5, 14, 14]])] * 3
    metric = BoxAccAtHalf(intervals=True)
    metric.update(maps, boxes, ids=["a", "b", "c"])
    assert float(metric.compute()) == pytest.approx(200 / 3)


def test_false_alarms_are_counted_by_image_and_by_area() -> None:
    maps = torch.zeros(4, 10, 10)
    maps[0, :5], maps[1, 0, 0], maps[2] = 0.9, 0.51, 0.5
    metric = FalseAlarm()
    metric.update(maps[:2])
    metric.update(maps[2:])
    result = metric.compute()
    assert isinstance(result, dict)
    assert float(result["false_alarm"]) == 50
    assert float(result["false_alarm_area"]) == pytest.approx(100 * 0.51 / 4)


def test_the_absent_class_is_another_one_and_always_the_same() -> None:
    located = torch.tensor([[0], [3], [2]])
    absent = absent_classes(located, 4, ["x", "y", "z"])
    assert (absent != located).all() and absent.max() < 4
    assert torch.equal(absent, absent_classes(located, 4, ["x", "y", "z"]))
    two = absent_classes(torch.tensor([[0], [1]]), 2, ["x", "y"])
    assert two[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize("zoom", [1.0, 2.0])
def test_evaluated_probabilities_are_those_that_explain_draws(
    net: DualBranch, samples: Samples, zoom: float
) -> None:
    metrics = ["box_acc_at_half", "false_alarm", "max_box_acc_v2"]
    options = {"methods": ["cam"], "metrics": metrics, "intervals": True, "zoom": zoom, "batch_size": 5}
    result = evaluate(net, samples, scales=["unit", "probability"], clamps=[False, True], **options)  # type: ignore[arg-type]
    x, labels = patches(24, seed=9)[:]
    boxes = [torch.tensor(sample.boxes) for sample in samples]
    drawn = explain(net, x, "cam", classes=labels, scale="probability", zoom=zoom).maps
    expected = BoxAccAtHalf()
    expected.update(drawn, boxes)
    value = result.value("box_acc_at_half", branch="sigmoid", scale="probability")
    assert value == pytest.approx(float(expected.compute()))
    assert value > 0
    absent = absent_classes(labels[:, None], 4, IDS)
    alarm = FalseAlarm()
    alarm.update(explain(net, x, "cam", classes=absent[:, 0], scale="probability", zoom=zoom).maps)
    computed = alarm.compute()
    assert isinstance(computed, dict)
    for name, number in computed.items():
        assert result.value(name, branch="sigmoid", scale="probability") == pytest.approx(float(number))
    assert result.value("false_alarm", branch="sigmoid", scale="unit", clamp=True) > 90
    assert ("cam", "sigmoid", False, "false_alarm", "probability") in result.metrics
    variants = {(row["branch"], row["clamp"], row["scale"]) for row in result.rows if row["method"]}
    assert ("softmax", False, "probability") not in variants and len(variants) == 5
    assert "cam sigmoid probability" in result.table()


def test_what_cannot_be_drawn_is_refused_before_an_image_is_read(net: DualBranch, samples: Samples) -> None:
    with pytest.raises(ConfigError, match="not calibrated for maps in probabilities at zoom 3"):
        evaluate(net, samples, methods=["cam"], scales=["probability"], zoom=3.0)
    with pytest.raises(ConfigError, match="scales are unit and probability, not"):
        evaluate(net, samples, methods=["cam"], scales=["raw"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="there is nothing to draw"):
        evaluate(net, samples, methods=["cam"], branches=["softmax"], scales=["probability"])
