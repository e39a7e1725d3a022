"""Is this ViT ODE-able? What its layers say about a student before any training.

A layered network is close to an ODE when its states move little from layer to layer, keep their direction, and move by
a rule that does not depend on the layer. So: velocity, turning, how much of the movement one (or k) autonomous fields
explain (see `tied_field`), and how many Euler steps the curvature of the path asks for.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from odevit.analysis import Finding, _silent
from odevit.analysis.tied_field import (
    PhaseFit,
    Sample,
    constant_residual,
    fit_runs,
    phase_fits,
    sample_tokens,
    suggested_fields,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from odevit.teachers.teacher import Teacher

FIELD_TOLERANCE = 0.1  # k fields are enough when they explain this share less than the best number of fields, at most
EULER_TOLERANCE = 0.1  # K steps are enough when Euler's estimated error is below this share of the path's length
WEAK = 0.5  # where regressions explain less than this with any number of fields, they cannot tell what tying costs
REPORTED_FIELDS = 4


class PathShape(NamedTuple):
    """Means over images of one kind of token; D layers."""

    velocity: Tensor  # (D,) ‖h_l - h_{l-1}‖
    relative_velocity: Tensor  # (D,) ‖h_l - h_{l-1}‖ over the mean of ‖h_{l-1}‖ and ‖h_l‖, at most 2
    turning: Tensor  # (D-1,) cosine of the angle between consecutive increments: 1 straight on, 0 a right angle
    curvature: Tensor  # (D-1,) ‖Δ_{l+1} - Δ_l‖ over the mean of ‖Δ_l‖ and ‖Δ_{l+1}‖
    length: float  # Σ ‖Δ_l‖
    bending: float  # Σ ‖Δ_{l+1} - Δ_l‖: the integral of ‖x''‖ with a layer as the unit of time


def path_shape(states: Tensor) -> PathShape:
    """Velocity and turning along states (D+1, …, d); a token that does not move has turning 1 and curvature 0."""
    states = states.double()
    increments = states.diff(dim=0)  # (D, …, d)
    speed, size = increments.norm(dim=-1), states.norm(dim=-1)
    bend = increments.diff(dim=0).norm(dim=-1)  # (D-1, …)
    both = speed[:-1] * speed[1:]
    dot = (increments[:-1] * increments[1:]).sum(dim=-1)
    tiny = torch.finfo(torch.float64).tiny
    cosine = torch.where(both > 0, dot / both.clamp_min(tiny), 1.0)
    relative_bend = bend / ((speed[:-1] + speed[1:]) / 2).clamp_min(tiny)

    def mean(x: Tensor) -> Tensor:
        return x.flatten(1).mean(dim=1).cpu()

    return PathShape(
        mean(speed),
        mean(speed / ((size[:-1] + size[1:]) / 2).clamp_min(tiny)),
        mean(cosine),
        mean(relative_bend),
        float(mean(speed).sum()),
        float(mean(bend).sum()),
    )


def estimated_error(shape: PathShape, num_steps: int) -> float:
    """Estimated error of K Euler steps as a share of the path's length.

    A step of h layers errs by h²/2 ‖x''‖; D/h of them sum to h/2 ∫‖x''‖ with h = D/K. How the flow stretches or shrinks
    earlier errors is left out, since no field exists yet.
    """
    if shape.length == 0:
        return 0.0
    return len(shape.velocity) / (2 * num_steps) * shape.bending / shape.length


def suggested_steps(shape: PathShape, tolerance: float = EULER_TOLERANCE) -> int:
    """The fewest Euler steps whose estimated error is at most `tolerance` of the path's length."""
    return max(1, math.ceil(estimated_error(shape, 1) / tolerance - 1e-9))


