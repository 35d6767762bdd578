"""RISE and extremal perturbations: what a score makes of an image that is shown only in part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sigcam.core.types import GridSize
from sigcam.methods.formulas import MANY_MASKS, copy_for_masks, usual_batch
from sigcam.methods.postprocess import resize
from sigcam.methods.probe import Probe, report_share
from sigcam.methods.registry import method
from sigcam.methods.targets import at_least_float32
from sigcam.network.dual import DualBranch
from sigcam.network.pass_memory import smaller_batch

# RISE (Petsiuk et al., 2018, Sec. 3.2 and 4)
MASK_CELLS, SHARE_SHOWN = 7, 0.5  # cells of a mask each way, and the probability with which one is shown

# Extremal perturbations (Fong et al., 2019); lengths are those of an image of 224 pixels on its shorter side
SIDE = 224
STEP, BLUR = 7, 20  # between the mask's points; standard deviation of the blur where nothing is shown
CORE, SPREAD, REACH = 10.5, 10.5, 35  # of the kernel: where it is 1, its standard deviation beyond, its end
LEVELS = 8  # blurred images, between which others are interpolated
TEMPERATURE = 1 / 20  # of the smooth maximum
AREAS = (0.025, 0.05, 0.1, 0.2)  # of the image; the masks are added up and smoothed, as for the pointing game
SMOOTHING = 0.09  # standard deviation, of the shorter side
ASCENT_STEPS, RATE, MOMENTUM = 800, 0.01, 0.9  # of gradient ascent; fewer steps are larger
START, GROWTH = 300.0, 1.0035**800  # weight of the area, and by how much it grows, geometrically
TIED = 1e-6  # pixels of a mask that differ by less count as equal


@method("rise", gives="pixels", finish="min-max", perturbs="images", signed=False, samples=4000)
def rise(probe: Probe) -> Tensor:
    """Random masks added up, each weighted by the score of the image seen through it (Petsiuk et al., 2018);
    the paper's score is the probability: `target="probability"`."""
    images, count = probe.forward_pass.images, probe.samples
    usual = probe.batch_size or usual_batch(images)
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
    samples=ASCENT_STEPS,
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
    net = copy_for_masks(probe) if len(jobs) * len(AREAS) * probe.samples >= MANY_MASKS else probe.net
    for done, (i, k) in enumerate(jobs):
        masks = list[Tensor]()
        for areas in torch.tensor(AREAS).split(batch):
            shares = done + len(masks) / len(AREAS), len(areas) / len(AREAS), len(jobs)
            masks += best_masks(probe, net, i, chosen[i].index(k), areas, shares)
        side = min(probe.forward_pass.image)
        found[i, k] = blurred(torch.stack(masks).sum(0)[None, None], SMOOTHING * side)[0, 0]
    return torch.stack([torch.stack([found[i, k] for k in chosen[i]]) for i in range(len(images))])


def best_masks(
    probe: Probe, net: DualBranch, index: int, k: int, areas: Tensor, shares: tuple[float, float, int]
) -> Tensor:
    """Return (A, H, W) masks of these areas that maximise the score, by `net`, of image `index`'s k-th
    class."""
    image = probe.forward_pass.images[index : index + 1].detach()
    size, scale = probe.forward_pass.image, min(probe.forward_pass.image) / SIDE
    exact = at_least_float32(image)
    sigmas = [BLUR * scale * (1 - level / (LEVELS - 1)) for level in range(LEVELS)]
    levels = torch.cat([blurred(exact, sigma) for sigma in sigmas])  # (L, C, H, W), the last one sharp
    points = mask_grid(size)
    kernel = mask_kernel(size, points).to(exact)
    counts = [max(1, round(area * size.height * size.width)) for area in areas.tolist()]
    grid = torch.ones(len(areas), *points, dtype=exact.dtype, device=image.device)
    grid, speed, rate = (
        grid.requires_grad_(),
        torch.zeros_like(grid),
        RATE * min(ASCENT_STEPS / probe.samples, 16),
    )
    for step in range(probe.samples):
        weight = START * GROWTH ** (step / probe.samples)
        with torch.enable_grad():
            masks = smooth_masks(grid, kernel, size)
            shown = shown_through(masks, levels).to(image.dtype)
            score = probe.score_of(probe.image_logits(shown, net), index, k)
            excess = (masks - nearest_of_area(masks.detach(), counts)).square().mean((1, 2))
            (slope,) = torch.autograd.grad((score - weight * excess).sum(), grid)
        with torch.no_grad():
            speed = MOMENTUM * speed + (1 - MOMENTUM) * slope
            grid = (grid + rate * speed).clamp(0, 1).requires_grad_()
        before, share, jobs = shares
        report_share((before + share * (step + 1) / probe.samples) / jobs)
    return smooth_masks(grid.detach(), kernel, size)


