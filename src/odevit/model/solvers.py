"""Integrators for dX/dt = F(X) + G(X): one step function per scheme, and `solve`.

A fixed-step scheme is a function `(field, x, h) -> x` registered with its order and its evaluations of F and of G per
step. To add one, write that function with a docstring: `solve`, the model, the CLI and the contract tests
(observed order, evaluation counts, gradients, export) pick it up from `SOLVERS`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_in_backward

from odevit.model.errors import NonFiniteStateError, SolverError
from odevit.registry import Registry


class Field(Protocol):
    """An autonomous right-hand side in two parts: F(x), G(x), and their sum when called."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def F(self, x: Tensor) -> Tensor: ...
    def G(self, x: Tensor) -> Tensor: ...


class Evaluations(NamedTuple):
    """How often F and G were evaluated. An evaluation of the whole field counts once for each."""

    F: int
    G: int


class Solution(NamedTuple):
    """States `xs` (m, *x.shape) at times `ts` (m,), and what they cost."""

    xs: Tensor
    ts: Tensor
    evaluations: Evaluations


Step = Callable[[Any, Tensor, float], Tensor]


class Solver(NamedTuple):
    step: Step
    order: int
    evaluations: Evaluations  # per step


SOLVERS: Registry[Solver] = Registry("solver")
ADAPTIVE = {"dopri5": 5, "adaptive_heun": 2}  # torchdiffeq's names, and their orders


def register_solver(*, order: int, F: int, G: int) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        SOLVERS[step.__name__] = Solver(step, order, Evaluations(F, G))
        return step

    return register


def solver_names() -> list[str]:
    return [*SOLVERS, *ADAPTIVE]


def given(num_steps: int | None, solver: str | None) -> dict[str, Any]:
    """Keyword arguments of a model's forward pass: its own setting, but for what is given."""
    return {name: value for name, value in (("num_steps", num_steps), ("solver", solver)) if value is not None}


def check_solver(name: str) -> None:
    if name not in SOLVERS and name not in ADAPTIVE:
        raise ValueError(f"unknown solver {name!r}; choose one of {', '.join(solver_names())}")


# --- the schemes ------------------------------------------------------------------------------------------------------


@register_solver(order=1, F=1, G=1)
def euler(field: Field, x: Tensor, h: float) -> Tensor:
    """x + h f(x). Order 1. K steps are a K-layer weight-tied ViT with parallel blocks. The paper's runs use it."""
    return x + h * field(x)


@register_solver(order=1, F=1, G=1)
def lie_trotter(field: Field, x: Tensor, h: float) -> Tensor:
    """Φ_G^h ∘ Φ_F^h with Euler subflows: MLP, then attention. Order 1 (Trotter 1959). The paper's theory uses it."""
    x = x + h * field.F(x)
    return x + h * field.G(x)


def _heun(f: Callable[[Tensor], Tensor], x: Tensor, h: float) -> Tensor:
    k1 = f(x)
    k2 = f(x + h * k1)
    return x + (h / 2) * (k1 + k2)


@register_solver(order=2, F=4, G=2)
def strang(field: Field, x: Tensor, h: float) -> Tensor:
    """Φ_F^{h/2} ∘ Φ_G^h ∘ Φ_F^{h/2} with Heun subflows. Order 2 (Strang 1968); Euler subflows would leave it at 1."""
    x = _heun(field.F, x, h / 2)
    x = _heun(field.G, x, h)
    return _heun(field.F, x, h / 2)


@register_solver(order=2, F=2, G=2)
def heun(field: Field, x: Tensor, h: float) -> Tensor:
    """Explicit trapezoid. Order 2 (Heun 1900)."""
    return _heun(field, x, h)


@register_solver(order=2, F=2, G=2)
def midpoint(field: Field, x: Tensor, h: float) -> Tensor:
    """Explicit midpoint. Order 2 (Runge 1895)."""
    return x + h * field(x + (h / 2) * field(x))


@register_solver(order=4, F=4, G=4)
def rk4(field: Field, x: Tensor, h: float) -> Tensor:
    """The classical Runge-Kutta method. Order 4 (Kutta 1901)."""
    k1 = field(x)
    k2 = field(x + (h / 2) * k1)
    k3 = field(x + (h / 2) * k2)
    k4 = field(x + h * k3)
    return x + (h / 6) * (k1 + 2 * k2 + 2 * k3 + k4)


