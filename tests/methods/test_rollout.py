"""Attention rollout against a loop over layers and heads, however attention is written; and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import DataError
from sigcam.methods.rollout import rollout_maps, token_shares
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from support.nets import Encoder, PlainVit, SoftmaxVit
from support.tiny import Gap, untouched

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
ALL, GRID = slice(None), slice(1, None)  # of the rows, behind a class token


def timm_vit(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    """A small one whose attention is far from uniform."""
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, **{**SMALL, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def images(height: int = 32, width: int = 32, count: int = 2) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(3))


# ------------------------------------------------------------------------------ slow, obvious versions


@contextmanager
def seen(modules: list[nn.Module], *, inputs: bool) -> Iterator[list[Tensor]]:
    """What enters or leaves each of the modules, in order."""
    found: list[Tensor] = []
    if inputs:
        handles = [m.register_forward_pre_hook(lambda _, args: found.append(args[0])) for m in modules]
    else:
        handles = [m.register_forward_hook(lambda _, args, out: found.append(out)) for m in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def joined(layers: list[list[tuple[Tensor, Tensor]]], scale: float) -> Tensor:
    """(L, L) for one image: layer by layer, head by head, from each head's queries and keys (L, d)."""
    product = torch.eye(len(layers[0][0][0]), dtype=torch.float64)
    for heads in layers:
        mean = torch.zeros_like(product)
        for queries, keys in heads:
            for i, query in enumerate(queries):
                powers = torch.tensor([math.exp(scale * float(query @ key)) for key in keys]).double()
                mean[i] += powers / powers.sum() / len(heads)
        product = (mean + torch.eye(len(mean))) / 2 @ product
    return product


def timm_product(model: nn.Module, x: Tensor) -> Tensor:
    """(B, L, L) from what the qkv layers of a timm ViT return."""
    blocks: Any = model.blocks
    with seen([block.attn.qkv for block in blocks], inputs=False) as found:
        model.eval()(x)
    heads = blocks[0].attn.num_heads

    def parts(qkv: Tensor) -> list[tuple[Tensor, Tensor]]:  # (L, 3 * width)
        queries, keys, _ = qkv.detach().double().chunk(3, 1)
        return list(zip(queries.chunk(heads, 1), keys.chunk(heads, 1), strict=True))

    width = found[0].shape[-1] // 3 // heads
    return torch.stack([joined([parts(qkv[b]) for qkv in found], width**-0.5) for b in range(len(x))])


def softmax_vit_product(model: SoftmaxVit, x: Tensor) -> Tensor:
    """(B, L, L) from what the to_qkv layers of nets.SoftmaxVit return, whose scores have no scale."""
    with seen([block.to_qkv for block in model.blocks], inputs=False) as found:
        model.eval()(x)

    def parts(block: Any, qkv: Tensor) -> list[tuple[Tensor, Tensor]]:
        queries, keys, _ = qkv.chunk(3, 1)
        pairs = zip(queries.chunk(2, 1), keys.chunk(2, 1), strict=True)
        return [(block.q_norm(q).detach().double(), block.k_norm(k).detach().double()) for q, k in pairs]

    layers = [[parts(b, qkv[i]) for b, qkv in zip(model.blocks, found, strict=True)] for i in range(len(x))]
    return torch.stack([joined(layer, 1.0) for layer in layers])


def torch_product(model: nn.Module, x: Tensor) -> Tensor:
    """(B, L, L) from what enters each nn.MultiheadAttention, and its packed weights."""
    modules = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    with torch.enable_grad(), seen(modules, inputs=True) as found:  # with gradient: no fast path skips them
        model.eval()(x)
    products = []
    for b in range(len(x)):
        layers = []
        for m, entered in zip(modules, found, strict=True):
            tokens = entered[b] if m.batch_first else entered[:, b]
            queries, keys, _ = (
                F.linear(tokens, m.in_proj_weight, m.in_proj_bias).detach().double().chunk(3, 1)
            )
            layers.append(list(zip(queries.chunk(m.num_heads, 1), keys.chunk(m.num_heads, 1), strict=True)))
        products.append(joined(layers, m.head_dim**-0.5))
    return torch.stack(products)


Rows = list[tuple[int | slice, float]]


