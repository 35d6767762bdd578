"""The `sigcam` command: parse, call the library, print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from sigcam.cli.console import progress_bar, show_caches, show_table
from sigcam.cli.options import options_of
from sigcam.core.config import FitConfig, TrainConfig
from sigcam.network.opening import check_device

app = typer.Typer(
    help="Evidence maps for any image classifier, from a sigmoid branch that leaves predictions untouched.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[
    str,
    typer.Option(
        "--model", help="timm:NAME, torchvision:NAME, hf:NAME, wsol:NAME, file:PATH.py:FUNCTION or embedded."
    ),
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
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Folder of cached features; default: $SIGCAM_CACHE.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Per process, for torch.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Processes that decode images.")]
SkipUnreadable = Annotated[
    bool, typer.Option("--skip-unreadable", help="Go on without pictures that cannot be read.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of whatever is random.")]
Crop = Annotated[
    bool, typer.Option("--crop", help="Cut the middle as the model's own preset does; default: squash.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Report = Annotated[bool, typer.Option("--report", help="Write report.html too, one file to look at.")]
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
    split: Annotated[str | None, typer.Option("--split", help="Of the data; default: all.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for a contact sheet.")] = None,
    workers: Workers = 0,
    seed: Seed = 0,
    head: HeadName = None,
    layer: LayerName = None,
    crop: Crop = False,
    as_json: Json = False,
) -> None:
    """Show how a classifier is split (head, layer, map size) and what a data set holds."""
    from sigcam.reports.inspection import inspect_data, model_facts
    from sigcam.core.errors import DataError

    facts: dict[str, Any] = {}
    if (output or split) and not data:
        raise DataError("--output and --split are about a data set: name it with --data.")
    if data:
        where: Any = {"format": format, "split": split, "output": output}
        with progress_bar() as progress:
            facts["data"] = inspect_data(data, **where, workers=workers, seed=seed, progress=progress)
    if model or not data:
        place: Any = {"head": head, "layer": layer, "crop": crop, "pretrained": False}
        from sigcam.network.opening import open_network

        opened = open_network(model or "embedded", weights, None, **place)
        facts["model"] = model_facts(opened.classifier, opened.net)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        for title, rows in facts.items():
            show_table(title, [row for row in rows.items() if not isinstance(row[1], list)])
            for name, table in rows.items():
                if isinstance(table, list) and table:
                    show_table(name, [tuple(row.values()) for row in table], header=tuple(table[0]))


@app.command("train-classifier")
@options_of(TrainConfig)
def train_classifier(
    data: Data,
    model: Model = "embedded",
    weights: Weights = None,
    format: Format = None,
    output: Output = Path("classifier"),
    probe: Annotated[
        bool, typer.Option("--probe", help="Train a linear head alone, with Adam, on features computed once.")
    ] = False,
    device: Device = "cpu",
    threads: Threads = None,
    crop: Crop = False,
    as_json: Json = False,
    *,
    config: TrainConfig,
) -> None:
    """Train a softmax classifier on a folder, for the branch to be attached to; goes on where it stopped."""
    from sigcam.cli.train import TrainOptions, make_classifier

    where = TrainOptions(data, format, model, weights, output, probe, device, threads, crop)
    make_classifier(where, config, as_json)


@app.command()
@options_of(FitConfig)
def fit(
    data: Annotated[str, typer.Option("--data", help="A folder of class folders, or `shapes`.")] = "",
    features: Annotated[
        Path | None, typer.Option("--features", help="Instead of --data: an .npz with plain and labels.")
    ] = None,
    negatives: Annotated[
        Path | None, typer.Option("--negatives", help="A folder of images that show none of the classes.")
    ] = None,
    model: Model = "embedded",
    weights: Weights = None,
    format: Format = None,
    output: Output = Path("branch"),
    cache: Cache = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep features in memory only.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
    head: HeadName = None,
    layer: LayerName = None,
    crop: Crop = False,
    as_json: Json = False,
    *,
    config: FitConfig,
) -> None:
    """Attach a sigmoid branch to a trained classifier and fit it; the classifier stays what it was."""
    from sigcam.cli.fit import FitOptions, make_branch

    where = (data, format, features, negatives, model, weights, output, cache, no_cache, device, threads)
    make_branch(FitOptions(*where, head, layer, crop), config, as_json)


@app.command()
def explain(
    pictures: Annotated[list[Path] | None, typer.Argument(help="Image files, or folders of them.")] = None,
    model: Model = "embedded",
    weights: Weights = None,
    branch: Annotated[
        str,
        typer.Option(
            "--branch",
            help="A fitted branch file, or softmax or centred, which need none; the embedded model has one.",
        ),
    ] = "sigmoid",
    method: Annotated[
        str, typer.Option("--method", help="cam, grad-cam, grad-cam++, layer-cam, score-cam, ...")
    ] = "grad-cam",
    target: Annotated[str, typer.Option("--target", help="class, probability or finer-cam.")] = "class",
    layers: Annotated[
        str | None, typer.Option("--layers", help="Fuse the maps of these layers: layer3,layer4.")
    ] = None,
    zoom: Annotated[
        float, typer.Option("--zoom", help="Draw maps from the image this much enlarged: finer, slower.")
    ] = 1.0,
    stride: Annotated[
        int | None, typer.Option("--stride", help="1: no stride in a CNN's last stage; maps twice as fine.")
    ] = None,
    aug_smooth: Annotated[
        bool, typer.Option("--aug-smooth", help="Mean over mirror images and brightnesses: six passes.")
    ] = False,
    top_n: Annotated[int | None, typer.Option("--top-n", help="Channels that Score-CAM tries.")] = None,
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
    captions: Annotated[bool, typer.Option("--captions", help="Class, scores, colour bar below.")] = False,
    report: Report = False,
    as_json: Json = False,
) -> None:
    """Draw evidence maps of pictures: an overlay (PNG), the map (NPY) and the scores (JSON) for each."""
    from sigcam.cli.explain import ExplainOptions, draw_pictures

    what = (pictures or (), data, format, model, weights, branch, method, target, layers, zoom, stride)
    how = (aug_smooth, top_n, classes, scale, clamp, threshold, output, batch_size, workers, device)
    draw_pictures(ExplainOptions(*what, *how, head, layer, crop, captions, report), as_json)


@app.command()
def evaluate(
    data: Annotated[
        str, typer.Option("--data", help="Annotated images: a WSOL metadata folder, or `shapes`.")
    ],
    maps: Annotated[
        Path | None, typer.Option("--maps", help="Score this folder of .npy or .png maps, named by image id.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Of the data.")] = "test",
    format: Format = None,
    model: Model = "embedded",
    weights: Weights = None,
    branch: Annotated[str, typer.Option("--branch", help="A fitted branch file.")] = "",
    branches: Annotated[
        str | None, typer.Option("--branches", help="Of softmax,sigmoid,centred; default: two of them.")
    ] = None,
    method: Annotated[str, typer.Option("--method", help="cam,grad-cam, ...")] = "grad-cam",
    metrics: Annotated[str | None, typer.Option("--metrics", help="max_box_acc_v2,pxap, ...")] = None,
    scorer: Annotated[
        str, typer.Option("--scorer", help="Who scores confidence: softmax,sigmoid,branch; or some of them.")
    ] = "softmax",
    val_split: Annotated[
        str | None, typer.Option("--val-split", help="Choose thresholds on this split, too.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first N images only.")] = None,
    intervals: Annotated[bool, typer.Option("--intervals", help="95 % bootstrap intervals.")] = False,
    output: Output = Path("evaluation"),
    batch_size: BatchSize = 16,
    workers: Workers = 0,
    device: Device = "cpu",
    threads: Threads = None,
    skip_unreadable: SkipUnreadable = False,
    head: HeadName = None,
    layer: LayerName = None,
    report: Report = False,
    as_json: Json = False,
) -> None:
    """Measure maps on annotated images: those in a folder, or those that a network draws."""
    from sigcam.cli.evaluate import EvaluateOptions, measure_and_report

    wanted = (data, format, split, val_split, limit, maps, model, weights, branch, branches, method, metrics)
    where = (output, batch_size, workers, device, report, skip_unreadable)
    measure_and_report(EvaluateOptions(*wanted, scorer, intervals, head, layer, *where), threads, as_json)


@app.command()
def bench(
    target: Annotated[
        str,
        typer.Argument(
            help="table1, table2, nwc, pos-weight, sources, overhead, figures, or all of these; lite2, "
            "stages or vgg16 for another classifier."
        ),
    ],
    data: Annotated[
        Path,
        typer.Option("--data", help="Folder with cub, cars, ilsvrc, openimages, pets, or some of these."),
    ],
    model: Annotated[str, typer.Option("--model", help="The frozen backbone under test.")] = "embedded",
    classifiers: Annotated[
        Path | None,
        typer.Option(
            "--classifiers",
            help="Folder with cub/classifier.safetensors and the like, from train-classifier; else a linear "
            "probe is trained on each data set.",
        ),
    ] = None,
    output: Output = Path("bench"),
    full: Annotated[
        bool, typer.Option("--full", help="Measure everything on all images, draw no sample.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: 100 images, 1000 to learn from, nothing enlarged.")
    ] = False,
    batch_size: BatchSize = 16,
    workers: Workers = 0,
    device: Device = "cpu",
    threads: Threads = None,
    skip_unreadable: SkipUnreadable = False,
    seed: Seed = 0,
) -> None:
    """Make the paper's tables and figures on your data, with controls and intervals; it can be resumed."""
    from sigcam.bench.plan import Plan
    from sigcam.bench.runner import run_bench
    from sigcam.core.errors import DataError

    if quick and full:
        raise DataError("--quick and --full are opposites: give one of them.")
    some, zoom = (100, 1.0) if quick else (None, 2.0)
    confidence = None if full else some or 300
    where: Any = {"device": device, "batch_size": batch_size, "workers": workers, "seed": seed}
    where |= {"train_images": 1000 if quick else None, "skip_unreadable": skip_unreadable}
    plan = Plan(data, output, confidence, some, zoom, model, classifiers, **where)
    with progress_bar(quiet=os.environ.get("RANK", "0") != "0") as progress:  # set by torchrun
        run_bench(target, plan, threads, progress=progress, announce=typer.echo)


