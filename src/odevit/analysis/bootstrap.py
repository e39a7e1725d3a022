"""Seeded bootstrap intervals for the numbers that analyses report."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

DRAWS, LEVEL = 1000, 0.95  # resamples and coverage: the usual choices


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension of (…, N), NaN where x or y is constant.

    With y in {0, 1} this is the point-biserial correlation.
    """
    x, y = x.double(), y.double()
    x, y = x - x.mean(dim=-1, keepdim=True), y - y.mean(dim=-1, keepdim=True)
    scale = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    return torch.where(scale > 1e-12, (x * y).sum(dim=-1) / scale, torch.nan)


def bootstrap_interval(
    statistic: Callable[..., Tensor], *columns: Tensor, seed: int = 0, draws: int = DRAWS, level: float = LEVEL
) -> tuple[float, float]:
    """Percentile interval of `statistic(*columns)` under resampling of the N rows with replacement.

    columns: tensors (N,), resampled together; the statistic maps (…, N) to (…). Draws without a value (a constant
    resample has no correlation) are left out; (nan, nan) when none is left.
    """
    n = len(columns[0])
    if n == 0:
        raise ValueError("a bootstrap needs at least one row, got none")
    generator = torch.Generator().manual_seed(seed)
    chunk = max(1, 2_000_000 // n)  # rows of indices held at once
    values = []
    for start in range(0, draws, chunk):
        index = torch.randint(n, (min(chunk, draws - start), n), generator=generator)
        values.append(statistic(*(column.cpu()[index] for column in columns)))
    found = torch.cat(values).double()
    found = found[found.isfinite()]
    if not len(found):
        return math.nan, math.nan
    low, high = torch.quantile(found, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high


def mean(x: Tensor) -> Tensor:
    """Mean over the last dimension."""
    return x.double().mean(dim=-1)


def number(value: float | Tensor) -> float | None:
    """A float for report.json; None where there is no finite value."""
    value = float(value)
    return value if math.isfinite(value) else None
