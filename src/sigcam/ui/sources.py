"""Networks of the page, and what visitors choose from: heads, methods and classes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sigcam.core.errors import ConfigError
from sigcam.methods.registry import METHODS
from sigcam.methods.targets import Branch
from sigcam.network.dual import DualBranch
from sigcam.network.opening import has_shipped_branch, open_network
from sigcam.reports.inspection import usable_methods
from sigcam.ui.serve import UiOptions

MAX_PASSES = 200  # for a map; a method that would take more tries fewer channels or samples
ZOOM = 1.0  # the page does not enlarge images
SYNTHETIC_NOTICE = (
    "The examples are synthetic birds, which an ImageNet classifier does not know. Drop a photograph, or "
    "install the example photographs: pip install 'sigcam[examples]'."
)


@dataclass(frozen=True)
class Source:
    """One head of one network, to draw maps from."""

    name: str
    net: DualBranch
    branch: Branch


def sources_of(net: DualBranch, prefix: str = "") -> list[Source]:
    """Return the heads of a network to draw maps from, the recommended one first."""
    branches: list[tuple[Branch, str]] = [("softmax", "softmax head")]
    if net.classes > 1:
        branches.append(("centred", "centred softmax head"))
    if net.fitted:
        branches.insert(0, ("sigmoid", "sigmoid branch"))
    else:
        branches.reverse()
    return [Source(f"{prefix}{name}", net, branch) for branch, name in branches]


def available_methods(nets: Sequence[DualBranch]) -> list[str]:
    """Return the methods that work with all networks."""
    usable = set[str](METHODS).intersection(*map(usable_methods, nets))
    return [name for name in METHODS if name in usable]


def why_relative(source: Source, method: str) -> str:
    """Return why maps of a head have no absolute scale, or "" if they have one."""
    if source.branch != "sigmoid":
        return f"the {'centred ' * (source.branch == 'centred')}softmax head has none"
    if not METHODS[method].in_logits:
        return f"maps by {method} are not in logits"
    try:
        source.net.calibration.map_scale(ZOOM)
    except ConfigError:
        return "this branch is not calibrated at this size (fit it again with --background auto)"
    return ""


def class_label(net: DualBranch, index: int) -> str:
    """Return the name of a class, or "class 3" if it has none."""
    names = net.class_names or ()
    return names[index] if index < len(names) else f"class {index}"


def class_choices(net: DualBranch) -> list[tuple[str, int]]:
    """Return every class as (label, index), with the index in labels that occur more than once."""
    labels = [class_label(net, k) for k in range(max(net.classes, 2))]
    counts = Counter(labels)
    return [(f"{label} ({k})" if counts[label] > 1 else label, k) for k, label in enumerate(labels)]


def same_class(index: int, net: DualBranch, other: DualBranch) -> int | None:
    """Return the class's index in another network, matched by name, or by index if the counts agree."""
    if net.class_names and other.class_names and other.class_names != net.class_names:
        name = class_label(net, index)
        return other.class_names.index(name) if name in other.class_names else None
    return index if other.classes == net.classes else None


def open_networks(options: UiOptions) -> tuple[dict[str, DualBranch], str]:
    """Return the networks by name, and the notice to show above the page (may be empty)."""
    o = options
    specs = [(o.model, o.weights, o.branch)]
    if (o.compare_model, o.compare_branch, o.compare_weights) != (None, None, None):
        weights = o.compare_weights or (o.weights if o.compare_model is None else None)
        specs.append((o.compare_model or o.model, weights, o.compare_branch or "sigmoid"))
    names = [_display_name(model) for model, _, _ in specs]
    if len(set(names)) < len(names):
        names = [f"{names[0]} A", f"{names[1]} B"]
    nets, notices = zip(*(_open(*spec, o.device) for spec in specs), strict=True)
    if not o.data and "embedded" in names and o.weights is None and find_spec("skimage") is None:
        notices += (SYNTHETIC_NOTICE,)
    return dict(zip(names, nets, strict=True)), " ".join(dict.fromkeys(filter(None, notices)))


def _display_name(model: str) -> str:
    """Return the model's name without the folder of its file, which visitors need not know."""
    kind, _, path = model.partition(":")
    return Path(path).name if kind == "file" else model


def _open(model: str, weights: Path | None, branch: str, device: str) -> tuple[DualBranch, str]:
    """Return the network and a notice: a model without a fitted branch opens with an unfitted one."""
    if branch != "sigmoid" or has_shipped_branch(model, weights):
        return open_network(model, weights, branch, device=device).net, ""
    net = open_network(model, weights, None, device=device).net
    return net, (
        f"{_display_name(model)} has no fitted branch, so its maps come from the centred softmax head and "
        "there is no evidence score. Fit a branch (on this page with --data, or with `sigcam fit`) and "
        "pass it as --branch."
    )
