"""Do nearby states drift apart along the flow, and does that go with errors? Findings from `dynamics.exponents`."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odevit.analysis import Finding, Study, register_analysis
from odevit.analysis.bootstrap import bootstrap_interval, mean, number, pearson
from odevit.dynamics.exponents import _evaluating, fixed_step_solver, model_exponents, teacher_exponents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPONENTS = 4  # how many are computed for each image
TEACHER_IMAGES = 64  # a teacher is many times larger than its student: this many images are enough for a distribution


def class_table(top: Tensor, correct: Tensor, labels: Tensor, names: list[str], seed: int) -> list[dict[str, Any]]:
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
                "interval": bootstrap_interval(mean, values, seed=seed),
                "deviation": number(values.double().std()) if len(values) > 1 else None,
            }
        )
    return rows


def correlation(x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Pearson's r of (N,) and (N,) with its bootstrap interval; None where one of them is constant."""
    r = number(pearson(x, y))
    interval = None if r is None else [number(end) for end in bootstrap_interval(pearson, x, y, seed=seed)]
    return {"r": r, "interval": interval, "count": len(x)}


def _predictions(study: Study) -> Tensor:
    with _evaluating(study.model):
        return torch.cat([study.model(images).logits.argmax(dim=-1) for images, _ in study.batches("predictions")])


def _exponents(study: Study) -> Tensor:
    parts = [
        model_exponents(study.model, images, EXPONENTS, batch_size=study.batch_size, seed=study.seed)
        for images, _ in study.batches("lyapunov")
    ]
    return torch.cat(parts).cpu()


def _top_finding(study: Study, exponents: Tensor) -> Finding:
    top, first = exponents[:, 0], study.images[: study.batch_size]
    other = model_exponents(study.model, first, EXPONENTS, batch_size=study.batch_size, seed=study.seed + 1)
    positive, config = float(mean(top > 0)), study.model.config
    solver = fixed_step_solver(config.solver)
    value = {
        "mean": float(mean(top)),
        "interval": bootstrap_interval(mean, top, seed=study.seed),
        "share_positive": positive,
        "spectrum_mean": mean(exponents.mT).tolist(),
        "change_with_other_tangents": float((other[:, 0].cpu() - top[: len(first)]).abs().mean()),
        "per_image": top.tolist(),
        "solver": solver,
        "num_steps": config.num_steps,
        "images": len(top),
    }
    low, high = value["interval"]
    text = (
        f"Finite-time exponents per unit of depth with {config.num_steps} {solver} steps: above 0 nearby states drift "
        f"apart, below 0 they approach. Measured: mean {value['mean']:.3f} [{low:.3f}, {high:.3f}], positive for "
        f"{positive:.0%} of {len(top)} images; other starting tangents move one by "
        f"{value['change_with_other_tangents']:.3f} on average."
    )
    headline = (
        f"Nearby states {'drift apart' if value['mean'] > 0 else 'approach each other'}: the top Lyapunov exponent is "
        f"{value['mean']:.3f} per layer of depth on average, and positive for {positive:.0%} of {len(top)} images."
    )
    return Finding(
        "lyapunov/top", value, "Top Lyapunov exponent", text, _histogram([("model", top)]), headline,
        {"mean top Lyapunov exponent": f"{value['mean']:.3f}"},
    )  # fmt: skip


def _interval_text(result: dict[str, Any]) -> str:
    if result["r"] is None:
        return "not defined (one of the two is constant)"
    low, high = result["interval"]
    return f"{result['r']:+.2f}" + ("" if low is None else f" [{low:+.2f}, {high:+.2f}]")


@register_analysis("lyapunov", summary="Do nearby states drift apart along the flow, and does that go with errors?")
def run(study: Study) -> Iterator[Finding]:
    """Per image, per class, against accuracy, and for the teacher where there is one."""
    labels, exponents = study.labels.cpu(), _exponents(study)
    yield _top_finding(study, exponents)

    top, correct = exponents[:, 0], (_predictions(study).cpu() == labels).double()
    rows = class_table(top, correct, labels, study.class_names, study.seed)
    means, accuracies = (torch.tensor([row[key] for row in rows]) for key in ("mean", "accuracy"))
    samples, classes = correlation(top, correct, study.seed), correlation(means, accuracies, study.seed)
    yield Finding(
        "lyapunov/classes",
        {"classes": rows, "correlation_images": samples, "correlation_classes": classes},
        "Exponent and accuracy by class",
        "One bubble per class, its area the number of images, whiskers the 95 % bootstrap interval of the mean. "
        f"Correlation of exponent and accuracy: {_interval_text(samples)} over images, {_interval_text(classes)} over "
        f"{len(rows)} classes.",
        _bubbles(rows),
    )
    if study.teacher is not None:
        images = study.for_teacher(study.images[:TEACHER_IMAGES])
        values = teacher_exponents(study.teacher, images, 1, batch_size=study.batch_size, seed=study.seed)[:, 0].cpu()
        positive = float(mean(values > 0))
        yield Finding(
            "lyapunov/teacher",
            {"mean": float(mean(values)), "share_positive": positive, "images": len(values)},
            "Top exponent, model and teacher",
            f"The same for the teacher, whose layers are the steps: mean {float(mean(values)):.3f} per layer, positive "
            f"for {positive:.0%} of {len(values)} images.",
            _histogram([("model", top), ("teacher", values)]),
        )


def _histogram(series: list[tuple[str, Tensor]]) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(height=2.6)
        everything = torch.cat([values for _, values in series]).double()
        low, high = float(everything.min()), float(everything.max())
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
            (low, high), x = row["interval"], row["accuracy"]
            axes.plot([x, x], [low, high], color=color(index), linewidth=1)
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
