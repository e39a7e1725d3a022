"""Extreme eigenvalues and singular values of operators known by their products only, one operator per sample.

Both routines keep their whole Krylov basis orthonormal and give, beside each value, the residual of its vectors: an
exact eigenvalue (singular value) lies within the residual of the value (Parlett, The Symmetric Eigenvalue Problem).
That it is the *largest* one no residual can prove; a random start misses it with probability zero. Values approach the
true ones from below.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

Map = Callable[[Tensor], Tensor]
ROUNDING = 100  # times machine precision: what is smaller than this, relative to the largest, counts as zero
SMALL = 1e-3  # singular values below this share of the largest need no better residual than at this share


class Estimate(NamedTuple):
    """A value approached from below and the residual of its vectors, both (b,) or (b, k)."""

    value: Tensor
    residual: Tensor

    @property
    def upper(self) -> Tensor:
        """value + residual: between the two lies a true one. The largest of all, unless the start missed it."""
        return self.value + self.residual


def center(x: Tensor) -> Tensor:
    """P x, P = I - 11ᵀ/d for every token (…, d): what remains of a state when constants per token do not count."""
    return x - x.mean(dim=-1, keepdim=True)


def dimension(like: Tensor, quotient: bool) -> int:
    """Of one sample's space (b, …, d): all variables, or those that `center` leaves."""
    size = like[0].numel()
    return size - size // like.shape[-1] if quotient else size


def _random(like: Tensor, k: int, seed: int, quotient: bool) -> Tensor:
    """k vectors (b, m, k), the same for every sample, so that results do not depend on how samples are batched."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(k, *like.shape[1:], generator=generator, dtype=torch.float64)
    vectors = (center(vectors) if quotient else vectors).flatten(1).mT.to(like)
    return vectors.expand(like.shape[0], -1, -1)


# --- symmetric operators ----------------------------------------------------------------------------------------------


def largest_eigenvalue(
    operator: Map, like: Tensor, *, iterations: int, tolerance: float, seed: int = 0, quotient: bool = False
) -> Estimate:
    """Largest eigenvalue of one symmetric operator per sample, (b,): Lanczos with full reorthogonalisation.

    Ends when every residual is below `tolerance` times the size of its operator, or after `iterations` products. A
    sample whose Krylov space is exhausted earlier is exact and idles. quotient: of P A P on the range of P.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    vector = _random(like, 1, seed, quotient)[..., 0]  # (b, m)
    vector = vector / vector.norm(dim=1, keepdim=True)
    steps = min(iterations, dimension(like, quotient))
    basis = vector.new_zeros(like.shape[0], steps, vector.shape[1])
    tridiagonal = torch.zeros(like.shape[0], steps, steps, dtype=torch.float64, device=like.device)
    size = torch.zeros_like(vector[:, 0])  # (b,) largest entry so far, the scale against which a remainder is zero
    alive = torch.ones_like(size, dtype=torch.bool)
    for i in range(steps):
        basis[:, i] = vector
        image = operator(vector.view_as(like))
        image = (center(image) if quotient else image).flatten(1)
        diagonal = (image * vector).sum(dim=1)
        # An idle sample gets its first Rayleigh quotient, which is never above the eigenvalue already found.
        tridiagonal[:, i, i] = torch.where(alive, diagonal.double(), tridiagonal[:, 0, 0])
        known = basis[:, : i + 1]
        for _ in range(2):  # once leaves rounding behind, twice is enough (Parlett)
            image = image - torch.einsum("bkm,bk->bm", known, torch.einsum("bkm,bm->bk", known, image))
            image = center(image.view_as(like)).flatten(1) if quotient else image  # rounding must not grow out of it
        rest = image.norm(dim=1)
        size = torch.maximum(size, torch.maximum(diagonal.abs(), rest))
        alive = alive & (rest > ROUNDING * torch.finfo(like.dtype).eps * size)
        vector = torch.where(alive[:, None], image / rest[:, None], 0.0)
        values, vectors = torch.linalg.eigh(tridiagonal[:, : i + 1, : i + 1])
        residual = torch.where(alive, rest, 0.0).double() * vectors[:, -1, -1].abs()
        if bool((residual <= tolerance * size).all()):
            break
        if i + 1 < steps:
            tridiagonal[:, i, i + 1] = tridiagonal[:, i + 1, i] = torch.where(alive, rest, 0.0).double()
    return Estimate(values[:, -1].to(like.dtype), residual.to(like.dtype))


