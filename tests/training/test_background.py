"""Background evidence: which cells are background, what enters the head, and what the branch learns of it."""

import logging
from dataclasses import replace

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sigcam.core.config import FitConfig
from sigcam.core.errors import ConfigError
from sigcam.network.attachment import attach
from sigcam.training.background import MIN_CELLS, background_cells, background_inputs, class_maps, classes_of
from sigcam.training.branch import fit
from sigcam.training.contrast import CONTRAST_TOLERANCE
from sigcam.training.features import Features, extract
from sigcam.training.selection import choose_background
from support.folders import CLASSES, network, tree
from support.patches import Mlp, empty, patch_network, patches
from support.tiny import Gap, images

BACKGROUND = FitConfig(l2=1e-3, background=1.0)


def cells_by_loop(maps: Tensor, threshold: float) -> list[tuple[int, int]]:
    """The background cells of one (P, Q) map, from the definition."""
    low, high = float(maps.min()), float(maps.max())
    every = [(p, q) for p in range(maps.shape[0]) for q in range(maps.shape[1])]
    found = [at for at in every if high > low and (float(maps[at]) - low) / (high - low) < threshold]
    return found if len(found) >= MIN_CELLS else []


@pytest.mark.parametrize("threshold", [0.2, 0.35, 0.5])
def test_background_of_a_linear_head_is_the_mean_over_its_cells(threshold: float) -> None:
    net = patch_network()
    x, labels = patches(12)[:]
    forward, index = net.run(x), labels[:, None]
    inputs = background_inputs(net, forward, index, FitConfig(background_threshold=threshold))
    weight = net.model.fc.weight.detach()
    for i in range(12):
        positive = weight[labels[i]].clamp(min=0)[:, None, None]
        cells = cells_by_loop((positive * forward.features[i]).sum(0), threshold)
        assert cells
        mean = torch.stack([forward.features[i, :, p, q] for p, q in cells]).mean(0)
        assert torch.allclose(inputs[i], mean, atol=1e-5)


def test_background_of_any_head_is_what_its_own_tail_makes_of_the_altered_features() -> None:
    net = patch_network(Mlp)
    assert not net.linear
    x, labels = patches(6)[:]
    forward, index = net.run(x, grad=True), labels[:, None]
    inputs = background_inputs(net, forward, index, FitConfig())
    cells = background_cells(class_maps(net, forward, index), index, 0.35)
    assert cells.any((1, 2)).all()
    altered = forward.features.detach().clone()
    for i in range(6):
        altered[i][:, ~cells[i]] = altered[i][:, cells[i]].mean(1, keepdim=True)
    expected = nn.functional.avg_pool2d(altered, 2).flatten(1)
    assert torch.allclose(inputs, expected, atol=1e-5)


def test_gradients_and_weights_give_the_same_cells_where_the_head_is_linear() -> None:
    net = patch_network()
    x, labels = patches(8)[:]
    forward, index = net.run(x, grad=True), labels[:, None]
    by_weight = class_maps(net, forward, index)
    net.linear = frozenset()
    by_gradient = class_maps(net, forward, index)
    cells = net.run(x).features[0, 0].numel()
    assert torch.allclose(by_gradient * cells, by_weight, rtol=1e-4, atol=1e-5)


def test_several_classes_leave_only_what_none_of_them_shows() -> None:
    maps = torch.zeros(1, 2, 3, 3)
    maps[0, 0, 0], maps[0, 1, 2] = 1.0, 5.0
    both = background_cells(maps, torch.tensor([[0, 1]]), 0.35)
    assert not both.any()  # three cells are too few
    one = background_cells(maps, torch.tensor([[0, -1]]), 0.35)
    assert one[0].tolist() == [[False] * 3, [True] * 3, [True] * 3]
    assert not background_cells(maps, torch.tensor([[-1, -1]]), 0.35).any()
    assert not background_cells(torch.ones(1, 1, 4, 4), torch.tensor([[0]]), 0.35).any()  # a blank map


