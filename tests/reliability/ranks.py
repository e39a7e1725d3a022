"""Two processes that train together, one of which sends itself a signal in the middle of a step."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from child_processes import free_port, join_group, start_child, wait_for_child
from tiny_runs import tiny_recipe

STEP = 7  # behind the checkpoint of step 5


def recipe(folder: Path) -> Any:
    return tiny_recipe(folder, data={"limit": 192}, optim={"steps": 12, "batch_size": 32}, loop={"log_every": 1})


def _rank(rank: int, port: int, folder: Path, number: int, victim: int, patience: float) -> None:
    from odevit.commands.train import train_recipe
    from odevit.training import heartbeat, loop
    from odevit_cli import sentence

    join_group(rank, port)
    sys.stderr = open(folder.parent / f"said-{rank}", "w", buffering=1)  # noqa: SIM115
    heartbeat.PATIENCE = patience
    step = loop.Run.train_step

    def hit(run: Any, batch: Any, progress: float) -> Any:
        if run.step == STEP and rank == victim:
            (folder.parent / "hit").write_text(str(time.time()))
            os.kill(os.getpid(), number)
        return step(run, batch, progress)

    loop.Run.train_step = hit  # type: ignore[method-assign]
    try:
        train_recipe(recipe(folder), resume=True, progress_bar=False)
    except OSError as error:
        print("error:", sentence(error), file=sys.stderr)
        sys.exit(1)


def train_two(folder: Path, number: int = 0, victim: int = -1, patience: float = 40.0) -> tuple[list[int], list[str]]:
    """Exit codes and what was said of both ranks; rank `victim` gets signal `number` before the exchange of step 7."""
    port = free_port()
    pair = [start_child(_rank, rank, port, folder / "run", number, victim, patience) for rank in range(2)]
    return [wait_for_child(child) for child in pair], [(folder / f"said-{rank}").read_text() for rank in range(2)]


def lose_one(folder: Path, number: int, victim: int, patience: float = 40.0) -> tuple[str, float]:
    """("survived" or what is wrong, seconds from the signal to the end of both)."""
    codes, said = train_two(folder, number, victim, patience)
    seconds = time.time() - float((folder / "hit").read_text())
    if codes[victim] != -signal.SIGKILL:  # a frozen one is ended too, lest it keep the run's lock
        return f"the lost process ended with {codes[victim]}", seconds
    words = ("of this run", "step-00000005", "resume with --resume")
    if codes[1 - victim] != 1 or not all(word in said[1 - victim] for word in words) or "Traceback" in said[1 - victim]:
        return f"the other process ended with {codes[1 - victim]}: {said[1 - victim]}", seconds
    return "survived", seconds


def resume(folder: Path, world: int) -> str:
    """The rest of the run by one process or two: "survived", or what is wrong."""
    from odevit.commands.train import train_recipe
    from odevit.training.runlog import read_metrics

    if world == 1:
        train_recipe(recipe(folder / "run"), resume=True, progress_bar=False)
    elif (codes := train_two(folder)[0]) != [0, 0]:
        return f"resuming ended with {codes}"
    steps = [record["step"] for record in read_metrics(folder / "run") if record["kind"] == "train"]
    if steps != list(range(1, 13)) or not (folder / "run" / "result.json").exists():
        return f"the resumed run has steps {steps}"
    return "survived"
