"""Jacobian norm, log-norm and the Euler error bound against dense Jacobians and exact solutions."""

import math

import pytest
import torch
from problems import tiny_images, tiny_model
from torch import Tensor

from odevit.dynamics.bounds import field_bound
from odevit.dynamics.exponents import model_exponents
from odevit.dynamics.jacobian import curvature, error_bound, forward_derivatives, jacobian_norm, linearise, log_norm
from odevit.model.field import VectorField
from odevit.model.layers import ATTENTIONS
from odevit.model.solvers import solve


def dense(f, x: Tensor) -> Tensor:
    """Jacobians (b, m, m) of every sample."""
    return torch.stack([torch.func.jacrev(f)(one[None]).reshape(one.numel(), one.numel()) for one in x])


def dense_norm(jacobian: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(jacobian, ord=2)


def dense_log_norm(jacobian: Tensor) -> Tensor:
    return torch.linalg.eigvalsh((jacobian + jacobian.mT) / 2)[:, -1]


def linear(matrix: Tensor):
    return lambda x: (x.flatten(1) @ matrix.T).view_as(x)


@pytest.mark.parametrize("kind", list(ATTENTIONS))
def test_linearise_agrees_with_forward_and_reverse_mode(kind):
    torch.manual_seed(0)
    field = VectorField(8, 2, hidden=16, attention=kind).double()
    x, v = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        y, push, pull = linearise(field, x)
        with forward_derivatives():
            expected, image = torch.func.jvp(field, (x,), (v,))
            pulled = torch.func.vjp(field, x)[1](v)[0]
    for _ in range(2):  # any number of products
        torch.testing.assert_close(push(v), image)
        torch.testing.assert_close(pull(v), pulled)
    torch.testing.assert_close(y, expected)
    assert not any(result.requires_grad for result in (y, push(v), pull(v)))
    assert all(parameter.grad is None for parameter in field.parameters())


def test_linear_fields_are_exact():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    for shift in (0.0, -10.0, 3.0):
        matrix = torch.randn(20, 20, dtype=torch.float64) + shift * torch.eye(20)
        jacobian = matrix.expand(4, 20, 20)
        f = linear(matrix)
        torch.testing.assert_close(jacobian_norm(f, x, 25), dense_norm(jacobian), rtol=1e-6, atol=0)
        torch.testing.assert_close(log_norm(f, x, 25).value, dense_log_norm(jacobian), rtol=1e-6, atol=1e-12)


def test_exhausted_krylov_spaces_do_not_invent_eigenvalues():
    """-2 x has one eigenvalue: after one iteration nothing is left, and no zero may appear."""
    x = torch.randn(3, 6)
    torch.testing.assert_close(log_norm(lambda z: -2 * z, x).value, torch.full((3,), -2.0))
    torch.testing.assert_close(jacobian_norm(lambda z: -2 * z, x), torch.full((3,), 2.0))
    torch.testing.assert_close(jacobian_norm(torch.zeros_like, x), torch.zeros(3))
    mu = log_norm(lambda z: -z * torch.tensor([1.0, 1, 1, 5, 5, 5]), x)
    torch.testing.assert_close(mu.value, torch.full((3,), -1.0))
    torch.testing.assert_close(mu.residual, torch.zeros(3))


def test_samples_are_independent():
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [5.0]])
    expected = (1 - torch.tanh(x) ** 2).max(dim=1).values
    torch.testing.assert_close(jacobian_norm(torch.tanh, x), expected)
    torch.testing.assert_close(log_norm(lambda z: -torch.tanh(z), x).value, -(1 - torch.tanh(x) ** 2).min(dim=1).values)


def test_rectangular_jacobian():
    torch.manual_seed(0)
    matrix = torch.randn(3, 8, dtype=torch.float64)
    norm = jacobian_norm(lambda x: x @ matrix.T, torch.randn(2, 8, dtype=torch.float64))
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(matrix, ord=2).expand(2))


