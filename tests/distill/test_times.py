import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit.distill.meeting import PLACEMENTS, match_steps, meeting_times, steps_per_layer

distances = st.lists(st.floats(0.01, 100), min_size=1, max_size=24).map(torch.tensor)


@pytest.mark.parametrize("placement", PLACEMENTS)
@given(distances=distances, horizon=st.floats(0.1, 10))
@settings(max_examples=100, deadline=None)
def test_times_increase_strictly_and_end_at_the_horizon(placement, distances, horizon):
    times = meeting_times(distances, horizon=horizon, placement=placement)
    assert times[-1] == horizon
    assert all(a < b for a, b in zip([0.0, *times], times, strict=False))


@given(distances=distances, num_steps=st.integers(1, 120), placement=st.sampled_from(sorted(PLACEMENTS)))
@settings(max_examples=400, deadline=None)
def test_matched_steps_are_strictly_increasing_for_any_depth_and_step_count(distances, num_steps, placement):
    pairs = match_steps(meeting_times(distances, placement=placement), num_steps)
    layers, steps = zip(*pairs, strict=True)
    assert all(a < b for a, b in itertools.pairwise(layers))
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert pairs[-1] == (len(distances), num_steps)
    assert len(pairs) == min(len(distances), num_steps)
    assert layers[0] >= 1
    assert steps[0] >= 1


@given(distances=distances, extra=st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_apportionment_stays_within_one_step_of_the_quota_unless_the_minimum_binds(distances, extra):
    num_steps = len(distances) + extra
    times = meeting_times(distances)
    quotas = [num_steps * (b - a) for a, b in zip([0.0, *times], times, strict=False)]
    seats = steps_per_layer(times, num_steps)
    assert sum(seats) == num_steps
    assert min(seats) >= 1
    if min(quotas) >= 1:
        assert all(abs(s - q) < 1 + 1e-9 for s, q in zip(seats, quotas, strict=True))


def test_distance_placement_matches_the_formula_and_ignores_scale():
    d = torch.tensor([1.0, 2.0, 3.0])
    shares = torch.softmax(d / 6.0, dim=0)  # τ = 3 · mean = 6
    assert meeting_times(d, horizon=2.0) == pytest.approx((2 * shares.cumsum(0)).tolist())
    assert meeting_times(1000 * d) == pytest.approx(meeting_times(d))


def test_uniform_times_at_k_equal_d_are_one_step_a_layer():
    times = meeting_times(torch.rand(12) + 0.1, placement="uniform")
    assert match_steps(times, 12) == [(i, i) for i in range(1, 13)]
    assert match_steps(times, 24) == [(i, 2 * i) for i in range(1, 13)]
    assert match_steps(times, 4) == [(3, 1), (6, 2), (9, 3), (12, 4)]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="distance, uniform"):
        meeting_times(torch.ones(3), placement="random")
    with pytest.raises(ValueError, match="not all zero"):
        meeting_times(torch.zeros(3))
    with pytest.raises(ValueError, match="at least 1"):
        match_steps([0.5, 1.0], 0)
    with pytest.raises(ValueError, match="at least 2 steps"):
        steps_per_layer([0.5, 1.0], 1)
