"""A trajectory cache in parts: each process of torchrun builds and reads its own.

The number of parts S is the recipe's (`distill.cache_shards`), not the number of processes W: rank r has the parts
r·S/W … (r + 1)·S/W - 1, each a cache folder of its own. A batch takes as many rows from every part (`ShardedSplit`), so
that it is the same for any W that divides S: a run resumes on another number of devices without a row being built
again. Parts begin at multiples of CHUNK images, so that their rows are those of the cache in one piece. Every process
needs its own parts only: on a disk that all share, or on its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odevit.data import Data
from odevit.data.augment import AugmentConfig
from odevit.data.shards import Part, ShardedSplit
from odevit.data.splits import Split
from odevit.distill import cache as caching
from odevit.distill.cache import CachedTrace, TrajectoryCache, open_cache, open_part, tell
from odevit.distill.cache_key import Transform, describe
from odevit.distill.split_teacher import Lockstep
from odevit.distill.top import TopLogits
from odevit.training.precision import precision_of
from odevit.training.sharding import Processes, processes


def cache_of(recipe: Any, teacher: Any, train: Split, mean: tuple[float, ...], std: tuple[float, ...]) -> "Cache":
    """The cache that a recipe asks for, of this process. mean, std: in which the teacher sees its images."""
    config = recipe.distill
    transform = Transform(
        image_size=teacher.image_size,
        mean=mean,
        std=std,
        augment=recipe.augment,
        views=config.cache_views,
        seed=recipe.seed if config.cache_seed is None else config.cache_seed,
        precision=precision_of(recipe.loop),
    )
    options: dict[str, Any] = {"tokens": config.cache, "top": config.cache_top, "temperature": config.kl_temperature}
    if config.cache_shards == 1:
        return open_cache(config.cache_folder, teacher, train, transform, **options)
    options |= {"shards": config.cache_shards, "mine": processes()}
    return open_shards(config.cache_folder, teacher, train, transform, **options)


def evenly(rows: int, count: int) -> Tensor:
    """At most `count` of the numbers below `rows`, evenly."""
    return torch.linspace(0, rows - 1, min(count, rows)).round().long()


class ShardedCache:
    """The parts of this process. `split` and `trace` count the rows of all parts."""

    def __init__(self, parts: Sequence[TrajectoryCache | None], sizes: Sequence[int], train: Split | None = None):
        self.parts = parts
        own = [None if part is None else part.split for part in parts]
        stored = not isinstance(next(split for split in own if split is not None), Part)
        self.split = ShardedSplit(own, sizes, None if stored else train)

    @property
    def parts_and_sizes(self) -> list[tuple[TrajectoryCache | None, int]]:
        return list(zip(self.parts, self.split.sizes, strict=True))

    def sample(self, count: int) -> Tensor:
        """About `count` rows spread evenly over all parts; those in parts of this process, at least one of each."""
        share = -(-count // len(self.parts))
        held = [part for part, cache in enumerate(self.parts) if cache is not None]
        return torch.cat([self.split.starts[part] + evenly(self.split.sizes[part], share) for part in held])

    def trace(self, indices: Tensor) -> CachedTrace:
        """The teacher's trace of rows (b,), all of them in parts of this process."""
        found = []
        for part, where, rows in self.split.place(indices):
            cache = self.parts[part]
            assert cache is not None
            found.append((where, cache.trace(rows)))
        back = torch.cat([where for where, _ in found]).argsort()
        states = [torch.cat(column)[back] for column in zip(*(trace.states for _, trace in found), strict=True)]
        answers = [trace.logits for _, trace in found]
        if answers[0] is None:
            return CachedTrace(states, None)
        if isinstance(answers[0], TopLogits):
            columns = (torch.cat(column)[back] for column in zip(*answers, strict=True))  # type: ignore[arg-type]
            return CachedTrace(states, TopLogits(*columns))
        return CachedTrace(states, torch.cat(answers)[back])  # type: ignore[arg-type]


Cache = TrajectoryCache | ShardedCache


def views_of(cache: Cache, data: Data) -> Data:
    """The same data, but trained on the views of a cache, which are augmented already."""
    return dataclasses.replace(data, train=cache.split, augment=AugmentConfig())


def joined(*caches: Cache) -> ShardedCache:
    """Caches of several sets of images as one: a batch takes as many rows from each. All in as many parts."""
    columns = [[(c, len(c.split))] if isinstance(c, TrajectoryCache) else c.parts_and_sizes for c in caches]
    # part 0 of all, part 1 of all, …: what a process has of each stays together, as its slice of a batch must be
    parts, sizes = zip(*(pair for number in zip(*columns, strict=True) for pair in number), strict=True)
    return ShardedCache(parts, sizes)


def shard_bounds(count: int, shards: int) -> list[tuple[int, int]]:
    """First and last + 1 image of each part, at multiples of CHUNK where there are so many."""
    if count < shards:
        raise ValueError(f"distill.cache_shards={shards} is more than the {count} training images")
    unit = caching.CHUNK if count > shards * caching.CHUNK else 1
    pieces = -(-count // unit)
    edges = [min(count, pieces * part // shards * unit) for part in range(shards + 1)]
    return list(pairwise(edges))


def open_shards(
    parent: str | Path,
    teacher: Any,
    train: Split,
    transform: Transform,
    *,
    shards: int,
    mine: Processes,
    tokens: str = "cls",
    top: int = 0,
    temperature: float = 1.0,
    say: Callable[[str], None] = tell,
) -> ShardedCache:
    """The parts of this process, built where they are not complete."""
    if shards % mine.total:
        raise ValueError(
            f"distill.cache_shards must be a multiple of the processes, each of which builds and reads its own parts: "
            f"got {shards} parts and {mine.total} processes. Start with a number of processes that divides it (a "
            "run may change it between sittings), or set another cache_shards, which builds another cache"
        )
    content = describe(teacher, train, transform, tokens, top, temperature)
    bounds = shard_bounds(len(train), shards)
    first, last = (shards * rank // mine.total for rank in (mine.rank, mine.rank + 1))
    parts: list[TrajectoryCache | None] = [None] * shards
    asked = Lockstep(teacher)
    for number in range(first, last):
        start, end = bounds[number]
        name = {**content, "shard": [number, shards]}
        part = Part(train, start, end)
        parts[number] = open_part(parent, name, asked, part, transform, start=start, say=say)
    asked.finish()
    return ShardedCache(parts, [transform.views * (end - start) for start, end in bounds], train)
