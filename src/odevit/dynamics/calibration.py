"""When may it stop? A threshold whose disagreement with the full depth is at most α, with confidence 1 - δ.

Thresholds are tried from the safest on. Each is a hypothesis "more than α of all images would be answered differently",
rejected when so few disagreements among n images have a probability of at most δ under it (exact binomial tail). The
first that is not rejected ends the search. However many are tried, the one kept is wrong with probability at most δ
(fixed-sequence testing: Angelopoulos et al., Learn then Test, 2021). No labels are needed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from odevit.checksum import checksum
from odevit.dynamics.flow import evaluating
from odevit.model.halting import SCORES, Moment
from odevit.model.solvers import SOLVERS


def check_risk(alpha: float, delta: float) -> None:
    for name, value in (("alpha", alpha), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")


def images_needed(alpha: float, delta: float) -> int:
    """The least n with (1 - α)^n ≤ δ: fewer images can prove nothing, even without a single disagreement."""
    check_risk(alpha, delta)
    n = max(1, math.floor(math.log(delta) / math.log1p(-alpha)))
    return n if (1 - alpha) ** n <= delta else n + 1


def check_count(images: int, alpha: float, delta: float) -> None:
    least = images_needed(alpha, delta)
    if images < least:
        raise ValueError(
            f"alpha = {alpha:g} with delta = {delta:g} needs at least {least} images, even if none of them disagrees; "
            f"got {images}. Give more images, or a larger alpha or delta."
        )


def p_value(disagreements: int, images: int, alpha: float) -> float:
    """P(at most so many disagreements) if each image disagreed with probability α: the binomial distribution, exact."""
    if disagreements >= images:
        return 1.0
    log, log_a, log_b = 0.0, math.log(alpha), math.log1p(-alpha)
    terms = []
    for i in range(disagreements + 1):  # log of the binomial coefficient, one factor after the other
        log += math.log((images - i + 1) / i) if i else 0.0
        terms.append(math.exp(log + i * log_a + (images - i) * log_b))
    return min(1.0, math.fsum(terms))


def fixed_sequence(p_values: Iterable[float], delta: float) -> int:
    """How many hypotheses are rejected: all before the first whose p-value exceeds δ."""
    count = 0
    for p in p_values:
        if p > delta:
            break
        count += 1
    return count


class Record(NamedTuple):
    """What the head says after each of K steps, answers (K, N), and the score there, (K, N)."""

    answers: Tensor
    scores: Tensor


def record(model: Any, images: Tensor, score: str = "margin", batch_size: int = 64) -> Record:
    """Answers and scores of images (N, c, H, W), prepared for the model, after every step of its own setting."""
    config = model.config
    grid, step = config.time_grid(), SOLVERS[config.solver].step
    answers, scores = [], []
    with evaluating(model):
        for batch in images.split(batch_size):
            x = model.odevit.embed(batch)
            logits, said, found = model.classify(x), [], []
            for i, (phase, h) in enumerate(grid.steps(), start=1):
                y = step(model.odevit.fields[phase], x, h)
                now = model.classify(y)
                said.append(now.argmax(dim=1))
                found.append(SCORES[score].value(Moment(i, grid, config.solver, x, y, logits, now)))
                x, logits = y, now
            answers.append(torch.stack(said))
            scores.append(torch.stack(found).double())
    return Record(torch.cat(answers, dim=1), torch.cat(scores, dim=1))


def stopping_steps(scores: Tensor, threshold: float) -> Tensor:
    """The step (N,) after which each image stops: the first whose score (K, N) is at least the threshold, else K."""
    arrived = scores >= threshold
    arrived[-1] = True
    return arrived.int().argmax(dim=0) + 1


class Calibration(NamedTuple):
    """A threshold, and what it did on the n images it was found with."""

    threshold: float
    disagreements: int
    images: int
    mean_steps: float


def disagreements(recorded: Record, threshold: float) -> Tensor:
    """Whether each image (N,) would be answered differently from the full depth."""
    steps = stopping_steps(recorded.scores, threshold)
    return recorded.answers.gather(0, steps[None] - 1)[0] != recorded.answers[-1]


def calibrate(recorded: Record, thresholds: Sequence[float], alpha: float = 0.01, delta: float = 0.05) -> Calibration:
    """The boldest threshold of those given (the safest first) that fixed-sequence testing keeps."""
    n = recorded.answers.shape[1]
    check_count(n, alpha, delta)
    kept = fixed_sequence((p_value(int(disagreements(recorded, t).sum()), n, alpha) for t in thresholds), delta)
    if kept == 0:
        raise ValueError(
            f"no threshold keeps the disagreement with the full depth below {alpha:g}: the safest one has "
            f"{int(disagreements(recorded, thresholds[0]).sum())} of {n}. Try another score, or a larger alpha."
        )
    chosen = thresholds[kept - 1]
    steps = stopping_steps(recorded.scores, chosen)
    return Calibration(chosen, int(disagreements(recorded, chosen).sum()), n, float(steps.double().mean()))


def calibrate_model(
    model: Any, images: Tensor, *, score: str = "margin", alpha: float = 0.01, delta: float = 0.05
) -> dict[str, Any]:
    """Calibrate on images (N, c, H, W) prepared for the model; what its config keeps as `halting`."""
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}; choose one of {', '.join(SCORES)}")
    if model.config.solver not in SOLVERS:
        raise ValueError(f"halting needs fixed steps; {model.config.solver} chooses its own")
    check_count(len(images), alpha, delta)
    found = calibrate(record(model, images, score), SCORES[score].thresholds, alpha, delta)
    return {
        "score": score,
        **found._asdict(),
        "alpha": alpha,
        "delta": delta,
        "solver": model.config.solver,
        "num_steps": model.config.num_steps,
        "checksum": checksum(model),
    }
