"""Any classifier in: networks that are no ViT, trained on digits, each turned into a flow by its answers alone.

    python experiments/any_classifier.py                        # two minutes of one core

Digits at 32 × 32 pixels. The teacher learns from labels; its student, of the shape of the quickstart's, sees none: it
compares answers (`distill.match: answers`). Runs resume; finished ones are only read.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from studies import print_markdown

from odevit.commands.distill import distill_recipe
from odevit.commands.train import train_recipe
from odevit.recipe import Recipe

IMAGES: dict[str, Any] = {"num_channels": 1, "num_labels": 10}
SHARED: dict[str, Any] = {"data": {"name": "digits", "image_size": 32}, "augment": {"crop": 2}}
STUDENT: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "tokenizer": "pooling", "hidden_size": 64, "num_attention_heads": 4,
    "mlp_ratio": 2, "norm": "layer", "pool": "sequence", "depth": 6, "num_steps": 4,
}  # fmt: skip
OPTIM: dict[str, Any] = {
    "name": "muon", "lr": 3e-3, "muon_lr": 1e-2, "weight_decay": 0.01, "epochs": 30, "batch_size": 64, "warmup": 0.1,
    "ema": 0.99,
}  # fmt: skip


def resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [1, 1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**IMAGES, **sizes))


def convnext() -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"hidden_sizes": [32, 64, 128], "depths": [1, 2, 1], "num_stages": 3, "patch_size": 2}
    return ConvNextForImageClassification(ConvNextConfig(**IMAGES, **sizes, image_size=32))


TEACHERS: dict[str, Callable[[], Any]] = {"ResNet": resnet, "ConvNeXt": convnext}


def study(build: Callable[[], Any], folder: Path, epochs: float) -> dict[str, Any]:
    """The comparison of a trained teacher and its student."""
    found = folder / "student/comparison.json"
    if not found.exists():
        torch.manual_seed(0)
        build().save_pretrained(folder / "untrained")
        optim = {"lr": 2e-3, "epochs": epochs, "batch_size": 64, "warmup": 0.1, "label_smoothing": 0.1}
        values = {**SHARED, "optim": optim, "output": str(folder / "teacher")}
        values["model"] = {"pretrained": str(folder / "untrained"), "image_size": 32}
        train_recipe(Recipe.from_dict(values), overwrite=True, progress_bar=False)
        values = {**SHARED, "model": STUDENT, "task": "distill", "output": str(folder / "student")}
        values |= {"optim": {**OPTIM, "epochs": epochs}, "loop": {"step_schedule": [[0, [2, 3, 4, 6]]]}}
        values["distill"] = {"teacher": str(folder / "teacher/model"), "match": "answers", "losses": {"kl": 1.0}}
        distill_recipe(Recipe.from_dict(values), report=None, overwrite=True, progress_bar=False)
    return json.loads(found.read_text())


def row(comparison: dict[str, Any]) -> dict[str, str]:
    teacher, student = comparison["teacher"], comparison["student"]
    return {
        "teacher": f"{100 * teacher['accuracy']:.2f}",
        "its parameters": f"{teacher['parameters']:,}",
        "student": f"{100 * student['accuracy']:.2f}",
        "its parameters ": f"{student['parameters']:,}",
        "agreement": f"{100 * comparison['agreement']:.2f}",
    }


def main(arguments: list[str] | None = None) -> dict[str, dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TEACHERS, default=list(TEACHERS))
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--output", type=Path, default=Path("runs/any_classifier"))
    options = parser.parse_args(arguments)
    rows = {name: row(study(TEACHERS[name], options.output / name, options.epochs)) for name in options.only}
    print_markdown("Digits, 359 test images", rows)
    return rows


if __name__ == "__main__":
    main()