def test_classes_of_labels_of_every_kind() -> None:
    assert classes_of(torch.tensor([2, 0]), 3).tolist() == [[2], [0]]
    assert classes_of(torch.tensor([1, 0]), 1).tolist() == [
        [0],
        [-1],
    ]  # one logit: shown or not
    many = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]])
    assert [sorted(row) for row in classes_of(many, 3).tolist()] == [[1, 2], [-1, -1], [-1, 0]]


def test_without_background_the_fit_is_the_papers_bit_for_bit() -> None:
    plain, zero = patch_network(), patch_network()
    fit(plain, patches(120), FitConfig(l2=1e-3, background=0))
    features = extract(zero, patches(120), FitConfig())
    assert features.backgrounds == ()
    fit(zero, features, FitConfig(l2=1e-3, background=0.0))
    for a, b in zip(plain.sigmoid.parameters(), zero.sigmoid.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_solved_branch_is_the_minimum_of_images_and_weighted_backgrounds() -> None:
    net, w = patch_network(), 2.0
    data = patches(100)
    result = fit(net, data, FitConfig(l2=0.03, background=w))
    features = extract(net, data, FitConfig(), backgrounds=True)
    image, alone = features.views[0].double(), features.backgrounds[0].double()
    assert result.background == w and bool(alone.isfinite().all())
    layer = net.last_layer("sigmoid")
    weight, bias = (layer.get_parameter(n).detach().double().requires_grad_() for n in ("weight", "bias"))
    targets = nn.functional.one_hot(data[:][1], 4).double()
    pos = torch.tensor(3.0, dtype=torch.float64)
    bce = nn.BCEWithLogitsLoss(pos_weight=pos, reduction="sum")
    loss = bce(image @ weight.T + bias, targets)
    loss = loss + w * bce(alone @ weight.T + bias, torch.zeros(100, 4, dtype=torch.float64))
    loss = loss / 100 / 4 + 0.03 * (weight**2).sum() / 4  # backgrounds add to the loss of images
    slopes = torch.autograd.grad(loss, (weight, bias))
    assert float(torch.cat([slope.flatten() for slope in slopes]).norm()) < 1e-6


@pytest.mark.parametrize("make", [Gap, Mlp])
def test_background_teaches_the_branch_when_nothing_is_there(make: type[Gap]) -> None:
    config = replace(BACKGROUND, l2="auto", batch_size=16, lr=0.01 if make is Mlp else None)
    with_it, without = patch_network(make), patch_network(make)
    before = with_it(empty()).softmax
    fit(with_it, patches(), config)
    fit(without, patches(), replace(config, background=0))
    assert torch.equal(with_it(empty()).softmax, before)
    x, labels = patches(80, seed=5)[:]
    shown = with_it.evidence(with_it(x).sigmoid).gather(1, labels[:, None]) > 0.5
    alarms = [(net.evidence(net(empty()).sigmoid).amax(1) > 0.5).float().mean() for net in (with_it, without)]
    assert shown.float().mean() > 0.9
    assert alarms[0] < 0.05
    assert alarms[0] <= alarms[1]


@pytest.mark.parametrize("make", [Gap, Mlp])
@pytest.mark.parametrize("background", ["auto", 1.0])
def test_softmax_logits_and_the_classifier_stay_bit_for_bit(make: type[Gap], background: object) -> None:
    zooms = (1.0, 2.0) if make is Gap else (1.0,)  # the other takes one size only
    net, config = patch_network(make), replace(BACKGROUND, l2="auto", zooms=zooms, batch_size=16)
    net.model.zero_grad()  # of its own training
    x = torch.cat([patches(40, seed=9)[:][0], empty(10)])
    before, bare = net(x).softmax.clone(), net.model(x).detach().clone()
    weights = {name: tensor.clone() for name, tensor in net.model.state_dict().items()}
    branch = [parameter.detach().clone() for parameter in net.sigmoid.parameters()]
    fit(net, patches(), replace(config, background=background))  # type: ignore[arg-type]
    assert torch.equal(net(x).softmax, before) and torch.equal(net.model(x), bare)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.model.state_dict().items())
    assert all(parameter.grad is None for parameter in net.model.parameters())
    assert not any(map(torch.equal, branch, (each.detach() for each in net.sigmoid.parameters())))


