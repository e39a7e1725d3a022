"""Adversaries for tests of upper bounds: gradient ascent instead of random draws, which never come near a bound."""

from collections.abc import Callable

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def ascend(value: Callable[[], Tensor], variables: list[Tensor], *, steps: int = 60, rate: float = 0.2) -> Tensor:
    """The largest of each of value() (b,) that Adam on its logarithm finds; `variables` end where they stand then."""
    for variable in variables:
        variable.requires_grad_()
    adam, best = torch.optim.Adam(variables, rate), torch.tensor(0.0, dtype=torch.float64)
    for _ in range(steps):
        adam.zero_grad()
        found = value()
        best = torch.maximum(best, found.detach())
        (-(found + 1e-30).log().sum()).backward()
        adam.step()
    for variable in variables:
        variable.requires_grad_(False)
    return best


def unit(x: Tensor) -> Tensor:
    """Every sample of (b, …) at length one."""
    return x / x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))


def second_derivative(f: Map, x: Tensor, v: Tensor, h: float = 1e-3) -> Tensor:
    """‖D²f(x)[v, v]‖ of every sample, (b,), by differences of fourth order: in float64 good to 1e-7 for f of size one.

    Not by `jvp` of `jvp`, which is wrong through nn.LayerNorm (torch 2.13).
    """
    far, near, here, beyond, farther = f(torch.cat([x + k * h * v for k in (-2, -1, 0, 1, 2)])).chunk(5)
    return ((16 * (near + beyond) - far - farther - 30 * here) / (12 * h**2)).flatten(1).norm(dim=1)


def largest_second_derivative(f: Map, x: Tensor, radius: float, *, tries: int = 16, seed: int = 0) -> float:
    """The largest ‖D²f(y)[v, v]‖ found over unit v and y in the ball of this radius around x (1, n, d)."""
    generator = torch.Generator().manual_seed(seed)
    move, direction = torch.randn(2, tries, *x.shape[1:], generator=generator, dtype=x.dtype).unbind()

    def point() -> tuple[Tensor, Tensor]:
        length = move.flatten(1).norm(dim=1).clamp_min(1).view(-1, *[1] * (x.ndim - 1))
        return x + radius * move / length, unit(direction)

    return float(ascend(lambda: second_derivative(f, *point()), [move, direction]).max())
