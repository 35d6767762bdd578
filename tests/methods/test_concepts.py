"""Deep feature factorisation: concepts are non-negative factors of the features of several images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sigcam
from sigcam.core.errors import DataError
from sigcam.methods.concepts import nonnegative_factors
from support.method_cases import network, pictures
from support.oracles import path_b
from support.tiny import Vgg, attached, images, untouched


def updated(matrix: np.ndarray, left: np.ndarray, right: np.ndarray, steps: int) -> np.ndarray:
    """Lee and Seung's rules, one entry after the other; the product."""
    left, right = left.copy(), right.copy()
    for _ in range(steps):
        product = left @ right
        left = np.array([[left[i, k] * sum(matrix[i] * right[k]) / sum(product[i] * right[k])
                          for k in range(len(right))] for i in range(len(left))])  # fmt: skip
        product = left @ right
        right = np.array([[right[k, j] * sum(left[:, k] * matrix[:, j]) / sum(left[:, k] * product[:, j])
                           for j in range(right.shape[1])] for k in range(len(right))])  # fmt: skip
    product_: np.ndarray = left @ right
    return product_


def test_factors_follow_the_multiplicative_rules() -> None:
    dice = torch.Generator().manual_seed(1)
    matrix = torch.rand(12, 5, generator=dice, dtype=torch.float64)
    first = torch.Generator().manual_seed(0)
    scale = (matrix.mean() / 3).sqrt()
    left, right = (torch.rand(*size, generator=first).double() * scale for size in ((12, 3), (3, 5)))
    for steps in (1, 4):
        found = nonnegative_factors(matrix, 3, steps=steps)
        expected = updated(matrix.numpy(), left.numpy(), right.numpy(), steps)
        assert np.abs((found[0] @ found[1]).numpy() - expected).max() < 1e-9


def test_one_factor_is_the_first_singular_pair_and_more_explain_more() -> None:
    matrix = torch.rand(30, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, right = nonnegative_factors(matrix, 1)
    u, s, v = torch.linalg.svd(matrix)
    assert torch.allclose(left @ right, s[0] * u[:, :1] @ v[:1], atol=1e-8)  # of Perron and Frobenius
    errors = [
        (matrix - torch.matmul(*nonnegative_factors(matrix, 4, steps=steps))).norm() for steps in (1, 9, 99)
    ]
    assert errors == sorted(errors, reverse=True)
    left, right = nonnegative_factors(matrix, 4)
    assert (left >= 0).all() and (right >= 0).all() and torch.allclose(right.norm(dim=1), right.new_ones(4))
    shares = left.sum(0) * right.sum(1)
    assert torch.equal(shares, shares.sort(descending=True).values)


def test_parts_that_share_no_channel_are_found_in_all_images() -> None:
    where = torch.rand(40, 3, dtype=torch.float64) * (torch.arange(40)[:, None] % 3 == torch.arange(3))
    which = torch.zeros(3, 6, dtype=torch.float64)
    which[0, :2], which[1, 2:4], which[2, 4:] = 1, 1, 1
    left, right = nonnegative_factors(where @ which, 3, steps=500)
    assert torch.allclose(left @ right, where @ which, atol=1e-4)
    assert torch.equal((right > 0.1).sum(0), torch.ones(6, dtype=torch.int64))


@pytest.mark.parametrize("name", ["gap", "vgg", "vit"])
def test_concepts_are_factors_of_the_features(name: str) -> None:
    net, x = network(name), pictures(name, 3)
    with untouched(net.model):
        found = sigcam.factorize(net, x, 2)
    features = net(x).features.detach().relu()
    assert found.maps.shape == (3, 2, *x.shape[2:]) and found.vectors.shape == (2, features.shape[1])
    cells = features.movedim(1, -1).flatten(0, 2)
    left, right = nonnegative_factors(cells, 2)
    assert found.error == pytest.approx(float((cells - left @ right).norm() / cells.norm()))
    low = left.view(3, *features.shape[2:], 2).numpy()
    peak = low[..., 0].max()
    brightest = int(low[..., 0].max((1, 2)).argmax())
    expected = path_b(low[brightest, ..., 0] / peak, *x.shape[2:])
    assert found.maps[brightest, 0].max() <= 1
    assert np.corrcoef(found.maps[brightest, 0].ravel(), expected.ravel())[0, 1] > 0.999


def test_another_layer_and_bad_numbers() -> None:
    net = attached(Vgg())
    assert sigcam.factorize(net, images(), 3, layer="features.1").vectors.shape == (3, 6)
    for wrong in (0, 9, True, 2.0):
        with pytest.raises(DataError, match=r"concepts is a whole number from 1 to 8 here, not"):
            sigcam.factorize(net, images(), wrong)


def test_the_drop_in_class_returns_what_the_peers_does() -> None:
    import pytorch_grad_cam as pgc

    net, x = attached(Vgg()), images()
    model, layer = net.model, net.model.get_submodule("features.4")
    head = torch.nn.Linear(8, 5)
    for computation in (None, head):
        theirs = pgc.DeepFeatureFactorization(model, layer, computation_on_concepts=computation)(x, 3)
        ours = sigcam.DeepFeatureFactorization(model, layer, computation_on_concepts=computation)(x, 3)
        assert [np.shape(each) for each in ours] == [np.shape(each) for each in theirs]
    assert 0 <= ours[1].min() <= ours[1].max() <= 1
