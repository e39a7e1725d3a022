"""The images of one split, in memory or decoded by workers as they are asked for."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from odevit.data.decode import CorruptImageError, Frame
from odevit.data.sources import GREY_MODES, Table

PROBED_IMAGES = 64  # looked at to learn the number of channels and the size
DECODE_CHUNK = 1024  # rows read at once while decoding into memory
DECODE_THREADS = 2  # more only wait for each other on small images


class Split(Protocol):
    """Images and labels of one split."""

    @property
    def skipped(self) -> list[str]:
        """Names of corrupt images met so far."""
        ...

    @property
    def labels(self) -> Tensor:
        """(n,) long, of all images."""
        ...

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 images (b, c, H, W) and labels (b,)."""
        ...

    def stream(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """`fetch` of one index tensor after the other."""
        ...


@dataclass
class MemorySplit:
    """All images decoded, uint8 (n, c, H, W)."""

    images: Tensor
    labels: Tensor
    skipped: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]

    def stream(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.fetch, batches)


@dataclass
class StreamedSplit:
    """Images decoded when asked for. The next readable image stands in for a corrupt one, which is named once."""

    table: Table
    channels: int
    frame: Frame
    workers: int
    strict: bool
    skipped: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def labels(self) -> Tensor:
        return self.table.labels

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._report(*self[indices])

    def stream(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        loader: DataLoader = DataLoader(
            self,  # type: ignore[arg-type]  # map-style: one "item" is one batch
            batch_size=None,
            sampler=batches,
            num_workers=self.workers,
            generator=torch.Generator(),  # its own: the global one must not move, or a resumed run would differ
        )
        for images, labels, corrupt in loader:
            yield self._report(images, labels, corrupt)

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor, list[str]]:
        pixels, used, corrupt = [], [], []
        for wanted in indices.tolist():
            for index in chain(range(wanted, len(self)), range(wanted)):
                try:
                    pixels.append(self.table.decode(index, self.channels, self.frame))
                    used.append(index)
                    break
                except CorruptImageError as error:
                    if self.strict:
                        raise
                    corrupt.append(str(error))
            else:
                raise ValueError(f"no image of the {self.table.split} split can be read; the last: {corrupt[-1]}")
        images = np.stack(pixels) if pixels else np.empty((0, self.channels, self.frame.cut, self.frame.cut), np.uint8)
        return torch.from_numpy(images), self.labels[used], corrupt

    def _report(self, images: Tensor, labels: Tensor, corrupt: list[str]) -> tuple[Tensor, Tensor]:
        new = [name for name in dict.fromkeys(corrupt) if name not in self.skipped]
        self.skipped.extend(new)
        if new:
            _warn_of_corrupt(new, self.table.split)
        return images, labels


def read_splits(
    tables: dict[str, Table], *, frame: Frame | None, strict: bool, memory_limit_mb: int, workers: int,
    side: int | None = None, channels: int | None = None,
) -> dict[str, Split]:  # fmt: skip
    """Decode into memory what fits there: images of one square size as they are, others brought into the frame.

    side: of the frame where the images need one and none is given. channels: 3 makes RGB of grey images.
    """
    found, native = _probe(tables["train"])
    channels = max(found, channels or 1)
    count = sum(len(table) for table in tables.values())
    limit = memory_limit_mb * 2**20

    def fits(size: int | None) -> bool:
        return size is not None and count * channels * size * size <= limit

    if fits(native) and (frame is None or frame.plain):
        try:
            return {name: _decode_all(table, channels, native, None, strict) for name, table in tables.items()}
        except _SizeError:
            native = None  # the probe met one size only, but there are more
    if native is None and frame is None:
        if side is None:
            raise ValueError(
                "the images have different sizes or are not square: say to which size they are brought, for example "
                "--set data.image_size=224"
            )
        frame = Frame.middle(side)
    if frame is not None and fits(frame.cut):
        return {name: _decode_all(table, channels, frame.cut, frame, strict) for name, table in tables.items()}
    if frame is None:
        assert native is not None
        frame = Frame.middle(native)
    return {name: StreamedSplit(table, channels, frame, workers, strict) for name, table in tables.items()}


class _SizeError(Exception):
    """An image has another size than the first ones."""


def _probe(table: Table) -> tuple[int, int | None]:
    """Channels (1 if all probed images are grey, else 3) and the side that all of them have, if they are square."""
    sizes, grey, failed = set(), True, ""
    for index in torch.linspace(0, len(table) - 1, min(PROBED_IMAGES, len(table))).long().tolist():
        try:
            image = table.open(index)
        except CorruptImageError as error:
            failed = str(error)
            continue
        sizes.add(image.size)
        grey = grey and image.mode in GREY_MODES
    if not sizes:
        raise ValueError(f"none of the images looked at can be read, for example {failed}")
    width, height = sizes.pop()
    return (1 if grey else 3), (width if width == height and not sizes else None)


def _decode_all(table: Table, channels: int, side: int | None, frame: Frame | None, strict: bool) -> MemorySplit:
    assert side is not None
    images = np.empty((len(table), channels, side, side), dtype=np.uint8)
    corrupt: dict[int, str] = {}

    def decode(index: int, cell: dict) -> None:
        try:
            pixels = table.decode_cell(index, cell, channels, frame)
        except CorruptImageError as error:
            corrupt[index] = str(error)
            return
        if pixels.shape[1:] != (side, side):
            raise _SizeError
        images[index] = pixels

    with ThreadPoolExecutor(DECODE_THREADS) as pool:
        for start in range(0, len(table), DECODE_CHUNK):
            rows = table.rows[start : start + DECODE_CHUNK].tolist()
            list(pool.map(decode, range(start, start + len(rows)), table.dataset[rows][table.image_column]))
    kept = torch.tensor([index for index in range(len(table)) if index not in corrupt], dtype=torch.long)
    names = [corrupt[index] for index in sorted(corrupt)]
    if strict and names:
        raise CorruptImageError(f"{len(names)} corrupt images in the {table.split} split: {_listed(names)}")
    if len(kept) == 0:
        raise ValueError(f"no image of the {table.split} split can be read: {_listed(names)}")
    if names:
        _warn_of_corrupt(names, table.split)
        return MemorySplit(torch.from_numpy(images)[kept], table.labels[kept], names)
    return MemorySplit(torch.from_numpy(images), table.labels, names)


def _warn_of_corrupt(names: list[str], split: str) -> None:
    warnings.warn(f"{len(names)} corrupt images of the {split} split skipped: {_listed(names)}", stacklevel=2)


def _listed(names: list[str]) -> str:
    return "; ".join(names[:5]) + (f"; and {len(names) - 5} more" if len(names) > 5 else "")
