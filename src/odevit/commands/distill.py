"""`odevit distill`: teacher and data in; a student, a side-by-side comparison and a report out."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odevit.analysis.comparison import compare, comparison_finding
from odevit.atomic import write_file
from odevit.commands.analyze import QUICK, Report, write_study
from odevit.commands.calibrate import MOST_IMAGES, adopt_cheapest, shuffled, write_config
from odevit.commands.console import print_comparison
from odevit.commands.evaluate import tell_of_other_classes
from odevit.data import Data, load_data
from odevit.distill.answers import build_answers
from odevit.distill.objective import build
from odevit.distill.split_teacher import gather_teacher_
from odevit.model.solvers import ADAPTIVE
from odevit.recipe import Recipe, assignment, override
from odevit.teachers.answerer import Answerer
from odevit.teachers.preprocessing import wanted_by, wanted_by_saved
from odevit.teachers.reading import model_class
from odevit.teachers.teacher import Teacher, find_family, tiny_teacher
from odevit.training.claim import claim_run
from odevit.training.classifiers import adapt_to_data, resolve_model
from odevit.training.loop import Result, fit

# What `odevit distill --teacher … --data …` does without a recipe.
DEFAULT: dict[str, Any] = {
    "task": "distill",
    "output": "runs/distill",
    "model": {"mlp_ratio": 4, "num_registers": 4, "num_steps": 6},
    "augment": {"mixup": 0.5},
    "optim": {
        "name": "muon", "lr": 1e-3, "muon_lr": 3e-3, "weight_decay": 0.05, "muon_weight_decay": 1.0, "epochs": 20,
        "batch_size": 64, "warmup": 0.05, "ema": 0.99,
    },
    "loop": {"step_schedule": [[0, [3, 4, 5, 6, 7, 8]]]},  # K drawn anew at every step: the weights learn a flow
    "distill": {"losses": {"cls_path": 0.003, "kl": 1.0}, "placement": "uniform"},
}  # fmt: skip

SMOKE: dict[str, Any] = {
    "output": "runs/smoke",
    "data": {"name": "digits", "image_size": 32, "limit": 64},
    "augment": {},
}
SMOKE_OVERRIDES = [
    "optim.steps=2",
    "optim.batch_size=16",
    "loop.eval_every=2",
    "loop.compile=false",
    "distill.sample=32",
    "distill.cache_views=1",
    "distill.extra_images=''",
]
QUICK_REPORT = Report(max_images=64, options=QUICK)  # a minute or two for a CIFAR student on two cores

FEW_IMAGES = 1000  # fewer cannot tell half a point


def distill(
    *,
    teacher: str | None = None,
    prompts: Sequence[str] | None = None,
    data: str | None = None,
    recipe: str | Path | None = None,
    overrides: Sequence[str] | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    smoke: bool = False,
    report: bool = True,
    max_images: int | None = None,
) -> Result:
    """Turn a trained ViT into an ODE-ViT, as a recipe (or the built-in one) and what is given beside it say.

    smoke: a tiny random teacher of the same family, two steps on digits, no report: does it run?
    """
    values = Recipe.load(recipe).to_dict() if recipe else DEFAULT
    if values["task"] != "distill":
        raise ValueError(f"{recipe} trains without a teacher (it has no task: distill); run: odevit train {recipe}")
    assignments = [*(overrides or ()), *(["data.strict=true"] if strict else [])]
    assignments += [f"distill.prompts={json.dumps(list(prompts))}"] if prompts else []
    for key, value in (("distill.teacher", teacher), ("data.name", data), ("output", output)):
        assignments += [assignment(key, value)] if value else []
    if smoke:
        values, assignments = {**values, **SMOKE}, [*SMOKE_OVERRIDES, *assignments]
    if "data" not in values and not data:
        raise ValueError("distillation needs images: --data digits, a folder, parquet files or a hub dataset")
    loaded = Recipe.from_dict(override(values, assignments))
    tiny = smoke_teacher(loaded) if smoke else None
    wanted = replace(QUICK_REPORT, max_images=max_images or QUICK_REPORT.max_images) if report and not smoke else None
    return distill_recipe(loaded, teacher=tiny, report=wanted, resume=resume, overwrite=overwrite or smoke)


def distill_recipe(
    recipe: Recipe,
    *,
    teacher: Teacher | None = None,
    data: Data | None = None,
    report: Report | None = QUICK_REPORT,
    resume: bool = False,
    overwrite: bool = False,
    progress_bar: bool = True,
    faster: float | None = None,
) -> Result:
    """Claim the folder, build student and objective, train, prove that the teacher is what it was, compare, report.

    Teacher and data are loaded as the recipe says unless given. The first process alone compares and reports.
    faster: accuracy that a cheaper setting may cost; None keeps the setting of the training.
    """
    assert recipe.distill is not None
    with claim_run(recipe, resume=resume, overwrite=overwrite) as claim:
        name = recipe.distill.teacher
        if teacher is None and recipe.distill.match == "answers":
            # a run's folder or a name of the zoo, as `load_classifier` takes it
            name = resolve_model(recipe.distill.named_teacher())
        wanted = wanted_by(teacher.module) if teacher else wanted_by_saved(name)
        data = data or load_data(recipe.data, wanted=wanted)
        if claim.first:
            tell_of_other_classes("the teacher's", wanted, data)
        objective: Any
        if recipe.distill.match == "answers":
            student, objective = build_answers(recipe, data, claim.device, teacher.module if teacher else None)
        else:
            student, objective = build(recipe, data, teacher, claim.device)
        taught_by, before = objective.teacher, objective.teacher.checksum()
        if claim.first and taught_by.mean is None:
            told = "the teacher does not say how its images are normalised: mean and std of the data are taken"
            print(f"{told} (data.mean and data.std say otherwise)", file=sys.stderr)
        side = min(taught_by.image_size, data.train.fetch(torch.arange(1))[0].shape[-1])
        if claim.first and recipe.distill.cache == "none" and student.config.image_size < side:
            told = f"without a cache the teacher is shown images of the student's {student.config.image_size} pixels"
            print(f"{told}; distill.cache=cls or logits shows it {side}", file=sys.stderr)
        if student.config.solver in ADAPTIVE:
            raise ValueError(
                f"a student needs a fixed-step solver, got {student.config.solver}: its cost is compared with its "
                "teacher's. Any solver may integrate the weights afterwards"
            )
        student = adapt_to_data(student, data)
        result = fit(recipe, claim, model=student, objective=objective, data=data, progress_bar=progress_bar)
        if taught_by.checksum() != before:
            raise RuntimeError("the teacher was modified while the student was trained: do not trust this student")
        gather_teacher_(taught_by)  # the first process alone goes on with it
        if claim.first and faster is not None:
            adopt_cheapest(result.model, *images_to_choose_by(result.model, data), faster)
            write_config(result.model, result.folder / "model")
        if claim.first:
            write_comparison(result, taught_by, data, recipe, report)
    return result


def images_to_choose_by(student: Any, data: Data) -> tuple[Tensor, Tensor]:
    """The validation images; where they are few, training images too: a student taught by answers saw no label."""
    parts = [shuffled(student, data.val, MOST_IMAGES)]
    if len(data.val) < FEW_IMAGES:
        parts.append(shuffled(student, data.train, MOST_IMAGES - len(data.val)))
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)


def write_comparison(
    result: Result, teacher: Teacher | Answerer, data: Data, recipe: Recipe, report: Report | None
) -> None:
    """comparison.json and its table, and the report when one is wanted."""
    assert recipe.distill is not None
    comparison = compare(result.model, teacher, data.test or data.val)
    write_file(result.folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    print_comparison(comparison)
    if report is not None:
        names = {"model": str(result.folder / "model"), "data": recipe.data.name, "teacher": recipe.distill.teacher}
        first = [comparison_finding(comparison)]
        seen = teacher if isinstance(teacher, Teacher) else None  # one that only answers has no states to look at
        write_study(result.model, data, seen, report.into(result.folder), names=names, first=first)


def smoke_teacher(recipe: Recipe) -> Teacher:
    """A tiny random teacher of the family of the recipe's own teacher, as its config.json tells it; in every process
    the same."""
    assert recipe.distill is not None
    family = family_of(recipe.distill.teacher)
    if family is None:
        print(f"{recipe.distill.teacher or 'the teacher'} is not here, so its family is unknown: a tiny ViT stands in")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        channels = 1 if recipe.data.name == "digits" else 3
        return tiny_teacher(family or "vit", image_size=32, patch_size=8, num_channels=channels)


def family_of(name: str) -> str | None:
    """The family of a model by its config.json alone, in a folder or in the local cache of the hub; None without it."""
    import transformers
    from transformers.utils import cached_file

    folder = Path(name) / "config.json"
    found = str(folder) if folder.is_file() else None
    if found is None and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        found = cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if found is None:
        return None
    values = json.loads(Path(found).read_text())
    if "model_type" not in values:
        return "timm" if "architecture" in values else None
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        try:
            return find_family(model_class(config)(config))
        except ValueError:  # no Vision Transformer: it can teach by its answers alone
            return None