def assert_reads(net: DualBranch, x: Tensor, product: Tensor, rows: Rows, grid: tuple[int, int]) -> None:
    """That the map is the given rows of the product (means, with weights), over the last P * Q tokens."""
    expected = torch.zeros_like(product[:, 0])
    for which, weight in rows:
        part = product[:, which]
        expected += weight * (part.mean(1) if part.ndim == 3 else part)
    found, cells = token_shares(net, x)
    assert cells == grid
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    maps = rollout_maps(net, x)
    assert maps.shape == (len(x), *grid)
    assert maps.dtype == torch.float32
    torch.testing.assert_close(maps.flatten(1), found[:, -grid[0] * grid[1] :], rtol=1e-6, atol=1e-8)
    assert maps.flatten(1).std(1).min() > 1e-3 * maps.mean()  # or the comparison would say little


# ------------------------------------------------------------------------------------- against the loop


@pytest.mark.parametrize("fused", [True, False])
def test_timm_vit_equals_the_loop_fused_or_not(fused: bool) -> None:
    model = timm_vit(img_size=(32, 48))
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    x = images(32, 48)
    assert_reads(attach(model, example=x[:1]), x, timm_product(model, x), [(0, 1.0)], (4, 6))


def test_distilled_deit_reads_both_of_its_tokens() -> None:
    model = timm_vit("deit_tiny_distilled_patch16_224")
    x = images()
    assert_reads(attach(model, example=x[:1]), x, timm_product(model, x), [(0, 0.5), (1, 0.5)], (4, 4))


def test_registers_are_left_out_of_the_map() -> None:
    model = timm_vit("vit_small_patch14_reg4_dinov2", img_size=(28, 56), patch_size=14)
    x = images(28, 56)
    net = attach(model, example=x[:1])
    assert net.split.fold.prefix == 5
    assert_reads(net, x, timm_product(model, x), [(0, 1.0)], (2, 4))


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_pooled_vit_reads_the_whole_grid_and_no_class_token(pool: str) -> None:
    model = timm_vit(global_pool=pool)
    x = images()
    assert_reads(attach(model, example=x[:1]), x, timm_product(model, x), [(GRID, 1.0)], (4, 4))


def test_vit_without_class_token_reads_the_grid() -> None:
    model = timm_vit(global_pool="avg", class_token=False)
    x = images()
    assert_reads(attach(model, example=x[:1]), x, timm_product(model, x), [(ALL, 1.0)], (4, 4))


def test_hand_written_vit_equals_the_loop_on_another_size_than_it_was_attached_with() -> None:
    model = SoftmaxVit()
    net, x = attach(model, example=images(64, 64, 1)), images(48, 96)
    assert_reads(net, x, softmax_vit_product(model, x), [(0, 1.0)], (3, 6))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("registers", [0, 3])
def test_torch_layers_equal_the_loop(batch_first: bool, registers: int) -> None:
    model = PlainVit((32, 48), registers=registers, batch_first=batch_first)
    x = images(32, 48)
    assert_reads(attach(model, example=x[:1]), x, torch_product(model, x), [(0, 1.0)], (4, 6))


@pytest.mark.parametrize("pooled", [True, False])
def test_torch_encoder_with_its_fast_path_equals_the_loop(pooled: bool) -> None:
    model = Encoder(pooled)
    x = images(32, 48)
    rows: Rows = [(ALL, 1.0)] if pooled else [(0, 1.0)]
    assert_reads(attach(model, example=x[:1]), x, torch_product(model, x), rows, (4, 6))


def test_torchvision_vit_equals_the_loop() -> None:
    models = pytest.importorskip("torchvision").models
    model = models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # torchvision starts it at zero
    x = images()
    assert_reads(attach(model, example=x[:1]), x, torch_product(model, x), [(0, 1.0)], (4, 4))


def hf(kind: str, implementation: str = "sdpa", **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        **{**tiny, "image_size": 32, "patch_size": 8, "num_labels": 5, "initializer_range": 0.3, **options}
    )
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def hf_product(model: nn.Module, x: Tensor) -> Tensor:
    """(B, L, L) from the attentions that a transformers model returns by itself."""
    with torch.no_grad():
        attentions = model.eval()(x, output_attentions=True).attentions
    product = torch.eye(attentions[0].shape[-1], dtype=torch.float64)
    for attention in attentions:
        product = (attention.double().mean(1) + torch.eye(len(product[-1]))) / 2 @ product
    return product


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transformers_vit_equals_its_own_attentions(implementation: str) -> None:
    model, x = hf("ViT", implementation), images()
    product = hf_product(hf("ViT", "eager"), x)
    assert_reads(attach(model, example=x[:1]), x, product, [(0, 1.0)], (4, 4))


