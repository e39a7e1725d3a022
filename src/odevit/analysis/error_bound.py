"""Approximation error: how far is Euler with N steps from the ODE, and how much of that does theory foresee?

Proposition 1 (Sander, Ablin and Peyré, NeurIPS 2022), for x_{n+1} = x_n + ψ(x_n)/N over unit time, ψ = T·s(F + G):

    ‖x_N - x(1)‖ ≤ (e^L - 1)/(2LN) · sup ‖J_ψ ψ‖

with L the Lipschitz constant of ψ; the log-norm μ may stand in its place (see `jacobian.error_bound`). L and μ ought to
be suprema over a region around the path. Here they are the largest values at states along it, and measured norms are
estimates from below: so these are the proposition's numbers as far as a path shows them, not certificates.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from odevit.analysis import Finding, Study, register_analysis
from odevit.analysis.intervals import number
from odevit.analysis.step_sweep import log_slope
from odevit.dynamics.bounds import field_bound, has_bound
from odevit.dynamics.jacobian import curvature, error_bound, jacobian_norm, log_norm
from odevit.model.solvers import solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = (2, 4, 8, 16, 32)  # N, in multiples of the number of fields
REFINEMENT = 8  # the reference is RK4 with this many times the steps
BEYOND = 1e15  # bounds this many times above the error are told, not drawn
STATES = 5  # where L, μ and the curvature are taken


@torch.no_grad()
def euler_error(fields: Sequence[Any], x: Tensor, num_steps: int, horizon: float) -> Tensor:
    """‖Euler_N - RK4_{8N}‖ at the horizon for each sample of x (b, …): (b,)."""
    euler = solve(fields, x, num_steps=num_steps, solver="euler", horizon=horizon).xs[-1]
    exact = solve(fields, x, num_steps=REFINEMENT * num_steps, solver="rk4", horizon=horizon).xs[-1]
    return (euler - exact).flatten(1).norm(dim=1)


class Rates(NamedTuple):
    """The largest values of ψ = T·field along the path, each (b,)."""

    bound: Tensor | None  # field_bound; None where none is known
    norm: Tensor  # ‖J‖, measured
    log_norm: Tensor  # μ, measured
    curvature: Tensor  # ‖J_ψ ψ‖


def _over_unit_time(field: Any, horizon: float, x: Tensor) -> Tensor:
    return horizon * field(x)


@torch.no_grad()
def path_rates(fields: Sequence[Any], x: Tensor, horizon: float, *, states: int = STATES) -> Rates:
    """L, μ and curvature of ψ = T·field, the largest over `states` states of each field's part of the path."""
    phases = len(fields)
    path = solve(fields, x, num_steps=phases * 4 * (states - 1), solver="rk4", horizon=horizon, save_at="steps").xs
    rows: dict[str, list[Tensor]] = {"bound": [], "norm": [], "log_norm": [], "curvature": []}
    for phase, field in enumerate(fields):
        start = phase * 4 * (states - 1)
        part = path[start : start + 4 * (states - 1) + 1 : 4]  # `states` states, both ends among them
        rows["curvature"].append(curvature(partial(_over_unit_time, field, horizon), part))
        for state in part:
            rows["norm"].append(horizon * jacobian_norm(field, state))
            rows["log_norm"].append(horizon * log_norm(field, state).value)
            if has_bound(field):
                rows["bound"].append(horizon * field_bound(field, state))
    largest = {name: torch.stack(values).amax(dim=0) if values else None for name, values in rows.items()}
    return Rates(**largest)  # type: ignore[arg-type]


def observed_order(counts: Sequence[int], errors: Tensor) -> float:
    """Minus the slope of log error (median over samples, (m, b)) against log N, between the two largest N."""
    middle = errors.median(dim=1).values[-2:].tolist()
    return -log_slope(counts[-2:], middle) if min(middle) > 0 else math.nan


@register_analysis("error_bound", summary="How far is Euler's method from the ODE, and what does theory foresee?")
def run(study: Study) -> Iterator[Finding]:
    """Measured error against Proposition 1 with three rates, for several numbers of steps.

    Options: images (the reference solution takes 32 evaluations for each of Euler's steps).
    """
    model = study.model
    images = study.images[study.spread(study.settings("error_bound", images=8)["images"])]
    fields, horizon = list(model.odevit.fields), float(model.config.horizon)
    with torch.no_grad(), parametrize.cached():
        x = model.odevit.embed(images)
        rates = path_rates(fields, x, horizon)
        counts, errors = [n * len(fields) for n in STEPS], []
        for done, count in enumerate(counts, start=1):
            errors.append(euler_error(fields, x, count, horizon))
            study.progress("error of Euler's method", done, len(counts))
        size = solve(fields, x, num_steps=counts[-1], solver="rk4", horizon=horizon).xs[-1].flatten(1).norm(dim=1)
    measured = torch.stack(errors).double().cpu()  # (m, b)
    named = {"L bounded": rates.bound, "L measured": rates.norm, "μ": rates.log_norm}
    bounds = {
        name: torch.stack([error_bound(rate, rates.curvature, count) for count in counts]).cpu()
        for name, rate in named.items()
        if rate is not None
    }
    order = observed_order(counts, measured)
    yield Finding(
        "error_bound/euler",
        {
            "num_steps": counts,
            "measured": _medians(measured),
            "relative": _medians(measured / size.double().cpu()),
            "observed_order": order,
            "rates": {name: float(rate.median()) for name, rate in named.items() if rate is not None},
            "curvature": float(rates.curvature.median()),
            "bounds": {name: _medians(bound) for name, bound in bounds.items()},
            "ratio": {name: _medians(bound / measured) for name, bound in bounds.items()},
            "images": len(images),
        },
        "Error of Euler's method and its bounds",
        _text(counts, measured, bounds, order),
        _figure(counts, measured, bounds),
    )


def _medians(values: Tensor) -> list[float | None]:
    """Over samples, (m, b) -> m numbers; None where a bound is beyond all floating-point numbers."""
    return [number(value) for value in values.median(dim=1).values]


def _text(counts: list[int], measured: Tensor, bounds: dict[str, Tensor], order: float) -> str:
    ratios = ", ".join(f"{float((bound / measured)[-1].median()):.3g}× ({name})" for name, bound in bounds.items())
    return (
        f"Distance of N Euler steps from the ODE's solution (RK4, {REFINEMENT}N steps) and Proposition 1's bound with "
        f"each rate, medians over images. Measured order {order:.2f}; bound over error at N = {counts[-1]}: {ratios}. "
        "L and μ are the largest values at states along the path, not over a region around it."
    )


def _figure(counts: list[int], measured: Tensor, bounds: dict[str, Tensor]) -> "Figure":
    from odevit.analysis.report.style import INK, color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(height=3.2)
        for index, (name, bound) in enumerate(bounds.items()):
            middle = bound.median(dim=1).values
            far = float(middle.max()) > BEYOND * float(measured.max())
            x, y = ([], []) if far else (counts, middle.tolist())
            axes.plot(
                x, y, color=color(index), marker="o", label=f"bound, {name}" + (": beyond the plot" if far else "")
            )
        axes.plot(counts, measured.median(dim=1).values.tolist(), color=INK, marker="s", label="measured error")
        axes.fill_between(
            counts, measured.amin(dim=1).tolist(), measured.amax(dim=1).tolist(), color=INK, alpha=0.15, linewidth=0
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlabel("Euler steps N")
        axes.set_ylabel("‖x_N − x(T)‖")
        axes.legend()
    return figure
