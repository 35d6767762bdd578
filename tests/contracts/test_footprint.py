"""Attaching, fitting and explaining change nothing in the user's model; they work wherever it works."""

import copy
import gc
import pickle
import resource
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sigcam.core.config import FitConfig
from sigcam.methods.explainer import explain
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training.branch import fit
from support.tiny import (
    Failing,
    Gap,
    InPlace,
    Normed,
    OnPlace,
    Probabilities,
    TwoHeads,
    Vgg,
    attached,
    easy_data,
    images,
    untouched,
)

MODELS: list[Callable[[], nn.Module]] = [Gap, Vgg, Normed, InPlace, OnPlace, Probabilities, TwoHeads]
QUICK = FitConfig("paper", epochs=3, batch_size=8)


def bare(model: nn.Module, x: Tensor) -> Tensor:
    """What the model itself says in eval mode, from a copy so that nothing is set on it."""
    twin = copy.deepcopy(model).eval()
    with torch.inference_mode(False), torch.no_grad():
        out: Tensor = twin(x.clone())
    return out


def test_a_model_that_works_in_place_changes_neither_images_nor_features() -> None:
    model = OnPlace().eval()
    net = attached(model)
    model.greedy = True
    with torch.inference_mode():
        inside = images()
    for x in (images(), inside):
        features = model.body(images() - 0.1)
        for forward_pass in (net.run(x), net.run(x, grad=True)):
            assert torch.equal(forward_pass.features, features)
            assert torch.equal(forward_pass.softmax, bare(model, images()))
        explain(net, x)
        assert torch.equal(x, images())


def mix_up(model: nn.Module) -> nn.Module:
    """Modes, requires_grad, gradients and hooks of every kind."""
    for number, module in enumerate(model.modules()):
        module.training = number % 2 == 0
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
        if number % 2:
            parameter.grad = torch.full_like(parameter, 0.25)
    last = list(model.modules())[-1]
    last.register_forward_hook(lambda module, args, out: None)
    last.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    last.register_full_backward_hook(lambda module, grads, out: None)
    return model


@pytest.mark.parametrize("make", MODELS)
def test_attach_fit_and_explain_leave_the_model_as_it_was(make: Callable[[], nn.Module]) -> None:
    model = mix_up(make())
    with untouched(model):
        net = attach(model, example=images(1))
        fit(net, easy_data(), QUICK)
        net(images())
        for branch in ("sigmoid", "softmax", "centred"):
            explain(net, images(), branch=branch)


@pytest.mark.parametrize("make", MODELS)
def test_softmax_is_bit_equal_to_the_bare_model_whatever_its_modes(make: Callable[[], nn.Module]) -> None:
    model = mix_up(make())
    net = attached(model)
    assert torch.equal(net(images()).softmax, bare(model, images()))
    assert torch.equal(net.run(images(), grad=True).softmax, bare(model, images()))


def test_fit_with_a_shuffling_loader_leaves_random_numbers_alone() -> None:
    net = attached(Gap())
    with untouched(net.model):
        fit(net, DataLoader(easy_data(), batch_size=8, shuffle=True), QUICK)


def test_everything_works_with_all_parameters_frozen() -> None:
    model = Vgg().requires_grad_(False)
    with untouched(model):
        net = attach(model, example=images(1))
        losses = fit(net, easy_data(), QUICK).losses
        assert losses[-1] < losses[0]
        for branch in ("sigmoid", "softmax"):
            assert not explain(net, images(), branch=branch, scale="raw").blank.any()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", MODELS)
def test_results_do_not_depend_on_gradient_modes(
    make: Callable[[], nn.Module], context: Callable[[], AbstractContextManager[None]]
) -> None:
    model, config = make().eval(), FitConfig("paper", epochs=2, batch_size=8)

    def work() -> list[Tensor]:
        net = attach(model, example=images(1))
        fit(net, easy_data(), config)
        out, ex = net(images()), explain(net, images())
        return [out.softmax, out.sigmoid.detach(), ex.maps, ex.probability, ex.evidence]

    outside = work()
    with context(), untouched(model):
        inside = work()
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert not any(tensor.is_inference() for tensor in inside[:2])


def test_images_made_in_inference_mode_can_be_explained_outside() -> None:
    net = attached(Gap())
    with torch.inference_mode():
        x = images()
    assert x.is_inference()
    assert torch.equal(explain(net, x).maps, explain(net, images()).maps)


