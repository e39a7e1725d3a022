"""`odevit distill`, and `odevit train` of a recipe with a teacher: one way, its order, its files, its refusals."""

import json
import os
import re

import pytest
import torch
from child_processes import start_child, start_pair, wait_for_child
from problems import TINY, tiny_model
from tiny_runs import tiny_recipe
from typer.testing import CliRunner

import odevit_cli
from odevit.analysis import load_analyses
from odevit.analysis.comparison import compare
from odevit.commands.distill import (
    DEFAULT,
    SMOKE,
    SMOKE_OVERRIDES,
    distill_recipe,
    family_of,
    images_to_choose_by,
    smoke_teacher,
)
from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.data.splits import MemorySplit
from odevit.distill.objective import Distillation
from odevit.distill.student import student_of
from odevit.recipe import Recipe, override, recipe_names
from odevit.teachers.teacher import Teacher, tiny_teacher
from odevit.training.runlog import read_metrics

RECIPES = recipe_names()


def invoke(*arguments):
    return CliRunner().invoke(odevit_cli.app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("teacher")
    tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1).module.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe_file(teacher_folder, tmp_path):
    """Two steps of a distillation on 128 digits."""
    values = tiny_recipe(tmp_path / "run", data={"limit": 128}, optim={"steps": 2, "batch_size": 32}).to_dict()
    values |= {"task": "distill", "model": {"mlp_ratio": 1, "num_steps": 2}}
    values["distill"] = {"teacher": str(teacher_folder), "losses": {"cls_path": 1.0, "kl": 1.0}, "sample": 32}
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe.from_dict(values).to_yaml())
    return path


# --- one way in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["train", "distill"])
def test_both_verbs_prove_the_teacher_and_write_the_comparison(verb, recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr("odevit.commands.distill.write_study", lambda *_, **__: None)
    words = ["train", recipe_file] if verb == "train" else ["distill", "--recipe", recipe_file]
    output = invoke(*words).stdout
    assert "Side by side on 128 images" in output
    assert set(json.loads((tmp_path / "run/comparison.json").read_text())) >= {"student", "teacher", "agreement"}

    original = Distillation.__call__

    def spoil(self, *arguments, **options):
        with torch.no_grad():
            next(self.teacher.parameters()).add_(1e-3)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Distillation, "__call__", spoil)
    with pytest.raises(RuntimeError, match="the teacher was modified"):
        invoke(*words, "--overwrite")


@pytest.mark.usefixtures("brief")
def test_the_report_at_the_end_is_that_of_analyze(recipe_file, teacher_folder, tmp_path):
    invoke("distill", "--recipe", recipe_file, "--max-images", 6)
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert {name.split("/")[0] for name in report["values"]} == set(load_analyses())
    assert report["headline"][0].startswith("The student answers")
    assert "of 128 images right" in report["headline"][0]  # the whole test split, not the sample of the analyses
    analyze = f"odevit analyze {tmp_path}/run/model --data digits --teacher {teacher_folder} --max-images 6 --quick"
    assert report["command"] == analyze
    again = tmp_path / "again"
    invoke(*analyze.split()[1:], "--only", "comparison,contraction", "-o", again)
    values = json.loads((again / "report.json").read_text())["values"]
    assert {name.split("/")[0] for name in values} == {"comparison", "contraction"}

    invoke("distill", "--recipe", recipe_file, "--no-report", "--overwrite")
    assert (tmp_path / "run/comparison.json").exists()
    assert not (tmp_path / "run/report.html").exists()


