"""What the rows of a trajectory cache depend on, and its hash: the name of the cache's folder."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from odevit.data.augment import MIXES, OPERATIONS, AugmentConfig
from odevit.data.splits import Split, StreamedSplit

FORMAT = 1  # part of the key: raised when rows are written in another way
HASHED_AT_ONCE = 1024  # images


@dataclass(frozen=True, kw_only=True)
class Transform:
    """From the images of a split to what the teacher sees."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: AugmentConfig
    views: int = 1  # augmented versions of each image
    seed: int = 0
    precision: str = "no"  # of the teacher's arithmetic

    def __post_init__(self) -> None:
        mixes = [name for name in MIXES if getattr(self.augment, name)]
        if mixes:
            raise ValueError(
                f"{' and '.join(mixes)} cannot be cached: mixed images have no single label. Set augment.{mixes[0]}=0, "
                "or let the teacher run online with distill.cache=none"
            )
        if self.views < 1:
            raise ValueError(f"distill.cache_views must be at least 1, got {self.views}")
        if self.views > 1 and not any(getattr(self.augment, name) for name in OPERATIONS):
            raise ValueError(
                f"{self.views} views of an image differ only by augmentation, and none is on: "
                f"set distill.cache_views=1, or one of {', '.join('augment.' + name for name in OPERATIONS)}"
            )


def describe(
    teacher: Any, train: Split, transform: Transform, tokens: str, top: int = 0, temperature: float = 1.0
) -> dict[str, Any]:
    """Everything that the rows of a cache depend on. As many top logits as there are classes are all of them."""
    kept = {"top": [top, temperature]} if 0 < top < teacher.num_labels else {}
    fields = asdict(transform)
    if transform.precision == "no":  # as in the keys of caches that were built before there was another
        del fields["precision"]
    return {
        "format": FORMAT,
        "teacher": teacher.checksum(),
        "settings": settings(teacher.module),
        "family": teacher.family,
        "patch_size": None if tokens == "logits" else teacher.patch_size,
        "data": digest(train),
        "transform": json.loads(json.dumps(fields)),
        "tokens": tokens,
        **kept,
    }


NAMES = {"training", "name_or_path", "transformers_version", "architectures", "dtype", "id2label", "label2id"}


def settings(module: nn.Module) -> str:
    """sha256 of what a model's answers depend on beside its tensors: heads, eps, activations and the like.

    The plain attributes and the class of every submodule, and its config where it has one, without names and versions.
    """
    found = []
    for name, part in module.named_modules():
        plain = {key: _plain(value) for key, value in vars(part).items() if not key.startswith("_")}
        config: Any = getattr(part, "config", None)
        plain["config"] = _plain(config.to_dict()) if hasattr(config, "to_dict") else None
        # a model that is split among processes is the same model
        kind = next(kind for kind in type(part).__mro__ if not kind.__name__.startswith("FSDP"))
        found.append([name, kind.__qualname__, {key: value for key, value in plain.items() if key not in NAMES}])
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Numbers and text as they are, functions by name, the same inside dictionaries and lists; None for the rest."""
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if key not in NAMES and not str(key).startswith("_")}
        return {key: _plain(item) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", None)


def digest(split: Split) -> str:
    """sha256 of all images and labels. A streamed split is told by its table: decoding it all would take too long."""
    content = hashlib.sha256()
    for part in _table_identity(split) if isinstance(split, StreamedSplit) else _pixels(split):
        content.update(part)
    return content.hexdigest()


def _pixels(split: Split) -> Iterator[bytes]:
    for images, labels in split.stream(list(torch.arange(len(split)).split(HASHED_AT_ONCE))):
        yield str(tuple(images.shape)).encode()
        yield images.contiguous().numpy().tobytes()
        yield labels.numpy().tobytes()


def _table_identity(split: StreamedSplit) -> Iterator[bytes]:
    table = split.table
    yield f"{table.dataset._fingerprint} {table.image_column} {split.channels} {tuple(split.frame)}".encode()
    yield table.rows.numpy().tobytes()
    yield table.labels.numpy().tobytes()
    if table.dataset[int(table.rows[0])][table.image_column].get("bytes"):
        return
    for rows in table.rows.split(HASHED_AT_ONCE):  # image files: the fingerprint knows their names only
        for cell in table.dataset[rows.tolist()][table.image_column]:
            found = os.stat(cell["path"])
            yield f"{cell['path']} {found.st_size} {found.st_mtime_ns}".encode()
