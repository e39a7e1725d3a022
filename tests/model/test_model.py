"""The model: tokens, initialisation, outputs, checkpointing, determinism, export."""

import math

import pytest
import torch
from problems import tiny_images, tiny_model
from torch import nn

from odevit import PRESETS, SOLVERS, OdeViTForImageClassification
from odevit.model.layers import TOKENIZERS, interpolate_positions
from odevit.model.spectral import spectral_norms

LABELS = torch.tensor([0, 3, 2])


def small_preset(name, **overrides):
    """A preset of its own type, of reduced size."""
    small = {"hidden_size": 96, "image_size": 32} if PRESETS[name]["hidden_size"] > 192 else {}
    return OdeViTForImageClassification.from_preset(name, **{**small, **overrides})


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("registers", [0, 1, 3])
def test_tokens_are_cls_then_patches_then_registers(tokenizer, registers):
    base, images = tiny_model(tokenizer=tokenizer, num_registers=registers).odevit, tiny_images()
    tokens = base.embed(images)
    assert tokens.shape == (3, 1 + 16 + registers, 32)
    assert torch.allclose(tokens[:, :1], (base.cls_token + base.positions[:, :1]).expand(3, -1, -1))
    assert torch.allclose(tokens[:, 1:17], base.tokenizer(images) + base.positions[:, 1:])
    assert torch.equal(tokens[:, 17:], base.registers.expand(3, -1, -1))


def test_positions_move_cls_and_patches_only():
    base, images = tiny_model().odevit, tiny_images()
    before = base.embed(images)
    base.positions.data += 1.0
    moved = base.embed(images) - before
    assert torch.allclose(moved[:, :17], torch.ones(3, 17, 32), atol=1e-5)
    assert (moved[:, 17:] == 0).all()


def test_a_model_without_registers_trains():
    model = tiny_model(num_registers=0).train()
    model(tiny_images(), labels=LABELS).loss.backward()
    assert model.odevit.registers.shape == (1, 0, 32)
    assert model.odevit.cls_token.grad.abs().max() > 0


# --- initialisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spectral_cap", [None, 1.0, 0.5])
@pytest.mark.parametrize(("preset", "stem"), [*((name, {}) for name in PRESETS), ("cifar-nano", {"tokenizer": "conv"})])
def test_fresh_models_have_spectral_norm_one_in_every_matrix(preset, stem, spectral_cap):
    torch.manual_seed(0)
    model = small_preset(preset, spectral_cap=spectral_cap, **stem)
    norms = spectral_norms(model.odevit)
    convolutions = {name for name in norms if name.startswith("tokenizer")}
    matrices = [f"attention.{n}" for n in ("query", "key", "value", "out")] + ["mlp.w1", "mlp.w2"]
    assert norms.keys() - convolutions == {f"fields.{i}.{n}" for i in range(len(model.odevit.fields)) for n in matrices}
    assert len(convolutions) == (1 if model.config.tokenizer == "patch" else 2)
    if model.config.tokenizer == "pooling":  # initialised as CCT's, without a norm
        norms = {name: norm for name, norm in norms.items() if name not in convolutions}
    for name, norm in norms.items():
        expected = 1 if spectral_cap is None or name in convolutions else min(1, spectral_cap)
        # the cap divides by an upper bound of the norm, at most 3 % above it
        assert expected * (1 - 0.03 * (spectral_cap is not None)) - 1e-5 <= norm <= expected + 1e-5, name


def test_query_key_and_value_are_separate_matrices():
    field = tiny_model().odevit.fields[0]
    weights = [getattr(field.attention, name).weight for name in ("query", "key", "value", "out")]
    assert all(w.shape == (32, 32) for w in weights)
    assert not any(torch.equal(weights[0], w) for w in weights[1:])


@pytest.mark.parametrize("preset", PRESETS)
def test_tokens_positions_norms_and_head_start_as_in_a_vit(preset):
    torch.manual_seed(0)
    model = small_preset(preset, num_registers=10, num_labels=100)
    for parameter in (model.odevit.cls_token, model.odevit.positions, model.odevit.registers, model.classifier.weight):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.25)
        assert abs(parameter.mean().item()) < 5 * 0.02 / math.sqrt(parameter.numel())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


