"""Vision Transformers as ordinary differential equations.

Importing odevit registers its classes with transformers' Auto classes, so `AutoModelForImageClassification` and
`pipeline("image-classification")` know them.
"""

from odevit.model import (
    PRESETS,
    SOLVERS,
    NonFiniteStateError,
    OdeViTBackbone,
    OdeViTConfig,
    OdeViTForImageClassification,
    OdeViTModel,
    Solution,
    SolverError,
    VectorField,
    solve,
)
from odevit.shipped import zoo

__version__ = "0.1.0"

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
    "zoo",
]
