"""Certified radius: against its formula from dense Jacobians, against models whose radius is known, and attacked."""

import math

import pytest
import torch

from odevit.analysis.attack import attack
from odevit.dynamics import certificate
from odevit.dynamics.bounds import field_bound
from odevit.dynamics.certificate import certify, norm_derivatives_bound, second_derivative_bound, tokenizer_bound
from odevit.model.config import OdeViTConfig
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


# --- against the formula, term by term --------------------------------------------------------------------------------


def margin_left(model, image: torch.Tensor, rho: float, exact: bool) -> float:
    """What is certainly left of the margins of one image (1, c, H, W) after any perturbation of size rho: the formula
    of the module, from dense Jacobians and gradients, one class and one step at a time."""
    base, config = model.odevit, model.config
    fields = [(base.fields[p], h) for p, h in Grid(config.num_steps, config.horizon, config.num_fields).steps()]
    steps = [lambda x, f=field, h=h: x + h * f(x) for field, h in fields]
    states = [base.embed(image)]
    for step in steps:
        states.append(step(states[-1]))
    size, patches = states[0].numel(), slice(1, 1 + config.num_patches)
    dense = [torch.func.jacrev(step)(x).reshape(size, size) for step, x in zip(steps, states, strict=False)]
    norms = [torch.linalg.matrix_norm(a, 2).item() for a in dense]
    flow = torch.eye(size, dtype=torch.float64).unflatten(1, states[0].shape[1:])[:, patches].flatten(1)
    reach = [1.0]
    for a in dense:
        flow = a @ flow
        reach.append(torch.linalg.matrix_norm(flow, 2).item())
    if not exact:
        norms = [1 + h * field_bound(field, x).item() for (field, h), x in zip(fields, states, strict=False)]
        reach = [math.prod(norms[:k]) for k in range(len(norms) + 1)]
    entrance = tokenizer_bound(base.tokenizer)
    answer = int(model.classify(states[-1]).argmax())

    def margin_from(k: int, j: int):
        def margin(x: torch.Tensor) -> torch.Tensor:
            for step in steps[k:]:
                x = step(x)
            logits = model.classify(x)[0]
            return logits[answer] - logits[j]

        return margin

    left = []
    for j in set(range(config.num_labels)) - {answer}:
        gradients = [torch.func.grad(margin_from(k, j))(states[k]) for k in range(len(states))]
        slope = torch.func.grad(lambda x, j=j: margin_from(0, j)(base.embed(x)))(image).norm()
        if config.tokenizer != "patch":
            slope = entrance * gradients[0][:, patches].norm()
        total, beyond = margin_from(len(steps), j)(states[-1]) - slope * rho, torch.zeros(1, dtype=torch.float64)
        for k, (field, h) in enumerate(fields):
            r = reach[k] * entrance * rho + beyond
            rest = h / 2 * second_derivative_bound(field, states[k])(r) * r**2
            total, beyond = total - gradients[k + 1].norm() * rest, norms[k] * beyond + rest
        r = reach[-1] * entrance * rho + beyond
        head = model.classifier.weight[answer] - model.classifier.weight[j]
        bend = norm_derivatives_bound(model.norm, states[-1][:, :1])(r)[1]
        left.append((total - head.norm() * bend / 2 * r**2).item())
    return min(left)


