"""Faults and hostile input, counted: prints tables, writes docs/reliability.json and the tables of docs/RELIABILITY.md.

make torture                                                    everything but the long run
python tests/reliability/torture.py corruption --cases 10000
python tests/reliability/torture.py kill --faults 110
python tests/reliability/torture.py disk full                   ENOSPC, EIO and EACCES at every write; a full tmpfs
python tests/reliability/torture.py ranks                       one of two processes killed, one frozen
python tests/reliability/torture.py long --minutes 120          memory, file handles and disk of one run
python tests/reliability/torture.py long --recipe cifar10/scratch --output DIR --set data.name=DIR   of a real one
"""

import argparse
import ctypes
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import child_processes  # noqa: E402
import corruption  # noqa: E402
import faults  # noqa: E402
import ranks  # noqa: E402
import reliability_tables  # noqa: E402

FIGURES = Path(__file__).parent.parent.parent / "docs" / "reliability.json"
SHARE = {  # of the faults
    "train": 30, "distill": 12, "cache": 20, "calibrate": 10, "hub": 12, "pt2": 5, "onnx": 2, "page": 8, "zoo": 9,
}  # fmt: skip


def try_corruption(folder: Path, options: Any) -> dict[str, Any]:
    """cases spoilt files, the same number of each kind; with --files only of some, and the others' counts stay."""
    kinds = options.files.split(",") if options.files else list(corruption.TARGETS)
    each = -(-options.cases // len(corruption.TARGETS))
    results = corruption.run(dict.fromkeys(kinds, each), folder, start=options.start)
    table = read_figures().get("corruption", {}).get("by_file", {}) if options.files else {}
    table |= {kind: dict.fromkeys((*corruption.OUTCOMES, "unnoticed"), 0) for kind in kinds}
    for name, number, outcome, said in results:
        table[name][outcome] += 1
        table[name]["unnoticed"] += outcome == "other" and corruption.TARGETS[name].verified
        if outcome not in corruption.GOOD:
            print("BAD", name, number, outcome, said, flush=True)
    return summed(table)


def summed(table: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The counts of all kinds of files together."""
    total = {column: sum(row[column] for row in table.values()) for column in (*corruption.OUTCOMES, "unnoticed")}
    bad = sum(count for column, count in total.items() if column not in corruption.GOOD)
    cases = sum(total[column] for column in corruption.OUTCOMES)
    return {"cases": cases, "bad": bad, "outcomes": total, "by_file": table}


def read_figures() -> dict[str, Any]:
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def try_kills(folder: Path, options: Any) -> dict[str, Any]:
    """So many kills over the tasks: at a random event, in the middle of a file, and at a random moment, by turns."""
    table = kept_rows("kill", options)
    for name in options.tasks.split(",") if options.tasks else SHARE:
        draw = random.Random(f"{name} {options.start}")
        survey, count = faults.Survey(name, folder), -(-options.faults * SHARE[name] // sum(SHARE.values()))
        row = dict.fromkeys(("events", *faults.KILLS, "survived"), 0) | {"events": survey.events}
        while sum(row[kind] for kind in faults.KILLS) < count:
            kind = faults.KILLS[draw.randrange(3)]
            number = draw.randrange(1, 1 + (survey.milliseconds if kind == "moment" else survey.events))
            outcome = survey.try_fault(kind, number)
            if outcome == "not reached":
                continue
            note(row, kind, outcome, f"{name} {kind} at {number} of {survey.events}")
        table[name] = row
        print(name, row, flush=True)
    return counted(table, faults.KILLS)


def note(row: dict[str, int], kind: str, outcome: str, where: str) -> None:
    """One fault more in the row of its task."""
    row[kind] += 1
    row["survived"] += outcome == "survived"
    if outcome != "survived":
        print(f"BAD {where}: {outcome}", flush=True)


def kept_rows(part: str, options: Any) -> dict[str, dict[str, int]]:
    """With --tasks the counts of the other tasks stay."""
    return read_figures().get(part, {}).get("by_task", {}) if options.tasks else {}


def counted(table: dict[str, dict[str, int]], kinds: Sequence[str]) -> dict[str, Any]:
    tried, survived = (sum(row[k] for row in table.values() for k in names) for names in (kinds, ["survived"]))
    return {"faults": tried, "survived": survived, "bad": tried - survived, "by_task": table}


def try_disk(folder: Path, options: Any) -> dict[str, Any]:
    """Each error at every write of a training run, of a cache, of a hub folder and of a model that is calibrated."""
    table = kept_rows("disk", options)
    for name in options.tasks.split(",") if options.tasks else ("cache", "calibrate", "hub", "train"):
        survey = faults.Survey(name, folder)
        row = dict.fromkeys(("writes", *faults.ERRORS, "survived"), 0) | {"writes": survey.writes}
        for number, kind in [(n, k) for n in range(1, survey.writes + 1) for k in faults.ERRORS]:
            outcome = survey.try_fault(kind, number)
            note(row, kind, outcome, f"{name} {kind} at {number} of {survey.writes}")
        table[name] = row
        print(name, row, flush=True)
    return counted(table, faults.ERRORS)


def try_full_disk(folder: Path, options: Any) -> dict[str, Any]:
    """A file system of 20, 40, … kB under a training run: it ends with a sentence, and goes on when there is room."""
    survey, row = faults.Survey("train", folder), {"ENOSPC": 0, "survived": 0}
    for size in range(20, 400, 20):
        outcome = faults.try_full_disk(survey, size, folder / "small")
        if outcome != "not reached":
            note(row, "ENOSPC", outcome, f"{size} kB")
    return counted({"train": row}, ["ENOSPC"])


def try_ranks(folder: Path, options: Any) -> dict[str, Any]:
    """Each of two processes killed and frozen; resumed by one process and by two. Both must end within 60 s."""
    failed, table = [], {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for victim, world in ((0, 1), (1, 1), (0, 2), (1, 2)):
            place = folder / f"{number}-{victim}-{world}"
            place.mkdir()
            outcome, seconds = ranks.lose_one(place, number, victim)
            outcome = ranks.resume(place, world) if outcome == "survived" else outcome
            name = f"{signal.Signals(number).name} to process {victim} of 2, resumed by {world}"
            table[name] = {"seconds until both ended": round(seconds), "survived": int(outcome == "survived")}
            if outcome != "survived" or seconds > 60:
                failed.append(f"{name}: {outcome} after {seconds:.0f} s")
                print("BAD", failed[-1], flush=True)
    return {"faults": 8, "survived": 8 - len(failed), "by_task": table, "bad": len(failed), "failed": failed}


def long_run(folder: Path, options: Any) -> dict[str, Any]:
    """One training with monitors, validation and checkpoints; memory, handles and disk once a minute."""
    minutes, run = options.minutes, Path(options.output).resolve() if options.output else folder / "run"
    child = child_processes.start_child(_train_for, run, minutes, options.recipe, options.set)
    samples = []
    while child.is_alive():
        child.join(min(60.0, 6 * minutes))
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
            memory = int(status.split("VmRSS:")[1].split()[0]) / 1024
            handles = len(os.listdir(f"/proc/{child.pid}/fd"))
        except (OSError, IndexError):
            break
        disk = sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 1e6
        samples.append((time.monotonic() / 3600, memory, handles, disk))
        spent = 60 * (samples[-1][0] - samples[0][0])
        print(f"{spent:6.1f} min  {memory:8.1f} MB  {handles:3} handles  {disk:8.2f} MB on disk", flush=True)
    child.join()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    settled = samples[len(samples) // 4 :]  # the first quarter fills caches
    names = ("memory_mb", "handles", "disk_mb")
    spent = round(60 * (samples[-1][0] - samples[0][0]), 1)
    result: dict[str, Any] = {
        "recipe": options.recipe,
        "minutes": spent,
        "exit_code": child.exitcode,
        "bad": int(child.exitcode not in (0, 143)),
    }
    result["steps"] = records[-1]["step"]
    result["parts"] = [minutes * begin for begin, _ in _schedule(options)] or [0.0]
    heap = run.with_suffix(".heap")
    if heap.exists():
        rows = [tuple(map(float, line.split())) for line in heap.read_text().splitlines()]
        rows = rows[len(rows) // 4 :]
        value, error = reliability_tables.slope([row[0] / 60 for row in rows], [row[1] for row in rows])
        result["in_use_mb_per_hour"] = [round(value, 2), round(error, 2)]
        print(f"bytes in use: {value:+.2f} ± {error:.2f} MB an hour over {len(rows)} samples", flush=True)
    result["samples"] = [[round(60 * (s[0] - samples[0][0]), 1), *s[1:]] for s in samples]
    result |= {kind: sum(record["kind"] == kind for record in records) for kind in ("val", "monitor")}
    for column, name in enumerate(names, start=1):
        result[name] = [settled[0][column], settled[-1][column], max(sample[column] for sample in samples)]
        hours, values = [s[0] for s in settled], [s[column] for s in settled]
        result[f"{name}_per_hour"] = round(reliability_tables.slope(hours, values)[0], 3)
    return result


def _schedule(options: Any) -> list[Any]:
    """When the recipe changes the numbers of steps it draws from, and with them the memory of a training step."""
    from odevit.recipe import Recipe

    return Recipe.load(options.recipe, options.set).loop.step_schedule if options.recipe else []


class _Mallinfo(ctypes.Structure):
    """What glibc's allocator says of itself (mallinfo2)."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _watch_heap(file: Path) -> None:
    """Once in 20 s: the least number of MB in use meanwhile, which no fragmentation and no batch in flight can move."""
    ask = ctypes.CDLL("libc.so.6").mallinfo2
    ask.restype = _Mallinfo
    began = time.monotonic()
    while True:
        least = math.inf
        for _ in range(400):
            time.sleep(0.05)
            heap = ask()
            least = min(least, (heap.uordblks + heap.hblkhd) / 2**20)
        with file.open("a") as out:
            out.write(f"{(time.monotonic() - began) / 60:.2f} {least:.2f}\n")


def _train_for(folder: Path, minutes: float, recipe: str, assignments: list[str]) -> None:
    from tiny_runs import tiny_recipe

    if hasattr(ctypes.CDLL(None), "mallinfo2"):
        threading.Thread(target=_watch_heap, args=(folder.with_suffix(".heap"),), daemon=True).start()

    from odevit.commands.train import train, train_recipe

    if recipe:
        train(recipe, [*assignments, f"optim.minutes={minutes}", f"output={folder}"])
        return

    loop = {"eval_every": 100, "checkpoint_every": 100, "log_every": 50, "monitor_every": 100}
    optim = {"minutes": minutes, "ema": 0.9, "name": "muon", "label_smoothing": 0.1, "lr": 1e-3}
    model, augment = {"dropout": 0.1, "drop_path": 0.1}, {"crop": 1, "flip": True, "mixup": 0.2}
    train_recipe(tiny_recipe(folder, model=model, optim=optim, augment=augment, loop=loop), progress_bar=False)


PARTS: dict[str, Callable[[Path, Any], dict[str, Any]]] = {
    "corruption": try_corruption, "kill": try_kills, "disk": try_disk, "full": try_full_disk, "ranks": try_ranks,
    "long": long_run,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[name for name in PARTS if name != "long"], choices=[*PARTS, []])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--files", default="", help="kinds of spoilt files, with commas; default: all")
    parser.add_argument("--start", type=int, default=0, help="number of the first case: others than the last time")
    parser.add_argument("--faults", type=int, default=110, help="kills")
    parser.add_argument("--tasks", default="", help="of kill and disk, with commas; the others' counts stay")
    parser.add_argument("--minutes", type=float, default=120, help="of the long run")
    parser.add_argument("--recipe", default="", help="of the long run; default: a tiny model on digits")
    parser.add_argument("--output", default="", help="where the long run is kept; default: it is removed")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the long run's recipe")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the server from which children are forked
    child_processes.processes.set_forkserver_preload([*child_processes.PRELOAD, "warm"])
    bad = 0
    for part in options.parts:
        print(f"== {part}", flush=True)
        with tempfile.TemporaryDirectory() as name:
            began = time.monotonic()
            found = PARTS[part](Path(name).resolve(), options)
        figures = read_figures()
        figures[part] = {**found, "seconds": round(time.monotonic() - began)}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        print(reliability_tables.table(part, figures[part]), flush=True)
        bad += found["bad"]
    reliability_tables.write_page()
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
