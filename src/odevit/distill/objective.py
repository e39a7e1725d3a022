"""Turn any trained ViT into an ODE-ViT: a teacher's trajectory, met at meeting times.

Collocation fits the field to the teacher's layer-to-layer velocities at the teacher's own states, one evaluation per
image; the unrolled stage integrates from the image and compares the whole path, with teacher forcing annealed away.

Shapes: b batch, D teacher blocks, M patches, E extra tokens of the teacher, R registers of the student, d width.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from odevit.data import Data, derive_seed
from odevit.distill.cache import CachedTrace
from odevit.distill.cache_shards import Cache, ShardedCache, cache_of, evenly, views_of
from odevit.distill.losses import LOSSES, Meeting
from odevit.distill.meeting import (
    PLACEMENTS,
    collocation_loss,
    match_steps,
    meeting_times,
    token_groups,
    unroll,
)
from odevit.distill.split_teacher import shard_teacher_
from odevit.distill.student import TOKENS, same_patches, student_of
from odevit.dynamics.arrival import answer_head, distance_and_radius
from odevit.dynamics.monitor import spread
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import SOLVERS
from odevit.teachers.teacher import Teacher, TeacherTrace, load_teacher
from odevit.training.evaluation import model_input
from odevit.training.integration import Integration
from odevit.training.objectives import Terms
from odevit.training.sharding import summed

LAYER_WEIGHTS = ("none", "variance", "last")
MEASURED_AT_ONCE = 64  # images
SMALLEST_VARIANCE = 1e-4  # of the largest layer's: bounds how much more a layer can count than another


@dataclass
class DistillConfig:
    """How a student learns from its teacher. The student's own fields are in the recipe's `model`."""

    teacher: str = ""  # folder or hub name
    # "path": a student of its teacher's shape follows its states; "answers": a student of any shape (the recipe's model
    # as in training) learns the answers of any image classifier
    match: Literal["path", "answers"] = "path"
    # of a two-tower teacher (CLIP, SigLIP): "a photo of a {}"; the data's class names in such texts become its head
    prompts: list[str] = field(default_factory=list)
    extra_images: str = ""  # answers only: another data set whose images, never its labels, the teacher answers too
    losses: dict[str, float] = field(default_factory=lambda: {"cls_path": 1.0})  # names in `losses.LOSSES`, weights
    placement: str = "distance"  # of the meeting times: "distance" (paper) or "uniform"
    temperature: float | None = None  # of the distance placement; None: 3 · mean distance
    layer_weights: str = "none"  # "none" (paper), "variance" (1 / (layers · variance over images)) or "last"
    kl_temperature: float = 1.0
    collocation: float = 0.0  # share of the run spent on velocities, before any unrolling
    forcing: float = 0.0  # share of the run, after collocation, in which teacher forcing goes from always to never
    freeze_head: bool = True  # the teacher's norm and head stay as they are
    cache: str = "none"  # "none" (teacher online); what is kept on disk of its states: "cls", "all", or "logits" alone
    cache_views: int = 1  # augmented versions of each image in the cache; an epoch goes through all of them
    cache_seed: int | None = None  # of the views; None: the run's own. Runs of other seeds can share a cache
    cache_folder: str = "cache"
    cache_top: int = 0  # of each answer, keep so many of the largest logits and the sum of the others; 0: all of it
    cache_shards: int = 1  # parts of the cache, of which each of torchrun's processes builds and reads its own
    shard_teacher: bool = False  # split the teacher among torchrun's processes (FSDP2) instead of a copy each
    sample: int = 2048  # training images from which distances and variances are measured

    def __post_init__(self) -> None:
        unknown = [name for name in self.losses if name not in LOSSES]
        try:
            self.losses = {name: float(weight) for name, weight in self.losses.items()}  # YAML reads 1e-3 as text
        except (TypeError, ValueError):
            raise ValueError(f"distill.losses must be numbers, got {self.losses}") from None
        if unknown or not any(self.losses.values()):
            raise ValueError(f"distill.losses: {unknown or 'nothing'}; give weights to some of {', '.join(LOSSES)}")
        caches = ("none", "logits", "cls", "all")
        choices = {"placement": tuple(PLACEMENTS), "layer_weights": LAYER_WEIGHTS, "cache": caches}
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"distill.{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}")
        for name in ("collocation", "forcing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"distill.{name} is a share of the run, between 0 and 1; got {getattr(self, name)}")
        for name in ("kl_temperature", "sample", "cache_views", "cache_shards"):
            if getattr(self, name) <= 0:
                raise ValueError(f"distill.{name} must be positive, got {getattr(self, name)}")
        self._check_cache()
        if (self.match == "answers") != (self.cache == "logits") and self.cache != "none":
            raise ValueError(
                f"distill.cache: {self.cache} does not go with distill.match: {self.match}; answers need only logits, "
                "a path needs cls or all"
            )
        if self.prompts and self.match != "path":
            raise ValueError("distill.prompts are for distill.match: path")
        if self.extra_images and (self.match, self.cache) != ("answers", "logits"):
            raise ValueError("distill.extra_images is for distill.match: answers with distill.cache: logits")

    def named_teacher(self) -> str:
        """`teacher`, which no run can do without."""
        if not self.teacher:
            raise ValueError(
                "distillation needs a teacher: --teacher DIRECTORY_OR_HUB_NAME, or distill.teacher in the recipe"
            )
        return self.teacher

    def _check_cache(self) -> None:
        if self.cache_top < 0:
            raise ValueError(f"distill.cache_top must be 0 (all logits) or positive, got {self.cache_top}")
        if self.cache == "none" and (self.cache_top or self.cache_shards > 1):
            raise ValueError("distill.cache_top and cache_shards are for a cache: set distill.cache to logits or cls")
        wanted = {name for name, weight in self.losses.items() if weight}
        if self.cache != "none" and "attention" in wanted:
            raise ValueError("the attention loss needs the teacher online, attention is not cached: distill.cache=none")
        needing = [name for name in ("collocation", "forcing") if getattr(self, name)]
        needing += sorted(wanted & {"patch_path", "register_path"})
        if self.cache == "cls" and needing:
            raise ValueError(
                f"{', '.join(needing)} needs all tokens of the teacher's states: set distill.cache to none or all"
            )


class TeacherStatistics(NamedTuple):
    """distances (D,): mean ‖h_l[CLS] - h_{l-1}[CLS]‖; variances (D, n): mean ‖h_l - its mean‖² of each token."""

    distances: Tensor
    variances: Tensor


def measure_teacher(
    traces: Iterable[TeacherTrace | CachedTrace], everyone: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> TeacherStatistics:
    """Statistics over the images of all traces, in float64. everyone: sums over processes that have other images."""
    count, distances, total, squares = 0, torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)
    for trace in traces:
        states = torch.stack(trace.states).cpu().double()  # (D + 1, b, n, d)
        count += states.shape[1]
        distances = distances + states[:, :, 0].diff(dim=0).norm(dim=-1).sum(dim=1)
        total = total + states[1:].sum(dim=1)  # (D, n, d)
        squares = squares + states[1:].square().sum(dim=(1, 3))  # (D, n)
    count = int(everyone(torch.tensor(count)))
    distances, total, squares = (everyone(tensor) for tensor in (distances, total, squares))
    return TeacherStatistics(distances / count, squares / count - (total / count).square().sum(dim=-1))


def layer_weights(kind: str, variances: Tensor, num_patches: int) -> Tensor:
    """(D, n) → weights (D, n). "variance": CLS, patches and extras each by their own mean variance, so that a path
    that predicts the mean state everywhere costs 1, whatever the teacher's scale."""
    weights = torch.ones_like(variances)
    if kind == "last":
        weights[:-1] = 0
    if kind == "variance":
        for tokens in token_groups(num_patches):
            mean = variances[:, tokens].mean(dim=1, keepdim=True)  # (D, 1)
            if mean.isfinite().all():  # else there are no such tokens
                weights[:, tokens] = 1 / (len(mean) * mean.clamp_min(SMALLEST_VARIANCE * float(mean.max())))
    return weights.float()


