"""Step robustness: has the network learnt a flow, or its own discretisation?

A network trained with K steps of one solver is run with K' steps of every solver. If it has learnt a flow, its answers
hardly change, and its state comes near the exact solution at the rate of the solver's order; if it has learnt its
discretisation, a more exact solver makes it worse.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from odevit.analysis import Finding, Study, register_analysis
from odevit.analysis.intervals import FEWEST
from odevit.analysis.step_sweep import (
    REFERENCE,
    STEP_COUNTS,
    Point,
    Setting,
    observed_orders,
    settings_within,
    sweep,
)
from odevit.model.solvers import ADAPTIVE, SOLVERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNIFICANT = 2.6  # standard errors: 5 % two-sided over five comparisons (Bonferroni)
SAME_ACCURACY = 0.01  # "within one point"


@register_analysis("robustness", summary="Do other step counts and solvers give the same answers?")
def run(study: Study) -> Iterator[Finding]:
    """Options: max_images, order_images, step_counts, solvers (None: all), max_evaluations (per image and setting; 400
    is rk4 with 100 steps, so nothing is left out)."""
    options = study.settings(
        "robustness", max_images=128, order_images=4, step_counts=STEP_COUNTS, solvers=None, max_evaluations=400
    )
    config, chosen = study.model.config, study.spread(options["max_images"])
    images, labels = study.images[chosen], study.labels[chosen]
    settings = settings_within(
        config.num_fields, options["step_counts"], options["solvers"], options["max_evaluations"]
    )
    settings = [setting for setting in settings if setting[1] >= config.least_steps(setting[0])]
    points = sweep(
        study.model, images, labels, settings, batch_size=study.batch_size,
        progress=lambda done, total: study.progress("robustness", done, total),
    )  # fmt: skip
    training = (config.solver, config.num_steps)
    values, text = verdict(points, training, _teacher_accuracy(study, chosen))
    values |= {"images": len(images), "verdict": text}
    figure = sweep_figure(points, training, values["teacher_accuracy"])
    how = f" Each line is one solver, the ring is the training setting; {len(images)} images."
    yield Finding("robustness/verdict", values, "Other step counts, other solvers", text + how, figure, headline=text)
    table = [points[setting].values() for setting in dict.fromkeys([training, REFERENCE, *settings])]
    cheap = f"Settings of at most {options['max_evaluations']} evaluations of the field."
    yield Finding("robustness/settings", table, "Every setting", f"error = ‖X_T − X_ref‖ / ‖X_ref‖. {cheap}")
    orders = observed_orders(study.model, images[: options["order_images"]], options["solvers"])
    yield order_finding(orders)


def order_finding(orders: dict[str, dict[str, Any]]) -> Finding:
    said = ", ".join(
        f"{solver} {'not measurable' if found['order'] is None else format(found['order'], '.2f')}"
        f" ({SOLVERS[solver].order})"
        for solver, found in orders.items()
    )
    text = (
        "The steeper the line, the faster more steps approach the exact flow. Observed order on this network, with the "
        f"scheme's own order in brackets: {said}; measured in float64, whole state, relative."
    )
    return Finding("robustness/order", orders, "Observed order", text, order_figure(orders))


def _teacher_accuracy(study: Study, chosen: torch.Tensor) -> float | None:
    """Of the teacher on the same images, or None without a teacher that answers in the same classes."""
    if study.teacher is None or study.teacher.num_labels != study.model.config.num_labels:
        return None
    right = 0
    for part in chosen.split(study.batch_size):
        logits = study.teacher.trace(study.for_teacher(study.images[part])).logits
        if logits is None:
            return None
        right += int((logits.argmax(dim=1) == study.labels[part]).sum())
    return right / len(chosen)


# --- the verdict ------------------------------------------------------------------------------------------------------


def compare(candidate: Point, base: Point) -> dict[str, Any]:
    """Accuracy of the candidate minus the base's on the same images, with the standard error of that difference."""
    assert candidate.right is not None, candidate
    assert base.right is not None, base
    difference = candidate.right.double() - base.right.double()
    error = difference.std(correction=0).item() / math.sqrt(len(difference))
    gain = difference.mean().item()
    named = {"solver": candidate.solver, "num_steps": candidate.num_steps, "evaluations": candidate.evaluations}
    significant = len(difference) >= FEWEST and abs(gain) > SIGNIFICANT * error  # one image has no error at all
    return {**named, "gain": gain, "standard_error": error, "significant": significant}


