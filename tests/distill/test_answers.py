"""Distillation of answers: any classifier teaches a student of any shape."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from odevit.commands.distill import distill_recipe
from odevit.data import DataConfig, load_data, prepare
from odevit.distill.answers import AnswerDistillation, extra_images
from odevit.distill.answers import build_answers as build
from odevit.distill.objective import DistillConfig
from odevit.recipe import Recipe
from odevit.training.evaluation import model_input
from odevit.training.integration import Integration


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A tiny random ResNet, which sees digits at 16 px in its own normalisation."""
    torch.manual_seed(0)
    config = ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=10)
    config.image_size = 16
    folder = tmp_path_factory.mktemp("resnet")
    ResNetForImageClassification(config).eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.3], "image_std": [0.4]}))
    return str(folder)


def recipe(folder, teacher, **distill):
    return Recipe.from_dict(
        {
            "task": "distill",
            "output": str(folder / "run"),
            "model": {"patch_size": 4, "hidden_size": 16, "num_attention_heads": 2, "depth": 2, "num_steps": 2},
            "data": {"name": "digits", "limit": 96},
            "augment": {"crop": 1},
            "optim": {"steps": 2, "batch_size": 32},
            "distill": {
                "teacher": teacher, "match": "answers", "losses": {"kl": 1.0}, "cache_folder": str(folder / "cache"),
                **distill,
            },
        }
    )  # fmt: skip


def test_the_teacher_gets_its_own_size_and_normalisation(tmp_path, teacher):
    data = load_data(DataConfig(name="digits", limit=96))
    student, objective = build(recipe(tmp_path, teacher), data)
    pixels = data.train.fetch(torch.arange(4))[0]
    with torch.no_grad():
        expected = objective.teacher.module(prepare(pixels.float() / 255, 16, [0.3], [0.4])).logits
    answers = objective.answers(student, model_input(student, pixels), torch.arange(4))
    assert torch.allclose(answers, expected, atol=1e-4)


def test_cached_answers_are_those_of_the_cached_views(tmp_path, teacher):
    data = load_data(DataConfig(name="digits", limit=96))
    student, objective = build(recipe(tmp_path, teacher, cache="logits", cache_views=3), data)
    views = objective.training_data(data).train
    assert len(views) == 3 * len(data.train)
    rows = torch.tensor([1, len(data.train) + 1])
    pixels = views.fetch(rows)[0]
    assert not torch.equal(pixels[0], pixels[1])  # two views of one image
    online = AnswerDistillation(objective.teacher, objective.config)
    cached = objective.answers(student, model_input(student, pixels), rows)
    assert torch.allclose(cached, online.answers(student, model_input(student, pixels), rows), atol=2e-2)
    assert (cached[0] - cached[1]).abs().max() > 1e-4


def test_losses_are_kl_and_cross_entropy_with_gradients(tmp_path, teacher):
    data = load_data(DataConfig(name="digits", limit=96))
    student, objective = build(recipe(tmp_path, teacher, losses={"kl": 2.0, "cross_entropy": 0.5}), data)
    pixels, labels = data.train.fetch(torch.arange(8))
    images, targets = model_input(student, pixels), torch.eye(10)[labels]
    terms = objective(student, images, targets, torch.arange(8), progress=0.5, integration=Integration(3))
    assert terms.evaluations == 3
    with torch.no_grad():
        logits, answers = student(images, num_steps=3).logits, objective.answers(student, images, torch.arange(8))
        p = answers.softmax(1)
        kl = (p * (p.log() - logits.log_softmax(1))).sum(1).mean()
    assert terms.losses["kl"].item() == pytest.approx(2 * kl.item(), rel=1e-4)
    sum(terms.losses.values()).backward()
    assert all(p.grad.abs().max() > 0 for n, p in student.named_parameters() if p.numel())


@pytest.mark.slow
def test_distill_runs_to_its_end_and_compares(tmp_path, teacher):
    result = distill_recipe(recipe(tmp_path, teacher, cache="logits"), report=None, progress_bar=False)
    comparison = json.loads((result.folder / "comparison.json").read_text())
    assert comparison["certified_agreement"] is None
    assert comparison["note"] == "this teacher only answers"
    assert 0 <= comparison["agreement"] <= 1
    assert comparison["teacher"]["macs"] > 0


