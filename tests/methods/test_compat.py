"""The drop-in classes: pytorch-grad-cam's own numbers for its own calls, without its traps."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import pytorch_grad_cam as pgc
import torch
import torch.nn.functional as F
import torchvision
from pytorch_grad_cam.utils.model_targets import (
    BinaryClassifierOutputTarget,
    ClassifierOutputReST,
    ClassifierOutputSoftmaxTarget,
    ClassifierOutputTarget,
    FinerWeightedTarget,
    RawScoresOutputTarget,
)
from torch import Tensor, nn

import sigcam
from sigcam.core.errors import AttachError, DataError
from sigcam.methods import compat
from sigcam.methods.explainer import explain
from sigcam.methods.postprocess import unit_range
from support.tiny import Gap, Probabilities, Vgg, attached, images, untouched

NAMES = [name for name, thing in vars(compat).items() if hasattr(thing, "method") and name[0] != "_"]
SAME = ["GradCAM", "GradCAMPlusPlus", "XGradCAM", "LayerCAM", "HiResCAM"]  # the peer's numbers
OTHER = ["ScoreCAM", "EigenCAM", "EigenGradCAM"]  # see docs/differences.md


class Pooled(Vgg):
    """The same for images of any size."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(F.adaptive_avg_pool2d(self.features(x), 4).flatten(1))
        return logits


@cache
def resnet() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(weights=None, num_classes=5).eval()
    return model


def gap() -> Gap:
    torch.manual_seed(0)
    return Gap().eval()


def vgg() -> nn.Module:
    torch.manual_seed(0)
    return Pooled().eval()


# a network, what of it the peer is given, and images that are not square where the network takes them
CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, int]]] = {
    "gap": (gap, "body", (16, 24)),
    "vgg": (vgg, "features.4", (16, 24)),
    "vgg, pooled": (vgg, "features.5", (20, 16)),
    "resnet18": (resnet, "layer4.1", (64, 96)),
    "resnet18, early": (resnet, "layer3.0", (64, 64)),
}


def case(name: str, count: int = 3) -> tuple[nn.Module, list[nn.Module], Tensor]:
    make, layer, (height, width) = CASES[name]
    model = make()
    x = torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))
    return model, [model.get_submodule(layer)], x


def both(name: str, model: nn.Module, layers: list[nn.Module], x: Tensor, *args: Any, **options: Any) -> Any:
    """The maps of sigcam's class and of pytorch-grad-cam's, by the same call."""
    ours = getattr(sigcam, name)(model, target_layers=layers)(x, *args, **options)
    with getattr(pgc, name)(model, target_layers=layers) as peer:
        return ours, peer(x, *args, **options)


def outputs(classes: list[int], kind: Any = ClassifierOutputTarget) -> list[Any]:
    return [kind(k) for k in classes]


# ----------------------------------------------------------------------------------------- the peer's numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [(name, which) for name in SAME for which in CASES if which != "resnet18, early" or name == "XGradCAM"],
)
def test_the_same_call_gives_pytorch_grad_cams_maps(name: str, which: str) -> None:
    model, layers, x = case(which)
    cam = getattr(sigcam, name)(model=model, target_layers=layers)
    with getattr(pgc, name)(model=model, target_layers=layers) as peer:
        for targets in (outputs([0, 3, 1]), None):
            ours, theirs = (c(input_tensor=x, targets=targets) for c in (cam, peer))
            assert ours.dtype == theirs.dtype == np.float32
            assert ours.shape == theirs.shape == (3, *x.shape[2:])
            assert ours.max() == 1
            assert np.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize("which", ["gap", "vgg"])
def test_ablation_cam_is_the_peers_where_scores_are_positive(which: str) -> None:
    model, layers, x = case(which)
    with torch.no_grad():
        model.get_parameter("fc.bias" if which == "gap" else "classifier.3.bias").add_(2)
    assert (model(x).amax(1) > 0).all()
    for size in (32, 2):
        ours = sigcam.AblationCAM(model, layers, batch_size=size)(x)
        with pgc.AblationCAM(model, layers, batch_size=size) as peer:
            assert np.abs(ours - peer(x, None)).max() < 1e-5


