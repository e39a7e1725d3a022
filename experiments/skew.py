"""Does a skew part keep the margins of a contractive flow? digits-certified with and without it.

    python experiments/skew.py --seeds 0 1 2 [--output runs/skew] [--set KEY=VALUE …]

dX/dt = -s ∇E(X) + s S X with S = B - Bᵀ: the skew part turns features and changes no distance. Explicit steps of it
expand, so it is taken exactly here, as the third part of Lie–Trotter: X exp(h s S)ᵀ, an orthogonal matrix. It lives
here only: an option enters the library when it pays (docs/RESULTS.md).
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from odevit.commands.train import train
from odevit.data import load_data
from odevit.model import model as model_module
from odevit.model.contractive import ContractiveField
from odevit.model.solvers import SOLVERS
from odevit.recipe import Recipe
from odevit.training.evaluation import certified_accuracy


class TurningField(ContractiveField):
    """A contractive field with a skew part that starts at zero."""

    def __init__(self, width: int, *args: Any, **options: Any):
        super().__init__(width, *args, **options)
        self.skew = nn.Parameter(torch.zeros(width, width))

    def turn(self, x: Tensor, h: float) -> Tensor:
        """exp(h s S) x for every token: the exact flow of the skew part."""
        return x @ torch.matrix_exp(h * self.scale * (self.skew - self.skew.mT)).mT


def turning_lie_trotter(field: Any, x: Tensor, h: float) -> Tensor:
    x = x + h * field.F(x)
    x = x + h * field.G(x)
    return field.turn(x, h) if isinstance(field, TurningField) else x


def run(skew: bool, seed: int, assignments: list[str], folder: Path) -> dict[str, float]:
    """Train digits-certified, with the skew part or without, and evaluate it; read what is there already."""
    file = folder / "certified.json"
    if file.exists():
        return json.loads(file.read_text())
    fields, solver = model_module.FIELDS, SOLVERS["lie_trotter"]
    usual = fields["contractive"]
    if skew:
        replace(fields, "contractive", lambda config: TurningField(**options_of(usual(config), config)))
        replace(SOLVERS, "lie_trotter", solver._replace(step=turning_lie_trotter))
    try:
        overrides = [*assignments, f"seed={seed}", f"output={folder}"]
        result = train("digits-certified", overrides, overwrite=True)
        test: Any = load_data(Recipe.load("digits-certified", overrides).data).test
        found = {"top1": result.metrics["top1"], **certified_accuracy(result.model, test)["certified"]}
    finally:
        replace(fields, "contractive", usual)
        replace(SOLVERS, "lie_trotter", solver)
    file.write_text(json.dumps(found))
    return found


def replace(registry: Any, name: str, value: Any) -> None:
    """In a registry that refuses a second entry of one name."""
    dict.__setitem__(registry, name, value)


def options_of(field: Any, config: Any) -> dict[str, Any]:
    mixing = "none" if field.kernel() is None else "depthwise"
    return {
        "width": config.hidden_size, "heads": field.heads, "hidden": field.w.out_features, "scale": field.scale,
        "mixing": mixing, "registers": config.num_registers,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=Path("runs/skew"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    rows = {
        name: [run(skew, seed, options.set, options.output / f"{name.split()[0]}-{seed}") for seed in options.seeds]
        for name, skew in (("without skew part", False), ("with", True))
    }
    print(f"| seeds {options.seeds} | top-1 | certified at 36 | 72 | 108 of 255 |\n|---|---:|---:|---:|---:|")
    for name, found in rows.items():
        columns = [[100 * row[key] for row in found] for key in found[0]]
        print(f"| {name} | {' | '.join(f'{statistics.mean(c):.1f} ({min(c):.1f}–{max(c):.1f})' for c in columns)} |")
    return rows


if __name__ == "__main__":
    main()
