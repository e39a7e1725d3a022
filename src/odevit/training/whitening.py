"""A pooling stem whose first convolution whitens the images' 3×3 patches and is not trained (as in airbench, Jordan
2024): nothing to learn there, and no gradient of the largest maps to compute."""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from odevit.data import Split
from odevit.model.layers import StemConvolution
from odevit.training.evaluation import model_input

IMAGES = 2000
"""so many, spread over the split, give the covariance"""
FLOOR = 1e-3
"""of the largest eigenvalue: what varies less is not blown up to unit variance"""


@torch.no_grad()
def whiten_stem(model: nn.Module, split: Split) -> None:
    """Set and freeze the first convolution of a pooling stem. The same split gives the same filters."""
    stem = next((module for module in model.modules() if isinstance(module, StemConvolution)), None)
    if stem is None:
        raise ValueError("optim.whiten sets the first convolution of a pooling stem: add model.tokenizer=pooling to it")
    chosen = torch.linspace(0, len(split) - 1, min(IMAGES, len(split))).long()
    filters = whitening_filters(model_input(model, split.fetch(chosen)[0]), stem.out_channels)
    stem.weight[: len(filters)] = filters  # channels beyond ± all eigenvectors keep their random start
    stem.weight.requires_grad_(False)


def whitening_filters(images: Tensor, count: int) -> Tensor:
    """At most (count, c, 3, 3): the leading eigenvectors of the covariance of 3×3 patches over their standard
    deviations, then the negatives of these, since a ReLU follows. images: (N, c, H, W)"""
    patches = nnf.unfold(images, 3).mT.flatten(0, 1)
    values, vectors = torch.linalg.eigh(patches.T.cov())
    filters = (vectors / values.clamp(min=FLOOR * values.max()).sqrt()).T.flip(0)[: count // 2]
    return torch.cat([filters, -filters]).reshape(-1, images.shape[1], 3, 3)
