"""ODE-ViTs in timm: `import odevit.timm`, then `timm.create_model("odevit_cifar_tiny")`.

Every preset and every model of the zoo is registered as `odevit_…`; `register(name, fields, folder)` adds one more,
with weights when a folder of `save_pretrained` is given. Stages of `forward_intermediates`
and of `features_only` are the steps of the solver.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from odevit.model.config import PRESETS, OdeViTConfig, own_fields
from odevit.model.layers import NORMS, interpolate_positions
from odevit.model.model import OdeViTForImageClassification, OdeViTModel
from odevit.model.pools import POOLS, Pool
from odevit.shipped import names, zoo

default_cfgs: dict[str, Any] = {}  # timm reads it at registration


class TimmOdeViT(nn.Module):
    """The flow and its head with timm's methods; `fields` are those of OdeViTConfig.

    global_pool: as `pool` of the config, or "" to return all tokens.
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | Sequence[int] | None = None,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **fields: Any,
    ):
        super().__init__()
        if unknown := [name for name in fields if name not in own_fields()]:
            raise TypeError(f"unknown field {', '.join(unknown)}; valid fields: {', '.join(own_fields())}")
        fields = {**fields, "num_channels": in_chans, "dropout": drop_rate, "drop_path": drop_path_rate}
        if global_pool:
            fields["pool"] = global_pool
        config = OdeViTConfig(**fields)
        if config.projection_size or config.unit_features:
            raise ValueError(
                "timm's head is linear: it has no place for projection_size and unit_features, the head of a CLIP "
                "tower; use OdeViTForImageClassification"
            )
        self.flow = OdeViTModel(config)
        self.norm = NORMS[config.final_norm](config.hidden_size, config.layer_norm_eps)
        self.num_features = self.embed_dim = config.hidden_size
        self.num_prefix_tokens = 1
        self.head: nn.Module = nn.Identity()
        self.pool: Pool | None = None
        if img_size is not None:
            self.set_input_size(img_size)
        self.reset_classifier(num_classes, config.pool if global_pool is None else global_pool)
        stage = {"num_chs": config.hidden_size, "reduction": config.patch_size}
        self.feature_info = [{**stage, "module": f"flow.step.{step}"} for step in range(config.num_steps)]

    @property
    def config(self) -> OdeViTConfig:
        return self.flow.config  # type: ignore[return-value]

    def forward_features(self, x: Tensor) -> Tensor:
        """Images → all tokens [CLS | patches | registers] at the end of the flow, after the final norm: (b, n, d)."""
        return self.norm(self.flow.evolve(self.flow.embed(x)).xs[-1])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (b, n, d) → logits (b, classes); without a pool (b, n, d) or (b, n, classes). No register is read."""
        x = x if self.pool is None else self.pool(x[:, : x.shape[1] - self.config.num_registers])
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """The patches after chosen steps, as maps (b, d, H/p, W/p) or tokens (b, M, d); see timm for the options.

        `stop_early` integrates only as far as the last of them.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        config = self.config
        taken, last = feature_take_indices(config.num_steps, indices)  # type: ignore[arg-type]
        until = None
        if stop_early and intermediates_only:
            until = config.time_grid().times()[last + 1]
        states = self.flow.evolve(self.flow.embed(x), save_at="steps", until=until).xs  # (steps + 1, b, n, d)
        chosen = [self.norm(states[index + 1]) if norm else states[index + 1] for index in taken]
        patches = [state[:, 1 : 1 + config.num_patches] for state in chosen]
        prefix = [state[:, :1] for state in chosen]
        if output_fmt == "NCHW":
            patches = [tokens.mT.unflatten(2, config.patch_grid).contiguous() for tokens in patches]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            result |= {"image_intermediates_prefix": prefix} if return_prefix_tokens else {}
            return result if intermediates_only else {**result, "image_features": self.norm(states[-1])}
        found = list(zip(patches, prefix, strict=True)) if return_prefix_tokens else patches
        return found if intermediates_only else (self.norm(states[-1]), found)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the features do not need. No steps are dropped: they share one field, and the grid is theirs."""
        taken, _ = feature_take_indices(self.config.num_steps, indices)  # type: ignore[arg-type]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head; none for 0 classes. global_pool: one of POOLS, "" (all tokens) or None (as it is)."""
        if global_pool is not None:
            if global_pool not in ("", *POOLS):
                raise ValueError(f"global_pool must be '' or one of {', '.join(POOLS)}, got {global_pool!r}")
            self.global_pool, tokens = global_pool, 1 + self.config.num_patches
            self.pool = POOLS[global_pool](self.num_features, tokens) if global_pool else None
        self.num_classes = num_classes
        self.head_hidden_size = self.pool.features if self.pool else self.num_features
        self.head = nn.Linear(self.head_hidden_size, num_classes) if num_classes else nn.Identity()
        if num_classes:
            nn.init.trunc_normal_(self.head.weight, std=0.02)  # type: ignore[arg-type]
            nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.flow.gradient_checkpointing = enable

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Take square images of another size: positions are interpolated. A pool of one size wants to be reset first:
        reset_classifier(0, ""), and afterwards with classes and its name."""
        sides = {img_size} if isinstance(img_size, int) else set(img_size)
        if len(sides) != 1:
            raise ValueError(f"an ODE-ViT takes square images, got {tuple(sides)}")
        size = sides.pop()
        if self.pool is not None:
            self.pool.check(1 + (size // self.config.patch_size) ** 2)
        self.flow.resize_images(size)

    def no_weight_decay(self) -> set[str]:
        return {"flow.cls_token", "flow.positions", "flow.registers"}


def from_huggingface(state: dict[str, Tensor], model: nn.Module | None = None) -> dict[str, Tensor]:
    """Weights of OdeViTForImageClassification under the names they have here; others as they are. Positions become
    those of the model's image size."""
    names = {"odevit.": "flow.", "classifier.": "head."}
    renamed = {
        next((new + name[len(old) :] for old, new in names.items() if name.startswith(old)), name): tensor
        for name, tensor in state.items()
    }
    if isinstance(model, TimmOdeViT) and "flow.positions" in renamed:
        positions = renamed["flow.positions"]
        side = math.isqrt(positions.shape[1] - 1)
        renamed["flow.positions"] = interpolate_positions(positions, (side, side), model.config.patch_grid)
    return renamed


