"""Contract of every registered solver: observed order, counts, gradients, compilation; and `solve` itself."""

import math

import pytest
import torch
from problems import Counting, Linear, Logistic, observed_order, small_field, tiny_images, tiny_model

from odevit.model.errors import NonFiniteStateError, SolverError
from odevit.model.solvers import ADAPTIVE, SOLVERS, Grid, register_solver, solve

X0 = torch.tensor([[0.2], [0.9], [2.5]], dtype=torch.float64)


def states(batch=2, tokens=6, width=16, seed=3):
    return torch.randn(batch, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SOLVERS)
def test_observed_order_on_a_problem_with_known_solution(name):
    field, steps = Logistic(), [32, 64, 128, 256]
    errors = [
        float((solve(field, X0, num_steps=k, solver=name, horizon=1.3).xs[-1] - field.exact(X0, 1.3)).norm())
        for k in steps
    ]
    order = observed_order(errors, steps)
    print(f"{name}: order {order:.3f}")
    assert order == pytest.approx(SOLVERS[name].order, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_observed_order_on_the_models_own_field(name):
    field, x = small_field().requires_grad_(False), states()
    reference = solve(field, x, num_steps=512, solver="rk4").xs[-1]
    steps = [32, 64, 128, 256]
    errors = [float((solve(field, x, num_steps=k, solver=name).xs[-1] - reference).norm()) for k in steps]
    order = observed_order(errors, steps)
    print(f"{name}: order {order:.3f} on the model's field")
    assert order == pytest.approx(SOLVERS[name].order, abs=0.1)


def test_strang_with_euler_subflows_is_only_first_order():
    """What Macaron-style blocks do: the reason why our Strang has Heun subflows."""

    def macaron(field, x, h):
        x = x + h / 2 * field.F(x)
        x = x + h * field.G(x)
        return x + h / 2 * field.F(x)

    field, steps, errors = Logistic(), [32, 64, 128, 256], []
    for k in steps:
        x = X0
        for _ in range(k):
            x = macaron(field, x, 1.0 / k)
        errors.append(float((x - field.exact(X0, 1.0)).norm()))
    assert observed_order(errors, steps) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", SOLVERS)
def test_evaluations_are_counted_truly(name):
    field = Counting(Logistic())
    evaluations = solve(field, X0, num_steps=7, solver=name).evaluations
    assert (field.F_count, field.G_count) == tuple(evaluations)
    assert evaluations.F == 7 * SOLVERS[name].evaluations.F


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_solvers_count_truly_and_reach_the_tolerance(name):
    counted = Counting(Logistic())
    solution = solve(counted, X0, solver=name, horizon=1.3, rtol=1e-6, atol=1e-6)
    assert (counted.F_count, counted.G_count) == tuple(solution.evaluations)
    assert torch.allclose(solution.xs[-1], counted.field.exact(X0, 1.3), atol=1e-5)
    loose = solve(counted, X0, solver=name, horizon=1.3, rtol=1e-2, atol=1e-2)
    assert loose.evaluations.F < solution.evaluations.F


@pytest.mark.parametrize("name", SOLVERS)
def test_gradients_pass_gradcheck(name):
    def final(x, a):
        return solve(Logistic(a=a), x, num_steps=3, solver=name).xs[-1]

    x, a = X0.clone().requires_grad_(), torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(final, (x, a))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTIVE)
def test_gradients_of_adaptive_solvers_equal_those_of_the_exact_solution(name):
    """Finite differences would see the step-size control jump; the exact solution does not."""
    x = X0.clone().requires_grad_()
    (ours,) = torch.autograd.grad(solve(Logistic(), x, solver=name, rtol=1e-6, atol=1e-6).xs[-1].sum(), x)
    (exact,) = torch.autograd.grad(Logistic().exact(x, 1.0).sum(), x)
    assert torch.allclose(ours, exact, atol=1e-3)


def test_the_models_field_passes_gradcheck():
    field, x = small_field(width=4, heads=2), states(1, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: solve(field, x, num_steps=2, solver="strang").xs[-1], (x,))


@pytest.mark.parametrize("method", ["euler", "midpoint", "rk4", "dopri5"])
def test_agrees_with_torchdiffeq(method):
    from torchdiffeq import odeint

    field, x = small_field(), states()
    theirs = {"rk4": "dopri5"}.get(method, method)  # torchdiffeq's rk4 is the 3/8 rule
    ts = torch.linspace(0, 1, 65, dtype=torch.float64)
    expected = odeint(lambda t, y: field(y), x, ts, method=theirs, rtol=1e-9, atol=1e-9)
    ours = solve(field, x, num_steps=64, solver=method, save_at="steps", rtol=1e-9, atol=1e-9).xs
    assert torch.allclose(ours, expected, atol=1e-6 if method == "rk4" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOLVERS, *ADAPTIVE])
def test_linear_system_with_two_fields_switches_at_half_time(name):
    generator = torch.Generator().manual_seed(5)
    A, B, C, D = torch.randn(4, 3, 3, dtype=torch.float64, generator=generator)
    first, second, x = Linear(A / 4, B / 4), Linear(C / 4, D / 4), torch.eye(3, dtype=torch.float64)
    exact = second.exact(first.exact(x, 0.5), 0.5)
    result = solve([first, second], x, num_steps=400, solver=name, rtol=1e-7, atol=1e-7).xs[-1]
    assert torch.allclose(result, exact, atol=3e-3)


