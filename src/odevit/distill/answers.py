"""Distillation of answers: a student of any shape learns what a classifier of any kind says. No label is needed, so any
images teach."""

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from odevit.data import Data, DataConfig, Wanted, load_data
from odevit.data.splits import MemorySplit, Split
from odevit.distill.cache_shards import Cache, cache_of, joined, views_of
from odevit.distill.losses import answer_divergence
from odevit.distill.split_teacher import shard_teacher_
from odevit.distill.top import TopLogits
from odevit.teachers.answerer import Answerer
from odevit.training.classifiers import build_classifier, load_classifier
from odevit.training.integration import Integration
from odevit.training.objectives import Terms

LOSSES = ("kl", "cross_entropy")


class AnswerDistillation:
    """The objective: KL to the teacher's answers, cached or online, and cross-entropy where labels may be used."""

    def __init__(self, teacher: Answerer, config: Any, cache: Cache | None = None):
        self.teacher, self.config, self.cache = teacher, config, cache

    def training_data(self, data: Data) -> Data:
        return data if self.cache is None else views_of(self.cache, data)

    def stage(self, progress: float) -> str:
        return "answers"

    def watch(self, model: Any, images: Tensor) -> dict[str, Any]:
        return {}

    def __call__(
        self, model: Any, images: Tensor, targets: Tensor, indices: Tensor, *, progress: float, integration: Integration
    ) -> Terms:
        output = model(images, **integration.options(getattr(model.config, "horizon", 1.0)))
        answers = self.answers(model, images, indices)
        terms = {
            "kl": lambda: answer_divergence(output.logits, answers, self.config.kl_temperature),
            "cross_entropy": lambda: nnf.cross_entropy(output.logits, targets),
        }
        losses = {name: weight * terms[name]() for name, weight in self.config.losses.items() if weight}
        evaluations = getattr(output, "evaluations", None)
        shown = None if self.config.extra_images else output.logits  # of these there is no label to be right about
        return Terms(losses, shown, None if evaluations is None else max(evaluations))

    def answers(self, model: Any, images: Tensor, indices: Tensor) -> Tensor | TopLogits:
        """The teacher's logits (b, classes) of a batch, or the largest of them."""
        if self.cache is not None:
            logits = self.cache.trace(indices).logits
            assert logits is not None
            return logits
        return self.teacher.to(images.device).answer(self.teacher.renormalise(images, model.config))


def build_answers(
    recipe: Any, data: Data, device: torch.device | str = "cpu", classifier: Any = None
) -> tuple[Any, AnswerDistillation]:
    """Student and objective of a recipe with `distill.match: answers`. classifier: loaded as it says unless given."""
    config = recipe.distill
    if unknown := [name for name, weight in config.losses.items() if weight and name not in LOSSES]:
        raise ValueError(
            f"distill.match: answers knows the losses {' and '.join(LOSSES)}; {', '.join(unknown)} compares states, "
            "which only a student of its teacher's shape can (distill.match: path)"
        )
    side = data.train.fetch(torch.arange(1))[0].shape[-1]
    teacher = Answerer(classifier or load_classifier(config.named_teacher()), data.mean, data.std, side).to(device)
    if teacher.num_labels != len(data.class_names):
        raise ValueError(f"the teacher answers with {teacher.num_labels} classes, the data has {len(data.class_names)}")
    student = build_classifier(recipe.model, data, recipe.data)
    if config.shard_teacher:
        shard_teacher_(config, recipe.loop.monitor_every, teacher)
    if config.extra_images and config.losses.get("cross_entropy"):
        raise ValueError("distill.extra_images have no labels of these classes: set the weight of cross_entropy to 0")
    if config.cache == "none":
        return student, AnswerDistillation(teacher, config)
    more, name = None, config.extra_images
    if name:  # before anything is built
        more = extra_images(data.train, name, recipe.data)
    cache = cache_of(recipe, teacher, data.train, teacher.mean, teacher.std)
    if more is not None:
        cache = joined(cache, cache_of(recipe, teacher, more, teacher.mean, teacher.std))
    return student, AnswerDistillation(teacher, config, cache)


def extra_images(train: Split, name: str, like: DataConfig | None = None) -> MemorySplit:
    """The training images of another data set, as large as these, with the label 0, which nobody reads.

    like: says how many of them at most, and what happens to broken ones.
    """
    images, labels = train.fetch(torch.arange(1))
    side = images.shape[-1]
    config = DataConfig(name=name, image_size=side)
    if like is not None:
        config.limit, config.strict = like.limit, like.strict
    other = load_data(config, wanted=Wanted(channels=images.shape[1])).train
    more, _ = other.fetch(torch.arange(len(other)))
    if more.shape[-1] != side:
        more = nnf.interpolate(more, size=(side, side), mode="bicubic", antialias=True)  # bytes, as `prepare` does
    if more.shape[1:] != images.shape[1:]:
        raise ValueError(
            f"distill.extra_images must be like the training images {tuple(images.shape[1:])}, "
            f"got {tuple(more.shape[1:])}"
        )
    return MemorySplit(more, torch.zeros(len(more), dtype=labels.dtype), [])