@pytest.mark.slow
def test_extra_images_teach_without_labels(tmp_path, teacher):
    """Half of a batch each; the answers are those of the images; the cache without them is read again, not built."""
    data = load_data(DataConfig(name="digits", limit=96))
    _, alone = build(recipe(tmp_path, teacher, cache="logits"), data)
    folders = {path.name for path in (tmp_path / "cache").iterdir()}
    student, objective = build(recipe(tmp_path, teacher, cache="logits", extra_images="digits"), data)
    added = {path.name for path in (tmp_path / "cache").iterdir()} - folders
    assert len(added) == 1
    split = objective.training_data(data).train
    assert len(split) == 2 * len(alone.training_data(data).train) < 2 * len(extra_images(data.train, "digits"))
    rows = split.order(32, torch.Generator().manual_seed(0))[:32]
    assert ((rows < len(data.train)).sum(), len(rows)) == (16, 32)
    images, labels = split.fetch(rows)
    assert set(labels[16:].tolist()) == {0}
    with torch.no_grad():
        expected = objective.teacher.module(prepare(images, 16, [0.3], [0.4])).logits
    assert torch.allclose(objective.answers(student, images, rows), expected, atol=1e-4)
    told = [
        kind(
            student,
            model_input(student, images[:2]),
            torch.eye(10)[:2],
            rows[:2],
            progress=0.5,
            integration=Integration(2),
        )
        for kind in (alone, objective)
    ]
    assert told[0].logits is not None
    assert told[1].logits is None  # half of the labels are made up: no accuracy of these is shown


def test_runs_of_other_seeds_may_share_a_cache(tmp_path, teacher):
    data = load_data(DataConfig(name="digits", limit=64))

    def logits(seed, **fields):
        plan = dataclasses.replace(recipe(tmp_path, teacher, cache="logits", **fields), seed=seed)
        return build(plan, data)[1].cache.logits

    assert not torch.equal(logits(0), logits(1))
    assert torch.equal(logits(0), logits(1, cache_seed=0))
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"losses": {"cls_path": 1.0}}, "cls_path compares states"),
        (
            {"extra_images": "digits", "cache": "logits", "losses": {"kl": 1.0, "cross_entropy": 1.0}},
            "no labels of these classes",
        ),
        ({"extra_images": "digits"}, "extra_images is for distill.match: answers with distill.cache: logits"),
    ],
)
def test_impossible_plans_are_refused(tmp_path, teacher, fields, message):
    with pytest.raises(ValueError, match=message):
        build(recipe(tmp_path, teacher, **fields), load_data(DataConfig(name="digits", limit=96)))


@pytest.mark.parametrize("fields", [{"match": "answers", "cache": "all"}, {"match": "path", "cache": "logits"}])
def test_caches_that_do_not_fit_are_refused(fields):
    with pytest.raises(ValueError, match="does not go with"):
        DistillConfig(**fields)


def test_a_classifier_that_says_no_size_gets_the_images_as_they_are(tmp_path):
    config = ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=10)
    ResNetForImageClassification(config).eval().save_pretrained(tmp_path / "resnet")
    data = load_data(DataConfig(name="digits", limit=96))
    student, objective = build(recipe(tmp_path, str(tmp_path / "resnet")), data)
    assert objective.teacher.image_size == 8
    assert objective.answers(student, torch.zeros(2, 1, 8, 8), torch.arange(2)).shape == (2, 10)


def test_extra_images_of_another_size_are_brought_to_that_of_the_others(tmp_path):
    from PIL import Image

    for name in "ab":
        (tmp_path / name).mkdir()
        for index in range(4):
            Image.new("L", (16, 16), 50 * index).save(tmp_path / name / f"{index}.png")
    more = extra_images(load_data(DataConfig(name="digits", limit=96)).train, str(tmp_path))
    assert more.images.shape[1:] == (1, 8, 8)
    assert more.images.dtype == torch.uint8


def test_extra_images_are_as_few_as_the_others_may_be(tmp_path, teacher):
    plan = recipe(tmp_path, teacher, cache="logits", extra_images="digits")
    _, objective = build(plan, load_data(plan.data))
    assert len(objective.cache.split) == 2 * 96
    rows = sum(len(np.load(path)) for path in tmp_path.glob("cache/*/labels.npy"))
    assert rows == 2 * 96


@pytest.mark.parametrize("name", ["run", "run/model", "digits"])
def test_the_classes_of_a_teacher_are_those_of_the_model_that_answers(name, tmp_path, monkeypatch):
    """Of a run's folder, of the model in it, and of a model of the zoo; the data is read in their order."""
    names = [str(i) for i in range(10)]
    if name != "digits":
        names = names[::-1]
        config = ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=10)
        config.id2label = dict(enumerate(names))
        ResNetForImageClassification(config).save_pretrained(tmp_path / "run" / "model")
        name = str(tmp_path / name)
    seen = []

    def load(config, wanted):
        seen.append(wanted.class_names)
        raise InterruptedError

    monkeypatch.setattr("odevit.commands.distill.load_data", load)
    with pytest.raises(InterruptedError):
        distill_recipe(recipe(tmp_path / "student", name, cache="logits"), report=None, progress_bar=False)
    assert seen == [names]
