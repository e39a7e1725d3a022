"""What is proven of a contractive model: certified accuracy, and its radii against an attack, in pixels of [0, 1]."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odevit.analysis import Finding, Study
from odevit.analysis.attack import attack
from odevit.dynamics.contraction_certificate import RADII, certified_radius, check_contractive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, TITLE = "stability/radius", "How far may an image move?"


def in_pixels(model: Any, images: Tensor) -> tuple[Callable[[Tensor], Any], Tensor]:
    """The model as a function of pixels of [0, 1], and normalised images (b, c, H, W) as such pixels."""
    mean, std = (images.new_tensor(v).view(1, -1, 1, 1) for v in (model.config.image_mean, model.config.image_std))
    return lambda pixels: SimpleNamespace(logits=model((pixels - mean) / std).logits), images * std + mean


def attacked_radii(model: Any, images: Tensor, *, batch_size: int = 250, seed: int = 0, iterations: int = 60) -> Tensor:
    """Smallest ℓ₂ change in pixels of [0, 1] found to flip the answer to each normalised image, (b,); of any model."""
    found = []
    for batch in images.split(batch_size):
        forward, pixels = in_pixels(model, batch)
        found.append(attack(forward, pixels, iterations=iterations, seed=seed).double())
    return torch.cat(found)


def certified_finding(study: Study, images: Tensor) -> Finding:
    """Certified accuracy on all images of the study; `images` are attacked as well."""
    model = study.model
    try:
        check_contractive(model)
    except ValueError as reason:
        return Finding(NAME, None, TITLE, f"Not computed: {reason}.")
    with torch.no_grad():
        logits = torch.cat([model(batch).logits for batch in study.images.split(study.batch_size)])
        radius, right = certified_radius(model, logits), logits.argmax(dim=1) == study.labels
        own = certified_radius(model, model(images).logits)
    attacked = attacked_radii(model, images, seed=study.seed)
    above, shares = (
        int((own > attacked).sum()),
        {n: float((right & (radius > r)).double().mean()) for n, r in RADII.items()},
    )
    value = {
        "certified_accuracy": shares,
        "accuracy": float(right.double().mean()),
        "certified": own.tolist(),
        "attacked": [size if math.isfinite(size) else None for size in attacked.tolist()],
        "certified_above_attacked": above,
        "images": len(radius),
        "images_attacked": len(images),
        "unit": "pixels of [0, 1]",
    }
    said = ", ".join(f"{share:.1%} within {name}" for name, share in shares.items())
    text = (
        "The field never expands, so every answer has a radius (ℓ₂, pixels of [0, 1]) within which it is proven to "
        f"stay. Right and certain: {said}, of {len(radius)} images ({value['accuracy']:.1%} right). Medians of "
        f"{len(images)} images: certified {own.median():.2g}, attacked {attacked.median():.2g}; certified is above "
        f"attacked for {above}."
    )
    headline = f"{shares['36/255']:.1%} of the images are answered rightly and provably so within 36/255."
    return Finding(
        NAME,
        value,
        TITLE,
        text,
        _curve(radius, right, attacked),
        headline,
        {"certified at 36/255": f"{shares['36/255']:.1%}"},
    )


def _curve(radius: Tensor, right: Tensor, attacked: Tensor) -> "Figure":
    """Share of images answered rightly beyond each radius: proven, and under attack (any answer)."""
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    finite = attacked[attacked.isfinite()]
    most = float(torch.cat([radius[right], finite, radius.new_tensor([0.5])]).quantile(0.98))
    sizes = torch.linspace(0, most, 100, dtype=torch.float64)
    proven = [100 * float((right & (radius > size)).double().mean()) for size in sizes]
    stays = [100 * float((attacked > size).double().mean()) for size in sizes]
    with figure_style():
        figure, axes = subplots(height=3)
        axes.plot(sizes.tolist(), proven, color=color(0), label="right and certain")
        axes.plot(sizes.tolist(), stays, color=color(1), label="answer not flipped by the attack")
        for size in RADII.values():
            axes.axvline(size, color=MUTED, linestyle=":", linewidth=1)
        axes.set_xlabel("ℓ₂ radius, pixels of [0, 1]; dotted: 36, 72, 108 of 255")
        axes.set_ylabel("% of images")
        axes.legend()
    return figure
