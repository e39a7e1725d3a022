"""What the monitor tells, against explicit Jacobians and maps of tiny models, for every kind of field."""

import math

import pytest
import torch
from problems import perturbed_model, tiny_images
from torch.func import jacrev

from odevit.dynamics.monitor import flow_measures

SMALL = {"image_size": 8, "hidden_size": 8, "num_registers": 0}
KINDS = {
    "softmax": {"num_fields": 2, "num_steps": 2},
    "l2": {"attention": "l2", "num_steps": 2},
    "sinkhorn": {"attention": "sinkhorn", "num_steps": 2},
    "contractive": {"field": "contractive", "pool": "mean", "num_steps": 2, "depth": 1},
}


def norms(flow, states):
    """Spectral norms of the Jacobians of a map of states, one image at a time."""
    found = []
    for x in states:
        j = jacrev(lambda flat, shape=x.shape: flow(flat.view(1, *shape)).flatten())(x.flatten())
        found.append(float(torch.linalg.matrix_norm(j, ord=2)))
    return sorted(found)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_measures_equal_what_they_say(kind):
    model, images = perturbed_model(**SMALL, **KINDS[kind]), tiny_images(3, size=8)
    seen = flow_measures(model, images)
    path = model(images, output_hidden_states=True, output_attentions=True)
    first, last = path.hidden_states[0].detach(), path.hidden_states[-2].detach()

    maps = torch.stack([p.detach() for p in path.attentions])  # (K, b, h, n, n)
    assert seen["map_norm"]["largest"] == pytest.approx(float(torch.linalg.svdvals(maps).max()), rel=1e-5)
    softmax = maps.diag_embed() - maps.unsqueeze(-1) * maps.unsqueeze(-2)  # its Jacobian at every row
    worst = float(torch.linalg.eigvalsh(softmax).max())
    assert 0 < worst <= seen["g1"]["largest"] * (1 + 1e-5) <= 1.0001

    per_depth = model.config.horizon / model.config.depth
    measured = norms(model.odevit.fields[0], first) + norms(model.odevit.fields[-1], last)
    assert seen["field_norm"]["largest"] == pytest.approx(per_depth * max(measured), rel=1e-3)
    assert seen["field_norm"]["median"] == pytest.approx(per_depth * sorted(measured)[2], rel=1e-3)
    assert ("field_bound" in seen) == (kind != "sinkhorn")
    if "field_bound" in seen:
        assert seen["field_bound"]["median"] >= seen["field_norm"]["median"] * (1 - 1e-5)

    growth = norms(lambda x: model.odevit.evolve(x).xs[-1], first)
    assert (seen["sigma_max"]["median"], seen["sigma_max"]["largest"]) == pytest.approx(
        (growth[1], growth[2]), rel=1e-3
    )
    assert max(seen["lyapunov"]) == pytest.approx(math.log(growth[2]) / model.config.depth, abs=1e-3)