@pytest.mark.parametrize("name", [*OTHER, "AblationCAM"])
@pytest.mark.parametrize("which", ["gap", "vgg"])
def test_where_sigcam_differs_on_purpose_the_class_gives_what_explain_does(name: str, which: str) -> None:
    model, layers, x = case(which)
    cam = getattr(sigcam, name)(model, layers)
    cam.batch_size = 2  # as the peer's Score-CAM is told
    maps = cam(x, outputs([0, 3, 1]))
    assert maps.dtype == np.float32 and maps.shape == (3, *x.shape[2:])
    assert (maps.min(), maps.max()) == (0, 1)
    net = sigcam.attach(model, layer=CASES[which][1])
    ex = explain(net, x, cam.method, branch="softmax", classes=[0, 3, 1], batch_size=2)
    assert np.array_equal(maps, ex.maps.numpy())


@pytest.mark.slow
def test_cam_is_grad_cam_with_path_a() -> None:
    model, layers, x = case("resnet18")
    maps = sigcam.CAM(model, layers)(x, 2)
    assert np.array_equal(
        maps, explain(sigcam.attach(model), x, "cam", branch="softmax", classes=2).maps.numpy()
    )
    with pytest.raises(DataError, match="Use 'grad-cam'"):
        sigcam.CAM(vgg())(images())


@pytest.mark.parametrize("which", ["gap", "vgg"])
@pytest.mark.parametrize("base", ["GradCAM", "XGradCAM", "HiResCAM"])
def test_finer_cam_is_the_peers(which: str, base: str) -> None:
    model, layers, x = case(which)
    ours = sigcam.FinerCAM(model, layers, base_method=getattr(sigcam, base))
    plain = both(base, model, layers, x, outputs([2, 2, 2]))[1]
    with pgc.FinerCAM(model, layers, base_method=getattr(pgc, base)) as peer:
        some: list[dict[str, Any]] = [
            {"comparison_categories": ranks} for ranks in ([1, 2], [3, 1], [1, 2, 3, 4])
        ]
        for options in ({}, {"alpha": 0.5}, {"target_idx": 2}, *some):
            assert np.abs(ours(x, **options) - peer(x, **options)).max() < 1e-5
        own = [FinerWeightedTarget(0, [2, 3], 1.0)] * 3
        assert np.abs(ours(x, own) - peer(x, own)).max() < 1e-5
        assert np.array_equal(peer(x, outputs([2, 2, 2])), plain)  # targets switch its comparison off
    assert np.array_equal(ours(x, 2), ours(x, target_idx=2))
    with pytest.raises(DataError, match=r"count from the nearest class, 1, not \[0, 1\]"):
        ours(x, comparison_categories=[0, 1])


@pytest.mark.parametrize("base", ["ScoreCAM", "AblationCAM"])
def test_finer_cam_of_a_perturbation_method_is_explains(base: str) -> None:
    model, layers, x = case("vgg")
    cam = sigcam.FinerCAM(model, layers, base_method=getattr(sigcam, base))
    ex = explain(cam.net, x, cam.method, branch="softmax", classes=1, target="finer-cam")
    assert np.array_equal(cam(x, 1), ex.maps.numpy())
    with pytest.raises(DataError, match="takes no other alpha"):  # which would need each image's own rivals
        cam(x, alpha=0.5)


@pytest.mark.parametrize("name", ["GradCAM", "XGradCAM"])
def test_several_layers_are_fused_as_the_peer_does(name: str) -> None:
    model, _, x = case("vgg")
    layers = [model.get_submodule(f"features.{i}") for i in (1, 5)]
    ours, theirs = both(name, model, layers, x, outputs([3, 3, 0]))
    assert np.abs(ours - theirs).max() < 1e-5
    assert np.array_equal(ours, getattr(sigcam, name)(model, ["features.1", "features.5"])(x, [3, 3, 0]))


