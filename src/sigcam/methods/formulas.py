"""The CAM methods, one function each: from a Probe to the weights of Eq. 4 (Eq. 5, 7)."""

from collections.abc import Callable

import torch
from torch import Tensor

from sigcam.core.errors import DataError
from sigcam.methods.postprocess import resize, unit_range
from sigcam.methods.probe import Probe
from sigcam.methods.registry import method
from sigcam.methods.rollout import class_attention, rollout_maps
from sigcam.network.dual import DualBranch
from sigcam.network.optimize import optimized
from sigcam.network.pass_memory import smaller_batch
from sigcam.network.trace import agree

CPU_BATCH, GPU_BATCH = 4, 32  # masked images per pass; larger batches are slower on a CPU, see `chunks`
SMOOTH_NOISE = 0.15  # of the image's range
MASK_NOISE = 2.0  # of a mask from 0 to 1
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


@method("grad-cam-elementwise", gives="gradients")
def grad_cam_elementwise(probe: Probe) -> Tensor:
    """Each cell weighted by its own gradient, where gradient times feature is positive."""
    return torch.where(probe.grads * probe.features <= 0, 0.0, probe.grads)  # NaN stays


@method("shapley-cam", gives="gradients", in_logits=True, linear_twin="grad-cam")
def shapley_cam(probe: Probe) -> Tensor:
    """Each channel's mean gradient less half the Hessian times the features: the Shapley values of features
    to second order (Cai, 2025)."""
    if probe.is_flat:
        return probe.mean_grads
    return probe.mean_grads - probe.curvature.mean((-2, -1), keepdim=True) / 2


@method(
    "smoothgrad-cam++",
    gives="gradients",
    perturbs="noise",
    samples=8,
    aliases=("smoothgradcampp", "smoothgradcamplusplus"),
)
def smoothgrad_cam_plus_plus(probe: Probe) -> Tensor:
    """Grad-CAM++ with the powers of the gradient averaged over noisy copies of the image (Omeiza et al.,
    2019), noise of 15% of its range."""
    images = probe.forward_pass.images
    spread = (images.amax((1, 2, 3), keepdim=True) - images.amin((1, 2, 3), keepdim=True)) * SMOOTH_NOISE
    powers = [torch.zeros((), device=images.device)] * 3  # mean g, g^2, g^3
    for copy in range(probe.samples):
        noise = standard_noise(images.shape[1:], copy).to(images)
        g = probe.of_images(images + spread * noise).grads
        powers = [mean + g**power / probe.samples for power, mean in enumerate(powers, 1)]
    first, second, third = powers
    share = second / (2 * second + over_cells(probe.features) * third + 1e-6)
    return over_cells(first.relu() * torch.where(second != 0, share, 0.0))


