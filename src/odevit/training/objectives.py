"""What is minimised: an objective turns (model, batch) into named loss terms. The loop knows nothing else of it."""

from typing import Any, NamedTuple, Protocol

import torch.nn.functional as nnf
from torch import Tensor, nn

from odevit.data import Data
from odevit.model.solvers import Grid
from odevit.training.config import PenaltyConfig
from odevit.training.integration import Integration


class Terms(NamedTuple):
    """losses: means over the batch, already weighted; their sum is minimised. logits (b, classes): for the accuracy
    that is shown. evaluations: of the field, per image."""

    losses: dict[str, Tensor]
    logits: Tensor | None = None
    evaluations: int | None = None


class Objective(Protocol):
    """Stateless from step to step, except for frozen things such as a teacher."""

    def __call__(
        self, model: Any, images: Tensor, targets: Tensor, indices: Tensor, *, progress: float, integration: Integration
    ) -> Terms:
        """images (b, c, S, S) normalised; targets (b, classes) soft; indices (b,) in the training split."""
        ...

    def stage(self, progress: float) -> str:
        """What is going on at this progress, in a word, for the progress bar."""
        ...

    def training_data(self, data: Data) -> Data:
        """The data to train on: as it is, unless the objective has prepared its own views of the images."""
        ...

    def watch(self, model: Any, images: Tensor) -> dict[str, Any]:
        """What only the objective can tell the monitor of these normalised images (b, c, S, S)."""
        ...


class Classification:
    """Cross-entropy with soft targets, or of certified radii (`penalties.margin`), plus penalties on the path."""

    def __init__(self, penalties: PenaltyConfig | None = None):
        self.penalties = penalties or PenaltyConfig()

    def stage(self, progress: float) -> str:
        return "train"

    def training_data(self, data: Data) -> Data:
        return data

    def watch(self, model: Any, images: Tensor) -> dict[str, Any]:
        return {}

    def __call__(
        self, model: Any, images: Tensor, targets: Tensor, indices: Tensor, *, progress: float, integration: Integration
    ) -> Terms:
        wanted = integration.options(getattr(model.config, "horizon", 1.0))
        if self.penalties.jasmin:
            wanted["output_attentions"] = True
        if self.penalties.transport:
            wanted["output_hidden_states"] = True
        output = model(images, **wanted)
        if self.penalties.margin:
            from odevit.dynamics.contraction_certificate import margin_loss

            losses = {"margin": margin_loss(model, output.logits, targets, self.penalties.margin)}
        else:
            losses = {"cross_entropy": nnf.cross_entropy(output.logits, targets)}
        evaluations = getattr(output, "evaluations", None)
        return Terms(
            losses | self._penalties(model, output, integration),
            output.logits,
            None if evaluations is None else max(evaluations),
        )

    def _penalties(self, model: Any, output: Any, integration: Integration) -> dict[str, Tensor]:
        losses = {}
        if self.penalties.jasmin:
            from odevit.dynamics.bounds import jasmin

            losses["jasmin"] = self.penalties.jasmin * jasmin(output.attentions, self.penalties.jasmin_k)
        if self.penalties.transport:
            num_steps = integration.num_steps or model.config.num_steps
            grid = model.config.time_grid(num_steps)
            losses["transport"] = self.penalties.transport * transport_cost(output.hidden_states, grid)
        return losses


def transport_cost(states: tuple[Tensor, ...], grid: Grid) -> Tensor:
    """∫ mean ‖dX/dt‖² dt of a path given by its K+1 states (b, n, d), with dX/dt the difference quotient of each step.

    The mean runs over batch, tokens and width. For Euler the quotient is the field itself.
    """
    total = states[0].new_zeros(())
    for (_, h), before, after in zip(grid.steps(), states[:-1], states[1:], strict=False):  # states may end early
        total = total + (after - before).square().mean() / h
    return total


class LossModule(nn.Module):
    """Model and objective as one module: the thing that is distributed, so that gradients are exchanged whatever part
    of the model the objective calls."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(
        self, images: Tensor, targets: Tensor, indices: Tensor, progress: float, integration: Integration
    ) -> Terms:
        return self.objective(self.model, images, targets, indices, progress=progress, integration=integration)
