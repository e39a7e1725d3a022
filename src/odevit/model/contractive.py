"""A field that is contractive by construction: minus the gradient of a convex energy, dX/dt = -s ∇E(X).

    F(x)   = -s Wᵀ Cᵀ σ(C W x + b)                        σ of slope in [0, 1]
    G(X)_i = -(s/n) Σ_h Σ_j w_ij A_hᵀ A_h (x_i - x_j),    w_ij = 1/√(1 + c_h ‖A_h(x_i - x_j)‖²)

G is the gradient of a pseudo-Huber interaction, (1/(c n)) Σ_{i<j} √(1 + c ‖A(x_i - x_j)‖²): near tokens attract more
per distance than far ones, as in attention. The Hessian of F's energy lies between 0 and ‖W‖²‖C‖², that of G's between
0 and ‖A‖² (A the stacked A_h; the Laplacian of the complete graph over n has largest eigenvalue 1). So the log-norm of
the drift is at most 0 everywhere and the exact flow never expands. ‖W‖, ‖A‖ and ‖C‖ are held at 1 or less whatever the
optimiser does; what that asks of the step size stands in `step_growth`.

Not here: a skew part s S x. Explicit steps of it expand; taken exactly, it gained no more than seeds differ by
(experiments/skew.py).
"""

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import parametrize

from odevit.model.layers import MIXINGS, DepthwiseMixing
from odevit.model.solvers import ADAPTIVE
from odevit.model.spectral import SpectralCap

SMOOTHNESS = 4.0
"""β of σ(x) = log(1 + e^{βx})/β: smooth, so that schemes keep their order, and within log(2)/β = 0.17 of ReLU."""


