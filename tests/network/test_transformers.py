"""Vision transformers: the layer chosen, the way back from tokens to cells, and a map by every method."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import sigcam
from sigcam.core.errors import AttachError, DataError
from sigcam.methods.rollout import rollout_maps
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.network.trace import logits_of

METHODS = ["grad-cam", "grad-cam++", "xgrad-cam", "layer-cam", "hires-cam", "eigen-cam", "eigengrad-cam"]
SMALL = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
SWIN = {"patch_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "window_size": 2}


def timm(name: str, **options: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, **{**SMALL, **options})


def torchvision() -> nn.Module:
    model = pytest.importorskip("torchvision").models.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # torchvision starts it at zero
    return model


def transformers(kind: str = "ViT", **options: Any) -> nn.Module:
    library = pytest.importorskip("transformers")
    tiny = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    size = {"image_size": [32, 48], "patch_size": 8, "num_labels": 5}
    config = getattr(library, f"{kind}Config")(**tiny, **size, **options)
    return getattr(library, f"{kind}ForImageClassification")(config)


class Case(NamedTuple):
    """A small transformer, where F must leave it, and outputs after which no token of the grid is read."""

    make: Callable[[], nn.Module]
    layer: str
    unread: tuple[str, ...] = ()
    heads: str = "head"
    prefix: int = 1
    size: tuple[int, int] = (32, 48)
    cell: int = 8  # pixels


CASES = {
    "class token": Case(
        lambda: timm("vit_tiny_patch16_224"), "blocks.2.norm1", ("blocks.2", "blocks", "norm")
    ),
    "distilled": Case(
        lambda: timm("deit_tiny_distilled_patch16_224"),
        *("blocks.2.norm1", ("blocks.2", "blocks", "norm"), "head, head_dist", 2),
    ),
    "registers": Case(
        lambda: timm("vit_small_patch14_reg4_dinov2"),
        *("blocks.2.norm1", ("blocks.2", "norm"), "head", 5),
    ),
    "average": Case(lambda: timm("vit_tiny_patch16_224", global_pool="avg"), "blocks"),
    "average without class token": Case(
        lambda: timm("vit_tiny_patch16_224", global_pool="avg", class_token=False), "blocks", prefix=0
    ),
    "swin": Case(lambda: timm("swin_tiny_patch4_window7_224", **SWIN), "norm", prefix=0),
    "torchvision": Case(
        torchvision,
        "encoder.layers.encoder_layer_2.ln_1",
        ("encoder.layers.encoder_layer_2", "encoder.ln", "encoder"),
        "heads",
        size=(32, 32),
    ),
    "transformers": Case(
        transformers, "vit.layers.2.layernorm_before", ("vit.layers.2", "vit.layernorm"), "classifier"
    ),
}
PLAIN = [name for name in CASES if name != "swin"]
BY_CLASS_TOKEN = [name for name, case in CASES.items() if case.unread]


@cache
def network(name: str) -> DualBranch:
    """The case's model, its weights large enough to tell tokens apart, and a branch that counts as fitted."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    net = attach(model, example=images(name, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    net.fitted = True
    return net


def images(name: str, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 3, *CASES[name].size, generator=generator)


# ------------------------------------------------------------------------------------------------- maps


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_every_gradient_method_gives_maps_at_image_size_on_both_branches(method: str, name: str) -> None:
    net, x = network(name), images(name)
    for branch in ("sigmoid", "softmax"):
        found = sigcam.explain(net, x, method, branch=branch, classes=torch.arange(5).expand(2, 5))
        assert found.maps.shape == (2, 5, *x.shape[-2:])
        assert torch.isfinite(found.maps).all()
        blank = int(found.blank.sum())  # a class may have no positive evidence, which is then said
        assert bool(found.notes) == bool(blank)
        assert blank < 5 or method == "eigen-cam"  # which knows no class, and is asked below
        drawn = found.maps[~found.blank]
        assert (drawn.amin((1, 2)) == 0).all() and (drawn.amax((1, 2)) == 1).all()


@pytest.mark.parametrize("name", CASES)
def test_eigen_cam_is_not_turned_to_where_all_of_it_is_negative(name: str) -> None:
    found = sigcam.explain(network(name), images(name, 8), "eigen-cam", branch="softmax")
    assert not found.blank.any(), found.notes  # channels of a norm's output sum to zero, and tell no sign


@pytest.mark.parametrize("name", CASES)
def test_maps_of_two_classes_differ_but_for_methods_that_know_no_class(name: str) -> None:
    net, x = network(name), images(name)
    for method in METHODS:
        maps = sigcam.explain(net, x, method, branch="softmax", classes=torch.tensor([[0, 1]] * 2)).maps
        assert torch.equal(maps[:, 0], maps[:, 1]) == (method == "eigen-cam"), method


