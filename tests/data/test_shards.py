"""A split in parts: every process finds its slice of a batch in its own, and batches do not know how many there are."""

import pytest
import torch

from odevit.data import batches
from odevit.data.shards import Part, ShardedSplit
from odevit.data.splits import MemorySplit

SIZES = (10, 12, 9, 11)


def whole() -> MemorySplit:
    rows = torch.arange(sum(SIZES))
    return MemorySplit(rows.to(torch.uint8)[:, None, None, None], rows % 5, ["bad.png"])


def sharded(held: range = range(4), shared: bool = False) -> ShardedSplit:
    split, starts = whole(), [sum(SIZES[:part]) for part in range(5)]
    parts = [Part(split, starts[i], starts[i + 1]) if i in held else None for i in range(4)]
    return ShardedSplit(parts, SIZES, split if shared else None)


def epoch(split, **options):
    return list(batches(split, 8, seed=3, drop_last=True, **options))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_batches_are_the_same_for_any_number_of_processes(count, shared):
    one = epoch(sharded(), epoch=1)
    ranks = []
    for rank in range(count):
        held = range(4 * rank // count, 4 * (rank + 1) // count)
        ranks.append(epoch(sharded(held, shared), epoch=1, rank=rank, world_size=count))
    for step, expected in enumerate(one):
        found = [rank[step] for rank in ranks]
        assert torch.equal(torch.cat([b.indices for b in found]), expected.indices)
        for batch in found:
            assert torch.equal(batch.images.flatten().long(), batch.indices)
            assert torch.equal(batch.labels, batch.indices % 5)


def test_an_epoch_takes_as_many_rows_from_every_part_and_none_twice():
    split = sharded()
    assert len(split) == 36
    seen = torch.cat([batch.indices for batch in epoch(split)])
    assert len(seen) == len(set(seen.tolist())) == 32  # 4 steps of 2 rows from each part: the smallest has 9
    per_part = torch.bucketize(seen, torch.tensor(split.starts), right=True)
    assert torch.equal(per_part.bincount(minlength=5)[1:], torch.tensor([8, 8, 8, 8]))
    assert not torch.equal(seen, torch.cat([batch.indices for batch in epoch(split, epoch=1)]))
    plain = list(batches(split, 8, shuffle=False, drop_last=True))
    assert plain[0].indices.tolist() == [0, 1, 10, 11, 22, 23, 31, 32]


def test_rows_come_back_in_the_order_in_which_they_were_asked_for():
    rows = torch.tensor([41, 0, 22, 10, 9, 31, 30])
    images, labels = sharded().fetch(rows)
    assert torch.equal(images.flatten().long(), rows)
    assert torch.equal(labels, rows % 5)
    assert sharded().skipped == ["bad.png"]
    assert torch.equal(sharded(range(1, 2)).labels, whole().labels[10:22])


def test_a_batch_that_the_parts_cannot_share_is_refused():
    with pytest.raises(ValueError, match="6 must be a multiple of the 4 parts"):
        list(batches(sharded(), 6, drop_last=True))
