"""Everything that feeds a model finds the model's device: each check runs in a child process, on a fake accelerator."""

import json
import traceback
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch
from brief import OPTIONS, make_brief
from child_processes import start_child, wait_for_child
from distill_contract import random_data, recipe_for
from fake_device import fake_device
from problems import perturbed_model

import odevit.training.claim
import odevit.training.loop
from odevit.teachers.teacher import Teacher, tiny_teacher


def student_and_teacher(device, **changes):
    teacher: Teacher = tiny_teacher("vit", image_size=32, patch_size=16, num_labels=5).to(device)
    changes = {"image_size": 32, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, **changes}
    student = perturbed_model(hidden_size=teacher.width, num_steps=2, **changes)
    return student.to(device), teacher


# --- the device itself ------------------------------------------------------------------------------------------------


def the_device_refuses_what_a_real_one_refuses(device, folder):
    here, there = torch.ones(3), torch.ones(3).to(device)
    assert there.device == device != here.device
    assert (there + 1 + torch.tensor(1.0)).tolist() == [3, 3, 3]
    assert there[torch.tensor([0, 2])].device == device
    for mixed in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: here[torch.tensor([0]).to(device)],
        lambda: torch.nn.Linear(3, 2)(there),
        lambda: there.numpy(),
        lambda: np.asarray(there),
        lambda: torch.randn(3, device=device, generator=torch.Generator()),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            mixed()
    there[1:] += 1  # views and gradients as everywhere
    assert there.cpu().tolist() == [1, 2, 2]
    weight = torch.ones(3, device=device, requires_grad=True)
    (weight * there).sum().backward()
    assert weight.grad.device == device
    assert weight.grad.tolist() == [1, 2, 2]


# --- what feeds a model -----------------------------------------------------------------------------------------------


def evaluation(device, folder):
    from odevit.training.evaluation import evaluate

    student, _ = student_and_teacher(device)
    assert evaluate(student, random_data().test)["count"] == 24


def monitors(device, folder):
    from odevit.training.evaluation import monitors as measure

    student, _ = student_and_teacher(device)
    assert len(json.dumps(measure(student, random_data().val, lambda model, images: {"seen": images.tolist()}))) > 100


def comparison(device, folder):
    from odevit.analysis.comparison import compare

    student, teacher = student_and_teacher(device)
    assert compare(student, teacher, random_data().test)["images"] == 24


def report(device, folder):
    from odevit.analysis.dense import LEAST
    from odevit.commands.analyze import Report, write_study

    student, teacher = student_and_teacher(device)
    wanted = Report(folder, max_images=2 * LEAST, options=OPTIONS, live=True)  # fewer: no dense probe
    with pytest.MonkeyPatch.context() as patch:
        make_brief(patch)
        findings = write_study(student, random_data(), teacher, wanted, names={"model": "m", "data": "d"})[1]
    assert not [finding for finding in findings if finding.name.endswith(("not_computed", "skipped"))]


def audit(device, folder):
    from odevit.commands import audit as command

    tiny_teacher("vit", image_size=16, patch_size=4, num_channels=1).module.save_pretrained(folder / "teacher")
    command.audit(str(folder / "teacher"), "digits", max_images=24, output=folder / "audit")


def commands(device, folder):
    """The verbs themselves choose the accelerator where there is one."""
    from PIL import Image

    from odevit.commands import best_device
    from odevit.commands.evaluate import evaluate
    from odevit.commands.predict import predict

    assert best_device().type == device.type
    student = student_and_teacher("cpu", num_channels=1, num_labels=10, image_mean=[0.5], image_std=[0.5])[0]
    student.save_pretrained(folder / "model")
    evaluate(str(folder / "model"), "digits", max_images=100, as_json=True)
    Image.fromarray(np.full((32, 32), 128, dtype=np.uint8)).save(folder / "grey.png")
    picture = folder / "attention.png"
    assert predict(str(folder / "model"), [str(folder / "grey.png")], attention=picture) == 0
    assert picture.exists()


