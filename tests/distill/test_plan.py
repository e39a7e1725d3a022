"""What `odevit plan` says, against what a run really does."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from tiny_distillations import recipe_of
from tiny_runs import tiny_recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import odevit.distill.plan
from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.commands.plan import plan
from odevit.commands.train import train_recipe
from odevit.data import load_data
from odevit.distill.objective import build
from odevit.distill.plan import (
    SOURCES,
    Source,
    activation_bytes,
    cache_bytes,
    images_per_second,
    make_plan,
    mean_macs,
    schedule_shares,
    stand_in_teacher,
    state_bytes,
)
from odevit.dynamics.cost import count_macs
from odevit.training.config import LoopConfig, OptimConfig


def tiny():
    return OdeViTForImageClassification(
        OdeViTConfig(image_size=8, patch_size=2, num_channels=1, hidden_size=16, num_attention_heads=2, num_steps=3)
    )


@pytest.mark.slow
def test_the_schedule_is_weighted_by_its_share_of_the_steps():
    loop = LoopConfig(step_schedule=[(0.0, 2), (0.25, [4, 6, "heun 3"])])
    assert schedule_shares(loop) == [(2, None, 0.25), (4, None, 0.25), (6, None, 0.25), (3, "heun", 0.25)]
    model = tiny()
    settings = [(2, "euler"), (4, "euler"), (6, "euler"), (3, "heun")]
    expected = sum(count_macs(model, num_steps=k, solver=s).total for k, s in settings) / 4
    assert mean_macs(model, loop) == pytest.approx(expected)
    assert mean_macs(model, LoopConfig()) == count_macs(model).total


def test_a_training_step_costs_three_forward_passes():
    """Counted by torch: forward and backward of the whole model."""
    model, images = tiny().train(), torch.randn(4, 1, 8, 8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images).logits.sum().backward()
    assert counter.get_total_flops() / 2 / 4 == pytest.approx(3 * count_macs(model).total, rel=0.1)


def test_kept_activations_grow_with_steps_and_leave_out_the_weights():
    model, images = tiny().train(), torch.randn(2, 1, 8, 8)
    two, four, eight = (activation_bytes(model, images, k) for k in (2, 4, 8))
    assert eight - four == pytest.approx(2 * (four - two), rel=0.05)
    state = 4 * 17 * 16  # one state of one image in bytes
    assert 10 * state < (four - two) / 2 < 60 * state
    assert all(p.grad is None for p in model.parameters())


def test_state_of_the_optimisers():
    adamw, muon = OptimConfig(steps=1), OptimConfig(steps=1, name="muon", ema=0.9)
    assert state_bytes(10, 100, adamw) == 4 * (100 + 10 * 3)
    assert state_bytes(10, 100, muon) == 4 * (100 + 10 * 3)


@pytest.mark.slow
def test_a_plan_of_a_run_that_then_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", partial(images_per_second, seconds=0.1))
    recipe = tiny_recipe(tmp_path / "run", data={"limit": None})
    numbers = make_plan(recipe, SOURCES["digits"])
    result = train_recipe(recipe, progress_bar=False)
    assert numbers["images"] == len(load_data(recipe.data).train)
    assert numbers["parameters"] == result.metrics["parameters"]
    assert numbers["epochs"] == pytest.approx(result.metrics["epochs"], rel=0.03)
    assert numbers["images_per_second_here"] > 0
    assert numbers["cache"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "cls"},
        {"cache": "cls", "cache_top": 3, "augment": {"crop": 1}, "cache_views": 2},
        {"cache": "all", "cache_top": 3, "cache_shards": 2},
    ],
)
def test_the_cache_has_the_size_that_was_planned(options, teacher_folder, data, tmp_path):
    recipe = recipe_of(tmp_path, teacher_folder, losses={"kl": 1.0}, **options)
    student, objective = build(recipe, data)
    planned = cache_bytes(recipe, Source(len(data.train), 8, 1, 10), student, objective.teacher)
    columns = [np.load(path, mmap_mode="r") for path in tmp_path.glob("cache/*/*.npy")]
    assert planned == sum(column.nbytes for column in columns)


@pytest.mark.slow
def test_imagenet_with_dinov2_base_is_planned_without_either(capsys, monkeypatch):
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", lambda *_: 1.0)
    numbers = plan("imagenet/dinov2-base", device_tflops=300, processes=8, as_json=True)
    assert json.loads(capsys.readouterr().out)["processes"] == 8
    assert numbers["teacher_parameters"] == pytest.approx(86.6e6, rel=0.03)
    assert numbers["macs_per_image"] > 4 * 4 * 261 * 6 * 768**2  # forward, backward twice, recomputed; 4 steps at least
    assert numbers["cache"] == 1_281_167 * (13 * 768 * 2 + 196 + 8)  # CLS path in half precision, 32 logits, label
    assert numbers["cache_per_process"] == numbers["cache"] / 8
    assert numbers["hours_here"] == pytest.approx(30 * 1_281_167 / 3600)
    work = 2 * numbers["macs_in_all"] / (8 * 300e12 * numbers["utilisation"])
    assert numbers["hours_there"] == pytest.approx(work / 3600)


@pytest.mark.parametrize(("macs", "images"), [(1e6, 32), (10e9, 5), (200e9, 1)])
def test_a_batch_whose_time_is_taken_is_smaller_for_a_larger_model(macs, images, tmp_path):
    model, seen = tiny(), []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    images_per_second(model, None, tiny_recipe(tmp_path), macs, seconds=0.0)
    assert set(seen) == {images}


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="facebook/dinov2-base"):
        stand_in_teacher("someone/vit", 224, 10)
    with pytest.raises(ValueError, match="ILSVRC/imagenet-1k"):
        plan("digits", ["data.name=someone/data"])
    with pytest.raises(ValueError, match="must be positive"):
        plan("digits", processes=0)
