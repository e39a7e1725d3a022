"""How far may a state still move? Where that is less than the head's radius, the answer is final, and that is proven.

For an autonomous flow with log-norm at most μ, ‖X(T) - X(t)‖ ≤ ‖ψ(X(t))‖ (e^{μτ} - 1)/μ, τ = T - t (`arrival_bound`).
A model takes steps, and its answer is that of its steps: if an Euler step grows distances by at most ℓ, consecutive
displacements do too, so after a step of length d the m steps left move the state by at most d (ℓ + ℓ² + … + ℓᵐ).

ℓ = 1 + hL needs an L that holds wherever the state can go. L2 attention with CenterNorm has a global one. Softmax
attention has none, so a ball is proven along with it: if the bound with the L of a ball around X_k is at most the
ball's radius, no later state leaves the ball. Both are honest and large: h·L of a trained model is far above 1, so the
rule hardly ever fires for them. A contractive field has ℓ = 1 by construction, everywhere.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from odevit.dynamics.bounds import attention_bound, mlp_bound, stiffness
from odevit.dynamics.certificate import attention_bounds, norm_derivatives_bound
from odevit.model.contractive import ContractiveField, step_growth
from odevit.model.field import VectorField
from odevit.model.halting import Moment
from odevit.model.layers import Attention, L2Attention

RADII = 12  # balls to try, each twice as large as the one before
ROUNDING = 1e-4  # of float32 over tens of steps, relative to the head's radius: nothing is certified within it


def arrival_bound(speed: Tensor, left: float, log_norm: float | Tensor) -> Tensor:
    """‖X(T) - X(t)‖ ≤ ‖ψ(X(t))‖ (e^{μτ} - 1)/μ: speed ‖ψ‖ (b,), left τ = T - t, log_norm μ ≥ that of the field wherever
    the flow can go; (b,). At μ = 0 it is ‖ψ‖ τ."""
    mu = torch.as_tensor(log_norm, dtype=speed.dtype, device=speed.device)
    safe = torch.where(mu == 0, torch.ones_like(mu), mu)
    return speed * torch.where(mu == 0, torch.full_like(mu, left), torch.expm1(mu * left) / safe)


def displacement_bound(last: Tensor, left: int, growth: Tensor) -> Tensor:
    """d (ℓ + … + ℓᵐ): how far m more steps can go after one of length d (b,), each of which grows distances by ≤ ℓ."""
    total, factor = torch.zeros_like(last), torch.ones_like(last)
    for _ in range(left):
        factor = factor * growth
        total = total + factor
    return last * total


def lipschitz_on_ball(field: VectorField, x: Tensor) -> Callable[[Tensor], Tensor]:
    """radius (b,) ↦ Lipschitz bound (b,) of the drift on that ball around x (b, n, d)."""
    before_f, before_g = norm_derivatives_bound(field.norm_f, x), norm_derivatives_bound(field.norm_g, x)
    mlp, z = mlp_bound(field.mlp, x.shape[1]), field.norm_g(x)
    attend = _attention_on_ball(field.attention, z)

    def bound(r: Tensor) -> Tensor:
        slope = before_g(r)[0]
        return abs(field.scale) * (before_f(r)[0] * mlp + field.damping + slope * attend(slope * r))

    return bound


def _attention_on_ball(attention: Attention, z: Tensor) -> Callable[[Tensor], Tensor]:
    if isinstance(attention, L2Attention):
        everywhere = attention_bound(attention, z)
        return lambda r: everywhere
    inside = attention_bounds(attention, z)
    return lambda r: inside(r)[0]


def contraction_radius(logits: Tensor, head_weight: Tensor) -> Tensor:
    """Radius (b,) of the largest ball around each head input with the same answer. logits (b, C), head_weight (C, d).

    Infinite when there is one class only; zero on a tie.
    """
    if logits.ndim != 2 or head_weight.ndim != 2 or logits.shape[1] != head_weight.shape[0]:
        raise ValueError(
            "logits must have shape (b, classes) and head_weight (classes, d), "
            f"got {tuple(logits.shape)} and {tuple(head_weight.shape)}"
        )
    answer = logits.argmax(dim=1)
    margin = logits.gather(1, answer[:, None]) - logits  # (b, C), zero at the answer itself
    normal = torch.cdist(head_weight[None], head_weight[None], compute_mode="donot_use_mm_for_euclid_dist")[0]  # (C, C)
    radius = torch.where(margin > 0, margin / normal[answer], torch.zeros_like(margin))  # parallel planes: x / 0 = inf
    return radius.scatter(1, answer[:, None], torch.inf).min(dim=1).values


def answer_head(model: Any) -> tuple[Tensor, Tensor] | None:
    """Weight (C, d) and bias (C,) of the linear map on `model.features` that gives the model's answers.

    Its logits are the model's own. With unit features they are so times ‖u‖ > 0, so only the answers are the same, and
    only if the bias is one number for all classes (it is dropped): None where it is not.
    """
    weight, bias = model.classifier.weight, model.classifier.bias
    if isinstance(model.projection, nn.Linear):
        weight = weight @ model.projection.weight  # (C, e) (e, d)
    if not model.config.unit_features:
        return weight, bias
    return (weight, torch.zeros_like(bias)) if bool((bias == bias[0]).all()) else None


def distance_and_radius(model: Any, state: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """‖norm(CLS of state) - norm(target)‖, and the radius around the latter in which the head cannot change its answer.

    state (b, n, d), target (b, d) is a CLS state such as a teacher's last; both results (b,) in float64, so that the
    head's rounding cannot contradict them. Below a ratio of 1, the model certainly answers as its head does on target.
    """
    head = answer_head(model)
    assert head is not None
    goal, weight, bias = model.norm(target).double(), head[0].double(), head[1].double()
    distance = torch.linalg.vector_norm(model.features(state).double() - goal, dim=1)
    return distance, contraction_radius(linear(goal, weight, bias), weight)


class Certified:
    """A rule that stops an image only where the steps left provably cannot change the answer. Euler steps only."""

    def __init__(self, model: Any):
        if not isinstance(model.classifier, nn.Linear):
            raise ValueError(
                f"certified halting needs a linear head, this model has a {type(model.classifier).__name__}"
            )
        if model.config.solver != "euler":
            raise ValueError(f"certified halting covers Euler steps, this model's solver is {model.config.solver!r}")
        if model.config.pool == "sequence":
            raise ValueError(
                "certified halting covers heads that read CLS, a mean or all tokens; a learned weighting has no bound"
            )
        head = answer_head(model)
        if head is None:
            raise ValueError("certified halting of unit features needs one bias for all classes")
        self.model, self.head = model, head

    @torch.no_grad()
    def __call__(self, moment: Moment) -> Tensor:
        if moment.solver != "euler":
            raise ValueError(f"certified halting covers Euler steps, got solver={moment.solver!r}")
        certain = torch.zeros(len(moment.state), dtype=torch.bool, device=moment.state.device)
        phases = list(moment.grid.steps())
        (phase, h), left = phases[moment.step - 1], len(phases) - moment.step
        if any(other != phase for other, _ in phases[moment.step :]):  # another field is still to come
            return certain
        x, last = moment.state, (moment.state - moment.before).flatten(1).norm(dim=1)
        field, read = self.model.odevit.fields[phase], self._read_out_slope(x)
        unit = self.model.config.unit_features
        logits = linear(self.model.features(x), *self.head) if unit else moment.logits
        radius = contraction_radius(logits, self.head[0]) * (1 - ROUNDING)
        if isinstance(field, ContractiveField):  # ℓ = 1 everywhere, so m steps go no further than m times the last one
            growth = step_growth("euler", h, *stiffness(field, x.shape[1]))
            ball = displacement_bound(last, left, torch.full_like(last, growth))
            return read(ball) * ball < radius
        slope = lipschitz_on_ball(field, x)
        for doubling in range(RADII):
            ball = last * left * 2.0**doubling
            stays = displacement_bound(last, left, 1 + h * slope(ball)) <= ball
            certain |= stays & (read(ball) * ball < radius)
        return certain

    def _read_out_slope(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """radius ↦ Lipschitz bound of state ↦ what the head reads, on that ball. A mean of n tokens moves by at
        most 1/√n of what they do together."""
        tokens = x[:, :1] if self.model.config.pool == "cls" else x[:, : x.shape[1] - self.model.config.num_registers]
        bound = norm_derivatives_bound(self.model.norm, tokens)
        shrink = 1 / math.sqrt(tokens.shape[1]) if self.model.config.pool == "mean" else 1.0
        return lambda r: bound(r)[0] * shrink
