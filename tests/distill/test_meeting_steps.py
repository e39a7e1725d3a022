"""Meeting a teacher's states: teacher forcing, tokens that line up, and collocation, in closed form."""

import pytest
import torch
from test_losses import tiny_student

from odevit.distill.meeting import (
    collocation_legs,
    collocation_loss,
    match_steps,
    meeting_times,
    unroll,
    with_teacher_tokens,
)
from odevit.model.solvers import Grid


def uniform_times(depth):
    return meeting_times(torch.ones(depth), placement="uniform")


# --- teacher forcing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_fields", [1, 2])
def test_forcing_every_sample_starts_every_leg_at_the_teacher(num_fields):
    model = tiny_student(num_fields=num_fields, num_steps=6)
    images, states = torch.randn(2, 1, 8, 8), [torch.randn(2, 5, 16) for _ in range(4)]
    pairs = match_steps(uniform_times(3), Grid(6))
    assert pairs == [(1, 2), (2, 4), (3, 6)]
    path, evaluations = unroll(model, images, states, 6, pairs, forced=1.0)
    assert evaluations == 6
    field_of = [model.odevit.fields[0]] * 3 + [model.odevit.fields[-1]] * 3
    for layer, step in pairs[:-1]:
        start = torch.cat([states[layer], path[step][:, 5:]], dim=1)  # registers go on as they are
        expected = start + field_of[step](start) / 6
        torch.testing.assert_close(path[step + 1], expected)
        assert not torch.allclose(path[step], start)  # compared before it is replaced
    free, _ = unroll(model, images, states, 6, pairs, forced=0.0)
    assert len(free) == len(path) == 7
    torch.testing.assert_close(free[:3], path[:3])
    assert not torch.allclose(free[3], path[3])


def test_forcing_draws_per_sample():
    """400 times the same image and 400 different teachers: who is not forced stays with the others."""
    model, images = tiny_student(num_steps=2), torch.randn(1, 1, 8, 8).expand(400, -1, -1, -1)
    torch.manual_seed(0)
    path, _ = unroll(model, images, [torch.randn(400, 5, 16) for _ in range(4)], 2, [(1, 1), (3, 2)], forced=0.3)
    free, _ = unroll(model, images[:1], [], 2, [])
    unforced = torch.isclose(path[2], free[2], atol=1e-4).all(dim=(1, 2))
    assert 0.62 < float(unforced.float().mean()) < 0.78  # 3.5 standard deviations around 0.7


@pytest.mark.parametrize("forced", [0.0, 0.5])
def test_too_few_steps_of_a_contractive_student_are_refused(forced):
    model = tiny_student(field="contractive", depth=6, num_steps=6)
    images, states = torch.randn(2, 1, 8, 8), [torch.randn(2, 5, 16) for _ in range(4)]
    with pytest.raises(ValueError, match="steps"):
        unroll(model, images, states, 2, [], forced=forced)


def test_teacher_tokens_line_up():
    x, state = torch.zeros(1, 7, 2), torch.arange(1.0, 15).view(1, 7, 2)
    assert torch.equal(with_teacher_tokens(x, state, num_patches=4), state)  # 2 extras, 2 registers
    for extras, replaced in ((1, 5), (0, 5), (-4, 1)):  # as many extras as registers, or none; -4: only CLS is cached
        mixed = with_teacher_tokens(x, state[:, : 5 + extras], num_patches=4)
        assert mixed.shape == x.shape
        assert torch.equal(mixed[:, :replaced], state[:, :replaced])
        assert not mixed[:, replaced:].any()
    assert torch.equal(with_teacher_tokens(x[:, :5], state, num_patches=4), state[:, :5])  # R = 0


# --- collocation ------------------------------------------------------------------------------------------------------


