"""Finite-time Lyapunov exponents: how fast do nearby states drift apart along the flow?

k tangents travel with the state through the model's own integrator (tangents of the step maps, not of the exact flow)
and are orthonormalised as whole tangents, all tokens together, every `qr_every` steps (Benettin et al. 1980):

    λ_i = (1 / total time) Σ log |R_ii|

Renormalising one token only, as some code does, measures something else: the other tokens keep growing and feed it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from odevit.dynamics.tangents import JetField, orthonormalise, push
from odevit.model.solvers import SOLVERS, Grid, NonFiniteStateError

JetMap = Callable[[Tensor], Tensor]  # (1 + k, b, …) -> (1 + k, b, …)
FIXED_STEP_FALLBACK = "rk4"  # stands in for an adaptive solver, whose steps are not one differentiable map


def lyapunov_spectrum(
    step_maps: Iterable[Callable[[Tensor], Tensor]],
    x0: Tensor,
    k: int = 1,
    *,
    total_time: float,
    qr_every: int = 1,
    frame: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Top k exponents of the composition of `step_maps` at each x0 (b, …): (b, k), largest first.

    Each map takes and returns a batch of states and must treat its samples independently.
    total_time: what the sum of log growths is divided by (time of a flow, number of layers of a network).
    frame: initial tangents (k, …) or (k, b, …); by default random, the same for every sample, so that the result does
        not depend on how samples are batched. Exponents over a short time depend on it, over a long time they do not.
    """
    maps = (partial(push, step) for step in step_maps)
    return jet_spectrum(maps, x0, k, total_time=total_time, qr_every=qr_every, frame=frame, seed=seed)


@torch.no_grad()
def jet_spectrum(
    maps: Iterable[JetMap],
    x0: Tensor,
    k: int = 1,
    *,
    total_time: float,
    qr_every: int = 1,
    frame: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """`lyapunov_spectrum` for maps that push their own tangents: (1 + k, b, …) -> (1 + k, b, …), the state first."""
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
    for step, advance in enumerate(maps, start=1):
        jet = advance(jet)
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


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and capped weights computed once, for a while."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), parametrize.cached():
            yield
    finally:
        model.train(training)


def fixed_step_solver(name: str) -> str:
    """The solver whose steps carry the tangents: itself, or rk4 in place of an adaptive one."""
    return name if name in SOLVERS else FIXED_STEP_FALLBACK


def model_exponents(
    model: Any,
    images: Tensor,
    k: int = 1,
    num_steps: int | None = None,
    solver: str | None = None,
    *,
    qr_every: int = 1,
    batch_size: int = 64,
    seed: int = 0,
) -> Tensor:
    """Top k finite-time exponents of the model's flow for each image (b, c, H, W): (b, k), per unit of depth.

    With the model's own steps and solver unless given (rk4 in place of an adaptive solver); the total time is s·T = D,
    so an exponent is the mean log growth per emulated layer. Memory is that of one batch, however many there are.
    """
    config, fields = model.config, [JetField(field) for field in model.odevit.fields]
    step = SOLVERS[fixed_step_solver(solver or config.solver)].step
    grid = Grid(num_steps or config.num_steps, float(config.horizon), len(fields))
    results = []
    with _evaluating(model):
        for batch in images.split(batch_size):
            maps = (partial(_jet_step, step, fields[phase], h) for phase, h in grid.steps())
            tokens, depth = model.odevit.embed(batch), float(config.depth)
            results.append(jet_spectrum(maps, tokens, k, total_time=depth, qr_every=qr_every, seed=seed))
    return torch.cat(results)


def _jet_step(step: Callable[[Any, Tensor, float], Tensor], field: JetField, h: float, jet: Tensor) -> Tensor:
    return step(field, jet, h)


def teacher_exponents(
    teacher: Any, images: Tensor, k: int = 1, *, qr_every: int = 1, batch_size: int = 16, seed: int = 0
) -> Tensor:
    """Top k exponents of a discrete ViT for each image: (b, k), per layer. Its blocks are the step maps of the flow."""
    results = []
    with torch.no_grad():
        for batch in images.split(batch_size):
            maps = (partial(teacher.block, layer) for layer in range(teacher.depth))
            tokens = teacher.trace(batch).states[0]
            results.append(lyapunov_spectrum(maps, tokens, k, total_time=teacher.depth, qr_every=qr_every, seed=seed))
    return torch.cat(results)
