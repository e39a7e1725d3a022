"""What `odevit plan` says, against what a run really does."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tiny_distillations import recipe_of
from tiny_runs import tiny_recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetConfig, ResNetForImageClassification

import odevit.distill.plan
from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.commands.plan import find_source, plan
from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.distill.answers import build_answers
from odevit.distill.objective import build
from odevit.distill.plan import (
    Source,
    activation_bytes,
    build_stand_ins,
    cache_bytes,
    images_per_second,
    make_plan,
    mean_macs,
    schedule_shares,
    stand_in_teacher,
    state_bytes,
)
from odevit.dynamics.cost import count_macs
from odevit.teachers.preprocessing import wanted_by_saved
from odevit.teachers.teacher import tiny_teacher
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
    numbers = make_plan(recipe, find_source(recipe.data))
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
        {"cache": "cls", "augment": {"crop": 1}, "image_size": 16},  # views are kept at the data's own size
    ],
)
def test_the_cache_has_the_size_that_was_planned(options, teacher_folder, data, tmp_path):
    options = dict(options)
    side = options.pop("image_size", None)
    recipe = recipe_of(tmp_path, teacher_folder, losses={"kl": 1.0}, **options)
    recipe.data.image_size = side
    student, objective = build(recipe, data)
    planned = cache_bytes(recipe, Source(len(data.train), 8, 1, 10), student, objective.teacher)
    assert planned == bytes_in(tmp_path / "cache")


def bytes_in(cache):
    """Of all rows, without the headers of the files."""
    return sum(np.load(path, mmap_mode="r").nbytes for path in cache.glob("*/*.npy"))


def resnet_in(folder):
    config = ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=10)
    ResNetForImageClassification(config).save_pretrained(folder)
    return str(folder)


def test_answers_to_extra_images_are_planned(tmp_path, monkeypatch):
    """Rows, epoch and cache of a run whose teacher, a ResNet, answers two views of two data sets."""
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", lambda *_: 10.0)
    monkeypatch.setattr(odevit.distill.plan, "answers_per_second", lambda *_: 100.0)
    options = {"match": "answers", "cache": "logits", "cache_views": 2, "extra_images": "digits"}
    recipe = recipe_of(tmp_path, resnet_in(tmp_path / "resnet"), losses={"kl": 1.0}, augment={"crop": 1}, **options)
    recipe.data.limit, recipe.model = 96, {"patch_size": 4, "hidden_size": 16, "num_attention_heads": 2}
    numbers = plan(write(recipe, tmp_path), as_json=True)
    data = load_data(recipe.data)
    _, objective = build_answers(recipe, data)
    assert (numbers["images"], numbers["extra_images"]) == (len(data.train), 96)
    assert numbers["cache"] == bytes_in(tmp_path / "cache")
    rows = len(objective.training_data(data).train)
    assert numbers["macs_per_epoch"] == numbers["macs_per_image"] * rows
    assert numbers["teacher_hours_here"] == pytest.approx(2 * (96 + 96) / 100 / 3600)
    assert numbers["hours_here"] == pytest.approx(recipe.optim.steps * recipe.optim.batch_size / 10 / 3600)


def pictures_in(folder, count, size):
    """In ten classes, none of them a square."""
    for index in range(count):
        path = folder / str(index % 10) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(index).integers(0, 255, (size + index % 3, size - 2, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return str(folder)


def test_pictures_of_any_size_are_planned_as_their_teacher_is_shown_them(tmp_path, monkeypatch, capsys):
    """Of its size, not of the student's; and an epoch ends with the extra images when they are fewer."""
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", lambda *_: 10.0)
    monkeypatch.setattr(odevit.distill.plan, "answers_per_second", lambda *_: 100.0)
    tiny_teacher("vit", image_size=16, patch_size=8).module.save_pretrained(tmp_path / "vit")
    options = {"match": "answers", "cache": "logits", "extra_images": pictures_in(tmp_path / "more", 20, 30)}
    recipe = recipe_of(tmp_path, str(tmp_path / "vit"), losses={"kl": 1.0}, augment={"crop": 1}, **options)
    recipe.data.name, recipe.data.limit = pictures_in(tmp_path / "images", 60, 20), None
    recipe.model = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_attention_heads": 2}
    numbers = plan(write(recipe, tmp_path), as_json=True)
    data = load_data(recipe.data, wanted=wanted_by_saved(recipe.distill.teacher))
    _, objective = build_answers(recipe, data)
    assert numbers["cache"] == bytes_in(tmp_path / "cache")
    assert numbers["macs_per_epoch"] == numbers["macs_per_image"] * len(objective.training_data(data).train)


def test_a_teacher_of_the_zoo_is_here_and_one_that_is_not_is_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", lambda *_: 10.0)
    monkeypatch.setattr(odevit.distill.plan, "answers_per_second", lambda *_: 100.0)
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(tmp_path, "digits", match="answers", cache="logits", losses={"kl": 1.0})
    recipe.model = {"patch_size": 4, "hidden_size": 16, "num_attention_heads": 2}
    assert plan(write(recipe, tmp_path))["teacher_hours_here"] == pytest.approx(320 / 100 / 3600)
    recipe.distill.teacher = "runs/not-yet/model"
    capsys.readouterr()
    assert plan(write(recipe, tmp_path), device_tflops=1)["teacher_hours_here"] is None
    assert "not counted: it is not here" in capsys.readouterr().out
    assert plan("answers", ["model.image_size=32", "model.patch_size=4"], data="digits")["teacher_hours_here"] is None


