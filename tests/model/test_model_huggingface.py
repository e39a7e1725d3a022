"""Hugging Face: saving and loading, Auto classes, other image sizes, pipeline and Trainer."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from problems import tiny_images, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from odevit import OdeViTConfig, OdeViTForImageClassification, OdeViTModel
from odevit.model.layers import interpolate_positions

VARIANTS = {
    "paper": {},
    "conv, two fields": {"tokenizer": "conv", "num_fields": 2},
    "capped": {"spectral_cap": 0.7},
    "l2, layer norm, bias": {"attention": "l2", "norm": "layer", "bias": True, "final_norm": "none"},
    "no registers": {"num_registers": 0, "horizon": 2.5, "meeting_times": [0.5, 1.0, 2.5]},
}


def perturbed(**overrides):
    """A model whose parameters and statistics are all away from their initial values."""
    model = tiny_model(**overrides)
    generator = torch.Generator().manual_seed(7)
    for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
        tensor.data += 0.05 * torch.rand(tensor.shape, generator=generator)
    return model


@pytest.fixture
def saved(tmp_path):
    model = perturbed(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.25])
    model.save_pretrained(tmp_path)
    return model, tmp_path


def same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def changed_fields(model, other):
    """Config fields that differ, apart from those in which transformers notes where a model came from."""
    ours, theirs = model.config.to_dict(), other.config.to_dict()
    return {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)} - {
        "_name_or_path",
        "architectures",
        "dtype",
    }


# --- saving and loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_round_trip_is_exact_to_the_bit(options, tmp_path):
    model = perturbed(**options)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }
    loaded, info = OdeViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"] | info["mismatched_keys"]
    assert not loaded.training
    assert same_weights(model, loaded)
    assert torch.equal(model(tiny_images()).logits, loaded(tiny_images()).logits)
    assert changed_fields(model, loaded) == set()


def test_auto_classes_know_the_model(saved):
    model, folder = saved
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is OdeViTConfig
    classifier = AutoModelForImageClassification.from_pretrained(folder)
    assert type(classifier) is OdeViTForImageClassification
    assert same_weights(model, classifier)
    base = AutoModel.from_pretrained(folder)
    assert type(base) is OdeViTModel
    assert same_weights(model.odevit, base)
    assert type(AutoModelForImageClassification.from_config(config)) is OdeViTForImageClassification


def test_the_flow_alone_can_be_saved_and_gets_a_new_head(saved, tmp_path):
    model, _ = saved
    model.odevit.save_pretrained(tmp_path / "flow")
    assert same_weights(model.odevit, OdeViTModel.from_pretrained(tmp_path / "flow"))
    classifier = OdeViTForImageClassification.from_pretrained(tmp_path / "flow")
    assert same_weights(model.odevit, classifier.odevit)
    assert classifier.classifier.weight.std().item() == pytest.approx(0.02, rel=0.3)


def test_config_fields_can_be_changed_on_loading(saved):
    model, folder = saved
    loaded = OdeViTForImageClassification.from_pretrained(folder, num_steps=9, solver="heun")
    assert loaded(tiny_images()).evaluations == (18, 18)
    assert torch.equal(loaded(tiny_images()).logits, model(tiny_images(), num_steps=9, solver="heun").logits)


def test_another_number_of_labels_on_loading(saved):
    model, folder = saved
    for load in (OdeViTForImageClassification, AutoModelForImageClassification):
        loaded = load.from_pretrained(folder, num_labels=7, ignore_mismatched_sizes=True)
        assert loaded(tiny_images()).logits.shape == (3, 7)
        assert same_weights(model.odevit, loaded.odevit)
        assert loaded.classifier.weight.std().item() == pytest.approx(0.02, rel=0.3)
        assert len(loaded.config.id2label) == 7
    with pytest.raises(ValueError, match="ignore_mismatched_sizes"):
        OdeViTForImageClassification.from_pretrained(folder, num_labels=7)


@pytest.mark.parametrize("options", [{}, {"spectral_cap": 0.7}])
def test_deep_copies_are_equal_and_independent(options):
    model = perturbed(**options)
    other = copy.deepcopy(model)
    assert torch.equal(other(tiny_images()).logits, model(tiny_images()).logits)
    nn.init.zeros_(other.classifier.weight)
    assert model.classifier.weight.abs().max() > 0


def test_pickling_keeps_every_bit():
    model = perturbed(tokenizer="conv")
    other = pickle.loads(pickle.dumps(model))
    assert same_weights(model, other)
    assert torch.equal(other(tiny_images()).logits, model(tiny_images()).logits)


# --- another image size -----------------------------------------------------------------------------------------------


def through_config(auto):
    def load(folder):
        config = AutoConfig.from_pretrained(folder, image_size=24)
        model = auto.from_pretrained(folder, config=config)
        assert config.image_size == 24  # the caller's config is left as it was
        return model

    return load


def resized(folder):
    model = OdeViTForImageClassification.from_pretrained(folder)
    model.resize_images(24)
    return model


LOADERS = {
    "class": lambda folder: OdeViTForImageClassification.from_pretrained(folder, image_size=24),
    "base class": lambda folder: OdeViTModel.from_pretrained(folder, image_size=24),
    "AutoModelForImageClassification": lambda folder: AutoModelForImageClassification.from_pretrained(
        folder, image_size=24
    ),
    "AutoModel": lambda folder: AutoModel.from_pretrained(folder, image_size=24),
    "class with config": through_config(OdeViTForImageClassification),
    "AutoModelForImageClassification with config": through_config(AutoModelForImageClassification),
    "AutoModel with config": through_config(AutoModel),
    "resize_images": resized,
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_every_path_loads_at_another_image_size(load, saved):
    model, folder = saved
    other = load(folder)
    base = getattr(other, "odevit", other)
    assert other.config.image_size == base.config.image_size == 24
    assert torch.equal(base.positions, interpolate_positions(model.odevit.positions, (4, 4), (6, 6)))
    images = tiny_images(size=24)
    expected = model(images, interpolate_pos_encoding=True, output_hidden_states=True)
    assert torch.equal(other(images, output_hidden_states=True).hidden_states[-1], expected.hidden_states[-1])
    assert changed_fields(model, other) == {"image_size"}

    other.save_pretrained(folder / "again")
    again = type(other).from_pretrained(folder / "again")
    assert json.loads((folder / "again" / "config.json").read_text())["image_size"] == 24
    assert AutoImageProcessor.from_pretrained(folder / "again").crop_size == {"height": 24, "width": 24}
    assert same_weights(other, again)


def test_resizing_keeps_frozen_positions_frozen_and_refuses_half_patches():
    model = tiny_model()
    model.odevit.positions.requires_grad_(False)
    model.resize_images(32)
    assert not model.odevit.positions.requires_grad
    with pytest.raises(ValueError, match="4 does not divide 30; use image_size=32"):
        model.resize_images(30)
    assert model.config.image_size == 32


# --- damaged folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto", [OdeViTForImageClassification, AutoModelForImageClassification])
def test_truncated_weights_name_the_folder(auto, saved):
    file = saved[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(OSError, match=f"{saved[1].name} are corrupt or incomplete.*again"):
        auto.from_pretrained(saved[1])


@pytest.mark.parametrize("name", ["odevit.fields.0.attention.query.weight", "classifier.weight", "norm.bias"])
def test_missing_tensors_are_named(name, saved):
    file = saved[1] / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(OSError, match=rf"{saved[1].name} lack 1 tensor\(s\) of this model: {name}$"):
        OdeViTForImageClassification.from_pretrained(saved[1])


def test_a_missing_file_is_named(saved):
    (saved[1] / "model.safetensors").unlink()
    with pytest.raises(OSError, match=f"model.safetensors.*{saved[1].name}"):
        OdeViTForImageClassification.from_pretrained(saved[1])


@pytest.mark.parametrize("auto", [OdeViTForImageClassification, AutoModelForImageClassification, AutoConfig])
def test_configs_of_a_newer_version_ask_for_an_upgrade(auto, saved):
    file = saved[1] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 99}))
    with pytest.raises(ValueError, match=r"format 99 by a newer odevit.*pip install -U odevit"):
        auto.from_pretrained(saved[1])


# --- image processor and pipeline -------------------------------------------------------------------------------------


def picture(mode="RGB", size=(24, 20)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def test_the_processor_resizes_and_normalises_as_the_config_says(saved):
    model, folder = saved
    processor = AutoImageProcessor.from_pretrained(folder)
    assert type(processor) is type(model.image_processor())
    assert processor.to_dict() == model.image_processor().to_dict()
    middle = picture().resize((19, 16), Image.Resampling.BICUBIC).crop((1, 0, 17, 16))  # 24 × 20, not squashed
    pixels = np.asarray(middle, dtype=np.float32) / 255
    expected = (pixels - [0.4, 0.5, 0.6]) / [0.2, 0.3, 0.25]
    result = processor(picture(), return_tensors="pt").pixel_values
    assert torch.allclose(result[0].permute(1, 2, 0), torch.tensor(expected, dtype=torch.float32), atol=1e-5)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_processor_takes_pictures_of_every_mode(channels, mode):
    result = tiny_model(num_channels=channels).image_processor()(picture(mode), return_tensors="pt").pixel_values
    assert result.shape == (1, channels, 16, 16)


@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (3, "L"), (1, "L"), (1, "RGB")])
def test_pipeline_gives_the_models_probabilities(channels, mode, tmp_path):
    model = perturbed(num_channels=channels, id2label={i: f"class {i}" for i in range(5)})
    model.save_pretrained(tmp_path)
    answers = pipeline("image-classification", model=str(tmp_path))(picture(mode))
    grey_or_color = picture(mode).convert("RGB").convert("L" if channels == 1 else "RGB")
    images = model.image_processor()(grey_or_color, return_tensors="pt").pixel_values
    with torch.no_grad():
        probabilities = model(images).logits[0].softmax(-1)
    assert len(answers) == 5
    assert [a["score"] for a in answers] == sorted((a["score"] for a in answers), reverse=True)
    for answer in answers:
        assert answer["score"] == pytest.approx(
            probabilities[int(answer["label"].removeprefix("class "))].item(), abs=1e-5
        )


# --- Trainer ----------------------------------------------------------------------------------------------------------


class RandomImages(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"pixel_values": tiny_images(1, seed=index)[0], "labels": index % 5}


def trainer(folder, **options):
    arguments = TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=8, learning_rate=1e-3, save_steps=3, logging_steps=1,
        use_cpu=True, report_to=[], seed=3, disable_tqdm=True, **options,
    )  # fmt: skip

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    return Trainer(
        tiny_model(dropout=0.1, drop_path=0.1, tokenizer="conv"),
        arguments,
        train_dataset=RandomImages(),
        eval_dataset=RandomImages(),
        compute_metrics=accuracy,
    )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_evaluates_saves_and_resumes_exactly(checkpointing, tmp_path):
    whole = trainer(tmp_path / "run", gradient_checkpointing=checkpointing)
    before = copy.deepcopy(whole.model.state_dict())
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert 0.5 < losses[0] < 3  # cross-entropy over five classes starts near log 5
    assert all(not torch.equal(before[name], p) for name, p in whole.model.named_parameters())
    metrics = whole.evaluate()
    with torch.no_grad():
        images, labels = torch.cat([tiny_images(1, seed=i) for i in range(16)]), torch.arange(16) % 5
        logits = whole.model.eval()(images).logits
    assert metrics["eval_loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), abs=1e-5)
    assert metrics["eval_accuracy"] == (logits.argmax(-1) == labels).float().mean().item()

    torch.manual_seed(99)
    resumed = trainer(tmp_path / "run", gradient_checkpointing=checkpointing)
    (tmp_path / "run" / "checkpoint-6").rename(tmp_path / "checkpoint-6")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert same_weights(whole.model, resumed.model)
    assert same_weights(whole.model, OdeViTForImageClassification.from_pretrained(tmp_path / "checkpoint-6"))
