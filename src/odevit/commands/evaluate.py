"""`odevit eval`: a classifier and images in, its accuracy out."""

import sys
from pathlib import Path
from typing import Any

from odevit.commands import best_device
from odevit.commands.console import print_numbers
from odevit.data import Data, DataConfig, Split, Wanted, load_data
from odevit.recipe import Recipe
from odevit.shipped import FOLDER, card, names
from odevit.teachers.preprocessing import wanted_by
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
    config = DataConfig(name=name, image_size=model.config.image_size, limit=limit, **held_out_by_run(model, name))
    wanted = wanted_by(model)
    data = load_data(config, own_frame(model), wanted)
    tell_of_other_classes("the model's", wanted, data)
    adapt_to_data(model, data)
    return data


def tell_of_other_classes(whose: str, wanted: Wanted, data: Data) -> None:
    """Classes of other names are taken in their order; that may be meant, and it may not."""
    theirs = list(wanted.class_names or ())
    if len(theirs) == len(data.class_names) and set(theirs) != set(data.class_names):
        first = next(pair for pair in zip(theirs, data.class_names, strict=True) if pair[0] != pair[1])
        print(
            f"{whose} classes are not named as those of the data: its {first[0]!r} is taken for {first[1]!r}, "
            "and so on in their order",
            file=sys.stderr,
        )


def held_out_by_run(model: Any, data: str) -> dict[str, Any]:
    """val_fraction and seed of the run that made a model, from the recipe beside it or its card in the zoo, if any; and
    the columns that it read, when this is its data."""
    folder = Path(getattr(model, "name_or_path", ""))
    if folder.parent == FOLDER and folder.name in names():
        return card(folder.name).get("held_out", {})
    recipe = folder.parent / "recipe.yaml"
    if folder.name not in ("model", "best") or not recipe.is_file():
        return {}
    made = Recipe.load(recipe)
    columns = {"image_column": made.data.image_column, "label_column": made.data.label_column}
    return held_out(made) | (columns if made.data.name == data else {})


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
