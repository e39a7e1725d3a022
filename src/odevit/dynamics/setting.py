"""Solver and number of steps are free once a flow is learnt: which setting is the cheapest that is good enough?"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from odevit.dynamics.cost import count_macs
from odevit.model.solvers import ADAPTIVE, SOLVERS


class Setting(NamedTuple):
    """A solver and its steps, multiply-accumulates for one image, and the accuracy on the images it was tried on."""

    solver: str
    num_steps: int
    macs: int
    accuracy: float


def affordable_settings(model: Any) -> list[tuple[str, int, int]]:
    """(solver, steps, multiply-accumulates) of every fixed-step setting that costs no more than the model's own."""
    config, fields = model.config, model.config.num_fields
    own = None if config.solver in ADAPTIVE else count_macs(model).total
    found = []
    for solver in SOLVERS:
        first = -(-config.least_steps(solver) // fields) * fields  # as many steps for every field
        least, more = (count_macs(model, solver=solver, num_steps=steps).total for steps in (first, first + fields))
        per_step = (more - least) // fields
        most = config.num_steps if own is None else first + (own - least) // per_step
        counts = range(config.least_steps(solver), most + 1)
        found += [(solver, steps, least + (steps - first) * per_step) for steps in counts]
    return sorted(found, key=lambda setting: setting[2])


@torch.no_grad()
def try_settings(model: Any, images: Tensor, labels: Tensor, batch_size: int = 256) -> list[Setting]:
    """Every affordable setting with its accuracy on images (N, c, H, W), prepared for the model, and labels (N,)."""
    tried = []
    for solver, steps, macs in affordable_settings(model):
        try:
            logits = [model(part, solver=solver, num_steps=steps).logits for part in images.split(batch_size)]
        except ArithmeticError:  # too coarse for this flow: the state is not finite
            continue
        right = torch.cat(logits).argmax(dim=1).cpu() == labels.cpu()
        tried.append(Setting(solver, steps, macs, float(right.double().mean())))
    return tried


def cheapest(tried: list[Setting], alpha: float) -> Setting:
    """Least multiply-accumulates within alpha of the best accuracy; of equal ones the most accurate."""
    best = max(setting.accuracy for setting in tried)
    enough = [setting for setting in tried if setting.accuracy >= best - alpha - 1e-12]
    return min(enough, key=lambda setting: (setting.macs, -setting.accuracy))
