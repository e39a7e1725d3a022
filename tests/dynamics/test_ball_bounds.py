"""Bounds of second derivatives on a ball: never passed by gradient ascent, and nearly attained, term by term."""

import math

import pytest
import torch
from ascent import ascend, largest_second_derivative, second_derivative, unit
from torch import Tensor, nn
from torch.func import jvp

from odevit.dynamics.bounds import GELU_SLOPE, attention_bound
from odevit.dynamics.certificate import (
    GELU_BEND,
    attention_bounds,
    convolution_bound,
    norm_derivatives_bound,
    second_derivative_bound,
    tokenizer_bound,
)
from odevit.dynamics.jacobian import jacobian_norm
from odevit.model.field import VectorField
from odevit.model.layers import NORMS, TOKENIZERS, Attention, ConvTokenizer

DOUBLE = torch.float64


def radius(r: float) -> Tensor:
    return torch.tensor([r], dtype=DOUBLE)


def drift(field: VectorField):
    return lambda y: field.F(y) + field.attend(y)[0]


def zero_field(width: int = 4, **options) -> VectorField:
    """A field of one head and one hidden unit whose matrices are all zero: what a test sets is all there is."""
    field = VectorField(width, 1, hidden=1, **{"norm": "none", **options}).double().requires_grad_(False)
    for layer in field.modules():
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.weight)
    return field


