"""`odevit doctor`: what went wrong in a run, where it is seen, and the one setting to change."""

import dataclasses
import json
import math
from pathlib import Path

from odevit.analysis.doctor import Curve, Diagnosis, diagnose

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48


def doctor(run: Path, *, as_json: bool = False) -> list[Diagnosis]:
    """Print every failure that the run folder shows, the first to mend first; returns them."""
    found = diagnose(run)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
        return found
    if not found:
        print("Nothing wrong was found in what this run has written.")
        if not any('"monitor"' in line for line in (run / "metrics.jsonl").open()):
            print("It did not look at its flow: --set loop.monitor_every=100 writes norms, maps and exponents.")
    for rank, one in enumerate(found):
        print(f"{one.failure[0].upper()}{one.failure[1:]}. {one.words}")
        if one.curve is not None:
            print(f"  {spark(one.curve)}")
        print(f"  {'change' if rank == 0 else 'then'}: --set {one.setting!r}" + "\n" * (rank < len(found) - 1))
    return found


def spark(curve: Curve) -> str:
    """A curve in one line: its label, its first and last value, and bars between."""
    values = [value if math.isfinite(value) else math.inf for value in curve.values]
    chosen = [values[round(i * (len(values) - 1) / max(1, WIDTH - 1))] for i in range(min(WIDTH, len(values)))]
    if len(values) <= WIDTH:
        chosen = values
    finite = [value for value in chosen if math.isfinite(value)] or [0.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    bars = "".join(
        BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] if math.isfinite(value) else "∞"
        for value in chosen
    )
    return f"{curve.label}: {values[0]:.3g} {bars} {values[-1]:.3g} (steps {curve.steps[0]} to {curve.steps[-1]})"
