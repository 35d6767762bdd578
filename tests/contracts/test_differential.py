"""However a map is asked for, it is the same map: every way to draw one against `explain` of the batch.

Networks, settings and images are drawn at random; `make soak` draws more of them. A new way to draw maps,
such as an exported file, is one more row in `WAYS`.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from sigcam.data.loader import Batch
from sigcam.evaluation.batch import BatchEvaluator, Variant
from sigcam.evaluation.registry import METRICS
from sigcam.methods import compat
from sigcam.methods.explainer import explain, explain_pass
from sigcam.methods.explanation import Explanation
from sigcam.methods.inputs import as_batch
from sigcam.methods.registry import METHODS, MapConfig, Scale
from sigcam.methods.targets import Branch
from sigcam.models.classifier import Classifier
from sigcam.models.preprocess import Preprocess
from sigcam.network import opening
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.network.zoom import zoomed
from sigcam.ui.sources import Source
from sigcam.ui.viewer import Request, Viewer
from support.commands import run
from support.samples import sample
from support.soak import soak_count

SIZE = (16, 24)
TOLERANCE = 1e-5  # of a unit map, or of the largest value of a raw one
ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "tanh": nn.Tanh}
HEADS = ("linear", "convolution", "mlp", "maximum", "class token", "mean token")


# --- networks ---


@dataclass(frozen=True)
class Spec:
    """A random small network that takes images of any size."""

    activation: str
    head: str
    classes: int
    probabilities: bool  # whether it ends in a softmax, or in a sigmoid for one logit
    gain: float  # of its last layer: large logits turn signs of formulas
    seed: int

    @property
    def tokens(self) -> bool:
        return "token" in self.head


class Random(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, act = spec, ACTIVATIONS[spec.activation]
        if spec.tokens:
            self.patches, self.extra = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
            options: Any = {"norm_first": True, "batch_first": True, "activation": act()}
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, **options) for _ in range(2))
            self.norm = nn.LayerNorm(8)
        else:
            steps = nn.Conv2d(3, 6, 3, 2, 1), act(), nn.Conv2d(6, 8, 3, 2, 1), act()
            self.body = nn.Sequential(*steps)
        if spec.head == "mlp":
            self.head: nn.Module = nn.Sequential(nn.Linear(32, 6), act(), nn.Linear(6, spec.classes))
        else:
            self.head = (
                nn.Conv2d(8, spec.classes, 1) if spec.head == "convolution" else nn.Linear(8, spec.classes)
            )

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        if not self.spec.probabilities:
            return logits
        return logits.sigmoid() if self.spec.classes == 1 else logits.softmax(1)

    def logits(self, x: Tensor) -> Tensor:
        head = self.spec.head
        if self.spec.tokens:
            x = self.patches(x).flatten(2).mT
            x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1) if head == "class token" else x
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x[:, 0] if head == "class token" else x.mean(1)))
        x = self.body(x)
        if head == "convolution":
            return self.head(x).mean((2, 3))
        if head == "mlp":
            return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return self.head(x.amax((2, 3)) if head == "maximum" else x.mean((2, 3)))


@cache
def network(spec: Spec) -> DualBranch:
    """The network in float64, so that differences are mistakes and not rounding, with a random branch."""
    torch.manual_seed(spec.seed)
    model = Random(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
        *_, last = (m for m in model.head.modules() if isinstance(m, nn.Linear | nn.Conv2d))
        last.weight.mul_(spec.gain)
    net = attach(model, example=torch.randn(1, 3, *SIZE), transform=Preprocess(*SIZE))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.3 * spec.gain)
    net.fitted = True
    return net.to(torch.float64)


@pytest.fixture(scope="module", autouse=True)
def few_samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, facts in METHODS.items():
            if facts.samples:
                patch.setitem(METHODS, name, replace(facts, samples=6))
        yield


# --- combinations ---

Choice = Literal["predicted", "int", "each", "several", "top5", "positive", "all"]


@dataclass(frozen=True)
class Case:
    """What is asked for."""

    spec: Spec
    method: str
    branch: Branch
    clamp: bool | None
    scale: Scale
    choice: Choice
    target: Any
    zoom: float
    images: int
    seed: int

    @property
    def net(self) -> DualBranch:
        return network(self.spec)

    @property
    def config(self) -> MapConfig:
        return MapConfig(self.method, self.branch, self.clamp, self.target, self.scale).checked()

    @property
    def classes(self) -> Any:
        """The `classes` argument of `explain`."""
        count, numbers = max(self.spec.classes, 2), np.random.default_rng(self.seed)
        return {
            "predicted": None,
            "int": int(numbers.integers(count)),
            "each": numbers.integers(count, size=self.images).tolist(),
            "several": torch.from_numpy(numbers.integers(count, size=(self.images, 2))),
        }.get(self.choice, self.choice)

    def pictures(self) -> list[Image.Image]:
        numbers = np.random.default_rng(self.seed)
        pixels = numbers.integers(0, 256, (self.images, *SIZE, 3), dtype=np.uint8)
        return [Image.fromarray(each) for each in pixels]

    def explain(self, x: Tensor, classes: Any) -> Explanation:
        options: Any = {**vars(self.config), "zoom": self.zoom, "size": "image"}
        return explain(self.net, x, classes=classes, **options)


def product_of_logits(logits: Tensor, classes: Tensor) -> Tensor:
    """A target of one's own."""
    return logits[:, 0] * logits[:, -1] + classes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec = Spec(
        draw(st.sampled_from(sorted(ACTIVATIONS))),
        draw(st.sampled_from(HEADS)),
        draw(st.sampled_from((1, 2, 4, 7))),
        draw(st.booleans()),
        draw(st.sampled_from((1.0, 30.0))),
        draw(st.integers(0, 2)),
    )
    one = spec.classes == 1
    branch: Branch = draw(
        st.sampled_from(("softmax", "sigmoid") if one else ("softmax", "sigmoid", "centred"))
    )
    linear = ("sigmoid" if branch == "sigmoid" else "softmax") in network(spec).linear
    has = {None: True, "linear": linear, "attention": spec.tokens, "patches": False, "rules": not spec.tokens}
    return Case(
        spec,
        draw(st.sampled_from([name for name, facts in METHODS.items() if has[facts.needs]])),
        branch,
        draw(st.sampled_from((None, False, True))),
        draw(st.sampled_from(("unit", "raw"))),
        draw(st.sampled_from(("predicted", "int", "each", "several", "top5", "positive", "all"))),
        draw(st.sampled_from(["class", "probability", product_of_logits] + ([] if one else ["finer-cam"]))),
        draw(st.sampled_from((1.0, 2.0))),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 99)),
    )


