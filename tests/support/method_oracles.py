"""Slow, obvious versions of every CAM method for one image and one class, written from the papers' formulas.

Everything is float64: one forward hook on a plain model, plain autograd, then NumPy. Options put in what a
peer does instead; their defaults are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from support.oracles import min_max

Array = NDArray[Any]
Target = Callable[[Tensor, int], Tensor]  # logits (C,) of one image and a class -> the scalar to explain

GRADIENT_METHODS = (
    *("grad-cam", "grad-cam++", "xgrad-cam", "layer-cam", "hires-cam", "eigengrad-cam"),
    *("grad-cam-elementwise", "shapley-cam", "seg-eigen-cam"),
)
OTHER_METHODS = ("score-cam", "ablation-cam", "eigen-cam", "random-cam")
REPEATED_METHODS = ("smoothgrad-cam++", "ss-cam", "is-cam")  # the same with more passes: slow


# ----------------------------------------------------------------------------------------------- targets


def logit(logits: Tensor, k: int) -> Tensor:
    return logits[k]


def softmax_probability(logits: Tensor, k: int) -> Tensor:
    return logits[k].exp() / logits.exp().sum()


def sigmoid_probability(logits: Tensor, k: int) -> Tensor:
    return 1 / (1 + (-logits[k]).exp())


def nearest(logits: Tensor, k: int) -> list[int]:
    """The three other classes whose logits are nearest to z_k."""
    others = [d for d in range(len(logits)) if d != k]
    return sorted(others, key=lambda d: abs(float((logits[d] - logits[k]).detach())))[:3]


def finer(logits: Tensor, k: int, *, rivals: Sequence[int] | None = None) -> Tensor:
    """z_k minus its rivals' mean logit, weighted by probability (Finer-CAM, alpha 1)."""
    top = bottom = torch.zeros((), dtype=logits.dtype)
    for d in nearest(logits, k) if rivals is None else rivals:
        p = softmax_probability(logits, d)
        top, bottom = top + p * logits[d], bottom + p
    return logits[k] - top / bottom


# -------------------------------------------------------------------------------------------- one network


@dataclass
class Plain:
    """A plain model, one of its layers, and how one image's output of that layer is a view (N, P, Q)."""

    model: nn.Module
    layer: str
    last: str  # its last linear layer
    fold: Callable[[Tensor], Tensor] = lambda output: output

    def run(self, image: Tensor, change: Callable[[Tensor], None] | None = None) -> tuple[Tensor, Tensor]:
        """Logits (C,) and the layer's output, which `change` may alter in place, folded, on its way."""
        caught: list[Tensor] = []

        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            out = out.clone()
            if change is not None:
                change(self.fold(out[0]))
            caught.append(out)
            return out.clone()  # so that an in-place step after the layer alters a copy

        handle = self.model.get_submodule(self.layer).register_forward_hook(hook)
        logits = self.model(image[None])[0]
        handle.remove()
        return logits, caught[0]

    def features(self, image: Tensor) -> Array:
        values: Array = self.fold(self.run(image)[1][0].detach()).numpy()
        return values

    def gradient(
        self, image: Tensor, k: int, target: Target, change: Callable[[Tensor], None] | None = None
    ) -> Array:
        logits, output = self.run(image, change)
        values: Array = self.fold(torch.autograd.grad(target(logits, k), output)[0][0]).numpy()
        return values

    def score(
        self, image: Tensor, k: int, target: Target, change: Callable[[Tensor], None] | None = None
    ) -> float:
        # With gradient recorded though none is taken: attention has another path without.
        return float(target(self.run(image, change)[0], k).detach())


# ------------------------------------------------------------------- weights (N, P, Q), or constant over P, Q


def cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    head = plain.model.get_submodule(plain.last)
    assert isinstance(head, nn.Linear)
    row: Array = head.weight[k].detach().numpy()[:, None, None]
    return row


def grad_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    g = plain.gradient(image, k, target)
    return np.array([np.full_like(g_i, g_i.mean()) for g_i in g])


def grad_cam_pp(plain: Plain, image: Tensor, k: int, target: Target, *, divide: bool = True) -> Array:
    features, g = plain.features(image), plain.gradient(image, k, target)
    weights = np.zeros_like(g)
    for i, (a_i, g_i) in enumerate(zip(features, g, strict=True)):
        alpha = 0.0
        for slope in g_i.flat:
            if slope != 0:
                a = slope**2
                if divide:
                    a /= 2 * slope**2 + a_i.sum() * slope**3 + 1e-6
                alpha += a * max(slope, 0)
        weights[i] = alpha
    return weights


