"""Every formula of docs/mathematics.md and docs/faq.md, with numbers. Some are tested for any size and seed
elsewhere:

Eq. 8-9 shifts      test_explaining: test_a_shifted_column_keeps_probabilities_and_moves_the_map_by_...
Eq. 10 collapse     test_explaining: test_a_large_negative_shift_blanks_the_softmax_map_and_no_other
Eq. 12 loss         test_fitting: test_the_loss_is_torchs_weighted_bce_and_the_papers_form
loss at the start   test_fitting: test_the_loss_at_zero_logits_is_the_golden_one
one minimum         test_solving: test_a_start_changes_the_way_and_not_the_answer
raw maps add up     test_explaining: test_the_mean_of_a_raw_map_plus_the_bias_is_the_logit
calibration         test_fitting: test_calibrated_scores_are_shifted_by_the_weight_and_say_so
"""

import math

import pytest
import torch
from torch import Tensor, nn

from sigcam.methods.explainer import explain
from sigcam.methods.explanation import Explanation
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch
from sigcam.training.loss import balanced_bce
from support.tiny import Gap, attached, images

SHIFTED: tuple[tuple[Branch, str], ...] = (
    ("softmax", "probability"),
    ("centred", "class"),
    ("centred", "probability"),
    ("softmax", "finer-cam"),
)


def gap(classes: int = 5, channels: int = 7) -> DualBranch:
    torch.manual_seed(3)
    return attached(Gap(classes, channels)).double()


def raw(net: DualBranch, method: str = "cam", **options: object) -> Explanation:
    how = {"branch": "softmax", "classes": 1, "scale": "raw", "size": "features"} | options
    return explain(net, images(4).double(), method, **how)  # type: ignore[arg-type]


def last(net: DualBranch) -> nn.Linear:
    layer = net.last_layer("softmax")
    assert isinstance(layer, nn.Linear)
    return layer


# ---------------------------------------------------------------------------------------- softmax and shifts


def test_adding_one_number_to_all_logits_leaves_softmax_and_moves_sigmoid() -> None:
    logits = torch.tensor([2.0, 1.0, 0.2, -0.8], dtype=torch.float64)
    assert torch.allclose((logits - 4).softmax(0), logits.softmax(0), rtol=1e-12)
    assert (((logits - 4).sigmoid() - logits.sigmoid()).abs() > 0.2).all()


def test_the_gradient_of_cross_entropy_sums_to_zero_over_classes() -> None:
    features = torch.rand(9, 7, dtype=torch.float64)
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(9) % 5
    logits = features @ weight.T
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), weight)
    formula = (logits.softmax(1) - nn.functional.one_hot(labels, 5)).detach().T @ features / 9
    assert torch.allclose(gradient, formula, atol=1e-14)
    assert gradient.sum(0).abs().max() < 1e-14
    (balanced,) = torch.autograd.grad(balanced_bce(features @ weight.T, labels), weight)
    assert balanced.sum(0).abs().max() > 1e-3  # the sigmoid branch's loss sees the shift


@pytest.mark.parametrize(
    ("optimiser", "stays"), [(torch.optim.SGD, True), (torch.optim.Adam, False)], ids=["sgd", "adam"]
)
def test_plain_steps_leave_the_mean_over_classes_where_it_was_and_adams_do_not(
    optimiser: type[torch.optim.SGD | torch.optim.Adam], stays: bool
) -> None:
    torch.manual_seed(0)
    features, labels = torch.rand(60, 7, dtype=torch.float64), torch.arange(60) % 5
    head = nn.Linear(7, 5).double()
    before = head.weight.detach().mean(0)
    steps = optimiser(head.parameters(), lr=0.1)
    for _ in range(50):
        steps.zero_grad()
        nn.functional.cross_entropy(head(features), labels).backward()
        steps.step()
    assert torch.allclose(head.weight.detach().mean(0), before, atol=1e-12) is stays


@pytest.mark.parametrize(("branch", "target"), SHIFTED)
def test_what_is_called_shift_proof_is(branch: Branch, target: str) -> None:
    net = gap()
    before, plain = raw(net, branch=branch, target=target).maps, raw(net).maps
    with torch.no_grad():
        last(net).weight.add_(torch.linspace(-4, 4, 7, dtype=torch.float64))
    assert torch.allclose(raw(net, branch=branch, target=target).maps, before, atol=1e-7)  # finer-cam: 1e-9
    assert (raw(net).maps - plain).abs().max() > 0.1  # the softmax logit's is not


def test_centring_keeps_probabilities_and_its_maps_add_up_to_zero_over_classes() -> None:
    net = gap()
    maps = raw(net, branch="centred", classes="all").maps
    assert maps.sum(1).abs().max() < 1e-12
    before = net(images(4).double()).softmax.softmax(1)
    with torch.no_grad():
        last(net).weight.sub_(last(net).weight.mean(0))
    assert torch.allclose(net(images(4).double()).softmax.softmax(1), before, atol=1e-12)
    assert torch.allclose(raw(net, classes="all").maps, maps, atol=1e-12)


