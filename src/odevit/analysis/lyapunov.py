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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from odevit.analysis import Finding, Study, register_analysis
from odevit.analysis.bootstrap import bootstrap_interval, mean, number, pearson
from odevit.analysis.tangents import JetField, orthonormalise, push
from odevit.solvers import SOLVERS, Grid, NonFiniteStateError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


# --- the analysis -----------------------------------------------------------------------------------------------------

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
    return Finding("lyapunov/top", value, "Top Lyapunov exponent", text, _histogram([("model", top)]))


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
        images = study.images[:TEACHER_IMAGES]
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
    from odevit.analysis.style import MUTED, color, figure_style, subplots

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
    from odevit.analysis.style import PAPER, color, figure_style, subplots

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
