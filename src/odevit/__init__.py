"""Vision Transformers as ordinary differential equations.

Importing odevit registers its classes with transformers' Auto classes, so `AutoModelForImageClassification` and
`pipeline("image-classification")` know them.
"""

from odevit.config import PRESETS, OdeViTConfig
from odevit.field import VectorField
from odevit.model import OdeViTForImageClassification, OdeViTModel
from odevit.solvers import SOLVERS, NonFiniteStateError, Solution, SolverError, solve

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SOLVERS",
    "NonFiniteStateError",
    "OdeViTConfig",
    "OdeViTForImageClassification",
    "OdeViTModel",
    "Solution",
    "SolverError",
    "VectorField",
    "solve",
]
