"""A run to a checkpoint and back: everything that the rest of the run depends on."""

import time
from typing import TYPE_CHECKING

import torch

from odevit.data import derive_seed
from odevit.training.checkpoint import check_same_recipe, library_versions, random_state, set_random_state
from odevit.training.sharding import gathered, load_model_state, load_optimizer_state

if TYPE_CHECKING:
    from odevit.training.loop import Run


def save_run(run: "Run") -> None:
    """Write a checkpoint. Called by all processes; the first one writes, the others hand in their generators."""
    from accelerate.utils import gather_object

    generators, window = gather_object([random_state()]), run.window.shared(run.accelerator)
    model_state, optimizer_states = gathered(run.model.state_dict()), gathered([o.state_dict() for o in run.optimizers])
    if run.accelerator.is_main_process:
        epoch, step_in_epoch = divmod(run.step, run.steps_per_epoch)
        state = {
            "model": model_state,
            "average": run.average.values if run.average is not None else {},
            "optimizers": optimizer_states,
            "random": generators,
        }
        meta = {
            "data_position": {"epoch": epoch, "step": step_in_epoch},
            "best": run.best,
            "validated_at": run.validated_at,
            "elapsed": run.elapsed,
            "window": window,
            "metrics_bytes": run.log.length(),
            "grouping": run.grouping,
            "recipe": run.recipe.to_dict(),
            "versions": library_versions(),
        }
        run.store.save(run.step, state, meta)
    run.saved_at, run.saved_step = run.elapsed, run.step
    run.accelerator.wait_for_everyone()


def load_run(run: "Run") -> None:
    """Continue where the newest good checkpoint stands, on any number of processes; without one, from the beginning."""
    found = run.store.load()
    if found is None:
        run.log.truncate(0)
        return
    state, meta = found
    check_same_recipe(run.recipe.from_dict(meta["recipe"]).to_dict(), run.recipe.to_dict())
    rank, main = run.accelerator.process_index, run.accelerator.is_main_process
    load_model_state(run.model, state["model"])
    if run.average is not None:
        run.average.load(state["average"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        load_optimizer_state(optimizer, saved)
    if rank < len(state["random"]):
        set_random_state(state["random"][rank])
    else:  # more processes than before
        torch.manual_seed(derive_seed(run.recipe.seed, "rank", rank, meta["step"]))
    run.step, run.best, run.validated_at = meta["step"], meta["best"], meta["validated_at"]
    run.window.sums = {name: value if main else 0.0 for name, value in meta["window"].items()}
    run.elapsed_before = run.saved_at = meta["elapsed"]
    run.saved_step = run.step
    run.began = time.monotonic()
    run.accelerator.wait_for_everyone()  # nobody reads any more
    if main:
        run.store.drop_after(run.step)
        run.log.truncate(meta["metrics_bytes"])
    if meta["versions"] != library_versions():
        run.log.say(f"resumed with other library versions than before: {meta['versions']}")
    exactly = "" if run.total_steps else ": a run by the clock, so not bit for bit"
    run.log.say(f"resumed at step {run.step}{exactly}")