# --- singular values --------------------------------------------------------------------------------------------------


def _orthonormal(block: Tensor, basis: Tensor, like: Tensor, seed: int, quotient: bool) -> Tensor:
    """Orthonormal columns (b, m, c), orthogonal to the basis, that together with it span the block (b, m, k ≥ c).

    Noise of the size of rounding turns a direction that is exhausted into a fresh one instead of an old one.
    """
    noise, width = _random(like, block.shape[2], seed, quotient), like.shape[-1]
    scale = block.norm(dim=1, keepdim=True).amax(dim=2, keepdim=True)  # (b, 1, 1)
    block = block + noise * torch.where(scale > 0, torch.finfo(block.dtype).eps * scale, 1.0)
    count = min(block.shape[2], dimension(like, quotient) - basis.shape[2])
    for _ in range(3):
        block = block - basis @ (basis.mT @ block)
        if quotient:
            block = center(block.unflatten(1, (-1, width)).mT).mT.flatten(1, 2)
        block = torch.linalg.qr(block).Q[:, :, :count]
    return block


def largest_singular_values(
    push: Map,
    pull: Map,
    like: Tensor,
    k: int = 1,
    *,
    iterations: int,
    tolerance: float,
    seed: int = 0,
    quotient: bool = False,
) -> Estimate:
    """Top k singular values of one linear map Φ per sample, (b, k), largest first: block Golub-Kahan-Lanczos.

    push: v ↦ Φ v and pull: u ↦ Φᵀ u on batches (b, …); blocks of k vectors, so that equal values are told apart. With
    V, U orthonormal and B = Uᵀ Φ V, Φ V = U B holds to rounding, and B's triplets (p, σ, q) leave only the residual
    ‖Φᵀ U p - σ V q‖. Ends when those of the top k are below `tolerance` · σ, or after `iterations` blocks. Values below
    rounding, relative to σ₁, are 0. quotient: of P Φ P on the range of P.
    """
    room = dimension(like, quotient)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if not 1 <= k <= room:
        raise ValueError(f"k must be between 1 and the number of state variables {room}, got {k}")

    def apply(function: Map, columns: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Images (b, m', c) of columns (b, m, c), and one of them in its own shape (b, …)."""
        images = [function(column.reshape(like.shape)) for column in columns.unbind(dim=2)]
        images = [center(image) for image in images] if quotient else images
        return torch.stack([image.flatten(1) for image in images], dim=2), images[0]

    right = block = torch.linalg.qr(_random(like, k, seed, quotient)).Q  # V (b, m, columns), and its newest part
    left, b, c = None, like.new_zeros(len(like), 0, 0), like.new_zeros(len(like), k, 0)
    for i in range(iterations):
        image, out = apply(push, block, like)
        left = image[:, :, :0] if left is None else left  # U (b, m', columns)
        fresh = _orthonormal(image, left, out, seed + 2 * i + 1, quotient)
        left = torch.cat([left, fresh], dim=2)
        b = torch.cat([pad(b, (0, 0, 0, fresh.shape[2])), left.mT @ image], dim=2)  # Uᵀ Φ V
        p, values, qh = torch.linalg.svd(b.double(), full_matrices=False)
        if fresh.shape[2]:
            image, _ = apply(pull, fresh, out)
            block = _orthonormal(image, right, like, seed + 2 * i + 2, quotient)
            right = torch.cat([right, block], dim=2)
            c = torch.cat([pad(c, (0, 0, 0, block.shape[2])), right.mT @ image], dim=2)  # Vᵀ Φᵀ U, V one block ahead
        lifted = pad(qh.mT * values[:, None], (0, 0, 0, c.shape[1] - qh.shape[2]))
        residual = (c.double() @ p - lifted).norm(dim=1)[:, :k]  # of Φᵀ u = σ v
        wanted = tolerance * values[:, :k].clamp_min(SMALL * values[:, :1])
        if bool((residual <= wanted).all()) or not fresh.shape[2] or not block.shape[2]:
            break
    missing = (0, k - min(k, values.shape[1]))  # of an image of less than k dimensions
    values, residual = pad(values[:, :k], missing), pad(residual, missing)
    zero = values <= ROUNDING * torch.finfo(like.dtype).eps * values[:, :1]
    return Estimate(torch.where(zero, 0.0, values), residual)
