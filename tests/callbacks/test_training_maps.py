"""What both callbacks share: what is read from a batch, what is drawn, what is left alone; lazy imports."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sigcam.callbacks.training_batches import LoaderPairs, images_of, labels_of
from sigcam.callbacks.training_maps import TrainingMaps
from sigcam.core.config import FitConfig
from sigcam.core.errors import DataError
from support.tiny import Gap, Normed, OnPlace, Vgg, easy_data, images, untouched


@pytest.mark.parametrize("make", [Gap, Vgg, Normed, OnPlace])
def test_drawing_in_inference_mode_and_autocast_leaves_the_model_alone(make: Any) -> None:
    model = make()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5) if number % 2 else None
    maps = TrainingMaps()
    with untouched(model), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        maps.keep_images((images(5), torch.zeros(5)))
        first = maps.draw(model, 1)
    assert isinstance(maps.images, Tensor) and not maps.images.is_inference()
    with untouched(model):
        assert maps.draw(model, 1).size == first.size


def test_a_half_precision_model_gets_images_of_its_type() -> None:
    assert TrainingMaps(images(2)).draw(Gap().to(torch.bfloat16), 0).width > 200


def test_maps_are_of_the_present_weights_and_the_fit_is_too(tmp_path: Any) -> None:
    model = Normed()
    maps = TrainingMaps(images(2), fit=FitConfig(), data=easy_data())
    before = maps.draw(model, 0).tobytes()
    with torch.no_grad():
        model.conv1.weight.neg_()
    assert maps.draw(model, 0).tobytes() != before
    with untouched(model):
        maps.fit_branch(model, None, 0, tmp_path)
    assert maps.net is not None and maps.net.fitted and (tmp_path / "branch.safetensors").is_file()


def test_images_and_labels_are_found_in_tuples_and_dicts() -> None:
    x, y = images(4), torch.arange(4)
    for batch in ((x, y), [x, y], {"labels": y, "pixel_values": x}, {"label": y, "image": x}):
        assert images_of(batch) is x and torch.equal(labels_of(batch), y)
    with pytest.raises(DataError, match="give images="):
        images_of((y, y))
    for batch in ((x,), {"image": x}, x):
        with pytest.raises(DataError, match="give data="):
            labels_of(batch)


def test_pairs_are_those_of_the_dataset_in_its_order_whatever_the_loader_does() -> None:
    data = easy_data(10)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    pairs = LoaderPairs(loader)
    assert len(pairs) == 10
    for (image, label), (x, y) in zip((pairs[i] for i in range(10)), data, strict=True):
        assert torch.equal(image, x) and label == y


@pytest.mark.slow
def test_the_libraries_are_imported_with_their_class_and_named_when_missing() -> None:
    code = """
import sys
import sigcam
assert dir(sigcam.callbacks)
assert not {"torch", "lightning", "transformers"} & {*sys.modules}
for library, name in (("lightning", "LightningMaps"), ("transformers", "TrainerMaps")):
    sys.modules[library] = None
    try:
        getattr(sigcam.callbacks, name)
    except sigcam.ModelError as error:
        print(error)
try:
    sigcam.callbacks.Nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "sigcam.callbacks.LightningMaps needs lightning: pip install 'sigcam[lightning]'.",
        "sigcam.callbacks.TrainerMaps needs transformers: pip install 'sigcam[hf]'.",
        "module 'sigcam.callbacks' has no attribute 'Nothing'",
    ], done.stderr
