"""JaSMin, and upper bounds of the Jacobian of a field, computed from weights and attention maps.

Everything that needs derivatives of the field (measured norms, log-norm, error bound) is in `jacobian.py`.
Shapes: b batch, n tokens, d width, h heads, e = d / h head width.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from odevit.dynamics.jacobian import check_precision
from odevit.model.contractive import ContractiveField
from odevit.model.field import VectorField
from odevit.model.layers import Attention, CenterNorm, DepthwiseMixing, L2Attention, Mlp

# --- JaSMin -----------------------------------------------------------------------------------------------------------


def g(p: Tensor, k: int = 1) -> Tensor:
    """g_k(p) = x_k (1 - x_k + x_{k+1}) of attention rows p (…, n) with x the row sorted downwards, x_{n+1} = 0; (…).

    It bounds the k-th eigenvalue of diag(p) - p pᵀ, the Jacobian of softmax (Yudin et al., arXiv 2507.07814).
    """
    n = p.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of tokens {n}, got {k}")
    x, index = p.topk(min(k + 1, n), dim=-1)
    others = p.scatter(-1, index[..., k - 1 : k], 0).sum(dim=-1)  # 1 - x_k, without cancellation when x_k is near 1
    return x[..., k - 1] * (others + x[..., k]) if k < n else x[..., k - 1] * others


def jasmin(attention: Tensor | Sequence[Tensor], k: int = 0) -> Tensor:
    """JaSMin penalty of attention maps (…, h, n, n), or of one map per step: a scalar in the autograd graph.

    log g₁ (k = 0) or log(g₁ / g_k) (k ≥ 2) of each row, max over query tokens, mean over everything else. The maps must
    be those before dropout. Where a row is one-hot to the last bit, g is held at the smallest positive number.
    """
    if k < 0 or k == 1:
        raise ValueError(f"k must be 0 (log g₁) or at least 2 (log g₁/g_k, which is always 0 for k = 1), got {k}")
    if not isinstance(attention, Tensor):
        return torch.stack([jasmin(step, k) for step in attention]).mean()

    def log_g(k: int) -> Tensor:
        return g(attention, k).clamp_min(torch.finfo(attention.dtype).tiny).log()

    rows = log_g(1) if k == 0 else log_g(1) - log_g(k)  # (…, h, n)
    return rows.amax(dim=-1).mean()


# --- Lipschitz bounds -------------------------------------------------------------------------------------------------

GELU_SLOPE = (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)
"""max |GELU'| = 1.12890…: GELU' = Φ(x) + x φ(x) is largest where φ(x)(2 - x²) = 0, at x = √2."""


def norm2(matrix: Tensor) -> Tensor:
    """Largest singular value of (…, m, n): (…,)."""
    return torch.linalg.matrix_norm(matrix, ord=2)


@torch.no_grad()
def norm_bound(norm: nn.Module, x: Tensor) -> Tensor:
    """Bound of the Jacobian norm of a norm layer at x (b, n, d): (b,). Global for CenterNorm, local for LayerNorm."""
    if isinstance(norm, CenterNorm):
        return (norm.gain * norm.weight.abs().max()).expand(x.shape[0])
    if isinstance(norm, nn.LayerNorm):  # diag(γ)/σ times a projection
        deviation = (x.var(dim=-1, unbiased=False) + norm.eps).sqrt().flatten(1).amin(dim=1)
        return norm.weight.abs().max() / deviation
    if isinstance(norm, nn.Identity):
        return x.new_ones(x.shape[0])
    raise ValueError(f"no Lipschitz bound is known for {type(norm).__name__}; known: CenterNorm, LayerNorm, Identity")


@torch.no_grad()
def mixing_bound(mixing: nn.Module, tokens: int) -> Tensor:
    """Norm of the mixing of `tokens` tokens, at least 1 since CLS passes; a scalar.

    A zero-padded convolution on a grid of side s is a compression of the circulant one on a grid of side s + 2, whose
    singular values are the moduli of the kernel's Fourier transform there: the largest of them bounds it.
    """
    if isinstance(mixing, nn.Identity):
        return torch.ones(())
    if not isinstance(mixing, DepthwiseMixing):
        raise ValueError(f"no Lipschitz bound is known for {type(mixing).__name__}; known: DepthwiseMixing, Identity")
    return _padded_norm(mixing.weight, tokens - 1 - mixing.registers)


def _padded_norm(kernel: Tensor, patches: int) -> Tensor:
    side = math.isqrt(patches) + 2
    return torch.fft.fft2(kernel, s=(side, side)).abs().max().clamp_min(1)


@torch.no_grad()
def mlp_bound(mlp: Mlp, tokens: int) -> Tensor:
    """Global Lipschitz bound of the MLP on `tokens` tokens, max |GELU'| · ‖W1‖₂ ‖C‖₂ ‖W2‖₂; a scalar."""
    return GELU_SLOPE * norm2(mlp.w1.weight) * mixing_bound(mlp.mixing, tokens) * norm2(mlp.w2.weight)


