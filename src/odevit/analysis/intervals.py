"""95 % intervals of the numbers that analyses report: Student's t for means, Fisher's z for correlations.

Neither is given for fewer than FEWEST values: from so few nobody can tell how far from normal they are. Percentile
bootstrap intervals, which stood here before, covered 50 % at n = 2, 71 % at 3 and 83 % at 5.
"""

import math

import torch
from torch import Tensor

LEVEL = 0.95
FEWEST = 8  # values of a mean, pairs of a correlation, and members of the smaller group where y is yes or no
CONSTANT = 1e-12  # a spread below this share of the largest value is rounding


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension of (…, N), NaN where x or y is constant or not finite.

    With y in {0, 1} this is the point-biserial correlation.
    """
    x, y = x.double(), y.double()
    constant = _constant(x) | _constant(y)
    x, y = x - x.mean(dim=-1, keepdim=True), y - y.mean(dim=-1, keepdim=True)
    scale = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    return torch.where(constant, torch.nan, (x * y).sum(dim=-1) / scale)


def _constant(x: Tensor) -> Tensor:
    return x.amax(dim=-1) - x.amin(dim=-1) <= CONSTANT * x.abs().amax(dim=-1)


def mean_interval(x: Tensor, level: float = LEVEL) -> tuple[float, float] | None:
    """Student's t interval of the mean of (N,); None below FEWEST values or where one is not finite."""
    from scipy.stats import t

    x = x.double()
    if len(x) < FEWEST or not bool(x.isfinite().all()):
        return None
    half = float(t.ppf((1 + level) / 2, len(x) - 1)) * float(x.std()) / math.sqrt(len(x))
    middle = float(x.mean())
    return middle - half, middle + half


def correlation_interval(x: Tensor, y: Tensor, level: float = LEVEL) -> tuple[float, float] | None:
    """Fisher's z interval of Pearson's correlation of (N,) and (N,): tanh(artanh r ± z / √(N - 3)).

    None below FEWEST pairs, where there is no correlation, or where y is yes or no and one answer is rarer than FEWEST.
    """
    from scipy.stats import norm

    r, values = float(pearson(x, y)), y.unique(return_counts=True)[1]
    if len(x) < FEWEST or not math.isfinite(r) or (len(values) == 2 and int(values.min()) < FEWEST):
        return None
    middle = math.atanh(r) if abs(r) < 1 else math.copysign(math.inf, r)
    half = float(norm.ppf((1 + level) / 2)) / math.sqrt(len(x) - 3)
    return math.tanh(middle - half), math.tanh(middle + half)


def mean(x: Tensor) -> Tensor:
    """Mean over the last dimension."""
    return x.double().mean(dim=-1)


def number(value: float | Tensor) -> float | None:
    """A float for report.json; None where there is no finite value."""
    value = float(value)
    return value if math.isfinite(value) else None
