"""What the model and its config say to wrong input: what must hold, what came, what to do."""

import pytest
import torch
from problems import TINY, tiny_images, tiny_model

from odevit import PRESETS, SOLVERS, OdeViTConfig, OdeViTForImageClassification
from odevit.model.config import own_fields
from odevit.model.layers import ATTENTIONS, NORMS, TOKENIZERS


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 1, 16, 16), r"\(batch, 3, height, width\), got \(2, 1, 16, 16\).*convert\('RGB'\)"),
        (torch.zeros(3, 16, 16), r"\(batch, 3, height, width\), got \(3, 16, 16\)"),
        (torch.zeros(2, 3, 20, 24), "expected 16×16 images, got 20×24; resize.*image_processor.*interpolate_pos_enc"),
        (None, "pixel_values is missing"),
    ],
)
def test_wrong_images_say_what_is_expected_and_what_to_do(images, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(images)


def test_grey_models_say_how_to_get_one_channel():
    with pytest.raises(ValueError, match=r"takes 1 channel.*convert\('L'\)"):
        tiny_model(num_channels=1)(tiny_images())


@pytest.mark.parametrize("size", [(18, 16), (16, 2)])
def test_interpolation_still_needs_whole_patches(size):
    with pytest.raises(ValueError, match=f"multiples of 4, got {size[0]}×{size[1]}"):
        tiny_model()(torch.zeros(1, 3, *size), interpolate_pos_encoding=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"solver": "rk5"}, f"'rk5'.*{', '.join(SOLVERS)}, dopri5"),
        ({"norm": "batch"}, f"unknown norm 'batch'.*{', '.join(NORMS)}"),
        ({"final_norm": "batch"}, f"unknown final_norm 'batch'.*{', '.join(NORMS)}"),
        ({"attention": "linear"}, f"unknown attention 'linear'.*{', '.join(ATTENTIONS)}"),
        ({"tokenizer": "words"}, f"unknown tokenizer 'words'.*{', '.join(TOKENIZERS)}"),
        ({"num_attention_heads": 5}, "5 heads do not divide width 32"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive and finite, got 0"),
        ({"patch_size": 0}, "patch_size must be positive"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"num_fields": 5}, "5 fields need at least one step each, got num_steps=4"),
        ({"num_fields": 0}, "num_fields must be positive"),
        ({"num_registers": -1}, "num_registers must be 0 or more, got -1"),
        ({"patch_size": 5}, "5 does not divide 16; use image_size=15"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"drop_path": -0.1}, "drop_path must be"),
        ({"depth": 0}, "depth must be positive"),
        ({"horizon": -1.0}, "horizon must be positive"),
        ({"spectral_cap": 0.0}, "spectral_cap must be positive or None"),
        ({"image_mean": [0.5]}, r"image_mean needs one value per channel \(3\)"),
        ({"format_version": 3}, "format 3 by a newer odevit.*up to 2.*pip install -U odevit"),
    ],
)
def test_impossible_configs_say_what_must_hold(fields, message):
    with pytest.raises(ValueError, match=message):
        OdeViTConfig(**{**TINY, **fields})


def test_conv_models_need_a_power_of_two():
    with pytest.raises(ValueError, match="power of two as patch_size, got 6"):
        tiny_model(tokenizer="conv", patch_size=6, image_size=24)


@pytest.mark.parametrize(("call", "message"), [({"solver": "rk5"}, "choose one of euler"), ({"num_steps": 0}, "got 0")])
def test_wrong_calls_say_what_must_hold(call, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(tiny_images(), **call)


def test_fewer_steps_than_fields_at_the_call():
    with pytest.raises(ValueError, match="3 fields need at least one step each, got num_steps=2"):
        tiny_model(num_fields=3)(tiny_images(), num_steps=2)


def test_unknown_presets_and_fields_list_the_valid_ones():
    with pytest.raises(ValueError, match=f"unknown preset 'vit'; choose one of {', '.join(PRESETS)}"):
        OdeViTForImageClassification.from_preset("vit")
    with pytest.raises(ValueError, match=f"unknown config field 'hiden_size'; valid fields: {', '.join(own_fields())}"):
        OdeViTForImageClassification.from_preset("cifar-nano", hiden_size=3)
    assert OdeViTForImageClassification.from_preset("cifar-nano", num_labels=7).classifier.out_features == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"spectral_cap": float("nan")},
        {"layer_norm_eps": -1.0},
        {"feature_times": [float("nan")]},
        {"image_std": [0.5, -0.5, 0.5]},
    ],
)
def test_numbers_that_would_fail_later_are_refused_at_once(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        OdeViTConfig(**{**TINY, **fields})