@pytest.mark.parametrize("base", ["GradCAMPlusPlus", "HiResCAM"])
def test_refine_cam_multiplies_layers_as_the_peer_does(base: str) -> None:
    model, _, x = case("vgg")
    layers = [model.get_submodule(f"features.{i}") for i in (1, 4)]
    cam = sigcam.RefineCAM(model, layers, base_method=getattr(sigcam, base))
    ours = cam(x, outputs([3, 3, 0]))
    with_peers = sigcam.RefineCAM(model, layers, None, getattr(pgc, base))(x, outputs([3, 3, 0]))
    theirs = pgc.RefineCAM(model, layers, base_method=getattr(pgc, base))(x, outputs([3, 3, 0]))
    assert np.abs(ours - theirs).max() < 1e-5 and np.array_equal(ours, with_peers)
    names = ["features.1", "features.4"]
    ex = explain(cam.net, x, cam.method, branch="softmax", classes=[3, 3, 0], layers=names, fusion="product")
    assert np.array_equal(ours, ex.maps.numpy())
    assert sigcam.RefineCAM(model, names)(x).shape == ours.shape
    one = sigcam.RefineCAM(model, layers[1:], base_method=getattr(sigcam, base))  # the method's own map
    assert np.array_equal(one(x, 1), getattr(sigcam, base)(model, layers[1:])(x, 1))


def test_layer_cam_fuses_layers_as_its_paper_does() -> None:
    model, _, x = case("vgg")
    layers = ["features.1", "features.4"]
    ours = sigcam.LayerCAM(model, layers)(x, 1)
    ex = explain(sigcam.attach(model), x, "layer-cam", branch="softmax", classes=1, layers=layers)
    assert np.array_equal(ours, ex.maps.numpy())


@pytest.mark.parametrize("which", ["gap", "vgg"])
def test_aug_smooth_is_the_peers_stretched_to_zero_to_one(which: str) -> None:
    model, layers, x = case(which)
    ours, theirs = both("GradCAM", model, layers, x, outputs([0, 3, 1]), aug_smooth=True)
    assert np.abs(ours - unit_range(torch.from_numpy(theirs)).numpy()).max() < 1e-5


@pytest.mark.parametrize("which", ["gap", "vgg"])
def test_eigen_smooth_is_the_peers_without_centring_and_with_a_sign(which: str) -> None:
    model, layers, x = case(which)
    ours, theirs = both("HiResCAM", model, layers, x, outputs([0, 3, 1]), eigen_smooth=True)
    assert np.array_equal(ours, sigcam.HiResCAM(model, layers)(x, [0, 3, 1], eigen_smooth=True))
    assert np.abs(ours - sigcam.EigenGradCAM(model, layers)(x, [0, 3, 1])).max() < 1e-5
    assert np.abs(ours - theirs).max() > 1e-2  # see docs/differences.md, EigenGrad-CAM


def test_an_activation_counts_to_the_layer_before_it() -> None:
    model = vgg()
    with pgc.GradCAM(model, [model.get_submodule("features.3")]) as peer:
        of_peer = peer(images(), outputs([0, 1, 2]))
    before, after = (sigcam.GradCAM(model, [f"features.{i}"])(images(), [0, 1, 2]) for i in (3, 4))
    assert np.array_equal(before, after)
    assert np.abs(before - of_peer).max() > 1e-3  # gradients before the ReLU on features after it


# ------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    "kind", [ClassifierOutputTarget, ClassifierOutputSoftmaxTarget, ClassifierOutputReST]
)
@pytest.mark.parametrize("name", ["GradCAM", "GradCAMPlusPlus", "HiResCAM"])
@pytest.mark.parametrize("which", ["gap", "vgg"])
def test_the_peers_target_objects_mean_what_they_mean_to_the_peer(kind: Any, name: str, which: str) -> None:
    model, layers, x = case(which)
    ours, theirs = both(name, model, layers, x, outputs([0, 3, 1], kind))
    assert np.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize("name", ["ScoreCAM", "AblationCAM"])
@pytest.mark.parametrize("which", ["gap", "vgg"])
def test_a_perturbed_image_is_scored_by_its_own_target(name: str, which: str) -> None:
    model, layers, x = case(which)
    cam = getattr(sigcam, name)(model, layers)
    maps = cam(x, outputs([0, 3, 1], ClassifierOutputSoftmaxTarget))
    for i, k in enumerate([0, 3, 1]):
        alone = cam(x[i : i + 1], [ClassifierOutputSoftmaxTarget(k)])
        assert np.abs(maps[i] - alone[0]).max() < 1e-5
        ex = explain(cam.net, x[i : i + 1], cam.method, branch="softmax", classes=k, target="probability")
        assert np.abs(maps[i] - ex.maps[0].numpy()).max() < 1e-5


