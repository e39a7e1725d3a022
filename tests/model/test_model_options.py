"""Options of the one model: depthwise mixing, pooling tokenizer, read-outs, damping, stopping before the end."""

import pytest
import torch
import torch.nn.functional as nnf

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.dynamics.arrival import lipschitz_on_ball
from odevit.dynamics.bounds import field_bound, mixing_bound
from odevit.dynamics.certificate import certify, tokenizer_bound
from odevit.dynamics.tangents import JetField, push
from odevit.model.field import VectorField
from odevit.model.layers import DepthwiseMixing, PoolingTokenizer
from odevit.model.model import OdeViTModel


def tiny(**changes):
    torch.manual_seed(0)
    fields = dict(
        image_size=8, patch_size=2, num_channels=1, hidden_size=8, num_attention_heads=2, mlp_ratio=2, depth=2,
        num_steps=4, num_registers=2, num_labels=3,
    )  # fmt: skip
    return OdeViTForImageClassification(OdeViTConfig(**{**fields, **changes})).eval()


def rough_mixing(channels=3, registers=1):
    torch.manual_seed(1)
    mixing = DepthwiseMixing(channels, registers).double()
    torch.nn.init.normal_(mixing.weight)
    return mixing


def test_mixing_is_the_identity_at_the_start():
    x = torch.randn(2, 1 + 9 + 1, 3)
    assert torch.equal(DepthwiseMixing(3, 1)(x), x)
    assert torch.equal(tiny(mixing="depthwise").odevit.fields[0].mlp.mixing.weight[:, 0].sum((1, 2)), torch.ones(16))


def test_mixing_is_a_convolution_on_the_grid_and_leaves_the_others():
    mixing, x = rough_mixing(), torch.randn(2, 1 + 9 + 1, 3, dtype=torch.float64)
    y = mixing(x)
    assert torch.equal(y[:, 0], x[:, 0])
    assert torch.equal(y[:, -1], x[:, -1])
    for row in range(3):
        for col in range(3):
            expected = torch.zeros(2, 3, dtype=torch.float64)
            for i in (-1, 0, 1):
                for j in (-1, 0, 1):
                    if 0 <= row + i < 3 and 0 <= col + j < 3:
                        expected += mixing.weight[:, 0, i + 1, j + 1] * x[:, 1 + 3 * (row + i) + col + j]
            assert torch.allclose(y[:, 1 + 3 * row + col], expected)


def test_mixing_wants_a_square_grid():
    with pytest.raises(ValueError, match="square grid"):
        DepthwiseMixing(3, 0)(torch.randn(1, 1 + 6, 3))


@pytest.mark.parametrize(("side", "slack"), [(2, 2.5), (3, 1.7), (6, 1.3)])
def test_mixing_bound_holds_and_is_tight(side, slack):
    """Against the singular values of the explicit matrix. The bound of the circulant is approached from above."""
    mixing, tokens = rough_mixing(), 1 + side * side + 1
    x = torch.zeros(1, tokens, 3, dtype=torch.float64)
    matrix = torch.func.jacrev(mixing)(x).reshape(tokens * 3, tokens * 3)
    exact, bound = torch.linalg.matrix_norm(matrix, ord=2), mixing_bound(mixing, tokens)
    assert exact <= bound * (1 + 1e-12)
    assert bound <= slack * exact
    mixing.weight.data *= 1e-3
    assert mixing_bound(mixing, tokens) == 1  # CLS passes


@pytest.mark.slow
def test_field_bound_with_mixing_survives_gradient_ascent():
    torch.manual_seed(0)
    field = VectorField(6, 2, hidden=6, norm="center", mixing="depthwise").double()
    torch.nn.init.normal_(field.mlp.mixing.weight, std=0.7)
    torch.nn.init.zeros_(field.attention.out.weight)  # the MLP alone, where the bound is near
    x = torch.randn(1, 10, 6, dtype=torch.float64, requires_grad=True)
    optimizer, largest = torch.optim.Adam([x, *field.mlp.parameters()], lr=0.05), 0.0
    for _ in range(150):
        jacobian = torch.func.jacrev(field.F)(x).reshape(60, 60)
        ratio = torch.linalg.matrix_norm(jacobian, ord=2) / field_bound(field, x.detach())[0]
        largest = max(largest, ratio.item())
        optimizer.zero_grad()
        (-ratio.log()).backward()
        optimizer.step()
    assert 0.4 < largest <= 1


def test_jets_of_a_mixed_field_are_its_tangents():
    torch.manual_seed(0)
    field = VectorField(6, 2, hidden=9, mixing="depthwise", registers=1).double()
    torch.nn.init.normal_(field.mlp.mixing.weight)
    jet = torch.randn(3, 2, 1 + 4 + 1, 6, dtype=torch.float64)
    assert torch.allclose(JetField(field)(jet), push(lambda x: field.F(x) + field.attend(x)[0], jet), atol=1e-10)


