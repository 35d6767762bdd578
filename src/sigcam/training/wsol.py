"""Trainers of weakly supervised localisation (WSOL): plain training with one thing changed each.

A trainer says which images an epoch shows and which logits it judges. The network stays an ordinary
classifier throughout: only `tap` and `ts-cam` leave something in it, layers before the head that its weights
file brings along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from sigcam.core.errors import ConfigError, DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Sample, Samples
from sigcam.models.classifier import Classifier
from sigcam.models.pooling import ThresholdedPool, TokenMaps, read_patches
from sigcam.models.preprocess import IMAGENET_MEAN, Preprocess
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.network.modules import is_norm, replace_module, run_model
from sigcam.network.trace import eval_mode
from sigcam.training.augmentation import seed_of
from sigcam.training.background import class_maps, classes_of
from sigcam.training.feature_reader import HeadInputs

# pixels of the input's side, of 16, 32, 44 and 56; probability (Singh & Lee, 2017, Tables 1 and 6)
HIDDEN_PATCH, HIDE_RATE = 32, 0.5
ERASING_STEPS, ERASED_ABOVE = (
    3,
    0.8,
)  # share of a map's maximum; neither is confirmed, see docs/differences.md
# The next three are those of the authors' own programs.
ACOL_THRESHOLD = 0.6  # delta, of a map from 0 to 1 (Zhang et al., 2018)
DROP_RATE, DROP_THRESHOLD = 0.75, 0.9  # gamma, for ResNet-50-SE (Choe & Shim, 2019)
TAP_THRESHOLD = 0.1  # for VGG-16 (Bae et al., 2020)


class Trainer:
    """Softmax cross-entropy on the images as they are: plain training, which each of WSOL changes.

    Args:
        classifier: what is trained, in place.

    Attributes:
        parameters: those of the trainer itself, trained along and thrown away at the end.
    """

    alters_images = False  # whether `samples` are others than those given
    in_steps = False  # whether an epoch depends on how many there are
    of_tokens = False  # whether it is for plain ViTs; the others are for networks with feature maps

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self.parameters = list[nn.Parameter]()

    @staticmethod
    def check_epochs(epochs: int | None) -> None:
        """Raise ConfigError if that is too few."""

    def samples(
        self, samples: Samples, epoch: int, epochs: int, *, seed: int, progress: Progress | None = None
    ) -> Samples:
        """Return what an epoch shows of the training images, in the same order; before it begins."""
        return samples

    def logits(self, run: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return the (B, C) logits whose cross-entropies are summed, given what runs the network."""
        return (run(inputs),)

    def state(self) -> dict[str, Any]:
        """Return what an interrupted training needs besides the network."""
        return {"parameters": [parameter.detach() for parameter in self.parameters]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        with torch.no_grad():
            for parameter, saved in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(saved)


class HideAndSeek(Trainer):
    """Each patch of 32 x 32 pixels, at the network's input size, is hidden with probability 0.5, anew in each
    epoch; hidden pixels have the mean that preprocessing subtracts (Singh & Lee, ICCV 2017)."""

    alters_images = True

    def samples(
        self, samples: Samples, epoch: int, epochs: int, *, seed: int, progress: Progress | None = None
    ) -> Samples:
        transform = self.classifier.transform
        size = (transform.height, transform.width) if isinstance(transform, Preprocess) else (224, 224)
        grid = [max(1, round(side / HIDDEN_PATCH)) for side in size]
        generator = torch.Generator().manual_seed(seed_of(seed, epoch, "has"))
        hidden = torch.rand(len(samples), *grid, generator=generator) < HIDE_RATE
        return _without(samples, hidden, transform)


class AdversarialErasing(Trainer):
    """Training in three steps of equally many epochs; after a step, what the label's map shows as most
    decisive is erased from each training image for good (Wei et al., CVPR 2017).

    The paper begins each step with a new network and merges the regions of all; an ordinary classifier is one
    network, so each step goes on with that of the one before. Maps are those of positive weights alone.
    """

    alters_images = in_steps = True

    def __init__(self, classifier: Classifier) -> None:
        super().__init__(classifier)
        if not isinstance(classifier.transform, Preprocess):
            raise ConfigError("adversarial-erasing must know where maps lie: use a model with a Preprocess.")
        self.step, self.regions = 0, torch.empty(0)  # (n, P, Q): the cells that are erased
        self._shown: tuple[int, Samples] | None = None

    @staticmethod
    def check_epochs(epochs: int | None) -> None:
        if epochs is not None and epochs < ERASING_STEPS:
            raise ConfigError(
                f"adversarial-erasing has {ERASING_STEPS} steps: give it as many epochs or more."
            )

    def samples(
        self, samples: Samples, epoch: int, epochs: int, *, seed: int, progress: Progress | None = None
    ) -> Samples:
        self.check_epochs(epochs)
        step = epoch * ERASING_STEPS // epochs
        if step > self.step:
            found = decisive_cells(self.classifier, self._erased(samples), progress)
            self.regions = found | self.regions if len(self.regions) else found
            self.step, self._shown = step, None
        if self._shown is None or self._shown[0] != step:
            self._shown = step, self._erased(samples)
        return self._shown[1]

    def _erased(self, samples: Samples) -> Samples:
        if not len(self.regions):
            return samples
        return _without(samples, self.regions, self.classifier.transform)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "regions": self.regions}

    def load_state(self, state: dict[str, Any]) -> None:
        self.step, self.regions = state["step"], state["regions"]


