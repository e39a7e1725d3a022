"""Which integration an optimiser step trains: the model's own, a scheduled one, or one drawn anew.

Trained at one K, weights learn the recurrence of K steps; trained at a K drawn anew at every step, they learn the flow,
which any solver can then integrate.
"""

from typing import Any, NamedTuple

import torch

from odevit.data import derive_seed
from odevit.model.contractive import check_steps
from odevit.model.solvers import SOLVERS, given
from odevit.training.config import LoopConfig


class Integration(NamedTuple):
    """num_steps, solver: None as the model's config says; until: share of the interval after which the head reads."""

    num_steps: int | None = None
    solver: str | None = None
    until: float = 1.0

    def options(self, horizon: float) -> dict[str, Any]:
        """Keyword arguments of the model's forward: only what differs from its own."""
        return given(self.num_steps, self.solver) | ({"until": self.until * horizon} if self.until < 1 else {})


def parse_setting(setting: int | str) -> Integration:
    """K, or "solver K"."""
    if isinstance(setting, int):
        return Integration(setting)
    solver, _, steps = setting.partition(" ")
    if solver not in SOLVERS or not steps.isdigit():
        raise ValueError(
            f"loop.step_schedule: {setting!r} must be a number of steps, or a solver and its steps such as "
            f"'midpoint 3'; solvers: {', '.join(SOLVERS)}"
        )
    return Integration(int(steps), solver)


def draw_integration(loop: LoopConfig, progress: float, seed: int, step: int) -> Integration:
    """The integration of one optimiser step: a function of the step alone, so that a resumed run and all processes
    agree. Before the first entry of the schedule, and without one, it is the model's own."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "integration", step))
    begun = [choices for begin, choices in loop.step_schedule if begin <= progress]
    chosen = Integration()
    if begun:
        choices = begun[-1] if isinstance(begun[-1], list) else [begun[-1]]
        chosen = parse_setting(choices[int(torch.randint(len(choices), (), generator=generator))])
    if float(torch.rand((), generator=generator)) < loop.anytime:
        chosen = chosen._replace(until=0.5 + 0.5 * float(torch.rand((), generator=generator)))
    return chosen


def check_schedule(loop: LoopConfig, config: Any) -> None:
    """Every entry can be integrated by the model: an error before the first step, not at a random one."""
    entries = [choices if isinstance(choices, list) else [choices] for _, choices in loop.step_schedule]
    if (entries or loop.anytime) and not hasattr(config, "num_fields"):
        raise ValueError("loop.step_schedule and loop.anytime are for ODE-ViTs: a discrete model has no solver steps")
    for choices in entries:
        if not choices:
            raise ValueError("loop.step_schedule: an empty list leaves no number of steps to draw")
        for setting in choices:
            wanted = parse_setting(setting)
            config.time_grid(wanted.num_steps or 0)
            if config.field == "contractive":
                check_steps(wanted.solver or config.solver, wanted.num_steps or 0, config.depth, config.num_fields)
