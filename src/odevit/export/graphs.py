"""What is exported: plain modules with tensors in and out, and what a reader of the file must know.

Shapes: b batch, c channels, S image size, n tokens, d width.
"""

import json
from typing import Any

from torch import Tensor, nn

from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import ADAPTIVE, SOLVERS, check_solver


class Classifier(nn.Module):
    """Normalised images (b, c, S, S) → logits (b, classes), the solver's steps unrolled."""

    def __init__(self, model: OdeViTForImageClassification, num_steps: int, solver: str):
        super().__init__()
        self.model, self.num_steps, self.solver = model, num_steps, solver

    def forward(self, images: Tensor) -> Tensor:
        flow = self.model.odevit
        return self.model.classify(flow.evolve(flow.embed(images), self.num_steps, self.solver).xs[-1])


class Embed(nn.Module):
    """Normalised images (b, c, S, S) → tokens (b, n, d), the state at t = 0."""

    def __init__(self, model: OdeViTForImageClassification):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.odevit.embed(images)


class Field(nn.Module):
    """A state (b, n, d) → both parts of its velocity, F (MLP) and G (attention): dX/dt = F + G."""

    def __init__(self, model: OdeViTForImageClassification, phase: int):
        super().__init__()
        self.field: Any = model.odevit.fields[phase]

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.field.F(state), self.field.G(state)


class Head(nn.Module):
    """A state (b, n, d) → logits (b, classes)."""

    def __init__(self, model: OdeViTForImageClassification):
        super().__init__()
        self.model = model

    def forward(self, state: Tensor) -> Tensor:
        return self.model.classify(state)


def chosen_flow(model: OdeViTForImageClassification, num_steps: int | None, solver: str | None) -> tuple[int, str]:
    """Steps and solver of the exported flow: the model's own unless given. Adaptive solvers cannot be unrolled."""
    steps, name = model.config.num_steps if num_steps is None else num_steps, solver or model.config.solver
    check_solver(name)
    if name in ADAPTIVE:
        raise ValueError(
            f"an exported flow has a fixed number of steps, {name} chooses its own; use --solver with one of "
            f"{', '.join(SOLVERS)}"
        )
    model.config.time_grid(steps)  # raises on impossible step counts
    return steps, name


def label_names(model: Any) -> list[str]:
    return [str(model.config.id2label[index]) for index in range(model.config.num_labels)]


def metadata(model: OdeViTForImageClassification, num_steps: int, solver: str) -> dict[str, str]:
    """Labels, preprocessing and flow, each as JSON text, for the file's own metadata."""
    config, neutral = model.config, [0.5] * model.config.num_channels
    preprocessing = {
        "input": "float32, (batch, channels, height, width), pixels on the scale 0..1, then (x - mean) / std",
        "channels": {1: "grey", 3: "RGB"}.get(config.num_channels, str(config.num_channels)),
        "image_size": config.image_size,
        "resize": "bicubic, shorter side to image_size, then the centre cut out",
        "mean": list(config.image_mean or neutral),
        "std": list(config.image_std or neutral),
    }
    flow = {
        "solver": solver,
        "num_steps": num_steps,
        "horizon": float(config.horizon),
        "fields": config.num_fields,
        "steps": [list(step) for step in config.time_grid(num_steps).steps()],
    }
    values = {"labels": label_names(model), "preprocessing": preprocessing, "flow": flow}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