def verdict(
    points: dict[Setting, Point], training: Setting, teacher_accuracy: float | None = None
) -> tuple[dict[str, Any], str]:
    """Does a higher order close the gap? Values, and the answer in words.

    Compared with the training setting on the same images: every solver of higher order with the most steps that cost
    no more than training did, and the exact flow (REFERENCE).
    """
    base = points[training]
    if base.diverged:
        raise ValueError(f"the state is infinite at its own setting ({_named(*training)}): there is nothing to compare")
    affordable = [p for p in points.values() if p.evaluations <= base.evaluations and not p.diverged]
    rivals = []
    own_order = SOLVERS[training[0]].order if training[0] in SOLVERS else ADAPTIVE[training[0]]
    for solver in (name for name, scheme in SOLVERS.items() if scheme.order > own_order):
        same_cost = [point for point in affordable if point.solver == solver]
        rivals += [max(same_cost, key=lambda point: point.num_steps)] if same_cost else []
    compared = [compare(rival, base) for rival in rivals]
    exact = None if points[REFERENCE].diverged else compare(points[REFERENCE], base)
    values: dict[str, Any] = {
        "training": base.values(), "teacher_accuracy": teacher_accuracy, "same_cost": compared, "exact_flow": exact,
        "steps_within_one_point": steps_within(points, training),
    }  # fmt: skip
    candidates = [*compared, *([exact] if exact else [])]
    better = [c for c in candidates if c["significant"] and c["gain"] > 0]
    values["closes_gap"] = bool(better)
    return values, _verdict_text(values, base, compared, exact, better)


def _verdict_text(
    values: dict[str, Any],
    base: Point,
    compared: list[dict[str, Any]],
    exact: dict[str, Any] | None,
    better: list[dict[str, Any]],
) -> str:
    gap = None if values["teacher_accuracy"] is None else values["teacher_accuracy"] - base.accuracy
    goal = (
        "raise the accuracy" if gap is None or gap <= 0 else f"close the gap of {100 * gap:.1f} points to the teacher"
    )
    text = f"Does a higher order {goal}? "
    if better:
        best = max(better, key=lambda c: c["gain"])
        share = f", {min(1.0, best['gain'] / gap):.0%} of the gap" if gap is not None and gap > 0 else ""
        text += f"Yes: {_named(best['solver'], best['num_steps'])} gains {_points(best)}{share}. "
    else:
        best_gain = max((c["gain"] for c in [*compared, *([exact] if exact else [])]), default=0.0)
        said = "Undecided: no gain is significant" if best_gain > 0 else "No: nothing gains"
        text += f"{said} on {_named(base.solver, base.num_steps)}, as trained ({base.accuracy:.1%}). "
    if compared:
        best = max(compared, key=lambda c: c["gain"])
        best_scheme = f"{_named(best['solver'], best['num_steps'])} ({_points(best)})"
        text += f"At its cost the best higher-order scheme is {best_scheme}; "
    if exact:
        text += f"the exact flow gives {_points(exact)}"
        learnt_steps = exact["significant"] and exact["gain"] < 0
        text += ": these weights have learnt their own steps rather than a flow. " if learnt_steps else ". "
    low, high = values["steps_within_one_point"]
    if low == high:
        return text + f"With {base.solver}, no other number of steps that was tried is within one point."
    return text + f"With {base.solver}, accuracy stays within one point from K' = {low} to {high}."


