"""Every form of a recipe's `model:` gives a classifier made for the data."""

import pytest
import torch
from tiny_runs import MODEL, tiny_recipe

from odevit import OdeViTForImageClassification
from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.shipped import zoo
from odevit.training.classifiers import adapt_to_data, build_classifier, load_odevit, save_classifier

VIT = {"type": "vit", "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"intermediate_size": 64}
CONFIG = DataConfig(name="digits", limit=640)


@pytest.fixture(scope="module")
def data():
    return load_data(CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (MODEL, 8),
        ({**MODEL, "image_size": 16}, 16),
        ({"preset": "cifar-nano"}, 32),
        ({"preset": "cifar-nano", "image_size": 16}, 16),
        (VIT, 8),
    ],
)
def test_from_scratch(spec, size, data):
    model = build_classifier(spec, data, CONFIG)
    assert (model.config.image_size, model.config.num_channels, model.config.num_labels) == (size, 1, 10)
    assert (model.config.image_mean, model.config.image_std) == (data.mean, data.std)
    assert model(torch.randn(2, 1, size, size)).logits.shape == (2, 10)
    assert build_classifier(spec, data, DataConfig(name="digits", image_size=24)).config.image_size in (size, 24)


@pytest.mark.slow
def test_fine_tuning_a_saved_classifier_at_another_size(tmp_path, data):
    recipe = tiny_recipe(tmp_path / "a", optim={"steps": 3})
    recipe.model = VIT
    teacher = train_recipe(recipe, data=data, progress_bar=False)
    recipe = tiny_recipe(tmp_path / "b", optim={"steps": 3})
    recipe.model = {"pretrained": str(teacher.folder / "model"), "image_size": 16}
    student = train_recipe(recipe, data=data, progress_bar=False).model
    assert type(student).__name__ == "ViTForImageClassification"
    assert student.config.image_size == 16
    assert list(student.config.image_mean) == pytest.approx(data.mean)
    from transformers import AutoModelForImageClassification

    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "b" / "model")
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(loaded.eval()(images).logits, student.eval()(images).logits)


def test_a_classifier_that_is_no_vit_is_fine_tuned_too(tmp_path, data):
    """With a fresh head for the data's classes where it had others, and the rest as it was saved."""
    from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
    saved = ResNetForImageClassification(config)
    saved.save_pretrained(tmp_path / "resnet")
    built = build_classifier({"pretrained": str(tmp_path / "resnet"), "image_size": 16}, data, CONFIG)
    assert (built.config.num_labels, built.config.image_size) == (len(data.class_names), 16)
    assert all(map(torch.equal, built.base_model.state_dict().values(), saved.base_model.state_dict().values()))
    recipe = tiny_recipe(tmp_path / "run", optim={"steps": 2})
    recipe.model = {"pretrained": str(tmp_path / "resnet")}
    result = train_recipe(recipe, data=data, progress_bar=False)
    assert result.model.config.image_size == data.train.fetch(torch.tensor([0]))[0].shape[-1]
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "model")
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(loaded.eval()(images).logits, result.model.eval()(images).logits)


@pytest.mark.slow
def test_training_the_head_alone_leaves_the_rest_as_it_was(tmp_path, data):
    """How the paper's teacher is made: a linear head on a frozen backbone, which may have come without one."""
    from transformers import ViTConfig, ViTModel

    fields = {name: value for name, value in VIT.items() if name != "type"}
    backbone = ViTModel(ViTConfig(**fields, image_size=8, num_channels=1), add_pooling_layer=False)
    backbone.save_pretrained(tmp_path / "dino")
    recipe = tiny_recipe(tmp_path / "run", optim={"steps": 3})
    recipe.model = {"pretrained": str(tmp_path / "dino"), "train": "head"}
    trained = train_recipe(recipe, data=data, progress_bar=False).model
    before = backbone.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in trained.base_model.state_dict().items())
    assert trained.classifier.weight.shape == (10, 32)
    assert trained.classifier.bias.abs().sum() > 0  # it began at zero


def test_fine_tuning_an_odevit(tmp_path, data):
    model = build_classifier({**MODEL, "num_steps": 3}, data, CONFIG)
    save_classifier(model, tmp_path)
    again = build_classifier({"pretrained": str(tmp_path), "image_size": 16}, data, CONFIG)
    assert isinstance(again, OdeViTForImageClassification)
    assert (again.config.image_size, again.config.num_steps) == (16, 3)
    assert torch.equal(again.odevit.fields[0].mlp.w1.weight, model.odevit.fields[0].mlp.w1.weight)


def test_the_users_normalisation_wins(tmp_path, data):
    config = DataConfig(name="digits", mean=[0.5], std=[0.25])
    model = build_classifier(MODEL, data, config)
    assert (model.config.image_mean, model.config.image_std) == ([0.5], [0.25])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "resnet"}, "must be 'odevit' or 'vit'"),
        ({"depht": 3}, r"unknown key model\.depht; valid keys: preset"),
        ({"type": "vit", "depth": 3}, r"unknown key model\.depth; valid keys: .*hidden_size"),
        ({"preset": "cifar-huge"}, "unknown preset"),
        ({"pretrained": "x", "depth": 3}, "only image_size and train may be given, got depth"),
        ({**MODEL, "num_labels": 7}, "answers with 7 classes but the data has 10"),
        ({**MODEL, "num_channels": 3}, "takes 3 channels but the images have 1"),
    ],
)
def test_mistakes_are_named(spec, message, data):
    with pytest.raises(ValueError, match=message):
        build_classifier(spec, data, CONFIG)


def test_class_names_reach_the_config(data):
    model = adapt_to_data(build_classifier(MODEL, data, CONFIG), data)
    assert model.config.id2label[3] == "3"
    assert model.config.label2id["3"] == 3


def test_a_calibrated_rule_does_not_outlive_the_weights_it_was_for():
    data = load_data(DataConfig(name="digits", limit=96))
    assert load_odevit("digits").config.halting
    assert build_classifier({"pretrained": zoo("digits")}, data, DataConfig(name="digits")).config.halting is None
