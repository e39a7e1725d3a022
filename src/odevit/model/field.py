"""The vector field dX/dt = s · (F(X) + G(X)): one shared attention + MLP block as the right-hand side of an ODE."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from odevit.model.contractive import ContractiveField
from odevit.model.layers import ATTENTIONS, MIXINGS, NORMS, Mlp

if TYPE_CHECKING:
    from odevit.model.config import OdeViTConfig


class DropPath(nn.Module):
    """Stochastic depth: drops a branch for whole samples, and keeps its expectation."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.rate
        return x * keep.to(x.dtype) / (1 - self.rate)


class VectorField(nn.Module):
    """F(X) = s · (MLP(norm_f(X)) − ρ X), G(X) = s · attention(norm_g(X)); the drift is F + G. X: (b, n, d).

    `damping` is ρ, usually 0: it lowers the log-norm of the drift by s ρ everywhere.
    `mixing` lets neighbouring patches meet inside F; `registers` says how many tokens at the end are no patches.
    Autonomous: no time enters. `scale` is s = D / T, so that the total depth s·T = D never depends on T.
    The field knows nothing of solvers; solvers call F, G, or the field itself for the drift.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int,
        scale: float = 1.0,
        norm: str = "center",
        norm_eps: float = 1e-6,
        attention: str = "softmax",
        mixing: str = "none",
        registers: int = 0,
        damping: float = 0.0,
        bias: bool = False,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.scale = scale
        self.damping = damping
        self.norm_f = NORMS[norm](width, norm_eps)
        self.norm_g = NORMS[norm](width, norm_eps)
        self.mlp = Mlp(width, hidden, bias=bias, dropout=dropout, mixing=MIXINGS[mixing](hidden, registers))
        self.attention = ATTENTIONS[attention](width, heads, bias=bias, dropout=dropout)
        self.drop_path = DropPath(drop_path)

    def F(self, x: Tensor) -> Tensor:
        y = self.drop_path(self.mlp(self.norm_f(x)))
        return self.scale * (y - self.damping * x if self.damping else y)

    def G(self, x: Tensor) -> Tensor:
        return self.scale * self.drop_path(self.attention(self.norm_g(x)))

    def forward(self, x: Tensor) -> Tensor:
        """The drift F(X) + G(X)."""
        return self.F(x) + self.G(x)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """G(X) and its attention map (b, h, n, n), in the autograd graph."""
        y, p = self.attention.attend(self.norm_g(x))
        return self.scale * self.drop_path(y), p

    def attention_map(self, x: Tensor) -> Tensor:
        """The attention map (b, h, n, n) alone."""
        return self.attention.map(self.norm_g(x))


def _sizes(config: "OdeViTConfig") -> dict[str, Any]:
    """What every field is told."""
    return {
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "hidden": config.mlp_hidden,
        "scale": config.depth / config.horizon,
        "mixing": config.mixing,
        "registers": config.num_registers,
    }


def _softmax(config: "OdeViTConfig") -> nn.Module:
    return VectorField(
        **_sizes(config),
        norm=config.norm,
        norm_eps=config.layer_norm_eps,
        attention=config.attention,
        damping=float(config.damping),
        bias=config.bias,
        dropout=config.dropout,
        drop_path=config.drop_path,
    )


def _contractive(config: "OdeViTConfig") -> nn.Module:
    return ContractiveField(**_sizes(config))


FIELDS: dict[str, Callable[["OdeViTConfig"], nn.Module]] = {"softmax": _softmax, "contractive": _contractive}
