"""What stability by construction costs and buys, and what the middle ways do: one table each.

    python experiments/stability.py contractive --data digits                  # three minutes of one core
    python experiments/stability.py middle --data digits
    python experiments/stability.py screen --data cifar10 --minutes 5 --set data.name=… --set data.val_fraction=0.1
    python experiments/stability.py contractive --data cifar10 --minutes 60 --seeds 0 --share 1/2 --set data.name=…
    python experiments/stability.py contractive --data cifar10 --minutes 60 --seeds 0 --set data.name=…  # the table

Every arm is a recipe with overrides. With `--minutes` all have that wall-clock budget; without, the recipes' own.
`--share I/N` takes every N-th run and keeps to core I. Runs resume: start the same command again and it goes on where
it was; finished arms are only read. Radii are ℓ₂ in pixels of [0, 1]; σ(Φ) is the largest singular value of the flow's
Jacobian, geometric mean over images; μ the largest log-norm per unit of depth seen on their paths (on the quotient for
softmax fields, whose norms take out constants); flow gap: accuracy of the model's own steps minus that of the exact
flow (rk4). `screen` changes one thing of the certified recipe at a time and reads held-out training images only.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from studies import print_markdown, run_study, study_parser

from odevit.analysis.certified import attacked_radii
from odevit.analysis.stability import path_measures
from odevit.commands.train import train
from odevit.data import DataConfig, Split, load_data
from odevit.data.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from odevit.data.splits import MemorySplit
from odevit.dynamics.contraction_certificate import RADII, certified_radius
from odevit.dynamics.cost import count_macs, count_parameters
from odevit.dynamics.exponents import model_exponents
from odevit.recipe import Recipe
from odevit.training.classifiers import load_odevit
from odevit.training.evaluation import certified_accuracy, evaluate, model_input


class Arm(NamedTuple):
    recipe: str
    overrides: tuple[str, ...] = ()


def arms(data: str) -> dict[str, dict[str, Arm]]:
    """The studies on digits or cifar10. The softmax field has as many parameters as the contractive fields together."""
    softmax = "digits" if data == "digits" else "cifar10/scratch"
    certified = "digits-certified" if data == "digits" else "cifar10/certified"
    usual = ("model.tokenizer=conv", "model.final_norm=layer", "model.pool=sqrt_mean")
    labels = ("penalties.margin=0", "optim.label_smoothing=0.1")
    same_muon = ("optim.name=muon", "optim.muon_lr=4e-3")
    return {
        "contractive": {
            "softmax": Arm(softmax),
            "softmax, linear patches": Arm(softmax, ("model.tokenizer=patch",)),
            "contractive, usual around it": Arm(certified, (*usual, *labels)),
            "contractive, certified": Arm(certified),
            "certified, wider": Arm(certified, ("model.hidden_size=192", "augment.crop=2")),
            "certified, √n·mean": Arm(certified, ("model.pool=sqrt_mean",)),
            "certified, margin 36/255": Arm(certified, ("penalties.margin=0.1412",)),
            "certified, Euler": Arm(certified, ("model.solver=euler", "model.depth=4")),
        },
        "screen": {
            "as it is": Arm(certified),
            "√n·mean": Arm(certified, ("model.pool=sqrt_mean",)),
            "CLS": Arm(certified, ("model.pool=cls",)),
            "MLP of 2": Arm(certified, ("model.mlp_ratio=2",)),
            "no mixing": Arm(certified, ("model.mixing=none",)),
            "two fields": Arm(certified, ("model.num_fields=2", "model.num_steps=2", "model.depth=4")),
            "eight fields": Arm(certified, ("model.num_fields=8", "model.num_steps=8", "model.depth=16")),
            "Euler": Arm(certified, ("model.solver=euler", "model.depth=4")),
            "Muon's rate 3e-2": Arm(certified, ("optim.muon_lr=3e-2",)),
        },
        "middle": {
            "softmax": Arm(softmax),
            "spectral cap 1": Arm(softmax, ("model.spectral_cap=1",)),
            "spectral cap 0.5": Arm(softmax, ("model.spectral_cap=0.5",)),
            "Muon, decay 0": Arm(softmax, (*same_muon, "optim.muon_weight_decay=0")),
            "Muon, decay 2": Arm(softmax, (*same_muon, "optim.muon_weight_decay=2")),
            "L2 attention": Arm(softmax, ("model.attention=l2",)),
            "damping 0.5": Arm(softmax, ("model.damping=0.5",)),
            "damping 2": Arm(softmax, ("model.damping=2",)),
            "JaSMin 0.1": Arm(softmax, ("penalties.jasmin=0.1",)),
            "JaSMin 0.01": Arm(softmax, ("penalties.jasmin=0.01",)),
        },
    }


def gather(splits: list[Split | None], count: int) -> MemorySplit:
    """At most `count` images of the test split, and of the others when it has fewer."""
    images, labels = [], []
    for split in splits:
        left = count - sum(map(len, labels))
        if split is not None and left > 0:
            pixels, classes = split.fetch(torch.arange(min(left, len(split))))
            images.append(pixels)
            labels.append(classes)
    return MemorySplit(torch.cat(images), torch.cat(labels))


def corrupted_accuracy(model: Any, split: MemorySplit, name: str, strength: int) -> float:
    return evaluate(model, MemorySplit(corrupt(split.images, name, strength), split.labels))["top1"]


def measure(folder: Path, data: DataConfig, *, attacked: int, path_images: int = 16) -> dict[str, Any]:
    """Everything in a row of the table, of a finished run."""
    model, loaded = load_odevit(str(folder)), load_data(data)
    config, test = model.config, loaded.test or loaded.val
    some = gather([test], attacked)
    result: dict[str, Any] = {
        "top1": evaluate(model, test)["top1"],
        "parameters": count_parameters(model)["total"],
        "macs": count_macs(model).total,
    }
    exact = evaluate(model, some, solver="rk4", num_steps=max(16, 4 * config.num_steps))["top1"]
    result["flow_gap"] = evaluate(model, some)["top1"] - exact
    result["corrupted"] = {
        name: [
            evaluate(model, MemorySplit(corrupt(some.images, name, strength), some.labels))["top1"]
            for strength in STRENGTHS
        ]
        for name in CORRUPTIONS
    }
    path = model_input(model, some.images[:path_images])
    exponents = model_exponents(model, path, k=1).value.double()
    result["exponent"] = float(exponents.mean())
    result["sigma"] = math.exp(result["exponent"] * float(config.depth))
    result["log_norm"] = float(path_measures(model, path).log_norm.max()) / float(config.depth)
    many = gather([test, loaded.val, loaded.train], attacked)
    images = model_input(model, many.images)
    with torch.no_grad():
        logits = torch.cat([model(batch).logits for batch in images.split(256)])
    radii, right = attacked_radii(model, images, iterations=40), logits.argmax(dim=1) == many.labels
    on_test = torch.arange(len(radii)) < len(some)
    result["attacked"] = {n: float((right & (radii > r))[on_test].double().mean()) for n, r in RADII.items()}
    result["attacked_radius"] = float(radii.median())
    try:
        proven = certified_radius(model, logits)
    except ValueError as reason:  # LayerNorm, softmax field, …
        return result | {"certified": None, "not_certified": str(reason)}
    result |= certified_accuracy(model, test)
    return result | {"certified_above_attacked": int((proven > radii).sum()), "images_attacked": len(radii)}


def measure_held_out(folder: Path, data: DataConfig) -> dict[str, Any]:
    """Accuracy and certified accuracy on the validation images alone."""
    model, val = load_odevit(str(folder)), load_data(data).val
    counts = {"parameters": count_parameters(model)["total"], "macs": count_macs(model).total}
    return counts | {"top1": evaluate(model, val)["top1"], "images": len(val)} | certified_accuracy(model, val)


def run_arm(arm: Arm, overrides: list[str], folder: Path, *, attacked: int | None) -> dict[str, Any]:
    """Train an arm and measure it, or read it when it has been. attacked: None for what is held out alone."""
    file = folder / "stability.json"
    if not file.exists():
        assignments = [*arm.overrides, *overrides, f"output={folder}"]
        if not (folder / "result.json").exists():
            train(arm.recipe, assignments, resume=True)
        data = Recipe.load(arm.recipe, assignments).data
        found = measure_held_out(folder, data) if attacked is None else measure(folder, data, attacked=attacked)
        file.write_text(json.dumps(found, indent=1))
    return json.loads(file.read_text())


def row(found: dict[str, Any]) -> dict[str, str]:
    proven = found["certified"]
    known = {
        "top-1": f"{found['top1']:.1%}",
        "certified 36/72/108": "–" if proven is None else " / ".join(f"{100 * share:.1f}" for share in proven.values()),
    }
    if "attacked" not in found:
        return known | {"multiply-accumulates": f"{found['macs']:,}", "parameters": f"{found['parameters']:,}"}
    corrupted = {name: sum(values) / len(values) for name, values in found["corrupted"].items()}
    return known | {
        "attacked 36/72/108": " / ".join(f"{100 * share:.1f}" for share in found["attacked"].values()),
        "attacked radius": f"{found['attacked_radius']:.2f}",
        "noise/blur/contrast/jpeg": " / ".join(f"{100 * share:.1f}" for share in corrupted.values()),
        "flow gap": f"{100 * found['flow_gap']:+.1f}",
        "exponent": f"{found['exponent']:+.3f}",
        "σ(Φ)": f"{found['sigma']:.3g}",
        "μ": f"{found['log_norm']:+.2g}",
        "parameters": f"{found['parameters']:,}",
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__ or "", ("contractive", "screen", "middle"), minutes=None, output="runs/stability")
    parser.add_argument("--data", choices=("digits", "cifar10"), default="digits")
    parser.add_argument("--attacked", type=int, default=1000, help="images to attack; on digits beyond the test split")
    options = parser.parse_args(arguments)
    found = run_study(
        parser,
        options,
        arms(options.data)[options.study],
        partial(run_arm, attacked=None if options.study == "screen" else options.attacked),
        title=f"{options.data}-{options.study}",
    )
    for name, values in found.items():
        if (beaten := values.get("certified_above_attacked")) is not None:
            print(f"{name}: certificates beaten by the attack: {beaten} of {values['images_attacked']} images")
    rows = {name: row(values) for name, values in found.items()}
    split = "held-out images" if options.study == "screen" else "test split"
    print_markdown(f"{options.study} on {options.data}, {split}", rows)
    return rows


if __name__ == "__main__":
    main()
