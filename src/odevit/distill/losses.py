"""Distillation losses: each compares a student with its teacher on one batch. A new one is one function here.

Shapes: L matched layers, b batch, n student tokens, M patches, E extra tokens of the teacher, d width. Squared
distances are summed over the width, averaged over batch and tokens, weighted and summed over layers: the paper's form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from odevit.distill.top import TopLogits, lumped
from odevit.dynamics.bounds import jasmin as jasmin_of
from odevit.registry import Registry


@dataclass
class Meeting:
    """What a student and its teacher did with one batch of images."""

    model: Any
    path: list[Tensor]  # student states at all its K+1 steps, each (b, n, d)
    student: Tensor  # (L, b, n, d) student states at the matched steps
    teacher: Tensor  # (L, b, 1 + M + E, d) teacher states at the matched layers; (L, b, 1, d) when only CLS is cached
    weights: Tensor  # (L, 1 + M + E), or (L, 1), of the teacher's tokens in each layer
    logits: Tensor  # (b, classes) of the student
    teacher_logits: Tensor | TopLogits | None
    teacher_attention: Tensor | None  # (b, h, M)
    targets: Tensor  # (b, classes)
    temperature: float = 1.0

    @property
    def num_patches(self) -> int:
        return self.model.config.num_patches


Loss = Callable[[Meeting], Tensor]
LOSSES: Registry[Loss] = Registry("loss")


def register_loss(loss: Loss) -> Loss:
    LOSSES[loss.__name__] = loss
    return loss


def _distance(meeting: Meeting, tokens: slice) -> Tensor:
    student, teacher = meeting.student[:, :, tokens], meeting.teacher[:, :, tokens]
    if student.shape != teacher.shape or student.shape[2] == 0:
        raise ValueError(
            f"student and teacher need the same tokens to compare, got {student.shape[2]} and {teacher.shape[2]}: "
            "patch_path needs distill.cache none or all, register_path as many registers as there are extra tokens"
        )
    squared = (student - teacher).square().sum(dim=-1).mean(dim=1)  # (L, tokens)
    return (meeting.weights[:, tokens] * squared).mean(dim=1).sum()


@register_loss
def cls_path(meeting: Meeting) -> Tensor:
    """Σ_l w_l mean ‖X(t_l)[CLS] - h_l[CLS]‖², the paper's loss."""
    return _distance(meeting, slice(0, 1))


@register_loss
def patch_path(meeting: Meeting) -> Tensor:
    """The same for the patch tokens."""
    return _distance(meeting, slice(1, 1 + meeting.num_patches))


@register_loss
def register_path(meeting: Meeting) -> Tensor:
    """The same for registers, when the teacher has as many extra tokens."""
    return _distance(meeting, slice(1 + meeting.num_patches, None))


@register_loss
def attention(meeting: Meeting) -> Tensor:
    """Σ |difference| of CLS's attention to the patches, teacher's last block against student's last step."""
    if meeting.teacher_attention is None:
        raise ValueError("the attention loss needs the teacher's attention: trace it with attention=True")
    field = meeting.model.odevit.fields[-1]
    student = field.attention_map(meeting.path[-2])[:, :, 0, 1 : 1 + meeting.num_patches]  # (b, h, M)
    return (student - meeting.teacher_attention).abs().sum(dim=-1).mean()


@register_loss
def jasmin(meeting: Meeting) -> Tensor:
    """log g₁ of the student's attention, mean over steps: lowers its Lipschitz bound."""
    return jasmin_of(meeting.model.odevit.attention_maps(meeting.path))


def answer_divergence(student: Tensor, teacher: Tensor | TopLogits, temperature: float) -> Tensor:
    """KL(teacher ‖ student) of logits (b, classes) at a temperature, times its square (Hinton et al. 2015).

    Of a teacher of whom only the top is known: over these classes and all the others as one, see `top`."""
    wide = torch.promote_types(student.dtype, torch.float32)  # autocast on a CPU would take logarithms in 16 bits
    if isinstance(teacher, TopLogits):
        said, meant = lumped(student.to(wide), teacher, temperature)
    else:
        said, meant = (torch.log_softmax(logits.to(wide) / temperature, dim=-1) for logits in (student, teacher))
    return nnf.kl_div(said, meant, reduction="batchmean", log_target=True) * temperature**2


@register_loss
def kl(meeting: Meeting) -> Tensor:
    """KL(teacher ‖ student) of the answers at the distillation temperature, times its square (Hinton et al. 2015)."""
    if meeting.teacher_logits is None:
        raise ValueError("the kl loss needs a teacher with a classification head")
    return answer_divergence(meeting.logits, meeting.teacher_logits, meeting.temperature)


@register_loss
def cross_entropy(meeting: Meeting) -> Tensor:
    """With the labels. The only loss here that reads them."""
    return nnf.cross_entropy(meeting.logits, meeting.targets)
