"""What to watch of a flow while it is trained: attention maps, steepness of the field, growth over the whole flow."""

from typing import Any

import torch
from torch import Tensor

from odevit.dynamics.bounds import field_bound, g, has_bound
from odevit.dynamics.exponents import model_exponents
from odevit.dynamics.flow import evaluating
from odevit.dynamics.jacobian import jacobian_norm


def spread(values: list[Tensor]) -> dict[str, float]:
    """Median and largest of all entries."""
    flat = torch.cat([value.flatten() for value in values])
    return {"median": float(flat.median()), "largest": float(flat.max())}


def flow_measures(model: Any, images: Tensor) -> dict[str, Any]:
    """Medians and largest values over the images (b, c, H, W), heads and steps of the model's own path.

    g1: of each attention map's worst row; map_norm: ‖P‖₂. field_bound and field_norm: the local bound of the Jacobian's
    norm (where one is known) and the norm measured, per unit of depth, at the first and the last step.
    sigma_max: of the Jacobian of the whole flow; lyapunov: its logarithm per unit of depth, of each image.
    """
    base, config = model.odevit, model.config
    with evaluating(model):
        path = base.evolve(base.embed(images), save_at="steps").xs
        maps = list(base.attention_maps(list(path)))
        phases = [phase for phase, _ in config.time_grid(len(path) - 1).steps()]
        ends = [(base.fields[phases[k]], path[k]) for k in sorted({0, len(phases) - 1})]
        scale = float(config.horizon) / float(config.depth)
        record: dict[str, Any] = {
            "g1": spread([g(p).amax(dim=-1) for p in maps]),
            "map_norm": spread([torch.linalg.matrix_norm(p, ord=2) for p in maps]),
            "field_norm": spread([scale * jacobian_norm(field, x) for field, x in ends]),
        }
        if all(has_bound(field) for field, _ in ends):
            record["field_bound"] = spread([scale * field_bound(field, x) for field, x in ends])
    exponents = model_exponents(model, images).value[:, 0]
    record["sigma_max"] = spread([(exponents * float(config.depth)).exp()])
    return {**record, "lyapunov": exponents.tolist()}