# --- ways to draw a map ---

Found = Iterator[tuple[int, int, Tensor]]  # image, which of its classes, map (H, W)


class Way(NamedTuple):
    """A way to draw maps, and the nearest combination that it can be asked for."""

    maps: Callable[[Case, Tensor, Tensor], Found]  # of a case, its (B, C, H, W) batch and (B, K) classes
    narrowed: Callable[[Case], Case] = lambda case: case


def columns(ex: Explanation, image: int | None = None) -> Found:
    """The maps of an explanation, or of the one of image `image`."""
    maps = ex.maps if ex.maps.ndim == 4 else ex.maps[:, None]
    for i, row in enumerate(maps):
        for k, each in enumerate(row):
            yield i if image is None else image, k, each


def one_by_one(case: Case, x: Tensor, chosen: Tensor) -> Found:
    for i in range(len(x)):
        own = case.classes[i : i + 1] if case.choice in ("each", "several") else case.classes
        yield from columns(case.explain(x[i : i + 1], own), i)


def from_a_pass(case: Case, x: Tensor, chosen: Tensor) -> Found:
    net, larger = zoomed(case.net, x, case.zoom)
    forward = net.run(larger, grad=True)
    classes = case.classes if case.zoom == 1 else chosen.clamp(min=0)  # as predicted at the native size
    for i, k, each in columns(explain_pass(net, forward, case.config, classes=classes, size=SIZE)):
        yield i, k, torch.zeros_like(each) if chosen[i, k] < 0 else each


def evaluated(case: Case, x: Tensor, chosen: Tensor) -> Found:
    labels = case.choice != "predicted"
    specs = {name: METRICS[name] for name in ("pxap", "mean_map")}  # maps of the class, of the predicted one
    evaluator = BatchEvaluator(case.net, specs, "label" if labels else "predicted", ("softmax",), case.zoom)
    batch = Batch(x, chosen[:, 0], list(range(len(x))), [], [SIZE[::-1]] * len(x))
    variants = [Variant(case.method, case.branch, clamp) for clamp in (False, True)]
    samples = [sample(i) for i in range(len(x))]
    records = dict(evaluator.records(batch, samples, variants))
    record = records[variants[bool(case.config.clamp)]]
    assert record.maps is not None and record.predicted_maps is not None
    for i in range(len(x)):
        yield i, 0, record.maps[i]
        if (
            not labels and not METHODS[case.method].masks_are_resized
        ):  # images are masked by CAM resized otherwise
            yield i, 0, record.predicted_maps[i]


