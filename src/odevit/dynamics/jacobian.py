"""What the field's Jacobian does, matrix-free: its norm, its log-norm, and the error bound of Euler's method.

Every function takes a map f of states x (b, …) that treats samples independently and draws no random numbers (eval
mode); one batched Jacobian product then serves all samples, each with its own vector.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Map = Callable[[Tensor], Tensor]


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


# --- Lanczos ----------------------------------------------------------------------------------------------------------


def _largest_eigenvalue(operator: Map, like: Tensor, iterations: int, seed: int) -> Tensor:
    """Largest eigenvalue of one symmetric operator per sample, (b,): Lanczos with full reorthogonalisation.

    The result is a Ritz value: never above the eigenvalue (up to rounding), rising to it with `iterations`, of which
    there are at most as many as dimensions. A sample whose Krylov space is exhausted earlier is exact and idles.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device).flatten(1)  # (b, m)
    vector = vector / vector.norm(dim=1, keepdim=True)
    steps = min(iterations, vector.shape[1])
    basis = vector.new_zeros(like.shape[0], steps, vector.shape[1])
    tridiagonal = torch.zeros(like.shape[0], steps, steps, dtype=torch.float64, device=like.device)
    size = torch.zeros_like(vector[:, 0])  # (b,) largest entry so far, the scale against which a remainder is zero
    alive = torch.ones_like(size, dtype=torch.bool)
    for i in range(steps):
        basis[:, i] = vector
        image = operator(vector.view_as(like)).flatten(1)
        diagonal = (image * vector).sum(dim=1)
        # An idle sample gets its first Rayleigh quotient, which is never above the eigenvalue already found.
        tridiagonal[:, i, i] = torch.where(alive, diagonal.double(), tridiagonal[:, 0, 0])
        known = basis[:, : i + 1]
        for _ in range(2):  # once leaves rounding behind, twice is enough (Parlett, The Symmetric Eigenvalue Problem)
            image = image - torch.einsum("bkm,bk->bm", known, torch.einsum("bkm,bm->bk", known, image))
        rest = image.norm(dim=1)
        size = torch.maximum(size, torch.maximum(diagonal.abs(), rest))
        alive = alive & (rest > 100 * torch.finfo(like.dtype).eps * size)
        vector = torch.where(alive[:, None], image / rest[:, None], 0.0)
        if i + 1 < steps:
            tridiagonal[:, i, i + 1] = tridiagonal[:, i + 1, i] = torch.where(alive, rest, 0.0).double()
    return torch.linalg.eigvalsh(tridiagonal)[:, -1].to(like.dtype)


@torch.no_grad()
def jacobian_norm(f: Map, x: Tensor, iterations: int = 20, *, seed: int = 0) -> Tensor:
    """‖J_f(x)‖₂ of every sample, (b,): Lanczos on JᵀJ, two Jacobian products an iteration; an estimate from below."""
    _, push, pull = linearise(f, x)
    return _largest_eigenvalue(lambda v: pull(push(v)), x, iterations, seed).clamp_min(0).sqrt()


@torch.no_grad()
def log_norm(f: Map, x: Tensor, iterations: int = 30, *, seed: int = 0) -> Tensor:
    """μ(x) = λ_max((J + Jᵀ)/2) of every sample, (b,): negative where the field contracts.

    Lanczos, two Jacobian products an iteration. An estimate from below that rises to μ with the iterations.
    """
    _, push, pull = linearise(f, x)
    return _largest_eigenvalue(lambda v: (push(v) + pull(v)) / 2, x, iterations, seed)


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
