"""Tokenizers, norms, attention and MLP: tensors in, tensors out.

Shapes: b batch, c channels, n tokens, d width, h heads, e = d / h head width.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CenterNorm(nn.Module):
    """γ ⊙ d/(d-1) (x - mean x) + β: LayerNorm without the division, so globally Lipschitz.

    At γ = 1 the Jacobian is d/(d-1) times an orthogonal projection: spectral norm exactly d/(d-1).
    """

    def __init__(self, width: int):
        super().__init__()
        if width < 2:
            raise ValueError(f"CenterNorm needs a width of at least 2, got {width}")
        self.gain = width / (width - 1)
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)
        return torch.addcmul(self.bias, centered, self.weight * self.gain)


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "center": lambda width, eps: CenterNorm(width),
    "layer": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "none": lambda width, eps: nn.Identity(),
}


class DepthwiseMixing(nn.Module):
    """A 3×3 depthwise convolution over the square grid of patches, zero-padded; CLS and registers pass as they are.

    (b, 1 + M + R, c) -> the same. The identity at the start (ConvMixer and LocalViT put it between the matrices of the
    MLP too). Linear, and its norm is known: see `odevit.dynamics.bounds.mixing_bound`.
    """

    def __init__(self, channels: int, registers: int = 0):
        super().__init__()
        self.registers = registers
        self.weight = nn.Parameter(torch.zeros(channels, 1, 3, 3))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        self.weight.zero_()[:, :, 1, 1] = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, self.weight)

    def mix(self, x: Tensor, kernel: Tensor) -> Tensor:
        """The convolution with a given kernel (c, 1, 3, 3)."""
        patches = x.shape[1] - 1 - self.registers
        side = math.isqrt(patches)
        if side * side != patches:
            raise ValueError(
                f"depthwise mixing needs a square grid of patches, got {patches} patches: use square images"
            )
        grid = x[:, 1 : 1 + patches].unflatten(1, (side, side)).permute(0, 3, 1, 2)  # (b, c, side, side)
        mixed = F.conv2d(grid, kernel, padding=1, groups=kernel.shape[0])
        return torch.cat([x[:, :1], mixed.flatten(2).mT, x[:, 1 + patches :]], dim=1)


class Mlp(nn.Module):
    """W2 · GELU(C · W1 · x), token by token but for C: the identity, or a mixing of neighbouring patches."""

    def __init__(
        self, width: int, hidden: int, *, bias: bool = False, dropout: float = 0.0, mixing: nn.Module | None = None
    ):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=bias)
        self.mixing = mixing or nn.Identity()
        self.w2 = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.w2(F.gelu(self.mixing(self.w1(x)))))


MIXINGS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda channels, registers: nn.Identity(),
    "depthwise": DepthwiseMixing,
}


class Attention(nn.Module):
    """Multi-head self-attention with softmax rows, scale 1/sqrt(e) and an output projection.

    `forward` uses the fused kernel and returns no map; `attend` also returns the map P (b, h, n, n), which is
    explicit, taken before dropout and part of the autograd graph. Subclasses change how tokens meet, not the interface.
    Under autocast on a CPU `forward` is explicit too: the fused kernel's backward pass takes five times as long there.
    """

    def __init__(self, width: int, heads: int, *, bias: bool = False, dropout: float = 0.0):
        super().__init__()
        if width % heads:
            raise ValueError(f"the number of heads must divide the width: {heads} heads do not divide width {width}")
        self.heads = heads
        self.scale = 1 / math.sqrt(width // heads)
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, n, d) -> (b, h, n, e)

    def merge(self, x: Tensor) -> Tensor:
        return self.dropout(self.out(x.transpose(1, 2).flatten(-2)))  # (b, h, n, e) -> (b, n, d)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            return self.attend(x)[0]
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        return self.merge(F.scaled_dot_product_attention(q, k, v, scale=self.scale))

    def map(self, x: Tensor) -> Tensor:
        """The map P alone, (b, h, n, n); rows sum to one."""
        q, k = self.split(self.query(x)), self.split(self.key(x))
        return torch.softmax(q @ k.mT * self.scale, dim=-1)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.map(x)
        return self.merge(p @ self.split(self.value(x))), p


class L2Attention(Attention):
    """Lipschitz attention of Kim, Papamakarios and Mnih (ICML 2021): logits -|q_i - q_j|² / sqrt(e), Wq = Wk tied.

    Head h returns P X A_h Wv_h with A_h = Wq_h Wq_hᵀ / sqrt(e), without which the map is not Lipschitz.
    """

    def __init__(self, width: int, heads: int, *, bias: bool = False, dropout: float = 0.0):
        super().__init__(width, heads, bias=False, dropout=dropout)
        del self.key  # tied to the query

    def logits_and_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.split(self.query(x))
        penalty = -self.scale * q.square().sum(-1, keepdim=True).mT  # (b, h, 1, n); the row's own |q_i|² cancels
        wq, wv = (w.weight.unflatten(0, (self.heads, -1)) for w in (self.query, self.value))  # (h, e, d)
        return q, penalty, self.scale * q @ (wq @ wv.mT)  # values X A_h Wv_h: (b, h, n, e)

    def forward(self, x: Tensor) -> Tensor:
        q, penalty, v = self.logits_and_values(x)
        mask = penalty.expand(-1, -1, q.shape[-2], -1)
        return self.merge(F.scaled_dot_product_attention(q, q, v, attn_mask=mask, scale=2 * self.scale))

    def map(self, x: Tensor) -> Tensor:
        q, penalty, _ = self.logits_and_values(x)
        return torch.softmax(2 * self.scale * q @ q.mT + penalty, dim=-1)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, penalty, v = self.logits_and_values(x)
        p = torch.softmax(2 * self.scale * q @ q.mT + penalty, dim=-1)
        return self.merge(p @ v), p


class SinkhornAttention(Attention):
    """Doubly stochastic attention (Sinkformers, Sander et al., AISTATS 2022): Sinkhorn's iteration on the logits.

    Five normalisations as in that paper; rows are normalised last, so they sum to one exactly.
    """

    iterations = 5

    def map(self, x: Tensor) -> Tensor:
        q, k = self.split(self.query(x)), self.split(self.key(x))
        logits = q @ k.mT * self.scale
        for i in range(self.iterations):  # rows, columns, …, rows
            logits = logits - logits.logsumexp(dim=-2 if i % 2 else -1, keepdim=True)
        return logits.exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)[0]


ATTENTIONS: dict[str, type[Attention]] = {"softmax": Attention, "l2": L2Attention, "sinkhorn": SinkhornAttention}


class PatchTokenizer(nn.Module):
    """One strided convolution: every patch becomes a token. (b, c, H, W) -> (b, n, d)."""

    def __init__(self, channels: int, width: int, patch_size: int):
        super().__init__()
        self.projection = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(images).flatten(2).mT  # (b, d, H/p, W/p) -> (b, n, d)


def _stage_widths(channels: int, width: int, patch_size: int) -> list[int]:
    """Channels before, between and after log2(patch_size) stages that each halve the image and double the width."""
    stages = int(math.log2(patch_size))
    if stages < 1 or 2**stages != patch_size:
        raise ValueError(f"a convolutional tokenizer needs a power of two as patch_size, got {patch_size}")
    return [channels] + [max(1, width // 2 ** (stages - 1 - i)) for i in range(stages)]


class ConvTokenizer(nn.Module):
    """log2(patch_size) convolutions 3×3 of stride 2 with BatchNorm and GELU between them. (b, c, H, W) -> (b, n, d)."""

    def __init__(self, channels: int, width: int, patch_size: int):
        super().__init__()
        widths = _stage_widths(channels, width, patch_size)
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.BatchNorm2d(before), nn.GELU()] if i else []
            layers.append(nn.Conv2d(before, after, 3, stride=2, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(2).mT  # (b, d, H/p, W/p) -> (b, n, d)


class StemConvolution(nn.Conv2d):
    """A 3×3 convolution before a ReLU: starts with the variance that ReLU wants (He et al. 2015), not with norm one."""

    def __init__(self, channels: int, width: int):
        super().__init__(channels, width, 3, padding=1, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight)


class PoolingTokenizer(nn.Module):
    """log2(patch_size) stages of a 3×3 convolution of stride 1, 3×3 max-pooling of stride 2 and ReLU, without biases.

    The tokenizer of Compact Convolutional Transformers (Hassani et al., arXiv 2104.05704). (b, c, H, W) -> (b, n, d).
    ReLU and max-pooling commute: the cheaper order, and channels last in memory, halve its time in training on a CPU.
    """

    def __init__(self, channels: int, width: int, patch_size: int):
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(_stage_widths(channels, width, patch_size)):
            layers += [StemConvolution(before, after), nn.MaxPool2d(3, 2, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images.contiguous(memory_format=torch.channels_last))
        return maps.flatten(2).mT  # (b, d, H/p, W/p) -> (b, n, d)


TOKENIZERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "patch": PatchTokenizer,
    "conv": ConvTokenizer,
    "pooling": PoolingTokenizer,
}


def interpolate_positions(
    positions: Tensor, grid: tuple[int, int], new_grid: tuple[int, int], *, antialias: bool = False
) -> Tensor:
    """Resize position embeddings (1, 1 + rows·cols, d), CLS first, to another grid (bicubic, as in DeiT and DINO).

    `antialias` as in timm and in DINOv2 with registers.
    """
    if grid == new_grid:
        return positions
    cls, patches = positions[:, :1], positions[:, 1:]
    image = patches.unflatten(1, grid).permute(0, 3, 1, 2)  # (1, d, rows, cols)
    image = F.interpolate(image, size=new_grid, mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat([cls, image.flatten(2).mT], dim=1)
