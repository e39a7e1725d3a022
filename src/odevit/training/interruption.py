"""What ends a training early: SIGTERM and Ctrl-C, as a flag that a loop reads between two steps, and divergence."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TrainingDivergedError(ArithmeticError):
    """A loss, gradient or state became NaN or infinite. The weights of the step before are untouched."""

    def __init__(self, step: int, what: str, checkpoint: Path | None):
        self.step, self.checkpoint = step, checkpoint
        good = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        super().__init__(
            f"training diverged at step {step}: {what}; {good}. Lower optim.lr, lengthen optim.warmup, tighten "
            "optim.clip, or hold the weights with model.spectral_cap; a smaller model.depth also helps."
        )


class TrainingInterrupted(SystemExit):
    """SIGTERM or Ctrl-C: a checkpoint was written. The exit code is 128 + the signal's number, as shells have it."""


class StopRequest:
    """`number` is 0 until a signal came, then that signal's number."""

    number = 0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Within the context the first SIGTERM or SIGINT only sets the request; a second one acts as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # signals belong to the main thread
        return

    def remember(number: int, frame: Any) -> None:
        request.number = number
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