class ContractiveField(nn.Module):
    """F and G as above, with the interface of `VectorField`. X: (b, n, d), h heads of width e = d / h.

    W: (hidden, d) with bias b; A: (d, d), its rows shared among the heads; c_h > 0 is learned. C is the identity or a
    depthwise 3×3 mixing of neighbouring patches, each kernel divided by max(1, its ℓ₁ norm), so that ‖C‖ ≤ 1 on every
    grid. `scale` is s = D / T.
    """

    def __init__(
        self, width: int, heads: int, *, hidden: int, scale: float = 1.0, mixing: str = "none", registers: int = 0
    ):
        super().__init__()
        self.scale, self.heads = scale, heads
        self.w = nn.Linear(width, hidden, bias=False)
        self.mixing = MIXINGS[mixing](hidden, registers)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.a = nn.Linear(width, width, bias=False)
        self.log_c = nn.Parameter(torch.zeros(heads))
        for layer in (self.w, self.a):
            parametrize.register_parametrization(layer, "weight", SpectralCap(1.0))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """W and A with equal singular values: what is not contracted on purpose passes undiminished."""
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.log_c)
        for layer in (self.w, self.a):
            nn.init.orthogonal_(layer.parametrizations.weight.original)  # type: ignore[union-attr, arg-type]

    def kernel(self) -> Tensor | None:
        """The mixing's kernel (hidden, 1, 3, 3) as it is used, or None without mixing."""
        if not isinstance(self.mixing, DepthwiseMixing):
            return None
        return self.mixing.weight / self.mixing.weight.abs().sum(dim=(1, 2, 3), keepdim=True).clamp_min(1)

    def F(self, x: Tensor) -> Tensor:
        hidden, kernel = self.w(x), self.kernel()
        if kernel is not None:
            hidden = self.mixing.mix(hidden, kernel)  # type: ignore[operator]
        hidden = functional.softplus(hidden + self.bias, beta=SMOOTHNESS)
        if kernel is not None:  # with zero padding the transposed convolution is the one with the kernel turned round
            hidden = self.mixing.mix(hidden, kernel.flip(-2, -1))  # type: ignore[operator]
        return -self.scale * functional.linear(hidden, self.w.weight.mT)

    def G(self, x: Tensor) -> Tensor:
        return self._attract(*self._pairs(x))

    def forward(self, x: Tensor) -> Tensor:
        """The drift F(X) + G(X)."""
        return self.F(x) + self.G(x)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """G(X) and its map (b, h, n, n): the weights w with rows normalised to sum one, in the autograd graph."""
        q, w = self._pairs(x)
        return self._attract(q, w), w / w.sum(dim=-1, keepdim=True)

    def attention_map(self, x: Tensor) -> Tensor:
        """The map (b, h, n, n) alone."""
        w = self._pairs(x)[1]
        return w / w.sum(dim=-1, keepdim=True)

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A_h x_i, centred over tokens (b, h, n, e), and w (b, h, n, n) from their Gram matrix: the cost of a map."""
        q = self.a(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q = q - q.mean(dim=-2, keepdim=True)  # only differences matter, and these are then exact where tokens are near
        square = q.square().sum(dim=-1, keepdim=True)
        distance = (square + square.mT - 2 * q @ q.mT).clamp_min(0)
        return q, torch.rsqrt(1 + self.log_c.exp().view(-1, 1, 1) * distance)

    def _attract(self, q: Tensor, w: Tensor) -> Tensor:
        """-(s/n) Aᵀ (diag(w 1) - w) q."""
        pull = (w.sum(dim=-1, keepdim=True) * q - w @ q).transpose(1, 2).flatten(-2)  # (b, n, d)
        return -self.scale / q.shape[-2] * functional.linear(pull, self.a.weight.mT)


def step_growth(solver: str, h: float, stiffness_F: float, stiffness_G: float) -> float:
    """By how much one step can move two states apart, at most: 1 where it never expands, inf where nothing is proven.

    stiffness: Lipschitz constants s ‖W‖² ‖C‖² of F and s ‖A‖² of G, both gradients of convex energies. Euler steps
    have a Jacobian between 1 - h(L_F + L_G) and 1. Heun's and the classical Runge–Kutta method never expand for
    h(L_F + L_G) ≤ 2 either: their radius of circle contractivity is 1 as Euler's is (Dahlquist and Jeltsch, 1979; the
    drift is cocoercive by Baillon and Haddad). Lie–Trotter takes its parts one by one, so each has a limit of 2 of its
    own, and Strang's F takes half steps. The midpoint rule has no such radius.
    """
    part_F, part_G = h * stiffness_F, h * stiffness_G
    if solver == "euler":
        return max(1.0, part_F + part_G - 1)
    if solver == "lie_trotter":
        return max(1.0, part_F - 1) * max(1.0, part_G - 1)
    if solver == "strang":
        return 1.0 if max(part_F / 2, part_G) <= 2 + ROUNDING else math.inf
    return 1.0 if solver in LIMITS and part_F + part_G <= 2 + ROUNDING else math.inf


ROUNDING = 1e-5  # of norms held in single precision: up to 1.05e-6 was seen in 100 draws
# The longest step h·s with which a scheme never expands whatever the weights, ‖W‖ and ‖A‖ being one at most.
LIMITS = {"euler": 1.0, "heun": 1.0, "rk4": 1.0, "lie_trotter": 2.0, "strang": 2.0}


def fewest_steps(solver: str, depth: float, phases: int = 1) -> int:
    """The least K with which a contractive flow of this depth never expands: ‖W‖ = ‖A‖ = 1 may be reached.

    K = D for most schemes, half of that where F and G are taken one by one. A scheme of which nothing is proven, as the
    midpoint rule, is held to Euler's limit; adaptive solvers choose their own steps.
    """
    limit = LIMITS.get(solver, LIMITS["euler"])
    return phases * max(1, math.ceil(depth / phases / limit - 1e-9))


def check_steps(solver: str, num_steps: int, depth: float, phases: int = 1) -> None:
    """ValueError where K steps are so long that the contractive field's guarantee is lost."""
    if solver in ADAPTIVE:
        return
    least = fewest_steps(solver, depth, phases)
    if num_steps < least:
        known = f"{solver} never expands a contractive flow of depth {depth:g} with at least {least} steps"
        unknown = f"nothing is proven of {solver}, which is held to Euler's limit: {least} steps at depth {depth:g}"
        limit = "h·s·‖W‖² and h·s·‖A‖² ≤ 2" if LIMITS.get(solver, 1) > 1 else "h·s·(‖W‖² + ‖A‖²) ≤ 2"
        raise ValueError(
            f"{known if solver in LIMITS else unknown} ({limit}, each norm up to 1), got num_steps={num_steps}; use at "
            f"least {least} steps, or less depth"
        )
