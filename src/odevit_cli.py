"""The command line: a table of verbs. Each declares its options here, and calls the function of the same options.

It stands beside the package, not in it: importing `odevit` brings torch and transformers (and registers the model with
transformers), which takes seconds, while `--help` must answer at once.
"""

import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

VERBS: dict[str, str] = {
    "quickstart": "odevit.commands.quickstart:quickstart",
    "info": "odevit.commands.info:info",
    "train": "odevit.commands.train:train",
    "recipes": "odevit.commands.recipes:recipes",
    "eval": "odevit.commands.evaluate:evaluate",
    "predict": "odevit.commands.predict:predict",
    "export": "odevit.commands.export:export",
    "distill": "odevit.commands.distill:distill",
    "analyze": "odevit.commands.analyze:analyze",
    "audit": "odevit.commands.audit:audit",
    "calibrate": "odevit.commands.calibrate:calibrate",
    "doctor": "odevit.commands.doctor:doctor",
    "page": "odevit.commands.page:page",
    "zoo": "odevit.commands.zoo:zoo",
    "plan": "odevit.commands.plan:plan",
}  # verb → module:function

app = typer.Typer(
    help="Vision Transformers as ordinary differential equations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
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
MaxImages = Annotated[
    int | None, typer.Option("--max-images", min=1, help="Use at most so many images, drawn at random.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def call(verb: str, options: dict[str, Any]) -> Any:
    """Import the function of a verb, and torch with it, and call it."""
    module, _, name = VERBS[verb].partition(":")
    return getattr(importlib.import_module(module), name)(**options)


@app.command()
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")] = Path("runs/quickstart"),
) -> None:
    """Two minutes: train a small ViT on handwritten digits, turn it into an ODE-ViT, and report what happened."""
    call("quickstart", locals())


@app.command()
def info(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_PRESET", help="A preset, a folder or a hub name.")],
    steps: Steps = None,
    solver: Solver = None,
    as_json: AsJson = False,
) -> None:
    """Parameters, multiply-accumulates, bytes and the Lipschitz bound of a model."""
    call("info", locals())


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `odevit recipes`) or a YAML file.")],
    data: Annotated[str | None, typer.Option("--data", help="As in eval; overrides the recipe's.")] = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Train an ODE-ViT, fine-tune any Hugging Face image classifier, or distil a teacher, as a recipe says."""
    call("train", locals())


@app.command()
def recipes() -> None:
    """The recipes of the package: what they do, their commands, how long they take, what came out."""
    call("recipes", locals())


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an image classifier.")],
    data: DataName,
    steps: Steps = None,
    solver: Solver = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    max_images: MaxImages = None,
    certified: Annotated[bool, typer.Option("--certified", help="Also what is proven of a contractive model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Top-1/3/5 accuracy of a model, from exact counts."""
    call("eval", locals())


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an image classifier.")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Files, folders, globs, - for stdin.")],
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Answers for each image.")] = None,
    attention: Annotated[Path | None, typer.Option("--attention", help="Draw what CLS looks at into this PNG.")] = None,
    steps: Steps = None,
    solver: Solver = None,
    full_depth: Annotated[
        bool, typer.Option("--full-depth", help="All steps, even where the calibrated rule would stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each image.")] = False,
) -> None:
    """What is in these images? A file that cannot be read is named, and the rest goes on."""
    if call("predict", locals()):  # the number of images that could not be read
        raise typer.Exit(1)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an ODE-ViT.")],
    kind: Annotated[str, typer.Option("--format", help="onnx, pt2 (torch.export) or hub (a folder to upload).")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File (a folder for parts and hub).")] = None,
    steps: Steps = None,
    solver: Solver = None,
    int8: Annotated[bool, typer.Option("--int8", help="Weights of the ONNX file in 8 bits.")] = False,
    parts: Annotated[bool, typer.Option("--parts", help="ONNX graphs embed, field and head: bring a solver.")] = False,
    halting: Annotated[
        bool, typer.Option("--halting", help="ONNX graphs of a calibrated model, one for each step: stop early.")
    ] = False,
    data: Annotated[str | None, typer.Option("--data", help="Check on these images; default: digits.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write files that run without odevit, and compare them with the model on real images."""
    call("export", locals())


@app.command()
def distill(
    teacher: Annotated[str | None, typer.Option(help="Folder or hub name of a trained ViT.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompts", help="CLIP, SigLIP: 'a photo of a {}' makes the data's class names the head."),
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="As in eval; overrides the recipe's.")] = None,
    recipe: Annotated[str | None, typer.Option(help="As in train; default: the built-in recipe.")] = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    strict: Strict = False,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="A tiny random teacher of the same family on digits, two steps: does it run?"),
    ] = False,
    report: Annotated[bool, typer.Option(help="End with the report of `analyze --teacher --quick`.")] = True,
    max_images: Annotated[
        int | None, typer.Option("--max-images", min=1, help="Images of the report; default: 64.")
    ] = None,
) -> None:
    """Turn a trained ViT into an ODE-ViT with about ten times fewer parameters."""
    call("distill", locals())


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an ODE-ViT.")],
    data: DataName,
    teacher: Annotated[str | None, typer.Option(help="Folder or hub name of its teacher.")] = None,
    only: Annotated[str | None, typer.Option(help="Comma-separated analyses; default: all.")] = None,
    max_images: Annotated[
        int, typer.Option("--max-images", min=1, help="Test images to look at, drawn at random.")
    ] = 256,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer solvers and images in the slow analyses.")] = False,
    output: Output = None,
) -> None:
    """See the dynamics: Lyapunov exponents, stability, contraction, step robustness, attention … in one report."""
    call("analyze", locals())


