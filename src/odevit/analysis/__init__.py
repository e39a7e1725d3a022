"""Analyses: one file per question, one registered function each, which yields findings.

    @register_analysis("lyapunov", summary="Do nearby states drift apart?")
    def run(study: Study) -> Iterator[Finding]: ...

To add one, write its file and append the file's name to `MODULES`: the CLI and the report pick it up from `ANALYSES`.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from odevit.model.errors import SolverError
from odevit.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# files of this package that register analyses, in the order of the report; append yours on its own line
MODULES: tuple[str, ...] = (
    "comparison",
    "flow",
    "lyapunov",
    "stability",
    "contraction",
    "robustness",
    "attention",
    "trajectory",
    "dense",
    "error_bound",
)


@dataclass(frozen=True)
class HtmlFigure:
    """A figure that is HTML already, trusted and self-contained (see `html_figures` for the factories)."""

    html: str


@dataclass
class Finding:
    """One result: a name, a value for report.json, and what a reader needs to understand it."""

    name: str  # "analysis/what", for example "lyapunov/top": unique in a report
    value: Any  # number, string, list or dict; tensors and arrays are converted; None when there is nothing to tell
    title: str  # a few words
    text: str  # one sentence: how to read the figure or the number
    figure: "Figure | HtmlFigure | None" = None
    headline: str = ""  # one sentence for the top of the report: what was found, in plain words; empty: not up there
    key_numbers: dict[str, Any] = field(default_factory=dict)  # label → value, for the row of numbers under it


def _silent(what: str, done: int, total: int) -> None:
    """No progress shown."""


@dataclass
class Study:
    """What an analysis looks at."""

    model: Any  # OdeViTForImageClassification in eval mode
    images: Tensor  # (N, c, H, W), float, already resized and normalised, on the model's device
    labels: Tensor  # (N,), there too
    class_names: list[str]
    teacher: Any | None = None  # odevit.teachers.Teacher
    batch_size: int = 64
    seed: int = 0
    sampling: str = ""  # how the images were chosen, in words for the reader of the report
    progress: Callable[[str, int, int], None] = field(default=_silent)  # called with (what, done, total)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # analysis -> its settings, see `settings`

    def batches(self, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Images (b, c, H, W) and labels (b,) in order; tells `progress` after every batch."""
        total = len(self.images)
        for start in range(0, total, self.batch_size):
            stop = min(start + self.batch_size, total)
            yield self.images[start:stop], self.labels[start:stop]
            self.progress(what, stop, total)

    def for_teacher(self, images: Tensor) -> Tensor:
        """The images of `study.images`, normalised as the teacher wants them."""
        assert self.teacher is not None
        return self.teacher.renormalise(images, self.model.config)

    def settings(self, analysis: str, **defaults: Any) -> dict[str, Any]:
        """The analysis' own settings: its defaults, replaced by what `options` says."""
        given = self.options.get(analysis, {})
        if unknown := [name for name in given if name not in defaults]:
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))} of {analysis}; valid names: {', '.join(defaults)}"
            )
        return {**defaults, **given}

    def spread(self, most: int) -> Tensor:
        """Indices of at most `most` images, evenly spread over the study."""
        count = min(most, len(self.images))
        return torch.linspace(0, len(self.images) - 1, count).round().long()


Run = Callable[[Study], Iterator[Finding]]


class Analysis(NamedTuple):
    run: Run
    summary: str  # the question it answers, one sentence
    needs_teacher: bool


ANALYSES: Registry[Analysis] = Registry("analysis")


def register_analysis(name: str, *, summary: str, needs_teacher: bool = False) -> Callable[[Run], Run]:
    """Register `run(study)` under `name`. Findings are named `name/…`."""

    def register(run: Run) -> Run:
        ANALYSES[name] = Analysis(run, summary, needs_teacher)
        return run

    return register


def load_analyses() -> dict[str, Analysis]:
    """Import every file in `MODULES`, so that `ANALYSES` is complete."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return ANALYSES


def run_analyses(names: Sequence[str] | None, study: Study) -> list[Finding]:
    """Run the named analyses (None: all) one after the other.

    One that needs a teacher and has none yields a single finding `name/skipped` with value None and the reason, at the
    end of the list.
    """
    analyses = load_analyses()
    chosen = list(analyses) if names is None else list(names)
    if unknown := [name for name in chosen if name not in analyses]:
        raise ValueError(f"unknown analysis {', '.join(map(repr, unknown))}; valid names: {', '.join(analyses)}")
    findings: list[Finding] = []
    skipped: list[Finding] = []
    for name in chosen:
        analysis = analyses[name]
        if analysis.needs_teacher and study.teacher is None:
            reason = f"Skipped: {name} compares the model with a teacher, and no teacher was given."
            skipped.append(Finding(f"{name}/skipped", None, "Not run", reason))
            continue
        try:
            for finding in analysis.run(study):
                findings.append(finding)
        except (SolverError, torch.linalg.LinAlgError) as error:
            reason = f"Not computed: {str(error).rstrip('.')}."
            findings.append(Finding(f"{name}/not_computed", None, "Not computed", reason))
    return findings + skipped
