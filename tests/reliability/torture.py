"""Faults and hostile input, counted: prints a table and writes docs/reliability.json, from which RELIABILITY.md quotes.

make torture                                                    everything but the long run, about an hour
python tests/reliability/torture.py corruption --cases 10000
python tests/reliability/torture.py kill --faults 100
python tests/reliability/torture.py disk --faults 60
python tests/reliability/torture.py long --minutes 120          memory, file handles and disk of one run
"""

import argparse
import collections
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import corruption  # noqa: E402
import faults  # noqa: E402

FIGURES = Path(__file__).parent.parent.parent / "docs" / "reliability.json"
SHARE = {"train": 6, "distill": 3, "cache": 3, "hub": 2, "page": 1, "calibrate": 2}  # of the faults


def try_corruption(folder: Path, options: Any) -> dict[str, Any]:
    """cases spoilt files, the same number of each kind."""
    each = -(-options.cases // len(corruption.TARGETS))
    results = corruption.run(dict.fromkeys(corruption.TARGETS, each), folder, start=options.start)
    table: dict[str, dict[str, int]] = {}
    for name, _, outcome, _ in results:
        row = table.setdefault(name, dict.fromkeys(corruption.OUTCOMES, 0))
        row[outcome] += 1
    print(f"{'file':30}" + "".join(f"{name:>9}" for name in corruption.OUTCOMES))
    for name, row in table.items():
        print(f"{name:30}" + "".join(f"{row[outcome]:9}" for outcome in corruption.OUTCOMES))
    total = {outcome: sum(row[outcome] for row in table.values()) for outcome in corruption.OUTCOMES}
    print(f"{'all':30}" + "".join(f"{total[outcome]:9}" for outcome in corruption.OUTCOMES))
    bad = [case for case in results if case[2] not in corruption.GOOD]
    for case in bad[:20]:
        print("BAD", *case)
    unnoticed = sum(case[2] == "other" and corruption.TARGETS[case[0]].verified for case in results)
    return {"cases": len(results), "outcomes": total, "by_file": table, "bad": len(bad), "unnoticed": unnoticed}


def try_faults(folder: Path, count: int, kinds: tuple[str, ...], seed: int) -> dict[str, Any]:
    """So many faults over the tasks, each at a random event, and a run after each."""
    table: dict[str, dict[str, int]] = {}
    draw, failed = random.Random(seed), []
    for name, share in SHARE.items():
        code, events, said = faults.run_task(name, folder / name / "reference")
        assert (code, said) == (0, ""), f"{name}: {said or code}"
        reference, row = faults.outcome(folder / name / "reference"), collections.Counter[str]()
        for _ in range(-(-count * share // sum(SHARE.values()))):
            kind, number = draw.choice(kinds), draw.randrange(1, events + 1)
            outcome = faults.try_fault(name, kind, number, reference, folder / name / "x")
            row["survived" if outcome == "survived" else "lost"] += 1
            if outcome != "survived":
                failed.append(f"{name} {kind} at event {number} of {events}: {outcome}")
        table[name] = {"events": events, "survived": row["survived"], "lost": row["lost"]}
        print(f"{name:12} {events:5} events  {row['survived']:4} survived  {row['lost']:3} not", flush=True)
    for line in failed:
        print("BAD", line)
    tried = sum(row["survived"] + row["lost"] for row in table.values())
    return {"faults": tried, "survived": tried - len(failed), "by_task": table, "failed": failed}


def long_run(folder: Path, minutes: float) -> dict[str, Any]:
    """One training with monitors, validation and checkpoints; memory, handles and disk once a minute."""
    from child_processes import start_child

    child = start_child(_train_for, folder / "run", minutes)
    samples = []
    while child.is_alive():
        child.join(min(60.0, 6 * minutes))
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
            memory = int(status.split("VmRSS:")[1].split()[0]) / 1024
            handles = len(os.listdir(f"/proc/{child.pid}/fd"))
        except (OSError, IndexError):
            break
        disk = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file()) / 1e6
        samples.append((time.monotonic() / 3600, memory, handles, disk))
        spent = 60 * (samples[-1][0] - samples[0][0])
        print(f"{spent:6.1f} min  {memory:8.1f} MB  {handles:3} handles  {disk:8.2f} MB on disk", flush=True)
    child.join()
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    settled = samples[len(samples) // 4 :]  # the first quarter fills caches
    names = ("memory_mb", "handles", "disk_mb")
    result: dict[str, Any] = {"minutes": minutes, "samples": len(samples), "exit_code": child.exitcode}
    result["steps"] = records[-1]["step"]
    result |= {kind: sum(record["kind"] == kind for record in records) for kind in ("val", "monitor")}
    for column, name in enumerate(names, start=1):
        result[name] = [settled[0][column], settled[-1][column], max(sample[column] for sample in samples)]
        result[f"{name}_per_hour"] = round(_slope([s[0] for s in settled], [s[column] for s in settled]), 3)
    return result


def _slope(x: list[float], y: list[float]) -> float:
    """Of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def _train_for(folder: Path, minutes: float) -> None:
    from tiny_runs import tiny_recipe

    from odevit.commands.train import train_recipe

    loop = {"eval_every": 100, "checkpoint_every": 100, "log_every": 50, "monitor_every": 100}
    optim = {"minutes": minutes, "ema": 0.9, "name": "muon", "label_smoothing": 0.1, "lr": 1e-3}
    model, augment = {"dropout": 0.1, "drop_path": 0.1}, {"crop": 1, "flip": True, "mixup": 0.2}
    train_recipe(tiny_recipe(folder, model=model, optim=optim, augment=augment, loop=loop), progress_bar=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["corruption", "kill", "disk"])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0, help="number of the first case: others than the last time")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=120)
    options = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    bad = 0
    for part in options.parts:
        print(f"== {part}", flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder, began = Path(name).resolve(), time.monotonic()
            if part == "corruption":
                found = try_corruption(folder, options)
                bad += found["bad"] + found["unnoticed"]
            elif part in ("kill", "disk"):
                kinds = ("kill",) if part == "kill" else faults.ERRORS
                found = try_faults(folder, options.faults, kinds, options.start)
                bad += len(found["failed"])
            elif part == "long":
                found = long_run(folder, options.minutes)
            else:
                raise ValueError(f"unknown part {part!r}; choose among corruption, kill, disk, long")
            figures[part] = {**found, "seconds": round(time.monotonic() - began)}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({name: {k: v for k, v in f.items() if not isinstance(v, dict)} for name, f in figures.items()}))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
