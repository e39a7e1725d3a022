"""The tables of results on CIFAR beside the paper's and the peers' rows, and its two pictures.

    python experiments/headlines.py --add RUN --name NAME --how WORDS --data CIFAR-10 --command "odevit train …"
    python experiments/headlines.py --curve RUN # where it was heading: a row of the table "Where were they heading?"
    python experiments/headlines.py             # the tables in docs/RESULTS.md, docs/accuracy-{parameters,macs}.svg

--add reads a finished run (its result.json, its weights) into docs/headlines.json; runs that differ in their seed alone
stand in one row. What others report is marked so.
"""

import argparse
import json
import math
import re
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import cct  # noqa: F401  (makes its runs loadable)

from odevit.analysis.report.style import MUTED, color, figure_style, subplots
from odevit.dynamics.cost import count_macs, count_parameters
from odevit.recipe import Recipe
from odevit.training.classifiers import load_classifier

DOCS = Path(__file__).parent.parent / "docs"
KINDS = ("measured by us", "reported by them")
TICKS = sorted(range(50, 98), key=lambda tick: (tick % 10 > 0, tick % 5 > 0, tick % 2 > 0))  # %, the roundest first
APART = 1 / 14  # of the axis, between two ticks
Box = tuple[float, float, float, float]  # its middle, width and height
POINT, DIGIT = 6.0, (4.6, 7.0)  # a marker, and a digit of 7 pt, in points


class Row(NamedTuple):
    name: str
    data: str
    how: str
    parameters: float
    macs: float | None
    accuracy: float
    kind: str = KINDS[0]
    minutes: float | None = None  # of the run, without its teacher's
    seed: int | None = None
    command: str = ""
    trained: float | None = None  # of the parameters; None: all

    @property
    def title(self) -> tuple[str, str, str, str]:
        return self.data, self.name, self.how, self.kind


def reported(name: str, how: str, parameters: float, macs: float | None, tens: float | None, hundreds: float | None,
             trained: float | None = None) -> list[Row]:  # fmt: skip
    """What others say of CIFAR-10 and CIFAR-100."""
    top1 = {"CIFAR-10": tens, "CIFAR-100": hundreds}
    return [
        Row(name, data, how, parameters, macs, right, KINDS[1], trained=trained)
        for data, right in top1.items()
        if right is not None
    ]


# the paper (arXiv 2511.16501), Compact Convolutional Transformers (arXiv 2104.05704 and their repository), Zhong et al.
# 2022; the paper's multiply-accumulates are ours: `odevit info paper-base`, at 224 pixels
REPORTED = [
    *reported("ODE-ViT, paper", "from scratch", 0.5e6, None, 0.809, None),
    *reported("ODE-ViT, paper", "from scratch", 4.2e6, None, None, 0.579),
    *reported("ODE-ViT Base, paper", "distilled from ViT-B (92.3, 88.1)", 7.9e6, 35.3e9, 0.885, 0.721, trained=7e6),
    *reported("ODE-ViT Small, paper", "distilled from ViT-B (92.3, 88.1)", 4.4e6, 18.5e9, 0.867, 0.657, trained=3.8e6),
    *reported("ODE, Zhong et al.", "from scratch", 0.7e6, None, None, 0.533),
    *reported("CCT-2/3x2", "from scratch, 200 GPU epochs", 0.284e6, 33e6, 0.8917, 0.6690),
    *reported("CCT-4/3x2", "from scratch, 200 GPU epochs", 0.482e6, 46e6, 0.9145, 0.7046),
    *reported("CCT-7/3x1", "from scratch, 200 GPU epochs", 3.76e6, 947e6, 0.9478, 0.7705),
    *reported("ViT-Lite-7/4", "from scratch, 200 GPU epochs", 3.7e6, 239e6, 0.9138, 0.6975),
]


def measured(run: Path, name: str, data: str, how: str, command: str, trained: int | None = None) -> Row:
    """What a finished run says of itself, its multiply-accumulates counted."""
    result, model = json.loads((run / "result.json").read_text()), load_classifier(str(run / "model"))
    parameters, macs = count_parameters(model)["total"], count_macs(model).total
    seed, minutes = Recipe.load(run / "recipe.yaml").seed, round(result["seconds"] / 60, 1)
    return Row(name, data, how, parameters, macs, result["top1"], KINDS[0], minutes, seed, command, trained)


