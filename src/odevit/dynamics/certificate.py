"""Certified radius: how far may an image move (ℓ₂, in normalised pixels) before the answer could change?

Softmax attention has no global Lipschitz constant, and one measured on the path certifies nothing beside it. So the
certificate follows a tube around the path X_k of Euler's method and bounds everything inside it. A perturbed path
X_k + Δ_k obeys, with A_k the Jacobian of the step at X_k, exactly

    Δ_{k+1} = A_k Δ_k + ρ_k,     ‖ρ_k‖ ≤ q_k = h/2 · M_k(r_k) r_k²,     r_k ≥ ‖Δ_k‖,

where M_k(r) bounds the field's second derivative on the whole ball of radius r around X_k (`second_derivative_bound`).
With Φ_k = A_{k-1} … A_0 on the patch tokens and ε_k for what is not linear, r_k = ‖Φ_k‖ r_0 + ε_k and
ε_{k+1} = ‖A_k‖ ε_k + q_k.
A margin m_j = z_y - z_j, whose gradient in X_k is a_k, then stays above

    m_j - ‖∇m_j‖ ρ - Σ_k ‖a_{k+1}‖ q_k - (second order of the read-out),        ρ the size of the image's perturbation,

and the radius is the largest ρ at which all of these are positive. It is a statement on real arithmetic, computed in
float64.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from odevit.dynamics.bounds import GELU_SLOPE, field_bound, g, mixing_bound, norm2
from odevit.dynamics.jacobian import forward_derivatives
from odevit.dynamics.tangents import JetField
from odevit.model.field import VectorField
from odevit.model.layers import Attention, CenterNorm, ConvTokenizer, PatchTokenizer, PoolingTokenizer
from odevit.model.solvers import euler

GELU_BEND = math.sqrt(2 / math.pi)
"""max |GELU''| = 2 φ(0): GELU'' = φ(x)(2 - x²)."""

EXACT_STATE = 800  # up to this many state variables ‖A_k‖ and ‖Φ_k‖ are computed, beyond they are bounded

Bound = Callable[[Tensor], Tensor]  # radius (b,) -> bound (b,) on the ball of that radius


# --- bounds on a ball -------------------------------------------------------------------------------------------------


def norm_derivatives_bound(norm: nn.Module, x: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """radius (b,) ↦ bounds (b,) of the first and second derivative of a norm layer on that ball around x (b, n, d).

    LayerNorm with u = x - mean, R² = ‖u‖² + d·eps: first derivative √d/R, second 2/√3 · √d/R², both the smallest
    possible. The second, squared, in a direction whose squared cosine with u is c, with t = ‖u‖²/R², is d/R⁴ times
    t ((1 + 2c - 3tc)² + 4c(1 - c)) ≤ 4/3.
    """
    one = x.new_ones(len(x))
    if isinstance(norm, CenterNorm):
        return lambda r: (norm.gain * norm.weight.abs().max() * one, 0 * one)
    if isinstance(norm, nn.Identity):
        return lambda r: (one, 0 * one)
    if not isinstance(norm, nn.LayerNorm):
        raise ValueError(f"no bound is known for {type(norm).__name__}; known: CenterNorm, LayerNorm, Identity")
    width, slope = x.shape[-1], norm.weight.abs().max() * math.sqrt(x.shape[-1])
    length = (x - x.mean(dim=-1, keepdim=True)).norm(dim=-1).flatten(1).amin(dim=1)  # (b,)

    def layer_norm(r: Tensor) -> tuple[Tensor, Tensor]:
        size = (length - r).clamp_min(0).square() + width * norm.eps
        return slope / size.sqrt(), 2 / math.sqrt(3) * slope / size

    return layer_norm


def attention_bounds(attention: Attention, z: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """radius (b,) ↦ bounds (b,) of softmax attention's first and second derivative on that ball around z (b, n, d).

    Per head, for a unit direction U: the logits S = Q Kᵀ/√e change by dS, ‖dS‖ ≤ τ = (‖Kc Wq‖ + ‖Q Wk‖)/√e, and
    dY = dP V + P dV,  d²Y = d²P V + 2 dP dV  with  dP = C dS,  d²P = P∘((dS - mean)² - var) + C d²S,  ‖C‖ ≤ g. Hence
    ‖P‖‖Wv‖ + g ‖Vc‖ τ  and  g (diam(V) τ² + 2 ‖Wqᵀ Wk‖/√e ‖Vc‖ + 2 τ ‖Wv‖). On a ball the logits move by at most σ, so
    p' ≤ e^{2σ} p entry by entry: ‖P‖ and the variance bound g grow by at most e^{2σ}, and never beyond √n and 1/2.
    """
    if type(attention) is not Attention:
        raise ValueError(f"the certificate knows softmax attention only, not {type(attention).__name__}")
    scale, n = attention.scale, z.shape[1]
    layers = (attention.query, attention.key, attention.value)
    wq, wk, wv = (layer.weight.unflatten(0, (attention.heads, -1)) for layer in layers)  # (h, e, d)
    q, k, v = (attention.split(layer(z)) for layer in layers)  # (b, h, n, e)
    p = torch.softmax(scale * q @ k.mT, dim=-1)
    k, v = (t - t.mean(dim=-2, keepdim=True) for t in (k, v))  # softmax rows do not see a shift of all keys
    kq, qk = k @ wq, q @ wk  # (b, h, n, d)
    alpha, value, out = norm2(wq.mT @ wk), norm2(wv), norm2(attention.out.weight)  # (h,), (h,), ()
    logits, rows = norm2(kq) + norm2(qk), kq.norm(dim=-1).amax(dim=-1) + qk.norm(dim=-1).amax(dim=-1)  # (b, h)
    map_norm, variance, spread = norm2(p), g(p).amax(dim=-1), norm2(v)
    diameter = torch.cdist(v, v, compute_mode="donot_use_mm_for_euclid_dist").amax(dim=(-2, -1))

    def bounds(radius: Tensor) -> tuple[Tensor, Tensor]:
        r = radius[:, None]  # (b, 1)
        tilt = (2 * scale * (rows * r + alpha * r.square())).exp()
        curve, tau = (tilt * variance).clamp_max(0.5), scale * (logits + 2 * alpha * r)
        values, wide = spread + value * r, diameter + math.sqrt(2) * value * r
        first = (tilt * map_norm).clamp_max(math.sqrt(n)) * value + curve * values * tau
        second = curve * (wide * tau.square() + 2 * scale * alpha * values + 2 * tau * value)
        return out * first.norm(dim=-1), out * second.norm(dim=-1)

    return bounds


@torch.no_grad()
def second_derivative_bound(field: VectorField, x: Tensor) -> Bound:
    """radius (b,) ↦ M (b,) with ‖D²ψ(y)[u, u]‖ ≤ M ‖u‖² for the drift ψ and every y in that ball around x (b, n, d)."""
    before_f, before_g = norm_derivatives_bound(field.norm_f, x), norm_derivatives_bound(field.norm_g, x)
    attend = attention_bounds(field.attention, field.norm_g(x))
    # ‖C W1‖ stands for ‖W1‖ where a linear mixing C follows it: the bend of GELU acts entry by entry on C W1 x
    w1 = norm2(field.mlp.w1.weight) * mixing_bound(field.mlp.mixing, x.shape[1])
    w2 = norm2(field.mlp.w2.weight)

    def bound(r: Tensor) -> Tensor:
        f1, f2 = before_f(r)
        g1, g2 = before_g(r)
        first, second = attend(g1 * r)
        mlp = GELU_BEND * w2 * w1.square() * f1.square() + GELU_SLOPE * w1 * w2 * f2
        return abs(field.scale) * (mlp + second * g1.square() + first * g2)

    return bound


def convolution_bound(layer: nn.Conv2d) -> float:
    """Bound of a convolution's operator norm.

    Every pixel is in at most ⌈k/stride⌉² patches, each of which is mapped by the matrix W (out, in·k·k).
    """
    overlap = math.prod(math.ceil(k / s) for k, s in zip(layer.kernel_size, layer.stride, strict=True))
    return float(norm2(layer.weight.detach().flatten(1))) * math.sqrt(overlap)


def tokenizer_bound(tokenizer: nn.Module) -> float:
    """Lipschitz bound of images ↦ tokens in eval mode."""
    if isinstance(tokenizer, PatchTokenizer):
        return convolution_bound(tokenizer.projection)
    if not isinstance(tokenizer, ConvTokenizer | PoolingTokenizer):
        known = "PatchTokenizer, ConvTokenizer, PoolingTokenizer"
        raise ValueError(f"no bound is known for {type(tokenizer).__name__}; known: {known}")
    bound = 1.0
    for layer in tokenizer.layers:
        if isinstance(layer, nn.Conv2d):
            bound *= convolution_bound(layer)
        elif isinstance(layer, nn.BatchNorm2d):
            assert layer.running_var is not None
            bound *= float((layer.weight.abs() / (layer.running_var + layer.eps).sqrt()).max())
        elif isinstance(layer, nn.MaxPool2d):  # 3×3 of stride 2: a pixel is in at most four windows
            bound *= math.ceil(layer.kernel_size / layer.stride)  # type: ignore[operator]
        elif isinstance(layer, nn.GELU):
            bound *= GELU_SLOPE
        else:
            assert isinstance(layer, nn.ReLU)
    return bound


# --- the path ---------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    h: float
    bend: Bound  # second derivative of the field on a ball around X_k
    norm: Tensor  # ‖A_k‖ or a bound of it, (b,)
    reach: Tensor  # ‖Φ_k‖ or a bound of it, times the tokenizer's Lipschitz bound, (b,)
    adjoint: Tensor  # ‖a_{k+1}‖ for every class, (C, b)


class Certificate(NamedTuple):
    """Per image, (b,): answer of the model, smallest margin, the certified radius, and a first-order estimate of it.

    The estimate min_j m_j / ‖∇m_j‖ certifies nothing; it is what the radius would be if the model were linear.
    """

    answer: Tensor
    margin: Tensor
    radius: Tensor
    first_order: Tensor


def _euler(field: VectorField, h: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + h * (field.F(x) + field.attend(x)[0])


def _pull_back(function: Callable[[Tensor], Tensor], x: Tensor, cotangents: Tensor) -> Tensor:
    """Jᵀ applied to each of (C, b, …)."""
    with forward_derivatives():
        pull = torch.func.vjp(function, x)[1]
        return torch.func.vmap(lambda c: pull(c)[0])(cotangents)


def _lengths(cotangents: Tensor) -> Tensor:
    """(C, b, …) -> (C, b)"""
    return cotangents.flatten(2).norm(dim=-1)


def _largest_singular(matrix: Tensor) -> Tensor:
    """‖A‖₂ of (b, m, l), rounded up: the largest eigenvalue of AᵀA is accurate to far less than 1e-9."""
    return torch.linalg.eigvalsh(matrix.mT @ matrix)[:, -1].clamp_min(0).sqrt() * (1 + 1e-9)


def _step_jacobian(field: VectorField, h: float, x: Tensor) -> Tensor:
    """The Jacobian (b, N, N) of an Euler step at each sample, with every unit vector as a tangent."""
    size = x[0].numel()
    units = torch.eye(size).to(x).view(size, 1, *x.shape[1:]).expand(-1, len(x), -1, -1)
    jet = euler(JetField(field), torch.cat([x.unsqueeze(0), units]), h)  # type: ignore[arg-type]
    return jet[1:].flatten(2).permute(1, 2, 0)


def _norms(
    grid: list[tuple[VectorField, float]], states: list[Tensor], patches: slice
) -> tuple[list[Tensor], list[Tensor]]:
    """‖A_k‖ (K of them) and ‖Φ_k‖ (K + 1): computed for small states, bounded by 1 + h·field_bound for large ones."""
    b, n, d = states[0].shape
    norms, reach = [], [states[0].new_ones(b)]
    moved = torch.eye(n * d).to(states[0]).unflatten(1, (n, d))[:, patches].flatten(1) if n * d <= EXACT_STATE else None
    for (field, h), x in zip(grid, states, strict=False):
        if moved is None:
            norms.append(1 + h * field_bound(field, x))
            reach.append(reach[-1] * norms[-1])
        else:
            jacobian = _step_jacobian(field, h, x)
            moved = jacobian @ moved
            norms.append(_largest_singular(jacobian))
            reach.append(_largest_singular(moved))
    return norms, reach


def check_certifiable(model: Any) -> None:
    """ValueError for models whose flow the certificate does not cover."""
    if model.config.field != "softmax":
        raise ValueError(f"this certificate covers the softmax field; this model has field={model.config.field!r}")
    if model.config.solver != "euler" or model.config.attention != "softmax":
        raise ValueError(
            "the certificate covers Euler steps with softmax attention; this model has "
            f"solver={model.config.solver!r}, attention={model.config.attention!r}"
        )
    if model.config.pool != "cls":
        raise ValueError(f"the certificate covers a head that reads CLS; this model has pool={model.config.pool!r}")
    for name, covered in (("embedding_norm", "none"), ("projection_size", None), ("unit_features", False)):
        if (value := getattr(model.config, name)) != covered:
            raise ValueError(f"the certificate covers plain tokens and a plain head; this model has {name}={value!r}")


def _margins(logits: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """z_y - z_j for every class j, (C, b), and its gradients in the logits, (C, b, C)."""
    one_hot = torch.eye(logits.shape[1]).to(logits)
    return (logits.gather(1, answer[:, None]) - logits).mT, one_hot[answer] - one_hot.unsqueeze(1)


@torch.no_grad()
def certify(model: Any, images: Tensor) -> Certificate:
    """Certified ℓ₂ radius of the model's answer for each image (b, c, H, W), with the model's own number of steps."""
    check_certifiable(model)
    model, images = copy.deepcopy(model).double().eval().requires_grad_(False), images.double()
    base, config = model.odevit, model.config
    grid = [(base.fields[phase], h) for phase, h in config.time_grid().steps()]
    steps, states = [_euler(field, h) for field, h in grid], [base.embed(images)]
    for step in steps:
        states.append(step(states[-1]))
    logits = model.classify(states[-1])
    answer = logits.argmax(dim=1)
    margins, directions = _margins(logits, answer)

    adjoints = [_pull_back(model.classify, states[-1], directions)]  # a_K, …, a_0, each (C, b, n, d)
    for step, x in zip(reversed(steps), reversed(states[:-1]), strict=True):
        adjoints.append(_pull_back(step, x, adjoints[-1]))
    gradient = _lengths(_pull_back(base.embed, images, adjoints[-1]))  # (C, b), of the margins in the image
    patches = slice(1, 1 + config.num_patches)
    entrance = tokenizer_bound(base.tokenizer)
    linear = isinstance(base.tokenizer, PatchTokenizer)
    slope = gradient if linear else entrance * _lengths(adjoints[-1][:, :, patches])

    norms, reach = _norms(grid, states, patches)
    bends = [second_derivative_bound(field, x) for (field, _), x in zip(grid, states, strict=False)]
    path = [
        _Step(h, bend, norm, span * entrance, _lengths(adjoint))
        for (_, h), bend, norm, span, adjoint in zip(grid, bends, norms, reach, adjoints[-2::-1], strict=False)
    ]
    head, last = model.classifier.weight, norm_derivatives_bound(model.norm, states[-1][:, :1])
    readout = (head[answer] - head.unsqueeze(1)).norm(dim=-1)  # ‖w_y - w_j‖, (C, b)
    itself = torch.arange(len(head), device=answer.device)[:, None] == answer  # (C, b)

    def certified(rho: Tensor) -> Tensor:
        """Whether every other class stays below the answer for all perturbations of size rho (b,)."""
        left, beyond = margins - slope * rho, torch.zeros_like(rho)
        for step in path:
            r = step.reach * rho + beyond
            rest = step.h / 2 * step.bend(r) * r.square()
            left, beyond = left - step.adjoint * rest, step.norm * beyond + rest
        r = reach[-1] * entrance * rho + beyond
        left = left - readout * last(r)[1] / 2 * r.square()
        return ((left > 0) | itself).all(dim=0)

    margin = margins.masked_fill(itself, torch.inf).amin(dim=0)
    first_order = (margins / gradient).masked_fill(itself, torch.inf).amin(dim=0)
    return Certificate(answer, margin, _largest_certified(certified, torch.ones_like(margin)), first_order)


def _largest_certified(certified: Callable[[Tensor], Tensor], one: Tensor, iterations: int = 60) -> Tensor:
    """The largest radius (b,) between 1e-30 and 1e3, bisecting its logarithm; 0 where not even 1e-30 is certified."""
    low, high = one * math.log(1e-30), one * math.log(1e3)
    for _ in range(iterations):
        middle = (low + high) / 2
        ok = certified(middle.exp())
        low, high = torch.where(ok, middle, low), torch.where(ok, high, middle)
    return torch.where(certified(low.exp()), low.exp(), 0.0)
