"""Absolute maps: cell scores whose mean is the logit, probabilities that compare, and what is refused."""

import pytest
import torch
from torch import Tensor

from sigcam.core.config import FitConfig
from sigcam.core.errors import ConfigError
from sigcam.methods.explainer import BRIGHTNESS, explain, explain_pass
from sigcam.methods.explanation import is_calibrated
from sigcam.methods.registry import METHODS, MapConfig
from sigcam.metrics.boxes import boxes_at
from sigcam.network.dual import DualBranch
from sigcam.training.branch import fit
from support.patches import Mlp, empty, patch_network, patches
from support.tiny import Gap, images

IN_LOGITS = [name for name, method in METHODS.items() if method.in_logits]


@pytest.fixture(scope="module")
def net() -> DualBranch:
    net = patch_network()
    fit(net, patches(), FitConfig(l2=1e-3, background=1.0, zooms=(1.0, 2.0)))
    return net


@pytest.fixture(scope="module")
def mlp() -> DualBranch:
    net = patch_network(Mlp)
    fit(net, patches(), FitConfig(background=1.0, lr=0.01, batch_size=16))
    return net


def some() -> tuple[Tensor, Tensor]:
    x, labels = patches(6, seed=3)[:]
    return x, labels


@pytest.mark.parametrize("branch", ["sigmoid", "softmax", "centred"])
@pytest.mark.parametrize("method", IN_LOGITS)
def test_the_mean_of_the_cells_is_the_logit(net: DualBranch, method: str, branch: str) -> None:
    x, labels = some()
    ex = explain(net, x, method, branch=branch, classes=labels, scale="logit", size="features")  # type: ignore[arg-type]
    assert torch.allclose(ex.maps.mean((1, 2)), ex.logits, atol=1e-4)
    assert ex.cells is not None and torch.equal(ex.cells, ex.maps)


@pytest.mark.parametrize("method", [name for name in IN_LOGITS if name != "cam"])
def test_the_mean_of_the_cells_is_the_logit_of_any_head(mlp: DualBranch, method: str) -> None:
    x, _ = some()
    ex = explain(mlp, x, method, classes="top5", scale="logit", size="features")
    assert ex.maps.shape[1] == 4
    assert torch.allclose(ex.maps.mean((2, 3)), ex.logits, atol=1e-4)


def test_a_cell_of_a_linear_head_scores_its_own_features(net: DualBranch) -> None:
    x, labels = some()
    ex = explain(net, x, "cam", classes=labels, scale="logit", size="features")
    layer, features = net.last_layer("sigmoid"), net.run(x).features
    scores = torch.einsum("bnpq,bn->bpq", features, layer.weight[labels]) + layer.bias[labels][:, None, None]
    assert torch.allclose(ex.maps, scores, atol=1e-4)


def enlarged(cells: Tensor, maps: Tensor) -> Tensor:
    """Maps (B, P, Q) at the size of others (B, H, W), bilinear."""
    return torch.nn.functional.interpolate(cells[:, None], maps.shape[-2:], mode="bilinear")[:, 0]


def test_probabilities_are_the_calibrated_sigmoid_and_are_never_stretched(net: DualBranch) -> None:
    x, labels = some()
    logit = explain(net, x, "cam", classes=labels, scale="logit")
    ex = explain(net, x, "cam", classes=labels, scale="probability")
    scale = net.calibration.maps[1.0]
    assert torch.allclose(ex.maps, enlarged(scale(logit.cells).sigmoid(), ex.maps), atol=1e-5)
    cells = explain(net, x, "cam", classes=labels, scale="probability", size="features")
    assert torch.allclose(cells.maps, scale(logit.cells).sigmoid(), atol=1e-5)
    nothing = explain(net, empty(20), "cam", classes=0, scale="probability")
    assert float(ex.maps.amax((1, 2)).min()) > 0.5 > float(nothing.maps.amax((1, 2)).mean())
    one = explain(net, x[:1], "cam", classes=labels[:1], scale="probability")
    assert torch.allclose(one.maps[0], ex.maps[0], atol=1e-5)


