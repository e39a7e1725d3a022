import copy
import json
import math

import pytest
import torch
from tiny_runs import MODEL
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.training.checkpoint import CheckpointStore
from odevit.training.config import OptimConfig
from odevit.training.optim import (
    AveragedWeights,
    Muon,
    build_optimizers,
    learning_rate_factor,
    orthogonalise,
    set_learning_rate,
    split_parameters,
)


def odevit(**fields):
    return OdeViTForImageClassification(OdeViTConfig(image_size=8, num_labels=10, **{**MODEL, **fields}))


MODELS = {
    "odevit": odevit,
    "capped": lambda: odevit(spectral_cap=1.0, num_fields=2, num_registers=2, bias=True, tokenizer="conv"),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    ),
}


def test_schedule():
    assert learning_rate_factor(0.0, 0.1) == 0
    assert learning_rate_factor(0.05, 0.1) == pytest.approx(0.5)
    assert learning_rate_factor(0.1, 0.1) == 1
    assert learning_rate_factor(0.1 + 0.9 / 2, 0.1) == pytest.approx(0.5)
    assert learning_rate_factor(0.1 + 0.9 / 3, 0.1) == pytest.approx((1 + math.cos(math.pi / 3)) / 2)
    assert learning_rate_factor(1.0, 0.1) == pytest.approx(0, abs=1e-12)


def test_cycles_restart_at_the_full_rate_and_end_at_zero():
    start = [learning_rate_factor(0.1 + 0.9 * cycle / 3, 0.1, cycles=3) for cycle in range(3)]
    middle = [learning_rate_factor(0.1 + 0.9 * (cycle + 0.5) / 3, 0.1, cycles=3) for cycle in range(3)]
    assert start == pytest.approx([1, 1, 1])
    assert middle == pytest.approx([0.5, 0.5, 0.5])
    assert learning_rate_factor(1.0, 0.1, cycles=3) == pytest.approx(0, abs=1e-12)
    assert learning_rate_factor(0.0, 0.0) == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_exactly_one_group(name, optimizer):
    model = MODELS[name]()
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    optimizers = build_optimizers(model, OptimConfig(name=optimizer, steps=1))
    held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    trainable = [id(p) for p in model.parameters() if p.requires_grad and p.numel()]
    assert sorted(held) == sorted(trainable)
    assert id(frozen) not in held


@pytest.mark.parametrize("name", MODELS)
def test_groups_hold_what_they_say(name):
    groups = split_parameters(MODELS[name]())
    assert groups["hidden"]
    assert all(p.ndim == 2 for p in groups["hidden"].values())
    assert all(".fields." in n or "layer" in n for n in groups["hidden"])
    assert "classifier.weight" in groups["decayed"]
    decayed = groups["decayed"] | groups["hidden"]
    assert not any("_token" in n or "position" in n or n.endswith("bias") for n in decayed)
    assert any("cls_token" in n for n in groups["plain"])
    convolutions = {n for n, module in MODELS[name]().named_modules() if isinstance(module, nn.Conv2d)}
    assert convolutions
    assert {f"{n}.weight" for n in convolutions} <= groups["decayed"].keys()
    assert {n for n, p in MODELS[name]().named_parameters() if p.ndim >= 2 and p.numel()} - decayed.keys() == {
        n for n in groups["plain"] if "_token" in n or "position" in n or "registers" in n
    }


def test_runs_begun_with_undecayed_tokenizers_keep_their_grouping(tmp_path):
    old, new = (split_parameters(odevit(), grouping) for grouping in (1, 2))
    moved = old["plain"].keys() - new["plain"].keys()
    assert moved == {"odevit.tokenizer.projection.weight"}
    assert moved <= new["decayed"].keys()
    store = CheckpointStore(tmp_path, keep=3)
    assert store.grouping(7) == 7
    for step, meta in enumerate(({}, {"grouping": 2}, None)):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        (path / "meta.json").write_text("{damaged" if meta is None else json.dumps(meta))
        assert store.grouping(7) == (1, 2, 2)[step]


def test_muon_moves_a_convolution_as_the_matrix_of_its_channels():
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(8, 3, 3, 3))
    matrix = nn.Parameter(kernel.detach().flatten(1).clone())
    optimizers = [Muon([parameter], lr=0.01, weight_decay=0.1) for parameter in (kernel, matrix)]
    for _ in range(3):
        kernel.grad = torch.randn(8, 3, 3, 3)
        matrix.grad = kernel.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(kernel.flatten(1), matrix)


