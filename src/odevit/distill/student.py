"""From a teacher to a student: what is copied, what is fresh, what is frozen, and what it weighs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from odevit.dynamics.cost import count_parameters
from odevit.model.config import OdeViTConfig, own_fields
from odevit.model.model import OdeViTForImageClassification
from odevit.teachers.teacher import Teacher, load_teacher

# fields of OdeViTConfig that a student takes over with the teacher's weights
TEACHERS_OWN = (
    "hidden_size", "num_attention_heads", "num_channels", "final_norm", "layer_norm_eps", "embedding_norm",
    "projection_size", "unit_features",
)  # fmt: skip
TOKENS = ("image_size", "patch_size", "tokenizer")
"""Fields with which a student has tokens of its own."""


class ParameterReport(NamedTuple):
    """Parameters of a student and of its teacher."""

    total: int
    trainable: int
    field: int
    teacher: int

    @property
    def ratio(self) -> float:
        """How many times smaller the student is, all its parameters counted."""
        return self.teacher / self.total


def student_of(teacher: Any, *, freeze_head: bool = True, **overrides: Any) -> OdeViTForImageClassification:
    """An ODE-ViT that starts from the teacher's tokens and answers through the teacher's norm and head.

    teacher: a Teacher, a ViT in memory, a folder or a hub name. overrides: fields of OdeViTConfig, such as num_fields,
    mlp_ratio, num_registers, num_steps. Width, heads, depth, image and patch size are the teacher's; extra tokens of
    the teacher (registers, distillation token) become registers unless num_registers says otherwise.

    Patch kernel and bias, CLS, positions, final norm and head are copied, never aliased; the field is fresh. With
    another image_size, patch_size or tokenizer the student has patches of its own, fresh too: smaller images and finer
    patches are cheaper to see. The head and its norm are frozen unless `freeze_head=False`. A teacher without a head
    that reads CLS gives a fresh head.
    """
    if not isinstance(teacher, Teacher):
        teacher = load_teacher(teacher)
    wrong = [name for name in overrides if name not in own_fields() or name in TEACHERS_OWN]
    if wrong:
        valid = [name for name in own_fields() if name not in TEACHERS_OWN]
        raise ValueError(f"cannot set {', '.join(wrong)} on a student; fields to choose: {', '.join(valid)}")
    parts = teacher.parts()
    extras = 0 if parts.registers is None else parts.registers.shape[1]
    config = OdeViTConfig(
        **{
            "image_size": teacher.image_size,
            "patch_size": teacher.patch_size,
            "num_channels": teacher.num_channels,
            "hidden_size": teacher.width,
            "num_attention_heads": teacher.heads,
            "depth": teacher.depth,
            "num_steps": teacher.depth,
            "num_registers": extras,
            "final_norm": "none" if parts.norm_weight is None else "layer",
            "embedding_norm": "none" if parts.embedding_norm_weight is None else "layer",
            "projection_size": None if parts.projection_weight is None else parts.projection_weight.shape[0],
            "unit_features": parts.unit_features,
            "layer_norm_eps": parts.norm_eps,
            "num_labels": teacher.num_labels or 2,
            "image_mean": None if parts.mean is None else list(parts.mean),
            "image_std": None if parts.std is None else list(parts.std),
            **overrides,
        }
    )
    student = OdeViTForImageClassification(config)
    copy_parts(teacher, student)
    labels = getattr(getattr(teacher.module, "config", None), "id2label", None)
    if labels and len(labels) == config.num_labels:
        student.config.id2label, student.config.label2id = dict(labels), {name: i for i, name in labels.items()}
    if freeze_head and parts.head_weight is not None:
        student.classifier.requires_grad_(False)
    if freeze_head and (parts.head_weight is not None or parts.projection_weight is not None):
        student.norm.requires_grad_(False)
        student.projection.requires_grad_(False)
    return student


@torch.no_grad()
def copy_parts(teacher: Teacher, student: OdeViTForImageClassification) -> list[str]:
    """Copy the teacher's parts into the student; the names of what was copied. A wrong shape is an error.

    Registers are copied when the student has as many as the teacher has extra tokens, patches when they are the same.
    """
    parts = teacher.parts()
    patches = {
        "odevit.tokenizer.projection.weight": parts.patch_weight,
        "odevit.tokenizer.projection.bias": parts.patch_bias,
        "odevit.positions": parts.positions,
    }
    sources: dict[str, Tensor | None] = {
        **(patches if same_patches(teacher, student) else {}),
        "odevit.cls_token": parts.cls_token,
        "odevit.embedding_norm.weight": parts.embedding_norm_weight,
        "odevit.embedding_norm.bias": parts.embedding_norm_bias,
        "norm.weight": parts.norm_weight,
        "norm.bias": parts.norm_bias,
        "projection.weight": parts.projection_weight,
        "classifier.weight": parts.head_weight,
        "classifier.bias": parts.head_bias,
    }
    if parts.registers is not None and parts.registers.shape == student.odevit.registers.shape:
        sources["odevit.registers"] = parts.registers
    copied = []
    for name, source in sources.items():
        if source is None:
            continue
        target = student.get_parameter(name)
        if target.shape != source.shape:
            raise ValueError(
                f"{name} must have one shape in both: the student has {tuple(target.shape)}, the teacher "
                f"{tuple(source.shape)}; leave num_labels to the teacher, or fine-tune it on these classes first"
            )
        target.copy_(source)
        copied.append(name)
    return copied


def same_patches(teacher: Teacher, student: OdeViTForImageClassification) -> bool:
    """Whether the student's patches are its teacher's, or its own."""
    theirs = {"image_size": teacher.image_size, "patch_size": teacher.patch_size, "tokenizer": "patch"}
    return all(getattr(student.config, name) == theirs[name] for name in TOKENS)


def parameter_report(student: OdeViTForImageClassification, teacher: nn.Module) -> ParameterReport:
    """Count the parameters of a student (all, trainable, those of its fields) and of its teacher."""

    own = count_parameters(student)
    return ParameterReport(own["total"], own["trainable"], own["blocks"], count_parameters(teacher)["total"])
