"""The studies of distillation: arms, what they share, and a lift to the teacher's last CLS, on a toy."""

from pathlib import Path
from typing import Any

import distillation as distillation_script
import lift
import pytest
import torch

from odevit.data import load_data
from odevit.distill.cache_shards import cache_of
from odevit.recipe import Recipe
from odevit.teachers.teacher import load_teacher
from odevit.training.classifiers import load_odevit


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a study: 80 random images in two classes, a ViT of two blocks, a hundredth of a minute."""
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    for split, count in (("train", 35), ("test", 5)):
        for label in ("cat", "dog"):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    teacher = ViTForImageClassification(ViTConfig(image_size=96, patch_size=16, num_labels=2, **sizes))
    teacher.save_pretrained(tmp_path / "teacher")
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: None)  # would last longer than the test
    shared = [f"data.name={tmp_path}/data", "data.val_fraction=0.1", "optim.batch_size=16"]
    shared += [f"distill.teacher={tmp_path}/teacher", "distill.sample=16"]
    options = ["--minutes", "0.001", "--output", str(tmp_path / "runs")]
    return options + [word for value in shared for word in ("--set", value)]


@pytest.fixture
def distillation(toy: list[str]) -> Any:
    return lambda *words: distillation_script.main([*words, *toy])


@pytest.mark.slow
def test_a_lift_meets_the_teachers_normed_cls(toy: list[str], tmp_path: Path) -> None:
    small = ["model.hidden_size=16", "model.num_attention_heads=2", "distill.cache_views=1"]
    small += [f"distill.cache_folder={tmp_path}/cache", "loop.step_schedule=[[0, 2]]"]
    rows = lift.main(["lift", *toy, *(word for value in small for word in ("--set", value))])
    assert set(rows) == {f"{name} (seed 0)" for name in lift.STUDIES["lift"]}
    teacher = load_teacher(str(tmp_path / "teacher"))
    runs = {path.parent.name: path for path in (tmp_path / "runs").rglob("result.json")}
    models = {name: load_odevit(str(path.parent / "model")) for name, path in runs.items()}
    frozen = models["lift-drawn-to-CLS-teachers-head-seed0"]
    assert torch.equal(frozen.classifier.weight, teacher.parts().head_weight)
    assert frozen.projection.weight.shape == (24, 16)
    assert models["answers-alone-seed0"].classifier.weight.shape == (2, 16)
    assert not torch.equal(models["lift-drawn-to-CLS-seed0"].projection.weight, models["lift-seed0"].projection.weight)
    # what the student is drawn to is what the teacher's head reads
    images = torch.randn(3, 3, 96, 96)
    recipe = lift.recipe_of([f"data.name={tmp_path}/data", *small, "data.val_fraction=0.1", "distill.sample=16"])
    data = load_data(recipe.data)
    assert recipe.distill is not None
    cache = cache_of(recipe, teacher, data.train, tuple(data.mean), tuple(data.std))
    objective = lift.LiftedAnswers(teacher, recipe.distill, cache, 1.0)
    trace = teacher.trace(images)
    parts = teacher.parts()
    assert parts.head_weight is not None
    read = objective.read(trace.states[-1]) @ parts.head_weight.mT + parts.head_bias
    torch.testing.assert_close(read, trace.logits)
    assert objective.variance > 0


def test_distillation_arms_share_the_work_and_are_only_read_once_they_are_done(
    distillation: Any, tmp_path: Path
) -> None:
    names = ("--only", "scratch, with labels", "paper's recipe", "ours")
    first = distillation("claims", *names, "--share", "1/2")
    second = distillation("claims", *names, "--share", "2/2")
    assert list(first) == ["scratch, with labels (seed 0)", "ours (seed 0)"]
    assert list(second) == ["paper's recipe (seed 0)"]
    folder = tmp_path / "runs" / "claims-0.001min"
    assert {f.name for f in folder.iterdir()} == {"scratch-with-labels-seed0", "papers-recipe-seed0", "ours-seed0"}
    written = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert distillation("claims", *names) == first | second
    assert written == {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert first["ours (seed 0)"]["agreement"].endswith("%")
    assert first["ours (seed 0)"]["certified"].endswith("%")
    assert first["scratch, with labels (seed 0)"]["agreement"] == ""


@pytest.mark.parametrize("study", distillation_script.STUDIES)
def test_every_arm_is_a_valid_recipe_and_differs_from_the_others(study: str) -> None:
    arms = distillation_script.STUDIES[study].values()
    made = [(str(Recipe.load(arm.recipe, list(arm.overrides)).to_dict()), arm.shake, arm.mixtures) for arm in arms]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "without everything"), "unknown arm without everything"),
        (("--share", "3/2"), "I/N with I from 1 to N"),
        (("--share", "half"), "I/N with I from 1 to N"),
    ],
)
def test_what_the_script_cannot_do(words: tuple[str, ...], message: str, distillation: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        distillation("ablation", *words)
    assert message in capsys.readouterr().err