def curve(run: Path) -> str:
    """Steps; top-1 of the held-out images by a quarter, half and three quarters of them, and at the end; then that of
    its own augmented images over the last twentieth."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [(line["step"], line["top1"]) for line in lines if line["kind"] == "val"]
    last = held_out[-1][0]
    shown = [min(held_out, key=lambda seen: abs(seen[0] - share * last))[1] for share in (0.25, 0.5, 0.75, 1)]
    own = [line["top1"] for line in lines if line["kind"] == "train" and line["step"] > 0.95 * last]
    learnt = "" if None in own else f"{100 * mean(own):.0f}"
    return f"| {last:,} | {' | '.join(f'{100 * right:.1f}' for right in shown)} | {learnt} |"


def read(file: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def numbered(rows: list[Row]) -> dict[int, list[Row]]:
    """The runs of each title, by data and mean accuracy: the numbers of the table and of the points in the pictures."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.seed or 0):
        runs.setdefault(row.title, []).append(row)
    return dict(enumerate(sorted(runs.values(), key=lambda runs: (runs[0].data, -accuracy(runs))), 1))


def accuracy(runs: list[Row]) -> float:
    return mean(run.accuracy for run in runs)


def table(rows: list[Row]) -> str:
    """Markdown: a table for each data set, then the commands by number."""
    lines: list[str] = []
    commands = [""]
    data = None
    for number, runs in numbered(rows).items():
        row = runs[0]
        if row.data != data:
            data = row.data
            lines += [
                "",
                f"| | {data} | how | parameters | trained | M multiply-accumulates | top-1 | minutes | seed | by |",
                "|---:|---|---|---:|---:|---:|---|---|---|---|",
            ]
        ours = row.kind == KINDS[0]
        size, trained = (
            "all" if count is None else f"{count:,.0f}" if ours else f"{count / 1e6:g} M"
            for count in (row.parameters, row.trained)
        )
        macs = "" if row.macs is None else f"{row.macs / 1e6:,.1f}"
        right = ", ".join(f"{100 * run.accuracy:{'.2f' if ours else '.4g'}}" for run in runs)
        minutes, seeds = (
            ", ".join(f"{value:g}" for value in values if value is not None)
            for values in ([run.minutes for run in runs], [run.seed for run in runs])
        )
        by = "us" if ours else "them"
        cells = (number, row.name, row.how, size, trained, macs, right, minutes, seeds, by)
        lines.append(f"| {' | '.join(map(str, cells))} |")
        commands += [f"* {number}: `{row.command}`"] if row.command else []
    return "\n".join([*lines[1:], *commands])


