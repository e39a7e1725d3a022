"""What the experiments share: a study has named arms, every arm runs once per seed, runs divide among cores."""

import argparse
import os
import re
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
