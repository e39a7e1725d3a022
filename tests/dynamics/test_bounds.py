"""JaSMin and Lipschitz bounds against dense linear algebra in float64."""

import itertools
import math

import pytest
import torch
from problems import dense_norm, norm2
from torch import Tensor, nn

from odevit.dynamics.bounds import GELU_SLOPE, attention_bound, field_bound, g, jasmin, mlp_bound, norm_bound
from odevit.model.field import VectorField
from odevit.model.layers import (
    ATTENTIONS,
    NORMS,
    Attention,
    L2Attention,
    Mlp,
    SinkhornAttention,
)
from odevit.model.spectral import (
    cap_spectral_norms_,
)


def randomise_(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Parameters of random sizes, biases and norm weights too, in float64."""
    for parameter in module.double().parameters():
        size = 10 ** (torch.rand((), generator=generator).item() * 1.5 - 1)  # 0.1 … 3
        scale = size / math.sqrt(parameter.shape[-1]) if parameter.ndim == 2 else size
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
    return module.requires_grad_(False)


# --- JaSMin -----------------------------------------------------------------------------------------------------------


def random_rows(count: int, n: int, generator: torch.Generator) -> Tensor:
    temperature = 10 ** (torch.rand(count, 1, generator=generator, dtype=torch.float64) * 3 - 1.5)  # 0.03 … 30
    return torch.softmax(torch.randn(count, n, generator=generator, dtype=torch.float64) * temperature, dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 5, 8, 17, 50])
def test_g_bounds_the_eigenvalues_of_the_softmax_jacobian(n):
    p = random_rows(2500, n, torch.Generator().manual_seed(n))  # 15,000 rows in all
    eigenvalues = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).flip(-1)
    for k in range(1, min(5, n) + 1):
        assert (g(p, k) >= eigenvalues[:, k - 1] - 1e-14).all()
    assert (g(p) <= eigenvalues[:, 0] / 0.8 + 1e-14).all()  # and it is not loose


def test_g_by_hand():
    p = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    assert g(p, 1) == pytest.approx(0.6 * (1 - 0.6 + 0.3))
    assert g(p, 2) == pytest.approx(0.3 * (1 - 0.3 + 0.1))
    assert g(p, 3) == pytest.approx(0.1 * (1 - 0.1 + 0))
    with pytest.raises(ValueError, match="between 1 and the number of tokens 3, got 4"):
        g(p, 4)


def test_g_stays_a_bound_in_float32_where_one_minus_x_cancels():
    logits = torch.tensor([0.0, -18.0, -18.0])
    p = torch.softmax(logits, dim=-1)
    assert g(p) == pytest.approx(float(g(torch.softmax(logits.double(), dim=-1))), rel=1e-5)


@pytest.mark.parametrize("k", [0, 2, 3])
def test_jasmin_takes_the_largest_query_and_the_mean_of_the_rest(k):
    torch.manual_seed(0)
    maps = torch.softmax(2 * torch.randn(4, 2, 3, 5, 5, dtype=torch.float64), dim=-1)  # (steps, b, h, n, n)
    expected = []
    for step, image, head in itertools.product(range(4), range(2), range(3)):
        rows = []
        for row in maps[step, image, head]:
            x = sorted(row.tolist(), reverse=True)
            first = x[0] * (1 - x[0] + x[1])
            rows.append(math.log(first) if k == 0 else math.log(first / (x[k - 1] * (1 - x[k - 1] + x[k]))))
        expected.append(max(rows))
    assert jasmin(maps, k) == pytest.approx(sum(expected) / len(expected), rel=1e-9)
    assert jasmin(list(maps), k) == pytest.approx(float(jasmin(maps, k)), rel=1e-12)


@pytest.mark.parametrize("k", [0, 2, 4])
def test_jasmin_gradient_against_finite_differences(k):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: jasmin(torch.softmax(z, dim=-1), k), logits)


@pytest.mark.parametrize("kind", list(ATTENTIONS))
def test_jasmin_reaches_query_and_key(kind):
    torch.manual_seed(0)
    field = VectorField(16, 2, hidden=16, attention=kind)
    x = torch.randn(2, 6, 16)
    for attention in (field.attend(x)[1], field.attention_map(x)):
        field.zero_grad()
        jasmin(attention).backward()
        for name, parameter in field.attention.named_parameters():
            if name in ("query.weight", "key.weight"):
                assert parameter.grad.isfinite().all()
                assert parameter.grad.norm() > 1e-6
            else:
                assert parameter.grad is None or not parameter.grad.any()


def test_descending_jasmin_lowers_the_largest_g():
    torch.manual_seed(0)
    field, x = VectorField(16, 2, hidden=16), torch.randn(4, 8, 16)
    optimiser = torch.optim.SGD(field.parameters(), lr=1.0)
    before = g(field.attention_map(x)).amax(dim=-1).mean()
    for _ in range(20):
        optimiser.zero_grad()
        jasmin(field.attention_map(x)).backward()
        optimiser.step()
    assert g(field.attention_map(x)).amax(dim=-1).mean() < 0.7 * before


def test_jasmin_is_finite_on_one_hot_rows_and_refuses_k_1():
    one_hot = torch.eye(4).expand(2, 3, 4, 4).clone().requires_grad_()
    for k in (0, 2):
        loss = jasmin(one_hot, k)
        loss.backward()
        assert loss.isfinite()
        assert one_hot.grad.isfinite().all()
    with pytest.raises(ValueError, match="at least 2"):
        jasmin(one_hot, 1)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_gelu_slope_is_the_largest_derivative_of_gelu():
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64, requires_grad=True)
    nn.functional.gelu(x).sum().backward()
    assert x.grad.abs().max() <= GELU_SLOPE
    assert x.grad.abs().max() == pytest.approx(GELU_SLOPE, rel=1e-9)
    assert abs(GELU_SLOPE - 1.129) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bias"), [(Attention, False), (Attention, True), (L2Attention, False)])
def test_attention_bound_is_never_below_the_jacobian_norm(kind, bias):
    """240 cases each: 720 in all, from almost uniform to almost one-hot attention, with and without a common offset."""
    generator = torch.Generator().manual_seed(2 * bias)
    ratios = []
    for case in range(240):
        heads, n = 1 + case % 4, 1 + case % 7
        attention = randomise_(kind(12, heads, bias=bias), generator)
        size = 10 ** (torch.rand(2, generator=generator) * 2 - 1)  # 0.1 … 10
        x = size[0] * torch.randn(1, n, 12, generator=generator, dtype=torch.float64)
        x = x + size[1] * torch.randn(1, 1, 12, generator=generator, dtype=torch.float64)
        ratios.append(float(attention_bound(attention, x)[0] / dense_norm(lambda z, a=attention: a.attend(z)[0], x)))
    assert min(ratios) >= 1 - 1e-9
    if kind is Attention:
        assert sorted(ratios)[120] < 6  # it means something: the median is a few times too large, no more


def test_l2_bound_is_quadratic_in_the_query_weight():
    """One token: the map is X WqᵀWq Wvᵀ Wo/√e, so ‖Wq‖ to the first power would be too small."""
    attention, x = randomise_(L2Attention(4, 1), torch.Generator().manual_seed(0)), torch.randn(1, 1, 4).double()
    wq, wv, wo = (norm2(layer.weight) for layer in (attention.query, attention.value, attention.out))
    assert attention_bound(attention, x)[0] == pytest.approx(float(wq**2 * wv * wo / 2))
    for weight in (attention.query.weight, attention.value.weight, attention.out.weight):
        weight.copy_(3 * torch.eye(4))
    assert dense_norm(lambda z: attention.attend(z)[0], x) == pytest.approx(3**4 / 2)  # attained, above 3³/2


def test_attention_bound_agrees_with_the_formula_of_the_method():
    torch.manual_seed(0)
    attention, x = randomise_(Attention(12, 3), torch.Generator().manual_seed(0)), torch.randn(1, 5, 12).double()
    total, centred, p = 0.0, x[0] - x[0].mean(dim=0), attention.map(x)[0]
    weights = [layer.weight.T.split(4, dim=1) for layer in (attention.query, attention.key, attention.value)]
    for head, (wq, wk, wv) in enumerate(zip(*weights, strict=True)):
        a = wq @ wk.T / 2  # sqrt(d/h) = 2
        logits = norm2(a @ centred.T) + norm2(x[0] @ a)
        total += (norm2(p[head]) * norm2(wv) + g(p[head]).max() * norm2(centred @ wv) * logits) ** 2
    assert attention_bound(attention, x)[0] == pytest.approx(float(norm2(attention.out.weight) * total**0.5), rel=1e-9)


def test_mlp_bound_is_never_below_the_jacobian_norm():
    generator = torch.Generator().manual_seed(0)
    for case in range(50):
        mlp = randomise_(Mlp(6, 9, bias=bool(case % 2)), generator)
        x = torch.randn(1, 2, 6, generator=generator, dtype=torch.float64)
        assert mlp_bound(mlp, x.shape[-2]) >= dense_norm(mlp, x)


@pytest.mark.slow
@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("kind", ["softmax", "l2"])
def test_field_bound_is_never_below_the_jacobian_norm(norm, kind):
    generator = torch.Generator().manual_seed(0)
    for case in range(50):
        field = VectorField(8, 2, hidden=12, scale=0.5 + case / 10, norm=norm, attention=kind, bias=bool(case % 2))
        randomise_(field, generator)
        x = (0.1 + case / 20) * torch.randn(1, 4, 8, generator=generator, dtype=torch.float64)
        assert field_bound(field, x)[0] >= dense_norm(lambda z, f=field: f.F(z) + f.attend(z)[0], x)
        assert norm_bound(field.norm_g, x)[0] >= dense_norm(field.norm_g, x) * (1 - 1e-12)


@pytest.mark.parametrize("kind", ["softmax", "l2"])
def test_bounds_are_per_sample_and_hold_for_a_capped_field(kind):
    torch.manual_seed(0)
    field = VectorField(8, 2, hidden=12, attention=kind, norm="layer").double()
    cap_spectral_norms_(field, 0.5)
    x = torch.randn(3, 5, 8, dtype=torch.float64) * torch.tensor([0.1, 1.0, 10.0])[:, None, None]
    bounds = field_bound(field, x)
    assert bounds.shape == (3,)
    for i in range(3):
        assert bounds[i] == pytest.approx(float(field_bound(field, x[i : i + 1])[0]), rel=1e-9)
        assert bounds[i] >= dense_norm(lambda z: field.F(z) + field.attend(z)[0], x[i : i + 1])


def test_unknown_bounds_say_so():
    with pytest.raises(ValueError, match=r"no Lipschitz bound is known for SinkhornAttention; known: Attention, L2"):
        attention_bound(SinkhornAttention(8, 2), torch.randn(1, 3, 8))
    with pytest.raises(ValueError, match=r"BatchNorm1d; known: CenterNorm"):
        norm_bound(nn.BatchNorm1d(8), torch.randn(1, 3, 8))
