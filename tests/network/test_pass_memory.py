"""The memory of a pass: counted on tiny networks, extrapolated to sizes that were never run."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigcam.core import memory as free
from sigcam.core.errors import DataError
from sigcam.methods.explainer import explain
from sigcam.network import pass_memory, zoom
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.network.pass_memory import LiveBytes, measure_pass, smaller_batch
from sigcam.network.zoom import zoom_batch, zoomed
from support.commands import spec
from support.nets import FlatMlp, SoftmaxVit, convs
from support.tiny import Failing, attached, images

KB = 1024


def test_live_bytes_are_those_that_a_ledger_by_hand_counts() -> None:
    weight = torch.ones(256)  # 1 kB, there before
    with LiveBytes() as live:
        a = torch.zeros(1024)  # + 4 kB
        b = a + 1  # + 4
        b.mul_(2), b.view(32, 32), weight * 2  # in place, a view, and 1 kB that is gone at once
        del a  # - 4
        c = torch.cat([b, b])  # + 8
        d = c[:10]  # keeps all of c
        del b, c
    assert live.events == [4 * KB, 4 * KB, KB, -KB, -4 * KB, 8 * KB, -4 * KB]
    assert live.peak == 12 * KB and len(d) == 10


def cnn(*size: int) -> DualBranch:
    body = convs(3, 8, 16, 16)
    return attach(
        nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
        example=torch.randn(1, 3, *size),
    )


def vit(**options: Any) -> DualBranch:
    timm = pytest.importorskip("timm")
    options = {"patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 4, **options}
    model = timm.models.VisionTransformer(img_size=32, **options)
    for block in model.blocks:
        block.attn.fused_attn = False  # scores of every token against every other
    return attach(model, example=torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("factor", [3, 6])
@pytest.mark.parametrize("make", [lambda: cnn(32, 32), vit, lambda: attach_vit(32)])
@pytest.mark.parametrize("grad", [False, True])
def test_the_estimate_for_a_larger_image_is_what_its_pass_takes(make: Any, grad: bool, factor: int) -> None:
    net, image = make(), torch.randn(1, 3, 32, 32)
    points = (net.split.point,)
    memory = zoom._compared(net, points, image, measure_pass(net, points, image, grad=grad), grad)
    finer, larger = zoomed(net, image, factor)
    with LiveBytes() as live:
        finer.run_at(points, larger, grad=grad)
    assert memory.peak(larger.shape[-2:].numel()) == pytest.approx(live.peak, rel=0.1)


def attach_vit(size: int) -> DualBranch:
    return attach(SoftmaxVit(size), example=torch.randn(1, 3, size, size))


def test_what_attention_takes_is_known_to_grow_faster_than_the_pixels() -> None:
    net, image = vit(), torch.randn(1, 3, 32, 32)
    points = (net.split.point,)
    linear = measure_pass(net, points, image, grad=False)
    compared = zoom._compared(net, points, image, linear, False)
    assert compared.peak(100 * 32 * 32) > 20 * linear.peak(100 * 32 * 32)


def test_a_pass_is_measured_once_per_network_and_size() -> None:
    runs = list[int]()
    net, image = cnn(32, 32), torch.randn(2, 3, 32, 32)
    net.model[0].register_forward_hook(lambda *_: runs.append(1))  # type: ignore[index]
    for _ in range(3):
        zoom_batch(net, image, 2)
        smaller_batch(8, net, image)
    assert len(runs) <= 4  # with a graph, after trying how to record in two passes, and without


def test_measuring_leaves_nothing_alive_and_the_random_state_alone() -> None:
    net, image = cnn(32, 32), torch.randn(1, 3, 32, 32)
    before = torch.get_rng_state()
    measure_pass(net, (net.split.point,), image, grad=True)
    gc.collect()
    assert torch.equal(torch.get_rng_state(), before)
    assert not [each for each in gc.get_objects() if type(each) is LiveBytes]


# ----------------------------------------------------------------------------------- what is done with it


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the free memory of this machine."""

    def set_free(count: float) -> None:
        for module in (free, pass_memory, zoom):
            monkeypatch.setattr(module, "free_memory", lambda device="cpu": int(count))
        monkeypatch.setattr(free, "SMALL", 0)

    return set_free


