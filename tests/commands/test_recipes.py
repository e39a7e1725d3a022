"""Recipes belong to the package: by name or path, with a header that says how they are run; also from a wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from odevit.commands.recipes import header, recipes
from odevit.recipe import RECIPES, Recipe, recipe_names

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_says_how_it_is_run(name):
    said, recipe = header(name), Recipe.load(name)
    command = "odevit distill --recipe" if recipe.task == "distill" else "odevit train"
    given = " --teacher MY_VIT --data MY_IMAGES" if name == "answers" else ""  # the user's own
    assert said["command"] == f"{command} {name}{given}"
    assert any(word in said["seen"] for word in ("Seen", "reports"))
    assert recipe == Recipe.load(RECIPES / f"{name}.yaml")


def test_the_list_names_them_all(capsys):
    assert (
        set(recipes()) == set(recipe_names()) >= {"digits", "cifar10/distill", "cifar100/teacher", "paper/cifar10-base"}
    )
    output = capsys.readouterr().out
    assert "odevit distill --recipe cifar10/distill" in output
    assert "98.05 % test accuracy in 9 s" in output


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no recipe cifar10/scrach: .*cifar10/scratch"):
        Recipe.load("cifar10/scrach")


@pytest.mark.slow
def test_a_wheel_brings_its_recipes_into_an_empty_folder(tmp_path):
    """Built without the network, installed into a folder of its own beside the pinned dependencies."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", *offline, "-w", tmp_path, source], check=True, timeout=200)
    (wheel,) = tmp_path.glob("odevit-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", tmp_path / "site", wheel], check=True, timeout=100)
    (tmp_path / "empty").mkdir()
    words = ["train", "digits", "--set", "optim.steps=2", "--set", "data.limit=64", "--set", "optim.batch_size=16"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    script = "import odevit, runpy; print(odevit.__file__); runpy.run_module('odevit', run_name='__main__')"
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(
        command, cwd=tmp_path / "empty", env=environment, check=True, timeout=200, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert len(list((tmp_path / "empty").glob("runs/*/result.json"))) == 1
