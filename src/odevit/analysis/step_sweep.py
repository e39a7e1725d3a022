"""The same weights with other step counts and solvers: what each setting costs, answers and how exact it is.

Costs are counted in evaluations of the field: (F + G) / 2.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odevit.model.errors import NonFiniteStateError
from odevit.model.solvers import SOLVERS

STEP_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100)
REFERENCE = ("rk4", 64)  # 256 evaluations: stands for the exact flow
ORDER_STEP_COUNTS = (8, 16, 32, 64)  # per field; doubling, so that two neighbours give a slope

Setting = tuple[str, int]  # solver, K'


@dataclass
class Point:
    """One setting on N images. A setting whose state became infinite has `diverged` and nothing else."""

    solver: str
    num_steps: int
    evaluations: float
    diverged: bool = False
    accuracy: float = math.nan
    agreement: float = math.nan  # with the training setting
    error: float = math.nan  # mean ‖X_T - X_ref‖ / ‖X_ref‖
    right: Tensor | None = None  # (N,)

    def values(self) -> dict[str, Any]:
        names = ("solver", "num_steps", "evaluations", "accuracy", "agreement", "error")
        return {name: getattr(self, name) for name in names if not (self.diverged and name in names[3:])}


def evaluations(solver: str, num_steps: int) -> float:
    """Evaluations of the field: an F and a G together are one."""
    per_step = SOLVERS[solver].evaluations
    return num_steps * (per_step.F + per_step.G) / 2


def settings_within(
    num_fields: int, step_counts: Sequence[int], solvers: Sequence[str] | None, max_evaluations: float
) -> list[Setting]:
    """Every solver × K' that gives each field a step and costs no more than `max_evaluations`."""
    unknown = [name for name in solvers or () if name not in SOLVERS]
    if unknown:
        raise ValueError(f"unknown solver {', '.join(map(repr, unknown))}; choose from {', '.join(SOLVERS)}")
    chosen = [
        (solver, count)
        for solver in solvers or SOLVERS
        for count in sorted(set(step_counts))
        if count >= num_fields and evaluations(solver, count) <= max_evaluations
    ]
    if not chosen:
        raise ValueError(
            f"no setting is left: with {num_fields} field(s), K' must be at least {num_fields} and cost at most "
            f"{max_evaluations} evaluations, got K' in {list(step_counts)}"
        )
    return chosen


@torch.no_grad()
def sweep(
    model: Any,
    images: Tensor,
    labels: Tensor,
    settings: Sequence[Setting],
    *,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Setting, Point]:
    """Run every setting, the training setting and REFERENCE (each once) on images (N, c, H, W) with labels (N,)."""
    training = (model.config.solver, model.config.num_steps)
    everything = list(dict.fromkeys([training, REFERENCE, *settings]))
    columns: dict[Setting, list[tuple[Tensor, Tensor, Tensor]]] = {setting: [] for setting in everything}
    cost: dict[Setting, float] = {}
    diverged: set[Setting] = set()
    total, done = len(everything) * math.ceil(len(images) / batch_size), 0

    def last_state(tokens: Tensor, setting: Setting) -> Tensor | None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)
        try:
            solution = model.odevit.evolve(tokens, setting[1], setting[0])
        except NonFiniteStateError:
            diverged.add(setting)
            return None
        cost[setting] = sum(solution.evaluations) / 2
        return solution.xs[-1]

    for start in range(0, len(images), batch_size):
        tokens, answers = model.odevit.embed(images[start : start + batch_size]), labels[start : start + batch_size]
        compared = {setting: last_state(tokens, setting) for setting in dict.fromkeys([training, REFERENCE])}
        for setting in everything:
            state = compared[setting] if setting in compared else last_state(tokens, setting)
            if state is not None:
                columns[setting].append(_measure(model, state, compared[REFERENCE], compared[training], answers))
    return {
        setting: Point(*setting, cost.get(setting, math.nan), diverged=True)
        if setting in diverged
        else _point(setting, cost[setting], columns[setting])
        for setting in everything
    }


def _measure(
    model: Any, state: Tensor, exact: Tensor | None, trained: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Right (b,), same answer as the training setting (b,), relative error (b,); NaN where there is no comparison."""
    answers = model.classify(state).argmax(dim=1)
    nothing = torch.full(answers.shape, math.nan, dtype=torch.float64, device=answers.device)
    same = nothing if trained is None else (answers == model.classify(trained).argmax(dim=1)).double()
    if exact is None:
        return answers == labels, same, nothing
    size = exact.flatten(1).double().norm(dim=1)
    return answers == labels, same, (state - exact).flatten(1).double().norm(dim=1) / size


def _point(setting: Setting, cost: float, columns: list[tuple[Tensor, Tensor, Tensor]]) -> Point:
    right, same, error = (torch.cat(column).cpu() for column in zip(*columns, strict=True))
    means = right.double().mean().item(), same.mean().item(), error.mean().item()
    return Point(*setting, cost, False, *means, right)


def fit_order(step_counts: Sequence[int], errors: Sequence[float]) -> float | None:
    """Minus the slope of log error over log K on the three finest usable points; None with fewer than two.

    Usable are errors below 0.25 (above, the expansion in h says nothing) and above 1e-12 (below, float64 rounds).
    """
    usable = [(k, e) for k, e in sorted(zip(step_counts, errors, strict=True)) if 1e-12 < e < 0.25]
    return None if len(usable) < 2 else -log_slope(*zip(*usable[-3:], strict=True))


def log_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of log y over log x, by least squares."""
    points = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True)]
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


@torch.no_grad()
def observed_orders(
    model: Any, images: Tensor, solvers: Sequence[str] | None = None, step_counts: Sequence[int] = ORDER_STEP_COUNTS
) -> dict[str, dict[str, Any]]:
    """Per solver: step_counts, errors (mean relative, against rk4 with twice the most steps) and order.

    Measured with a copy of the model in float64 on the CPU, because float32 rounds before rk4's order can be seen.
    step_counts are per field, so that every field gets equal steps.
    """
    exact = copy.deepcopy(model).to("cpu", torch.float64).eval()
    tokens = exact.odevit.embed(images.to("cpu", torch.float64))
    every = [count * model.config.num_fields for count in step_counts]
    reference = exact.odevit.evolve(tokens, 2 * max(every), "rk4").xs[-1].flatten(1)
    result = {}
    for solver in solvers or SOLVERS:
        errors = []
        counts = [count for count in every if count >= model.config.least_steps(solver)]
        if len(counts) < 2:
            continue
        for count in counts:
            try:
                state = exact.odevit.evolve(tokens, count, solver).xs[-1].flatten(1)
                errors.append(((state - reference).norm(dim=1) / reference.norm(dim=1)).mean().item())
            except NonFiniteStateError:
                errors.append(math.inf)
        result[solver] = {"step_counts": counts, "errors": errors, "order": fit_order(counts, errors)}
    return result
