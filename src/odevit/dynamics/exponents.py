"""Lyapunov exponents: how fast do nearby states drift apart?

Finite-time exponents of a model, `model_exponents` and `teacher_exponents`: λ_i = log σ_i(Φ) / (sT), Φ the Jacobian of
the whole map from tokens to final state, K steps of the model's own integrator. They have a definite value for every
image, found to a residual that is told.

Long-time exponents of a dynamical system, `long_time_exponents`: the limit over many steps, by k tangents that are
orthonormalised every few steps (Benettin et al. 1980). Over the few steps of a network random tangents do not get near
the top direction, and the result depends on their number and seed: so this is not for models.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from odevit.dynamics.flow import blind_to_constants, evaluating, flow_map
from odevit.dynamics.jacobian import check_precision, linearise
from odevit.dynamics.lanczos import Map, largest_singular_values
from odevit.dynamics.tangents import orthonormalise, push
from odevit.model.errors import NonFiniteStateError

PRODUCTS, FEWEST = 40, 10  # with Φ, and as many with Φᵀ, at most: in blocks of k, of which there may be FEWEST anyway
TOLERANCE = 5e-3  # residual of a singular value at which iteration stops; the error is of the order of its square
ELEMENTS = 16_000_000  # numbers a batch may hold: its size times tokens, width and steps, times WORKSPACE
WORKSPACE = 60  # tensors of a state's size that one step leaves in a graph for products with Φ and Φᵀ, about

# --- finite time ------------------------------------------------------------------------------------------------------


class Exponents(NamedTuple):
    """Top k exponents of each image, (b, k) in float64, largest first, per unit of depth; -inf beyond Φ's rank."""

    value: Tensor  # log σ / (sT), from below
    upper: Tensor  # log(σ + residual) / (sT): a true exponent lies between the two


