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

from odevit.augment import AugmentConfig
from odevit.data import DataConfig

C = TypeVar("C")
BUDGETS = ("epochs", "steps", "minutes")


@dataclass
class OptimConfig:
    """How the weights move, and for how long: exactly one of epochs, steps and minutes."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the fields, AdamW for everything else
    lr: float = 1e-3
    muon_lr: float | None = None  # None: the same as lr (Muon's step is scaled to the size of an AdamW step)
    weight_decay: float = 0.05  # on matrices and convolutions only
    # of the matrices that Muon moves; None: the same. It bounds them: spectral norms end below 0.25 √(longer side) / it
    muon_weight_decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: float = 0.05  # fraction of the run
    cycles: int = 1  # half cosines after the warm-up, each from the full rate to zero
    epochs: float | None = None
    steps: int | None = None
    minutes: float | None = None  # wall clock of the loop with its validations; resuming is then not bit for bit
    batch_size: int = 128  # images per step over all processes
    accumulate: int = 1  # pieces in which each process works through its part of a batch: less memory, same numbers
    clip: float = 1.0  # largest norm of the gradient; 0 switches clipping off
    ema: float = 0.0  # decay of the averaged weights that are evaluated and saved; 0 switches them off
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        given = [f"optim.{name}" for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            came = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of optim.epochs, optim.steps and optim.minutes; got {came}")
        if getattr(self, given[0].removeprefix("optim.")) <= 0:
            raise ValueError(f"{given[0]} must be positive, got {getattr(self, given[0].removeprefix('optim.'))}")
        for name, low, high in (("warmup", 0, 1), ("ema", 0, 1), ("label_smoothing", 0, 1)):
            if not low <= getattr(self, name) < high:
                raise ValueError(f"optim.{name} must be in [{low}, {high}), got {getattr(self, name)}")
        for name in ("lr", "batch_size", "accumulate", "cycles"):
            if getattr(self, name) <= 0:
                raise ValueError(f"optim.{name} must be positive, got {getattr(self, name)}")
        for name in ("clip", "weight_decay", "muon_weight_decay"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"optim.{name} must not be negative, got {getattr(self, name)}")


@dataclass
class LoopConfig:
    """What happens around the steps: evaluation, checkpoints, speed, monitors. `every` counts steps."""

    eval_every: int = 0  # validation; 0: once an epoch
    log_every: int = 20  # one line in metrics.jsonl
    checkpoint_every: int = 0  # 0: at every validation
    checkpoint_minutes: float = 10.0  # and at the latest after so many minutes
    keep: int = 2  # checkpoints kept; the older one is the way back when the newest is damaged
    eval_batch_size: int = 256
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"  # auto: bf16 on GPUs that have it, else no
    gradient_checkpointing: bool = False  # recompute each solver step in the backward pass: less memory, slower
    compile: bool = False  # torch.compile of each field
    fsdp: bool = False  # split the model among torchrun's processes (FSDP2) instead of a copy each: for large teachers
    step_schedule: list[tuple[float, int]] = field(default_factory=list)  # [[from progress, solver steps], …]
    monitor_every: int = 0  # spectral norms (one SVD per matrix) and top Lyapunov exponent of 4 images; 0 = off
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.keep < 1 or self.log_every < 1 or self.eval_batch_size < 1:
            raise ValueError("loop.keep, loop.log_every and loop.eval_batch_size must be at least 1")
        for name in ("eval_every", "checkpoint_every", "monitor_every", "checkpoint_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"loop.{name} must not be negative, got {getattr(self, name)}")
        begins = [begin for begin, _ in self.step_schedule]
        if begins and (begins != sorted(begins) or begins[0] != 0):
            raise ValueError(f"loop.step_schedule must start at progress 0 and increase, got {self.step_schedule}")


@dataclass
class PenaltyConfig:
    """Weights of terms added to the loss; 0 switches a term off. (The spectral cap is a field of the model.)"""

    jasmin: float = 0.0  # attention's Lipschitz surrogate
    jasmin_k: int = 0  # 0: log g₁; k ≥ 2: log g₁/g_k
    transport: float = 0.0  # ∫ mean ‖dX/dt‖² dt along the path


@dataclass
class Recipe:
    """Everything about a run. `model` is one of

    {preset: NAME, …fields of OdeViTConfig}, {…fields of OdeViTConfig},
    {pretrained: DIRECTORY_OR_HUB_NAME, image_size: S, train: all | head} (any Hugging Face image classifier),
    {type: vit, …fields of ViTConfig} (a discrete ViT from scratch).
    """

    data: DataConfig
    optim: OptimConfig
    model: dict[str, Any] = field(default_factory=dict)
    task: Literal["train", "distill"] = "train"
    seed: int = 0
    output: str = "runs/odevit"
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    penalties: PenaltyConfig = field(default_factory=PenaltyConfig)
    distill: Any = None  # odevit.distill.DistillConfig, read when the task is distill

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        values = dict(values)
        distill = values.pop("distill", None)
        if distill is not None or values.get("task") == "distill":
            from odevit.distill import DistillConfig

            parsed = distill if isinstance(distill, DistillConfig) else parse(DistillConfig, distill or {}, "distill")
            return dataclasses.replace(parse(cls, values), distill=parsed)
        return parse(cls, values)

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

    def to_dict(self) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy with "a.b=c" applied; c is read as YAML. Setting one budget (epochs, steps, minutes) unsets the others."""
    import yaml

    result: dict[str, Any] = _plain(dict(values))
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


def _plain(value: Any) -> Any:
    """Tuples to lists, so that YAML and JSON give back what was written."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