def test_each_size_has_a_scale_of_its_own_and_others_are_refused(net: DualBranch) -> None:
    x, labels = some()
    larger = explain(net, x, "cam", classes=labels, scale="probability", zoom=2.0)
    logit, scale = explain(net, x, "cam", classes=labels, scale="logit", zoom=2.0), net.calibration.maps[2.0]
    assert torch.allclose(larger.maps, enlarged(scale(logit.cells).sigmoid(), larger.maps), atol=1e-5)
    with pytest.raises(ConfigError, match="--zooms 1,2,3"):
        explain(net, x, "cam", scale="probability", zoom=3.0)
    with pytest.raises(ConfigError, match="without stride= and layers="):
        explain(net, x, "cam", scale="probability", stride=1)
    with pytest.raises(ConfigError, match="not calibrated"):
        explain(patch_network(), x, "grad-cam", scale="probability")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": "eigen-cam"}, "needs maps in logits, as by cam, grad-cam"),
        ({"clamp": True}, "leave clamp out"),
        ({"target": "finer-cam"}, "leave target='finer-cam' out"),
        ({"branch": "softmax", "scale": "probability"}, "for the sigmoid branch"),
        ({"scale": "absolute"}, "unknown scale 'absolute': there are unit, raw, logit, probability"),
    ],
)
def test_maps_that_have_no_such_scale_are_refused(
    net: DualBranch, settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        explain(net, some()[0], **{"method": "grad-cam", "scale": "logit", **settings})  # type: ignore[arg-type]


def test_boxes_cut_probabilities_at_one_half_and_other_maps_at_a_fifth(net: DualBranch) -> None:
    x, labels = some()
    ex = explain(net, x, "cam", classes=labels, scale="probability")
    for box, mask in zip(ex.boxes(), ex.maps > 0.5, strict=True):
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        assert box[0, 0] >= columns[0] and box[0, 1] >= rows[0]
        assert box[0, 2] <= columns[-1] + 1 and box[0, 3] <= rows[-1] + 1
    assert not any(
        each.any() for each in explain(net, empty(5), "cam", classes=1, scale="probability").boxes()
    )
    unit = explain(net, x, "cam", classes=labels)
    assert all(torch.equal(a, b) for a, b in zip(unit.boxes(), boxes_at(unit.maps, 0.2), strict=True))


def test_evidence_says_whether_the_class_is_present(net: DualBranch) -> None:
    x, labels = some()
    ex = explain(net, x, classes=labels)
    scale = net.calibration.evidence
    assert torch.allclose(ex.evidence, (ex.logits * scale.scale + scale.shift).sigmoid())
    assert ex.present.dtype == torch.bool and ex.present.all()
    several = explain(net, empty(4), classes="all")
    assert several.present.shape == (4, 4) and not several.present.any()
    assert (explain(net, x, classes="positive").classes[:, 0] >= 0).all()
    assert (explain(net, empty(4), classes="positive").classes == -1).all()


@pytest.mark.parametrize("scale", ["logit", "probability"])
def test_contributions_of_regions_add_up_to_the_logit(net: DualBranch, scale: str) -> None:
    x, labels = some()
    ex = explain(net, x, "cam", classes=labels, scale=scale)  # type: ignore[arg-type]
    assert torch.allclose(ex.contribution((0, 0, 16, 16)), ex.logits, atol=1e-4)
    parts = [(0, 0, 5, 16), (5, 0, 16, 7), (5, 7, 16, 16)]
    assert torch.allclose(sum(ex.contribution(box) for box in parts), ex.logits, atol=1e-4)  # type: ignore[arg-type]
    patch = x.sum(1) > 1.2
    rows, columns = patch[0].any(1).nonzero()[:, 0], patch[0].any(0).nonzero()[:, 0]
    inside = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    assert ex.contribution(inside)[0] > 0 > ex.logits[0] - ex.contribution(inside)[0]
    several = explain(net, x, "cam", classes="all", scale="logit")
    assert torch.allclose(several.contribution((0, 0, *several.maps.shape[:1:-1])), several.logits, atol=1e-4)
    with pytest.raises(ConfigError, match="draw one"):
        explain(net, x).contribution((0, 0, 4, 4))


def test_one_logit_gives_the_two_classes_complementary_probabilities() -> None:
    x, labels = patches(160)[:]
    from torch.utils.data import TensorDataset

    from sigcam.network.attachment import attach

    torch.manual_seed(0)
    net = attach(Gap(classes=1), example=images(1))
    fit(net, TensorDataset(x, (labels == 0).long()), FitConfig(l2=1e-3, background=1.0))
    if not net.calibration.maps:
        pytest.fail("the branch must be calibrated")
    both = explain(net, x[:5], classes="all", scale="probability")
    assert torch.allclose(both.maps.sum(1), torch.ones(5, *both.maps.shape[2:]), atol=1e-5)
    assert torch.allclose(both.evidence.sum(1), torch.ones(5), atol=1e-5)


def test_a_pass_of_enlarged_images_names_its_zoom(net: DualBranch) -> None:
    x, labels = some()
    larger = torch.nn.functional.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
    config = MapConfig("cam", scale="probability")
    drawn = explain_pass(net, net.run(larger), config, classes=labels, zoom=2.0, size=(16, 16))
    expected = explain(net, x, "cam", classes=labels, scale="probability", zoom=2.0)
    assert torch.allclose(drawn.maps, expected.maps, atol=1e-4)


def test_probabilities_of_views_are_averaged(net: DualBranch) -> None:
    x, labels = some()
    ex = explain(net, x, "cam", classes=labels, scale="probability", aug_smooth=True)
    views = [
        explain(
            net, (x.flip(-1) if mirrored else x) * factor, "cam", classes=labels, scale="probability"
        ).maps
        for mirrored in (False, True)
        for factor in BRIGHTNESS
    ]
    half = len(BRIGHTNESS)
    mean = (sum(views[:half]) + sum(views[half:]).flip(-1)) / len(views)
    assert torch.allclose(ex.maps, mean, atol=1e-5)


def test_captions_and_rows_say_whether_the_class_is_present(net: DualBranch) -> None:
    x, labels = some()
    shown = explain(net, x, "cam", classes=labels, scale="probability")
    assert shown.caption(0)[2] == f"evidence {float(shown.evidence[0]):.3f}, present"
    assert [row["present"] for row in shown.rows()] == [True] * 6
    nothing = explain(net, empty(2), "cam", classes="all", scale="probability")
    assert nothing.caption(0, 2)[2] == f"evidence {float(nothing.evidence[0, 2]):.3f}, not present"
    assert nothing.rows()[1]["present"] == [False] * 4
    unit = explain(net, x, "cam", classes=labels)
    assert unit.caption(0)[2].endswith(", present") and unit.rows()[0]["present"] is True
    assert "present" in unit._repr_html_()


def test_a_branch_that_is_not_calibrated_does_not_say_what_is_present() -> None:
    net = patch_network()
    fit(net, patches(), FitConfig(l2=1e-3, background=0.0))
    ex = explain(net, some()[0], "cam")
    assert ex.caption(0)[2] == f"evidence {float(ex.evidence[0]):.3f}"
    assert ex.rows()[0]["present"] is None and not is_calibrated(net)
    unfitted = explain(patch_network(), some()[0], "cam", branch="centred")
    assert unfitted.rows()[0]["present"] is None and len(unfitted.caption(0)) == 2


def test_overlays_captions_files_and_notebooks_know_both_scales(net: DualBranch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    x, labels = some()
    for scale in ("logit", "probability"):
        ex = explain(net, x, "cam", classes=labels, scale=scale)  # type: ignore[arg-type]
        assert len(ex.overlay(boxes=0.5, contour=0.5, captions=True, legend=True)) == 6
        assert "figure" in ex._repr_html_()
        ex.save(tmp_path / scale, threshold=0.5)
        assert ex.rows()[0]["scale"] == scale
