"""Tried outside the library: what else might carry more per parameter, from scratch on CIFAR-10 at equal steps.

    python experiments/tried.py tried --steps 800 --seeds 0 1 --set data.name=DIRECTORY --share 1/2   # beside it 2/2
    python experiments/tried.py tried --steps 800 --seeds 0 1                                         # the table

Arms beside the model as it is (experiments/flow.py, "sequence pooling"): γ and β of the field's norms as piecewise
linear functions of time (`norms`), output gains too (`gains`), low-rank corrections of every matrix whose weights
depend on time (`low rank`), steps of random length (`jittered steps`), a Kullback-Leibler term that draws half as many
steps to the answer of all of them (`consistency`), a stem whose convolutions start with norm one as all other matrices
do (`spectral stem`) instead of with the variance that ReLU wants, one that AdamW moves (`AdamW for the stem`) instead
of Muon, one that whitens 3×3 patches and is not trained (`whitening stem`, as airbench has it), one with half the
channels before its last stage (`narrow stem`), one with BatchNorm after every pooling (`normed stem`), and images
mirrored in every second epoch instead of at random (`alternating flip`). Arms of another speed are compared at equal
time: --minutes 8. Each is a patch of the field, the
grid, the objective, the stem, the optimiser or the augmentation that lives here only: an option enters the library
when it pays (docs/RESULTS.md).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import flow
import torch
import torch.nn.functional as nnf
from studies import run_study, study_parser
from torch import Tensor, nn

from odevit.data import Batch, load_data
from odevit.model import field as field_module
from odevit.model import layers, solvers
from odevit.model import model as model_module
from odevit.model.field import VectorField
from odevit.model.layers import PoolingTokenizer, StemConvolution
from odevit.model.spectral import spectral_init_
from odevit.training import loop
from odevit.training.objectives import Classification, Terms

KNOTS, RANK = 4, 4
now = [0.0]  # the time in [0, 1] at which a field is evaluated; the solvers below keep it


def at_now(knots: Tensor) -> Tensor:
    """Piecewise linear interpolation of (KNOTS, …) at the present time."""
    place = min(1.0, now[0]) * (KNOTS - 1)
    left = min(int(place), KNOTS - 2)
    return knots[left] + (place - left) * (knots[left + 1] - knots[left])


class ModulatedField(VectorField):
    """norm(X) (1 + γ(t)) + β(t) in the place of norm(X), and (1 + gain(t)) times what comes out."""

    gains = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        width = self.attention.query.in_features
        self.norms_in_time = nn.Parameter(torch.zeros(KNOTS, 4, width))
        self.gains_in_time = nn.Parameter(torch.zeros(KNOTS, 2, width)) if self.gains else None

    def _gain(self, part: int) -> Tensor | float:
        return 1.0 if self.gains_in_time is None else 1 + at_now(self.gains_in_time)[part]

    def F(self, x: Tensor) -> Tensor:
        scale, shift = at_now(self.norms_in_time)[:2]
        return self.scale * self._gain(0) * self.mlp(self.norm_f(x) * (1 + scale) + shift)

    def G(self, x: Tensor) -> Tensor:
        scale, shift = at_now(self.norms_in_time)[2:]
        return self.scale * self._gain(1) * self.attention(self.norm_g(x) * (1 + scale) + shift)


class FieldWithGains(ModulatedField):
    gains = True


class LowRankLinear(nn.Linear):
    """W + U diag(s(t)) V."""

    def __init__(self, inside: int, outside: int):
        super().__init__(inside, outside, bias=False)
        self.up = nn.Parameter(torch.zeros(1, outside, RANK))  # three axes: not a matrix for Muon
        self.down = nn.Parameter(torch.randn(1, RANK, inside) * inside**-0.5)
        self.in_time = nn.Parameter(torch.linspace(-1, 1, KNOTS).reshape(KNOTS, 1, 1).repeat(1, 1, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + ((x @ self.down[0].T) * at_now(self.in_time)[0]) @ self.up[0].T


class LowRankField(VectorField):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for part, names in ((self.mlp, ("w1", "w2")), (self.attention, ("query", "key", "value", "out"))):
            for name in names:
                old = getattr(part, name)
                setattr(part, name, LowRankLinear(old.in_features, old.out_features))


def timed(step: solvers.Step, stages: tuple[float, ...]) -> solvers.Step:
    """A solver's step whose i-th evaluation of the field is at the i-th of these shares of it."""

    def run(field: Any, x: Tensor, h: float) -> Tensor:
        start, left = now[0], iter(stages)

        def drift(y: Tensor) -> Tensor:
            now[0] = start + next(left) * h
            return field(y)

        y = step(drift, x, h)
        now[0] = start + h
        return y

    return run


