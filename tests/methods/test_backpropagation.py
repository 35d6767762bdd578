"""Guided backpropagation and FullGrad against slow versions, and what each promises."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sigcam
from sigcam.methods.backpropagation import BiasCalls, guided_gradients, scored_images
from sigcam.methods.probe import Probe
from sigcam.methods.targets import Branch
from support.method_cases import BRANCHES, CHOSEN, close, network, pictures, plain, raw
from support.method_oracles import full_gradient
from support.tiny import Normed, untouched

NETWORKS = ["gap", "vgg", "normed"]


class Guided(torch.autograd.Function):
    """A ReLU whose gradient is positive, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * (gradient > 0)


def probed(name: str, branch: Branch) -> tuple[Probe, Tensor]:
    net, x = network(name), pictures(name)
    return Probe(net, net.run(x), branch, torch.tensor(CHOSEN)[:, None]), x


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", NETWORKS)
def test_guided_gradients_are_those_of_relus_with_positive_gradients(
    name: str, branch: Branch, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, x = probed(name, branch)
    with untouched(probe.net.model):
        found = guided_gradients(probe)
        maps = raw(probe.net, x, "guided-backpropagation", branch=branch, classes=CHOSEN, size="image")
    twin = plain(probe.net, branch, name).model
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: Guided.apply(x))
    for i, k in enumerate(CHOSEN):
        image = x[i : i + 1].clone().requires_grad_()
        (expected,) = torch.autograd.grad(twin(image)[0, k], image)
        assert close(found[i, 0], expected[0].numpy(), 1e-9)
        assert close(maps[i], expected[0].abs().sum(0).numpy(), 1e-9)


def test_guided_backpropagation_is_the_peers() -> None:
    import pytorch_grad_cam as pgc

    net, x = network("vgg"), pictures("vgg")
    for category in (None, 2):
        theirs = pgc.GuidedBackpropReLUModel(copy.deepcopy(net.model), "cpu")(x[:1], category)
        ours = sigcam.GuidedBackpropReLUModel(net.model, "cpu")(x[:1], category)
        assert ours.shape == theirs.shape == (*x.shape[2:], 3)
        assert np.abs(ours - theirs).max() < 1e-6 * np.abs(theirs).max()


def test_without_relus_guided_gradients_are_gradients() -> None:
    probe, x = probed("signed", "softmax")
    image = x.clone().requires_grad_()
    score = plain(probe.net, "softmax", "signed").model(image)[[0, 1], CHOSEN].sum()
    assert close(guided_gradients(probe)[:, 0], torch.autograd.grad(score, image)[0].numpy(), 1e-9)


@pytest.mark.parametrize("branch", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", NETWORKS)
def test_image_and_biases_times_gradients_add_up_to_the_score(name: str, branch: Branch) -> None:
    probe, _ = probed(name, branch)
    recorder = BiasCalls()
    for i, (image, (score,)) in enumerate(scored_images(probe, recorder)):
        by_image, *by_layer = torch.autograd.grad(score, [image, *recorder.outputs], allow_unused=True)
        total = (image * by_image).sum()
        for gradient, bias in zip(by_layer, recorder.biases, strict=True):
            total = total + (0 if gradient is None else (gradient * bias).sum())
        assert float(total.detach()) == pytest.approx(float(probe.scores[i, 0].detach()), rel=1e-9)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", NETWORKS)
def test_fullgrad_is_its_formula(name: str, branch: Branch) -> None:
    net, x = network(name), pictures(name)
    with untouched(net.model):
        maps = raw(net, x, "fullgrad", branch=branch, classes=CHOSEN, size="image")
        every = raw(net, x, "fullgrad", branch=branch, classes="all", size="image")
    twin = plain(net, branch, name).model
    for i, k in enumerate(CHOSEN):
        assert close(maps[i], full_gradient(twin, x[i], k), 1e-7)
        assert close(every[i, k], maps[i].numpy(), 1e-9)


def test_fullgrad_as_a_class_takes_layers_and_needs_none() -> None:
    torch.manual_seed(0)
    model, x = Normed().eval(), torch.randn(2, 3, 16, 24)
    maps = sigcam.FullGrad(model, [model.conv2])(x, 1)
    ex = sigcam.explain(sigcam.attach(model), x, "fullgrad", branch="softmax", classes=1)
    assert np.array_equal(maps, ex.maps.numpy()) and maps.shape == (2, 16, 24)
    assert np.abs(sigcam.FullGrad(model)(x, [lambda row: row[1]] * 2) - maps).max() < 1e-5
