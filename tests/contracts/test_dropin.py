"""Programs for pytorch-grad-cam run with their import changed, and draw what they drew."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.nets import PlainVit
from support.tiny import Gap, Normed, untouched

LIBRARIES = "pytorch_grad_cam", "sigcam"

# --------------------------------------------------------------------------------------- what programs load


class Cifar(nn.Module):
    """A network for 32 x 32 pixels only, whose last layer has one cell there."""

    def __init__(self) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for before, after in ((3, 6), (6, 8), (8, 8), (8, 8), (8, 8)):
            steps += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*steps, nn.Conv2d(8, 8, 1), nn.ReLU())
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).reshape(len(x), 8))
        return logits


class Digits(nn.Module):
    """A network for pictures of one channel, 28 x 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.relu, self.relu2, self.pool = nn.ReLU(), nn.ReLU(), nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(6 * 12 * 12, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu2(self.conv2(self.relu(self.conv1(x)))))
        logits: Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return logits


class Segmenter(nn.Module):
    """Scores of three classes for each pixel, at half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU()
        )
        self.classifier = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.classifier(self.backbone(x)), scale_factor=2.0)


class Embedder(nn.Module):
    """The mean features of an image, and no classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = nn.functional.adaptive_avg_pool2d(self.features(x), 1)[:, :, 0, 0]
        return pooled


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gap": (Gap, (3, 16, 24)),
    "normed": (Normed, (3, 32, 32)),
    "cifar": (Cifar, (3, 32, 32)),
    "digits": (Digits, (1, 28, 28)),
    "vit": (lambda: PlainVit((16, 24), patch=4, registers=0), (3, 16, 24)),
    "segmenter": (Segmenter, (3, 16, 24)),
    "embedder": (Embedder, (3, 16, 24)),
}


def loaded(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    make, shape = MODELS[name]
    return make().eval(), torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))


def ran(program: str, library: str, name: str) -> dict[str, Any]:
    """What the program leaves behind, with this library in its import."""
    model, images = loaded(name)
    names: dict[str, Any] = {"model": model, "images": images, "torch": torch, "np": np}
    exec(textwrap.dedent(program).replace("pytorch_grad_cam import", f"{library} import"), names)
    return names


# ------------------------------------------------------------------------------------------------- programs

