"""The table of systems: every method of the registry on the softmax head, the branch, and with background."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sigcam.bench.cost import Cost, TooSlow, map_cost
from sigcam.bench.measure import evaluate_rows
from sigcam.bench.networks import LAST_STAGES, networks, packaged_weights, table_fits
from sigcam.bench.paper import CURVES, BenchRow
from sigcam.bench.plan import Plan
from sigcam.bench.registry import FINE_DATASETS, MASKED_DATASETS
from sigcam.bench.tables import FULL_CURVE_STEPS, with_curves
from sigcam.core.checkpoint import Checkpoint
from sigcam.core.distributed import rank
from sigcam.core.errors import DataError, SigcamError
from sigcam.core.types import Progress
from sigcam.data.loader import load_batches
from sigcam.data.sample import Samples
from sigcam.evaluation.metric_table import evaluation_facts
from sigcam.methods.registry import METHODS, MapConfig
from sigcam.network.dual import DualBranch

SYSTEM_DATASETS = (*FINE_DATASETS, "pets")
SYSTEM_FITS = ("sigmoid", "sigmoid + background")
ANY_HEAD = "any head"  # the branch in rows of methods whose maps are the same for all classes and heads
CHEAP = 12  # passes for a map, up to which a method is measured on all the images
TIMED_IMAGES = 8
_MASKS: Any = {"branches": ("softmax", "sigmoid"), "clamps": (None, True)}  # None: as published


@dataclass(frozen=True)
class Amounts:
    """How much is measured of each data set; None stands for all.

    Args:
        images: of methods that take `CHEAP` passes for a map or fewer; slower ones get as many
            passes in all as such a method.
        fewest: images that a slow method gets at least.
        curve_images: images for insertion and deletion, of `curve_steps` steps each.
        most_passes: for a map; a method that would take more tries fewer channels or samples.
        limit: passes, counted with those backwards, beyond which a method is left out all the same.
        everywhere: passes beyond which a method is measured on the first data set alone.
    """

    images: int | None = 200
    fewest: int = 30
    curve_images: int | None = 30
    curve_steps: int = 10
    most_passes: int | None = 320
    limit: int | None = 600
    everywhere: float = 100

    def images_of(self, passes: float) -> int | None:
        """Return the number of images of a method that takes so many passes for a map."""
        if self.images is None or passes <= CHEAP:
            return self.images
        return min(self.images, max(self.fewest, int(self.images * CHEAP / passes)))


QUICK = Amounts(images=12, fewest=4, curve_images=4, curve_steps=7, most_passes=16, limit=32)
WHOLE = Amounts(
    None, curve_images=None, curve_steps=FULL_CURVE_STEPS, most_passes=None, limit=None, everywhere=math.inf
)
OF_LARGE = Amounts(40, 12, curve_images=10, curve_steps=6, most_passes=128, limit=300, everywhere=2)


def amounts(plan: Plan) -> Amounts:
    """Return how much is measured: less of the paper's networks, a pass of which takes far longer."""
    if plan.quick:
        return QUICK
    if plan.fidelity_images is None:
        return WHOLE
    return OF_LARGE if plan.backbone in LAST_STAGES else Amounts()


def systems(plan: Plan, progress: Progress) -> list[BenchRow]:
    """Localisation, confidence and cost of every method that the network allows, on each head."""
    plan, rows = replace(plan, zoom=1.0), list[BenchRow]()
    costs, left_out = dict[str, Cost](), dict[str, str]()
    for dataset in plan.available(SYSTEM_DATASETS):
        fits = table_fits(plan, dataset)
        nets = networks(plan, dataset, {name: fits[name] for name in SYSTEM_FITS}, progress)
        net = nets.pop("sigmoid")
        if not costs:  # which depends on the network, not on the data
            costs, left_out = method_costs(plan, net, dataset, progress)
        rows += _rows(plan, dataset, net, nets, costs, progress)
    about = packaged_weights(plan) | {"left_out": left_out}
    return [row | asdict(costs[row["method"]]) | about for row in rows]


