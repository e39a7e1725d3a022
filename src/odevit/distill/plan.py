"""What a run will cost, before it is started: arithmetic, memory, disk and time, from the recipe alone.

Works without the data and without the teacher: known names stand for their sizes, and random weights for trained ones.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from odevit.data import Data
from odevit.data.augment import OPERATIONS
from odevit.data.splits import MemorySplit
from odevit.distill.student import student_of
from odevit.distill.top import bytes_of_top
from odevit.dynamics.cost import count_macs, count_parameters
from odevit.model.solvers import given
from odevit.shipped import names
from odevit.teachers.answerer import Answerer
from odevit.teachers.teacher import Teacher, load_teacher
from odevit.training.classifiers import build_classifier, load_classifier, resolve_model
from odevit.training.config import LoopConfig, OptimConfig
from odevit.training.integration import parse_setting
from odevit.training.precision import autocast, precision_of

BACKWARD = 2  # a backward pass costs twice its forward pass: one product for the input, one for the weights
BYTES = 4  # of a float32
PROBE = 50e9  # multiply-accumulates in a batch whose time is taken: about a second of one core
UTILISATION = 0.35  # of a device's peak that training of small ViTs reaches: our share of matrix rate is below it


class Source(NamedTuple):
    """A data set by its numbers."""

    images: int  # of its training split
    size: int
    channels: int
    classes: int
    has_val: bool = True  # else a share of the training images is held out


SOURCES = {
    "digits": Source(1_438, 8, 1, 10, has_val=False),
    "uoft-cs/cifar10": Source(50_000, 32, 3, 10, has_val=False),
    "uoft-cs/cifar100": Source(50_000, 32, 3, 100, has_val=False),
    "clane9/imagenet-100": Source(126_689, 224, 3, 100),
    "ILSVRC/imagenet-1k": Source(1_281_167, 224, 3, 1000),
}

# hub name → (class in transformers, fields that differ from its default config)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "facebook/dinov2-small": ("Dinov2", {"patch_size": 14, "hidden_size": 384, "num_attention_heads": 6}),
    "facebook/dinov2-base": ("Dinov2", {"patch_size": 14}),
    "facebook/dinov2-base-imagenet1k-1-layer": ("Dinov2", {"patch_size": 14}),
    "facebook/dinov2-large": (
        "Dinov2", {"patch_size": 14, "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
    ),
    "google/vit-base-patch16-224": ("ViT", {}),
    "facebook/dino-vitb16": ("ViT", {}),
    "facebook/deit-tiny-patch16-224": (
        "ViT", {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
    ),
}  # fmt: skip


def stand_in_data(source: Source, size: int | None) -> Data:
    """Two black images per class: all that building a model asks of a data set."""
    side, count = size or source.size, 2 * source.classes
    labels = torch.arange(count) % source.classes
    split = MemorySplit(torch.zeros(count, source.channels, side, side, dtype=torch.uint8), labels, [])
    names, middle = [str(i) for i in range(source.classes)], [0.5] * source.channels
    return Data(split, split, split, names, middle, middle, source.channels)


def stand_in_teacher(name: str, image_size: int | None, classes: int) -> Teacher:
    """A teacher of a known architecture with random weights."""
    import transformers

    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"the teacher {name!r} is neither a folder here nor one whose size is known: {known}")
    kind, fields = ARCHITECTURES[name]
    config = getattr(transformers, f"{kind}Config")(**fields, num_labels=classes)
    return load_teacher(getattr(transformers, f"{kind}ForImageClassification")(config), image_size=image_size)


def schedule_shares(loop: LoopConfig) -> list[tuple[int | None, str | None, float]]:
    """(K, solver, share of the optimiser steps) of every integration that training draws."""
    if not loop.step_schedule:
        return [(None, None, 1.0)]
    begins = [begin for begin, _ in loop.step_schedule]
    shares = []
    for (begin, choices), end in zip(loop.step_schedule, [*begins[1:], 1.0], strict=True):
        settings = choices if isinstance(choices, list) else [choices]
        for setting in settings:
            steps, solver, _ = parse_setting(setting)
            shares.append((steps, solver, (end - begin) / len(settings)))
    return shares


def mean_macs(model: Any, loop: LoopConfig) -> float:
    """Multiply-accumulates of one forward pass in training, averaged over the schedule of steps."""
    return sum(
        share * count_macs(model, num_steps=steps, solver=solver).total
        for steps, solver, share in schedule_shares(loop)
    )


def activation_bytes(model: Any, images: Tensor, num_steps: int) -> float:
    """Bytes that a forward pass keeps for the backward pass, per image; a tensor kept twice counts once."""
    kept: dict[tuple[int, int], int] = {}
    weights = {p.data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(images, **({"num_steps": num_steps} if hasattr(model, "odevit") else {}))
        del output  # only now: what it holds must not be freed, and its memory given to another, before it is counted
    return sum(kept.values()) / len(images)


def state_bytes(trainable: int, total: int, optim: OptimConfig) -> int:
    """Weights, gradients, the optimiser's averages (Muon one, AdamW two) and averaged weights."""
    moments = 1 if optim.name == "muon" else 2
    return BYTES * (total + trainable * (1 + moments + (1 if optim.ema else 0)))


