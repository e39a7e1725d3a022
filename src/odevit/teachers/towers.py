"""Image towers of two-tower models (CLIP, SigLIP), and the texts they are compared with as a frozen linear head.

Among texts with unit embeddings w_j a tower's logits are s ⟨w_j, u/‖u‖⟩ + b, u what it makes of the image: a linear
layer on u/‖u‖ with rows s·w_j. So zero-shot classes are a head like any other, no label is needed, and other classes
are other rows.

CLIP (Radford et al., arXiv 2103.00020): a norm before block 1, u = P norm(CLS). SigLIP (Zhai et al., arXiv 2303.15343):
no CLS, u = what a learned probe gathers from the last patches. Its CLS is defined here as what that probe gathers from
the patches after each block: after the last block it is u exactly; on the way it is what the tower would say there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odevit.teachers.families import NO_HEAD, TEACHERS, Anatomy, Family, split_heads, square


class ImageTower(nn.Module):
    """The image tower of a two-tower model, its projection, and the texts it knows.

    vision: CLIPVisionModel or SiglipVisionModel of transformers. projection: None where the tower has none.
    head: (labels, e), rows s·w_j; None until texts are given. Without it the tower has features only.
    """

    def __init__(self, vision: Any, projection: nn.Linear | None = None, head: nn.Linear | None = None):
        super().__init__()
        self.vision, self.projection, self.head = vision, projection, head
        self.config = vision.config

    def features(self, images: Tensor) -> Tensor:
        """(b, c, S, S) -> (b, e), not yet of length one."""
        pooled = self.vision(images).pooler_output
        return pooled if self.projection is None else self.projection(pooled)

    def forward(self, images: Tensor) -> SimpleNamespace:
        """(b, c, S, S) -> .logits (b, labels), None without texts."""
        features = self.features(images)
        return SimpleNamespace(logits=None if self.head is None else self.head(F.normalize(features, dim=-1)))


@torch.no_grad()
def text_head(model: Any, tokenizer: Any, class_names: Sequence[str], prompts: Sequence[str]) -> nn.Linear:
    """The texts of two-tower `model` as a linear layer on unit image features: rows s·w_j, and its bias if it has one.

    Several prompts, such as "a photo of a {}": the unit embeddings of a class are averaged, as CLIP's authors do.
    """
    if not hasattr(model, "logit_scale"):
        raise ValueError(f"prompts need a model with a text tower (CLIPModel, SiglipModel), got {type(model).__name__}")
    if wrong := [prompt for prompt in prompts if "{}" not in prompt]:
        raise ValueError(f"a prompt must say where the class goes, as in 'a photo of a {{}}'; got {wrong[0]!r}")
    length = model.config.text_config.max_position_embeddings
    rows = []
    for name in class_names:
        texts = [prompt.replace("{}", name.replace("_", " ")) for prompt in prompts]
        ids = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        wanted = {"input_ids": ids["input_ids"]}
        if type(model).__name__ == "CLIPModel" and "attention_mask" in ids:  # SigLIP also reads its padding
            wanted["attention_mask"] = ids["attention_mask"]
        embedded = F.normalize(model.eval().get_text_features(**wanted).pooler_output, dim=-1)
        rows.append(F.normalize(embedded.mean(dim=0), dim=0))
    head = nn.Linear(rows[0].shape[0], len(rows))
    head.weight.copy_(torch.stack(rows) * model.logit_scale.exp())
    head.bias.fill_(float(model.logit_bias) if hasattr(model, "logit_bias") else 0.0)
    return head


def zero_shot_tower(model: Any, tokenizer: Any, class_names: Sequence[str], prompts: Sequence[str]) -> ImageTower:
    """The image tower of a two-tower model with these classes as its head."""
    head = text_head(model, tokenizer, class_names, prompts)
    tower = image_tower(model)
    tower.head = head
    tower.config.id2label = dict(enumerate(class_names))
    tower.config.label2id = {name: index for index, name in enumerate(class_names)}
    return tower


def image_tower(model: Any) -> ImageTower:
    """The image tower of a two-tower model or of its vision half; no weights are copied."""
    if isinstance(model, ImageTower):
        return model
    return ImageTower(getattr(model, "vision_model", model), getattr(model, "visual_projection", None))


@dataclass(frozen=True)
class Towers(Family):
    """Image towers of transformers with CLIP's embeddings and blocks."""

    vision: str
    classes: tuple[str, ...]
    projects: bool = True

    def recognises(self, module: nn.Module) -> bool:
        inner = module.vision if isinstance(module, ImageTower) else module
        names = {kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("transformers.")}
        return bool(names & {self.vision, *self.classes})

    def prepare(self, module: nn.Module) -> nn.Module:
        return image_tower(module)

    def anatomy(self, module: Any) -> Anatomy:
        tower = image_tower(module)
        vision, embeddings = tower.vision, tower.vision.embeddings
        return Anatomy(
            blocks=list(vision.encoder.layers),
            heads=vision.config.num_attention_heads,
            projection=embeddings.patch_embedding,
            cls_token=self.cls_token(vision),
            extras=None,
            positions=embeddings.position_embedding.weight[None],
            norm=self.final_norm(vision),
            head=tower.head,
            head_note="" if tower.head is not None else f"{NO_HEAD}; or give it texts as classes (distill --prompts)",
            num_labels=0 if tower.head is None else tower.head.out_features,
            image_size=square(embeddings.image_size, "images"),
            embedding_norm=vision.pre_layrnorm if hasattr(vision, "pre_layrnorm") else None,
            readout=tower.projection,
            unit_features=tower.head is not None,
        )

    def cls_token(self, vision: Any) -> Tensor:
        return vision.embeddings.class_embedding[None, None]

    def final_norm(self, vision: Any) -> nn.LayerNorm | None:
        return vision.post_layernorm

    def logits(self, module: Any, images: Tensor) -> Tensor | None:
        return module(images).logits

    def block(self, module: Any, index: int, x: Tensor) -> Tensor:
        return module.vision.encoder.layers[index](x, None)

    def queries_and_keys(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x, attention = block.layer_norm1(x), block.self_attn
        heads = attention.num_heads
        return split_heads(attention.q_proj(x), heads), split_heads(attention.k_proj(x), heads)

    def install(self, module: Any, image_size: int, projection: nn.Conv2d, positions: nn.Parameter) -> None:
        embeddings, count = module.vision.embeddings, positions.shape[1]
        embeddings.patch_embedding = projection
        embeddings.position_embedding = nn.Embedding(count, positions.shape[2])
        embeddings.position_embedding.weight = nn.Parameter(positions[0].detach(), positions.requires_grad)
        embeddings.position_ids = torch.arange(count, device=positions.device)[None]
        embeddings.image_size, embeddings.patch_size = image_size, projection.kernel_size[0]
        embeddings.num_patches, embeddings.num_positions = (image_size // projection.kernel_size[0]) ** 2, count
        module.config.image_size, module.config.patch_size = image_size, projection.kernel_size[0]

    def example(self, *, image_size: int, patch_size: int, num_labels: int, num_channels: int) -> nn.Module:
        import transformers

        kind = getattr(transformers, self.vision)
        vision = kind(
            kind.config_class(
                hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
                attention_dropout=0.1, image_size=image_size, patch_size=patch_size, num_channels=num_channels,
            )
        )  # fmt: skip
        projection = nn.Linear(32, 24, bias=False) if self.projects else None
        return ImageTower(vision, projection, nn.Linear(24 if self.projects else 32, num_labels, bias=False))


class SigLIP(Towers):
    """Towers without CLS: a probe gathers the patches. CLS is what it gathers after each block."""

    looks_at_cls = False

    def cls_token(self, vision: Any) -> Tensor:
        if not vision.use_head:
            raise ValueError("a SigLIP teacher must have its pooling head (vision_use_head), this one has not")
        return vision.head.probe

    def final_norm(self, vision: Any) -> nn.LayerNorm | None:
        return None

    def gather(self, module: Any, patches: Tensor) -> Tensor:
        """(b, M, d) -> [CLS | patches] (b, 1 + M, d)."""
        vision = module.vision
        return torch.cat([vision.head(vision.post_layernorm(patches))[:, None], patches], dim=1)

    def states(self, module: Any, states: list[Tensor]) -> list[Tensor]:
        first = torch.cat([module.vision.head.probe.expand(len(states[0]), -1, -1), states[0]], dim=1)
        return [first, *(self.gather(module, patches) for patches in states[1:])]

    def block(self, module: Any, index: int, x: Tensor) -> Tensor:
        return self.gather(module, super().block(module, index, x[:, 1:]))

    def cls_attention(self, module: Any, x: Tensor) -> Tensor:
        patches = Towers.block(self, module, -1, x[:, 1:])
        pooling = module.vision.head.attention
        weight, bias = (t.chunk(3) for t in (pooling.in_proj_weight, pooling.in_proj_bias))
        query = F.linear(module.vision.head.probe, weight[0], bias[0])
        key = F.linear(module.vision.post_layernorm(patches), weight[1], bias[1])
        query, key = split_heads(query, pooling.num_heads), split_heads(key, pooling.num_heads)
        row = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, dim=-1)[:, :, 0]  # (b, h, M)
        return F.pad(row, (1, 0))  # the probe does not look at itself


TEACHERS["clip"] = Towers("CLIPVisionModel", ("CLIPModel", "CLIPVisionModelWithProjection"))
TEACHERS["siglip"] = SigLIP("SiglipVisionModel", ("SiglipModel",), projects=False)