def test_gradients_of_the_branch_reach_a_users_own_loss() -> None:
    net = attached(Gap())
    net(images()).sigmoid.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert all(parameter.grad is None for parameter in net.model.parameters())


def test_train_mode_trains_the_branch_on_eval_mode_features() -> None:
    model = Normed().train()
    net, quiet = attach(model, example=images(1)), attach(copy.deepcopy(model).eval(), example=images(1))
    with untouched(model):
        fit(net, easy_data(), QUICK)
    fit(quiet, easy_data(), QUICK)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), quiet.parameters(), strict=True))
    assert all(module.training for module in model.modules())


def test_a_frozen_batch_norm_inside_the_head_copy_stays_frozen_while_fitting() -> None:
    net = attached(Normed())
    norm = net.get_submodule("sigmoid.copies.0.1")
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    fit(net, easy_data(), QUICK)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    net.train()
    assert not norm.training
    assert net.get_submodule("sigmoid.copies.0.3").training  # dropout follows


@pytest.mark.parametrize("make", [Vgg, InPlace], ids=["module", "function"])
def test_features_are_what_an_in_place_relu_has_read_or_made_not_overwritten(
    make: Callable[[], nn.Module],
) -> None:
    model = make().eval()
    net = attached(model)
    forward_pass = net.run(images(), grad=True)
    again = net.run(images())
    assert torch.equal(forward_pass.features, again.features)
    assert (forward_pass.features >= 0).all()
    assert forward_pass.features.std() > 0
    assert torch.equal(forward_pass.softmax, bare(model, images()))


