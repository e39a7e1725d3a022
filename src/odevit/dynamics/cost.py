"""What a model weighs and costs: parameters, multiply-accumulates with attention included, bytes, milliseconds."""

import copy
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from odevit.dynamics.jacobian import forward_derivatives
from odevit.model.solvers import ADAPTIVE, SOLVERS, given
from odevit.model.spectral import make_plain_


class Macs(NamedTuple):
    """Multiply-accumulates for one image: everything, and what the flow (or the blocks) alone takes."""

    total: int
    flow: int


def count_macs(
    model: nn.Module,
    *,
    num_steps: int | None = None,
    solver: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Macs:
    """Counted by running the model on the meta device: shared blocks count as often as they run, attention included.

    shape (c, H, W): of an image; default: as the model's config says, which timm's and torchvision's models have not.
    `flow` is what the block stack costs without tokenizer and head. The adaptive solvers choose their steps by the
    image, so they have no count: ValueError.
    """
    config: Any = getattr(model, "config", None)
    scheme = solver or getattr(config, "solver", None)
    if scheme in ADAPTIVE:
        raise ValueError(
            f"{scheme} chooses its steps by the image, so it has no count of multiply-accumulates; "
            f"choose one of {', '.join(SOLVERS)}"
        )
    ghost = copy.deepcopy(model).eval().to("meta")
    make_plain_(ghost)  # a spectral cap is computed once per batch, and never once the weights are final
    shape = shape or (config.num_channels, config.image_size, config.image_size)
    image = torch.empty(1, *shape, device="meta", dtype=next((p.dtype for p in model.parameters()), None))
    options = given(num_steps, solver)
    with FlopCounterMode(display=False) as counter, forward_derivatives(), torch.no_grad():
        ghost(image, **options)
    total = counter.get_total_flops() // 2
    around = 0
    for name, module in ghost.named_modules():
        if isinstance(module, nn.Conv2d) or name in ("classifier", "head", "pool", "projection"):
            counts = counter.get_flop_counts().get(f"{type(ghost).__name__}.{name}", {})
            around += sum(counts.values()) // 2
    return Macs(total, total - around)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """total, trainable, and of the blocks (fields) alone."""
    base = getattr(model, "odevit", model)
    blocks = getattr(base, "fields", None)
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "blocks": sum(p.numel() for p in blocks.parameters()) if blocks is not None else 0,
    }


def describe(model: Any, *, num_steps: int | None = None, solver: str | None = None) -> dict[str, Any]:
    """The numbers behind `odevit info`."""
    from odevit.dynamics.bounds import field_bound

    config, parameters = model.config, count_parameters(model)
    macs = count_macs(model, num_steps=num_steps, solver=solver)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, config.num_channels, config.image_size, config.image_size, generator=generator)
    single = model if model.dtype.itemsize >= 4 else copy.deepcopy(model).float()  # half has no singular values
    with torch.no_grad():
        tokens = single.odevit.embed(image.to(next(single.parameters())))
        try:
            bounds = [float(field_bound(field, tokens)) for field in single.odevit.fields]
        except ValueError:  # no bound is known for this attention
            bounds = []
    return {
        "parameters": parameters,
        "num_steps": num_steps if num_steps is not None else config.num_steps,
        "solver": solver or config.solver,
        "macs": {"total": macs.total, "flow": macs.flow},
        "bytes": sum(t.numel() * t.element_size() for t in model.state_dict().values()),
        "lipschitz_bound": max(bounds) if bounds else None,
    }


@torch.no_grad()
def milliseconds_per_image(
    models: Mapping[str, Callable[[Tensor], Any]], images: Tensor, repeats: int = 5
) -> dict[str, float]:
    """Median over repeats, the models taking turns, so that a noisy machine disturbs all of them alike."""
    wait = torch.accelerator.synchronize if images.device.type != "cpu" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name, model in models.items():
            start = time.perf_counter()
            model(images)
            wait()
            if repeat:  # the first one warms up
                times[name].append((time.perf_counter() - start) * 1000 / len(images))
    return {name: median(values) for name, values in times.items()}