def build(
    recipe: Any, data: Data, teacher: Teacher | None = None, device: torch.device | str = "cpu"
) -> tuple[OdeViTForImageClassification, "Distillation"]:
    """Student and objective of a recipe with `task: distill`. The student's meeting times go into its config.

    teacher: loaded as the recipe says unless given. device: where it runs. A cache, if wanted, is built here.
    """
    config: DistillConfig = recipe.distill
    if teacher is None:
        teacher = load_teacher(
            config.named_teacher(),
            image_size=recipe.data.image_size,
            prompts=config.prompts,
            class_names=data.class_names,
        )
    teacher.to(device)
    if teacher.num_labels and teacher.num_labels != len(data.class_names):
        raise ValueError(f"the teacher answers with {teacher.num_labels} classes, the data has {len(data.class_names)}")
    options = dict(recipe.model)
    if not teacher.num_labels:
        options.setdefault("num_labels", len(data.class_names))
    if teacher.mean is None:
        options.setdefault("image_mean", data.mean)
        options.setdefault("image_std", data.std)
    torch.manual_seed(derive_seed(recipe.seed, "initial weights"))  # whatever loading the teacher has drawn
    student = student_of(teacher, freeze_head=config.freeze_head, **options)
    check_plan(config, teacher, student)
    if config.shard_teacher:
        shard_teacher_(config, recipe.loop.monitor_every, teacher)
    cache = None
    if config.cache != "none":
        mean, std = (teacher.mean or tuple(student.config.image_mean)), (teacher.std or tuple(student.config.image_std))
        cache = cache_of(recipe, teacher, data.train, mean, std)
    traces = sample_traces(student, teacher, cache, data, config.sample)
    if isinstance(cache, ShardedCache):
        statistics = measure_teacher(traces, lambda tensor: summed(tensor, device))
    else:
        statistics = measure_teacher(traces)
    student.config.meeting_times = meeting_times(
        statistics.distances,
        horizon=student.config.horizon,
        placement=config.placement,
        temperature=config.temperature,
    )
    return student, Distillation(teacher, config, statistics, cache)


