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


@pytest.mark.parametrize("final_norm", ["none", "layer"])
def test_path_measures_equal_full_jacobians(final_norm):
    """The log-norm on the quotient where the head ignores constants, on the whole space where it reads them."""
    model = tiny_model(num_fields=2, num_steps=4, horizon=2.0, final_norm=final_norm)
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    basis = torch.eye(40, dtype=torch.float64)
    if final_norm != "none":
        p = torch.kron(torch.eye(5), torch.eye(8) - 1 / 8).double()
        basis = torch.linalg.eigh(p).eigenvectors[:, 5:]
    measures = path_measures(model, images)
    states = model.odevit.evolve(model.odevit.embed(images), save_at="steps").xs
    for k, (phase, _) in enumerate(Grid(4, 2.0, 2).steps()):
        field = model.odevit.fields[phase]
        for i in range(2):
            jacobian = 2.0 * torch.func.jacrev(lambda y, field=field: field(y))(states[k, i : i + 1]).reshape(40, 40)
            assert measures.norm[k, i].item() == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item(), rel=1e-3)
            symmetric = torch.linalg.eigvalsh(basis.mT @ (jacobian + jacobian.mT) @ basis / 2)[-1].item()
            assert measures.log_norm[k, i].item() == pytest.approx(symmetric, rel=1e-3)
            assert measures.log_norm_upper[k, i].item() >= symmetric * (1 - 1e-9)
    assert measures.quotient == (final_norm != "none")
    assert measures.bound is not None
    assert (measures.norm <= measures.bound).all()


def test_a_field_that_stands_still_has_no_sign():
    """Its log-norm is 0: -1e-10 from rounding is no contraction, and +1e-10 no expansion."""
    model = tiny_model(final_norm="layer").float()
    (field,) = model.odevit.fields
    field.mlp.w1.weight.data.zero_()
    field.attention.value.weight.data.zero_()
    study = Study(model, torch.randn(2, 1, 8, 8), torch.zeros(2).long(), list("0123456789"))
    path = next(finding for finding in run(study) if finding.name == "stability/path")
    assert path.value["share_contracting"] == path.value["share_expanding"] == 0
    assert "nowhere" in path.headline


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
