"""Started by test_distributed.py with two gloo processes: `distributed_script.py FOLDER`."""

import sys
from pathlib import Path

import torch
from tiny_runs import tiny_recipe

from odevit import train
from odevit.train import fit


class Stop(Exception):
    pass


def stop_after(step: int) -> None:
    original = train.Run.train_step

    def train_step(run, batch, progress):
        if run.step == step:
            raise Stop
        return original(run, batch, progress)

    train.Run.train_step = train_step


def distributed_recipe(folder: Path):
    return tiny_recipe(
        folder, optim={"steps": 20, "accumulate": 2, "ema": 0.9}, augment={"mixup": 0.2}, loop={"log_every": 1}
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    fit(distributed_recipe(folder / "two"), progress_bar=False)
    fit(distributed_recipe(folder / "one-then-two"), resume=True, progress_bar=False)
    stop_after(13)
    try:
        fit(distributed_recipe(folder / "two-then-one"), progress_bar=False)
    except Stop:
        print("stopped")
    torch.distributed.destroy_process_group()
