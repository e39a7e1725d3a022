"""Data: honest splits, batches that resume anywhere, settings that make no sense."""

import pytest
import torch

from odevit.data import DataConfig, batches, derive_seed, hold_out, load_data, num_batches, prepare
from odevit.data.augment import Augment, AugmentConfig


def load(name, **settings):
    return load_data(DataConfig(name=str(name), **settings))


def image_keys(split):
    images, _ = split.fetch(torch.arange(len(split)))
    return {bytes(image.numpy().tobytes()) for image in images}


# digits and splits


@pytest.mark.slow
def test_digits_are_split_by_class_without_overlap_and_by_seed():
    from sklearn.datasets import load_digits

    data = load("digits")
    assert len(data.train) + len(data.val) + len(data.test) == len(load_digits().target)
    assert data.train.images.shape[1:] == (1, 8, 8)
    assert data.train.images.max() == 255
    assert data.class_names == [str(digit) for digit in range(10)]
    assert data.channels == 1
    # digits hold no two equal images, so the splits may not share one
    assert not image_keys(data.train) & image_keys(data.val)
    assert not (image_keys(data.train) | image_keys(data.val)) & image_keys(data.test)
    for split, share in ((data.val, 0.1 * 0.8), (data.test, 0.2)):
        wanted = torch.from_numpy(load_digits().target).bincount() * share
        assert torch.all((split.labels.bincount(minlength=10) - wanted).abs() <= 1.5)
    assert torch.equal(load("digits").val.images, data.val.images)
    assert not torch.equal(load("digits", seed=1).val.images[:50], data.val.images[:50])


@pytest.mark.parametrize("counts", [(100, 50, 10), (3,) * 8, (1, 1, 20), (*[1] * 50, 20)])
def test_hold_out_takes_each_class_share_to_within_one_image(counts):
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    kept, held = hold_out(labels, 0.2, seed=0)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(len(labels)))
    assert torch.all((labels[held].bincount(minlength=len(counts)) - 0.2 * torch.tensor(counts)).abs() <= 1)
    assert torch.all(labels[kept].bincount() >= 1)
    if min(counts) > 1:  # classes of one image give none away
        assert abs(len(held) - 0.2 * len(labels)) <= 1


def test_mean_and_std_are_those_of_the_training_images():
    data = load("digits")
    reference = data.train.images.double() / 255
    assert data.mean == pytest.approx([reference.mean().item()])
    assert data.std == pytest.approx([reference.std(correction=0).item()])
    prepared = prepare(data.train.images, None, data.mean, data.std)
    assert prepared.mean().item() == pytest.approx(0, abs=1e-4)
    assert prepared.std().item() == pytest.approx(1, abs=1e-3)
    assert load("digits", mean=[0.5], std=[0.25]).mean == [0.5]


def test_limit_keeps_a_seeded_choice_of_each_split():
    data = load("digits", limit=20)
    assert [len(data.train), len(data.val), len(data.test)] == [20, 20, 20]
    assert image_keys(data.train) <= image_keys(load("digits").train)
    assert image_keys(data.train) == image_keys(load("digits", limit=20).train)


# batches


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_image_once_and_images_match_labels(shuffle):
    split = load("digits", limit=50).train
    found = list(batches(split, 8, seed=3, epoch=2, shuffle=shuffle))
    indices = torch.cat([batch.indices for batch in found])
    assert torch.equal(indices.sort().values, torch.arange(50))
    assert torch.equal(indices, torch.arange(50)) is not shuffle
    assert len(found) == num_batches(50, 8, drop_last=False) == 7
    assert len(list(batches(split, 8, drop_last=True))) == num_batches(50, 8, drop_last=True) == 6
    for batch in found:
        assert torch.equal(batch.images, split.images[batch.indices])
        assert torch.equal(batch.labels, split.labels[batch.indices])


def test_order_is_a_function_of_seed_and_epoch_alone():
    split = load("digits", limit=50).train

    def order(seed, epoch):
        return torch.cat([batch.indices for batch in batches(split, 8, seed=seed, epoch=epoch)]).tolist()

    before = torch.random.get_rng_state()
    first = order(0, 0)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(5)
    assert order(0, 0) == first
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert derive_seed(1, "order", 23) != derive_seed(12, "order", 3)


def test_a_resumed_epoch_continues_the_order():
    split = load("digits", limit=50).train
    whole = list(batches(split, 8, seed=1, epoch=4))
    rest = list(batches(split, 8, seed=1, epoch=4, start_step=3))
    assert [batch.indices.tolist() for batch in rest] == [batch.indices.tolist() for batch in whole[3:]]


@pytest.mark.parametrize("world_size", [2, 4])
def test_rank_slices_make_the_global_batch_also_after_augmentation(world_size):
    split = load("digits", limit=50).train
    config = AugmentConfig(crop=1, flip=True, geometry=0.2, color=0.2, erase=0.3, mixup=0.8, cutmix=1.0)
    augment = Augment(config, 10)

    def run(rank, size):
        for step, batch in enumerate(batches(split, 16, seed=2, drop_last=True, rank=rank, world_size=size)):
            yield augment(batch.images, batch.labels, seed=step, start=batch.start, total=batch.total)

    for alone, *slices in zip(run(0, 1), *(run(rank, world_size) for rank in range(world_size)), strict=True):
        assert torch.equal(alone[0], torch.cat([part[0] for part in slices]))
        assert torch.equal(alone[1], torch.cat([part[1] for part in slices]))


def test_an_incomplete_last_batch_is_shared_out_completely():
    split = load("digits", limit=18).train
    last = [list(batches(split, 8, rank=rank, world_size=4))[-1] for rank in range(4)]
    assert sorted(len(batch.indices) for batch in last) == [0, 0, 1, 1]
    assert torch.equal(torch.cat([b.indices for b in last]), list(batches(split, 8))[-1].indices)


def test_impossible_batches_are_refused_at_once():
    split = load("digits", limit=10).train
    with pytest.raises(ValueError, match="multiple of the 4 processes; got 6"):
        batches(split, 6, world_size=4)
    with pytest.raises(ValueError, match="no full batch of 16"):
        batches(split, 16, drop_last=True)


def test_prepare_resizes_and_normalises():
    images = torch.full((2, 3, 8, 8), 51, dtype=torch.uint8)
    out = prepare(images, 16, [0.1, 0.2, 0.3], [0.5, 0.5, 0.5])
    assert out.shape == (2, 3, 16, 16)
    assert torch.allclose(out[0, :, 5, 5], torch.tensor([0.2, 0.0, -0.2]), atol=1e-5)
    as_floats = prepare(images.float() / 255, 16, [0.1, 0.2, 0.3], [0.5, 0.5, 0.5])
    torch.testing.assert_close(as_floats, out, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"val_fraction": 0.0}, "between 0 and 1"),
        ({"limit": 0}, "at least 1 image"),
        ({"mean": [0.5]}, "mean and std go together"),
        ({"mean": [0.5, 0.5], "std": [0.5, 0.5]}, "1 channels; got 2 means"),
    ],
)
def test_wrong_settings_say_what_must_hold(settings, words):
    with pytest.raises(ValueError, match=words):
        load("digits", **settings)
