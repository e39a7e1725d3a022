"""`odevit distill`: teacher and data in, student and a side-by-side comparison out."""

import json
from pathlib import Path
from typing import Any

import torch

from odevit.analysis.contraction import agreement
from odevit.cost import count_macs, milliseconds_per_image
from odevit.data import Data, Split, load_data
from odevit.distill import build
from odevit.evaluation import model_input
from odevit.recipe import Recipe, override
from odevit.student import parameter_report
from odevit.tables import print_table
from odevit.teachers import Teacher, tiny_teacher
from odevit.train import Result, fit

# What `odevit distill --teacher … --data …` does without a recipe.
DEFAULT: dict[str, Any] = {
    "task": "distill",
    "output": "runs/distill",
    "model": {"mlp_ratio": 4, "num_registers": 4},
    "augment": {"mixup": 0.5},
    "optim": {
        "name": "muon", "lr": 1e-3, "muon_lr": 5e-3, "weight_decay": 0.05, "epochs": 20, "batch_size": 64,
        "warmup": 0.05, "ema": 0.99,
    },
    "distill": {"losses": {"cls_path": 0.003, "kl": 1.0}, "placement": "uniform"},
}  # fmt: skip

SMOKE: dict[str, Any] = {"data": {"name": "digits", "image_size": 32, "limit": 128}, "augment": {}}
SMOKE_OVERRIDES = [
    "optim.steps=2",
    "optim.batch_size=16",
    "loop.eval_every=2",
    "loop.compile=false",
    "distill.sample=32",
]


def run_distillation(
    *,
    teacher: str | None,
    data: str | None,
    recipe: Path | None,
    overrides: list[str],
    output: Path | None,
    resume: bool,
    overwrite: bool,
    smoke: bool,
) -> dict[str, Any]:
    """Distil as a recipe (or the built-in one) says, compare student and teacher on the test split, and print it."""
    values = Recipe.load(recipe).to_dict() if recipe else DEFAULT
    assignments = [*overrides]
    assignments += [f"distill.teacher={teacher}"] if teacher else []
    assignments += [f"data.name={data}"] if data else []
    assignments += [f"output={output}"] if output else []
    if smoke:
        values = {**values, **SMOKE, "output": "runs/smoke"}
        assignments = [*SMOKE_OVERRIDES, *assignments]
    if "data" not in values and not data:
        raise ValueError("distillation needs images: --data digits, a folder, parquet files or a hub dataset")
    loaded = Recipe.from_dict(override(values, assignments))
    images = load_data(loaded.data)
    tiny = smoke_teacher(loaded) if smoke else None
    result, network = distil(loaded, images, teacher=tiny, resume=resume, overwrite=overwrite or smoke)
    comparison = compare(result.model, network, images.test or images.val)
    (result.folder / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    print_comparison(comparison)
    return comparison


def smoke_teacher(recipe: Recipe) -> Teacher:
    """A tiny random teacher of the family that the recipe's own teacher belongs to, judged by its name."""
    name = recipe.distill.teacher.lower()
    known = (("dinov2-with-registers", "dinov2-registers"), ("dinov2", "dinov2"), ("dino", "dino"), ("deit", "deit"))
    family = next((family for part, family in known if part in name), "vit")
    return tiny_teacher(family, image_size=32, patch_size=8, num_channels=1)


def distil(
    recipe: Recipe,
    data: Data,
    *,
    teacher: Teacher | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> tuple[Result, Teacher]:
    """Build the student, run the loop, and prove that the teacher is what it was."""
    student, objective = build(recipe, data, teacher)
    teacher, before = objective.teacher, objective.teacher.checksum()
    result = fit(
        recipe, model=student, objective=objective, data=data, resume=resume, overwrite=overwrite,
        progress_bar=progress_bar,
    )  # fmt: skip
    assert teacher.checksum() == before, "the teacher was modified"
    return result, teacher


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
