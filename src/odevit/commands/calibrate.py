"""`odevit calibrate`: the cheapest solver and steps, and when an image may stop, written into the model's config."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from odevit.atomic import write_file
from odevit.commands import best_device
from odevit.commands.console import check_output, print_table
from odevit.commands.evaluate import choose_split, load_data_for
from odevit.data import Split, derive_seed
from odevit.dynamics.calibration import calibrate_model, check_count
from odevit.dynamics.setting import Setting, cheapest, try_settings
from odevit.model.halting import SCORES
from odevit.shipped import names
from odevit.training.classifiers import load_odevit, resolve_model
from odevit.training.evaluation import model_input

MOST_IMAGES = 5000  # enough to find α = 0.1 %, and a minute or two of a small model's time


def calibrate(
    model: str,
    data: str,
    *,
    alpha: float = 0.01,
    delta: float = 0.05,
    score: str = "margin",
    split: str = "val",
    max_images: int = MOST_IMAGES,
    keep_setting: bool = False,
    as_json: bool = False,
) -> dict[str, Any]:
    """Search the setting on one half of the images, calibrate halting on the other, and write both into config.json.

    The halves are disjoint because a rule tested on images that chose the setting would be too hopeful. With
    keep_setting there is no search, and all images go into the calibration.
    """
    check_count(max_images, alpha, delta)
    folder = Path(resolve_model(model))
    if model in names():
        raise ValueError(
            f"{model} belongs to the package, and its card says what it does: calibrate a copy of {folder}"
        )
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}; choose one of {', '.join(SCORES)}")
    if not folder.is_dir():
        raise ValueError(f"calibrate writes into the model's folder; {model} is not one here: download it first")
    check_output(folder / "config.json")
    network: Any = load_odevit(model)
    network.to(best_device())
    images, labels = shuffled(network, choose_split(load_data_for(network, data), split), max_images)
    half = 0 if keep_setting else len(images) // 2
    try:
        check_count(len(images) - half, alpha, delta)
    except ValueError as error:
        hint = " With --keep-setting all images go into it." if half else ""
        raise ValueError(f"{error}{hint} ({split} split of {data}: {len(images)} images)") from error
    chosen = None
    if not keep_setting:
        chosen = adopt_cheapest(network, images[:half], labels[:half], alpha, quiet=as_json)
    halting = calibrate_model(network, images[half:], score=score, alpha=alpha, delta=delta)
    network.config.halting = halting
    write_config(network, folder)
    print_halting(halting, as_json, chosen)
    return halting


def shuffled(network: Any, split: Split, most: int) -> tuple[Tensor, Tensor]:
    """At most so many images of a split, prepared for the model, and their labels, in a random order."""
    generator = torch.Generator().manual_seed(derive_seed(0, "calibrate"))
    order = torch.randperm(len(split), generator=generator)[:most]
    parts = list(split.stream(list(order.split(256))))
    images = torch.cat([model_input(network, pixels) for pixels, _ in parts])
    return images, torch.cat([labels for _, labels in parts]).to(images.device)


def adopt_cheapest(network: Any, images: Tensor, labels: Tensor, alpha: float, quiet: bool = False) -> Setting:
    """Give the model the cheapest setting within alpha of the best, and say what was found."""
    network.eval()
    tried = try_settings(network, images, labels)
    own = (network.config.solver, network.config.num_steps)
    chosen = cheapest(tried, alpha)
    network.config.solver, network.config.num_steps = chosen.solver, chosen.num_steps
    if not quiet:
        rows = {"its own": next((s for s in tried if s[:2] == own), None), "chosen": chosen}
        rows |= {"the best": max(tried, key=lambda s: (s.accuracy, -s.macs))}
        print_table(
            f"{len(tried)} settings on {len(images):,} images, within {alpha:.1%} of the best",
            {name: _row(setting) for name, setting in rows.items() if setting is not None},
            headers=("solver", "steps", "M multiply-accumulates", "accuracy"),
        )
    return chosen


def _row(setting: Setting) -> dict[str, str]:
    return {
        "solver": setting.solver,
        "steps": str(setting.num_steps),
        "M multiply-accumulates": f"{setting.macs / 1e6:,.2f}",
        "accuracy": f"{setting.accuracy:.2%}",
    }


def write_config(network: Any, folder: Path) -> None:
    """Solver, steps and halting into config.json; everything else there, and the weights, stay as they are."""
    file = folder / "config.json"
    config = network.config
    values = {"solver": config.solver, "num_steps": config.num_steps, "halting": config.halting}
    write_file(file, json.dumps({**json.loads(file.read_text()), **values}, indent=2) + "\n")


def print_halting(halting: dict[str, Any], as_json: bool, chosen: Setting | None) -> None:
    if as_json:
        print(json.dumps({**halting, "setting": chosen and chosen._asdict()}))
        return
    Console().print(
        f"An image may stop when its {halting['score']} reaches {halting['threshold']:.4f}: after "
        f"{halting['mean_steps']:.2f} of {halting['num_steps']} steps on average. With confidence "
        f"{1 - halting['delta']:.0%} at most {halting['alpha']:.1%} of all images are then answered otherwise than at "
        f"full depth ({halting['disagreements']} of {halting['images']} here). Written into config.json.",
        highlight=False,
    )
