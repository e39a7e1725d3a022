"""When and how a student meets its teacher: meeting times along [0, T], the solver steps that stand for them, and the
student's path held against the teacher's states, unrolled from the image or one leg at a time (collocation).

Shapes: b batch, D teacher blocks, M patches, E extra tokens of the teacher, R registers of the student, d width.
A student's tokens are [CLS | M patches | R registers], a teacher's [CLS | M patches | E extras].
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import SOLVERS, Grid
from odevit.registry import Registry

PLACEMENTS: Registry[Callable[[Tensor, float | None], Tensor]] = Registry("placement")


def register_placement(rule: Callable[[Tensor, float | None], Tensor]) -> Callable[[Tensor, float | None], Tensor]:
    PLACEMENTS[rule.__name__] = rule
    return rule


@register_placement
def distance(distances: Tensor, temperature: float | None) -> Tensor:
    """Share of the time per layer: softmax(d / τ), τ = 3 · mean(d) unless given, so that it is free of scale."""
    tau = 3 * distances.mean() if temperature is None else temperature
    return torch.softmax(distances / tau, dim=0)


@register_placement
def uniform(distances: Tensor, temperature: float | None) -> Tensor:
    """The same share for every layer."""
    return torch.full_like(distances, 1 / len(distances))


def meeting_times(
    distances: Tensor, *, horizon: float = 1.0, placement: str = "distance", temperature: float | None = None
) -> list[float]:
    """Times t_1 < … < t_D = T from the mean distances that the teacher's CLS token travels in each of its D layers."""
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}; choose one of {', '.join(PLACEMENTS)}")
    if not bool(torch.isfinite(distances).all()) or bool((distances < 0).any()) or not bool(distances.any()):
        raise ValueError(f"distances must be finite, not negative and not all zero, got {distances.tolist()}")
    times = horizon * PLACEMENTS[placement](distances.double(), temperature).cumsum(0)
    result = [*times[:-1].tolist(), float(horizon)]
    if any(before >= after for before, after in pairwise([0.0, *result])):
        raise ValueError(
            f"meeting times must increase, got {result}: temperature {temperature} is too small for distances of "
            f"{distances.mean():.3g} on average; raise it, or leave it out"
        )
    return result


def steps_per_layer(times: Sequence[float], grid: Grid) -> list[int]:
    """Apportion the K ≥ D steps of a grid to the D layers by largest remainders, at least one step each.

    A layer's quota is the steps that the grid makes between its times, parts of steps included.
    """
    layers, num_steps = len(times), grid.num_steps
    if num_steps < layers:
        raise ValueError(f"{layers} layers need at least {layers} steps to have one each, got {num_steps}")
    knots = grid.times()
    marks = np.interp([0.0, *_on(grid, times)], knots, range(num_steps + 1)).tolist()  # times counted in steps
    quotas = [end - start for start, end in pairwise(marks)]
    seats = [max(1, int(quota)) for quota in quotas]
    while sum(seats) < num_steps:
        hungriest = max(range(layers), key=lambda layer: quotas[layer] - seats[layer])
        seats[hungriest] += 1
    while sum(seats) > num_steps:
        richest = max((layer for layer in range(layers) if seats[layer] > 1), key=lambda i: seats[i] - quotas[i])
        seats[richest] -= 1
    return seats


def _on(grid: Grid, times: Sequence[float]) -> list[float]:
    """Times that end where the grid ends."""
    return [grid.horizon * time / times[-1] for time in times]


def match_steps(times: Sequence[float], grid: Grid) -> list[tuple[int, int]]:
    """Pairs (layer, step), both 1-based and strictly increasing, ending with (D, K).

    With K ≥ D steps every layer has its pair. With fewer, every step is paired with the layer nearest in time. Steps
    of a grid with several phases are not of one size: their times are the grid's.
    """
    layers, num_steps = len(times), grid.num_steps
    if num_steps >= layers:
        return list(enumerate(accumulate(steps_per_layer(times, grid)), start=1))
    pairs, previous, times = [], 0, _on(grid, times)
    for step, goal in enumerate(grid.times()[1:], start=1):
        latest = layers - (num_steps - step)  # leave a layer for each step to come
        previous = min(range(previous + 1, latest + 1), key=lambda layer: abs(times[layer - 1] - goal))
        pairs.append((previous, step))
    return pairs  # the last step is at the horizon, where the last layer is


def token_groups(num_patches: int) -> list[slice]:
    """CLS, patches, and what stands behind them: registers or the teacher's extra tokens."""
    return [slice(0, 1), slice(1, 1 + num_patches), slice(1 + num_patches, None)]