def test_saves_all_steps_with_their_times():
    solution = solve(Logistic(), X0, num_steps=5, horizon=2.0, save_at="steps")
    assert solution.xs.shape == (6, 3, 1)
    assert solution.ts.tolist() == pytest.approx([0, 0.4, 0.8, 1.2, 1.6, 2.0])
    assert torch.equal(solution.xs[0], X0)


@pytest.mark.parametrize("name", ["rk4", "dopri5"])
def test_requested_times_lie_on_the_solution(name):
    field, times = Logistic(), [0.0, 0.111, 0.5, 0.73, 1.0]
    solution = solve(field, X0, num_steps=40, solver=name, save_at=times, rtol=1e-8, atol=1e-8)
    for x, t in zip(solution.xs, times, strict=True):
        assert torch.allclose(x, field.exact(X0, t), atol=1e-6), t


def test_interpolated_times_cost_two_evaluations_each():
    counted = Counting(Logistic())
    solution = solve(counted, X0, num_steps=4, save_at=[0.25, 0.3, 0.9])
    assert solution.evaluations == (8, 8)
    assert (counted.F_count, counted.G_count) == (8, 8)


@pytest.mark.parametrize(("steps", "phases"), [(7, 3), (12, 1), (5, 5), (9, 2)])
def test_grid_divides_each_phase_evenly(steps, phases):
    grid = Grid(steps, 2.0, phases)
    sizes = list(grid.steps())
    assert len(sizes) == steps
    assert sum(h for _, h in sizes) == pytest.approx(2.0)
    assert [math.fsum(h for p, h in sizes if p == phase) for phase in range(phases)] == pytest.approx(
        [2 / phases] * phases
    )
    assert grid.times() == pytest.approx([0.0, *torch.tensor([h for _, h in sizes]).double().cumsum(0).tolist()])


@pytest.mark.parametrize("name", SOLVERS)
def test_gradient_checkpointing_changes_no_gradient(name):
    field, x = small_field(), states()
    gradients = []
    for checkpoint in (False, True, "segments"):
        field.zero_grad()
        solve(field, x, num_steps=5, solver=name, recompute=checkpoint, save_at="steps").xs.square().sum().backward()
        gradients.append([p.grad.clone() for p in field.parameters()])
    for plain, recomputed, segments in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
        assert torch.equal(plain, segments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["euler", "strang"])
def test_compiled_equals_eager(name):
    model, images = tiny_model(solver=name), tiny_images()
    expected = model(images).logits
    for field in model.odevit.fields:
        for part in (field, field.mlp, field.attention):
            part.compile(backend="aot_eager")  # captured and rewritten; test_loop.py also lets it be made machine code
    assert torch.allclose(model(images).logits, expected, atol=1e-5)


class Exploding:
    def F(self, x):
        return x.square() * 1e8

    def G(self, x):
        return x

    def __call__(self, x):
        return self.F(x) + self.G(x)


def test_non_finite_states_name_step_and_time():
    with pytest.raises(NonFiniteStateError, match=r"after step \d+ \(t = 0\.\d+\)") as caught:
        solve(Exploding(), torch.ones(2, 3, 4), num_steps=10, solver="rk4")
    assert 1 <= caught.value.step < 10
    assert caught.value.time == pytest.approx(caught.value.step / 10)
    with pytest.raises(NonFiniteStateError, match="step 0"):
        solve(Logistic(), torch.tensor([[float("nan")]]), num_steps=3)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_failures_are_typed_and_never_say_only_underflow(name):
    with pytest.raises(SolverError, match="t = ") as caught:
        solve(Exploding(), torch.full((2, 3, 4), 1e30), solver=name)
    assert "finite" in str(caught.value) or "stiff" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"solver": "rk5"}, ", ".join([*SOLVERS, *ADAPTIVE])),
        ({"num_steps": 0}, "at least 1"),
        ({"save_at": [0.5, 0.2]}, "increasing"),
        ({"save_at": [0.5, 1.2]}, "within"),
        ({"save_at": []}, "non-empty"),
    ],
)
def test_bad_arguments_say_what_must_hold(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(Logistic(), X0, **arguments)


def test_a_new_scheme_is_one_function(monkeypatch):
    @register_solver(order=3, F=3, G=3)
    def ralston3(field, x, h):
        """Ralston's third-order method."""
        k1 = field(x)
        k2 = field(x + h / 2 * k1)
        k3 = field(x + 3 * h / 4 * k2)
        return x + h * (2 * k1 + 3 * k2 + 4 * k3) / 9

    try:
        field, steps = Logistic(), [16, 32, 64]
        errors = [
            float((solve(field, X0, num_steps=k, solver="ralston3").xs[-1] - field.exact(X0, 1)).norm()) for k in steps
        ]
        assert observed_order(errors, steps) == pytest.approx(3, abs=0.1)
        assert tiny_model()(tiny_images(), solver="ralston3").logits.shape == (3, 5)
    finally:
        del SOLVERS["ralston3"]
