"""OneDnnLinear: the product, and both gradients, of torch's own layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sigcam import attach, explain
from sigcam.network import linear
from sigcam.network.linear import OneDnnLinear, constant_weights, use_onednn
from support.tiny import Vgg, images

MULTIPLY = linear._Product.forward


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs of oneDNN's products from here on."""
    seen = list[tuple[int, ...]]()

    def counted(ctx: object, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(input.shape))
        return MULTIPLY(ctx, input, weight, bias)

    monkeypatch.setattr(linear._Product, "forward", staticmethod(counted))
    return seen


def layers(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """The same layer twice, once through oneDNN."""
    torch.manual_seed(0)
    plain, fast = nn.Linear(1024, 1024, bias=bias), nn.Linear(1024, 1024, bias=bias)
    fast.load_state_dict(plain.state_dict())
    use_onednn(nn.ModuleList([fast]))
    assert type(fast) is OneDnnLinear
    return plain, fast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1024), (8, 1024), (2, 3, 1024)])
def test_products_and_gradients_of_inputs_are_torchs(
    bias: bool, shape: tuple[int, ...], products: list[tuple[int, ...]]
) -> None:
    plain, fast = layers(bias)
    first = torch.randn(shape, requires_grad=True)
    second = first.detach().clone().requires_grad_()
    with constant_weights():
        out = fast(second)
    expected = plain(first)
    assert torch.allclose(out, expected, atol=1e-5)
    weights = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad((expected * weights).tanh().sum(), first, create_graph=True)
    (found,) = torch.autograd.grad((out * weights).tanh().sum(), second, create_graph=True)
    assert torch.allclose(found, wanted, atol=1e-5)
    (wanted,) = torch.autograd.grad(wanted.square().sum(), first)
    (found,) = torch.autograd.grad(found.square().sum(), second)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert len(products) >= 3 and products[0] == shape


def test_where_weights_are_trained_the_layer_is_torchs(products: list[tuple[int, ...]]) -> None:
    plain, fast = layers()
    x = torch.randn(4, 1024)
    plain(x).square().sum().backward()
    fast(x).square().sum().backward()
    assert not products
    assert torch.equal(plain.weight.grad, fast.weight.grad) and torch.equal(plain.bias.grad, fast.bias.grad)


def test_other_types_small_layers_and_autocast_are_left_to_torch(products: list[tuple[int, ...]]) -> None:
    small = nn.Sequential(nn.Linear(8, 8))
    use_onednn(small)
    assert type(small[0]) is nn.Linear
    _, fast = layers()
    x = torch.randn(4, 1024)
    with torch.no_grad():
        assert fast.double()(x.double()).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16):
            assert fast.float()(x).dtype == torch.bfloat16
        assert fast(x[:0]).shape == (0, 1024)
        assert not products
        fast(x)
    assert products == [(4, 1024)]


def test_maps_do_not_depend_on_who_multiplies(
    monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]
) -> None:
    batch = images(2)
    model = Vgg().eval()
    net = attach(model, example=images(1))
    net.fitted = True
    plain = explain(net, batch, "grad-cam", scale="raw").maps
    assert not products
    monkeypatch.setattr(linear, "MIN_NUMBERS", 0)
    net = attach(model, example=images(1))
    net.fitted = True
    fast = explain(net, batch, "grad-cam", scale="raw").maps
    assert products and torch.allclose(fast, plain, rtol=1e-4, atol=1e-6 * float(plain.abs().max()))
    assert all(parameter.grad is None for parameter in net.sigmoid.parameters())
