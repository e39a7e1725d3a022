import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit.distill.meeting import PLACEMENTS, match_steps, meeting_times, steps_per_layer
from odevit.model.solvers import Grid

distances = st.lists(st.floats(0.01, 100), min_size=1, max_size=24).map(torch.tensor)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@given(distances=distances, horizon=st.floats(0.1, 10))
@settings(max_examples=100, deadline=None)
def test_times_increase_strictly_and_end_at_the_horizon(placement, distances, horizon):
    times = meeting_times(distances, horizon=horizon, placement=placement)
    assert times[-1] == horizon
    assert all(a < b for a, b in zip([0.0, *times], times, strict=False))


@pytest.mark.slow
@given(
    distances=distances,
    num_steps=st.integers(1, 120),
    placement=st.sampled_from(sorted(PLACEMENTS)),
    phases=st.integers(1, 5),
)
@settings(max_examples=400, deadline=None)
def test_matched_steps_are_strictly_increasing_for_any_grid(distances, num_steps, placement, phases):
    grid = Grid(num_steps, phases=min(phases, num_steps))
    pairs = match_steps(meeting_times(distances, placement=placement), grid)
    layers, steps = zip(*pairs, strict=True)
    assert all(a < b for a, b in itertools.pairwise(layers))
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert pairs[-1] == (len(distances), num_steps)
    assert len(pairs) == min(len(distances), num_steps)
    assert layers[0] >= 1
    assert steps[0] >= 1


@pytest.mark.slow
@given(distances=distances, extra=st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_apportionment_stays_within_one_step_of_the_quota_unless_the_minimum_binds(distances, extra):
    num_steps = len(distances) + extra
    times = meeting_times(distances)
    quotas = [num_steps * (b - a) for a, b in zip([0.0, *times], times, strict=False)]
    seats = steps_per_layer(times, Grid(num_steps))
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
    assert match_steps(times, Grid(12)) == [(i, i) for i in range(1, 13)]
    assert match_steps(times, Grid(24)) == [(i, 2 * i) for i in range(1, 13)]
    assert match_steps(times, Grid(4)) == [(3, 1), (6, 2), (9, 3), (12, 4)]


def test_unequal_steps_meet_layers_at_their_own_times():
    """Three fields and four steps: two of 1/6, then 1/3 and 1/3."""
    times = meeting_times(torch.ones(12), horizon=2.0, placement="uniform")
    grid = Grid(4, 2.0, phases=3)
    assert match_steps(times, grid) == [(2, 1), (4, 2), (8, 3), (12, 4)]
    for layer, step in match_steps(times, grid):
        assert times[layer - 1] == pytest.approx(grid.times()[step])
    # seven steps, three in the first third: the layers of [1/3, 1] have two thirds of the time and four steps
    assert match_steps([1 / 3, 2 / 3, 1.0], Grid(7, phases=3)) == [(1, 3), (2, 5), (3, 7)]
    assert match_steps([2 / 9, 1.0], Grid(7, phases=3)) == [(1, 2), (2, 7)]


@pytest.mark.slow
@given(distances=distances, num_steps=st.integers(1, 60), phases=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_fewer_steps_than_layers_meet_the_nearest_free_layer(distances, num_steps, phases):
    grid = Grid(min(num_steps, len(distances)), phases=min(phases, num_steps, len(distances)))
    times = meeting_times(distances)
    pairs = match_steps(times, grid)
    if grid.num_steps < len(times):
        knots, used = grid.times(), {layer for layer, _ in pairs}
        for index, (layer, step) in enumerate(pairs[:-1]):
            low = pairs[index - 1][0] if index else 0
            free = [other for other in range(low + 1, len(times) + 1 - (grid.num_steps - step)) if other not in used]
            assert all(abs(times[layer - 1] - knots[step]) <= abs(times[o - 1] - knots[step]) + 1e-12 for o in free)


def test_a_short_layer_has_its_step_all_the_same():
    assert steps_per_layer([0.05, 0.1, 1.0], Grid(3)) == [1, 1, 1]
    assert steps_per_layer([0.05, 0.1, 1.0], Grid(10)) == [1, 1, 8]


def test_every_step_to_come_is_left_a_layer():
    """The last layer is nearest to step 2, but belongs to step 3."""
    assert match_steps([0.05, 0.1, 0.15, 1.0], Grid(3)) == [(2, 1), (3, 2), (4, 3)]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="distance, uniform"):
        meeting_times(torch.ones(3), placement="random")
    with pytest.raises(ValueError, match="not all zero"):
        meeting_times(torch.zeros(3))
    with pytest.raises(ValueError, match="at least 2 steps"):
        steps_per_layer([0.5, 1.0], Grid(1))


def test_a_temperature_that_leaves_layers_no_time_is_refused():
    """It gave [0, 0, 1]: three meetings at two times."""
    with pytest.raises(ValueError, match=r"must increase.*temperature 0\.1 is too small"):
        meeting_times(torch.tensor([10.0, 20.0, 90.0]), temperature=0.1)