def xgrad_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    features, g = plain.features(image), plain.gradient(image, k, target)
    weights = np.zeros_like(g)
    for i, (a_i, g_i) in enumerate(zip(features, g, strict=True)):
        weights[i] = (g_i * a_i).sum() / (a_i.sum() + 1e-7)
    return weights


def layer_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    return np.maximum(plain.gradient(image, k, target), 0)


def hires_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    return plain.gradient(image, k, target)


def grad_cam_elementwise(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    g, features = plain.gradient(image, k, target), plain.features(image)
    weights = np.zeros_like(g)
    for place in np.ndindex(*g.shape):
        if max(g[place] * features[place], 0) > 0:
            weights[place] = g[place]
    return weights


def shapley_cam(plain: Plain, image: Tensor, k: int, target: Target, *, step: float = 1e-4) -> Array:
    """The Hessian times F is how the gradient changes when F grows in proportion."""
    less, more = (
        plain.gradient(image, k, target, lambda f, factor=factor: f.mul_(factor))  # type: ignore[misc]
        for factor in (1 - step, 1 + step)
    )
    weights = plain.gradient(image, k, target) - (more - less) / (2 * step) / 2
    return np.array([np.full_like(w_i, w_i.mean()) for w_i in weights])


def smoothgrad_cam_pp(
    plain: Plain, image: Tensor, k: int, target: Target, *, noise: float = 0.15, copies: int = 8
) -> Array:
    features, spread = plain.features(image), float(image.max() - image.min())
    gradients = []
    for seed in range(copies):
        drawn = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
        gradients.append(plain.gradient(image + noise * spread * drawn.double(), k, target))
    weights = np.zeros_like(features)
    for i, a_i in enumerate(features):
        for place in np.ndindex(*a_i.shape):
            first, second, third = (np.mean([g[i][place] ** power for g in gradients]) for power in (1, 2, 3))
            if second != 0:
                alpha = second / (2 * second + a_i.sum() * third + 1e-6)
                weights[i] += alpha * max(first, 0)
    return weights


def random_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    features = plain.features(image)
    drawn = torch.rand(len(features), generator=torch.Generator().manual_seed(0)).double().numpy()
    weights: Array = np.zeros_like(features) + (2 * drawn - 1)[:, None, None]
    return weights


def ss_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    noises = [torch.randn(image.shape[1:], generator=torch.Generator().manual_seed(n)) for n in range(10)]
    changes = [lambda mask, n=n: mask + 2 * n.double().numpy() for n in noises]
    return score_cam(plain, image, k, target, changes=changes)


def is_cam(
    plain: Plain, image: Tensor, k: int, target: Target, *, first: int = 0, scaled_first: bool = False
) -> Array:
    strengths = [sum(j / 10 for j in range(first, first + i)) for i in range(1, 11)]
    changes = [lambda mask, c=c: c * mask for c in strengths]
    return score_cam(plain, image, k, target, scaled_first=scaled_first, changes=changes)


def score_cam(
    plain: Plain,
    image: Tensor,
    k: int,
    target: Target,
    *,
    channels: Sequence[int] | None = None,
    aligned: bool = False,
    scaled_first: bool = False,
    changes: Sequence[Callable[[Array], Array]] = (lambda mask: mask,),
) -> Array:
    """Softmax over channels of the scores of the image behind each channel's mask, upsampled, then scaled."""
    features = plain.features(image)
    chosen = range(len(features)) if channels is None else channels
    scores = []
    for i in chosen:
        mask = features[i]
        steps: list[Callable[[Array], Array]] = [
            lambda m: bilinear(m, image.shape[1], image.shape[2], aligned=aligned),
            lambda m: (m - m.min()) / (m.max() - m.min() + 1e-8),
        ]
        for step in reversed(steps) if scaled_first else steps:
            mask = step(mask)
        changed = [image * torch.from_numpy(change(mask)) for change in changes]
        scores.append(np.mean([plain.score(masked, k, target) for masked in changed]))
    powers = np.exp(np.array(scores) - max(scores))
    weights = np.zeros_like(features)
    weights[list(chosen)] = (powers / powers.sum())[:, None, None]
    return weights


def ablation_cam(
    plain: Plain,
    image: Tensor,
    k: int,
    target: Target,
    *,
    value: Callable[[int, float], float] = lambda channel, lowest: 0.0,
    signed: bool = False,
) -> Array:
    """The share of the score that is lost with each channel: (s - s_i) / |s|."""
    features, whole = plain.features(image), plain.score(image, k, target)
    weights = np.zeros_like(features)
    for i in range(len(features)):
        fill = value(i, float(features.min()))
        left = plain.score(image, k, target, lambda f, i=i, fill=fill: f[i].fill_(fill))  # type: ignore[misc]
        weights[i] = (whole - left) / (whole if signed else abs(whole))
    return weights


def first_direction(stack: Array, towards: Array) -> Array:
    """First left singular vector (N,) of N maps (N, P, Q) as rows, its map in agreement with `towards` (P,
    Q)."""
    rows = stack.reshape(len(stack), -1)
    v: Array = np.linalg.svd(rows, full_matrices=False)[0][:, 0]
    return v if (v @ rows) @ towards.ravel() >= 0 else -v


def eigen_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    features = plain.features(image)
    return first_direction(features, np.sqrt((features**2).sum(0)))[:, None, None]


def eigengrad_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    g = plain.gradient(image, k, target)
    product = g * plain.features(image)
    return g * first_direction(product, product.sum(0))[:, None, None]


def seg_eigen_cam(plain: Plain, image: Tensor, k: int, target: Target) -> Array:
    sizes = np.abs(plain.gradient(image, k, target))
    product = sizes * plain.features(image)
    return sizes * first_direction(product, product.sum(0))[:, None, None]


def centred_projection(stack: Array) -> Array:
    """What a peer draws instead: each map's mean taken off first, and the sign as it comes."""
    rows = stack.reshape(len(stack), -1)
    rows = rows - rows.mean(1, keepdims=True)
    projected: Array = (np.linalg.svd(rows, full_matrices=False)[0][:, 0] @ rows).reshape(stack.shape[1:])
    return projected


WEIGHTS: dict[str, Callable[..., Array]] = {
    "cam": cam,
    "grad-cam": grad_cam,
    "grad-cam++": grad_cam_pp,
    "xgrad-cam": xgrad_cam,
    "layer-cam": layer_cam,
    "hires-cam": hires_cam,
    "score-cam": score_cam,
    "ablation-cam": ablation_cam,
    "eigen-cam": eigen_cam,
    "eigengrad-cam": eigengrad_cam,
    "grad-cam-elementwise": grad_cam_elementwise,
    "shapley-cam": shapley_cam,
    "seg-eigen-cam": seg_eigen_cam,
    "random-cam": random_cam,
    "smoothgrad-cam++": smoothgrad_cam_pp,
    "ss-cam": ss_cam,
    "is-cam": is_cam,
}


# ------------------------------------------------------------------------------- maps (P, Q) without weights


def kpca_cam(plain: Plain, image: Tensor) -> Array:
    """Kernel PCA of the cells (Schoelkopf et al., 1998): the first component of each."""
    features = plain.features(image)
    cells = features.reshape(len(features), -1).T
    mean = cells.mean(0)
    kernel = np.array([[np.tanh((x - mean) @ (y - mean) / len(x) + 1) for y in cells] for x in cells])
    centre = np.eye(len(cells)) - 1 / len(cells)
    left, values, _ = np.linalg.svd(centre @ kernel @ centre)
    kernel = centre @ kernel @ centre
    best = max(range(len(values)), key=lambda n: left[:, n] @ kernel @ left[:, n])
    component: Array = left[:, best] * np.sqrt(values[best])
    upright = component @ np.sqrt((cells**2).sum(1)) >= 0
    return (component if upright else -component).reshape(features.shape[1:])


def fem(plain: Plain, image: Tensor, *, shares: bool = False) -> Array:
    """With `shares`, channels weighted by their share of cells far above the mean, as a peer does instead."""
    features = plain.features(image)
    total = np.zeros(features.shape[1:])
    for a_i in features:
        mean = sum(a_i.flat) / a_i.size
        deviation = (sum((a - mean) ** 2 for a in a_i.flat) / a_i.size) ** 0.5
        far_above = [a >= mean + 2 * deviation for a in a_i.flat]
        for place, above in zip(np.ndindex(*a_i.shape), far_above, strict=True):
            total[place] += np.mean(far_above) * a_i[place] if shares else mean * above
    return total


MAPS: dict[str, Callable[..., Array]] = {"kpca-cam": kpca_cam, "fem": fem}


# -------------------------------------------------------------------------------------------------- maps


def eigen_smoothed(
    method: str, plain: Plain, image: Tensor, k: int, target: Target, *, clamp: bool = False
) -> Array:
    """Project each cell's weighted channels (N,) on the direction along which cells vary most, by the
    eigenvectors of their N x N sum of squares; the projections agree in sign with the plain map."""
    weights, features = WEIGHTS[method](plain, image, k, target), plain.features(image)
    weighted = np.zeros_like(features)
    for i, a_i in enumerate(features):
        weighted[i] = np.maximum(weights[i], 0) * a_i if clamp else weights[i] * a_i
    squares = np.zeros((len(features), len(features)))
    for cell in weighted.reshape(len(weighted), -1).T:
        squares += np.outer(cell, cell)
    values, vectors = np.linalg.eigh(squares)
    low: Array = np.tensordot(vectors[:, np.argmax(values)], weighted, 1)
    return low if (low * weighted.sum(0)).sum() >= 0 else -low


def low_map(
    method: str,
    plain: Plain,
    image: Tensor,
    k: int,
    target: Target = logit,
    *,
    clamp: bool = False,
    **choice: Any,
) -> Array:
    """The weighted sum of channels (P, Q), signed: no ReLU, no scaling."""
    weights = WEIGHTS[method](plain, image, k, target, **choice)
    if clamp:
        weights = np.maximum(weights, 0)
    features = plain.features(image)
    total = np.zeros(features.shape[1:])
    for i, a_i in enumerate(features):
        total += weights[i] * a_i
    return total


def raw_map(method: str, plain: Plain, image: Tensor, k: int, target: Target, *, clamp: bool) -> Array:
    """`scale="raw"` at P x Q: a gradient per cell becomes a weight of the mean over cells."""
    low = low_map(method, plain, image, k, target, clamp=clamp)
    return low * low.size if method in (*GRADIENT_METHODS, "smoothgrad-cam++") else low


def fused(method: str, lows: Sequence[Array], height: int, width: int) -> Array:
    """Several layers' maps as one: the mean of their unit maps; for Layer-CAM their maximum, each over its
    own largest value, and all but the last layer's drawn together by tanh (Eq. 9 of its paper, gamma 2)."""
    if method != "layer-cam":
        return averaged(lows, height, width)
    *shallow, last = (np.maximum(low, 0) / low.max() for low in lows)
    scaled = [*(np.tanh(2 * low) for low in shallow), last]
    return min_max(np.max([bilinear(low, height, width) for low in scaled], axis=0))


def averaged(lows: Sequence[Array], height: int, width: int) -> Array:
    """The mean over layers of maps scaled, then enlarged (section 4.3, path B)."""
    scaled = [min_max(np.maximum(low, 0), 1e-7) for low in lows]
    return min_max(np.mean([bilinear(low, height, width) for low in scaled], axis=0))


def multiplied(lows: Sequence[Array], height: int, width: int) -> Array:
    """RefineCAM: the product over layers of maps without negative values, enlarged, then scaled."""
    product = np.ones((height, width))
    for low in lows:
        product = product * min_max(bilinear(np.maximum(low, 0), height, width))
    return min_max(product)


def bilinear(values: Array, height: int, width: int, *, aligned: bool = False) -> Array:
    """Bilinear resizing between pixel centres, or with the corners' centres on each other if `aligned`."""

    def mix(cells: int, pixels: int) -> Array:
        matrix = np.zeros((pixels, cells))
        for pixel in range(pixels):
            place = pixel * (cells - 1) / (pixels - 1) if aligned else (pixel + 0.5) * cells / pixels - 0.5
            place = min(max(place, 0), cells - 1)
            left = min(int(place), max(cells - 2, 0))
            matrix[pixel, left] += 1 - (place - left)
            matrix[pixel, min(left + 1, cells - 1)] += place - left
        return matrix

    resized: Array = mix(values.shape[0], height) @ values @ mix(values.shape[1], width).T
    return resized


def full_gradient(
    model: nn.Module, image: Tensor, k: int, *, epsilon: float = 0.0, by_layer: bool = False
) -> Array:
    """FullGrad, from zeros added to the output of every convolution and normalisation; a peer adds `epsilon`
    to the range by which it divides, another one takes one range for all channels of a layer."""
    added: list[tuple[Tensor, nn.Module]] = []

    def add(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        added.append((torch.zeros_like(out).requires_grad_(), module))
        return out + added[-1][0]

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    handles = [layer.register_forward_hook(add) for layer in layers]
    pixels = image[None].clone().requires_grad_()
    score = model(pixels)[0, k]
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(score, [pixels, *(zeros for zeros, _ in added)])

    def scaled(channels: Array) -> list[Array]:
        sizes = np.abs(channels)
        return list(min_max(sizes)) if by_layer else [min_max(each, epsilon) for each in sizes]

    total = sum(scaled((image * gradients[0][0]).detach().numpy()))
    for g, (_, layer) in zip(gradients[1:], added, strict=True):
        bias: Any = layer.bias
        if isinstance(layer, nn.BatchNorm2d):
            bias = layer.bias - layer.weight * layer.running_mean / (layer.running_var + layer.eps).sqrt()
        for low in scaled(bias.detach().numpy()[:, None, None] * g[0].numpy()):
            total = total + bilinear(low, *image.shape[1:], aligned=by_layer)
    found: Array = total
    return found
