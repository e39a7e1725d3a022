"""OdeViTConfig: everything that defines an ODE-ViT, and the presets."""

import math
from functools import wraps
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from odevit.model.contractive import check_steps, fewest_steps
from odevit.model.field import FIELDS
from odevit.model.layers import ATTENTIONS, MIXINGS, NORMS, TOKENIZERS
from odevit.model.pools import POOLS
from odevit.model.solvers import Grid, check_solver

FORMAT_VERSION = 2  # raised when an older odevit could no longer read a newer config
LARGEST_SIZE = 1 << 16  # of any single size: a file that says more is broken, or meant to fill the memory
LARGEST_STATE = 1 << 31  # numbers in the positions of all tokens
MOST_STEPS = 10_000


def in_one_sentence(cls: Any) -> Any:
    """A value of the wrong type is a ValueError like every other wrong value."""
    original = cls.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            original(self, *args, **values)
        except StrictDataclassError as error:
            raise ValueError(" ".join(str(error.__cause__ or error).split())) from error

    cls.__init__ = init
    return cls


@in_one_sentence
@strict
class OdeViTConfig(BackboneConfigMixin, PreTrainedConfig):
    """Configuration of an ODE-ViT.

    image_size, patch_size, num_channels: what the tokenizer expects.
    tokenizer: "patch" (one strided convolution), "conv" (3×3 convolutions of stride 2) or "pooling" (3×3
        convolutions with max-pooling, best on small images).
    pool: what the head reads: "cls", "sequence" (a learned weighting of all tokens but the registers), "mean",
        "sqrt_mean" (√n times it, of norm one) or "flatten" (every token for itself: images of one size only).
    hidden_size, num_attention_heads, mlp_ratio: width d, heads h, hidden width of the MLP over d.
    num_registers: learned tokens without position at the end of the sequence; 0 is allowed.
    depth: D, the discrete depth being emulated; the field is scaled by D / horizon.
    horizon: T, the end of the time interval.
    num_steps, solver: K and the scheme; both can be changed at any call without retraining.
    num_fields: 1 is the paper (autonomous); k gives each k-th of [0, T] its own parameters.
    field: "softmax" (the paper) or "contractive" (never expands, by construction; it has no norm, and needs num_steps
        of at least `depth`, or of half of it with solver "lie_trotter" or "strang").
    norm: "center" (Lipschitz) or "layer"; attention: "softmax", "l2" (Lipschitz, tied) or "sinkhorn".
    mixing: "none" or "depthwise" (a 3×3 depthwise convolution on the patch grid inside F, the identity at the start).
    damping: ρ ≥ 0 of a term −ρX in the field, which lowers its log-norm by ρ per unit of depth; 0 is the paper.
    layer_norm_eps: of every LayerNorm, where there is one.
    bias: biases in the attention and MLP matrices (the paper has none; a ViT's blocks have); L2 attention has none.
    final_norm: norm before the classifier: "none" (the paper from scratch), "layer" (as behind a teacher) or "center".
    embedding_norm: norm of the tokens before the flow, "none" but behind a CLIP teacher.
    projection_size, unit_features: what the head reads is projected to this width, and brought to length one, as by the
        image tower of CLIP; the head's rows are then embeddings of texts.
    dropout, drop_path: rates, active in training only.
    spectral_cap: None, or the largest spectral norm that any matrix of the field may ever have.
    meeting_times: times at which a distilled student met its teacher's layers.
    feature_times: times of a backbone's feature maps beside t = 0, increasing; None: every step of the solver.
    out_features, out_indices: which of them a backbone returns; None: the last.
    image_mean, image_std: normalisation of the input, per channel; written into the image processor on saving.
    halting: the calibrated rule for stopping early that `odevit calibrate` found, and what it is for.
    """

    model_type = "odevit"
    keys_to_ignore_at_inference = ["hidden_states", "attentions", "evaluations", "steps"]  # noqa: RUF012 (Trainer wants a list)

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    tokenizer: str = "patch"
    pool: str = "cls"
    hidden_size: int = 768
    num_attention_heads: int = 12
    mlp_ratio: float | int = 4.0
    num_registers: int = 0
    depth: float | int = 12.0
    horizon: float | int = 1.0
    num_steps: int = 12
    solver: str = "euler"
    num_fields: int = 1
    field: str = "softmax"
    norm: str = "center"
    attention: str = "softmax"
    mixing: str = "none"
    damping: float | int = 0.0
    layer_norm_eps: float = 1e-6
    bias: bool = False
    final_norm: str = "layer"
    embedding_norm: str = "none"
    projection_size: int | None = None
    unit_features: bool = False
    dropout: float | int = 0.0
    drop_path: float | int = 0.0
    spectral_cap: float | int | None = None
    meeting_times: list[float] | None = None
    feature_times: list[float] | None = None
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    halting: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        if "checkpoint_times" in kwargs:  # the name of meeting_times in format 1
            self.meeting_times = kwargs.pop("checkpoint_times")
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"this model was saved in format {self.format_version} by a newer odevit; this one reads formats up to "
                f"{FORMAT_VERSION}. Upgrade with: pip install -U odevit"
            )
        for name, registry in (
            ("tokenizer", TOKENIZERS),
            ("pool", POOLS),
            ("field", FIELDS),
            ("mixing", MIXINGS),
            ("norm", NORMS),
            ("attention", ATTENTIONS),
            ("final_norm", NORMS),
            ("embedding_norm", NORMS),
        ):
            if getattr(self, name) not in registry:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(registry)}")
        check_solver(self.solver)
        self._check_numbers()
        self.time_grid()  # raises on impossible step counts
        if self.field == "contractive":
            self._check_contractive()
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size: {self.num_attention_heads} heads do not divide width "
                f"{self.hidden_size}"
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size must divide image_size: {self.patch_size} does not divide {self.image_size}; "
                f"use image_size={round(self.image_size / self.patch_size) * self.patch_size or self.patch_size}"
            )
        self._check_feature_times()
        features, indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        if features is not None or indices is not None:
            self.set_output_features_output_indices(features, indices)
        super().__post_init__(**kwargs)

    def _check_feature_times(self) -> None:
        times = self.feature_times
        if times is not None and (
            not times or sorted(set(times)) != times or not 0 < times[0] <= times[-1] <= self.horizon
        ):
            raise ValueError(f"feature_times must increase within (0, {self.horizon:g}], got {times}")

    def _check_numbers(self) -> None:
        positive = ("image_size", "patch_size", "num_channels", "hidden_size", "num_attention_heads", "mlp_ratio")
        for name in (*positive, "depth", "horizon", "num_fields"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("image_size", "patch_size", "num_channels", "hidden_size", "mlp_ratio", "num_registers"):
            if getattr(self, name) > LARGEST_SIZE:
                raise ValueError(f"{name} must be at most {LARGEST_SIZE}, got {getattr(self, name)}")
        if self.num_fields > MOST_STEPS or self.num_steps > MOST_STEPS:
            raise ValueError(f"at most {MOST_STEPS} steps and fields, got {self.num_steps} and {self.num_fields}")
        if self.num_patches * self.hidden_size > LARGEST_STATE:
            raise ValueError(
                f"{self.num_patches} patches of width {self.hidden_size} are more than {LARGEST_STATE} numbers; use a "
                "smaller image_size or a larger patch_size"
            )
        for name in ("num_registers", "damping"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.projection_size is not None and self.projection_size <= 0:
            raise ValueError(f"projection_size must be positive or None, got {self.projection_size}")
        if self.spectral_cap is not None and not 0 < self.spectral_cap < math.inf:
            raise ValueError(f"spectral_cap must be positive or None, got {self.spectral_cap}")
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"layer_norm_eps must be positive, got {self.layer_norm_eps}")
        for name in ("dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_channels:
                raise ValueError(f"{name} needs one value per channel ({self.num_channels}), got {values}")
            if values is not None and not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must be finite, got {values}")
        if self.image_std is not None and min(self.image_std) <= 0:
            raise ValueError(f"image_std must be positive, got {self.image_std}")

    def _check_contractive(self) -> None:
        check_steps(self.solver, self.num_steps, self.depth, self.num_fields)
        without = {
            "attention": "softmax",
            "damping": 0,
            "bias": False,
            "dropout": 0,
            "drop_path": 0,
            "spectral_cap": None,
        }
        for name, value in without.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"a contractive field has no {name}, got {name}={getattr(self, name)!r}: leave it out (its norms "
                    "are held and its bias is there in any case)"
                )

    @property
    def stage_times(self) -> list[float]:
        """Times of a backbone's feature maps, 0 first."""
        return [0.0, *(self.feature_times or self.time_grid().times()[1:])]

    @property
    def stage_names(self) -> list[str]:
        """What a backbone calls them: stem, t=0.25, …"""
        return ["stem", *(f"t={time:g}" for time in self.stage_times[1:])]

    def to_dict(self) -> dict[str, Any]:
        """Without out_indices: they follow from out_features, and mean something else at another number of steps."""
        return {**super().to_dict(), "out_indices": None}

    def time_grid(self, num_steps: int | None = None) -> Grid:
        """When the flow steps: K steps, or so many, over [0, T] in as many phases as there are fields."""
        return Grid(self.num_steps if num_steps is None else num_steps, float(self.horizon), self.num_fields)

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Patches per column and per row."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def num_patches(self) -> int:
        rows, cols = self.patch_grid
        return rows * cols

    def least_steps(self, solver: str) -> int:
        """With fewer, a contractive flow could expand, and others have no step for each field."""
        return fewest_steps(solver, self.depth, self.num_fields) if self.field == "contractive" else self.num_fields

    @property
    def mlp_hidden(self) -> int:
        return round(self.hidden_size * self.mlp_ratio)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "OdeViTConfig":
        """A preset by name, with any of its fields replaced."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
        valid = [*cls.__dataclass_fields__, "num_labels"]
        unknown = [key for key in overrides if key not in valid]
        if unknown:
            raise ValueError(
                f"unknown config field {', '.join(map(repr, unknown))}; valid fields: {', '.join(own_fields())}"
            )
        return cls(**{**PRESETS[name], **overrides})


def own_fields() -> list[str]:
    """The fields that belong to an ODE-ViT, without those every Hugging Face config has."""
    return [*(name for name in OdeViTConfig.__annotations__ if not name.startswith("_")), "num_labels"]


_PAPER: dict[str, Any] = dict(
    image_size=224, patch_size=16, hidden_size=768, num_attention_heads=12, num_registers=10, depth=12, num_steps=23,
    final_norm="none", num_labels=100,
)  # fmt: skip
_CIFAR: dict[str, Any] = dict(
    image_size=32, patch_size=4, tokenizer="pooling", norm="layer", mixing="depthwise", pool="sequence", depth=6,
    num_steps=4, num_labels=10,
)  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "paper-base": {**_PAPER, "mlp_ratio": 4},  # 7.91M at 100 classes
    "paper-small": {**_PAPER, "mlp_ratio": 1},  # 4.37M
    "cifar-nano": {**_CIFAR, "hidden_size": 128, "num_attention_heads": 4, "mlp_ratio": 2},
    "cifar-tiny": {**_CIFAR, "hidden_size": 192, "num_attention_heads": 3, "mlp_ratio": 2},
    "cifar-small": {**_CIFAR, "hidden_size": 384, "num_attention_heads": 6, "mlp_ratio": 3, "num_fields": 2},
}
