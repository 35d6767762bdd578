"""The CAM methods, one function each: from a Probe to the weights of Eq. 4 (Eq. 5, 7)."""

import torch
from torch import Tensor

from sigcam.methods.postprocess import resize, unit_range
from sigcam.methods.probe import Probe
from sigcam.methods.registry import method
from sigcam.methods.rollout import rollout_maps
from sigcam.network.dual import DualBranch
from sigcam.network.optimize import optimized
from sigcam.network.pass_memory import smaller_batch
from sigcam.network.trace import agree

CPU_BATCH, GPU_BATCH = 4, 32  # masked images per pass; larger batches are slower on a CPU, see `chunks`
MANY_MASKS = 256  # a faster copy takes the time of about ten passes to make and check


def over_cells(values: Tensor) -> Tensor:
    """Sum over the grid, keeping its two axes with size 1."""
    return values.sum((-2, -1), keepdim=True)


@method("cam", finish="min-max", needs="linear", in_logits=True, light=True)
def cam(probe: Probe) -> Tensor:
    """The class's row of the last layer (Zhou et al., 2016), for global average pooling + linear heads."""
    return probe.head_weight[..., None, None]


@method("grad-cam", gives="gradients", in_logits=True, light=True)
def grad_cam(probe: Probe) -> Tensor:
    """Each channel's mean gradient (Selvaraju et al., 2017; Eq. 5)."""
    return probe.mean_grads


@method("grad-cam++", gives="gradients", aliases=("gradcampp", "gradcamplusplus"))
def grad_cam_plus_plus(probe: Probe) -> Tensor:
    """Positive gradients, each weighted by a ratio of its powers (Chattopadhay et al., 2018). For g
    around 1e-4 the 1e-6 dominates, so the map depends on the gradient's scale (PROTOCOL 4.2). The ratio is
    negative where g times the sum of a channel's features is below -2: never if features are not."""
    g = probe.grads
    share = g**2 / (2 * g**2 + over_cells(probe.features) * g**3 + 1e-6)
    return over_cells(g.relu() * torch.where(g != 0, share, 0.0))


@method("xgrad-cam", gives="gradients", in_logits=True, linear_twin="grad-cam")
def xgrad_cam(probe: Probe) -> Tensor:
    """Each channel's gradients, averaged with its activations as weights (Fu et al., 2020)."""
    if probe.linear:  # equal gradients have one average, even if features of either sign sum to zero
        return probe.mean_grads
    return over_cells(probe.grads * probe.features) / (over_cells(probe.features) + 1e-7)


@method("layer-cam", gives="gradients", fusion="max", signed=False, in_logits=True, linear_twin="grad-cam")
def layer_cam(probe: Probe) -> Tensor:
    """Each cell weighted by its own positive gradient (Jiang et al., 2021)."""
    return probe.grads.relu()


@method("hires-cam", gives="gradients", in_logits=True, linear_twin="grad-cam")
def hires_cam(probe: Probe) -> Tensor:
    """Each cell weighted by its own gradient (Draelos and Carin, 2020)."""
    return probe.grads


def copy_for_masks(probe: Probe) -> DualBranch:
    """The network with an optimised private copy of its model, where that has the same logits; made anew,
    since the weights may change between calls."""
    net, image = probe.net, probe.forward_pass.images[:1]
    if net.model is not net.original or image.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return net
    split = net.split
    try:
        copied = net.with_model(optimized(net.model, image, keep=(split.layer, *split.heads, *split.last)))
        logits = copied.run(image).softmax_logits
    except Exception:  # any user network, any failure: the network itself does
        return net
    return copied if agree(logits, probe.forward_pass.softmax_logits[:1].detach()) else net


@method("score-cam", perturbs="images", signed=False)
def score_cam(probe: Probe) -> Tensor:
    """Softmax over channels of the scores of the image masked by each (Wang et al., 2020; Eq. 7)."""
    features, images = probe.features[:, 0], probe.forward_pass.images
    count, channels = features.shape[:2]
    batch_size = probe.batch_size or (CPU_BATCH if images.device.type == "cpu" else GPU_BATCH)
    top_n = min(probe.top_n or channels, channels)
    net = copy_for_masks(probe) if count * top_n >= MANY_MASKS else probe.net
    batch_size = smaller_batch(min(batch_size, top_n), probe.net, images)
    chosen = features.flatten(2).std(2).topk(top_n, dim=1).indices.sort(1).values  # (B, top_n)
    scores = features.new_full((count, probe.classes.shape[1], channels), float("-inf"))
    for i in range(count):
        for part in chosen[i].split(batch_size):
            masks = resize(features[i, part][None], probe.forward_pass.image, "bilinear")[0]  # (R, H, W)
            masks = unit_range(masks, eps=1e-8).to(images.dtype)
            scores[i, :, part] = probe.rescore(i, images=images[i] * masks[:, None], net=net).to(scores).T
    return scores.softmax(2)[..., None, None]


@method("ablation-cam", perturbs="features")
def ablation_cam(probe: Probe) -> Tensor:
    """The fraction of the score lost with each channel set to zero (Desai and Ramaswamy, 2020); relative to
    its absolute value, since a negative score would flip every weight."""
    scores = probe.scores.detach().double()[..., None]  # (B, K, 1)
    lost = (scores - probe.ablated) / scores.abs().clamp(min=1e-12)
    return lost.to(probe.features.dtype)[..., None, None]


def first_component(matrix: Tensor, towards: Tensor) -> Tensor:
    """Return the first left singular vector (..., N) of each (..., N, L) matrix, with the sign for which the
    columns' projections agree with `towards` (..., L). From the Gram matrix of the shorter side, in float64,
    since that squares the condition number."""
    usable = torch.isfinite(matrix).all(-1).all(-1)[..., None]  # else the solver raises for the whole batch
    exact = torch.where(usable[..., None], matrix, 0.0).double()
    if exact.shape[-2] <= exact.shape[-1]:
        vector = torch.linalg.eigh(exact @ exact.mT).eigenvectors[..., -1]  # (..., N)
    else:
        vector = (exact @ torch.linalg.eigh(exact.mT @ exact).eigenvectors[..., -1:])[..., 0]
        vector = vector / vector.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    projections = (vector[..., None, :] @ exact)[..., 0, :]  # (..., L)
    upright = (projections * towards).sum(-1, keepdim=True) >= 0
    return torch.where(usable, torch.where(upright, vector, -vector), float("nan")).to(matrix.dtype)


@method("eigen-cam", class_specific=False, light=True)
def eigen_cam(probe: Probe) -> Tensor:
    """The channels' first principal direction, uncentred (Muhammad and Yeasin, 2020), with the sign that
    makes the map positive where activations are strong; the same for all classes."""
    flat = probe.features.flatten(-2)  # (B, 1, N, P*Q)
    return first_component(flat, flat.norm(dim=-2))[..., None, None]


@method("eigengrad-cam", gives="gradients")
def eigengrad_cam(probe: Probe) -> Tensor:
    """Gradients times the first principal direction of gradients times features, which sets its sign."""
    flat = (probe.grads * probe.features).flatten(-2)
    return probe.grads * first_component(flat, flat.sum(-2))[..., None, None]


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
    """The attention of the head's token to each patch, multiplied over layers (Abnar and Zuidema, 2020), for
    plain vision transformers; the same for all classes."""
    return rollout_maps(probe.net, probe.forward_pass.images)[:, None]
