"""Lipschitz and contraction: how large are the weights, how steep is the field, how far may an image move?"""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from odevit.analysis import Finding, Study, register_analysis
from odevit.analysis.attack import attack
from odevit.analysis.certified import certified_finding
from odevit.dynamics.bounds import field_bound
from odevit.dynamics.certificate import EXACT_STATE, certify, check_certifiable
from odevit.dynamics.exponents import sees_quotient
from odevit.dynamics.jacobian import jacobian_norm, log_norm
from odevit.model.spectral import spectral_norms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNLESS = 1e-4  # of ‖J‖: a log-norm this near to zero has no sign (float32 products, a hundred times their rounding)
PATH_STATES = 9  # at most this many states along the path
RADIUS_BATCH = 8  # of them at once: an exact Jacobian takes memory quadratic in the state


class PathMeasures(NamedTuple):
    """Of ψ = T·field, the field over unit time, at m states of the path: each (m, b)."""

    times: list[float]  # (m,), from 0 to 1
    bound: Tensor | None  # of ‖J‖; None where no bound is known
    norm: Tensor  # ‖J‖, from below by Lanczos iteration
    log_norm: Tensor  # μ, likewise
    log_norm_upper: Tensor  # μ with the residual of the iteration added: an estimate from above
    quotient: bool  # μ of P J P: constants per token, which neither field nor head sees, do not count


@torch.no_grad()
def path_measures(model: Any, images: Tensor, *, states: int = PATH_STATES) -> PathMeasures:
    """Bound, norm and log-norm of T·field (the field over unit time) at states along the model's own path."""
    quotient = sees_quotient(model, images)
    config, base = model.config, model.odevit
    grid = config.time_grid()
    path = base.evolve(base.embed(images), save_at="steps").xs  # (K + 1, b, n, d)
    phases, times = [phase for phase, _ in grid.steps()], grid.times()
    count = min(states, config.num_steps)
    chosen = sorted({round(i * (config.num_steps - 1) / max(1, count - 1)) for i in range(count)})
    bounds, norms, log_norms, uppers = [], [], [], []
    for k in chosen:
        field, x = base.fields[phases[k]], path[k]
        with suppress(ValueError):  # no bound is known for this attention
            bounds.append(field_bound(field, x))
        norms.append(jacobian_norm(field, x))
        estimate = log_norm(field, x, quotient=quotient)
        log_norms.append(estimate.value)
        uppers.append(estimate.upper)
    horizon = float(config.horizon)
    return PathMeasures(
        [times[k] / horizon for k in chosen],
        horizon * torch.stack(bounds) if bounds else None,
        horizon * torch.stack(norms),
        horizon * torch.stack(log_norms),
        horizon * torch.stack(uppers),
        quotient,
    )


@register_analysis("stability", summary="How steep is the field, does it contract, and how far may an image move?")
def run(study: Study) -> Iterator[Finding]:
    """Spectral norms of every weight, bounds and measured norms along the path, certified radii against an attack.

    Options: path_images (about 100 Jacobian products for each of their states), radius_images (certified and attacked).
    """
    options = study.settings("stability", path_images=16, radius_images=32)
    yield _weights(study.model)
    with torch.no_grad(), parametrize.cached():
        measures = path_measures(study.model, study.images[study.spread(options["path_images"])])
    yield _path(study.model, measures)
    radius = certified_finding if study.model.config.field == "contractive" else _radius
    yield radius(study, study.images[study.spread(options["radius_images"])])


def _weights(model: Any) -> Finding:
    norms = {name.removeprefix("odevit."): float(norm) for name, norm in spectral_norms(model).items()}
    largest = max(norms, key=lambda name: norms[name])
    return Finding(
        "stability/weights",
        norms,
        "Spectral norms of the weights",
        f"The most that each matrix can stretch a vector (1 after spectral initialisation); the largest is {largest} "
        f"with {norms[largest]:.2f}.",
        _bars(norms),
    )


