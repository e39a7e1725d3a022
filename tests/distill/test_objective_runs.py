"""Whole distillations on digits: their stages, what they write, caches, and resuming."""

import pytest
import torch
import torch.nn.functional as nnf
from safetensors.torch import load_file
from tiny_distillations import PHASES, distil, recipe_of

from odevit.data import prepare
from odevit.distill.objective import (
    Distillation,
    build,
)
from odevit.teachers.teacher import load_teacher, tiny_teacher
from odevit.training import loop as train
from odevit.training.claim import claim_run
from odevit.training.evaluation import model_input
from odevit.training.integration import Integration
from odevit.training.loop import fit
from odevit.training.runlog import read_metrics


def sabotage(monkeypatch, step):
    original = train.Run.train_step

    def train_step(run, batch, progress):
        if run.step == step:
            raise ZeroDivisionError("pulled the plug")
        return original(run, batch, progress)

    monkeypatch.setattr(train.Run, "train_step", train_step)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "all"])
def test_a_run_names_its_phases_spares_its_teacher_and_resumes_bit_for_bit(
    cache, teacher_folder, data, tmp_path, monkeypatch
):
    checksum = load_teacher(str(teacher_folder)).checksum()
    options = {"cache": cache, **PHASES, "optim": {"ema": 0.9}, "augment": {"crop": 1}, "model": {"dropout": 0.1}}
    options |= {"cache_views": 2} if cache == "all" else {}
    whole = distil(recipe_of(tmp_path / "whole", teacher_folder, **options), data)
    records = [record for record in read_metrics(whole.folder) if record["kind"] == "train"]
    assert [r["stage"] for r in records] == ["collocation"] * 3 + ["teacher forcing"] * 4 + ["unrolled"] * 3
    assert [r["evaluations"] for r in records] == [1] * 3 + [3] * 7
    assert set(records[0]["losses"]) == {"collocation"}
    assert set(records[-1]["losses"]) == {"cls_path", "patch_path", "kl", "jasmin"}
    assert load_teacher(str(teacher_folder)).checksum() == checksum
    assert len(whole.model.config.meeting_times) == 3

    broken = recipe_of(tmp_path / "broken", teacher_folder, **options)
    with monkeypatch.context() as patch:
        sabotage(patch, step=6)
        with pytest.raises(ZeroDivisionError):
            distil(broken, data)
    resumed = distil(broken, data, resume=True)
    assert (resumed.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    ours, theirs = (load_file(run.folder / "model" / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    frozen = load_teacher(str(teacher_folder)).parts()
    assert torch.equal(whole.model.classifier.weight.cpu(), frozen.head_weight)
    assert torch.equal(whole.model.norm.bias.cpu(), frozen.norm_bias)
    assert not torch.equal(whole.model.odevit.positions.cpu(), frozen.positions)


@pytest.mark.slow
def test_a_line_of_the_log_across_two_phases_divides_each_loss_by_the_steps_that_had_it(teacher_folder, data, tmp_path):
    single, five = (distil(recipe_of(tmp_path / str(n), teacher_folder, log_every=n, **PHASES), data) for n in (1, 5))
    steps = [record for record in read_metrics(single.folder) if record["kind"] == "train"][:5]
    line = next(record for record in read_metrics(five.folder) if record["kind"] == "train")
    assert [set(step["losses"]) == {"collocation"} for step in steps] == [True] * 3 + [False] * 2
    for name, value in line["losses"].items():
        had = [step["losses"][name] for step in steps if name in step["losses"]]
        assert value == pytest.approx(sum(had) / len(had), rel=1e-5), name
    assert line["loss"] == pytest.approx(sum(step["loss"] for step in steps) / 5, rel=1e-5)


@pytest.mark.slow
def test_a_monitored_run_writes_and_draws_the_distance(teacher_folder, data, tmp_path):
    recipe = recipe_of(tmp_path, teacher_folder, optim={"steps": 3}, cache="cls")
    recipe.loop.monitor_every = 1
    distil(recipe, data)
    looks = [r for r in read_metrics(tmp_path) if r["kind"] == "monitor"]
    assert [r["step"] for r in looks] == [1, 2, 3]
    assert all(0 < r["distance_over_radius"]["median"] <= r["distance_over_radius"]["largest"] for r in looks)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["cls", "all"])
def test_cached_and_online_teachers_give_the_same_losses(cache, teacher_folder, data, tmp_path):
    options = {"losses": {"cls_path": 1.0, "kl": 1.0}} if cache == "cls" else PHASES
    losses = []
    for kind in ("none", cache):
        recipe = recipe_of(tmp_path / kind, teacher_folder, cache=kind, **options)
        folder = distil(recipe, data).folder
        losses.append([r["losses"] for r in read_metrics(folder) if r["kind"] == "train"])
    assert len(losses[0]) == 10
    for online, cached in zip(*losses, strict=True):
        assert cached == pytest.approx(online, rel=1e-2)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2e-3)  # half precision
    assert losses[0] != losses[1]


def test_a_student_with_patches_of_its_own_follows_a_teacher_of_larger_images(data, tmp_path):
    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=16, patch_size=4, num_channels=1)
    rows = torch.arange(8)
    found = []
    for cache in ("none", "cls"):
        model = {"image_size": 8, "patch_size": 2, "tokenizer": "pooling"}
        recipe = recipe_of(tmp_path, "", model=model, cache=cache, losses={"cls_path": 1.0, "kl": 1.0})
        student, objective = build(recipe, data, teacher)
        split = objective.training_data(data).train
        pixels, labels = split.fetch(rows)
        assert pixels.shape[-1] == 8
        images, targets = model_input(student, pixels), torch.eye(10)[labels]
        terms = objective(student, images, targets, rows, progress=0.5, integration=Integration())
        found.append({name: float(loss) for name, loss in terms.losses.items()})
        seen = teacher.trace(prepare(pixels, 16, student.config.image_mean, student.config.image_std))
        ours = student(images, output_hidden_states=True)
        divergence = nnf.kl_div(
            ours.logits.log_softmax(-1), seen.logits.log_softmax(-1), reduction="batchmean", log_target=True
        )
        assert found[-1]["kl"] == pytest.approx(float(divergence), rel=2e-2)
        sum(terms.losses.values()).backward()
        assert float(student.odevit.tokenizer.layers[0].weight.grad.abs().max()) > 0
    assert found[0] == pytest.approx(found[1], rel=2e-2)  # bytes against floats resized, half precision


@pytest.mark.slow
def test_with_a_cache_the_teacher_never_runs_again_and_nothing_is_augmented_twice(
    teacher_folder, data, tmp_path, monkeypatch
):
    options = {"cache": "cls", "cache_views": 2, "augment": {"crop": 2}, "optim": {"steps": 3}}
    recipe = recipe_of(tmp_path, teacher_folder, **options)
    student, objective = build(recipe, data)
    assert len(objective.training_data(data).train) == 640
    assert len(objective.training_data(data).val) == len(data.val)
    seen = []
    monkeypatch.setattr(
        Distillation,
        "observe",
        lambda self, model, images, rows, attention: seen.append((images, rows)) or self.cache.trace(rows),
    )
    monkeypatch.setattr(objective.teacher, "trace", lambda *_: pytest.fail("the teacher ran"))
    with claim_run(recipe) as claim:
        fit(recipe, claim, model=student, objective=objective, data=data, progress_bar=False)
    assert len(seen) == 3
    for images, rows in seen:
        assert torch.equal(images, model_input(student, objective.cache.split.images[rows]))