def is_cached(recipe: Any) -> bool:
    return recipe.distill is not None and recipe.distill.cache != "none"


def cached_rows(recipe: Any, images: int, extra: int = 0) -> int:
    """Rows that the teacher is asked once: every view of the training images and of the extra ones."""
    return (images + extra) * recipe.distill.cache_views if is_cached(recipe) else 0


def epoch_rows(recipe: Any, images: int, extra: int = 0) -> int:
    """Rows of an epoch: all views; with extra images as many of these, so that it ends with the smaller set."""
    if not is_cached(recipe):
        return images
    return recipe.distill.cache_views * (2 * min(images, extra) if extra else images)


def kept_side(recipe: Any, source: Source) -> int:
    """Of the training images: their own, at which they are augmented, where all of them fit into memory so."""
    fits = source.images * source.channels * source.size**2 <= recipe.data.memory_limit_mb * 2**20
    return source.size if fits else recipe.data.image_size or source.size


def bytes_of_row(recipe: Any, source: Source, student: Any, teacher: Any) -> int:
    """In the cache: the image where it is augmented, the answer (or its top k), the states."""
    config, side, classes = recipe.distill, kept_side(recipe, source), student.config.num_labels
    row = 8  # the label
    if any(getattr(recipe.augment, name) for name in OPERATIONS):  # else the images are the data's own
        row += source.channels * side * side
    if teacher is None or teacher.num_labels:
        row += bytes_of_top(config.cache_top, classes) if 0 < config.cache_top < classes else BYTES * classes
    if config.cache in ("cls", "all"):
        tokens = 1 if config.cache == "cls" else 1 + teacher.num_patches + teacher.extra_tokens
        row += 2 * (teacher.depth + 1) * tokens * teacher.width
    return row


def cache_bytes(recipe: Any, source: Source, student: Any, teacher: Any, extra: int = 0) -> int:
    rows = cached_rows(recipe, source.images, extra)
    return rows * bytes_of_row(recipe, source, student, teacher) if rows else 0


def teacher_here(recipe: Any) -> str | None:
    """The folder of a teacher that need not be stood in for: as a run finds it, but without the hub."""
    if recipe.distill is None or not recipe.distill.teacher:
        return None
    name = recipe.distill.teacher
    if recipe.distill.match == "answers" and (name in names() or Path(name).is_dir()):
        return resolve_model(name)
    return name if Path(name).is_dir() else None


def build_stand_ins(recipe: Any, source: Source) -> tuple[Any, Any]:
    """Student and, where there is one, its teacher, as the recipe says, with random weights where none are at hand."""
    data = stand_in_data(source, recipe.data.image_size)
    if recipe.task != "distill":
        return build_classifier(recipe.model, data, recipe.data), None
    name, size, here = recipe.distill.teacher, recipe.data.image_size, teacher_here(recipe)
    if recipe.distill.match == "answers":  # from a teacher that sees images of its own size
        student = build_classifier(recipe.model, data, recipe.data)
        if here:
            return student, Answerer(load_classifier(here), data.mean, data.std, kept_side(recipe, source))
        return student, stand_in_teacher(name, None, source.classes) if name in ARCHITECTURES else None
    teacher = load_teacher(here, image_size=size) if here else stand_in_teacher(name, size, source.classes)
    options = {**({"num_labels": source.classes} if not teacher.num_labels else {}), **recipe.model}
    return student_of(teacher, freeze_head=recipe.distill.freeze_head, **options), teacher


def epochs_of(optim: OptimConfig, images: int) -> float | None:
    if optim.epochs is not None:
        return optim.epochs
    return None if optim.steps is None else optim.steps * optim.batch_size / images


