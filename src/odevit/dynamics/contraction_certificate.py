"""A certificate that costs nothing: the answer of a contractive model is certain within

    r = min_j (z_y - z_j) / (‖w_y - w_j‖ L),        L = ‖E₀‖ · (growth of the steps, 1) · (norm of the read-out, 1),

in ℓ₂, in pixels of [0, 1]: tokenizer E₀ with the normalisation of the images, flow and read-out move two images apart
by at most L. For every image, without a search. It needs `field="contractive"`, no norm before a linear head, and a
tokenizer with a known norm (exact for linear patches, which do not overlap). Positions, CLS, registers are constants.
A statement on real arithmetic: logits carry the rounding of the type they were computed in.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from odevit.dynamics.arrival import contraction_radius
from odevit.dynamics.bounds import stiffness
from odevit.dynamics.certificate import Certificate, tokenizer_bound
from odevit.model.contractive import step_growth
from odevit.model.layers import PatchTokenizer
from odevit.model.pools import ClsPool, FlattenPool, MeanPool, RootMeanPool
from odevit.model.spectral import gram_norm

RADII = {"36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255}
"""The ℓ₂ radii at which certified accuracy is reported (Wong et al., NeurIPS 2018, and all after them)."""


def check_contractive(model: Any) -> None:
    """ValueError that says which part of the model the certificate does not cover."""
    config = model.config
    if getattr(config, "field", None) != "contractive":
        raise ValueError(
            f"the certificate needs a field that never expands, field='contractive'; this model has "
            f"field={getattr(config, 'field', None)!r}"
        )
    if not isinstance(model.norm, nn.Identity):
        raise ValueError(
            f"the certificate covers no norm before the head, and {type(model.norm).__name__} is one: it divides or "
            "shifts what the flow has kept apart. Use final_norm='none'"
        )
    if not isinstance(model.pool, ClsPool | MeanPool | RootMeanPool | FlattenPool):
        raise ValueError(
            "the certificate covers the linear read-outs cls, mean, sqrt_mean and flatten; this model has "
            f"pool={config.pool!r}"
        )
    if type(model.classifier) is not nn.Linear:
        raise ValueError(f"the certificate covers a linear head only, got {type(model.classifier).__name__}")
    if config.embedding_norm != "none" or config.projection_size is not None or config.unit_features:
        raise ValueError(
            "the certificate covers no norm of the tokens and no projection or unit length before the head"
        )
    if not config.image_std:
        raise ValueError("the certificate is in pixels, so it needs the normalisation: image_std in the model's config")


def entrance_norm(model: Any) -> Tensor:
    """‖E₀‖: by how much tokenizer and normalisation move two images of [0, 1] apart, at most; a differentiable scalar.

    Linear patches: the norm of the kernel as a matrix, its columns divided by the std of their channel, bounded by
    `gram_norm` in training (1–2 % above) and exact in eval mode. Others: their bound over the smallest std.
    """
    tokenizer, std = model.odevit.tokenizer, model.odevit.cls_token.new_tensor(model.config.image_std)
    if not isinstance(tokenizer, PatchTokenizer):
        return torch.as_tensor(tokenizer_bound(tokenizer), device=std.device) / std.min()
    kernel = (tokenizer.projection.weight / std.view(1, -1, 1, 1)).flatten(1)
    return gram_norm(kernel) if model.training else torch.linalg.matrix_norm(kernel.double(), ord=2)


def read_out_norm(model: Any) -> float:
    """Norm of state ↦ what the head reads: 1 for CLS, √n·mean and all tokens, 1/√n for the mean of n tokens."""
    return 1 / math.sqrt(1 + model.config.num_patches) if isinstance(model.pool, MeanPool) else 1.0


@torch.no_grad()
def flow_growth(model: Any, num_steps: int | None = None, solver: str | None = None) -> float:
    """By how much the model's steps can move two states apart, at most: 1 but for the rounding of the held norms."""
    config, base = model.config, model.odevit
    tokens = 1 + config.num_patches + config.num_registers
    parts = [stiffness(field, tokens) for field in base.fields]
    scheme = solver or config.solver
    grid = config.time_grid(num_steps)
    growth = math.prod(step_growth(scheme, h, *parts[phase]) for phase, h in grid.steps())
    if not math.isfinite(growth):
        raise ValueError(
            f"nothing is proven for {scheme} with {grid.num_steps} steps on a contractive field; "
            "use euler, lie_trotter, strang, heun or rk4 with enough steps"
        )
    return growth


