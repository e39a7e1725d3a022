"""How much of a layered network's movement can k autonomous fields explain? Regression instead of training.

The states h_0 … h_D of a teacher give pairs (h_{l-1}, Δ_l = h_l - h_{l-1}). One autonomous field means ONE function of
the state that gives Δ_l whatever the layer l. The class of functions tried here is linear in fixed features of a token
and of the mean token (its context): both as they are, the token rescaled to unit size, and random GELU features of the
rescaled two. Every phase gets its own ridge regression on the same features, so that the only difference between one
field, k fields and one field per layer is how many layers share a regression. Phases are those that a student with k
fields and a step per layer has: see `phase_runs`.

Honest by images: they are shuffled (data often come sorted by class), regressions are fitted on the first part of them,
ridge strengths are chosen on the second, and residuals are reported on the third.

Shapes: D layers, N images, n tokens (CLS first), m sampled tokens, d width, r directions, p features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from odevit.model.solvers import Grid

MAX_DIRECTIONS = 192  # features see this many principal directions: the width of a DeiT-tiny, so that p stays below 900
RANDOM_FEATURES = 256
RIDGES = (1e-8, 1e-3, 1e-2, 1e-1)  # of the mean eigenvalue of the features' Gram matrix
FIT_SHARE, CHOOSE_SHARE = 0.6, 0.2  # of the images; the rest judges
NEGLIGIBLE = 1e-12  # of the largest energy of a layer: a layer that moves less has nothing to explain


@dataclass
class Sample:
    """What regressions see of the states: some tokens of every image, and the mean over all its tokens."""

    tokens: Tensor  # (D+1, N, m, d), CLS first
    context: Tensor  # (D+1, N, d)


def sample_tokens(states: Tensor, patches: int = 7, seed: int = 0) -> Sample:
    """CLS and at most `patches` random other tokens of every image, from states (D+1, N, n, d)."""
    if states.ndim != 4 or states.shape[0] < 2:
        raise ValueError(f"states must have shape (layers + 1 >= 2, images, tokens, width), got {tuple(states.shape)}")
    _, images, tokens, width = states.shape
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(images, tokens - 1, generator=generator).argsort(dim=1)[:, :patches] + 1
    chosen = torch.cat([torch.zeros(images, 1, dtype=torch.long), order], dim=1).to(states.device)  # (N, m)
    index = chosen[None, :, :, None].expand(len(states), -1, -1, width)
    return Sample(states.gather(2, index), states.mean(dim=2))


class Pairs(NamedTuple):
    """Features and targets of all layers for one part of the images."""

    features: Tensor  # (D, N', m, p)
    increments: Tensor  # (D, N', m, d)
    weights: Tensor  # (D, m): one over the energy of the layer's CLS (first) or other increments, see `row_weights`


def row_weights(increments: Tensor) -> Tensor:
    """(D, N', m, d) -> (D, m): with them, Σ w ‖e‖² is the unexplained share of a layer's movement.

    CLS and the other tokens count one half each, every layer counts the same.
    """
    energy = increments.square().sum(dim=(1, 3))  # (D, m)
    kinds = [energy[:, :1], energy[:, 1:]] if energy.shape[1] > 1 else [energy]
    totals = torch.cat([kind.sum(dim=1, keepdim=True).expand_as(kind) for kind in kinds], dim=1)  # (D, m)
    return 1 / (len(kinds) * totals.clamp_min(NEGLIGIBLE * float(totals.max()) or 1.0))


class FeatureMap:
    """Token and context -> p features; directions and scales are those of the states it is made from."""

    def __init__(self, sample: Sample, seed: int = 0):
        states = sample.tokens[:-1].flatten(0, 2).double()
        _, vectors = torch.linalg.eigh(states.T @ states)
        self.directions = vectors[:, -MAX_DIRECTIONS:]  # (d, r)
        generator = torch.Generator().manual_seed(seed)
        rank = self.directions.shape[1]
        self.mix = torch.randn(2 * rank, RANDOM_FEATURES, generator=generator, dtype=torch.float64).to(states.device)
        self.mean, self.std = torch.zeros(1).to(states), torch.ones(1).to(states)
        raw = self(sample)[..., :-1].flatten(0, 2)
        std = raw.std(dim=0)
        self.mean, self.std = raw.mean(dim=0), torch.where(std > 1e-9 * std.max(), std, torch.inf)

    def __call__(self, sample: Sample) -> Tensor:
        """(D, N, m, p) for the states that enter a layer; the last feature is the constant 1."""
        token = sample.tokens[:-1].double() @ self.directions  # (D, N, m, r)
        context = (sample.context[:-1].double() @ self.directions)[:, :, None].expand_as(token)
        rescaled = torch.cat([_unit(token), _unit(context)], dim=-1)
        random = gelu(rescaled @ self.mix / 2**0.5)
        features = torch.cat([token, _unit(token), context, random], dim=-1)
        features = (features - self.mean) / self.std
        return torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


Run = tuple[int, int]  # layers first … last, 0-based, both included


def phase_runs(depth: int, fields: int) -> list[Run]:
    """The layers of each phase of a student with `fields` fields and one step per layer of its teacher."""
    phases = [phase for phase, _ in Grid(depth, phases=fields).steps()]
    return [(phases.index(phase), depth - 1 - phases[::-1].index(phase)) for phase in range(fields)]


def split_images(count: int, seed: int = 0) -> list[Tensor]:
    """Shuffled rows to fit, to choose, to judge."""
    if count < 5:
        raise ValueError(f"at least 5 images are needed to fit, choose and judge on different ones; got {count}")
    fit, choose = int(FIT_SHARE * count), max(1, int(CHOOSE_SHARE * count))
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return list(rows.split([fit, choose, count - fit - choose]))


def fit_runs(sample: Sample, *, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> dict[Run, Tensor]:
    """A ridge regression for every phase of 1 … D fields. Its unexplained shares (layers, 2) of CLS and of the others,
    on the judging images."""
    rows = split_images(sample.context.shape[1], seed)
    parts = [Sample(sample.tokens[:, part], sample.context[:, part]) for part in rows]
    feature_map = FeatureMap(parts[0], seed)
    fit, choose, judge = (_pairs(feature_map, part) for part in parts)
    fitting, choosing = _moments(fit), _moments(choose)
    depth = len(fit.increments)
    runs = sorted({run for fields in range(1, depth + 1) for run in phase_runs(depth, fields)})
    judged = {}
    for done, (first, last) in enumerate(runs, start=1):
        layers = slice(first, last + 1)
        gram, moment, _ = (moments[layers].sum(dim=0) for moments in fitting)
        fits = [ridge_regression(gram, moment, ridge) for ridge in RIDGES]
        gram, moment, energy = (moments[layers].sum(dim=0) for moments in choosing)
        costs = [float(energy - 2 * (w * moment).sum() + (w * (gram @ w)).sum()) for w in fits]
        best = min(range(len(RIDGES)), key=costs.__getitem__)
        judged[first, last] = unexplained(judge, layers, fits[best]).cpu()
        if progress is not None:
            progress(done, len(runs))
    return judged


def _pairs(feature_map: FeatureMap, part: Sample) -> Pairs:
    increments = part.tokens.double().diff(dim=0)
    return Pairs(feature_map(part), increments, row_weights(increments))


def _moments(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted second moments of every layer: features (D, p, p), both (D, p, d), increments (D,)."""
    weighted = (pairs.features * pairs.weights[:, None, :, None]).flatten(1, 2)
    energy = (pairs.increments.square().sum(dim=(1, 3)) * pairs.weights).sum(dim=1)
    return weighted.mT @ pairs.features.flatten(1, 2), weighted.mT @ pairs.increments.flatten(1, 2), energy


def constant_residual(sample: Sample, *, seed: int = 0) -> float:
    """What is left when every layer moves all images alike, by its mean increment of CLS and of the other tokens.

    No field of the state: the share above which a field knows something about the image.
    """
    fit, _, judge = split_images(sample.context.shape[1], seed)
    increments = sample.tokens.double().diff(dim=0)  # (D, N, m, d)
    seen, held = increments[:, fit], increments[:, judge]
    means = [seen[:, :, :1].mean(dim=(1, 2)), seen[:, :, 1:].mean(dim=(1, 2))]
    error = torch.cat([held[:, :, :1] - means[0][:, None, None], held[:, :, 1:] - means[1][:, None, None]], dim=2)
    return float((error.square().sum(dim=(1, 3)) * row_weights(held)).sum(dim=1).mean())


def ridge_regression(gram: Tensor, moment: Tensor, ridge: float) -> Tensor:
    """Coefficients (p, d) from Gram matrix (p, p) and moments (p, d); the constant, the last feature, goes free."""
    strength = gram.diagonal().new_full((len(gram),), ridge * float(gram.diagonal().mean()))
    strength[-1] = 0
    return torch.cholesky_solve(moment, torch.linalg.cholesky(gram + strength.diag()))


def unexplained(pairs: Pairs, layers: slice, coefficients: Tensor) -> Tensor:
    """(layers, 2): share of the movement of CLS and of the other tokens that the regression leaves unexplained."""
    error = (pairs.increments[layers] - pairs.features[layers] @ coefficients).square().sum(dim=(1, 3))  # (layers, m)
    shares = error * pairs.weights[layers]
    if shares.shape[1] == 1:
        return shares.expand(-1, 2)
    return 2 * torch.stack([shares[:, 0], shares[:, 1:].sum(dim=1)], dim=1)


@dataclass
class PhaseFit:
    """k fields; shares of movement left unexplained on images that chose nothing."""

    fields: int
    starts: list[int]  # first layer of every phase, counted from 1
    residual: float
    residual_cls: float
    residual_patches: float
    per_layer: list[float]


def phase_fits(judged: dict[Run, Tensor]) -> list[PhaseFit]:
    """What k = 1 … D fields leave unexplained; the last is one field per layer."""
    depth = 1 + max(last for _, last in judged)
    results = []
    for fields in range(1, depth + 1):
        runs = phase_runs(depth, fields)
        shares = torch.cat([judged[run] for run in runs])  # (D, 2)
        cls, patches = shares.mean(dim=0).tolist()
        starts, per_layer = [first + 1 for first, _ in runs], shares.mean(dim=1).tolist()
        results.append(PhaseFit(fields, starts, shares.mean().item(), cls, patches, per_layer))
    return results


def suggested_fields(fits: list[PhaseFit], tolerance: float) -> int:
    """The fewest fields that explain at least 1 - tolerance of what the best number of fields explains.

    The best is one field per layer, unless its regressions suffer from having the fewest rows each.
    """
    best = max(1 - fit.residual for fit in fits)
    return next(fit.fields for fit in fits if 1 - fit.residual >= min(best, (1 - tolerance) * best))