@torch.no_grad()
def decisive_cells(classifier: Classifier, samples: Samples, progress: Progress | None = None) -> Tensor:
    """Return (n, P, Q) the cells of each whole image where the map of its label is above 80 % of its maximum;
    none of an image that cannot be read, or whose map is blank."""
    assert isinstance(classifier.transform, Preprocess)
    whole = replace(classifier.transform, resize=None)  # as training views are, before their crop
    net, done = HeadInputs(_attached(classifier)).fast_net, 0
    cells: Tensor | None = None
    for batch in load_batches(samples, whole, batch_size=32):
        if len(batch.images):
            if batch.labels is None:
                raise DataError("training a classifier needs labelled samples.")
            shown = classes_of(batch.labels, net.classes).to(net.device)
            with torch.set_grad_enabled("softmax" not in net.linear):
                passed = net.run(batch.images.to(net.device), grad="softmax" not in net.linear)
                maps = class_maps(net, passed, shown)[:, 0].detach()  # (B, P, Q), never negative
            found = maps > ERASED_ABOVE * maps.amax((1, 2), keepdim=True)
            cells = torch.zeros(len(samples), *maps.shape[1:], dtype=torch.bool) if cells is None else cells
            cells[batch.indices] = found.cpu()
        done += len(batch.indices) + len(batch.skipped)
        if progress:
            progress("erasing", done, len(samples))
    return torch.zeros(len(samples), 1, 1, dtype=torch.bool) if cells is None else cells


