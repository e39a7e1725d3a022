"""The ODE-ViT itself: torch and transformers, nothing else."""

from odevit.model.backbone import OdeViTBackbone
from odevit.model.config import PRESETS, OdeViTConfig
from odevit.model.errors import NonFiniteStateError, SolverError
from odevit.model.field import VectorField
from odevit.model.model import OdeViTForImageClassification, OdeViTModel
from odevit.model.solvers import SOLVERS, Solution, solve

__all__ = [
    "PRESETS",
    "SOLVERS",
    "NonFiniteStateError",
    "OdeViTBackbone",
    "OdeViTConfig",
    "OdeViTForImageClassification",
    "OdeViTModel",
    "Solution",
    "SolverError",
    "VectorField",
    "solve",
]
