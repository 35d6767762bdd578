"""ThresholdedPool and TokenMaps against the obvious loops, and weights files that bring them along."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import ModelError
from sigcam.models.pooling import ThresholdedPool, TokenMaps, read_patches, restore_pooling


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.7])
def test_each_channel_is_averaged_over_its_strong_cells(threshold: float) -> None:
    torch.manual_seed(0)
    features = torch.randn(3, 4, 5, 6).relu()
    features[1, 2] = 0  # a channel without any
    pooled = ThresholdedPool(nn.AdaptiveAvgPool2d(1), threshold)(features)
    assert pooled.shape == (3, 4, 1, 1)
    for b in range(3):
        for n in range(4):
            cells = features[b, n].flatten().tolist()
            strong = [cell for cell in cells if cell > threshold * max(cells)]
            expected = sum(strong) / len(strong) if strong else 0.0
            assert float(pooled[b, n]) == pytest.approx(expected, rel=1e-5)


def test_a_channel_whose_cells_are_alike_is_averaged_as_usual() -> None:
    features = torch.rand(2, 3, 1, 1).expand(2, 3, 4, 4)
    pooled = ThresholdedPool(nn.AdaptiveAvgPool2d(1), 0.5)(features)
    torch.testing.assert_close(pooled.flatten(1), features.mean((2, 3)))


def test_weights_bring_the_layer_to_where_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    state = {**model.state_dict(), "1.0.tap_threshold": torch.tensor(0.3)}
    restore_pooling(model, state)
    assert isinstance(model[1][0], ThresholdedPool)  # type: ignore[index]
    model.load_state_dict(state)
    assert float(model.state_dict()["1.0.tap_threshold"]) == pytest.approx(0.3)
    with pytest.raises(ModelError, match="have a thresholded pooling 'gap', the model none"):
        restore_pooling(model, {"gap.tap_threshold": torch.tensor(0.1)})


class Tokens(nn.Module):
    """What is left of a ViT without its blocks."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(tokens)[:, 0])


@pytest.mark.parametrize("cells", [(2, 3), (4, 6)])  # as trained, and an image twice as large
def test_a_linear_head_on_token_maps_is_a_convolution_of_the_tokens_averaged(cells: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, tokens = Tokens(), torch.randn(2, 2 + cells[0] * cells[1], 4)
    nn.init.normal_(model.norm.weight)
    maps = model.norm(tokens)[:, 2:].mT.unflatten(2, cells)
    read_patches(model, "norm", "head", (2, 2, 3))
    nn.init.normal_(model.head.bias)
    kernel = model.head.weight.unflatten(1, (4, 3, 3))  # (C, N, 3, 3)
    semantic = F.conv2d(maps, kernel, model.head.bias, padding=1)
    torch.testing.assert_close(model(tokens), semantic.mean((2, 3)))


def test_token_maps_hold_each_token_beside_its_neighbours() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(1, 1 + 12, 2)
    found = TokenMaps(nn.Identity(), (1, 3, 4))(tokens)
    assert found.shape == (1, 18, 3, 4)
    for p in range(3):
        for q in range(4):
            for n in range(2):
                for tap in range(9):
                    y, x = p + tap // 3 - 1, q + tap % 3 - 1
                    inside = 0 <= y < 3 and 0 <= x < 4
                    expected = float(tokens[0, 1 + 4 * y + x, n]) if inside else 0.0
                    assert float(found[0, 9 * n + tap, p, q]) == expected


def test_weights_bring_a_head_on_patch_tokens_of_any_number_of_classes() -> None:
    trained, model, tokens = Tokens(classes=3), Tokens(), torch.randn(2, 7, 4)
    read_patches(trained, "norm", "head", (1, 2, 3))
    state = trained.state_dict()
    assert set(state) == {f"{n}.{p}" for n in ("norm.0.norm", "head") for p in ("weight", "bias")} | {
        "norm.0.token_grid"
    }
    restore_pooling(model, state)
    assert model.head.weight.shape == (5, 36)  # as many as the model has, as for any other head
    again = Tokens(classes=3)
    restore_pooling(again, state)
    again.load_state_dict(state)
    assert torch.equal(again(tokens), trained(tokens))
    for bad in ({**state, "head.weight": torch.zeros(3, 8)}, {"other.0.token_grid": torch.tensor([1, 2, 3])}):
        with pytest.raises(
            ModelError, match=r"have a head on patch tokens of '(norm|other)', the model none"
        ):
            restore_pooling(Tokens(), bad)
