import dataclasses

import pytest
import yaml
from tiny_runs import tiny_recipe

from odevit.parse import parse
from odevit.recipe import Recipe, assignment, override
from odevit.training.config import LoopConfig, OptimConfig, PenaltyConfig

MINIMAL = {"data": {"name": "digits"}, "optim": {"epochs": 2}}


def test_round_trip_through_yaml(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", loop={"step_schedule": [[0, 2], [0.5, 4]]}, optim={"betas": [0.9, 0.95]})
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    again = Recipe.load(tmp_path / "recipe.yaml")
    assert again == recipe
    assert again.loop.step_schedule == [(0.0, 2), (0.5, 4)]
    assert again.optim.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optim.lrr", 1, r"unknown key optim\.lrr; valid keys: .*\blr\b"),
        ("optimizer", {}, r"unknown key optimizer; valid keys: .*optim"),
        ("data.nam", "x", r"unknown key data\.nam; valid keys: name"),
        ("optim.lr", "fast", r"optim\.lr must be a number, got 'fast'"),
        ("optim.lr", True, r"optim\.lr must be a number"),
        ("optim.batch_size", 2.5, r"optim\.batch_size must be a whole number"),
        ("loop.compile", "yes", r"loop\.compile must be true or false"),
        ("optim.name", "sgd", r"optim\.name must be one of 'adamw', 'muon'; got 'sgd'"),
        ("optim.betas", [0.9], r"optim\.betas must have 2 entries"),
        ("loop.step_schedule", [[0.0, "many"]], r"loop\.step_schedule\[0\]\[1\] must be a whole number"),
        ("loop.step_schedule", [[0.5, 3]], r"must start at progress 0"),
        ("optim", 3, r"optim must be a group of keys"),
        ("model", "cifar", r"model must be a group of keys"),
        ("optim.ema", 1.0, r"optim\.ema must be in \[0, 1\)"),
        ("optim.steps", 5, r"exactly one of .* got optim\.epochs and optim\.steps"),
        ("loop.keep", 0, r"loop\.keep"),
    ],
)
def test_mistakes_are_named(path, value, message):
    values = {key: dict(group) for key, group in MINIMAL.items()}
    *parents, name = path.split(".")
    target = values
    for parent in parents:
        target = target.setdefault(parent, {})
    target[name] = value
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(values)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.name is missing"):
        Recipe.from_dict({**MINIMAL, "data": {}})
    with pytest.raises(ValueError, match=r"exactly one of .*; got none"):
        Recipe.from_dict({**MINIMAL, "optim": {}})
    with pytest.raises(ValueError, match="there is no recipe"):
        Recipe.load(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="key: value"):
        Recipe.load(tmp_path / "list.yaml")


def test_overrides(tmp_path):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(MINIMAL))
    sets = ["optim.lr=1e-3", "optim.steps=7", "model.preset=cifar-nano", "loop.step_schedule=[[0, 2]]", "seed=3"]
    recipe = Recipe.load(tmp_path / "r.yaml", sets)
    assert recipe.optim.lr == 1e-3  # YAML itself reads 1e-3 as text
    assert (recipe.optim.steps, recipe.optim.epochs) == (7, None)  # one budget replaces the other
    assert recipe.model == {"preset": "cifar-nano"}
    assert recipe.loop.step_schedule == [(0.0, 2)]
    assert recipe.seed == 3
    with pytest.raises(ValueError, match="key=value"):
        override(MINIMAL, ["optim.lr"])
    with pytest.raises(ValueError, match=r"cannot set seed\.x"):
        override({"seed": 1}, ["seed.x=1"])
    assert MINIMAL == {"data": {"name": "digits"}, "optim": {"epochs": 2}}


def test_unions_and_none():
    @dataclasses.dataclass
    class Config:
        size: int | None = None
        word: str | float = "a"

    assert parse(Config, {"size": None, "word": 2.0}) == Config(None, 2.0)
    with pytest.raises(ValueError, match="size must be a whole number"):
        parse(Config, {"size": "big"})


@pytest.mark.parametrize("config", [OptimConfig, LoopConfig, PenaltyConfig, Recipe])
def test_every_field_is_read_somewhere(config):
    """No dead options: each name occurs in the package as an attribute access."""
    from pathlib import Path

    import odevit

    sources = "".join(path.read_text() for path in Path(odevit.__file__).parent.rglob("*.py"))
    for field in dataclasses.fields(config):
        if field.name in ("steps", "epochs", "minutes"):
            assert f"optim.{field.name}" in sources
        assert f".{field.name}" in sources, field.name


@pytest.mark.parametrize("value", ["imgs #2", "2024-05-01", "1234", "no", "a: b", "[old] set", "Käse 猫", 'quo"ted'])
def test_a_value_given_beside_a_recipe_arrives_as_it_is(value):
    values = override({"data": {"name": "digits"}}, [assignment("data.name", value), assignment("data.strict", True)])
    assert values == {"data": {"name": value, "strict": True}}


def test_no_means_no():
    """YAML reads the word as false."""
    values = override(Recipe.load("digits").to_dict(), ["loop.mixed_precision=no"])
    assert Recipe.from_dict(values).loop.mixed_precision == "no"