def needs(net: DualBranch, image: Tensor, factor: float) -> float:
    finer, larger = zoomed(net, image, factor)
    with LiveBytes() as live:
        finer.run(larger)
    return live.peak + 2 * larger.nbytes


def test_a_zoom_that_does_not_fit_is_refused_with_both_numbers_and_one_that_fits(little: Any) -> None:
    net, x = attached(cnn(16, 16).model), images(2)
    enough = needs(net, x[:1], 10)
    little(2 * enough)
    assert explain(net, x, zoom=10).maps.shape == (2, 16, 16)
    little(enough / 4)
    with pytest.raises(DataError) as caught:
        explain(net, x, zoom=10)
    assert f"one image at zoom=10 needs about {free.size_text(enough)} of memory" in str(caught.value)
    assert f"{free.size_text(enough / 4)} are free: zoom=" in str(caught.value)
    fits = float(str(caught.value).split("zoom=")[-1].split()[0])
    assert 3 < fits < 5
    assert explain(net, x, zoom=fits).maps.shape == (2, 16, 16)
    little(0)
    with pytest.raises(DataError, match=r"0 bytes are free: use no zoom, or free some memory\."):
        explain(net, x, zoom=10)


@pytest.mark.parametrize("aug_smooth", [False, True])
def test_a_batch_that_does_not_fit_is_zoomed_in_parts(little: Any, aug_smooth: bool) -> None:
    net, x = attached(cnn(16, 16).model), images(5)
    options: dict[str, Any] = {"zoom": 3, "classes": [[0, 1], [1, 2], [2, 3], [3, 0], [1, 1]]}
    whole = explain(net, x, "layer-cam", aug_smooth=aug_smooth, **options)
    sizes = list[int]()
    net.model[0].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))  # type: ignore[index]
    little(2.2 * pass_memory.KERNELS * needs(net, x[:1], 3))
    sizes.clear()
    parts = explain(net, x, "layer-cam", aug_smooth=aug_smooth, **options)
    views = 6 if aug_smooth else 1
    assert [size for size in sizes if size < 5][-3 * views :] == [2] * views + [2] * views + [1] * views
    assert torch.allclose(parts.maps, whole.maps, atol=1e-5)
    for name in ("classes", "positive_share", "blank", "logits"):
        assert torch.allclose(getattr(parts, name), getattr(whole, name))


def test_evaluate_refuses_a_batch_that_does_not_fit_with_one_that_does(little: Any) -> None:
    net, x = attached(cnn(16, 16).model), images(8)
    one = needs(net, x[:1], 3)
    little(4 * one)
    assert zoom_batch(net, x[:3], 3, whole=True) == 2  # what a part may hold, but all three may be tried
    with pytest.raises(
        DataError, match=r"a batch of 8 images at zoom=3 needs .* are free: a batch size of 2 fits"
    ):
        zoom_batch(net, x, 3, whole=True)
    little(0.9 * one)
    with pytest.raises(DataError, match=r"a batch of 8 images at zoom=3 needs .* are free: zoom=2\.\d fits"):
        zoom_batch(net, x, 3, whole=True)


@pytest.mark.parametrize(
    "options", [{"aug_smooth": True}, {"stride": 1}, {"layers": ["0.0", "0.1"]}, {"method": "score-cam"}]
)
def test_no_other_option_gets_a_zoom_past_the_refusal(little: Any, options: dict[str, Any]) -> None:
    net = attached(cnn(16, 16).model)
    little(2**20)
    with pytest.raises(
        DataError, match=r"one image at zoom=100 needs about \d+ MB of memory, 1\.0 MB are free"
    ):
        explain(net, images(2), zoom=100, **options)


