"""The vector field: its formula, its symmetries, dropout and stochastic depth."""

import pytest
import torch
from problems import small_field
from torch.nn.functional import gelu

from odevit.model.field import DropPath, VectorField
from odevit.model.layers import ATTENTIONS, NORMS
from odevit.model.solvers import solve


def states(batch=2, tokens=6, width=16, seed=3):
    return torch.randn(batch, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def center_norm(x, weight, bias):
    width = x.shape[-1]
    return weight * width / (width - 1) * (x - x.mean(-1, keepdim=True)) + bias


def hand_written_mlp(w, x):
    return gelu(center_norm(x, w["norm_f.weight"], w["norm_f.bias"]) @ w["mlp.w1.weight"].T) @ w["mlp.w2.weight"].T


def hand_written_attention(w, x, heads):
    y, outputs = center_norm(x, w["norm_g.weight"], w["norm_g.bias"]), []
    size = x.shape[-1] // heads
    for h in range(heads):
        q, k, v = (y @ w[f"attention.{n}.weight"][h * size : (h + 1) * size].T for n in ("query", "key", "value"))
        outputs.append((q @ k.transpose(1, 2) / size**0.5).softmax(-1) @ v)
    return torch.cat(outputs, -1) @ w["attention.out.weight"].T


@pytest.mark.parametrize("layers", [1, 5, 12])
def test_euler_steps_are_a_weight_tied_parallel_vit(layers):
    field, x = small_field(scale=3.0), states()
    w, y = dict(field.named_parameters()), x
    for _ in range(layers):
        y = y + 3.0 / layers * (hand_written_mlp(w, y) + hand_written_attention(w, y, heads=2))
    assert (solve(field, x, num_steps=layers, solver="euler").xs[-1] - y).abs().max() < 1e-12


@pytest.mark.parametrize("layers", [1, 5, 12])
def test_lie_trotter_steps_are_a_weight_tied_sequential_vit(layers):
    field, x = small_field(scale=3.0), states()
    w, y = dict(field.named_parameters()), x
    for _ in range(layers):
        y = y + 3.0 / layers * hand_written_mlp(w, y)
        y = y + 3.0 / layers * hand_written_attention(w, y, heads=2)
    assert (solve(field, x, num_steps=layers, solver="lie_trotter").xs[-1] - y).abs().max() < 1e-12


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_drift_is_the_sum_of_its_parts(norm, attention):
    field, x = small_field(norm=norm, attention=attention), states()
    assert torch.equal(field(x), field.F(x) + field.G(x))
    with_map, p = field.attend(x)
    assert torch.allclose(with_map, field.G(x), atol=1e-12)
    assert torch.allclose(field.attention_map(x), p, atol=1e-12)
    assert p.shape == (2, 2, 6, 6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_field_follows_a_permutation_of_the_tokens(norm, attention):
    field, x = small_field(norm=norm, attention=attention), states()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.allclose(field(x[:, order]), field(x)[:, order], atol=1e-12)


def test_F_is_token_wise_and_G_is_not():
    field, x = small_field(), states()
    other = x.clone()
    other[:, 3] = states(seed=4)[:, 3]
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(field.F(other)[:, keep], field.F(x)[:, keep])
    assert (field.G(other) - field.G(x))[:, keep].abs().amin(dim=(0, 2)).min() > 0


def test_scale_multiplies_both_parts():
    one, four, x = small_field(), small_field(scale=4.0), states()
    assert torch.allclose(four.F(x), 4 * one.F(x), atol=1e-12)
    assert torch.allclose(four.G(x), 4 * one.G(x), atol=1e-12)
    assert torch.allclose(four.attend(x)[0], 4 * one.attend(x)[0], atol=1e-12)
    assert torch.allclose(four.attention_map(x), one.attention_map(x), atol=1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_parameter_gets_a_finite_gradient(attention):
    field = small_field(attention=attention, bias=True)
    field(states()).square().sum().backward()
    for name, parameter in field.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # softmax rows do not change when all logits of a row move together, so the key's bias has no effect
        if name != "attention.key.bias":
            assert parameter.grad.abs().max() > 1e-9, name


# --- dropout and stochastic depth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"drop_path": 0.3}])
def test_noise_is_there_in_training_only_and_comes_back_after_evaluation(options):
    field, x = small_field(**options), states()
    clean = small_field()(x)
    for _ in range(2):
        field.train()
        torch.manual_seed(0)
        first, second = field(x), field(x)
        assert not torch.equal(first, second)
        torch.manual_seed(0)
        assert torch.equal(field(x), first)
        field.eval()
        assert torch.equal(field(x), clean)


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"drop_path": 0.3}])
@pytest.mark.parametrize("part", ["F", "G"])
def test_noise_keeps_the_expectation(options, part):
    field, x = small_field(**options), states(1)
    clean = getattr(field, part)(x)
    torch.manual_seed(0)
    noisy = getattr(field.train(), part)(x.expand(4000, -1, -1))  # 4000 independent draws
    # each draw is 0 or clean/0.7 with probability 0.7: standard deviation √(0.3/0.7) |clean|; five standard errors
    assert ((noisy.mean(0) - clean[0]).abs() <= 5 * (0.3 / 0.7 / 4000) ** 0.5 * clean[0].abs() + 1e-12).all()


def test_stochastic_depth_drops_whole_samples_at_its_rate():
    layer, x = DropPath(0.25).train(), torch.ones(4000, 3, 5)
    torch.manual_seed(0)
    y = layer(x)
    dropped = (y == 0).flatten(1)
    assert torch.equal(dropped.all(1), dropped.any(1))
    assert dropped.all(1).float().mean() == pytest.approx(0.25, abs=0.03)
    assert torch.allclose(y[~dropped.all(1)], torch.tensor(4 / 3))
    assert DropPath(0.0).train()(x) is x


def test_both_branches_draw_their_own_masks():
    field = VectorField(16, 2, hidden=16, drop_path=0.5).train()
    torch.manual_seed(0)
    x = torch.randn(400, 3, 16)
    dropped_F, dropped_G = ((part(x) == 0).flatten(1).all(1) for part in (field.F, field.G))
    assert (dropped_F == dropped_G).float().mean() == pytest.approx(0.5, abs=0.1)
