"""Tangents through steps and fields: J V for k directions at once, beside the state itself.

A jet is a state with its k tangents stacked behind it: (1 + k, b, …), the state first. Jets add and scale like states,
so the solvers' own step functions run on them unchanged: `euler(JetField(field), jet, h)` is (x + h f(x), V + h J V).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from odevit.dynamics.jacobian import forward_derivatives
from odevit.model.contractive import ContractiveField
from odevit.model.field import VectorField
from odevit.model.layers import Attention, CenterNorm

DEPENDENT = 100  # times machine precision, relative to the column: what Gram-Schmidt leaves of a dependent one is less


@torch.no_grad()
def push(function: Callable[[Tensor], Tensor], jet: Tensor) -> Tensor:
    """(f(x), J_f V) for any differentiable map, as a jet (1 + k, b, …). The state is computed once for all tangents."""
    x, tangents = jet[0].clone(), jet[1:]  # a view would drag the whole jet's memory along, once for every tangent
    with forward_derivatives():
        y, pushed = torch.func.vmap(lambda v: torch.func.jvp(function, (x,), (v,))[:2], out_dims=(None, 0))(tangents)  # type: ignore[misc, arg-type]
    return torch.cat([y.unsqueeze(0), pushed])


def _linear(layer: nn.Linear, jet: Tensor) -> Tensor:
    out = functional.linear(jet, layer.weight)
    if layer.bias is not None:
        out[0] += layer.bias
    return out


def _normalise(norm: nn.Module, jet: Tensor) -> Tensor:
    if isinstance(norm, CenterNorm):
        out = (jet - jet.mean(dim=-1, keepdim=True)).mul_(norm.weight * norm.gain)
        out[0] += norm.bias
        return out
    return jet.clone() if isinstance(norm, nn.Identity) else push(norm, jet)


def _gelu(jet: Tensor) -> Tensor:
    """GELU' = Φ(x) + x φ(x). Works in place."""
    x = jet[0]
    slope = torch.special.ndtr(x) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    jet[1:].mul_(slope)
    jet[0] = functional.gelu(x)
    return jet


def _softmax_attention(attention: Attention, jet: Tensor) -> Tensor:
    """dS = (dQ Kᵀ + Q dKᵀ)/√e, dP = P ∘ (dS - rows of P·dS), dY = dP V + P dV."""
    q, k, v = (
        _linear(layer, jet).unflatten(-1, (attention.heads, -1)).transpose(2, 3)
        for layer in (attention.query, attention.key, attention.value)
    )  # (1 + k, b, h, n, e)
    q = q * attention.scale
    p = torch.softmax(q[0] @ k[0].mT, dim=-1)  # (b, h, n, n)
    d_logits = (q[1:] @ k[0].mT).add_(q[0] @ k[1:].mT)  # (k, b, h, n, n)
    d_p = d_logits.mul_(p)
    d_p.sub_(p * d_p.sum(dim=-1, keepdim=True))
    out = p @ v  # (1 + k, b, h, n, e)
    out[1:] += d_p @ v[0]
    return _linear(attention.out, out.transpose(2, 3).flatten(-2))


class JetField:
    """F, G and the drift of a field on jets (1 + k, b, n, d), without dropout.

    CenterNorm, the MLP and softmax attention by the product rule, sharing the state's attention map between all
    tangents; other norms and attentions, and fields that are no `VectorField`, by `push`.
    """

    def __init__(self, field: VectorField | ContractiveField):
        self.field = field

    def F(self, jet: Tensor) -> Tensor:
        if isinstance(self.field, ContractiveField):
            return push(self.field.F, jet)
        mlp = self.field.mlp
        hidden = _linear(mlp.w1, _normalise(self.field.norm_f, jet))
        if not isinstance(mlp.mixing, nn.Identity):  # linear: state and tangents alike
            hidden = mlp.mixing(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        out = _linear(mlp.w2, _gelu(hidden))
        return out.sub_(jet, alpha=self.field.damping).mul_(self.field.scale)

    def G(self, jet: Tensor) -> Tensor:
        if isinstance(self.field, ContractiveField):
            return push(self.field.G, jet)
        attention, jet = self.field.attention, _normalise(self.field.norm_g, jet)
        if type(attention) is Attention:
            return _softmax_attention(attention, jet).mul_(self.field.scale)
        return push(lambda x: attention.attend(x)[0], jet).mul_(self.field.scale)

    def __call__(self, jet: Tensor) -> Tensor:
        return self.F(jet).add_(self.G(jet))


def orthonormalise(tangents: Tensor) -> tuple[Tensor, Tensor]:
    """QR of the k tangents (k, b, …) of each sample, over the whole flattened state: Q (k, b, …) and diag R (k, b).

    Modified Gram-Schmidt, which needs no transposed copy. A column that depends on earlier ones, up to rounding, gets
    R = 0 and stays 0.
    """
    q = tangents.flatten(2).clone()  # (k, b, N)
    rounding = DEPENDENT * torch.finfo(q.dtype).eps * torch.linalg.vector_norm(q, dim=-1)  # (k, b)
    diagonal = []
    for i in range(len(q)):
        length = torch.linalg.vector_norm(q[i], dim=-1)  # (b,)
        length = torch.where(length > rounding[i], length, 0.0)
        q[i] *= torch.where(length > 0, 1 / length, 0.0).unsqueeze(-1)
        if i + 1 < len(q):
            dots = torch.einsum("kbn,bn->kb", q[i + 1 :], q[i])
            q[i + 1 :] -= dots.unsqueeze(-1) * q[i]
        diagonal.append(length)
    return q.view_as(tangents), torch.stack(diagonal)
