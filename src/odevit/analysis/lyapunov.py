"""Do nearby states drift apart along the flow, and does that go with errors? Findings from `dynamics.exponents`."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odevit.analysis import Finding, Study, register_analysis
from odevit.analysis.intervals import FEWEST, correlation_interval, mean, mean_interval, number, pearson
from odevit.dynamics.exponents import (
    Exponents,
    model_exponents,
    sees_quotient,
    teacher_exponents,
    teacher_sees_quotient,
)
from odevit.dynamics.flow import evaluating, fixed_step_solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPONENTS = 4  # how many are computed for each image
ROUNDING = 1e-5  # an exponent this near to zero has no sign


def class_table(top: Tensor, correct: Tensor, labels: Tensor, names: list[str]) -> list[dict[str, Any]]:
    """For each class with images: its number of images, accuracy, mean exponent with 95 % interval, and deviation."""
    rows = []
    for index in labels.unique().tolist():
        chosen = labels == index
        values = top[chosen]
        rows.append(
            {
                "class": names[index] if index < len(names) else str(index),
                "images": int(chosen.sum()),
                "accuracy": float(mean(correct[chosen])),
                "mean": float(mean(values)),
                "interval": mean_interval(values),
                "deviation": number(values.double().std()) if len(values) > 1 else None,
            }
        )
    return rows


def correlation(x: Tensor, y: Tensor) -> dict[str, Any]:
    """Pearson's r of (N,) and (N,) with its interval; None where one of them is constant."""
    return {"r": number(pearson(x, y)), "interval": correlation_interval(x, y), "count": len(x)}


def _predictions(study: Study) -> Tensor:
    with evaluating(study.model):
        return torch.cat([study.model(images).logits.argmax(dim=-1) for images, _ in study.batches("predictions")])


