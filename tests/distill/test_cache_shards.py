"""A cache in parts: its rows are those of the cache in one piece, whoever built them."""

import pytest
import torch

from odevit.data.augment import AugmentConfig
from odevit.data.splits import MemorySplit
from odevit.distill import cache as caching
from odevit.distill.cache import Builder, open_cache
from odevit.distill.cache_key import Transform
from odevit.distill.cache_shards import joined, open_shards, shard_bounds
from odevit.distill.objective import DistillConfig
from odevit.distill.top import TopLogits
from odevit.teachers.teacher import tiny_teacher
from odevit.training.sharding import Processes

IMAGES, CHUNK = 60, 8


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    return tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1)


@pytest.fixture(scope="module")
def train():
    pixels = torch.randint(0, 256, (IMAGES, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return MemorySplit(pixels, torch.arange(IMAGES) % 10)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(caching, "CHUNK", CHUNK)


def transform(**changes):
    values = {"image_size": 8, "mean": (0.4,), "std": (0.3,), "augment": AugmentConfig(crop=1)}
    return Transform(**(values | changes))


def parts_of(folder, teacher, train, change=None, **options):
    """The cache in four parts as each of two processes sees it."""
    made = change or transform(views=2)
    return [
        open_shards(folder, teacher, train, made, shards=4, mine=Processes(rank, 2), say=lambda text: None, **options)
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tokens": "all"}, {"tokens": "logits"}, {"tokens": "cls", "top": 3}])
def test_rows_are_those_of_one_piece(options, teacher, train, tmp_path):
    whole = open_cache(tmp_path, teacher, train, transform(views=2), say=lambda text: None, **options)
    bounds = shard_bounds(IMAGES, 4)
    assert [(a % CHUNK, b - a) for a, b in bounds] == [(0, 16), (0, 16), (0, 16), (0, 12)]
    first, second = parts_of(tmp_path, teacher, train, **options)
    assert [part is None for part in first.parts] == [False, False, True, True]
    assert [part is None for part in second.parts] == [True, True, False, False]
    # row 32 + 16 + 5: part 1, second view, sixth image. In one piece: second view of image 16 + 5
    mine, theirs = torch.tensor([53, 1]), torch.tensor([60 + 21, 1])
    assert torch.equal(first.split.fetch(mine)[0], whole.split.fetch(theirs)[0])
    ours, one = first.trace(mine), whole.trace(theirs)
    for a, b in zip(ours.states, one.states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)  # half precision, other batches
    if isinstance(one.logits, TopLogits):
        assert torch.equal(ours.logits.classes, one.logits.classes)
    else:
        torch.testing.assert_close(ours.logits, one.logits, rtol=1e-4, atol=1e-5)


def test_another_number_of_processes_builds_nothing_again(teacher, train, tmp_path, monkeypatch):
    two = parts_of(tmp_path, teacher, train)
    monkeypatch.setattr(Builder, "build", lambda *_: pytest.fail("built again"))
    one = open_shards(tmp_path, teacher, train, transform(views=2), shards=4, mine=Processes())
    rows = torch.arange(0, 2 * IMAGES, 7)
    assert torch.equal(one.split.fetch(rows)[0][:5], two[0].split.fetch(rows[:5])[0])
    spread = [cache.sample(8) for cache in two]
    assert torch.equal(torch.cat(spread), one.sample(8))
    with pytest.raises(ValueError, match=r"4 parts and 3 processes.*divides it"):
        open_shards(tmp_path, teacher, train, transform(views=2), shards=4, mine=Processes(0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("crop", [1, 0])
def test_two_sets_of_images_join_so_that_every_process_has_its_slice_of_a_batch(crop, teacher, train, tmp_path):
    """A batch of 16 takes two rows of each of the 2 x 4 parts; a process reads its half with its answers."""
    other = MemorySplit(255 - train.images[:40], torch.zeros(40, dtype=torch.long))
    made = transform(augment=AugmentConfig(crop=crop))
    both = zip(*(parts_of(tmp_path, teacher, split, made, tokens="logits") for split in (train, other)), strict=True)
    for rank, caches in enumerate(both):
        cache = joined(*caches)
        rows = cache.split.order(16, torch.Generator().manual_seed(0))[:16].chunk(2)[rank]
        images, _ = cache.split.fetch(rows)
        whole = torch.cat([train.images, other.images])
        asked = teacher.answer((images / 255 - 0.4) / 0.3)
        torch.testing.assert_close(cache.trace(rows).logits, asked, rtol=1e-4, atol=1e-5)
        if not crop:
            known = [int((image == whole).flatten(1).all(1).nonzero()) >= IMAGES for image in images]
            assert known == [False, False, True, True] * 2


def test_without_augmentation_the_images_are_the_datas_own(teacher, train, tmp_path):
    first, _ = parts_of(tmp_path, teacher, train, transform(augment=AugmentConfig()))
    assert first.split.whole is train
    rows = torch.tensor([17, 3])
    assert torch.equal(first.split.fetch(rows)[0], train.images[rows])
    assert first.trace(rows).states[0].shape == (2, 1, 32)


def test_few_images_make_small_parts(train):
    assert shard_bounds(9, 4) == [(0, 2), (2, 4), (4, 6), (6, 9)]
    with pytest.raises(ValueError, match="more than the 3 training images"):
        shard_bounds(3, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_top": 5}, "are for a cache"),
        ({"cache_shards": 2}, "are for a cache"),
        ({"cache": "cls", "cache_top": -1}, "must be 0"),
        ({"cache": "cls", "cache_shards": 0}, "must be positive"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**fields)
