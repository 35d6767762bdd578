"""The `sigcam` command: parse, call the library, print."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from sigcam.config import FitConfig
from sigcam.console import progress_bar, show_report, show_skips, show_table

if TYPE_CHECKING:
    from sigcam.data import Samples
    from sigcam.dual import DualBranch
    from sigcam.models import Classifier

app = typer.Typer(
    help="Evidence maps for any image classifier, from a sigmoid branch that leaves predictions untouched.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
DEFAULT = FitConfig()

Model = Annotated[
    str,
    typer.Option("--model", help="timm:NAME, torchvision:NAME, hf:NAME, file:PATH.py:FUNCTION or embedded."),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", help="The classifier's weights: .safetensors or .pth.")
]
Data = Annotated[
    str, typer.Option("--data", help="A folder with one folder of images per class, or `shapes`.")
]
Format = Annotated[str | None, typer.Option("--format", help="Layout of the data; guessed if not given.")]
Output = Annotated[Path, typer.Option("--output", help="Folder to write to.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images per pass.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Processes that decode images.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of whatever is random.")]
Crop = Annotated[
    bool, typer.Option("--crop", help="Cut the middle as the model's own preset does; default: squash.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
HeadName = Annotated[
    str | None, typer.Option("--head", help="Module that returns the logits, if it is not found.")
]
LayerName = Annotated[str | None, typer.Option("--layer", help="Module whose output the maps are made of.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from sigcam import __version__

        typer.echo(f"sigcam {__version__}")
        raise typer.Exit


@app.command()
def inspect(
    model: Model = "",
    weights: Weights = None,
    data: Annotated[
        str, typer.Option("--data", help="Look at a data set instead of, or beside, a model.")
    ] = "",
    format: Format = None,
    head: HeadName = None,
    layer: LayerName = None,
    crop: Crop = False,
    as_json: Json = False,
) -> None:
    """Show how a classifier is split (head, layer, map size) and what a data set holds."""
    facts: dict[str, Any] = {}
    if data:
        samples = _open(data, format, "train")
        counts = [0] * len(samples.classes)
        for sample in samples:
            if sample.label is not None:
                counts[sample.label] += 1
        facts["data"] = {
            "images": len(samples),
            "classes": len(samples.classes),
            "images per class": f"{min(counts)} to {max(counts)}" if counts else "no labels",
            "boxes": sum(sample.boxes is not None for sample in samples),
            "masks": sum(sample.open_mask is not None for sample in samples),
        }
    if model or not data:
        classifier, net = _attach(model or "embedded", weights, crop, head, layer, pretrained=False)
        split, size = net.split, net.split.fold.image
        facts["model"] = {
            "model": classifier.name,
            "classes": f"{net.classes}"
            + (f" ({', '.join(classifier.classes[:3])}, ...)" if classifier.classes else ""),
            "head": ", ".join(split.heads)
            + ("" if split.whole else " (combined by the model's own last steps)"),
            "layer": split.layer + (" and the activation after it" if split.activation else ""),
            "map": f"{split.fold.grid[0]} x {split.fold.grid[1]} cells of a {size[0]} x {size[1]} input"
            + (f", after {split.fold.prefix} prefix token(s)" if split.fold.prefix else ""),
            "layout": split.fold.layout,
            "returns": split.output,
            "global average + linear": ", ".join(sorted(net.linear)) or "no",
            "methods": ", ".join(_usable_methods(net)),
            "branch parameters": f"{sum(p.numel() for p in net.parameters() if p.requires_grad):,}",
            "finer layers": "; ".join(_finer_layers(net)) or "none",
            "preprocessing": str(classifier.transform),
        }
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        for title, rows in facts.items():
            show_table(title, list(rows.items()))


@app.command("train-classifier")
def train_classifier(
    data: Data,
    model: Model = "embedded",
    weights: Weights = None,
    format: Format = None,
    output: Output = Path("classifier"),
    probe: Annotated[
        bool, typer.Option("--probe", help="Train a linear head on the frozen backbone.")
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the features.")] = 30,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = 1e-3,
    batch_size: BatchSize = 32,
    workers: Workers = 0,
    device: Device = "cpu",
    seed: Seed = 0,
    crop: Crop = False,
    as_json: Json = False,
) -> None:
    """Train a softmax classifier on a folder, for the branch to be attached to."""
    from sigcam.errors import DataError
    from sigcam.manifest import data_fingerprint, try_folder, write_manifest
    from sigcam.models import save_classifier
    from sigcam.training import train_probe

    if not probe:
        raise DataError(
            "only the linear probe is there: pass --probe to train a linear head on a frozen backbone."
        )
    samples = _enough(_open(data, format, "train"))
    try_folder(output)
    classifier = _load(model, weights, crop, device, len(samples.classes))
    with progress_bar() as progress:
        result = train_probe(
            classifier,
            samples,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            workers=workers,
            seed=seed,
            progress=progress,
        )
    path = output / "classifier.safetensors"
    save_classifier(path, classifier.model, spec=model, classes=samples.classes)
    facts = {
        "images": result.images,
        "classes": len(samples.classes),
        "training accuracy": result.train_accuracy,
        "final loss": result.losses[-1],
        "skipped": len(result.skipped),
        "classifier": str(path),
    }
    write_manifest(
        output, model=model, data=data, data_fingerprint=data_fingerprint(samples), seed=seed, numbers=facts
    )
    show_report(facts, result.skipped, as_json)


@app.command()
def fit(
    data: Data,
    model: Model = "embedded",
    weights: Weights = None,
    format: Format = None,
    output: Output = Path("branch"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the cached features.")] = DEFAULT.epochs,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = DEFAULT.lr,
    batch_size: BatchSize = DEFAULT.batch_size,
    views: Annotated[
        int, typer.Option(min=1, max=2, help="2 adds each image's mirror image.")
    ] = DEFAULT.views,
    pos_weight: Annotated[str, typer.Option(help="A number, or balanced: C - 1.")] = str(DEFAULT.pos_weight),
    l2: Annotated[float, typer.Option(min=0, help="Strength of the penalty on weights.")] = DEFAULT.l2,
    workers: Workers = DEFAULT.workers,
    seed: Seed = DEFAULT.seed,
    device: Device = "cpu",
    head: HeadName = None,
    layer: LayerName = None,
    crop: Crop = False,
    as_json: Json = False,
) -> None:
    """Attach a sigmoid branch to a trained classifier and fit it; the classifier stays what it was."""
    from sigcam.dual import fingerprint
    from sigcam.errors import DataError
    from sigcam.fitting import fit as fit_branch
    from sigcam.fitting import match_classes
    from sigcam.manifest import data_fingerprint, try_folder, write_manifest

    try:
        weight: Any = "balanced" if pos_weight == "balanced" else float(pos_weight)
    except ValueError:
        raise DataError(f"--pos-weight takes a number or balanced, not {pos_weight!r}.") from None
    samples = _enough(_open(data, format, "train"))
    try_folder(output)
    classifier, net = _attach(model, weights, crop, head, layer, device)
    samples = match_classes(samples, net.classes, net.class_names)
    config = FitConfig(epochs, lr, batch_size, cast(Literal[1, 2], views), weight, l2, workers, seed)
    with progress_bar() as progress:
        result = fit_branch(net, samples, config, progress=progress)
    path = output / "branch.safetensors"
    output.mkdir(parents=True, exist_ok=True)
    net.save(path)
    facts = {
        "images": result.images,
        "classes": net.classes,
        "positive weight": result.pos_weight,
        "first loss": result.losses[0],
        "final loss": result.losses[-1],
        "seconds": {stage: round(seconds, 2) for stage, seconds in result.seconds.items()},
        "skipped": len(result.skipped),
        "branch": str(path),
    }
    write_manifest(
        output,
        model=classifier.name,
        model_fingerprint=fingerprint(net.model),
        data=data,
        data_fingerprint=data_fingerprint(samples),
        seed=seed,
        config=asdict(config),
        losses=result.losses,
        numbers=facts,
    )
    show_report(facts, result.skipped, as_json)


@app.command()
def explain(
    pictures: Annotated[list[Path] | None, typer.Argument(help="Image files, or folders of them.")] = None,
    model: Model = "embedded",
    weights: Weights = None,
    branch: Annotated[
        str, typer.Option("--branch", help="A fitted branch file, or softmax or centred, which need none.")
    ] = "sigmoid",
    method: Annotated[str, typer.Option("--method", help="cam or grad-cam.")] = "grad-cam",
    classes: Annotated[
        str | None,
        typer.Option("--class", help="A class name or number; default: what the classifier predicts."),
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="unit: each map from 0 to 1; raw: signed, in logits.")
    ] = "unit",
    clamp: Annotated[
        bool | None, typer.Option("--clamp/--no-clamp", help="Keep positive weights only.")
    ] = None,
    threshold: Annotated[float, typer.Option("--threshold", min=0, max=1, help="Of the box.")] = 0.2,
    data: Annotated[str, typer.Option("--data", help="A folder of class folders, or `shapes:20`.")] = "",
    format: Format = None,
    output: Output = Path("maps"),
    batch_size: BatchSize = 16,
    workers: Workers = 0,
    device: Device = "cpu",
    head: HeadName = None,
    layer: LayerName = None,
    crop: Crop = False,
    as_json: Json = False,
) -> None:
    """Draw evidence maps of pictures: an overlay (PNG), the map (NPY) and the scores (JSON) for each."""
    from sigcam.data.folder import pictures as open_pictures
    from sigcam.dual import fingerprint, load
    from sigcam.errors import CheckpointError, DataError
    from sigcam.explaining import explain as explain_images
    from sigcam.manifest import data_fingerprint, try_folder, write_manifest, write_text
    from sigcam.methods import method_name

    if not pictures and not data:
        raise DataError("no pictures: give image files or a folder, e.g. `sigcam explain photo.jpg`.")
    method_name(method)
    if scale not in ("unit", "raw"):
        raise DataError(f"--scale is unit or raw, not {scale!r}.")
    samples = open_pictures(pictures) if pictures else _open(data, format, "test")
    file = None if branch in ("sigmoid", "softmax", "centred") else Path(branch)
    if file is not None and file.is_dir():  # what `sigcam fit` wrote to
        file = file / "branch.safetensors"
    if branch == "sigmoid":
        raise CheckpointError(
            "the sigmoid branch must be fitted first: give its file (--branch branch.safetensors, made by "
            "`sigcam fit`), "
            "or use --branch centred, which needs none."
        )
    if file is not None and not file.is_file():
        raise CheckpointError(f"--branch {branch}: no such file {file}, and no branch of that name.")
    if file is not None and (head or layer):
        raise DataError("--head and --layer are part of a fitted branch: leave them out, or fit with them.")
    try_folder(output)
    if file is None:
        classifier, net = _attach(model, weights, crop, head, layer, device)
    else:
        classifier = _load(model, weights, crop, device)
        net = _prepared(load(file, classifier.model), classifier)
        if not net.fitted:
            raise CheckpointError(f"{file} holds a branch that was never fitted: make one with `sigcam fit`.")
    index = _class_index(classes, net)
    rows, skipped, names = list[dict[str, Any]](), list[tuple[str, str]](), _file_names(samples)
    with progress_bar() as progress:
        for batch in _batches(samples, classifier, batch_size, workers, skipped):
            chosen = [samples[i] for i in batch.indices]
            ex = explain_images(
                net,
                [sample.open() for sample in chosen],
                method,
                branch=cast(Any, "sigmoid" if file else branch),
                clamp=clamp,
                classes=index,
                scale=cast(Any, scale),
            )
            boxes = ex.boxes(threshold)
            for sample, row, box in zip(chosen, ex.rows(), boxes, strict=True):
                row |= {"box": box[0].tolist(), "threshold": threshold}
                rows.append({"image": sample.id, **row})
            ex.save(output, [names[i] for i in batch.indices], threshold=threshold)
            progress("maps", batch.indices[-1] + 1, len(samples))
    if not rows:
        raise DataError(f"none of the {len(samples)} pictures could be read; the first: {skipped[0][1]}")
    write_text(output / "explanation.json", json.dumps(rows, indent=1))
    write_manifest(
        output,
        model=classifier.name,
        model_fingerprint=fingerprint(net.model),
        branch=branch,
        data_fingerprint=data_fingerprint(samples),
        method=method,
        skipped=skipped,
        numbers=rows,
    )
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    shown = [
        (
            row["image"],
            row["class_name"],
            f"{row['probability']:.3f}",
            f"{row['evidence']:.3f}" if file else "-",
        )
        for row in rows[:20]
    ]
    show_table("maps", shown, header=("image", "class", "probability", "evidence"))
    for row in rows:
        if row["blank"]:
            typer.echo(
                f"blank map: {row['image']} (share of positive evidence {row['positive_share']:.0%})",
                err=True,
            )
    show_skips(skipped)
    typer.echo(f"{len(rows)} overlay(s), maps and explanation.json are in {output}")


@app.command()
def demo(
    output: Output = Path("sigcam-demo"),
    images: Annotated[int, typer.Option(min=64, help="Training images of `shapes` to make.")] = 1600,
    test_images: Annotated[int, typer.Option(min=32, help="Test images.")] = 400,
    device: Device = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Do the whole job offline: make data, train a classifier, fit a branch, draw and measure maps."""
    from sigcam.demo import run_demo

    with progress_bar() as progress:
        table = run_demo(
            output,
            images=images,
            test_images=test_images,
            device=_device(device),
            seed=seed,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(table, indent=1))
        return
    show_table(
        "mean IoU of the thresholded map with the object's mask",
        [(r["branch"], r["clamp"], f"{r['iou']:.3f}", f"{r['threshold']:.2f}") for r in table["maps"]],
        header=("map from", "weights", "mean IoU", "threshold"),
    )
    show_table(
        "does the best class's score tell pictures with a bird from the same pictures without it?",
        [
            (
                r["score"],
                f"{r['above_half_with_bird']:.1%}",
                f"{r['above_half_without']:.1%}",
                f"{r['auroc']:.3f}",
            )
            for r in table["nothing_there"]
        ],
        header=("score", "above 0.5 with", "above 0.5 without", "AUROC"),
    )
    rows = {k: v for k, v in table.items() if k not in ("maps", "nothing_there")}
    show_table(
        "demo",
        [(k.replace("_", " "), f"{v:.4g}" if isinstance(v, float) else str(v)) for k, v in rows.items()],
    )
    typer.echo(f"look at {output / 'maps.png'} and {output / 'distortions.png'}")


