"""The contractive field: its theorems, searched for counterexamples by gradient ascent on tiny models in float64."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from problems import contractive_model
from torch import Tensor
from torch.func import jacrev
from torch.nn.utils import parametrize

from odevit.analysis.stability import path_measures
from odevit.dynamics.bounds import field_bound, stiffness
from odevit.dynamics.cost import count_macs
from odevit.dynamics.exponents import model_exponents
from odevit.model.contractive import LIMITS, ContractiveField, fewest_steps, step_growth
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import SOLVERS, solve

tiny_model = partial(contractive_model, hidden_size=8, num_labels=3)
TOKENS, WIDTH = 5, 4  # CLS and a grid of 2 × 2


def tiny_field(mixing: str = "none", scale: float = 1.0) -> ContractiveField:
    return ContractiveField(WIDTH, 2, hidden=6, scale=scale, mixing=mixing).double()


def wild_(field: ContractiveField, spread: float = 2.0) -> ContractiveField:
    """Weights as no training would leave them."""
    with torch.no_grad():
        for parameter in field.parameters():
            parameter.normal_(std=spread)
    return field


def brute_drift(field: ContractiveField, x: Tensor) -> Tensor:
    """The formulas, token by token and pair by pair; x (n, d)."""
    n, e = len(x), WIDTH // field.heads
    w, a, c = field.w.weight, field.a.weight, field.log_c.exp()
    out = torch.zeros_like(x)
    for i in range(n):
        out[i] -= w.T @ torch.nn.functional.softplus(w @ x[i] + field.bias, beta=4)
        for h, j in itertools.product(range(field.heads), range(n)):
            a_h = a[h * e : (h + 1) * e]
            step = a_h @ (x[i] - x[j])
            out[i] -= a_h.T @ step / torch.sqrt(1 + c[h] * step @ step) / n
    return field.scale * out


def test_drift_and_map_are_the_formulas() -> None:
    torch.manual_seed(0)
    field, x = wild_(tiny_field(scale=1.7)), torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(field(x), torch.stack([brute_drift(field, sample) for sample in x]), atol=1e-12)
        pulled, p = field.attend(x)
        assert torch.equal(pulled, field.G(x))
        assert torch.equal(p, field.attention_map(x))
    assert torch.allclose(p.sum(dim=-1), torch.ones(3, 2, TOKENS, dtype=torch.float64))
    assert bool((p > 0).all())
    distance = torch.cdist(*[(x @ field.a.weight.mT).unflatten(-1, (2, -1)).transpose(1, 2)] * 2)
    assert bool((p.gather(-1, distance.argsort(dim=-1)).diff(dim=-1) <= 1e-12).all()), "near tokens attract more"


def jacobian(field: ContractiveField, part: str, x: Tensor) -> Tensor:
    """(n·d, n·d) of F, G or the drift at one state (n, d)."""
    function = getattr(field, part)
    return jacrev(lambda flat: function(flat.view(1, *x.shape)).flatten())(x.flatten())


@pytest.mark.parametrize("mixing", ["none", "depthwise"])
def test_hessian_is_symmetric_and_between_zero_and_its_bounds(mixing: str) -> None:
    torch.manual_seed(1)
    closest = 0.0
    for spread in (0.3, 1.0, 3.0):
        field = wild_(tiny_field(mixing, scale=1.5), spread)
        bounds = stiffness(field, TOKENS)
        assert all(bound <= field.scale * (1 + 1e-9) for bound in bounds), "norms are held at one"
        for distance in (0.01, 1.0, 10.0):
            x = distance * torch.randn(TOKENS, WIDTH, dtype=torch.float64)
            for part, bound in zip("FG", bounds, strict=True):
                hessian = -jacobian(field, part, x)
                assert torch.allclose(hessian, hessian.mT, atol=1e-12)
                values = torch.linalg.eigvalsh(hessian)
                assert values[0] >= -1e-12
                assert values[-1] <= bound + 1e-12
                closest = max(closest, float(values[-1].detach()) / bound)
        assert float(field_bound(field, x[None])) == pytest.approx(sum(bounds))
    assert closest > 0.9, "the bounds are nearly attained"


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["none", "depthwise"])
def test_log_norm_is_never_positive_at_searched_states(mixing: str) -> None:
    """1,200 states: states and weights climb the gradient of the largest eigenvalue of (J + Jᵀ)/2."""
    torch.manual_seed(2)
    size, seen = TOKENS * WIDTH, 0
    units = torch.eye(size, dtype=torch.float64).view(size, 1, TOKENS, WIDTH).expand(-1, 100, -1, -1)
    for spread in (0.3, 1.0, 3.0):
        field, x = wild_(tiny_field(mixing), spread), torch.randn(100, TOKENS, WIDTH, dtype=torch.float64)
        optimizer = torch.optim.Adam([x.requires_grad_(), *field.parameters()], lr=0.2)
        for _ in range(4):
            with parametrize.cached():
                y = field(x)
            (rows,) = torch.autograd.grad(y, x, units, create_graph=True, is_grads_batched=True)
            j = rows.flatten(2).transpose(0, 1)  # (100, n·d, n·d)
            top = torch.linalg.eigvalsh((j + j.mT) / 2)[:, -1]
            assert float(top.detach().max()) <= 1e-12
            seen += len(top)
            optimizer.zero_grad()
            (-top.sum()).backward()
            optimizer.step()
    assert seen >= 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "num_steps"), [("rk4", 12), *((name, int(4 / limit)) for name, limit in LIMITS.items())]
)
def test_no_pair_of_states_parts_at_the_step_limit(solver: str, num_steps: int) -> None:
    """Pairs climb the gradient of their growth, under the exact flow (rk4, small steps) and schemes at the limit."""
    torch.manual_seed(3)
    field = wild_(tiny_field("depthwise", scale=4.0)).requires_grad_(False)
    assert fewest_steps(solver, depth=4.0) <= num_steps
    assert step_growth(solver, 1 / num_steps, *stiffness(field, TOKENS)) <= 1 + 1e-9
    x = torch.randn(32, TOKENS, WIDTH, dtype=torch.float64).requires_grad_()
    apart = torch.logspace(-3, 1, 32, dtype=torch.float64).view(-1, 1, 1)
    delta = (apart * torch.randn(32, TOKENS, WIDTH, dtype=torch.float64)).requires_grad_()
    largest = 0.0
    for _ in range(8):
        with parametrize.cached():
            ends = solve(field, torch.cat([x, x + delta]), num_steps=num_steps, solver=solver).xs[-1]
        growth = ((ends[32:] - ends[:32]).flatten(1).norm(dim=1) / delta.flatten(1).norm(dim=1)).log()
        largest = max(largest, float(growth.detach().exp().max()))
        assert largest <= 1 + 1e-10
        up_x, up_delta = torch.autograd.grad(growth.sum(), (x, delta))
        with torch.no_grad():
            x += up_x / up_x.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1)
            size = delta.flatten(1).norm(dim=1).view(-1, 1, 1)
            delta += 0.5 * size * up_delta / up_delta.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1)
    assert largest >= 0.95, "the search comes near the bound, so it would find a violation"


def test_one_step_beyond_the_limit_expands() -> None:
    """The limit is sharp: tokens that differ along a singular vector of A = 1 are reflected beyond their distance."""
    field = tiny_field(scale=1.0).requires_grad_(False)
    with torch.no_grad():
        field.log_c.fill_(-50)  # c = 0: the attraction is linear
        field.bias.fill_(-50)  # F = 0
    x = torch.zeros(1, TOKENS, WIDTH, dtype=torch.float64)
    other = x.clone()
    other[:, 0, 0], other[:, 1, 0] = 1, -1
    for h in (1.9, 2.0, 2.1, 3.0):
        ends = [SOLVERS["lie_trotter"].step(field, state, h) for state in (x, other)]
        growth = float((ends[1] - ends[0]).norm() / (other - x).norm())
        predicted = step_growth("lie_trotter", h, 0.0, stiffness(field, TOKENS)[1])
        assert growth <= predicted + 1e-9
        if h > 2.05:
            assert growth > 1
            assert growth == pytest.approx(predicted)


def test_too_few_steps_are_an_error_everywhere() -> None:
    with pytest.raises(ValueError, match="at least 4 steps"):
        tiny_model(num_steps=3)
    model, images = tiny_model(), torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="got num_steps=3; use at least 4 steps"):
        model(images, num_steps=3)
    with pytest.raises(ValueError, match="rk4 never expands"):
        model(images, num_steps=2, solver="rk4")
    with pytest.raises(ValueError, match=r"nothing is proven of midpoint.*: 4 steps at depth 4"):
        model(images, num_steps=2, solver="midpoint")
    with pytest.raises(ValueError, match=r"lie_trotter .* at least 2 steps \(h·s·‖W‖² and h·s·‖A‖² ≤ 2,"):
        model(images, num_steps=1, solver="lie_trotter")
    for options in ({"num_steps": 2, "solver": "lie_trotter"}, {"num_steps": 9}, {"solver": "dopri5"}):
        assert bool(model(images, **options).logits.isfinite().all())
    assert fewest_steps("euler", 4, phases=3) == 6
    with pytest.raises(ValueError, match="at least 6 steps"):
        tiny_model(num_fields=3, num_steps=5)


@pytest.mark.parametrize(
    "options",
    [{"attention": "l2"}, {"dropout": 0.1}, {"drop_path": 0.1}, {"spectral_cap": 1.0}, {"bias": True}],
)
def test_options_of_the_softmax_field_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"a contractive field has no {next(iter(options))}"):
        tiny_model(**options)


@pytest.mark.slow
def test_it_has_its_place_in_model_solvers_cost_and_analyses() -> None:
    model = tiny_model(num_fields=2, mixing="depthwise", num_registers=1)
    images = torch.randn(3, 1, 8, 8)
    output = model(images, output_hidden_states=True, output_attentions=True)
    assert [tuple(p.shape) for p in output.attentions] == [(3, 2, 6, 6)] * 4
    assert count_macs(model, num_steps=8).flow == 2 * count_macs(model).flow > 0
    assert float(model_exponents(model, images, k=2).value.max()) <= 1e-5, "exponents are never positive"
    measures = path_measures(model, images)
    assert float(measures.log_norm.max()) <= 1e-5
    assert measures.bound is not None
    assert bool((measures.bound >= measures.norm - 1e-5).all())
    model.train()
    model(images, labels=torch.tensor([0, 1, 2])).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.numel() and "cls_token" not in name:
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().sum()) > 0, name


def test_training_cannot_break_the_norms_and_saving_keeps_the_answers(tmp_path: Any) -> None:
    model, images = tiny_model(), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for parameter in model.odevit.fields.parameters():
            parameter.mul_(7).add_(torch.randn_like(parameter))
    assert max(stiffness(model.odevit.fields[0], 5)) <= model.odevit.fields[0].scale * (1 + 1e-5)
    model.save_pretrained(tmp_path)
    again = OdeViTForImageClassification.from_pretrained(tmp_path, num_steps=8).eval()
    assert torch.allclose(again(images, num_steps=4).logits, model(images).logits, atol=1e-6)


def test_root_mean_pool_is_a_map_of_norm_one() -> None:
    model = tiny_model(num_registers=2)
    j = jacrev(lambda flat: model.read_out(flat.view(1, 7, 8)).flatten())(torch.randn(56))
    assert float(torch.linalg.matrix_norm(j, ord=2)) == pytest.approx(1, abs=1e-6)
    assert float(j.unflatten(1, (7, 8))[:, 5:].abs().max()) == 0, "registers are not read"
