"""A trained model as one map of states: tokens in, the state at the horizon out, by the model's own integrator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from odevit.dynamics.lanczos import Map, center
from odevit.model.solvers import SOLVERS

FIXED_STEP_FALLBACK = "rk4"  # stands in for an adaptive solver, whose steps are not one differentiable map
BLIND = 1e-3  # a constant that changes a state by less than this share of itself is not seen; rounding is far below


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode within the context; afterwards every module has its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and capped weights computed once, for a while."""
    with eval_mode(model), torch.no_grad(), parametrize.cached():
        yield


def fixed_step_solver(name: str) -> str:
    """The solver whose steps can be differentiated as one map: itself, or rk4 in place of an adaptive one."""
    return name if name in SOLVERS else FIXED_STEP_FALLBACK


def flow_map(model: Any, num_steps: int | None = None, solver: str | None = None) -> Map:
    """Tokens (b, n, d) ↦ state at the horizon (b, n, d), with the model's own steps and solver unless given."""
    name = fixed_step_solver(solver or model.config.solver)

    def flow(tokens: Tensor) -> Tensor:
        return model.odevit.evolve(tokens, num_steps, name).xs[-1]

    return flow


def blind_to_constants(flow: Map, read: Callable[[Tensor], Tensor] | None, tokens: Tensor) -> bool:
    """Do flow and read-out ignore a constant added to a token? Asked of the functions themselves, at one state.

    Where every norm subtracts the token's mean (CenterNorm, LayerNorm), the constant passes through the flow unchanged
    and the head never sees it: Φ 1 = 1. Dynamics then live on the quotient, P Φ P with P = I - 11ᵀ/d per token. A field
    without norms moves constants, a head without a norm reads them: there the whole space counts.
    """
    tokens = tokens[:1]
    shift = torch.linspace(1, 2, tokens.shape[1], dtype=tokens.dtype, device=tokens.device)[None, :, None]
    shift = shift * tokens.std()
    end, moved = flow(tokens), flow(tokens + shift)
    gap = center(moved - end).norm() <= BLIND * center(end).norm()
    if read is None or not bool(gap):
        return bool(gap)
    answer = read(end)
    return bool((read(moved) - answer).norm() <= BLIND * answer.norm())
