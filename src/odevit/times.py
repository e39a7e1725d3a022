"""Checkpoint times: when along [0, T] a student should meet each layer of its teacher, and at which solver step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PLACEMENTS: dict[str, Callable[[Tensor, float | None], Tensor]] = {}


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


def checkpoint_times(
    distances: Tensor, *, horizon: float = 1.0, placement: str = "distance", temperature: float | None = None
) -> list[float]:
    """Times t_1 < … < t_D = T from the mean distances that the teacher's CLS token travels in each of its D layers."""
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}; choose one of {', '.join(PLACEMENTS)}")
    if not bool(torch.isfinite(distances).all()) or bool((distances < 0).any()) or not bool(distances.any()):
        raise ValueError(f"distances must be finite, not negative and not all zero, got {distances.tolist()}")
    times = horizon * PLACEMENTS[placement](distances.double(), temperature).cumsum(0)
    return [*times[:-1].tolist(), float(horizon)]


def steps_per_layer(times: Sequence[float], num_steps: int) -> list[int]:
    """Apportion num_steps ≥ D steps to the D layers by largest remainders, at least one step each."""
    layers = len(times)
    if num_steps < layers:
        raise ValueError(f"{layers} layers need at least {layers} steps to have one each, got {num_steps}")
    starts = [0.0, *times[:-1]]
    quotas = [(end - start) / times[-1] * num_steps for start, end in zip(starts, times, strict=True)]
    seats = [max(1, int(quota)) for quota in quotas]
    while sum(seats) < num_steps:
        hungriest = max(range(layers), key=lambda layer: quotas[layer] - seats[layer])
        seats[hungriest] += 1
    while sum(seats) > num_steps:
        richest = max((layer for layer in range(layers) if seats[layer] > 1), key=lambda i: seats[i] - quotas[i])
        seats[richest] -= 1
    return seats


def match_steps(times: Sequence[float], num_steps: int) -> list[tuple[int, int]]:
    """Pairs (layer, step), both 1-based and strictly increasing, ending with (D, K).

    With K ≥ D steps every layer has its pair. With fewer, every step is paired with the layer nearest in time.
    """
    layers = len(times)
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if num_steps >= layers:
        step, pairs = 0, []
        for layer, count in enumerate(steps_per_layer(times, num_steps), start=1):
            step += count
            pairs.append((layer, step))
        return pairs
    pairs, previous = [], 0
    for step in range(1, num_steps + 1):
        latest = layers - (num_steps - step)  # leave a layer for each step to come
        goal = times[-1] * step / num_steps
        previous = min(range(previous + 1, latest + 1), key=lambda layer: abs(times[layer - 1] - goal))
        pairs.append((previous, step))
    pairs[-1] = (layers, num_steps)
    return pairs
