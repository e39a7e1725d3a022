"""What a head reads of the tokens CLS and patches: one class per pool. Shapes: b batch, n tokens, d width."""

import math

import torch
from torch import Tensor, nn


class Pool(nn.Module):
    """What a head reads of CLS and patches. (b, n, d) -> (b, features). Most take any number of tokens."""

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.features = width

    def check(self, tokens: int) -> None:
        """ValueError where it cannot read so many."""


class ClsPool(Pool):
    """The first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class MeanPool(Pool):
    """The mean of the n tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class RootMeanPool(Pool):
    """√n times the mean of the n tokens: a linear map of norm one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1) / math.sqrt(x.shape[1])


class FlattenPool(Pool):
    """All tokens one after another: a linear map of norm one that loses nothing. Takes as many as it was built for."""

    def __init__(self, width: int, tokens: int):
        super().__init__(width, tokens)
        self.tokens, self.features = tokens, tokens * width

    def check(self, tokens: int) -> None:
        if tokens != self.tokens:
            raise ValueError(
                f"pool='flatten' reads every token for itself, so this model takes images of {self.tokens - 1} patches "
                f"only, got {tokens - 1}; resize the images, or give the model another pool and a fresh head"
            )

    def forward(self, x: Tensor) -> Tensor:
        self.check(x.shape[1])
        return x.flatten(1)


class TokenScore(nn.Linear):
    """A number for each token, nearly the same for all at the start."""

    def __init__(self, width: int):
        super().__init__(width, 1)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class SequencePool(Pool):
    """Σ_i p_i x_i with p the softmax over tokens of a learned score (arXiv 2104.05704)."""

    def __init__(self, width: int, tokens: int):
        super().__init__(width, tokens)
        self.score = TokenScore(width)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.softmax(self.score(x), dim=1) * x).sum(dim=1)


POOLS: dict[str, type[Pool]] = {
    "cls": ClsPool,
    "sequence": SequencePool,
    "mean": MeanPool,
    "sqrt_mean": RootMeanPool,
    "flatten": FlattenPool,
}
