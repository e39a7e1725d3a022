"""The search for the cheapest setting: costs against a count, choices against brute force."""

import pytest
import torch
from problems import contractive_model, tiny_images, tiny_model

from odevit.dynamics.cost import count_macs
from odevit.dynamics.setting import Setting, affordable_settings, cheapest, try_settings


@pytest.mark.slow
def test_costs_are_those_of_a_count_and_no_setting_is_dearer_than_the_models_own():
    model = tiny_model(num_steps=5, num_fields=2)
    found = affordable_settings(model)
    own = count_macs(model).total
    tried = {solver for solver, *_ in found}
    assert tried >= {"euler", "lie_trotter", "heun", "midpoint"}
    assert not tried & {"strang", "rk4"}  # two fields need two steps, which are more than 5 evaluations of theirs
    assert ("euler", 5, own) in found
    dearest = {solver: (steps, macs) for solver, steps, macs in found}  # sorted by cost, so the last ones stay
    for solver, (steps, macs) in dearest.items():
        assert macs == count_macs(model, solver=solver, num_steps=steps).total <= own
        assert count_macs(model, solver=solver, num_steps=steps + 1).total > own


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "depth"), [(1, 4.0), (2, 8.0), (3, 4.0)])
def test_settings_of_a_contractive_model_are_those_that_never_expand(fields, depth):
    model = contractive_model(num_fields=fields, depth=depth, num_steps=12)
    found = affordable_settings(model)
    assert {solver for solver, _, _ in found} >= {"euler", "lie_trotter"}
    for solver, steps, macs in found:
        assert steps >= model.config.least_steps(solver)
        assert macs == count_macs(model, solver=solver, num_steps=steps).total <= count_macs(model).total


def test_accuracies_are_the_models():
    model, images = tiny_model(num_steps=4), tiny_images(12)
    with torch.no_grad():
        labels = model(images, solver="midpoint", num_steps=2).logits.argmax(1)
    tried = {(s.solver, s.num_steps): s for s in try_settings(model, images, labels, batch_size=5)}
    assert tried["midpoint", 2].accuracy == 1
    for (solver, steps), setting in tried.items():
        right = model(images, solver=solver, num_steps=steps).logits.argmax(1) == labels
        assert setting.accuracy == right.double().mean()


def test_the_cheapest_within_alpha_of_the_best():
    tried = [
        Setting("euler", 1, 10, 0.5),
        Setting("euler", 2, 20, 0.90),
        Setting("heun", 1, 20, 0.895),
        Setting("euler", 3, 30, 0.91),
    ]
    assert cheapest(tried, 0.0) == tried[3]
    assert cheapest(tried, 0.01) == tried[1]
    assert cheapest(tried, 0.02) == tried[1]  # of the two at 20 the better one
    assert cheapest(tried, 0.5) == tried[0]


@pytest.mark.slow
def test_settings_that_blow_up_are_left_out():
    model, images = tiny_model(num_steps=3), tiny_images(2)
    with torch.no_grad():
        model.odevit.fields[0].mlp.w2.weight.mul_(1e13)
    tried = {(s.solver, s.num_steps) for s in try_settings(model, images, torch.zeros(2))}
    assert ("euler", 1) in tried
    assert ("euler", 3) not in tried