def standard_noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return standard normal noise on the CPU, always the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@method("random-cam", class_specific=False, light=True, aliases=("random",))
def random_cam(probe: Probe) -> Tensor:
    """Weights drawn between -1 and 1, always the same ones: a control, which any method should beat."""
    channels = probe.features.shape[2]
    weights = torch.rand(channels, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return weights.to(probe.features)[None, None, :, None, None]


def copy_for_masks(probe: Probe) -> DualBranch:
    """The network with an optimised private copy of its model, where that has the same logits; made anew,
    since the weights may change between calls."""
    forward_pass = probe.forward_pass
    return faster_copy(probe.net, forward_pass.images[:1], forward_pass.softmax_logits[:1].detach())


def faster_copy(net: DualBranch, image: Tensor, logits: Tensor) -> DualBranch:
    """The network with such a copy if it gives these logits (1, C) of the image, else the network itself."""
    if net.model is not net.original or image.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return net
    split = net.split
    try:
        copied = net.with_model(optimized(net.model, image, keep=(split.layer, *split.heads, *split.last)))
        found = copied.run(image).softmax_logits
    except Exception:  # any user network, any failure: the network itself does
        return net
    return copied if agree(found, logits) else net


def usual_batch(images: Tensor) -> int:
    """Return how many altered images run in one pass where `batch_size` is not given and memory is there."""
    return CPU_BATCH if images.device.type == "cpu" else GPU_BATCH


def mask_scores(
    probe: Probe, versions: int = 1, change: Callable[[Tensor, int], Tensor] = lambda masks, version: masks
) -> Tensor:
    """Return (B, K, N) scores of the images behind each channel, upsampled and scaled from 0 to 1 as a mask;
    the mean over changed versions of the masks (R, H, W). -inf for channels that are not tried."""
    features, images = probe.features[:, 0], probe.forward_pass.images
    count, channels = features.shape[:2]
    batch_size = probe.batch_size or usual_batch(images)
    top_n = min(probe.top_n or channels, channels)
    net = copy_for_masks(probe) if count * top_n * versions >= MANY_MASKS else probe.net
    batch_size = smaller_batch(min(batch_size, top_n), probe.net, images)
    varied = features.flatten(2).std(2, correction=0)  # of one cell, zero
    chosen = varied.topk(top_n, dim=1).indices.sort(1).values  # (B, top_n)
    scores = features.new_full((count, probe.classes.shape[1], channels), float("-inf"))
    for i in range(count):
        for part in chosen[i].split(batch_size):
            masks = resize(features[i, part][None], probe.forward_pass.image, "bilinear")[0]  # (R, H, W)
            masks = unit_range(masks, eps=1e-8).to(images.dtype)
            total = torch.zeros((), device=images.device)
            for version in range(versions):
                masked = images[i] * change(masks, version)[:, None]
                total = total + probe.rescore(i, images=masked, net=net).to(scores) / versions
            scores[i, :, part] = total.T
    return scores


@method("score-cam", perturbs="images", signed=False)
def score_cam(probe: Probe) -> Tensor:
    """Softmax over channels of the scores of the image masked by each (Wang et al., 2020; Eq. 7)."""
    return mask_scores(probe).softmax(2)[..., None, None]


@method("ss-cam", perturbs="images", samples=10, signed=False)
def ss_cam(probe: Probe) -> Tensor:
    """Score-CAM with each score averaged over noisy masks (SS-CAM; Wang et al., 2020), whose noise has a
    standard deviation of 2 and is the same for every channel."""

    def with_noise(masks: Tensor, version: int) -> Tensor:
        return masks + MASK_NOISE * standard_noise(masks.shape[1:], version).to(masks)

    return mask_scores(probe, probe.samples, with_noise).softmax(2)[..., None, None]


@method("is-cam", perturbs="images", samples=10, signed=False)
def is_cam(probe: Probe) -> Tensor:
    """Score-CAM with each score averaged over strengths of the mask (Naidu et al., 2020): for n samples, the
    sums of j / n over j = 0, over 0 and 1, and so on up to n - 1."""

    def stronger(masks: Tensor, version: int) -> Tensor:
        return masks * (version * (version + 1) / 2 / probe.samples)

    return mask_scores(probe, probe.samples, stronger).softmax(2)[..., None, None]


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


@method("seg-eigen-cam", gives="gradients")
def seg_eigen_cam(probe: Probe) -> Tensor:
    """Sizes of gradients times the first principal direction of these times features, with the sign that
    agrees with their sum (Chung and Ying, 2025)."""
    sizes = probe.grads.abs()
    flat = (sizes * probe.features).flatten(-2)
    return sizes * first_component(flat, flat.sum(-2))[..., None, None]


@method("kpca-cam", gives="maps", class_specific=False, signed=False, light=True)
def kpca_cam(probe: Probe) -> Tensor:
    """The cells' first component by kernel PCA (Karmani et al., 2024), with the kernel tanh(x y / N + 1) of
    cells less their mean and the sign that makes the map positive where activations are strong; the same for
    all classes."""
    components = [_kernel_component(cells.double()) for cells in probe.features[:, 0].flatten(2).mT]
    return torch.stack(components).to(probe.features).reshape(-1, 1, *probe.features.shape[-2:])


def _kernel_component(cells: Tensor) -> Tensor:
    """Return (L,) the first component of one image's cells (L, N) by kernel PCA; NaN if one is not finite."""
    if not bool(torch.isfinite(cells).all()):
        return torch.full_like(cells[:, 0], float("nan"))
    centred = cells - cells.mean(0)
    kernel = torch.tanh(centred @ centred.mT / cells.shape[1] + 1)  # (L, L)
    kernel = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
    values, vectors = torch.linalg.eigh(kernel)
    component: Tensor = vectors[:, -1] * values[-1].clamp(min=0).sqrt()
    return component if component @ cells.norm(dim=1) >= 0 else -component


@method("fem", gives="maps", class_specific=False, signed=False, light=True)
def fem(probe: Probe) -> Tensor:
    """The cells in which a channel lies two standard deviations or more above its mean, added up over
    channels with the means as weights (Fuad et al., 2020); the same for all classes."""
    features = probe.features
    mean = features.mean((-2, -1), keepdim=True)
    deviation = features.std((-2, -1), correction=0, keepdim=True)
    far_above = features >= mean + 2 * deviation
    return (mean * far_above).sum(2)


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


@method("ts-cam", finish="min-max", needs="patches")
def ts_cam(probe: Probe) -> Tensor:
    """The class's row of the last layer, times the class token's attention to each patch, the mean over heads
    and layers (Gao et al., 2021), for plain vision transformers trained for it."""
    attention = class_attention(probe.net, probe.forward_pass.images, "ts-cam")  # (B, P, Q)
    if not probe.linear:
        kind = type(probe.net.model).__name__
        raise DataError(
            f"ts-cam needs a head that is linear on averaged patch tokens, and that of {kind} is not: train "
            "one (sigcam train-classifier --wsol ts-cam), or use 'attention-rollout'."
        )
    return probe.head_weight[..., None, None] * attention[:, None, None]
