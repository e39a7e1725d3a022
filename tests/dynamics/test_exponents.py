"""Exponents: finite-time ones against singular values of explicit Jacobians, long-time ones against exact problems."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from odevit.dynamics.exponents import (
    finite_time_exponents,
    long_time_exponents,
    model_exponents,
    sees_quotient,
    teacher_exponents,
    teacher_sees_quotient,
)
from odevit.dynamics.flow import flow_map
from odevit.dynamics.jacobian import forward_derivatives
from odevit.dynamics.tangents import JetField, orthonormalise, push
from odevit.model.config import OdeViTConfig
from odevit.model.errors import NonFiniteStateError
from odevit.model.layers import ATTENTIONS, NORMS
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import SOLVERS


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


# --- finite time ------------------------------------------------------------------------------------------------------


def singular_exponents(flow, x: Tensor, total_time: float, quotient: bool = False) -> Tensor:
    """log σ_i / time of the explicit Jacobian of each sample, (b, n·d)."""
    size = x[0].numel()
    with forward_derivatives(), torch.no_grad():
        rows = torch.stack([torch.func.jacrev(flow)(one[None]).reshape(size, size) for one in x])
    if quotient:
        p = torch.eye(x.shape[-1], dtype=x.dtype) - 1 / x.shape[-1]
        p = torch.kron(torch.eye(size // x.shape[-1], dtype=x.dtype), p)
        rows = p @ rows @ p
    return torch.linalg.svdvals(rows).log() / total_time


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 6, 24])
@pytest.mark.parametrize("quotient", [False, True])
def test_model_exponents_are_singular_values_of_the_whole_map(num_steps, quotient):
    """And neither the number of exponents nor the seed of the start matters."""
    model, batch = tiny_model(num_steps=num_steps, num_registers=0), images(2)
    exact = singular_exponents(flow_map(model), model.odevit.embed(batch).detach(), 3.0, quotient)
    for k, seed in ((1, 0), (3, 1)):
        found = model_exponents(model, batch, k, quotient=quotient, seed=seed)
        assert torch.allclose(found.value, exact[:, :k], atol=1e-4)
        assert (found.value <= exact[:, :k] + 1e-9).all()
        assert (exact[:, :k] <= found.upper + 1e-9).all()
        assert (found.upper - found.value).max() < 1e-2


@pytest.mark.parametrize(
    "overrides",
    [{"solver": "rk4"}, {"solver": "strang", "num_fields": 2}, {"norm": "layer"}, {"attention": "l2"}],
)
def test_model_exponents_follow_the_models_own_integrator(overrides):
    model = tiny_model(num_registers=0, num_steps=2, **overrides)
    exact = singular_exponents(flow_map(model), model.odevit.embed(images(2)).detach(), 3.0)
    assert torch.allclose(model_exponents(model, images(2), 2).value, exact[:, :2], atol=1e-4)


@pytest.mark.slow
def test_model_exponents_do_not_depend_on_batches_and_leave_modes_alone():
    model = tiny_model(dropout=0.5, drop_path=0.5, spectral_cap=1.0).train()
    model.odevit.fields[0].attention.eval()  # a part that someone has frozen
    modes = [module.training for module in model.modules()]
    found = model_exponents(model, images(5), 2)
    assert [module.training for module in model.modules()] == modes
    assert found.value.shape == found.upper.shape == (5, 2)
    assert (found.value.diff(dim=1) <= 0).all()
    assert torch.allclose(model_exponents(model, images(5), 2, batch_size=2).value, found.value, atol=1e-4)
    assert torch.equal(model_exponents(model, images(5), 2).value, found.value)
    assert not found.value.requires_grad


def test_exponents_are_per_unit_of_depth_whatever_the_horizon():
    short, long = tiny_model(horizon=1.0), tiny_model(horizon=7.0)
    assert torch.allclose(model_exponents(short, images(), 2).value, model_exponents(long, images(), 2).value)


@pytest.mark.slow
def test_adaptive_solver_is_replaced_by_rk4():
    model = tiny_model()
    found = model_exponents(model, images(1), 1, solver="dopri5", num_steps=3)
    assert torch.equal(found.value, model_exponents(model, images(1), 1, solver="rk4", num_steps=3).value)


def test_large_states_are_taken_a_few_at_a_time(monkeypatch):
    model = tiny_model()
    whole = model_exponents(model, images(3))
    sizes = []
    monkeypatch.setattr("odevit.dynamics.exponents.ELEMENTS", 1)
    embed = model.odevit.embed
    monkeypatch.setattr(model.odevit, "embed", lambda batch: sizes.append(len(batch)) or embed(batch))
    assert torch.allclose(model_exponents(model, images(3)).value, whole.value, atol=1e-4)
    assert sizes == [1, 1, 1, 1]  # the first asks how large a state is


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, True),
        ({"norm": "layer", "final_norm": "center"}, True),
        ({"norm": "none"}, False),
        ({"final_norm": "none"}, False),
    ],
)
def test_the_quotient_counts_where_field_and_head_ignore_constants(overrides, expected):
    model = tiny_model(**overrides)
    assert sees_quotient(model, images()) == expected
    assert sees_quotient(model.float(), images().float()) == expected


def test_contraction_is_seen_on_the_quotient_only():
    """x' = -x + mean: every difference between entries shrinks, and the top exponent of the whole space is still 0."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)

    def flow(x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        return mean + math.exp(-1) * (x - mean)

    whole, quotient = (finite_time_exponents(flow, x, total_time=1.0, quotient=q) for q in (False, True))
    assert torch.allclose(whole.value, torch.zeros(2, 1).double(), atol=1e-9)
    assert torch.allclose(quotient.value, -torch.ones(2, 1).double())
    assert (quotient.upper < -0.99).all()


def test_teacher_exponents_are_singular_values_of_its_blocks():
    from odevit.teachers.teacher import tiny_teacher

    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=16, patch_size=8)
    teacher.module.double()
    batch = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    x = teacher.trace(batch).states[0]

    def flow(x: Tensor) -> Tensor:
        for layer in range(teacher.depth):
            x = teacher.block(layer, x)
        return x

    for quotient in (False, True):
        exact = singular_exponents(flow, x, teacher.depth, quotient)[:, :1]
        found = teacher_exponents(teacher, batch, quotient=quotient, batch_size=1)
        assert torch.allclose(found.value, exact, atol=1e-4)
    assert teacher_sees_quotient(teacher, batch)