def test_muon_moves_pooling_stems_and_runs_begun_with_adamw_there_end_so():
    model = OdeViTForImageClassification(OdeViTConfig.from_preset("cifar-nano"))
    stem = {f"odevit.tokenizer.layers.{i}.weight" for i in (0, 3)}
    old, new = (split_parameters(model, grouping) for grouping in (2, 3))
    assert new["hidden"].keys() - old["hidden"].keys() == stem
    assert old["decayed"].keys() - new["decayed"].keys() == stem
    assert old["plain"].keys() == new["plain"].keys()
    muon, _ = build_optimizers(model, OptimConfig(name="muon", steps=1))
    model(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss.backward()
    for name in stem:
        weight = model.get_parameter(name)
        before = weight.detach().clone()
        muon.step()
        values = torch.linalg.svdvals((weight.detach() - before).flatten(1))
        assert values.max() < 2.5 * values.median()  # an orthogonal step, not a gradient


def test_muon_takes_the_matrices_and_its_own_rate():
    model = odevit()
    muon, adamw = build_optimizers(model, OptimConfig(name="muon", steps=1, lr=1e-3, muon_lr=5e-3))
    assert isinstance(muon, Muon)
    assert {id(p) for p in muon.param_groups[0]["params"]} == {
        id(p) for p in split_parameters(model)["hidden"].values()
    }
    set_learning_rate([muon, adamw], 0.5)
    set_learning_rate([muon, adamw], 0.5)  # of the base rate, not of the last one
    assert muon.param_groups[0]["lr"] == 2.5e-3
    assert all(group["lr"] == 5e-4 for group in adamw.param_groups)
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.05, 0.0]
    assert muon.param_groups[0]["weight_decay"] == 0.05
    own = OptimConfig(name="muon", steps=1, muon_weight_decay=1.5)
    assert [o.param_groups[0]["weight_decay"] for o in build_optimizers(model, own)] == [1.5, 0.05]


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizers(odevit().requires_grad_(False), OptimConfig(steps=1))


def test_average_formula_and_exact_swap():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = AveragedWeights(model, decay=0.5)
    expected = copy.deepcopy({n: t for n, t in model.state_dict().items() if t.is_floating_point()})
    for step in range(8):
        with torch.no_grad():
            model[0].weight.add_(torch.randn(2, 3))
        model(torch.randn(4, 3))  # moves the running statistics
        average.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in expected.items():
            value.mul_(decay).add_(model.state_dict()[name], alpha=1 - decay)
    before = copy.deepcopy(model.state_dict())
    with average.swapped_in(model):
        for name, value in expected.items():
            torch.testing.assert_close(model.state_dict()[name], value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("shape", [(24, 24), (8, 32), (32, 8)])
def test_muon_is_pytorchs_up_to_its_bfloat16(shape):
    torch.manual_seed(0)
    options = {"lr": 0.01, "weight_decay": 0.1}
    ours, theirs = (nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for _ in range(2))
    before = ours.detach().clone()
    optimizers = Muon([ours], **options), torch.optim.Muon([theirs], **options, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(shape)
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - before).norm()
    assert moved > 0.1
    assert (ours - theirs).norm() < 0.02 * moved
    groups, pytorchs = (optimizer.state_dict()["param_groups"][0] for optimizer in optimizers)
    assert groups | {"adjust_lr_fn": "match_rms_adamw"} == pytorchs
    assert optimizers[0].state[ours].keys() == optimizers[1].state[theirs].keys()


def test_orthogonalise_keeps_the_singular_vectors_and_levels_the_values():
    torch.manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(6, 10, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.linspace(1.0, 5.0, 6, dtype=torch.float64).diag() @ vt
    values = u.mT @ orthogonalise(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7) @ vt.mT
    assert (values - values.diag().diag()).abs().max() < 1e-12
    assert values.diag().min() > 0.6
    assert values.diag().max() < 1.3


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16)])
def test_muons_decay_bounds_the_spectral_norm(shape):
    torch.manual_seed(0)
    weight, gradient, decay = nn.Parameter(torch.zeros(shape)), torch.randn(shape), 2.0
    muon = Muon([weight], lr=0.05, weight_decay=decay)
    bound = 0.25 * max(shape) ** 0.5 / decay
    norms = []
    for _ in range(200):  # the same direction for ever: nothing grows faster
        weight.grad = gradient
        muon.step()
        norms.append(float(torch.linalg.matrix_norm(weight.detach(), 2)))
    assert max(norms) <= bound
    assert norms[-1] > 0.6 * bound  # and the bound is not idle
