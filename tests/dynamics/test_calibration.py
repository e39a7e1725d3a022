"""Calibrated halting: p-values and testing against other libraries, and the guarantee over random splits."""

import math

import pytest
import torch
from problems import tiny_images, tiny_model

from odevit.checksum import checksum
from odevit.dynamics.calibration import (
    Record,
    calibrate,
    calibrate_model,
    disagreements,
    fixed_sequence,
    images_needed,
    p_value,
    record,
    stopping_steps,
)
from odevit.model.halting import SCORES, SHARES


@pytest.mark.slow
def test_p_values_are_binomial_tails():
    from scipy.stats import binom

    for n, alpha in ((1, 0.3), (7, 0.5), (299, 0.01), (5000, 0.02)):
        for k in {0, 1, 2, 5, n // 2, n - 1, n}:
            if k <= n:
                assert p_value(k, n, alpha) == pytest.approx(binom.cdf(k, n, alpha), rel=1e-9, abs=1e-300)


@pytest.mark.slow
def test_fixed_sequence_is_mapies():
    fwer = pytest.importorskip("mapie.risk_control")
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        p = torch.rand(int(torch.randint(1, 9, (), generator=generator)), generator=generator).pow(4).double().numpy()
        kept = fwer.control_fwer(p, 0.05, fwer_method="fixed_sequence")
        assert list(range(fixed_sequence(p, 0.05))) == list(kept)


def test_least_number_of_images():
    assert images_needed(0.01, 0.05) == 299
    for alpha, delta in ((0.01, 0.05), (0.05, 0.05), (0.5, 0.25), (0.9, 0.5), (0.001, 0.1)):
        n = images_needed(alpha, delta)
        assert p_value(0, n, alpha) <= delta
        assert n == 1 or p_value(0, n - 1, alpha) > delta
    sure = Record(torch.zeros(2, 298), torch.ones(2, 298))
    with pytest.raises(ValueError, match="needs at least 299 images, even if none of them disagrees; got 298"):
        calibrate(sure, SHARES, 0.01, 0.05)
    assert calibrate(Record(torch.zeros(2, 299), torch.ones(2, 299)), SHARES, 0.01, 0.05).mean_steps == 1


@pytest.mark.parametrize(("alpha", "delta"), [(0, 0.05), (1, 0.05), (-1, 0.05), (0.01, 0), (0.01, 1), (math.nan, 0.5)])
def test_risks_outside_the_unit_interval(alpha, delta):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        images_needed(alpha, delta)


def synthetic(n, seed, steps=6, wrong=0.3):
    """Images that settle at a random step; before it the answer is wrong with some probability and the score low."""
    generator = torch.Generator().manual_seed(seed)
    settled = torch.randint(1, steps + 1, (n,), generator=generator)
    step = torch.arange(1, steps + 1)[:, None]
    errs = (torch.rand(steps, n, generator=generator) < wrong) & (step < settled)
    scores = torch.sigmoid(2 * (step - settled) + 2 * torch.randn(steps, n, generator=generator) + 2)
    return Record(errs.long(), scores.double())


def test_brute_force_of_stopping():
    recorded = synthetic(50, 0)
    for threshold in (0.2, 0.7, 0.99, 2.0):
        steps, wrong = stopping_steps(recorded.scores, threshold), disagreements(recorded, threshold)
        for i in range(50):
            first = next((k for k in range(6) if recorded.scores[k, i] >= threshold), 5)
            assert steps[i] == first + 1
            assert wrong[i] == (recorded.answers[first, i] != recorded.answers[5, i])


@pytest.mark.slow
def test_guarantee_holds_where_it_binds():
    """100 calibration sets from one distribution: the true risk exceeds α in at most δ of them, and nearly uses it."""
    population, alpha, delta, thresholds = synthetic(20_000, 1), 0.05, 0.1, SHARES[::5]
    chosen = [calibrate(synthetic(300, 10 + seed), thresholds, alpha, delta).threshold for seed in range(100)]
    risks = {t: float(disagreements(population, t).double().mean()) for t in set(chosen)}
    exceeded = sum(risks[t] > alpha for t in chosen)
    assert exceeded <= 100 * delta + 2 * math.sqrt(100 * delta * (1 - delta))
    assert sum(risks[t] for t in chosen) / 100 > alpha / 3  # not by never stopping


def test_no_threshold_is_safe():
    restless = Record(torch.tensor([[1] * 400, [0] * 400]), torch.ones(2, 400))
    with pytest.raises(ValueError, match=r"400 of 400\. Try another score"):
        calibrate(restless, SHARES)


@pytest.mark.parametrize("score", list(SCORES))
def test_thresholds_run_from_safe_to_bold(score):
    thresholds = SCORES[score].thresholds
    assert thresholds == sorted(thresholds, reverse=True)
    model, images = tiny_model(num_steps=5), tiny_images(40)
    recorded = record(model, images, score, batch_size=16)
    steps = [stopping_steps(recorded.scores, t).double().mean().item() for t in thresholds]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == 5
    assert recorded.scores.shape == recorded.answers.shape == (5, 40)


def test_a_model_in_training_is_calibrated_as_it_answers_and_left_as_it_was():
    model, images = tiny_model(dropout=0.5, tokenizer="conv"), tiny_images(20)
    before, expected = {name: value.clone() for name, value in model.state_dict().items()}, record(model, images)
    found = record(model.train(), images)
    assert torch.equal(found.scores, expected.scores)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_config_keeps():
    model, images = tiny_model(depth=0.01), tiny_images(60)  # hardly moves: every answer is there after one step
    kept = calibrate_model(model, images, alpha=0.05, delta=0.05)
    assert kept["checksum"] == checksum(model)
    assert (kept["images"], kept["disagreements"], kept["score"], kept["num_steps"]) == (60, 0, "margin", 4)
    with pytest.raises(ValueError, match="needs at least 299 images"):
        calibrate_model(model, images)
    with pytest.raises(ValueError, match="choose one of margin"):
        calibrate_model(model, images, score="luck")
