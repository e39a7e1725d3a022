"""What the experiments share: a study has named arms, every arm runs once per seed, runs divide among cores."""

import argparse
import contextlib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch


def share(text: str) -> tuple[int, int]:
    """I/N → (I, N)."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, for example 1/2; got {text!r}")
    return int(first), int(count)


def study_parser(
    description: str, studies: Collection[str], *, minutes: float | None, output: str
) -> argparse.ArgumentParser:
    """minutes: of every run, unless the user says otherwise; None: what the recipes say."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=studies)
    parser.add_argument("--minutes", type=float, default=minutes, help="of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="names of arms; default: all")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument(
        "--share", type=share, metavar="I/N", help="only every N-th run, beginning with the I-th, on core I alone"
    )
    return parser


def chosen_runs(
    parser: argparse.ArgumentParser, options: argparse.Namespace, arms: Collection[str]
) -> list[tuple[int, str]]:
    """(seed, arm) of every run asked for. With --share the process keeps to its core, on one thread."""
    if unknown := [name for name in options.only or [] if name not in arms]:
        parser.error(f"unknown arm {', '.join(unknown)}; choose from: {', '.join(arms)}")
    runs = [(seed, name) for seed in options.seeds for name in options.only or arms]
    if options.share:
        first, count = options.share
        runs = runs[first - 1 :: count]
        os.sched_setaffinity(0, {first - 1})
        torch.set_num_threads(1)
    return runs


def run_study(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    arms: Mapping[str, Any],
    run_arm: Callable[[Any, list[str], Path], Any],
    title: str,
) -> dict[str, Any]:
    """`run_arm(arm, assignments, folder)` of every run asked for, by the run's name.

    The assignments tell an arm its seed, its budget and the user's own --set. title: of the folder of all runs.
    """
    length = "recipe" if options.minutes is None else f"{options.minutes:g}min"
    budget = [] if options.minutes is None else [f"optim.minutes={options.minutes}"]
    rows: dict[str, Any] = {}
    for seed, name in chosen_runs(parser, options, arms):
        words = re.sub(r"[ /]", "-", re.sub(r"[,']", "", name))
        folder = options.output / f"{title}-{length}" / f"{words}-seed{seed}"
        rows[f"{name} (seed {seed})"] = run_arm(arms[name], [f"seed={seed}", *budget, *options.overrides], folder)
    return rows


def print_markdown(title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
    """A table to be read in a terminal of any width, and pasted into docs."""
    columns = list(next(iter(rows.values())))
    print(f"{title}\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row[column] for column in columns)} |")


def imported_from_timm(name: str) -> Any:
    """A module of .venv/timm, which is on the path only meanwhile: others must not find torchvision there.

    timm imports torchvision, whose wheel does not import on a CPU build of torch until its operators are declared."""
    folder = str(Path(sys.prefix) / "timm")
    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # declared already
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)
    sys.path.append(folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def rank_interval(correlation: float | None, count: int) -> tuple[float, float] | None:
    """95 % interval of Spearman's correlation of `count` pairs: Fisher's z with variance (1 + r²/2) / (n - 3) (Bonett
    and Wright, Psychometrika 65, 2000). None below 8 pairs, or without a correlation."""
    from odevit.analysis.intervals import FEWEST

    if correlation is None or count < FEWEST:
        return None
    if abs(correlation) >= 1:
        return correlation, correlation
    middle, half = math.atanh(correlation), 1.96 * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    return math.tanh(middle - half), math.tanh(middle + half)
