"""Trajectories: the paths of the CLS token, seen in the plane and the space where they vary most.

A path is the CLS state at every solver step (student) or after every block (teacher), before the final norm.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from odevit.analysis import Finding, HtmlFigure, Study, register_analysis
from odevit.distill.meeting import match_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PrincipalAxes(NamedTuple):
    """Principal component analysis of points in d dimensions."""

    mean: Tensor  # (d,)
    components: Tensor  # (k, d), orthonormal
    explained: Tensor  # (k,): share of the variance along each

    def project(self, points: Tensor) -> Tensor:
        """(…, d) -> (…, k)."""
        return (points - self.mean) @ self.components.T


def principal_axes(points: Tensor, count: int = 3) -> PrincipalAxes:
    """The `count` axes of largest variance of points (m, d). Signs are fixed: the largest entry of each is positive."""
    if points.ndim != 2 or min(points.shape) < count:
        raise ValueError(f"{count} axes need at least {count} points in {count} dimensions, got {tuple(points.shape)}")
    mean = points.mean(dim=0)
    _, values, rows = torch.linalg.svd(points - mean, full_matrices=False)
    rows = rows[:count]
    signs = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)).sign()
    variance = values.square()
    return PrincipalAxes(mean, rows * signs, variance[:count] / variance.sum().clamp_min(1e-300))


def path_lengths(paths: Tensor) -> tuple[Tensor, Tensor]:
    """Length (N,) and straightness (N,) = end-to-end distance / length, of paths (N, m, d). 1 is a straight line."""
    length = paths.diff(dim=1).norm(dim=-1).sum(dim=1)
    return length, (paths[:, -1] - paths[:, 0]).norm(dim=-1) / length.clamp_min(1e-300)


def layer_errors(student: Tensor, teacher: Tensor, pairs: list[tuple[int, int]]) -> list[dict[str, float]]:
    """How far the student (N, K+1, d) is from the teacher (N, D+1, d) at each (layer, step).

    relative: mean of ‖s - h‖ / ‖h‖. of_spread: sqrt of Σ‖s - h‖² / Σ‖h - mean h‖²; 1 is no better than to answer every
    image with the mean state of the layer.
    """
    result = []
    for layer, step in pairs:
        target = teacher[:, layer]
        gap = (student[:, step] - target).norm(dim=-1)
        spread = (target - target.mean(dim=0)).square().sum()
        relative = (gap / target.norm(dim=-1)).mean().item()
        of_spread = (gap.square().sum() / spread.clamp_min(1e-300)).sqrt().item()
        result.append({"layer": layer, "step": step, "relative": relative, "of_spread": of_spread})
    return result


@torch.no_grad()
def cls_paths(study: Study, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    """CLS paths of the student (N, K+1, d) and the teacher (N, D+1, d'), in float64 on the CPU."""
    base, student, teacher = study.model.odevit, [], []
    for done, part in enumerate(chosen.split(study.batch_size), start=1):
        images = study.images[part]
        states = base.evolve(base.embed(images), save_at="steps").xs  # (K + 1, b, n, d)
        student.append(states[:, :, 0].transpose(0, 1).double().cpu())
        if study.teacher is not None:
            trace = study.teacher.trace(study.for_teacher(images))
            teacher.append(torch.stack([state[:, 0] for state in trace.states], dim=1).double().cpu())
        study.progress("trajectory", min(done * study.batch_size, len(chosen)), len(chosen))
    return torch.cat(student), torch.cat(teacher) if teacher else None


@register_analysis("trajectory", summary="Which way does the CLS token go, and does it follow the teacher?")
def run(study: Study) -> Iterator[Finding]:
    """Options: max_images (for the numbers), classes and per_class (paths drawn)."""
    options = study.settings("trajectory", max_images=256, classes=4, per_class=6)
    chosen = study.spread(options["max_images"])
    student, teacher = cls_paths(study, chosen)
    labels = study.labels[chosen].cpu()
    comparable = teacher if teacher is not None and teacher.shape[-1] == student.shape[-1] else None
    points = [paths.flatten(0, 1) for paths in (student, comparable) if paths is not None]
    axes = principal_axes(torch.cat(points))
    drawn = drawn_images(labels, options["classes"], options["per_class"])
    projected = axes.project(student), None if comparable is None else axes.project(comparable)

    values: dict[str, Any] = {"images": len(chosen), "explained_variance": axes.explained.tolist()}
    for who, paths in (("student", student), ("teacher", teacher)):
        if paths is not None:
            length, straightness = path_lengths(paths)
            values[who] = {"length": length.mean().item(), "straightness": straightness.mean().item()}
    text = (
        f"The plane that holds {axes.explained[:2].sum():.0%} of the paths' variance: thin lines are images, "
        "thick ones class means; paths that part by class show where the decision is made"
    )
    text += ". Dashed and crosses: the teacher." if comparable is not None else "."
    figure = plane_figure(projected, labels, drawn, study.class_names, axes.explained)
    yield Finding("trajectory/plane", values, "Paths of the CLS token", text, figure)
    text = f"The same in space ({axes.explained.sum():.0%} of the variance); turn it to see whether classes part."
    space = space_figure(projected, labels, drawn, study.class_names)
    yield Finding(
        "trajectory/space", {"paths": sum(map(len, drawn.values()))}, "Paths in three dimensions", text, space
    )
    if comparable is not None:
        yield layers_finding(study, student, comparable)


def drawn_images(labels: Tensor, classes: int, per_class: int) -> dict[int, Tensor]:
    """Indices of at most per_class images of the most frequent classes: few enough to be told apart."""
    present, counts = labels.unique(return_counts=True)
    frequent = present[counts.argsort(descending=True, stable=True)][:classes]
    return {int(label): (labels == label).nonzero()[:per_class, 0] for label in sorted(frequent.tolist())}


def layers_finding(study: Study, student: Tensor, teacher: Tensor) -> Finding:
    depth, config = teacher.shape[1] - 1, study.model.config
    times = config.meeting_times
    matched = times is not None and len(times) == depth
    if not matched:
        times = [config.horizon * (layer + 1) / depth for layer in range(depth)]
    errors = layer_errors(student, teacher, match_steps(times, study.model.config.time_grid(student.shape[1] - 1)))
    where = "its meeting times" if matched else "evenly spaced times (it has no meeting times for this teacher)"
    text = (
        f"Distance of the student's CLS at {where} from the teacher's layers. Relative to the spread over images, 1 is "
        f"no better than the mean state; the last layer is at {errors[-1]['of_spread']:.2f}."
    )
    value = {"meeting_times": matched, "layers": errors}
    return Finding("trajectory/layers", value, "Distance from the teacher, layer by layer", text, layers_figure(errors))


Projected = tuple[Tensor, Tensor | None]  # student (N, K+1, 3), teacher (N, D+1, 3)


def plane_figure(
    projected: Projected, labels: Tensor, drawn: dict[int, Tensor], names: list[str], explained: Tensor
) -> "Figure":
    """Left: paths, images thin and class means thick. Right: where they end, joined with the teacher's end."""
    from odevit.analysis.report.style import MUTED, PAPER, color, figure_style, subplots

    student, teacher = projected
    with figure_style():
        figure, (left, right) = subplots(1, 2, width=7.4, height=3.7)
        for index, (label, chosen) in enumerate(drawn.items()):
            tint, of_class = color(index), labels == label
            for path in student[chosen]:
                left.plot(path[:, 0], path[:, 1], color=tint, linewidth=0.6, alpha=0.4)
            mean = student[of_class].mean(dim=0)
            left.plot(mean[:, 0], mean[:, 1], color=tint, linewidth=2.2, label=names[label])
            left.plot(*mean[-1, :2], "o", color=tint, markeredgecolor=PAPER, markersize=7)
            ends = student[of_class][:, -1]
            if teacher is not None:
                mean, goals = teacher[of_class].mean(dim=0), teacher[of_class][:, -1]
                left.plot(mean[:, 0], mean[:, 1], color=tint, linewidth=1.6, linestyle=(0, (3, 1.5)))
                left.plot(*mean[-1, :2], "X", color=tint, markeredgecolor=PAPER, markersize=7)
                lines = torch.stack([ends, goals], dim=0)  # (2, n, 3)
                right.plot(lines[..., 0], lines[..., 1], color=tint, linewidth=0.5, alpha=0.3)
                right.scatter(goals[:, 0], goals[:, 1], marker="x", s=16, color=tint, linewidths=1)
            right.scatter(ends[:, 0], ends[:, 1], s=18, color=tint, edgecolors=PAPER, linewidths=0.4)
        start = student[:, 0].mean(dim=0)
        left.plot(*start[:2], "o", color=MUTED, markersize=7, markerfacecolor="none")
        left.annotate("start", tuple(start[:2].tolist()), xytext=(6, -10), textcoords="offset points", color=MUTED)
        for axes, title in ((left, "Paths"), (right, "Where they end")):
            axes.set(xlabel=f"PC 1 ({explained[0]:.0%})", ylabel=f"PC 2 ({explained[1]:.0%})", title=title)
            axes.grid(True, axis="both")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(drawn))
    return figure


