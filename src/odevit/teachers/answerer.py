"""Any image classifier as a teacher that only answers: images in, logits out. It need not be a Vision Transformer."""

from typing import Any

import torch
from torch import Tensor, nn

from odevit.checksum import checksum
from odevit.data import prepare
from odevit.teachers.preprocessing import wanted_by


class Answerer(nn.Module):
    """A frozen classifier in eval mode for ever, with its own image size and normalisation.

    module: anything whose output has `.logits` and whose config has num_labels. mean, std, side: stand in where its
    config has no image_mean, image_std and image_size (a ResNet takes images of any size).
    """

    def __init__(self, module: Any, mean: list[float], std: list[float], side: int | None = None):
        super().__init__()
        self.module = module.eval().requires_grad_(False)
        self.training = False
        own = wanted_by(module).side or side
        if own is None:
            raise ValueError("the classifier's config has no image_size (a square one), and no other was given")
        self.image_size: int = own
        self.num_labels: int = module.config.num_labels
        self.num_channels: int = getattr(module.config, "num_channels", len(mean))
        self.mean = tuple(getattr(module.config, "image_mean", None) or mean)
        self.std = tuple(getattr(module.config, "image_std", None) or std)
        self.family = type(module).__name__

    def train(self, mode: bool = True) -> "Answerer":
        """Does nothing: a teacher never leaves eval mode."""
        return self

    @torch.no_grad()
    def answer(self, images: Tensor) -> Tensor:
        """(b, c, S, S) prepared for this teacher -> (b, labels)."""
        return self.module(images).logits

    def renormalise(self, images: Tensor, config: Any) -> Tensor:
        """Images (b, c, s, s) prepared as `config` (of a student) says → of this teacher's size and normalisation."""
        mean, std = (images.new_tensor(values)[:, None, None] for values in (config.image_mean, config.image_std))
        return prepare((images * std + mean).clamp(0, 1), self.image_size, self.mean, self.std)

    def checksum(self) -> str:
        """Proves that nobody changed it, and names its cache."""
        return checksum(self.module)