# --- integration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """`num_steps` steps over [0, horizon] in `phases` equal phases; each phase is divided evenly into its steps."""

    num_steps: int
    horizon: float = 1.0
    phases: int = 1

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if self.num_steps < self.phases:
            raise ValueError(f"{self.phases} fields need at least one step each, got num_steps={self.num_steps}")

    def steps(self) -> Iterator[tuple[int, float]]:
        """(phase, step size) of every step."""
        length = self.horizon / self.phases
        for phase in range(self.phases):
            count = self.num_steps // self.phases + (phase < self.num_steps % self.phases)
            for _ in range(count):
                yield phase, length / count

    def times(self) -> list[float]:
        """The num_steps + 1 times of the states, from 0 to the horizon."""
        times, length = [0.0], self.horizon / self.phases
        for phase in range(self.phases):
            count = self.num_steps // self.phases + (phase < self.num_steps % self.phases)
            times += [phase * length + length * (i + 1) / count for i in range(count)]
        return [*times[:-1], float(self.horizon)]


def solve(
    fields: Field | Sequence[Field],
    x: Tensor,
    *,
    num_steps: int = 12,
    solver: str = "euler",
    horizon: float = 1.0,
    save_at: Literal["end", "steps"] | Sequence[float] = "end",
    until: float | None = None,
    recompute: bool | Literal["segments"] = False,
    check_finite: bool = True,
    rtol: float = 1e-4,
    atol: float = 1e-4,
) -> Solution:
    """Integrate from x at t = 0 to t = horizon.

    fields: one field, or k fields, one for each k-th of [0, horizon].
    save_at: "end" (the last state), "steps" (all num_steps + 1 states) or times. A time between two steps is read off
        the cubic Hermite interpolant, which costs two evaluations of the field, both counted.
    until: stop at the first step that reaches this time; the grid stays that of the whole interval. None: its end.
    recompute: run each step again in the backward pass instead of keeping its intermediates: K states are held. With
        "segments" only every √K-th is, for a third evaluation of each step (Chen et al., 2016).
    check_finite: raise NonFiniteStateError naming the step (off inside compiled and exported graphs).
    rtol, atol: for the adaptive solvers only, which choose their own steps and ignore num_steps.
    """
    check_solver(solver)
    parts: Sequence[Any] = fields if isinstance(fields, Sequence) else [fields]
    end = horizon if until is None else _check_times([until], horizon)[0]
    times = None if isinstance(save_at, str) else _check_times(save_at, end)
    if solver in ADAPTIVE:
        if times is None:
            steps = [t for t in Grid(num_steps, horizon, len(parts)).times() if t < end]
            times = [end] if save_at == "end" else [*steps, end]
        return _solve_adaptive(parts, x, times, horizon, end, solver, rtol, atol)

    grid = Grid(num_steps, horizon, len(parts))
    knots = grid.times()
    taken = next(i for i, t in enumerate(knots) if t >= end * (1 - 1e-9))
    step, _, cost = SOLVERS[solver]
    keep_all = save_at != "end"
    start, states = x, [x]
    planned = list(islice(grid.steps(), taken))

    def advance(x: Tensor, some: Sequence[tuple[int, float]]) -> tuple[Tensor, ...]:
        passed: list[Tensor] = []
        for phase, h in some:
            if recompute:
                x = recompute_in_backward(step, parts[phase], x, h, use_reentrant=False)
            else:
                x = step(parts[phase], x, h)
            passed = [*passed, x] if keep_all else [x]
        return tuple(passed)

    length = math.ceil(math.sqrt(len(planned))) if recompute == "segments" and planned else max(1, len(planned))
    for first in range(0, len(planned), length):
        some = planned[first : first + length]
        if recompute == "segments":
            passed = recompute_in_backward(advance, x, some, use_reentrant=False)
        else:
            passed = advance(x, some)
        x = passed[-1]
        states = [*states, *passed] if keep_all else [x]
    readable = not torch.compiler.is_compiling() and not x.is_meta
    if check_finite and readable and not bool(torch.isfinite(x).all()):
        raise _first_non_finite(parts, start, grid, step)

    count_F, count_G = taken * cost.F, taken * cost.G
    if times is None:
        times = knots[: taken + 1] if keep_all else [knots[taken]]
    else:
        states, extra = _read_off(states, parts, grid, times)
        count_F, count_G = count_F + extra, count_G + extra
    return Solution(torch.stack(states), torch.tensor(times, dtype=torch.float64), Evaluations(count_F, count_G))