def method_costs(
    plan: Plan, net: DualBranch, dataset: str, progress: Progress
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Return the cost of each method, and why others are left out; from the output folder if measured."""
    samples, how = plan.samples(dataset, "test", TIMED_IMAGES), amounts(plan)
    facts = [evaluation_facts(net, samples, net.transform), asdict(how)]
    kept = Checkpoint(plan.output / "parts" / f"costs-{plan.slug}.pt", facts)
    state = kept.load() or {"costs": {}, "left_out": {}}
    images, channels = _first_images(net, samples), channels_of(net)
    for number, name in enumerate(METHODS):
        if name in state["costs"] or name in state["left_out"]:
            continue
        settings = effort(name, channels, how)
        try:
            state["costs"][name] = asdict(map_cost(net, images, name, settings, most_passes=how.limit))
        except TooSlow:
            state["left_out"][name] = f"it takes more than {how.limit} passes for a map"
        except SigcamError as error:  # a package that is missing, a head or layers that do not allow it
            state["left_out"][name] = str(error).removesuffix(".")
        if rank() == 0:
            kept.save(state)
        progress("costs", number + 1, len(METHODS))
    return {name: Cost(**cost) for name, cost in state["costs"].items()}, dict(state["left_out"])


def effort(method: str, channels: int, how: Amounts) -> dict[str, int]:
    """Return how many channels or samples a method is told to take, where its own number is too many."""
    if how.most_passes is None:
        return {}
    config = MapConfig(method).within(how.most_passes, channels)
    told = {"top_n": config.top_n, "samples": config.samples}
    return {name: count for name, count in told.items() if count}


def channels_of(net: DualBranch) -> int:
    """Return the number of channels of the network's features."""
    with torch.no_grad():
        return int(net.run(net.example).features.shape[1])


def _first_images(net: DualBranch, samples: Samples) -> Tensor:
    """Return a batch of the images that can be read."""
    assert net.transform is not None
    for batch in load_batches(samples, net.transform, batch_size=len(samples)):
        if len(batch.images):
            return batch.images.to(net.device, next(net.model.parameters()).dtype)
    raise DataError(f"none of the first {len(samples)} test images can be read.")


def _rows(
    plan: Plan,
    dataset: str,
    net: DualBranch,
    others: Mapping[str, DualBranch],
    costs: Mapping[str, Cost],
    progress: Progress,
) -> list[BenchRow]:
    """Return the rows of a data set in the order of the registry, those with equally many images evaluated
    together."""
    how, channels, groups = amounts(plan), channels_of(net), dict[tuple[Any, ...], list[str]]()
    first = plan.available(SYSTEM_DATASETS)[0]
    for name, cost in costs.items():
        if cost.passes > how.everywhere and dataset != first:
            continue
        told = tuple(effort(name, channels, how).items())
        key = how.images_of(cost.passes), METHODS[name].class_specific, told
        groups.setdefault(key, []).append(name)
    rows = list[BenchRow]()
    for (images, specific, told), methods in groups.items():
        settings: Any = {"methods": methods, "others": others, **_MASKS}
        if not specific:
            settings = {"methods": methods, "branches": ("softmax",)}
        settings |= {f"map_{name}": count for name, count in told}
        samples = plan.samples(dataset, "test", images)
        rows += _measured(plan, dataset, net, samples, settings, progress)
    order = {name: number for number, name in enumerate(METHODS)}
    described = (_described(row, channels, how) for row in rows if _differs(row))
    return sorted(described, key=lambda row: order[row["method"]])


def _measured(
    plan: Plan,
    dataset: str,
    net: DualBranch,
    samples: Samples,
    settings: Mapping[str, Any],
    progress: Progress,
) -> list[BenchRow]:
    """Return the rows of some methods, with insertion and deletion of some or all of the images."""
    how, name = amounts(plan), f"systems-{plan.slug}-{dataset}"
    metrics = ("pxap" if dataset in MASKED_DATASETS else "max_box_acc_v2", "average_drop", "mean_map")
    usual: Any = {**settings, "metrics": metrics}
    curves: Any = {**settings, "curve_steps": how.curve_steps}
    if how.curve_images is None or len(samples) <= how.curve_images:  # maps are drawn once
        usual = curves | {"metrics": (*metrics, *CURVES)}
        rows = evaluate_rows(plan, name, net, dataset, samples, progress, **usual)
        return [row | {"curve_images": row["images"]} for row in rows]
    rows = evaluate_rows(plan, name, net, dataset, samples, progress, **usual)
    few = plan.samples(dataset, "test", how.curve_images)
    curves |= {"metrics": CURVES}
    return with_curves(rows, evaluate_rows(plan, f"curves-{name}", net, dataset, few, progress, **curves))


def _differs(row: BenchRow) -> bool:
    """Whether the row is not the same as that of the maps as published: clamping changes signed ones only."""
    return METHODS[row["method"]].signed or (row["branch"], row["clamp"]) != ("softmax", True)


def _described(row: BenchRow, channels: int, how: Amounts) -> BenchRow:
    """Return the row with what tells how it was made."""
    made: BenchRow = {"curve_steps": how.curve_steps}
    if not METHODS[row["method"]].class_specific:
        made["branch"] = ANY_HEAD
    for name, count in effort(row["method"], channels, how).items():
        made |= {name: count, "fit": f"{count} {'channels tried' if name == 'top_n' else 'samples'}"}
    return row | made