def test_pooling_tokenizer_is_that_of_cct():
    torch.manual_seed(0)
    tokenizer, images = PoolingTokenizer(3, 8, 4), torch.randn(2, 3, 16, 16)
    x = images
    for layer in (tokenizer.layers[0], tokenizer.layers[3]):
        assert layer.bias is None
        x = nnf.max_pool2d(nnf.conv2d(x, layer.weight, padding=1).relu(), 3, 2, padding=1)
    assert torch.equal(tokenizer(images), x.flatten(2).mT)
    assert tokenizer(images).shape == (2, 16, 8)


def test_pooling_tokenizer_bound_survives_gradient_ascent():
    torch.manual_seed(0)
    tokenizer = PoolingTokenizer(1, 4, 2).double()
    bound = tokenizer_bound(tokenizer)
    a = torch.randn(1, 1, 6, 6, dtype=torch.float64, requires_grad=True)
    b = (a.detach() + 0.1 * torch.randn_like(a)).requires_grad_()
    optimizer = torch.optim.Adam([a, b], lr=0.02)
    for _ in range(200):
        ratio = (tokenizer(a) - tokenizer(b)).norm() / (a - b).norm()
        optimizer.zero_grad()
        (-ratio).backward()
        optimizer.step()
        assert ratio <= bound


@pytest.mark.parametrize("pool", ["cls", "sequence", "mean", "sqrt_mean", "flatten"])
def test_read_outs_ignore_registers(pool):
    model = tiny(pool=pool)
    state = torch.randn(2, 1 + 16 + 2, 8)
    other = state.clone()
    other[:, -2:] = 100
    assert torch.equal(model.classify(state), model.classify(other))
    tokens = model.norm(state[:, :17])
    mean = tokens.mean(1)
    expected = {"cls": tokens[:, 0], "mean": mean, "sqrt_mean": 17**0.5 * mean, "flatten": tokens.flatten(1)}.get(pool)
    if pool == "sequence":
        weights = torch.softmax(model.pool.score(tokens)[..., 0], dim=1)
        expected = torch.einsum("bn,bnd->bd", weights, tokens)
    assert torch.allclose(model.read_out(state), expected, atol=1e-6)
    assert torch.equal(model.classify(state), model.classifier(model.read_out(state)))


def test_a_pooling_stem_and_a_learned_weighting_start_in_their_own_way():
    """Not with norm one as other matrices do. transformers passes over modules without parameters of their own."""
    torch.manual_seed(0)
    config = {"image_size": 8, "patch_size": 4, "hidden_size": 64, "num_attention_heads": 2}
    for model_class in (OdeViTModel, OdeViTForImageClassification):
        model = model_class(OdeViTConfig(**config, tokenizer="pooling", pool="sequence"))
        for layer in getattr(model, "odevit", model).tokenizer.layers[::3]:
            fan_in = layer.weight[0].numel()
            assert float(layer.weight.detach().var()) == pytest.approx(2 / fan_in, rel=0.15)
    assert 0.01 < float(model.pool.score.weight.detach().std()) < 0.03
    query = model.odevit.fields[0].attention.query.weight.detach()
    assert float(torch.linalg.matrix_norm(query, 2)) == pytest.approx(1, rel=1e-3)


def test_a_head_that_reads_every_token_takes_one_size_only(tmp_path):
    model = tiny(pool="flatten")
    assert model.classifier.in_features == model.pool.features == 17 * 8
    with pytest.raises(ValueError, match="images of 16 patches only, got 36; resize the images"):
        model(torch.randn(1, 1, 12, 12), interpolate_pos_encoding=True)
    with pytest.raises(ValueError, match="images of 16 patches only, got 36"):
        model.resize_images(12)
    assert model.config.image_size == 8
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(type(model).from_pretrained(tmp_path).eval()(images).logits, model(images).logits)
    with pytest.raises(ValueError, match="images of 16 patches only"):
        type(model).from_pretrained(tmp_path, image_size=12)


@pytest.mark.parametrize("solver", ["euler", "midpoint", "dopri5"])
def test_until_stops_at_the_first_step_that_reaches_the_time(solver):
    model, images = tiny(), torch.randn(2, 1, 8, 8)
    tokens = model.odevit.embed(images)
    states = model.odevit.evolve(tokens, 4, solver, save_at="steps").xs
    with torch.no_grad():
        early = model.odevit.evolve(tokens, 4, solver, until=0.5)
    assert early.ts.tolist() == [0.5]
    assert torch.allclose(early.xs[-1], states[2], atol=1e-6 if solver != "dopri5" else 1e-3)
    if solver == "euler":
        assert early.evaluations == (2, 2)
        between = model.odevit.evolve(tokens, 4, solver, until=0.51, save_at="steps")
        assert between.ts.tolist() == [0, 0.25, 0.5, 0.75]
        output = model(images, num_steps=4, until=0.5, output_attentions=True)
        assert len(output.attentions) == 2
        assert torch.allclose(output.logits, model.classify(states[2]), atol=1e-6)
    for wrong in (1.5, -0.5, float("nan")):
        with pytest.raises(ValueError, match="within"):
            model.odevit.evolve(tokens, 4, solver, until=wrong)