class Acol(Trainer):
    """Two heads learn side by side; the second sees the feature maps without the cells where the first one's
    map of the label, stretched to 0 to 1, is above 0.6 (Zhang et al., CVPR 2018).

    The network's own head is the mean of both throughout, and half their difference is the trainer's: the
    mean of two linear heads is a linear head, whose map is the mean of theirs. Steps on these are steps on
    both heads of twice the length. The paper gives each head convolutions of its own and takes the higher of
    both maps.
    """

    def __init__(self, classifier: Classifier) -> None:
        super().__init__(classifier)
        net, self.pool = _attached(classifier), find_pooling(classifier)
        self.head = net.last_layer("softmax")
        weight = self.head.get_parameter("weight")
        self.half = nn.Linear(weight.shape[1], weight.shape[0]).to(weight)
        for parameter in self.half.parameters():
            nn.init.zeros_(parameter)
        self.parameters = list(self.half.parameters())

    def logits(self, run: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        seen = list[Tensor]()
        with _before(self.pool, lambda features: seen.append(features)):
            mean_logits = run(inputs)
        features, layer = seen[-1], linear_weight(self.head)
        assert layer is not None
        first = mean_logits + self.half(features.mean((2, 3)))
        with torch.no_grad():
            maps = class_evidence(features, layer[0] + self.half.weight, labels)
        kept = features * (stretched(maps) <= ACOL_THRESHOLD)[:, None]
        pooled = kept.mean((2, 3))
        return first, F.linear(pooled, *layer) - self.half(pooled)


def class_evidence(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return each image's signed map (B, P, Q) of its label, from F (B, N, P, Q) and weights (C, N)."""
    return torch.einsum("bn,bnpq->bpq", weight[labels].to(features.dtype), features)


def stretched(maps: Tensor) -> Tensor:
    """Return maps (B, P, Q) stretched to 0 to 1; zeros for a constant map."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / (high - low).clamp(min=torch.finfo(maps.dtype).tiny)


class Adl(Trainer):
    """In each step the last feature maps are multiplied by one of two maps made of their mean over channels:
    with probability 0.75 the drop mask, 0 where that mean is 0.9 of its maximum or more, else the importance
    map, its sigmoid (Choe & Shim, CVPR 2019). In eval mode nothing changes.

    The paper has several such layers, and 0.8 for VGG-16.
    """

    def __init__(self, classifier: Classifier) -> None:
        super().__init__(classifier)
        self.pool = find_pooling(classifier)

    def logits(self, run: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        with _before(self.pool, attention_dropped):
            return super().logits(run, inputs, labels)


def attention_dropped(features: Tensor) -> Tensor:
    """Return F (B, N, P, Q) times the drop mask or the importance map, drawn from torch's generator."""
    attention = features.mean(1, keepdim=True)  # (B, 1, P, Q)
    if float(torch.rand(())) < DROP_RATE:
        return features * (attention < DROP_THRESHOLD * attention.amax((2, 3), keepdim=True))
    return features * attention.sigmoid()


class Tap(Trainer):
    """Global average pooling becomes the mean over each channel's cells above 0.1 of its maximum, in training
    and ever after (Bae et al., ECCV 2020).

    Grad-CAM of such a network is w F of the head's weights w, the paper's map: the gradients of a channel's
    cells add up to its weight. The paper's clamping is `clamp`, its percentile `--threshold percentile`.
    """

    def __init__(self, classifier: Classifier) -> None:
        super().__init__(classifier)
        if not any(isinstance(module, ThresholdedPool) for module in classifier.model.modules()):
            pool = find_pooling(classifier)
            replace_module(classifier.model, pool, ThresholdedPool(pool, TAP_THRESHOLD).eval())


class TsCam(Trainer):
    """The head of a plain ViT reads the patch tokens instead of the class token: a new 3x3 convolution makes
    them a map for each class, whose mean is the logit, in training and ever after (Gao et al., ICCV 2021).

    The convolution is a linear head on `TokenMaps`, so CAM of such a network is its semantic maps, and the
    method `ts-cam` multiplies these by attention.
    """

    of_tokens = True

    def __init__(self, classifier: Classifier) -> None:
        super().__init__(classifier)
        if not any(isinstance(module, TokenMaps) for module in classifier.model.modules()):
            read_patches(classifier.model, *find_class_token(classifier))


WSOL: dict[str, type[Trainer]] = {
    "has": HideAndSeek,
    "adversarial-erasing": AdversarialErasing,
    "acol": Acol,
    "adl": Adl,
    "tap": Tap,
    "ts-cam": TsCam,
}


def trainer_named(name: str | None) -> type[Trainer]:
    """Return the trainer of that name, for None that of plain training; ConfigError, with similar names."""
    if name is None:
        return Trainer
    if name not in WSOL:
        near = get_close_matches(name, WSOL, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no trainer {name!r}: {hint}There are {', '.join(WSOL)}.")
    return WSOL[name]


def find_pooling(classifier: Classifier) -> nn.Module:
    """Return the module that averages the last feature maps over the grid for a linear head; ModelError if
    there is none."""
    net, found = _attached(classifier), list[nn.Module]()

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        maps = args[0] if args else None
        if isinstance(maps, Tensor) and isinstance(output, Tensor) and maps.ndim == 4:
            mean = maps.mean((2, 3))
            same = output.numel() == mean.numel() != maps.numel()
            if same and torch.allclose(output.reshape(mean.shape), mean, rtol=1e-4, atol=1e-5):
                found.append(module)

    with torch.no_grad(), eval_mode(classifier.model) as handles:
        for module in classifier.model.modules():
            if next(module.children(), None) is None:
                handles.append(module.register_forward_hook(watch))
        run_model(classifier.model, net.example)
    if "softmax" not in net.linear or not found:
        sentence = f"{classifier.name} has no pooling module that averages maps for one linear layer"
        raise ModelError(f"{sentence}: use has, adversarial-erasing or another network.")
    return found[-1]


def find_class_token(classifier: Classifier) -> tuple[str, str, tuple[int, int, int]]:
    """Return the names of a ViT's last norm and of the linear head that reads the first token of it, and the
    number of tokens before the grid, P and Q; ModelError if there are none."""
    net, read, first_tokens = _attached(classifier), list[Tensor](), list[tuple[str, Tensor]]()
    names = {module: name for name, module in classifier.model.named_modules()}
    head, prefix, (p, q) = net.last_layer("softmax"), net.split.fold.prefix, net.split.fold.grid

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is head:
            read.append(args[0])
        elif is_norm(module) and isinstance(output, Tensor) and output.shape[:-1] == (1, prefix + p * q):
            first_tokens.append((names[module], output[:, 0]))

    with torch.no_grad(), eval_mode(classifier.model) as handles:
        handles += [module.register_forward_hook(watch) for module in names]
        run_model(classifier.model, net.example)
    norms = [name for name, token in first_tokens if torch.equal(token, read[-1])]
    if not prefix or not norms or len(net.split.last) > 1 or not isinstance(head, nn.Linear):
        wanted = "a plain ViT in which one linear layer reads the class token that the last norm returns"
        raise ModelError(f"{classifier.name} is not {wanted}: use another network, or another trainer.")
    return norms[-1], names[head], (prefix, p, q)


def _attached(classifier: Classifier) -> DualBranch:
    return attach(classifier.model, transform=classifier.transform, class_names=classifier.classes)


@contextmanager
def _before(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Pass what enters the module through `change`, which may return None, inside the block."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        changed = change(args[0])
        return None if changed is None else (changed, *args[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _without(samples: Samples, hidden: Tensor, transform: Any) -> Samples:
    """Return the samples with the cells of a grid (n, P, Q) over each image painted in the mean colour."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    if isinstance(transform, Preprocess):
        mean = transform.mean[::-1] if transform.bgr else transform.mean
    colour = tuple(round(255 * level) for level in mean)
    items = (_painted(sample, cells, colour) for sample, cells in zip(samples, hidden, strict=True))
    return Samples(tuple(items), samples.classes)


def _painted(sample: Sample, cells: Tensor, colour: tuple[int, ...]) -> Sample:
    """Return the sample without its file, since its pixels are others."""
    mask = cells.numpy().astype(np.uint8) * 255
    return replace(sample, open=partial(_open_painted, sample.open, mask, colour), path=None)


def _open_painted(open: Callable[[], Image.Image], mask: Any, colour: tuple[int, ...]) -> Image.Image:
    image = open().convert("RGB")
    image.paste(colour, mask=Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    return image
