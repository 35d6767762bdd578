"""explain: from images to evidence maps (Eq. 4, 6), and the Explanation that holds them."""

from __future__ import annotations

import base64
import io
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sigcam.boxes import boxes_at
from sigcam.draw import overlay, with_boxes
from sigcam.dual import DualBranch, Passage
from sigcam.errors import DataError
from sigcam.methods import METHODS, method_name
from sigcam.probe import Branch, Probe, Target, branch_logits, class_score, full, resize, unit_range
from sigcam.trace import Size

log = logging.getLogger("sigcam")
Scale = Literal["unit", "raw"]
Picture = Image.Image | str | Path
Classes = int | Sequence[int] | Tensor | Literal["top5", "positive", "all"] | None


@dataclass(frozen=True, repr=False)
class Explanation:
    """Maps of one class (or K) per image, and the scores of those classes.

    Args:
        maps: (B, H, W), or (B, K, H, W); in [0, 1] unless `scale` is "raw".
        classes: (B,) or (B, K) class indices; -1 pads "positive".
        probability: the softmax head's probability of the class.
        evidence: the sigmoid branch's score of the class, in [0, 1], each class judged by itself; it means
            nothing unless the branch is `fitted`.
        logits: the class's logit in the branch that the maps explain.
        positive_share: how much of the evidence before clamping is positive, in [0, 1].
        blank: whether a map is all zero; `notes` says why.
    """

    maps: Tensor
    classes: Tensor
    probability: Tensor
    evidence: Tensor
    logits: Tensor
    positive_share: Tensor
    blank: Tensor
    notes: tuple[str, ...]
    method: str
    branch: Branch
    clamp: bool
    scale: Scale
    fitted: bool
    class_names: tuple[str, ...] | None = None
    pictures: tuple[Image.Image, ...] = ()
    images: Tensor | None = None

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.maps.shape))
        how = f"{self.method}, {self.branch} branch, clamp={self.clamp}, {self.scale}"
        return f"Explanation({shape} maps: {how})"

    def __len__(self) -> int:
        return len(self.maps)

    def name(self, index: int) -> str:
        """The name of class `index`, or its number."""
        return (
            self.class_names[index]
            if self.class_names and 0 <= index < len(self.class_names)
            else f"class {index}"
        )

    def first_maps(self) -> Tensor:
        """(B, H, W): the maps, or each image's first where there are several."""
        return self.maps if self.maps.ndim == 3 else self.maps[:, 0]

    def boxes(self, threshold: float = 0.2, mode: Literal["largest", "all"] = "largest") -> list[Tensor]:
        """Per image, xyxy boxes (G, 4) in map pixels around what is above `threshold` of the map's peak."""
        maps = self.first_maps()
        if self.scale == "raw":
            maps = unit_range(maps if self.method == "cam" else maps.relu())
        return boxes_at(maps, threshold, mode)

    def overlay(self, *, boxes: float | None = None) -> list[Image.Image]:
        """Per image, the picture with its map on it; `boxes` is a threshold at which to draw the box too."""
        drawn = [
            overlay(picture, values, signed=self.scale == "raw")
            for picture, values in zip(self._pictures(), self.first_maps(), strict=True)
        ]
        if boxes is None:
            return drawn
        return [with_boxes(d, b.tolist()) for d, b in zip(drawn, self.boxes(boxes), strict=True)]

    def save(
        self, folder: str | Path, names: Sequence[str] | None = None, *, threshold: float | None = None
    ) -> list[Path]:
        """Writes overlays (PNG), maps (NPY) and scores (explanation.json); returns the overlays' paths.

        Args:
            names: of the files, without ending; by default 0000, 0001, ...
            threshold: draws the box at this threshold on the overlay.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = names or [f"{i:04d}" for i in range(len(self))]
        written = []
        for stem, picture, values in zip(names, self.overlay(boxes=threshold), self.maps, strict=True):
            written.append(folder / f"{stem}.png")
            picture.save(written[-1])
            np.save(folder / f"{stem}.npy", values.detach().cpu().float().numpy())
        about = [row | {"name": stem} for stem, row in zip(names, self.rows(), strict=True)]
        (folder / "explanation.json").write_text(json.dumps(about, indent=1))
        return written

    def rows(self) -> list[dict[str, Any]]:
        """Per image, plain numbers: class, probability, evidence, logit, share of positive evidence."""
        rows = []
        for i in range(len(self)):
            index = self.classes[i].reshape(-1).tolist()
            rows.append(
                {
                    "class": index if self.maps.ndim == 4 else index[0],
                    "class_name": [self.name(k) for k in index]
                    if self.maps.ndim == 4
                    else self.name(index[0]),
                    "probability": self.probability[i].tolist(),
                    "evidence": self.evidence[i].tolist() if self.fitted else None,
                    "logit": self.logits[i].tolist(),
                    "positive_share": self.positive_share[i].tolist(),
                    "blank": self.blank[i].tolist(),
                    "method": self.method,
                    "branch": self.branch,
                    "clamp": self.clamp,
                    "scale": self.scale,
                }
            )
        return rows

    def _pictures(self) -> Sequence[Image.Image]:
        if self.pictures:
            return self.pictures
        assert self.images is not None
        flat = (
            self.images.detach().float().flatten(1)
        )  # shown between their extremes: mean and std are unknown
        low, high = flat.amin(1)[:, None, None, None], flat.amax(1)[:, None, None, None]
        shown = (255 * (self.images.detach().float() - low) / (high - low).clamp(min=1e-12)).byte().cpu()
        shown = shown[:, :3] if shown.shape[1] >= 3 else shown[:, :1].expand(-1, 3, -1, -1)
        return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in shown]

    def _repr_html_(self) -> str:
        cells = []
        for picture, row in zip(self.overlay(), self.rows(), strict=True):
            buffer = io.BytesIO()
            picture.save(buffer, "PNG")
            source = base64.b64encode(buffer.getvalue()).decode()
            first = {k: v[0] if isinstance(v, list) else v for k, v in row.items()}
            said = [escape(first["class_name"]), f"probability {first['probability']:.3f}"]
            said += [f"evidence {first['evidence']:.3f}"] if self.fitted else []
            said += ["blank map"] if first["blank"] else []
            cells.append(
                f"<figure style='display:inline-block;margin:4px'><img src='data:image/png;base64,{source}'>"
                f"<figcaption>{'<br>'.join(said)}</figcaption></figure>"
            )
        return "".join(cells)


def explain(
    net: DualBranch,
    images: Tensor | Picture | Sequence[Picture],
    method: str = "grad-cam",
    *,
    branch: Branch = "sigmoid",
    clamp: bool | None = None,
    classes: Classes = None,
    target: Target = class_score,
    scale: Scale = "unit",
    size: Literal["image", "features"] | Size | None = None,
) -> Explanation:
    """Evidence maps for one class per image, in [0, 1], at image size (Eq. 4, 6; clamp: Sec. 3.3).

    Args:
        images: a (B, C, H, W) batch as the model takes it; or pictures (PIL or paths) where `net.transform`
            is known.
        branch: "sigmoid", "softmax", or "centred": the softmax head with the mean over classes taken off.
        clamp: keep positive channel weights only; by default on the sigmoid branch's unit maps.
        classes: an int for all images, one per image, (B, K), "top5", "positive" (evidence above one half)
            or "all";
            by default what the softmax head predicts.
        scale: "unit" is each map from 0 to 1; "raw" is signed, in logits: no ReLU, no scaling.
        size: "image" (default), "features" keeps P x Q (default for "all"), or (height, width).
    """
    if not isinstance(net, DualBranch):
        raise DataError(
            f"explain takes what attach returns, not {type(net).__name__}: net = sigcam.attach(model)."
        )
    batch, pictures = _as_batch(net, images)
    passage = net.run(batch, grad=True)
    found = explain_passage(
        net,
        passage,
        method,
        branch=branch,
        clamp=clamp,
        classes=classes,
        target=target,
        scale=scale,
        size=size,
    )
    for note in found.notes:
        log.warning(note)
    return replace(found, pictures=pictures, images=batch)


def explain_passage(
    net: DualBranch,
    passage: Passage,
    method: str = "grad-cam",
    *,
    branch: Branch = "sigmoid",
    clamp: bool | None = None,
    classes: Classes = None,
    target: Target = class_score,
    scale: Scale = "unit",
    size: Literal["image", "features"] | Size | None = None,
) -> Explanation:
    """As `explain`, from what `net.run(images, grad=True)` gave: one pass serves any number of them."""
    name = method_name(method)
    if branch not in ("sigmoid", "softmax", "centred"):
        raise DataError(f"unknown branch {branch!r}: there are sigmoid, softmax and centred.")
    if scale not in ("unit", "raw"):
        raise DataError(f"unknown scale {scale!r}: there are unit and raw.")
    if not (size in (None, "image", "features") or (isinstance(size, tuple | list) and len(size) == 2)):
        raise DataError(f"size is 'image', 'features' or (height, width), not {size!r}.")
    if name == "cam" and target is not class_score:
        raise DataError("'cam' reads the class's own weights and knows no other target: use 'grad-cam'.")
    if clamp is None:
        clamp = branch == "sigmoid" and scale == "unit"  # the softmax baseline keeps its signed weights
    if branch == "sigmoid" and not net.fitted:
        _warn_unfitted(net)
    with torch.inference_mode(False), torch.no_grad():
        chosen, several = _choose_classes(net, passage, classes)  # (B, K)
        if size is None:
            size = "features" if isinstance(classes, str) and classes == "all" else "image"
        out = (
            passage.image if size == "image" else passage.features.shape[-2:] if size == "features" else size
        )
        maps, shares, notes = list[Tensor](), list[Tensor](), list[str]()
        for column in chosen.T:  # one backbone pass serves all
            with torch.enable_grad():
                probe = Probe(net, passage, branch=branch, classes=column.clamp(min=0), target=target)
                weights = METHODS[name](probe).detach()  # w  (B, N, 1, 1) or (B, N, P, Q)
            if scale == "raw" and name != "cam":
                weights = (
                    weights * probe.features[0, 0].numel()
                )  # a gradient per cell, as a weight of the mean
            share = _positive_share(weights, probe.features)
            kept = weights.clamp(min=0) if clamp else weights  # keep evidence, drop inhibition
            low = (kept * probe.features).sum(1)  # M  (B, P, Q)
            maps.append(finish(low, name, (out[0], out[1]), scale))
            shares.append(share)
            notes += _why_blank(maps[-1], weights, low, clamp, asked=column >= 0)
        stacked = torch.stack(maps, 1) * (chosen >= 0)[:, :, None, None]  # (B, K, H, W)
        scores = Scores.of(net, passage, branch, chosen)

    def shape(values: Tensor) -> Tensor:
        return values if several else values[:, 0]

    return Explanation(
        maps=shape(stacked),
        classes=shape(chosen),
        probability=shape(scores.probability),
        evidence=shape(scores.evidence),
        logits=shape(scores.logits),
        positive_share=shape(torch.stack(shares, 1)),
        blank=shape(~stacked.flatten(2).any(2)),
        notes=tuple(notes),
        method=name,
        branch=branch,
        clamp=clamp,
        scale=scale,
        fitted=net.fitted,
        class_names=net.class_names,
    )


def finish(maps: Tensor, method: str, size: Size, scale: Scale) -> Tensor:
    """Low-resolution maps to score maps (PROTOCOL 4.3): path A for cam, path B for every other method."""
    if method == "cam":
        if scale == "raw":
            return resize(maps, size, "bicubic")
        flat = maps.flatten(1)
        varied = (flat.amax(1) > flat.amin(1))[:, None, None]  # rounding in the resize would be stretched
        return unit_range(resize(torch.where(varied, maps, 0.0), size, "bicubic"))
    if scale == "raw":
        return resize(maps, size, "bilinear")
    maps = unit_range(maps.relu(), eps=1e-7)
    maps = unit_range(resize(maps, size, "bilinear").relu(), eps=1e-7)
    return unit_range(maps)


@dataclass(frozen=True)
class Scores:
    """Three numbers for each (image, class), all (B, K)."""

    probability: Tensor
    evidence: Tensor
    logits: Tensor

    @staticmethod
    def of(net: DualBranch, passage: Passage, branch: Branch, chosen: Tensor) -> Scores:
        """The softmax head's probability, the sigmoid branch's evidence, and the branch's logit."""
        explained, evidence = (full(branch_logits(passage, b).detach()) for b in (branch, "sigmoid"))
        probability = full(passage.softmax)
        if net.split.output == "logits":
            probability = probability.sigmoid() if net.classes == 1 else probability.softmax(1)
        index = chosen.clamp(min=0)
        if net.classes == 1:
            sign = 2 * index - 1
            probability = torch.where(index == 1, probability, 1 - probability)
            return Scores(probability, (evidence * sign).sigmoid(), explained * sign)
        return Scores(
            probability.gather(1, index), evidence.gather(1, index).sigmoid(), explained.gather(1, index)
        )


