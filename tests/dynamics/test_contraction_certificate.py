"""Certificates of contractive models: exact where they say so, never beaten by an attack, refused where not covered."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import contractive_model
from torch import Tensor, nn
from torch.func import jacrev

from odevit.analysis import Study, run_analyses
from odevit.analysis.attack import attack
from odevit.data import DataConfig, Split, load_data
from odevit.data.splits import MemorySplit
from odevit.dynamics.arrival import Certified, arrival_bound
from odevit.dynamics.contraction_certificate import (
    TEMPERATURE,
    certified_radius,
    certify_contractive,
    check_contractive,
    entrance_norm,
    flow_growth,
    margin_loss,
    settle_head,
)
from odevit.model.halting import halt
from odevit.model.model import OdeViTForImageClassification
from odevit.training.config import PenaltyConfig
from odevit.training.evaluation import certified_accuracy, model_input
from odevit.training.integration import Integration
from odevit.training.objectives import Classification


@pytest.fixture(scope="module")
def digits() -> Split:
    return load_data(DataConfig(name="digits")).train


@pytest.fixture(scope="module")
def trained(digits: Split) -> OdeViTForImageClassification:
    """80 steps with the margin loss."""
    model, objective = contractive_model().train(), Classification(PenaltyConfig(margin=0.3))
    images, labels = digits.fetch(torch.arange(1024))
    images, targets = model_input(model, images), nn.functional.one_hot(labels, 10).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(80):
        chosen = torch.arange(step * 128, step * 128 + 128) % 1024
        terms = objective(model, images[chosen], targets[chosen], chosen, progress=0.0, integration=Integration())
        assert list(terms.losses) == ["margin"]
        optimizer.zero_grad()
        terms.losses["margin"].backward()
        optimizer.step()
    return model.eval()


def pixels_to_logits(model: OdeViTForImageClassification) -> Any:
    config = model.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (config.image_mean, config.image_std))
    return lambda pixels: SimpleNamespace(logits=model((pixels - mean.to(pixels)) / std.to(pixels)).logits)


@pytest.mark.slow
def test_no_attack_beats_a_certificate(trained: OdeViTForImageClassification, digits: Split) -> None:
    pixels = digits.fetch(torch.arange(48))[0].float() / 255
    forward = pixels_to_logits(trained)
    radius = certified_radius(trained, forward(pixels).logits)
    found = attack(forward, pixels, iterations=40)
    assert bool((found.double() >= radius).all())
    assert float((radius / found).median()) > 0.02, "a radius one can see"
    assert float(radius.median()) > 0.01


@pytest.mark.slow
def test_certified_accuracy_counts_right_answers_beyond_each_radius(
    trained: OdeViTForImageClassification, digits: Split
) -> None:
    images, labels = digits.fetch(torch.arange(300))
    found = certify_contractive(trained, model_input(trained, images))
    result = certified_accuracy(trained, MemorySplit(images, labels), batch_size=128)
    right = found.answer == labels
    for name, size in (("36/255", 36 / 255), ("72/255", 72 / 255), ("108/255", 108 / 255)):
        assert result["certified"][name] == pytest.approx(float((right & (found.radius > size)).double().mean()))
    assert 0 < result["certified"]["108/255"] < result["certified"]["36/255"] < float(right.double().mean())
    assert result["median_radius"] == pytest.approx(float(torch.where(right, found.radius, 0.0).median()))


@pytest.mark.parametrize("channels", [1, 3])
def test_entrance_is_the_exact_norm_from_pixels_to_tokens(channels: int) -> None:
    std = [0.4, 0.1, 0.7][:channels]
    model = (
        contractive_model(num_channels=channels, image_mean=[0.5] * channels, image_std=std)
        .double()
        .requires_grad_(False)
    )
    nn.init.normal_(model.odevit.tokenizer.projection.weight)

    def tokens(pixels: Tensor) -> Tensor:
        return model.odevit.embed(
            (pixels.view(1, channels, 8, 8) - 0.5) / pixels.new_tensor(std).view(-1, 1, 1)
        ).flatten()

    exact = torch.linalg.matrix_norm(jacrev(tokens)(torch.rand(channels * 64, dtype=torch.float64)), ord=2)
    assert float(entrance_norm(model)) == pytest.approx(float(exact), rel=1e-9)
    bound = float(entrance_norm(model.train()))
    assert 1 - 1e-9 <= bound / float(exact) <= 1.05


def test_whole_model_moves_no_further_than_its_constant() -> None:
    """The Jacobian from pixels to the head's input has a norm of at most ‖E₀‖, and comes near it."""
    for pool in ("sqrt_mean", "flatten", "cls", "mean"):
        model = contractive_model(pool=pool).double().requires_grad_(False)

        def features(flat: Tensor, model: Any = model) -> Tensor:
            images = (flat.view(1, 1, 8, 8) - 0.3) / 0.4
            return model.read_out(model.odevit(images).last_hidden_state).flatten()

        norm = torch.linalg.matrix_norm(jacrev(features)(torch.rand(64, dtype=torch.float64)), ord=2)
        shrink = 5**-0.5 if pool == "mean" else 1.0
        assert float(norm) <= float(entrance_norm(model)) * flow_growth(model) * shrink + 1e-12
    assert flow_growth(model) <= 1 + 1e-9


