"""What timm's own model tests check, on every ODE-ViT that timm knows."""

from itertools import cycle

import pytest
import torch
from PIL import Image
from problems import perturbed_model, tiny_images

timm = pytest.importorskip("timm", reason="timm is an optional extra")
pytest.importorskip("torchvision.models", reason="torchvision is needed by timm")

import odevit.shipped  # noqa: E402
import odevit.timm  # noqa: E402
from odevit import OdeViTForImageClassification  # noqa: E402
from odevit.model.layers import ATTENTIONS, MIXINGS, TOKENIZERS  # noqa: E402
from odevit.model.pools import POOLS  # noqa: E402
from odevit.timm import register, to_timm  # noqa: E402

NAMES = timm.list_models("odevit_*")  # every preset and every model of the zoo
EVERY = set(NAMES)
TINY = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "num_attention_heads": 2, "mlp_ratio": 2, "depth": 3,
    "num_steps": 4, "num_registers": 2, "num_labels": 5,
}  # fmt: skip
for tokenizer, pool, attention, mixing in zip(
    cycle(TOKENIZERS), POOLS, cycle(ATTENTIONS), cycle(MIXINGS), strict=False
):
    kinds = {"tokenizer": tokenizer, "pool": pool, "attention": attention, "mixing": mixing}
    register(f"odevit_test_{pool}", {**TINY, **kinds})
    NAMES.append(f"odevit_test_{pool}")


def create(name, **options):
    """The model as it is registered, but on the smallest of images, in as many steps as it has fields plus one."""
    fields = config_of(name)
    size = min(fields.image_size, 2 * fields.patch_size)
    return timm.create_model(name, img_size=size, **{"num_steps": fields.num_fields + 1, **options})


def config_of(name):
    with torch.device("meta"):
        return timm.create_model(name).config


def inputs(model, batch=2):
    shape = model.config.num_channels, model.config.image_size, model.config.image_size
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


def test_every_preset_and_the_zoo_are_registered():
    presets = {f"odevit_{name.replace('-', '_')}" for name in odevit.timm.PRESETS}
    shipped = {f"odevit_{name.replace('-', '_')}" for name in odevit.shipped.names()}
    assert presets | shipped <= EVERY
    assert shipped <= set(timm.list_models("odevit_*", pretrained=True))
    assert not presets & set(timm.list_models("odevit_*", pretrained=True))


@pytest.mark.parametrize("name", sorted(EVERY))
def test_the_registered_size_steps_and_config(name):
    """Built on the meta device, at its own size: what timm's config says is what the model is."""
    with torch.device("meta"):
        model = timm.create_model(name)
    cfg = model.default_cfg
    assert cfg["input_size"] == (model.config.num_channels, model.config.image_size, model.config.image_size)
    assert model(torch.empty(1, *cfg["input_size"], device="meta")).shape == (1, cfg["num_classes"])
    assert len(model.feature_info) == model.config.num_steps


