"""Bounds of what is left of the path, against the path; the certified rule never changes an answer."""

import math

import pytest
import torch
from problems import tiny_images, tiny_model
from torch import nn

from odevit.dynamics.arrival import Certified, arrival_bound, displacement_bound, lipschitz_on_ball
from odevit.model.field import VectorField
from odevit.model.halting import Moment
from odevit.model.solvers import Grid, euler


@pytest.mark.parametrize("mu", [-2.0, -1e-9, 0.0, 1e-9, 1.5])
def test_arrival_bound_is_attained_by_the_scalar_field(mu):
    """x' = μx: |x(T) - x(t)| = |μx| (e^{μτ} - 1)/μ exactly."""
    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    exact = (x * math.expm1(mu * 0.7)).abs()
    torch.testing.assert_close(arrival_bound((mu * x).abs(), 0.7, mu), exact)


def test_arrival_bound_holds_for_linear_flows():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        a = torch.randn(5, 5, generator=generator, dtype=torch.float64)
        x, left = (
            torch.randn(5, generator=generator, dtype=torch.float64),
            float(torch.rand((), generator=generator)) * 2,
        )
        mu = torch.linalg.eigvalsh((a + a.mT) / 2)[-1]
        moved = (torch.linalg.matrix_exp(left * a) @ x - x).norm()
        assert moved <= arrival_bound((a @ x).norm(), left, mu) * (1 + 1e-9)


def test_displacement_bound_holds_for_linear_steps_and_is_attained():
    generator = torch.Generator().manual_seed(1)
    for attained in (False, True):
        matrix = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        matrix = 1.3 * torch.eye(4, dtype=torch.float64) if attained else matrix
        states = [torch.randn(4, generator=generator, dtype=torch.float64)]
        for _ in range(6):
            states.append(matrix @ states[-1])
        growth = torch.linalg.matrix_norm(matrix, ord=2)
        for k in range(1, 6):
            bound = displacement_bound((states[k] - states[k - 1]).norm(), 6 - k, growth)
            moved = (states[6] - states[k]).norm()
            assert moved <= bound * (1 + 1e-12)
            assert not attained or moved == pytest.approx(bound.item())


@pytest.mark.parametrize("norm", ["center", "layer"])
@pytest.mark.parametrize("attention", ["softmax", "l2"])
def test_lipschitz_on_ball_against_search(norm, attention):
    """No pair of points in the ball is further apart behind the field than the bound allows."""
    torch.manual_seed(0)
    field = VectorField(8, 2, hidden=16, scale=1.7, norm=norm, attention=attention, registers=1).double().eval()
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    for radius in (0.05, 1.0):
        bound = lipschitz_on_ball(field, x)(torch.full((6,), radius, dtype=torch.float64))
        for _ in range(50):
            ends = []
            for _ in range(2):
                offset = torch.randn_like(x)
                ends.append(x + radius * torch.rand(()) * offset / offset.flatten(1).norm(dim=1)[:, None, None])
            with torch.no_grad():
                grown = (field(ends[0]) - field(ends[1])).flatten(1).norm(dim=1)
            assert (grown <= bound * (ends[0] - ends[1]).flatten(1).norm(dim=1) * (1 + 1e-9)).all()


@pytest.mark.slow
def test_certified_rule_never_changes_an_answer_and_fires_on_calm_flows():
    fired = 0
    for seed in range(12):
        options = dict(norm=("center", "layer")[seed % 2], attention=("softmax", "l2")[seed // 2 % 2])
        options |= dict(
            pool=("cls", "mean", "flatten")[seed // 4 % 3], final_norm=("none", "layer", "center")[seed % 3]
        )
        depth = (0.01, 0.03, 0.1)[seed // 4]
        model = tiny_model(seed, depth=depth, num_steps=5, num_fields=1 + seed % 2, **options)
        images = tiny_images(16, seed=seed)
        full = model(images).logits
        with torch.no_grad():  # margins of all sizes around zero
            model.classifier.bias -= full.mean(dim=0) * (model.config.pool == "mean")
            full = model(images).logits
            halted = model(images, halting=Certified(model))
        assert torch.equal(halted.logits.argmax(1), full.argmax(1))
        fired += int((halted.steps < 5).sum())
        if model.config.num_fields == 2:
            assert halted.steps.min() > 3  # not before the last field
    assert fired > 20


def test_certified_rule_does_not_fire_at_a_tie():
    model = tiny_model(depth=0.001, num_steps=4, pool="mean", final_norm="none")
    grid, images, rule = Grid(4), tiny_images(6), Certified(model)
    with torch.no_grad():
        x = model.odevit.embed(images)
        y = euler(model.odevit.fields[0], x, 0.25)
        logits = model.classify(y)
        assert rule(Moment(1, grid, "euler", x, y, logits, logits)).all()
        assert not rule(Moment(1, grid, "euler", x, y, logits, torch.zeros_like(logits))).any()
        faster = Moment(
            1, grid, "euler", x - 1000 * (y - x), y, logits, logits
        )  # the same place, reached by a longer step
        assert not rule(faster).any()


def test_what_cannot_be_certified():
    with pytest.raises(ValueError, match="Euler"):
        Certified(tiny_model(solver="rk4"))
    with pytest.raises(ValueError, match="learned weighting"):
        Certified(tiny_model(pool="sequence"))
    model = tiny_model()
    with pytest.raises(ValueError, match="Euler"):
        model(tiny_images(1), halting=Certified(model), solver="rk4")
    model.classifier = nn.Sequential(model.classifier)
    with pytest.raises(ValueError, match="linear head"):
        Certified(model)