def from_the_start(evolve: Callable[..., solvers.Solution]) -> Callable[..., solvers.Solution]:
    def run(self: Any, *args: Any, **options: Any) -> solvers.Solution:
        now[0] = 0.0
        return evolve(self, *args, **options)

    return run


def jittered(steps: Callable[[solvers.Grid], Iterator[tuple[int, float]]]) -> Callable:
    def run(grid: solvers.Grid) -> Iterator[tuple[int, float]]:
        planned = list(steps(grid))
        if not torch.is_grad_enabled():  # in training only
            return iter(planned)
        lengths = torch.rand(len(planned)) + 0.5
        lengths *= grid.horizon / lengths.sum()
        return iter([(phase, h) for (phase, _), h in zip(planned, lengths.tolist(), strict=True)])

    return run


def consistent(call: Callable[..., Terms]) -> Callable[..., Terms]:
    def run(self: Classification, model: Any, images: Tensor, *args: Any, **options: Any) -> Terms:
        terms = call(self, model, images, *args, **options)
        assert terms.logits is not None
        fewer = max(1, (options["integration"].num_steps or model.config.num_steps) // 2)
        short = model(images, num_steps=fewer).logits.log_softmax(dim=1)
        term = 0.5 * nnf.kl_div(short, terms.logits.detach().softmax(dim=1), reduction="batchmean")
        return terms._replace(losses=terms.losses | {"consistency": term})

    return run


def spectral_stem(initialise: Callable[..., None]) -> Callable[..., None]:
    def run(self: Any, module: nn.Module) -> None:
        initialise(self, module)
        if isinstance(module, StemConvolution):
            spectral_init_(module.weight)

    return run


def adamw_stem(build: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def run(model: nn.Module, config: Any, grouping: int) -> list[Any]:
        return build(model, config, 2)  # as parameters were grouped before

    return run


def narrow_stem(widths: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def run(channels: int, width: int, patch_size: int) -> list[int]:
        first, *between, last = widths(channels, width, patch_size)
        return [first, *(max(1, count // 2) for count in between), last]

    return run


class NormedTokenizer(PoolingTokenizer):
    """BatchNorm between max-pooling and ReLU, where maps are a quarter of the size that the convolution leaves."""

    def __init__(self, channels: int, width: int, patch_size: int):
        super().__init__(channels, width, patch_size)
        parts: list[nn.Module] = []
        count = 0
        for layer in self.layers:
            parts += [nn.BatchNorm2d(count), layer] if isinstance(layer, nn.ReLU) else [layer]
            count = getattr(layer, "out_channels", count)
        self.layers = nn.Sequential(*parts)


def whitening_filters(images: Tensor, count: int) -> Tensor:
    """(count, c, 3, 3): ± the leading eigenvectors of the covariance of 3×3 patches, over their standard deviations."""
    images = (images - images.mean(dim=(0, 2, 3), keepdim=True)) / images.std(dim=(0, 2, 3), keepdim=True)
    patches = nnf.unfold(images, 3).mT.flatten(0, 1)
    values, vectors = torch.linalg.eigh(patches.T.cov())
    kept = min(count // 2, len(values))
    filters = (vectors / values.clamp(min=1e-3 * float(values.max())).sqrt()).T.flip(0)[:kept]
    return torch.cat([filters, -filters]).reshape(2 * kept, images.shape[1], 3, 3)


def whitening_stem(images: Tensor) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrap(initialise: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, module: nn.Module) -> None:
            initialise(self, module)
            if isinstance(module, StemConvolution) and module.in_channels == images.shape[1]:
                filters = whitening_filters(images, module.out_channels)
                with torch.no_grad():
                    module.weight[: len(filters)] = filters
                module.weight.requires_grad_(False)

        return run

    return wrap


def alternating(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, batch: Batch) -> Any:
        mirrored = (batch.indices + self.step // self.steps_per_epoch) % 2 == 1
        images = torch.where(mirrored[:, None, None, None], batch.images.flip(-1), batch.images)
        return prepare(self, batch._replace(images=images))

    return run


FIELDS = {"norms": ModulatedField, "gains": FieldWithGains, "low rank": LowRankField}
ARMS = (
    "as it is",
    *FIELDS,
    "jittered steps",
    "consistency",
    "spectral stem",
    "AdamW for the stem",
    "whitening stem",
    "narrow stem",
    "normed stem",
    "alternating flip",
)
STAGES = {"euler": (0.0,), "midpoint": (0.0, 0.5), "rk4": (0.0, 0.5, 0.5, 1.0)}


def patch(arm: str, images: Tensor | None = None) -> Callable[[], None]:
    """Put the arm in the library's place; returns what takes it out again. images: (N, c, H, W), of `whitening stem`"""
    stack = ExitStack()

    def put(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))

    if arm in FIELDS:
        put(field_module, "VectorField", lambda usual: FIELDS[arm])
        put(model_module.OdeViTModel, "evolve", from_the_start)
        stack.callback(dict.update, solvers.SOLVERS, dict(solvers.SOLVERS))
        for name, stages in STAGES.items():
            solver = solvers.SOLVERS[name]
            dict.__setitem__(solvers.SOLVERS, name, solver._replace(step=timed(solver.step, stages)))
    elif arm == "jittered steps":
        put(solvers.Grid, "steps", jittered)
    elif arm == "consistency":
        put(Classification, "__call__", consistent)
    elif arm == "spectral stem":
        put(model_module.OdeViTPreTrainedModel, "_init_weights", spectral_stem)
    elif arm == "AdamW for the stem":
        put(loop, "build_optimizers", adamw_stem)
    elif arm == "whitening stem":
        assert images is not None
        put(model_module.OdeViTPreTrainedModel, "_init_weights", whitening_stem(images))
    elif arm == "narrow stem":
        put(layers, "_stage_widths", narrow_stem)
    elif arm == "normed stem":
        stack.enter_context(mock.patch.dict(layers.TOKENIZERS, pooling=NormedTokenizer))
    elif arm == "alternating flip":
        put(loop.Run, "prepare", alternating)
    return stack.close


def run_arm(arm: str, assignments: list[str], folder: Path) -> dict[str, Any]:
    if (folder / "settings.json").exists():
        return json.loads((folder / "settings.json").read_text())
    images = None
    if arm == "whitening stem":
        train = load_data(flow.recipe_of(flow.OURS, flow.SHORT, assignments).data).train
        images = train.fetch(torch.arange(min(2000, len(train))))[0] / 255
    restore = patch(arm, images)
    try:
        changes = ["augment.flip=false"] if arm == "alternating flip" else []
        return flow.run_arm(((flow.OURS, flow.SHORT), changes), assignments, folder)
    finally:
        restore()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__ or "", ["tried"], minutes=None, output="runs/tried")
    parser.add_argument("--steps", type=int, help="default: 800, unless --minutes is given")
    options = parser.parse_args(arguments)
    if options.steps is None and options.minutes is None:
        options.steps = 800
    budget = f"{options.minutes:g} minutes" if options.steps is None else f"{options.steps} steps"
    if options.steps is not None:
        options.overrides.append(f"optim.steps={options.steps}")
    rows = run_study(parser, options, {name: name for name in ARMS}, run_arm, title=f"tried-{options.steps or 'time'}")
    flow.print_rows(rows, ["model", *flow.SETTINGS], f"{budget} each")
    return rows


if __name__ == "__main__":
    main()
