"""`odevit info`: what a model weighs and costs."""

from pathlib import Path
from typing import Any

from odevit.commands.console import print_info
from odevit.dynamics.cost import describe
from odevit.model.config import PRESETS
from odevit.model.model import OdeViTForImageClassification
from odevit.shipped import names
from odevit.training.classifiers import load_odevit


def info(model: str, *, steps: int | None = None, solver: str | None = None, as_json: bool = False) -> dict[str, Any]:
    """Parameters, multiply-accumulates, bytes and the Lipschitz bound of a preset, a folder or a model of the hub."""
    if model not in PRESETS and model not in names() and "/" not in model and not Path(model).exists():
        raise ValueError(
            f"unknown model {model!r}: neither a folder, nor a hub name, nor one of the zoo ({', '.join(names())}), "
            f"nor one of {', '.join(PRESETS)}"
        )
    network = OdeViTForImageClassification.from_preset(model) if model in PRESETS else load_odevit(model)
    numbers = describe(network.eval(), num_steps=steps, solver=solver)
    print_info(model, numbers, as_json)
    return numbers
