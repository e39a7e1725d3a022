"""Contraction region: how near must a student's CLS state come to its teacher's for the same answer to be certain?

Behind a linear head z = W c + b, the answer y stays the same in the open ball around c of radius

    r(c) = min over j ≠ y of (z_y - z_j) / ‖w_y - w_j‖,

the distance to the nearest decision plane: no larger ball has this property. So a student that reads its state with
the teacher's own norm and head certainly agrees wherever ‖c_student - c_teacher‖ < r(c_teacher).

A tower that compares P c / ‖P c‖ with texts W answers as the linear head W P does, because the length changes no order:
its radius is that of W P, exactly, and c is what it is for every other teacher.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from odevit.analysis import Finding, Study, register_analysis
from odevit.dynamics.arrival import answer_head, distance_and_radius
from odevit.teachers.answerer import Answerer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = ("both right", "both wrong", "teacher only", "student only")
GROUP_COLORS = (0, 3, 2, 1)  # of the palette
SAME_READING_TOLERANCE = 1e-3  # of the logits' largest value: rounding of a float32 head is 100 times below it


@torch.no_grad()
def agreement(
    student: Any,
    teacher: Any,
    images: Tensor,
    labels: Tensor | None = None,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """How often the student gives the teacher's answer (observed), and how often it must (certified).

    images (N, c, S, S) are normalised for the student; the teacher gets them in its own normalisation.

    Returns observed (a share), certified (a share, or None where the two do not read the state in the same way), note
    (why not, or how the teacher was read; else empty), and per image: student_answers, teacher_answers, and, with a
    certificate, distances ‖norm(CLS_student) - norm(CLS_teacher)‖, radii r(c_teacher) and certified_images; with labels
    student_right and teacher_right too. All per-image values are (N,) tensors on the CPU.
    """
    parts = None if isinstance(teacher, Answerer) else teacher.parts()
    batches: list[dict[str, Tensor]] = []
    notes: list[str] = []
    for start in range(0, len(images), batch_size):
        values, note = _compare(student, teacher, parts, images[start : start + batch_size])
        batches.append(values)
        notes += [note] if note else []
        if progress is not None:
            progress(min(start + batch_size, len(images)), len(images))
    keys = set.intersection(*(set(values) for values in batches))
    result: dict[str, Any] = {key: torch.cat([values[key] for values in batches]).cpu() for key in sorted(keys)}
    result["observed"] = (result["student_answers"] == result["teacher_answers"]).double().mean().item()
    result["note"], result["certified"] = notes[0] if notes else "", None
    if "radii" in result:
        result["certified_images"] = result["distances"] < result["radii"]
        result["certified"] = result["certified_images"].double().mean().item()
    if labels is not None:
        for who in ("student", "teacher"):
            result[f"{who}_right"] = result[f"{who}_answers"] == labels.cpu()
    return result


def _compare(student: Any, teacher: Any, parts: Any, images: Tensor) -> tuple[dict[str, Tensor], str]:
    """Answers of one batch, with distances and radii where both read the state alike; and a note."""
    state = student.odevit.evolve(student.odevit.embed(images)).xs[-1]  # (b, n, d)
    features, head = student.features(state).double(), answer_head(student)  # (b, d)
    mine = student.classify(state) if head is None else linear(features, head[0].double(), head[1].double())
    theirs_to_see = teacher.renormalise(images, student.config)
    if parts is None:
        answers = teacher.answer(theirs_to_see).argmax(1)
        return {"student_answers": mine.argmax(1), "teacher_answers": answers}, "this teacher only answers"
    trace = teacher.trace(theirs_to_see)
    target = trace.states[-1][:, 0]  # (b, d')
    theirs, note = _same_reading(student, parts, target, trace.logits)
    if theirs is None:
        if trace.logits is None:
            raise ValueError(f"{note}, and the teacher has no classifier of its own: there is nothing to compare")
        return {"student_answers": mine.argmax(1), "teacher_answers": trace.logits.argmax(1)}, note
    distances, radii = distance_and_radius(student, state, target)
    answers = {"student_answers": mine.argmax(1), "teacher_answers": theirs.argmax(1)}
    return {**answers, "distances": distances, "radii": radii}, note


def read(cls: Tensor, norm: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """CLS states (b, d) -> logits (b, C), the head in float64 so that its rounding cannot contradict a certificate."""
    return linear(norm(cls).double(), weight.double(), bias.double())


def _same_reading(student: Any, parts: Any, target: Tensor, logits: Tensor | None) -> tuple[Tensor | None, str]:
    """The student's logits on the teacher's last CLS state (b, d), or None where its read-out is not the teacher's.

    Compared by what they do: on that state, the teacher's norm and head must give the same logits.
    """
    if student.config.pool != "cls":
        return None, f"the student reads its tokens by pool={student.config.pool!r}, the teacher its CLS token"
    head = answer_head(student)
    if head is None:
        return None, "the student's unit features meet a bias that differs between classes"
    if target.shape[1] != head[0].shape[1]:
        return None, f"the teacher is {target.shape[1]} wide and the student {head[0].shape[1]}"
    read_by_student = read(target, student.norm, *head)
    if parts.head_weight is None:
        if logits is not None:
            return None, f"the teacher's classifier does not read CLS alone: {parts.head_note}"
        return read_by_student, "the teacher has no classifier, its state is read with the student's"
    read_by_teacher = read(target, parts.norm, *parts.answer_head())
    if read_by_teacher.shape != read_by_student.shape:
        classes = read_by_teacher.shape[1], read_by_student.shape[1]
        return None, f"the teacher has {classes[0]} classes and the student {classes[1]}"
    gap = (read_by_student - read_by_teacher).abs().max().item()
    if gap > SAME_READING_TOLERANCE * max(1.0, read_by_teacher.abs().max().item()):
        return None, f"the student's norm and head are not the teacher's (logits differ by {gap:.2g} on the same state)"
    return read_by_student, f"the teacher is read through its CLS head: {parts.head_note}" if parts.head_note else ""


@register_analysis("contraction", summary="Is the student near enough to its teacher to agree?", needs_teacher=True)
def run(study: Study) -> Iterator[Finding]:
    result = agreement(
        study.model,
        study.teacher,
        study.images,
        study.labels,
        study.batch_size,
        lambda done, total: study.progress("contraction", done, total),
    )
    groups = _group(result["student_right"], result["teacher_right"])
    same = f"Student and teacher give the same answer on {result['observed']:.1%} of {len(study.images)} images"
    values: dict[str, Any] = {key: result[key] for key in ("observed", "certified", "note")}
    values["groups"] = {name: int((groups == i).sum()) for i, name in enumerate(GROUPS)}
    key_numbers = {"agreement with the teacher": f"{result['observed']:.1%}"}
    if result["certified"] is None:
        text = f"{same}; no agreement can be certified, because {result['note']}."
        yield Finding("contraction/agreement", values, "Agreement with the teacher", text, key_numbers=key_numbers)
        return
    distances, radii = result["distances"], result["radii"]
    values |= {"median_distance": distances.median().item(), "median_radius": radii.median().item()}
    values["median_distance_over_radius"] = (distances / radii).median().item()
    text = (
        f"{same}; on {result['certified']:.1%} this is certain, because the student's CLS state (after the final norm) "
        "is inside the teacher's contraction region: below the diagonal on the right."
    )
    text += f" Note: {result['note']}." if result["note"] else ""
    figure = agreement_figure(distances, radii, groups)
    headline = (
        f"On {result['certified']:.1%} of the images the agreement with the teacher is certain, not luck: the "
        "student's state ends within the radius in which the head cannot change its answer."
    )
    key_numbers["agreement that is certain"] = f"{result['certified']:.1%}"
    yield Finding("contraction/agreement", values, "Contraction region", text, figure, headline, key_numbers)


def _group(student_right: Tensor, teacher_right: Tensor) -> Tensor:
    """Index into GROUPS for every image."""
    wrong = torch.where(student_right, torch.tensor(3), torch.tensor(1))
    return torch.where(teacher_right, torch.where(student_right, torch.tensor(0), torch.tensor(2)), wrong)


def agreement_figure(distances: Tensor, radii: Tensor, groups: Tensor) -> "Figure":
    """The paper's Figure 3: distances by who is right; beside it distance against radius. All (N,)."""
    from odevit.analysis.report.style import INK, color, figure_style, subplots

    with figure_style():
        figure, (left, right) = subplots(1, 2, width=7.4, height=3.3, width_ratios=(1.1, 1))
        places, ticks = list(range(len(GROUPS)))[::-1], []
        for row, name in enumerate(GROUPS):
            of_group = distances[groups == row]
            _ridge(left, of_group, distances, places[row], color(GROUP_COLORS[row]))
            ticks.append(f"{name}\n{len(of_group)} image{'s' * (len(of_group) != 1)}")
        left.set_yticks([place + 0.3 for place in places], ticks)
        left.tick_params(axis="y", length=0, labelcolor=INK)
        left.grid(False)
        left.set(xlabel="distance after the final norm", ylim=(-0.15, len(GROUPS)))
        left.spines["left"].set_visible(False)
        left.set_title("How far from the teacher, by who is right")
        shown = torch.isfinite(radii) & (radii > 0)  # a logarithmic axis has no place for the others
        if shown.any():
            _against_radius(right, distances[shown], radii[shown], groups[shown])
        right.set_title("Distance against radius")
    return figure


