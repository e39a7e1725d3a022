"""Tokenizers, norms, attention and MLP against formulas written by hand, in float64."""

import math

import pytest
import torch
from torch import nn

from odevit.model.layers import ATTENTIONS, NORMS, TOKENIZERS, CenterNorm, L2Attention, Mlp, interpolate_positions


def tokens(batch=2, count=7, width=16, seed=3):
    return torch.randn(batch, count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(kind, *, width=16, heads=4, bias=False, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    layer = ATTENTIONS[kind](width, heads, bias=bias, dropout=dropout).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=1.5 / math.sqrt(width))
    return layer.eval()


# --- norms and MLP ----------------------------------------------------------------------------------------------------


def test_center_norm_is_its_formula():
    norm, x = CenterNorm(16).double(), tokens()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    expected = norm.weight * (16 / 15) * (x - x.mean(-1, keepdim=True)) + norm.bias
    assert torch.allclose(norm(x), expected, atol=1e-14)


def test_center_norm_is_linear_where_layer_norm_is_not():
    x = tokens()
    assert torch.allclose(CenterNorm(16).double()(3 * x), 3 * CenterNorm(16).double()(x))
    assert torch.allclose(nn.LayerNorm(16).double()(3 * x), nn.LayerNorm(16).double()(x), atol=1e-4)


def test_center_norm_needs_two_numbers():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        CenterNorm(1)


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_keeps_the_shape_and_knows_its_eps(name):
    norm = NORMS[name](16, 1e-3).double()
    assert norm(tokens()).shape == tokens().shape
    assert getattr(norm, "eps", 1e-3) == 1e-3


def test_mlp_is_its_formula():
    mlp, x = Mlp(16, 24, bias=True).double(), tokens()
    hidden = x @ mlp.w1.weight.mT + mlp.w1.bias
    gelu = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    assert torch.allclose(mlp(x), gelu @ mlp.w2.weight.mT + mlp.w2.bias, atol=1e-13)


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_fused_and_explicit_attention_agree(kind, bias):
    layer, x = attention(kind, bias=bias).float(), tokens().float()
    explicit, p = layer.attend(x)
    assert torch.allclose(layer(x), explicit, atol=1e-5)
    assert torch.allclose(layer.map(x), p, atol=1e-5)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_maps_are_row_stochastic(kind):
    layer, x = attention(kind), tokens()
    for p in (layer.map(x), layer.attend(x)[1]):
        assert p.shape == (2, 4, 7, 7)
        assert torch.allclose(p.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64), atol=1e-12)
        assert (p >= 0).all()


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_the_map_is_in_the_graph_of_query_and_key(kind):
    layer = attention(kind)
    (layer.attend(tokens())[1] ** 2).sum().backward()
    projections = [layer.query] if kind == "l2" else [layer.query, layer.key]
    for projection in projections:
        assert projection.weight.grad is not None
        assert projection.weight.grad.isfinite().all()
        assert projection.weight.grad.abs().max() > 1e-6
    assert layer.value.weight.grad is None


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_fused_and_explicit_gradients_agree(kind):
    layer, gradients = attention(kind), []
    for forward in (layer, lambda x: layer.attend(x)[0]):
        layer.zero_grad()
        forward(tokens()).square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for fused, explicit in zip(*gradients, strict=True):
        assert torch.allclose(fused, explicit, atol=1e-9)
        assert fused.abs().max() > 0