DROP_INS = {
    cls.method: cls
    for name, cls in vars(compat).items()
    if hasattr(cls, "method") and name[0] != "_" and name not in ("FinerCAM", "RefineCAM")  # of any method
}


def by_drop_in_class(case: Case, x: Tensor, chosen: Tensor) -> Found:
    drop_in = DROP_INS[case.method]
    if case.target == "finer-cam":
        cam = compat.FinerCAM(case.net, base_method=drop_in, branch=case.branch)
    else:
        cam = drop_in(case.net, branch=case.branch)
    for i, each in enumerate(cam(x, targets=case.classes)):
        yield i, 0, torch.from_numpy(each)


def on_the_page(case: Case, x: Tensor, chosen: Tensor) -> Found:
    source = Source("it", case.net, case.branch)
    signed = case.branch == "sigmoid" and not case.config.clamp
    for i, picture in enumerate(case.pictures()):
        viewer = Viewer(f"{i}.png", picture, [case.net])
        classes = () if case.choice == "predicted" else tuple(dict.fromkeys(chosen[i].tolist()))
        viewer.update(Request(classes, (source,), (case.method,), "signed" if signed else "evidence"))
        raw = np.load(io.BytesIO(viewer.files()["maps.npy"]))
        for panel, values in zip(viewer.panels, raw, strict=True):
            found = panel.unit_map[0] if case.scale == "unit" else torch.from_numpy(values)
            for k in (chosen[i] == panel.class_index).nonzero()[:, 0].tolist():
                yield i, k, found


def by_the_command(case: Case, x: Tensor, chosen: Tensor) -> Found:
    words = ["explain", "--method", case.method, "--branch", case.branch, "--scale", case.scale]
    words += ["--target", case.target, "--zoom", str(case.zoom)]
    words += [] if case.clamp is None else ["--clamp" if case.clamp else "--no-clamp"]
    words += [] if case.choice == "predicted" else ["--class", str(case.classes)]
    opened = opening.OpenedNetwork(
        case.net, Classifier(case.net.model, Preprocess(*SIZE), None, "it"), case.branch
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for i, picture in enumerate(case.pictures()):
            picture.save(Path(folder) / f"{i}.png")
        patch.setattr(opening, "open_network", lambda *_, **__: opened)
        assert run(patch, *words, "--output", f"{folder}/maps", folder) == 0
        for i, file in enumerate(sorted(Path(folder, "maps").rglob("*.npy"))):
            yield i, 0, torch.from_numpy(np.load(file))


def one_class_an_image(case: Case) -> Case:
    return replace(case, choice=case.choice if case.choice in ("predicted", "int", "each") else "each")


def as_evaluated(case: Case) -> Case:
    return replace(one_class_an_image(case), target="class", scale="unit")


def as_dropped_in(case: Case) -> Case:
    target = case.target if case.target in ("class", "finer-cam") else "class"
    case = replace(case, method=case.method if case.method in DROP_INS else "grad-cam", target=target)
    return replace(one_class_an_image(case), clamp=None, scale="unit", zoom=1.0)


def as_on_the_page(case: Case) -> Case:
    clamp = bool(case.clamp) and case.branch == "sigmoid"
    choice = "several" if case.choice == "positive" else case.choice
    return replace(case, clamp=clamp, choice=choice, target="class", zoom=1.0)


def as_commanded(case: Case) -> Case:
    target = case.target if isinstance(case.target, str) else "class"
    return replace(case, choice="predicted" if case.choice == "predicted" else "int", target=target)


WAYS = {
    "images one by one": Way(one_by_one),
    "explain_pass": Way(from_a_pass),
    "evaluate": Way(evaluated, as_evaluated),
    "drop-in class": Way(by_drop_in_class, as_dropped_in),
    "page": Way(on_the_page, as_on_the_page),
    "command": Way(by_the_command, as_commanded),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=soak_count(20, 400))
@given(case=cases())
def test_every_way_draws_the_map_that_explain_draws(way: str, case: Case) -> None:
    case = WAYS[way].narrowed(case)
    x, _ = as_batch(case.net, case.pictures())
    ex = case.explain(x, case.classes)
    chosen = ex.classes if ex.classes.ndim == 2 else ex.classes[:, None]
    expected = {(i, k): each for i, k, each in columns(ex)}
    compared = set()
    for i, k, each in WAYS[way].maps(case, x, chosen):
        largest = 1.0 if case.scale == "unit" else float(expected[i, k].abs().max())
        apart = float((each - expected[i, k]).abs().max())
        assert apart <= TOLERANCE * largest, f"image {i}, class {chosen[i, k]}: {apart:.2g} of {largest:.2g}"
        compared.add((i, k))
    assert compared >= {(i, k) for i, k in expected if chosen[i, k] >= 0}
