"""Facts about what a network computes: kept results are taken up again only where all of them are equal.

Names, weights and structure do not tell everything: the code of a model's `forward`, or of a transform of the
user's own, may change and keep its name. So the facts include a hash of what comes out for a test input.
"""

import hashlib
import re
import uuid
from collections.abc import Iterable
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sigcam.models.classifier import Classifier
from sigcam.models.preprocess import Transform
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch
from sigcam.network.trace import eval_mode, logits_of

PICTURE_SIZES = ((97, 64), (64, 97), (300, 300))  # width and height of the test pictures


@torch.no_grad()
def network_facts(net: DualBranch, transform: Transform | None) -> dict[str, Any]:
    """Return everything about a network, its branch, its preprocessing and this machine that maps and scores
    depend on."""
    return {
        "classifier": fingerprint(net.original),
        "branch": fingerprint(net.sigmoid),
        "calibration": net.calibration.to_json(),
        "structure": [repr(net.original), repr(net.split), net.model is net.original, net.input_shape],
        "class names": net.class_names,
        "preprocessing": transform_facts(transform),
        "outputs": hash_of_tensors(vars(net(noise_input(net))).values()),
        **machine_facts(net.device),
    }


def noise_input(net: DualBranch) -> Tensor:
    """Return a (1, C, H, W) input of the network's own size, the same in every process."""
    noise = torch.randn(1, *net.input_shape, generator=torch.Generator().manual_seed(0))
    return noise.to(net.example)


def classifier_facts(classifier: Classifier) -> dict[str, Any]:
    """Return everything about a classifier, its preprocessing and this machine that training depends on."""
    return {
        "model": classifier.name,
        "weights": fingerprint(classifier.model),
        "structure": repr(classifier.model),
        "preprocessing": transform_facts(classifier.transform),
        "outputs": _outputs(classifier),
        **machine_facts(next(classifier.model.parameters()).device),
    }


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, besides the versions of packages."""
    return {"device": device.type, "threads": torch.get_num_threads()}


def transform_facts(transform: Transform | None) -> list[str]:
    """Return a transform's repr without memory addresses, and a hash of what it makes of test pictures; of a
    random one, from a fixed seed. Where it refuses them, the facts equal no others."""
    if transform is None:
        return []
    name = re.sub(r" at 0x[0-9a-fA-F]+", "", str(transform))
    try:
        return [name, hash_of_tensors(_view(transform, size) for size in PICTURE_SIZES)]
    except Exception:  # code of the user's, which need not take these pictures
        return [name, uuid.uuid4().hex]


def hash_of_tensors(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the tensors' shapes and bits."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(data.shape)} {data.dtype}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def _outputs(classifier: Classifier) -> str:
    """Return a hash of the logits of a test picture; equal to no other if there are none."""
    first = next(classifier.model.parameters())
    try:
        image = _view(classifier.transform, PICTURE_SIZES[-1])[None].to(first)
        with eval_mode(classifier.model):
            return hash_of_tensors([logits_of(classifier.model(image), 1)])
    except Exception:  # the training says what is wrong
        return uuid.uuid4().hex


def _view(transform: Transform, size: tuple[int, int]) -> Tensor:
    """Return what the transform makes of a test picture."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return transform(Image.fromarray(pixels.numpy()))
