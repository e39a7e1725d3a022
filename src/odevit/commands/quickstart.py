"""`odevit quickstart`: the whole story on handwritten digits, in three minutes on two cores and without a download.

A small discrete ViT is trained (the teacher), turned into an ODE-ViT with one shared block (the student, label-free),
and both are compared; then the dynamics are analysed and everything is written into one report.
"""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from odevit.analysis import Finding, run_analyses
from odevit.analysis.comparison import compare, print_comparison
from odevit.analysis.report import write_report
from odevit.commands.distill import distil
from odevit.commands.study import make_study, progress_bars
from odevit.data import load_data
from odevit.recipe import Recipe
from odevit.teachers.teacher import load_teacher
from odevit.training.loop import fit

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
    "model": {"mlp_ratio": 2, "num_registers": 2, "num_steps": 6},
    "data": DATA,
    "augment": AUGMENT,
    "optim": {
        "name": "muon", "lr": 3e-3, "muon_lr": 1e-2, "weight_decay": 0.01, "epochs": 30, "batch_size": 64,
        "warmup": 0.1, "ema": 0.99,
    },
    "loop": {"eval_every": 200},
    "distill": {"losses": {"cls_path": 0.003, "kl": 1.0}, "placement": "uniform"},
}  # fmt: skip

# The report's analyses, cut down to what three minutes allow.
OPTIONS: dict[str, dict[str, Any]] = {
    "robustness": {"max_images": 128, "max_evaluations": 48},
    "stability": {"path_images": 8, "radius_images": 8},
    "error_bound": {"images": 4},
}


def main(folder: Path, *, images: int = 360, quick: bool = False) -> dict[str, Any]:
    """Run it and print where the report is. Returns the comparison. `quick` is for tests: a few steps, no claims."""
    start, console = time.perf_counter(), Console()
    data = load_data(Recipe.from_dict({**TEACHER, "output": str(folder)}).data)

    console.rule("[bold]1. A discrete ViT learns to read digits: the teacher")
    fit(recipe_for(TEACHER, folder / "teacher", quick), data=data, overwrite=True)
    teacher = load_teacher(folder / "teacher" / "model")

    console.rule("[bold]2. One shared block, integrated over time, learns from it: the student (no labels)")
    result, _ = distil(recipe_for(STUDENT, folder / "student", quick), data, teacher=teacher, overwrite=True)
    comparison = compare(result.model, teacher, data.test or data.val)
    print_comparison(comparison)

    console.rule("[bold]3. What does the flow do?")
    with progress_bars() as progress:
        study = make_study(
            result.model, data, teacher=teacher, max_images=40 if quick else images, options=OPTIONS, progress=progress
        )
        findings = [comparison_finding(comparison), *run_analyses(None, study)]
    report = write_report(
        findings,
        folder,
        title="A Vision Transformer turned into a flow",
        command="odevit quickstart",
        meta={"data": "scikit-learn's digits", "images": study.sampling, "student": "student/model"},
    )
    figures = {finding.name: finding.figure for finding in findings}
    figures["robustness/verdict"].savefig(folder / "quickstart.png", dpi=160, facecolor="white")  # type: ignore
    console.print(f"\nDone in {time.perf_counter() - start:.0f} s. Model: {result.folder / 'model'}")
    console.print(f"Picture: {folder / 'quickstart.png'}")
    console.print(f"[bold]Report: {report}[/]  (open it in a browser)", soft_wrap=True)
    return comparison


def recipe_for(values: dict[str, Any], folder: Path, quick: bool) -> Recipe:
    optim = {**values["optim"], "epochs": 0.5} if quick else values["optim"]
    return Recipe.from_dict({**values, "optim": optim, "output": str(folder)})


def comparison_finding(comparison: dict[str, Any]) -> Finding:
    """The side-by-side table as the first section of the report."""
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
        f"The student answers {student['accuracy']:.1%} of {comparison['images']} test images right, the teacher "
        f"{teacher['accuracy']:.1%}; it has 1/{comparison['parameter_ratio']:.1f} of the teacher's parameters and "
        f"gives the teacher's answer on {comparison['agreement']:.1%}."
    )
    return Finding("comparison/side_by_side", rows, "Teacher and student", text, headline=text)