@app.command()
def audit(
    teacher: Annotated[str, typer.Argument(help="Folder or hub name of a trained ViT.")],
    data: DataName,
    image_size: Annotated[int | None, typer.Option(help="Run the teacher at this size; default: its own.")] = None,
    max_images: Annotated[int, typer.Option("--max-images", min=1, help="Images to look at, drawn at random.")] = 256,
    output: Output = None,
) -> None:
    """Is this ViT ODE-able? Velocity, curvature and tied-field residual of its layers, before any training."""
    call("audit", locals())


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Folder of an ODE-ViT; its config.json is changed.")],
    data: DataName,
    alpha: Annotated[
        float, typer.Option(help="Most disagreement with the full depth, and accuracy given up for a cheaper setting.")
    ] = 0.01,
    delta: Annotated[float, typer.Option(help="Probability that the disagreement is larger after all.")] = 0.05,
    score: Annotated[str, typer.Option(help="margin, confidence, change or velocity.")] = "margin",
    split: Annotated[str, typer.Option(help="train, val or test.")] = "val",
    max_images: Annotated[
        int, typer.Option("--max-images", min=1, help="Use at most so many images, drawn at random.")
    ] = 5000,
    keep_setting: Annotated[
        bool, typer.Option("--keep-setting", help="Leave solver and steps; only calibrate when to stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a model fast: its cheapest solver and steps, and a calibrated rule by which images stop early."""
    call("calibrate", locals())


@app.command()
def doctor(
    run: Annotated[Path, typer.Argument(help="Folder that a training or distillation wrote.")],
    as_json: AsJson = False,
) -> None:
    """What went wrong in this run? Says it in words, with the curve, and names the one setting to change."""
    call("doctor", locals())


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
    call("page", locals())


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `odevit recipes`) or a YAML file.")],
    teacher: Annotated[str | None, typer.Option(help="As in distill.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="As in eval; overrides the recipe's.")] = None,
    overrides: Overrides = None,
    device_tflops: Annotated[float | None, typer.Option(help="Peak of the device it will run on.")] = None,
    processes: Annotated[int, typer.Option(help="Processes (devices) of torchrun.")] = 1,
    images: Annotated[int | None, typer.Option(help="Training images; default: the data set's own number.")] = None,
    as_json: AsJson = False,
) -> None:
    """What will this run cost? Parameters, arithmetic, memory, disk and hours, before it is started."""
    call("plan", locals())


@app.command()
def zoo(as_json: AsJson = False) -> None:
    """The trained models that come with odevit; their names work wherever a model is asked for."""
    call("zoo", locals())


DISK: dict[int | None, str] = {
    errno.ENOSPC: "free some space there, then try again",
    errno.EDQUOT: "free some space of your share of that disk, then try again",
    errno.EIO: "the disk fails: look after it, then try again",
    errno.EACCES: "mend its rights or choose another place, then try again",
    errno.EROFS: "it cannot be written to: choose another place",
}


def sentence(error: Exception) -> str:
    """What a person reads; what to do about a disk is added where only the system spoke."""
    hint = DISK.get(error.errno) if isinstance(error, OSError) else None
    return f"{error}: {hint}" if hint else str(error)


def main() -> None:
    """Entry point: a wrong input ends with one sentence, a fault of ours with a traceback."""
    try:
        app()
    except (ValueError, OSError, ArithmeticError) as error:
        if os.environ.get("ODEVIT_DEBUG"):
            raise
        said = Text.assemble(("error: ", "bold red"), sentence(error))  # what is in brackets is no markup
        Console(stderr=True).print(said, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
