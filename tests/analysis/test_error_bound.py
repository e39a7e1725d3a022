"""Proposition 1 against the truth on problems where both are known, and on a model."""

import math

import pytest
import torch

from odevit.analysis import Study
from odevit.analysis import error_bound as analysis
from odevit.analysis.error_bound import REFINEMENT, euler_error, observed_order, path_rates, run
from odevit.dynamics.jacobian import error_bound
from odevit.model.config import OdeViTConfig
from odevit.model.model import OdeViTForImageClassification


class Linear(torch.nn.Module):
    """dx/dt = A x in one part."""

    def __init__(self, matrix: torch.Tensor):
        super().__init__()
        self.matrix = matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix.mT


def test_error_of_euler_on_the_exponential():
    field = Linear(torch.tensor([[0.7]], dtype=torch.float64))
    x = torch.tensor([[2.0]], dtype=torch.float64)
    found = euler_error([field], x, 10, horizon=3.0)
    assert found.item() == pytest.approx(abs(2 * (1 + 0.21) ** 10 - 2 * math.exp(2.1)), rel=1e-5)
    assert REFINEMENT == 8


def test_rates_are_those_of_the_field_over_unit_time():
    torch.manual_seed(0)
    a, horizon = torch.randn(5, 5, dtype=torch.float64), 1.7
    x = torch.randn(3, 5, dtype=torch.float64)
    rates = path_rates([Linear(a)], x, horizon)
    assert rates.bound is None
    assert torch.allclose(rates.norm, horizon * torch.linalg.matrix_norm(a, 2).expand(3), rtol=1e-6)
    assert torch.allclose(rates.log_norm, horizon * torch.linalg.eigvalsh((a + a.mT) / 2)[-1].expand(3), rtol=1e-6)
    times = torch.linspace(0, horizon, 5, dtype=torch.float64)
    states = torch.stack([x @ torch.linalg.matrix_exp(t * a).mT for t in times])
    exact = (states @ (horizon * a @ a * horizon).mT).norm(dim=-1).amax(dim=0)
    assert torch.allclose(rates.curvature, exact, rtol=1e-3)  # the path is RK4's


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 16])
def test_the_bound_holds_on_linear_systems_with_L_and_with_mu(count):
    torch.manual_seed(1)
    for _ in range(5):
        a, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
        fields = [Linear(a), Linear(a - 0.5 * torch.eye(4, dtype=torch.float64))]  # two phases
        rates, error = path_rates(fields, x, 2.0), euler_error(fields, x, count, 2.0)
        loose, tight = (error_bound(rate, 1.05 * rates.curvature, count) for rate in (rates.norm, rates.log_norm))
        assert (error <= tight).all()  # 5 % for the curvature between the sampled states
        assert (tight <= loose * (1 + 1e-9)).all()


def test_observed_order():
    errors = torch.tensor([[1.0, 2.0, 3.0], [0.25, 0.5, 0.75]])
    assert observed_order([4, 8], errors) == pytest.approx(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [{}, {"num_fields": 2, "attention": "sinkhorn"}, {"field": "contractive", "pool": "mean"}]
)
def test_analysis_reports_error_bounds_and_ratio(overrides, monkeypatch):
    monkeypatch.setattr(analysis, "STEPS", (2, 4, 8))
    torch.manual_seed(0)
    settings = dict(image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=2, num_labels=3)
    model = OdeViTForImageClassification(
        OdeViTConfig(**settings, mlp_ratio=2, depth=2, num_steps=4, **overrides)
    ).eval()
    study = Study(model, torch.randn(3, 1, 8, 8), torch.zeros(3).long(), ["a", "b", "c"])
    (finding,) = run(study)
    value = finding.value
    assert value["observed_order"] == pytest.approx(1, abs=0.25)
    assert ("L bounded" in value["bounds"]) == ("attention" not in overrides)
    for name, bound in value["bounds"].items():
        assert all(b >= m for b, m in zip(bound, value["measured"], strict=True)), name
        assert all(ratio >= 1 for ratio in value["ratio"][name])
    assert value["bounds"]["μ"][0] <= value["bounds"]["L measured"][0]
    assert "not over a region" in finding.text
    assert finding.figure is not None
