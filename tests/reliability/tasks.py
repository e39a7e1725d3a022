"""What odevit writes, each as the command does it, tiny. `prepare(task, folder)` puts there what the task is given."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXPERIMENTS = str(Path(__file__).parent.parent.parent / "experiments")


def train(folder: Path) -> None:
    """Everything that has a state: Muon, averages, dropout, mixup; monitors, validation, checkpoints."""
    from odevit.commands.train import train_recipe

    _count_steps(folder)
    train_recipe(recipe(folder / "run"), resume=True, progress_bar=False)


def recipe(folder: Path) -> Any:
    from tiny_runs import tiny_recipe

    return tiny_recipe(
        folder,
        data={"limit": 192},
        model={"hidden_size": 16, "dropout": 0.1, "drop_path": 0.1},
        optim={"name": "muon", "ema": 0.9, "label_smoothing": 0.1, "steps": 9, "batch_size": 32},
        augment={"crop": 1, "flip": True, "mixup": 0.2},
        loop={"eval_every": 4, "checkpoint_every": 2, "log_every": 3, "monitor_every": 6},
    )


def _count_steps(folder: Path) -> None:
    """Training steps are events too; and the curve, half of such a run's time, is a blank one."""
    from matplotlib.figure import Figure
    from PIL import Image

    from odevit.training import loop

    Figure.savefig = lambda figure, file, dpi: Image.new("L", (9, 9)).save(file, "PNG")  # type: ignore[method-assign]

    step = loop.Run.train_step

    def counted(run: Any, batch: Any, progress: float) -> Any:
        sys.audit("odevit.step", str(folder))
        return step(run, batch, progress)

    loop.Run.train_step = counted  # type: ignore[method-assign]


def distill(folder: Path) -> None:
    """A teacher's states cached, a student trained on them, and the comparison."""
    from odevit.commands.distill import distill_recipe
    from odevit.distill import cache as caching
    from odevit.recipe import Recipe

    caching.CHUNK = 64
    _count_steps(folder)
    values = {
        "output": str(folder / "run"),
        "task": "distill",
        "data": {"name": "digits", "limit": 192},
        "model": {"num_steps": 2},
        "distill": {"teacher": str(folder / "teacher"), "cache": "cls", "cache_folder": str(folder / "cache")},
        "optim": {"steps": 6, "batch_size": 32},
        "loop": {"eval_every": 3, "checkpoint_every": 2, "log_every": 2, "keep": 2},
    }
    distill_recipe(Recipe.from_dict(values), resume=True, report=None, progress_bar=False)


def cache(folder: Path) -> None:
    import handed

    from odevit.distill import cache as caching

    caching.CHUNK = 4
    handed.open_cache_of_digits(folder / "cache")


def calibrate(folder: Path) -> None:
    from odevit.commands.calibrate import calibrate as command

    options: dict[str, Any] = {"alpha": 0.2, "delta": 0.2, "split": "train", "max_images": 60, "keep_setting": True}
    command(str(folder / "model"), "digits", **options, as_json=True)


def hub(folder: Path) -> None:
    from odevit.commands.export import export

    export(str(folder / "model"), "hub", output=folder / "hub")


def pt2(folder: Path) -> None:
    from odevit.commands.export import export

    export(str(folder / "model"), "pt2", output=folder / "model.pt2", as_json=True)


def onnx(folder: Path) -> None:
    from odevit.commands.export import export

    export(str(folder / "model"), "onnx", output=folder / "model.onnx", as_json=True)


def page(folder: Path) -> None:
    from odevit.commands.page import page as command

    title = "the same in every folder"  # else the name of the run's folder
    command(str(folder / "model"), data="digits", title=title, output=folder / "page.html")


def zoo(folder: Path) -> None:
    """As experiments/ship.py does: a finished run becomes a model of the zoo."""
    if EXPERIMENTS not in sys.path:
        sys.path.append(EXPERIMENTS)
    import ship

    (folder / "zoo").mkdir(exist_ok=True)
    ship.ship(folder / "run", "tiny", data="digits", command="a test", folder=folder / "zoo")


TASKS: dict[str, Callable[[Path], Any]] = {
    "train": train, "distill": distill, "cache": cache, "calibrate": calibrate, "hub": hub, "pt2": pt2, "onnx": onnx,
    "page": page, "zoo": zoo,
}  # fmt: skip


def printed(error: Exception) -> str:
    """What the command line says."""
    import odevit_cli

    return odevit_cli.sentence(error)


def prepare(name: str, folder: Path) -> None:
    """What the task finds: a model, a teacher or a finished run, made once beside the folders."""
    needed = {"train": None, "cache": None, "distill": "teacher", "zoo": "run"}.get(name, "model")
    folder.mkdir(parents=True, exist_ok=True)
    if needed is None:
        return
    kept = folder.parent / "inputs" / needed
    if not kept.exists():
        {"teacher": _teacher, "model": _model, "run": _run}[needed](kept)
    shutil.copytree(kept, folder / needed)


def _teacher(folder: Path) -> None:
    import torch

    from odevit.teachers.teacher import tiny_teacher
    from odevit.training.classifiers import save_classifier

    torch.manual_seed(0)
    module = tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1).module
    module.config.image_mean, module.config.image_std = [0.5], [0.5]
    save_classifier(module, folder)


def _model(folder: Path) -> None:
    import torch

    from odevit import OdeViTConfig, OdeViTForImageClassification
    from odevit.training.classifiers import save_classifier

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8}
    sizes |= {"image_mean": [0.5], "image_std": [0.5], "num_labels": 10}
    config = OdeViTConfig(**sizes, num_attention_heads=2, mlp_ratio=1, depth=1, num_steps=2)
    save_classifier(OdeViTForImageClassification(config).eval(), folder)


def _run(folder: Path) -> None:
    import json

    _model(folder / "model")
    (folder / "recipe.yaml").write_text(recipe(folder).to_yaml())
    (folder / "result.json").write_text(json.dumps({"top1": 0.1, "seconds": 1.0, "epochs": 1.0}))
