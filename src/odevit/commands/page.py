"""`odevit page`: a model as one HTML file that runs it in the visitor's browser."""

from pathlib import Path

import torch

from odevit.commands.evaluate import load_data_for
from odevit.page import make_payload, write_page
from odevit.training.classifiers import load_odevit

IMAGES = 500  # their class means span the plane


def page(
    model: str,
    *,
    data: str | None = None,
    teacher: str | None = None,
    title: str | None = None,
    output: Path = Path("page.html"),
) -> Path:
    """The command: returns the path of the page. Without `data`, the data of the run that made the model, if known."""
    network = load_odevit(model)
    name = data or data_of_the_run(Path(model))
    images = labels = None
    names = list((network.config.id2label or {}).values())
    if name is not None:
        loaded = load_data_for(network, name)
        split = loaded.test if loaded.test is not None else loaded.val
        rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:IMAGES]
        (images, labels), names = split.fetch(rows), loaded.class_names
    teaching = None
    if teacher is not None:
        from odevit.teachers.teacher import load_teacher

        teaching = load_teacher(teacher, image_size=network.config.image_size)
    payload = make_payload(
        network, title=title or Path(model).resolve().name, class_names=names, images=images, labels=labels,
        teacher=teaching,
    )  # fmt: skip
    path = write_page(payload, output)
    print(f"page: {path} ({path.stat().st_size / 1e6:.2f} MB; open it in a browser, or put it on any static host)")
    return path


def data_of_the_run(model: Path) -> str | None:
    """The data that the recipe beside a model names, for a model inside its run's folder."""
    recipe = model.resolve().parent / "recipe.yaml"
    if not recipe.is_file():
        return None
    from odevit.recipe import Recipe

    return Recipe.load(recipe).data.name
