"""Distillations of ten steps."""

import dataclasses

from tiny_runs import tiny_recipe

from odevit.distill.objective import DistillConfig, build
from odevit.training.claim import claim_run
from odevit.training.loop import fit

PHASES = {"collocation": 0.3, "forcing": 0.4, "losses": {"cls_path": 1.0, "patch_path": 0.5, "kl": 1.0, "jasmin": 0.01}}


def recipe_of(folder, teacher_folder, model=None, optim=None, augment=None, log_every=1, **distill):
    base = tiny_recipe(
        folder,
        data={"limit": 320},
        optim={"steps": 10, "batch_size": 32, "lr": 1e-3, **(optim or {})},
        loop={"eval_every": 5, "checkpoint_every": 4, "log_every": log_every},
        augment=augment or {},
    )
    config = DistillConfig(**{"teacher": str(teacher_folder), "cache_folder": str(folder / "cache"), **distill})
    return dataclasses.replace(base, task="distill", model={"mlp_ratio": 1, **(model or {})}, distill=config)


def distil(recipe, data, *, resume=False):
    """Only the training of `commands.distill.distill_recipe`."""
    with claim_run(recipe, resume=resume) as claim:
        student, objective = build(recipe, data)
        return fit(recipe, claim, model=student, objective=objective, data=data, progress_bar=False)
