"""RISE and extremal perturbations: what a score makes of an image that is shown only in part."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.types import GridSize
from sigcam.methods.formulas import CPU_BATCH, GPU_BATCH, MANY_MASKS, copy_for_masks
from sigcam.methods.postprocess import resize
from sigcam.methods.probe import Probe, report_share
from sigcam.methods.registry import method
from sigcam.methods.targets import at_least_float32
from sigcam.network.pass_memory import smaller_batch

# RISE (Petsiuk et al., 2018, Sec. 3.2 and 4)
MASK_CELLS, SHARE_SHOWN = 7, 0.5  # cells of a mask each way, and the probability with which one is shown

# Extremal perturbations (Fong et al., 2019); lengths are those of an image of 224 pixels on its shorter side
SIDE = 224
STEP, RADIUS, BLUR = (
    7,
    21,
    20,
)  # between the mask's points; of the kernel; standard deviation where nothing is shown
LEVELS = 8  # blurred images, between which others are interpolated
TEMPERATURE = 1 / 20  # of the smooth maximum
AREAS = (0.025, 0.05, 0.1, 0.2)  # of the image; the masks are added up and smoothed, as for the pointing game
SMOOTHING = 0.09  # standard deviation, of the shorter side
RATE, MOMENTUM, PENALTY = 0.01, 0.9, 300.0  # of gradient ascent; the penalty doubles after each third of it


@method("rise", gives="pixels", finish="min-max", perturbs="images", signed=False, samples=4000)
def rise(probe: Probe) -> Tensor:
    """Random masks added up, each weighted by the score of the image seen through it (Petsiuk et al., 2018);
    the paper's score is the probability: `target="probability"`."""
    images, count = probe.forward_pass.images, probe.samples
    usual = probe.batch_size or (CPU_BATCH if images.device.type == "cpu" else GPU_BATCH)
    batch = smaller_batch(min(usual, count), probe.net, images)
    net = copy_for_masks(probe) if len(images) * count >= MANY_MASKS else probe.net
    grids, shifts = random_grids(count, probe.forward_pass.image)
    maps = torch.zeros(
        *probe.classes.shape, *probe.forward_pass.image, dtype=torch.float64, device=images.device
    )
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        masks = grown_masks(grids[part], shifts[part], probe.forward_pass.image).to(
            images.device
        )  # (R, H, W)
        for i in range(len(images)):
            scores = probe.rescore(i, images=images[i] * masks[:, None].to(images.dtype), net=net)  # (R, K)
            maps[i] += torch.einsum("rk,rhw->khw", scores.double(), masks.double())
        report_share(min(start + batch, count) / count)
    return (maps / (count * SHARE_SHOWN)).to(probe.features.dtype)


def random_grids(count: int, image: GridSize) -> tuple[Tensor, Tensor]:
    """Return (N, 7, 7) cells that are shown or not, and (N, 2) shifts in pixels, up to the size of a cell;
    the same for every image of that size."""
    generator = torch.Generator().manual_seed(0)
    grids = (torch.rand(count, MASK_CELLS, MASK_CELLS, generator=generator) < SHARE_SHOWN).float()
    rows, columns = (
        torch.randint(math.ceil(side / MASK_CELLS) + 1, (count,), generator=generator) for side in image
    )
    return grids, torch.stack([rows, columns], 1)


def grown_masks(grids: Tensor, shifts: Tensor, image: GridSize) -> Tensor:
    """Return (N, H, W) masks in [0, 1]: grids enlarged bilinearly to one cell more than the image, and cut
    out at the shifts."""
    height, width = ((MASK_CELLS + 1) * math.ceil(side / MASK_CELLS) for side in image)
    grown = resize(grids[:, None], GridSize(height, width), "bilinear")[:, 0]
    cut = [
        mask[y:, x:][: image.height, : image.width]
        for mask, (y, x) in zip(grown, shifts.tolist(), strict=True)
    ]
    return torch.stack(cut)


@method(
    "extremal-perturbation",
    gives="pixels",
    signed=False,
    samples=800,
    passes=len(AREAS),
    aliases=("extremal",),
)
def extremal_perturbation(probe: Probe) -> Tensor:
    """The smooth masks of four given areas that keep the score highest while all else is blurred (Fong et
    al., 2019), added up and smoothed by a Gaussian."""
    images = probe.forward_pass.images
    usual = probe.batch_size or len(AREAS)
    batch = smaller_batch(min(usual, len(AREAS)), probe.net, images, grad="images")
    found = dict[tuple[int, int], Tensor]()
    chosen = probe.classes.tolist()
    jobs = list(dict.fromkeys((i, k) for i, classes in enumerate(chosen) for k in classes))
    for done, (i, k) in enumerate(jobs):
        masks = list[Tensor]()
        for areas in torch.tensor(AREAS).split(batch):
            shares = done + len(masks) / len(AREAS), len(areas) / len(AREAS), len(jobs)
            masks += best_masks(probe, i, chosen[i].index(k), areas, shares)
        side = min(probe.forward_pass.image)
        found[i, k] = blurred(torch.stack(masks).sum(0)[None, None], SMOOTHING * side)[0, 0]
    return torch.stack([torch.stack([found[i, k] for k in chosen[i]]) for i in range(len(images))])


