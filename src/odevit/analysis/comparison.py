"""A student and its teacher side by side: what it kept, and what it costs."""

from typing import Any

import torch

from odevit.analysis.contraction import agreement
from odevit.commands.console import print_table
from odevit.data import Split
from odevit.distill.student import parameter_report
from odevit.dynamics.cost import count_macs, milliseconds_per_image
from odevit.teachers.teacher import Teacher
from odevit.training.evaluation import model_input


@torch.no_grad()
def compare(student: Any, teacher: Teacher, split: Split, *, max_images: int | None = None) -> dict[str, Any]:
    """Accuracy, agreement (observed and certified), parameters, multiply-accumulates and milliseconds of both."""
    student = student.eval()
    count = len(split) if max_images is None else min(len(split), max_images)
    right_student = right_teacher = observed = certified = 0
    note, certifiable = "", True
    for images, labels in split.stream(list(torch.arange(count).split(256))):
        batch = agreement(student, teacher, model_input(student, images), labels)
        right_student += int(batch["student_right"].sum())
        right_teacher += int(batch["teacher_right"].sum())
        observed += int((batch["student_answers"] == batch["teacher_answers"]).sum())
        certifiable = certifiable and batch["certified"] is not None
        certified += int(batch["certified_images"].sum()) if certifiable else 0
        note = note or batch["note"]
    images = model_input(student, split.fetch(torch.arange(min(64, count)))[0])
    times = milliseconds_per_image({"student": student, "teacher": teacher}, images)
    report = parameter_report(student, teacher)
    return {
        "images": count,
        "student": {
            "accuracy": right_student / count,
            "parameters": report.total,
            "trainable": report.trainable,
            "macs": count_macs(student).total,
            "milliseconds": times["student"],
        },
        "teacher": {
            "accuracy": right_teacher / count,
            "parameters": report.teacher,
            "trainable": 0,
            "macs": count_macs(teacher.module).total,
            "milliseconds": times["teacher"],
        },
        "agreement": observed / count,
        "certified_agreement": certified / count if certifiable else None,
        "note": note,
        "parameter_ratio": report.ratio,
    }


def print_comparison(comparison: dict[str, Any]) -> None:
    student, teacher = comparison["student"], comparison["teacher"]

    def row(show: Any, key: str) -> dict[str, str]:
        return {"student": show(student[key]), "teacher": show(teacher[key])}

    print_table(
        f"Side by side on {comparison['images']:,} images",
        {
            "accuracy": row(lambda v: f"{v:.2%}", "accuracy"),
            "parameters": row(lambda v: f"{v:,}", "parameters"),
            "of these trained here": row(lambda v: f"{v:,}", "trainable"),
            "multiply-accumulates": row(lambda v: f"{v / 1e6:,.1f} M", "macs"),
            "milliseconds an image": row(lambda v: f"{v:.2f}", "milliseconds"),
        },
        headers=("student", "teacher"),
    )
    certified = comparison["certified_agreement"]
    print(
        f"The student has 1/{comparison['parameter_ratio']:.1f} of the parameters and agrees with its teacher on ",
        end="",
    )
    print(f"{comparison['agreement']:.2%} of the images", end="")
    print("." if certified is None else f"; on {certified:.2%} that is certain (contraction region).")
    if comparison["note"]:
        print(f"Note: {comparison['note']}.")