def test_the_settled_head_keeps_answers_and_radii_and_speaks_in_probabilities() -> None:
    model, images = contractive_model(pool="flatten").double(), torch.randn(16, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        model.classifier.weight.mul_(300)  # the margin loss would not mind
        model.classifier.bias.normal_()
        before = model(images).logits
        radius = certified_radius(model, before)
        settle_head(model)
        after = model(images).logits
    assert torch.equal(after.argmax(1), before.argmax(1))
    assert torch.allclose(certified_radius(model, after), radius)
    # wherever the rows are as far apart as they are in the mean, a margin of logits is the radius over τ
    weight, lipschitz = model.classifier.weight.detach(), float(entrance_norm(model).detach())
    pairs = torch.pdist(weight) * TEMPERATURE * lipschitz
    assert float(pairs.mean()) == pytest.approx(1)
    settle_head(model)
    assert torch.allclose(model(images).logits, after)


def test_margin_loss_asks_for_radii_and_not_for_scale() -> None:
    model, images = contractive_model().train(), torch.randn(4, 1, 8, 8)
    targets = nn.functional.one_hot(torch.tensor([1, 2, 3, 3]), 10).float()
    loss = margin_loss(model, model(images).logits, targets, 0.1)
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.numel():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
            assert float(parameter.grad.abs().sum()) > 0, name
    with torch.no_grad():
        assert float(margin_loss(model, model(images).logits, targets, 0.2)) > float(loss)
        model.classifier.weight.mul_(5)
        model.classifier.bias.mul_(5)
        assert float(margin_loss(model, model(images).logits, targets, 0.1)) == pytest.approx(float(loss), rel=1e-4)


def test_two_equal_rows_of_the_head_do_not_spoil_the_loss() -> None:
    model, images = contractive_model(), torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        model.classifier.weight[1] = model.classifier.weight[0]
    targets = nn.functional.one_hot(torch.tensor([0, 1, 2, 3]), 10).float()
    loss = margin_loss(model, model(images).logits, targets, 0.1)
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_what_is_not_covered_is_named() -> None:
    sequential = contractive_model()
    sequential.classifier = nn.Sequential(nn.Linear(16, 10), nn.ReLU())  # type: ignore[assignment]
    unknown = contractive_model()
    unknown.odevit.tokenizer = nn.Sequential(unknown.odevit.tokenizer)
    for model, message in (
        (contractive_model(final_norm="layer"), "LayerNorm is one"),
        (contractive_model(final_norm="center"), "CenterNorm is one"),
        (contractive_model(pool="sequence"), "pool='sequence'"),
        (contractive_model(field="softmax"), "field='softmax'"),
        (contractive_model(image_std=None), "image_std"),
        (sequential, "linear head only, got Sequential"),
    ):
        with pytest.raises(ValueError, match=message):
            check_contractive(model)
    with pytest.raises(ValueError, match="no bound is known for Sequential"):
        certified_radius(unknown, torch.randn(2, 10))
    with pytest.raises(ValueError, match="nothing is proven for midpoint"):
        flow_growth(contractive_model(), solver="midpoint")
    bounded = contractive_model(tokenizer="conv")
    assert float(certified_radius(bounded, torch.randn(2, 10)).min()) > 0, "a convolutional tokenizer has a bound"


@pytest.mark.slow
def test_the_report_shows_certified_accuracy(trained: OdeViTForImageClassification, digits: Split) -> None:
    images, labels = digits.fetch(torch.arange(64))
    study = Study(trained, model_input(trained, images), labels, [str(i) for i in range(10)])
    study.options["stability"] = {"path_images": 2, "radius_images": 8}
    findings = {finding.name: finding for finding in run_analyses(["stability"], study)}
    found = findings["stability/radius"]
    assert found.value["certified_above_attacked"] == 0
    assert found.value["certified_accuracy"]["36/255"] > 0.1
    assert "provably so within 36/255" in found.headline
    assert findings["stability/path"].value["share_expanding"] == 0
    trained.norm = nn.LayerNorm(16)
    try:
        (found,) = [f for f in run_analyses(["stability"], study) if f.name == "stability/radius"]
    finally:
        trained.norm = nn.Identity()
    assert found.value is None
    assert "LayerNorm" in found.text


# --- stopping early ---------------------------------------------------------------------------------------------------


def test_arrival_bound_holds_on_a_contractive_flow() -> None:
    """‖X(T) - X(t)‖ ≤ (T - t) ‖ψ(X(t))‖, μ = 0: for the exact flow at every time, and tight for short times."""
    model = contractive_model().double().requires_grad_(False)
    path = model.odevit.evolve(model.odevit.embed(torch.randn(8, 1, 8, 8, dtype=torch.float64)), 64, "rk4", "steps")
    tightest = 0.0
    for t, state in zip(path.ts[:-1], path.xs[:-1], strict=True):
        speed = model.odevit.fields[0](state).flatten(1).norm(dim=1)
        moved = (path.xs[-1] - state).flatten(1).norm(dim=1)
        bound = arrival_bound(speed, float(1 - t), 0.0)
        assert bool((moved <= bound * (1 + 1e-9)).all())
        tightest = max(tightest, float((moved / bound).max()))
    assert tightest > 0.9


@pytest.mark.slow
def test_certified_halting_stops_early_and_never_errs(trained: OdeViTForImageClassification, digits: Split) -> None:
    images = model_input(trained, digits.fetch(torch.arange(256))[0])
    trained.config.num_steps = 24
    try:
        halted = halt(trained, images, Certified(trained))
        with torch.no_grad():
            full = trained(images).logits
    finally:
        trained.config.num_steps = 4
    assert torch.equal(halted.logits.argmax(dim=1), full.argmax(dim=1))
    assert float(halted.steps.double().mean()) < 23, "some images are proven to have arrived"
