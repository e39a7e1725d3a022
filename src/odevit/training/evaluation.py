"""Accuracy of any image classifier, from exact counts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from odevit.data import Split, batches, prepare
from odevit.dynamics.flow import eval_mode
from odevit.model.solvers import given


@torch.no_grad()
def evaluate(
    model: Any,
    split: Split,
    *,
    batch_size: int = 256,
    num_steps: int | None = None,
    solver: str | None = None,
    accelerator: Any = None,
) -> dict[str, Any]:
    """Top-1/3/5 from exact counts and the mean cross-entropy of any classifier whose output has `.logits`.

    Works in eval mode and gives every module its mode back. Images are prepared as the model's config says.
    With an accelerator the split is shared among its processes.
    """
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    options = given(num_steps, solver)
    counts = torch.zeros(5, dtype=torch.float64)  # right at 1, 3, 5; summed loss; images
    with eval_mode(model):
        for batch in batches(split, -(-batch_size // world) * world, shuffle=False, rank=rank, world_size=world):
            count = len(batch.labels)
            # without a share of the last batch, one blank image: split weights are gathered by all processes together
            images = batch.images if count else batch.images.new_zeros(1, *batch.images.shape[1:])
            logits = model(model_input(model, images), **options).logits[:count].float().cpu()
            counts += _count(logits, batch.labels)
    right1, right3, right5, loss, count = (
        accelerator.reduce(counts.to(accelerator.device)) if world > 1 else counts
    ).tolist()
    return {
        "top1": right1 / count,
        "top3": right3 / count,
        "top5": right5 / count,
        "loss": loss / count,
        "count": int(count),
    }


@torch.no_grad()
def certified_accuracy(
    model: Any, split: Split, *, batch_size: int = 256, num_steps: int | None = None, solver: str | None = None
) -> dict[str, Any]:
    """Share of images answered rightly and provably so within 36/255, 72/255 and 108/255 (ℓ₂, pixels of [0, 1]).

    Also the median certified radius, 0 for wrong answers. For contractive models; others are an error that says why.
    """
    from odevit.dynamics.contraction_certificate import RADII, certified_radius, check_contractive

    check_contractive(model)
    device, radii = next(model.parameters()).device, []
    with eval_mode(model):
        for batch in batches(split, batch_size, shuffle=False):
            images = model_input(model, batch.images.to(device))
            logits = model(images, num_steps=num_steps, solver=solver).logits
            radius = certified_radius(model, logits, num_steps=num_steps, solver=solver).cpu()
            radii.append(torch.where(logits.argmax(dim=1).cpu() == batch.labels, radius, -1.0))
    found = torch.cat(radii)
    shares = {name: float((found > size).double().mean()) for name, size in RADII.items()}
    return {"certified": shares, "median_radius": float(found.clamp_min(0).median())}


def _count(logits: Tensor, labels: Tensor) -> Tensor:
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]  # (b, 5)
    right = [ranked[:, :k].any(dim=1).sum() for k in (1, 3, 5)]
    return torch.stack([*right, nnf.cross_entropy(logits, labels, reduction="sum"), torch.tensor(len(labels))]).double()


def model_input(model: Any, images: Tensor) -> Tensor:
    """uint8 or float images of any size → what the model expects, as its config says, on its device."""
    if not model.config.image_mean or not model.config.image_std:
        raise ValueError(
            "the model does not say with which mean and std its images were normalised: put image_mean and image_std "
            "into its config.json, or a preprocessor_config.json beside it"
        )
    images = images.to(next(model.parameters()).device)
    return prepare(images, model.config.image_size, model.config.image_mean, model.config.image_std)


def monitors(
    model: Any, split: Split, watch: Callable[[Any, Tensor], dict[str, Any]], images: int = 4
) -> dict[str, Any]:
    """Spectral norm of every matrix and, for an ODE-ViT, what its flow does with the first images of a split.

    `watch` adds what the objective knows. Costs one singular value decomposition per matrix, and per image two Jacobian
    norms and one σ_max by Lanczos (up to 80 products). Leaves random numbers as they are.
    """
    from odevit.model.spectral import spectral_norms

    record: dict[str, Any] = {"spectral_norms": spectral_norms(model)}
    if hasattr(model, "odevit"):
        from odevit.dynamics.monitor import flow_measures

        pixels = split.fetch(torch.arange(min(images, len(split))))[0]
        with eval_mode(model), torch.random.fork_rng():
            inputs = model_input(model, pixels)
            record |= flow_measures(model, inputs)
            with torch.no_grad():
                record |= watch(model, inputs)
    return record