@pytest.mark.parametrize("name", NAMES)
def test_forward_backward_and_config(name):
    model = create(name, num_classes=42).train()
    images = inputs(model)
    model(images).square().mean().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None] == []
    state, cfg = model.state_dict(), model.default_cfg
    assert cfg["classifier"] + ".weight" in state
    assert cfg["first_conv"] + ".weight" in state
    model.eval()
    with torch.no_grad():
        output = model(images)
        assert output.shape == (2, 42)
        assert torch.isfinite(output).all()
        features = model.forward_features(images)
        assert features.shape[-1] == model.num_features
        assert torch.equal(model.forward_head(features), output)
        pooled = model.forward_head(features, pre_logits=True)
        assert torch.allclose(model.get_classifier()(pooled), output, atol=1e-5)
        model.reset_classifier(0)
        assert torch.equal(model(images), pooled)
        model.reset_classifier(0, "")
        assert torch.equal(model(images), features)
        model.reset_classifier(7, "mean")
        assert model(images).shape == (2, 7)
        assert model.num_classes == 7


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_and_features(name):
    model = create(name, num_steps=3 * config_of(name).num_fields).eval()
    images = inputs(model)
    patch, steps = model.config.patch_size, model.config.num_steps
    side = images.shape[-1] // patch
    with torch.no_grad():
        final, maps = model.forward_intermediates(images)
        assert torch.equal(final, model.forward_features(images))
        assert len(maps) == steps
        assert {tuple(m.shape) for m in maps} == {(2, model.num_features, side, side)}
        early = model.forward_intermediates(images, indices=[0, 1], stop_early=True, intermediates_only=True)
        assert all(torch.equal(a, b) for a, b in zip(early, maps, strict=False))
        tokens = model.forward_intermediates(
            images, indices=1, return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
        )
        assert torch.equal(torch.cat(tokens[0][::-1], dim=1), final[:, : 1 + side * side])
        named = model.forward_intermediates(images, output_dict=True, return_prefix_tokens=True)
        assert set(named) == {"image_features", "image_intermediates", "image_intermediates_prefix"}
        with torch.device("meta"):  # nothing to initialise: the weights are the model's
            features = create(name, num_steps=steps, features_only=True, out_indices=(0, 2)).eval()
        weights = {f"model.{k}": v for k, v in model.state_dict().items()}
        assert features.load_state_dict(weights, strict=False, assign=True).missing_keys == []
        assert features.feature_info.channels() == [model.num_features] * 2
        assert features.feature_info.reduction() == [patch] * 2
        for ours, theirs in zip((maps[0], maps[2]), features(images), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_export_checkpointing_and_other_sizes(name):
    model = create(name, num_classes=5).eval()
    images = inputs(model)
    with torch.no_grad():
        expected = model(images)
        assert torch.allclose(torch.export.export(model, (images,)).module()(images), expected, atol=1e-5)
    model.set_grad_checkpointing()
    model.train()(images).sum().backward()
    assert model.flow.gradient_checkpointing
    side, channels = 3 * model.config.patch_size, model.config.num_channels
    pool = model.global_pool
    if pool == "flatten":  # its head knows every token
        with pytest.raises(ValueError, match="reads every token for itself"):
            model.set_input_size((side, side))
        model.reset_classifier(0, "")
    model.set_input_size((side, side))
    if pool == "flatten":
        model.reset_classifier(5, pool)
    assert model.eval()(torch.randn(1, channels, side, side)).shape == (1, 5)
    with torch.device("meta"):
        assert create(name, num_classes=5, in_chans=1)(images[:, :1].to("meta")).shape == (2, 5)
    with pytest.raises(ValueError, match="square"):
        model.set_input_size((side, 16))
    with pytest.raises(ValueError, match="global_pool must be '' or one of cls"):
        model.reset_classifier(3, "avg")


@pytest.mark.parametrize("name", odevit.shipped.names())
def test_a_model_of_the_zoo_comes_with_its_weights(name):
    ours = OdeViTForImageClassification.from_pretrained(odevit.zoo(name)).eval()
    theirs = timm.create_model(f"odevit_{name.replace('-', '_')}", pretrained=True).eval()
    images = inputs(theirs, 4)
    with torch.no_grad():
        assert torch.equal(theirs(images), ours(images).logits)
    data = timm.data.resolve_model_data_config(theirs)
    assert list(data["mean"]) == ours.config.image_mean
    transform = timm.data.create_transform(**data, is_training=False)
    picture = Image.new("L" if ours.config.num_channels == 1 else "RGB", (20, 20), 128)
    assert transform(picture).shape == images.shape[1:]


def test_weights_of_a_folder_come_with_pretrained(tmp_path):
    ours = perturbed_model(tokenizer="conv", pool="sequence", image_mean=[0.1] * 3, image_std=[0.2] * 3).eval()
    ours.save_pretrained(tmp_path)
    register("odevit_test_folder", {}, tmp_path)
    model = timm.create_model("odevit_test_folder", pretrained=True).eval()
    images = tiny_images(2)
    with torch.no_grad():
        assert torch.equal(model(images), ours(images).logits)
        assert torch.equal(to_timm(ours)(images), ours(images).logits)
    assert timm.data.resolve_model_data_config(model)["mean"] == (0.1, 0.1, 0.1)
    other = timm.create_model("odevit_test_folder", pretrained=True, num_classes=3, in_chans=1)
    assert other(torch.randn(2, 1, 16, 16)).shape == (2, 3)
    assert torch.equal(other.flow.positions, model.flow.positions)
    assert timm.is_model_pretrained("odevit_test_folder")
    assert not timm.is_model_pretrained("odevit_cifar_tiny")


def test_a_preset_without_weights_says_so():
    with pytest.raises(RuntimeError, match=r"[Nn]o pretrained weights"):
        timm.create_model("odevit_cifar_nano", pretrained=True)
    with pytest.raises(TypeError, match="unknown field widht"):
        timm.create_model("odevit_cifar_nano", widht=3)


def test_weights_follow_another_image_size():
    model = timm.create_model("odevit_cifar10", pretrained=True, img_size=64).eval()
    ours = OdeViTForImageClassification.from_pretrained(odevit.zoo("cifar10"), image_size=64).eval()
    images = tiny_images(2, size=64)
    with torch.no_grad():
        assert torch.allclose(model(images), ours(images).logits, atol=1e-5)


@pytest.mark.parametrize("options", [{"unit_features": True}, {"projection_size": 8}])
def test_a_head_that_timm_cannot_have_is_refused(options):
    with pytest.raises(ValueError, match="no place for projection_size and unit_features"):
        to_timm(perturbed_model(**options))


def test_precision_is_kept():
    model = to_timm(perturbed_model().double())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