def finite_time_exponents(
    flow: Map, x: Tensor, k: int = 1, *, total_time: float, quotient: bool = False, seed: int = 0
) -> Exponents:
    """λ_i = log σ_i / total_time of the Jacobian of `flow`, which treats samples independently, at each x (b, …).

    quotient: of P Φ P with P = I - 11ᵀ/d per token. It descends to the quotient because Φ maps constants to constants.
    """
    if total_time <= 0:
        raise ValueError(f"total_time must be positive, got {total_time}")
    check_precision(x)
    end, forward, backward = linearise(flow, x)
    if not bool(torch.isfinite(end).all()):
        raise NonFiniteStateError(None, total_time)
    blocks = max(FEWEST, PRODUCTS // k)
    found = largest_singular_values(
        forward, backward, x, k, iterations=blocks, tolerance=TOLERANCE, seed=seed, quotient=quotient
    )
    return Exponents(found.value.log() / total_time, found.upper.log() / total_time)


def _batches(tensor: Tensor, most: int, size: int, steps: int) -> Iterator[Tensor]:
    """Parts of at most `most` images, fewer where the graph of `steps` steps on states of `size` numbers is large."""
    yield from tensor.split(max(1, min(most, ELEMENTS * 4 // (WORKSPACE * size * steps))))


def _joined(parts: list[Exponents]) -> Exponents:
    return Exponents(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def model_exponents(
    model: Any,
    images: Tensor,
    k: int = 1,
    num_steps: int | None = None,
    solver: str | None = None,
    *,
    quotient: bool = False,
    batch_size: int = 64,
    seed: int = 0,
) -> Exponents:
    """Top k finite-time exponents of the model's flow for each image (b, c, H, W): (b, k), per unit of depth.

    With the model's own steps and solver unless given (rk4 in place of an adaptive solver); the total time is s·T = D,
    so an exponent is the mean log growth per emulated layer. Costs some 10 blocks of 2k Jacobian products an image.
    quotient: constants per token do not count (see `sees_quotient`).
    """
    config, flow, parts = model.config, flow_map(model, num_steps, solver), []
    with evaluating(model):
        tokens = model.odevit.embed(images[:1])[0].numel()
        for batch in _batches(images, batch_size, tokens, num_steps or config.num_steps):
            x = model.odevit.embed(batch)
            parts.append(
                finite_time_exponents(flow, x, k, total_time=float(config.depth), quotient=quotient, seed=seed)
            )
    return _joined(parts)


def sees_quotient(model: Any, images: Tensor) -> bool:
    """Does the model ignore constants per token, so that its exponents are those of the quotient?

    True where the field's norms and the head's subtract means; then the exponents of the whole space have a zero for
    every token that says nothing about the model, and the top one is never below 0.
    """
    with evaluating(model):
        return blind_to_constants(flow_map(model), model.classify, model.odevit.embed(images[:1]))


def _blocks(teacher: Any) -> Map:
    def flow(x: Tensor) -> Tensor:
        for layer in range(teacher.depth):
            x = teacher.block(layer, x)
        return x

    return flow


@torch.no_grad()
def teacher_exponents(
    teacher: Any, images: Tensor, k: int = 1, *, quotient: bool = False, batch_size: int = 64, seed: int = 0
) -> Exponents:
    """Top k finite-time exponents of a discrete ViT for each image: (b, k), per layer. Its blocks are the steps."""
    flow, parts = _blocks(teacher), []
    size = (1 + teacher.num_patches + teacher.extra_tokens) * teacher.width
    for batch in _batches(images, batch_size, size, teacher.depth):
        x = teacher.trace(batch).states[0]
        parts.append(finite_time_exponents(flow, x, k, total_time=float(teacher.depth), quotient=quotient, seed=seed))
    return _joined(parts)


@torch.no_grad()
def teacher_sees_quotient(teacher: Any, images: Tensor) -> bool:
    """The same question of a teacher's blocks; its final LayerNorm, which every family has, ignores constants."""
    return blind_to_constants(_blocks(teacher), None, teacher.trace(images[:1]).states[0])


# --- long time --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def long_time_exponents(
    step_maps: Iterable[Map],
    x0: Tensor,
    k: int = 1,
    *,
    total_time: float,
    jets: bool = False,
    qr_every: int = 1,
    frame: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Top k exponents of the composition of many `step_maps` at each x0 (b, …): (b, k), largest first.

    λ_i = (1 / total time) Σ log |R_ii|, tangents orthonormalised as a whole: renormalising a part of the state measures
    something else. Each map takes and returns a batch of states and must treat its samples independently.
    jets: the maps push their own tangents: (1 + k, b, …) -> (1 + k, b, …), the state first.
    frame: initial tangents (k, …) or (k, b, …); by default random, the same for every sample, so that the result does
        not depend on how samples are batched. Exponents over a short time depend on it, over a long time they do not.
    """
    size = math.prod(x0.shape[1:])
    if not 1 <= k <= size:
        raise ValueError(f"k must be between 1 and the number of state variables {size}, got {k}")
    if qr_every < 1 or total_time <= 0:
        raise ValueError(f"qr_every must be ≥ 1 and total_time > 0, got {qr_every} and {total_time}")
    if frame is None:
        generator = torch.Generator().manual_seed(seed)
        frame = torch.randn(k, *x0.shape[1:], generator=generator, dtype=torch.float64)
    if frame.ndim == x0.ndim:
        frame = frame.unsqueeze(1)  # (k, 1, …): the same for every sample
    tangents, _ = orthonormalise(frame.to(x0).expand(k, *x0.shape))
    jet = torch.cat([x0.unsqueeze(0), tangents])  # (1 + k, b, …)
    growth = x0.new_zeros(k, len(x0), dtype=torch.float64)
    step = 0
    for step, advance in enumerate(step_maps, start=1):
        jet = advance(jet) if jets else push(advance, jet)
        if step % qr_every == 0:
            jet, growth = _renormalise(jet, growth)
    if step % qr_every:
        jet, growth = _renormalise(jet, growth)
    if not bool(torch.isfinite(jet).all()):
        raise NonFiniteStateError(step, total_time)
    return (growth / total_time).sort(dim=0, descending=True).values.mT  # (b, k)


def _renormalise(jet: Tensor, growth: Tensor) -> tuple[Tensor, Tensor]:
    tangents, diagonal = orthonormalise(jet[1:])
    return torch.cat([jet[:1], tangents]), growth + diagonal.double().log()
