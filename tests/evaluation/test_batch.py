"""The maps that `evaluate` measures are those that `explain` draws, for every method, branch and clamp."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import sigcam
from sigcam.data.loader import Batch
from sigcam.evaluation.batch import NO_MAPS, BatchEvaluator, Variant
from sigcam.evaluation.registry import METRICS
from sigcam.methods.registry import METHODS
from sigcam.methods.targets import Branch
from sigcam.models.pooling import read_patches
from sigcam.network.dual import DualBranch
from support.method_cases import BRANCHES, Signed, fitted, network, pictures, quick
from support.samples import sample

LABELS = [0, 3]


def supported(net: DualBranch, method: str, branch: Branch) -> bool:
    attends = any(isinstance(module, nn.MultiheadAttention) for module in net.model.modules())
    linear = ("sigmoid" if branch == "sigmoid" else "softmax") in net.linear
    has = {"linear": linear, "attention": attends, "patches": attends and linear, "rules": not attends}
    return has.get(METHODS[method].needs or "", True)


def confident(name: str) -> DualBranch:
    """The network with logits so large that gradients of signed features turn every formula's signs."""
    net = copy.deepcopy(network(name))
    with torch.no_grad():
        for head in ("softmax", "sigmoid"):
            net.last_layer(head).get_parameter("weight").mul_(100)
    return net


def assert_evaluated_as_explained(net: DualBranch, x: Tensor, branch: Branch) -> None:
    variants = [
        Variant(method, branch, clamp)
        for method in METHODS
        if supported(net, method, branch)
        for clamp in (False, True)
    ]
    specs = {name: METRICS[name] for name in ("pxap", "mean_map")}  # maps of labels and of predictions
    batch = Batch(x, torch.tensor(LABELS), [0, 1], [], [(x.shape[3], x.shape[2])] * 2)
    evaluator = BatchEvaluator(net, specs, "label", ("softmax",), 1.0, map_samples=6)
    seen = list[Variant]()
    for variant, record in evaluator.records(batch, [sample(i) for i in range(2)], variants):
        if variant == NO_MAPS:
            continue
        seen.append(variant)
        asked = {"branch": branch, "clamp": variant.clamp, **quick(variant.method or "")}
        explained = sigcam.explain(net, x, variant.method, classes=LABELS, **asked).maps  # type: ignore[arg-type]
        assert record.maps is not None and record.predicted_maps is not None
        assert torch.allclose(record.maps, explained, atol=1e-5), variant
        if not METHODS[variant.method or ""].masks_are_resized:  # masks by CAM are resized otherwise
            explained = sigcam.explain(net, x, variant.method, **asked).maps  # type: ignore[arg-type]
            assert torch.allclose(record.predicted_maps, explained, atol=1e-5), variant
    assert seen == variants


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", ["signed", "vit", "vgg"])
def test_evaluated_maps_are_those_of_explain(name: str, branch: Branch) -> None:
    net, x = confident(name), pictures(name)
    assert (float(net(x).features.min()) < -0.1) == (name != "vgg")
    assert_evaluated_as_explained(net, x, branch)


@pytest.mark.parametrize("branch", BRANCHES)
def test_evaluated_maps_are_those_of_explain_for_a_head_on_patch_tokens(branch: Branch) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=4)
    read_patches(model, "encoder.ln", "heads.head", (1, 4, 4))
    net = fitted(model.eval(), (16, 16))
    assert supported(net, "ts-cam", branch)
    assert_evaluated_as_explained(net, torch.randn(2, 3, 16, 16, dtype=torch.float64), branch)


@pytest.mark.parametrize("branch", BRANCHES)
def test_evaluated_maps_are_those_of_explain_where_features_sum_to_zero(branch: Branch) -> None:
    model = Signed()
    model.body[0] = nn.Conv2d(3, 6, 1, bias=False)  # an odd function: F of x and of -x cancel
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x = torch.cat([x, -x.flip(3)], 3)
    net = fitted(model, (8, 16))
    assert float(net(x).features.sum((2, 3)).abs().max()) < 1e-9
    assert_evaluated_as_explained(net, x, branch)
