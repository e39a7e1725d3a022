"""A student and its teacher side by side: what it kept, and what it costs."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from odevit.analysis import Finding, Study, register_analysis
from odevit.analysis.contraction import agreement
from odevit.analysis.flow import MOST_IMAGES, flow_gap
from odevit.data import Split
from odevit.distill.student import parameter_report
from odevit.dynamics.cost import count_macs, milliseconds_per_image
from odevit.teachers.answerer import Answerer
from odevit.teachers.teacher import Teacher
from odevit.training.evaluation import model_input

TIMED_IMAGES = 64


def compare(student: Any, teacher: Teacher | Answerer, split: Split) -> dict[str, Any]:
    """Accuracy, agreement (observed and certified), parameters, multiply-accumulates and milliseconds of both."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))  # a folder is sorted by class
    batches = split.stream(list(order.split(256)))
    return compare_on(student.eval(), teacher, ((model_input(student, images), labels) for images, labels in batches))


@torch.no_grad()
def compare_on(student: Any, teacher: Teacher | Answerer, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The same on batches of images (b, c, S, S), prepared and on the student's device, and labels (b,)."""
    count = right_student = right_teacher = observed = certified = 0
    note, certifiable, timed, kept = "", True, None, []
    for images, labels in batches:
        timed = images[:TIMED_IMAGES] if timed is None else timed
        batch = agreement(student, teacher, images, labels)
        kept += [(images, labels)] if count < MOST_IMAGES else []
        count += len(labels)
        right_student += int(batch["student_right"].sum())
        right_teacher += int(batch["teacher_right"].sum())
        observed += int((batch["student_answers"] == batch["teacher_answers"]).sum())
        certifiable = certifiable and batch["certified"] is not None
        certified += int(batch["certified_images"].sum()) if certifiable else 0
        note = note or batch["note"]
    assert timed is not None
    theirs = teacher.renormalise(timed, student.config)
    times = milliseconds_per_image({"student": student, "teacher": lambda _: teacher.answer(theirs)}, timed)
    looked_at, answers = (torch.cat(column)[:MOST_IMAGES] for column in zip(*kept, strict=True))
    gap = flow_gap(student, looked_at, answers)
    report, shape = parameter_report(student, teacher), tuple(timed.shape[1:])
    return {
        "images": count,
        "student": {
            "accuracy": right_student / count,
            "parameters": report.total,
            "trainable": report.trainable,
            "macs": count_macs(student, shape=shape).total,
            "milliseconds": times["student"],
        },
        "teacher": {
            "accuracy": right_teacher / count,
            "parameters": report.teacher,
            "trainable": 0,
            "macs": count_macs(teacher.module, shape=tuple(theirs.shape[1:])).total,
            "milliseconds": times["teacher"],
        },
        "agreement": observed / count,
        "certified_agreement": certified / count if certifiable else None,
        "note": note,
        "parameter_ratio": report.ratio,
        "flow": gap,
    }


@register_analysis("comparison", summary="What did the student keep, and what does it cost?", needs_teacher=True)
def run(study: Study) -> Iterator[Finding]:
    assert study.teacher is not None
    yield comparison_finding(compare_on(study.model, study.teacher, study.batches("comparison")))


def comparison_finding(comparison: dict[str, Any]) -> Finding:
    """The side-by-side table as a section of the report."""
    student, teacher = comparison["student"], comparison["teacher"]
    rows = {
        who: {
            "accuracy": f"{numbers['accuracy']:.2%}",
            "parameters": f"{numbers['parameters']:,}",
            "multiply-accumulates": f"{numbers['macs'] / 1e6:,.2f} M",
            "ms an image": f"{numbers['milliseconds']:.3f}",
        }
        for who, numbers in (("teacher", teacher), ("student", student))
    }
    text = (
        f"The student answers {student['accuracy']:.1%} of {comparison['images']} images right, the teacher "
        f"{teacher['accuracy']:.1%}; it has 1/{comparison['parameter_ratio']:.1f} of the teacher's parameters and "
        f"gives the teacher's answer on {comparison['agreement']:.1%}."
    )
    return Finding("comparison/side_by_side", rows, "Teacher and student", text, headline=text)
