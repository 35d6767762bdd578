"""ThresholdedPool: an average over the strong cells of each channel, which a weights file may ask for."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sigcam.core.errors import ModelError

THRESHOLD = "tap_threshold"  # the buffer that marks such a layer in a state dict


class ThresholdedPool(nn.Module):
    """The mean over each channel's cells above `threshold` times its highest (TAP, Bae et al., 2020).

    The threshold is part of the state dict, so weights that were trained with this layer load into no network
    without it, and `load_classifier` knows where it belongs.
    """

    def __init__(self, pool: nn.Module, threshold: float = 0.0) -> None:
        super().__init__()
        self.pool = pool  # the global average pooling that it stands for, whose output's form is kept
        self.register_buffer(THRESHOLD, torch.tensor(float(threshold)))

    def forward(self, features: Tensor) -> Tensor:
        highest = features.amax((2, 3), keepdim=True)  # (B, N, 1, 1)
        kept = (features > self.get_buffer(THRESHOLD) * highest).to(features.dtype)
        mean: Tensor = self.pool(features * kept)
        share: Tensor = self.pool(kept)
        return mean / share.clamp(min=torch.finfo(share.dtype).tiny)  # 0 for a channel without any


def restore_pooling(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put a ThresholdedPool around each pooling layer of the model that the state dict has a threshold of."""
    for key in state:
        name, _, last = key.rpartition(".")
        if last == THRESHOLD and name:
            parent, _, child = name.rpartition(".")
            try:
                pool = model.get_submodule(name)
            except AttributeError:
                raise ModelError(
                    f"these weights have a thresholded pooling {name!r}, the model none."
                ) from None
            setattr(model.get_submodule(parent), child, ThresholdedPool(pool))