# ------------------------------------------------------------------------------------ what the commands share


def _device(name: str) -> str:
    import torch

    from sigcam.errors import DataError

    try:
        torch.empty(1, device=torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def _open(data: str, format: str | None, split: str) -> Samples:
    from sigcam.data import open_dataset

    return open_dataset(data, format=format, split=split)


def _enough(samples: Samples) -> Samples:
    """The samples, if there are two classes with two images each."""
    from sigcam.errors import DataError

    if len(samples.classes) < 2:
        raise DataError(
            f"the data has one class ({samples.classes[0]}): at least two are needed to tell them apart."
        )
    counts = [0] * len(samples.classes)
    for sample in samples:
        counts[sample.label or 0] += 1
    few = next((name for name, count in zip(samples.classes, counts, strict=True) if count < 2), None)
    if few is not None:
        raise DataError(f"class {few!r} has one image: give each class at least two, or remove its folder.")
    return samples


def _load(
    model: str,
    weights: Path | None,
    crop: bool,
    device: str,
    classes: int | None = None,
    *,
    pretrained: bool = True,
) -> Classifier:
    import torch

    from sigcam.models import load_classifier

    classifier = load_classifier(
        model,
        weights=weights,
        device=_device(device),
        crop=crop,
        num_classes=classes,
        pretrained=pretrained,
    )
    classifier.model.to(memory_format=torch.channels_last)  # up to twice as fast; the model is ours alone
    return classifier


def _attach(
    model: str,
    weights: Path | None,
    crop: bool,
    head: str | None,
    layer: str | None,
    device: str = "cpu",
    pretrained: bool = True,
) -> tuple[Classifier, DualBranch]:
    from sigcam.dual import attach

    classifier = _load(model, weights, crop, device, pretrained=pretrained)
    return classifier, _prepared(attach(classifier.model, head=head, layer=layer), classifier)


def _prepared(net: DualBranch, classifier: Classifier) -> DualBranch:
    """The network with the classifier's preprocessing and class names."""
    net.transform = classifier.transform
    net.class_names = net.class_names or classifier.classes
    return net


def _finer_layers(net: DualBranch) -> list[str]:
    """For each finer grid that the network passes through, the last layer on it."""
    last = {(p, q): f"{name} ({n} x {p} x {q})" for name, n, p, q in net.split.spatial}
    return [text for grid, text in last.items() if grid[0] > net.split.fold.grid[0]]


def _usable_methods(net: DualBranch) -> list[str]:
    from sigcam.methods import METHODS

    return [name for name in METHODS if name != "cam" or net.linear]


def _class_index(given: str | None, net: DualBranch) -> int | None:
    from difflib import get_close_matches

    from sigcam.errors import DataError

    names = net.class_names or ()
    if given is None or given in names:
        return None if given is None else names.index(given)
    if given.isdecimal():
        return int(given)
    close = get_close_matches(given, names, n=3)
    raise DataError(
        f"no class is named {given!r}" + (f": did you mean {', '.join(close)}?" if close else ".")
    )


def _batches(
    samples: Samples, classifier: Classifier, batch_size: int, workers: int, skipped: list[tuple[str, str]]
) -> Iterator[Any]:
    from sigcam.data.loading import collect

    for batch in collect(samples, classifier.transform, batch_size=batch_size, workers=workers):
        skipped += batch.skipped
        if len(batch.images):
            yield batch


def _file_names(samples: Samples) -> list[str]:
    """A name for each sample's files, `photo.map` for `photo.jpg`: no two alike, none that of a picture."""
    plain = [sample.id.strip("/").replace("/", "__").replace("\\", "__") for sample in samples]
    stems = [name.rsplit(".", 1)[0] for name in plain]
    twice = {stem for stem, count in Counter(stems).items() if count > 1}
    return [f"{name if stem in twice else stem}.map" for name, stem in zip(plain, stems, strict=True)]