def _path(model: Any, measures: PathMeasures) -> Finding:
    depth, (_, bound, norm, log, upper, quotient) = float(model.config.depth), measures
    zero = SIGNLESS * norm
    value = {
        "time": measures.times,
        "bound": None if bound is None else (bound.mean(dim=1) / depth).tolist(),
        "norm": (norm.mean(dim=1) / depth).tolist(),
        "log_norm": (log.mean(dim=1) / depth).tolist(),
        "log_norm_upper": (upper.mean(dim=1) / depth).tolist(),
        "quotient": quotient,
        "share_contracting": float((upper < -zero).double().mean()),
        "share_expanding": float((log > zero).double().mean()),
        "bound_over_norm": None if bound is None else float((bound / norm).median()),
        "images": norm.shape[1],
    }
    loose = "" if bound is None else f"The bound is {value['bound_over_norm']:.1f}× the measured norm (median). "
    without = " Constants per token, which neither field nor head sees, are taken out of μ." if quotient else ""
    text = (
        "Per unit of depth, at states of the path: the a-priori bound of the Jacobian's norm, the norm itself, and the "
        f"log-norm μ, the fastest rate at which any two states nearby can part.{without} {loose}μ is positive at "
        f"{value['share_expanding']:.0%} of the states of {norm.shape[1]} images: there some states part. Its estimate "
        f"from above (Lanczos, residual added) is negative at {value['share_contracting']:.0%}: there the field is "
        "estimated to contract in every direction."
    )
    share = value["share_contracting"]
    where = "nowhere along the paths looked at" if share == 0 else f"at {share:.0%} of the states looked at"
    headline = f"The field is estimated to contract in every direction (log-norm below 0) {where}."
    return Finding(
        "stability/path", value, "The Jacobian along the path", text, _curves(measures, depth), headline,
        {"states where the field contracts": f"{share:.0%}"},
    )  # fmt: skip


def _radius(study: Study, images: Tensor) -> Finding:
    name, title = "stability/radius", "How far may an image move?"
    try:
        check_certifiable(study.model)
    except ValueError as reason:
        return Finding(name, None, title, f"Not computed: {reason}.")
    parts, found = [], []
    for batch in images.split(RADIUS_BATCH):
        parts.append(certify(study.model, batch))
        found.append(attack(study.model, batch, seed=study.seed))
        study.progress("certified radius", min(RADIUS_BATCH * len(parts), len(images)), len(images))
    radius, estimate = (torch.cat([getattr(part, key) for part in parts]) for key in ("radius", "first_order"))
    attacked = torch.cat(found).double()
    above = int((radius > attacked).sum())
    state = study.model.config.hidden_size * (1 + study.model.config.num_patches + study.model.config.num_registers)
    value = {
        "certified": radius.tolist(),
        "attacked": [size if math.isfinite(size) else None for size in attacked.tolist()],
        "first_order_estimate": estimate.tolist(),
        "certified_above_attacked": above,
        "images": len(images),
        "exact_jacobians": state <= EXACT_STATE,
    }
    text = (
        "ℓ₂ distance in normalised pixels within which the answer provably stays (in real arithmetic), against the "
        f"smallest change that an attack found to flip it: certified is above attacked for {above} of {len(images)} "
        f"images. Medians: certified {radius.median():.2g}, attacked {attacked.median():.2g}, first-order estimate (no "
        f"certificate) {estimate.median():.2g}."
    )
    return Finding(name, value, title, text, _radii(radius, attacked, estimate))


# --- figures ----------------------------------------------------------------------------------------------------------


def _bars(norms: dict[str, float]) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(height=0.7 + 0.2 * len(norms))
        names = list(norms)
        axes.barh(range(len(names)), [norms[name] for name in names], color=color(0), height=0.65)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(1, color=MUTED, linestyle=":", linewidth=1)
        axes.grid(False)
        axes.grid(True, axis="x")
        axes.set_xlabel("spectral norm")
    return figure


def _curves(measures: PathMeasures, depth: float) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    series = [("bound of ‖J‖", measures.bound), ("‖J‖", measures.norm), ("log-norm μ", measures.log_norm)]
    with figure_style():
        figure, axes = subplots(height=3)
        for index, (name, values) in enumerate(series):
            if values is None:
                continue
            scaled = values.double() / depth
            middle, low, high = scaled.mean(dim=1), scaled.amin(dim=1), scaled.amax(dim=1)
            axes.plot(measures.times, middle.tolist(), color=color(index), marker="o", label=name)
            axes.fill_between(measures.times, low.tolist(), high.tolist(), color=color(index), alpha=0.2, linewidth=0)
        axes.axhline(0, color=MUTED, linestyle=":", linewidth=1)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_xlabel("time / T")
        axes.set_ylabel("per unit of depth")
        axes.legend()
    return figure


def _radii(radius: Tensor, attacked: Tensor, estimate: Tensor) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    shown = attacked.isfinite()
    x = attacked[shown].tolist()
    with figure_style():
        figure, axes = subplots(height=3.2)
        axes.scatter(x, estimate[shown].tolist(), s=16, color=color(1), label="first-order estimate (not certified)")
        axes.scatter(x, radius[shown].tolist(), s=16, color=color(0), label="certified")
        if x:
            axes.plot([min(x), max(x)], [min(x), max(x)], color=MUTED, linestyle=":", linewidth=1, label="attacked")
        if bool((radius[shown] > 0).any()):
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel("smallest change found by the attack")
        axes.set_ylabel("ℓ₂ radius")
        axes.legend()
    return figure
