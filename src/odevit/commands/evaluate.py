"""`odevit eval`: a classifier and images in, its accuracy out."""

from typing import Any

from odevit.commands import best_device
from odevit.commands.console import print_numbers
from odevit.data import Data, DataConfig, Split, load_data
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
    """A data set as the model takes it; a wrong number of classes or channels is an error."""
    data = load_data(DataConfig(name=name, image_size=model.config.image_size, limit=limit), own_frame(model))
    adapt_to_data(model, data)
    return data


def choose_split(data: Data, name: str) -> Split:
    """A split by name; a missing test split is replaced by no other, since the reader would not know."""
    if name not in ("train", "val", "test"):
        raise ValueError(f"unknown split {name!r}; choose one of train, val, test")
    split = getattr(data, name)
    if split is None:
        raise ValueError("this data has no test split; use --split val")
    return split
