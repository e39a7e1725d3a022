"""A frozen teacher split among torchrun's processes (FSDP2): each holds its share of the weights, and all must ask."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from odevit.training.sharding import gathered, processes, shard_, summed


def shard_teacher_(config: Any, monitor_every: int, teacher: Any) -> None:
    """Split a frozen teacher among the processes, after checking that all of them will ask it together.

    One process has it whole. Until `gather_teacher_` it cannot be copied."""
    count = processes().total
    if count == 1:
        return
    if monitor_every or config.losses.get("attention"):
        raise ValueError(
            "a teacher that is split among processes (distill.shard_teacher) answers only when all of them ask it for "
            "all: set loop.monitor_every and distill.losses.attention to 0"
        )
    if config.cache != "none" and config.cache_shards == 1:
        raise ValueError(
            "a teacher that is split among processes cannot fill a cache that one of them writes: set "
            f"distill.cache_shards to a multiple of the {count} processes"
        )
    stand_ins: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in teacher.parameters()
    }
    object.__setattr__(
        teacher, "unsplit", copy.deepcopy(teacher.module, stand_ins)
    )  # all but its weights; no part of it
    shard_(teacher.module)


def gather_teacher_(teacher: Any) -> None:
    """Every process holds the whole teacher again, and may ask it alone. Nothing happens to one that is not split."""
    unsplit = vars(teacher).pop("unsplit", None)
    if unsplit is None:
        return
    weights = {name: gathered(parameter).detach() for name, parameter in teacher.module.named_parameters()}
    unsplit.load_state_dict(weights, strict=False, assign=True)  # buffers are its own
    teacher.module = unsplit.eval().requires_grad_(False)


class Lockstep:
    """A teacher that answers when all processes ask. One split among them (FSDP2) can do no other: who has no images
    left asks about a black one until all are done. Processes say before every question whether they still have some."""

    def __init__(self, teacher: Any):
        self.teacher = teacher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.teacher, name)

    def trace(self, images: Tensor) -> Any:
        self._anyone(True)
        return self.teacher.trace(images)

    def answer(self, images: Tensor) -> Any:
        self._anyone(True)
        return self.teacher.answer(images)

    def finish(self) -> None:
        device, size = next(self.teacher.parameters()).device, self.teacher.image_size
        while self._anyone(False):
            self.teacher.answer(torch.zeros(1, self.teacher.num_channels, size, size, device=device))

    def _anyone(self, me: bool) -> bool:
        return bool(summed(torch.tensor(float(me)), next(self.teacher.parameters()).device))
