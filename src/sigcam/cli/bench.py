"""`sigcam bench`: the paper's tables and figures."""

import os
from dataclasses import dataclass
from pathlib import Path

from sigcam.bench.registry import targets_help
from sigcam.cli import options as opt
from sigcam.cli.console import progress_bar, say
from sigcam.cli.options import option
from sigcam.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchOptions(opt.RunOptions, opt.BatchOptions, opt.ThreadOptions, opt.SkipOptions, opt.SeedOptions):
    """Options of `sigcam bench`."""

    target: str = option(targets_help, argument=True)
    data: Path = option("Folder with cub, cars, ilsvrc, openimages, pets, or some of these.")
    model: str = option("Frozen backbone to test.", "embedded")
    classifiers: Path | None = option(
        "Folder with cub/classifier.safetensors and so on, from train-classifier; otherwise a linear probe "
        "is trained on each data set.",
        None,
    )
    full: bool = option("Measure everything on all images instead of a sample.", False)
    quick: bool = option("A first look: 100 images, 1000 to train on, nothing enlarged.", False)
    output: Path = Path("bench")

    @property
    def resumes(self) -> bool:
        return True


def bench_command(options: BenchOptions) -> None:
    """Make the paper's tables and figures on your data, with controls and intervals; can be resumed."""
    from sigcam.bench.plan import Plan
    from sigcam.bench.runner import run_bench

    o = options
    if o.quick and o.full:
        raise ConfigError("--quick and --full are opposites: give one of them.")
    plan = Plan(
        data=o.data,
        output=o.output,
        fidelity_images=100 if o.quick else None if o.full else 300,
        localization_images=100 if o.quick else None,
        zoom=1.0 if o.quick else 2.0,
        backbone=o.model,
        classifiers=o.classifiers,
        train_images=1000 if o.quick else None,
        device=o.device,
        batch_size=o.batch_size,
        workers=o.workers,
        seed=o.seed,
        skip_unreadable=o.skip_unreadable,
    )
    with progress_bar(quiet=os.environ.get("RANK", "0") != "0") as progress:  # set by torchrun
        run_bench(o.target, plan, o.threads, progress=progress, announce=_say_lines)


def _say_lines(text: str) -> None:
    for line in text.split("\n"):
        say(line)