NEAREST = 1e-6  # rows of a head count as at least so far apart: two equal ones must not make the loss nan


def class_distances(model: Any) -> Tensor:
    """‖w_i - w_j‖ of the head's rows, (C, C), differentiable (the diagonal is 0 with gradient 0)."""
    weight = model.classifier.weight
    square = (weight.unsqueeze(1) - weight).square().sum(dim=-1)
    same = torch.eye(len(weight), dtype=torch.bool, device=weight.device)
    return torch.where(same, 0.0, torch.where(same, 1.0, square).clamp_min(NEAREST**2).sqrt())


@torch.no_grad()
def certified_radius(model: Any, logits: Tensor, *, num_steps: int | None = None, solver: str | None = None) -> Tensor:
    """ℓ₂ radius (b,) in pixels of [0, 1] within which each answer of the model is certain, from its logits (b, C)."""
    check_contractive(model)
    lipschitz = float(entrance_norm(model)) * flow_growth(model, num_steps, solver) * read_out_norm(model)
    return contraction_radius(logits.double(), model.classifier.weight.detach().double()) / lipschitz


@torch.no_grad()
def certify_contractive(model: Any, images: Tensor) -> Certificate:
    """The certificate of normalised images (b, c, H, W), in pixels of [0, 1]; first_order is the radius itself."""
    logits = model(images).logits
    radius = certified_radius(model, logits)
    top = logits.double().topk(min(2, logits.shape[1]), dim=1).values
    return Certificate(logits.argmax(dim=1), top[:, 0] - top[:, -1], radius, radius)


TEMPERATURE = 0.25 / math.sqrt(2)
"""Of the margin loss, in pixels: 1/4 for logits of a head with rows of norm one, √2 apart (Prach and Lampert 2022)."""


def margin_loss(model: Any, logits: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """Cross-entropy that asks for a certified radius of epsilon pixels: a scalar. logits (b, C), soft targets (b, C).

    Cross-entropy with an offset and a temperature, as for 1-Lipschitz networks (Prach and Lampert, ECCV 2022), here of
    the radii r_yj = (z_y - z_j)/(‖w_y - w_j‖ L) in pixels: mean of log(1 + Σ_j exp((ε - r_yj)/τ)), y the label.
    Radii do not change with the scale of head or tokenizer. An offset on the logits that grows with that scale
    (Tsuzuku et al., NeurIPS 2018) was tried and collapses from scratch: while margins are below ε, smaller weights pay.
    """
    check_contractive(model)
    distance = class_distances(model) + torch.eye(logits.shape[1], device=logits.device)  # the diagonal is not used
    lipschitz = read_out_norm(model) * entrance_norm(model).to(logits.dtype)
    radii = (logits.unsqueeze(2) - logits.unsqueeze(1)) / (distance * lipschitz)  # (b, y, j)
    same = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
    lacking = ((epsilon - radii) / TEMPERATURE).masked_fill(same, 0.0)
    return (targets * lacking.logsumexp(dim=2)).sum(dim=1).mean()


@torch.no_grad()
def settle_head(model: Any) -> None:
    """Bring the head to the scale at which logits differ by radii over τ, in the mean over pairs of classes, in place:
    probabilities like those of the margin loss. It does not see the scale, so training leaves any; answers and radii
    stay."""
    check_contractive(model)
    distances = class_distances(model)
    classes = len(distances)
    mean = distances.sum() / (classes * (classes - 1))
    scale = 1 / (TEMPERATURE * read_out_norm(model) * float(entrance_norm(model)) * mean)
    model.classifier.weight.mul_(scale)
    model.classifier.bias.mul_(scale)