def own_path(model, images, legs):
    """States of a "teacher" that makes one Euler step of the student's own field per layer."""
    x = model.odevit.embed(images)
    states, fields = [x], model.odevit.fields
    for leg in range(legs):
        field = fields[leg * len(fields) // legs]
        x = x + field(x) / legs
        states.append(x)
    return [state.detach() for state in states]


@pytest.mark.parametrize(("num_fields", "registers", "num_steps"), [(1, 0, 4), (2, 0, 4), (2, 2, 8), (4, 0, 4)])
def test_collocation_is_zero_for_the_students_own_flow(num_fields, registers, num_steps):
    model = tiny_student(num_fields=num_fields, num_registers=registers, num_steps=num_steps, depth=4).double()
    model.config.meeting_times = uniform_times(4)
    states = own_path(model, torch.randn(16, 1, 8, 8, dtype=torch.double), 4)
    weights = torch.ones(4, states[0].shape[1], dtype=torch.double)
    assert float(collocation_loss(model, states, weights, num_steps).detach()) < 1e-10
    states[-1] = states[-1] + 1
    assert float(collocation_loss(model, states, weights, num_steps).detach()) > 1


def test_collocation_in_closed_form_and_its_gradient():
    """One layer leaves nothing to chance: CLS and patches, each a mean over its tokens, weighted."""
    model = tiny_student(num_steps=1)
    model.config.meeting_times = [1.0]
    start, end = torch.randn(3, 6, 16), torch.randn(3, 6, 16)  # E = 1, R = 2: extras say nothing about registers
    weights = torch.tensor([[2.0, 3, 3, 3, 3, 100]])
    loss = collocation_loss(model, [start, end], weights, 1)
    x = torch.cat([start[:, :5], model.odevit.registers.expand(3, -1, -1)], dim=1)
    squared = (x + model.odevit.fields[0](x))[:, :5].sub(end[:, :5]).square().sum(-1)
    torch.testing.assert_close(loss, 2 * squared[:, 0].mean() + 3 * squared[:, 1:].mean())
    loss.backward()
    for name, parameter in model.odevit.fields.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name
    assert model.odevit.registers.grad.any()  # they are attended to


def test_collocation_estimates_the_sum_over_layers_with_one_evaluation_an_image():
    model = tiny_student(num_fields=2, num_registers=0, num_steps=3)
    model.config.meeting_times = [0.2, 0.4, 1.0]
    states, weights = [torch.randn(2000, 5, 16) for _ in range(4)], torch.rand(3, 5)
    seen = []
    for field in model.odevit.fields:
        field.register_forward_pre_hook(lambda field, args: seen.append(len(args[0])))
    with torch.no_grad():
        loss = float(collocation_loss(model, states, weights, 3))
        assert sum(seen) == 2000
        expected = 0.0
        # three steps in two phases: 1/4, 1/4, 1/2 of the time
        for layer, (phase, dt) in enumerate(((0, 0.25), (0, 0.25), (1, 0.5))):
            moved = states[layer] + dt * model.odevit.fields[phase](states[layer])
            squared = weights[layer] * (moved - states[layer + 1]).square().sum(-1)
            expected += float(squared[:, 0].mean() + squared[:, 1:].mean())
    assert loss == pytest.approx(expected, rel=0.05)


def test_legs_are_split_where_another_field_takes_over():
    """Two layers, three fields of one step each: the first leg, 2/3 of the time, is shared by two fields."""
    legs = collocation_legs(uniform_times(2), Grid(3, 1.5, phases=3))
    expected = [(0, 1, 1.0, 0.0, 0.5, 0), (0, 1, 1.0, 0.5, 0.5, 1), (1, 2, 0.5, 0.0, 1.0, 2)]
    assert [tuple(leg) for leg in legs] == [pytest.approx(leg) for leg in expected]


@pytest.mark.parametrize(("fields", "num_steps", "depth"), [(3, 3, 2), (2, 2, 1), (4, 6, 3), (3, 7, 4), (3, 4, 12)])
def test_collocation_trains_every_field(fields, num_steps, depth):
    legs = collocation_legs(uniform_times(depth), Grid(num_steps, phases=fields))
    assert {leg.phase for leg in legs} == set(range(fields))
    by_layer = {}
    for leg in legs:
        by_layer[leg.after] = by_layer.get(leg.after, 0) + leg.share
    assert list(by_layer.values()) == pytest.approx([1] * min(depth, num_steps))
    torch.manual_seed(0)
    model = tiny_student(num_fields=fields, num_steps=num_steps)
    model.config.meeting_times = uniform_times(depth)
    states = [torch.randn(64, 5, 16) for _ in range(depth + 1)]
    collocation_loss(model, states, torch.ones(depth, 5), num_steps).backward()
    for field in model.odevit.fields:
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in field.parameters())


def test_a_shared_leg_in_closed_form():
    """Each field answers for the leg's velocity, where its part of the straight way begins, by its part of the time."""
    model = tiny_student(num_fields=2, num_registers=0, num_steps=3).double()
    model.config.meeting_times = [1.0]
    start, end = torch.randn(2, 1, 5, 16, dtype=torch.double).expand(-1, 4000, -1, -1)
    torch.manual_seed(0)
    with torch.no_grad():
        loss = float(collocation_loss(model, [start, end], torch.ones(1, 5).double(), 3))
        expected = 0.0
        for field, x in zip(model.odevit.fields, (start[:1], (start[:1] + end[:1]) / 2), strict=True):
            squared = (field(x) - (end - start)[:1]).square().sum(-1)
            expected += float(squared[:, 0].mean() + squared[:, 1:].mean()) / 2
    assert loss == pytest.approx(expected, rel=0.02)


def test_collocation_with_fewer_steps_than_layers_skips_layers():
    model = tiny_student(num_registers=0, num_steps=2, depth=4).double()
    model.config.meeting_times = uniform_times(4)
    inner = own_path(model, torch.randn(4, 1, 8, 8, dtype=torch.double), 2)
    junk = torch.full_like(inner[0], 1e6)
    states = [inner[0], junk, inner[1], junk, inner[2]]
    assert float(collocation_loss(model, states, torch.ones(4, 5).double(), 2).detach()) < 1e-10
