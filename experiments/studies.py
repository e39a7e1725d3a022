"""What the experiments share: a study has named arms, every arm runs once per seed, runs divide among cores."""

import argparse
import os
import re
from collections.abc import Collection
from pathlib import Path

import torch


def share(text: str) -> tuple[int, int]:
    """I/N → (I, N)."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, for example 1/2; got {text!r}")
    return int(first), int(count)


def study_parser(description: str, studies: Collection[str], *, minutes: float, output: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=studies)
    parser.add_argument("--minutes", type=float, default=minutes)
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


def run_folder(options: argparse.Namespace, seed: int, name: str) -> Path:
    words = re.sub(r"[ /]", "-", re.sub(r"[,']", "", name))
    return options.output / f"{options.study}-{options.minutes:g}min" / f"{words}-seed{seed}"


def assignments_of(options: argparse.Namespace, seed: int) -> list[str]:
    """What every arm is told of seed, budget and the user's own --set."""
    return [f"seed={seed}", f"optim.minutes={options.minutes}", *options.overrides]
