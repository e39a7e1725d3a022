"""Lyapunov exponents: exact on linear systems, Lorenz, and the same tangents as the model's own flow."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from odevit.analysis import Study
from odevit.analysis.bootstrap import bootstrap_interval, mean, pearson
from odevit.analysis.lyapunov import correlation, run
from odevit.dynamics.exponents import jet_spectrum, lyapunov_spectrum, model_exponents, teacher_exponents
from odevit.dynamics.tangents import JetField, orthonormalise, push
from odevit.model.config import OdeViTConfig
from odevit.model.layers import ATTENTIONS, NORMS
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import SOLVERS, NonFiniteStateError


def tiny_model(**overrides) -> OdeViTForImageClassification:
    torch.manual_seed(0)
    settings = dict(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=2, mlp_ratio=2, num_registers=1,
        depth=3, num_steps=5, num_labels=3,
    )  # fmt: skip
    model = OdeViTForImageClassification(OdeViTConfig(**{**settings, **overrides})).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def normal_matrix(eigenvalues: list[complex]) -> Tensor:
    """A real normal matrix with these eigenvalues (one of each conjugate pair)."""
    blocks = [
        torch.tensor([[z.real, z.imag], [-z.imag, z.real]]) if z.imag else torch.tensor([[z.real]]) for z in eigenvalues
    ]
    matrix = torch.block_diag(*blocks).double()
    rotation = torch.linalg.qr(torch.randn(len(matrix), len(matrix), dtype=torch.float64)).Q
    return rotation @ matrix @ rotation.mT


# --- exact problems ---------------------------------------------------------------------------------------------------


def test_linear_flow_gives_real_parts_of_eigenvalues():
    torch.manual_seed(0)
    a = normal_matrix([0.5, 0.29 + 2j, -0.4, -1 + 0.5j])
    step = torch.linalg.matrix_exp(0.5 * a)
    x0 = torch.randn(2, 6, dtype=torch.float64)
    found = lyapunov_spectrum([lambda x: x @ step.mT] * 600, x0, 6, total_time=300.0)
    expected = torch.tensor([0.5, 0.29, 0.29, -0.4, -1, -1], dtype=torch.float64)
    assert torch.allclose(found, expected.expand(2, 6), atol=0.02)
    assert torch.allclose(found.sum(dim=1), a.trace().expand(2), atol=1e-10)  # the volume's growth is exact at any time


def test_euler_steps_give_the_exponents_of_euler_steps_not_of_the_flow():
    h, rates = 0.25, torch.tensor([0.7, -0.3, -2.0], dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    a = vectors @ rates.diag() @ vectors.mT
    found = lyapunov_spectrum(
        [lambda x: x + h * x @ a.mT], torch.zeros(1, 3).double(), 3, total_time=h, frame=vectors.mT
    )
    assert torch.allclose(found[0], (1 + h * rates).abs().log() / h, atol=1e-12)


LORENZ = torch.tensor([[-10, 10, 0], [28, -1, 0], [0, 0, -8 / 3]], dtype=torch.float64)
TURN = torch.tensor([[0, 0, 0], [0, 0, -1], [0, 1, 0]], dtype=torch.float64)  # x₀ · (0, -x₂, x₁) is the quadratic part


def lorenz(x: Tensor) -> Tensor:
    return x @ LORENZ.mT + x[..., :1] * (x @ TURN.mT)


def lorenz_jet(jet: Tensor) -> Tensor:
    """The Lorenz field and its tangents by the product rule."""
    out, turned = jet @ LORENZ.mT + jet[0, :, :1] * (jet @ TURN.mT), jet[0] @ TURN.mT
    out[1:] += jet[1:, :, :1] * turned
    return out


def test_lorenz():
    step, jet_step = (partial(SOLVERS["rk4"].step, field, h=0.02) for field in (lorenz, lorenz_jet))
    x = torch.randn(800, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + torch.tensor(
        [0, 0, 25.0]
    )
    for _ in range(1000):  # onto the attractor
        x = step(x)
    ours = lyapunov_spectrum([step] * 6, x[:2], 3, total_time=1.0)
    assert torch.allclose(ours, jet_spectrum([jet_step] * 6, x[:2], 3, total_time=1.0), atol=1e-10)

    # The growth between t = 4, when the tangents have found their directions, and t = 20.
    until = [jet_spectrum([jet_step] * n, x, 3, total_time=1.0, qr_every=5).mean(dim=0) for n in (200, 1000)]
    found = (until[1] - until[0]) / 16
    assert found[0].item() == pytest.approx(0.906, abs=0.02)
    assert found[1].item() == pytest.approx(0, abs=0.02)
    assert found.sum().item() == pytest.approx(-(10 + 1 + 8 / 3), abs=0.01)


def test_renormalising_a_slice_only_is_wrong_and_ours_is_right():
    """The published notebook's estimator on a linear system of two tokens whose true exponent is 0.290."""
    torch.manual_seed(0)
    a = torch.randn(8, 8, dtype=torch.float64)
    a = a - (torch.linalg.eigvals(a).real.max() - 0.290) * torch.eye(8, dtype=torch.float64)
    step, steps, h = torch.linalg.matrix_exp(0.1 * a), 1000, 0.1
    ours = lyapunov_spectrum([lambda x: x @ step.mT] * steps, torch.zeros(1, 8).double(), 1, total_time=steps * h)

    v, total = torch.randn(8, dtype=torch.float64), 0.0
    for _ in range(500):
        v = step @ v
        length = v[:2].norm()
        v[:2] /= length  # the "CLS token" alone
        total += float(length.log())
    assert ours.item() == pytest.approx(0.290, abs=0.01)
    assert abs(total / (500 * h) - 0.290) > 1