def test_a_taken_folder_is_told_before_anything_is_loaded(recipe_file, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text("output: elsewhere")
    for verb in ("distill", "train"):
        monkeypatch.setattr(f"odevit.commands.{verb}.load_data", lambda config: pytest.fail("data was loaded"))
    with pytest.raises(ValueError, match="already holds a run"):
        distill_recipe(Recipe.load(recipe_file))
    with pytest.raises(ValueError, match="already holds a run"):
        train_recipe(tiny_recipe(tmp_path / "run"))


def test_what_overwrite_deletes_is_kept_until_the_new_run_can_start(recipe_file, tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    for name in ("recipe.yaml", "result.json", "model/weights"):
        (tmp_path / "run" / name).write_text("hours of work")
    for run in (
        lambda: train_recipe(tiny_recipe(tmp_path / "run", data={"name": str(tmp_path / "typo")}), overwrite=True),
        lambda: distill_recipe(Recipe.load(recipe_file, ["distill.teacher=/no/where"]), overwrite=True),
    ):
        with pytest.raises(ValueError, match=r"typo|/no/where"):
            run()
        assert (tmp_path / "run/model/weights").read_text() == "hours of work"
        assert (tmp_path / "run/recipe.yaml").read_text() == "hours of work"


def _one_of_two(rank, port, folder, words):
    """`odevit …` as torchrun would start it, its output in a file."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    with (folder / f"stdout-{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
    import odevit.commands.distill as command

    original = command.write_file

    def write_file(path, content):
        (folder / f"written-{rank}").write_text(path.name)
        original(path, content)

    command.write_file = write_file
    odevit_cli.app(words, standalone_mode=False)


def test_of_two_processes_the_first_alone_prints_and_writes(recipe_file, tmp_path, monkeypatch):
    """With a teacher split among them, and a cache of which each builds and reads its half; one process then reads both
    halves, and has the same losses."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["distill", "--recipe", str(recipe_file), "--no-report"]
    options = ["cache=cls", "cache_top=3", "cache_shards=2", "shard_teacher=true", f"cache_folder={tmp_path}/cache"]
    for assignment in [f"distill.{option}" for option in options] + ["loop.log_every=1"]:
        words += ["--set", assignment]
    children = [start_child(_one_of_two, rank, port, tmp_path, words) for rank in range(2)]
    assert [wait_for_child(child) for child in children] == [0, 0]
    assert "Side by side" in (tmp_path / "stdout-0").read_text()
    assert (tmp_path / "written-0").exists()
    assert (tmp_path / "stdout-1").read_text() == ""
    assert not (tmp_path / "written-1").exists()
    assert len(list((tmp_path / "cache").glob("*/classes.npy"))) == 2
    monkeypatch.setattr("odevit.distill.cache.Builder.build", lambda *_: pytest.fail("built again"))
    invoke(*words, "--set", f"output={tmp_path}/one")
    two, one = (read_metrics(tmp_path / name) for name in ("run", "one"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)
    both = [json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("run", "one")]
    assert both[0]["agreement"] == both[1]["agreement"]


# --- recipes and smoke runs -------------------------------------------------------------------------------------------


def smoke_runs() -> list[str]:
    """A recipe for each smoke run: --smoke takes other data and another teacher, so that some recipes become one."""
    runs = {}
    for name in RECIPES:
        if (recipe := Recipe.load(name)).task == "distill":
            values = override({**recipe.to_dict(), **SMOKE}, [*SMOKE_OVERRIDES, "distill.teacher=tiny"])
            runs.setdefault(json.dumps(values, sort_keys=True), name)
    return list(runs.values())


@pytest.mark.parametrize("name", smoke_runs())
def test_distillation_recipes_run_end_to_end_with_smoke(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("distill", "--recipe", name, "--smoke").exit_code == 0
    comparison = json.loads((tmp_path / "runs/smoke/comparison.json").read_text())
    smaller = comparison["student"]["parameters"] < comparison["teacher"]["parameters"]
    assert smaller or Recipe.load(name).distill.match == "answers"  # there the student has the recipe's own size
    assert 0 <= comparison["agreement"] <= 1


@pytest.mark.slow
def test_the_recipe_for_imagenet_runs_on_two_processes(tmp_path, monkeypatch):
    """With a tiny DINOv2 in the place of its own: a cache of eight parts, four for each, and a teacher split in two."""
    monkeypatch.chdir(tmp_path)
    teacher = save_example("dinov2", tmp_path / "dinov2")
    words = ["distill", "--recipe", "imagenet/dinov2-base", "--smoke", "--teacher", str(teacher)]
    children = start_pair([*words, "--set", f"distill.cache_folder={tmp_path}/cache"])
    assert [wait_for_child(child) for child in children] == [0, 0]
    comparison = json.loads((tmp_path / "runs/smoke/comparison.json").read_text())
    assert 0 <= comparison["agreement"] <= 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 8


def save_example(family, folder):
    tiny_teacher(family, image_size=16, patch_size=4, num_channels=1).module.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["vit", "dino", "deit", "deit-distilled", "dinov2", "dinov2-registers"])
def test_smoke_reads_the_family_from_config_json_not_from_the_path(family, tmp_path):
    folder = save_example(family, tmp_path / "facebook-deit-dinov2-dino")
    assert family_of(str(folder)) == family
    (folder / "model.safetensors").unlink()  # the config alone tells it
    recipe = Recipe.from_dict({**DEFAULT, "data": {"name": "digits"}, "distill": {"teacher": str(folder)}})
    assert smoke_teacher(recipe).family == family


@pytest.mark.parametrize("name", ["", "runs/not-made-yet", "facebook/dinov2-small-that-nobody-has-here", "/a/b/c"])
def test_smoke_works_without_the_teacher_being_there(name, capsys):
    recipe = Recipe.from_dict({**DEFAULT, "data": {"name": "digits"}, "distill": {"teacher": name}})
    teacher = smoke_teacher(recipe)
    assert teacher.checksum() == smoke_teacher(recipe).checksum()  # processes that meet again have the same one
    assert isinstance(teacher, Teacher)
    assert teacher.family == "vit"
    assert "a tiny ViT stands in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["distill"], "needs images"),
        (["distill", "--data", "digits", "-o", "{tmp}/x"], "needs a teacher"),
        (["distill", "--recipe", "answers", "--data", "digits", "-o", "{tmp}/x"], "needs a teacher"),
        (["distill", "--recipe", "{digits}"], r"trains without a teacher .*odevit train digits"),
        (
            ["distill", "--recipe", "{recipe}", "--set", "penalties.jasmin=5"],
            r"distill\.losses\.jasmin=5 instead",
        ),
        (["train", "{recipe}", "--set", "penalties.transport=1"], r"a distillation has distill\.losses"),
        (["train", "{recipe}", "--set", "loop.fsdp=true"], "works with task: train"),
    ],
)
def test_what_is_refused_in_one_sentence(arguments, message, recipe_file, tmp_path):
    words = [word.format(digits="digits", recipe=recipe_file, tmp=tmp_path) for word in arguments]
    with pytest.raises(ValueError, match=message) as caught:
        invoke(*words)
    assert len(re.findall(r"\n", str(caught.value))) == 0
    assert not (tmp_path / "run").exists()


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


def test_few_validation_images_are_joined_by_training_images():
    data = load_data(DataConfig(name="digits", image_size=8, limit=60))
    student = tiny_model(image_size=8, num_channels=1, image_mean=[0.5], image_std=[0.5])
    images, labels = images_to_choose_by(student, data)
    assert len(images) == len(labels) == len(data.val) + len(data.train)
