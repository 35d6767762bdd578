"""The module that is exported computes what explain computes, whatever the head."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from sigcam.deployment.graph import OUTPUTS, Drawn, ExportedNetwork
from sigcam.methods.explainer import explain
from sigcam.network.calibration import BranchCalibration, LogitScale
from sigcam.network.dual import DualBranch
from support.nets import ConvThenMean, Encoder, PlainVit
from support.tiny import Gap, InPlace, Normed, Probabilities, TwoHeads, Vgg, attached, images, untouched


class ConvAfterPool(Gap):
    """Pooling, a 1x1 convolution with an activation, and the linear layer, as in MobileNetV3."""

    def __init__(self) -> None:
        super().__init__(channels=6)
        self.pool, self.conv = nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(nn.functional.hardswish(self.conv(self.pool(self.body(x)))).flatten(1))
        return logits


CALIBRATION = BranchCalibration(LogitScale(0.7, 0.2), {1.0: LogitScale(1.3, -0.1)})
NETS: dict[str, Callable[[], nn.Module]] = {
    "global average": Gap,
    "in-place": InPlace,
    "convolution, then mean": ConvThenMean,
    "probabilities": Probabilities,
    "one logit": lambda: Gap(classes=1),
    "two heads": TwoHeads,
    "MLP": Vgg,
    "norm in the head": Normed,
    "norm after pooling": lambda: ConvNeXt(
        [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=4
    ),
    "convolution after pooling": ConvAfterPool,
    "transformer": lambda: PlainVit((16, 16), 4),
    "transformer with a fast path": lambda: Encoder(False),
}


def network(name: str) -> DualBranch:
    torch.manual_seed(0)
    net = attached(NETS[name]().eval())
    net.calibration = CALIBRATION
    return net


def outputs(net: DualBranch, x: Tensor, scale: str, threshold: float, k: int = 3) -> dict[str, Tensor]:
    k = min(k, max(net.classes, 2))
    module = ExportedNetwork(net, Drawn(k, None, scale, threshold), None).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        return dict(zip(OUTPUTS, module(x), strict=True))


BOTH = ("global average", "one logit", "MLP")  # in both scales; the others differ in their logits alone
CASES = [(name, "logit") for name in NETS] + [(name, "probability") for name in BOTH]


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_outputs_equal_those_of_explain(name: str, scale: str):
    net, x = network(name), images(2, seed=5)
    threshold = 0.5 if scale == "probability" else 0.2
    with untouched(net.model):
        out = outputs(net, x, scale, threshold)
    options = {"classes": out["classes"], "scale": scale}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of blank maps
        cells, ex = explain(net, x, size="features", **options), explain(net, x, **options)
        top = explain(net, x, classes="top5")
    assert torch.equal(out["classes"], top.classes[:, : out["classes"].shape[1]])
    assert torch.allclose(out["maps"], cells.maps, atol=1e-4)
    for key, expected in (
        ("probability", ex.probability),
        ("evidence", ex.evidence),
        ("branch_logits", ex.logits),
    ):
        assert torch.allclose(out[key].gather(1, out["classes"]), expected, atol=1e-5), key
    assert torch.equal(out["present"], ex.present)
    boxes = [torch.cat(ex.select(k).boxes()) for k in range(out["classes"].shape[1])]
    assert torch.equal(out["boxes"].long(), torch.stack(boxes, 1))


def test_chosen_classes_are_drawn_for_every_image():
    net, x = network("global average"), images(3)
    module = ExportedNetwork(net, Drawn(2, (3, 1), "logit", 0.2), None).eval()
    with torch.no_grad():
        out = dict(zip(OUTPUTS, module(x), strict=True))
    assert out["classes"].tolist() == [[3, 1]] * 3
    expected = explain(net, x, classes=torch.tensor([[3, 1]] * 3), scale="logit", size="features")
    assert torch.allclose(out["maps"], expected.maps, atol=1e-5)