def test_qr_every_1_and_5_agree():
    model = tiny_model(num_steps=10)
    every, seldom = (model_exponents(model, images(), 4, qr_every=m) for m in (1, 5))
    assert torch.allclose(every, seldom, atol=1e-8)
    assert torch.allclose(every, model_exponents(model, images(), 4, qr_every=3), atol=1e-8)  # 3 does not divide 10


# --- tangents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_jets_equal_torch_derivatives(norm, attention):
    field = tiny_model(norm=norm, attention=attention, bias=True).odevit.fields[0].requires_grad_(False)
    jet = torch.randn(4, 2, 5, 8, dtype=torch.float64)
    for part in (field.F, field.G, field):
        name = getattr(part, "__name__", "__call__")
        assert torch.allclose(getattr(JetField(field), name)(jet), push(part, jet), atol=1e-12)
        assert torch.allclose(push(part, jet)[0], part(jet[0]), atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_tangents_are_finite_differences_of_the_models_own_flow(solver):
    model = tiny_model(num_fields=2).requires_grad_(False)
    with torch.no_grad():
        x = model.odevit.embed(images(2))
    v, eps = torch.randn_like(x), 1e-6
    v /= v.flatten(1).norm(dim=1)[:, None, None]
    ends = [model.odevit.evolve(x + sign * eps * v, solver=solver).xs[-1] for sign in (1, -1)]
    growth = ((ends[0] - ends[1]) / (2 * eps)).flatten(1).norm(dim=1).log() / 3  # depth 3

    maps = (
        partial(SOLVERS[solver].step, JetField(model.odevit.fields[p]), h=1 / c / 2)
        for p, c in [(0, 3)] * 3 + [(1, 2)] * 2
    )
    found = jet_spectrum(maps, x, 1, total_time=3.0, frame=v.unsqueeze(0))
    assert torch.allclose(found[:, 0], growth, atol=1e-7)


def test_gram_schmidt_is_qr():
    v = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    q, diagonal = orthonormalise(v)
    r = torch.linalg.qr(v.flatten(2).permute(1, 2, 0)).R
    assert torch.allclose(diagonal.mT, r.diagonal(dim1=-2, dim2=-1).abs(), atol=1e-12)
    assert torch.allclose(
        torch.einsum("kbij,lbij->bkl", q, q), torch.eye(3, dtype=torch.float64).expand(2, 3, 3), atol=1e-12
    )


def test_dead_direction_has_no_growth_and_no_nan():
    found = lyapunov_spectrum(
        [lambda x: x * torch.tensor([2.0, 0.0])] * 3, torch.ones(1, 2), 2, total_time=3.0, frame=torch.eye(2)
    )
    assert found[0, 0].item() == pytest.approx(math.log(2))
    assert found[0, 1].item() == -math.inf


# --- model and teacher ------------------------------------------------------------------------------------------------


def test_model_exponents_are_sorted_and_do_not_depend_on_batches_or_mode():
    model = tiny_model(dropout=0.5, drop_path=0.5, spectral_cap=1.0).train()
    found = model_exponents(model, images(5), 4)
    assert found.shape == (5, 4)
    assert (found.diff(dim=1) <= 0).all()
    assert model.training
    assert torch.allclose(model_exponents(model, images(5), 4, batch_size=2), found, atol=1e-12)
    assert not found.requires_grad


def test_exponents_are_per_unit_of_depth_whatever_the_horizon():
    short, long = tiny_model(horizon=1.0), tiny_model(horizon=7.0)
    assert torch.allclose(model_exponents(short, images(), 2), model_exponents(long, images(), 2), atol=1e-10)


def test_adaptive_solver_is_replaced_by_rk4():
    model = tiny_model()
    found = model_exponents(model, images(), 1, solver="dopri5", num_steps=8)
    assert torch.equal(found, model_exponents(model, images(), 1, solver="rk4", num_steps=8))


def test_teacher_exponents_are_those_of_its_blocks():
    from odevit.teachers.teacher import tiny_teacher

    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=16, patch_size=8)
    batch = torch.randn(2, 3, 16, 16)
    x = teacher.trace(batch).states[0]
    v = torch.randn(1, *x.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    v = (v / v.norm()).expand_as(x)
    total = torch.zeros(2)
    for layer in range(teacher.depth):
        x, v = push(partial(teacher.block, layer), torch.stack([x, v]))
        total += v.flatten(1).norm(dim=1).log()
        v = v / v.flatten(1).norm(dim=1)[:, None, None]
    found = teacher_exponents(teacher, batch, 1)
    assert torch.allclose(found[:, 0].float(), total / teacher.depth, atol=1e-4)


def test_errors_tell_what_must_hold():
    with pytest.raises(ValueError, match="between 1 and the number of state variables 2"):
        lyapunov_spectrum([], torch.zeros(1, 2), 3, total_time=1.0)
    with pytest.raises(ValueError, match="total_time > 0"):
        lyapunov_spectrum([], torch.zeros(1, 2), 1, total_time=0.0)
    with pytest.raises(NonFiniteStateError):
        lyapunov_spectrum([lambda x: x / 0], torch.ones(1, 2), 1, total_time=1.0)


# --- statistics and findings ------------------------------------------------------------------------------------------


def test_bootstrap_interval_covers_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(300, 40, generator=generator) + 2
    intervals = [bootstrap_interval(mean, row, seed=i, draws=400) for i, row in enumerate(samples)]
    assert 0.89 < sum(low <= 2 <= high for low, high in intervals) / 300 < 0.98
    assert bootstrap_interval(mean, samples[0], seed=3) == bootstrap_interval(mean, samples[0], seed=3)


def test_pearson():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert pearson(x, -2 * x + 1).item() == pytest.approx(-1)
    y = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert pearson(x, y).item() == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item(), abs=1e-6)
    assert correlation(x, torch.ones(50), 0)["r"] is None


def test_analysis_tells_what_it_measured():
    model = tiny_model().float()
    labels = torch.arange(24) % 3
    study = Study(model, images(24).float(), labels, ["a", "b", "c"], batch_size=10)
    top, classes = list(run(study))
    exponents = model_exponents(model, study.images, 4)[:, 0]
    assert top.value["per_image"] == pytest.approx(exponents.tolist(), abs=1e-5)
    assert top.value["share_positive"] == pytest.approx((exponents > 0).double().mean().item())
    assert f"{top.value['share_positive']:.0%}" in top.text
    for index, row in enumerate(classes.value["classes"]):
        assert row["mean"] == pytest.approx(exponents[labels == index].mean().item(), abs=1e-5)
        assert row["interval"][0] <= row["mean"] <= row["interval"][1]
    assert all(finding.figure is not None for finding in (top, classes))
