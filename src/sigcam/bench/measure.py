"""Evaluate a network and arrange its numbers as rows of a table, with intervals and paired differences."""

from typing import Any

import torch
from torch import Tensor

from sigcam.bench.paper import BenchRow
from sigcam.bench.plan import Plan
from sigcam.core.checkpoint import Checkpoint
from sigcam.core.config import FitConfig
from sigcam.core.distributed import all_gather, barrier, rank
from sigcam.core.files import hash_of
from sigcam.core.types import Progress
from sigcam.data.sample import Samples, match_classes
from sigcam.evaluation.evaluator import evaluate
from sigcam.evaluation.metric_table import evaluation_facts
from sigcam.evaluation.result import FIXED, Result
from sigcam.metrics.bootstrap import Interval, paired
from sigcam.network.dual import DualBranch, linear_weight
from sigcam.training.features import extract

BASELINE = ("softmax", False)  # branch and clamp of the maps that `delta` compares with
CONTROL = ("softmax", True)  # those that `beside` compares clamped maps with


def evaluate_rows(
    plan: Plan,
    name: str,
    net: DualBranch,
    dataset: str,
    samples: Samples,
    progress: Progress,
    **settings: Any,
) -> list[BenchRow]:
    """Return a row for each method, branch and clamp, from the output folder if it was evaluated before.

    Each row has intervals, paired differences from the softmax head's signed maps (`delta`) and, if clamped,
    from its clamped maps (`beside`). `settings` are arguments of `evaluate`.
    """
    samples = match_classes(samples, net.classes, net.class_names)
    labels = {"backbone": plan.backbone, "classifier": plan.classifier_kind(dataset)}
    facts = [evaluation_facts(net, samples, net.transform), settings, plan.batch_size, plan.skip_unreadable]
    facts += [dataset, labels, BASELINE, CONTROL]
    finished = Checkpoint(plan.output / "parts" / f"{name}-{hash_of(facts)[:12]}.pt", facts)
    if state := finished.load():
        return list(state["rows"])
    assert finished.path is not None
    result = evaluate(
        net,
        samples,
        batch_size=plan.batch_size,
        workers=plan.workers,
        skip_unreadable=plan.skip_unreadable,
        intervals=True,
        unfinished=finished.path.with_suffix(".unfinished"),
        progress=lambda _, done, total: progress(name, done, total),
        **settings,
    )
    rows = [{**row, **labels} for row in table_rows(result, dataset, float(settings.get("zoom", 1.0)))]
    if rank() == 0:
        finished.save({"rows": rows})
    barrier()
    return rows


def table_rows(result: Result, dataset: str, zoom: float) -> list[BenchRow]:
    """Return the numbers of an evaluation, one row per method, branch and clamp."""
    rows = list[BenchRow]()
    variants = list(dict.fromkeys(key[:3] for key in result.metrics if key[0] is not None))
    for variant in variants:
        method, branch, clamp = variant
        row: BenchRow = {"dataset": dataset, "method": method, "branch": branch, "clamp": clamp, "zoom": zoom}
        row |= {name: result.about[name] for name in ("images", "data_fingerprint", "model_fingerprint")}
        row |= {"intervals": {}, "delta": {}, "beside": {}}
        for number in result.rows:
            source = (number["method"], number["branch"], number["clamp"])
            if source not in (variant, (None, None, None)) or number["threshold_from"] == "transferred":
                continue
            name = _column_name(number)
            row[name] = number["value"]
            if number["low"] is not None:
                row["intervals"][name] = [number["low"], number["high"]]
        for key, metric in result.metrics.items():
            for name, base in (("delta", BASELINE), ("beside", CONTROL)):
                control = result.metrics.get(key._replace(branch=base[0], clamp=base[1]))
                applies = key[:3] == variant and (branch, clamp) != base and (clamp or name == "delta")
                if applies and control is not None:
                    intervals = paired(metric, control)
                    interval = intervals if isinstance(intervals, Interval) else intervals.get(key.label)
                    if interval is not None:
                        row[name][key.label] = [interval.value, interval.low, interval.high]
        rows.append(row)
    return rows


def _column_name(number: BenchRow) -> str:
    """Return the metric's name, with a fixed threshold and with a scorer other than the softmax head."""
    fixed = f"_at_{number['threshold'] or FIXED:g}" if number["threshold_from"] == "fixed" else ""
    scorer = f":{number['scorer']}" if number["scorer"] not in (None, "softmax") else ""
    return f"{number['metric']}{fixed}{scorer}"


@torch.no_grad()
def presence_auroc(
    plan: Plan, net: DualBranch, samples: Samples, others: Samples, progress: Progress
) -> dict[str, Interval]:
    """Return, for the softmax and the sigmoid head, how well the best class's score tells `samples` from
    images of no class (`others`): AUROC in percent. Empty if the head has no linear layer."""
    scores = dict[str, list[Tensor]](softmax=[], sigmoid=[])
    for part in (samples, others):
        features = extract(
            net, part, FitConfig(), cache=plan.output / "features", progress=progress, labelled=False
        ).views[0]
        for branch, parts in scores.items():
            weight_bias = linear_weight(net.last_layer(branch))  # type: ignore[arg-type]
            if weight_bias is None or features.ndim != 2:
                return {}
            logits = features.to(weight_bias[0]) @ weight_bias[0].T + weight_bias[1]
            best = (logits.softmax(1) if branch == "softmax" else logits).amax(1).cpu()
            parts.append(torch.cat(all_gather(best)))
    return {branch: auroc_interval(*parts) for branch, parts in scores.items()}


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