def test_head_that_reads_class_token_and_mean_reads_half_of_each() -> None:
    model, x = hf("Dinov2", "eager"), images(32, 48)
    rows: Rows = [(0, 0.5), (GRID, 0.5)]
    assert_reads(attach(model, example=x[:1]), x, hf_product(model, x), rows, (4, 6))


# ------------------------------------------------------------------------- however attention is written

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[Tensor], Tensor]


class HandVit(nn.Module):
    """A ViT around any function of q, k, v (B, heads, L, d); `between` is a step between its layers."""

    def __init__(self, attend: Attend, between: Step = lambda x: x, pooled: bool = False) -> None:
        super().__init__()
        self.pooled = pooled
        self.patches, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 5)
        self.attend, self.between = attend, between

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for norm, qkv in zip(self.norms, self.qkv, strict=False):
            parts = (3 * qkv(norm(x))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # (3, B, 2, L, 8)
            x = self.between(x + self.attend(*parts).transpose(1, 2).flatten(2))
            x = x + self.mlp(x)
        return self.head(self.norms[3](x.mean(1) if self.pooled else x[:, 0]))


def hand_vit(attend: Attend, pooled: bool = False) -> HandVit:
    torch.manual_seed(1)
    return HandVit(attend, pooled=pooled).double()


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))  # (heads * B, L, d)
    return by_hand(q, k, v).unflatten(0, (2, -1)).transpose(0, 1)


def frozen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return by_hand(q, k, v)


def inferring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.inference_mode():
        return by_hand(q, k, v)


def zeros(q: Tensor) -> Tensor:
    return torch.zeros(q.shape[-2], q.shape[-2], dtype=q.dtype)


KERNEL = F.scaled_dot_product_attention
WAYS: dict[str, Attend] = {
    "softmax by a function": lambda q, k, v: (
        F.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5, -1) @ v
    ),
    "softmax with positive axis": lambda q, k, v: torch.softmax(input=q @ k.mT * 8**-0.5, dim=3) @ v,
    "softmax over queries' axis": lambda q, k, v: (k @ q.mT * 8**-0.5).softmax(-2).mT @ v,
    "values without gradient": lambda q, k, v: by_hand(q, k, v.detach()),
    "images and heads in one axis": lambda q, k, v: by_hand(
        *(t.flatten(0, 1) for t in (q, k, v)),
    ).unflatten(0, (-1, 2)),
    "heads and images in one axis": heads_first,
    "heads before images": lambda q, k, v: by_hand(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1),
    "kernel": KERNEL,
    "kernel by keywords": lambda q, k, v: KERNEL(query=q, key=k, value=v, is_causal=False),
    "kernel, heads before images": lambda q, k, v: KERNEL(
        *(t.transpose(0, 1) for t in (q, k, v)),
    ).transpose(0, 1),
    "kernel, one axis": lambda q, k, v: KERNEL(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (-1, 2)),
    "kernel with a scale": lambda q, k, v: KERNEL(q * 2, k, v, scale=0.5 * 8**-0.5),
    "kernel with a mask that hides nothing": lambda q, k, v: KERNEL(q, k, v, attn_mask=zeros(q) == 0),
    "kernel with a bias of zero": lambda q, k, v: KERNEL(q, k, v, zeros(q)[None, None]),
    "under no_grad": frozen,
    "under inference_mode": inferring,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_map_does_not_depend_on_how_attention_is_written(way: str) -> None:
    x = images(24, 40, 3).double()
    expected = rollout_maps(attach(hand_vit(by_hand), example=x[:1]), x)
    net = attach(hand_vit(WAYS[way]), example=x[:1])
    assert expected.std() > 1e-4
    torch.testing.assert_close(rollout_maps(net, x), expected, rtol=1e-9, atol=1e-12)


def hidden(q: Tensor) -> Tensor:
    """No token but itself attends to the third."""
    mask = zeros(q) == 0
    mask[:, 2] = False
    return mask.fill_diagonal_(True)


