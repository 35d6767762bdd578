"""What background evidence depends on: its weight, how it is found, what is made of it, the size of maps."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigcam.bench.measure import evaluate_rows, presence, with_presence
from sigcam.bench.networks import BranchFit, networks, paper_fit
from sigcam.bench.paper import HEADS, BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.registry import FINE_DATASETS
from sigcam.bench.tables import ABSOLUTE_METRICS, ALL_VARIANTS, methods_for
from sigcam.core.config import FitConfig
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.training.background import background_cells, class_maps
from sigcam.training.feature_reader import HeadInputs
from sigcam.training.features import Features, extract

WEIGHT = 3.0  # of backgrounds, where another thing changes
NO_WEIGHT = 1e-9  # as good as none, but backgrounds are computed, and maps calibrated on them
ZOOMS = (1.0, 2.0, 3.0)
CELLS = 4  # single background cells of an image


def background(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Ablations of background evidence; the size of maps only where the plan enlarges images."""
    dataset = plan.available(FINE_DATASETS)[0]
    zooms = ZOOMS if plan.zoom != 1 else ZOOMS[:1]
    first = paper_fit(plan, dataset, background=WEIGHT, zooms=zooms)
    chosen = networks(plan, dataset, {"weight 3": first}, progress)
    if not chosen:  # there is no background to learn from
        return []
    l2 = float(chosen["weight 3"].recipe["l2"])
    linear = chosen["weight 3"].linear >= {"softmax", "sigmoid"}
    fits = _fits(plan, dataset, first, replace(first, l2=l2, zooms=(1.0,)), linear, progress)
    nets = networks(plan, dataset, fits, progress)
    net = nets["sigmoid"]
    samples = plan.samples(dataset, "test", plan.ablation_images)
    found = dict[str, Any]()
    if plan.has("pets"):
        pets = plan.samples("pets", "test", plan.ablation_images)
        found = presence(plan, nets, samples, pets, progress)
    rows = list[BenchRow]()
    for zoom in zooms:
        names = [name for name in nets if name != "sigmoid" and (zoom == 1 or name == "weight 3")]
        settings = ALL_VARIANTS | {"methods": methods_for(net)[:1], "zoom": zoom}
        settings |= {"metrics": ("max_box_acc_v2", *ABSOLUTE_METRICS), "others": {n: nets[n] for n in names}}
        zoom_rows = evaluate_rows(plan, f"background-x{zoom:g}", net, dataset, samples, progress, **settings)
        if zoom == 1:  # scores are those of the image's own size
            with_presence(zoom_rows, found)
        rows += [
            row if row["branch"] in HEADS else row | {"branch": "sigmoid + background", "fit": row["branch"]}
            for row in zoom_rows
        ]
    return rows


def _fits(
    plan: Plan, dataset: str, first: FitConfig, base: FitConfig, linear: bool, progress: Progress
) -> dict[str, FitConfig | BranchFit]:
    """Return the fits, each of which differs from `first` in one thing; `base` is the same with its penalty.

    Args:
        linear: whether both heads are global average pooling + linear: others mine by gradients, and have no
            cells to learn from.
    """
    paper = replace(base, background=0.0)
    fits: dict[str, FitConfig | BranchFit] = {"sigmoid": paper, "weight 3": first}
    fits |= {f"weight {w:g}": replace(base, background=w or NO_WEIGHT) for w in (0.0, 1.0, 10.0)}
    fits |= {f"threshold {t:g}": replace(base, background_threshold=t) for t in (0.2, 0.5)}
    if not linear:
        return fits
    cache = plan.output / "features"
    sigmoid = networks(plan, dataset, {"sigmoid": paper}, progress)["sigmoid"]
    heads = {"centred": _centred(sigmoid), "sigmoid": _layer_of(sigmoid, "sigmoid")}
    for name, head in heads.items():
        mine = partial(_mined_by, head=head, config=base, cache=cache, progress=progress)
        fits[f"mined by the {name} head"] = BranchFit(base, rows=mine, tag=f"mined by {name}")
    cells = partial(_with_cells, config=base, plan=plan, cache=cache, progress=progress)
    each = replace(base, background=NO_WEIGHT, negatives_weight=WEIGHT / CELLS)
    fits["single cells"] = BranchFit(each, rows=cells, tag=f"{CELLS} cells")
    return fits


def _layer_of(net: DualBranch, branch: Any) -> tuple[Tensor, Tensor]:
    """Return weight (C, N) and bias (C,) of a head."""
    layer = linear_weight(net.last_layer(branch))
    assert layer is not None
    return layer[0].detach().clone(), layer[1].detach().clone()


def _centred(net: DualBranch) -> tuple[Tensor, Tensor]:
    """Return the softmax head less its mean over classes."""
    weight, bias = _layer_of(net, "softmax")
    return weight - weight.mean(0), bias - bias.mean()


def _mined_by(
    net: DualBranch,
    samples: Samples,
    *,
    head: tuple[Tensor, Tensor],
    config: FitConfig,
    cache: Path,
    progress: Progress,
) -> tuple[Features, None]:
    """Return the features, with the backgrounds that another head finds: that of a copy of the classifier
    whose last layer holds the head's weights."""
    other = net.with_model(copy.deepcopy(net.model))
    other.original = other.model
    layer = other.last_layer("softmax")
    with torch.no_grad():
        weight = layer.get_parameter("weight")
        weight.copy_(head[0].reshape(weight.shape))
        layer.get_parameter("bias").copy_(head[1])
    own = extract(net, samples, config, cache=cache, progress=progress)
    mined = extract(other, samples, config, cache=cache, progress=progress, backgrounds=True)
    return replace(own, backgrounds=mined.backgrounds), None


def _with_cells(
    net: DualBranch,
    samples: Samples,
    *,
    config: FitConfig,
    plan: Plan,
    cache: Path,
    progress: Progress,
) -> tuple[Features, Features]:
    """Return the features, and as examples without a class a few random background cells of each image."""
    own = extract(net, samples, config, cache=cache, progress=progress, backgrounds=True)
    return own, single_cells(net, samples, config, plan.batch_size, progress)


@torch.no_grad()
def single_cells(
    net: DualBranch, samples: Samples, config: FitConfig, batch_size: int, progress: Progress
) -> Features:
    """Return F at four random background cells of each image, (n, N), one after the other; of an image with
    too little background, none."""
    fast, generator = HeadInputs(net).fast_net, torch.Generator().manual_seed(config.seed)
    rows, done = list[Tensor](), 0
    for batch in load_batches(samples, net.transform, batch_size=batch_size):
        if len(batch.images) and batch.labels is not None:
            forward_pass, classes = (
                fast.run(batch.images.to(net.device)),
                batch.labels[:, None].to(net.device),
            )
            maps = class_maps(fast, forward_pass, classes)
            cells = background_cells(maps, classes, config.background_threshold).flatten(1).cpu()  # (B, PQ)
            features = forward_pass.features.flatten(2).transpose(1, 2).cpu()  # (B, PQ, N)
            for own, where in zip(features, cells, strict=True):
                places = where.nonzero()[:, 0]  # none, or at least MIN_CELLS
                rows.append(own[places[torch.randperm(len(places), generator=generator)[:CELLS]]])
        done += len(batch.indices) + len(batch.skipped)
        progress("cells", done, len(samples))
    found = torch.cat(rows)
    return Features((found,), torch.full((len(found),), -1))
