"""LeGrad against a loop over blocks, however attention is written; and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigcam.core.errors import DataError
from sigcam.methods.explainer import explain
from sigcam.methods.legrad import legrad
from sigcam.methods.probe import Probe
from sigcam.network.attachment import attach
from support.nets import PlainVit
from support.tiny import Gap, untouched


def attention(block: nn.TransformerEncoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """One image's tokens (L, N) after torch's block with 2 heads, and its attention (2, L, L)."""
    normed, mha = block.norm1(x), block.self_attn
    queries, keys, values = (normed @ mha.in_proj_weight.T + mha.in_proj_bias).chunk(3, 1)
    width = len(queries[0]) // 2
    parts = [slice(head * width, (head + 1) * width) for head in range(2)]
    weights = torch.stack([(queries[:, p] @ keys[:, p].T / width**0.5).softmax(1) for p in parts])
    mixed = [weights[head] @ values[:, p] for head, p in enumerate(parts)]
    x = x + torch.cat(mixed, 1) @ mha.out_proj.weight.T + mha.out_proj.bias
    return x + block.linear2(F.relu(block.linear1(block.norm2(x)))), weights


def looped(model: PlainVit, head: nn.Module, image: Tensor, k: int, cells: tuple[int, int]) -> Tensor:
    """The mean over blocks of the positive gradients by attention, of the class's logit for the mean of
    all tokens right after them, the class token included."""
    tokens = model.embed(F.unfold(image[None], model.patch, stride=model.patch)[0].T)
    tokens = torch.cat([model.extra[0], tokens]) + model.position[0]
    total = torch.zeros(len(tokens), dtype=image.dtype)
    for block in model.layers:
        tokens, weights = attention(block, tokens)  # type: ignore[arg-type]
        logit = head(model.norm(sum(tokens) / len(tokens)))[k]
        (gradient,) = torch.autograd.grad(logit, weights, retain_graph=True)
        for row in gradient.flatten(0, 1):
            total += row.clamp(min=0) / (gradient.shape[0] * gradient.shape[1])
    return (total[-cells[0] * cells[1] :] / len(model.layers)).view(cells)


@pytest.mark.parametrize("branch", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("registers", "batch_first"), [(0, True), (2, True), (1, False)])
def test_legrad_is_its_formula(branch: Any, registers: int, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = PlainVit((16, 24), 4, registers, batch_first, depth=3).double().eval()
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    net = attach(model, example=x[:1], init="copy")
    net.fitted = True
    with torch.no_grad():
        net.last_layer("sigmoid").get_parameter("weight").mul_(-1)
    options: Any = {"branch": branch, "classes": [1, 3], "scale": "raw", "size": "features"}
    with untouched(model):
        maps = explain(net, x, "legrad", **options).maps
        every = explain(net, x, "legrad", **{**options, "classes": "all"}).maps
    head = net.last_layer(branch)
    for i, k in enumerate([1, 3]):
        expected = looped(model, head, x[i], k, (4, 6)).detach()
        assert torch.allclose(maps[i], expected, rtol=1e-6, atol=1e-9 * float(expected.max()))
        assert torch.allclose(every[i, k], maps[i], rtol=1e-9)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_fused_attention_gives_what_explicit_attention_does(name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
    model, x = timm.create_model(name, **small).eval(), torch.randn(2, 3, 32, 32)
    maps = []
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        net = attach(model, example=x[:1])
        maps.append(explain(net, x, "legrad", branch="softmax", classes=2, scale="raw", size="features").maps)
    assert maps[0].shape == (2, 4, 4) and maps[0].amax() > 0
    assert torch.allclose(*maps, rtol=1e-4, atol=1e-8)


def test_other_networks_are_refused() -> None:
    torch.manual_seed(0)
    net, x = attach(Gap().eval(), example=torch.randn(1, 3, 16, 16)), torch.randn(1, 3, 16, 16)
    with pytest.raises(DataError, match="Gap is no row of blocks with one attention layer each: use"):
        legrad(Probe(net, net.run(x), "softmax", torch.zeros(1, 1, dtype=torch.int64)))