def unroll(
    model: OdeViTForImageClassification,
    images: Tensor,
    states: list[Tensor],
    num_steps: int,
    pairs: list[tuple[int, int]],
    forced: float = 0.0,
    solver: str | None = None,
) -> tuple[list[Tensor], int]:
    """The student's K + 1 states (b, n, d), and evaluations per image.

    After a step that meets a layer (pairs: layer, step) each sample goes on from the teacher's tokens instead of its
    own with probability `forced`; the path keeps its own.
    """
    x = model.odevit.embed(images)
    if not forced:
        solution = model.odevit.evolve(x, num_steps, solver, save_at="steps")
        return list(solution.xs.unbind(0)), max(solution.evaluations)
    solver = solver or model.config.solver
    model.odevit.check_setting(solver, num_steps)
    scheme, grid = SOLVERS[solver], model.config.time_grid(num_steps)
    layer_at, path = {step: layer for layer, step in pairs}, [x]
    with parametrize.cached():  # capped matrices are computed once, not at every step
        for step, (phase, h) in enumerate(grid.steps(), start=1):
            x = scheme.step(model.odevit.fields[phase], x, h)
            path.append(x)
            if step in layer_at:
                taken = torch.rand(len(x), 1, 1, device=x.device) < forced
                x = torch.where(taken, with_teacher_tokens(x, states[layer_at[step]], model.config.num_patches), x)
    return path, num_steps * max(scheme.evaluations)


def with_teacher_tokens(x: Tensor, state: Tensor, num_patches: int) -> Tensor:
    """x (b, 1 + M + R, d) with the teacher's CLS and patches, and its E extra tokens when E = R."""
    count = state.shape[1] if state.shape == x.shape else min(state.shape[1], 1 + num_patches)
    return torch.cat([state[:, :count], x[:, count:]], dim=1)


class Leg(NamedTuple):
    """From one met layer to the next, or the part of that way that one field is in charge of."""

    before: int  # layers, from 0
    after: int
    dt: float  # time between the two layers
    begin: float  # where the part begins, as a share of the way
    share: float  # of the time between the two layers
    phase: int


def collocation_legs(times: Sequence[float], grid: Grid) -> list[Leg]:
    """The legs between met layers, split where another field takes over."""
    knots, phases, legs = grid.times(), [phase for phase, _ in grid.steps()], []
    for (before, first), (after, last) in pairwise([(0, 0), *match_steps(times, grid)]):
        dt = knots[last] - knots[first]
        for phase, steps in groupby(range(first, last), key=phases.__getitem__):
            inside = list(steps)
            start, end = knots[inside[0]], knots[inside[-1] + 1]
            legs.append(Leg(before, after, dt, (start - knots[first]) / dt, (end - start) / dt, phase))
    return legs


def collocation_loss(
    model: OdeViTForImageClassification, states: list[Tensor], weights: Tensor, num_steps: int
) -> Tensor:
    """One evaluation per image: from a layer chosen at random, does h + Δt ψ(h) meet the next layer's state?

    states: D + 1 of (b, 1 + M + E, d); weights (D, 1 + M + E). Layers, Δt and the field in charge are those of the
    student's own grid at `num_steps`, so that the unrolled stage goes on with the velocities learnt here. On a leg that
    several fields share, each is asked for the whole leg's velocity where its part of the straight way begins, and
    counts by the time of its part. An unbiased estimate of Σ_l w_l ‖error‖², summed over the width, with CLS, patches
    and (when E = R > 0) registers each a mean over their tokens. Otherwise registers take their initial value: the
    teacher says nothing about them.
    """
    config, base, batch = model.config, model.odevit, states[0].shape[0]
    legs = collocation_legs(config.meeting_times, model.config.time_grid(num_steps))
    chosen = [legs[i] for i in torch.randint(len(legs), (batch,)).tolist()]
    before = torch.stack([states[leg.before][i] for i, leg in enumerate(chosen)])
    after = torch.stack([states[leg.after][i] for i, leg in enumerate(chosen)])
    dt, begin, share = before.new_tensor([[leg.dt, leg.begin, leg.share] for leg in chosen]).T[:, :, None, None]
    weight = weights[[leg.after - 1 for leg in chosen]] * share[..., 0]  # (b, 1 + M + E)
    in_charge = torch.tensor([leg.phase for leg in chosen], device=before.device)

    start = before + begin * (after - before)
    fresh = torch.cat([start[:, : 1 + config.num_patches], base.registers.expand(batch, -1, -1)], dim=1)
    x = with_teacher_tokens(fresh, start, config.num_patches)  # (b, 1 + M + R, d)
    velocity = torch.zeros_like(x)
    for phase, vector_field in enumerate(base.fields):
        mine = (in_charge == phase).nonzero()[:, 0]
        if len(mine):
            velocity = velocity.index_copy(0, mine, vector_field(x[mine]).to(velocity.dtype))
    shared = after.shape[1] if after.shape == x.shape else 1 + config.num_patches
    moved = before[:, :shared] + dt * velocity[:, :shared]
    error = weight[:, :shared] * (moved - after[:, :shared]).square().sum(dim=-1)  # (b, shared)
    groups = [error[:, tokens] for tokens in token_groups(config.num_patches)]
    return torch.stack([group.mean() for group in groups if group.shape[1]]).sum() * len(legs)
