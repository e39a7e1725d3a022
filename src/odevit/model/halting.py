"""Stop when arrived: integrate a batch and drop every image after the first step at which a rule says so.

A rule sees what one step did and says which images need no further one. `Threshold` is the rule that a calibration
finds (`odevit.dynamics.calibration`) or a guess sets; the one that proves it is `odevit.dynamics.arrival.Certified`.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from odevit.checksum import checksum
from odevit.model.contractive import check_steps
from odevit.model.errors import NonFiniteStateError
from odevit.model.solvers import ADAPTIVE, SOLVERS, Evaluations, Grid, check_solver
from odevit.registry import Registry


class Moment(NamedTuple):
    """What a rule sees of the images under way: states (b, n, d) and logits (b, C) before and after step `step`."""

    step: int  # 1 … K
    grid: Grid
    solver: str
    before: Tensor
    state: Tensor
    logits_before: Tensor
    logits: Tensor


Rule = Callable[[Moment], Tensor]  # → (b,) bool: these may stop here


# --- scores -----------------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """A number for every image that grows as it arrives, and the thresholds to try, the safest first.

    The thresholds are fixed in advance: a calibration that took them from its own images would prove nothing.
    """

    value: Callable[[Moment], Tensor]  # → (b,)
    thresholds: list[float]


SHARES = [1 / (1 + math.exp(-x / 10)) for x in range(160, -41, -1)]  # 1 - 1e-7 … 0.018, even in log-odds
SIZES = [-(10 ** (x / 20)) for x in range(-120, 61)]  # -1e-6 … -1e3
SCORES: Registry[Score] = Registry("score")


def register_score(thresholds: list[float]) -> Callable[[Callable[[Moment], Tensor]], Callable[[Moment], Tensor]]:
    def register(value: Callable[[Moment], Tensor]) -> Callable[[Moment], Tensor]:
        SCORES[value.__name__] = Score(value, thresholds)
        return value

    return register


@register_score(SHARES)
def margin(moment: Moment) -> Tensor:
    """Probability of the answer minus that of the runner-up."""
    if moment.logits.shape[1] < 2:
        raise ValueError("a head with a single class has no runner-up, so its answers have no margin")
    best = moment.logits.double().softmax(dim=1).topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


@register_score(SHARES)
def confidence(moment: Moment) -> Tensor:
    """Probability of the answer: the usual way of leaving early (BranchyNet, 2016), to stand beside."""
    return moment.logits.double().softmax(dim=1).amax(dim=1)


@register_score(SIZES)
def change(moment: Moment) -> Tensor:
    """Minus the largest change of a logit during the step."""
    return -(moment.logits - moment.logits_before).abs().amax(dim=1)


@register_score(SIZES)
def velocity(moment: Moment) -> Tensor:
    """Minus the distance moved during the step over the length of the state: no evaluation beyond the step's own."""
    moved = (moment.state - moment.before).flatten(1).norm(dim=1)
    return -moved / moment.state.flatten(1).norm(dim=1).clamp_min(torch.finfo(moved.dtype).tiny)


@dataclass(frozen=True)
class Threshold:
    """Stop after the first step whose score is at least the threshold."""

    score: str
    threshold: float

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"unknown score {self.score!r}; choose one of {', '.join(SCORES)}")
        if math.isnan(self.threshold):
            raise ValueError("the threshold must be a number, got nan")

    def __call__(self, moment: Moment) -> Tensor:
        return SCORES[self.score].value(moment) >= self.threshold


def saved_rule(model: Any, num_steps: int | None = None, solver: str | None = None) -> Threshold:
    """The calibrated rule in a model's config; ValueError when it has none, or one of other weights or settings.

    num_steps, solver: those that it is wanted for, where they are not the config's.
    """
    saved = model.config.halting
    advice = "run: odevit calibrate MODEL --data …"
    if not saved:
        raise ValueError(f"this model has no calibrated rule for stopping early; {advice}")
    wrong = [key for key in ("score", "threshold", "solver", "num_steps", "checksum") if key not in saved]
    if wrong:
        raise ValueError(f"the config's halting lacks {', '.join(wrong)}; {advice}")
    if saved["checksum"] != checksum(model):
        raise ValueError(
            "the rule for stopping early was calibrated for other weights than these (another model's config.json, "
            f"trained since, or converted to another precision), so its guarantee does not hold; {advice}"
        )
    own = (solver or model.config.solver, model.config.num_steps if num_steps is None else num_steps)
    if (saved["solver"], saved["num_steps"]) != own:
        raise ValueError(
            f"the rule for stopping early was calibrated for {saved['num_steps']} steps of {saved['solver']}, "
            f"now {own[1]} of {own[0]} are asked for; {advice}"
        )
    if not isinstance(saved["threshold"], int | float) or not isinstance(saved["score"], str):
        raise ValueError(f"the config's halting has a threshold of {saved['threshold']!r}, not a number; {advice}")
    return Threshold(saved["score"], float(saved["threshold"]))


# --- integration ------------------------------------------------------------------------------------------------------


class Halted(NamedTuple):
    """logits (b, C) of every image where it stopped, the step (b,) after which it did, and the most evaluations."""

    logits: Tensor
    steps: Tensor
    evaluations: Evaluations


@torch.no_grad()
def halt(
    model: Any,
    images: Tensor | None,
    rule: Rule,
    *,
    num_steps: int | None = None,
    solver: str | None = None,
    interpolate_pos_encoding: bool = False,
    **others: Any,
) -> Halted:
    """Integrate images (b, c, H, W); those that the rule stops leave the batch, so that the others cost less time."""
    config = model.config
    solver, steps = solver or config.solver, num_steps if num_steps is not None else config.num_steps
    check_solver(solver)
    if solver in ADAPTIVE:
        raise ValueError(f"halting needs fixed steps, {solver} chooses its own; choose one of {', '.join(SOLVERS)}")
    if images is None:
        raise ValueError("pixel_values is missing: pass images as a float tensor (batch, channels, height, width)")
    if model.training:
        raise ValueError("halting is for inference: call model.eval() first")
    if any(value for value in others.values()):
        raise ValueError(f"halting cannot be combined with {', '.join(others)}: images stop at different times")
    tokens = model.odevit.embed(images, interpolate_pos_encoding)
    grid, scheme = config.time_grid(steps), SOLVERS[solver]
    under_way = torch.arange(len(tokens), device=tokens.device)
    x, logits = tokens, model.classify(tokens)
    last = torch.empty_like(logits)
    taken = torch.full((len(tokens),), steps, device=tokens.device)
    contractive = config.field == "contractive"
    if contractive:
        check_steps(solver, steps, config.depth, config.num_fields)
    with parametrize.cached() if contractive or config.spectral_cap is not None else nullcontext():
        for step, (phase, h) in enumerate(grid.steps(), start=1):
            y = scheme.step(model.odevit.fields[phase], x, h)
            now = model.classify(y)
            done = torch.ones(len(y), dtype=torch.bool, device=y.device)
            if step < steps:
                done = rule(Moment(step, grid, solver, x, y, logits, now))
            last[under_way[done]], taken[under_way[done]] = now[done], step
            x, logits = y, now
            if bool(done.any()):
                under_way, x, logits = under_way[~done], y[~done], now[~done]
                if not len(under_way):
                    break
    if not bool(torch.isfinite(last).all()):
        raise NonFiniteStateError(None, config.horizon)
    most = int(taken.max()) if len(taken) else 0
    return Halted(last, taken, Evaluations(most * scheme.evaluations.F, most * scheme.evaluations.G))