WITH = """
    from pytorch_grad_cam import METHOD
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    with METHOD(model=model, target_layers=[LAYER]) as cam:
        cam.batch_size = 32
        maps = cam(input_tensor=images, targets=[ClassifierOutputTarget(3)] * len(images))
    outputs = cam.outputs
"""
PREDICTED = """
    from pytorch_grad_cam import METHOD

    cam = METHOD(model, [LAYER])
    maps = cam(images, None)
    first = maps[0, :]
    predicted = torch.softmax(cam.outputs, dim=1).argmax(1).tolist()
"""
LAYERS = """
    from pytorch_grad_cam import METHOD

    layers = [m for m in model.modules() if isinstance(m, torch.nn.ReLU)][:2]
    maps = METHOD(model=model, target_layers=layers)(input_tensor=images, targets=None)
"""
TABLE = """
    from pytorch_grad_cam import METHOD
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget

    methods = {"it": METHOD}
    for aug_smooth in (False, True):
        with methods["it"](model=model, target_layers=[LAYER], reshape_transform=None) as cam:
            targets = [ClassifierOutputSoftmaxTarget(k) for k in (0, 2)]
            maps = cam(input_tensor=images, targets=targets, aug_smooth=aug_smooth, eigen_smooth=False)
"""
TOKENS = """
    from pytorch_grad_cam import METHOD

    def reshape_transform(tensor, height=4, width=6):
        result = tensor[:, 1:, :].reshape(tensor.size(0), height, width, tensor.size(2))
        return result.transpose(2, 3).transpose(1, 2)

    cam = METHOD(model=model, target_layers=[LAYER], reshape_transform=reshape_transform)
    cam.batch_size = 4
    maps = cam(input_tensor=images, targets=None)
"""
PIXELS = """
    from pytorch_grad_cam import METHOD
    from pytorch_grad_cam.utils.model_targets import SemanticSegmentationTarget

    mask = np.zeros((8, 12), np.float32)
    mask[2:6, 3:9] = 1
    targets = [SemanticSegmentationTarget(1, mask), SemanticSegmentationTarget(2, 1 - mask)]
    with METHOD(model=model, target_layers=[LAYER]) as cam:
        cam.batch_size = 4
        maps = cam(input_tensor=images, targets=targets)
    outputs = cam.outputs
"""
CONCEPT = """
    from pytorch_grad_cam import METHOD

    class SimilarityToConcept:
        def __init__(self, features):
            self.features = features

        def __call__(self, model_output):
            return torch.nn.CosineSimilarity(dim=0)(model_output, self.features)

    concept = model(images.flip(0, 3))[0, :].detach()
    with METHOD(model=model, target_layers=[LAYER]) as cam:
        maps = cam(input_tensor=images, targets=[SimilarityToConcept(concept)] * 2)
    outputs = cam.outputs
"""
LOOP = """
    from pytorch_grad_cam import METHOD
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    images = images.requires_grad_()
    for k in (2, 1):
        cam = METHOD(model=model, target_layers=[LAYER])
        cam.uses_gradients = True
        maps = cam(images, [ClassifierOutputTarget(k)] * 2)
        assert cam.model is model and len(cam.target_layers) == 1 and images.to(cam.device) is images
        cam.activations_and_grads.release()
        del cam
"""
WHERE = {
    "gap": "model.body[-1]",
    "normed": "model.conv2",
    "cifar": "model.features[-1]",
    "digits": "model.relu2",
    "vit": "model.layers[-1].norm1",
    "segmenter": "model.backbone[-1]",
    "embedder": "model.features[-1]",
}
PROGRAMS = {
    "with": (WITH, ("gap", "normed", "cifar", "digits")),
    "predicted": (PREDICTED, ("gap", "cifar", "digits")),
    "layers": (LAYERS, ("digits", "cifar")),
    "table": (TABLE, ("gap", "digits")),
    "tokens": (TOKENS, ("vit",)),
    "pixels": (PIXELS, ("segmenter",)),
    "concept": (CONCEPT, ("embedder",)),
    "loop": (LOOP, ("gap", "digits")),
}
CASES = [(program, name) for program, (_, names) in PROGRAMS.items() for name in names]
SAME = ["GradCAM", "HiResCAM", "XGradCAM", "GradCAMPlusPlus", "GradCAMElementWise"]  # the formula in both
OTHERS = [  # see docs/differences.md
    *("LayerCAM", "EigenCAM", "EigenGradCAM", "ScoreCAM", "AblationCAM"),
    *("SegEigenCAM", "KPCA_CAM", "FEM", "RandomCAM"),
]


@pytest.mark.filterwarnings("ignore")  # of the peer
@pytest.mark.parametrize("method", [*SAME, *OTHERS])
@pytest.mark.parametrize(("program", "name"), CASES)
def test_a_program_runs_with_its_import_changed(program: str, name: str, method: str) -> None:
    if (program, method) == ("tokens", "AblationCAM"):
        pytest.skip("the peer needs another ablation layer there")
    text = PROGRAMS[program][0].replace("METHOD", method).replace("LAYER", WHERE[name])
    theirs, ours = (ran(text, library, name) for library in LIBRARIES)
    assert ours["maps"].dtype == theirs["maps"].dtype == np.float32
    assert ours["maps"].shape == theirs["maps"].shape == (2, *MODELS[name][1][1:])
    assert 0 <= ours["maps"].min() <= ours["maps"].max() <= 1
    for kept in ("predicted", "first"):
        assert np.shape(theirs.get(kept)) == np.shape(ours.get(kept))
    assert ours.get("predicted") == theirs.get("predicted")
    if "outputs" in theirs:
        assert torch.allclose(ours["outputs"], theirs["outputs"].detach(), atol=1e-6)
    exact = method in SAME and program != "table" and name != "normed"  # normed: conv2 before its ReLU
    if exact or (name == "cifar" and program != "layers"):  # one cell: nothing to tell apart
        assert np.abs(ours["maps"] - theirs["maps"]).max() < 1e-4


def test_one_cell_gives_its_own_value_where_maps_are_raw() -> None:
    import sigcam

    model, images = loaded("cifar")
    with untouched(model):
        cam = sigcam.GradCAM(model, [model.get_submodule("features.16")])
        assert not cam(images, 1).any()  # scaled from its smallest value to its largest
        ex = sigcam.explain(cam.net, images, branch="softmax", classes=1, scale="raw", size="features")
    assert ex.maps.shape == (2, 1, 1)
    bias = model.get_parameter("classifier.bias")[1]
    assert torch.allclose(ex.maps[:, 0, 0] + bias, model(images)[:, 1], atol=1e-5)
