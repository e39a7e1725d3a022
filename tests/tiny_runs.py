"""A run that takes about a second and still uses everything that has a state: dropout, augmentation, averages, Muon."""

from pathlib import Path
from typing import Any

from odevit.recipe import Recipe

MODEL = {"patch_size": 4, "hidden_size": 32, "num_attention_heads": 2, "mlp_ratio": 1, "depth": 2, "num_steps": 2}


def tiny_recipe(folder: Path, **changes: dict[str, Any]) -> Recipe:
    """Plain AdamW on digits without any randomness in the model; `changes` are groups of keys to replace."""
    values: dict[str, Any] = {
        "output": str(folder),
        "model": MODEL,
        "data": {"name": "digits", "limit": 640},
        "optim": {"steps": 24, "batch_size": 64, "lr": 3e-3},
        "loop": {"eval_every": 8, "checkpoint_every": 5, "log_every": 3, "keep": 2},
    }
    for group, replaced in changes.items():
        values[group] = {**values.get(group, {}), **replaced} if isinstance(replaced, dict) else replaced
    if "minutes" in values["optim"]:
        del values["optim"]["steps"]
    return Recipe.from_dict(values)


def stateful_recipe(folder: Path) -> Recipe:
    return tiny_recipe(
        folder,
        model={"dropout": 0.1, "drop_path": 0.1},
        optim={"name": "muon", "ema": 0.9, "label_smoothing": 0.1},
        augment={"crop": 1, "flip": True, "mixup": 0.2},
    )