MASKED: dict[str, tuple[Attend, Attend]] = {
    "boolean": (
        lambda q, k, v: KERNEL(q, k, v, hidden(q)),
        lambda q, k, v: (q @ k.mT * 8**-0.5).masked_fill(~hidden(q), -math.inf).softmax(-1) @ v,
    ),
    "bias": (
        lambda q, k, v: KERNEL(q, k, v, zeros(q) + torch.arange(q.shape[-2]) / 4),
        lambda q, k, v: (q @ k.mT * 8**-0.5 + torch.arange(q.shape[-2]) / 4).softmax(-1) @ v,
    ),
    "causal": (
        lambda q, k, v: KERNEL(q, k, v, is_causal=True),
        lambda q, k, v: (q @ k.mT * 8**-0.5 + zeros(q).fill_(-math.inf).triu(1)).softmax(-1) @ v,
    ),
    "grouped": (
        lambda q, k, v: KERNEL(q, k[:, :1], v[:, :1], enable_gqa=True),
        lambda q, k, v: by_hand(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q)),
    ),
}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_and_groups_of_a_kernel_count_as_written_out(kind: str) -> None:
    x = images(24, 40).double()
    fused, written_out = (attach(hand_vit(way, pooled=True), example=x[:1]) for way in MASKED[kind])
    expected = rollout_maps(written_out, x)
    torch.testing.assert_close(rollout_maps(fused, x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weights", ["none", "mean", "each"])
def test_torch_attention_gives_the_model_what_it_asked_for(weights: str) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
            self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
            ask = {"need_weights": weights != "none", "average_attn_weights": weights != "each"}
            out, found = self.attention(x, x, x, **ask)
            length = x.shape[1]
            shape = {"none": None, "mean": (len(x), length, length), "each": (len(x), 4, length, length)}
            assert (None if found is None else tuple(found.shape)) == shape[weights]
            return self.head((x + out)[:, 0])

    model, x = Asking(), images(24, 40)
    product = torch_product(model, x)
    assert_reads(attach(model, layer="patches", example=x[:1]), x, product, [(0, 1.0)], (3, 5))


# ------------------------------------------------------------------------------------------ identities


def test_shares_of_all_tokens_sum_to_one() -> None:
    net = attach(timm_vit("deit_tiny_distilled_patch16_224"), example=images(count=1))
    rows, _ = token_shares(net, images(count=3))
    torch.testing.assert_close(rows.sum(1), torch.ones(3))
    assert (rows >= 0).all()
    maps = rollout_maps(net, images(count=3))
    assert (maps.sum((1, 2)) < 1).all()


def test_uniform_attention_gives_a_constant_map() -> None:
    model = timm_vit()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:32] = 0  # the queries
            block.attn.qkv.bias[:32] = 0
    maps = rollout_maps(attach(model, example=images(count=1)), images())
    torch.testing.assert_close(maps, torch.full((2, 4, 4), (1 - 0.5**3) / 17))


def test_order_of_heads_does_not_matter() -> None:
    model = timm_vit()
    net = attach(model, example=images(count=1))
    before, order = rollout_maps(net, images()), torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for block in model.blocks:
            for parameter in (block.attn.qkv.weight, block.attn.qkv.bias):
                parameter.copy_(parameter.unflatten(0, (3, 4, 8))[:, order].flatten(0, 2))
            block.attn.proj.weight.copy_(block.attn.proj.weight.unflatten(1, (4, 8))[:, order].flatten(1))
    torch.testing.assert_close(rollout_maps(net, images()), before, rtol=1e-4, atol=1e-7)


def test_each_image_of_a_batch_has_the_map_it_has_alone() -> None:
    net, x = attach(timm_vit(depth=2), example=images(count=1)), images(count=11)
    alone = torch.cat([rollout_maps(net, image[None]) for image in x])
    torch.testing.assert_close(rollout_maps(net, x), alone, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("p", "q"), [(0, 0), (0, 4), (2, 0), (1, 3)])
def test_the_one_patch_that_differs_is_where_the_map_does(p: int, q: int) -> None:
    net = attach(hand_vit(by_hand), example=images(24, 40, 1).double())  # it knows no positions
    x = torch.zeros(1, 3, 24, 40, dtype=torch.float64)
    x[..., 8 * p : 8 * p + 8, 8 * q : 8 * q + 8] = images(8, 8, 1)
    (maps,) = rollout_maps(net, x)
    apart = (maps - maps.median()).abs() > 1e-9
    assert apart.nonzero().tolist() == [[p, q]]


def test_the_layer_that_gives_f_does_not_matter() -> None:
    model, x = timm_vit(img_size=(32, 48)), images(32, 48)
    early = attach(model, layer="patch_embed", example=x[:1])  # before the class token comes in
    assert early.split.fold.prefix == 0
    assert torch.equal(rollout_maps(early, x), rollout_maps(attach(model, example=x[:1]), x))


# ---------------------------------------------------------------------------------------------- refusals


def timm_made(name: str, **options: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, num_classes=5, **options)


def pooled_by_weights() -> nn.Module:
    class SequencePool(HandVit):
        def __init__(self) -> None:
            super().__init__(KERNEL)
            self.weigh = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patches(x).flatten(2).transpose(1, 2)
            for qkv in self.qkv:
                parts = qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
                x = x + self.attend(*parts).transpose(1, 2).flatten(2)
            return self.head((self.weigh(x).softmax(1).mT @ x)[:, 0])

    return SequencePool()


def mixing() -> nn.Module:
    return HandVit(KERNEL, between=lambda x: x + 0.1 * x.roll(1, 1))


SWIN = {
    "img_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": (1, 1),
    "num_heads": (1, 2),
    "window_size": 4,
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "CNN": (Gap, "Gap has no visible attention layer"),
    "windows": (
        lambda: timm_made("swin_tiny_patch4_window7_224", **SWIN),
        "SwinTransformer attends over 16 tokens at a time where its map has 8 x 8 cells",
    ),
    "fewer tokens further on": (
        lambda: timm_made(
            "pit_ti_distilled_224",
            img_size=32,
            patch_size=8,
            stride=4,
            base_dims=(8, 8),
            depth=(1, 1),
            heads=(2, 2),
        ),
        "PoolingVisionTransformer attends over 51 tokens, then over 18",
    ),
    "fewer keys": (
        lambda: HandVit(lambda q, k, v: KERNEL(q, k[:, :, ::2], v[:, :, ::2])),
        "HandVit attends from 17 to 9 tokens",
    ),
    "attention pooling": (
        lambda: timm_vit(global_pool="map", class_token=False),
        "VisionTransformer attends from 1 to 16 tokens",
    ),
    "pooling by a softmax": (
        pooled_by_weights,
        "SequencePool pools or mixes its 16 tokens by a softmax into 1",
    ),
    "two attentions side by side": (
        lambda: timm_vit("vit_small_patch16_18x2_224", depth=2),
        "VisionTransformer has attention layers side by side",
    ),
    "another step between tokens": (mixing, "HandVit mixes its tokens by other steps than attention"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_vit_is_refused_in_one_line_that_says_why(kind: str) -> None:
    make, why = REFUSED[kind]
    model = make()
    net = attach(model, example=images(count=1))
    with untouched(model), pytest.raises(DataError) as error:
        rollout_maps(net, images())
    assert str(error.value) == f"attention-rollout is for plain ViTs, and {why}: use 'grad-cam'."


# --------------------------------------------------------------------------------------------- footprint


@pytest.mark.parametrize("make", [timm_vit, lambda: PlainVit((32, 32)), SoftmaxVit])
def test_nothing_is_left_behind_in_any_mode(make: Callable[[], nn.Module]) -> None:
    model = make().train()
    next(model.children()).eval()
    size = 64 if isinstance(model, SoftmaxVit) else 32
    net, x = attach(model, example=images(size, size, 1)), images(size, size)
    with untouched(model):
        expected = rollout_maps(net, x)
    assert not expected.requires_grad
    with untouched(model), torch.no_grad():
        assert torch.equal(rollout_maps(net, x), expected)
    with untouched(model), torch.inference_mode():
        found = rollout_maps(net, x.clone())  # images of inference mode
        assert torch.equal(found, expected)
    assert not found.is_inference()
    kept = x.clone()
    model.requires_grad_(False)
    with untouched(model):
        assert torch.equal(rollout_maps(net, x), expected)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("make", [timm_vit, lambda: PlainVit((32, 32))])
def test_maps_are_in_full_precision_under_autocast(make: Callable[[], nn.Module]) -> None:
    model = make()
    net, x = attach(model, example=images(count=1)), images()
    expected = rollout_maps(net, x)
    with untouched(model), torch.autocast("cpu", torch.bfloat16):
        rows, _ = token_shares(net, x)
        maps = rollout_maps(net, x)
    assert maps.dtype == torch.float32
    torch.testing.assert_close(rows.sum(1), torch.ones(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(maps, expected, rtol=0.1, atol=2e-3)
    assert not torch.equal(maps, expected)  # the model itself did compute in bfloat16


def test_a_model_in_half_precision_gives_maps_in_full() -> None:
    model = timm_vit().bfloat16()
    net = attach(model, example=images(count=1).bfloat16())
    rows, _ = token_shares(net, images().bfloat16())
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.sum(1), torch.ones(2), rtol=1e-5, atol=1e-5)


def test_a_failing_model_is_left_as_it_was() -> None:
    model = timm_vit()
    net = attach(model, example=images(count=1))
    with untouched(model), pytest.raises(AssertionError, match="Input height"):
        rollout_maps(net, images(48, 48))
