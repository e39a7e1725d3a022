"""A recipe: one small YAML file that says everything about a run, read into typed dataclasses.

Unknown keys and wrong types are errors that name the key and list what is valid. `--set a.b=c` replaces one value.
The configs of data, augmentation and distillation live beside the code that reads them.
"""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from odevit.data import DataConfig
from odevit.distill.objective import DistillConfig
from odevit.training.config import BUDGETS, RunConfig, plain

C = TypeVar("C")


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        recipe = parse(cls, values)
        if recipe.task == "distill" and recipe.distill is None:
            recipe.distill = DistillConfig()
        return recipe

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Recipe":
        """Read a YAML file and apply overrides such as "optim.lr=1e-3"."""
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no recipe {path}") from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold `key: value` lines, got {type(values).__name__}")
        return cls.from_dict(override(values, overrides))

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)


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


# --- the strict parser ------------------------------------------------------------------------------------------------


def parse(cls: type[C], values: Any, where: str = "") -> C:
    """A dataclass from a mapping: every key known, every value of the annotated type."""
    if dataclasses.is_dataclass(values) and isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'the recipe'} must be a group of keys, got {values!r}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in names:
            raise ValueError(f"unknown key {prefix}{key}; valid keys: {', '.join(names)}")
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in values:
            raise ValueError(f"{prefix}{f.name} is missing")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, arguments))}; got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, where)  # type: ignore[arg-type]
    if origin in (list, tuple, collections.abc.Sequence):
        return _convert_sequence(tuple if origin is tuple else list, arguments, value, where)
    if (origin or hint) is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a group of keys, got {value!r}")
        return dict(value)
    return _convert_scalar(hint, value, where)


def _convert_union(options: Sequence[Any], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is not type(None):
            try:
                return _convert(option, value, where)
            except ValueError as error:
                errors.append(str(error))
    raise ValueError(" or ".join(errors))


def _convert_sequence(origin: type, arguments: tuple, value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, got {value!r}")
    if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
        kinds = [arguments[0] if arguments else Any] * len(value)
    else:
        kinds = list(arguments)
        if len(kinds) != len(value):
            raise ValueError(f"{where} must have {len(kinds)} entries, got {value!r}")
    return origin(
        _convert(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _convert_scalar(hint: type, value: Any, where: str) -> Any:
    """YAML reads 1e-3 (without a point) as text: text that is a number counts as one where a number is expected."""
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif hint is int and not isinstance(value, bool):
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    elif hint in (bool, str) and isinstance(value, hint):
        return value
    raise ValueError(f"{where} must be {wanted.get(hint, hint)}, got {value!r}")