def _collect(study: Study, what: str, exponents: Callable[[Tensor], Exponents]) -> Exponents:
    """Of all images of the study, a batch at a time."""
    parts = [exponents(images) for images, _ in study.batches(what)]
    return Exponents(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _summary(found: Exponents) -> dict[str, Any]:
    """Mean, interval, signs and residual of the top exponents. A value is from below, so only `upper` can tell a minus.

    share_positive and share_negative need not add up to one: the rest is not told apart from zero.
    """
    top, upper = found.value[:, 0], found.upper[:, 0]
    return {
        "mean": number(mean(top)),
        "interval": mean_interval(top),
        "share_positive": float(mean(top > ROUNDING)),
        "share_negative": float(mean(upper < -ROUNDING)),
        "largest_gap_to_upper": number((upper - top).max()),
    }


def _said(summary: dict[str, Any]) -> str:
    interval = summary["interval"]
    low_high = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return "-∞ for some image" if summary["mean"] is None else f"mean {summary['mean']:.3f}{low_high}"


def _signs(summary: dict[str, Any]) -> str:
    return (
        f"positive for {summary['share_positive']:.0%} and negative for {summary['share_negative']:.0%} of the images"
    )


def _top_finding(study: Study, found: Exponents, quotient: Exponents | None) -> Finding:
    top, config = found.value[:, 0], study.model.config
    solver, depth = fixed_step_solver(config.solver), float(config.depth)
    value = {
        **_summary(found),
        "quotient": None if quotient is None else _summary(quotient),
        "spectrum_mean": [number(entry) for entry in mean(found.value.mT)],
        "median_amplification": number((top * depth).exp().median()),
        "per_image": [number(entry) for entry in top],
        "solver": solver,
        "num_steps": config.num_steps,
        "images": len(top),
    }
    text = (
        "Finite-time exponents log σ(Φ) / depth, σ the singular values of the Jacobian Φ of the whole flow "
        f"({config.num_steps} {solver} steps): above 0 some nearby states drift apart, below 0 all approach. Measured: "
        f"{_said(value)} over {len(top)} images; a small change in the worst direction comes out "
        f"{value['median_amplification']:.3g} times as large (median). Block Lanczos, residuals below "
        f"{value['largest_gap_to_upper']:.1g}. "
    )
    if quotient is None:
        seen, text = value, text + f"It is {_signs(value)}."
    else:
        seen = value["quotient"]
        text += (
            "A constant added to a token passes unchanged and unread, so the top exponent is never below 0; with those "
            f"directions taken out it is {_said(seen)}, {_signs(seen)}."
        )
    if seen["share_positive"] > 0.5:
        drift = "Some nearby states drift apart"
    elif seen["share_negative"] > 0.5:
        drift = "All nearby states approach each other"
    else:
        drift = "Nearby states neither clearly drift apart nor approach"
    headline = (
        f"{drift}: over the whole flow a small change grows at most {value['median_amplification']:.3g}-fold (median; "
        f"top finite-time exponent {_said(value)} per layer of depth, {len(top)} images)."
    )
    shown = {} if value["mean"] is None else {"mean top Lyapunov exponent": f"{value['mean']:.3f}"}
    return Finding("lyapunov/top", value, "Top Lyapunov exponent", text, _histogram([("model", top)]), headline, shown)


def _interval_text(result: dict[str, Any]) -> str:
    if result["r"] is None:
        return "not defined (one of the two is constant)"
    if result["interval"] is None:
        return f"{result['r']:+.2f} (no interval: fewer than {FEWEST} values, or images of one kind)"
    low, high = result["interval"]
    return f"{result['r']:+.2f} [{low:+.2f}, {high:+.2f}]"


@register_analysis("lyapunov", summary="Do nearby states drift apart along the flow, and does that go with errors?")
def run(study: Study) -> Iterator[Finding]:
    """Per image, per class, against accuracy, and for the teacher where there is one."""
    options: dict[str, Any] = {"batch_size": study.batch_size, "seed": study.seed}
    model, labels = study.model, study.labels.cpu()
    found = _collect(study, "exponents", lambda images: model_exponents(model, images, EXPONENTS, **options))
    quotient = None
    if sees_quotient(model, study.images):
        quotient = _collect(
            study, "exponents of the quotient", lambda images: model_exponents(model, images, quotient=True, **options)
        )
    yield _top_finding(study, found, quotient)

    top, correct = found.value[:, 0], (_predictions(study).cpu() == labels).double()
    rows = class_table(top, correct, labels, study.class_names)
    means, accuracies = (torch.tensor([row[key] for row in rows]) for key in ("mean", "accuracy"))
    samples, classes = correlation(top, correct), correlation(means, accuracies)
    yield Finding(
        "lyapunov/classes",
        {"classes": rows, "correlation_images": samples, "correlation_classes": classes},
        "Exponent and accuracy by class",
        "One bubble per class, its area the number of images, whiskers the 95 % interval of the mean (Student's t, "
        f"{FEWEST} images at least). Correlation of top exponent and accuracy, with Fisher's 95 % interval: "
        f"{_interval_text(samples)} over images, {_interval_text(classes)} over {len(rows)} classes.",
        _bubbles(rows),
    )
    if study.teacher is not None:
        yield _teacher_finding(study, top, options)


def _teacher_finding(study: Study, top: Tensor, options: dict[str, Any]) -> Finding:
    teacher = study.teacher

    def exponents(images: Tensor, quotient: bool = False) -> Exponents:
        return teacher_exponents(teacher, study.for_teacher(images), quotient=quotient, **options)

    found = _collect(study, "teacher's exponents", exponents)
    value: dict[str, Any] = {**_summary(found), "quotient": None, "images": len(found.value)}
    seen = value
    if teacher_sees_quotient(teacher, study.for_teacher(study.images[:1])):
        seen = value["quotient"] = _summary(
            _collect(study, "teacher's, of the quotient", partial(exponents, quotient=True))
        )
    return Finding(
        "lyapunov/teacher",
        value,
        "Top exponent, model and teacher",
        f"The same for the teacher, whose layers are the steps: {_said(value)} per layer over {value['images']} images"
        f"{'' if seen is value else f'; without constants per token {_said(seen)}'}, {_signs(seen)}.",
        _histogram([("model", top), ("teacher", found.value[:, 0])]),
    )


def _histogram(series: list[tuple[str, Tensor]]) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(height=2.6)
        series = [(name, values[values.isfinite()]) for name, values in series]
        everything = torch.cat([values for _, values in series]).double()
        low, high = (float(everything.min()), float(everything.max())) if len(everything) else (0.0, 0.0)
        bins = torch.linspace(low, high + 1e-9, 31).tolist() if high > low else 10
        for index, (name, values) in enumerate(series):
            weights = [1 / len(values)] * len(values)
            axes.hist(values.tolist(), bins=bins, weights=weights, color=color(index), alpha=0.75, label=name)
        axes.axvline(0, color=MUTED, linestyle=":", linewidth=1)
        axes.set_xlabel("top exponent per unit of depth")
        axes.set_ylabel("share of images")
        if len(series) > 1:
            axes.legend()
    return figure


def _bubbles(rows: list[dict[str, Any]]) -> "Figure":
    from odevit.analysis.report.style import PAPER, color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(height=3.6)
        largest = max(row["images"] for row in rows)
        for index, row in enumerate(rows):
            x = row["accuracy"]
            if row["interval"] is not None:
                axes.plot([x, x], row["interval"], color=color(index), linewidth=1)
            area = 40 + 260 * row["images"] / largest
            axes.scatter([x], [row["mean"]], s=area, color=color(index), alpha=0.85, edgecolor=PAPER, zorder=3)
            if len(rows) <= 20:
                axes.annotate(
                    row["class"], (x, row["mean"]), xytext=(2 + math.sqrt(area) / 2, 0), textcoords="offset points",
                    ha="left", va="center", fontsize=8,
                )  # fmt: skip
        axes.margins(0.12)
        axes.set_xlabel("accuracy of the class")
        axes.set_ylabel("mean top exponent")
    return figure