def check_plan(config: DistillConfig, teacher: Teacher, student: OdeViTForImageClassification) -> None:
    """What can only be told once teacher and student are there."""
    wanted = {name for name, weight in config.losses.items() if weight}
    if "kl" in wanted and not teacher.num_labels:
        raise ValueError("the kl loss needs a teacher with a classification head: set distill.losses.kl to 0")
    if teacher.parts().head_weight is None and not wanted & {"kl", "cross_entropy"}:
        raise ValueError(
            f"nothing would train the student's head, which is fresh ({teacher.parts().head_note}): give a weight "
            "to distill.losses.kl or cross_entropy"
        )
    compared = sorted(wanted & {"patch_path", "attention"}) + [
        name for name in ("collocation", "forcing") if getattr(config, name)
    ]
    if compared and not same_patches(teacher, student):
        raise ValueError(
            f"{', '.join(compared)} compares patches, and this student has its own: leave {', '.join(TOKENS)} to the "
            f"teacher, or set {', '.join(compared)} to 0"
        )
    if "register_path" in wanted and not student.config.num_registers == teacher.extra_tokens > 0:
        raise ValueError(
            "register_path compares registers with the teacher's extra tokens, so there must be as many: "
            f"{student.config.num_registers} registers, {teacher.extra_tokens} extra tokens"
        )
    if config.forcing and student.config.solver not in SOLVERS:
        raise ValueError(
            f"teacher forcing needs a solver with fixed steps ({', '.join(SOLVERS)}), got {student.config.solver}"
        )


def sample_traces(
    student: OdeViTForImageClassification, teacher: Teacher, cache: Cache | None, data: Data, sample: int
) -> Iterator[TeacherTrace | CachedTrace]:
    """The teacher's traces of up to `sample` training images, spread evenly over the split (or its cached views; of
    a cache in parts, those that lie in the parts of this process)."""
    device = next(teacher.parameters()).device
    if isinstance(cache, ShardedCache):
        chosen = cache.sample(sample)
    else:
        chosen = evenly(len(data.train if cache is None else cache.split), sample)
    rows = chosen.split(MEASURED_AT_ONCE)
    if cache is not None:
        yield from map(cache.trace, rows)
        return
    for images, _ in data.train.stream(list(rows)):
        yield teacher.trace(teacher.renormalise(model_input(student, images).to(device), student.config))