def test_maps_of_the_beginning_are_those_of_the_whole():
    """With the model's own number of steps, not given again; the second field begins in the middle."""
    images = torch.randn(2, 1, 8, 8)
    for fields, steps in ((2, 4), (2, 2), (3, 5)):
        model = tiny(num_fields=fields, num_steps=steps)
        whole = model(images, output_attentions=True).attentions
        early = model(images, output_attentions=True, until=0.5).attentions
        assert 0 < len(early) < len(whole)
        assert all(torch.equal(one, other) for one, other in zip(early, whole, strict=False))


def test_adaptive_solvers_stop_at_until_and_never_see_what_comes_after():
    model, images = tiny(num_fields=2), torch.randn(2, 1, 8, 8)
    tokens = model.odevit.embed(images)
    whole, half, nothing = (model.odevit.evolve(tokens, solver="dopri5", until=until) for until in (1.0, 0.5, 0.0))
    assert 0 < half.evaluations.F < whole.evaluations.F
    assert nothing.evaluations.F == 0
    assert torch.equal(nothing.xs[-1], tokens)
    with torch.no_grad():
        model.odevit.fields[1].mlp.w2.weight.fill_(float("nan"))
    again = model.odevit.evolve(tokens, solver="dopri5", until=0.5)
    assert torch.equal(again.xs, half.xs)
    states = model.odevit.evolve(tokens, solver="dopri5", until=0.5, save_at=[0.2, 0.5])
    assert states.xs.shape[0] == 2


@pytest.mark.parametrize("options", [{"mixing": "depthwise"}, {"pool": "flatten"}])
def test_what_knows_its_neighbours_refuses_images_that_are_not_square(options):
    """Also 2 × 8 patches, as many as 4 × 4: they would be mixed, or read, as if they lay elsewhere."""
    model = tiny(**options)
    with pytest.raises(ValueError, match="must be square, got 4×16"):
        model(torch.randn(1, 1, 4, 16), interpolate_pos_encoding=True)
    assert tiny()(torch.randn(1, 1, 4, 16), interpolate_pos_encoding=True).logits.shape == (1, 3)


def test_the_certificate_says_what_it_does_not_cover():
    with pytest.raises(ValueError, match="pool='mean'"):
        certify(tiny(pool="mean"), torch.randn(1, 1, 8, 8))
    certificate = certify(tiny(mixing="depthwise"), torch.randn(1, 1, 8, 8))
    assert certificate.radius > 0


@pytest.mark.parametrize("option", [{"tokenizer": "pooling"}, {"pool": "sequence"}, {"mixing": "depthwise"}])
def test_every_new_parameter_learns_and_comes_back_from_disk(option, tmp_path):
    model = tiny(**option)
    model(torch.randn(2, 1, 8, 8), labels=torch.tensor([0, 1])).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    model.save_pretrained(tmp_path)
    again = OdeViTForImageClassification.from_pretrained(tmp_path).eval()
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(model(images).logits, again(images).logits)


@pytest.mark.parametrize("field", ["tokenizer", "pool", "mixing"])
def test_unknown_options_list_the_valid_ones(field):
    with pytest.raises(ValueError, match=f"unknown {field} 'magic'; choose one of"):
        OdeViTConfig(**{field: "magic"})


def test_damping_lowers_the_log_norm_by_itself_per_unit_of_depth():
    torch.manual_seed(0)
    field, damped = (VectorField(6, 2, hidden=9, scale=2.0, damping=rho).double() for rho in (0.0, 0.7))
    damped.load_state_dict(field.state_dict())
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    tops: list[float] = []
    for one in (field, damped):
        jacobian = torch.func.jacrev(lambda x, one=one: one.F(x) + one.attend(x)[0])(x).reshape(24, 24)
        tops.append(torch.linalg.eigvalsh((jacobian + jacobian.T) / 2)[-1].item())
        assert torch.linalg.matrix_norm(jacobian, ord=2) <= field_bound(one, x)[0]
    assert tops[0] - tops[1] == pytest.approx(2.0 * 0.7, abs=1e-9)


def test_a_damped_field_has_its_tangents_and_a_tight_bound():
    torch.manual_seed(0)
    field = VectorField(6, 2, hidden=9, scale=2.0, damping=0.7).double()
    jet = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    assert torch.allclose(JetField(field)(jet), push(lambda x: field.F(x) + field.attend(x)[0], jet), atol=1e-10)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    for layer in (field.mlp.w2, field.attention.out):
        torch.nn.init.zeros_(layer.weight)
    expected = torch.full((2,), 1.4, dtype=torch.float64)  # −ρ X alone
    assert torch.allclose(field_bound(field, x), expected)
    assert torch.allclose(lipschitz_on_ball(field, x)(torch.ones(2, dtype=torch.float64)), expected)


@pytest.mark.parametrize("rho", [-0.1, float("inf"), float("nan")])
def test_damping_is_no_growth(rho):
    with pytest.raises(ValueError, match="damping must be 0 or more"):
        tiny(damping=rho)


def test_a_contractive_field_needs_no_damping():
    with pytest.raises(ValueError, match="has no damping"):
        tiny(field="contractive", damping=0.1)
