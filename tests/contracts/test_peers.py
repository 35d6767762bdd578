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
import torch.nn.functional as F
from captum.attr import LayerGradCam
from pytorch_grad_cam.feature_factorization.deep_feature_factorization import dff
from pytorch_grad_cam.metrics import road
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget
from torch import Tensor, nn
from torchcam import methods as torchcam
from torchvision.models.vision_transformer import VisionTransformer

import sigcam
import support.method_oracles as oracle
from sigcam.core.errors import DataError
from sigcam.methods.concepts import factorize, nonnegative_factors
from sigcam.methods.explainer import explain
from sigcam.metrics import removal
from sigcam.network.attachment import attach
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
    "fullgrad_smooth": (
        "pytorch-grad-cam",
        "FullGrad with `eigen_smooth`",
        "projects the layers' maps, shrunk to an eighth of the image, on their first principal component",
        "adds them up as always, and logs that `eigen_smooth` is not used",
        "the method adds up maps and weights no channels",
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
    "fullgrad_range": (
        "fullgrad-saliency (the authors')",
        "FullGrad",
        "scales all channels of a layer by one range, and enlarges them with corners aligned",
        "scales each channel by its own range, and enlarges it between pixel centres",
        "as pytorch-grad-cam does: channels of small values count, too",
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
    "refine_cam_smoothing": (
        "pytorch-grad-cam",
        "RefineCAM with `eigen_smooth`",
        "averages each layer's map over six views of the image instead, as `aug_smooth` does",
        "keeps the first principal component of each layer's weighted channels",
        "it is what the name says",
    ),
    "random_cam": (
        "pytorch-grad-cam",
        "RandomCAM",
        "draws other weights in each call",
        "always takes the same ones",
        "the same image has the same map every time",
    ),
    "factorization": (
        "pytorch-grad-cam",
        "DeepFeatureFactorization",
        "subtracts each channel's minimum before it factorises, and scales each map by itself",
        "counts negative features as zero; the maps of one concept have one scale in all images",
        "where an image lacks a concept, its map is dark",
    ),
    "road": (
        "pytorch-grad-cam",
        "ROAD",
        "how the target's output changes, where all pixels from a percentile of the map on are removed",
        "the class's probability, where exactly the share that is asked for is removed; equal values in "
        "reading order",
        "else a map that is mostly 0 loses all of its zeros at the first step",
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
    "is_cam_strengths": (
        "torch-cam",
        "IS-CAM",
        "begins with a strength of 1 / N, so that each is the following one: up to (N + 1) / 2",
        "begins with 0 and ends with (N - 1) / 2",
        "the paper's sum is over j / N from j = 0 on, and so is the formula on torch-cam's page",
    ),
    "refine_cam_size": (
        "torch-cam",
        "RefineCAM",
        "multiplies maps at the size of the largest layer, each scaled before it is enlarged",
        "multiplies them at the image's size, each scaled there",
        "as in the implementation that the authors gave to pytorch-grad-cam",
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
    "rollout_dropped": (
        "vit-explain",
        "attention rollout",
        "sets the lowest 90% of each layer's attention to 0 unless told otherwise",
        "keeps all of it",
        "the paper multiplies the whole matrices",
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


@pytest.mark.parametrize("name", ["gap", "vgg", "normed"])
def test_difference_fullgrad_range(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    by_layer, by_channel = (
        [min_max(oracle.full_gradient(twin.model, x[i], k, by_layer=way)) for i, k in enumerate(CHOSEN)]
        for way in (True, False)
    )
    check(np.array(by_layer), ours("fullgrad", name), by_layer, by_channel)  # the peer is not installed


def test_difference_random_cam() -> None:
    x, twin = pictures("vgg"), plain(network("vgg"), "softmax", "vgg")
    assert differ(peer_maps(pgc.RandomCAM, twin, x), peer_maps(pgc.RandomCAM, twin, x))
    mine = ours("random-cam", "vgg")
    assert np.array_equal(mine, ours("random-cam", "vgg"))
    expected = [unit(low_map("random-cam", twin, x[i], k), "vgg") for i, k in enumerate(CHOSEN)]
    assert np.abs(mine - np.array(expected)).max() < 1e-5


def test_difference_factorization() -> None:
    x, model = pictures("signed", 3).float(), plain(network("signed"), "softmax", "signed").model.float()
    with torch.no_grad():
        features = model.body(x).numpy()
    vectors, factors = dff(features.copy(), 2)
    assert (features.min((0, 2, 3)) < -0.5).any()
    assert (vectors >= features.min((0, 2, 3))[:, None] - 1e-5).all() and vectors.min() < 0
    theirs = pgc.DeepFeatureFactorization(model, model.body)(x, 2)[1]
    for one, found in zip(factors, theirs, strict=True):
        for low, drawn in zip(one, found, strict=True):
            assert np.abs(oracle.bilinear(min_max(low, 1e-7), 16, 24) - drawn).max() < 1e-5
    mine = factorize(network("signed"), x.double(), 2)
    cells = torch.from_numpy(features).double().relu().movedim(1, -1)  # (B, P, Q, N)
    lows = nonnegative_factors(cells.flatten(0, 2), 2)[0].view(*cells.shape[:3], 2).numpy()
    for i in range(3):
        for k in range(2):
            expected = oracle.bilinear(lows[i, ..., k] / lows[..., k].max(), 16, 24)
            assert np.abs(expected - mine.maps[i, k].numpy()).max() < 1e-5
    assert lows.max((1, 2)).min() < 0.9 * lows.max()  # darker in one image than in another


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # the peer's
def test_difference_road(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    images, maps = (torch.rand(shape, generator=generator) for shape in ((2, 3, 6, 5), (2, 6, 5)))
    model, classes = nn.Sequential(nn.Flatten(), nn.Linear(90, 4)), torch.tensor([2, 0])
    targets = [ClassifierOutputSoftmaxTarget(int(k)) for k in classes]
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)  # no noise in either
    monkeypatch.setattr(removal, "impute", partial(removal.impute, noise=0))

    def theirs(peer: Any, shown: Tensor, percent: int, **options: Any) -> Any:
        return peer(100 - percent)(images, shown.numpy(), targets, model, **options)

    kinds = road.ROADLeastRelevantFirst, road.ROADMostRelevantFirst
    for percent in (20, 50):
        curves = removal.removal_curves(
            lambda x: model(x).softmax(1), images, maps, classes, fractions=[percent / 100]
        )
        before = model(images).softmax(1)[[0, 1], classes].detach().numpy()
        for peer, curve in zip(kinds, curves, strict=True):
            assert np.abs(theirs(peer, maps, percent, return_diff=False) - curve[:, 0].numpy()).max() < 1e-5
            assert np.abs(theirs(peer, maps, percent) - (curve[:, 0].numpy() - before)).max() < 1e-5
    sparse, seen = torch.where(maps > 0.5, maps, 0.0), list[int]()
    _, imputed = theirs(kinds[0], sparse, 10, return_diff=False, return_visualization=True)
    assert torch.equal((imputed != images).any(1), sparse == 0)
    monkeypatch.setattr(removal, "impute", lambda x, gone: seen.extend(gone.sum((1, 2)).tolist()) or x)
    removal.removal_curves(lambda x: model(x).softmax(1), images, sparse, classes, fractions=[0.1])
    assert seen == [3] * 4 and int((sparse == 0).sum((1, 2)).min()) > 9


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


@pytest.mark.parametrize("name", ["gap", "normed"])
def test_difference_fullgrad_smooth(name: str) -> None:
    x, twin = pictures(name).float(), plain(network(name), "softmax", name)
    targets = [ClassifierOutputTarget(k) for k in CHOSEN]
    plainly, smoothed = (
        pgc.FullGrad(twin.model.float(), [])(x, targets, eigen_smooth=s) for s in (False, True)
    )
    cam = sigcam.FullGrad(twin.model)
    assert differ(smoothed, plainly)
    assert np.array_equal(cam(x, CHOSEN, eigen_smooth=True), cam(x, CHOSEN))
    assert np.abs(cam(x, CHOSEN) - plainly).max() < 0.05  # but for what the peer adds to ranges


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


@pytest.mark.parametrize("method", sorted(SAME))
def test_refine_cam_is_pytorch_grad_cams(method: str) -> None:
    twin, x = plain(network("vgg"), "softmax", "vgg"), pictures("vgg")
    layers = [twin.model.get_submodule(layer) for layer in LAYERS]
    peer = pgc.RefineCAM(twin.model, layers, base_method=SAME[method])
    theirs = peer(x, [ClassifierOutputTarget(k) for k in CHOSEN])
    assert np.abs(theirs - ours(method, "vgg", layers=LAYERS, fusion="product")).max() < 1e-5


def test_difference_refine_cam_smoothing() -> None:
    twin, x = plain(network("vgg"), "softmax", "vgg"), pictures("vgg")
    layers, targets = (
        [twin.model.get_submodule(e) for e in LAYERS],
        [ClassifierOutputTarget(k) for k in CHOSEN],
    )
    peer = pgc.RefineCAM(twin.model, layers, base_method=pgc.HiResCAM)
    views, smoothed = [], []
    for layer in layers:
        with pgc.HiResCAM(twin.model, [layer]) as each:
            views.append(each(x, targets, aug_smooth=True))
    for i, k in enumerate(CHOSEN):
        lows = []
        for name in LAYERS:
            twin.layer = name
            lows.append(oracle.eigen_smoothed("hires-cam", twin, x[i], k, oracle.logit))
        smoothed.append(oracle.multiplied(lows, 8, 32))
    check(
        peer(x, targets, eigen_smooth=True),
        ours("hires-cam", "vgg", layers=LAYERS, fusion="product", eigen_smooth=True),
        [min_max(each) for each in np.prod(views, axis=0)],
        smoothed,
    )


def test_difference_refine_cam_size() -> None:
    twin, x, small = plain(network("vgg"), "softmax", "vgg"), pictures("vgg"), ["features.4", "features.5"]
    with torchcam.RefineCAM(twin.model, list(small), base_method=torchcam.LayerCAM) as peer:
        theirs = peer(class_idx=CHOSEN, scores=twin.model(x))[0].numpy()
    at_layer, at_image = [], []
    for i, k in enumerate(CHOSEN):
        lows = []
        for layer in small:
            twin.layer = layer
            lows.append(low_map("layer-cam", twin, x[i], k))
        each = np.prod([oracle.bilinear(min_max(np.maximum(low, 0), 1e-8), 4, 16) for low in lows], axis=0)
        at_layer.append(min_max(oracle.bilinear(each, 8, 32)))
        at_image.append(oracle.multiplied(lows, 8, 32))
    enlarged = np.array([min_max(oracle.bilinear(each, 8, 32)) for each in theirs])
    check(enlarged, ours("layer-cam", "vgg", layers=small, fusion="product"), at_layer, at_image)


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


@pytest.mark.parametrize("name", ["gap", "vgg"])
def test_difference_is_cam_strengths(name: str) -> None:
    x, twin = pictures(name), plain(network(name), "softmax", name)
    shifted, later, expected = (
        [unit(low_map("is-cam", twin, x[i], k, **choice), name) for i, k in enumerate(CHOSEN)]
        for choice in ({"first": 1, "scaled_first": True}, {"first": 1}, {})
    )
    theirs = np.array([unit(low, name) for low in torchcam_maps(torchcam.ISCAM, twin, x)])
    check(theirs, ours("is-cam", name), shifted, expected)
    assert differ(np.array(later), np.array(expected))


def test_legrad_is_torch_cams() -> None:
    torch.manual_seed(0)
    sizes: Any = {"image_size": 24, "patch_size": 4, "num_layers": 3, "num_heads": 2}
    model = VisionTransformer(**sizes, hidden_dim=8, mlp_dim=16, num_classes=5).double().eval()
    x = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    nn.init.normal_(model.heads.head.weight)  # zero as it is made
    with torchcam.LeGrad(model, list(model.encoder.layers)) as peer:
        theirs = peer(CHOSEN, model(x), normalized=False)[0]
    net, options = attach(model, example=x[:1]), {"scale": "raw", "size": "features"}
    maps = explain(net, x, "legrad", branch="softmax", classes=CHOSEN, **options).maps  # type: ignore[arg-type]
    assert maps.shape == (2, 6, 6) and close(maps, theirs.numpy(), 1e-9)


def test_difference_rollout_dropped() -> None:
    x, model = pictures("vit"), plain(network("vit"), "softmax", "vit").model

    def rolled(one: Tensor, dropped: float) -> Array:
        tokens = model.embed(F.unfold(one[None], 4, stride=4).transpose(1, 2))
        tokens = torch.cat([model.extra, tokens], 1) + model.position
        product = np.eye(tokens.shape[1])
        for layer in model.layers:
            normed = layer.norm1(tokens)
            mean = layer.self_attn(normed, normed, normed)[1][0].detach().numpy().copy()
            lowest = mean.ravel().argsort()[: int(mean.size * dropped)]
            mean.flat[lowest[lowest != 0]] = 0
            step = mean + np.eye(len(mean))
            product, tokens = step / step.sum(1, keepdims=True) @ product, layer(tokens)
        return product[0, 2:].reshape(4, 6)

    maps = [[unit(rolled(one, dropped), "vit") for one in x] for dropped in (0.9, 0.0)]
    check(np.array(maps[0]), ours("attention-rollout", "vit"), *maps)  # the peer is not installed


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
    first = page.partition("\n## ")[0]  # the table of peers
    rows = [line for line in first.splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {' | '.join(row)} |" for row in DIFFERENCES.values()]
