"""METHODS: every CAM method, one short function each, from a Probe to the weights of Eq. 4 (Eq. 5, 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from sigcam.methods.postprocess import resize
from sigcam.methods.probe import Probe
from sigcam.methods.registry import method
from sigcam.methods.rollout import rollout_maps

MASKED = {"cpu": 8, "gpu": 32}  # masked images of one pass: more cost a CPU fresh memory, see `chunks`


def over_cells(values: Tensor) -> Tensor:
    """The sum over the grid, which stays as two axes of size 1."""
    return values.sum((-2, -1), keepdim=True)


# ----------------------------------------------------------------------------------- from the head's weights


@method("cam", finish="min-max", needs="linear", in_logits=True, light=True)
def cam(probe: Probe) -> Tensor:
    """The class's row of the last layer (Zhou et al., 2016), for heads that are global average + linear."""
    return probe.head_weight[..., None, None]


# ---------------------------------------------------------------------------------------- from gradients


@method("grad-cam", gives="gradients", in_logits=True, light=True)
def grad_cam(probe: Probe) -> Tensor:
    """Each channel's mean gradient (Selvaraju et al., 2017; Eq. 5)."""
    return probe.mean_grads


@method("grad-cam++", gives="gradients", signed=False, aliases=("gradcampp", "gradcamplusplus"))
def grad_cam_plus_plus(probe: Probe) -> Tensor:
    """Positive gradients, each weighted by a ratio of its powers (Chattopadhay et al., 2018). With g near
    1e-4 the 1e-6 rules, so the map depends on the gradient's scale (PROTOCOL 4.2)."""
    g = probe.grads
    share = g**2 / (2 * g**2 + over_cells(probe.features) * g**3 + 1e-6)
    return over_cells(g.relu() * torch.where(g != 0, share, 0.0))


@method("xgrad-cam", gives="gradients", in_logits=True, linear_twin="grad-cam")
def xgrad_cam(probe: Probe) -> Tensor:
    """Each channel's gradients, averaged with its activations as weights (Fu et al., 2020)."""
    return over_cells(probe.grads * probe.features) / (over_cells(probe.features) + 1e-7)


@method("layer-cam", gives="gradients", fusion="max", signed=False, in_logits=True, linear_twin="grad-cam")
def layer_cam(probe: Probe) -> Tensor:
    """Each cell weighted by its own positive gradient (Jiang et al., 2021)."""
    return probe.grads.relu()


@method("hires-cam", gives="gradients", in_logits=True, linear_twin="grad-cam")
def hires_cam(probe: Probe) -> Tensor:
    """Each cell weighted by its own gradient (Draelos and Carin, 2020)."""
    return probe.grads


# -------------------------------------------------------------------------------------- from perturbations


@method("score-cam", perturbs="images", signed=False)
def score_cam(probe: Probe) -> Tensor:
    """Each channel's score when the image is masked by it, softmax over channels (Wang et al., 2020; Eq.
    7)."""
    features, images = probe.features[:, 0], probe.passage.images
    count, channels = features.shape[:2]
    some = probe.batch_size or MASKED["cpu" if images.device.type == "cpu" else "gpu"]
    kept = min(probe.top_n or channels, channels)
    chosen = features.flatten(2).std(2).topk(kept, dim=1).indices.sort(1).values  # (B, top_n)
    scores = features.new_full((count, probe.classes.shape[1], channels), float("-inf"))
    for i in range(count):
        for part in chosen[i].split(some):
            masks = resize(features[i, part][None], probe.passage.image, "bilinear")[0]  # (R, H, W)
            low, high = masks.amin((1, 2), keepdim=True), masks.amax((1, 2), keepdim=True)
            masks = ((masks - low) / (high - low + 1e-8)).to(images.dtype)
            scores[i, :, part] = probe.rescore(i, images=images[i] * masks[:, None]).to(scores).T
    return scores.softmax(2)[..., None, None]


@method("ablation-cam", perturbs="features")
def ablation_cam(probe: Probe) -> Tensor:
    """The share of the score that is lost with each channel set to zero (Desai and Ramaswamy, 2020); of its
    size, since a negative score would turn every weight round."""
    scores = probe.scores.detach().double()[..., None]  # (B, K, 1)
    lost = (scores - probe.ablated) / scores.abs().clamp(min=1e-12)
    return lost.to(probe.features.dtype)[..., None, None]


# --------------------------------------------------------------------------------- from principal components


def first_component(matrix: Tensor, towards: Tensor) -> Tensor:
    """The first left singular vector (..., N) of each (..., N, L) matrix, its sign such that what the columns
    project to agrees with `towards` (..., L); by the Gram matrix of the shorter side, in float64, since that
    squares the condition."""
    usable = torch.isfinite(matrix).all(-1).all(-1)[..., None]  # the solver would raise for the whole batch
    exact = torch.where(usable[..., None], matrix, 0.0).double()
    if exact.shape[-2] <= exact.shape[-1]:
        found = torch.linalg.eigh(exact @ exact.mT).eigenvectors[..., -1]  # (..., N)
    else:
        found = (exact @ torch.linalg.eigh(exact.mT @ exact).eigenvectors[..., -1:])[..., 0]
        found = found / found.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    projected = (found[..., None, :] @ exact)[..., 0, :]  # (..., L)
    upright = (projected * towards).sum(-1, keepdim=True) >= 0
    return torch.where(usable, torch.where(upright, found, -found), float("nan")).to(matrix.dtype)


@method("eigen-cam", class_specific=False, light=True)
def eigen_cam(probe: Probe) -> Tensor:
    """The channels' first principal direction, uncentred (Muhammad and Yeasin, 2020), turned so that the map
    is positive where activations are strong; knows no class."""
    flat = probe.features.flatten(-2)  # (B, 1, N, P*Q)
    return first_component(flat, flat.norm(dim=-2))[..., None, None]


@method("eigengrad-cam", gives="gradients")
def eigengrad_cam(probe: Probe) -> Tensor:
    """Gradients times the first principal direction of gradients times features, turned so that the map is
    positive where those are."""
    flat = (probe.grads * probe.features).flatten(-2)
    return probe.grads * first_component(flat, flat.sum(-2))[..., None, None]


# ------------------------------------------------------------------------------------------ from attention


@method(
    "attention-rollout",
    gives="maps",
    needs="attention",
    class_specific=False,
    signed=False,
    aliases=("rollout",),
    light=True,
)
def attention_rollout(probe: Probe) -> Tensor:
    """What the head's token takes from each patch through all layers' attention (Abnar and Zuidema, 2020),
    for plain vision transformers; knows no class."""
    return rollout_maps(probe.net, probe.passage.images)[:, None]