# ---------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("make", MODELS)
def test_bf16_autocast_keeps_softmax_bits_and_gives_float32_maps(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    net = attached(model)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            expected = model(images())
        assert expected.dtype == torch.bfloat16 or isinstance(model, Probabilities)
        assert torch.equal(net(images()).softmax, expected)
        ex = explain(net, images())
    assert ex.maps.dtype == torch.float32
    plain = explain(net, images(), classes=ex.classes)
    assert (ex.maps - plain.maps).abs().max() < 0.15


class SelfCasting(Vgg):
    """Switches autocast on inside its own forward, as accelerate makes models do."""

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_model_that_switches_autocast_on_itself_is_attached_fitted_and_explained() -> None:
    model = SelfCasting().eval()
    with untouched(model):
        net = attach(model, example=images(1))
        losses = fit(net, easy_data(), QUICK).losses
        assert losses[-1] < losses[0]
        assert torch.equal(net(images()).softmax, bare(model, images()))
        assert net(images()).sigmoid.dtype == torch.float32
        for branch in ("sigmoid", "softmax", "centred"):
            assert not explain(net, images(), branch=branch, scale="raw").blank.any()


def test_attaching_under_autocast_gives_the_same_branch() -> None:
    model = Gap()
    with torch.autocast("cpu", torch.bfloat16):
        inside = attach(model, example=images(1))
    outside = attach(model, example=images(1))
    assert inside.split.heads == outside.split.heads
    assert inside.linear == outside.linear
    assert torch.equal(inside(images()).sigmoid, outside(images()).sigmoid)


def test_fitting_under_autocast_learns_and_the_next_pass_sees_it() -> None:
    net = attach(Gap(), example=images(1))
    with torch.autocast("cpu", torch.bfloat16):
        before = net(images()).sigmoid.float()
        losses = fit(net, easy_data(), FitConfig("paper", epochs=20, lr=0.05, batch_size=8)).losses
        after = net(images()).sigmoid.float()
    assert losses[-1] < 0.7 * losses[0]
    assert (after - before).abs().max() > 0.1
    assert (after - net(images()).sigmoid).abs().max() < 0.1


def test_a_users_training_step_in_the_same_autocast_still_gets_gradients() -> None:
    model = Gap()
    net = attached(model)
    with torch.autocast("cpu", torch.bfloat16):
        explain(net, images())
        model(images()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ------------------------------------------------------------------------------------------- flat memory


@pytest.mark.slow
def test_a_thousand_explanations_leave_no_tensor_no_hook_and_no_memory_behind() -> None:
    net = attached(Vgg())
    x = images(2, size=16)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for _ in range(50):
        explain(net, x)
    tensors, peak = live(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with untouched(net.model):
        for _ in range(1000):
            explain(net, x)
    assert live() == tensors
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / (
        2**20 if sys.platform == "darwin" else 2**10
    )
    assert grown < 16  # MB; one leaked graph per call would be some 60


@pytest.mark.slow
def test_an_explanation_is_freed_without_the_garbage_collector() -> None:
    net = attached(Vgg())
    gc.collect()
    gc.disable()
    try:
        forward_pass = net.run(images(), grad=True)
        watched = weakref.ref(forward_pass.cut)
        del forward_pass
        assert watched() is None
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------- exceptions


class Breakable(nn.Module):
    """A trunk and a head that can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU())
        self.early = Failing()
        self.head = nn.Sequential(Failing(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.early(self.body(x).mean((2, 3))))
        return logits


@pytest.mark.parametrize("place", ["early", "head.0"])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_error_inside_the_model_passes_through_and_leaves_nothing_behind(
    place: str, error: BaseException
) -> None:
    model = mix_up(Breakable())
    net = attached(model)
    part = model.get_submodule(place)
    assert isinstance(part, Failing)
    part.broken = error
    for work in (lambda: net(images()), lambda: explain(net, images()), lambda: fit(net, easy_data(), QUICK)):
        with untouched(model), pytest.raises(type(error)):
            work()
    part.broken = None
    assert torch.equal(net(images()).softmax, bare(model, images()))


def test_an_error_while_attaching_leaves_nothing_behind() -> None:
    model = mix_up(Breakable())
    assert isinstance(model.early, Failing)
    model.early.broken = ValueError("broken")
    with untouched(model), pytest.raises(Exception, match="broken"):
        attach(model, example=images(1))


def test_an_error_in_the_branch_or_in_a_target_leaves_nothing_behind() -> None:
    model = mix_up(Breakable())
    net = attached(model)

    def target(logits: Tensor, classes: Tensor) -> Tensor:
        raise ZeroDivisionError

    with untouched(model), pytest.raises(ZeroDivisionError):
        explain(net, images(), target=target)
    copied = net.get_submodule("sigmoid.copies.0.0")
    assert isinstance(copied, Failing)
    copied.broken = ValueError("in the branch")
    with untouched(model), untouched(net.sigmoid), pytest.raises(ValueError, match="in the branch"):
        explain(net, images())


def test_a_module_renamed_after_attaching_leaves_no_hook_behind() -> None:
    model = Gap()
    net = attached(model)
    model.classifier = model.fc
    del model.fc
    with untouched(model), pytest.raises(AttributeError):
        net(images())


class Broken(Dataset[tuple[Tensor, int]]):
    """Eleven good items, then an error."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.good = error, easy_data()

    def __len__(self) -> int:
        return len(self.good)

    def __getitem__(self, index: int) -> Any:
        if index > 10:
            raise self.error
        return self.good[index]


@pytest.mark.parametrize("error", [ValueError("unreadable"), KeyboardInterrupt()])
def test_an_error_inside_a_dataset_leaves_model_and_branch_as_they_were(error: BaseException) -> None:
    model = mix_up(Normed())
    net = attach(model, example=images(1))
    with untouched(model), untouched(net.sigmoid), pytest.raises(type(error)):
        fit(net, Broken(error), QUICK)
    assert not net.fitted


def test_an_interrupt_in_the_middle_of_training_leaves_the_branch_as_it_was() -> None:
    model = mix_up(Vgg())
    net = attach(model, example=images(1))
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "epoch 2" and done == 16:
            raise KeyboardInterrupt

    with untouched(model), untouched(net.sigmoid), pytest.raises(KeyboardInterrupt):
        fit(net, easy_data(), QUICK, progress=progress)
    assert not net.fitted
    assert net.recipe == {}
    fit(net, easy_data(), QUICK)  # which the interrupted one would have changed, too
    assert any(not torch.equal(value, before[name]) for name, value in net.state_dict().items())


# ------------------------------------------------------------------------------------------------ threads


def in_threads(*works: Callable[[], None]) -> None:
    """Runs all at once and raises what any of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("make", [Vgg, InPlace, TwoHeads])
def test_threads_that_share_a_network_a_model_and_a_branch_get_right_answers(
    make: Callable[[], nn.Module],
) -> None:
    model = make().eval()
    net, other = attached(model), attached(model, seed=1)
    batches = [images(2, seed) for seed in range(4)]
    with torch.no_grad():
        plain = [model(x) for x in batches]
    outs, maps = [net(x) for x in batches], [explain(net, x).maps for x in batches]

    def network(used: DualBranch) -> Callable[[], None]:
        def work() -> None:
            for _ in range(10):
                for x, out in zip(batches, outs, strict=True):
                    got = used(x)
                    assert torch.equal(got.softmax, out.softmax)
                    assert torch.equal(got.sigmoid, out.sigmoid)
                    assert torch.equal(got.pooled, out.pooled)

        return work

    def explaining() -> None:
        for _ in range(5):
            for x, expected in zip(batches, maps, strict=True):
                assert torch.equal(explain(net, x).maps, expected)

    def bare_model() -> None:
        for _ in range(30):
            for x, expected in zip(batches, plain, strict=True):
                with torch.no_grad():
                    assert torch.equal(model(x), expected)
                assert model(x).requires_grad

    with untouched(model):
        in_threads(network(net), network(other), network(net), explaining, bare_model)


def test_explaining_goes_on_while_another_thread_fits_another_branch() -> None:
    model = Vgg().eval()
    net, learner = attached(model), attach(model, example=images(1))
    expected = explain(net, images()).maps
    alone = attach(model, example=images(1))
    fit(alone, easy_data(), QUICK)

    def explaining() -> None:
        for _ in range(20):
            assert torch.equal(explain(net, images()).maps, expected)

    def fitting() -> None:
        fit(learner, easy_data(), QUICK)

    in_threads(explaining, fitting)
    assert all(torch.equal(a, b) for a, b in zip(learner.parameters(), alone.parameters(), strict=True))


def test_two_networks_around_one_model_do_not_see_each_other() -> None:
    model = Vgg()
    first, second = attach(model, example=images(1)), attach(model, example=images(1), seed=1)
    before = second(images()).sigmoid
    fit(first, easy_data(), QUICK)
    assert torch.equal(second(images()).sigmoid, before)
    assert first.model is second.model
    assert not second.fitted


# ---------------------------------------------------------------------------------- what the network holds


def test_train_reaches_only_the_branch() -> None:
    model = Vgg().eval()
    net = attached(model)
    net.train()
    assert net.get_submodule("sigmoid.copies.0.2").training
    assert not any(module.training for module in model.modules())
    model.train()
    net.eval()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("make", MODELS)
def test_parameters_and_state_hold_only_the_branch(make: Callable[[], nn.Module]) -> None:
    net = attached(make())
    own = {id(tensor) for tensor in (*net.model.parameters(), *net.model.buffers())}
    assert not own & {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
    assert all(name.startswith("sigmoid.copies.") for name in net.state_dict())
    assert net.model not in list(net.modules())


def test_a_transform_that_is_a_module_is_not_registered() -> None:
    net = attached(Gap())
    net.transform = nn.Linear(2, 2)
    assert "transform" not in dict(net.named_modules())
    assert not any(name.startswith("transform") for name in net.state_dict())


def test_a_layer_called_transform_is_not_taken_for_preprocessing() -> None:
    class Odd(Gap):
        def __init__(self) -> None:
            super().__init__()
            self.transform = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.transform(x))

    assert attach(Odd(), example=images(1)).transform is None


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_and_pickles_answer_alike_and_share_nothing(
    make: Callable[[], nn.Module], twin: Callable[[DualBranch], DualBranch]
) -> None:
    net = attached(make())
    net.class_names = ("a", "b", "c", "d")
    other = twin(net)
    assert torch.equal(other(images()).softmax, net(images()).softmax)
    assert torch.equal(other(images()).sigmoid, net(images()).sigmoid)
    assert torch.equal(explain(other, images()).maps, explain(net, images()).maps)
    assert other.fitted
    assert other.class_names == net.class_names
    assert other.model is not net.model
    fit(other, easy_data(), QUICK)
    assert not torch.equal(other(images()).sigmoid, net(images()).sigmoid)


@pytest.mark.parametrize("make", MODELS)
def test_moving_the_network_moves_model_and_branch(make: Callable[[], nn.Module]) -> None:
    net = attached(make()).to(torch.float64)
    x = images().double()
    assert all(p.dtype == torch.float64 for p in (*net.parameters(), *net.model.parameters()))
    assert net(x).softmax.dtype == net(x).sigmoid.dtype == torch.float64
    inputs, labels = easy_data()[:]
    fit(net, TensorDataset(inputs.double(), labels), QUICK)
    assert explain(net, x).maps.dtype == torch.float64