def test_batch_norm_starts_neutral_learns_in_training_and_is_still_in_evaluation():
    model = tiny_model(tokenizer="conv")
    (norm,) = (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    assert (norm.running_mean == 0).all()
    assert (norm.running_var == 1).all()
    assert (norm.weight == 1).all()
    model(tiny_images())
    assert norm.num_batches_tracked == 0
    model.train()(tiny_images())
    assert norm.num_batches_tracked == 1
    assert norm.running_mean.abs().max() > 0


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_fields", [1, 2, 3])
@pytest.mark.parametrize("solver", SOLVERS)
def test_states_and_maps_of_every_step(solver, num_fields):
    model, images = tiny_model(num_fields=num_fields), tiny_images()
    out = model(images, num_steps=5, solver=solver, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 6
    assert len(out.attentions) == 5
    assert all(state.shape == (3, 19, 32) for state in out.hidden_states)
    assert all(p.shape == (3, 2, 19, 19) for p in out.attentions)
    assert torch.equal(out.hidden_states[0], model.odevit.embed(images))
    assert torch.equal(model.classify(out.hidden_states[-1]), out.logits)
    assert torch.allclose(model(images, num_steps=5, solver=solver).logits, out.logits, atol=1e-6)
    cost = SOLVERS[solver].evaluations
    assert out.evaluations == (5 * cost.F, 5 * cost.G)
    phases = {1: [0] * 5, 2: [0, 0, 0, 1, 1], 3: [0, 0, 1, 1, 2]}[num_fields]
    for phase, state, p in zip(phases, out.hidden_states, out.attentions, strict=False):
        field = model.odevit.fields[phase]
        assert torch.allclose(field.attention.map(field.norm_g(state)), p, atol=1e-6)


def test_maps_reach_the_query_and_key_weights():
    model = tiny_model()
    sum(p.square().sum() for p in model(tiny_images(), output_attentions=True).attentions).backward()
    attention = model.odevit.fields[0].attention
    assert attention.query.weight.grad.abs().max() > 0
    assert attention.key.weight.grad.abs().max() > 0


def test_nothing_is_returned_that_was_not_asked_for_and_the_config_can_ask():
    out = tiny_model()(tiny_images())
    assert out.hidden_states is out.attentions is out.loss is None
    out = tiny_model(output_hidden_states=True)(tiny_images())
    assert len(out.hidden_states) == 5
    assert out.attentions is None


def test_steps_and_solver_can_be_changed_at_the_call():
    model, images = tiny_model(), tiny_images()
    default = model(images)
    assert default.evaluations == (4, 4)
    assert torch.equal(model(images, num_steps=4, solver="euler").logits, default.logits)
    rk4, dopri5 = model(images, num_steps=24, solver="rk4"), model(images, solver="dopri5")
    assert rk4.evaluations == (96, 96)
    assert torch.allclose(rk4.logits, dopri5.logits, atol=1e-2)
    error = (default.logits - rk4.logits).norm()
    assert (model(images, num_steps=32).logits - rk4.logits).norm() < 0.3 * error
    assert model.config.num_steps == 4
    assert model.config.solver == "euler"


def test_adaptive_solvers_also_give_states_and_maps():
    out = tiny_model()(tiny_images(), solver="dopri5", output_hidden_states=True, output_attentions=True)
    assert (len(out.hidden_states), len(out.attentions)) == (5, 4)


def test_tuples_instead_of_dictionaries():
    model, images = tiny_model(), tiny_images()
    expected = model(images, labels=LABELS, output_hidden_states=True)
    loss, logits, states, evaluations = model(images, labels=LABELS, output_hidden_states=True, return_dict=False)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)
    assert len(states) == 5
    assert evaluations == (4, 4)
    assert torch.equal(model.odevit(images, return_dict=False)[0], states[-1])


def test_logits_depend_on_cls_alone_and_pass_the_final_norm():
    model, state = tiny_model(final_norm="layer"), torch.randn(2, 19, 32)
    expected = nn.functional.layer_norm(state[:, 0], (32,), eps=1e-6) @ model.classifier.weight.mT
    assert torch.allclose(model.classify(state), expected, atol=1e-6)
    plain = tiny_model(final_norm="none")
    assert torch.allclose(plain.classify(state), state[:, 0] @ plain.classifier.weight.mT, atol=1e-6)


def test_loss_is_cross_entropy():
    model, images = tiny_model(), tiny_images()
    out = model(images, labels=LABELS)
    log_p = out.logits - out.logits.exp().sum(-1, keepdim=True).log()
    assert torch.allclose(out.loss, -log_p[torch.arange(3), LABELS].mean(), atol=1e-6)


@pytest.mark.parametrize("solver", ["euler", "strang", "dopri5"])
@pytest.mark.parametrize("num_fields", [1, 3])
def test_the_horizon_is_only_a_unit_of_time(solver, num_fields):
    """Total depth s·T = D: the same K gives the same result whatever T."""
    one, five = (tiny_model(horizon=t, num_fields=num_fields, solver=solver) for t in (1, 5))
    assert one.odevit.fields[0].scale == 5 * five.odevit.fields[0].scale == 3
    tolerance = 1e-2 if solver == "dopri5" else 1e-5
    assert torch.allclose(one(tiny_images()).logits, five(tiny_images()).logits, atol=tolerance)
    assert five.odevit.evolve(five.odevit.embed(tiny_images()), save_at="steps").ts[-1] == 5


def test_several_fields_are_several_parameter_sets():
    one, three = tiny_model(), tiny_model(num_fields=3)
    block = sum(p.numel() for p in one.odevit.fields.parameters())
    assert sum(p.numel() for p in three.parameters()) == sum(p.numel() for p in one.parameters()) + 2 * block
    three.train()(tiny_images(), labels=LABELS).loss.backward()
    for field in three.odevit.fields:
        assert field.attention.value.weight.grad.abs().max() > 0


@pytest.mark.parametrize("size", [(24, 24), (8, 20), (4, 4)])
def test_other_image_sizes_with_interpolated_positions(size):
    model = tiny_model()
    images = torch.randn(2, 3, *size)
    grid = size[0] // 4, size[1] // 4
    out = model(images, interpolate_pos_encoding=True, output_hidden_states=True)
    assert out.hidden_states[-1].shape == (2, 1 + grid[0] * grid[1] + 2, 32)
    expected = model.odevit.tokenizer(images) + interpolate_positions(model.odevit.positions, (4, 4), grid)[:, 1:]
    assert torch.allclose(out.hidden_states[0][:, 1:-2], expected, atol=1e-6)


def test_interpolation_changes_nothing_at_the_models_own_size():
    model, images = tiny_model(), tiny_images()
    assert torch.equal(model(images, interpolate_pos_encoding=True).logits, model(images).logits)


# --- gradient checkpointing, dropout, determinism, export -------------------------------------------------------------

NOISY = dict(dropout=0.2, drop_path=0.2)


def training_step(model, seed=0):
    model.train().zero_grad()
    torch.manual_seed(seed)
    loss = model(tiny_images(), labels=LABELS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"spectral_cap": 1.0}, {"num_fields": 2, "solver": "strang"}])
