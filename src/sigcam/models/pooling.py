"""Layers before a linear head that a weights file may ask for: ThresholdedPool, TokenMaps."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import ModelError

THRESHOLD, TOKEN_GRID = "tap_threshold", "token_grid"  # the buffers that mark such layers in a state dict


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


class TokenMaps(nn.Module):
    """Patch tokens as maps (B, 9 N, P, Q), which hold each token beside its eight neighbours, zero outside.

    A 3x3 convolution of the tokens is a linear layer on these, and the mean of its maps is that layer on the
    mean of these: so the head of TS-CAM (Gao et al., 2021) is a linear one.

    Args:
        norm: the last norm of a plain ViT, which returns tokens (B, L, N).
        grid: number of tokens before the patches, P and Q; part of the state dict, as a threshold is.
    """

    def __init__(self, norm: nn.Module, grid: Sequence[int]) -> None:
        super().__init__()
        self.norm = norm
        self.prefix, *self.cells = grid
        self.register_buffer(TOKEN_GRID, torch.tensor([*grid]))

    def forward(self, tokens: Tensor) -> Tensor:
        patches = self.norm(tokens)[:, self.prefix :].mT  # (B, N, P*Q)
        larger = math.sqrt(patches.shape[2] / math.prod(self.cells))  # an image of another size
        p, q = (round(larger * side) for side in self.cells)
        maps: Tensor = F.unfold(patches.unflatten(2, (p, q)), 3, padding=1).unflatten(2, (p, q))
        return maps


def read_patches(model: nn.Module, norm: str, head: str, grid: Sequence[int]) -> None:
    """Let a new linear head read the mean of TokenMaps where the old one reads the first token that the last
    norm returns."""
    maps = TokenMaps(model.get_submodule(norm), grid)
    one_token = nn.Unflatten(1, (1, -1))  # (B, 1, 9 N)
    replaced = nn.Sequential(maps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), one_token)
    _put(model, norm, replaced.eval())
    old = model.get_submodule(head)
    assert isinstance(old, nn.Linear)
    new = nn.Linear(9 * old.in_features, old.out_features).to(old.weight)
    noise = torch.randn(new.weight.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        new.weight.copy_(0.02 * noise)
        new.bias.zero_()
    _put(model, head, new.eval())


def restore_pooling(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put the layers into the model that the state dict has a threshold or a token grid of."""
    for key in state:
        name, _, last = key.rpartition(".")
        if last == THRESHOLD and name:
            try:
                pool = model.get_submodule(name)
            except AttributeError:
                raise ModelError(
                    f"these weights have a thresholded pooling {name!r}, the model none."
                ) from None
            _put(model, name, ThresholdedPool(pool))
        elif last == TOKEN_GRID:
            norm, grid = name.removesuffix(".0"), state[key].tolist()
            modules = dict(model.named_modules())
            linear = {each: m.in_features for each, m in modules.items() if isinstance(m, nn.Linear)}
            shapes = {each: state[f"{each}.weight"].shape for each in linear if f"{each}.weight" in state}
            heads = [each for each, shape in shapes.items() if shape[1:] == (9 * linear[each],)]
            if norm not in modules or len(heads) != 1 or len(grid) != 3:
                raise ModelError(f"these weights have a head on patch tokens of {norm!r}, the model none.")
            read_patches(model, norm, heads[0], grid)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
