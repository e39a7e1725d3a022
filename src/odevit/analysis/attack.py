"""An ℓ₂ attack by projected gradients: the upper end of a model's robustness, to hold against certified radii."""

from typing import Any

import torch
from torch import Tensor


def attack(model: Any, images: Tensor, *, iterations: int = 60, seed: int = 0) -> Tensor:
    """Size (b,) of the smallest ℓ₂ perturbation found that changes the model's answer; inf where none was found.

    Projected gradient ascent on max_j z_j - z_y, on a sphere that shrinks after a success and grows after a failure
    (decoupled direction and norm: Rony et al., CVPR 2019), then bisection along the best perturbation found.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (-1, *[1] * (images.ndim - 1))

    def rise(delta: Tensor) -> Tensor:
        """max_j z_j - z_y, (b,): positive where the answer has changed."""
        logits = model(images + delta).logits
        others = logits.scatter(1, answer[:, None], -torch.inf)
        return others.amax(dim=1) - logits.gather(1, answer[:, None])[:, 0]

    with torch.no_grad():
        answer = model(images).logits.argmax(dim=1)
    delta = 1e-3 * torch.randn(images.shape, generator=generator, dtype=images.dtype).to(images.device)
    size = images.new_ones(len(images))
    smallest, best = torch.full_like(size, torch.inf), torch.zeros_like(images)
    for i in range(iterations):
        delta.requires_grad_(True)
        value = rise(delta)
        (gradient,) = torch.autograd.grad(value.sum(), delta)
        delta, found = delta.detach(), value.detach() > 0
        length = delta.flatten(1).norm(dim=1)
        better = found & (length < smallest)
        smallest, best = torch.where(better, length, smallest), torch.where(better.view(shape), delta, best)
        unit = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-30).view(shape)
        delta = delta + (0.05 + 0.95 * (1 - i / iterations)) * size.view(shape) * unit
        size = torch.where(found, size * 0.9, size * 1.1)
        delta = delta * (size / delta.flatten(1).norm(dim=1).clamp_min(1e-30)).view(shape)
    with torch.no_grad():
        low, high = torch.zeros_like(size), torch.ones_like(size)
        for _ in range(20):
            middle = (low + high) / 2
            changed = rise(best * middle.view(shape)) > 0
            low, high = torch.where(changed, low, middle), torch.where(changed, middle, high)
    return torch.where(smallest.isfinite(), smallest * high, torch.inf)