def set_attention(attention: Attention, query: list, key: list, value: list) -> Attention:
    """Rank one each: rows (d,) for the first coordinate of query, key and value; the output is passed on."""
    for layer, row in ((attention.query, query), (attention.key, key), (attention.value, value)):
        nn.init.zeros_(layer.weight)
        layer.weight[0] = torch.tensor(row, dtype=DOUBLE)
    nn.init.eye_(attention.out.weight)
    return attention


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_gelu_bend_is_the_largest_second_derivative_of_gelu():
    x = torch.linspace(-10, 10, 20_001, dtype=DOUBLE)[:, None]
    bend = second_derivative(nn.functional.gelu, x, torch.ones_like(x))
    assert bend.max().item() == pytest.approx(GELU_BEND, rel=1e-9)
    assert x[bend.argmax()].abs() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_layer_norm_bounds_are_attained(eps):
    """Among all x (1, 6) of one length and all directions: 2/√3 · √d/R² is reached, √d/R only where eps is small."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(6, eps=eps).double().requires_grad_(False)
    norm.weight.fill_(-1.5)
    x, v = torch.randn(2, 32, 1, 6, dtype=DOUBLE).unbind()
    length = torch.rand(32, 1, 1, dtype=DOUBLE) + 0.5

    def centred(x: Tensor) -> Tensor:
        return length * unit(x - x.mean(dim=-1, keepdim=True))

    def share(order: int) -> Tensor:
        first, second = norm_derivatives_bound(norm, centred(x))(torch.zeros(32, dtype=DOUBLE))
        if order == 1:
            return jvp(norm, (centred(x),), (unit(v),))[1].flatten(1).norm(dim=1) / first
        return second_derivative(norm, centred(x), unit(v)) / second

    found = ascend(lambda: share(2), [x, v, length], steps=80, rate=0.05)
    assert found.max() <= 1 + 1e-9
    assert found.max() > 0.98
    first = ascend(lambda: share(1), [x, v], steps=20)
    assert first.max() <= 1 + 1e-9
    assert first.max() > 0.98


@pytest.mark.parametrize("r", [0.3, 0.9])
def test_layer_norm_bounds_follow_the_nearest_point_of_the_ball(r):
    """The state of the ball with the smallest deviation is the worst, and it is reached."""
    norm = nn.LayerNorm(4, eps=1e-3).double().requires_grad_(False)
    x = torch.tensor([[[3.0, 1, -1, -3]]], dtype=DOUBLE) / math.sqrt(20)  # length 1
    found = largest_second_derivative(norm, x, r)
    bound = norm_derivatives_bound(norm, x)(radius(r))[1].item()
    assert 0.95 * bound < found <= bound
    both = torch.cat([x, 5 * x], dim=1)  # the token with the smallest deviation counts
    assert norm_derivatives_bound(norm, both)(radius(r))[1].item() == pytest.approx(bound)


# Attention of rank one on two tokens of width four, in which one term of the bound is all there is at a point, or
# nearly so: coordinate 0 is what queries see, 1 what keys see, 2 what values see. Then the radii at which the ascent
# must reach this share of the bound.
ATTENTIONS = {
    "curvature of the logits": ([1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [[0, 0, 1, 0], [0, 0, -1, 0]]),
    "maps and values together": ([1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [[5, 0, 0, 0], [5, 0, 0, 0]]),
    "curvature of softmax": ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [[60, 0.05, 1, 0], [60, -0.05, -1, 0]]),
    "saturated": ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [[60, 0.15, 1, 0], [60, -0.15, -1, 0]]),
    "no values yet": ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [[60, 0.05, 0, 0], [60, -0.05, 0, 0]]),
    "no logits yet": ([1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [[0, 0, 30, 0], [0, 0, -30, 0]]),
    "nothing yet": ([1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [[0, 0, 0, 0], [0, 0, 0, 0]]),
}
SHARES = {
    ("curvature of the logits", 1e-6): 0.999,
    ("curvature of the logits", 0.05): 0.9,
    ("maps and values together", 1e-6): 0.999,
    ("maps and values together", 0.05): 0.85,
    ("curvature of softmax", 1e-6): 0.6,
    ("saturated", 1e-6): 0.6,
    ("saturated", 0.02): 0.2,
    ("saturated", 0.1): 0.09,
    ("no values yet", 0.3): 0.1,
    ("no logits yet", 1.0): 0.1,
    ("no logits yet", 3.0): 0.07,
    ("nothing yet", 1.0): 0.1,
    ("nothing yet", 3.0): 0.05,
}


@pytest.mark.parametrize(("case", "r"), SHARES)
def test_every_term_of_the_attention_bound_is_needed(case, r):
    query, key, value, x = ATTENTIONS[case]
    attention = set_attention(Attention(4, 1).double().requires_grad_(False), query, key, value)
    x = torch.tensor([x], dtype=DOUBLE)
    found = largest_second_derivative(lambda z: attention.attend(z)[0], x, r)
    bound = attention_bounds(attention, x)(radius(r))[1].item()
    assert found <= bound * (1 + 1e-9)
    assert found > SHARES[case, r] * bound


@pytest.mark.parametrize("bias", [False, True])
def test_at_a_point_the_first_bound_is_the_local_one(bias):
    torch.manual_seed(0)
    attention, z = Attention(6, 2, bias=bias).double(), torch.randn(2, 5, 6, dtype=DOUBLE)
    with torch.no_grad():
        first, _ = attention_bounds(attention, z)(torch.zeros(2, dtype=DOUBLE))
    torch.testing.assert_close(first, attention_bound(attention, z))


@pytest.mark.slow
@pytest.mark.parametrize("r", [0.01, 0.05])
def test_first_bound_of_a_saturated_map_grows_with_the_ball(r):
    """Where the map is nearly one-hot its derivative is nearly that of the values; a step away it is not."""
    query, key, value, x = ATTENTIONS["saturated"]
    attention = set_attention(Attention(4, 1).double().requires_grad_(False), query, key, value)
    x, move, v = torch.tensor([x], dtype=DOUBLE), *torch.randn(2, 16, 2, 4, dtype=DOUBLE).unbind()

    def slope() -> Tensor:
        y = x + r * move / move.flatten(1).norm(dim=1).clamp_min(1)[:, None, None]
        return jvp(lambda z: attention.attend(z)[0], (y,), (unit(v),))[1].flatten(1).norm(dim=1)

    found, bound = ascend(slope, [move, v]).max().item(), attention_bounds(attention, x)(radius(r))[0].item()
    assert 0.3 * bound < found <= bound


# --- the field --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "center"])
def test_bend_of_the_mlp_is_attained(norm):
    """One hidden unit at 0, where GELU bends most, read and written across the constant direction."""
    field = zero_field(norm=norm, scale=-3.0)
    row = torch.tensor([1.0, -1, 0, 0], dtype=DOUBLE) / math.sqrt(2)
    field.mlp.w1.weight[0], field.mlp.w2.weight[:, 0] = 0.7 * row, 2 * row
    x = torch.zeros(1, 2, 4, dtype=DOUBLE)
    along = torch.stack([row, 0 * row])[None]
    gain = 4 / 3 if norm == "center" else 1.0
    expected = 3 * 2 * (0.7 * gain) ** 2 * GELU_BEND
    assert second_derivative(drift(field), x, along).item() == pytest.approx(expected, rel=1e-5)
    assert second_derivative_bound(field, x)(radius(1.0)).item() == pytest.approx(expected)


def test_slope_of_the_mlp_times_the_bend_of_layer_norm_is_attained():
    """One hidden unit at √2, where GELU is steepest and straight, that reads where LayerNorm bends most."""
    field = zero_field(norm="layer", norm_eps=1e-9, bias=True)
    u = torch.tensor([1.0, -1, 0, 0], dtype=DOUBLE) / math.sqrt(2)
    w = torch.tensor([0.0, 0, 1, -1], dtype=DOUBLE) / math.sqrt(2)
    sine, cosine = math.sqrt(2 / 3), math.sqrt(1 / 3)
    worst = u * sine + 2 * w * cosine
    field.mlp.w1.weight[0] = 0.01 * worst / worst.norm()
    field.mlp.w2.weight[0, 0] = 1.0
    x = u[None, None]
    field.mlp.w1.bias.copy_(math.sqrt(2) - field.mlp.w1.weight @ field.norm_f(x)[0, 0])
    found = second_derivative(drift(field), x, (cosine * u + sine * w)[None, None]).item()
    assert found == pytest.approx(0.01 * GELU_SLOPE * 2 / math.sqrt(3) * 2, rel=1e-2)  # √d/R² = 2
    assert 0.97 < found / second_derivative_bound(field, x)(radius(0.0)).item() <= 1


def test_slope_of_attention_times_the_bend_of_layer_norm_is_attained():
    """One token: attention is its value matrix."""
    field = zero_field(norm="layer", norm_eps=1e-9)
    nn.init.eye_(field.attention.value.weight).mul_(5)
    nn.init.eye_(field.attention.out.weight)
    x = torch.tensor([[[1.0, -1, 0, 0]]], dtype=DOUBLE) / math.sqrt(2)
    found = largest_second_derivative(drift(field), x, 0.0)
    assert 0.98 < found / second_derivative_bound(field, x)(radius(0.0)).item() <= 1 + 1e-6


def test_bend_of_attention_behind_center_norm_is_attained():
    """The logits bend, read across the constant direction: the gain enters squared, and once with the values."""
    field = zero_field(norm="center", scale=0.5)
    set_attention(field.attention, [1, -1, 0, 0], [1, -1, 0, 0], [0, 0, 1, -1])
    x = torch.tensor([[[0.0, 0, 1, -1], [0, 0, -1, 1]]], dtype=DOUBLE)
    found = largest_second_derivative(drift(field), x, 1e-6)
    assert 0.99 < found / second_derivative_bound(field, x)(radius(1e-6)).item() <= 1 + 1e-6


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1e-3, 0.3, 3.0])
def test_gradient_ascent_never_passes_the_bound(norm, size):
    torch.manual_seed(0)
    field = VectorField(6, 2, hidden=8, norm=norm, bias=True, mixing="depthwise").double().requires_grad_(False)
    for parameter in field.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    x = 0.7 * torch.randn(1, 5, 6, dtype=DOUBLE)
    bound = second_derivative_bound(field, x)(radius(size)).item()
    assert largest_second_derivative(drift(field), x, size, tries=8) <= bound * (1 + 1e-6)
    assert math.isfinite(bound)


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_tokenizer_bound_is_never_passed(tokenizer):
    torch.manual_seed(0)
    layer = TOKENIZERS[tokenizer](1, 6, 4).double().eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    bound = tokenizer_bound(layer)
    norms = jacobian_norm(layer, torch.randn(8, 1, 8, 8, dtype=DOUBLE), 40)
    assert norms.max() <= bound * (1 + 1e-9)
    if tokenizer == "patch":  # patches do not overlap: the bound is the norm
        assert norms[0].item() == pytest.approx(bound)


@pytest.mark.parametrize(("stride", "taps"), [(1, "all"), (2, "corners")])
def test_overlap_of_a_convolution_is_attained(stride, taps):
    """Kernels whose windows add up where they overlap: the norm comes near the bound as the image grows."""
    layer = nn.Conv2d(1, 1, 3, stride=stride, padding=1, bias=False).double().requires_grad_(False)
    nn.init.ones_(layer.weight)
    if taps == "corners":
        layer.weight[:, :, 1] = layer.weight[:, :, :, 1] = 0
    norm = jacobian_norm(layer, torch.zeros(1, 1, 32, 32, dtype=DOUBLE), 60).item()
    assert 0.95 < norm / convolution_bound(layer) <= 1


def test_bound_of_the_convolutional_stem_is_nearly_attained():
    """Windows that add up, one channel, GELU at its steepest: the bound is 1.4 times too large at most."""
    layer = ConvTokenizer(1, 2, 4).double().eval().requires_grad_(False)
    convolutions = [part for part in layer.layers if isinstance(part, nn.Conv2d)]
    for part, every in zip(convolutions, (2, 1), strict=True):
        part.weight.zero_()
        part.weight[0, 0, ::every, ::every] = 1.0
        if part.bias is not None:
            part.bias.zero_()
    for part in layer.layers:
        if isinstance(part, nn.BatchNorm2d):
            part.running_var.fill_(0.25)
            part.weight.fill_(-1.5)
            part.bias.fill_(math.sqrt(2))
    norm = jacobian_norm(layer, torch.zeros(1, 1, 64, 64, dtype=DOUBLE), 60).item()
    assert 0.72 < norm / tokenizer_bound(layer) <= 1
    first, second = map(convolution_bound, convolutions)
    assert tokenizer_bound(layer) == pytest.approx(first * 1.5 / 0.5 * GELU_SLOPE * second, rel=1e-4)


def test_unknown_parts_are_named():
    with pytest.raises(ValueError, match="known: PatchTokenizer"):
        tokenizer_bound(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="known: CenterNorm"):
        norm_derivatives_bound(nn.BatchNorm1d(2), torch.zeros(1, 1, 2))