def _as_batch(
    net: DualBranch, images: Tensor | Picture | Sequence[Picture]
) -> tuple[Tensor, tuple[Image.Image, ...]]:
    if isinstance(images, Tensor):
        if images.ndim != 4 or not len(images):
            raise DataError(f"images must be (B, C, H, W) with B >= 1, not {tuple(images.shape)}.")
        if images.device != net.device:
            raise DataError(
                f"images are on {images.device}, the network on {net.device}: move one with .to(...)."
            )
        return images, ()
    if net.transform is None:
        raise DataError("pictures need preprocessing: set net.transform, or give a (B, C, H, W) tensor.")
    from sigcam.data.folder import open_picture

    given = [images] if isinstance(images, Image.Image | str | Path) else list(images)
    if not given:
        raise DataError("no pictures were given.")
    for item in given:
        if not isinstance(item, Image.Image | str | Path):
            what = "a (B, C, H, W) tensor, or pictures: PIL images or paths"
            raise DataError(f"images must be {what}, not {type(item).__name__}.")
    pictures = tuple(p.convert("RGB") if isinstance(p, Image.Image) else open_picture(Path(p)) for p in given)
    batch = torch.stack([net.transform(p) for p in pictures])
    seen = getattr(
        net.transform, "picture", None
    )  # what of a picture the network sees; else it is drawn from
    shown = (
        tuple(seen(p) for p in pictures) if seen else ()
    )  # the batch itself, so that maps lie where they belong
    return batch.to(net.device, next(net.model.parameters()).dtype), shown


