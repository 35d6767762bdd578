"""The card of a branch on the Hugging Face hub: its README.md, written from what the branch file keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sigcam.core.manifest import versions
from sigcam.models.state_dict import fingerprint
from sigcam.network.calibration import BranchCalibration

if TYPE_CHECKING:
    from sigcam.network.dual import DualBranch

NAMES_SHOWN = 20  # class names in a card
FIT_ROWS = {  # rows of the card, by the recipe's keys
    "recipe": "recipe",
    "images": "training images",
    "loss": "loss",
    "l2": "L2 penalty",
    "pos_weight": "weight of positives",
    "prior": "weights shrink towards",
    "background": "weight of backgrounds",
    "views": "views of each image",
    "seed": "random seed",
    "final_loss": "final loss",
}
HELD_OUT_ROWS = {
    "images": "held-out images",
    "mean_average_precision": "mean average precision",
    "mean_auroc": "mean AUC",
    "evidence_error": "calibration error of evidence",
}


def branch_card(net: DualBranch, repo: str, *, model: str | None = None, license: str | None = None) -> str:
    """Return the README.md of a branch: front matter, how to use it, and what it was fitted to and how.

    Args:
        model: the classifier as the commands name it, such as timm:resnet50; None if they cannot open it.
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        license=license,
        library_name="sigcam",
        pipeline_tag="image-classification",
        tags=["class-activation-maps", "explainability", "weakly-supervised-localization"],
        base_model=_base_model(net, model),
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2]}",
        f"A sigmoid branch for {_name_of(net, model)}: it scores every class independently, and evidence "
        "maps are drawn from these scores. The classifier itself is not in this repository, and its "
        "predictions stay what they were.",
        "## Use",
        _usage(f"hf://{repo}", model),
        "## The classifier it belongs to",
        _table(_classifier_rows(net, model)),
        _class_list(net),
        "## How it was fitted",
        _table(_values(net.recipe, FIT_ROWS)) if net.recipe else "This was not recorded.",
        _calibration_line(net.calibration),
    ]
    held_out = net.recipe.get("held_out") or {}
    if rows := _values(held_out, HELD_OUT_ROWS):
        parts += ["## Scores on held-out training images", _table(rows)]
    made = ", ".join(f"{name} {versions()[name]}" for name in ("sigcam", "torch") if name in versions())
    return "\n\n".join([*parts, f"Written with {made}."]) + "\n"


def _values(facts: dict[str, Any], labels: dict[str, str]) -> list[tuple[str, str]]:
    return [(label, _shown(facts[key])) for key, label in labels.items() if key in facts]


def _base_model(net: DualBranch, model: str | None) -> str | None:
    """Return the hub's name of the classifier, if it is known to have one."""
    scheme, _, name = (model or "").partition(":")
    known: Any = getattr(net.original, "pretrained_cfg", None) or {}  # of a timm model
    found = name if scheme == "hf" else known.get("hf_hub_id")
    return found if isinstance(found, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", found) else None


def _name_of(net: DualBranch, model: str | None) -> str:
    return f"`{model}`" if model else f"the network `{type(net.original).__name__}`"


def _usage(address: str, model: str | None) -> str:
    if model is None:
        return (
            "```python\nimport sigcam\n\n"
            "model = ...  # the classifier, with the weights that this branch was fitted to\n"
            f'net = sigcam.load("{address}", model)\n'
            'sigcam.explain(net, images).save("maps")\n```'
        )
    return (
        f"```bash\nsigcam explain photo.jpg --model {model} --branch {address}\n```\n\n"
        f'```python\nimport sigcam\n\nclassifier = sigcam.load_classifier("{model}")\n'
        f'net = sigcam.load("{address}", classifier.model, transform=classifier.transform)\n'
        'sigcam.explain(net, "photo.jpg").save("maps")\n```'
    )


def _classifier_rows(net: DualBranch, model: str | None) -> list[tuple[str, str]]:
    size = " x ".join(map(str, net.input_shape))
    return [
        ("network", f"{type(net.original).__name__}{f', `{model}`' if model else ''}"),
        ("input (channels x height x width)", size),
        ("classes", str(max(net.classes, 2))),
        ("features after", f"`{net.split.layer}`"),
        ("head", ", ".join(f"`{head}`" for head in net.split.heads)),
        ("fingerprint of its weights", f"`{fingerprint(net.original)}`"),
    ]


def _class_list(net: DualBranch) -> str:
    if not net.class_names:
        return "Its classes have no names."
    names = [f"`{' '.join(name.split()).replace('`', chr(39))}`" for name in net.class_names[:NAMES_SHOWN]]
    more = len(net.class_names) - len(names)
    return f"Classes: {', '.join(names)}{f' and {more} more' if more > 0 else ''}."


def _calibration_line(calibration: BranchCalibration) -> str:
    if not calibration.maps:
        return "Its scores rank images and cells; they are not calibrated as probabilities."
    scale = calibration.evidence
    zooms = ", ".join(f"{zoom:g}" for zoom in calibration.maps)
    return (
        f"It is calibrated with backgrounds: evidence is sigmoid({scale.scale:.3g} logit {scale.shift:+.3g})"
        f", and maps in probabilities can be drawn at zoom {zooms}."
    )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = (f"| {label} | {value.replace('|', chr(92) + '|')} |" for label, value in rows)
    return "\n".join(["| | |", "|---|---|", *lines])


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
        return f"{min(value):.4g} to {max(value):.4g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