@pytest.mark.parametrize("kind", list(ATTENTIONS))
@pytest.mark.parametrize("contraction", [0.0, 8.0])
def test_vector_fields_against_dense_jacobians(kind, contraction):
    torch.manual_seed(0)
    field = VectorField(16, 2, hidden=32, scale=2.0, attention=kind, bias=kind == "softmax").double()
    x = torch.randn(3, 6, 16, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return field(z) - contraction * z

    with forward_derivatives():
        jacobian = dense(f, x).detach()
    exact_norm, exact_mu = dense_norm(jacobian), dense_log_norm(jacobian)
    norm, (mu, residual) = jacobian_norm(f, x), log_norm(f, x)
    assert not norm.requires_grad
    assert not mu.requires_grad
    torch.testing.assert_close(norm, exact_norm, rtol=1e-3, atol=0)
    torch.testing.assert_close(mu, exact_mu, rtol=1e-3, atol=0)
    assert (norm <= exact_norm * (1 + 1e-9)).all()  # from below
    assert (mu <= exact_mu + 1e-9).all()
    assert (exact_mu <= mu + residual + 1e-9).all()
    assert (mu + residual < 0).all() == (contraction > 0)  # the contracting field is seen to contract
    assert (mu <= norm).all()


@pytest.mark.parametrize("norm", ["center", "layer"])
def test_no_field_behind_a_norm_contracts_except_on_the_quotient(norm):
    """-c (x - mean) contracts every difference between entries, and has log-norm 0 all the same."""
    torch.manual_seed(0)
    field = VectorField(16, 2, hidden=32, norm=norm).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return field(z) - 12 * (z - z.mean(dim=-1, keepdim=True))

    with forward_derivatives():
        jacobian = dense(f, x).detach()
    p = torch.kron(torch.eye(6), torch.eye(16) - 1 / 16).double()
    basis = torch.linalg.eigh(p).eigenvectors[:, 6:]
    exact = dense_log_norm(basis.mT @ jacobian @ basis)
    whole, quotient = log_norm(f, x, 90), log_norm(f, x, 90, quotient=True)
    assert (dense_log_norm(jacobian) >= -1e-9).all()
    assert (whole.upper > -1e-6).all()  # so no sign is taken for a minus
    torch.testing.assert_close(quotient.value, exact, rtol=1e-4, atol=0)
    assert (quotient.upper < -1).all()


def test_float32_and_more_iterations_than_needed():
    torch.manual_seed(0)
    field, x = VectorField(8, 2, hidden=16), torch.randn(2, 3, 8)
    with forward_derivatives():
        jacobian = dense(field, x).detach()
    torch.testing.assert_close(log_norm(field, x, 200).value, dense_log_norm(jacobian), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(jacobian_norm(field, x, 200), dense_norm(jacobian), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        log_norm(field, x, 0)


# --- Euler's error ----------------------------------------------------------------------------------------------------


def test_curvature_is_the_second_derivative_of_the_path():
    matrix = torch.tensor([[0.0, 1.0], [-4.0, 0.0]], dtype=torch.float64)
    xs = torch.randn(5, 3, 2, dtype=torch.float64)  # m, b, state
    expected = (xs @ matrix.T @ matrix.T).norm(dim=-1).max(dim=0).values
    torch.testing.assert_close(curvature(lambda x: x @ matrix.T, xs), expected)
    torch.testing.assert_close(curvature(lambda x: x @ matrix.T, list(xs)), expected)


def test_error_bound_formula_and_limits():
    assert error_bound(2.0, 3.0, 10) == pytest.approx((math.exp(2) - 1) / (2 * 2 * 10) * 3)
    assert error_bound(0.0, 3.0, 10) == pytest.approx(3 / 20)
    for rate in (1e-9, -1e-9):  # continuous at zero
        assert error_bound(rate, 3.0, 10) == pytest.approx(3 / 20, rel=1e-8)
    steps = [math.exp(-2 * j / 10) / 10 for j in range(10)]
    assert error_bound(-2.0, 3.0, 10) == pytest.approx(3 / 20 * sum(steps))
    assert error_bound(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]), 4).shape == (2,)
    assert error_bound(1e4, 1.0, 2) == math.inf  # not NaN
    assert error_bound(-1e4, 1.0, 2) == pytest.approx(1 / 8)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        error_bound(1.0, 1.0, 0)


def test_proposition_1_with_a_negative_rate_needs_the_sum():
    """ψ = -x, one step: the error is 1/e, which (e^μ - 1)/(2μN)·C misses."""
    error, rate = abs((1 - 1) - math.exp(-1)), -1.0
    assert error > math.expm1(rate) / (2 * rate)
    assert error <= error_bound(rate, 1.0, 1)


class Split:
    """A field in the solvers' sense with everything in F."""

    def __init__(self, f):
        self.F = f
        self.G = torch.zeros_like

    def __call__(self, x: Tensor) -> Tensor:
        return self.F(x)


PROBLEMS = [
    # ψ, its exact flow from x over time t, and L and μ on [0, 1], which no path leaves
    (lambda x: 3 * x * (1 - x), lambda x, t: 1 / (1 + (1 / x - 1) * math.exp(-3 * t)), 3.0, 3.0),
    (lambda x: -(x**3), lambda x, t: x / (1 + 2 * t * x**2).sqrt(), 3.0, 0.0),
    (lambda x: -x - x**3, lambda x, t: (math.exp(2 * t) * (1 + x**-2) - 1) ** -0.5, 4.0, -1.0),
]


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("num_steps", [3, 4, 8, 32])
def test_error_bound_is_never_violated(case, num_steps):
    """Paths stay in [0, 1], where L and μ are known; C is taken over a grid of all of it, so the bound is rigorous."""
    psi, flow, lipschitz, mu = PROBLEMS[case]
    x = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)[:, None]  # b = 50
    path = solve(Split(psi), x, num_steps=num_steps, save_at="steps").xs
    assert path.min() >= 0
    assert path.max() <= 1
    everywhere = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]
    largest = curvature(psi, [everywhere]).max()
    for n, state in enumerate(path):
        error = (state - flow(x, n / num_steps)).abs().max()
        assert error <= error_bound(lipschitz, largest, num_steps)
        assert error <= error_bound(mu, largest, num_steps)
    assert error_bound(mu, largest, num_steps) <= error_bound(lipschitz, largest, num_steps)


