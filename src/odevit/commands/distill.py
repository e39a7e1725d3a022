"""`odevit distill`: teacher and data in, student and a side-by-side comparison out."""

import json
from pathlib import Path
from typing import Any

from odevit.analysis.comparison import compare, print_comparison
from odevit.data import Data, load_data
from odevit.distill.objective import build
from odevit.recipe import Recipe, override
from odevit.teachers.teacher import Teacher, tiny_teacher
from odevit.training.loop import Result, fit

# What `odevit distill --teacher … --data …` does without a recipe.
DEFAULT: dict[str, Any] = {
    "task": "distill",
    "output": "runs/distill",
    "model": {"mlp_ratio": 4, "num_registers": 4},
    "augment": {"mixup": 0.5},
    "optim": {
        "name": "muon", "lr": 1e-3, "muon_lr": 3e-3, "weight_decay": 0.05, "muon_weight_decay": 1.0, "epochs": 20,
        "batch_size": 64, "warmup": 0.05, "ema": 0.99,
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
    assert recipe.distill is not None
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
    if teacher.checksum() != before:
        raise RuntimeError("the teacher was modified while the student was trained: do not trust this student")
    return result, teacher
