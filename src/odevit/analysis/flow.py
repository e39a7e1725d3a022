"""Is it a flow? The same weights with few steps, many steps and exactly, and the head read before the end.

A network trained at one number of steps has learnt that recurrence: other step counts and exact integration cost it
accuracy. The flow gap says how much.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odevit.analysis import Finding, Study, register_analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP_COUNTS = (3, 4, 6, 8, 12, 24, 48)
EXACT = ("rk4", 16)  # per field; 64 evaluations: the step error is far below what can change an answer
READ_OUTS = 12  # times at which the head is read, evenly over the interval
MOST_IMAGES = 1000


@torch.no_grad()
def flow_gap(model: Any, images: Tensor, labels: Tensor, batch_size: int = 64) -> dict[str, Any]:
    """Accuracy at the model's own setting minus that of the exact flow, with its standard error; accuracies at
    K = 3 … 48 of its own solver and their spread. images (N, c, H, W) prepared for the model, labels (N,)."""
    config = model.config
    exact = (EXACT[0], max(EXACT[1] * config.num_fields, config.least_steps(EXACT[0])))
    counts = [n for n in STEP_COUNTS if n >= config.least_steps(config.solver)] or [config.num_steps]
    settings = [(config.solver, config.num_steps), exact, *((config.solver, count) for count in counts)]
    right: dict[tuple[str, int], Tensor] = {}
    for solver, steps in dict.fromkeys(settings):
        answers = [
            model(batch, solver=solver, num_steps=steps).logits.argmax(dim=1) for batch in images.split(batch_size)
        ]
        right[solver, steps] = (torch.cat(answers).cpu() == labels.cpu()).double()
    difference = right[settings[0]] - right[exact]
    by_steps = {count: right[config.solver, count].mean().item() for count in counts}
    return {
        "gap": difference.mean().item(),
        "standard_error": difference.std(correction=0).item() / math.sqrt(len(difference)),
        "own": right[settings[0]].mean().item(),
        "exact_flow": right[exact].mean().item(),
        "accuracy_by_steps": by_steps,
        "spread": max(by_steps.values()) - min(by_steps.values()),
        "solver": config.solver,
        "num_steps": config.num_steps,
        "images": len(labels),
    }


@torch.no_grad()
def accuracy_over_time(model: Any, images: Tensor, labels: Tensor, batch_size: int = 64) -> list[dict[str, float]]:
    """Accuracy of the head at READ_OUTS times along one integration, and how many answers are already the last ones."""
    config, counts = model.config, torch.zeros(READ_OUTS, 2, dtype=torch.float64)
    steps = READ_OUTS * max(1, math.ceil(config.num_fields / READ_OUTS), math.ceil(config.num_steps / READ_OUTS))
    times = [config.horizon * (i + 1) / READ_OUTS for i in range(READ_OUTS)]
    for batch, answers in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        states = model.odevit.evolve(model.odevit.embed(batch), steps, save_at=times).xs
        said = torch.stack([model.classify(state).argmax(dim=1) for state in states]).cpu()  # (READ_OUTS, b)
        counts[:, 0] += (said == answers.cpu()).sum(dim=1)
        counts[:, 1] += (said == said[-1]).sum(dim=1)
    shares = counts / len(labels)
    return [
        {"t": t / config.horizon, "accuracy": a, "final": f} for t, (a, f) in zip(times, shares.tolist(), strict=True)
    ]


@register_analysis("flow", summary="Has it learnt a flow, or its own steps? And when is the answer there?")
def run(study: Study) -> Iterator[Finding]:
    """Options: max_images."""
    chosen = study.spread(study.settings("flow", max_images=MOST_IMAGES)["max_images"])
    images, labels = study.images[chosen], study.labels[chosen]
    gap = flow_gap(study.model, images, labels, study.batch_size)
    study.progress("flow", 1, 2)
    yield gap_finding(gap)
    path = accuracy_over_time(study.model, images, labels, study.batch_size)
    study.progress("flow", 2, 2)
    settled = settles_at(path)
    yield Finding(
        "flow/anytime",
        path,
        "The head, read along the way",
        f"Accuracy and share of answers that are already the last ones, at {READ_OUTS} times; {len(labels)} images. "
        f"From t = {settled:.2f} T on, 99 % of the answers stay what they are.",
        anytime_figure(path),
    )


def settles_at(path: list[dict[str, Any]]) -> float:
    """The time from which on 99 % of the answers are the last ones, at every later time too."""
    moving = [index for index, row in enumerate(path) if row["final"] < 0.99]
    return path[moving[-1] + 1 if moving else 0]["t"]


def gap_finding(gap: dict[str, Any]) -> Finding:
    points, error = 100 * gap["gap"], 100 * gap["standard_error"]
    counts = [int(count) for count in gap["accuracy_by_steps"]]
    text = (
        f"Integrated exactly, the model has {gap['exact_flow']:.1%} where its own {gap['num_steps']} {gap['solver']} "
        f"steps have {gap['own']:.1%}: a flow gap of {points:+.1f} ± {error:.1f} points. From K = {min(counts)} to "
        f"{max(counts)} its accuracy varies by {100 * gap['spread']:.1f} points."
    )
    return Finding(
        "flow/gap", gap, "The flow gap", f"{text} {gap['images']} images.", headline=text,
        key_numbers={"flow gap": f"{points:+.1f} points"},
    )  # fmt: skip


def anytime_figure(path: list[dict[str, float]]) -> "Figure":
    from odevit.analysis.report.style import color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(width=5.6, height=2.8)
        times = [row["t"] for row in path]
        for index, (key, label) in enumerate((("accuracy", "accuracy"), ("final", "answer is already the last one"))):
            axes.plot(times, [100 * row[key] for row in path], "o-", markersize=3, color=color(index), label=label)
        axes.set(xlabel="time, as a share of T", ylabel="%")
        axes.legend()
    return figure
