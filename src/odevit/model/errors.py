"""What can go wrong while a flow is integrated, in words that say what to do."""

import math
from typing import Any

import torch
from torch import Tensor


class SolverError(ArithmeticError):
    """The integration could not be finished."""


class NonFiniteStateError(SolverError):
    """A state became NaN or infinite. `step` is None for adaptive solvers."""

    def __init__(self, step: int | None, time: float):
        self.step, self.time = step, time
        where = f"at t = {time:.4g}" if step is None else f"after step {step} (t = {time:.4g})"
        super().__init__(
            f"the state is not finite {where}. The field's norms do not bound the state: lower the learning rate or "
            "the depth, use more solver steps, or hold the weights with spectral_cap."
        )

    def __reduce__(self) -> Any:  # worker processes send it to their parent
        return type(self), (self.step, self.time)


class NonFiniteLogitsError(NonFiniteStateError):
    """The state is finite and what the head makes of it is not."""

    def __init__(self, step: None = None, time: float = math.nan):
        self.step, self.time = step, time
        ArithmeticError.__init__(self, "the last state is finite, the logits are not: the head's weights are too large")


def check_logits(logits: Tensor) -> Tensor:
    """The same; an error when they are NaN or infinite (not inside compiled and exported graphs)."""
    if not torch.compiler.is_compiling() and not logits.is_meta and not bool(torch.isfinite(logits).all()):
        raise NonFiniteLogitsError
    return logits
