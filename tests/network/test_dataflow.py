"""From which values each value was computed, found without keeping a tensor; and what attaching costs."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sigcam.network.attachment import attach
from sigcam.network.dataflow import Dataflow, tensors_in
from sigcam.network.trace import run_traced
from support.nets import PlainVit, convs
from support.tiny import Vgg

Step = Callable[[Tensor, Tensor], Tensor]


def into_view(x: Tensor, y: Tensor) -> Tensor:
    made = x * 2
    made.flatten(1)[:, :3].copy_(y[:, :3])
    return made


def into_item(x: Tensor, y: Tensor) -> Tensor:
    made = x.new_zeros(x.shape)
    made[:, ::2] = y[:, ::2]
    return made


def into_base(x: Tensor, y: Tensor) -> Tensor:
    made = x * 2
    part = made[:, :3]
    made.add_(y)
    return part


class Numpy(torch.autograd.Function):
    """Computes where torch does not see it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))


# step, whether its result comes from x, and from y
STEPS: dict[str, tuple[Step, bool, bool]] = {
    "sum": (lambda x, y: x + y, True, True),
    "one of two": (lambda x, y: y.relu(), False, True),
    "detach": (lambda x, y: x.detach() * 2, True, False),
    "data": (lambda x, y: x.data + 1, True, False),
    "in place": (lambda x, y: (x * 1).add_(y), True, True),
    "into a view": (into_view, True, True),
    "into an item": (into_item, False, True),
    "into the base of a view": (into_base, True, True),
    "out": (lambda x, y: torch.add(y, 1, out=torch.empty_like(x)), False, True),
    "shape alone": (lambda x, y: torch.zeros_like(x) + y, False, True),
    "by an index": (lambda x, y: y[:, x.argmax(1)], False, True),
    "complex": (lambda x, y: torch.fft.irfft(torch.fft.rfft(x)) * y, True, True),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x[None], x[None], y[None]), True, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_result_comes_from_what_autograd_says_it_comes_from(name: str) -> None:
    step, from_x, from_y = STEPS[name]
    x, y, flow = torch.randn(2, 6), torch.randn(2, 6), Dataflow()
    values = [flow.value(x, given=True), flow.value(y, given=True)]
    with torch.no_grad(), flow:
        out = step(x, y)
        reaching = flow.reaching([flow.value(out)])
    assert [value in reaching for value in values] == [from_x, from_y]


def test_a_module_that_torch_does_not_see_into_passes_on_its_inputs() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Numpy.apply(x)
            return made

    model = nn.Sequential(convs(3, 8), Sine(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    trace, _ = run_traced(model, torch.randn(1, 3, 16, 16))
    outputs = {output.name: output.value for output in trace.outputs}
    assert outputs["0"] in trace.flow.reaching([outputs["4"]])


def test_a_factor_of_zero_stops_gradients_but_not_descent() -> None:
    weight, bias, flow = torch.zeros(4, 6), torch.ones(4), Dataflow()
    x = torch.randn(2, 6)
    first = flow.value(x, given=True)
    with torch.no_grad(), flow:
        for out in (F.linear(x, weight, bias), F.linear(x, weight), x * torch.zeros(6), x @ weight.T):
            value = flow.value(out)
            assert first in flow.reaching([value])
            assert first not in flow.reaching([value], live=True)
        assert first in flow.reaching([flow.value(F.linear(x, weight + 1, 0 * bias))], live=True)
        assert first in flow.reaching([flow.value(torch.addmm(x[:, :4], x, weight.T))], live=True)


def test_a_tensor_at_the_address_of_a_freed_one_is_another_value() -> None:
    flow, values = Dataflow(), list[int]()
    with torch.no_grad(), flow:
        for _ in range(20):
            values.append(flow.value(torch.randn(4)))
    assert len(set(values)) == 20


@pytest.mark.parametrize("make", [Vgg, lambda: PlainVit((16, 16))], ids=["vgg", "vit"])
def test_a_trace_keeps_no_tensor_of_the_pass(make: Callable[[], nn.Module]) -> None:
    model, seen = make().eval(), list[weakref.ref[Tensor]]()
    for module in model.modules():
        module.register_forward_hook(lambda module, args, out: seen.extend(map(weakref.ref, tensors_in(out))))
    gc.disable()
    try:
        _trace, output = run_traced(model, torch.randn(1, 3, 16, 16))
        assert {id(found) for reference in seen if (found := reference()) is not None} == {id(output)}
    finally:
        gc.enable()
    assert not output.requires_grad


# ------------------------------------------------------------------------------------------- what it costs


def peak(work: Callable[[], object], folder: Path) -> int:
    """The most bytes that tensors took at one time, above what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    live = most = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


class Tokens(nn.Module):
    """Attention between 32 x 32 tokens of 32 channels, whose axes take another pass to tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.fc = nn.Conv2d(3, 32, 2, 2), nn.Linear(32, 5)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        for norm in self.norms:
            x = norm(x + (x @ x.mT).softmax(-1) @ x)
        logits: Tensor = self.fc(x.mean(1))
        return logits


def wide() -> nn.Module:
    trunk = [convs(24, 24, 24, 24, stride=1), nn.MaxPool2d(2), convs(24, 24, 24, stride=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)]
    return nn.Sequential(convs(3, 24, stride=1), *trunk, *head)


@pytest.mark.slow
@pytest.mark.parametrize("make", [wide, Tokens])
def test_attaching_takes_little_more_memory_than_a_forward(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model, example = make().eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        forward = peak(lambda: model(example), tmp_path)
    assert forward > 10 * sum(p.nbytes for p in model.parameters())
    assert peak(lambda: attach(model, example=example), tmp_path) <= 1.5 * forward


@pytest.mark.parametrize(
    ("make", "passes"),
    [(wide, 2), (Tokens, 3), (lambda: PlainVit((64, 64)), 4)],
    ids=["wide", "tokens", "vit"],
)
def test_attaching_runs_the_model_a_few_times(make: Callable[[], nn.Module], passes: int) -> None:
    model, ran = make().eval(), list[int]()
    model.register_forward_pre_hook(lambda module, args: ran.append(len(args[0])))
    attach(model, example=torch.randn(1, 3, 64, 64))
    assert ran == [1] * passes
