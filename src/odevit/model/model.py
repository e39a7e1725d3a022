"""The model, Hugging Face-native. Its forward reads like the paper: embed, evolve, classify.

Shapes: b batch, n = 1 + M + R tokens [CLS | M patches | R registers], d width, h heads, K steps.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, PreTrainedModel
from transformers.utils import ModelOutput

from odevit.model.config import OdeViTConfig
from odevit.model.contractive import ContractiveField, check_steps
from odevit.model.errors import check_logits
from odevit.model.field import FIELDS
from odevit.model.halting import Rule, halt, saved_rule
from odevit.model.image_processor import OdeViTImageProcessor, square_processor
from odevit.model.layers import (
    NORMS,
    TOKENIZERS,
    CenterNorm,
    DepthwiseMixing,
    StemConvolution,
    interpolate_positions,
)
from odevit.model.pools import POOLS, Pool, TokenScore
from odevit.model.saved import follow_umask, read_model
from odevit.model.solvers import Evaluations, Solution, solve
from odevit.model.spectral import cap_spectral_norms_, spectral_init_


@dataclass
class OdeViTOutput(ModelOutput):
    """last_hidden_state X_T (b, n, d); K+1 hidden_states (b, n, d) and K attentions (b, h, n, n) when asked for."""

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    evaluations: Evaluations | None = None


@dataclass
class OdeViTClassifierOutput(ModelOutput):
    """loss (when labels are given), logits (b, classes), and what OdeViTOutput holds.

    With halting: steps (b,) that each image took, and the evaluations of the one that took most.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    evaluations: Evaluations | None = None
    steps: Tensor | None = None


class OdeViTPreTrainedModel(PreTrainedModel):
    config_class = OdeViTConfig
    base_model_prefix = "odevit"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["VectorField", "ContractiveField"]  # noqa: RUF012 (the type transformers declares)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers asks only modules with parameters of their own
        if isinstance(module, DepthwiseMixing | ContractiveField):
            module.reset()
        elif isinstance(module, StemConvolution | TokenScore):
            module.reset_parameters()
        elif isinstance(module, parametrize.ParametrizationList):
            spectral_init_(module.original)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if not parametrize.is_parametrized(module):
                spectral_init_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, CenterNorm | nn.LayerNorm | nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        elif isinstance(module, OdeViTModel):
            for parameter in (module.cls_token, module.positions, module.registers):
                # 0.02 as in ViT and DeiT, where norms and logits make the most of it; a contractive field has neither
                nn.init.trunc_normal_(parameter, std=1.0 if self.config.field == "contractive" else 0.02)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Any:
        """A fresh model from a preset by name: `paper-base`, `cifar-tiny`, …; overrides are config fields."""
        return cls(OdeViTConfig.from_preset(name, **overrides))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, and: `image_size=S` interpolates the positions; what is missing or broken is an error."""
        return read_model(cls, super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    def resize_images(self, image_size: int) -> None:
        """Serve another image size from now on: interpolates the positions, once, and updates the config."""
        base: Any = getattr(self, self.base_model_prefix, self)
        if image_size == base.config.image_size:
            return
        config = OdeViTConfig(**{**base.config.to_dict(), "image_size": image_size})
        if isinstance(pool := getattr(self, "pool", None), Pool):
            pool.check(1 + config.num_patches)
        positions = interpolate_positions(base.positions.detach(), base.config.patch_grid, config.patch_grid)
        self.config = base.config = config
        base.positions = nn.Parameter(positions, requires_grad=base.positions.requires_grad)

    def image_processor(self) -> OdeViTImageProcessor:
        """The processor that resizes and normalises as this model expects."""
        size, neutral = self.config.image_size, [0.5] * self.config.num_channels
        return OdeViTImageProcessor(
            **square_processor(size),
            image_mean=self.config.image_mean or neutral,
            image_std=self.config.image_std or neutral,
        )

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and writes the image processor beside the weights."""
        super().save_pretrained(save_directory, *args, **kwargs)
        self.image_processor().save_pretrained(save_directory)
        follow_umask(save_directory)


