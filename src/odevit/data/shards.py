"""A split in parts, of which a process may hold only its own: see `distill.cache_shards`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from odevit.data.splits import Split


@dataclass
class Part:
    """Rows first … last - 1 of another split."""

    whole: Split
    first: int
    last: int

    @property
    def skipped(self) -> list[str]:
        return self.whole.skipped

    @property
    def labels(self) -> Tensor:
        return self.whole.labels[self.first : self.last]

    def __len__(self) -> int:
        return self.last - self.first

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.whole.fetch(indices + self.first)

    def stream(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return self.whole.stream([indices + self.first for indices in batches])


@dataclass
class ShardedSplit:
    """Parts one after another; None: a part that another process holds.

    A global batch takes as many rows from every part, so that each process finds its slice of it in its own parts, and
    a batch is the same for any number of processes. An epoch ends with the smallest part: `len` counts what it uses.
    whole: a split with the rows of all parts, which every process can read; it streams with its own workers.
    """

    parts: Sequence[Split | None]
    sizes: Sequence[int]
    whole: Split | None = None

    def __len__(self) -> int:
        return len(self.sizes) * min(self.sizes)

    @property
    def starts(self) -> list[int]:
        """The row with which each part begins."""
        return [sum(self.sizes[:part]) for part in range(len(self.sizes))]

    @property
    def skipped(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.parts if part is not None for name in part.skipped))

    @property
    def labels(self) -> Tensor:
        """Of the parts that are here."""
        return torch.cat([part.labels for part in self.parts if part is not None])

    def order(self, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """The rows of all parts, batch after batch; shuffled within each part."""
        if batch_size % len(self.sizes):
            raise ValueError(
                f"optim.batch_size {batch_size} must be a multiple of the {len(self.sizes)} parts of the cache "
                "(distill.cache_shards): a batch takes as many rows from each"
            )
        share, used = batch_size // len(self.sizes), min(self.sizes)
        rows = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            own = torch.arange(size) if generator is None else torch.randperm(size, generator=generator)
            rows.append(own[: used // share * share].view(-1, share) + start)  # (steps, share)
        return torch.cat(rows, dim=1).flatten()

    def place(self, indices: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """(part, where in `indices`, which rows of the part) of every part that is asked for."""
        found = []
        for part, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            where = ((indices >= start) & (indices < start + size)).nonzero().flatten()
            if len(where):
                assert self.parts[part] is not None, f"part {part} lies with another process"
                found.append((part, where, indices[where] - start))
        return found

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self.whole is not None:
            return self.whole.fetch(indices)
        pieces = []
        for part, where, rows in self.place(indices):
            split = self.parts[part]
            assert split is not None
            pieces.append((where, *split.fetch(rows)))
        order, images, labels = (torch.cat(column) for column in zip(*pieces, strict=True))
        back = order.argsort()
        return images[back], labels[back]

    def stream(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.fetch, batches) if self.whole is None else self.whole.stream(batches)