def _choose_classes(net: DualBranch, passage: Passage, classes: Classes) -> tuple[Tensor, bool]:
    """(B, K) class indices, and whether the caller asked for several per image."""
    batch, device = len(passage.softmax), passage.softmax.device
    count = max(net.classes, 2)  # one logit tells two classes apart
    if classes is None:
        if net.classes == 1:
            level = 0.5 if net.split.output == "probabilities" else 0.0
            return (passage.softmax > level).long(), False
        return passage.softmax.argmax(1, keepdim=True), False
    if isinstance(classes, str):
        if classes == "all":
            return torch.arange(count, device=device).expand(batch, count), True
        if classes == "top5":
            logits = passage.softmax
            ranked = torch.cat([-logits, logits], 1) if net.classes == 1 else logits
            return ranked.topk(min(5, count), dim=1).indices, True
        if classes == "positive":
            logits = passage.sigmoid.detach()
            ranked = torch.cat([-logits, logits], 1) if net.classes == 1 else logits
            most = max(1, int((ranked > 0).sum(1).max()))
            top = ranked.topk(most, dim=1)
            return torch.where(top.values > 0, top.indices, -1), True
        raise DataError(f"classes={classes!r} is unknown: give indices, 'top5', 'positive' or 'all'.")
    index = torch.as_tensor(classes, device=device)
    if index.is_floating_point() or index.dtype == torch.bool:
        raise DataError(f"classes must be whole numbers, not {index.dtype}.")
    several = index.ndim == 2
    if index.ndim == 0:
        index = index.expand(batch)[:, None]
    elif index.ndim == 1:
        index = index[:, None]
    if index.ndim != 2 or len(index) != batch:
        raise DataError(
            f"classes of shape {tuple(torch.as_tensor(classes).shape)} do not fit {batch} image(s): give "
            "one int, "
            "one per image, or a (B, K) tensor."
        )
    if bool(((index < 0) | (index >= count)).any()):
        wrong = int(index[(index < 0) | (index >= count)][0])
        raise DataError(f"class {wrong} does not exist: this classifier has classes 0 to {count - 1}.")
    return index.long(), several