def steps_within(points: dict[Setting, Point], training: Setting) -> tuple[int, int]:
    """The widest unbroken range of K' around the training K whose accuracy is within SAME_ACCURACY of it."""
    own = sorted((p for p in points.values() if p.solver == training[0]), key=lambda p: p.num_steps)
    middle = next(i for i, p in enumerate(own) if p.num_steps == training[1])
    good = [not p.diverged and abs(p.accuracy - own[middle].accuracy) <= SAME_ACCURACY + 1e-9 for p in own]
    low = high = middle
    while low > 0 and good[low - 1]:
        low -= 1
    while high + 1 < len(own) and good[high + 1]:
        high += 1
    return own[low].num_steps, own[high].num_steps


def _points(compared: dict[str, Any]) -> str:
    return f"{100 * compared['gain']:+.1f} ± {100 * compared['standard_error']:.1f} points"


def _named(solver: str, steps: int) -> str:
    return f"{solver} with {steps} step{'s' if steps > 1 else ''}"


# --- figures ----------------------------------------------------------------------------------------------------------


def sweep_figure(points: dict[Setting, Point], training: Setting, teacher_accuracy: float | None) -> "Figure":
    """Accuracy and agreement with the training setting against evaluations, one line per solver."""
    from odevit.analysis.report.style import INK, MUTED, color, figure_style, subplots

    base, exact = points[training], points[REFERENCE]
    with figure_style():
        figure, panels = subplots(1, 2, width=7.4, height=3.3, sharex=True)
        for axes, what in zip(panels, ("accuracy", "agreement"), strict=True):
            for index, solver in enumerate(SOLVERS):
                line = sorted((p for s, p in points.items() if s[0] == solver), key=lambda p: p.evaluations)
                line = [p for p in line if not p.diverged and (solver, p.num_steps) != REFERENCE]
                shares = [100 * getattr(p, what) for p in line]
                axes.plot([p.evaluations for p in line], shares, "o-", markersize=3, color=color(index), label=solver)
            ring = dict(markersize=9, markerfacecolor="none", markeredgecolor=INK, zorder=5)
            axes.plot([base.evaluations], [100 * getattr(base, what)], "o", **ring)
            for height, name in ((getattr(exact, what), "exact flow"), (teacher_accuracy, "teacher")):
                if height is None or math.isnan(height) or (name == "teacher" and what == "agreement"):
                    continue
                of_teacher = name == "teacher"
                axes.axhline(100 * height, color=MUTED, linewidth=1, linestyle=":" if of_teacher else "--")
                place, side = (0.995, "right") if of_teacher else (0.005, "left")
                # at the right the curves lie on the exact flow: the teacher's name keeps to its other side
                offset, end = (-2, "top") if of_teacher and height <= exact.accuracy else (2, "bottom")
                axes.annotate(
                    name, (place, 100 * height), xycoords=("axes fraction", "data"), xytext=(0, offset), ha=side,
                    va=end, textcoords="offset points", fontsize=7.5, color=MUTED,
                )  # fmt: skip
            axes.set(xscale="log", xlabel="evaluations of the field")
            axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
        panels[0].set_title("Accuracy (%)")
        panels[1].set_title("Same answer as the training setting (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SOLVERS))
    return figure


def order_figure(orders: dict[str, dict[str, Any]]) -> "Figure":
    """Error against steps, both logarithmic; each line ends with its observed order."""
    from odevit.analysis.report.style import color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(width=5.6, height=3.3)
        for solver, found in orders.items():
            pairs = [(k, e) for k, e in zip(found["step_counts"], found["errors"], strict=True) if 0 < e < math.inf]
            if not pairs:
                continue
            counts, errors = zip(*pairs, strict=True)
            order = "–" if found["order"] is None else f"{found['order']:.1f}"
            line = color(list(SOLVERS).index(solver))
            axes.plot(counts, errors, "o-", color=line, label=f"{solver}  (order {order})")
        axes.set(xscale="log", yscale="log", xlabel="steps", ylabel="relative error of the last state")
        ticks = next(iter(orders.values()))["step_counts"]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