def mask_grid(image: GridSize) -> GridSize:
    """Return how many points a mask has: every 7 pixels of an image of 224, at most one for each pixel."""
    step = max(1.0, STEP * min(image) / SIDE)
    return GridSize(*(max(2, round(side / step)) for side in image))


def mask_kernel(image: GridSize, points: GridSize) -> Tensor:
    """Return the kernel around a point, one value for each point in reach: 1 up to half of 21 pixels, then a
    Gaussian, exp(-2 (d / 21 - 1/2)^2)."""
    scale = min(image) / SIDE
    steps = [side / count for side, count in zip(image, points, strict=True)]  # pixels between two points
    reach = [math.ceil(REACH * scale / step) for step in steps]
    rows, columns = (
        torch.arange(-far, far + 1, dtype=torch.float64) * step
        for far, step in zip(reach, steps, strict=True)
    )
    distance = torch.hypot(rows[:, None], columns) / scale
    return (-((distance - CORE).clamp(min=0) / SPREAD).square() / 2).exp()


def smooth_masks(grid: Tensor, kernel: Tensor, image: GridSize) -> Tensor:
    """Return (A, H, W) masks: at each point the smooth maximum of the values in reach times the kernel, and
    bilinear between the points. Beyond an edge the points are mirrored."""
    rows, columns = (
        mirrored(count, (size - 1) // 2, grid)
        for count, size in zip(grid.shape[1:], kernel.shape, strict=True)
    )
    padded = grid[:, rows][:, :, columns][:, None]
    values = F.unfold(padded, kernel.shape) * kernel.flatten()[:, None]  # (A, points in reach, points)
    masks = (values * (values / TEMPERATURE).softmax(1)).sum(1)
    return resize(masks.unflatten(1, grid.shape[1:])[None], image, "bilinear")[0]


def mirrored(count: int, reach: int, like: Tensor) -> Tensor:
    """Return the indices of `count` points and, on both sides, those of the mirrored ones."""
    index = torch.arange(-reach, count + reach, device=like.device) % (2 * count)
    return torch.minimum(index, 2 * count - 1 - index)


def nearest_of_area(masks: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the (A, H, W) masks of zeros and ones, with so many ones, that are nearest to these; pixels with
    equal claims share what is left for them."""
    values = masks.flatten(1)
    total = values.shape[1]
    last = [row.kthvalue(total - n + 1).values for row, n in zip(values, counts, strict=True)]
    above = values - torch.stack(last)[:, None]
    equal, more = above.abs() <= TIED, above > TIED
    left = torch.tensor(counts, device=values.device) - more.sum(1)
    return (more + equal * (left.to(values) / equal.sum(1))[:, None]).view_as(masks)


def shown_through(masks: Tensor, levels: Tensor) -> Tensor:
    """Return (A, C, H, W) images, sharp where a mask is 1 and blurred most where it is 0; between two levels
    linearly."""
    place = masks * (len(levels) - 1)
    low = place.detach().floor().clamp(max=len(levels) - 2)
    index = low.long()[:, None, None].expand(-1, -1, levels.shape[1], -1, -1)
    stack = levels.expand(len(masks), -1, -1, -1, -1)  # (A, L, C, H, W)
    below, above = (stack.gather(1, index + step)[:, 0] for step in (0, 1))
    return below + (place - low)[:, None] * (above - below)


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