def test_classes_come_as_numbers_lists_tensors_arrays_or_objects() -> None:
    model, layers, x = case("vgg")
    cam = sigcam.GradCAM(model, layers)
    expected = cam(x, [2, 2, 2])
    same: list[Any] = [
        2,
        np.int64(2),
        torch.tensor(2),
        (2, 2, 2),
        torch.tensor([2, 2, 2]),
        np.array([2, 2, 2]),
        outputs([2, 2, 2]),
        outputs([np.int64(2), torch.tensor(2), 2]),  # type: ignore[list-item]
        ClassifierOutputTarget(2),
    ]
    for targets in same:
        assert np.array_equal(cam(x, targets), expected), targets

    def third(row: Tensor) -> Tensor:
        return row[2]

    functions: list[Any] = [third, [third] * 3, [ClassifierOutputTarget(2), third, third]]
    for targets in functions:
        assert np.abs(cam(x, targets) - expected).max() < 1e-6


BAD_TARGETS: list[tuple[Any, str]] = [
    ([1], r"1 targets for 3 image\(s\): give one for each, or one alone"),
    ([1, 1, 1, 1], r"4 targets for 3"),
    (outputs([1]), r"1 targets for 3"),
    (torch.tensor([1, 2]), r"2 targets for 3"),
    ([], r"0 targets for 3"),
    (9, "class 9 does not exist: this classifier has classes 0 to 3"),
    (outputs([0, 1, -1]), "class -1 does not exist"),
    (1.5, "whole numbers"),
    ([0, 1, 1.5], "whole numbers"),
    (torch.zeros(3, 2, dtype=torch.long), "one per image"),
    ([0, 1, lambda row: row[0]], "whole numbers, or functions"),
    ([RawScoresOutputTarget()] * 3, "one number per image"),
    (lambda row: 3.0, "one number per image, as a tensor, not 3.0"),
]


@pytest.mark.parametrize(("targets", "sentence"), BAD_TARGETS)
def test_targets_that_do_not_fit_are_refused_in_one_line(targets: Any, sentence: str) -> None:
    model, layers, x = case("gap")
    with pytest.raises(DataError, match=sentence) as caught:
        sigcam.GradCAM(model, layers)(x, targets)
    assert "\n" not in str(caught.value)


def test_a_short_list_of_targets_raises_where_the_peer_draws_nothing_for_the_rest() -> None:
    model, layers, x = case("gap")
    with pgc.GradCAM(model, layers) as peer:
        theirs = peer(x, outputs([1]))
    assert theirs.shape == (3, 16, 24) and theirs[0].any() and not theirs[1:].any()
    with pytest.raises(DataError):
        sigcam.GradCAM(model, layers)(x, outputs([1]))


@pytest.mark.parametrize("k", [0, 1])
def test_one_logit_has_both_classes_and_the_peers_binary_target(k: int) -> None:
    torch.manual_seed(0)
    model = Gap(classes=1).eval()
    x = images()
    targets = outputs([k] * 3, BinaryClassifierOutputTarget)
    ours, theirs = both("GradCAM", model, [model.body], x, targets)
    assert np.abs(ours - theirs).max() < 1e-5
    cam = sigcam.GradCAM(model)
    assert np.abs(cam(x, k) - ours).max() < 1e-6
    ours, theirs = both("GradCAM", model, [model.body], x, outputs([0] * 3))  # the peer's place of the logit
    assert np.abs(ours - theirs).max() < 1e-5


def test_a_model_of_probabilities_is_explained_by_its_logits() -> None:
    torch.manual_seed(0)
    model = Probabilities().eval()
    plain = Gap()
    plain.load_state_dict(model.state_dict())
    assert np.abs(sigcam.GradCAM(model)(images(), 2) - sigcam.GradCAM(plain)(images(), 2)).max() < 1e-5


# ---------------------------------------------------------------------------------------- layers and options


