"""A name, folder or file → uint8 images and labels in batches, and float images ready for a model.

Small sets are decoded once and kept in memory; large ones are decoded by worker processes as they are needed. Both
have the same order, a pure function of (seed, epoch), so a run resumes at any step, on any number of processes. Images
of one square size are augmented at that size in memory, and at `image_size` when they are streamed.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from odevit.data.augment import AugmentConfig
from odevit.data.decode import Frame
from odevit.data.shards import ShardedSplit
from odevit.data.sources import Table, open_tables
from odevit.data.splits import MemorySplit, Split, read_splits

DIGITS_TEST_FRACTION = 0.2  # scikit-learn's digits have no split of their own
STATISTICS_IMAGES = 2048  # a streamed set's mean and std come from a sample of this size
STATISTICS_CHUNK = 256  # images whose sums are taken at once


@dataclass(kw_only=True)
class DataConfig:
    """Which images, and how they are read."""

    name: str  # "digits", a hub dataset, a folder (CLASS/IMAGE or train/CLASS/IMAGE …), a parquet file or folder
    image_size: int | None = None  # side of the model's input; None keeps the images' own size
    image_column: str | None = None  # None: the first column that holds images
    label_column: str | None = None  # None: "label", else "fine_label", else the one with most classes
    val_fraction: float = 0.1  # held out of train, by class, when the data has no validation split
    seed: int = 0  # of the held-out split and of limit
    strict: bool = False  # a corrupt image is an error, instead of named, skipped and counted
    limit: int | None = None  # at most so many images of each split, chosen at random: for smoke runs
    memory_limit_mb: int = 2048  # sets that need more are streamed
    workers: int = 2  # processes that decode a streamed set
    mean: Sequence[float] | None = None  # per channel, on the scale 0..1; None: of the training images
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction must lie between 0 and 1; got {self.val_fraction}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 image, or null for all; got {self.limit}")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both, or neither to have them computed")


@dataclass
class Data:
    """What `load_data` found. `test` is None when the source has no (labelled) test split."""

    train: Split
    val: Split
    test: Split | None
    class_names: list[str]
    mean: list[float]  # per channel, of images on the scale 0..1
    std: list[float]
    channels: int
    augment: AugmentConfig | None = None  # what is left to do to the training images; None: what the recipe says

    @property
    def skipped(self) -> int:
        """Corrupt images left out so far."""
        return sum(len(split.skipped) for split in (self.train, self.val, self.test) if split is not None)


class Batch(NamedTuple):
    """Rows start … start + b of the global batch of `total` images."""

    images: Tensor  # uint8 (b, c, H, W)
    labels: Tensor  # (b,)
    indices: Tensor  # (b,) into the split
    start: int
    total: int


class Wanted(NamedTuple):
    """What a model takes, where the data leaves it open."""

    side: int | None = None  # of squares that images of several sizes are brought to
    channels: int | None = None  # 3: grey images become RGB
    class_names: Sequence[str] | None = None  # the order of the data's classes, when they are these


def load_data(config: DataConfig, frame: Frame | None = None, wanted: Wanted | None = None) -> Data:
    """Open, check, split and (when it fits in memory) decode a data set. Every fault is found here, before step one.

    frame: how pictures become squares of `config.image_size`; default: shorter side resized to it, the centre cut out.
    """
    wanted = wanted or Wanted()
    if frame is None and config.image_size is not None:
        frame = Frame.middle(config.image_size)
    splits: dict[str, Split]
    if config.name == "digits":
        splits, class_names = _load_digits(config)
    else:
        tables, class_names = open_tables(config.name, config.image_column, config.label_column)
        tables = _checked(tables, class_names)
        if "val" not in tables:
            train, val = hold_out(tables["train"].labels, config.val_fraction, config.seed)
            tables |= {"train": tables["train"].select(train), "val": tables["train"].select(val)}
        if config.limit is not None:
            tables = {name: t.select(_limited(len(t), config.limit, config.seed)) for name, t in tables.items()}
        tables, class_names = in_order(tables, class_names, wanted.class_names)
        splits = read_splits(
            tables,
            frame=frame,
            strict=config.strict,
            memory_limit_mb=config.memory_limit_mb,
            workers=config.workers,
            side=wanted.side,
            channels=wanted.channels,
        )
    mean, std = (config.mean, config.std) if config.mean and config.std else _statistics(splits["train"])
    channels = splits["train"].fetch(torch.tensor([0]))[0].shape[1]
    if len(mean) != channels or len(std) != channels:
        raise ValueError(f"the images have {channels} channels; got {len(mean)} means and {len(std)} stds")
    return Data(
        splits["train"],
        splits["val"],
        splits.get("test"),
        class_names,
        [*map(float, mean)],
        [*map(float, std)],
        channels,
    )


def in_order(
    tables: dict[str, Table], names: list[str], wanted: Sequence[str] | None
) -> tuple[dict[str, Table], list[str]]:
    """The same with its classes in the order of `wanted`, if these are the same classes."""
    if wanted is None or sorted(wanted) != sorted(names) or len(set(names)) < len(names):
        return tables, names
    place = torch.tensor([list(wanted).index(name) for name in names])
    return {split: replace(table, labels=place[table.labels]) for split, table in tables.items()}, list(wanted)


def hold_out(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Sorted indices (kept, held out): `fraction` of all images, of each class its share to within one image.

    A class keeps at least one image.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "hold out"))
    held, seen, taken = [], 0, 0
    for label in labels.unique().tolist():
        members = (labels == label).nonzero()[:, 0]
        seen += len(members)
        # rounding the running total spreads what rounding each class would lose
        share = math.ceil(len(members) * fraction)
        count = min(math.floor(seen * fraction + 0.5) - taken, share, len(members) - 1)
        taken += count
        held.append(members[torch.randperm(len(members), generator=generator)[:count]])
    val = torch.cat(held).sort().values
    if len(val) == 0:
        raise ValueError(
            f"{len(labels)} training images in {len(held)} classes are too few to hold out {fraction:g} of them for "
            "validation. Add images, raise val_fraction, or provide a validation split."
        )
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[val] = False
    return kept.nonzero()[:, 0], val


def derive_seed(*parts: int | str) -> int:
    """A seed that is a function of its parts alone, e.g. (run seed, "augment", step)."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def num_batches(length: int, batch_size: int, drop_last: bool) -> int:
    return length // batch_size if drop_last else -(-length // batch_size)