def test_the_strongest_weight_within_an_error_is_chosen() -> None:
    plain = torch.tensor([0.8, 0.9, 0.7, 0.8])  # the standard error is 0.041
    scores = {3.0: plain - 0.05, 1.0: plain - 0.03}
    weight, found, tried = choose_background(plain, lambda w: (f"with {w:g}", scores[w]), None)
    assert (weight, found) == (1.0, "with 1")
    assert [w for w, _ in tried] == [0.0, 3.0, 1.0]
    weight, found, tried = choose_background(plain, lambda w: ("", plain - 0.04), None)
    assert weight == 3.0 and len(tried) == 2
    weight, found, _ = choose_background(plain, lambda w: ("", plain - 0.1), None)
    assert (weight, found) == (0.0, None)


def test_auto_chooses_on_held_out_images_and_says_what_it_cost() -> None:
    net = patch_network()
    result = fit(net, patches(), FitConfig(l2=1e-3, background="auto"))
    assert result.background == 3.0
    assert [weight for weight, _ in result.background_search] == [0.0, 3.0]
    assert net.recipe["background"] == 3.0
    given = patch_network()
    fit(given, patches(), FitConfig(l2=1e-3, background=3.0))
    for a, b in zip(net.sigmoid.parameters(), given.sigmoid.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)
    assert given.calibration.maps.keys() == net.calibration.maps.keys() == {1.0}
    few = patch_network()
    assert (
        fit(few, patches(120), FitConfig(l2=1e-3, background="auto")).background == 0
    )  # 24 held-out images are too few


def test_images_without_background_give_none_and_are_counted() -> None:
    net = patch_network()
    x, labels = patches(100)[:]
    x[:10] = 0.0
    with torch.no_grad():
        net.model.body[0].bias.clamp_(min=0.1)
    result = fit(net, TensorDataset(x, labels), BACKGROUND)
    flat = [i for i in range(100) if float(net.run(x[i : i + 1]).features.std((2, 3)).max()) < 1e-6]
    assert result.without_background >= len(flat)


def test_one_logit_and_multi_hot_labels_learn_from_backgrounds() -> None:
    x, labels = patches(160)[:]
    many = nn.functional.one_hot(labels, 4)
    many[::3, 0] = 1
    several = patch_network()
    result = fit(several, TensorDataset(x, many), BACKGROUND)
    assert result.background == 1.0 and several.calibration.maps
    torch.manual_seed(0)
    one = attach(Gap(classes=1), example=images(1))
    result = fit(one, TensorDataset(x, (labels == 0).long()), BACKGROUND)
    assert result.without_background >= 120  # images that do not show the class have no background of it


def test_a_class_token_has_seen_the_object_and_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=4)
    net = attach(model, example=images(1, size=32))
    data = TensorDataset(images(260, size=32), torch.arange(260) % 4)
    with pytest.raises(ConfigError, match="class or register tokens, which have seen the whole image"):
        fit(net, data, BACKGROUND)
    with caplog.at_level(logging.WARNING, "sigcam"):
        assert fit(net, data, FitConfig(l2=0.1, background="auto")).background == 0
    assert "fitted without background evidence" in caplog.text