@pytest.mark.slow
def test_error_bound_on_a_vector_field_over_its_horizon():
    """ψ = T · field: with L and μ measured along the path, against RK4 with eight times the steps."""
    torch.manual_seed(0)
    horizon, num_steps = 2.0, 4
    field = VectorField(16, 2, hidden=16, scale=0.5).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64)

    def psi(z: Tensor) -> Tensor:
        return horizon * field(z)

    with torch.no_grad():
        path = solve(field, x, num_steps=num_steps, horizon=horizon, save_at="steps").xs
        exact = solve(field, x, num_steps=8 * num_steps, horizon=horizon, solver="rk4").xs[-1]
    error = (path[-1] - exact).flatten(1).norm(dim=1)
    largest = curvature(psi, path)
    bounds = [
        error_bound(torch.stack([rate(psi, state) for state in path]).amax(dim=0), largest, num_steps)
        for rate in (
            lambda f, state: log_norm(f, state).value,
            jacobian_norm,
            lambda f, state: horizon * field_bound(field, state),
        )
    ]
    assert (error <= bounds[0]).all()
    assert (bounds[0] <= bounds[1]).all()  # μ ≤ ‖J‖ ≤ bound
    assert (bounds[1] <= bounds[2]).all()


def test_half_precision_is_refused_with_a_way_out():
    model = tiny_model().bfloat16()
    with pytest.raises(ValueError, match=r"single or double precision, got torch.bfloat16: model.float\(\)"):
        model_exponents(model, tiny_images(1).bfloat16())
    with pytest.raises(ValueError, match="single or double precision"):
        field_bound(model.odevit.fields[0], torch.zeros(1, 17, 8).bfloat16())