def _check_times(times: Sequence[float], horizon: float) -> list[float]:
    result = [float(t) for t in times]
    if not result or sorted(result) != result or not 0 <= result[0] <= result[-1] <= horizon * (1 + 1e-9):
        raise ValueError(f"save_at and until must be non-empty, increasing and within [0, {horizon}], got {result}")
    return result


def _read_off(states: list[Tensor], parts: Sequence[Any], grid: Grid, times: list[float]) -> tuple[list[Tensor], int]:
    """States at arbitrary times: steps as they are, others by cubic Hermite interpolation. Also the evaluations."""
    knots, phases = grid.times(), [phase for phase, _ in grid.steps()]
    result, evaluations = [], 0
    for t in times:
        i = min(range(len(knots)), key=lambda j: abs(knots[j] - t))
        if math.isclose(knots[i], t, abs_tol=1e-9 * grid.horizon):
            result.append(states[i])
            continue
        i = i if knots[i] < t else i - 1
        h, field, (x0, x1) = knots[i + 1] - knots[i], parts[phases[i]], states[i : i + 2]
        u = (t - knots[i]) / h
        slopes = (u**3 - 2 * u**2 + u) * h * field(x0) + (u**3 - u**2) * h * field(x1)
        result.append((2 * u**3 - 3 * u**2 + 1) * x0 + (3 * u**2 - 2 * u**3) * x1 + slopes)
        evaluations += 2
    return result, evaluations


@torch.no_grad()
def _first_non_finite(parts: Sequence[Any], x: Tensor, grid: Grid, step: Step) -> NonFiniteStateError:
    """Integrate again, looking at every state: only on failure, so that the usual path never waits for a check."""
    times = grid.times()
    if not bool(torch.isfinite(x).all()):
        return NonFiniteStateError(0, 0.0)
    for i, (phase, h) in enumerate(grid.steps(), start=1):
        x = step(parts[phase], x, h)
        if not bool(torch.isfinite(x).all()):
            return NonFiniteStateError(i, times[i])
    return NonFiniteStateError(grid.num_steps, grid.horizon)  # dropout drew other masks this time


def _largest_rms(x: Tensor) -> Tensor:
    """Error norm of the adaptive solvers: the worst sample's RMS, so a batch is as accurate as each of its images."""
    return x.flatten(1).square().mean(dim=1).sqrt().max() if x.ndim > 1 else x.square().mean().sqrt()


def _solve_adaptive(
    parts: Sequence[Any], x: Tensor, times: list[float], horizon: float, end: float, method: str, rtol: float,
    atol: float,
) -> Solution:  # fmt: skip
    try:
        from torchdiffeq import odeint
    except ImportError as error:  # the model's code may run without odevit and what it installs, see odevit.export.hub
        raise SolverError(f"{method} needs torchdiffeq: pip install torchdiffeq") from error

    calls, states = 0, []
    for phase, field in enumerate(parts):
        start, stop = horizon * phase / len(parts), min(end, horizon * (phase + 1) / len(parts))
        last = phase == len(parts) - 1 or stop >= end
        wanted = [t for t in times if start <= t and (t < stop or last)]
        if start == stop:  # nothing to integrate
            states += [x] * len(wanted)
            break

        def drift(t: Tensor, state: Tensor, field: Field = field) -> Tensor:
            nonlocal calls
            calls += 1
            if not bool(torch.isfinite(state).all()):
                raise NonFiniteStateError(None, float(t))
            return field(state)

        knots = sorted({start, *(min(t, stop) for t in wanted), stop})
        try:
            path = odeint(
                drift,
                x,
                torch.tensor(knots, dtype=torch.float64, device=x.device),
                method=method,
                rtol=rtol,
                atol=atol,
                options={"norm": _largest_rms},
            )
        except AssertionError as error:  # torchdiffeq's way to say that no step size reaches the tolerance
            raise SolverError(
                f"{method} cannot reach rtol={rtol}, atol={atol} between t = {start:.4g} and {stop:.4g} ({error}): "
                "the field is too stiff here; loosen the tolerances or use a fixed-step solver"
            ) from error
        states += [path[knots.index(min(t, stop))] for t in wanted]
        x = path[-1]
        if last:
            break
    return Solution(torch.stack(states), torch.tensor(times, dtype=torch.float64), Evaluations(calls, calls))
