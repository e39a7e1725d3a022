"""Initial value problems with exact solutions, as fields in two parts, and small models."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from odevit import OdeViTConfig, OdeViTForImageClassification, VectorField


@dataclass
class Logistic:
    """x' = a x - b x², split into its linear and quadratic parts, which do not commute."""

    a: float = 1.5
    b: float = 0.7

    def F(self, x: Tensor) -> Tensor:
        return self.a * x

    def G(self, x: Tensor) -> Tensor:
        return -self.b * x.square()

    def __call__(self, x: Tensor) -> Tensor:
        return self.F(x) + self.G(x)

    def exact(self, x: Tensor, t: float) -> Tensor:
        growth = math.exp(self.a * t)
        return self.a * x * growth / (self.a + self.b * x * (growth - 1))


@dataclass
class Linear:
    """x' = (A + B) x for rows x."""

    A: Tensor
    B: Tensor

    def F(self, x: Tensor) -> Tensor:
        return x @ self.A.mT

    def G(self, x: Tensor) -> Tensor:
        return x @ self.B.mT

    def __call__(self, x: Tensor) -> Tensor:
        return self.F(x) + self.G(x)

    def exact(self, x: Tensor, t: float) -> Tensor:
        return x @ torch.linalg.matrix_exp(t * (self.A + self.B)).mT


class Counting:
    """A field that counts how often each of its parts is evaluated."""

    def __init__(self, field):
        self.field, self.F_count, self.G_count = field, 0, 0

    def F(self, x: Tensor) -> Tensor:
        self.F_count += 1
        return self.field.F(x)

    def G(self, x: Tensor) -> Tensor:
        self.G_count += 1
        return self.field.G(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.F(x) + self.G(x)


def observed_order(errors: list[float], steps: list[int]) -> float:
    """Slope of log error against log step size, by least squares."""
    x = -torch.tensor(steps, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def norm2(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix.detach(), ord=2)


def dense_norm(f, x: Tensor) -> Tensor:
    """‖J_f‖₂ at one sample x (1, n, d) from the whole Jacobian; maps and fields must be in float64."""
    return norm2(torch.func.jacrev(f)(x).reshape(x.numel(), x.numel()))


def small_field(seed: int = 0, *, width: int = 16, heads: int = 2, **kwargs) -> VectorField:
    """A float64 field with random weights of moderate size."""
    torch.manual_seed(seed)
    field = VectorField(width, heads, hidden=2 * width, **kwargs).double()
    for parameter in field.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.8 / math.sqrt(width))
        else:
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.1)
    return field.eval()


TINY = dict(
    image_size=16, patch_size=4, hidden_size=32, num_attention_heads=2, mlp_ratio=2, depth=3, num_steps=4,
    num_registers=2, num_labels=5,
)  # fmt: skip


def tiny_model(seed: int = 0, **overrides) -> OdeViTForImageClassification:
    torch.manual_seed(seed)
    return OdeViTForImageClassification(OdeViTConfig(**{**TINY, **overrides})).eval()


def contractive_model(**overrides) -> OdeViTForImageClassification:
    """One field that contracts by construction, on digits of 8 × 8."""
    settings = dict(
        field="contractive", image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_registers=0, depth=4,
        pool="sqrt_mean", final_norm="none", num_labels=10, image_mean=[0.3], image_std=[0.4],
    )  # fmt: skip
    return tiny_model(**{**settings, **overrides})


def tiny_images(batch: int = 3, seed: int = 1, channels: int = 3, size: int = 16) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


def perturbed_model(**overrides) -> OdeViTForImageClassification:
    """A tiny model whose parameters and statistics are all away from their initial values."""
    model = tiny_model(**overrides)
    generator = torch.Generator().manual_seed(7)
    for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
        tensor.data += 0.05 * torch.rand(tensor.shape, generator=generator)
    return model
