"""Halting: the same answers as step by step, images really leave the batch, and what cannot be halted says so."""

import pytest
import torch
from problems import tiny_images, tiny_model

from odevit import OdeViTModel
from odevit.checksum import checksum
from odevit.dynamics.calibration import record, stopping_steps
from odevit.model.halting import SCORES, Threshold, saved_rule
from odevit.model.solvers import SOLVERS


def spread_model(**options):
    """A tiny model whose images arrive at different steps."""
    model = tiny_model(depth=12, num_steps=6, final_norm="layer", **options)
    with torch.no_grad():
        model.classifier.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def middle(values):
    return float(values.flatten().median())


@pytest.mark.slow
@pytest.mark.parametrize("score", list(SCORES))
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_answers_are_those_of_the_step_at_which_it_stopped(score, solver):
    model, images = spread_model(num_fields=2), tiny_images(24)
    model.config.solver = solver
    with torch.no_grad():
        states = model(images, output_hidden_states=True).hidden_states
        by_step = torch.stack([model.classify(state) for state in states])  # (K + 1, b, C)
        recorded = record(model, images, score)
        threshold = middle(recorded.scores[:-1])
        halted = model(images, halting=Threshold(score, threshold))
    expected = stopping_steps(recorded.scores, threshold)
    assert torch.equal(halted.steps, expected)
    assert len(set(expected.tolist())) > 1  # or the test would show little
    torch.testing.assert_close(halted.logits, by_step[expected, torch.arange(24)], rtol=1e-4, atol=1e-5)
    most = int(expected.max()) * SOLVERS[solver].evaluations.F
    assert halted.evaluations == (most, most)


def test_finished_images_leave_the_batch(monkeypatch):
    model, images, sizes = spread_model(), tiny_images(24), []
    recorded = record(model, images)
    threshold = middle(recorded.scores[:-1])
    steps = stopping_steps(recorded.scores, threshold)
    field = model.odevit.fields[0]
    field.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    model(images, halting=Threshold("margin", threshold))
    assert sizes == [int((steps >= k).sum()) for k in range(1, int(steps.max()) + 1)]
    assert sum(sizes) < 24 * 6


def test_extreme_thresholds_and_sizes():
    model, images = spread_model(), tiny_images(5)
    assert model(images, halting=Threshold("margin", -1.0)).steps.tolist() == [1] * 5
    never = model(images, halting=Threshold("margin", float("inf")), labels=torch.zeros(5, dtype=torch.long))
    full = model(images, labels=torch.zeros(5, dtype=torch.long))
    assert never.steps.tolist() == [6] * 5
    torch.testing.assert_close(never.logits, full.logits)
    torch.testing.assert_close(never.loss, full.loss)
    few = model(images, halting=Threshold("margin", float("inf")), num_steps=2, solver="rk4")
    torch.testing.assert_close(few.logits, model(images, num_steps=2, solver="rk4").logits)
    assert model(images[:0], halting=Threshold("margin", 0.5)).logits.shape == (0, 5)
    capped = spread_model(spectral_cap=0.5)
    torch.testing.assert_close(capped(images, halting=lambda m: m.logits[:, 0] > 1e9).logits, capped(images).logits)


def test_what_cannot_be_halted_says_so():
    model, images, rule = spread_model(), tiny_images(2), Threshold("margin", 0.5)
    with pytest.raises(ValueError, match="OdeViTForImageClassification"):
        OdeViTModel(model.config)(images, halting=rule)
    with pytest.raises(ValueError, match="dopri5 chooses its own"):
        model(images, halting=rule, solver="dopri5")
    with pytest.raises(ValueError, match="output_hidden_states"):
        model(images, halting=rule, output_hidden_states=True)
    with pytest.raises(ValueError, match=r"model\.eval"):
        spread_model().train()(images, halting=rule)
    with pytest.raises(ValueError, match="choose one of margin"):
        Threshold("luck", 0.5)
    with torch.no_grad():
        model.odevit.fields[0].mlp.w1.weight.fill_(torch.inf)
    with pytest.raises(ArithmeticError, match="not finite"):
        model(images, halting=rule)


def test_a_single_class_has_no_margin():
    with pytest.raises(ValueError, match="no runner-up"):
        tiny_model(num_labels=1)(tiny_images(2), halting=Threshold("margin", 0.5))


def test_a_saved_rule_belongs_to_its_model(tmp_path):
    model, images = spread_model(), tiny_images(8)
    with pytest.raises(ValueError, match="odevit calibrate"):
        model(images, halting="calibrated")
    rule = {"score": "margin", "threshold": 0.1, "solver": "euler", "num_steps": 6, "checksum": checksum(model)}
    model.config.halting = rule
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert saved_rule(loaded) == Threshold("margin", 0.1)
    own = model(images, halting=Threshold("margin", 0.1))
    assert torch.equal(loaded(images, halting="calibrated").steps, own.steps)
    loaded.config.num_steps = 7
    with pytest.raises(ValueError, match="calibrated for 6 steps of euler, now 7 of euler"):
        saved_rule(loaded)
    loaded.config.num_steps = 6
    assert torch.equal(loaded(images, halting="calibrated", num_steps=6, solver="euler").steps, own.steps)
    for other in ({"num_steps": 48}, {"solver": "midpoint"}):  # nothing was proven of these
        with pytest.raises(ValueError, match="calibrated for 6 steps of euler, now"):
            loaded(images, halting="calibrated", **other)
    with torch.no_grad():
        loaded.classifier.bias += 1e-3
    with pytest.raises(ValueError, match="calibrated for other weights"):
        loaded(images, halting="calibrated")
    loaded.config.halting = {"score": "margin"}
    with pytest.raises(ValueError, match="lacks threshold, solver"):
        saved_rule(loaded)
