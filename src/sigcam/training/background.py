"""Background evidence: what an image shows beside its class, as one more example that shows no class.

The softmax head's own map of the label says where the class is. Cells well below its peak are background, and
what the head would be given if the image showed nothing else is a negative for every class: F with all other
cells replaced by the background's mean, through the network's own pooling. For global average pooling that is
the mean over background cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from sigcam.network.dual import DualBranch, ForwardPass, linear_weight

MIN_CELLS = 4  # an image with fewer background cells gives no example


@dataclass(frozen=True)
class KeptMaps:
    """F of images that passed the backbone earlier: all that a background needs where `suffices_f`."""

    features: Tensor  # F (B, N, P, Q)

    @classmethod
    def of(cls, forward_pass: ForwardPass, dtype: torch.dtype) -> KeptMaps:
        """Return F in the cache's precision; DataError if it does not fit into that."""
        features = forward_pass.features.detach()
        kept = features.to(dtype).contiguous()
        if bool(kept.isinf().any()) and not bool(features.isinf().any()):
            raise DataError("features are too large for float16: set precision to bfloat16.")
        return cls(kept)


def suffices_f(net: DualBranch) -> bool:
    """Whether backgrounds follow from F and the last layer's weights alone: where both heads are global
    average pooling and one linear layer."""
    return net.linear == {"softmax", "sigmoid"} and why_no_background(net) is None


def why_no_background(net: DualBranch) -> str | None:
    """Return why this network's images have no background that its head can be given; None if they have."""
    if net.split.fold.prefix:
        return (
            f"the head of this {type(net.model).__name__} reads class or register tokens, which have seen "
            "the whole image, so its background cannot be separated"
        )
    return None


def classes_of(labels: Tensor, classes: int) -> Tensor:
    """Return (B, K) the classes that each image shows, from (B,) or (B, C) labels; -1 fills up."""
    if labels.ndim == 2:
        count = max(1, int(labels.sum(1).max())) if len(labels) else 1
        values, index = labels.float().topk(min(count, labels.shape[1]), dim=1)
        return torch.where(values > 0, index, -1)
    return torch.where(labels == 1, 0, -1)[:, None] if classes == 1 else labels[:, None]


def class_maps(net: DualBranch, forward_pass: ForwardPass | KeptMaps, classes: Tensor) -> Tensor:
    """Return the softmax head's clamped maps (B, K, P, Q) of (B, K) classes (Eq. 4-6, Sec. 3.3).

    The pass must have a graph unless the head is global average pooling + linear.
    """
    index = classes.clamp(min=0)
    if "softmax" in net.linear:
        layer = linear_weight(net.last_layer("softmax"))
        assert layer is not None
        weights = layer[0].detach()[index]  # (B, K, N)
    else:
        assert isinstance(forward_pass, ForwardPass)
        fold, image, logits = forward_pass.point.fold, forward_pass.image, forward_pass.softmax_logits
        with torch.enable_grad():
            columns = [logits.gather(1, column[:, None]).sum() for column in index.unbind(1)]
        gradients = [torch.autograd.grad(c, forward_pass.cut, retain_graph=True)[0] for c in columns]
        weights = torch.stack([fold(g, image).mean((2, 3)) for g in gradients], 1)
    features = forward_pass.features.detach().float()
    return torch.einsum("bkn,bnpq->bkpq", weights.float().clamp(min=0), features)


def background_cells(maps: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Return (B, P, Q) the cells where no class's map reaches `threshold` of its range; none if a map is
    constant, if there is no class, or if fewer than `MIN_CELLS` are left."""
    low, high = maps.amin((2, 3), keepdim=True), maps.amax((2, 3), keepdim=True)
    shown = (classes >= 0)[:, :, None, None]
    inside = (maps - low >= threshold * (high - low)) | (high <= low)  # all of a constant map
    cells = ~(inside & shown).any(1) & shown.any(1)
    return cells & (cells.sum((1, 2), keepdim=True) >= MIN_CELLS)


@torch.no_grad()
def background_inputs(
    net: DualBranch, forward_pass: ForwardPass | KeptMaps, classes: Tensor, config: FitConfig
) -> Tensor:
    """Return what enters the sigmoid head, (B, ...), if each image showed its background alone, given the
    (B, K) classes that it shows; infinite for an image that has too little of it."""
    maps = class_maps(net, forward_pass, classes)
    cells = background_cells(maps, classes, config.background_threshold)[:, None]  # (B, 1, P, Q)
    features = forward_pass.features.detach().float()
    mean = (features * cells).sum((2, 3)) / cells.sum((2, 3)).clamp(min=1)  # (B, N)
    if "sigmoid" in net.linear:
        inputs = mean
    else:
        assert isinstance(forward_pass, ForwardPass)
        inputs = net.with_features(forward_pass, torch.where(cells, features, mean[..., None, None])).pooled
    found = cells.flatten(1).any(1).view(-1, *[1] * (inputs.ndim - 1))
    return torch.where(found, inputs, torch.inf)
