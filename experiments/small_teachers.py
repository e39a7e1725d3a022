"""Small Vision Transformers of many families, trained on scikit-learn's digits for a minute or less each.

All take images (b, 1, 8, 8) in patches of 4 × 4 and are 48 wide with 4 heads (Swin: 16 patches of 2 × 2 at width 24,
then 4 of 4 × 4 at width 48). `train` reads the labels, except for DINO-type teachers: these see two distorted views of
every image and no label (Caron et al., arXiv 2104.14294), and only the linear head on their frozen CLS token does.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from contraction_hypothesis import Images, minimise, normed_cls, refitted_head, with_head
from studies import imported_from_timm
from torch import Tensor, nn

WIDTH, HEADS, CLASSES = 48, 4, 10
IMAGES: dict[str, Any] = {"image_size": 8, "num_channels": 1, "num_labels": CLASSES}
SIZES: dict[str, Any] = {**IMAGES, "patch_size": 4, "hidden_size": WIDTH, "num_attention_heads": HEADS}
RATE = 5e-3  # of AdamW, for all
PROTOTYPES, MOMENTUM = 64, 0.95  # of DINO's head, and of its averaged teacher: a run has hundreds of steps only
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.05  # DINO's own


@dataclass(frozen=True)
class SmallTeacher:
    """One row of the study. labels: whether its blocks are trained with them. staged: tokens are merged on the way."""

    family: str
    depth: int
    build: Callable[[], Any]
    layer_scale: float | None = None  # where its increments begin to be scaled; None: they are not
    drop_path: float = 0.0
    labels: bool = True
    staged: bool = False


def hugging_face(kind: str, depth: int, suffix: str = "ForImageClassification", **fields: Any) -> Any:
    import transformers

    mlp = {"mlp_ratio": 2} if kind.startswith("Dinov2") else {"intermediate_size": 2 * WIDTH}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **mlp, num_hidden_layers=depth, **fields)
    return getattr(transformers, f"{kind}{suffix}")(config)


def timm_vit(depth: int, **fields: Any) -> Any:
    library = imported_from_timm("timm.models.vision_transformer")
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": CLASSES, "embed_dim": WIDTH}
    return library.VisionTransformer(**sizes, depth=depth, num_heads=HEADS, mlp_ratio=2, **fields)


def swin(depths: list[int], drop_path: float) -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        **IMAGES, patch_size=2, embed_dim=WIDTH // 2, depths=depths, num_heads=[2, 4][: len(depths)], window_size=2,
        mlp_ratio=2, drop_path_rate=drop_path,
    )  # fmt: skip
    return SwinForImageClassification(config)


def small_teachers() -> dict[str, SmallTeacher]:
    """Name → teacher. The order mixes families, so that a run that is cut short has seen all of them."""
    found: dict[str, SmallTeacher] = {}
    for depth in (6, 3):
        found |= of_every_family(depth)
    found["Swin, 2 + 4 blocks"] = SmallTeacher("Swin", 6, lambda: swin([2, 4], 0.0), staged=True)
    for scale, drop in ((0.1, 0.0), (None, 0.2), (0.1, 0.2)):
        words = " and ".join((["LayerScale 0.1"] if scale else []) + (["stochastic depth 0.2"] if drop else []))
        found[f"timm, 6 blocks, {words}"] = of_timm(6, scale, drop)
        found[f"DINOv2 with registers, 6 blocks, {words}"] = dinov2(6, scale or 1.0, drop)
    found["ViT, 9 blocks"] = SmallTeacher("ViT", 9, lambda: hugging_face("ViT", 9))
    found["timm, 6 blocks, 4 registers, query-key norm"] = SmallTeacher(
        "timm", 6, lambda: timm_vit(6, reg_tokens=4, qk_norm=True)
    )
    found |= of_every_family(12)
    found["Swin, 2 + 4 blocks, stochastic depth 0.2"] = SmallTeacher(
        "Swin", 6, lambda: swin([2, 4], 0.2), drop_path=0.2, staged=True
    )
    found["timm, 12 blocks, LayerScale 0.1 and stochastic depth 0.2"] = of_timm(12, 0.1, 0.2)
    return found


def of_every_family(depth: int) -> dict[str, SmallTeacher]:
    """One teacher of each family whose states a student can follow."""
    deit = "ForImageClassificationWithTeacher"
    return {
        f"ViT, {depth} blocks": SmallTeacher("ViT", depth, lambda: hugging_face("ViT", depth)),
        f"DeiT, distilled, {depth} blocks": SmallTeacher("DeiT", depth, lambda: hugging_face("DeiT", depth, deit)),
        f"DINO-type, {depth} blocks": SmallTeacher("DINO", depth, lambda: hugging_face("ViT", depth), labels=False),
        f"DINOv2 with registers, {depth} blocks": dinov2(depth, 1.0, 0.0),
        f"timm, {depth} blocks": of_timm(depth, None, 0.0),
    }


def dinov2(depth: int, scale: float, drop: float) -> SmallTeacher:
    fields = {"num_register_tokens": 4, "layerscale_value": scale, "drop_path_rate": drop}
    build = lambda: hugging_face("Dinov2WithRegisters", depth, **fields)  # noqa: E731
    return SmallTeacher("DINOv2", depth, build, layer_scale=scale, drop_path=drop)


def of_timm(depth: int, scale: float | None, drop: float) -> SmallTeacher:
    build = lambda: timm_vit(depth, init_values=scale, drop_path_rate=drop)  # noqa: E731
    return SmallTeacher("timm", depth, build, layer_scale=scale, drop_path=drop)


def train(teacher: SmallTeacher, images: Images, steps: int, seed: int = 0) -> Any:
    """A trained module in eval mode."""
    torch.manual_seed(seed)
    module = teacher.build()
    if not teacher.labels:
        return train_dino(module, images, steps, seed)

    def loss_of(rows: Tensor) -> Tensor:
        labels = images.train_labels[rows]
        heads = answers(module, images.train[rows])
        return torch.stack([nnf.cross_entropy(logits, labels, label_smoothing=0.1) for logits in heads]).mean()

    minimise(module, loss_of, len(images.train), steps, RATE, seed)
    return module


def answers(module: Any, images: Tensor) -> list[Tensor]:
    """Logits of every head: of CLS, and of the distillation token where there is one."""
    output = module(images)
    if isinstance(output, Tensor):
        return [output]
    return [output.cls_logits, output.distillation_logits] if "cls_logits" in output else [output.logits]


def distorted(images: Tensor) -> Tensor:
    """Each image (b, 1, 8, 8) turned, stretched and moved a little, with noise."""
    count = len(images)
    angle = 0.25 * torch.randn(count)
    scale = torch.empty(count).uniform_(0.8, 1.2)
    maps = torch.stack([scale * angle.cos(), -angle.sin(), angle.sin(), scale * angle.cos()], dim=1).view(-1, 2, 2)
    maps = torch.cat([maps, torch.empty(count, 2, 1).uniform_(-0.25, 0.25)], dim=2)
    grid = nnf.affine_grid(maps, list(images.shape), align_corners=False)
    moved = nnf.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return moved + 0.1 * torch.randn_like(images)


def balanced(scores: Tensor) -> Tensor:
    """(b, prototypes) → targets that use every prototype alike, by three Sinkhorn–Knopp steps: what DINOv2 has in the
    place of DINO's centering, with which these small teachers collapsed."""
    weights = (scores / TEACHER_TEMPERATURE).exp()
    for _ in range(3):
        weights = weights / weights.sum(dim=0)
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights


