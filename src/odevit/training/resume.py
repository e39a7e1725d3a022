"""A run to a checkpoint and back: everything that the rest of the run depends on."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from odevit.atomic import write_file
from odevit.data import derive_seed
from odevit.training.checkpoint import (
    CheckpointStore,
    check_same_recipe,
    library_versions,
    random_state,
    set_random_state,
)
from odevit.training.runlog import read_metrics
from odevit.training.sharding import gathered, load_model_state, load_optimizer_state

if TYPE_CHECKING:
    from odevit.training.loop import Run

TENSORS = ("model", "average", "optimizers", "random")  # fields in the state's file; meta.json holds the others


@dataclass(kw_only=True)
class RunState:
    """Where a run stands. `of` and `restore` are all that knows both it and the run."""

    model: dict[str, Any]  # weights
    average: dict[str, Any]  # averaged weights, empty without an average
    optimizers: list[dict[str, Any]]
    random: list[dict[str, Any]]  # the generators of every process
    step: int
    data_position: dict[str, int]  # for people: {"epoch", "step"}; the data's order follows from the step
    best: dict[str, Any] | None  # scores of the best validation, with its step
    validated_at: int  # step, -1 before the first validation
    elapsed: float  # seconds in the loop
    window: dict[str, float]  # sums since the last line of metrics.jsonl
    metrics_bytes: int  # length of metrics.jsonl: what a killed process wrote behind it is cut off
    recipe: dict[str, Any]
    versions: dict[str, str]
    grouping: int = 1  # see `optim.GROUPING`; runs of the first format do not say

    @classmethod
    def of(cls, run: "Run") -> "RunState":
        """Called by all processes: sharded weights are gathered, generators and window sums handed in."""
        from accelerate.utils import gather_object

        epoch, step = divmod(run.step, run.steps_per_epoch)
        return cls(
            model=gathered(run.model.state_dict()),
            average=run.average.values if run.average is not None else {},
            optimizers=gathered([optimizer.state_dict() for optimizer in run.optimizers]),
            random=gather_object([random_state()]),
            step=run.step,
            data_position={"epoch": epoch, "step": step},
            best=run.best,
            validated_at=run.validated_at,
            elapsed=run.elapsed,
            window=run.window.shared(run.accelerator),
            metrics_bytes=run.log.length(),
            recipe=run.recipe.to_dict(),
            versions=library_versions(),
            grouping=run.grouping,
        )

    def restore(self, run: "Run") -> None:
        """Into a run that was just built from the same recipe, on any number of processes."""
        rank, main = run.accelerator.process_index, run.accelerator.is_main_process
        load_model_state(run.model, self.model)
        if run.average is not None:
            run.average.load(self.average)
        for optimizer, saved in zip(run.optimizers, self.optimizers, strict=True):
            load_optimizer_state(optimizer, saved)
        if rank < len(self.random):
            set_random_state(self.random[rank])
        else:  # more processes than before
            torch.manual_seed(derive_seed(run.recipe.seed, "rank", rank, self.step))
        run.step = run.saved_step = self.step
        run.best, run.validated_at = self.best, self.validated_at
        run.window.sums = {name: value if main else 0.0 for name, value in self.window.items()}
        run.elapsed_before = run.saved_at = self.elapsed
        run.began = time.monotonic()

    def write(self, store: CheckpointStore) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        step = values.pop("step")
        store.save(step, {name: values.pop(name) for name in TENSORS}, values)

    @classmethod
    def read(cls, store: CheckpointStore) -> "RunState | None":
        """Of the newest good checkpoint; None without any."""
        found = store.load()
        if found is None:
            return None
        values = {**found[0], **found[1]}
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})


def save_run(run: "Run") -> None:
    """Write a checkpoint. Called by all processes; the first one writes."""
    state = RunState.of(run)
    if run.accelerator.is_main_process:
        state.write(run.store)
    run.saved_step = run.step
    run.accelerator.wait_for_everyone()


def name_of(folder: Path, begun: str) -> str:
    """The name that a run's folder was begun with, while it is its name: it may be resumed from within, as --output .
    says. Of a folder that was moved or copied since, its whole path."""
    parts, whole = Path(begun).parts, folder.resolve()
    kept = parts and (Path(begun).resolve() == whole or whole.parts[-len(parts) :] == parts)
    return begun if kept else str(whole)


def write_recipe(run: "Run") -> None:
    """recipe.yaml says how the run goes on: a resumed one may be longer, and its folder have another name."""
    if run.accelerator.is_main_process:
        write_file(run.folder / "recipe.yaml", run.recipe.to_yaml())


def load_run(run: "Run") -> None:
    """Continue where the newest good checkpoint stands; without one, from the beginning."""
    state = RunState.read(run.store)
    if state is None:
        run.recipe = dataclasses.replace(run.recipe, output=name_of(run.folder, run.recipe.output))
        run.log.truncate(0)
        return
    begun = run.recipe.from_dict(state.recipe)
    check_same_recipe(begun.to_dict(), run.recipe.to_dict())
    run.recipe = dataclasses.replace(run.recipe, output=name_of(run.folder, begun.output))
    state.restore(run)
    run.accelerator.wait_for_everyone()  # nobody reads any more
    if run.accelerator.is_main_process:
        run.store.drop_after(run.step)
        run.store.drop_old()  # killed behind the newest checkpoint and before this
        run.log.truncate(state.metrics_bytes)
        read_metrics(run.folder)  # what is drawn at the end: damage is told now
    if state.versions != library_versions():
        run.log.say(f"resumed with other library versions than before: {state.versions}")
    exactly = "" if run.total_steps else ": a run by the clock, so not bit for bit"
    run.log.say(f"resumed at step {run.step}{exactly}")
