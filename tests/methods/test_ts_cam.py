"""TS-CAM against loops over layers, heads and cells, on either head; where it is offered, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sigcam
from sigcam.core.errors import DataError
from sigcam.methods.rollout import class_attention
from sigcam.models.classifier import Classifier
from sigcam.models.preprocess import Preprocess
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.reports.inspection import usable_methods
from sigcam.training.wsol import TsCam
from sigcam.ui.sources import available_methods
from support.oracles import path_a
from support.tiny import Gap, untouched

SMALL = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 8, "depth": 3, "num_heads": 2, "num_classes": 5}
GRID, CLASSES = (4, 6), [[1, 3], [0, 4]]  # of two images


def images(height: int = 16, width: int = 24, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(3), dtype=dtype)


def timm_vit(name: str = "deit_tiny_patch16_224", **options: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, **{**SMALL, **options})


def torchvision_vit() -> nn.Module:
    return pytest.importorskip("torchvision").models.VisionTransformer(16, 4, 3, 2, 8, 16, num_classes=5)


def hf_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    tiny = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**tiny, image_size=[16, 24], patch_size=4, num_labels=5)
    config._attn_implementation = "eager"
    return transformers.ViTForImageClassification(config)


def in_its_form(model: nn.Module, size: tuple[int, int] = (16, 24)) -> DualBranch:
    """The model with a head on its patch tokens and weights of some size, and a branch of other ones."""
    TsCam(Classifier(model.eval(), Preprocess(*size), None, "small"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    net = attach(model.double(), example=images(*size)[:1])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    net.fitted = True
    return net


def timm_attention(model: Any, image: Tensor) -> Tensor:
    """(L,) by hand: what the first token asks of each, block by block and head by head."""
    outputs, rows = list[Tensor](), list[Tensor]()
    handles = [b.attn.qkv.register_forward_hook(lambda _, __, out: outputs.append(out)) for b in model.blocks]
    with torch.no_grad():
        model(image[None])
    for handle in handles:
        handle.remove()
    for qkv in outputs:
        queries, keys, _ = qkv[0].unflatten(-1, (3, 2, 4)).unbind(1)  # each (L, heads, 4)
        for head in range(2):
            powers = [math.exp(float(queries[0, head] @ key) / math.sqrt(4)) for key in keys[:, head]]
            rows.append(torch.tensor([power / sum(powers) for power in powers], dtype=torch.float64))
    assert len(rows) == 3 * 2
    return torch.stack(rows).mean(0)


def semantic_map(tokens: Tensor, head: nn.Linear, k: int) -> Tensor:
    """(P, Q) of class k: at each cell, its 3x3 kernel times the tokens around it, without bias."""
    (p, q), kernel = GRID, head.weight[k].detach().unflatten(0, (-1, 3, 3))
    found = torch.zeros(GRID, dtype=tokens.dtype)
    for y in range(p):
        for x in range(q):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= y + dy < p and 0 <= x + dx < q:
                        found[y, x] += kernel[:, dy + 1, dx + 1] @ tokens[(y + dy) * q + x + dx]
    return found


@pytest.mark.parametrize("branch", ["softmax", "sigmoid"])
@pytest.mark.parametrize("registers", [0, 2])
def test_ts_cam_is_its_formula(branch: Any, registers: int) -> None:
    options = {"reg_tokens": registers, "no_embed_class": True} if registers else {}
    model: Any = timm_vit("vit_tiny_patch16_224", **options)
    net, x = in_its_form(model), images()
    outputs = list[Tensor]()
    handle = model.norm[0].norm.register_forward_hook(lambda _, __, out: outputs.append(out))
    with torch.no_grad():
        model(x)
    handle.remove()
    asked: dict[str, Any] = {"branch": branch, "classes": torch.tensor(CLASSES), "clamp": False}
    with untouched(model):
        raw = sigcam.explain(net, x, "ts-cam", scale="raw", size="features", **asked).maps
        unit = sigcam.explain(net, x, "ts-cam", **asked).maps
    head: Any = net.last_layer(branch)
    for i, chosen in enumerate(CLASSES):
        attention = timm_attention(model, x[i])[1 + registers :].view(GRID)
        for k, label in enumerate(chosen):
            expected = attention * semantic_map(outputs[0][i, 1 + registers :], head, label)
            torch.testing.assert_close(raw[i, k], expected, rtol=1e-9, atol=1e-9)
            drawn = torch.from_numpy(path_a(expected.numpy(), 16, 24))
            torch.testing.assert_close(unit[i, k].double(), drawn.double(), rtol=0, atol=1e-5)


def test_it_is_cam_times_attention_for_every_branch_target_and_clamp() -> None:
    net, x = in_its_form(timm_vit()), images()
    attention = class_attention(net, x, "ts-cam")
    assert attention.shape == (2, *GRID) and (attention.sum((1, 2)) < 1).all()
    for branch in ("softmax", "sigmoid", "centred"):
        for clamp in (False, True):
            for target in ("class", "probability", "finer-cam"):
                asked: Any = {"branch": branch, "clamp": clamp, "target": target, "classes": "all"}
                asked |= {"scale": "raw", "size": "features"}
                cam = sigcam.explain(net, x, "cam", **asked).maps
                found = sigcam.explain(net, x, "ts-cam", **asked).maps
                torch.testing.assert_close(found, cam * attention[:, None], rtol=1e-9, atol=1e-12)


def test_attention_is_that_which_transformers_returns_by_itself() -> None:
    net, x = in_its_form(hf_vit()), images()
    with torch.no_grad():
        layers = net.model(x, output_attentions=True).attentions  # each (B, heads, L, L)
    expected = torch.stack([layer.mean(1)[:, 0, 1:] for layer in layers]).mean(0).view(2, *GRID)
    found = class_attention(net, x, "ts-cam")  # of a softmax in float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-8)
    assert not sigcam.explain(net, x, "ts-cam").blank.any()


def test_torchvisions_vit_has_a_map_too() -> None:
    net = in_its_form(torchvision_vit(), (16, 16))
    found = sigcam.explain(net, images(16, 16), "ts-cam", classes="top5")
    assert found.maps.shape == (2, 5, 16, 16) and not found.blank.any()


def test_an_image_of_another_size_is_folded_as_the_trained_one() -> None:
    net = in_its_form(timm_vit(dynamic_img_size=True))
    x = images(32, 48)
    assert sigcam.explain(net, x, "ts-cam", size="features").maps.shape == (2, 8, 12)
    assert sigcam.explain(net, images(), "ts-cam", zoom=2.0, size="features").maps.shape == (2, 8, 12)


def test_a_head_that_averages_normed_patches_needs_no_training_form() -> None:
    model = timm_vit(global_pool="avg", fc_norm=False)
    net, x = attach(model.eval(), example=images(dtype=torch.float32)[:1]), images(dtype=torch.float32)
    asked: Any = {"branch": "softmax", "scale": "raw", "size": "features"}
    cam, found = (sigcam.explain(net, x, name, **asked).maps for name in ("cam", "ts-cam"))
    torch.testing.assert_close(found, cam * class_attention(net, x, "ts-cam"))


REFUSED = {
    "class token": (timm_vit, "averaged patch tokens, and that of VisionTransformer is not: train"),
    "no class token": (
        lambda: timm_vit("vit_tiny_patch16_224", class_token=False, global_pool="avg", fc_norm=False),
        "ts-cam is for plain ViTs, and VisionTransformer has no class token: use 'grad-cam'",
    ),
    "CNN": (Gap, "ts-cam is for plain ViTs, and Gap has no visible attention layer: use 'grad-cam'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_networks_are_refused_in_a_sentence_and_not_offered(kind: str) -> None:
    make, sentence = REFUSED[kind]
    x = images(dtype=torch.float32)
    net = attach(make().eval(), example=x[:1])
    with untouched(net.model), pytest.raises(DataError) as error:
        sigcam.explain(net, x, "ts-cam", branch="softmax")
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert "ts-cam" not in usable_methods(net) and "ts-cam" not in available_methods([net])


def test_it_is_offered_where_it_works() -> None:
    net = in_its_form(timm_vit()).float()
    assert {"ts-cam", "cam", "attention-rollout"} <= set(usable_methods(net)) & set(available_methods([net]))
    other = attach(Gap().eval(), example=torch.randn(1, 3, 16, 16))
    assert not {"ts-cam", "attention-rollout"} & set(available_methods([net, other]))