MODELS = {
    "layer norm at the end": {"final_norm": "layer", "num_steps": 3},
    "two fields": {"num_fields": 2, "num_steps": 3, "horizon": 2.0, "depth": 2},
    "stem, biases, registers": {"tokenizer": "conv", "bias": True, "num_registers": 1, "num_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_at_the_radius_nothing_is_left_of_the_margin(name, exact, monkeypatch):
    model, images = tiny_model(num_labels=4, **MODELS[name]), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    if not exact:
        monkeypatch.setattr(certificate, "EXACT_STATE", 0)
    result = certify(model, images)
    assert torch.equal(result.answer, model(images).logits.argmax(dim=1))
    for i, rho in enumerate(result.radius.tolist()):
        assert margin_left(model, images[i : i + 1], rho * (1 - 1e-5), exact) > 0
        assert margin_left(model, images[i : i + 1], rho * (1 + 1e-5), exact) < 0


# --- against the true radius ------------------------------------------------------------------------------------------


def see_through(bend: float, margin: float = 0.5) -> OdeViTForImageClassification:
    """One patch, two fields, a step each: attention takes the patch's first coordinate to CLS's second, evenly and so
    linearly; then one hidden unit bends it, and the head reads its output. `bend` 0: it passes straight to the head."""
    sizes = dict(image_size=4, patch_size=4, num_channels=1, hidden_size=4, num_attention_heads=1, mlp_ratio=1)
    options = dict(num_steps=2, num_fields=2, depth=2, num_labels=2, norm="none", final_norm="none")
    model = OdeViTForImageClassification(OdeViTConfig(**sizes, **options)).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    first, second = model.odevit.fields
    model.odevit.tokenizer.projection.weight[0] = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
    first.attention.value.weight[1, 0] = 40.0
    torch.nn.init.eye_(first.attention.out.weight)
    second.mlp.w1.weight[0, 1] = bend
    second.mlp.w2.weight[2, 0] = 1.0
    model.classifier.weight[1, 2 if bend else 1] = 1.0
    model.classifier.bias[0] = margin
    return model


def distance_per_unit(model: OdeViTForImageClassification) -> float:
    """Size of the image's smallest change that moves CLS's second coordinate by one: 40 by two tokens is 20."""
    return 1 / (20 * model.odevit.tokenizer.projection.weight[0].norm().item())


def test_a_linear_model_is_certified_and_attacked_up_to_its_decision_plane():
    model, images = see_through(0.0), torch.zeros(3, 1, 4, 4, dtype=torch.float64)
    plane = 0.5 * distance_per_unit(model)
    result, attacked = certify(model, images), attack(model, images, iterations=25)
    assert result.radius.tolist() == pytest.approx([plane] * 3, rel=1e-6)
    assert result.first_order.tolist() == pytest.approx([plane] * 3)
    assert result.margin.tolist() == pytest.approx([0.5] * 3)
    assert (attacked >= result.radius * (1 - 1e-6)).all()
    assert (attacked <= 1.02 * plane).all()


@pytest.mark.parametrize("margin", [0.05, 0.5, 2.0])
def test_the_radius_of_a_bent_model_is_near_the_smallest_attack(margin):
    """GELU bends most where this model stands: first order alone would certify too much, and the radius is less than a
    factor of 1.6 from the perturbation that changes the answer."""
    model, images = see_through(1.0, margin), torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    result, attacked = certify(model, images), attack(model, images, iterations=40)
    grid = torch.linspace(0, 3, 300_001, dtype=torch.float64)
    true = grid[torch.searchsorted(torch.nn.functional.gelu(grid), margin)].item() * distance_per_unit(model)
    assert attacked.item() == pytest.approx(true, rel=0.02)
    assert result.radius.item() < true < 1.6 * result.radius.item()
    assert result.first_order.item() > true


def test_the_largest_radius_is_found():
    radii = torch.tensor([3e-20, 0.37, 12.0, 1e-40, 1e5], dtype=torch.float64)
    found = certificate._largest_certified(lambda rho: rho < radii, torch.ones(5, dtype=torch.float64))
    assert found.tolist() == pytest.approx([3e-20, 0.37, 12.0, 0.0, 1e3], rel=1e-9)


# --- trained and random models ----------------------------------------------------------------------------------------


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_bounded_jacobians_give_a_smaller_radius_than_exact_ones(trained, monkeypatch):
    images = digits()[0][1500:1510]
    exact = certify(trained, images).radius
    monkeypatch.setattr(certificate, "EXACT_STATE", 0)
    bounded = certify(trained, images).radius
    assert (bounded <= exact * (1 + 1e-9)).all()
    assert (bounded > 0).all()


def test_models_without_certificate_say_why():
    with pytest.raises(ValueError, match="Euler steps with softmax attention"):
        certify(tiny_model(solver="rk4"), torch.zeros(1, 1, 8, 8))