def _against_radius(axes: Any, distances: Tensor, radii: Tensor, groups: Tensor) -> None:
    """The right panel: below the diagonal, agreement is certain. A distance of zero is drawn at the lower edge."""
    from odevit.analysis.report.style import MUTED, PAPER, color

    middle = radii.median().item()
    distances = distances.clamp_min(1e-3 * middle)
    low, high = radii.min().item() * 0.8, radii.max().item() * 1.25
    bottom, top = 0.7 * min(distances.min().item(), middle), 1.25 * max(distances.max().item(), middle)
    diagonal = [min(low, bottom), max(high, top)]
    axes.fill_between(diagonal, [diagonal[0]] * 2, diagonal, color=color(0), alpha=0.10, linewidth=0)
    axes.plot(diagonal, diagonal, color=MUTED, linewidth=1)
    for index, name in enumerate(GROUPS):
        style = dict(s=14, color=color(GROUP_COLORS[index]), edgecolors=PAPER, linewidths=0.3, alpha=0.85)
        axes.scatter(radii[groups == index], distances[groups == index], label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="radius of the contraction region", ylabel="distance")
    axes.set(xlim=(low, high), ylim=(bottom, top), box_aspect=1)
    axes.annotate("certain to agree", (0.96, 0.05), xycoords="axes fraction", ha="right", fontsize=8, color=MUTED)


def _ridge(axes: Any, values: Tensor, everything: Tensor, place: float, color: str) -> None:
    """One row of the left panel: a histogram scaled to its own height above a base line, and its median."""
    from odevit.analysis.report.style import INK, RULE

    axes.axhline(place, color=RULE, linewidth=0.7, zorder=0)
    if len(values) == 0:
        return
    edges = torch.linspace(everything.min().item(), everything.max().item() * (1 + 1e-6) + 1e-12, 41)
    heights = torch.histogram(values.double().cpu(), edges.double()).hist
    axes.stairs(place + 0.8 * heights / heights.max(), edges, baseline=place, fill=True, color=color, alpha=0.85)
    median = values.median().item()
    axes.plot([median, median], [place, place + 0.25], color=INK, linewidth=1.2)
