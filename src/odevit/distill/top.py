"""Answers of many classes, kept as the k largest logits and one number for all the others.

With p the teacher's and q the student's answer at temperature T, the classes outside the top k are lumped into one,
whose probability both know: KL over k + 1 classes. It never exceeds the KL over all classes: the difference is
p(rest) · KL(p | rest ‖ q | rest) (chain rule), so that it is small where the top k hold nearly everything, and zero
when k is the number of classes. How the rest is divided is left to the student; spreading it evenly instead would teach
an answer that the teacher never gave.

Shapes: b batch, C classes, k kept. ImageNet-1k with k = 32: 196 bytes an image instead of 4,000.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TopLogits(NamedTuple):
    """The largest logits of a teacher; rest: logsumexp of the others over T."""

    values: Tensor  # (b, k)
    classes: Tensor  # (b, k) long
    rest: Tensor  # (b,)


def keep_top(logits: Tensor, count: int, temperature: float) -> TopLogits:
    """(b, C) → its `count` < C largest."""
    values, classes = logits.topk(count, dim=1)
    others = logits.scatter(1, classes, -torch.inf)
    return TopLogits(values, classes, torch.logsumexp(others / temperature, dim=1))


def bytes_of_top(count: int, classes: int) -> int:
    """On disk, an image: values and rest in float32, classes in two bytes (four beyond 32,768 of them)."""
    return count * (4 + (2 if classes <= 2**15 else 4)) + 4


def lumped(student: Tensor, teacher: TopLogits, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits (b, C) of a student and its teacher's top → log-probabilities (b, k + 1) of both, the rest in the last."""
    scaled = student / temperature
    others = torch.logsumexp(scaled.scatter(1, teacher.classes, -torch.inf), dim=1, keepdim=True)
    whole = torch.logsumexp(scaled, dim=1, keepdim=True)
    said = torch.cat([scaled.gather(1, teacher.classes), others], dim=1) - whole
    meant = torch.cat([teacher.values / temperature, teacher.rest[:, None]], dim=1)
    return said, torch.log_softmax(meant, dim=1)