@app.command()
def ui(
    model: Model = "embedded",
    weights: Weights = None,
    branch: Annotated[
        str, typer.Option("--branch", help="A fitted branch file, softmax or centred; embedded has one.")
    ] = "sigmoid",
    data: Annotated[str, typer.Option("--data", help="A folder to choose from, to sort, to fit on.")] = "",
    format: Format = None,
    compare_model: Annotated[
        str | None, typer.Option("--compare-model", help="A second model to show beside the first.")
    ] = None,
    compare_weights: Annotated[Path | None, typer.Option("--compare-weights", help="Of the second.")] = None,
    compare_branch: Annotated[
        str | None, typer.Option("--compare-branch", help="A second branch, of the same or the second model.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Others than this machine need --auth.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="To listen on.")] = 7860,
    share: Annotated[
        bool, typer.Option("--share", help="Through gradio's public tunnel; with --auth.")
    ] = False,
    auth: Annotated[
        str | None, typer.Option("--auth", envvar="SIGCAM_AUTH", help="user:password that visitors need.")
    ] = None,
    device: Device = "cpu",
    open: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = True,
) -> None:
    """Look at maps in the browser, on a page that this machine alone can reach unless you say otherwise."""
    from sigcam.ui.serve import UiOptions, serve

    shown = (model, weights, branch, data, format, compare_model, compare_weights, compare_branch)
    serve(UiOptions(*shown, host, port, share, auth, device, open), typer.echo)


cache_app = typer.Typer(help="Look at cached features, or remove them.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@cache_app.command("list")
def cache_list(cache: Cache = None, as_json: Json = False) -> None:
    """Show what features are cached, and how much room they take."""
    from sigcam.training.feature_cache import default_folder, list_caches

    root = cache or default_folder()
    show_caches(root, list_caches(root), as_json)


@cache_app.command("clear")
def cache_clear(
    names: Annotated[list[str] | None, typer.Argument(help="Caches to remove; default: all.")] = None,
    cache: Cache = None,
) -> None:
    """Remove cached features; they are computed again when needed."""
    from sigcam.training.feature_cache import clear_caches, default_folder

    gone = clear_caches(cache or default_folder(), names or ())
    typer.echo(f"removed {len(gone)} cache(s), {sum(each.size for each in gone) / 1e6:.1f} MB")


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
    from sigcam.reports.demo import run_demo

    with progress_bar() as progress:
        table = run_demo(
            output,
            images=images,
            test_images=test_images,
            device=check_device(device),
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
    page = output / "report.html"
    typer.echo(f"look at {page if page.is_file() else output / 'maps.png'}")