class Distillation:
    """The objective: collocation first, then the unrolled path. Labels enter only through the cross_entropy loss.

    The teacher is no part of the model: it is neither trained, averaged, saved nor distributed.
    """

    def __init__(
        self,
        teacher: Teacher,
        config: DistillConfig,
        statistics: TeacherStatistics,
        cache: Cache | None = None,
    ):
        self.teacher, self.config, self.statistics, self.cache = teacher, config, statistics, cache
        self.weights = layer_weights(config.layer_weights, statistics.variances, teacher.num_patches)  # (D, n)

    def training_data(self, data: Data) -> Data:
        return data if self.cache is None else views_of(self.cache, data)

    def stage(self, progress: float) -> str:
        if progress < self.config.collocation:
            return "collocation"
        return "teacher forcing" if self.forced(progress) else "unrolled"

    def forced(self, progress: float) -> float:
        """Probability that a state is replaced by the teacher's after it has been compared: 1 → 0, linearly."""
        if not self.config.forcing:
            return 0.0
        return max(0.0, 1 - (progress - self.config.collocation) / self.config.forcing)

    def __call__(
        self,
        model: OdeViTForImageClassification,
        images: Tensor,
        targets: Tensor,
        indices: Tensor,
        *,
        progress: float,
        integration: Integration,
    ) -> Terms:
        num_steps = integration.num_steps or model.config.num_steps
        unrolled = progress >= self.config.collocation
        trace = self.observe(model, images, indices, attention=unrolled and bool(self.config.losses.get("attention")))
        weights = self.weights.to(images.device)
        if not unrolled:
            return Terms({"collocation": collocation_loss(model, trace.states, weights, num_steps)}, None, 1)
        pairs = match_steps(model.config.meeting_times, model.config.time_grid(num_steps))
        path, evaluations = unroll(
            model, images, trace.states, num_steps, pairs, self.forced(progress), integration.solver
        )
        read_at = math.ceil(integration.until * num_steps)  # the end, or a late step in anytime training
        layers, steps = zip(*pairs, strict=True)
        meeting = Meeting(
            model=model,
            path=path,
            student=torch.stack([path[step] for step in steps]),
            teacher=torch.stack([trace.states[layer] for layer in layers]),
            weights=weights[[layer - 1 for layer in layers]],
            logits=model.classify(path[read_at]),
            teacher_logits=trace.logits,
            teacher_attention=trace.attention,
            targets=targets,
            temperature=self.config.kl_temperature,
        )
        losses = {name: weight * LOSSES[name](meeting) for name, weight in self.config.losses.items() if weight}
        return Terms(losses, meeting.logits, evaluations)

    def watch(self, model: OdeViTForImageClassification, images: Tensor) -> dict[str, Any]:
        """distance_over_radius: how far the student's last CLS state is from the teacher's, against the radius in which
        the student's head cannot change its answer there. Below 1 the two agree for certain (with the teacher's head).
        """
        trace = self.teacher.to(images.device).trace(self.teacher.renormalise(images, model.config))
        target = trace.states[-1][:, 0]
        if model.config.pool != "cls" or (head := answer_head(model)) is None or target.shape[1] != head[0].shape[1]:
            return {}
        state = model.odevit.evolve(model.odevit.embed(images)).xs[-1]
        distance, radius = distance_and_radius(model, state, target)
        return {"distance_over_radius": spread([distance / radius])}

    def observe(
        self, model: OdeViTForImageClassification, images: Tensor, indices: Tensor, attention: bool = False
    ) -> TeacherTrace | CachedTrace:
        """The teacher's trace of a batch: from the cache when there is one, else by running it where the images are."""
        if self.cache is not None:
            return self.cache.trace(indices)
        return self.teacher.to(images.device).trace(self.teacher.renormalise(images, model.config), attention=attention)
