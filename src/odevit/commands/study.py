"""`odevit analyze` and `odevit audit`: load a model and images, run the analyses, write the report."""

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from odevit.analysis import Study, run_analyses
from odevit.analysis.report import write_report
from odevit.data import Data, DataConfig, Split, load_data
from odevit.training.classifiers import adapt_to_data, load_odevit, own_frame
from odevit.training.evaluation import model_input


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


def make_study(
    model: Any, data: Data, *, teacher: Any = None, max_images: int = 256, seed: int = 0, **options: Any
) -> Study:
    """A study of at most `max_images` images of the test split (of val when there is none), drawn at random."""
    split, name = (data.test, "test") if data.test is not None else (data.val, "validation")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(split), generator=generator)[:max_images].sort().values
    images, labels = split.fetch(rows)
    sampling = f"{len(rows)} of {len(split)} {name} images, drawn at random with seed {seed}"
    return Study(
        model=model.eval(),
        images=model_input(model, images),
        labels=labels,
        class_names=data.class_names,
        teacher=teacher,
        seed=seed,
        sampling=sampling,
        **options,
    )


def analyze(
    model: str,
    data: str,
    *,
    teacher: str | None = None,
    only: Sequence[str] | None = None,
    max_images: int = 256,
    output: Path | None = None,
) -> Path:
    """The command: returns the path of the report."""
    from odevit.teachers.teacher import load_teacher

    network = load_odevit(model)
    loaded = load_data_for(network, data)
    teaching = load_teacher(teacher, image_size=network.config.image_size) if teacher else None
    command = f"odevit analyze {model} --data {data}" + (f" --teacher {teacher}" if teacher else "")
    command += f" --max-images {max_images}"
    with progress_bars() as progress:
        study = make_study(network, loaded, teacher=teaching, max_images=max_images, progress=progress)
        findings = run_analyses(only, study)
    path = write_report(
        findings,
        output or Path("runs/report"),
        title=f"ODE-ViT report: {Path(model).name}",
        command=command,
        meta={"model": model, "data": data, "images": study.sampling},
    )
    print(f"report: {path}")
    return path


def audit(
    teacher: str, data: str, *, image_size: int | None = None, max_images: int = 256, output: Path | None = None
) -> Path:
    """The command: returns the path of the report."""
    from odevit.analysis.audit import audit as examine
    from odevit.data import prepare
    from odevit.teachers.teacher import load_teacher

    network = load_teacher(teacher, image_size=image_size)
    loaded = load_data(DataConfig(name=data, image_size=network.image_size), network.frame)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(loaded.train), generator=generator)[:max_images].sort().values
    images = prepare(
        loaded.train.fetch(rows)[0], network.image_size, network.mean or loaded.mean, network.std or loaded.std
    )
    with progress_bars() as progress:
        findings = list(examine(network, images, progress=progress))
    path = write_report(
        findings,
        output or Path("runs/audit"),
        title=f"Is this ViT ODE-able? {Path(teacher).name}",
        command=f"odevit audit {teacher} --data {data} --max-images {max_images}"
        + (f" --image-size {image_size}" if image_size else ""),
        meta={
            "teacher": teacher,
            "data": data,
            "images": f"{len(rows)} of {len(loaded.train)} training images, seed 0",
        },
    )
    print(f"report: {path}")
    return path


@contextmanager
def progress_bars() -> Any:
    """A callback (what, done, total) that draws one bar per analysis."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress
