"""`odevit page`: a model as one HTML file that runs it in the visitor's browser."""

from pathlib import Path
from typing import Any

import torch

from odevit.commands.console import check_output
from odevit.commands.evaluate import load_data_for
from odevit.data import Data
from odevit.export.graphs import label_names
from odevit.page import make_payload, write_page
from odevit.shipped import card, names
from odevit.training.classifiers import load_odevit, resolve_model

IMAGES = 500  # their class means span the plane in which the page shows CLS


def page(
    model: str,
    *,
    data: str | None = None,
    teacher: str | None = None,
    title: str | None = None,
    output: Path = Path("page.html"),
) -> Path:
    """The command: returns the path of the page. Without `data`, the data of the run that made the model, if known."""
    check_output(output)
    network = load_odevit(model)
    name = data or data_of_the_run(model)
    loaded = load_data_for(network, name) if name is not None else None
    teaching = None
    if teacher is not None:
        from odevit.teachers.teacher import load_teacher

        teaching = load_teacher(teacher, image_size=network.config.image_size)
    folder = Path(model).resolve()
    title = title or (folder.parent if folder.name == "model" else folder).name  # RUN/model is called RUN
    path = write_page(page_of(network, loaded, teacher=teaching, title=title), output)
    print(f"page: {path} ({path.stat().st_size / 1e6:.2f} MB; open it in a browser, or put it on any static host)")
    if loaded is None:
        print("It has no examples and no class means: the model's data is not known here; --data gives them.")
    return path


def page_of(model: Any, data: Data | None, *, teacher: Any = None, title: str) -> dict[str, Any]:
    """What a page of the model holds: examples and class means from the test split (from val when there is none)."""
    if data is None:
        names = label_names(model)  # config.json may have its keys in another order
        return make_payload(model, title=title, class_names=names, teacher=teacher)
    split = data.test if data.test is not None else data.val
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:IMAGES]
    images, labels = split.fetch(rows)
    return make_payload(
        model, title=title, class_names=data.class_names, images=images, labels=labels, teacher=teacher
    )  # fmt: skip


def data_of_the_run(model: str) -> str | None:
    """The data that the recipe beside a model names, or a shipped model's card, where it comes with the package."""
    if model in names():
        return "digits" if card(model)["data"] == "digits" else None
    recipe = Path(resolve_model(model)).resolve().parent / "recipe.yaml"
    if not recipe.is_file():
        return None
    from odevit.recipe import Recipe

    return Recipe.load(recipe).data.name
