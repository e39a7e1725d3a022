"""`odevit quickstart`: the whole story on handwritten digits, in two minutes on two quiet cores and without a download.

A small discrete ViT is trained (the teacher), turned into an ODE-ViT with one shared block (the student, label-free),
and both are compared; then the dynamics are analysed and everything is written into one report.
"""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from odevit.commands.analyze import QUICK, Report
from odevit.commands.console import check_output
from odevit.commands.distill import distill_recipe
from odevit.commands.train import train_recipe
from odevit.recipe import Recipe

DATA: dict[str, Any] = {"name": "digits", "image_size": 8}  # 1,797 images of scikit-learn, 8×8 grey
AUGMENT: dict[str, Any] = {"mixup": 0.5}  # without it the teacher stays near 96 %: 1,293 images are few

TEACHER: dict[str, Any] = {
    "model": {
        "type": "vit", "patch_size": 2, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 128, "initializer_range": 0.1,
    },
    "data": DATA,
    "augment": AUGMENT,
    "optim": {"lr": 2e-3, "weight_decay": 0.05, "epochs": 40, "batch_size": 64, "warmup": 0.1, "ema": 0.99},
    "loop": {"eval_every": 200},
}  # fmt: skip

STUDENT: dict[str, Any] = {
    "task": "distill",
    "model": {"mlp_ratio": 2, "num_registers": 0, "num_steps": 4},
    "data": DATA,
    "augment": AUGMENT,
    "optim": {
        "name": "muon", "lr": 3e-3, "muon_lr": 1e-2, "weight_decay": 0.01, "epochs": 30, "batch_size": 64,
        "warmup": 0.1, "ema": 0.99,
    },
    "loop": {"eval_every": 200, "step_schedule": [[0, [2, 3, 4, 5, 6, 8]]]},  # K drawn anew at every step: a flow
    "distill": {"losses": {"cls_path": 0.003, "kl": 1.0}, "placement": "uniform"},
}  # fmt: skip

FASTER = 0.005  # accuracy that fewer steps may cost: 7 of the 1,438 images that are not for testing
REPORT_IMAGES = 360  # all that the test split has


def quickstart(output: Path, *, quick: bool = False) -> Path:
    """Train a teacher, distil it, and say where the report is. `quick` is for tests: a few steps, no claims."""
    start, console = time.perf_counter(), Console()
    check_output(output / "report.html")
    teacher = output / "teacher"
    console.rule("[bold]1. A discrete ViT learns to read digits: the teacher")
    train_recipe(recipe_for(TEACHER, teacher, quick), overwrite=True)

    console.rule("[bold]2. One shared block, integrated over time, learns from it (no labels). What does its flow do?")
    report = Report(
        output,
        title="A Vision Transformer turned into a flow",
        command="odevit quickstart",
        max_images=40 if quick else REPORT_IMAGES,
        options=QUICK,
        picture=("robustness/verdict", output / "quickstart.png"),
        live=True,
    )
    values = {**STUDENT, "distill": {**STUDENT["distill"], "teacher": str(teacher / "model")}}
    student = recipe_for(values, output / "student", quick)
    result = distill_recipe(student, report=report, overwrite=True, faster=FASTER)
    console.print(f"\nDone in {time.perf_counter() - start:.0f} s. Model: {result.folder / 'model'}")
    console.print(f"Picture: {output / 'quickstart.png'}")
    console.print(f"[bold]Report: {output / 'report.html'}[/]  (open it in a browser)", soft_wrap=True)
    return output / "report.html"


def recipe_for(values: dict[str, Any], folder: Path, quick: bool) -> Recipe:
    optim = {**values["optim"], "epochs": 0.5} if quick else values["optim"]
    return Recipe.from_dict({**values, "optim": optim, "output": str(folder)})
