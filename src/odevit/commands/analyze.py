"""`odevit analyze`: an ODE-ViT and images in, a report out: what does its flow do?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from odevit.analysis import Finding, Study, load_analyses, run_analyses
from odevit.analysis.report import write_report
from odevit.commands import best_device
from odevit.commands.console import check_output, progress_bars
from odevit.commands.evaluate import load_data_for
from odevit.commands.page import page_of
from odevit.data import Data
from odevit.page import live
from odevit.teachers.teacher import load_teacher
from odevit.training.classifiers import load_odevit
from odevit.training.evaluation import model_input

# settings of the slow analyses under --quick: fewer solvers, images and states
QUICK: dict[str, dict[str, Any]] = {
    "robustness": {"max_images": 128, "max_evaluations": 48},
    "stability": {"path_images": 8, "radius_images": 8},
    "error_bound": {"images": 4},
}


@dataclass(frozen=True)
class Report:
    """What is looked at, and where it is written."""

    folder: Path = Path("runs/report")
    title: str = ""  # default: the model's name
    command: str = ""  # default: the `odevit analyze` that makes the same report
    only: Sequence[str] | None = None  # names of analyses; None: all
    max_images: int = 256
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # analysis → its settings; QUICK: --quick
    picture: tuple[str, Path] | None = None  # a finding's figure that is saved by itself, and where
    live: bool = False  # the report begins with the model itself, running in the reader's browser

    def into(self, folder: Path) -> "Report":
        """The same, written to `folder` unless a folder was chosen."""
        return replace(self, folder=folder) if self.folder == Report.folder else self


def analyze(
    model: str,
    data: str,
    *,
    teacher: str | None = None,
    only: str | None = None,
    max_images: int = 256,
    quick: bool = False,
    output: Path | None = None,
) -> Path:
    """See the dynamics of a trained ODE-ViT, beside its teacher when there is one; the path of the report."""
    folder = output or Report.folder
    check_output(folder / "report.html")
    device = best_device()
    network: Any = load_odevit(model)
    network.to(device)
    loaded = load_data_for(network, data)
    teaching = load_teacher(teacher, image_size=network.config.image_size).to(device) if teacher else None
    report = Report(
        folder,
        only=list(dict.fromkeys(name.strip() for name in only.split(","))) if only else None,
        max_images=max_images,
    )
    report = replace(report, options=QUICK) if quick else report
    names = {"model": model, "data": data} | ({"teacher": teacher} if teacher else {})
    return write_study(network, loaded, teaching, report, names=names)[0]


def write_study(
    model: Any, data: Data, teacher: Any, report: Report, *, names: Mapping[str, str], first: Sequence[Finding] = ()
) -> tuple[Path, list[Finding]]:
    """Run the analyses, write the report, say where it is. names: of model, data and teacher. first: findings that
    are there already; an analysis that made one of them is not run again."""
    made = {finding.name.partition("/")[0] for finding in first}
    chosen = [name for name in report.only or load_analyses() if name not in made]
    with progress_bars() as progress:
        study = make_study(
            model, data, teacher=teacher, max_images=report.max_images, options=dict(report.options), progress=progress
        )
        findings = [*first, *run_analyses(chosen, study)]
    command = f"odevit analyze {names['model']} --data {names['data']}"
    command += f" --teacher {names['teacher']}" if names.get("teacher") else ""
    command += f" --only {','.join(report.only)}" if report.only else ""
    command += f" --max-images {report.max_images}" + (" --quick" if report.options == QUICK else "")
    path = write_report(
        findings,
        report.folder,
        title=report.title or f"ODE-ViT report: {' '.join(Path(names['model']).parts[-2:])}",
        command=report.command or command,
        meta={**names, "images": study.sampling},
        opening=live(page_of(model, data, teacher=teacher, title=report.title)) if report.live else None,
    )
    if report.picture is not None:
        name, target = report.picture
        figure: Any = next(finding.figure for finding in findings if finding.name == name)
        figure.savefig(target, dpi=160, facecolor="white")
    print(f"report: {path}")
    return path, findings


def make_study(
    model: Any, data: Data, *, teacher: Any = None, max_images: int = 256, seed: int = 0, **options: Any
) -> Study:
    """A study of at most `max_images` images of the test split (of val when there is none), drawn at random."""
    split, name = (data.test, "test") if data.test is not None else (data.val, "validation")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(split), generator=generator)[:max_images].sort().values
    pixels, labels = split.fetch(rows)
    images = model_input(model, pixels)
    return Study(
        model=model.eval(),
        images=images,
        labels=labels.to(images.device),
        class_names=data.class_names,
        teacher=teacher,
        seed=seed,
        sampling=f"{len(rows)} of {len(split)} {name} images, drawn at random with seed {seed}",
        **options,
    )
