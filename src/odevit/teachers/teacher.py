"""Any trained Vision Transformer as a frozen teacher: its states, attention and logits, and the parts a student copies.

    teacher = load_teacher("facebook/deit-tiny-patch16-224", image_size=96)
    trace = teacher.trace(images, attention=True)  # .states[l]: raw output of block l; [0]: what enters block 1
    parts = teacher.parts()                        # copies: patch kernel, CLS, positions, final norm, head

Shapes: b batch, S image size, M patches, E extra tokens (registers, distillation token), d width, h heads.
Every state is ordered [CLS | M patches | E extras], so its first 1 + M tokens line up with a student's. Blocks know
nothing of positions, so the order changes nothing but rounding.

Which head a student copies: the linear layer that reads norm(CLS). A distilled DeiT averages two heads, so its CLS head
alone is close to its answer but not equal; DINOv2's classifier also reads the mean patch, so no head on CLS can stand
for it and `parts().head_weight` is None. `parts().head_note` says so; `trace().logits` are always the teacher's own.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from odevit.checksum import checksum
from odevit.data import prepare
from odevit.teachers.families import TEACHERS, Anatomy, Family
from odevit.teachers.preprocessing import Preprocessing, carried_preprocessing
from odevit.teachers.reading import read_model, read_tokenizer
from odevit.teachers.resizing import resize_patch_kernel
from odevit.teachers.towers import zero_shot_tower

__all__ = [
    "TEACHERS",
    "Teacher",
    "TeacherParts",
    "TeacherTrace",
    "find_family",
    "is_known",
    "load_teacher",
    "resize_classifier",
    "resize_patch_kernel",
    "tiny_teacher",
]


@dataclass
class TeacherTrace:
    """What a teacher did with a batch."""

    states: list[Tensor]  # D + 1 of (b, 1 + M + E, d): the tokens entering block 1, then every raw block output
    attention: Tensor | None  # (b, h, M): CLS row of the last block over the patches; E and CLS columns left out
    logits: Tensor | None  # (b, labels); None without a head


@dataclass
class TeacherParts:
    """Copies of what a student takes over; changing them never reaches the teacher."""

    patch_weight: Tensor  # (d, c, p, p)
    patch_bias: Tensor  # (d,)
    cls_token: Tensor  # (1, 1, d)
    positions: Tensor  # (1, 1 + M, d)
    registers: Tensor | None  # (1, E, d): the extra tokens with their positions already added
    embedding_norm_weight: Tensor | None  # (d,): a norm of the tokens before block 1 (CLIP), with norm_eps
    embedding_norm_bias: Tensor | None
    norm_weight: Tensor | None  # (d,); None: CLS is read as it is (SigLIP)
    norm_bias: Tensor | None  # (d,)
    norm_eps: float
    projection_weight: Tensor | None  # (e, d): an image tower's projection, before the head
    unit_features: bool  # the head reads what comes before it brought to length one
    head_weight: Tensor | None  # (labels, d), or (labels, e) behind a projection
    head_bias: Tensor | None  # (labels,)
    head_note: str  # empty: head(norm(h_D[CLS])) gives the teacher's logits; else the reason why not
    mean: tuple[float, ...] | None  # the teacher's own normalisation per channel, for images in 0..1
    std: tuple[float, ...] | None

    def norm(self, cls: Tensor) -> Tensor:
        """(b, d) -> (b, d): the final norm."""
        if self.norm_weight is None:
            return cls
        return layer_norm(cls, cls.shape[-1:], self.norm_weight, self.norm_bias, self.norm_eps)

    def answer_head(self) -> tuple[Tensor, Tensor]:
        """Weight (labels, d) and bias of the linear map on norm(CLS) that gives the answers of a teacher with a head.

        Its logits are the teacher's; with unit features they are so up to a positive factor of the image.
        """
        assert self.head_weight is not None
        assert self.head_bias is not None
        weight = self.head_weight if self.projection_weight is None else self.head_weight @ self.projection_weight
        return weight, torch.zeros_like(self.head_bias) if self.unit_features else self.head_bias


class Teacher(nn.Module):
    """A frozen ViT in eval mode for ever. Made by `load_teacher`, which hands over a module nobody else holds."""

    def __init__(
        self,
        module: nn.Module,
        family: str,
        *,
        preprocessing: Preprocessing | None = None,
    ):
        super().__init__()
        self.module = module.eval().requires_grad_(False)
        self.training = False
        self.family = family
        self.mean, self.std, self.frame = preprocessing or Preprocessing()
        anatomy = self.anatomy
        self.width: int = anatomy.projection.out_channels
        self.num_channels: int = anatomy.projection.in_channels
        self.patch_size: int = anatomy.projection.kernel_size[0]
        self.heads, self.depth = anatomy.heads, len(anatomy.blocks)
        self.image_size, self.num_labels = anatomy.image_size, anatomy.num_labels
        self.num_patches = (self.image_size // self.patch_size) ** 2
        self.extra_tokens = 0 if anatomy.extras is None else anatomy.extras.shape[1]
        if self.frame is not None:
            self.frame = self.frame.scaled(self.image_size)

    @property
    def adapter(self) -> Family:
        return TEACHERS[self.family]

    @property
    def anatomy(self) -> Anatomy:
        return self.adapter.anatomy(self.module)

    def train(self, mode: bool = True) -> "Teacher":
        """Does nothing: a teacher never leaves eval mode."""
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(b, c, S, S) -> (b, labels): the teacher's own logits."""
        logits = self.answer(images)
        if logits is None:
            raise ValueError(f"this {self.family} teacher cannot classify: {self.anatomy.head_note}")
        return logits

    @torch.no_grad()
    def answer(self, images: Tensor) -> Tensor | None:
        """(b, c, S, S) -> (b, labels), the teacher's own logits; None without a head, but run all the same."""
        self.check(images)
        return self.adapter.logits(self.module, images)

    @torch.no_grad()
    def trace(self, images: Tensor, attention: bool = False) -> TeacherTrace:
        """Run the teacher once on (b, c, S, S) and return every state; hooks live only during this call."""
        self.check(images)
        blocks = self.anatomy.blocks
        states: list[Tensor] = []
        hooks = [blocks[0].register_forward_pre_hook(lambda block, args: states.append(args[0]))]
        hooks += [block.register_forward_hook(lambda block, args, output: states.append(output)) for block in blocks]
        try:
            logits = self.adapter.logits(self.module, images)
        finally:
            for hook in hooks:
                hook.remove()
        states = [self.extras_last(state) for state in self.adapter.states(self.module, states)]
        return TeacherTrace(states, self.cls_attention(states[-2]) if attention else None, logits)

    def block(self, index: int, x: Tensor) -> Tensor:
        """Block `index` (from 0) on tokens (b, n, d) in any order; gradients reach x, never the teacher."""
        return self.adapter.block(self.module, index, x)

    def cls_attention(self, x: Tensor) -> Tensor:
        """(b, 1 + M + E, d) entering the last block -> (b, h, M): how its CLS attends to the patches."""
        return self.adapter.cls_attention(self.module, x)[:, :, 1 : 1 + self.num_patches]

    def extras_last(self, state: Tensor) -> Tensor:
        """[CLS | extras | patches], the order of every family, -> [CLS | patches | extras]."""
        if self.extra_tokens == 0:
            return state
        cls, extras, patches = state.split([1, self.extra_tokens, self.num_patches], dim=1)
        return torch.cat([cls, patches, extras], dim=1)

    def parts(self) -> TeacherParts:
        """Copies of the parts that a student takes over. A missing bias is a bias of zeros."""
        a = self.anatomy
        positions = a.positions.detach()
        prefix = positions.shape[1] - self.num_patches  # 0 (CLS has none), 1 (CLS), 1 + E (CLS and extras)
        cls_position = positions[:, :1] if prefix else torch.zeros_like(positions[:, :1])
        extras = None if a.extras is None else a.extras.detach().clone()
        if extras is not None and prefix > 1:
            extras = extras + positions[:, 1:prefix]
        return TeacherParts(
            patch_weight=copied(a.projection.weight),
            patch_bias=copied_bias(a.projection),
            cls_token=copied(a.cls_token),
            positions=torch.cat([cls_position, positions[:, prefix:]], dim=1),
            registers=extras,
            embedding_norm_weight=None if a.embedding_norm is None else copied(a.embedding_norm.weight),
            embedding_norm_bias=None if a.embedding_norm is None else copied_bias(a.embedding_norm),
            norm_weight=None if a.norm is None else copied(a.norm.weight),
            norm_bias=None if a.norm is None else copied_bias(a.norm),
            norm_eps=1e-6 if a.norm is None else a.norm.eps,
            projection_weight=None if a.readout is None else copied(a.readout.weight),
            unit_features=a.unit_features,
            head_weight=None if a.head is None else copied(a.head.weight),
            head_bias=None if a.head is None else copied_bias(a.head),
            head_note=a.head_note,
            mean=self.mean,
            std=self.std,
        )

    def checksum(self) -> str:
        """sha256 of the name, type, shape and bytes of every parameter and buffer."""
        return checksum(self.module)

    def renormalise(self, images: Tensor, config: Any) -> Tensor:
        """Images (b, c, S, S) prepared as `config` (of a student) says → of the size and normalisation of this teacher.

        The same tensor where both agree. A teacher that does not say how its images are normalised takes the student's.
        """
        theirs = (tuple(config.image_mean or ()), tuple(config.image_std or ()))
        if images.shape[-1] != self.image_size and all(theirs):
            old_mean, old_std = (images.new_tensor(x)[:, None, None] for x in theirs)
            pixels = (images * old_std + old_mean).clamp(0, 1)
            return prepare(pixels, self.image_size, self.mean or theirs[0], self.std or theirs[1])
        if self.mean is None or self.std is None or not all(theirs) or theirs == (self.mean, self.std):
            return images
        old_mean, old_std, mean, std = (images.new_tensor(x)[:, None, None] for x in (*theirs, self.mean, self.std))
        return (images * old_std + old_mean - mean) / std

    def check(self, images: Tensor) -> None:
        expected = (self.num_channels, self.image_size, self.image_size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"this teacher takes images (b, {', '.join(map(str, expected))}), got {tuple(images.shape)}; "
                f"resize the images or load it with load_teacher(…, image_size=…)"
            )


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def copied_bias(layer: Any) -> Tensor:
    return layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else copied(layer.bias)


