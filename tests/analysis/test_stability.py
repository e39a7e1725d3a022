"""What the stability analysis tells about a path, against full Jacobians."""

import pytest
import torch

from odevit.analysis import Study
from odevit.analysis.stability import path_measures, run
from odevit.model.config import OdeViTConfig
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import Grid


def tiny_model(**overrides) -> OdeViTForImageClassification:
    sizes = dict(image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=2, mlp_ratio=2, depth=1)
    options = dict(num_steps=3, num_labels=10, final_norm="none")
    torch.manual_seed(0)
    model = OdeViTForImageClassification(OdeViTConfig(**{**sizes, **options, **overrides})).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.requires_grad_(False)


def test_path_measures_equal_full_jacobians():
    model, images = tiny_model(num_fields=2, num_steps=4, horizon=2.0), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    measures = path_measures(model, images)
    states = model.odevit.evolve(model.odevit.embed(images), save_at="steps").xs
    for k, (phase, _) in enumerate(Grid(4, 2.0, 2).steps()):
        field = model.odevit.fields[phase]
        for i in range(2):
            jacobian = 2.0 * torch.func.jacrev(lambda y, field=field: field(y))(states[k, i : i + 1]).reshape(40, 40)
            assert measures.norm[k, i].item() == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item(), rel=1e-3)
            symmetric = torch.linalg.eigvalsh((jacobian + jacobian.mT) / 2)[-1].item()
            assert measures.log_norm[k, i].item() == pytest.approx(symmetric, rel=1e-3)
    assert measures.bound is not None
    assert (measures.norm <= measures.bound).all()


@pytest.mark.parametrize("overrides", [{}, {"attention": "sinkhorn", "spectral_cap": 1.0}])
def test_analysis(overrides):
    model = tiny_model(**overrides).float()
    findings = {
        f.name: f for f in run(Study(model, torch.randn(6, 1, 8, 8), torch.zeros(6).long(), list("0123456789")))
    }
    assert len(findings) == 3
    assert findings["stability/path"].value["images"] == 6
    if overrides:
        assert findings["stability/radius"].value is None
        assert "softmax" in findings["stability/radius"].text
    else:
        assert findings["stability/radius"].value["certified_above_attacked"] == 0
        assert all(f.figure is not None for f in findings.values())