def best_masks(probe: Probe, index: int, k: int, areas: Tensor, shares: tuple[float, float, int]) -> Tensor:
    """Return (A, H, W) masks of these areas that maximise the score of image `index`'s k-th class."""
    image = probe.forward_pass.images[index : index + 1].detach()
    size, scale = probe.forward_pass.image, min(probe.forward_pass.image) / SIDE
    exact = at_least_float32(image)
    sigmas = [BLUR * scale * (1 - level / (LEVELS - 1)) for level in range(LEVELS)]
    levels = torch.cat([blurred(exact, sigma) for sigma in sigmas])  # (L, C, H, W), the last one sharp
    points = mask_grid(size)
    kernel = mask_kernel(size, points).to(exact)
    pixels = torch.arange(size.height * size.width, device=image.device)
    hidden = ((1 - areas.double()) * len(pixels)).round().to(image.device)
    wanted = (pixels >= hidden[:, None]).to(exact)  # (A, H*W) zeros, then ones
    grid = torch.full((len(areas), *points), 0.5, dtype=exact.dtype, device=image.device)
    grid, speed, penalty = grid.requires_grad_(), torch.zeros_like(grid), 0.0
    for step in range(probe.samples):
        with torch.enable_grad():
            masks = smooth_masks(grid, kernel, size)
            shown = shown_through(masks, levels).to(image.dtype)
            score = probe.score_of(probe.image_logits(shown), index, k)
            excess = (masks.flatten(1).sort(dim=1, stable=True).values - wanted).square().mean(1)
            (slope,) = torch.autograd.grad((score - penalty * excess).sum(), grid)
        with torch.no_grad():
            speed = MOMENTUM * speed + slope
            grid = (grid + RATE * speed).clamp(0, 1).requires_grad_()
        # the first step follows the score alone, which puts points in order that were equal
        penalty = PENALTY * 2 ** (3 * (step + 1) // probe.samples)
        before, share, jobs = shares
        report_share((before + share * (step + 1) / probe.samples) / jobs)
    return smooth_masks(grid.detach(), kernel, size)


def mask_grid(image: GridSize) -> GridSize:
    """Return how many points a mask has: every 7 pixels of an image of 224, at most one for each pixel."""
    step = max(1.0, STEP * min(image) / SIDE)
    return GridSize(*(max(2, round(side / step)) for side in image))


def mask_kernel(image: GridSize, points: GridSize) -> Tensor:
    """Return (points, points) the kernel's value for each two points: exp(-max(0, d - 1)^2 / 4) at distance
    d, in units of its radius."""
    rows, columns = (
        (torch.arange(count, dtype=torch.float64) + 0.5) * side / count
        for count, side in zip(points, image, strict=True)
    )
    places = torch.cartesian_prod(rows, columns)
    distance = torch.cdist(places, places) / (RADIUS * min(image) / SIDE)
    return (-(distance - 1).clamp(min=0).square() / 4).exp()


def smooth_masks(grid: Tensor, kernel: Tensor, image: GridSize) -> Tensor:
    """Return (A, H, W) masks: at each point the smooth maximum of all points' values times the kernel, and
    bilinear between the points."""
    values = kernel * grid.flatten(1)[:, None]  # (A, points, points)
    masks = (values * (values / TEMPERATURE).softmax(-1)).sum(-1)
    return resize(masks.unflatten(1, grid.shape[1:])[None], image, "bilinear")[0]


def shown_through(masks: Tensor, levels: Tensor) -> Tensor:
    """Return (A, C, H, W) images, sharp where a mask is 1 and blurred most where it is 0; between two levels
    linearly."""
    place = masks * (len(levels) - 1)
    weights = torch.stack([(1 - (place - level).abs()).clamp(min=0) for level in range(len(levels))], 1)
    return torch.einsum("alhw,lchw->achw", weights, levels)


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Return the images filtered by a Gaussian, up to three standard deviations; edges are repeated."""
    reach = math.ceil(3 * sigma)
    if reach == 0:
        return images
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    kernel = (-(offsets / sigma).square() / 2).exp()
    kernel = (kernel / kernel.sum()).expand(images.shape[1], 1, 1, -1)
    for padding, weight in (((reach, reach, 0, 0), kernel), ((0, 0, reach, reach), kernel.mT)):
        images = F.conv2d(F.pad(images, padding, mode="replicate"), weight, groups=images.shape[1])
    return images
