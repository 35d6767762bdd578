"""Maps against those of pytorch-grad-cam, torch-cam and captum: equal, or different on purpose."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_grad_cam as pgc
import torch
from captum.attr import LayerGradCam
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget
from torch import Tensor
from torchcam import methods as torchcam

import support.method_oracles as oracle
from sigcam.core.errors import DataError
from sigcam.methods.explainer import explain
from support.method_cases import (
    CASES,
    CHOSEN,
    close,
    differ,
    fitted,
    linear_layer,
    network,
    ours,
    pictures,
    plain,
    raw,
    unit,
)
from support.method_oracles import Array, Plain, low_map
from support.oracles import min_max
from support.tiny import Gap

# ----------------------------------------------------------------------------------------------------- peers

SAME = {
    "grad-cam": pgc.GradCAM,
    "grad-cam++": pgc.GradCAMPlusPlus,
    "xgrad-cam": pgc.XGradCAM,
    "layer-cam": pgc.LayerCAM,
    "hires-cam": pgc.HiResCAM,
    "grad-cam-elementwise": pgc.GradCAMElementWise,
}


def folding(twin: Plain) -> Callable[[Tensor], Tensor]:
    return lambda output: torch.stack([twin.fold(one) for one in output])


def peer_maps(peer: Any, twin: Plain, x: Tensor, classes: list[int] = CHOSEN, **options: Any) -> Array:
    """What pytorch-grad-cam draws."""
    layer = twin.model.get_submodule(twin.layer)
    with peer(twin.model, [layer], folding(twin)) as cam:
        maps: Array = cam(x, [ClassifierOutputTarget(k) for k in classes], **options)
    return maps


def torchcam_maps(peer: Any, twin: Plain, x: Tensor, **options: Any) -> list[Array]:
    """What torch-cam draws, after its ReLU and before its scaling."""
    with peer(twin.model, twin.layer, **options) as cam:
        maps: Tensor = cam(class_idx=CHOSEN, scores=twin.model(x), normalized=False)[0]
    return list(maps.numpy())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", SAME)
def test_unit_maps_are_pytorch_grad_cams(method: str, name: str) -> None:
    net, x = network(name), pictures(name)
    theirs = peer_maps(SAME[method], plain(net, "softmax", name), x)
    assert np.abs(ours(method, name) - theirs).max() < 1e-5


@pytest.mark.parametrize("name", ["gap", "vgg", "normed"])
def test_ablation_cam_is_pytorch_grad_cams_where_scores_are_positive_and_features_reach_down_to_0(
    name: str,
) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    classes = twin.model(x).argmax(1).tolist()
    assert all(twin.score(x[i], k, oracle.logit) > 0 for i, k in enumerate(classes))
    assert all(twin.features(one).min() == 0 for one in x)
    theirs = peer_maps(pgc.AblationCAM, twin, x, classes)
    assert np.abs(ours("ablation-cam", name, classes) - theirs).max() < 1e-5


@pytest.mark.parametrize("name", ["gap", "signed", "vgg", "normed"])
def test_fullgrad_is_pytorch_grad_cams_but_for_what_it_adds_to_ranges(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    theirs = pgc.FullGrad(twin.model, [])(x, [ClassifierOutputTarget(k) for k in CHOSEN])
    mine = ours("fullgrad", name)
    for i, k in enumerate(CHOSEN):
        expected = (min_max(oracle.full_gradient(twin.model, x[i], k, epsilon=e)) for e in (1e-7, 0))
        assert all(np.abs(a[i] - b).max() < 1e-5 for a, b in zip((theirs, mine), expected, strict=True))
    assert np.abs(mine - theirs).max() < 0.05


@pytest.mark.parametrize("target", ["class", "probability"])
@pytest.mark.parametrize("name", ["gap", "signed", "vgg", "normed"])  # of tokens, the peer's hooks fail
def test_shapley_cam_is_pytorch_grad_cams(name: str, target: Any) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    kind = ClassifierOutputTarget if target == "class" else ClassifierOutputSoftmaxTarget
    with pgc.ShapleyCAM(twin.model, [twin.model.get_submodule(twin.layer)]) as cam:
        theirs = cam(x, [kind(k) for k in CHOSEN])
    assert np.abs(ours("shapley-cam", name, target=target) - theirs).max() < 1e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", SAME)
def test_finer_cam_is_pytorch_grad_cams(method: str, name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    best = twin.model(x).argmax(1).tolist()
    layer = twin.model.get_submodule(twin.layer)
    with pgc.FinerCAM(twin.model, [layer], folding(twin), base_method=SAME[method]) as peer:
        theirs = peer(x)
    assert np.abs(ours(method, name, best, target="finer-cam") - theirs).max() < 1e-5


def test_finer_cam_of_ablations_is_pytorch_grad_cams() -> None:
    torch.manual_seed(0)
    net, x = fitted(Gap(classes=10), (16, 24)), pictures("gap")
    twin = plain(net, "softmax", "gap")
    with pgc.FinerCAM(twin.model, [twin.model.get_submodule("body")], base_method=pgc.AblationCAM) as peer:
        theirs = peer(x)
    ex = explain(net, x, "ablation-cam", branch="softmax", clamp=False, target="finer-cam")
    assert np.abs(ex.maps.numpy() - theirs).max() < 1e-5


@pytest.mark.parametrize("name", ["gap", "signed", "vgg", "normed"])  # captum folds no tokens
def test_grad_cam_is_captums(name: str) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), "softmax", name)
    theirs = LayerGradCam(twin.model, twin.model.get_submodule(twin.layer)).attribute(x, CHOSEN).detach()
    maps = raw(net, x, "grad-cam", branch="softmax", classes=CHOSEN)
    assert close(maps, math.prod(maps.shape[1:]) * theirs[:, 0].numpy(), 1e-9)


@pytest.mark.parametrize("name", ["gap", "signed", "vgg", "normed"])
def test_torch_cams_maps_are_ours_where_it_follows_the_papers(name: str) -> None:
    net, x, twin = network(name), pictures(name), plain(network(name), "softmax", name)
    same = {
        "grad-cam": torchcam.GradCAM,
        "xgrad-cam": torchcam.XGradCAM,
        "layer-cam": torchcam.LayerCAM,
    }
    for method, peer in same.items():
        maps = raw(net, x, method, branch="softmax", classes=CHOSEN).relu()
        for mine, theirs in zip(maps, torchcam_maps(peer, twin, x), strict=True):
            assert close(mine, theirs * theirs.size, 1e-6)  # XGrad-CAM: its epsilon is 1e-8, ours 1e-7
    if name in ("gap", "signed"):
        maps = raw(net, x, "cam", branch="softmax", classes=CHOSEN)
        for mine, theirs in zip(maps, torchcam_maps(torchcam.CAM, twin, x, fc_layer="fc"), strict=True):
            assert close(mine, theirs, 1e-9)


# ---------------------------------------------------------------------------------- deliberate differences

# Peer, method: what the peer does; what we do; why. The page docs/differences.md shows these rows.
DIFFERENCES: dict[str, tuple[str, str, str, str, str]] = {
    "eigen_cam": (
        "pytorch-grad-cam",
        "Eigen-CAM",
        "subtracts each channel's mean over the grid before the SVD, and keeps whatever sign results",
        "decomposes the features without centring, and chooses the sign that makes the map positive "
        "where activations are strong",
        "the paper decomposes the features themselves; with a free sign the object may come out dark",
    ),
    "eigengrad_cam": (
        "pytorch-grad-cam",
        "EigenGrad-CAM",
        "the same, on gradient times features",
        "no centring; the sign makes the map positive where the sum over channels of gradient times "
        "features is positive",
        "centring removes evidence that is spread over the whole image, and the sign is arbitrary",
    ),
    "eigen_smooth": (
        "pytorch-grad-cam",
        "all, with `eigen_smooth`",
        "the same, on weights times features",
        "no centring; the sign makes the map positive where the sum over weighted channels is",
        "as for EigenGrad-CAM",
    ),
    "seg_eigen_cam": (
        "pytorch-grad-cam",
        "Seg-Eigen-CAM",
        "the same, on sizes of gradients times features",
        "as for EigenGrad-CAM",
        "as for EigenGrad-CAM",
    ),
    "kpca_cam": (
        "pytorch-grad-cam",
        "KPCA-CAM",
        "keeps whatever sign the component has",
        "chooses the sign that makes the map positive where activations are strong",
        "with a free sign the object may come out dark",
    ),
    "fem": (
        "pytorch-grad-cam",
        "FEM",
        "weights each channel's features by the share of its cells that are far above its mean",
        "sums the cells far above each channel's mean, weighted by that mean",
        "the paper sums binary maps, each weighted by the mean of its channel",
    ),
    "ablation_cam_negative_score": (
        "pytorch-grad-cam",
        "Ablation-CAM",
        "divides the drop by the signed score, so that a negative score flips every weight",
        "divides by the score's absolute value",
        "a channel whose removal lowers the score is evidence for the class, even if the score is negative",
    ),
    "ablation_cam_value": (
        "pytorch-grad-cam",
        "Ablation-CAM",
        "unless the smallest feature is exactly 0, sets a channel ten million below the smallest "
        "value among the variants made so far, so that each channel of a chunk is set lower than the "
        "one before",
        "sets the channel to 0",
        "the paper sets it to 0; a huge value is far outside the range of real activations, and makes "
        "weights depend on the channels' order and on the batch size",
    ),
    "score_cam_corners": (
        "pytorch-grad-cam",
        "Score-CAM",
        "upsamples masks with corners aligned, maps without",
        "upsamples masks as it upsamples maps, between pixel centres",
        "a mask should cover the cells that its map shows",
    ),
    "layer_cam_layers": (
        "pytorch-grad-cam",
        "Layer-CAM of several layers",
        "the mean of the layers' maps",
        "their maximum, with tanh on all but the last layer's",
        "as in the Layer-CAM paper: fine detail of early layers is not averaged away",
    ),
    "scaling": (
        "pytorch-grad-cam, torch-cam",
        "all",
        "add 1e-7 (1e-8) to the range before dividing, so that a map of tiny values does not reach 1",
        "always fills 0 to 1, or is reported blank",
        "thresholds, and so boxes, should not depend on the gradients' size",
    ),
    "short_targets": (
        "pytorch-grad-cam",
        "all",
        "accepts a list of targets that is too short; the images without one get no gradient and blank maps",
        "raises an error that says how many classes it expects",
        "a silently wrong batch is worse than an error",
    ),
    "grad_cam_pp_division": (
        "torch-cam",
        "Grad-CAM++",
        "divides a copy and discards the result: a channel's weight is the sum of its positive "
        "gradients cubed",
        "divides as the paper does, with 1e-6 in the denominator",
        "the division is the method",
    ),
    "score_cam_order": (
        "torch-cam",
        "Score-CAM",
        "scales a mask to 0 to 1 before upsampling it, so that its peak may be lost",
        "scales it after upsampling",
        "the paper normalises the upsampled mask: every channel is then shown at full strength somewhere",
    ),
    "layer_cam_tanh": (
        "torch-cam",
        "Layer-CAM of several layers",
        "tanh on the maps of all layers",
        "tanh on all but the last layer's",
        "the paper scales the shallow layers' maps, to bring them to the last one's level",
    ),
    "finer_cam_strength": (
        "torch-cam",
        "Finer-CAM",
        "subtracts 0.6 times the plain mean of the nearest classes",
        "subtracts their mean weighted by probability, at full strength",
        "the likelier rival counts more; `target=` takes any function of the logits for other choices",
    ),
}


def check(theirs: Array, mine: Array, peers_choice: list[Array], our_choice: list[Array]) -> None:
    """The peer's maps are the oracle's with the peer's choice, ours with ours, and the choice matters."""
    assert np.abs(theirs - np.array(peers_choice)).max() < 1e-5
    assert np.abs(mine - np.array(our_choice)).max() < 1e-5
    assert differ(theirs, mine)


