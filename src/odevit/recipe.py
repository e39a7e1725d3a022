"""A recipe: one small YAML file that says everything about a run, read into typed dataclasses.

Unknown keys and wrong types are errors that name the key and list what is valid. `--set a.b=c` replaces one value.
The configs of data, augmentation and distillation live beside the code that reads them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from odevit.data import DataConfig
from odevit.distill.objective import DistillConfig
from odevit.parse import plain, reading
from odevit.training.config import BUDGETS, PenaltyConfig, RunConfig

RECIPES = Path(__file__).parent / "recipes"  # one YAML per experiment: command, time and accuracy in its header


@dataclass(kw_only=True)
class Recipe(RunConfig):
    """A run: what `RunConfig` says of the loop, and data, model and task. `model` is one of

    {preset: NAME, …fields of OdeViTConfig}, {…fields of OdeViTConfig},
    {pretrained: DIRECTORY_OR_HUB_NAME, image_size: S, train: all | head} (any Hugging Face image classifier),
    {type: vit, …fields of ViTConfig} (a discrete ViT from scratch).
    """

    data: DataConfig
    model: dict[str, Any] = field(default_factory=dict)
    task: Literal["train", "distill"] = "train"
    distill: DistillConfig | None = None  # read when the task is distill

    def __post_init__(self) -> None:
        if self.task != "distill":
            return
        self.distill = self.distill or DistillConfig()
        if self.penalties.jasmin:
            raise ValueError(
                f"penalties belong to training with labels; in a distillation write distill.losses.jasmin="
                f"{self.penalties.jasmin:g} instead of penalties.jasmin"
            )
        if self.penalties != PenaltyConfig():
            raise ValueError("penalties belong to training with labels: a distillation has distill.losses instead")
        if self.loop.fsdp:
            raise ValueError(
                "loop.fsdp works with task: train; a distillation trains a copy of the student per process"
            )

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Recipe":
        """Read a YAML file, or a recipe of the package by its name, and apply overrides such as "optim.lr=1e-3"."""
        path = find_recipe(path)
        with reading(path):
            values = read_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold `key: value` lines, got {type(values).__name__}")
        return cls.from_dict(override(values, overrides))


def read_yaml(text: str) -> Any:
    """YAML of plain values: no key twice, and no references, of which a few lines make a tree without end."""
    import yaml

    class PlainLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("a recipe has no references (*name); write the values out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if isinstance(key, str) and keys.count(key) > 1:
                    raise ValueError(f"the key {key!r} stands twice in one group")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, PlainLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not valid YAML: {error}") from error


def recipe_names() -> list[str]:
    """Of the recipes in the package: "digits", "cifar10/distill", …"""
    return sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml"))


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path, else a name of the package's."""
    if Path(name).is_file():
        return Path(name)
    if str(name) in recipe_names():
        return RECIPES / f"{name}.yaml"
    raise ValueError(f"there is no recipe {name}: neither a file, nor one of {', '.join(recipe_names())}")


def assignment(key: str, value: Any) -> str:
    """key=value for `override`, such that the value arrives as it is: "imgs #2" and "2024-05-01" are no YAML."""
    return f"{key}={json.dumps(value if isinstance(value, bool) else str(value))}"


def override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy with "a.b=c" applied; c is read as YAML. Setting one budget (epochs, steps, minutes) unsets the others."""
    import yaml

    result: dict[str, Any] = plain(dict(values))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ValueError(f"an override is written key=value, for example optim.lr=1e-3; got {assignment!r}")
        *parents, name = path.strip().split(".")
        target = result
        for parent in parents:
            if target.get(parent) is None:
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                raise ValueError(f"cannot set {path}: {parent} is a single value, not a group of keys")
        if parents == ["optim"] and name in BUDGETS:
            for other in BUDGETS:
                target.pop(other, None)
        target[name] = yaml.safe_load(text)
    return result
