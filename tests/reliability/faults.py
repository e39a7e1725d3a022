"""Faults on purpose: tasks that write, run in a child that is killed, or whose disk fails, at one chosen event.

An event is a file of the task's folder opened for writing, made, renamed, cut or removed (Python's audit events), or a
training step. `run_task(task, folder, fault)` with fault = ("kill" | errno's name, number of the event).
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from child_processes import start_child, wait_for_child

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
ERRORS = ("ENOSPC", "EIO", "EACCES")


def train(folder: Path) -> None:
    from tiny_runs import stateful_recipe

    from odevit.commands.train import train_recipe
    from odevit.training import loop

    step = loop.Run.train_step

    def counted(run: Any, batch: Any, progress: float) -> Any:
        sys.audit("odevit.step", str(folder))
        return step(run, batch, progress)

    loop.Run.train_step = counted  # type: ignore[method-assign]
    train_recipe(stateful_recipe(folder / "run"), resume=True, progress_bar=False)


def cache(folder: Path) -> None:
    import corruption

    from odevit.distill import cache as caching

    caching.CHUNK = 4
    corruption._open_cache(folder / "cache")


def distill(folder: Path) -> None:
    from odevit.commands.distill import distill_recipe
    from odevit.recipe import Recipe
    from odevit.teachers.teacher import tiny_teacher
    from odevit.training.classifiers import save_classifier

    teacher = folder.parent / "teacher"
    if not teacher.exists():
        import torch

        torch.manual_seed(0)
        module = tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1).module
        module.config.image_mean, module.config.image_std = [0.5], [0.5]
        save_classifier(module, teacher)
    values = {
        "output": str(folder / "run"),
        "task": "distill",
        "data": {"name": "digits", "limit": 128},
        "model": {"num_steps": 2},
        "distill": {"teacher": str(teacher), "cache": "cls", "cache_folder": str(folder / "cache")},
        "optim": {"steps": 8, "batch_size": 32},
        "loop": {"eval_every": 4, "checkpoint_every": 3, "log_every": 2, "keep": 2},
    }
    distill_recipe(Recipe.from_dict(values), resume=True, report=None, progress_bar=False)


def _model() -> Any:
    import torch

    from odevit import OdeViTConfig, OdeViTForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8}
    config = OdeViTConfig(**sizes, num_attention_heads=2, mlp_ratio=1, depth=1, num_steps=2, num_labels=3)
    return OdeViTForImageClassification(config).eval()


def hub(folder: Path) -> None:
    from odevit.export.hub import write_hub_folder

    write_hub_folder(_model(), folder / "hub")


def page(folder: Path) -> None:
    from odevit.page import make_payload, write_page

    write_page(make_payload(_model(), title="page", class_names=["a", "b", "c"]), folder / "page.html")


def calibrate(folder: Path) -> None:
    """A model's folder written again with a rule: as `odevit calibrate` does."""
    import torch

    from odevit.dynamics.calibration import calibrate_model
    from odevit.training.checkpoint import write_folder

    model = _model()
    model.config.halting = calibrate_model(model, torch.ones(60, 1, 8, 8), alpha=0.2, delta=0.2)
    write_folder(folder / "model", model.save_pretrained)


TASKS: dict[str, Callable[[Path], None]] = {
    "train": train, "distill": distill, "cache": cache, "hub": hub, "page": page, "calibrate": calibrate,
}  # fmt: skip

# whose bytes differ from run to run, since they tell times or the folder's name
DIFFERENT = ("timing.jsonl", "result.json", "curve.png", "meta.json", "selected.json", "lock", "comparison.json")
DIFFERENT += ("recipe.yaml",)


def outcome(folder: Path) -> dict[str, str]:
    """sha256 of every file that tells neither times nor places."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in DIFFERENT)
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def run_task(name: str, folder: Path, fault: tuple[str, int] | None = None) -> tuple[int, int, str]:
    """(exit code, events seen, what was said) of one run of a task in a child."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder.parent / f"{folder.name}.json"
    report.unlink(missing_ok=True)
    code = wait_for_child(start_child(_run_task, name, folder, fault, report))
    seen, said = json.loads(report.read_text()) if report.exists() else (0, "")
    return code, seen, said


def _run_task(name: str, folder: Path, fault: tuple[str, int] | None, report: Path) -> None:
    seen, inside = 0, str(folder)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        writes = event == "open" and bool((arguments[2] or 0) & WRITING)
        if not (writes or event in CHANGES or event == "odevit.step"):
            return
        if not str(arguments[0]).startswith(inside):
            return
        seen += 1
        if fault is not None and seen == fault[1]:
            if fault[0] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif event != "odevit.step":
                number = getattr(errno, fault[0])
                raise OSError(number, os.strerror(number), str(arguments[0]))

    sys.addaudithook(hook)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    said = ""
    try:
        TASKS[name](folder)
    except (ValueError, OSError, ArithmeticError) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        total = seen
        report.write_text(json.dumps([total, said]))


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for pattern in (".tmp-*", ".previous-*") for path in folder.rglob(pattern)]


def try_fault(name: str, kind: str, number: int, reference: dict[str, str], folder: Path) -> str:
    """A run with one fault, and one more without: "survived", or what is wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    code, _, said = run_task(name, folder, (kind, number))
    if kind == "kill" and code != -signal.SIGKILL:
        return "not reached" if code == 0 else f"exit code {code}"
    if kind != "kill" and code != 0:
        return f"raw exception, exit code {code}"
    good = kept_checkpoints(folder)
    code, _, said = run_task(name, folder)
    if code != 0 or said:
        return f"the second run failed: {said or code}"
    if leftovers(folder):
        return f"left behind: {leftovers(folder)}"
    found = outcome(folder)
    if found != reference:
        return f"other results: {[name for name in reference if found.get(name) != reference[name]] or [*found]}"
    return "survived" if good else "a checkpoint was damaged"


def kept_checkpoints(folder: Path) -> bool:
    """Whether every checkpoint that has its final name is whole."""
    from odevit.training.checkpoint import CheckpointError, read_checkpoint

    try:
        for step in folder.rglob("step-*"):
            if not step.name.startswith(".") and step.is_dir() and not step.parent.name.startswith("."):
                read_checkpoint(step)
    except CheckpointError:
        return False
    return True
