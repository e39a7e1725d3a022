"""Spectral norms, the initialisation and the cap, against dense linear algebra in float64."""

import copy
import itertools

import pytest
import torch
from problems import dense_norm, norm2
from torch import nn
from torch.nn.utils import parametrize

from odevit.dynamics.bounds import norm_bound
from odevit.model.field import VectorField
from odevit.model.layers import (
    CenterNorm,
    PatchTokenizer,
)
from odevit.model.spectral import (
    SpectralCap,
    cap_spectral_norms_,
    gram_norm,
    spectral_init_,
    spectral_norms,
)

# --- initialisation and spectral norms --------------------------------------------------------------------------------


def test_spectral_init_gives_norm_one_to_every_matrix():
    torch.manual_seed(0)
    field = VectorField(48, 4, hidden=96, bias=True)
    for layer in (layer for layer in field.modules() if isinstance(layer, nn.Linear)):
        result = spectral_init_(layer.weight)
        assert result is layer.weight
        assert layer.weight.grad_fn is None
    norms = spectral_norms(field)
    names = {f"attention.{name}" for name in ("query", "key", "value", "out")} | {"mlp.w1", "mlp.w2"}
    assert norms.keys() == names
    assert all(norm == pytest.approx(1, abs=1e-5) for norm in norms.values())


def test_spectral_init_sees_a_convolution_as_a_matrix():
    tokenizer = PatchTokenizer(3, 32, 4)
    spectral_init_(tokenizer.projection.weight)
    assert norm2(tokenizer.projection.weight.reshape(32, 3 * 4 * 4)) == pytest.approx(1, abs=1e-5)
    assert spectral_norms(tokenizer) == {"projection": pytest.approx(1, abs=1e-5)}


def test_spectral_init_is_seeded_and_runs_on_meta():
    first, second = torch.empty(8, 5), torch.empty(8, 5)
    for weight in (first, second):
        torch.manual_seed(3)
        spectral_init_(weight)
    assert torch.equal(first, second)
    assert spectral_init_(torch.empty(8, 5, device="meta")).shape == (8, 5)


def test_center_norm_has_jacobian_norm_exactly_d_over_d_minus_1():
    for width in (2, 3, 16, 33):
        norm = CenterNorm(width).double()
        x = torch.randn(1, 2, width, dtype=torch.float64)
        assert dense_norm(norm, x) == pytest.approx(width / (width - 1), rel=1e-12)
        assert norm_bound(norm, x) == pytest.approx(width / (width - 1), rel=1e-12)


def test_gram_norm_is_an_upper_bound_within_three_percent():
    torch.manual_seed(0)
    shapes = [(1, 1), (1, 7), (64, 64), (128, 32), (32, 128), (200, 200)]
    for shape, dtype, size in itertools.product(shapes, (torch.float32, torch.float64), (1e-6, 1.0, 1e6)):
        for weight in (torch.randn(shape, dtype=dtype), torch.eye(*shape, dtype=dtype), torch.ones(shape, dtype=dtype)):
            exact, bound = norm2(size * weight), gram_norm(size * weight)
            rounding = 1e-12 if dtype == torch.float64 else 3e-6
            assert exact * (1 - rounding) <= bound <= 1.03 * exact
    assert gram_norm(torch.zeros(3, 4)) == 0


def test_gram_norm_keeps_its_precision_under_autocast_and_in_half():
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gram_norm(weight) == gram_norm(weight.clone()) >= norm2(weight.float()) * (1 - 3e-6)
    assert gram_norm(weight) == pytest.approx(float(gram_norm(weight.double())), rel=1e-5)
    assert SpectralCap(1.0)(weight.bfloat16()).dtype == torch.bfloat16


def test_gram_norm_of_half_precision_is_never_below_the_norm():
    """Of rank one the bound is the norm itself, so rounding it to bfloat16 went below in every other case."""
    torch.manual_seed(0)
    for _ in range(50):
        weight = torch.outer(torch.randn(8), torch.randn(6)).bfloat16()
        assert gram_norm(weight) >= norm2(weight.float()) * (1 - 3e-6)


# --- the cap ----------------------------------------------------------------------------------------------------------


def test_gradients_of_gram_norm_and_cap():
    torch.manual_seed(0)
    for shape in ((4, 6), (5, 3)):
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(gram_norm, weight)
        assert torch.autograd.gradcheck(SpectralCap(0.7), weight)  # bites
        assert torch.autograd.gradcheck(SpectralCap(100.0), weight)  # does not
    zero = torch.zeros(3, 3, requires_grad=True)
    SpectralCap(1.0)(zero).sum().backward()
    assert torch.equal(zero.grad, torch.ones(3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("cap", [0.8, 1.5])
def test_cap_holds_through_aggressive_training(cap):
    torch.manual_seed(0)
    field = VectorField(16, 2, hidden=32)
    names = cap_spectral_norms_(field, cap)
    assert len(names) == 6
    x, target = torch.randn(8, 5, 16), 10 * torch.randn(8, 5, 16)
    optimiser = torch.optim.SGD(field.parameters(), lr=1.0)
    for _ in range(50):
        optimiser.zero_grad()
        with parametrize.cached():
            loss = (x + field(x) - target).square().mean()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in field.parameters())
        optimiser.step()
        assert max(spectral_norms(field).values()) <= cap * (1 + 1e-5)
    raw = [norm2(p) for name, p in field.named_parameters() if name.endswith("original")]
    assert max(raw) > 1.2 * cap  # the cap had something to hold
    assert max(spectral_norms(field).values()) > 0.95 * cap  # and wastes little


def test_capped_field_survives_deepcopy_and_state_dict():
    torch.manual_seed(0)
    field, other = VectorField(16, 2, hidden=32), VectorField(16, 2, hidden=32)
    for each in (field, other):
        cap_spectral_norms_(each, 0.5)
    x = torch.randn(2, 3, 16)
    assert not torch.equal(field(x), other(x))
    other.load_state_dict(field.state_dict())
    assert torch.equal(field(x), other(x))
    copied = copy.deepcopy(field)
    assert torch.equal(field(x), copied(x))
    copied.mlp.w1.parametrizations.weight.original.data.zero_()
    assert not torch.equal(field(x), copied(x))
    field.mlp.w1.weight = torch.eye(32, 16) / 4  # assignable
    assert norm2(field.mlp.w1.weight) == pytest.approx(0.25)


def test_cap_rejects_nonsense_and_double_use():
    with pytest.raises(ValueError, match="positive, got 0"):
        SpectralCap(0)
    field = VectorField(8, 2, hidden=8)
    cap_spectral_norms_(field, 1.0)
    with pytest.raises(ValueError, match=r"mlp\.w1.*once"):
        cap_spectral_norms_(field, 1.0)