def test_features_without_backgrounds_are_refused_only_if_asked_for() -> None:
    net = patch_network()
    features = Features((net(patches(300)[:][0]).pooled.detach(),), patches(300)[:][1])
    assert fit(net, features, FitConfig(l2=0.1, background="auto")).background == 0
    with pytest.raises(ConfigError, match="computed before have no backgrounds: use background=0"):
        fit(net, features, BACKGROUND)
    with pytest.raises(ConfigError, match="give images instead of features"):
        fit(net, features, FitConfig(zooms=(1.0, 2.0), background="auto"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"background": -1.0}, "background must be 'auto' or a number, 0 or more"),
        ({"background": float("nan")}, "background must be"),
        ({"background_threshold": 0.0}, "background_threshold must be between 0 and 1"),
        ({"background_threshold": 1.5}, "background_threshold must be between 0 and 1"),
        ({"recipe": "paper", "background": 1.0}, "background is for recipe fast"),
        ({"zooms": ()}, "zooms must be numbers of 1 or more"),
        ({"zooms": (0.5,)}, "zooms must be numbers of 1 or more"),
        ({"zooms": (1.0, 2.0), "background": 0}, "zooms are calibrated with backgrounds"),
        ({"calibrate": True, "background": 1.0}, "calibrate is for fits without background"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fit(patch_network(), patches(40), FitConfig(**settings))  # type: ignore[arg-type]


def test_backgrounds_are_cached_beside_the_images_and_follow_the_labels(tmp_path) -> None:  # type: ignore[no-untyped-def]
    samples, root = tree(tmp_path / "data"), tmp_path / "cache"
    seen = list[int]()

    def fitted(data) -> Tensor:  # type: ignore[no-untyped-def]
        net = network()
        run = net.run_at
        seen.clear()

        def counted(points, images, **options):  # type: ignore[no-untyped-def]
            seen.append(len(images))
            return run(points, images, **options)

        net.run_at = counted  # type: ignore[method-assign]
        fit(net, data, replace(BACKGROUND, l2=0.1), cache=root)
        return net.last_layer("sigmoid").get_parameter("weight").detach().clone()

    first = fitted(samples)
    passes = sum(seen)
    assert passes >= len(samples)
    assert torch.equal(fitted(samples), first)
    assert sum(seen) < passes - len(samples) + 10  # all features were there
    items = [
        replace(sample, label=(sample.label + 1) % 4) if i < 10 else sample
        for i, sample in enumerate(samples)
    ]
    relabelled = replace(samples, items=tuple(items))
    assert relabelled.classes == CLASSES
    fresh = network()
    fit(fresh, relabelled, replace(BACKGROUND, l2=0.1))
    changed = fitted(relabelled)
    assert torch.allclose(changed, fresh.last_layer("sigmoid").get_parameter("weight"), atol=1e-6)


def test_the_contrast_is_the_minimum_of_a_softmax_with_a_background_class() -> None:
    net, data = patch_network(), patches(100)
    config = FitConfig(l2=0.1, background=3.0, loss="background-softmax")
    result = fit(net, data, config)
    assert result.gradient is not None and result.gradient < 1e-4
    features = extract(net, data, FitConfig(), backgrounds=True)
    x = torch.cat([features.views[0], features.backgrounds[0]]).double()
    targets = torch.cat([data[:][1], torch.full((100,), 4)])
    weights = torch.cat([torch.ones(100), torch.full((100,), 3.0)]).double()
    layer = nn.Linear(6, 5).double()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    for step in range(6000):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.999**step
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(layer(x), targets, reduction="none")
        ((weights * loss).sum() / 100 + 0.1 / 4 * (layer.weight**2).sum()).backward()
        optimizer.step()
    expected = (layer.weight[:4] - layer.weight[4]).detach()
    # A gradient of at most CONTRAST_TOLERANCE in each of 35 places, over the curvature of the penalty.
    bound = CONTRAST_TOLERANCE * 35**0.5 / (2 * 0.1 / 4 * 100 / 400)
    assert bound < 0.01
    assert torch.allclose(
        net.last_layer("sigmoid").get_parameter("weight").double(), expected, rtol=0, atol=bound
    )
    assert net.calibration.maps


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"background": "auto"}, "needs a weight of backgrounds"),
        ({"background": 3.0, "recipe": "paper"}, "recipe fast"),
    ],
)
def test_a_contrast_that_cannot_be_fitted_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fit(patch_network(), patches(40), FitConfig(loss="background-softmax", **settings))  # type: ignore[arg-type]
