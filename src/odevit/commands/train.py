"""`odevit train`: a recipe in, a run folder out. A recipe with a teacher goes the way of `odevit distill`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from odevit.commands.distill import distill_recipe
from odevit.data import Data, derive_seed, load_data
from odevit.recipe import Recipe, assignment
from odevit.training.claim import claim_run
from odevit.training.classifiers import adapt_to_data, build_classifier
from odevit.training.loop import Result, fit
from odevit.training.objectives import Classification, Objective


def train(
    recipe: str | Path,
    overrides: Sequence[str] | None = None,
    *,
    data: str | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    strict: bool = False,
) -> Result:
    """Train an ODE-ViT, fine-tune any Hugging Face image classifier, or distil a teacher, as a recipe says."""
    given = {"data.name": data, "output": output, "data.strict": strict}
    assignments = [*(overrides or ()), *(assignment(key, value) for key, value in given.items() if value)]
    loaded = Recipe.load(recipe, assignments)
    run = distill_recipe if loaded.task == "distill" else train_recipe
    return run(loaded, resume=resume, overwrite=overwrite)


def train_recipe(
    recipe: Recipe,
    *,
    model: Any = None,
    objective: Objective | None = None,
    data: Data | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> Result:
    """Claim the folder, load the data, build the model, train. Model, objective and data may be given instead."""
    with claim_run(recipe, resume=resume, overwrite=overwrite) as claim:
        data = data or load_data(recipe.data)
        torch.manual_seed(derive_seed(recipe.seed, "initial weights"))
        model = build_classifier(recipe.model, data, recipe.data) if model is None else adapt_to_data(model, data)
        objective = objective or Classification(recipe.penalties)
        return fit(recipe, claim, model=model, objective=objective, data=data, progress_bar=progress_bar)
