"""The network with two heads: what its branch is made of, and the file it is kept in."""

import copy
import threading
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sigcam.core.config import FitConfig
from sigcam.core.errors import AttachError
from sigcam.network.attachment import attach
from sigcam.training.branch import fit
from support.tiny import Gap, InPlace, Normed, Probabilities, TwoHeads, Vgg, attached, easy_data, images

MODELS: list[Callable[[], nn.Module]] = [Gap, Vgg, Normed, InPlace, Probabilities, TwoHeads]


@pytest.fixture(scope="module")
def squeezenet() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.squeezenet1_1(num_classes=5)
    return model.eval()


@pytest.fixture(scope="module")
def convnext() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("convnext_atto", num_classes=5).eval()
    with torch.no_grad():
        for parameter in model.get_submodule("head.norm").parameters():
            parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def deit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, num_classes=5)
    return model.eval()


# -------------------------------------------------------------------------------------------- both branches


@given(st.sampled_from(MODELS), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_softmax_is_bit_equal_to_the_bare_model(
    make: Callable[..., nn.Module], batch: int, classes: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = make(classes).eval()
    net = attach(model, example=images(1))
    with torch.no_grad():
        expected = model(images(batch, seed))
    assert torch.equal(net(images(batch, seed)).softmax, expected)
    assert torch.equal(net.run(images(batch, seed), grad=True).softmax, expected)
    assert net(images(batch, seed)).sigmoid.shape == (batch, classes)


@pytest.mark.slow
def test_softmax_is_bit_equal_on_real_architectures(
    squeezenet: nn.Module, convnext: nn.Module, deit: nn.Module
) -> None:
    x = images(2, size=64)
    for model in (squeezenet, convnext, deit):
        net = attach(model, example=images(1, size=64))
        with torch.no_grad():
            assert torch.equal(net.run(x, grad=True).softmax, model(x))


@pytest.mark.parametrize("make", [Gap, Vgg, Normed, InPlace, TwoHeads])
def test_a_copied_branch_says_what_the_softmax_head_says(make: Callable[[], nn.Module]) -> None:
    net = attach(make(), example=images(1), init="copy")
    assert torch.equal(net(images()).sigmoid, net(images()).softmax)


def test_a_copied_branch_gives_the_logits_behind_probabilities() -> None:
    model = Probabilities().eval()
    net = attach(model, example=images(1), init="copy")
    out = net(images())
    assert torch.equal(out.sigmoid, Gap.forward(model, images()))
    assert torch.equal(out.sigmoid.softmax(1), out.softmax)


def test_a_copied_branch_of_a_distilled_deit_averages_its_two_heads(deit: nn.Module) -> None:
    net = attach(deit, example=images(1, size=64), init="copy")
    out = net(images(2, size=64))
    assert torch.equal(out.sigmoid, out.softmax)
    assert isinstance(net.head, tuple)
    assert out.pooled.shape == (2, 2 * 192)
    assert torch.allclose(net.sigmoid.from_pooled(out.pooled), out.sigmoid, atol=1e-6)


def test_a_fresh_branch_is_normal_with_std_a_hundredth_and_no_bias() -> None:
    net = attach(Gap(classes=500, channels=64), example=images(1))
    layer = net.last_layer("sigmoid")
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach()
    assert abs(float(weight.std()) - 0.01) < 2e-4
    assert abs(float(weight.mean())) < 2e-4
    assert not layer.bias.any()


def test_a_fresh_branch_depends_on_its_seed_and_not_on_the_global_one() -> None:
    model = Vgg()
    torch.manual_seed(1)
    first = attach(model, example=images(1), seed=5)
    torch.manual_seed(2)
    second, third = attach(model, example=images(1), seed=5), attach(model, example=images(1), seed=6)
    weights = [net.state_dict()["sigmoid.copies.0.0.weight"] for net in (first, second, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_branch_of_a_frozen_model_is_trainable_and_holds_no_gradient() -> None:
    model = Gap().requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    net = attach(model, example=images(1))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())


def test_normalisation_inside_the_head_keeps_trained_values_frozen(convnext: nn.Module) -> None:
    net = attach(convnext, example=images(1, size=64))
    trained, ours = convnext.get_submodule("head.norm"), net.sigmoid.copies[0].get_submodule("norm")
    for name, value in trained.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    assert frozen == ["sigmoid.copies.0.norm.weight", "sigmoid.copies.0.norm.bias"]


def test_pooled_is_what_enters_the_first_trainable_layer_after_the_norm(convnext: nn.Module) -> None:
    net = attach(convnext, example=images(1, size=64))
    seen: list[Tensor] = []
    last = convnext.get_submodule("head.fc")
    handle = last.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    out = net(images(2, size=64))
    handle.remove()
    assert torch.equal(out.pooled, seen[0])


@pytest.mark.parametrize("make", MODELS)
def test_running_from_pooled_gives_the_branch_logits(make: Callable[[], nn.Module]) -> None:
    net = attached(make())
    out = net(images(5))
    assert torch.allclose(net.sigmoid.from_pooled(out.pooled), out.sigmoid, atol=1e-6)


class Backwards(nn.Module):
    """A head that names its last layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.hidden = nn.Linear(5, 4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.hidden(x).tanh())
        return logits


class Parallel(nn.Module):
    """A head with two layers that both read its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.a(x) + self.b(x * x))
        return logits


@pytest.mark.parametrize("head", [Backwards, Parallel])
def test_pooled_is_what_decides_whatever_order_the_head_names_its_layers_in(
    head: Callable[[], nn.Module],
) -> None:
    class Model(Gap):
        def __init__(self) -> None:
            super().__init__()
            self.fc = head()  # type: ignore[assignment]

    net = attached(Model())
    out = net(images(5))
    assert out.pooled.shape == (5, 6)
    assert torch.equal(out.pooled, out.features.mean((2, 3)))
    assert torch.allclose(net.sigmoid.from_pooled(out.pooled), out.sigmoid, atol=1e-6)
    before = {name: value.clone() for name, value in net.named_parameters()}
    fit(net, easy_data(), FitConfig("paper", epochs=1))
    assert all(not torch.equal(value, before[name]) for name, value in net.named_parameters())


def test_a_relu_after_the_last_layer_is_left_out_of_the_branch(squeezenet: nn.Module) -> None:
    net = attach(squeezenet, example=images(1, size=64))
    out = net(images(4, size=64))
    assert (out.softmax >= 0).all()
    assert (out.sigmoid < 0).any()
    copied = attach(squeezenet, example=images(1, size=64), init="copy")
    last = squeezenet.get_submodule("classifier.1")
    expected = last(out.features).mean((2, 3))
    assert torch.allclose(copied(images(4, size=64)).sigmoid, expected, atol=1e-6)
    assert isinstance(squeezenet.get_submodule("classifier.2"), nn.ReLU)  # the user's own stays


def test_a_softmax_module_at_the_end_of_the_head_is_left_out_of_the_branch() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
        nn.Softmax(1),
    ).eval()
    net = attach(model, example=images(1), init="copy")
    out = net(images())
    assert (out.sigmoid < 0).any()
    assert torch.allclose(out.sigmoid.softmax(1), out.softmax, atol=1e-6)
    assert torch.equal(out.softmax, model(images()))


def test_the_users_hooks_on_the_head_do_not_fire_for_the_copy() -> None:
    model = Vgg()
    fired: list[str] = []
    lock = threading.Lock()  # cannot be copied, and need not be

    def hook(*_: object) -> None:
        with lock:
            fired.append("hook")

    model.classifier.register_forward_hook(hook)
    model.classifier[0].register_forward_pre_hook(hook)
    net = attach(model, example=images(1))
    fired.clear()
    out = net(images())
    assert len(fired) == 2  # once each, by the model itself
    net.sigmoid.from_pooled(out.pooled)
    assert len(fired) == 2


def test_the_users_hooks_on_the_layer_are_seen_in_the_features() -> None:
    model = Gap()
    model.body.register_forward_hook(lambda module, args, out: out + 1)
    net = attach(model, example=images(1))
    assert (net(images()).features >= 1).all()


def test_two_heads_combined_from_parts_of_one_output_are_followed() -> None:
    class Chunked(TwoHeads):
        def forward(self, x: Tensor) -> Tensor:
            pooled = self.body(x).mean((2, 3))
            both = torch.stack([self.fc(pooled), self.other(pooled)], 1)  # (B, 2, C)
            first, second = both.unbind(1)
            mean: Tensor = 0.25 * first + 0.75 * second
            return mean.view(len(x), 2, 2).reshape(len(x), 4)

    net = attach(Chunked(), example=images(1), init="copy")
    assert torch.allclose(net(images(5)).sigmoid, net(images(5)).softmax, atol=1e-7)


def test_heads_combined_with_other_values_are_refused_with_what_to_do() -> None:
    class Gated(TwoHeads):
        def forward(self, x: Tensor) -> Tensor:
            pooled = self.body(x).mean((2, 3))
            gate: Tensor = pooled[:, :4].sigmoid()
            mixed: Tensor = gate * self.fc(pooled) + (1 - gate) * self.other(pooled)
            return mixed

    with pytest.raises(AttachError, match="Name one head"):
        attach(Gated(), example=images(1))


def test_the_network_says_what_it_is() -> None:
    net = attach(Vgg(), example=images(1))
    assert repr(net) == "DualBranch(Vgg: layer='features.4', head='classifier', 4 classes, not fitted)"
    assert net.head is net.model.classifier
    assert net.layer is net.model.get_submodule("features.4")
    assert net.classes == 4


def test_attach_sees_through_wrappers() -> None:
    model = Gap()
    assert attach(nn.DataParallel(model), example=images(1)).model is model
    with pytest.raises(AttachError, match=r"needs a torch\.nn\.Module, not str"):
        attach("resnet50")  # type: ignore[arg-type]


def test_a_model_made_in_inference_mode_is_refused_with_what_to_do() -> None:
    with torch.inference_mode():
        model = Gap()
        with pytest.raises(
            AttachError, match=r"made inside torch\.inference_mode\(\).* a copy of it, outside"
        ):
            attach(model, example=images(1))
    net = attach(copy.deepcopy(model), example=images(1))
    with torch.no_grad():
        assert torch.equal(net(images()).softmax, model(images()))


def test_a_model_that_forbids_gradients_itself_is_explained_all_the_same() -> None:
    class Forbidding(Gap):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model, plain = Forbidding(), Gap()
    plain.load_state_dict(model.state_dict())
    net, other = attached(model), attached(plain)
    for branch in ("sigmoid", "softmax"):
        gradients = []
        for used in (net, other):
            forward_pass = used.run(images(), grad=True)
            logits = forward_pass.sigmoid if branch == "sigmoid" else forward_pass.softmax_logits
            gradients.append(torch.autograd.grad(logits[:, 1].sum(), forward_pass.cut)[0])
        assert torch.equal(gradients[0], gradients[1])


def test_running_from_pooled_works_after_moving_the_network(convnext: nn.Module) -> None:
    net = attach(copy.deepcopy(convnext), example=images(1, size=64)).to(torch.float64)
    out = net(images(2, size=64).double())
    assert torch.allclose(net.sigmoid.from_pooled(out.pooled), out.sigmoid)


def test_the_preprocessing_of_a_timm_model_follows_the_size_it_was_built_for() -> None:
    import timm

    net = attach(timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=3, depth=1))
    assert (net.transform.height, net.transform.width) == (96, 96)  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------- altered features