def check_projections(peer: Any, method: str, name: str, stacks: list[Array]) -> None:
    """The peer's maps are centred projections of those stacks of maps (N, P, Q), of either sign."""
    x, twin = pictures(name), plain(network(name), "softmax", name)
    theirs, expected = peer_maps(peer, twin, x), []
    for stack, found in zip(stacks, theirs, strict=True):
        low = oracle.centred_projection(stack)
        expected.append(min(unit(low, name), unit(-low, name), key=lambda u, m=found: np.abs(u - m).max()))
    our_choice = [unit(low_map(method, twin, x[i], k), name) for i, k in enumerate(CHOSEN)]
    check(theirs, ours(method, name), expected, our_choice)


@pytest.mark.parametrize("name", ["gap", "signed", "vgg", "normed", "vit"])
def test_difference_eigen_cam(name: str) -> None:
    twin = plain(network(name), "softmax", name)
    stacks = [twin.features(one) for one in pictures(name)]
    check_projections(pgc.EigenCAM, "eigen-cam", name, stacks)


@pytest.mark.parametrize("name", ["gap", "signed", "vgg", "normed", "vit"])
def test_difference_seg_eigen_cam(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    stacks = [
        np.abs(twin.gradient(x[i], k, oracle.logit)) * twin.features(x[i]) for i, k in enumerate(CHOSEN)
    ]
    check_projections(pgc.SegEigenCAM, "seg-eigen-cam", name, stacks)


@pytest.mark.parametrize("name", ["gap", "vgg", "vit"])
def test_difference_kpca_cam(name: str) -> None:
    x, twin = pictures(name, 6), plain(network(name), "softmax", name)
    theirs = peer_maps(pgc.KPCA_CAM, twin, x, [0] * 6)
    free = 0
    for one, found in zip(x, theirs, strict=True):
        low = oracle.kpca_cam(twin, one)
        apart = [np.abs(unit(sign * low, name) - found).max() for sign in (1, -1)]
        assert min(apart) < 1e-4
        free += apart[1] < apart[0]
    assert free or name != "gap"


@pytest.mark.parametrize("name", ["gap", "vgg", "vit"])
def test_difference_fem(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    choices = [[unit(oracle.fem(twin, one, shares=shares), name) for one in x] for shares in (True, False)]
    check(peer_maps(pgc.FEM, twin, x), ours("fem", name), *choices)


@pytest.mark.parametrize("name", ["gap", "signed", "vgg", "normed", "vit"])
def test_difference_eigengrad_cam(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    stacks = [twin.gradient(x[i], k, oracle.logit) * twin.features(x[i]) for i, k in enumerate(CHOSEN)]
    check_projections(pgc.EigenGradCAM, "eigengrad-cam", name, stacks)


@pytest.mark.parametrize("name", ["gap", "vgg"])
def test_difference_eigen_smooth(name: str) -> None:
    x, twin, expected = pictures(name), plain(network(name), "softmax", name), []
    theirs = peer_maps(pgc.GradCAM, twin, x, eigen_smooth=True)
    for i, k in enumerate(CHOSEN):
        low = oracle.centred_projection(oracle.grad_cam(twin, x[i], k, oracle.logit) * twin.features(x[i]))
        expected.append(
            min((unit(s * low, name) for s in (1, -1)), key=lambda u: np.abs(u - theirs[i]).max())
        )
    smoothed = [oracle.eigen_smoothed("grad-cam", twin, x[i], k, oracle.logit) for i, k in enumerate(CHOSEN)]
    check(theirs, ours("grad-cam", name, eigen_smooth=True), expected, [unit(low, name) for low in smoothed])


@pytest.mark.parametrize("name", ["gap", "vgg", "normed"])
def test_difference_ablation_cam_negative_score(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    classes = twin.model(x).argmin(1).tolist()
    assert all(twin.score(x[i], k, oracle.logit) < 0 for i, k in enumerate(classes))
    lows = [
        [unit(low_map("ablation-cam", twin, x[i], k, signed=signed), name) for i, k in enumerate(classes)]
        for signed in (True, False)
    ]
    check(peer_maps(pgc.AblationCAM, twin, x, classes), ours("ablation-cam", name, classes), *lows)


def test_difference_ablation_cam_value() -> None:
    x, twin = pictures("signed"), plain(network("signed"), "softmax", "signed")
    classes = twin.model(x).argmax(1).tolist()
    sinking = partial(
        low_map, "ablation-cam", twin, signed=True, value=lambda channel, low: low - (channel + 1) * 1e7
    )
    check(
        peer_maps(pgc.AblationCAM, twin, x, classes),
        ours("ablation-cam", "signed", classes),
        [unit(sinking(x[i], k), "signed") for i, k in enumerate(classes)],
        [unit(low_map("ablation-cam", twin, x[i], k), "signed") for i, k in enumerate(classes)],
    )
    one_by_one = peer_maps(partial(pgc.AblationCAM, batch_size=1), twin, x, classes)
    assert differ(one_by_one, peer_maps(pgc.AblationCAM, twin, x, classes))


@pytest.mark.parametrize("name", ["gap", "vgg"])
def test_difference_score_cam_corners(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    lows = [
        [unit(low_map("score-cam", twin, x[i], k, aligned=aligned), name) for i, k in enumerate(CHOSEN)]
        for aligned in (True, False)
    ]
    check(peer_maps(pgc.ScoreCAM, twin, x), ours("score-cam", name), *lows)


LAYERS = ["features.1", "features.4"]


def of_layers(method: str, i: int, k: int) -> list[Array]:
    """Low maps of both layers of `vgg`."""
    twin, lows = plain(network("vgg"), "softmax", "vgg"), []
    for layer in LAYERS:
        twin.layer = layer
        lows.append(low_map(method, twin, pictures("vgg")[i], k))
    return lows


def peer_layers(method: str) -> Array:
    twin = plain(network("vgg"), "softmax", "vgg")
    with SAME[method](twin.model, [twin.model.get_submodule(layer) for layer in LAYERS]) as peer:
        maps: Array = peer(pictures("vgg"), [ClassifierOutputTarget(k) for k in CHOSEN])
    return maps


@pytest.mark.parametrize("method", sorted(SAME.keys() - {"layer-cam"}))
def test_maps_of_several_layers_are_pytorch_grad_cams(method: str) -> None:
    assert np.abs(peer_layers(method) - ours(method, "vgg", layers=LAYERS)).max() < 1e-5


def test_difference_layer_cam_layers() -> None:
    lows = [of_layers("layer-cam", i, k) for i, k in enumerate(CHOSEN)]
    check(
        peer_layers("layer-cam"),
        ours("layer-cam", "vgg", layers=LAYERS),
        [oracle.averaged(low, 8, 32) for low in lows],
        [oracle.fused("layer-cam", low, 8, 32) for low in lows],
    )


def test_difference_layer_cam_tanh() -> None:
    x, twin = pictures("vgg"), plain(network("vgg"), "softmax", "vgg")
    with torchcam.LayerCAM(twin.model, LAYERS) as peer:
        cams = peer(class_idx=CHOSEN, scores=twin.model(x))
        theirs = peer.fuse_cams(cams, (8, 32)).numpy()
    everywhere = [
        np.max(
            [oracle.bilinear(np.tanh(2 * min_max(low, 1e-8)), 8, 32) for low in of_layers("layer-cam", i, k)],
            axis=0,
        )
        for i, k in enumerate(CHOSEN)
    ]
    our_choice = [
        oracle.fused("layer-cam", of_layers("layer-cam", i, k), 8, 32) for i, k in enumerate(CHOSEN)
    ]
    check(theirs, ours("layer-cam", "vgg", layers=LAYERS), everywhere, our_choice)


def test_difference_scaling() -> None:
    net, x = fitted(Gap(), (16, 24)), pictures("gap")
    with torch.no_grad():
        linear_layer(net, "softmax").weight.copy_(torch.tensor([[1e-7], [0.0], [0.0], [1e-7]]).expand(-1, 6))
    twin = plain(net, "softmax", "gap")
    theirs = peer_maps(pgc.GradCAM, twin, x)
    with torchcam.GradCAM(twin.model, twin.layer) as peer:
        others = peer(class_idx=CHOSEN, scores=twin.model(x))[0].numpy()
    mine = explain(net, x, branch="softmax", clamp=False, classes=CHOSEN).maps.numpy()
    for i, k in enumerate(CHOSEN):
        low = low_map("grad-cam", twin, x[i], k)
        assert np.abs(others[i] - (low - low.min()) / (np.ptp(low) + 1e-8)).max() < 1e-6
        once = oracle.bilinear((low - low.min()) / (np.ptp(low) + 1e-7), 16, 24)
        assert np.abs(theirs[i] - (once - once.min()) / (np.ptp(once) + 1e-7)).max() < 1e-6
        assert theirs[i].max() < 1 - 1e-6 and others[i].max() < 0.9
        assert np.abs(mine[i] - unit(low, "gap")).max() < 1e-5
        assert (mine[i].min(), mine[i].max()) == (0, 1)


def test_difference_short_targets() -> None:
    net, x = network("gap"), pictures("gap")
    theirs = peer_maps(pgc.GradCAM, plain(net, "softmax", "gap"), x, [2])
    assert theirs[0].any() and not theirs[1].any()
    with pytest.raises(DataError):
        explain(net, x, branch="softmax", classes=[2])


@pytest.mark.parametrize("name", ["gap", "vgg", "normed"])
def test_difference_grad_cam_pp_division(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    theirs = torchcam_maps(torchcam.GradCAMpp, twin, x)
    for i, k in enumerate(CHOSEN):
        assert close(theirs[i], low_map("grad-cam++", twin, x[i], k, divide=False), 1e-9)
    check(
        np.array([unit(low, name) for low in theirs]),
        ours("grad-cam++", name),
        [unit(low_map("grad-cam++", twin, x[i], k, divide=False), name) for i, k in enumerate(CHOSEN)],
        [unit(low_map("grad-cam++", twin, x[i], k), name) for i, k in enumerate(CHOSEN)],
    )


@pytest.mark.parametrize("name", ["gap", "vgg"])
def test_difference_score_cam_order(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    lows = [
        [unit(low_map("score-cam", twin, x[i], k, scaled_first=first), name) for i, k in enumerate(CHOSEN)]
        for first in (True, False)
    ]
    theirs = np.array([unit(low, name) for low in torchcam_maps(torchcam.ScoreCAM, twin, x)])
    check(theirs, ours("score-cam", name), *lows)


def test_difference_finer_cam_strength() -> None:
    x, twin = pictures("vgg"), plain(network("vgg"), "softmax", "vgg")
    theirs = np.array([unit(low, "vgg") for low in torchcam_maps(torchcam.FinerCAM, twin, x)])

    def milder(logits: Tensor, k: int) -> Tensor:  # of four classes, the three nearest are all the others
        return logits[k] - 0.6 * (logits.sum() - logits[k]) / 3

    def batched(logits: Tensor, classes: Tensor) -> Tensor:
        return torch.stack([milder(row, int(k)) for row, k in zip(logits, classes, strict=True)])

    expected = [unit(low_map("grad-cam", twin, x[i], k, milder), "vgg") for i, k in enumerate(CHOSEN)]
    finer = [unit(low_map("grad-cam", twin, x[i], k, oracle.finer), "vgg") for i, k in enumerate(CHOSEN)]
    check(theirs, ours("grad-cam", "vgg", target="finer-cam"), expected, finer)
    assert np.abs(ours("grad-cam", "vgg", target=batched) - theirs).max() < 1e-5  # and ours can be told to


def test_every_difference_is_tested_and_on_the_page() -> None:
    tested = {
        name.removeprefix("test_difference_") for name in globals() if name.startswith("test_difference_")
    }
    assert tested == DIFFERENCES.keys()
    page = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
    page = page.partition("## Attributions to pixels")[0]  # tests/methods/test_attributions.py
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {' | '.join(row)} |" for row in DIFFERENCES.values()]
