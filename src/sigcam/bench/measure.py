"""Evaluate a network and arrange its numbers as rows of a table, with intervals and paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sigcam.bench.paper import HEADS, STRONGEST_OF, BenchRow, row_name
from sigcam.bench.plan import Plan
from sigcam.core.checkpoint import Checkpoint
from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, barrier, rank
from sigcam.core.files import hash_of
from sigcam.core.types import Progress
from sigcam.data.sample import Samples, match_classes
from sigcam.evaluation.evaluator import evaluate
from sigcam.evaluation.metric_table import evaluation_facts
from sigcam.evaluation.registry import METRICS
from sigcam.evaluation.result import FIXED, MetricKey, Result
from sigcam.metrics.base import ImageMetric
from sigcam.metrics.bootstrap import Interval, paired
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.training.features import extract

BASELINE = ("softmax", False)  # branch and clamp of the maps that `delta` compares with
CONTROL = ("softmax", True)  # those that `beside` compares clamped maps with
ABSOLUTE_ONLY = ("box_acc_at_half", "false_alarm", "false_alarm_area")  # a unit map always reaches 1


def evaluate_rows(
    plan: Plan,
    name: str,
    net: DualBranch,
    dataset: str,
    samples: Samples,
    progress: Progress,
    *,
    others: Mapping[str, DualBranch] | None = None,
    **settings: Any,
) -> list[BenchRow]:
    """Return a row for each method, branch, clamp and scale, from the output folder if it was evaluated
    before.

    Each row has intervals, paired differences from the softmax head's signed maps (`delta`) and, if clamped,
    from its clamped maps (`beside`); a row of `others` also from the strongest control (`versus`). Maps in
    probabilities (`scales`) are drawn of the branches that are calibrated. `settings` are arguments of
    `evaluate`.
    """
    others, zoom = dict(others or {}), float(settings.get("zoom", 1.0))
    samples = match_classes(samples, net.classes, net.class_names)
    branches: dict[str, DualBranch] = {"sigmoid": net, **others}
    if "probability" in settings.get("scales", ()) and not any(
        is_calibrated_at(each, zoom) for each in branches.values()
    ):
        settings |= {"scales": ("unit",)}
    labels = {"backbone": plan.backbone, "classifier": plan.classifier_kind(dataset)}
    facts = [evaluation_facts(net, samples, net.transform, others), settings, plan.batch_size]
    facts += [plan.skip_unreadable, dataset, labels, BASELINE, CONTROL, STRONGEST_OF]
    finished = Checkpoint(plan.output / "parts" / f"{name}-{hash_of(facts)[:12]}.pt", facts)
    if state := finished.load():
        return list(state["rows"])
    assert finished.path is not None
    result = evaluate(
        net,
        samples,
        others=others,
        batch_size=plan.batch_size,
        workers=plan.workers,
        skip_unreadable=plan.skip_unreadable,
        intervals=True,
        unfinished=finished.path.with_suffix(".unfinished"),
        progress=lambda _, done, total: progress(name, done, total),
        **settings,
    )
    rows = [{**row, **labels} for row in table_rows(result, dataset, zoom)]
    for row in rows:
        if row["branch"] in branches:
            row |= _fit_facts(branches[row["branch"]])
    if rank() == 0:
        finished.save({"rows": rows})
    barrier()
    return rows


def is_calibrated_at(net: DualBranch, zoom: float) -> bool:
    """Whether the branch draws maps in probabilities at this enlargement."""
    return any(math.isclose(known, zoom, rel_tol=1e-6) for known in net.calibration.maps)


def _fit_facts(net: DualBranch) -> BenchRow:
    """Return penalty, weight of backgrounds and held-out mean average precision of a fit, if known."""
    return {name: net.recipe[name] for name in ("l2", "background", "held_out_ap") if name in net.recipe}


def table_rows(result: Result, dataset: str, zoom: float) -> list[BenchRow]:
    """Return the numbers of an evaluation, one row per method, branch, clamp and scale."""
    rows = list[BenchRow]()
    variants = list(dict.fromkeys(key.variant for key in result.metrics if key.method is not None))
    for variant in variants:
        method, branch, clamp, scale = variant
        row: BenchRow = {"dataset": dataset, "method": method, "branch": branch, "clamp": clamp}
        row |= {"scale": scale, "zoom": zoom}
        row |= {name: result.about[name] for name in ("images", "data_fingerprint", "model_fingerprint")}
        row |= {"intervals": {}, "delta": {}, "beside": {}, "versus": {}}
        for number in result.rows:
            source = (number["method"], number["branch"], number["clamp"], number["scale"])
            mine = source == variant or source[:3] == (None, None, None)
            if not mine or number["threshold_from"] == "transferred":
                continue
            if number["metric"] in ABSOLUTE_ONLY and scale == "unit":
                continue
            name = _column_name(number)
            row[name] = number["value"]
            if number["low"] is not None:
                row["intervals"][name] = [number["low"], number["high"]]
        for key, metric in result.metrics.items():
            if key.variant != variant or key.metric in ABSOLUTE_ONLY:
                continue
            for name, base in (("delta", BASELINE), ("beside", CONTROL)):
                control = result.metrics.get(_control_key(key, base))
                applies = (branch, clamp, scale) != (*base, "unit") and (clamp or name == "delta")
                if applies and control is not None:
                    interval = _differences_of(key, metric, control).get(key.label)
                    if interval is not None:
                        row[name][key.label] = [interval.value, interval.low, interval.high]
            if branch not in HEADS:
                row["versus"] |= _versus(key, metric, result)
        rows.append(row)
    return rows


def _control_key(key: MetricKey, control: tuple[str, bool]) -> MetricKey:
    """Return the key of the same metric for unit maps of a control (branch, clamp)."""
    return key._replace(branch=control[0], clamp=control[1], scale="unit")


def _differences_of(key: MetricKey, metric: ImageMetric, control: ImageMetric) -> dict[str, Interval]:
    """Return the paired differences of a metric's numbers, by column."""
    differences = paired(metric, control)
    return {key.label: differences} if isinstance(differences, Interval) else differences


