"""Hard numbers: right answers or a typed error, never silent NaN."""

import copy
import math

import pytest
import torch

from odevit import NonFiniteStateError, OdeViTConfig, OdeViTForImageClassification
from odevit.model.errors import SolverError
from odevit.model.solvers import SOLVERS

SIZES = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_attention_heads": 2}


def tiny_model(**changes):
    torch.manual_seed(0)
    values = {**SIZES, "mlp_ratio": 1, "depth": 2, "num_steps": 3, "num_labels": 5, **changes}
    return OdeViTForImageClassification(OdeViTConfig(**values)).eval()


def images(count=3, size=8):
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, pixels, **options):
    return model(pixels, **options).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "solver"), [*((1, solver) for solver in SOLVERS), (1000, "euler"), (1000, "lie_trotter")]
)
def test_one_step_and_a_thousand_agree_with_double_precision(steps, solver):
    model = tiny_model()
    exact = logits(copy.deepcopy(model).double(), images().double(), num_steps=steps, solver=solver)
    torch.testing.assert_close(
        logits(model, images(), num_steps=steps, solver=solver).double(), exact, rtol=0, atol=2e-4
    )


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-2), (torch.bfloat16, 1e-1), (torch.float64, 1e-5)])
def test_precisions(dtype, error):
    model = tiny_model()
    found = logits(copy.deepcopy(model).to(dtype), images().to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), logits(model, images()), rtol=0, atol=error)


def test_images_of_another_precision_are_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"torch\.float32, the images' torch\.float64: convert"):
        tiny_model()(images().double())
    with pytest.raises(ValueError, match=r"images' torch\.uint8"):
        tiny_model()(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(logits(tiny_model(), images())).all()


@pytest.mark.parametrize("changes", [{}, {"attention": "l2"}, {"attention": "sinkhorn"}, {"pool": "mean"}])
def test_batches_of_none_and_one(changes):
    model = tiny_model(**changes)
    assert logits(model, images(0)).shape == (0, 5)
    torch.testing.assert_close(logits(model, images(1)), logits(model, images())[:1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pool", ["cls", "mean", "sequence"])
def test_one_patch(pool):
    model = tiny_model(image_size=4, pool=pool)
    assert torch.isfinite(logits(model, images(2, 4))).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -1e4, 1e-42, 1e30])
@pytest.mark.parametrize("attention", ["softmax", "l2", "sinkhorn"])
def test_constant_images(value, attention):
    try:
        found = logits(tiny_model(attention=attention), torch.full((2, 1, 8, 8), value))
    except SolverError:
        assert abs(value) > 1e3
    else:
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4", "dopri5"])
def test_a_bad_pixel_is_a_typed_error(value, solver):
    pixels = images()
    pixels[1, 0, 3, 3] = value
    with pytest.raises(NonFiniteStateError):
        logits(tiny_model(), pixels, solver=solver)


@pytest.mark.parametrize("weight", [1e20, 1e38])
def test_an_exploding_field_is_a_typed_error(weight):
    model = tiny_model(num_steps=12, final_norm="none")
    with torch.no_grad():
        for parameter in model.odevit.fields.parameters():
            parameter.fill_(weight)
    with pytest.raises(NonFiniteStateError):
        logits(model, images())


def test_a_head_that_overflows_is_a_typed_error():
    model = tiny_model()
    with torch.no_grad():
        model.classifier.weight.fill_(3e38)
    with pytest.raises(NonFiniteStateError):
        logits(model, images() * 10)


@pytest.mark.slow
def test_a_stiff_field():
    """Steps longer than stability allows grow without bound: a typed error or finite numbers."""
    model = tiny_model(depth=2000)
    for steps in (1, 8, 64, 500):
        try:
            found = logits(model, images(), num_steps=steps)
        except SolverError:
            continue
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("scale", [1e-40, 1e-44, 0.0])
def test_subnormal_weights(scale):
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.odevit.fields.parameters():
            parameter.mul_(scale)
    still = logits(model, images())
    exact = logits(copy.deepcopy(model).double(), images().double())
    torch.testing.assert_close(still.double(), exact, rtol=0, atol=1e-5)


def test_one_thread_and_two_agree():
    model, pixels = tiny_model(hidden_size=64, image_size=32, num_steps=12), images(16, 32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = logits(model, pixels)
        torch.set_num_threads(2)
        two = logits(model, pixels)
    finally:
        torch.set_num_threads(before)
    assert float((one - two).abs().max()) <= 1e-5
