"""Eigenvalues and singular values by products only, against dense decompositions."""

import pytest
import torch
from torch import Tensor

from odevit.dynamics.lanczos import center, dimension, largest_eigenvalue, largest_singular_values


def products(matrices: Tensor, shape: tuple[int, ...] | None = None):
    """push, pull and a sample of the domain of matrices (b, m', m), on vectors of a shape."""
    shape = shape or (matrices.shape[2],)

    def apply(matrix: Tensor, v: Tensor) -> Tensor:
        image = (matrix @ v.flatten(1)[..., None])[..., 0]
        return image.unflatten(1, shape) if image.shape[1] == torch.Size(shape).numel() else image

    like = torch.zeros(len(matrices), *shape, dtype=matrices.dtype)
    return (lambda v: apply(matrices, v)), (lambda u: apply(matrices.mT, u)), like


def range_of_p(tokens: int, width: int) -> Tensor:
    """Orthonormal basis of the states whose tokens have mean zero."""
    p = torch.eye(width, dtype=torch.float64) - 1 / width
    return torch.linalg.eigh(torch.kron(torch.eye(tokens, dtype=torch.float64), p)).eigenvectors[:, tokens:]


@pytest.mark.parametrize(("rows", "columns", "k"), [(40, 40, 4), (3, 8, 1), (8, 3, 2), (5, 5, 5), (7, 7, 3), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values(rows, columns, k, dtype):
    torch.manual_seed(0)
    matrices = torch.randn(2, rows, columns, dtype=dtype)
    push, pull, like = products(matrices)
    found = largest_singular_values(push, pull, like, k, iterations=60, tolerance=1e-9)
    exact = torch.linalg.svdvals(matrices.double())[:, :k]
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.value, exact, rtol=rounding, atol=rounding)
    assert (found.residual <= 10 * rounding * exact[:, :1]).all()


def test_equal_singular_values_are_told_apart_by_blocks():
    matrices = torch.tensor([3.0, 3.0, 3.0, 2.0, 1.0, 1.0]).double().diag()[None]
    found = largest_singular_values(*products(matrices), 4, iterations=10, tolerance=1e-9)
    torch.testing.assert_close(found.value, torch.tensor([[3.0, 3.0, 3.0, 2.0]]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_beyond_the_rank_values_are_zero_exactly(rank, dtype):
    torch.manual_seed(0)
    matrices = torch.randn(2, 30, rank, dtype=dtype) @ torch.randn(2, rank, 30, dtype=dtype)
    found = largest_singular_values(*products(matrices), 3, iterations=60, tolerance=1e-9)
    exact = torch.linalg.svdvals(matrices.double())[:, :rank]
    torch.testing.assert_close(found.value[:, :rank], exact, rtol=1e-5, atol=0)
    assert (found.value[:, rank:] == 0).all()


def test_residuals_bound_the_error_and_values_come_from_below():
    torch.manual_seed(0)
    matrices = torch.randn(4, 100, 100, dtype=torch.float64)
    exact = torch.linalg.svdvals(matrices)
    for iterations in (1, 3, 6):
        found = largest_singular_values(*products(matrices), 2, iterations=iterations, tolerance=0.0)
        assert (found.value <= exact[:, :2] + 1e-12).all()
        nearest = (found.value[:, :, None] - exact[:, None]).abs().amin(dim=2)
        assert (nearest <= found.residual + 1e-12).all()
    assert (found.residual > 0.01).any()  # not yet converged: the bound said something


def test_quotient_is_the_range_of_p():
    torch.manual_seed(0)
    matrices = torch.randn(2, 60, 60, dtype=torch.float64)
    basis = range_of_p(5, 12)
    p = basis @ basis.mT
    push, pull, like = products(matrices, (5, 12))
    found = largest_singular_values(push, pull, like, 3, iterations=60, tolerance=1e-10, quotient=True)
    torch.testing.assert_close(found.value, torch.linalg.svdvals(p @ matrices @ p)[:, :3])
    assert dimension(like, True) == 55
    assert dimension(like, False) == 60

    symmetric = (matrices + matrices.mT) / 2 - 40 * torch.eye(60).double()  # every eigenvalue far below zero
    push, _, like = products(symmetric, (5, 12))
    for iterations in (55, 500):  # the whole space, and no zero of P's kernel may appear
        found = largest_eigenvalue(push, like, iterations=iterations, tolerance=1e-14, quotient=True)
        torch.testing.assert_close(found.value, torch.linalg.eigvalsh(basis.mT @ symmetric @ basis)[:, -1])
        assert (found.residual <= 1e-9).all()


def test_eigenvalue_residual_bounds_the_error_and_ends_the_iteration():
    torch.manual_seed(0)
    a = torch.randn(3, 80, 80, dtype=torch.float64)
    symmetric = a + a.mT
    exact = torch.linalg.eigvalsh(symmetric)
    products_taken = []

    def operator(v: Tensor) -> Tensor:
        products_taken.append(1)
        return (symmetric @ v[..., None])[..., 0]

    for iterations in (3, 10):
        found = largest_eigenvalue(operator, torch.zeros(3, 80).double(), iterations=iterations, tolerance=0.0)
        assert ((found.value[:, None] - exact).abs().amin(dim=1) <= found.residual + 1e-12).all()
        assert (found.value <= exact[:, -1]).all()
    products_taken.clear()
    found = largest_eigenvalue(operator, torch.zeros(3, 80).double(), iterations=80, tolerance=1e-3)
    assert len(products_taken) < 60
    torch.testing.assert_close(found.value, exact[:, -1], rtol=1e-4, atol=0)
    assert torch.equal(found.upper, found.value + found.residual)


def test_start_is_the_same_for_every_sample():
    matrices = torch.randn(1, 20, 20).double().expand(3, -1, -1)
    found = largest_singular_values(*products(matrices), 2, iterations=2, tolerance=0.0)
    assert (found.value == found.value[:1]).all()
    assert torch.equal(center(torch.tensor([[1.0, 3.0]])), torch.tensor([[-1.0, 1.0]]))


def test_errors():
    push, pull, like = products(torch.eye(3)[None])
    with pytest.raises(ValueError, match="between 1 and the number of state variables 3"):
        largest_singular_values(push, pull, like, 4, iterations=1, tolerance=0.0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        largest_singular_values(push, pull, like, iterations=0, tolerance=0.0)