def space_figure(projected: Projected, labels: Tensor, drawn: dict[int, Tensor], names: list[str]) -> HtmlFigure:
    """The drawn paths in three dimensions; the teacher's are dashed."""
    from odevit.analysis.report.html_figures import paths3d

    paths = []
    for who, points in zip(("", " (teacher)"), projected, strict=True):
        for index, (label, chosen) in enumerate(drawn.items()):
            for path in points[chosen] if points is not None else ():
                entry = {"points": path.numpy(), "label": names[label] + who, "color_index": index, "dashed": bool(who)}
                paths.append(entry)
    return paths3d(paths)


def layers_figure(errors: list[dict[str, float]]) -> "Figure":
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    layers = [error["layer"] for error in errors]
    with figure_style():
        figure, axes = subplots(width=5.6, height=2.8)
        for index, (key, name) in enumerate(
            (("of_spread", "relative to the spread"), ("relative", "relative to size"))
        ):
            axes.plot(layers, [error[key] for error in errors], "o-", color=color(index), label=name)
        axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
        axes.annotate(
            "no better than the mean state", (layers[-1], 1), xytext=(0, 3), textcoords="offset points", ha="right",
            fontsize=7.5, color=MUTED,
        )  # fmt: skip
        axes.set(xlabel="layer of the teacher", ylabel="error of the student", xticks=layers)
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
    return figure