def _versus(key: MetricKey, metric: ImageMetric, result: Result) -> dict[str, BenchRow]:
    """Return, by column, the strongest control on these images and the paired difference from it."""
    higher = METRICS[key.metric].higher_is_better
    controls = {each: result.metrics.get(_control_key(key, each)) for each in STRONGEST_OF}
    found = {each: control for each, control in controls.items() if control is not None}
    if higher is None or not found:
        return {}
    values = dict[str, dict[tuple[str, bool], float]]()
    for each, control in found.items():
        computed = control.compute()
        named = computed if isinstance(computed, dict) else {key.label: computed}
        for name, value in named.items():
            if not name.startswith("threshold_"):
                values.setdefault(name, {})[each] = float(value) * (1 if higher else -1)
    versus, known = dict[str, BenchRow](), dict[tuple[str, bool], dict[str, Interval]]()
    for name, by_control in values.items():
        strongest = max(by_control, key=lambda each: by_control[each])  # of equal ones the first
        if strongest not in known:
            known[strongest] = _differences_of(key, metric, found[strongest])
        interval = known[strongest][name]
        control_name = row_name({"branch": strongest[0], "clamp": strongest[1]})
        difference = [interval.value, interval.low, interval.high]
        versus[name] = {"control": control_name, "difference": difference}
    return versus


def _column_name(number: BenchRow) -> str:
    """Return the metric's name, with a fixed threshold and with a scorer other than the softmax head."""
    fixed = f"_at_{number['threshold'] or FIXED:g}" if number["threshold_from"] == "fixed" else ""
    scorer = f":{number['scorer']}" if number["scorer"] not in (None, "softmax") else ""
    return f"{number['metric']}{fixed}{scorer}"


