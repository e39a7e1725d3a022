"""`odevit eval`: a classifier and images in, its accuracy out."""

from pathlib import Path
from typing import Any

from odevit.commands import best_device
from odevit.commands.console import print_numbers
from odevit.data import Data, DataConfig, Split, load_data
from odevit.recipe import Recipe
from odevit.shipped import FOLDER, card, names
from odevit.training.classifiers import adapt_to_data, load_classifier, own_frame
from odevit.training.evaluation import certified_accuracy
from odevit.training.evaluation import evaluate as measure


def evaluate(
    model: str,
    data: str,
    *,
    steps: int | None = None,
    solver: str | None = None,
    split: str = "test",
    max_images: int | None = None,
    certified: bool = False,
    as_json: bool = False,
) -> dict[str, Any]:
    """Top-1/3/5 accuracy of a model, from exact counts; `certified` adds what is proven of a contractive one."""
    network = load_classifier(model).to(best_device())
    chosen = choose_split(load_data_for(network, data, max_images), split)
    result = measure(network, chosen, num_steps=steps, solver=solver)
    if certified:
        proven = certified_accuracy(network, chosen, num_steps=steps, solver=solver)
        shares = {f"certified at {name}": share for name, share in proven.pop("certified").items()}
        result = {**result, **shares, **proven}
    print_numbers(f"{model} on {data} ({split})", result, as_json)
    return result


def load_data_for(model: Any, name: str, limit: int | None = None) -> Data:
    """A data set as the model takes it; a wrong number of classes or channels is an error.

    Validation images are those that the model's run held out: of any others it has seen most.
    """
    config = DataConfig(name=name, image_size=model.config.image_size, limit=limit, **held_out_by_run(model))
    data = load_data(config, own_frame(model))
    adapt_to_data(model, data)
    return data


def held_out_by_run(model: Any) -> dict[str, Any]:
    """val_fraction and seed of the run that made a model, from the recipe beside it or its card in the zoo, if any."""
    folder = Path(getattr(model, "name_or_path", ""))
    if folder.parent == FOLDER and folder.name in names():
        return card(folder.name).get("held_out", {})
    recipe = folder.parent / "recipe.yaml"
    return held_out(Recipe.load(recipe)) if folder.name == "model" and recipe.is_file() else {}


def held_out(recipe: Recipe) -> dict[str, Any]:
    return {"val_fraction": recipe.data.val_fraction, "seed": recipe.data.seed}


def choose_split(data: Data, name: str) -> Split:
    """A split by name; a missing test split is replaced by no other, since the reader would not know."""
    if name not in ("train", "val", "test"):
        raise ValueError(f"unknown split {name!r}; choose one of train, val, test")
    split = getattr(data, name)
    if split is None:
        raise ValueError("this data has no test split; use --split val")
    return split