class Around(nn.Module):
    """A path around F keeps the batch's size; `how` joins it with what follows F."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.side = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU()), nn.Linear(3, 6)
        self.how, self.fc, self.batches = how, nn.Linear(12 if how == "joined" else 6, 4), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        pooled, side = self.body(x).mean((2, 3)), self.side(x.mean((2, 3)))
        if self.how == "joined":
            pooled = torch.cat([pooled, side], 1)
        elif self.how == "added":
            pooled = pooled + side
        logits: Tensor = self.fc(pooled).tanh()
        return logits.reshape(len(x), -1) if self.how == "sized" else logits


@pytest.mark.parametrize("how", ["plain", "added", "joined", "sized"])
def test_other_features_are_scored_as_if_the_model_had_made_them(how: str) -> None:
    model = Around(how).eval()
    net = attach(model, example=images(1), layer="body")
    forward_pass = net.run(images(3))
    variants = forward_pass.features[1] * torch.rand(5, 6, 1, 1)
    made = iter(variants)
    scores = [net.rescore(forward_pass, 1, variants[i : i + 1]).softmax for i in range(5)]
    handle = model.body.register_forward_hook(lambda *_: next(made)[None])
    expected = torch.cat([model(images(3)[1:2]) for _ in range(5)])
    handle.remove()
    model.batches.clear()
    torch.testing.assert_close(net.rescore(forward_pass, 1, variants).softmax, expected)
    torch.testing.assert_close(torch.cat(scores), expected)
    assert model.batches == ([1] if how in ("plain", "added") else [5])  # by then it is known


class Small(Gap):
    """A head that runs out of memory for more than three images."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.batches = error, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        features = self.body(x).tanh()
        if len(features) > 3:
            raise self.error
        logits: Tensor = self.fc(features.mean((2, 3)))
        return logits


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_what_runs_out_of_memory_is_not_run_again_with_more_images(error: Exception) -> None:
    model = Small(error).eval()
    net = attach(model, example=images(1))
    forward_pass = net.run(images(1))
    with pytest.raises(type(error)) as caught:
        net.rescore(forward_pass, 0, forward_pass.features.expand(8, -1, -1, -1))
    assert caught.value is error
    assert max(model.batches) < 3


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_attach_does_not_blame_the_model_for_a_lack_of_memory(error: Exception) -> None:
    class Large(Gap):
        def __deepcopy__(self, memo: object) -> None:
            raise error

    broken = Gap()
    broken.body.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))
    for work in (lambda: attach(broken), lambda: attach(Large(), optimize=True)):
        with pytest.raises(type(error)) as caught:
            work()
        assert caught.value is error
