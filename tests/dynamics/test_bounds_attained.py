"""Lipschitz bounds are never passed by gradient ascent on states and weights, and nearly attained by some."""

import math

import pytest
import torch
from ascent import ascend, unit
from torch import Tensor, nn
from torch.func import functional_call, jvp

from odevit.dynamics.bounds import attention_bound, field_bound, mixing_bound, mlp_bound, norm_bound
from odevit.dynamics.jacobian import jacobian_norm
from odevit.model.field import VectorField
from odevit.model.layers import Attention, DepthwiseMixing, L2Attention, Mlp

DOUBLE = torch.float64


def slope(f, x: Tensor, v: Tensor) -> Tensor:
    """‖J_f(x) v‖ of every sample, v at length one."""
    return jvp(f, (x,), (unit(v),))[1].flatten(1).norm(dim=1)


@pytest.mark.slow
def test_mlp_bound_is_attained_by_some_weights():
    """Matrices of norm one, biases, state and direction all climb: the slope of GELU, 1.129, is reached."""
    torch.manual_seed(0)
    mlp = Mlp(3, 4, bias=True).double().requires_grad_(False)
    weights = {name: parameter.clone() for name, parameter in mlp.named_parameters()}
    x, v = torch.randn(2, 8, 1, 3, dtype=DOUBLE).unbind()

    def found() -> Tensor:
        held = {name: w / torch.linalg.matrix_norm(w, 2) if w.ndim == 2 else w for name, w in weights.items()}
        return slope(lambda z: functional_call(mlp, held, (z,)), x, v)

    best = ascend(found, [*weights.values(), x, v], steps=150, rate=0.05).max()
    for matrix in (mlp.w1.weight, mlp.w2.weight):
        matrix /= torch.linalg.matrix_norm(matrix, 2)
    assert 0.98 < best / mlp_bound(mlp, 1) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "needed"), [(2, 1.1), (8, 0.8)])
def test_l2_bound_stands_above_what_ascent_finds(n, needed):
    """Two tokens: the derivative passes √n/√e, so the bound needs its terms in c."""
    torch.manual_seed(0)
    attention = L2Attention(2, 1).double().requires_grad_(False)
    for layer in (attention.query, attention.value, attention.out):
        nn.init.eye_(layer.weight)
    x, v = 2 * torch.randn(8, n, 2, dtype=DOUBLE), torch.randn(8, n, 2, dtype=DOUBLE)
    best = ascend(lambda: slope(lambda z: attention.attend(z)[0], x, v), [x, v]).max()
    assert best > needed * math.sqrt(n / 2)
    assert best <= attention_bound(attention, x[:1])[0]


CASES = {  # rows of query, key and value; two tokens; which part of the bound is all there is, or nearly so
    "keys": ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [[0, 300, 1, 0], [0, -300, -1, 0]]),
    "queries": ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [[300, 0, 1, 0], [300, 0, -1, 0]]),
    "values": ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 5, 0], [[0, 0, 0, 0], [0, 0, 0, 0]]),
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_every_part_of_the_softmax_bound_is_attained(case, heads):
    """With two heads that see the same, outputs of both add up in squares."""
    *rows, x = CASES[case]
    attention = Attention(4, heads).double().requires_grad_(False)
    for layer, row in zip((attention.query, attention.key, attention.value), rows, strict=True):
        layer.weight.zero_()
        layer.weight[:: 4 // heads] = torch.tensor(row, dtype=DOUBLE)
    nn.init.eye_(attention.out.weight).mul_(-2)
    x = torch.tensor([x], dtype=DOUBLE)
    norm = jacobian_norm(lambda z: attention.attend(z)[0], x)
    assert 0.98 < norm / attention_bound(attention, x) <= 1 + 1e-9


def test_softmax_bound_is_a_sum_of_its_parts():
    """Values and logits at once: ascent on the state passes either part alone."""
    torch.manual_seed(0)
    attention = Attention(2, 1).double().requires_grad_(False)
    for layer in (attention.query, attention.key, attention.value, attention.out):
        nn.init.eye_(layer.weight)
    x, v = torch.randn(2, 16, 2, 2, dtype=DOUBLE).unbind()

    def share() -> Tensor:
        return slope(lambda z: attention.attend(z)[0], x, v) / attention_bound(attention, x)

    best = ascend(share, [x, v]).max()
    assert 0.8 < best <= 1 + 1e-9


@pytest.mark.parametrize("eps", [1e-9, 0.5])
def test_layer_norm_bound_is_attained_at_the_flattest_token(eps):
    norm = nn.LayerNorm(4, eps=eps).double().requires_grad_(False)
    norm.weight.fill_(-2.0)
    flat, steep = torch.tensor([1.0, -1, 0, 0], dtype=DOUBLE), torch.tensor([9.0, -9, 3, -3], dtype=DOUBLE)
    x = torch.stack([torch.stack([steep, flat]), torch.stack([steep, steep])])
    torch.testing.assert_close(norm_bound(norm, x), jacobian_norm(norm, x, 40))


def test_mixing_bound_is_nearly_attained_on_a_large_grid():
    torch.manual_seed(0)
    mixing = DepthwiseMixing(3, registers=1).double().requires_grad_(False)
    mixing.weight += torch.randn_like(mixing.weight)
    x = torch.zeros(1, 1 + 12 * 12 + 1, 3, dtype=DOUBLE)
    assert 0.9 < jacobian_norm(mixing, x, 60)[0] / mixing_bound(mixing, x.shape[1]) <= 1


def test_field_bound_is_attained_where_mlp_and_attention_pull_together():
    """One token, everything along one direction: s (gain · GELU' · w + gain · v)."""
    field = VectorField(4, 1, hidden=1, scale=-1.5, bias=True).double().requires_grad_(False)
    for layer in (part for part in field.modules() if isinstance(part, nn.Linear)):
        layer.weight.zero_()
        layer.bias.zero_()
    row = torch.tensor([1.0, -1, 0, 0], dtype=DOUBLE) / math.sqrt(2)
    field.mlp.w1.weight[0], field.mlp.w2.weight[:, 0] = 0.5 * row, 3 * row
    field.mlp.w1.bias.fill_(math.sqrt(2))
    field.attention.value.weight.copy_(0.7 * row.outer(row))
    nn.init.eye_(field.attention.out.weight)
    x = torch.zeros(1, 1, 4, dtype=DOUBLE)
    torch.testing.assert_close(field_bound(field, x), jacobian_norm(field, x))