@pytest.mark.slow
def test_the_layer_is_found_where_none_is_given() -> None:
    for which in ("gap", "vgg", "resnet18"):
        model, layers, x = case(which)
        found, named, spelled = (sigcam.GradCAM(model, given) for given in (None, layers, [CASES[which][1]]))
        assert np.array_equal(found(x), named(x)) and np.array_equal(named(x), spelled(x))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("wrap", [lambda model: model, sigcam.attach])
def test_a_layer_that_is_no_map_is_refused_when_the_object_is_made(
    several: bool, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = gap()
    more: list[Any] = ["body.0"] if several else []
    with pytest.raises(AttachError, match=r"layer='fc' \(Linear\) returns .* Layers that do: 'body'"):
        sigcam.GradCAM(wrap(model), [model.fc, *more])
    with pytest.raises(AttachError, match="did you mean 'body'"):
        sigcam.GradCAM(wrap(model), ["bodi", *more])
    with pytest.raises(AttachError, match="this Conv2d is no module of Gap"):
        sigcam.GradCAM(wrap(model), [nn.Conv2d(3, 3, 3), *more])


def test_what_is_not_needed_is_ignored_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, layers, x = case("gap")
    compat._log_once.cache_clear()
    expected = sigcam.GradCAM(model, layers)(x)
    for _ in range(2):
        assert np.array_equal(sigcam.GradCAM(model, layers, lambda tokens: tokens)(x), expected)
    sigcam.AblationCAM(model, layers, None, object(), 32, 0.5)
    said = [record.getMessage() for record in caplog.records]
    assert ["reshape_transform is not needed" in said[0], "no ablation_layer" in said[1]] == [True] * len(
        said
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_class_takes_the_arguments_of_older_programs(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, layers, x = case("gap")
    compat._log_once.cache_clear()
    make = getattr(sigcam, name)
    expected = make(model, layers)(x)
    assert np.array_equal(make(model, layers, device="cpu", use_cuda=False)(x), expected)
    assert "not used" not in caplog.text
    for options in ({"use_cuda": True}, {"device": torch.device("cuda", 0)}):
        assert np.array_equal(make(model, layers, **options)(x), expected)
    assert caplog.text.count("maps are computed where the model is") == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_class_takes_eigen_smooth(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, layers, x = case("gap")
    compat._log_once.cache_clear()
    cam = getattr(sigcam, name)(model, layers)
    smooth = cam(x, [0, 3, 1], eigen_smooth=True)
    if name in ("EigenCAM", "EigenGradCAM", "SegEigenCAM", "KPCA_CAM", "FEM", "FullGrad"):
        assert np.array_equal(smooth, cam(x, [0, 3, 1]))
        assert caplog.text.count("eigen_smooth is not used") == 1
        if name != "FullGrad":
            with getattr(pgc, name)(model, layers) as peer:
                maps = [peer(x, outputs([0, 3, 1]), eigen_smooth=each) for each in (False, True)]
            assert np.array_equal(*maps)
    else:
        target = "finer-cam" if name == "FinerCAM" else "class"
        options: Any = {"classes": [0, 3, 1], "branch": "softmax", "target": target, "eigen_smooth": True}
        assert np.array_equal(smooth, explain(cam.net, x, cam.method, **options).maps.numpy())
        assert "not used" not in caplog.text


def test_finer_cam_takes_its_arguments_in_the_peers_order() -> None:
    model, layers, x = case("vgg")
    ours = sigcam.FinerCAM(model, layers, None, sigcam.HiResCAM)
    assert np.array_equal(ours(x, None, True, 1, None), ours(x, eigen_smooth=True))
    with pgc.FinerCAM(model, layers, None, pgc.HiResCAM) as peer:
        for arguments in ((False, 0.5), (False, 0.5, [1, 2]), (False, 1, None, 2)):
            assert np.abs(ours(x, None, *arguments) - peer(x, None, *arguments)).max() < 1e-5  # type: ignore[arg-type]


def test_outputs_are_the_models_own_for_the_last_images() -> None:
    model, layers, x = case("gap")
    cam = sigcam.GradCAM(model, layers)
    assert cam.outputs is None
    cam(x, 1)
    assert torch.equal(cam.outputs, model(x).detach())
    cam(x[:1], 1, aug_smooth=True)
    assert torch.equal(cam.outputs, model(x[:1]).detach())


def test_layers_that_are_no_list_are_refused() -> None:
    model = gap()
    wrong: Any
    for wrong in (
        [],
        model.get_submodule("body"),
        "body",
    ):  # the peer would go through a Sequential's children
        with pytest.raises(DataError, match=re.escape("[model.layer4]")):
            sigcam.GradCAM(model, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_every_class_is_public_and_takes_a_batch_of_one(name: str) -> None:
    cam = getattr(sigcam, name)
    assert name in sigcam.__all__ and cam.__doc__.count("\n") == 0
    maps = cam(gap())(torch.randn(1, 3, 16, 24))
    assert maps.shape == (1, 16, 24) and maps.dtype == np.float32
    assert 0 <= maps.min() <= maps.max() <= 1


# ------------------------------------------------------------------------------ models that are no classifier


class Segmenter(nn.Module):
    """Scores of classes for each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.vgg = Vgg()
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.vgg.features(x))
        return scores


def first(scores: Tensor) -> Tensor:
    return scores[0].square().mean()


def second(scores: Tensor) -> Tensor:
    return scores[1, 1:].sum()


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return Segmenter().train()


@pytest.mark.parametrize("name", ["GradCAM", "GradCAMPlusPlus", "HiResCAM"])
@pytest.mark.parametrize("layers", [["vgg.features.4"], ["vgg.features.1", "vgg.features.4"]])
def test_targets_score_any_output_as_in_the_peer(name: str, layers: list[str]) -> None:
    model, x = segmenter().eval(), torch.randn(3, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    modules = [model.get_submodule(layer) for layer in layers]
    ours, theirs = both(name, model, modules, x, [first, second, first])
    assert np.abs(ours - theirs).max() < 1e-5
    cam = getattr(sigcam, name)(model, layers)
    assert np.array_equal(ours, cam(x, [first, second, first]))
    assert np.abs(ours[1] - cam(x, second)[1]).max() < 1e-6


@pytest.mark.parametrize("name", ["ScoreCAM", "AblationCAM", "FullGrad", "EigenCAM"])
def test_a_scored_output_is_a_classifiers_only_logit(name: str) -> None:
    model, x = segmenter(), images()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.fc = model, nn.Linear(1, 1)
            with torch.no_grad():
                self.fc.weight.fill_(1), self.fc.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(self.model(x)[:, 1, 1:].sum((1, 2))[:, None])
            return logits

    layers = ["vgg.features.4"]
    maps = getattr(sigcam, name)(model, layers, batch_size=3)(x, second)
    expected = getattr(sigcam, name)(Classifier(), [f"model.{each}" for each in layers])(x, 1)
    assert maps.any() and np.abs(maps - expected).max() < 1e-5


def test_an_image_whose_score_has_no_gradient_gets_a_blank_map(caplog: pytest.LogCaptureFixture) -> None:
    def where_positive(scores: Tensor) -> Tensor:
        return (scores.mean() + 1e6 * float(scores.mean() < total)).clamp(max=1e5)

    model, x = segmenter().eval(), images()
    total = model(x).mean((1, 2, 3)).median().item()
    maps = sigcam.GradCAM(model, ["vgg.features.4"])(x, where_positive)
    assert sorted(maps.any((1, 2))) == [False, True, True]
    assert "the map of image 0 is blank: no gradient reaches the layer" in caplog.text


def test_a_scored_model_is_left_as_it_was() -> None:
    model, x = segmenter(), images()
    with untouched(model), torch.no_grad():
        cam = sigcam.GradCAM(model)
        cam(x, first)
        assert cam.outputs is not None
    assert torch.equal(cam.outputs, model.eval()(x).detach())


class AsDict(Segmenter):
    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x)}


class AsTuple(Segmenter):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


@pytest.mark.parametrize(
    ("make", "targets", "error", "sentence"),
    [
        (
            segmenter,
            None,
            AttachError,
            "not .B, C. logits.* Or pass functions of one image's output as targets",
        ),
        (segmenter, [0, 1, 2], AttachError, "Or pass functions of one image's output"),
        (segmenter, [first, second], DataError, "2 targets for 3"),
        (segmenter, lambda scores: scores[0], DataError, r"as a tensor, not of shape \(4, 4\)"),
        (segmenter, lambda scores: scores[3].mean(), IndexError, "index 3 is out of bounds"),
        (segmenter, lambda scores: torch.ones(()), AttachError, "no gradient passes from layer"),
        (AsDict, first, DataError, "a row for each image, and the model returned dict"),
        (AsTuple, first, DataError, r"a row for each image: 2 for 3 image\(s\)"),
    ],
)
def test_a_model_without_logits_says_what_it_needs(
    make: Callable[[], nn.Module], targets: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        sigcam.GradCAM(make(), ["vgg.features.4"])(images(), targets)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------- DualBranch


@pytest.mark.parametrize("name", ["GradCAM", "LayerCAM", "ScoreCAM"])
def test_a_dual_branch_is_explained_by_its_sigmoid_branch(name: str) -> None:
    net = attached(Vgg())
    cam = getattr(sigcam, name)(net)
    assert np.array_equal(cam(images()), explain(net, images(), cam.method).maps.numpy())
    assert np.array_equal(cam(images(), 1), explain(net, images(), cam.method, classes=1).maps.numpy())
    for branch in ("softmax", "centred", "sigmoid"):
        told = getattr(sigcam, name)(net, branch=branch)(images())
        assert np.array_equal(told, explain(net, images(), cam.method, branch=branch).maps.numpy())
    layer = net.model.get_submodule("features.1")
    expected = explain(net, images(), cam.method, layers=[layer]).maps.numpy()
    assert np.array_equal(getattr(sigcam, name)(net, [layer])(images()), expected)


def test_an_unfitted_branch_warns_and_a_bare_model_does_not() -> None:
    sigcam.GradCAM(vgg())(images())  # a warning would be an error
    with pytest.warns(UserWarning, match="not fitted, so these maps are noise"):
        sigcam.GradCAM(sigcam.attach(vgg()))(images())


# ----------------------------------------------------------------------------------------------- footprint


def test_with_reraises_the_index_error_that_the_peer_swallows(capsys: pytest.CaptureFixture[str]) -> None:
    model, layers, x = case("gap")
    with pgc.GradCAM(model, layers) as peer:
        maps = peer(x, outputs([99] * 3))
    assert "maps" not in locals()  # nothing was raised, and nothing assigned
    assert "An exception occurred in CAM" in capsys.readouterr().out
    with pytest.raises(DataError), sigcam.GradCAM(model, layers) as cam:
        maps = cam(x, outputs([99] * 3))
    with pytest.raises(IndexError), sigcam.GradCAM(model, layers) as cam:
        maps = cam(x, outputs([99] * 3, ClassifierOutputSoftmaxTarget))
    with pytest.raises(IndexError), sigcam.FinerCAM(model, layers):
        raise IndexError


@pytest.mark.parametrize("name", [*SAME, "ScoreCAM", "AblationCAM"])
def test_frozen_train_mode_and_no_grad_change_nothing_and_all_is_put_back(name: str) -> None:
    model, layers, x = case("vgg")
    expected = getattr(sigcam, name)(model, layers)(x)
    model.requires_grad_(False).train()
    model.get_submodule("features").eval()  # modes mixed
    with untouched(model):
        assert np.array_equal(getattr(sigcam, name)(model, layers)(x), expected)
        with torch.no_grad():
            assert np.array_equal(getattr(sigcam, name)(model, layers)(x), expected)
        with torch.inference_mode():
            assert np.array_equal(getattr(sigcam, name)(model, layers)(x), expected)
        with getattr(sigcam, name)(model, layers) as cam:
            assert np.array_equal(cam(x), expected)


def test_attributes_are_those_of_a_call_and_not_of_the_class() -> None:
    one, other = (sigcam.FinerCAM(gap(), base_method=base) for base in (pgc.XGradCAM, sigcam.HiResCAM))
    assert (one.method, other.method, sigcam.FinerCAM.method) == ("xgrad-cam", "hires-cam", "grad-cam")
    with pytest.raises(DataError, match="unknown method"):
        sigcam.FinerCAM(gap(), base_method=dict)
