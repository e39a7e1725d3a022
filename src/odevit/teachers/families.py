"""Where each family of Vision Transformers keeps its parts. One entry of TEACHERS per family.

A family recognises its models, names their parts (`Anatomy`), puts a resized patch kernel and positions back, and
builds a tiny random model of its kind (for contract tests and smoke runs). No library is imported to recognise a model:
a timm or torchvision model can only come from a process that has imported its library already.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odevit.registry import Registry
from odevit.teachers.resizing import resize_positions, resize_projection

NO_HEAD = "the teacher has no classification head: train one on its CLS token, or distil without logits"
AVERAGED_HEADS = (
    "the teacher averages a CLS head and a distillation head; only the CLS head is copied, because a student answers "
    "from CLS alone"
)
POOLED_PATCHES = "the teacher's classifier also reads the patch tokens, so no head on CLS alone gives its logits"


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model, by reference. E extra tokens (registers, distillation) stand between CLS and patches."""

    blocks: Sequence[nn.Module]
    heads: int
    projection: nn.Conv2d
    cls_token: Tensor  # (1, 1, d)
    extras: Tensor | None  # (1, E, d), without positions
    positions: Tensor  # (1, P + M, d): P positions for the first tokens, then one per patch
    norm: nn.LayerNorm | None  # None: CLS is read as it is
    head: nn.Linear | None  # reads norm(CLS)
    head_note: str  # empty when head(norm(CLS)) is the teacher's answer, else why not
    num_labels: int  # of the teacher's own logits; 0 without a head
    image_size: int
    embedding_norm: nn.LayerNorm | None = None  # of the tokens, before block 1
    readout: nn.Linear | None = None  # image towers: the head reads u / ‖u‖, u = readout(norm(CLS))
    unit_features: bool = False


