"""`sigcam demo`: the whole job offline, on synthetic images."""

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from sigcam.cli import options as opt
from sigcam.cli.console import as_text, progress_bar, say, show_table
from sigcam.cli.options import option


@dataclass(frozen=True, kw_only=True)
class DemoOptions(opt.RunOptions, opt.SeedOptions, opt.JsonOptions):
    """Options of `sigcam demo`."""

    images: int = option("Number of synthetic training images.", 1600, min=64)
    test_images: int = option("Number of test images.", 400, min=32)
    output: Path = Path("sigcam-demo")


def demo_command(options: DemoOptions) -> None:
    """Do the whole job offline: make data, train a classifier, fit a branch, draw and measure maps."""
    from sigcam.network.opening import check_device
    from sigcam.reports.demo import run_demo
    from sigcam.reports.demo_page import map_source

    with progress_bar() as progress:
        result = run_demo(
            options.output,
            images=options.images,
            test_images=options.test_images,
            device=check_device(options.device),
            seed=options.seed,
            progress=progress,
        )
    if options.json:
        typer.echo(json.dumps(result, indent=1))
        return
    photograph = result.pop("photograph")
    if "left_out" in photograph:
        say(f"no photograph: {photograph['left_out']}")
    else:
        show_table(
            f"one photograph: {photograph['credit']}",
            [
                (r["class_name"], f"{r['probability']:.3f}", f"{r['evidence']:.3f}", r["presence"])
                for r in photograph["classes"]
            ],
            header=("class", "softmax probability", "sigmoid evidence", "verdict"),
        )
    show_table(
        "mean IoU of the thresholded map with the object's mask",
        [(map_source(r), r["clamp"], f"{r['iou']:.3f}", f"{r['threshold']:.2f}") for r in result.pop("maps")],
        header=("map from", "weights", "mean IoU", "threshold"),
    )
    with_and_without = ("above_half_with_bird", "above_half_without")
    show_table(
        "does the score of the best class tell images with a bird from the same images without it?",
        [
            (r["score"], *(f"{r[key]:.1%}" for key in with_and_without), f"{r['auroc']:.3f}")
            for r in result.pop("nothing_there")
        ],
        header=("score", "above 0.5 with", "above 0.5 without", "AUROC"),
    )
    show_table("demo", [(name.replace("_", " "), as_text(value)) for name, value in result.items()])
    page = options.output / "report.html"
    say(f"look at {page if page.is_file() else options.output / 'maps.png'}")