def memory_of_process(recipe: Any, student: Any, teacher: Any, processes: int) -> float:
    """Bytes of weights, the optimiser's averages, what a batch keeps for its backward pass, and the teacher."""
    config, parameters = student.config, count_parameters(student)
    most_steps = max(steps or getattr(config, "num_steps", 1) for steps, _, _ in schedule_shares(recipe.loop))
    probe = torch.zeros(2, config.num_channels, config.image_size, config.image_size)
    kept = activation_bytes(student.train(), probe, most_steps) / (most_steps if recipe.loop.recompute else 1)
    batch = -(-recipe.optim.batch_size // (processes * recipe.optim.accumulate))
    teacher_bytes = 0 if teacher is None else BYTES * sum(p.numel() for p in teacher.parameters())
    if recipe.distill is not None and recipe.distill.shard_teacher:
        teacher_bytes //= processes
    return state_bytes(parameters["trainable"], parameters["total"], recipe.optim) + kept * batch + teacher_bytes


def make_plan(
    recipe: Any, source: Source, *, extra: int = 0, processes: int = 1, tflops: float | None = None
) -> dict[str, Any]:
    """All numbers of `odevit plan`. source: the images to train on; extra: how many `distill.extra_images` are."""
    student, teacher = build_stand_ins(recipe, source)
    parameters, cached = count_parameters(student), is_cached(recipe)
    teacher_macs = 0 if teacher is None else count_macs(
        teacher.module, shape=(teacher.num_channels, teacher.image_size, teacher.image_size)
    ).total  # fmt: skip
    passes = 1 + BACKWARD + (1 if recipe.loop.recompute else 0)
    per_image = passes * mean_macs(student, recipe.loop) + (0 if cached else teacher_macs)
    rows, asked = epoch_rows(recipe, source.images, extra), cached_rows(recipe, source.images, extra)
    speed = images_per_second(student, None if cached else teacher, recipe, per_image)
    teacher_hours: float | None = 0.0  # None: it is not here, and not known
    if recipe.task == "distill" and teacher is None:
        teacher_hours = None
    elif asked:
        teacher_hours = asked / answers_per_second(teacher, recipe, teacher_macs) / 3600
    epochs = epochs_of(recipe.optim, rows)
    by_the_clock = None if recipe.optim.minutes is None else recipe.optim.minutes / 60
    epochs_here = epochs if by_the_clock is None else by_the_clock * 3600 * speed / rows
    assert epochs_here is not None  # a recipe has exactly one of epochs, steps and minutes
    total = epochs_here * rows * per_image + asked * teacher_macs
    there = None if tflops is None else 2 * total / (tflops * 1e12 * UTILISATION * processes) / 3600
    cache = cache_bytes(recipe, source, student, teacher, extra)
    return {
        "images": source.images,
        "extra_images": extra,
        "views": recipe.distill.cache_views if cached else 1,
        "epochs": epochs,
        "epochs_here": epochs_here,
        "parameters": parameters["total"],
        "trainable": parameters["trainable"],
        "teacher_parameters": None if teacher is None else sum(p.numel() for p in teacher.parameters()),
        "macs_per_image": per_image,
        "macs_per_epoch": per_image * rows,
        "macs_in_all": total,
        "memory_per_process": memory_of_process(recipe, student, teacher, processes),
        "cache": cache,
        "cache_per_process": cache / (processes if recipe.distill and recipe.distill.cache_shards > 1 else 1),
        "images_per_second_here": speed,
        "hours_here": by_the_clock if epochs is None else epochs * rows / speed / 3600,
        "teacher_hours_here": teacher_hours,
        "hours_there": there,
        "utilisation": UTILISATION,
    }


def images_per_second(student: Any, teacher: Any, recipe: Any, macs: float, seconds: float = 3.0) -> float:
    """Forward and backward passes on this machine, with the teacher where it runs online, for a few seconds.

    Every integration that training draws counts with its share. macs: of one image, so that a batch of a large model
    stays within those seconds.
    """
    config, count = student.train().config, max(1, min(recipe.optim.batch_size, int(PROBE / macs)))
    images = torch.randn(count, config.num_channels, config.image_size, config.image_size)
    shares, each = schedule_shares(recipe.loop), 0.0
    for steps, solver, share in shares:
        options = given(steps, solver)

        def step(options: dict[str, Any] = options) -> None:
            with autocast(precision_of(recipe.loop), images.device):
                logits = student(images, **options).logits
                if teacher is not None:
                    answer_noise(teacher, count)
            logits.float().square().sum().backward()
            student.zero_grad()

        each += share * seconds_of(step, seconds / len(shares)) / count
    return 1 / each


def answers_per_second(teacher: Any, recipe: Any, macs: float, seconds: float = 2.0) -> float:
    """Images that the teacher answers on this machine, in the run's precision."""
    count = max(1, min(64, int(PROBE / macs)))

    def step() -> None:
        with autocast(precision_of(recipe.loop), torch.device("cpu")):
            answer_noise(teacher, count)

    return count / seconds_of(step, seconds)


def answer_noise(teacher: Any, count: int) -> None:
    teacher.answer(torch.randn(count, teacher.num_channels, teacher.image_size, teacher.image_size))


def seconds_of(step: Callable[[], None], seconds: float) -> float:
    """Of one call, after a first one, averaged over so many seconds."""
    step()
    done, began = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - began < seconds:
        step()
        done += 1
    return (time.perf_counter() - began) / done