class Family(ABC):
    """Adapter of one family. `antialias`: how its own library interpolates positions.

    looks_at_cls: whether its blocks read CLS; without one of its own, CLS is what its head makes of the patches.
    """

    antialias = False
    looks_at_cls = True

    @abstractmethod
    def recognises(self, module: nn.Module) -> bool: ...

    @abstractmethod
    def anatomy(self, module: Any) -> Anatomy: ...

    @abstractmethod
    def logits(self, module: Any, images: Tensor) -> Tensor | None:
        """Run the whole model. (b, c, S, S) -> (b, labels), or None without a head."""

    @abstractmethod
    def queries_and_keys(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b, n, d) entering the block -> its queries and keys, each (b, h, n, e), unscaled."""

    def prepare(self, module: nn.Module) -> nn.Module:
        """What the teacher keeps of a loaded model: all of it, but of two towers the image tower alone."""
        return module

    def block(self, module: Any, index: int, x: Tensor) -> Tensor:
        """Block `index` on states (b, 1 + M + E, d) in any order of tokens."""
        return self.anatomy(module).blocks[index](x)

    def states(self, module: Any, states: list[Tensor]) -> list[Tensor]:
        """What enters block 1 and what leaves every block -> the same as [CLS | extras | patches]."""
        return states

    def cls_attention(self, module: Any, x: Tensor) -> Tensor:
        """States (b, n, d) entering the last block -> (b, h, n): where its CLS looks."""
        query, key = self.queries_and_keys(self.anatomy(module).blocks[-1], x)
        return torch.softmax(query[:, :, 0, None] @ key.mT / query.shape[-1] ** 0.5, dim=-1)[:, :, 0]

    @abstractmethod
    def install(self, module: Any, image_size: int, projection: nn.Conv2d, positions: nn.Parameter) -> None:
        """Make `module` take images of another size, with this patch kernel and these positions."""

    @abstractmethod
    def example(self, *, image_size: int, patch_size: int, num_labels: int, num_channels: int) -> nn.Module:
        """A tiny random model: width 32, 3 blocks, 2 heads, dropout 0.1."""

    def resize(self, module: nn.Module, image_size: int | None = None, patch_size: int | None = None) -> None:
        """In place: interpolate positions to the new grid, resize the patch kernel if `patch_size` differs."""
        parts = self.anatomy(module)
        old_patch = parts.projection.kernel_size[0]
        image_size, patch_size = image_size or parts.image_size, patch_size or old_patch
        if (image_size, patch_size) == (parts.image_size, old_patch):
            return
        if image_size < 1 or patch_size < 1 or image_size % patch_size:
            near = max(1, round(image_size / patch_size)) * patch_size
            raise ValueError(
                f"image_size must be a multiple of the patch size {patch_size}, got {image_size}; use {near}"
            )
        positions = resize_positions(
            parts.positions, parts.image_size // old_patch, image_size // patch_size, antialias=self.antialias
        )
        projection = parts.projection if patch_size == old_patch else resize_projection(parts.projection, patch_size)
        self.install(module, image_size, projection, positions)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (b, n, d) -> (b, h, n, e)


def square(size: Any, what: str) -> int:
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise ValueError(f"a teacher needs square {what}, this one has {height} × {width}")
    return height


@dataclass(frozen=True)
class HuggingFace(Family):
    """Models of transformers: embeddings, a list of blocks, layernorm, at most one linear classifier."""

    config: str
    classes: tuple[str, ...]  # the first one is the example's
    blocks: str = "layers"
    block_norm: str = "layernorm_before"
    extras: str | None = None
    head: str = "classifier"
    head_note: str = ""
    antialias: bool = False
    mlp: tuple[str, int] = ("intermediate_size", 64)

    def recognises(self, module: nn.Module) -> bool:
        kinds = type(module).__mro__
        return any(kind.__module__.startswith("transformers.") and kind.__name__ in self.classes for kind in kinds)

    def anatomy(self, module: Any) -> Anatomy:
        base = module.base_model  # the model itself when it has no head
        embeddings = base.embeddings
        classifier = dict(module.named_children()).get(self.head)
        labels = module.config.num_labels if isinstance(classifier, nn.Linear) else 0
        readable = isinstance(classifier, nn.Linear) and self.head_note != POOLED_PATCHES
        return Anatomy(
            blocks=list(base.get_submodule(self.blocks)),
            heads=module.config.num_attention_heads,
            projection=embeddings.patch_embeddings.projection,
            cls_token=embeddings.cls_token,
            extras=getattr(embeddings, self.extras) if self.extras else None,
            positions=embeddings.position_embeddings,
            norm=base.layernorm,
            head=classifier if readable else None,
            head_note=self.head_note if labels else NO_HEAD,
            num_labels=labels,
            image_size=square(embeddings.patch_embeddings.image_size, "images"),
        )

    def logits(self, module: Any, images: Tensor) -> Tensor | None:
        output = module(images, return_dict=True)
        return output.logits if self.anatomy(module).num_labels else None

    def queries_and_keys(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x, attention = block.get_submodule(self.block_norm)(x), block.attention
        heads = attention.num_attention_heads
        return split_heads(attention.q_proj(x), heads), split_heads(attention.k_proj(x), heads)

    def install(self, module: Any, image_size: int, projection: nn.Conv2d, positions: nn.Parameter) -> None:
        embeddings = module.base_model.embeddings
        patches, patch_size = embeddings.patch_embeddings, projection.kernel_size[0]
        embeddings.position_embeddings, patches.projection = positions, projection
        patches.image_size, patches.patch_size = (image_size, image_size), (patch_size, patch_size)
        patches.num_patches = (image_size // patch_size) ** 2
        embeddings.image_size, embeddings.patch_size = patches.image_size, patch_size
        for config in (module.config, module.base_model.config):
            config.image_size, config.patch_size = image_size, patch_size

    def example(self, *, image_size: int, patch_size: int, num_labels: int, num_channels: int) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=2, hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1, image_size=image_size, patch_size=patch_size, num_channels=num_channels,
            num_labels=num_labels, **dict([self.mlp]),
        )  # fmt: skip
        return getattr(transformers, self.classes[0])(config)


class Timm(Family):
    """timm's VisionTransformer, with its registers, LayerScale, query-key norms and distilled DeiT variant."""

    antialias = True

    def recognises(self, module: nn.Module) -> bool:
        library = sys.modules.get("timm.models.vision_transformer")
        return library is not None and isinstance(module, library.VisionTransformer)

    def anatomy(self, module: Any) -> Anatomy:
        block = module.blocks[0]
        norm = module.norm if isinstance(module.norm, nn.LayerNorm) else module.fc_norm
        distilled = type(module).__name__ == "VisionTransformerDistilled"
        for works, reason in (
            (module.cls_token is not None, "a CLS token"),
            (module.pos_embed is not None, "learned absolute positions"),
            (isinstance(module.norm_pre, nn.Identity), "no norm before its first block"),
            (isinstance(module.patch_embed.norm, nn.Identity), "no norm in its patch embedding"),
            (isinstance(module.patch_embed.proj, nn.Conv2d), "one convolution as its patch embedding"),
            (isinstance(norm, nn.LayerNorm), "a final LayerNorm"),
            (type(block).__name__ == "Block" and type(block.attn).__name__ == "Attention", "plain blocks"),
        ):
            if not works:
                raise ValueError(f"a timm teacher must have {reason}; this {type(module).__name__} has not")
        classifier = module.head if isinstance(module.head, nn.Linear) else None
        reads_cls = module.global_pool == "token"
        note = AVERAGED_HEADS if distilled else "" if reads_cls else POOLED_PATCHES
        return Anatomy(
            blocks=list(module.blocks),
            heads=block.attn.num_heads,
            projection=module.patch_embed.proj,
            cls_token=module.cls_token,
            extras=module.dist_token if distilled else module.reg_token,
            positions=module.pos_embed,
            norm=norm,
            head=classifier if reads_cls else None,
            head_note=note if classifier is not None else NO_HEAD,
            num_labels=classifier.out_features if classifier is not None else 0,
            image_size=square(module.patch_embed.img_size, "images"),
        )

    def logits(self, module: Any, images: Tensor) -> Tensor | None:
        output = module(images)
        return output if isinstance(module.head, nn.Linear) else None

    def queries_and_keys(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
        heads = block.attn.num_heads
        return block.attn.q_norm(split_heads(query, heads)), block.attn.k_norm(split_heads(key, heads))

    def install(self, module: Any, image_size: int, projection: nn.Conv2d, positions: nn.Parameter) -> None:
        patches = module.patch_embed
        module.pos_embed, patches.proj = positions, projection
        patches.patch_size, patches.img_size = projection.kernel_size, (image_size, image_size)
        patches.grid_size = tuple(image_size // size for size in projection.kernel_size)
        patches.num_patches = patches.grid_size[0] * patches.grid_size[1]

    def example(self, *, image_size: int, patch_size: int, num_labels: int, num_channels: int) -> nn.Module:
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(
            img_size=image_size, patch_size=patch_size, in_chans=num_channels, num_classes=num_labels, embed_dim=32,
            depth=3, num_heads=2, mlp_ratio=2, pos_drop_rate=0.1, proj_drop_rate=0.1,
        )  # fmt: skip


class Torchvision(Family):
    """torchvision's VisionTransformer with its plain patch embedding."""

    def recognises(self, module: nn.Module) -> bool:
        library = sys.modules.get("torchvision.models.vision_transformer")
        return library is not None and isinstance(module, library.VisionTransformer)

    def anatomy(self, module: Any) -> Anatomy:
        if not isinstance(module.conv_proj, nn.Conv2d):
            raise ValueError("a torchvision teacher must have one convolution as its patch embedding, not a stem")
        linear = len(module.heads) == 1 and isinstance(module.heads[-1], nn.Linear)
        last = module.heads[-1]
        return Anatomy(
            blocks=list(module.encoder.layers),
            heads=module.encoder.layers[0].num_heads,
            projection=module.conv_proj,
            cls_token=module.class_token,
            extras=None,
            positions=module.encoder.pos_embedding,
            norm=module.encoder.ln,
            head=last if linear else None,
            head_note="" if linear else "the teacher's head is more than one linear layer",
            num_labels=last.out_features,
            image_size=module.image_size,
        )

    def logits(self, module: Any, images: Tensor) -> Tensor | None:
        return module(images)

    def queries_and_keys(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        attention = block.self_attention
        qkv = F.linear(block.ln_1(x), attention.in_proj_weight, attention.in_proj_bias)
        query, key, _ = qkv.chunk(3, dim=-1)
        return split_heads(query, attention.num_heads), split_heads(key, attention.num_heads)

    def install(self, module: Any, image_size: int, projection: nn.Conv2d, positions: nn.Parameter) -> None:
        module.encoder.pos_embedding, module.conv_proj = positions, projection
        module.image_size, module.patch_size = image_size, projection.kernel_size[0]
        module.seq_length = positions.shape[1]

    def example(self, *, image_size: int, patch_size: int, num_labels: int, num_channels: int) -> nn.Module:
        from torchvision.models.vision_transformer import VisionTransformer

        if num_channels != 3:
            raise ValueError(f"torchvision's VisionTransformer takes 3 channels only, got {num_channels}")
        return VisionTransformer(
            image_size=image_size, patch_size=patch_size, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64,
            dropout=0.1, attention_dropout=0.1, num_classes=num_labels,
        )  # fmt: skip


DINOV2: dict[str, Any] = {
    "blocks": "encoder.layer", "block_norm": "norm1", "head_note": POOLED_PATCHES, "mlp": ("mlp_ratio", 2)
}  # fmt: skip
TEACHERS: Registry[Family] = Registry("teacher family")
TEACHERS["vit"] = HuggingFace("ViTConfig", ("ViTForImageClassification",))
TEACHERS["dino"] = HuggingFace("ViTConfig", ("ViTModel",))
TEACHERS["deit"] = HuggingFace(
    "DeiTConfig", ("DeiTForImageClassification", "DeiTModel"), extras="distillation_token"
)  # fmt: skip
TEACHERS["deit-distilled"] = HuggingFace(
    "DeiTConfig", ("DeiTForImageClassificationWithTeacher",), extras="distillation_token", head="cls_classifier",
    head_note=AVERAGED_HEADS,
)  # fmt: skip
TEACHERS["dinov2"] = HuggingFace("Dinov2Config", ("Dinov2ForImageClassification", "Dinov2Model"), **DINOV2)
TEACHERS["dinov2-registers"] = HuggingFace(
    "Dinov2WithRegistersConfig", ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel"),
    extras="register_tokens", antialias=True, **DINOV2,
)  # fmt: skip
TEACHERS["timm"] = Timm()
TEACHERS["torchvision"] = Torchvision()
