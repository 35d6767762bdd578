"""ThresholdedPool against the obvious loop, and a weights file that brings it along."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sigcam.core.errors import ModelError
from sigcam.models.pooling import ThresholdedPool, restore_pooling


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