def calibration(device, folder):
    from odevit.dynamics.arrival import Certified
    from odevit.dynamics.calibration import calibrate_model

    student, _ = student_and_teacher(device, solver="euler")
    images = torch.randn(40, 3, 32, 32).to(device)
    student.config.halting = calibrate_model(student, images, alpha=0.3, delta=0.1)
    assert student(images, halt=True).logits.device == device
    assert student(images, halt=Certified(student)).logits.device == device


def export_and_page(device, folder):
    from odevit.commands.page import page_of
    from odevit.export.files import eager_runner, logits_of

    student, teacher = student_and_teacher(device)
    page_of(student, random_data(), teacher=teacher, title="page")
    page_of(student, None, title="page")
    logits_of(eager_runner(student, None, None), torch.randn(4, 3, 32, 32))


def long_time_exponents(device, folder):
    from odevit.dynamics.exponents import long_time_exponents as exponents

    steps = [lambda x: x + 0.1 * x.flip(-1).sin()] * 4
    assert exponents(steps, torch.randn(2, 3).to(device), 2, total_time=0.4).device == device


def claim_on_device(monkeypatch, device):
    """Runs get an accelerator that says `fake:0` and, like accelerate's, sends the model there; safetensors wants a
    pointer to memory, which a fake tensor has not, and gets copies on the CPU."""
    original, save = odevit.training.claim._accelerator, odevit.training.loop.save_classifier

    def accelerator(config):
        made = original(config)
        made.prepare_model = lambda model, **_: model.to(device)
        return made

    def save_copies(model, folder, state):
        save(model, folder, {name: tensor.cpu() for name, tensor in state.items()})

    monkeypatch.setattr(odevit.training.loop, "save_classifier", save_copies)
    monkeypatch.setattr(accelerate.Accelerator, "device", device)
    monkeypatch.setattr(odevit.training.claim, "_accelerator", accelerator)


def distillation(device, folder, **changes):
    """Statistics and cache, three steps, validation, checkpoint, comparison; then the same run resumed."""
    from odevit.commands.analyze import Report
    from odevit.commands.distill import distill_recipe

    teacher = tiny_teacher("vit", image_size=32, patch_size=16, num_labels=5)
    recipe = recipe_for(teacher, folder / "run").to_dict()
    recipe["optim"] |= {"name": "muon", "ema": 0.5}
    recipe["loop"] = {"eval_every": 1, "monitor_every": 1, "checkpoint_every": 1, "mixed_precision": "no"}
    recipe["distill"] |= {"cache_folder": str(folder / "cache"), **changes}
    if "match" in changes:
        teacher.module.save_pretrained(folder / "teacher")
        recipe["distill"]["teacher"] = str(folder / "teacher")
        teacher = None
    report = Report(only=["lyapunov"], max_images=4)
    from odevit.recipe import Recipe

    with pytest.MonkeyPatch.context() as patch:
        claim_on_device(patch, device)
        make_brief(patch)
        for steps in (1, 2):
            recipe["optim"]["steps"] = steps
            made = Recipe.from_dict(recipe)
            result = distill_recipe(
                made, teacher=teacher, data=random_data(), report=report, resume=steps > 1, progress_bar=False
            )
        assert result.metrics["steps"] == 2
        assert next(result.model.parameters()).device == device


CHECKS = [
    the_device_refuses_what_a_real_one_refuses, evaluation, monitors, comparison, report, audit, commands, calibration,
    export_and_page, long_time_exponents, distillation,
]  # fmt: skip


def run_check(name: str, folder: Path) -> None:
    try:
        with fake_device() as device:
            globals()[name](device, folder)
    except BaseException:
        (folder / "traceback.txt").write_text(traceback.format_exc())
        raise


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_second_device(check, tmp_path):
    code = wait_for_child(start_child(run_check, check.__name__, tmp_path))
    if code:
        pytest.fail((tmp_path / "traceback.txt").read_text())
