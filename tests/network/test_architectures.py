"""One row per architecture: it attaches without being told, splits where the row says, stays bit-equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sigcam.core.errors import AttachError
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.network.trace import logits_of
from support.nets import footprint


class Row(NamedTuple):
    """An architecture, the input it takes, and where it must split."""

    name: str
    heads: str
    layer: str
    features: tuple[int, int, int]  # N, P, Q
    size: tuple[int, int] = (64, 96)
    turns: bool = True  # takes the image on its side as well: nothing in it is made for one size
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    slow: bool = False


SIZED: Any = {"turns": False, "options": {"img_size": (64, 96)}}
BARE = {"init_weights": False}

TORCHVISION = [
    Row("alexnet", "classifier", "features.11", (256, 3, 5)),
    Row("vgg11", "classifier", "features.19", (512, 4, 6), slow=True),
    Row("vgg16_bn", "classifier", "features.42", (512, 4, 6), slow=True),
    Row("resnet18", "fc", "layer4", (512, 2, 3)),
    Row("resnet50", "fc", "layer4", (2048, 2, 3)),
    Row("resnext50_32x4d", "fc", "layer4", (2048, 2, 3)),
    Row("wide_resnet50_2", "fc", "layer4", (2048, 2, 3), slow=True),
    Row("densenet121", "classifier", "features + relu", (1024, 2, 3)),
    Row("googlenet", "fc", "inception5b", (1024, 2, 3), options=BARE),
    Row("inception_v3", "fc", "Mixed_7c", (2048, 1, 2), size=(96, 128), options=BARE),
    Row("squeezenet1_1", "classifier", "features", (512, 3, 5)),
    Row("mobilenet_v2", "classifier", "features", (1280, 2, 3)),
    Row("mobilenet_v3_large", "classifier", "features", (960, 2, 3)),
    Row("shufflenet_v2_x1_0", "fc", "conv5", (1024, 2, 3)),
    Row("mnasnet1_0", "classifier", "layers", (1280, 2, 3)),
    Row("efficientnet_b0", "classifier", "features", (1280, 2, 3)),
    Row("efficientnet_v2_s", "classifier", "features", (1280, 2, 3)),
    Row("regnet_y_400mf", "fc", "trunk_output", (440, 2, 3)),
    Row("convnext_tiny", "classifier", "features", (768, 2, 3)),
    Row(
        *("vit_b_16", "heads", "encoder.layers.encoder_layer_11.ln_1", (768, 4, 4)),
        size=(64, 64),
        options={"image_size": 64},
    ),
    Row("swin_t", "head", "norm", (768, 2, 3)),
    Row(
        "maxvit_t",
        "classifier",
        "blocks.3",
        (512, 7, 7),
        (224, 224),
        options={"input_size": (224, 224)},
        slow=True,
    ),
]

TIMM = [
    # tokens behind a class token: F leaves the last block's first norm
    Row("deit_tiny_patch16_224", "head", "blocks.11.norm1", (192, 4, 6), **SIZED),
    Row("deit_tiny_distilled_patch16_224", "head, head_dist", "blocks.11.norm1", (192, 4, 6), **SIZED),
    Row("vit_small_patch14_reg4_dinov2", "head", "blocks.11.norm1", (384, 4, 6), **SIZED),
    Row("pit_ti_distilled_224", "head, head_dist", "transformers.2.blocks.3.norm1", (256, 2, 3), **SIZED),
    Row("cait_xxs24_224", "head", "blocks_token_only.1.norm1", (192, 4, 6), **SIZED),
    Row("xcit_nano_12_p16_224", "head", "cls_attn_blocks.1.norm1", (128, 4, 6)),
    Row("tnt_s_patch16_224", "head", "blocks.11.norm_out", (384, 4, 6), **SIZED),
    Row("coat_lite_tiny", "head", "serial_blocks4.1.norm1", (320, 2, 3), **SIZED),
    Row("crossvit_tiny_240", "head.0, head.1", "blocks.1.blocks.1", (192, 14, 14), (240, 240)),
    Row("volo_d1_224", "head, aux_head", "post_network.0", (384, 4, 6), **SIZED),
    # tokens that are averaged, or read by attention
    Row("vit_wee_patch16_reg1_gap_256", "head", "blocks", (256, 4, 6), **SIZED),
    Row("vit_srelpos_small_patch16_224", "head", "norm", (384, 4, 6), **SIZED),
    Row("eva02_tiny_patch14_224", "head", "blocks.11", (192, 4, 6), **SIZED),
    Row("mixer_s32_224", "head", "norm", (512, 2, 3), **SIZED),
    Row("resmlp_12_224", "head", "norm", (384, 4, 6), **SIZED),
    Row("gmlp_s16_224", "head", "norm", (256, 4, 6), **SIZED),
    Row("levit_128s", "head, head_dist", "stages", (384, 1, 2), **SIZED),
    Row("hiera_tiny_224", "head", "blocks.11", (768, 2, 3), **SIZED),
    Row("twins_svt_small", "head", "norm", (512, 2, 3), **SIZED),
    Row("efficientformer_l1", "head, head_dist", "norm", (448, 7, 7), (224, 224)),
    # channels last
    Row("swin_tiny_patch4_window7_224", "head", "norm", (768, 2, 3), **SIZED),
    Row("sequencer2d_s", "head", "norm", (384, 4, 6), **SIZED),
    Row("mambaout_femto", "head", "stages", (288, 2, 3)),
    # convolutional
    Row("convmixer_768_32", "head", "blocks", (768, 9, 13), slow=True),
    Row("poolformer_s12", "head.fc", "stages", (512, 2, 3)),
    Row("caformer_s18", "head.fc", "stages", (512, 2, 3)),
    Row("pvt_v2_b0", "head", "stages", (256, 2, 3)),
    Row("hrnet_w18_small", "classifier", "final_layer", (2048, 2, 3)),
    Row("resnetv2_50x1_bit", "head", "norm", (2048, 2, 3)),
    Row("eca_nfnet_l0", "head", "final_act", (2304, 2, 3)),
    Row("repvgg_a0", "head", "stages", (1280, 2, 3)),
    Row("repvit_m0_9", "head", "stages", (384, 2, 3)),
    Row("ghostnet_100", "classifier", "blocks", (960, 2, 3)),
    Row("tf_efficientnet_lite0", "classifier", "bn2", (1280, 2, 3)),
    Row("mobilenetv4_conv_small", "classifier", "blocks", (960, 2, 3)),
    Row("mobilevit_xxs", "head", "final_conv", (320, 2, 3)),
    Row("hgnetv2_b0", "head", "stages", (1024, 2, 3)),
    Row("efficientvit_b0", "head.classifier", "head.in_conv", (1024, 2, 3)),
    Row("fastvit_t8", "head", "final_conv", (768, 2, 3)),
    Row("edgenext_xx_small", "head", "stages", (168, 2, 3)),
    Row("convnextv2_atto", "head", "stages", (320, 2, 3)),
    Row("coatnet_nano_rw_224", "head", "norm", (512, 2, 3), **SIZED),
    Row("dla34", "fc", "level5", (512, 2, 3)),
]


def rows(library: str, table: list[Row]) -> list[Any]:
    marks = {row.name: [pytest.mark.slow] if row.slow else [] for row in table}
    return [pytest.param(library, row, id=f"{library}-{row.name}", marks=marks[row.name]) for row in table]


def build(library: str, row: Row) -> nn.Module:
    if library == "timm":
        timm = pytest.importorskip("timm")
        return timm.create_model(row.name, num_classes=10, **row.options)
    models = pytest.importorskip("torchvision").models
    return getattr(models, row.name)(num_classes=10, **row.options)


def check(
    model: nn.Module, heads: str, layer: str, features: tuple[int, ...], size: tuple[int, int]
) -> DualBranch:
    """Attaches the model at this size and asserts where it splits and what must hold for every classifier."""
    images = torch.randn(2, 3, *size)
    before = footprint(model)
    net = attach(model, example=images[:1])
    found = net.split.layer + (" + relu" if net.split.activation else "")
    assert (", ".join(net.split.heads), found) == (heads, layer)
    out = net(images)
    assert footprint(model) == before
    with torch.no_grad():
        assert torch.equal(out.softmax, logits_of(model.eval()(images), 2))
    assert out.features.shape == (2, *features)
    torch.testing.assert_close(net.sigmoid.from_pooled(out.pooled), out.sigmoid, rtol=1e-5, atol=1e-7)
    forward_pass = net.run(images, grad=True)
    (gradient,) = torch.autograd.grad(forward_pass.sigmoid[:, 1].sum(), forward_pass.cut)
    cells = net.split.fold(gradient, size).abs().sum(1).flatten(1)  # (B, P*Q)
    assert (cells.count_nonzero(1) > cells.shape[1] // 8).all()
    return net


@pytest.mark.slow
@pytest.mark.parametrize(("library", "row"), [*rows("torchvision", TORCHVISION), *rows("timm", TIMM)])
def test_architecture_splits_where_the_table_says(library: str, row: Row) -> None:
    net = check(build(library, row), row.heads, row.layer, row.features, row.size)
    if row.turns and row.size[0] != row.size[1]:
        n, p, q = row.features
        assert net(torch.randn(1, 3, *row.size[::-1])).features.shape == (1, n, q, p)


@pytest.mark.parametrize(
    "name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_050", "convnext_atto", "levit_128s"]
)
def test_a_backbone_without_classifier_is_told_apart_from_one_with(name: str) -> None:
    model = pytest.importorskip("timm").create_model(name, num_classes=0)
    with pytest.raises(AttachError, match=r"has no head with parameters: .* attach\(model, head='\.\.\.'\)"):
        attach(model)


def test_a_backbone_that_ends_in_a_linear_layer_is_no_classifier() -> None:
    kind = pytest.importorskip("timm").models.vision_transformer.VisionTransformer
    model = kind(embed_dim=32, depth=2, num_heads=2, class_token=False, global_pool="map", num_classes=0)
    with pytest.raises(AttachError, match=r"Is it a feature extractor"):
        attach(model)


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
# classifier, config, heads, layer, features, size
TRANSFORMERS: dict[str, tuple[dict[str, Any], str, str, tuple[int, int, int], tuple[int, int]]] = {
    "ResNet": (
        {**STAGES, "embedding_size": 8, "layer_type": "basic"},
        *("classifier", "resnet.encoder.stages.3", (32, 2, 3), (64, 96)),
    ),
    "ConvNext": (STAGES, "classifier", "convnext.encoder.stages.3", (32, 2, 3), (64, 96)),
    "ViT": (
        {**TINY, "image_size": [64, 96]},
        *("classifier", "vit.layers.1.layernorm_before", (32, 4, 6), (64, 96)),
    ),
    "Swin": (
        {"embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 1, 2], "window_size": 2, "image_size": 64},
        *("classifier", "swin.layernorm", (32, 4, 6), (64, 96)),
    ),
    "Dinov2": (
        {**TINY, "image_size": 64, "patch_size": 16},
        *("classifier", "dinov2.layernorm", (32, 4, 6), (64, 96)),
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers_classifier_attaches_raw_and_wrapped(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from sigcam.models.builders import LogitsOnly

    options, heads, layer, features, size = TRANSFORMERS[kind]
    config = getattr(transformers, f"{kind}Config")(num_labels=5, **options)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    check(model, heads, layer, features, size)
    check(LogitsOnly(model), f"model.{heads}", f"model.{layer}", features, size)
