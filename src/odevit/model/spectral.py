"""Spectral norms of matrices: set to one at the start, measured, bounded from above, and held during training.

Needs nothing else of odevit. What a whole field's bound is made of stands in `odevit.dynamics.bounds`.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# --- spectral initialisation ------------------------------------------------------------------------------------------


@torch.no_grad()
def spectral_init_(weight: Tensor) -> Tensor:
    """Xavier-normal, then divided by the largest singular value, in place: ‖W‖₂ = 1.

    weight: a matrix (out, in), or a convolution (out, in, k, k) seen as the matrix (out, in·k·k).
    """
    nn.init.xavier_normal_(weight)
    return weight.div_(torch.linalg.matrix_norm(weight.flatten(1), ord=2))


# --- spectral norms, measured, bounded and held -----------------------------------------------------------------------


def _matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every linear and convolutional weight as a matrix, with its layer's name; capped weights as they are used."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            yield name, layer.weight.detach().flatten(1)


def spectral_norms(module: nn.Module) -> dict[str, float]:
    """‖W‖₂ of every linear and convolutional layer by name, exact (one singular value decomposition each)."""
    return {name: float(torch.linalg.matrix_norm(matrix, ord=2)) for name, matrix in _matrices(module)}


def gram_norm(weight: Tensor, iterations: int = 7) -> Tensor:
    """Upper bound of ‖W‖₂ that is never below it (up to rounding), differentiable; a scalar in float32 or better.

    Gram iteration (Delattre et al., ICML 2023): with G₀ = W and G_k = G_{k-1}ᵀ G_{k-1}, ‖W‖₂ ≤ ‖G_k‖_F^(1/2^k). This is
    the Schatten norm of exponent 2^(k+1): at most rank^(1/2^(k+1)) too large, 2.6 % for k = 7 and rank 768.
    """
    kind = weight.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():  # not on meta
        gram = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
        gram = gram if gram.shape[0] >= gram.shape[1] else gram.mT  # the smaller of the two Gram matrices
        tiny = torch.finfo(gram.dtype).tiny
        log_scale = gram.new_zeros(())
        for _ in range(iterations):
            # The result does not depend on the rescaling, so no gradient has to pass through it.
            size = torch.linalg.matrix_norm(gram.detach()).clamp_min(tiny)
            gram = gram / size
            gram = gram.mT @ gram
            log_scale = 2 * (log_scale + size.log())
        last = torch.linalg.matrix_norm(gram).clamp_min(tiny).log()
        return ((log_scale + last) / 2**iterations).exp()  # rounded to bfloat16 it could be below the norm


class SpectralCap(nn.Module):
    """Parametrisation W ↦ W · min(1, c / gram_norm(W)): ‖W‖₂ ≤ c holds at every step, whatever the optimiser does.

    Use `torch.nn.utils.parametrize.cached()` around forward passes that share the weight, so that it is computed once.
    """

    def __init__(self, cap: float):
        super().__init__()
        if cap <= 0:
            raise ValueError(f"the spectral cap must be positive, got {cap}; use no cap at all to leave weights free")
        self.cap = cap

    def forward(self, weight: Tensor) -> Tensor:
        return (weight / (gram_norm(weight) / self.cap).clamp_min(1)).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight  # so that a capped weight can be assigned

    def extra_repr(self) -> str:
        return f"cap={self.cap}"


def cap_spectral_norms_(module: nn.Module, cap: float) -> list[str]:
    """Hold ‖W‖₂ ≤ cap for every linear layer inside `module`; returns their names. Layers already capped are errors."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in layers.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(f"{name!r} already has a parametrised weight; cap the spectral norms once")
        parametrize.register_parametrization(layer, "weight", SpectralCap(cap))
    return list(layers)


def make_plain_(module: nn.Module) -> None:
    """Capped weights become plain numbers: what the cap leaves of them."""
    for layer in module.modules():
        if parametrize.is_parametrized(layer):
            shared = type(layer)  # a deep copy shares it with its original, and removing changes the class
            layer.__class__ = type(shared.__name__, shared.__bases__, dict(shared.__dict__))
            for name in list(layer.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(layer, name)


def plain_copy(model: Any) -> Any:
    """Of an ODE-ViT: in eval mode on the CPU, in float32, its capped weights plain numbers."""
    copied: Any = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    make_plain_(copied)
    copied.config.spectral_cap = None
    return copied