def test_a_graph_through_many_layers_is_counted(little: Any) -> None:
    model = nn.Sequential(
        convs(3, 8, 8, 8, 8, stride=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    net, x = attached(model), images(1)
    early = (net.feature_point("0.0"),)
    with_graph, without = (measure_pass(net, early, x, grad=grad).peak(256) for grad in (True, False))
    assert with_graph > 1.3 * without


def test_score_cam_takes_fewer_masks_at_a_time_where_more_do_not_fit(little: Any) -> None:
    net, x = attached(cnn(16, 16).model), images(2)
    whole = explain(net, x, "score-cam", batch_size=16).maps
    one = measure_pass(net, (net.split.point,), x[:1], grad=False).peak(256) + 2 * x[0].nbytes
    sizes = list[int]()
    net.model[0].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))  # type: ignore[index]
    little(3.5 * pass_memory.KERNELS * one)
    parts = explain(net, x, "score-cam", batch_size=16).maps
    assert max(sizes[1:]) == 3 and torch.allclose(parts, whole, atol=1e-5)


def test_maps_of_many_classes_are_finished_in_parts_or_refused(
    little: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sigcam.methods import explainer

    net, x = attached(cnn(16, 16).model), images(2)
    whole = {scale: explain(net, x, classes="all", size="image", scale=scale) for scale in ("unit", "raw")}  # type: ignore[arg-type]
    monkeypatch.setattr(explainer, "MAX_WEIGHTS", 3 * 2 * 256)  # three classes of two images
    for scale, expected in whole.items():
        parts = explain(net, x, classes="all", size="image", scale=scale)  # type: ignore[arg-type]
        assert torch.equal(parts.maps, expected.maps) and torch.equal(parts.blank, expected.blank)
    little(4 * 2 * 4 * 256)
    with pytest.raises(
        DataError, match=r"drawing 8 map\(s\) of 16x16 needs about \d+ kB of memory, 8\.2 kB are"
    ):
        explain(net, x, classes="all", size="image")
    little(1e9)
    with pytest.raises(
        DataError, match=r"drawing 1 map\(s\) of 20000x20000 needs about 6\.4 GB .*1\.0 GB are"
    ):
        explain(net, x[:1], size=(20000, 20000))


def test_without_a_zoom_nothing_is_measured_or_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (free, pass_memory, zoom):
        monkeypatch.setattr(module, "free_memory", None)
    monkeypatch.setattr(zoom, "measure_pass", None)
    assert explain(attached(cnn(16, 16).model), images(2)).maps.shape == (2, 16, 16)


def test_unknown_memory_refuses_no_zoom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoom, "free_memory", lambda device: None)
    assert zoom_batch(cnn(16, 16), images(7), 900) == 7


def test_a_network_of_one_size_is_measured_at_that_size(little: Any) -> None:
    net = attach(FlatMlp((32, 48)), example=torch.randn(1, 3, 32, 48))
    little(1e6)
    with pytest.raises(
        DataError, match=r"one image at zoom=90 needs about \d+ MB of memory, 1\.0 MB are free"
    ):
        zoom_batch(net, torch.randn(1, 3, 32, 48), 90)


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError(), OSError(12, "no")]
)
def test_a_failed_allocation_is_not_called_a_model_of_one_size(error: Exception) -> None:
    failing = Failing()
    net = attached(
        nn.Sequential(convs(3, 4), failing, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    )
    failing.broken = error
    with pytest.raises(DataError, match=r"zoom=2 needs images of 32x32, which do not fit into memory: use a"):
        zoomed(net, images(1), 2)


LIMITED = """
import atexit, resource, sys, torch, sigcam.network.opening, sigcam.reports.explain_report
from sigcam.cli.main import main
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2 * 10**9,) * 2)
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
atexit.register(lambda begin: print("grown", used() - begin), used())
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_the_command_refuses_a_zoom_that_would_take_all_memory(place: Path) -> None:
    words = ("explain", place / "data" / "cat", "--model", spec(place), "--branch", "centred", "--zoom", 50)
    command = [sys.executable, "-c", LIMITED, *map(str, words), "--output", str(place / "maps")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    line, needed = ended.stderr.strip(), r"one image at zoom=50 needs about [\d.]+ GB of memory"
    assert ended.returncode == 2 and len(line.splitlines()) == 1, line
    assert re.fullmatch(rf"sigcam: {needed}, [12]\.\d GB are free: zoom=[\d.]+ fits\.", line)
    assert int(ended.stdout.split()[-1]) < 5e8  # bytes
    assert not (place / "maps").exists()
