"""What the field's Jacobian does, matrix-free: its norm, its log-norm, and the error bound of Euler's method.

Every function takes a map f of states x (b, …) that treats samples independently and draws no random numbers (eval
mode); one batched Jacobian product then serves all samples, each with its own vector.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from odevit.dynamics.lanczos import Estimate, Map, largest_eigenvalue, largest_singular_values


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Context in which forward-mode derivatives pass through attention: fused kernels have none, the plain one does.

    The second one is that of nn.MultiheadAttention in eval mode, which torchvision's ViTs are made of.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def check_precision(x: Tensor) -> None:
    """Singular values are not to be had in half precision, and would mean little."""
    if x.dtype.itemsize < 4:
        raise ValueError(f"bounds and exponents need single or double precision, got {x.dtype}: model.float()")


def linearise(f: Map, x: Tensor) -> tuple[Tensor, Map, Map]:
    """f(x), v ↦ J v and u ↦ Jᵀ u at x, from one evaluation of f: for many products at the same state.

    J v is the derivative of the linear map u ↦ Jᵀ u. Each product costs about one evaluation, where `torch.func.jvp`
    evaluates f again and takes about four times as long. No gradient reaches the parameters of f.
    """
    with forward_derivatives(), torch.enable_grad():
        x = x.detach().requires_grad_()
        y = f(x)
        if not y.requires_grad:  # a constant
            y = y + 0 * x.sum()
        u = torch.zeros_like(y, requires_grad=True)
        (pulled,) = torch.autograd.grad(y, x, u, create_graph=True)

    def push(v: Tensor) -> Tensor:
        return torch.autograd.grad(pulled, u, v, retain_graph=True)[0]

    def pull(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True)[0]

    return y.detach(), push, pull


# --- norm and log-norm ------------------------------------------------------------------------------------------------

CONVERGED = 1e-4  # residual, relative to the operator's size, at which iteration stops


@torch.no_grad()
def jacobian_norm(f: Map, x: Tensor, iterations: int = 30, *, seed: int = 0) -> Tensor:
    """‖J_f(x)‖₂ of every sample, (b,): Lanczos, two Jacobian products an iteration; an estimate from below."""
    _, push, pull = linearise(f, x)
    found = largest_singular_values(push, pull, x, iterations=iterations, tolerance=CONVERGED, seed=seed)
    return found.value[:, 0].to(x.dtype)


@torch.no_grad()
def log_norm(f: Map, x: Tensor, iterations: int = 30, *, seed: int = 0, quotient: bool = False) -> Estimate:
    """μ(x) = λ_max((J + Jᵀ)/2) of every sample, (b,): negative where the field contracts in every direction.

    Lanczos, two Jacobian products an iteration. The value rises to μ from below, so a minus proves nothing; with the
    residual added it is an estimate from above. Norms that subtract a token's mean give J·1 = 0 and so μ ≥ 0 always:
    whether such a field contracts is asked of P J P, P = I - 11ᵀ/d per token, on the range of P (quotient).
    """
    _, push, pull = linearise(f, x)
    return largest_eigenvalue(
        lambda v: (push(v) + pull(v)) / 2, x, iterations=iterations, tolerance=CONVERGED, seed=seed, quotient=quotient
    )


# --- error of Euler's method ------------------------------------------------------------------------------------------


@torch.no_grad()
def curvature(psi: Map, xs: Tensor | Iterable[Tensor]) -> Tensor:
    """C = max over the states xs (m, b, …) of ‖J_ψ(x) ψ(x)‖ = ‖x''‖, per sample (b,). One Jacobian product a state.

    psi is the field over unit time: T times the model's field, if the model integrates to T.
    """
    norms = []
    for x in xs:
        velocity, push, _ = linearise(psi, x)
        norms.append(push(velocity).flatten(1).norm(dim=1))
    return torch.stack(norms).amax(dim=0)


def error_bound(rate: Tensor | float, curvature: Tensor | float, num_steps: int) -> Tensor:
    """Bound of ‖x_n - x(n/N)‖, n ≤ N, for N = num_steps Euler steps x + ψ(x)/N; the shape of rate and curvature.

    rate: a Lipschitz constant L of ψ, or its log-norm μ, which may be zero or negative; over unit time, that is of T
    times the field. curvature: C ≥ ‖J_ψ ψ‖ (see `curvature`). Both must hold on the region that the paths sweep: taken
    at sampled states they make the result an estimate.

    Each step errs by at most C/(2N²), and the exact flow carries that on with growth e^(rate·τ) over the time τ left:
    in all C/(2N) times (1/N) Σ_{j<N} e^(rate·j/N). For rate ≥ 0 this is at most C/(2N) · (e^L - 1)/L (Proposition 1),
    which is returned. For rate < 0 the sum is the larger of the two and is returned, for Proposition 1 with μ in place
    of L would fail: ψ(x) = -x, N = 1, x₀ = 1 errs by e⁻¹ = 0.368, and (e^μ - 1)/(2μN) · C = 0.316.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    rate, largest = torch.as_tensor(rate, dtype=torch.float64), torch.as_tensor(curvature, dtype=torch.float64)
    growth = _expm1_over(rate)  # ∫₀¹ e^(rate·τ) dτ
    growth = torch.where(rate < 0, growth / _expm1_over(rate / num_steps), growth)
    return largest / (2 * num_steps) * growth


def _expm1_over(rate: Tensor) -> Tensor:
    """(e^r - 1)/r, which is 1 at r = 0."""
    safe = torch.where(rate == 0, 1.0, rate)
    return torch.where(rate == 0, 1.0, torch.expm1(safe) / safe)