@pytest.mark.parametrize("name", PLAIN)
def test_attention_rollout_is_one_more_map_of_a_plain_vit(name: str) -> None:
    net, x = network(name), images(name)
    found = sigcam.explain(net, x, "attention-rollout", branch="softmax")
    assert found.maps.shape == (2, *x.shape[-2:])
    assert not found.blank.any()
    shares = sigcam.explain(net, x, "attention-rollout", scale="raw", size="features").maps
    assert shares.shape == net(x).features[:, 0].shape
    assert (shares.sum((1, 2)) <= 1 + 1e-6).all()
    assert torch.equal(shares, rollout_maps(net, x))


def test_attention_rollout_refuses_swin() -> None:
    with pytest.raises(
        DataError, match=r"is for plain ViTs, and SwinTransformer attends .*: use 'grad-cam'\."
    ):
        sigcam.explain(network("swin"), images("swin"), "attention-rollout")


# -------------------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize("name", CASES)
def test_features_leave_where_tokens_of_the_grid_are_still_read(name: str) -> None:
    net, case = network(name), CASES[name]
    assert (net.split.layer, ", ".join(net.split.heads)) == (case.layer, case.heads)
    assert net.split.fold.prefix == case.prefix
    forward_pass = net.run(images(name), grad=True)
    for logits in (forward_pass.softmax_logits, forward_pass.sigmoid):
        (gradient,) = torch.autograd.grad(logits[:, 2].sum(), forward_pass.cut, retain_graph=True)
        cells = net.split.fold(gradient, case.size).abs().sum(1)  # (B, P, Q)
        assert (cells > 0).all()


@pytest.mark.parametrize(("name", "layer"), [(n, layer) for n in BY_CLASS_TOKEN for layer in CASES[n].unread])
def test_naming_an_output_of_which_only_the_class_token_is_read_is_refused(name: str, layer: str) -> None:
    net, case, x = network(name), CASES[name], images(name)
    outputs: list[Tensor] = []
    handle = net.model.get_submodule(layer).register_forward_hook(lambda _, args, out: outputs.append(out))
    logits = logits_of(net.model(x), 2)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits.sum(), outputs[0])  # (B, L, N)
    assert gradient[:, : case.prefix].any()
    assert not gradient[:, case.prefix :].any()
    reason = rf"layer='{layer}' gets no gradient on its grid\. Layers that do: '"
    with pytest.raises(AttachError, match=reason):
        attach(net.model, layer=layer, example=x[:1])
    with pytest.raises(AttachError, match=reason):
        sigcam.explain(net, x, "grad-cam", layers=[case.layer, layer])


# ---------------------------------------------------------------------------------- from tokens to cells


class NoAttention(TorchFunctionMode):
    """Attention gives zero, so that a token meets no other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__ == "multi_head_attention_forward":
            return torch.zeros_like(out[0]), None
        attends = ("scaled_dot_product_attention", "softmax")
        return torch.zeros_like(out) if func.__name__ in attends and out.ndim > 2 else out


@pytest.mark.parametrize("name", CASES)
def test_a_patch_that_changes_moves_its_own_cell_and_no_other(name: str) -> None:
    net, case = network(name), CASES[name]
    before = images(name, 1)
    rows, columns = case.size[0] // case.cell, case.size[1] // case.cell
    with NoAttention():
        plain = net(before).features
        assert plain.shape[-2:] == (rows, columns)
        for p, q in [(0, 0), (0, columns - 1), (rows - 1, 0), (1, 2), (2, 1), (rows - 1, columns - 1)]:
            after = before.clone()
            after[..., p * case.cell : (p + 1) * case.cell, q * case.cell : (q + 1) * case.cell] += 1
            moved = (net(after).features - plain).abs().amax((0, 1)) > 1e-4
            assert moved.nonzero().tolist() == [[p, q]]


@pytest.mark.parametrize("name", PLAIN)
def test_features_are_the_tokens_behind_the_prefix_row_by_row(name: str) -> None:
    net, case, x = network(name), CASES[name], images(name)
    outputs: list[Tensor] = []
    handle = net.layer.register_forward_hook(lambda _, args, out: outputs.append(out.detach()))
    features = net(x).features
    handle.remove()
    _, _, rows, columns = features.shape
    assert outputs[0].shape[1] == case.prefix + rows * columns
    for p in range(rows):
        for q in range(columns):
            assert torch.equal(features[:, :, p, q], outputs[0][:, case.prefix + p * columns + q])


def test_a_vit_of_any_size_folds_an_image_on_its_side() -> None:
    model = timm("vit_tiny_patch16_224", img_size=32, dynamic_img_size=True).eval()
    net = attach(model, example=torch.randn(1, 3, 32, 32))
    for height, width in [(32, 48), (48, 32), (24, 72)]:
        x = torch.randn(1, 3, height, width)
        found = sigcam.explain(net, x, "layer-cam", branch="softmax", size="features")
        assert found.maps.shape == (1, height // 8, width // 8)
        changed = x.clone()
        changed[..., 8:16, 16:24] += 1
        with NoAttention():
            moved = (net(changed).features - net(x).features).abs().amax((0, 1)) > 1e-4
        assert moved.nonzero().tolist() == [[1, 2]]