def batches(
    split: Split,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    start_step: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Batches of one epoch from `start_step` on. `batch_size` counts the images of all processes together.

    The global batch of a step is a function of (seed, epoch, step); each rank gets a contiguous slice of it, of a
    sharded split the rows of its own parts.
    """
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(f"batch_size must be a positive multiple of the {world_size} processes; got {batch_size}")
    steps = num_batches(len(split), batch_size, drop_last)
    if steps == 0:
        raise ValueError(f"a split of {len(split)} images has no full batch of {batch_size}. Lower batch_size.")
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch)) if shuffle else None
    if isinstance(split, ShardedSplit):
        order = split.order(batch_size, generator)
    else:
        order = torch.randperm(len(split), generator=generator) if shuffle else torch.arange(len(split))
    whole = [order[step * batch_size : (step + 1) * batch_size] for step in range(start_step, steps)]
    starts = [len(indices) * rank // world_size for indices in whole]
    ends = [len(indices) * (rank + 1) // world_size for indices in whole]
    mine = [indices[start:end] for indices, start, end in zip(whole, starts, ends, strict=True)]
    fetched = split.stream(mine)
    return (
        Batch(images, labels, indices, start, len(all_indices))
        for (images, labels), indices, start, all_indices in zip(fetched, mine, starts, whole, strict=True)
    )


def prepare(images: Tensor, image_size: int | None, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 0..255 or float 0..1 (b, c, H, W) → float (b, c, S, S): resized when sizes differ, then normalised.

    Bytes are resized as bytes: on a CPU that gives the pixels which PIL gives in the image processor.
    """
    if image_size is not None and images.shape[-2:] != (image_size, image_size):
        bytewise = images.dtype == torch.uint8 and images.device.type == "cpu"  # other devices cannot
        images = images if bytewise or images.is_floating_point() else images.float() / 255
        images = nnf.interpolate(images, size=(image_size, image_size), mode="bicubic", antialias=True)
        images = images if bytewise else images.clamp(0, 1)
    images = images if images.is_floating_point() else images.float() / 255
    center = torch.tensor(mean, dtype=images.dtype, device=images.device).view(-1, 1, 1)
    scale = torch.tensor(std, dtype=images.dtype, device=images.device).view(-1, 1, 1)
    return (images - center) / scale


def _load_digits(config: DataConfig) -> tuple[dict[str, Split], list[str]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(np.round(digits.images * (255 / 16)).astype(np.uint8))[:, None]  # grey levels are 0..16
    labels = torch.from_numpy(digits.target).long()
    rest, test = hold_out(labels, DIGITS_TEST_FRACTION, config.seed)
    train, val = hold_out(labels[rest], config.val_fraction, config.seed)
    splits: dict[str, Split] = {}
    for name, rows in {"train": rest[train], "val": rest[val], "test": test}.items():
        if config.limit is not None:
            rows = rows[_limited(len(rows), config.limit, config.seed)]
        splits[name] = MemorySplit(images[rows], labels[rows])
    return splits, [str(name) for name in digits.target_names]


def _limited(length: int, limit: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, "limit"))
    return torch.randperm(length, generator=generator)[:limit].sort().values


def _checked(tables: dict[str, Table], class_names: list[str]) -> dict[str, Table]:
    """Labels in range and every class with a training image; an unlabelled test split is left out."""
    if "test" in tables and bool((tables["test"].labels == -1).all()):
        warnings.warn("the test split has no labels (all missing or -1) and is left out", stacklevel=3)
        tables = {name: table for name, table in tables.items() if name != "test"}
    for name, table in tables.items():
        if len(table) == 0:
            raise ValueError(f"the {name} split is empty")
        wrong = ((table.labels < 0) | (table.labels >= len(class_names))).nonzero()[:, 0]
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"labels must be 0 … {len(class_names) - 1} ({len(class_names)} classes); the {name} split has "
                f"{len(wrong)} others, the first in row {first}: {_label_in_words(int(table.labels[first]))}."
            )
    counts = tables["train"].labels.bincount(minlength=len(class_names))
    empty = [class_names[index] for index in (counts == 0).nonzero()[:, 0].tolist()]
    if empty:
        shown = ", ".join(empty[:10]) + (f" and {len(empty) - 10} more" if len(empty) > 10 else "")
        raise ValueError(
            f"every class needs a training image; {len(tables['train'])} images leave {len(empty)} of "
            f"{len(class_names)} classes empty: {shown}. Add images or remove these classes."
        )
    if len(class_names) < 2:
        raise ValueError(f"at least two classes are needed; found only {class_names[0]!r}")
    return tables


def _label_in_words(label: int) -> str:
    return "missing (-1)" if label == -1 else str(label)


def _statistics(train: Split) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, on the scale 0..1."""
    indices = torch.arange(len(train))
    if not isinstance(train, MemorySplit):
        indices = _limited(len(train), STATISTICS_IMAGES, seed=0)
    count, total, squares = 0, torch.tensor(0), torch.tensor(0)
    for images, _ in train.stream(list(indices.split(STATISTICS_CHUNK))):
        pixels = images.transpose(0, 1).flatten(1).int()  # (c, b·H·W)
        count += pixels.shape[1]
        total = total + pixels.sum(1, dtype=torch.int64)
        squares = squares + pixels.square().sum(1, dtype=torch.int64)
    mean = total.double() / count
    deviation = (squares.double() / count - mean**2).clamp_min(0).sqrt()
    if bool((deviation == 0).any()):
        raise ValueError("all training images are one and the same colour in some channel: nothing can be learnt")
    return (mean / 255).tolist(), (deviation / 255).tolist()