def register(name: str, fields: dict[str, Any], folder: str | Path | None = None) -> None:
    """Teach timm a TimmOdeViT of these config fields; `pretrained=True` gives it the weights of the folder."""
    fields = dict(fields)
    if folder is not None:
        stored = json.loads((Path(folder) / "config.json").read_text())
        labels = {"num_labels": len(stored["id2label"])} if "id2label" in stored else {}
        fields = {**{key: stored[key] for key in own_fields() if key in stored}, **labels, **fields}
    classes = fields.pop("num_labels", 1000)
    channels, size = fields.pop("num_channels", 3), fields.get("image_size", 224)
    mean, std = (tuple(fields.get(key) or [0.5] * channels) for key in ("image_mean", "image_std"))
    default_cfgs[name] = generate_default_cfgs({name: {
        "url": "", "num_classes": classes, "input_size": (channels, size, size), "fixed_input_size": True,
        "pool_size": None, "crop_pct": 1.0, "interpolation": "bicubic", "mean": mean,
        "std": std, "license": "apache-2.0", "classifier": "head",
        "first_conv": "flow.tokenizer." + ("projection" if fields.get("tokenizer", "patch") == "patch" else "layers.0"),
        **({} if folder is None else {"file": str(Path(folder) / "model.safetensors")}),
    }})[name]  # fmt: skip

    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        options = {key: value for key, value in fields.items() if key not in ("image_mean", "image_std")}
        return build_model_with_cfg(
            TimmOdeViT, name, pretrained, pretrained_filter_fn=from_huggingface,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"},
            **{"num_classes": classes, "in_chans": channels, **options, **kwargs},
        )  # fmt: skip

    entry.__name__ = entry.__qualname__ = name
    register_model(entry)


for preset, preset_fields in PRESETS.items():
    register(f"odevit_{preset.replace('-', '_')}", preset_fields)
for shipped in names():
    register(f"odevit_{shipped.replace('-', '_')}", {}, zoo(shipped))


@torch.no_grad()
def to_timm(model: OdeViTForImageClassification) -> TimmOdeViT:
    """A classifier of ours with timm's methods: the same weights, copied."""
    fields = {name: getattr(model.config, name) for name in own_fields() if name != "num_labels"}
    renamed = {"in_chans": fields.pop("num_channels"), "drop_rate": fields.pop("dropout")}
    result = TimmOdeViT(
        **renamed, drop_path_rate=fields.pop("drop_path"), num_classes=int(model.config.num_labels or 0), **fields
    )
    result.to(device=model.device, dtype=model.dtype).load_state_dict(from_huggingface(model.state_dict()))
    return result.train(model.training)