def test_under_autocast_on_a_cpu_no_fused_kernel_runs(monkeypatch):
    layer, x = attention("softmax").float(), tokens().float()
    expected = layer(x)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)  # whoever calls it fails
    with pytest.raises(TypeError):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        seen = layer(x)
    assert seen.dtype == torch.bfloat16
    error = (seen.float() - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.03  # a few roundings to eight bits


def test_softmax_attention_is_its_formula():
    layer, x = attention("softmax", bias=True), tokens()
    heads = []
    for h in range(4):
        rows = slice(4 * h, 4 * h + 4)
        q, k, v = (x @ w.weight[rows].mT + w.bias[rows] for w in (layer.query, layer.key, layer.value))  # (b, n, e)
        heads.append(torch.softmax(q @ k.mT / math.sqrt(4), -1) @ v)
    expected = torch.cat(heads, -1) @ layer.out.weight.mT + layer.out.bias
    assert torch.allclose(layer(x), expected, atol=1e-12)


def test_l2_attention_is_its_formula():
    """Kim et al., eq. 14: P_ij ∝ exp(-|q_i - q_j|²/√e), the head is P X A Wv with A = Wq Wqᵀ/√e, token by token."""
    layer, x = attention("l2"), tokens()
    heads, maps = [], []
    for h in range(4):
        wq, wv = layer.query.weight[4 * h : 4 * h + 4].mT, layer.value.weight[4 * h : 4 * h + 4].mT  # (d, e)
        q = x @ wq
        distances = (q[:, :, None] - q[:, None]).square().sum(-1)  # (b, n, n)
        maps.append(torch.softmax(-distances / 2, -1))
        heads.append(maps[-1] @ x @ (wq @ wq.mT / 2) @ wv)
    explicit, p = layer.attend(x)
    assert torch.allclose(p, torch.stack(maps, 1), atol=1e-12)
    assert torch.allclose(layer.map(x), p, atol=1e-12)
    assert torch.allclose(explicit, torch.cat(heads, -1) @ layer.out.weight.mT, atol=1e-12)
    assert torch.allclose(layer(x), explicit, atol=1e-12)


def test_l2_attention_ties_query_and_key():
    names = {name for name, _ in attention("l2").named_parameters()}
    assert names == {"query.weight", "value.weight", "out.weight"}
    p = attention("l2").map(tokens())
    assert (p.diagonal(dim1=-2, dim2=-1) == p.amax(-1)).all()  # nobody is nearer to a token than itself


def test_sinkhorn_is_nearly_doubly_stochastic():
    layer, x = attention("sinkhorn"), tokens()
    p, softmax = layer.map(x), attention("softmax").map(x)
    error, softmax_error = ((q.sum(-2) - 1).abs().max() for q in (p, softmax))
    assert error < 0.2 * softmax_error
    layer.iterations = 101
    assert torch.allclose(layer.map(x).sum(-2), torch.ones(2, 4, 7, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_follows_a_permutation_of_the_tokens(kind):
    layer, x = attention(kind), tokens()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    y, p = layer.attend(x[:, order])
    assert torch.allclose(layer(x[:, order]), layer(x)[:, order], atol=1e-12)
    assert torch.allclose(y, layer.attend(x)[0][:, order], atol=1e-12)
    assert torch.allclose(p, layer.map(x)[:, :, order][..., order], atol=1e-12)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_dropout_never_touches_the_map(kind):
    layer = attention(kind, dropout=0.5)
    still = layer.attend(tokens())[1]
    moving, p = layer.train().attend(tokens())
    assert torch.equal(p, still)
    assert (moving == 0).double().mean() == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_heads_must_divide_the_width(kind):
    with pytest.raises(ValueError, match="3 heads do not divide width 16"):
        ATTENTIONS[kind](16, 3)


def test_l2_attention_has_no_bias_even_when_asked():
    assert all(layer.bias is None for layer in L2Attention(16, 4, bias=True).children() if isinstance(layer, nn.Linear))


# --- tokenizers and positions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch_size", [2, 4, 8])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_give_one_token_per_patch(kind, patch_size):
    tokenizer = TOKENIZERS[kind](3, 24, patch_size)
    assert tokenizer(torch.randn(2, 3, 16, 32)).shape == (2, 16 * 32 // patch_size**2, 24)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_stand_in_reading_order(kind):
    """A change of one patch's first pixel, the centre of the stem's receptive field, moves that patch's token most.

    In the mean over fresh weights: the receptive fields of the pooling stem overlap.
    """
    tokenizers = [TOKENIZERS[kind](1, 8, 4).eval() for _ in range(32)]
    for row, col, index in ((0, 0, 0), (0, 3, 3), (3, 0, 12), (2, 1, 9)):
        images = torch.zeros(2, 1, 16, 16)
        images[1, :, 4 * row, 4 * col] = 5
        moved = torch.stack([tokenizer(images).diff(dim=0)[0].norm(dim=-1) for tokenizer in tokenizers])
        assert moved.mean(dim=0).argmax() == index


def test_patch_tokenizer_is_a_linear_map_of_each_patch():
    tokenizer, images = TOKENIZERS["patch"](3, 8, 4), torch.randn(2, 3, 8, 8)
    patches = torch.nn.functional.unfold(images, 4, stride=4).mT  # (b, n, 3·4·4)
    expected = patches @ tokenizer.projection.weight.flatten(1).mT + tokenizer.projection.bias
    assert torch.allclose(tokenizer(images), expected, atol=1e-5)


@pytest.mark.parametrize("patch_size", [1, 3, 6, 12])
def test_conv_tokenizer_needs_a_power_of_two(patch_size):
    with pytest.raises(ValueError, match=f"power of two as patch_size, got {patch_size}"):
        TOKENIZERS["conv"](3, 24, patch_size)


def test_conv_tokenizer_has_one_halving_per_stage_and_norms_between():
    layers = TOKENIZERS["conv"](3, 32, 8).layers
    kinds = [type(layer) for layer in layers]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.GELU, nn.Conv2d, nn.BatchNorm2d, nn.GELU, nn.Conv2d]
    assert [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)] == [8, 16, 32]


def test_positions_keep_cls_and_interpolate_a_smooth_image_truly():
    x, y = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
    fine = torch.stack([x, y, x * y], -1)
    positions = torch.cat([torch.full((1, 1, 3), 9.0), fine.reshape(1, 64, 3)], 1)
    assert interpolate_positions(positions, (8, 8), (8, 8)) is positions
    result = interpolate_positions(positions, (8, 8), (16, 24))
    assert result.shape == (1, 1 + 16 * 24, 3)
    assert torch.equal(result[:, 0], positions[:, 0])
    grid = result[0, 1:].reshape(16, 24, 3)
    rows = ((torch.arange(16) + 0.5) * 8 / 16 - 0.5) / 7 * 2 - 1
    cols = ((torch.arange(24) + 0.5) * 8 / 24 - 0.5) / 7 * 2 - 1
    expected = torch.stack([rows[:, None].expand(16, 24), cols.expand(16, 24), rows[:, None] * cols], -1)
    assert torch.allclose(grid[4:-4, 6:-6], expected[4:-4, 6:-6], atol=0.02)  # a cell is 0.29 wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_maps_exist_in_half_precision_and_are_those_that_were_used(name, dtype):
    torch.manual_seed(0)
    attention = ATTENTIONS[name](8, 2).to(dtype)
    x = torch.randn(2, 5, 8).to(dtype)
    assert torch.allclose(attention.map(x), attention.attend(x)[1], atol=1e-2)
    assert torch.allclose(attention.map(x).float().sum(-1), torch.ones(2, 2, 5), atol=2e-2)