def test_the_stand_in_of_a_teacher_is_shown_images_of_the_teachers_size(tmp_path):
    """A CNN those that are kept, a ViT its own, whatever data.image_size says."""
    recipe = recipe_of(tmp_path, resnet_in(tmp_path / "resnet"), match="answers", cache="logits", losses={"kl": 1.0})
    recipe.data.image_size, recipe.model = 16, {"patch_size": 4, "hidden_size": 16, "num_attention_heads": 2}
    _, objective = build_answers(recipe, load_data(recipe.data))
    assert build_stand_ins(recipe, find_source(recipe.data))[1].image_size == objective.teacher.image_size == 8
    recipe.distill.teacher = "facebook/deit-tiny-patch16-224"
    assert build_stand_ins(recipe, find_source(recipe.data))[1].image_size == 224


def test_the_time_is_that_of_a_model_in_training(tmp_path):
    """A pretrained one comes in eval mode, without its dropout."""
    model, seen = tiny().eval(), []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    images_per_second(model, None, tiny_recipe(tmp_path), 1e9, seconds=0)
    assert all(seen)


def write(recipe, folder):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(asdict(recipe)))
    return str(folder / "recipe.yaml")


def test_minutes_are_turned_into_epochs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", lambda *_: 10.0)
    numbers = plan(write(tiny_recipe(tmp_path, optim={"minutes": 3}), tmp_path))
    assert numbers["hours_here"] == 3 / 60
    assert numbers["epochs_here"] == pytest.approx(3 * 60 * 10 / 640)
    assert numbers["epochs"] is None
    assert "2.8 in the recipe's minutes" in capsys.readouterr().out


def test_minutes_are_turned_into_hours_of_another_device(tmp_path, monkeypatch, capsys):
    """It works through as many images as the minutes are enough for here."""
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", lambda *_: 10.0)
    numbers = plan(write(tiny_recipe(tmp_path, optim={"minutes": 3}), tmp_path), device_tflops=2, processes=4)
    work = 2 * numbers["macs_per_image"] * 3 * 60 * 10
    assert numbers["hours_there"] == pytest.approx(work / (4 * 2e12 * numbers["utilisation"]) / 3600)
    assert "hours on 4 × 2 TFLOPS" in capsys.readouterr().out


def test_a_plan_counts_the_images_that_are_trained_on():
    """Without those held out, and within the limit."""
    assert find_source(DataConfig(name="uoft-cs/cifar10", val_fraction=0.02)).images == 49_000
    assert find_source(DataConfig(name="uoft-cs/cifar10", limit=100)).images == 100
    assert find_source(DataConfig(name="ILSVRC/imagenet-1k")).images == 1_281_167


def test_each_number_of_steps_counts_with_its_share(monkeypatch):
    """One step for three quarters of the run, seven for the rest, each as long as its evaluations: 2.5 on average."""
    recipe = tiny_recipe(Path("run"), loop={"step_schedule": [[0, 1], [0.75, 7]]}, optim={"batch_size": 4})
    model, clock = tiny(), []
    model.register_forward_pre_hook(lambda *call: clock.append(call[2]["num_steps"]), with_kwargs=True)
    monkeypatch.setattr(odevit.distill.plan, "seconds_of", lambda step, _: step() or clock[-1])
    assert images_per_second(model, None, recipe, 1e6) == pytest.approx(4 / 2.5)


@pytest.mark.slow
def test_imagenet_with_dinov2_base_is_planned_without_either(capsys, monkeypatch):
    monkeypatch.setattr(odevit.distill.plan, "images_per_second", lambda *_: 1.0)
    monkeypatch.setattr(odevit.distill.plan, "answers_per_second", lambda *_: 2.0)
    numbers = plan("imagenet/dinov2-base", device_tflops=300, processes=8)
    printed = capsys.readouterr().out.replace("│", " ").split()
    page = (Path(__file__).parents[2] / "docs/distil.md").read_text()
    shown = page.split("odevit plan imagenet/dinov2-base --device-tflops 300 --processes 8\n\n")[1].split("\n\n")[0]
    assert len(rows := shown.splitlines()) == 9
    assert [row for row in rows if " ".join(row.split()) not in " ".join(printed)] == []
    assert numbers["teacher_parameters"] == pytest.approx(86.6e6, rel=0.03)
    assert numbers["macs_per_image"] > 4 * 4 * 261 * 6 * 768**2  # forward, backward twice, recomputed; 4 steps at least
    assert numbers["cache"] == 1_281_167 * (13 * 768 * 2 + 196 + 8)  # CLS path in half precision, 32 logits, label
    assert numbers["cache_per_process"] == numbers["cache"] / 8
    assert numbers["hours_here"] == pytest.approx(30 * 1_281_167 / 3600)
    assert numbers["teacher_hours_here"] == pytest.approx(1_281_167 / 2 / 3600)
    work = 2 * numbers["macs_in_all"] / (8 * 300e12 * numbers["utilisation"])
    assert numbers["hours_there"] == pytest.approx(work / 3600)


@pytest.mark.parametrize(("macs", "images"), [(1e6, 64), (10e9, 5), (200e9, 1)])
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