def test_errors_tell_what_must_hold():
    with pytest.raises(ValueError, match="between 1 and the number of state variables 2"):
        long_time_exponents([], torch.zeros(1, 2), 3, total_time=1.0)
    with pytest.raises(ValueError, match="total_time > 0"):
        long_time_exponents([], torch.zeros(1, 2), 1, total_time=0.0)
    with pytest.raises(ValueError, match="total_time must be positive, got 0"):
        finite_time_exponents(lambda x: x, torch.zeros(1, 2), total_time=0.0)
    with pytest.raises(NonFiniteStateError):
        long_time_exponents([lambda x: x / 0], torch.ones(1, 2), total_time=1.0)
    with pytest.raises(NonFiniteStateError):
        finite_time_exponents(lambda x: x / 0, torch.ones(1, 2), total_time=1.0)


def normal_matrix(eigenvalues: list[complex]) -> Tensor:
    """A real normal matrix with these eigenvalues (one of each conjugate pair)."""
    blocks = [
        torch.tensor([[z.real, z.imag], [-z.imag, z.real]]) if z.imag else torch.tensor([[z.real]]) for z in eigenvalues
    ]
    matrix = torch.block_diag(*blocks).double()
    rotation = torch.linalg.qr(torch.randn(len(matrix), len(matrix), dtype=torch.float64)).Q
    return rotation @ matrix @ rotation.mT


# --- long time: exact problems ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_linear_flow_gives_real_parts_of_eigenvalues():
    torch.manual_seed(0)
    a = normal_matrix([0.5, 0.29 + 2j, -0.4, -1 + 0.5j])
    step = torch.linalg.matrix_exp(0.5 * a)
    x0 = torch.randn(2, 6, dtype=torch.float64)
    found = long_time_exponents([lambda x: x @ step.mT] * 600, x0, 6, total_time=300.0)
    expected = torch.tensor([0.5, 0.29, 0.29, -0.4, -1, -1], dtype=torch.float64)
    assert torch.allclose(found, expected.expand(2, 6), atol=0.02)
    assert torch.allclose(found.sum(dim=1), a.trace().expand(2), atol=1e-10)  # the volume's growth is exact at any time