def test_gradient_checkpointing_gives_the_same_bits_with_dropout(options):
    plain, checkpointed = tiny_model(**NOISY, **options), tiny_model(**NOISY, **options)
    checkpointed.gradient_checkpointing_enable()
    assert checkpointed.is_gradient_checkpointing
    assert checkpointed.odevit.gradient_checkpointing
    (loss, gradients), (same_loss, same_gradients) = training_step(plain), training_step(checkpointed)
    assert torch.equal(loss, same_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same_gradients[name]) or (
            "spectral_cap" in options  # the cap's gradient is summed in another order
            and torch.allclose(gradient, same_gradients[name], atol=1e-6)
        ), name
    checkpointed.gradient_checkpointing_disable()
    assert not checkpointed.odevit.gradient_checkpointing


def bytes_kept_for_backward(model):
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(tiny_images(8), labels=torch.arange(8) % 5).loss.backward()
    return sum(kept.values())


def test_gradient_checkpointing_really_saves_memory():
    plain, checkpointed = tiny_model(num_steps=24), tiny_model(num_steps=24)
    checkpointed.gradient_checkpointing_enable()
    assert bytes_kept_for_backward(checkpointed) < 0.2 * bytes_kept_for_backward(plain)


def test_dropout_is_active_in_training_only_and_again_after_evaluation():
    noisy, clean, images = tiny_model(**NOISY), tiny_model(), tiny_images()
    for _ in range(2):
        assert torch.equal(noisy.eval()(images).logits, clean(images).logits)
        noisy.train()
        assert not torch.equal(noisy(images).logits, noisy(images).logits)


def three_steps(seed):
    model = tiny_model(seed, **NOISY, tokenizer="conv")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        loss, _ = training_step(model, seed=step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.eval()(tiny_images()).logits, model.state_dict()


def test_everything_is_the_same_to_the_last_bit_at_a_fixed_seed():
    (losses, logits, weights), (same_losses, same_logits, same_weights) = three_steps(0), three_steps(0)
    assert losses == same_losses
    assert torch.equal(logits, same_logits)
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert three_steps(1)[0] != losses


def test_the_state_dict_holds_each_shared_block_once():
    short, long = tiny_model(num_steps=2), tiny_model(num_steps=24)
    assert short.state_dict().keys() == long.state_dict().keys()
    pointers = [tensor.data_ptr() for tensor in long.state_dict().values() if tensor.numel()]
    assert len(pointers) == len(set(pointers))
    assert sum(".query.weight" in name for name in long.state_dict()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["euler", "strang"])
def test_exports_with_a_dynamic_batch(solver):
    model = tiny_model(solver=solver)
    program = torch.export.export(model, (tiny_images(2),), dynamic_shapes={"pixel_values": {0: torch.export.Dim("b")}})
    images = tiny_images(5)
    assert torch.allclose(program.module()(images).logits, model(images).logits, atol=1e-6)
