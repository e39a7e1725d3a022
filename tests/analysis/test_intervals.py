"""Intervals cover as often as they say, from eight values on, and there are none below."""

import pytest
import torch
from torch import Tensor

from odevit.analysis.intervals import FEWEST, correlation_interval, mean_interval, pearson


def pairs(count: int, rho: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, noise = torch.randn(2, count, generator=generator, dtype=torch.float64)
    return x, rho * x + (1 - rho**2) ** 0.5 * noise


@pytest.mark.parametrize("count", [FEWEST, 12, 40])
@pytest.mark.parametrize("skewed", [False, True])
def test_mean_intervals_cover(count, skewed):
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(1000, count, generator=generator, dtype=torch.float64)
    truth = 1.0 if skewed else 0.0
    samples = samples.square() if skewed else samples  # χ² with one degree of freedom: as skewed as it gets
    intervals = [mean_interval(row) for row in samples]
    covered = sum(low <= truth <= high for low, high in intervals) / 1000
    assert (0.84 if skewed else 0.93) < covered < 0.97


@pytest.mark.slow
@pytest.mark.parametrize("count", [FEWEST, 10, 40])
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_correlation_intervals_cover(count, rho):
    generator = torch.Generator().manual_seed(0)
    intervals = [correlation_interval(*pairs(count, rho, generator)) for _ in range(800)]
    assert 0.925 < sum(low <= rho <= high for low, high in intervals) / 800 < 0.97


def test_correlation_with_a_rare_answer_covers_or_has_no_interval():
    """Accuracy of images: mostly right. Without any relation the interval must hold zero 19 times of 20."""
    generator, covered = torch.Generator().manual_seed(0), 0
    right = torch.ones(100, dtype=torch.float64)
    right[:FEWEST] = 0
    for _ in range(800):
        low, high = correlation_interval(torch.randn(100, generator=generator), right)
        covered += low <= 0 <= high
    assert 0.93 < covered / 800 < 0.97
    right[0] = 1
    assert correlation_interval(torch.randn(100, generator=generator), right) is None


def test_no_interval_from_few_values():
    assert mean_interval(torch.randn(FEWEST - 1)) is None
    assert mean_interval(torch.full((FEWEST,), -torch.inf)) is None
    assert correlation_interval(torch.randn(FEWEST - 1), torch.randn(FEWEST - 1)) is None
    assert mean_interval(torch.ones(FEWEST)) == (1.0, 1.0)
    x = torch.arange(10.0)
    assert correlation_interval(x, 2 * x) == pytest.approx((1.0, 1.0))


def test_pearson_of_a_constant_is_not_a_number_at_any_scale():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for constant in (0.1, 1e6, 1e-9, 0.0):  # 1e6: deviations from the rounded mean are large
        assert pearson(x, torch.full((50,), constant)).isnan()
        assert pearson(torch.full((50,), constant, dtype=torch.float64), x).isnan()
    assert pearson(1e-9 * x, -2e-9 * x).item() == pytest.approx(-1)  # small is not constant
    y = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert pearson(x, y).item() == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item(), abs=1e-6)
    assert pearson(x, torch.where(x > 0, x, torch.inf)).isnan()
