"""What a run is told: how the weights move and for how long, and what happens around the steps."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from odevit.data.augment import AugmentConfig
from odevit.parse import parse, plain

BUDGETS = ("epochs", "steps", "minutes")
RENAMED = {"loop": {"gradient_checkpointing": "recompute"}}  # group → {key of an earlier version: today's}


@dataclass
class OptimConfig:
    """How the weights move, and for how long: exactly one of epochs, steps and minutes."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of fields and pooling stems, AdamW for the rest
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
    # auto: bf16 on GPUs that have it, else no. A CPU with AVX-512 BF16 trains 1.9 times as fast in bf16, too
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    recompute: bool = False  # run each solver step again in the backward pass: less memory, slower
    compile: bool = False  # torch.compile of each field
    fsdp: bool = False  # split the model among torchrun's processes (FSDP2) instead of a copy each: for large teachers
    # [[from progress, K], …]: solver steps in training; a list in place of K, such as [3, 4, 6, "midpoint 3"], is drawn
    # from anew at every optimiser step, so that the weights learn the flow and not one number of steps
    step_schedule: list[tuple[float, int | list[int | str]]] = field(default_factory=list)
    anytime: float = 0.0  # share of the optimiser steps in which the head reads the state at a random time in [T/2, T]
    # a look at the weights (an SVD each) and, for 4 images, attention, field, σ_max of the flow (≤ 80 products) and the
    # distance to a teacher; timing.jsonl and the end of the run tell what the looks cost
    monitor_every: int = 0
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
        if not 0 <= self.anytime <= 1:
            raise ValueError(f"loop.anytime is a share of the steps, between 0 and 1; got {self.anytime}")


@dataclass
class PenaltyConfig:
    """Weights of terms added to the loss; 0 switches a term off. (The spectral cap is a field of the model.)"""

    jasmin: float = 0.0  # attention's Lipschitz surrogate
    jasmin_k: int = 0  # 0: log g₁; k ≥ 2: log g₁/g_k
    transport: float = 0.0  # ∫ mean ‖dX/dt‖² dt along the path
    margin: float = 0.0  # no weight but a radius ε (ℓ₂, pixels of [0, 1]) to certify: the loss of contractive models

    def __post_init__(self) -> None:
        for name in ("jasmin", "transport", "margin"):
            if getattr(self, name) < 0:
                raise ValueError(f"penalties.{name} must not be negative, got {getattr(self, name)}")


@dataclass(kw_only=True)
class RunConfig:
    """All that the loop reads. A recipe adds the data, the model and the task."""

    optim: OptimConfig
    seed: int = 0
    output: str = "runs/odevit"
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    penalties: PenaltyConfig = field(default_factory=PenaltyConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote, also in an earlier version."""
        return parse(cls, _renamed(values))

    def to_dict(self) -> dict[str, Any]:
        return plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for group, names in RENAMED.items():
        if isinstance(result.get(group), Mapping):
            result[group] = {names.get(key, key): value for key, value in result[group].items()}
    return result