def places(points: dict[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """Where each point's number stands, as an offset of its middle: as near as it covers no point and no other number.

    points: number -> (x, y) on the paper, in points of 1/72 inch, as the offsets are.
    """
    around = [(radius, turn * math.pi / 6) for radius, turn in product(range(8, 100, 3), range(12))]  # above first
    boxes = [(x, y, POINT, POINT) for x, y in points.values()]
    offsets: dict[int, tuple[float, float]] = {}
    for number, (x, y) in points.items():
        size = (DIGIT[0] * len(str(number)), DIGIT[1])
        candidates = ((radius * math.sin(angle), radius * math.cos(angle)) for radius, angle in around)
        offsets[number] = next(
            (dx, dy) for dx, dy in candidates if not any(overlap((x + dx, y + dy, *size), box) for box in boxes)
        )
        dx, dy = offsets[number]
        boxes.append((x + dx, y + dy, *size))
    return offsets


def overlap(one: Box, other: Box) -> bool:
    return abs(one[0] - other[0]) < (one[2] + other[2]) / 2 and abs(one[1] - other[1]) < (one[3] + other[3]) / 2


def height(right: float) -> float:
    """Accuracy on a scale of errors: from 80 to 90 % is as far as from 90 to 95 %."""
    return -math.log(1 - right)


def ticks_between(lowest: float, highest: float) -> list[int]:
    """Accuracies in % whose heights lie between these two, as many as have room, the roundest first."""
    kept: list[int] = []
    for tick in TICKS:
        place = height(tick / 100)
        room = all(abs(place - height(other / 100)) >= APART * (highest - lowest) for other in kept)
        if lowest < place < highest and room:
            kept.append(tick)
    return sorted(kept)


def draw(rows: list[Row], what: str, path: Path) -> None:
    """Accuracy against parameters or multiply-accumulates: ours blue, what we measured filled; means over seeds."""
    title, unit = {"parameters": ("parameters", 1.0), "macs": ("million multiply-accumulates an image", 1e6)}[what]
    data, written = list(dict.fromkeys(row.data for row in rows)), []
    with figure_style():
        figure, panels = subplots(len(data), 1, width=6, height=4 * len(data))
        for axes, name in zip([panels] if len(data) == 1 else panels, data, strict=True):
            of_data = {number: runs for number, runs in numbered(rows).items() if runs[0].data == name}
            shown = {number: runs for number, runs in of_data.items() if getattr(runs[0], what) is not None}
            points = {number: (getattr(runs[0], what) / unit, height(accuracy(runs))) for number, runs in shown.items()}
            for number, point in points.items():
                row = shown[number][0]
                fill = "full" if row.kind == KINDS[0] else "none"
                axes.plot(*point, "o", color=color(0 if "ours" in row.name else 1), fillstyle=fill)
            axes.set(xscale="log", xlabel=title, ylabel="top-1, % (scale of errors)", title=name)
            axes.margins(0.08, 0.08)
            ticks = ticks_between(*axes.get_ylim())
            axes.set_yticks([height(tick / 100) for tick in ticks], [str(tick) for tick in ticks])
            figure.draw_without_rendering()
            on_paper = axes.transData.transform(list(points.values())) * 72 / figure.dpi
            offsets = places(dict(zip(points, map(tuple, on_paper), strict=True)))
            line = {"arrowstyle": "-", "linewidth": 0.4, "color": MUTED, "shrinkA": 0, "shrinkB": 2.5}
            for number, offset in offsets.items():
                middle = {"ha": "center", "va": "center", "textcoords": "offset points", "arrowprops": line}
                axes.annotate(str(number), points[number], offset, fontsize=7, **middle)
            names = [f"{number}  {runs[0].name}, {runs[0].how}" for number, runs in shown.items()]
            beside = axes.text(
                1.03, 1, "\n".join(names), transform=axes.transAxes, va="top", fontsize=7, linespacing=1.4
            )
            beside.set_in_layout(False)  # it would squeeze the axes; the file is cut to hold it
            written.append(beside)
        written.append(figure.suptitle("blue: ours; filled: measured by us; hollow: reported by them", fontsize=7))
    figure.savefig(path, facecolor="white", bbox_inches="tight", bbox_extra_artists=written)


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="RUN")
    parser.add_argument("--curve", type=Path, metavar="RUN")
    for option in ("--name", "--how", "--data", "--command"):
        parser.add_argument(option, default="")
    parser.add_argument("--trained", type=int, help="how many of the parameters; default: all")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    if options.curve:
        print(curve(options.curve))
        return []
    file, page = options.docs / "headlines.json", options.docs / "RESULTS.md"
    own = read(file)
    if options.add:
        row = measured(options.add, options.name, options.data, options.how, options.command, options.trained)
        own = [r for r in own if (r.title, r.seed) != (row.title, row.seed)] + [row]
        file.write_text(json.dumps([r._asdict() for r in own], indent=1) + "\n")
    rows = own + REPORTED
    marked = re.compile("(<!-- headlines -->\n).*?(<!-- end -->)", re.DOTALL)
    page.write_text(marked.sub(lambda match: f"{match[1]}{table(rows)}\n{match[2]}", page.read_text()))
    for what in ("parameters", "macs"):
        draw(rows, what, options.docs / f"accuracy-{what}.svg")
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