def _softmax_bound(attention: Attention, x: Tensor) -> Tensor:
    """Local bound, written with Q, K, V so that it also holds with biases. Per head, with S = Q Kᵀ/√e:

    dY = P dV + dP V, rows dP_i = dS_i C_i, C_i = diag(p_i) - p_i p_iᵀ, ‖C_i‖ ≤ g₁(p_i) and C_i 1 = 0. So V and K may be
    centred over tokens, and dS = (dX Wqᵀ Kᵀ + Q Wk dXᵀ)/√e gives ‖P‖‖Wv‖ + g ‖Vc‖ (‖Kc Wq‖ + ‖Q Wk‖)/√e.
    """
    wq, wk, wv = (
        layer.weight.unflatten(0, (attention.heads, -1)) for layer in (attention.query, attention.key, attention.value)
    )  # (h, e, d)
    q, k, v = (attention.split(layer(x)) for layer in (attention.query, attention.key, attention.value))  # (b, h, n, e)
    k, v = k - k.mean(dim=-2, keepdim=True), v - v.mean(dim=-2, keepdim=True)
    p = attention.map(x)  # (b, h, n, n)
    slope = g(p).amax(dim=-1)  # (b, h)
    # ‖K Wq‖ = ‖K Rᵀ‖ with Wqᵀ = O R and O orthonormal: decompositions of (n, e) instead of (n, d).
    wq, wk = (torch.linalg.qr(w.mT).R.mT for w in (wq, wk))
    logits = attention.scale * (norm2(k @ wq) + norm2(q @ wk))
    heads = norm2(p) * norm2(wv) + slope * norm2(v) * logits  # (b, h)
    return norm2(attention.out.weight) * heads.square().sum(dim=-1).sqrt()


def _inverse_of_x_exp(y: float) -> float:
    """φ⁻¹(y) for φ(x) = x exp(x + 1), y ≥ 0, by Newton's method on log x + x + 1 = log y."""
    if y == 0:
        return 0.0
    x = min(1.0, y / math.e**2)  # φ(1) = e²: at or below the root, from where it rises monotonically
    for _ in range(50):
        x = x * (math.log(y) - math.log(x)) / (1 + x)  # x - f/f' with f = log x + x + 1 - log y, f' = 1/x + 1
    return x


def _l2_bound(attention: Attention, x: Tensor) -> Tensor:
    """Global bound of L2 attention over n tokens, after Kim, Papamakarios and Mnih (ICML 2021), Theorem 3.2.

    With y = Wq x, c = φ⁻¹(n - 1) ≥ Σ_j p_ij |y_i - y_j|²/√e (their Lemma) a head's map is P X Wqᵀ Wq/√e, and the three
    parts of its Jacobian are at most √n (from P), 2c (the token itself) and 2c√n (the others), each times ‖Wq‖²/√e.
    Their 4c√n + √n is this, rounded up. Note ‖Wq‖² per head: the map is quadratic in Wq.
    """
    n = x.shape[-2]
    c = _inverse_of_x_exp(n - 1)
    wq, wv = (layer.weight.unflatten(0, (attention.heads, -1)) for layer in (attention.query, attention.value))
    heads = attention.scale * (math.sqrt(n) + 2 * c * (1 + math.sqrt(n))) * norm2(wq).square() * norm2(wv)  # (h,)
    return (norm2(attention.out.weight) * heads.square().sum().sqrt()).expand(x.shape[0])


ATTENTION_BOUNDS: dict[type[Attention], Callable[[Attention, Tensor], Tensor]] = {
    Attention: _softmax_bound,
    L2Attention: _l2_bound,
}


@torch.no_grad()
def attention_bound(attention: Attention, x: Tensor) -> Tensor:
    """Bound of the Jacobian norm of attention at x (b, n, d): (b,). Local (at x) for softmax, global for L2."""
    if type(attention) not in ATTENTION_BOUNDS:
        known = ", ".join(kind.__name__ for kind in ATTENTION_BOUNDS)
        raise ValueError(f"no Lipschitz bound is known for {type(attention).__name__}; known: {known}")
    return ATTENTION_BOUNDS[type(attention)](attention, x)


@torch.no_grad()
def stiffness(field: ContractiveField, tokens: int) -> tuple[float, float]:
    """Global Lipschitz constants of the parts of a contractive field on `tokens` tokens: s ‖W‖² ‖C‖² and s ‖A‖²."""
    kernel = field.kernel()
    mixing = 1.0 if kernel is None else float(_padded_norm(kernel, tokens - 1 - field.mixing.registers))  # type: ignore
    w, a = (float(norm2(layer.weight.double())) for layer in (field.w, field.a))
    return field.scale * (w * mixing) ** 2, field.scale * a**2


def has_bound(field: nn.Module) -> bool:
    """Is there a `field_bound`? Not with Sinkhorn attention."""
    known = isinstance(field, VectorField) and type(field.attention) in ATTENTION_BOUNDS
    return known or isinstance(field, ContractiveField)


@torch.no_grad()
def field_bound(field: VectorField | ContractiveField, x: Tensor) -> Tensor:
    """Bound of the Jacobian norm of the field's drift at x (b, n, d), without dropout: s (L_F + L_G), shape (b,).

    An Euler step of size h then has a Jacobian norm of at most 1 + h times this.
    """
    check_precision(x)
    if isinstance(field, ContractiveField):
        return x.new_full((x.shape[0],), sum(stiffness(field, x.shape[-2])))
    bound_F = norm_bound(field.norm_f, x) * mlp_bound(field.mlp, x.shape[-2]) + field.damping
    bound_G = norm_bound(field.norm_g, x) * attention_bound(field.attention, field.norm_g(x))
    return abs(field.scale) * (bound_F + bound_G)