@torch.no_grad()
def audit(
    teacher: "Teacher",
    images: Tensor,
    *,
    batch_size: int = 64,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = _silent,
) -> Iterator[Finding]:
    """Findings about a teacher from prepared images (N, c, S, S): 1,000 judge CLS well, 5 are the least."""
    sample = teacher_sample(teacher, images, batch_size=batch_size, seed=seed, progress=progress)
    shapes = {"CLS": path_shape(sample.tokens[:, :, 0]), "patches": path_shape(sample.tokens[:, :, 1:])}
    fits = phase_fits(fit_runs(sample, seed=seed, progress=lambda done, total: progress("tied field", done, total)))
    fields = suggested_fields(fits, FIELD_TOLERANCE)
    steps = max(suggested_steps(shape) for shape in shapes.values())
    yield verdict_finding(fits, fields, steps, shapes, len(images), 1 - constant_residual(sample, seed=seed))
    yield fields_finding(fits, fields)
    yield shape_finding(shapes)
    yield steps_finding(shapes, steps)


def teacher_sample(
    teacher: "Teacher",
    images: Tensor,
    *,
    batch_size: int = 64,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = _silent,
) -> Sample:
    """CLS and some patches of every image after every layer; extra tokens of the teacher count as context only."""
    samples, device = [], next(teacher.parameters(), images).device
    for start in range(0, len(images), batch_size):
        states = torch.stack(teacher.trace(images[start : start + batch_size].to(device)).states)  # (D+1, b, n, d)
        kept = sample_tokens(states[:, :, : 1 + teacher.num_patches], seed=seed + start)
        samples.append(Sample(kept.tokens.cpu(), states.mean(dim=2).cpu()))
        progress("teacher", min(start + batch_size, len(images)), len(images))
    return Sample(torch.cat([s.tokens for s in samples], dim=1), torch.cat([s.context for s in samples], dim=1))


def verdict_finding(
    fits: list[PhaseFit], fields: int, steps: int, shapes: dict[str, PathShape], images: int, constant: float
) -> Finding:
    depth, one, chosen = len(fits), 1 - fits[0].residual, 1 - fits[fields - 1].residual
    best = max(1 - fit.residual for fit in fits)
    value = {
        "suggested_fields": fields,
        "phases_start_at_layers": fits[fields - 1].starts,
        "suggested_steps": steps,
        "explained_by_one_field": one,
        "explained_by_suggested_fields": chosen,
        "explained_by_one_field_per_layer": 1 - fits[-1].residual,
        "explained_by_one_constant_per_layer": constant,
        "field_tolerance": FIELD_TOLERANCE,
        "euler_tolerance": EULER_TOLERANCE,
        "images": images,
    }
    starts = ", ".join(map(str, fits[fields - 1].starts))
    text = (
        f"On images not used for fitting, one autonomous field explains {max(0.0, one):.0%} of the movement of {depth} "
        f"layers, one field per layer {max(0.0, 1 - fits[-1].residual):.0%} (a fixed increment per layer, blind to "
        f"the image: {max(0.0, constant):.0%}). "
    )
    if best < WEAK:
        text += (
            f"No number of fields explains {WEAK:.0%}: these regressions cannot tell what tying costs; use more images."
        )
    elif fields == 1:
        text += f"Tying all layers costs less than {FIELD_TOLERANCE:.0%} of that: start with num_fields = 1."
    else:
        text += (
            f"{fields} fields, with phases starting at layers {starts}, explain {chosen:.0%}, within "
            f"{FIELD_TOLERANCE:.0%} of the best: start with num_fields = {fields}."
        )
    cls = shapes["CLS"]
    text += (
        f" The curvature of the path asks for {steps} Euler steps to be within {EULER_TOLERANCE:.0%} of the smooth "
        f"flow; {depth} steps, one per layer, are estimated at {estimated_error(cls, depth):.0%} for CLS."
    )
    return Finding("audit/verdict", value, "Is this ViT ODE-able?", text, headline=text)


def fields_finding(fits: list[PhaseFit], fields: int) -> Finding:
    depth = len(fits)
    reported = [fit for fit in fits if fit.fields in (*range(1, REPORTED_FIELDS + 1), fields, depth)]
    per_layer = max(fits[-1].residual, 1e-12)
    value = {
        "fields": [vars(fit) for fit in reported],
        "residual_by_number_of_fields": [fit.residual for fit in fits],
        "residual_tied_over_per_layer": fits[0].residual / per_layer if fits[0].residual > 1e-6 else 1.0,
    }
    text = (
        "Share of the movement that k autonomous fields leave unexplained on held-out images (left), and where "
        "(right): a layer that is high for one field and low for one field per layer is one that tying hurts. "
        "The regressions are a proxy: a trained field with attention can explain more."
    )
    return Finding("audit/tied_field", value, "What tying the layers costs", text, fields_figure(fits, fields))