def is_known(module: nn.Module) -> bool:
    """Whether it is a Vision Transformer of a family in TEACHERS."""
    return any(family.recognises(module) for family in TEACHERS.values())


def find_family(module: nn.Module) -> str:
    """The name of the family in TEACHERS that recognises this model."""
    for name, family in TEACHERS.items():
        if family.recognises(module):
            return name
    raise ValueError(
        f"a teacher must be a Vision Transformer of a supported family ({', '.join(TEACHERS)}), got "
        f"{type(module).__module__}.{type(module).__name__}"
    )


def load_teacher(
    source: str | Path | nn.Module,
    image_size: int | None = None,
    patch_size: int | None = None,
    prompts: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Teacher:
    """A frozen teacher from a folder, a hub name (`timm/…` through timm, else transformers) or a model in memory.

    A model in memory is deep-copied: neither its weights, nor its mode, nor its requires_grad flags ever change.
    image_size: the square images it will take; positions are interpolated once, the way its own library does.
    patch_size: another patch size by pseudo-inverse resize of the patch kernel, e.g. 8 for images of half the size.
    prompts, class_names: of a two-tower model (CLIP, SigLIP), whose text tower turns them into its head.
    """
    if isinstance(source, nn.Module):
        find_family(source)  # fail before copying
        module, preprocessing = copy.deepcopy(source), carried_preprocessing(source)
    else:
        module, preprocessing = read_model(str(source))
    if prompts:
        module = zero_shot_tower(module, read_tokenizer(source), class_names, prompts)
    family = find_family(module)
    module = TEACHERS[family].prepare(module)
    TEACHERS[family].resize(module, image_size, patch_size)
    return Teacher(module, family, preprocessing=preprocessing)


def tiny_teacher(
    family: str, *, image_size: int = 32, patch_size: int = 8, num_labels: int = 10, num_channels: int = 3
) -> Teacher:
    """A tiny random teacher of one family, for smoke runs and tests."""
    if family not in TEACHERS:
        raise ValueError(f"unknown teacher family {family!r}; choose one of {', '.join(TEACHERS)}")
    sizes = {"image_size": image_size, "patch_size": patch_size}
    return load_teacher(TEACHERS[family].example(**sizes, num_labels=num_labels, num_channels=num_channels))


def resize_classifier(model: Any, image_size: int, num_labels: int | None = None) -> Any:
    """Prepare a trainable Hugging Face classifier for fine-tuning at another image size, in place.

    Positions are interpolated; with `num_labels` every head becomes a fresh linear layer of that many classes. The
    config follows, so `save_pretrained` and `from_pretrained` round-trip at the new size. Returns the model.
    """
    family = TEACHERS[find_family(model)]
    heads = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    if not heads or not type(model).__module__.startswith("transformers."):
        raise ValueError(
            f"resize_classifier needs a Hugging Face model with a linear classifier, got {type(model).__name__}; "
            "load it with AutoModelForImageClassification.from_pretrained(…)"
        )
    family.resize(model, image_size)
    if num_labels is not None:
        for name in heads:
            old = model.get_submodule(name)
            new = nn.Linear(old.in_features, num_labels, device=old.weight.device, dtype=old.weight.dtype)
            nn.init.trunc_normal_(new.weight, std=model.config.initializer_range)
            nn.init.zeros_(new.bias)
            setattr(model, name, new)
        model.config.num_labels = model.num_labels = num_labels
    return model