def _positive_share(weights: Tensor, features: Tensor) -> Tensor:
    """(B,) sum of positive parts over sum of sizes of all weight x feature products."""
    products = (weights * features).flatten(1)
    return products.clamp(min=0).sum(1) / products.abs().sum(1).clamp(min=1e-30)


def _why_blank(maps: Tensor, weights: Tensor, low: Tensor, clamp: bool, asked: Tensor) -> list[str]:
    notes = []
    for i in (~maps.flatten(1).any(1) & asked).nonzero().flatten().tolist():
        if not bool(torch.isfinite(low[i]).all()):
            why = "its values are not finite: check the images and the model's weights"
        elif not bool(weights[i].count_nonzero()):
            why = "no gradient reaches the layer: name another one in attach(model, layer=...)"
        elif clamp and not bool((weights[i] > 0).any()):
            why = "no channel has a positive weight, and clamping keeps positive ones only: see scale='raw'"
        elif bool((low[i] <= 0).all()):
            why = "all evidence is negative and the ReLU removes it: see scale='raw', or the sigmoid branch"
        else:
            why = "it is constant"
        notes.append(f"the map of image {i} is blank: {why}.")
    return notes


def _warn_unfitted(net: DualBranch) -> None:
    if not net.warned:
        net.warned = True
        warnings.warn(
            "the sigmoid branch is not fitted, so these maps are noise: fit it (sigcam.fit), load one "
            "(sigcam.load), "
            "or use branch='centred', which needs no training.",
            stacklevel=4,  # where explain was called
        )
