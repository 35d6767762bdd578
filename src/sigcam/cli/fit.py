"""`sigcam fit`: attach a sigmoid branch to a trained classifier and fit it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sigcam.cli import options as opt
from sigcam.cli.console import progress_bar, say, show_result
from sigcam.cli.options import option
from sigcam.core.config import FitConfig
from sigcam.core.errors import ConfigError
from sigcam.core.files import write_text_atomic
from sigcam.core.manifest import write_manifest


@dataclass(frozen=True, kw_only=True)
class FitOptions(
    opt.SourceOptions, opt.RunOptions, opt.CacheOptions, opt.ThreadOptions, opt.LayerOptions, opt.CropOptions
):
    """Options of `sigcam fit`."""

    data: str = ""
    features: Path | None = option("Instead of --data: an .npz file with plain and labels.", None)
    negatives: Path | None = option("Folder of images that show none of the classes.", None)
    output: Path = Path("branch")
    no_cache: bool = option("Keep features in memory only.", False)
    config: FitConfig = FitConfig()

    @property
    def resumes(self) -> bool:
        return bool(self.data) and not self.no_cache


def fit_command(options: FitOptions) -> None:
    """Attach a sigmoid branch to a trained classifier and fit it; the classifier does not change."""
    import torch

    from sigcam.core.distributed import process_group, rank, world_size
    from sigcam.data.registry import open_training_data
    from sigcam.data.sample import data_fingerprint, match_classes
    from sigcam.models.state_dict import fingerprint, weights_facts
    from sigcam.network.opening import open_network
    from sigcam.reports.fit_report import fit_details, fit_summary, plot_fit
    from sigcam.training.branch import fit
    from sigcam.training.feature_cache import default_folder
    from sigcam.training.features import read_features
    from sigcam.training.settings import check_fit_config

    o = options
    if bool(o.data) == bool(o.features):
        raise ConfigError("give the images to fit on (--data), or their features (--features): one of them.")
    check_fit_config(o.config, linear=None, negatives=bool(o.negatives))
    if o.threads:
        torch.set_num_threads(o.threads)
    with process_group(o.device) as device:
        data: Any = read_features(o.features) if o.features else open_training_data(o.data, o.format)
        opened = open_network(
            o.model, o.weights, None, head=o.head, layer=o.layer, crop=o.crop, device=device
        )
        net = opened.net
        if o.features:
            source = {"features": str(o.features)}
        else:
            data = match_classes(data, net.classes, net.class_names)
            source = {"data": o.data, "data_fingerprint": data_fingerprint(data)}
        cache = None if o.no_cache else o.cache or default_folder()
        with progress_bar(quiet=rank() > 0) as progress:
            result = fit(net, data, o.config, negatives=o.negatives, cache=cache, progress=progress)
        if rank() > 0:
            return
        o.output.mkdir(parents=True, exist_ok=True)
        path = o.output / "branch.safetensors"
        net.save(path)
        names = net.class_names or tuple(f"class {k}" for k in range(max(net.classes, 2)))
        write_text_atomic(o.output / "fit.json", json.dumps(fit_details(result, names), indent=1) + "\n")
        numbers = fit_summary(result) | {"processes": world_size(), "threads": torch.get_num_threads()}
        numbers |= {"branch": str(path)}
        write_manifest(
            o.output,
            model=opened.classifier.name,
            weights=weights_facts(o.model, o.weights),
            model_fingerprint=fingerprint(net.original),
            **source,
            negatives=str(o.negatives) if o.negatives else None,
            seed=o.config.seed,
            config=asdict(o.config),
            numbers=numbers,
        )
        plotted = plot_fit(result, o.output / "fit.png")
        show_result(numbers, result.skipped, o.json)
        if not o.json:
            written = "branch, fit.json, fit.png" if plotted else "branch, fit.json"
            if result.background:
                say(
                    "fitted with background evidence: maps show where the class is, rather than where the "
                    "softmax score came from (--background 0 is the paper's fit)"
                )
            say(f"{written} and manifest.json are in {o.output}")