def test_the_difference_of_two_maps_is_the_log_of_the_ratio_of_their_probabilities() -> None:
    net, bias = gap(), last(gap()).bias.detach()
    a, b = raw(net, classes=1), raw(net, classes=4)
    ratio = (a.probability / b.probability).log()
    assert torch.allclose((a.maps - b.maps).mean((1, 2)) + bias[1] - bias[4], ratio, atol=1e-12)


# ------------------------------------------------------------------------------------------ the balanced loss


@pytest.mark.parametrize(("share", "classes"), [(0.125, 8), (0.5, 8), (0.01, 8), (0.005, 200)])
def test_the_loss_is_smallest_where_the_odds_are_the_weight_times_the_odds_of_the_share(
    share: float, classes: int
) -> None:
    weight = classes - 1
    score = weight * share / (weight * share + 1 - share)
    logit = torch.tensor(math.log(score / (1 - score)), dtype=torch.float64, requires_grad=True)
    yes, no = torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)
    (slope,) = torch.autograd.grad(-(weight * share * yes + (1 - share) * no), logit)
    assert abs(float(slope)) < 1e-12
    assert (abs(score - 0.5) < 1e-12) is (share == 1 / classes)
    assert float((logit.detach() - math.log(weight)).sigmoid()) == pytest.approx(
        share, rel=1e-12
    )  # calibrated


# ------------------------------------------------------------------------------------- clamping and gradients


def test_a_map_is_what_positive_weights_give_and_what_negative_ones_do() -> None:
    net = gap()
    signed, kept = (raw(net, branch="sigmoid", clamp=clamp).maps for clamp in (False, True))
    features = net(images(4).double()).features
    weight = net.last_layer("sigmoid").get_parameter("weight").detach()[1]
    negative = (weight.clamp(max=0)[:, None, None] * features).sum(1)
    assert torch.allclose(signed, kept + negative, atol=1e-12)
    assert (kept >= signed.relu() - 1e-12).all() and (kept > signed.relu() + 1e-6).any()
    assert (kept >= 0).all() and (negative <= 0).all()


@pytest.mark.parametrize("method", ["grad-cam", "xgrad-cam", "hires-cam"])
def test_methods_that_are_said_to_coincide_do(method: str) -> None:
    cells = net_cells(net := gap())
    assert torch.allclose(raw(net, method).maps, raw(net).maps, atol=1e-5)  # xgrad-cam's 1e-7
    features = net(images(4).double()).features.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(last(net)(features.mean((2, 3)))[:, 1].sum(), features)
    assert torch.allclose(gradient, (last(net).weight[1] / cells)[None, :, None, None], atol=1e-15)


def test_layer_cam_is_the_clamped_cam_and_two_methods_are_others() -> None:
    net = gap()
    clamped = raw(net, clamp=True).maps
    assert torch.allclose(raw(net, "layer-cam").maps, clamped, atol=1e-12)
    for method in ("grad-cam++", "ablation-cam"):
        maps = raw(net, method).maps
        for other in (raw(net).maps, clamped):
            assert not alike(maps, other).allclose(torch.ones(4, dtype=torch.float64), atol=1e-6)


def test_ablation_cams_weight_is_what_the_logit_loses_over_its_size() -> None:
    net = gap()
    ex, features = raw(net, "ablation-cam"), net(images(4).double()).features
    lost = last(net).weight.detach()[1] * features.mean((2, 3)) / ex.logits.abs()[:, None]
    assert torch.allclose(ex.maps, (lost[:, :, None, None] * features).sum(1), atol=1e-9)


def test_a_probabilitys_gradient_is_the_class_against_what_else_is_thought() -> None:
    net = gap()
    ex, all_maps = raw(net, "grad-cam", target="probability"), raw(net, classes="all").maps
    p = net(images(4).double()).softmax.softmax(1)
    formula = p[:, 1, None, None] * (all_maps[:, 1] - (p[:, :, None, None] * all_maps).sum(1))
    assert torch.allclose(ex.maps, formula, atol=1e-12)


def test_a_sure_networks_probability_map_fades_and_its_logit_map_does_not() -> None:
    net = gap()
    with torch.no_grad():
        last(net).bias[1] += 20
    sure = raw(net, "grad-cam", target="probability")
    assert (sure.probability > 1 - 1e-6).all()
    assert sure.maps.abs().max() < 1e-6 * raw(net).maps.abs().max()
    with torch.no_grad():
        last(net).bias[1] += 980  # 1 - p is 0 in any precision
    blank = explain(net, images(4).double(), branch="softmax", classes=1, target="probability")
    assert blank.blank.all() and "is blank" in blank.notes[0]


@pytest.mark.parametrize("method", ["grad-cam", "xgrad-cam", "layer-cam", "hires-cam"])
def test_the_sigmoids_score_has_the_map_of_its_logit(method: str) -> None:
    net, x = gap(), images(4).double()
    logit, score = (explain(net, x, method, target=target).maps for target in ("class", "probability"))
    assert torch.allclose(logit, score, atol=1e-5)


def net_cells(net: DualBranch) -> int:
    return net(images(1).double()).features[0, 0].numel()


def alike(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.cosine_similarity(a.flatten(1), b.flatten(1))
