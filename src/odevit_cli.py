"""The command line. It only parses and calls.

It stands beside the package, not in it: importing `odevit` brings torch and transformers (and registers the model with
transformers), which takes seconds, while `odevit --help` must answer at once.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Vision Transformers as ordinary differential equations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the recipe.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the recipe's output folder.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse corrupt images instead of naming and skipping them.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete what is in the output folder.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Solver steps K; default: the model's own.")]
Solver = Annotated[str | None, typer.Option("--solver", help="Solver; default: the model's own.")]
DataName = Annotated[
    str, typer.Option("--data", help="'digits', a folder of images, parquet files, or a dataset on the hub.")
]
MaxImages = Annotated[int | None, typer.Option("--max-images", help="Use at most so many images, drawn at random.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")] = Path("runs/quickstart"),
) -> None:
    """Three minutes: train a small ViT on handwritten digits, turn it into an ODE-ViT, and report what happened."""
    from odevit.commands.quickstart import main as run

    run(output)


@app.command()
def info(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_PRESET", help="A preset, a folder or a hub name.")],
    steps: Steps = None,
    solver: Solver = None,
    as_json: AsJson = False,
) -> None:
    """Parameters, multiply-accumulates, bytes and the Lipschitz bound of a model."""
    from odevit.commands.console import print_info
    from odevit.dynamics.cost import describe
    from odevit.model.config import PRESETS
    from odevit.model.model import OdeViTForImageClassification
    from odevit.training.classifiers import load_odevit

    known = model in PRESETS
    if not known and "/" not in model and not Path(model).exists():
        raise ValueError(f"unknown model {model!r}: neither a folder, nor a hub name, nor one of {', '.join(PRESETS)}")
    network = OdeViTForImageClassification.from_preset(model) if known else load_odevit(model)
    print_info(model, describe(network.eval(), num_steps=steps, solver=solver), as_json)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="YAML file.")],
    set_: Override = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Train an ODE-ViT, or fine-tune any Hugging Face image classifier, as a recipe says."""
    from odevit.recipe import Recipe
    from odevit.training.loop import fit

    overrides = [*(set_ or []), *(["data.strict=true"] if strict else [])]
    fit(Recipe.load(recipe, overrides), resume=resume, overwrite=overwrite)


@app.command(name="eval")
def evaluate_(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an image classifier.")],
    data: DataName,
    steps: Steps = None,
    solver: Solver = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    max_images: MaxImages = None,
    as_json: AsJson = False,
) -> None:
    """Top-1/3/5 accuracy of a model, from exact counts."""
    from odevit.commands.console import print_numbers
    from odevit.commands.study import choose_split, load_data_for
    from odevit.training.classifiers import load_classifier
    from odevit.training.evaluation import evaluate

    network = load_classifier(model)
    chosen = choose_split(load_data_for(network, data, max_images), split)
    result = evaluate(network, chosen, num_steps=steps, solver=solver)
    print_numbers(f"{model} on {data} ({split})", result, as_json)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an image classifier.")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Files, folders, globs, - for stdin.")],
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Answers for each image.")] = None,
    attention: Annotated[Path | None, typer.Option("--attention", help="Draw what CLS looks at into this PNG.")] = None,
    steps: Steps = None,
    solver: Solver = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each image.")] = False,
) -> None:
    """What is in these images? A file that cannot be read is named, and the rest goes on."""
    from odevit.commands.predict import predict as run

    failed = run(model, images, top_k=top_k, as_json=as_json, attention=attention, steps=steps, solver=solver)
    if failed:
        raise typer.Exit(1)


@app.command()
def distill(
    teacher: Annotated[str | None, typer.Option(help="Folder or hub name of a trained ViT.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="As in eval; overrides the recipe's.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file; default: the built-in recipe.")] = None,
    set_: Override = None,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    strict: Strict = False,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="A tiny random teacher of the same family on digits, two steps: does it run?"),
    ] = False,
) -> None:
    """Turn a trained ViT into an ODE-ViT with about ten times fewer parameters."""
    from odevit.commands.distill import run_distillation

    overrides = [*(set_ or []), *(["data.strict=true"] if strict else [])]
    run_distillation(
        teacher=teacher, data=data, recipe=recipe, overrides=overrides, output=output, resume=resume,
        overwrite=overwrite, smoke=smoke,
    )  # fmt: skip


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an ODE-ViT.")],
    data: DataName,
    teacher: Annotated[str | None, typer.Option(help="Folder or hub name of its teacher.")] = None,
    only: Annotated[str | None, typer.Option(help="Comma-separated analyses; default: all.")] = None,
    max_images: Annotated[int, typer.Option("--max-images", help="Test images to look at, drawn at random.")] = 256,
    output: Output = None,
) -> None:
    """See the dynamics: Lyapunov exponents, stability, contraction, step robustness, attention … in one report."""
    from odevit.commands.study import analyze as run

    run(model, data, teacher=teacher, only=only.split(",") if only else None, max_images=max_images, output=output)


@app.command()
def audit(
    teacher: Annotated[str, typer.Argument(help="Folder or hub name of a trained ViT.")],
    data: DataName,
    image_size: Annotated[int | None, typer.Option(help="Run the teacher at this size; default: its own.")] = None,
    max_images: Annotated[int, typer.Option("--max-images", help="Images to look at, drawn at random.")] = 256,
    output: Output = None,
) -> None:
    """Is this ViT ODE-able? Velocity, curvature and tied-field residual of its layers, before any training."""
    from odevit.commands.study import audit as run

    run(teacher, data, image_size=image_size, max_images=max_images, output=output)


@app.command()
def page(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an ODE-ViT.")],
    data: Annotated[
        str | None, typer.Option("--data", help="Where the examples come from, as in eval; default: the model's run.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="Folder or hub name of its teacher.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page; default: the model's name.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("page.html"),
) -> None:
    """One HTML file that runs the model in a browser: draw or drop an image, and watch it flow."""
    from odevit.commands.page import page as run

    run(model, data=data, teacher=teacher, title=title, output=output)


def main() -> None:
    """Entry point: a wrong input ends with one sentence, a fault of ours with a traceback."""
    try:
        app()
    except (ValueError, OSError, ArithmeticError) as error:
        if os.environ.get("ODEVIT_DEBUG"):
            raise
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