def shape_finding(shapes: dict[str, PathShape]) -> Finding:
    value = {
        name: {key: item.tolist() if isinstance(item, Tensor) else item for key, item in shape._asdict().items()}
        for name, shape in shapes.items()
    }
    turn = shapes["CLS"].turning
    heard = f" (mean for CLS: {turn.mean():.2f})" if len(turn) else ""
    text = (
        "Left: how far a layer moves its tokens, relative to their size. Right: cosine between the increments of two "
        f"layers in a row{heard}; near 1 the path is smooth, near 0 every layer turns off at a right angle."
    )
    return Finding("audit/path", value, "Velocity and turning, layer by layer", text, shape_figure(shapes))


def steps_finding(shapes: dict[str, PathShape], steps: int) -> Finding:
    depth = len(shapes["CLS"].velocity)
    counts = sorted({1, 2, 4, depth, 2 * depth, 4 * depth, steps})
    value: dict[str, Any] = {
        "suggested_steps": {name: suggested_steps(shape) for name, shape in shapes.items()},
        "estimated_error": {name: {k: estimated_error(shape, k) for k in counts} for name, shape in shapes.items()},
    }
    text = (
        f"Estimated error of K Euler steps as a share of the path's length, (D/2K)·∫‖x″‖; K = {steps} brings it below "
        f"{EULER_TOLERANCE:.0%}. A student with K = {depth} steps can still copy the layers themselves: this number "
        "says when its answer stops depending on K."
    )
    return Finding("audit/steps", value, "How many steps?", text)


def fields_figure(fits: list[PhaseFit], fields: int) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    depth = len(fits)
    layers = list(range(1, depth + 1))
    shown = list(dict.fromkeys([1, fields, depth]))
    with figure_style():
        figure, (left, right) = subplots(1, 2, width=7.4, height=3.1, width_ratios=(1, 1.4))
        for index, (key, name) in enumerate((("residual_cls", "CLS"), ("residual_patches", "patches"))):
            left.plot(layers, [getattr(fit, key) for fit in fits], "o-", color=color(index), label=name)
        left.axvline(fields, color=MUTED, linewidth=1, linestyle="--")
        left.set(xlabel="number of fields", ylabel="unexplained share", title="k fields, equal phases")
        for index, count in enumerate(shown):
            fit = fits[count - 1]
            name = "one field per layer" if count == depth else "one field" if count == 1 else f"{count} fields"
            right.plot(layers, fit.per_layer, "o-", color=color(2 + index), label=name)
        for start in fits[fields - 1].starts[1:]:
            right.axvline(start - 0.5, color=MUTED, linewidth=1, linestyle="--")
        right.set(xlabel="layer", title="By layer" + (" (dashed: a new field begins)" if fields > 1 else ""))
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(loc="best")
    return figure


def shape_figure(shapes: dict[str, PathShape]) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    with figure_style():
        figure, (left, right) = subplots(1, 2, width=7.4, height=2.9)
        for index, (name, shape) in enumerate(shapes.items()):
            depth = len(shape.velocity)
            left.plot(range(1, depth + 1), shape.relative_velocity, "o-", color=color(index), label=name)
            right.plot(range(2, depth + 1), shape.turning, "o-", color=color(index), label=name)
        right.axhline(0, color=MUTED, linewidth=1, linestyle="--")
        left.set(xlabel="layer", ylabel="length of the increment / size", title="Relative velocity")
        left.set_ylim(bottom=0)
        right.set(xlabel="layer", ylabel="cosine with the layer before", title="Turning", ylim=(-1.05, 1.05))
        for axes in (left, right):
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(loc="best")
    return figure
