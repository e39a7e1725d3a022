"""Corruptions made on the spot: Gaussian noise, blur, less contrast and JPEG, each at five strengths.

The kinds and the levels are those of CIFAR-10-C (Hendrycks and Dietterich, ICLR 2019), made here for images of any size
without a download; levels are in pixels and shares, so they are harder for images smaller than 32 pixels.
"""

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from PIL import Image
from torch import Tensor

STRENGTHS = (1, 2, 3, 4, 5)


class Corruption(NamedTuple):
    apply: Callable[[Tensor, float, torch.Generator], Tensor]  # images in [0, 1] (b, c, H, W), level → the same
    levels: tuple[float, float, float, float, float]


def _noise(images: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    return images + deviation * torch.randn(images.shape, generator=generator)


def _blur(images: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """A Gaussian of this deviation in pixels, cut at four of them, the border repeated."""
    reach = max(1, round(4 * sigma))
    kernel = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).view(1, 1, -1)
    flat = images.flatten(0, 1).unsqueeze(1)  # (b·c, 1, H, W)
    flat = functional.conv2d(functional.pad(flat, (reach, reach, 0, 0), mode="replicate"), kernel.unsqueeze(2))
    flat = functional.conv2d(functional.pad(flat, (0, 0, reach, reach), mode="replicate"), kernel.unsqueeze(3))
    return flat.view_as(images)


def _contrast(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + share * (images - mean)


def _jpeg(images: Tensor, quality: float, generator: torch.Generator) -> Tensor:
    pictures = _to_bytes(images).permute(0, 2, 3, 1).numpy()
    result = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture).save(
            file, "JPEG", quality=int(quality)
        )
        decoded = np.asarray(Image.open(file))
        result.append(torch.from_numpy(decoded.copy()).reshape(picture.shape).permute(2, 0, 1))
    return torch.stack(result).float() / 255


CORRUPTIONS: dict[str, Corruption] = {
    "noise": Corruption(_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "blur": Corruption(_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "contrast": Corruption(_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "jpeg": Corruption(_jpeg, (80, 65, 58, 50, 40)),
}


def _to_bytes(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def corrupt(images: Tensor, name: str, strength: int, *, seed: int = 0) -> Tensor:
    """uint8 images (b, c, H, W) of one or three channels, corrupted at a strength from 1 to 5; uint8."""
    if name not in CORRUPTIONS:
        raise ValueError(f"unknown corruption {name!r}; choose one of {', '.join(CORRUPTIONS)}")
    if strength not in STRENGTHS:
        raise ValueError(f"the strength must be from 1 to 5, got {strength}")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            "corruptions take uint8 images (b, 1 or 3, H, W), got "
            f"{str(images.dtype).removeprefix('torch.')} {tuple(images.shape)}"
        )
    apply, levels = CORRUPTIONS[name]
    return _to_bytes(apply(images.float() / 255, levels[strength - 1], torch.Generator().manual_seed(seed)))
