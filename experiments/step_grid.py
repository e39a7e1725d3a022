"""Would unequal steps buy anything? Euler on grids whose steps grow or shrink by a factor, beside equal steps.

    python experiments/step_grid.py digits --data digits --split train
    python experiments/step_grid.py MODEL --data DATA --max-images 1000 [--json FILE]

A grid of K steps in each phase has lengths h, h·g, h·g², …: g below 1 is finer late, above 1 finer early. One column is
the share of right answers, so that the cheapest setting within a point can be read off with and without such grids.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odevit.commands.evaluate import choose_split, load_data_for
from odevit.model.solvers import SOLVERS
from odevit.training.classifiers import load_odevit
from odevit.training.evaluation import model_input

GROWTHS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 2.5)


def lengths(steps: int, horizon: float, growth: float) -> list[float]:
    """Of the steps: each is `growth` times the one before, together the horizon."""
    weights = [growth**i for i in range(steps)]
    return [horizon * weight / sum(weights) for weight in weights]


@torch.no_grad()
def accuracy(model: Any, images: Tensor, labels: Tensor, steps: int, growth: float, solver: str = "euler") -> float:
    """Of a model with one or more fields; K is divided among them as evenly as in the library."""
    fields, right = model.odevit.fields, 0
    counts = [steps // len(fields) + (phase < steps % len(fields)) for phase in range(len(fields))]
    for part, wanted in zip(images.split(256), labels.split(256), strict=True):
        x = model.odevit.embed(part)
        for field, count in zip(fields, counts, strict=True):
            for h in lengths(count, model.config.horizon / len(fields), growth):
                x = SOLVERS[solver].step(field, x, h)
        right += int((model.classify(x).argmax(dim=1) == wanted).sum())
    return right / len(labels)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="val")
    parser.add_argument("--max-images", type=int, default=1000)
    parser.add_argument("--most", type=int, default=5, help="the largest K")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    model: Any = load_odevit(options.model)
    split = choose_split(load_data_for(model, options.data), options.split)
    pixels, labels = split.fetch(torch.arange(min(options.max_images, len(split))))
    images = model_input(model, pixels)
    first = max(1, model.config.num_fields)
    found = {
        str(steps): {str(growth): accuracy(model, images, labels, steps, growth) for growth in GROWTHS}
        for steps in range(first, options.most + 1)
    }
    print(
        f"{options.model}, {len(labels):,} images of {options.split}: right answers in % against the growth of steps\n"
    )
    print(f"| Euler | {' | '.join(map(str, GROWTHS))} |\n|---|{'---:|' * len(GROWTHS)}")
    for steps, row in found.items():
        print(f"| K = {steps} | {' | '.join(f'{100 * value:.1f}' for value in row.values())} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