def test_euler_steps_give_the_exponents_of_euler_steps_not_of_the_flow():
    h, rates = 0.25, torch.tensor([0.7, -0.3, -2.0], dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    a = vectors @ rates.diag() @ vectors.mT
    found = long_time_exponents(
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


@pytest.mark.slow
def test_lorenz():
    step, jet_step = (partial(SOLVERS["rk4"].step, field, h=0.02) for field in (lorenz, lorenz_jet))
    x = torch.randn(800, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + torch.tensor(
        [0, 0, 25.0]
    )
    for _ in range(1000):  # onto the attractor
        x = step(x)
    ours = long_time_exponents([step] * 6, x[:2], 3, total_time=1.0)
    assert torch.allclose(ours, long_time_exponents([jet_step] * 6, x[:2], 3, total_time=1.0, jets=True), atol=1e-10)

    # The growth between t = 4, when the tangents have found their directions, and t = 20.
    until = [
        long_time_exponents([jet_step] * n, x, 3, total_time=1.0, jets=True, qr_every=5).mean(dim=0)
        for n in (200, 1000)
    ]
    found = (until[1] - until[0]) / 16
    assert found[0].item() == pytest.approx(0.906, abs=0.02)
    assert found[1].item() == pytest.approx(0, abs=0.02)
    assert found.sum().item() == pytest.approx(-(10 + 1 + 8 / 3), abs=0.01)


@pytest.mark.slow
def test_renormalising_a_slice_only_is_wrong_and_ours_is_right():
    """The published notebook's estimator on a linear system of two tokens whose true exponent is 0.290."""
    torch.manual_seed(0)
    a = torch.randn(8, 8, dtype=torch.float64)
    a = a - (torch.linalg.eigvals(a).real.max() - 0.290) * torch.eye(8, dtype=torch.float64)
    step, steps, h = torch.linalg.matrix_exp(0.1 * a), 1000, 0.1
    ours = long_time_exponents([lambda x: x @ step.mT] * steps, torch.zeros(1, 8).double(), 1, total_time=steps * h)

    v, total = torch.randn(8, dtype=torch.float64), 0.0
    for _ in range(500):
        v = step @ v
        length = v[:2].norm()
        v[:2] /= length  # the "CLS token" alone
        total += float(length.log())
    assert ours.item() == pytest.approx(0.290, abs=0.01)
    assert abs(total / (500 * h) - 0.290) > 1


def test_qr_every_1_and_5_agree():
    step = partial(SOLVERS["rk4"].step, lorenz, h=0.02)
    x = torch.tensor([[1.0, 2.0, 20.0]], dtype=torch.float64)
    every, seldom, odd = (long_time_exponents([step] * 10, x, 2, total_time=0.2, qr_every=m) for m in (1, 5, 3))
    assert torch.allclose(every, seldom, atol=1e-8)
    assert torch.allclose(every, odd, atol=1e-8)  # 3 does not divide 10


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
    found = long_time_exponents(maps, x, 1, total_time=3.0, jets=True, frame=v.unsqueeze(0))
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
    found = long_time_exponents(
        [lambda x: x * torch.tensor([2.0, 0.0])] * 3, torch.ones(1, 2), 2, total_time=3.0, frame=torch.eye(2)
    )
    assert found[0, 0].item() == pytest.approx(math.log(2))
    assert found[0, 1].item() == -math.inf


def test_rank_one_map_has_one_exponent():
    """Not -37, the logarithm of rounding."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        matrix = torch.outer(*torch.randn(2, 6, dtype=dtype))
        x = torch.zeros(2, 6, dtype=dtype)
        found = long_time_exponents([lambda x, m=matrix: x @ m.mT] * 3, x, 3, total_time=3.0)
        assert found[:, 0].isfinite().all()
        assert (found[:, 1:] == -math.inf).all()
        found = finite_time_exponents(lambda x, m=matrix: x @ m.mT, x, 3, total_time=1.0).value
        assert found[0, 0].item() == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2).log()), rel=1e-5)
        assert (found[:, 1:] == -math.inf).all()