def train_dino(module: Any, images: Images, steps: int, seed: int) -> Any:
    """Blocks by DINO's loss between two views, then a linear head on the frozen CLS by logistic regression."""
    student = nn.ModuleDict({"vit": module.vit, "head": nn.Linear(WIDTH, PROTOTYPES, bias=False)})
    teacher = copy.deepcopy(student).requires_grad_(False)

    def features(network: nn.ModuleDict, views: Tensor) -> Tensor:
        cls = network["vit"](views).last_hidden_state[:, 0]
        weight: Any = network["head"].weight
        return nnf.normalize(cls, dim=-1) @ nnf.normalize(weight, dim=-1).T

    def loss_of(rows: Tensor) -> Tensor:
        views = torch.cat([distorted(images.train[rows]), distorted(images.train[rows])])
        with torch.no_grad():
            for mine, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
                theirs.lerp_(mine, 1 - MOMENTUM)
            target = balanced(features(teacher, views)).roll(len(rows), 0)  # of the other view
        log_answer = torch.log_softmax(features(student, views) / STUDENT_TEMPERATURE, dim=-1)
        return -(target * log_answer).sum(dim=-1).mean()

    minimise(student, loss_of, len(images.train), steps, RATE, seed)
    return with_head(module, *refitted_head(normed_cls(module, images.train), images.train_labels, 0)).eval()