@torch.no_grad()
def presence(
    plan: Plan, nets: Mapping[str, DualBranch], samples: Samples, nothing: Samples, progress: Progress
) -> dict[str, dict[str, Interval]]:
    """Return, for the softmax head and each of the branches of one classifier, in percent:

    - auroc_nothing: how well the best class's score tells `samples` from images of no class (`nothing`);
    - above_half: the share of `samples` whose label has a score above one half;
    - above_half_nothing: the share of `nothing` whose best class has.

    The score is the softmax head's probability, a branch's evidence. Empty if the head has no linear layer.
    """
    net = next(iter(nets.values()))
    samples = match_classes(samples, net.classes, net.class_names)
    heads: dict[str, tuple[DualBranch, Literal["softmax", "sigmoid"]]] = {"softmax": (net, "softmax")}
    heads |= {name: (each, "sigmoid") for name, each in nets.items()}
    scores: dict[str, list[Tensor]] = {name: [] for name in heads}  # per set: best, label's; (n, 2)
    for part in (samples, nothing):
        cache = plan.output / "features"
        read = extract(net, part, FitConfig(), cache=cache, progress=progress, labelled=False)
        features, positions = read.views[0], read.positions()
        known = torch.tensor([-1 if part[i].label is None else part[i].label for i in positions.tolist()])
        for name, (each, branch) in heads.items():
            weight_bias = linear_weight(each.last_layer(branch))
            if weight_bias is None or features.ndim != 2:
                return {}
            logits = features.to(weight_bias[0]) @ weight_bias[0].T + weight_bias[1]
            score = (logits.softmax(1) if branch == "softmax" else each.evidence(logits)).cpu()
            # evidence rises with the logit, which does not round to 1
            best = score.amax(1) if branch == "softmax" else logits.amax(1).cpu()
            own = score.amax(1)
            if part is samples:
                own = score.gather(1, known.clamp(min=0)[:, None])[:, 0]
            gathered = all_gather((positions, torch.stack([best, own], 1)))
            order = torch.cat([positions for positions, _ in gathered]).argsort()
            scores[name].append(torch.cat([both for _, both in gathered])[order])
    found = dict[str, dict[str, Interval]]()
    for name, (inside, outside) in scores.items():
        found[name] = {
            "auroc_nothing": auroc_interval(inside[:, 0], outside[:, 0]),
            "above_half": share_interval(inside[:, 1] > 0.5),
            "above_half_nothing": share_interval(outside[:, 1] > 0.5),
        }
    return found


def with_presence(rows: Sequence[BenchRow], found: Mapping[str, Mapping[str, Interval]]) -> None:
    """Add to each row what `presence` found of its branch."""
    for row in rows:
        for column, interval in found.get(row["branch"], {}).items():
            row[column] = interval.value
            row["intervals"][column] = [interval.low, interval.high]


def share_interval(hits: Tensor) -> Interval:
    """Return the share of true values (n,), in percent; the interval resamples them a thousand times."""
    drawn = torch.randint(len(hits), (1000, len(hits)), generator=torch.Generator().manual_seed(0))
    shares = hits.double()[drawn].mean(1)
    ends = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64))
    value, low, high = (100 * float(x) for x in (hits.double().mean(), *ends))
    return Interval(value, low, high)


def auroc_interval(positives: Tensor, negatives: Tensor) -> Interval:
    """Return the area under the ROC curve of scores (n,) and (m,), in percent: the share of ordered pairs,
    ties counting half. The interval resamples both sets of images a thousand times."""
    above = (positives[:, None] > negatives).float() + (positives[:, None] == negatives).float() / 2  # (n, m)
    generator, draws = torch.Generator().manual_seed(0), list[Tensor]()
    for count in above.shape:
        drawn = torch.randint(count, (1000, count), generator=generator)
        draws.append(torch.zeros(1000, count).scatter_add_(1, drawn, torch.ones_like(drawn).float()))
    shares = ((draws[0] @ above) * draws[1]).sum(1).double() / above.numel()
    ends = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64))
    value, low, high = (100 * float(x) for x in (above.double().mean(), *ends))
    return Interval(value, low, high)


def logit_shift(net: DualBranch) -> float | None:
    """Return the length of the mean row of the softmax head's weight, in percent of the mean length of a row:
    the part of the head that no probability depends on. None if the head has no linear layer."""
    weight_bias = linear_weight(net.last_layer("softmax"))
    if weight_bias is None:
        return None
    weight = weight_bias[0].detach()
    return float(100 * weight.mean(0).norm() / weight.norm(dim=1).mean())
