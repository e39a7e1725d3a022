"""Bounds that must never be violated: of tokenizers, of the field on a ball, of the certified radius."""

import pytest
import torch
from torch.func import jvp

from odevit.analysis import Study
from odevit.analysis.attack import attack
from odevit.analysis.stability import path_measures, run
from odevit.dynamics import certificate
from odevit.dynamics.certificate import certify, norm_derivatives_bound, second_derivative_bound, tokenizer_bound
from odevit.model.config import OdeViTConfig
from odevit.model.layers import NORMS, TOKENIZERS
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import Grid

TINY = dict(
    image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=2, mlp_ratio=2, depth=1, num_steps=3,
    num_labels=10, final_norm="none",
)  # fmt: skip


def tiny_model(**overrides) -> OdeViTForImageClassification:
    torch.manual_seed(0)
    model = OdeViTForImageClassification(OdeViTConfig(**{**TINY, **overrides})).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.requires_grad_(False)


def of_length(shape: tuple[int, ...], length: float) -> torch.Tensor:
    """Random directions, each sample of this length; one in three has a single entry."""
    delta = torch.randn(shape, dtype=torch.float64)
    flat = delta.flatten(1)
    for row in range(0, len(flat), 3):
        flat[row] *= torch.nn.functional.one_hot(torch.randint(flat.shape[1], ()), flat.shape[1])
    return delta * (length / flat.norm(dim=1)).view(-1, *[1] * (len(shape) - 1))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_tokenizer_bound_is_never_violated(tokenizer):
    model = tiny_model(tokenizer=tokenizer)
    layer, bound = model.odevit.tokenizer, tokenizer_bound(model.odevit.tokenizer)
    images = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    for image in images:
        jacobian = torch.func.jacrev(layer)(image[None]).reshape(-1, 64)
        assert torch.linalg.matrix_norm(jacobian, 2) <= bound * (1 + 1e-9)
    if tokenizer == "patch":  # patches do not overlap: the bound is the norm
        assert torch.linalg.matrix_norm(jacobian, 2).item() == pytest.approx(bound)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 5.0])
def test_second_derivative_bound_holds_on_the_whole_ball(norm, size):
    field = tiny_model(norm=norm, bias=True).odevit.fields[0]
    x = 0.7 * torch.randn(1, 5, 8, dtype=torch.float64)
    radius = torch.tensor([size], dtype=torch.float64)
    bound = second_derivative_bound(field, x)(radius)
    delta = of_length((60, 5, 8), size)

    def drift(y):
        return field.F(y) + field.attend(y)[0]

    value, linear = jvp(drift, (x.repeat(60, 1, 1),), (delta,))
    remainder = (drift(x + delta) - value - linear).flatten(1).norm(dim=1)
    assert (remainder <= bound / 2 * size**2 * (1 + 1e-9)).all()
    assert bound.isfinite().all()

    # and second derivatives at points inside the ball, by differences of first ones
    inside = x + delta * torch.rand(60, 1, 1, dtype=torch.float64)
    u = of_length((60, 5, 8), 1.0)
    second = jvp(lambda y: jvp(drift, (y,), (u,))[1], (inside,), (u,))[1].flatten(1).norm(dim=1)
    assert (second <= bound * (1 + 1e-9)).all()


def test_layer_norm_derivatives_bound_hold():
    norm = torch.nn.LayerNorm(6, eps=1e-3).double().requires_grad_(False)
    norm.weight.data = torch.randn(6, dtype=torch.float64)
    x, r = torch.randn(1, 1, 6, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    first, second = norm_derivatives_bound(norm, x)(r)
    points, u = x + of_length((300, 1, 6), 0.5), of_length((300, 1, 6), 1.0)
    one, two = jvp(lambda y: jvp(norm, (y,), (u,))[1], (points,), (u,))
    assert (one.flatten(1).norm(dim=1) <= first).all()
    assert (two.flatten(1).norm(dim=1) <= second).all()


# --- certified radius -------------------------------------------------------------------------------------------------


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    tensor = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return (tensor - tensor.mean()) / tensor.std(), torch.tensor(labels)


@pytest.fixture(scope="module")
def trained() -> OdeViTForImageClassification:
    torch.manual_seed(0)
    images, labels = digits()
    model = OdeViTForImageClassification(OdeViTConfig(**TINY))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(200):
        chosen = torch.randint(1500, (64,))
        loss = model(images[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False).double()


def test_no_attack_succeeds_within_the_certified_radius_of_200_images(trained):
    images, labels = digits()
    images, labels = images[1500:1700].double(), labels[1500:1700]
    result, attacked = certify(trained, images), attack(trained, images, iterations=25)
    assert (result.answer == labels).double().mean() > 0.5  # it has learned something
    assert (result.radius <= attacked).all()
    assert (result.radius <= result.first_order * (1 + 1e-9)).all()
    assert (result.radius > 1e-5).double().mean() > 0.9
    assert attacked.isfinite().double().mean() > 0.9  # or the comparison would say nothing
    # Nor does any random or gradient step of exactly that size.
    for delta in (of_length(images.shape, 1.0), _gradient_direction(trained, images, result.answer)):
        moved = trained(images + delta * result.radius.view(-1, 1, 1, 1)).logits.argmax(dim=1)
        assert (moved == result.answer).all()


def _gradient_direction(model, images, answer):
    images = images.clone().requires_grad_(True)
    logits = model(images).logits
    top = logits.topk(2, dim=1).values
    (gradient,) = torch.autograd.grad((top[:, 1] - top[:, 0]).sum(), images)
    return gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    "overrides",
    [
        {"final_norm": "layer"},
        {"tokenizer": "conv", "num_fields": 2, "bias": True},
        {"norm": "layer", "num_registers": 2},
    ],
)
def test_certificate_is_sound_for_other_models(overrides):
    model, images = tiny_model(**overrides), torch.randn(12, 1, 8, 8, dtype=torch.float64)
    result, attacked = certify(model, images), attack(model, images, iterations=30)
    assert (result.radius <= attacked).all()
    assert (result.radius > 0).all()
    assert torch.equal(result.answer, model(images).logits.argmax(dim=1))


def test_bounded_jacobians_give_a_smaller_radius_than_exact_ones(trained, monkeypatch):
    images = digits()[0][1500:1510]
    exact = certify(trained, images).radius
    monkeypatch.setattr(certificate, "EXACT_STATE", 0)
    bounded = certify(trained, images).radius
    assert (bounded <= exact * (1 + 1e-9)).all()
    assert (bounded > 0).all()


def test_a_linear_model_is_certified_up_to_its_decision_plane():
    model = tiny_model(
        depth=1e-12
    )  # the flow stands still; CLS does not see the image, so nothing can change the answer
    result = certify(model, torch.randn(2, 1, 8, 8, dtype=torch.float64))
    assert (result.radius > 1).all()


def test_models_without_certificate_say_why():
    with pytest.raises(ValueError, match="Euler steps with softmax attention"):
        certify(tiny_model(solver="rk4"), torch.zeros(1, 1, 8, 8))


# --- findings ---------------------------------------------------------------------------------------------------------


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
