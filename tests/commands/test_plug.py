"""`odevit distill`: every distillation recipe runs end to end on a tiny teacher, and the comparison is right."""

import json
from pathlib import Path

import pytest
import torch
from problems import TINY
from typer.testing import CliRunner

import odevit_cli
from odevit.analysis.comparison import compare
from odevit.commands.distill import DEFAULT
from odevit.data.splits import MemorySplit
from odevit.distill.student import student_of
from odevit.recipe import Recipe
from odevit.teachers.teacher import tiny_teacher

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_says_how_it_is_run(path):
    recipe = Recipe.load(path)
    header = path.read_text().split("\n\n")[0]
    command = "odevit distill --recipe" if recipe.task == "distill" else "odevit train"
    assert f"{command} recipes/{path.name}" in header


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if Recipe.load(path).task == "distill"], ids=lambda p: p.stem
)
def test_distillation_recipes_run_end_to_end_with_smoke(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(odevit_cli.app, ["distill", "--recipe", str(path), "--smoke"], catch_exceptions=False)
    assert result.exit_code == 0
    comparison = json.loads((tmp_path / "runs/smoke/comparison.json").read_text())
    assert comparison["student"]["parameters"] < comparison["teacher"]["parameters"]
    assert 0 <= comparison["agreement"] <= 1


def test_without_recipe_data_or_teacher_the_error_says_what_is_missing():
    for arguments, message in (
        (["distill"], "needs images"),
        (["distill", "--data", "digits"], "needs a teacher"),
    ):
        with pytest.raises(ValueError, match=message):
            CliRunner().invoke(odevit_cli.app, arguments, catch_exceptions=False)


def test_the_default_recipe_is_valid():
    assert Recipe.from_dict({**DEFAULT, "data": {"name": "digits"}}).task == "distill"


def test_comparison_counts_what_it_says():
    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=16, patch_size=4, num_labels=TINY["num_labels"])
    student = student_of(teacher, num_registers=1, image_mean=[0.5] * 3, image_std=[0.5] * 3).eval()
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8)
    prepared = (images.float() / 255 - 0.5) / 0.5
    labels = teacher(prepared).argmax(1)
    result = compare(student, teacher, MemorySplit(images, labels))
    assert result["teacher"]["accuracy"] == 1.0
    with torch.no_grad():
        same = (student(prepared).logits.argmax(1) == labels).float().mean().item()
    assert result["agreement"] == pytest.approx(same)
    assert result["student"]["accuracy"] == pytest.approx(same)
    assert result["certified_agreement"] <= result["agreement"]
    assert result["parameter_ratio"] == pytest.approx(
        sum(p.numel() for p in teacher.parameters()) / sum(p.numel() for p in student.parameters())
    )