class OdeViTModel(OdeViTPreTrainedModel):
    """Images → tokens → the state X(T) of the flow."""

    def __init__(self, config: OdeViTConfig):
        super().__init__(config)
        width = config.hidden_size
        self.tokenizer = TOKENIZERS[config.tokenizer](config.num_channels, width, config.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + config.num_patches, width))
        self.registers = nn.Parameter(torch.zeros(1, config.num_registers, width))
        self.embedding_norm = NORMS[config.embedding_norm](width, config.layer_norm_eps)
        self.fields = nn.ModuleList(FIELDS[config.field](config) for _ in range(config.num_fields))
        if config.spectral_cap is not None:
            cap_spectral_norms_(self.fields, config.spectral_cap)
        self.gradient_checkpointing = False
        self.recompute: Literal["steps", "segments"] = "steps"  # what gradient checkpointing runs again, as in `solve`
        self.post_init()

    def embed(self, images: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Images (b, c, H, W) → tokens [CLS | patches | registers] (b, n, d). Registers have no position."""
        self._check_images(images, interpolate_pos_encoding)
        grid = images.shape[-2] // self.config.patch_size, images.shape[-1] // self.config.patch_size
        positions = interpolate_positions(self.positions, self.config.patch_grid, grid)
        cls_token, registers = (t.expand(images.shape[0], -1, -1) for t in (self.cls_token, self.registers))
        tokens = torch.cat([cls_token, self.tokenizer(images)], dim=1) + positions
        return self.embedding_norm(torch.cat([tokens, registers], dim=1))

    def evolve(
        self,
        tokens: Tensor,
        num_steps: int | None = None,
        solver: str | None = None,
        save_at: Literal["end", "steps"] | Sequence[float] = "end",
        until: float | None = None,
    ) -> Solution:
        """Integrate the tokens over [0, T]. `num_steps` and `solver` default to the config's, `until` as in `solve`."""
        num_steps = num_steps if num_steps is not None else self.config.num_steps
        solver = solver or self.config.solver
        self.check_setting(solver, num_steps)
        recompute = self.gradient_checkpointing and self.training
        capped_once = (self.config.field == "contractive" or self.config.spectral_cap is not None) and not recompute
        with parametrize.cached() if capped_once else nullcontext():
            return solve(
                list(self.fields),  # type: ignore[arg-type]
                tokens,
                num_steps=num_steps,
                solver=solver,
                horizon=self.config.horizon,
                save_at=save_at,
                until=until,
                recompute="segments" if recompute and self.recompute == "segments" else recompute,
            )

    def check_setting(self, solver: str, num_steps: int) -> None:
        """Refuse steps that a contractive field is too stiff for: nothing is proven of them."""
        if self.config.field == "contractive":
            check_steps(solver, num_steps, self.config.depth, self.config.num_fields)

    def attention_maps(self, states: Sequence[Tensor], num_steps: int | None = None) -> tuple[Tensor, ...]:
        """The map (b, h, n, n) at the start of each step, from the states of a trajectory. In the graph.

        num_steps: K of the grid when the states are only its beginning; else there are K + 1 of them.
        """
        grid = self.config.time_grid(num_steps or len(states) - 1)
        return tuple(
            self.fields[phase].attention_map(x)  # type: ignore[operator]
            for (phase, _), x in zip(grid.steps(), states[:-1], strict=False)
        )

    def forward(
        self,
        pixel_values: Tensor | None = None,
        num_steps: int | None = None,
        solver: str | None = None,
        until: float | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        interpolate_pos_encoding: bool = False,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> OdeViTOutput | tuple:
        if pixel_values is None:
            raise ValueError("pixel_values is missing: pass images as a float tensor (batch, channels, height, width)")
        if kwargs.get("halting") is not None:
            raise ValueError("halting needs a head that says when an answer is there: use OdeViTForImageClassification")
        with_states = output_hidden_states if output_hidden_states is not None else self.config.output_hidden_states
        with_maps = output_attentions if output_attentions is not None else self.config.output_attentions
        tokens = self.embed(pixel_values, interpolate_pos_encoding)
        save_at: Literal["end", "steps"] = "steps" if with_states or with_maps else "end"
        solution = self.evolve(tokens, num_steps, solver, save_at, until)
        states = tuple(solution.xs.unbind(0))
        output = OdeViTOutput(
            last_hidden_state=states[-1],
            hidden_states=states if with_states else None,
            attentions=self.attention_maps(states, num_steps or self.config.num_steps) if with_maps else None,
            evaluations=solution.evaluations,
        )
        return output if return_dict is not False else output.to_tuple()

    def _check_images(self, images: Tensor, interpolate: bool) -> None:
        channels, size, patch = self.config.num_channels, self.config.image_size, self.config.patch_size
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"expected images of shape (batch, {channels}, height, width), got {tuple(images.shape)}; "
                f"this model takes {channels} channel(s), see PIL's image.convert({'RGB' if channels == 3 else 'L'!r})"
            )
        wanted = self.positions.dtype
        if images.dtype != wanted and not torch.is_autocast_enabled(images.device.type):
            raise ValueError(
                f"the model's numbers are {wanted}, the images' {images.dtype}: convert them, images.to({wanted})"
            )
        height, width = images.shape[-2:]
        if interpolate and (height % patch or width % patch or min(height, width) < patch):
            raise ValueError(
                f"with interpolate_pos_encoding the sides must be multiples of {patch}, got {height}×{width}"
            )
        square = self.config.mixing != "none" or self.config.pool == "flatten"
        if interpolate and square and height != width:
            raise ValueError(
                f"with mixing={self.config.mixing!r} and pool={self.config.pool!r} images must be square, "
                f"got {height}×{width}"
            )
        if not interpolate and (height, width) != (size, size):
            raise ValueError(
                f"expected {size}×{size} images, got {height}×{width}; resize them (model.image_processor() does), "
                f"pass interpolate_pos_encoding=True, or load with from_pretrained(…, image_size={height})"
            )


class OdeViTForImageClassification(OdeViTPreTrainedModel):
    """logits = head(pool(norm(X_T))), where the pool takes CLS, a mean, a learned weighting or all tokens; or, as the
    image tower of CLIP, head(u / ‖u‖), u = P pool(norm(X_T)): see projection_size and unit_features."""

    def __init__(self, config: OdeViTConfig):
        super().__init__(config)
        self.odevit = OdeViTModel(config)
        self.norm = NORMS[config.final_norm](config.hidden_size, config.layer_norm_eps)
        self.pool = POOLS[config.pool](config.hidden_size, 1 + config.num_patches)
        read, size = self.pool.features, config.projection_size or self.pool.features
        self.projection = nn.Linear(read, size, bias=False) if config.projection_size else nn.Identity()
        self.classifier = nn.Linear(size, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    @classmethod
    def from_teacher(cls, teacher: Any, **overrides: Any) -> "OdeViTForImageClassification":
        """A student of a trained ViT (a model, a folder or a hub name): see `odevit.distill.student.student_of`."""
        from odevit.distill.student import student_of

        return student_of(teacher, **overrides)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.classifier:
            nn.init.trunc_normal_(module.weight, std=0.02)  # as in ViT and DeiT

    def classify(self, state: Tensor) -> Tensor:
        """A state (b, n, d) → logits (b, classes)."""
        return self.classifier(self.read_out(state))

    def read_out(self, state: Tensor) -> Tensor:
        """A state (b, n, d) → what the linear head reads, (b, d) or projected (b, e); of length one if wanted."""
        features = self.projection(self.features(state))
        return nn.functional.normalize(features, dim=-1) if self.config.unit_features else features

    def features(self, state: Tensor) -> Tensor:
        """A state (b, n, d) → pool(norm(state)) (b, d), or (b, n·d) where all are read. Registers are not read."""
        tokens = state[:, :1] if self.config.pool == "cls" else state[:, : state.shape[1] - self.config.num_registers]
        return self.pool(self.norm(tokens))

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        halting: Rule | Literal["calibrated"] | None = None,
        **kwargs: Any,
    ) -> OdeViTClassifierOutput | tuple:
        """kwargs: num_steps, solver, until, output_hidden_states, output_attentions, interpolate_pos_encoding.

        halting: a rule by which images stop early and leave the batch, or "calibrated": the one in the config, whose
        weights are then checked at every call (`saved_rule(model)` checks once).
        """
        if halting is not None:
            asked = kwargs.get("num_steps"), kwargs.get("solver")
            rule = saved_rule(self, *asked) if halting == "calibrated" else halting
            logits, steps, evaluations = halt(self, pixel_values, rule, **kwargs)
            outputs = OdeViTOutput(evaluations=evaluations)
        else:
            outputs, steps = self.odevit(pixel_values, **kwargs), None
            logits = check_logits(self.classify(outputs.last_hidden_state))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        output = OdeViTClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            evaluations=outputs.evaluations,
            steps=steps,
        )
        return output if return_dict is not False else output.to_tuple()


AutoConfig.register("odevit", OdeViTConfig)
AutoModel.register(OdeViTConfig, OdeViTModel)
AutoModelForImageClassification.register(OdeViTConfig, OdeViTForImageClassification)
AutoImageProcessor.register(OdeViTConfig, image_processor_classes={"pil": OdeViTImageProcessor})
