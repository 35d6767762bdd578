"""Fitting the branch: the loss of Eq. 12, what data it takes, what it refuses, and that it learns."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from sigcam.data.readers.shapes import shapes
from sigcam.data.sample import Sample, Samples, match_classes
from sigcam.models.preprocess import Preprocess
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training.augmentation import RandomCropFlip
from sigcam.training.branch import FitResult, fit
from sigcam.training.features import Features
from sigcam.training.loss import as_targets, balanced_bce, pos_weights, positives_of
from sigcam.training.training_set import choose_held_out
from support.oracles import bce_code, bce_paper
from support.tiny import Gap, Normed, TwoHeads, Vgg, attached, easy_data, images

QUICK = FitConfig("paper", epochs=8, lr=0.05, batch_size=8)
GIVEN = FitConfig(l2=0.1, batch_size=8)


def fresh(model: nn.Module | None = None, **options: int) -> DualBranch:
    return attach(model or Gap(), example=images(1), **options)  # type: ignore[arg-type]


def weights(net: DualBranch) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -------------------------------------------------------------------------------------------- the loss


@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 999))
def test_the_loss_is_torchs_weighted_bce_and_the_papers_form(batch: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, classes, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(classes, (batch,), generator=generator)
    loss = balanced_bce(logits, labels)
    one_hot = nn.functional.one_hot(labels, classes).double()
    reference = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(classes - 1.0, dtype=torch.float64))
    assert torch.equal(loss, reference(logits, one_hot))
    assert float(loss) == pytest.approx(bce_paper(logits.numpy(), labels.numpy()), rel=1e-10)
    assert float(loss) == pytest.approx(bce_code(logits.numpy(), one_hot.numpy(), classes - 1), rel=1e-10)


@given(st.integers(1, 5), st.integers(2, 6), st.floats(0.1, 50), st.integers(0, 999))
def test_any_weight_and_multi_hot_labels_follow_the_formula(
    batch: int, classes: int, rho: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(2, (batch, classes), generator=generator)
    for kind in (targets, targets.double(), targets.bool()):
        loss = float(balanced_bce(logits, kind, rho))
        assert loss == pytest.approx(bce_code(logits.numpy(), targets.numpy(), rho), rel=1e-10)


@pytest.mark.parametrize(
    ("classes", "golden"), [(1000, 1.384908), (200, 1.379363), (196, 1.379221), (100, 1.372431)]
)
def test_the_loss_at_zero_logits_is_the_golden_one(classes: int, golden: float) -> None:
    loss = float(balanced_bce(torch.zeros(3, classes), torch.tensor([0, 5, classes - 1])))
    assert loss == pytest.approx(golden, abs=1e-6)
    assert loss == pytest.approx(2 * (1 - 1 / classes) * math.log(2), rel=1e-6)


@given(st.integers(1, 5), st.integers(2, 8), st.integers(0, 999))
def test_the_gradient_is_minus_rho_times_doubt_and_plus_belief(batch: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, classes, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(classes, (batch,), generator=generator)
    (gradient,) = torch.autograd.grad(balanced_bce(logits, labels), logits)
    for n in range(batch):
        for k in range(classes):
            s = float(logits.detach()[n, k].sigmoid())
            expected = -(classes - 1) * (1 - s) if k == labels[n] else s
            assert float(gradient[n, k]) == pytest.approx(expected / (batch * classes), rel=1e-9)


def test_one_logit_takes_labels_0_and_1_weighted_negatives_over_positives() -> None:
    logits, labels = torch.tensor([[0.3], [-1.0], [2.0], [0.5]]), torch.tensor([1, 0, 0, 0])
    expected = bce_code(logits.double().numpy(), labels[:, None].numpy(), 3.0)
    assert float(balanced_bce(logits, labels)) == pytest.approx(expected, rel=1e-6)
    assert float(balanced_bce(logits, labels[:, None])) == pytest.approx(expected, rel=1e-6)
    one_sided = balanced_bce(logits, torch.zeros(4, dtype=torch.long))
    assert torch.isfinite(one_sided)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (torch.tensor([0, 4]), "labels run from 0 to 4, the classifier's classes from 0 to 3"),
        (torch.tensor([-1, 2]), "labels run from -1 to 2"),
        (torch.tensor([0.5, 1.0]), "class indices"),
        (torch.tensor([float("nan"), 1.0]), "class indices"),
        (torch.tensor([[0, 1, 0, 2], [0, 0, 0, 1]]), "must be 0 or 1"),
        (torch.zeros(2, 3), r"not \(2, 3\)"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(labels: Tensor, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        balanced_bce(torch.zeros(2, 4), labels)


# ---------------------------------------------------------------------------------------------- learning


STEPS = FitConfig(epochs=40, lr=0.02, batch_size=8)
PAPER = FitConfig("paper", epochs=40, lr=0.02, batch_size=8)
CODE = FitConfig("paper-code", epochs=40, lr=0.05, batch_size=8, decay_every=30, weight_decay=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "config"),
    [
        *[(Gap, config) for config in (FitConfig(), FitConfig(views=2), GIVEN, PAPER, CODE)],
        *[(make, STEPS) for make in (Vgg, Normed, TwoHeads)],
        *[(make, replace(STEPS, views=2)) for make in (Vgg, Normed, TwoHeads)],
        (Normed, PAPER),
    ],
)
def test_the_loss_falls_and_the_branch_learns_while_softmax_stays(
    make: Callable[[], nn.Module], config: FitConfig
) -> None:
    net = fresh(make())
    before, state = net(images()).softmax, copy.deepcopy(net.model.state_dict())
    result = fit(net, easy_data(), config)
    assert len(result.losses) == 40 or config.recipe == "fast"
    assert result.losses[-1] < 0.75 * result.losses[0] or config.l2 == "auto"  # begun at a stronger one's end
    assert torch.equal(net(images()).softmax, before)
    assert all(torch.equal(state[name], tensor) for name, tensor in net.model.state_dict().items())
    x, labels = easy_data()[:]
    assert float((net(x).sigmoid.argmax(1) == labels).float().mean()) > 0.8
    assert net.fitted
    assert not net.sigmoid.training


@pytest.mark.slow
def test_a_convolution_head_is_solved_for_on_the_mean_of_its_maps() -> None:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1(num_classes=4)
    net = attach(model, example=images(1, size=64))
    x, labels = easy_data(12)[:]
    data = TensorDataset(nn.functional.interpolate(x, size=64), labels)
    result = fit(net, data, FitConfig(l2=1e-3))
    assert result.gradient is not None and result.gradient < 1e-8
    assert net(data[:][0]).pooled.ndim == 4
    assert (net(data[:][0]).sigmoid.argmax(1) == labels).float().mean() > 0.8


def test_a_two_head_transformer_learns_in_both_heads() -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=4)
    net = attach(model, example=images(1, size=32))
    before = weights(net)
    x, labels = easy_data(12)[:]
    data = TensorDataset(nn.functional.interpolate(x, size=32), labels)
    result = fit(net, data, FitConfig(epochs=15, lr=0.01, batch_size=6, holdout=0))
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert result.quality is None
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


def test_the_solved_branch_is_the_minimum_of_eq_12_and_the_penalty() -> None:
    model, l2 = Gap(), 0.03
    net = fresh(model)
    fit(net, easy_data(), FitConfig(l2=l2, views=2))
    x, labels = easy_data()[:]
    with torch.no_grad():
        views = [model.body(v).mean((2, 3)).half().double() for v in (x, x.flip(-1))]
    layer = net.last_layer("sigmoid")
    w, b = (layer.get_parameter(n).detach().double().requires_grad_() for n in ("weight", "bias"))
    loss = balanced_bce(torch.cat(views) @ w.T + b, labels.repeat(2)) + l2 * (w**2).sum() / 4
    slopes = torch.autograd.grad(loss, (w, b))
    assert float(torch.cat([slope.flatten() for slope in slopes]).norm()) < 1e-6  # the weights are float32


def test_the_papers_recipe_is_what_a_plain_loop_gives() -> None:
    model = Gap()
    net = fresh(model)
    x, labels = easy_data()[:]
    with torch.no_grad():
        pooled = model.body(x).mean((2, 3))
    layer = nn.Linear(6, 4)
    layer.load_state_dict(net.last_layer("sigmoid").state_dict())
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    loss_function = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))
    for _ in range(10):
        for chosen in torch.arange(24).split(8):
            optimizer.zero_grad()
            loss_function(layer(pooled[chosen]), nn.functional.one_hot(labels[chosen], 4).float()).backward()
            optimizer.step()
    result = fit(net, DataLoader(easy_data(), batch_size=8), FitConfig("paper"))
    assert len(result.losses) == 10
    assert torch.allclose(net.last_layer("sigmoid").weight, layer.weight, atol=1e-6)  # type: ignore[arg-type]


def test_the_papers_code_is_what_a_plain_loop_gives() -> None:
    net = fresh(Gap())
    x, labels = easy_data()[:]
    head = copy.deepcopy(net.sigmoid).train()
    own = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3)
    loss_function = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))
    torch.manual_seed(0)
    rates = []
    for epoch in range(1, 6):
        if epoch % 2 == 0:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        rates.append(optimizer.param_groups[0]["lr"])
        for chosen in torch.arange(24).split(8):
            optimizer.zero_grad()
            logits = head.from_pooled(net(x[chosen]).pooled.detach())
            loss_function(logits, nn.functional.one_hot(labels[chosen], 4).float()).backward()
            optimizer.step()
    assert rates == pytest.approx([0.02, 0.002, 0.002, 0.0002, 0.0002])
    config = FitConfig("paper-code", epochs=5, lr=0.02, decay_every=2, weight_decay=1e-3)
    fit(net, DataLoader(easy_data(), batch_size=8), config)
    for ours, theirs in zip(net.sigmoid.parameters(), head.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_statistics_of_the_batch_are_an_option_of_the_papers_code() -> None:
    model = Normed()
    nets = [fresh(model), fresh(model)]
    for net, kind in zip(nets, ("eval", "batch"), strict=True):
        config = replace(CODE, epochs=2, batch_norm=kind)  # type: ignore[arg-type]
        state = copy.deepcopy(model.state_dict())
        fit(net, DataLoader(easy_data(), batch_size=8), config)
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not same(weights(nets[0]), weights(nets[1]))


def test_the_papers_view_of_a_picture_is_a_random_crop_of_a_larger_one_mirrored_or_not() -> None:
    picture = Image.fromarray((np.mgrid[0:256, 0:256][1]).astype(np.uint8)).convert("RGB")
    plain = Preprocess(224, 224, mean=(0.0,) * 3, std=(1.0,) * 3)
    view, seen = RandomCropFlip(plain), set[tuple[int, bool]]()
    for _ in range(20):
        row = (view(picture)[0, 0] * 255).round()
        step = float(row[1] - row[0])
        assert view(picture).shape == (3, 224, 224)
        assert abs(step) == 1  # at 256 pixels, not enlarged
        seen.add((int(row.min()), step < 0))
    assert len({left for left, _ in seen}) > 5 and {flipped for _, flipped in seen} == {True, False}
    assert all(0 <= left <= 32 for left, _ in seen)


def test_the_same_seed_gives_the_same_branch_and_another_seed_another() -> None:
    model = Vgg()  # with dropout in the head
    nets = [fresh(model) for _ in range(3)]
    for number, (net, seed) in enumerate(zip(nets, (4, 4, 5), strict=True)):
        torch.manual_seed(number)
        fit(net, easy_data(), FitConfig(epochs=2, seed=seed))
    assert same(weights(nets[0]), weights(nets[1]))
    assert not same(weights(nets[0]), weights(nets[2]))


def test_a_shuffling_loader_gives_the_same_branch_whatever_the_global_seed() -> None:
    model = Gap()
    nets = [fresh(model), fresh(model)]
    for number, net in enumerate(nets):
        torch.manual_seed(number)
        fit(net, DataLoader(easy_data(), batch_size=8, shuffle=True), QUICK)
    assert same(weights(nets[0]), weights(nets[1]))


def test_dropout_inside_the_head_is_active_while_fitting_and_not_after() -> None:
    model, still = Vgg(), Vgg()
    still.load_state_dict(model.state_dict())
    dropout = still.classifier[2]
    assert isinstance(dropout, nn.Dropout)
    dropout.p = 0.0
    nets = [fresh(model), fresh(still)]
    for net in nets:
        fit(net, easy_data(), FitConfig(epochs=2))
    assert not same(weights(nets[0]), weights(nets[1]))
    assert torch.equal(nets[0](images()).sigmoid, nets[0](images()).sigmoid)


def test_the_positive_weight_moves_the_scores_of_positives_up() -> None:
    model = Gap()
    means = []
    for rho in (0.2, 20.0):
        net = fresh(model)
        result = fit(net, easy_data(), FitConfig(l2=0.01, pos_weight=rho))
        assert result.pos_weight == net.recipe["pos_weight"] == rho
        means.append(float(net(easy_data()[:][0]).sigmoid.detach().mean()))
    assert means[0] < means[1] - 1
    assert fit(fresh(model), easy_data(), GIVEN).pos_weight == 3.0


def test_one_logit_is_fitted_on_labels_0_and_1() -> None:
    x = images(20)
    labels = (torch.arange(20) % 4 == 0).long()
    x[labels == 1] += 2
    net = fresh(Gap(classes=1))
    result = fit(net, TensorDataset(x, labels), FitConfig(l2=1e-3))
    assert result.pos_weight == 3.0
    assert result.label_counts == (15, 5)
    assert torch.equal(net(x).sigmoid[:, 0] > 0, labels == 1)
    with pytest.raises(DataError, match="labels run from 0 to 2, the classifier's classes from 0 to 1"):
        fit(net, TensorDataset(x, torch.arange(20) % 3), QUICK)


def test_multi_hot_labels_are_fitted() -> None:
    x, labels = easy_data()[:]
    many = nn.functional.one_hot(labels, 4)
    many[:, 0] = 1
    net = fresh()
    result = fit(net, TensorDataset(x, many), FitConfig(l2=1e-3))
    assert result.label_counts == (24, 6, 6, 6)
    assert (net(x).sigmoid[:, 0] > 0).all()


# ------------------------------------------------------------------------------------------- kinds of data


def as_tensor(picture: Image.Image) -> Tensor:
    pixels = np.asarray(picture.convert("RGB").resize((16, 16)), dtype=np.float32)
    return torch.from_numpy(pixels / 128 - 1).permute(2, 0, 1)


def colour(value: int) -> Image.Image:
    return Image.new("RGB", (20, 20), (value, 255 - value, 128))


def unreadable(name: str) -> Image.Image:
    raise DataError(f"{name} cannot be decoded.")


def samples(count: int = 12, classes: tuple[str, ...] = ("a", "b", "c", "d")) -> Samples:
    kinds = len(classes)
    return Samples(
        tuple(Sample(f"{i}.png", partial(colour, 60 * (i % kinds)), i % kinds) for i in range(count)), classes
    )


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Items without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = easy_data()
        yield from (data[i] for i in range(len(data)))


def test_samples_datasets_loaders_lists_and_streams_give_one_branch() -> None:
    model, data = Gap(), easy_data()
    kinds: list[object] = [
        data,
        DataLoader(data, batch_size=8),
        DataLoader(data, batch_size=5),
        [data[i] for i in range(len(data))],
        Stream(),
        DataLoader(Stream(), batch_size=8),
    ]
    nets = [fresh(model) for _ in kinds]
    for net, kind in zip(nets, kinds, strict=True):
        assert fit(net, kind, GIVEN).images == 24  # type: ignore[arg-type]
    for net in nets[1:]:
        assert torch.allclose(weights(net)[0], weights(nets[0])[0], atol=1e-5)


def test_samples_are_fitted_with_the_networks_transform_or_a_given_one() -> None:
    net = fresh()
    with pytest.raises(DataError, match=r"set net\.transform, or fit\(\.\.\., transform=\.\.\.\)"):
        fit(net, samples(), GIVEN)
    result = fit(net, samples(), GIVEN, transform=as_tensor)
    assert (result.images, result.label_counts, result.skipped) == (12, (3, 3, 3, 3), ())
    assert net.class_names == ("a", "b", "c", "d")
    other = fresh(net.model)
    other.transform = as_tensor
    fit(other, samples(), GIVEN)
    assert same(weights(net), weights(other))


def test_the_synthetic_birds_can_be_fitted() -> None:
    net = attach(Gap(classes=8), example=images(1))
    result = fit(net, shapes(16, size=32), GIVEN, transform=as_tensor)
    assert result.images == 16
    assert net.class_names is not None
    assert net.class_names[0] == "crested barred forktail"


def test_unreadable_samples_are_named_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    good = samples()
    broken = Sample("broken.jpg", partial(unreadable, "broken.jpg"), 1)
    data = Samples((*good.items[:5], broken, *good.items[5:]), good.classes)
    net, plain = fresh(), fresh()
    plain.sigmoid.load_state_dict(net.sigmoid.state_dict())
    with caplog.at_level(logging.WARNING, "sigcam"):
        result = fit(net, data, GIVEN, transform=as_tensor)
    assert result.skipped == (("broken.jpg", "broken.jpg cannot be decoded."),)
    assert result.images == 12
    assert "1 file(s) could not be read and were left out, the first: broken.jpg" in caplog.text


def test_a_class_without_images_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    x, labels = easy_data(12, classes=2)[:]
    with caplog.at_level(logging.WARNING, "sigcam"):
        result = fit(fresh(), TensorDataset(x, labels), GIVEN)
    assert result.label_counts == (6, 6, 0, 0)
    assert "2 of 4 classes have no image" in caplog.text


def test_progress_counts_up_in_each_stage_to_its_total() -> None:
    told: list[tuple[str, int, int]] = []
    fit(fresh(), easy_data(), FitConfig(batch_size=8), progress=lambda *step: told.append(step))
    assert [step for step in told if step[0] == "features"] == [("features", n, 24) for n in (0, 8, 16, 24)]
    assert [stage for stage in dict.fromkeys(stage for stage, _, _ in told)] == [
        "features",
        "penalty",
        "training",
    ]
    for stage in ("features", "penalty", "training"):
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    told.clear()
    fit(fresh(), easy_data(), QUICK, progress=lambda *step: told.append(step))
    assert [step for step in told if step[0] == "epoch 8"] == [("epoch 8", n, 24) for n in (8, 16, 24)]
    told.clear()
    fit(fresh(), Stream(), GIVEN, progress=lambda *step: told.append(step))
    assert all(done <= total for _, done, total in told)


def test_the_result_and_the_recipe_say_what_was_done() -> None:
    net = fresh()
    result = fit(net, easy_data(), FitConfig())
    assert isinstance(result, FitResult)
    assert set(result.seconds) == {"features", "penalty", "training"}
    assert net.recipe["recipe"] == "fast"
    assert net.recipe["images"] == 24
    assert net.recipe["final_loss"] == result.losses[-1]
    assert net.recipe["l2"] == result.l2 in [l2 for l2, _ in result.search]
    assert result.quality is not None
    assert result.quality.images == 4  # one of six of each class
    assert len(result.quality.average_precision) == len(result.positive_share) == 4
    layer = net.last_layer("sigmoid").get_parameter("weight")
    assert result.positive_share == pytest.approx((layer > 0).float().mean(1).tolist())
    assert fit(net, easy_data(), GIVEN).search == ()


# ------------------------------------------------------------------------------- penalty, prior, negatives


def test_the_search_takes_the_strongest_penalty_within_an_error_of_the_best() -> None:
    net = fresh()
    result = fit(net, easy_data(48), FitConfig())
    scores = dict(result.search)
    assert max(scores.values()) - scores[result.l2] <= 0.5
    one = fresh(net.model)
    fit(one, easy_data(48), FitConfig(l2=result.l2))
    assert torch.allclose(weights(one)[0], weights(net)[0], atol=1e-5)


def test_held_out_images_are_a_share_of_every_class_and_none_is_emptied() -> None:
    labels = torch.tensor([0] * 10 + [1] * 5 + [2] * 2 + [3])
    held = choose_held_out(labels, FitConfig())
    assert [int(held[labels == k].sum()) for k in range(4)] == [2, 1, 1, 0]
    assert torch.equal(held, choose_held_out(labels, FitConfig()))
    assert not torch.equal(held, choose_held_out(labels, FitConfig(seed=1)))
    assert not choose_held_out(labels, FitConfig(holdout=0)).any()


def test_quality_is_of_a_branch_that_did_not_see_the_images() -> None:
    x, _ = easy_data(40)[:]
    noise = torch.randint(4, (40,), generator=torch.Generator().manual_seed(0))
    result = fit(fresh(Gap(channels=64)), TensorDataset(x, noise), FitConfig(l2=1e-4))
    assert result.quality is not None
    assert result.quality.mean_average_precision < 0.7  # by heart it would be 1
    assert repr(result).startswith("FitResult(40 images, 4 classes, mean AP 0.") and len(repr(result)) < 100


def test_the_softmax_prior_is_what_a_strong_penalty_leaves() -> None:
    net = fresh()
    fit(net, easy_data(), FitConfig(l2=1e5, prior="softmax"))
    softmax = net.last_layer("softmax").get_parameter("weight").detach()
    assert torch.allclose(weights(net)[0], softmax - softmax.mean(0), atol=1e-4)
    with pytest.raises(DataError, match="prior='softmax' is for linear heads"):
        fit(fresh(Vgg()), easy_data(), FitConfig(prior="softmax"))


def test_negatives_lower_the_scores_of_what_shows_no_class(tmp_path: Path) -> None:
    other = TensorDataset(images(16) * 3 - 2, torch.zeros(16))
    model = Gap()
    plain, taught, heavy, features = (fresh(model) for _ in range(4))
    fit(plain, easy_data(), GIVEN)
    fit(taught, easy_data(), GIVEN, negatives=other)
    result = fit(heavy, easy_data(), replace(GIVEN, negatives_weight=5.0), negatives=other)
    means = [float(net(other[:][0]).sigmoid.detach().mean()) for net in (plain, taught, heavy)]
    assert means[0] > means[1] > means[2]
    assert result.images == 24
    pooled = taught(other[:][0]).pooled.detach()
    fit(features, easy_data(), GIVEN, negatives=Features((pooled,), torch.full((16,), -1)))
    assert torch.allclose(weights(features)[0], weights(taught)[0], atol=1e-4)
    for i in range(3):
        colour(50 * i).save(tmp_path / f"{i}.png")
    fit(fresh(), samples(), GIVEN, transform=as_tensor, negatives=tmp_path)
    with pytest.raises(DataError, match="negatives are for recipe fast"):
        fit(fresh(), easy_data(), QUICK, negatives=other)


def test_features_can_be_fitted_on_alone() -> None:
    model = Gap()
    net, other = fresh(model), fresh(model)
    x, labels = easy_data()[:]
    fit(net, easy_data(), GIVEN)
    fit(other, Features((net(x).pooled.detach(),), labels), GIVEN)
    assert torch.allclose(weights(net)[0], weights(other)[0], atol=1e-6)
    for broken, sentence in (
        (Features((torch.zeros(24, 5),), labels), r"features must be \('n', 6\)"),
        (Features((torch.zeros(23, 6),), labels), "23 features with 24 labels"),
        (Features((torch.full((24, 6), torch.nan),), labels), "not finite"),
        (Features((torch.zeros(24, 6),), labels + 1), "labels run from 1 to 4"),
    ):
        with pytest.raises(DataError, match=sentence):
            fit(other, broken, GIVEN)


def test_a_fit_on_features_passes_the_backbone_once() -> None:
    net, passes = fresh(), list[int]()
    x, labels = easy_data()[:]
    features = Features((net(x).pooled.detach(),), labels)
    with torch.no_grad():
        net.model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    fit(net, features, GIVEN, negatives=features)
    assert passes == [1]  # the example image, for the shape of what enters the head


def test_weights_of_positives_by_number_by_classes_and_by_counts() -> None:
    positives = positives_of(torch.tensor([0, 0, 0, 1, 2, 2]), 4)
    assert (
        positives.tolist()
        == positives_of(as_targets(torch.tensor([0, 0, 0, 1, 2, 2]), 4), 4).tolist()
        == [3, 1, 2, 0]
    )
    assert pos_weights("balanced", positives, 6).tolist() == [3, 3, 3, 3]
    assert pos_weights(2.5, positives, 6).tolist() == [2.5] * 4
    assert pos_weights("counts", positives, 6).tolist() == [1, 5, 2, 1]
    net = fresh()
    result = fit(net, TensorDataset(*easy_data()[:]), replace(GIVEN, pos_weight="counts"))
    assert result.pos_weight == 3.0  # all alike: one number
    uneven = TensorDataset(easy_data()[:][0], torch.tensor([0] * 12 + [1] * 6 + [2] * 4 + [3] * 2))
    assert fit(net, uneven, replace(GIVEN, pos_weight="counts")).pos_weight == (1.0, 3.0, 5.0, 11.0)


def test_calibrated_scores_are_shifted_by_the_weight_and_say_so() -> None:
    model = Gap()
    plain, moved = fresh(model), fresh(model)
    fit(plain, easy_data(), GIVEN)
    fit(moved, easy_data(), replace(GIVEN, calibrate=True))
    x = images(3)
    assert torch.allclose(moved(x).sigmoid + math.log(3), plain(x).sigmoid, atol=1e-5)
    assert moved.recipe["calibrate"] is True


def test_very_uneven_classes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    labels = torch.tensor([0] * 22 + [1, 2])
    with caplog.at_level(logging.WARNING, "sigcam"):
        fit(fresh(), TensorDataset(easy_data()[:][0], labels), GIVEN)
    assert "classes have from 1 to 22 images; pos_weight='counts'" in caplog.text


# -------------------------------------------------------------------------------------------------- classes


def test_classes_match_by_name_in_any_order() -> None:
    net = fresh()
    net.class_names = ("d", "c", "b", "a")
    moved = match_classes(samples(), net.classes, net.class_names)
    assert [sample.label for sample in moved[:4]] == [3, 2, 1, 0]
    assert [sample.id for sample in moved] == [sample.id for sample in samples()]
    fit(net, samples(), QUICK, transform=as_tensor)
    assert net.class_names == ("d", "c", "b", "a")


def test_a_part_of_the_classes_matches_by_name() -> None:
    moved = match_classes(samples(4, ("d", "b")), 4, ("a", "b", "c", "d"))
    assert [sample.label for sample in moved] == [3, 1, 3, 1]
    assert moved.classes == ("a", "b", "c", "d")


def test_classes_match_by_order_when_the_counts_agree() -> None:
    data = samples()
    assert match_classes(data, 4, None) is data
    assert match_classes(data, 4, ("w", "x", "y", "z")) is data
    assert match_classes(samples(4, ("no", "yes")), 1, None).classes == ("no", "yes")


def test_classes_that_differ_in_spelling_alone_match() -> None:
    data = samples(8, ("Tiger_Shark", "crane_n02012849", "hen", "crane_n03126707"))
    assert match_classes(data, 4, ("tiger shark", "crane bird", "hen", "crane")) is data
    with pytest.raises(DataError, match="1 of 4 class names"):
        match_classes(samples(8, ("a", "b", "c", "elk")), 4, ("a", "b", "c", "dog"))


def test_classes_that_do_not_match_are_refused_with_both_counts() -> None:
    with pytest.raises(
        DataError, match=r"the data has 3 classes \(x, y, z, \.\.\.\), the classifier 4"
    ) as caught:
        match_classes(samples(6, ("x", "y", "z")), 4, ("a", "b", "c", "d"))
    assert "(a, b, c, ...)" in str(caught.value)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------- bad input


def broken_image() -> TensorDataset:
    x, labels = easy_data()[:]
    x[10] = float("nan")
    return TensorDataset(x, labels)


class Items(Dataset[object]):
    def __init__(self, item: object) -> None:
        self.item = item

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> object:
        return self.item


X, NAMES = torch.zeros(3, 16, 16), ("a", "b", "c", "d")
NO_LABEL = Sample("x.png", partial(colour, 1))
UNREADABLE = Sample("x.png", partial(unreadable, "x.png"), 0)


def one_label_short(items: list[object]) -> tuple[Tensor, Tensor]:
    return torch.stack([X, X]), torch.tensor([0])


BAD: dict[str, tuple[object, str]] = {
    "label too high": (TensorDataset(images(4), torch.tensor([0, 1, 2, 4])), "labels run from 0 to 4"),
    "label negative": (TensorDataset(images(4), torch.tensor([0, 1, 2, -1])), "labels run from -1 to 2"),
    "one class": (TensorDataset(images(4), torch.full((4,), 2)), "all 4 images show one class"),
    "empty": (TensorDataset(images(4)[:0], torch.zeros(0, dtype=torch.long)), "there are no images"),
    "empty list": ([], "there are no images"),
    "nan": (broken_image(), "features are not finite among images 8 to 15"),
    "images alone": (TensorDataset(images(4)), r"must yield \(images, labels\)"),
    "a tensor alone": (Items(X), r"must yield \(images, labels\), not Tensor"),
    "a dict": (Items({"image": X, "label": 0}), r"must yield \(images, labels\), not dict"),
    "names as labels": (Items((X, "owl")), r"labels must be numbers, not \('owl', 'owl'"),
    "flat images": (Items((X[0], 0)), r"images as \(B, C, H, W\) tensors, not \(4, 16, 16\)"),
    "fewer labels": (DataLoader(Items(0), collate_fn=one_label_short), "2 images with 1 label"),
    "single items": (DataLoader(Items((X, 0)), batch_size=None), r"not \(3, 16, 16\)"),
    "a number": (5, "fit takes Samples, a torch Dataset or a DataLoader, not int"),
    "unlabelled": (Samples((NO_LABEL,), NAMES), "labelled"),
    "sample label negative": ([Sample("x.png", partial(colour, 1), -1)], r"image x\.png has label -1"),
    "unreadable": (Samples((UNREADABLE,), NAMES), "none of 1 could be read, the first: x.png cannot be"),
    "no samples": (Samples((), NAMES), "there are no images"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_data_is_refused_in_one_line_and_the_branch_stays(what: str) -> None:
    data, sentence = BAD[what]
    net = fresh()
    before = weights(net)
    with pytest.raises(DataError, match=sentence) as caught:
        fit(net, data, GIVEN, transform=as_tensor)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert same(weights(net), before)
    assert not net.fitted


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "epochs and batch_size must be 1 or more, views 1 or 2"),
    ({"batch_size": 0}, "epochs and batch_size must be 1 or more"),
    ({"views": 3}, "views 1 or 2"),
    ({"recipe": "slow"}, "recipe must be fast, paper or paper-code"),
    ({"epochs": 3}, "solved for exactly, without epochs or lr"),
    ({"lr": 0.1}, "solved for exactly, without epochs or lr"),
    ({"l2": 0}, "needs an l2 above 0"),
    ({"l2": -1.0}, "l2 must be 'auto' or a number"),
    ({"l2": "much"}, "l2 must be 'auto' or a number"),
    ({"pos_weight": 0}, "pos_weight must be above 0"),
    ({"holdout": 0.9}, "holdout must be from 0 to 0.5"),
    ({"recipe": "paper", "batch_norm": "batch"}, "batch with recipe paper-code"),
    ({"recipe": "paper", "lr": -1.0}, "lr must be above 0"),
    ({"recipe": "paper", "prior": "softmax"}, "prior='softmax' is for linear heads"),
]


@pytest.mark.parametrize(("given", "sentence"), SETTINGS)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        fit(fresh(), easy_data(), FitConfig(**given))


def test_training_that_diverges_is_refused_and_undone() -> None:
    net = attached(Vgg())
    before = weights(net)
    with pytest.raises(DataError, match="diverged at lr=1e\\+30"):
        fit(net, easy_data(), FitConfig(epochs=5, lr=1e30))
    assert same(weights(net), before)


def test_a_refit_starts_from_where_the_branch_is() -> None:
    net = fresh()
    first = fit(net, easy_data(), QUICK).losses
    second = fit(net, easy_data(), QUICK).losses
    assert second[0] < first[0]


@pytest.mark.slow
def test_a_half_precision_model_is_fitted_in_full_precision_and_stays_half() -> None:
    torch.manual_seed(0)
    net = attach(Gap().bfloat16(), example=images(1).bfloat16())
    slow = FitConfig("paper", epochs=60, lr=1e-4, batch_size=8)  # steps too small for 8 bits of mantissa
    before = weights(net)
    result = fit(net, easy_data(), slow)
    assert all(parameter.dtype == torch.bfloat16 for parameter in net.parameters())
    assert result.losses[-1] < result.losses[0] and not same(before, weights(net))
    falls = [a > b for a, b in zip(result.losses, result.losses[1:], strict=False)]
    assert sum(falls) > 55
